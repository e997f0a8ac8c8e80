"""The suite for machines with a GPU, on the emulated one at tiny sizes: that all of its parts run, and how it
handles parts that fail, hang or were interrupted before."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from experiments.gpu import context as gpu_context
from experiments.gpu import models as gpu_models
from experiments.gpu import parts as gpu_parts
from experiments.gpu import suite as gpu_suite
from experiments.gpu import tuning, warpgroups
from tests.cuda_emulation.cublas import NAMES, StandIn, library_folder
from tests.cuda_emulation.driver import EmulatedCompiler, EmulatedDriver
from tests.support.tuner_models import PAPER_DEVICE, RecordedRunner

from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.library.cublas import CuBlas

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_suite(folder: Path, only: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.gpu.suite", "--tiny", "--work", str(folder), "--results", str(folder)]
    command += ["--only", only]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | environment, cwd=ROOT)


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("pycuda") is not None, reason="pycuda is installed")
def test_gpu_suite_without_gpu_fails_with_reason(tmp_path: Path) -> None:
    done = run_suite(tmp_path, "gemm")
    assert done.returncode == 3 and "expected a GPU at 'cuda'" in done.stderr and "the package pycuda" in done.stderr
    assert not (tmp_path / "gpu_suite.md").exists(), "no figures without a GPU"


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.heavy
def test_gpu_suite_on_emulated_gpu_writes_results(tmp_path: Path) -> None:
    """Models are tuned in a child process, built in three ways and timed, and the results are written."""
    path = os.pathsep.join([str(HERE / "packages"), str(ROOT), *sys.path])
    libraries = str(library_folder(tmp_path))
    done = run_suite(tmp_path, "gemm", PYTHONPATH=path, RELAX_TUNE_CACHE=str(tmp_path), LD_LIBRARY_PATH=libraries)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert results["card"]["device"] == "emulated" and results["card"]["cublas"] == "13.1.2"
    assert [row["key"] for row in results["gemm"]["rows"]] == ["f16 32 x 48, M = 1", "f16 32 x 48, M = 5"]
    for row in results["gemm"]["rows"]:
        assert row["cuBLAS runs"] in ("cublas.gemm_f16", "cublaslt.matmul_f16") and row["ours, us"] > 0
        assert "candidates, 0 failed" in row["tuned"]
    assert "| f16 32 x 48, M = 5 |" in (tmp_path / "gpu_suite.md").read_text()


Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The rows of a part, run in this process."""
    driver = EmulatedDriver()
    library = StandIn(library_folder(tmp_path) / NAMES[0], driver)

    def opened(target: str) -> CUDADevice:
        return CUDADevice(0, driver, lambda architecture: EmulatedCompiler(tmp_path), lambda: driver)

    def untuned(context: Any, modules: Any, *_: Any, **__: Any) -> Iterator[tuple[str, str]]:
        return gpu_parts.untuned(context, opened("cuda"), {name: make() for name, make in modules.items()})

    monkeypatch.setattr(gpu_parts, "open_device", opened)
    monkeypatch.setattr(gpu_parts, "CuBlas", lambda: CuBlas(library.dll))
    monkeypatch.setattr(gpu_parts, "tuned", untuned)
    context = gpu_parts.Context(tmp_path, "cuda", sys.executable, True, time.monotonic() + 100, frozenset())
    return lambda part: list(gpu_parts.PARTS[part](context))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("card", ["card"]),
        (
            "ceilings",
            ["copy", "launch, queued", "launch, recorded", *(f"product {k} 16" for k in ("f32", "f16", "bf16"))],
        ),
        ("memory", ["add f32"]),
        pytest.param(
            "decoder", [f"tiny {f} {n}" for f in ("prefill", "decode") for n in (3, 5)], marks=pytest.mark.heavy
        ),
    ],
)
def test_parts(rows: Rows, part: str, keys: list[str]) -> None:
    results = rows(part)
    assert [row["key"] for row in results] == keys and not any("absent" in row for row in results)


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.heavy
def test_products_of_four_warps_are_verified(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warpgroups, "opened", gpu_parts.open_device)
    monkeypatch.setattr(warpgroups, "CuBlas", gpu_parts.CuBlas)
    (other,) = rows("warpgroups")
    assert "compute capability 9.0" in other["absent"]
    monkeypatch.setattr(warpgroups, "HOPPER", 8)
    verified, timed = rows("warpgroups")
    assert verified["result"] == "verified"
    assert timed["result"] == "as mma.data_parallel" and timed["us"] > 0 and timed["cuBLAS, us"] > 0
    one = np.ones((5, 32), np.float16)
    func = warpgroups.product_of("f16", 64, 32, True)
    assert [warpgroups.difference(func, 5, one, x * one)[:5] for x in (1, 2)] == ["", "wrong"]


@pytest.mark.process
@pytest.mark.ccompiler
def test_sampled_candidates_run(rows: Rows) -> None:
    assert rows("candidates")


def test_gpu_suite_tuning_out_of_time_builds_best_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RecordedRunner(lambda program, symbols: 1.0, info=PAPER_DEVICE)
    monkeypatch.setattr(runner, "close", lambda: None, raising=False)
    monkeypatch.setattr(tuning, "open_runner", lambda settings: runner)
    context = gpu_context.Context(tmp_path, "c", sys.executable, True, time.monotonic() + 100, frozenset())
    modules = {"one": lambda: gpu_models.memory_bound("f32", 8, 40)["add"]}
    ((name, summary),) = tuning.tuned(context, modules, 200.0, 50, ["measured", "kernels"])
    assert name == "one" and summary.endswith("candidates, 0 failed; cut short")
    assert len(runner.batches) == 1 and {p.name for p in tmp_path.glob("*.rta")} == {
        "one-measured.rta",
        "one-kernels.rta",
    }


@pytest.mark.process
@pytest.mark.parametrize("part", ["gemm_torch", "decoder_torch"])
@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_gpu_suite_part_without_torch_reports_absence(rows: Rows, part: str) -> None:
    (row,) = rows(part)
    assert row["key"] == "torch" and "the package torch" in row["absent"]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The suite with parts for tests: each writes a row, then ends as its name says."""
    (tmp_path / "parts.py").write_text(
        "import os, sys, time\nname, folder = sys.argv[1], sys.argv[3]\n"
        "gpu = os.environ.get('A_GPU', 'a')\n"
        'print(f\'{{"key": "one", "us": 1.5, "device": "{gpu}"}}\', file=open(f\'{folder}/{name}.jsonl\', \'w\'))\n'
        "if name == 'hangs': time.sleep(60)\nif name == 'fails': raise SystemExit('it broke')\n"
    )
    monkeypatch.setattr(gpu_suite, "RUN_PART", [sys.executable, str(tmp_path / "parts.py")])
    return gpu_suite


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "state"), [("ends", "done"), ("fails", "failed: it broke"), ("hangs", "out of time after 1 s")]
)
def test_gpu_suite_failing_part_keeps_rows(suite: ModuleType, tmp_path: Path, name: str, state: str) -> None:
    part_result = suite.run_part(name, tmp_path, 1.0, [])
    assert part_result.state == state and part_result.rows == [{"key": "one", "us": 1.5, "device": "a"}], (
        "finished rows remain"
    )
    lines = suite.report({"device": "d"}, {"gemm": part_result})
    assert "| one | 1.5 | a |" in lines and ((f"gemm: {state}." in lines) == (state != "done"))


@pytest.mark.process
def test_gpu_suite_runs_finished_parts_only_on_request(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gpu_suite", "--work", str(tmp_path), "--results", str(tmp_path), "--only", "gemm,cluster"]
    both = ["gemm", "cluster"]
    cases = (
        ("a", [], both),
        ("a", [], []),
        ("a", ["--again", "cluster"], ["cluster"]),
        ("b", [], ["gpu_suite:", *both]),
    )
    for gpu, more, parts in cases:
        monkeypatch.setenv("A_GPU", gpu)
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        assert suite.main() == 0
        assert [line.split(" ")[0] for line in capsys.readouterr().err.splitlines()] == parts
        assert set(json.loads((tmp_path / "gpu_suite.json").read_text())) == {"card", "gemm", "cluster"}


@pytest.mark.process
def test_results_are_written_after_each_part(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[list[str]] = []
    write = suite.write
    monkeypatch.setattr(suite, "write", lambda *x: (states.append([p.state for p in x[2].values()]), write(*x))[1])
    arguments = ["--work", str(tmp_path), "--results", str(tmp_path), "--only", "gemm,cluster"]
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *arguments])
    assert suite.main() == 0
    assert states == [["not begun"] * 2, ["done", "not begun"], ["done", "done"]]


def test_rows_of_truncated_line_is_skipped(suite: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"key": "one"}\n{"key": "tw')
    assert suite.rows_of(tmp_path / "x.jsonl") == [{"key": "one"}] and suite.rows_of(tmp_path / "no") == []
