"""Exports of what C cannot express, weights that do not fit, and calls that are wrong: one sentence each, nothing lost."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import C_KERNELS
from tests.support.programs import read
from tests.support.tuner_models import PAPER_DEVICE, QUICK, feed_forward, row_scale
from tests.tuner.export.c_exports import ExportedModel, Options, compiled
from tests.tuner.export.test_c_export import looked_up
from typer.testing import CliRunner

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.export.c_export import export_c
from relax_tune.tuner.job.device_job import device_job

BRANCHES = """
    @function
    def main(c: Tensor((), bool), x: Tensor((n, 3), f32)) -> Tensor((n, 3), f32):
        y: Tensor((n, 3), f32)
        if c:
            with dataflow():
                b: Tensor((n, 3), f32) = op.relu(x)
            y = b
        else:
            with dataflow():
                e: Tensor((n, 3), f32) = op.tanh(x)
            y = e
        return y
"""


def built(module: Any, folder: Path, device: Any = PAPER_DEVICE) -> Artifact:
    job = device_job(module, device, MemoryStore(), QUICK)
    return load_artifact(job.artifact(job.build("generic")).save(folder / "model.rta"))


def with_steps(artifact: Artifact, **changes: Any) -> Artifact:
    """The artifact with another first step."""
    program = artifact.program
    call = program.calls[0]
    step = replace(call.variants[0].steps[0], **changes)
    variant = replace(call.variants[0], steps=(step, *call.variants[0].steps[1:]))
    changed = replace(program, calls=(replace(call, variants=(variant,)), *program.calls[1:]))
    return replace(artifact, programs=(changed,))


def test_artifact_of_another_target_is_refused(tmp_path: Path) -> None:
    artifact = built(row_scale(), tmp_path, replace(PAPER_DEVICE, kind="opencl", libraries=()))
    with pytest.raises(UserError, match=r"model\.rta.*opencl.*--target c"):
        export_c(artifact, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_artifact_with_library_calls_names_the_way_around(tmp_path: Path) -> None:
    artifact = with_steps(built(row_scale(), tmp_path), kind="library", target="openblas.sgemm")
    with pytest.raises(UserError, match=r"main.*openblas\.sgemm.*--no-libraries"):
        export_c(artifact, tmp_path / "c")


def test_unknown_function_and_name_are_refused(tmp_path: Path) -> None:
    artifact = built(row_scale(), tmp_path)
    with pytest.raises(UserError, match=r"--function 'encode': .*main, .*model.rta"):
        export_c(artifact, tmp_path / "c", functions=["encode"])
    with pytest.raises(UserError, match=r"--name 'my model': .*a letter first"):
        export_c(artifact, tmp_path / "c", "my model")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        export_c(artifact, tmp_path / "file")


def test_export_command_names_functions_or_reason(tmp_path: Path) -> None:
    built(row_scale(), tmp_path)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "model.rta"), "--c", str(tmp_path / "c"), "--name", "net"])
    assert done.exit_code == 0 and "wrote main to" in done.output, done.output
    assert {"net.h", "net.c", "net.weights", "CMakeLists.txt", "net.pc.in"} <= {
        p.name for p in (tmp_path / "c").iterdir()
    }
    (tmp_path / "model.rta").write_bytes((tmp_path / "model.rta").read_bytes()[:-500])
    done = CliRunner().invoke(app, ["export", str(tmp_path / "model.rta"), "--c", str(tmp_path / "c")])
    assert done.exit_code == 2 and "got none: truncated" in done.output


def test_build_without_libraries_is_exported(tmp_path: Path) -> None:
    targets = {}
    for libraries in (True, False):
        job = device_job(feed_forward(), PAPER_DEVICE, MemoryStore(), replace(QUICK, libraries=libraries))
        program = job.build("library").program
        targets[libraries] = {s.kind for c in program.calls for v in c.variants for s in v.steps}
    assert targets == {True: {"kernel", "library"}, False: {"kernel"}}


def test_flags_of_artifact_come_from_the_table(tmp_path: Path) -> None:
    artifact = built(row_scale(), tmp_path, replace(PAPER_DEVICE, fingerprint=(("cpu", "any"), ("flags", '") evil("'))))
    export_c(artifact, tmp_path / "c", "net")
    text = (tmp_path / "c" / "CMakeLists.txt").read_text()
    assert 'set(net_MACHINE "-march=native"' in text and "evil" not in text


@pytest.mark.ccompiler
@pytest.mark.process
def test_wrong_weights_are_refused_in_c(tmp_path: Path) -> None:
    export_c(built(looked_up(), tmp_path), tmp_path / "c", "net")
    library = compiled(tmp_path / "c")
    data = (tmp_path / "c" / "net.weights").read_bytes()

    def refusal(content: bytes) -> str:
        (tmp_path / "w").write_bytes(content)
        with pytest.raises(ValueError) as found:
            ExportedModel(tmp_path / "c", library, Options(str(tmp_path / "w").encode()))
        return str(found.value)

    assert (
        refusal(data[:-1])
        == f"{tmp_path}/w: expected {len(data)} bytes of weights, got {len(data) - 1}; copy the file again"
    )
    assert "got 0; copy" in refusal(b"") and "got none that can be read" not in refusal(b"x")
    assert "got those of another model" in refusal(data[:16] + bytes([data[16] ^ 1]) + data[17:])
    assert "got another kind of file" in refusal(b"\0" * len(data))
    with pytest.raises(ValueError, match=r"nowhere.*weights"):
        ExportedModel(tmp_path / "c", library, Options(b"/nowhere"))
    memory = np.zeros(len(data) + 128, np.uint8)
    for shift in (0, 8):
        start = -memory.ctypes.data % 64 + shift
        memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
        given = Options(None, memory.ctypes.data + start, len(data))
        if shift == 0:
            ExportedModel(tmp_path / "c", library, given).close()
        else:
            with pytest.raises(ValueError, match=r"options.weights: expected weights aligned to 64 bytes"):
                ExportedModel(tmp_path / "c", library, given)


@pytest.mark.ccompiler
@pytest.mark.process
def test_wrong_arrays_are_refused_in_c(tmp_path: Path) -> None:
    artifact = built(row_scale(), tmp_path)
    export_c(artifact, tmp_path / "c", "net")
    model = ExportedModel(tmp_path / "c", compiled(tmp_path / "c"))
    x = np.ones((4, 16), np.float32)
    symbols = (ctypes.c_int64 * 1)(4)

    def refusal(given: int | None, place: int | None) -> str:
        failed = model.library.net_run(
            model.model, 0, symbols, (ctypes.c_void_p * 1)(given), (ctypes.c_void_p * 1)(place)
        )
        assert failed == 1
        return str(model.library.net_error(model.model).decode())

    at = x.ctypes.data
    assert refusal(None, at) == "main: parameter x: expected an array, got NULL"
    assert ": expected memory for it, got NULL" in refusal(at, None)
    assert ": expected separate memory, but parameter x lies in it" in refusal(at, at + 64)
    assert model.run(0, artifact.program, [4], [x])[0].shape == (4, 16)
    model.close()


def test_kernel_of_another_form_is_refused(tmp_path: Path) -> None:
    artifact = built(row_scale(), tmp_path)
    program = artifact.program
    kernel = replace(program.kernels[0], source=C_KERNELS["sums"])
    wrong = replace(artifact, programs=(replace(program, kernels=(kernel, *program.kernels[1:])),))
    with pytest.raises(Exception, match=f"kernel {kernel.name}.*build it again"):
        export_c(wrong, tmp_path / "c")


def test_branching_function_is_refused_by_name(tmp_path: Path) -> None:
    artifact = built(read(BRANCHES), tmp_path)
    with pytest.raises(UserError, match=r"function main.*it branches"):
        export_c(artifact, tmp_path / "c")
