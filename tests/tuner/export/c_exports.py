"""Exports as C, compiled and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.device.c_compiler import KERNEL_FLAGS
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.export.c_export import export_c

Array = np.ndarray[Any, Any]
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
TEAM = ("-Dnet_TEAM", "-pthread")
"""Flags of an export whose loops run on several threads."""
GCC = ("gcc", "-march=native", *TEAM)


class Options(ctypes.Structure):
    _fields_ = (
        ("weights_file", ctypes.c_char_p),
        ("weights", ctypes.c_void_p),
        ("weights_bytes", ctypes.c_size_t),
        ("workspace_bytes", ctypes.c_size_t),
        ("threads", ctypes.c_int),
    )


def sources(folder: Path) -> list[str]:
    """The C files of a library without linked weights."""
    return [str(folder / "net.c"), str(folder / "net_team.c"), *map(str, sorted(folder.glob("net_kernels*.c")))]


def compiled(folder: Path, *command: str) -> Path:
    """The shared library of an export."""
    path = folder / "libnet.so"
    build(folder, path, *(command or GCC), "-shared", "-fPIC")
    return path


def build(folder: Path, target: Path, *command: str, main: bool = False) -> None:
    """Compile an export, without the optimisations that take long."""
    more = [str(folder / "net_main.c")] if main else []
    flags = (*STRICT, *KERNEL_FLAGS, "-O1")
    subprocess.run([*command, *flags, *sources(folder), *more, "-o", str(target), "-lm"], check=True, timeout=300)


def called(
    program: Program, command: Sequence[str], folder: Path, symbols: Mapping[str, int], inputs: Sequence[Array]
) -> list[Array]:
    """Results of the program `net_main` of an export. Raises ValueError with what it says when it fails."""
    arguments = [f"{name}={value}" for name, value in symbols.items()]
    for index, array in zip(program.inputs, inputs, strict=True):
        path = folder / f"{program.buffers[index].name}.in"
        np.ascontiguousarray(array).tofile(path)
        arguments.append(f"{program.buffers[index].name}={path}")
    places = [folder / f"{number}.out" for number in range(len(program.outputs))]
    arguments += [f"{program.buffers[i].name}={path}" for i, path in zip(program.outputs, places)]
    weights = ("--weights", str(folder / "net.weights"))
    done = subprocess.run(
        [*command, *weights, program.name, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return [np.fromfile(p, program.buffers[i].dtype) for i, p in zip(program.outputs, places)]


class ExportedModel:
    """An export of name `net`, opened. Raises ValueError with the sentence of a failure."""

    def __init__(self, folder: Path, library: Path, options: Options | None = None) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.net_error.restype = ctypes.c_char_p
        self.model = ctypes.c_void_p()
        given = options or Options(str(folder / "net.weights").encode())
        self._check(self.library.net_create(ctypes.byref(self.model), ctypes.byref(given)))

    def _check(self, failed: int) -> None:
        if failed:
            raise ValueError(self.library.net_error(self.model).decode())

    def reserve(self, function: int, symbols: Sequence[int]) -> None:
        self._check(self.library.net_reserve(self.model, function, (ctypes.c_int64 * 16)(*symbols)))

    def run(self, number: int, program: Program, symbols: Sequence[int], inputs: Sequence[Array]) -> list[Array]:
        """Call a function; arrays have the model's dims."""
        given = (ctypes.c_int64 * 16)(*symbols)
        specs = [program.buffers[i] for i in program.inputs]
        held = [np.ascontiguousarray(np.moveaxis(x, s.outer, 0) if s.outer else x) for x, s in zip(inputs, specs)]
        results, shapes = [], []
        for number_of, index in enumerate(program.outputs):
            spec, dims, size = program.buffers[index], (ctypes.c_int64 * 32)(), ctypes.c_size_t()
            self._check(self.library.net_output_dims(self.model, number, given, number_of, dims))
            self._check(self.library.net_output_bytes(self.model, number, given, number_of, ctypes.byref(size)))
            array = np.full(size.value + 64, 77, np.uint8)
            results.append(array)
            shapes.append(tuple(dims[: len(spec.shape)]))
        pointers = (ctypes.c_void_p * (len(held) + 1))(*(x.ctypes.data for x in held))
        places = (ctypes.c_void_p * (len(results) + 1))(*(x.ctypes.data for x in results))
        self._check(self.library.net_run(self.model, number, given, pointers, places))
        found = []
        for index, shape, array in zip(program.outputs, shapes, results):
            spec = program.buffers[index]
            assert (array[-64:] == 77).all(), "nothing is written behind a result"
            stored = array[:-64].view(np.dtype(spec.dtype)).reshape(shape)
            found.append(np.moveaxis(stored, 0, spec.outer) if spec.outer else stored)
        return found

    def close(self) -> None:
        self.library.net_destroy(self.model)


def exported(artifact: Artifact, folder: Path, *command: str) -> ExportedModel:
    """Export, compile and open an artifact."""
    export_c(artifact, folder, "net")
    return ExportedModel(folder, compiled(folder, *command))


def symbols_of(model: Model, program: Program, inputs: Sequence[Array]) -> list[int]:
    """The values of a program's symbols for arguments."""
    executor = model.executors[program.name]
    found = [0] * len(program.symbols)
    for index, (position, dim) in executor.binders.items():
        found[index] = inputs[position].shape[dim]
    return found


def same_bits(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    assert len(found) == len(wanted)
    for f, w in zip(found, wanted):
        assert f.shape == w.shape and f.dtype == w.dtype
        assert np.ascontiguousarray(f).tobytes() == np.ascontiguousarray(w).tobytes()


def agree(
    artifact: Artifact, model: Model, made: ExportedModel, function: str, *calls: Sequence[Array]
) -> list[list[Array]]:
    """Results of calls, which are the artifact's to the bit."""
    number = artifact.functions.index(function)
    program = next(p for p in artifact.programs if p.name == function)
    results = []
    for inputs in calls:
        symbols = symbols_of(model, program, inputs)
        made.reserve(number, symbols)
        results.append(model.run(list(inputs), function))
        same_bits(made.run(number, program, symbols, inputs), results[-1])
    return results
