"""Run by test_rules_memory.py in a child process: candidates of each rule where a stray access cannot go unnoticed.

`asan FOLDER`: C kernels under AddressSanitizer, every buffer an exact block of the sanitizer's heap.
`oclgrind`: OpenCL kernels under the simulator, whose log the parent reads.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.ir.codegen_runner import Compiled, kernels_of, number
from tests.schedules.candidates import CASES, Dims, arguments, problems, sampled

from relax_tune.ir.buffer import Buffer
from relax_tune.ir.interp import bind_symbols
from relax_tune.runtime.device.registry import open_device

# One function of each kind, at shapes whose product the simulator can bear; (name, shapes, candidates).
CHOSEN: dict[str, list[tuple[str, tuple[Dims, ...], int]]] = {
    "c": [
        ("matmul symbolic", ({"m": 13, "n": 37, "k": 5}, {"m": 1, "n": 1, "k": 1}), 3),
        ("matmul 96", ({"m": 5}, {"m": 17}), 3),
        ("matmul 7", ({"m": 5},), 3),
        ("batched NT", ({"b": 2, "n": 19}, {"b": 1, "n": 1}), 3),
        ("batched NN", ({"b": 2, "n": 13},), 3),
        ("mean pool", ({"b": 3, "n": 9},), 1),
        ("layer norm", ({"n": 5, "m": 37}, {"n": 1, "m": 2}), 2),
        ("softmax", ({"n": 7, "m": 41}, {"n": 1, "m": 1}), 3),
        ("softmax with mask", ({"b": 2, "n": 11},), 3),
        ("gather, add, norm", ({"b": 3, "n": 7},), 2),
        ("row sum", ({"n": 5, "m": 70}, {"n": 9, "m": 1}), 2),
        ("transpose", ({"b": 3, "n": 7},), 2),
        ("gather", ({"s": 13},), 2),
        ("pointwise 1", ({"n": 71}, {"n": 1}), 3),
        ("pointwise 2", ({"n": 5, "m": 33},), 3),
        ("stencil", ({"n": 37},), 2),
        ("two outputs", ({"n": 5, "m": 9},), 1),
    ],
    "opencl": [
        ("matmul symbolic", ({"m": 5, "n": 11, "k": 3},), 3),
        ("matmul 7", ({"m": 5},), 2),
        ("batched NT", ({"b": 2, "n": 5},), 2),
        ("batched NN", ({"b": 1, "n": 5},), 2),
        ("mean pool", ({"b": 2, "n": 5},), 1),
        ("layer norm", ({"n": 3, "m": 19},), 2),
        ("softmax", ({"n": 5, "m": 11},), 2),
        ("gather, add, norm", ({"b": 1, "n": 3},), 2),
        ("transpose", ({"b": 2, "n": 3},), 2),
        ("pointwise 1", ({"n": 19},), 2),
        ("stencil", ({"n": 11},), 2),
        ("two outputs", ({"n": 3, "m": 5},), 1),
    ],
}


class Heap:
    """Blocks of exactly as many bytes as an array has, from the allocator the sanitizer watches."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL(None)
        self.c.malloc.restype = ctypes.c_void_p
        self.c.malloc.argtypes = [ctypes.c_size_t]
        self.c.free.argtypes = [ctypes.c_void_p]

    def block(self, array: np.ndarray) -> int:
        address = self.c.malloc(array.nbytes)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        return int(address)

    def take(self, address: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        ctypes.memmove(out.ctypes.data, address, like.nbytes)
        self.c.free(address)
        return out


def asan(folder: str) -> None:
    heap = Heap()
    wanted = [
        (name, shapes, CASES[name][0](), made)
        for name, shapes, count in CHOSEN["c"]
        for _, _, made in sampled(CASES[name][0](), "c", count, name)
    ]
    kernels = [kernels_of(replace(made, name=f"k{at}"), "c") for at, (*_, made) in enumerate(wanted)]
    units = [Path(folder) / f"unit{a}.c" for a in range(4)]
    for a, unit in enumerate(units):
        # every kernel's text carries the same guarded prelude
        unit.write_text("\n".join(k.source for some in kernels[a::4] for k in some))
    flags = [
        "-O1",
        "-g",
        "-march=native",
        "-fopenmp",
        "-shared",
        "-fPIC",
        "-fsanitize=address",
        "-fno-omit-frame-pointer",
    ]
    running = [subprocess.Popen(["gcc", *flags, str(u), "-o", str(u.with_suffix(".so")), "-lm"]) for u in units]
    assert all(p.wait() == 0 for p in running)
    libraries = [ctypes.CDLL(str(u.with_suffix(".so"))) for u in units]
    for at, (name, shapes, _, made) in enumerate(wanted):
        # the instance comes from a function of its own, so its symbols are that one's
        for seed, dims in enumerate(shapes):
            arrays, scalars = arguments(made, dims, seed)
            env = bind_symbols(made, arrays, scalars)
            held: dict[Buffer, np.ndarray] = dict(zip(made.buffers, arrays, strict=True))
            for b in (b for k in kernels[at] for b in k.buffers):
                held.setdefault(b, np.full(tuple(number(d, env) for d in b.shape), np.nan, b.dtype.numpy))
            blocks = {b: heap.block(np.ascontiguousarray(array)) for b, array in held.items()}
            for k in kernels[at]:
                values = [ctypes.c_int64(number(e, env)) for e in k.scalars]
                print(f"{name} {dict(dims)} {k.name}", flush=True)
                getattr(libraries[at % 4], k.name)(*(ctypes.c_void_p(blocks[b]) for b in k.buffers), *values)
            after = {b: heap.take(blocks[b], array) for b, array in held.items()}
            check(name, arrays, [after[b] for b in made.output_buffers], dims)
    print("asan done")


def oclgrind() -> None:
    device = open_device("opencl:oclgrind")
    for name, shapes, count in CHOSEN["opencl"]:
        candidates = sampled(CASES[name][0](), "opencl", count, name)
        for sketch, values, made in candidates:
            (run,) = Compiled.together(device, "opencl", [made])
            run.guard = 0
            for seed, dims in enumerate(shapes):
                print(f"{name} {dict(dims)} {sketch.name} {values}", flush=True)
                arrays, scalars = arguments(made, dims, seed)
                check(name, arrays, run(arrays, scalars), dims)
    device.close()
    print("oclgrind done")


def check(name: str, arrays: list[np.ndarray], found: list[np.ndarray], dims: Dims) -> None:
    wrong = problems(CASES[name][0](), arrays, found, dims)
    assert not wrong, (name, wrong)


if __name__ == "__main__":
    if sys.argv[1] == "asan":
        asan(sys.argv[2])
    else:
        oclgrind()
