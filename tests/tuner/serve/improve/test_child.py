"""The process that tunes for served sizes, on a model that runs in generic loops: its artifact, its refusals, its priority."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tuner.serve.served import Files, mixing, slow

from relax_tune.ir.frontend.text import save_text
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.hashed_zip import digest_at_end
from relax_tune.tuner.serve.improve.improver import COMMAND
from relax_tune.tuner.serve.improve.order import IMPROVES, ImproveOrder, settings_of
from relax_tune.tuner.serve.improve.sizes import ServedSizes
from relax_tune.tuner.service.job_process import JobProcess
from relax_tune.tuner.service.work_order import DONE, TRY_LATER, USER_ERROR

pytestmark = [pytest.mark.ccompiler, pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def order(files: Files, tmp_path: Path) -> Iterator[ImproveOrder]:
    path = files.artifact("slow")
    sizes = ServedSizes()
    sizes.of_model(load_artifact(path).manifest["extra"]["model"])
    record = sizes.recorder("main", ["b"])
    for _ in range(100):
        record((8,))
    sizes.profile().save(tmp_path / "profile.json")
    yield ImproveOrder(
        artifact=str(path),
        base=digest_at_end(path),
        source=str(save_text(slow(), tmp_path / "slow.relax")),
        out=str(tmp_path / "out.rta"),
        profile=str(tmp_path / "profile.json"),
        sizes=(("main", (8,), 1.0),),
        secs=2.0,
        tolerance=1e-3,
        db=f"sqlite:///{tmp_path / 'records.db'}",
    )


def ended(order: ImproveOrder, command: Sequence[str] = COMMAND) -> tuple[int, JobProcess]:
    process = JobProcess(order, command)
    try:
        code = process.wait(240)
        assert code is not None
        return code, process
    finally:
        process.close()


def test_order_is_read_back_from_text(order: ImproveOrder) -> None:
    assert ImproveOrder.from_json(order.to_json()) == order


def test_settings_come_from_the_served_artifact(order: ImproveOrder, files: Files) -> None:
    settings, facts = settings_of(replace(order, threads=2), load_artifact(files.artifact("slow")))
    assert settings.target == "c:threads=2" and settings.shapes == "profile" and facts["weight_types"] == {}


def test_process_writes_a_faster_artifact_of_equal_results(order: ImproveOrder) -> None:
    code, process = ended(order)
    assert code == DONE, process.error
    result = process.result
    assert not result["refused"] and result["gain"] > 0.02 and result["difference"] < 1e-3 and result["sizes"] == 1
    assert load_artifact(order.out).manifest["extra"][IMPROVES] == order.base
    code, process = ended(replace(order, artifact=order.out, out=f"{order.out}.rta", built=order.out))
    assert code == DONE and "same kernels" in process.result["refused"] and not Path(f"{order.out}.rta").exists()


def test_artifact_beyond_the_tolerance_is_not_written(order: ImproveOrder, files: Files) -> None:
    code, process = ended(replace(order, built=str(files.artifact("fast")), tolerance=1e-30))
    assert code == DONE and "1e-30" in process.result["refused"] and not Path(order.out).exists()


@pytest.mark.parametrize(
    "change, expected, subject",
    [
        ({"source": "{other}"}, USER_ERROR, "--improve-from"),
        ({"source": "missing.relax"}, USER_ERROR, "missing.relax"),
        ({"db": "postgresql://nobody@127.0.0.1:1/none?connect_timeout=1"}, TRY_LATER, "127.0.0.1"),
        ({"artifact": "missing.rta"}, USER_ERROR, "missing.rta"),
    ],
)
def test_wrong_order_is_an_error_with_the_subject(
    order: ImproveOrder, tmp_path: Path, change: dict[str, Any], expected: int, subject: str
) -> None:
    other = save_text(mixing(), tmp_path / "other.relax")
    changed = {name: value.format(other=other) for name, value in change.items()}
    code, process = ended(replace(order, **changed))
    assert (code, subject in process.error) == (expected, True), process.error


def test_full_disk_is_an_error_without_a_file(order: ImproveOrder, files: Files) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700 << 10, 700 << 10)); "
        "from relax_tune.tuner.serve.improve.child import main; sys.exit(main())"
    )
    before = set(Path(order.out).parent.iterdir())
    order = replace(order, built=str(files.artifact("fast")))
    status, process = ended(order, (sys.executable, "-c", code))
    assert status != DONE and "free some space" in process.error and order.out in process.error
    assert {p.name for p in set(Path(order.out).parent.iterdir()) - before} <= {
        "records.db",
        "records.db-wal",
        "records.db-shm",
    }


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no SCHED_IDLE")
def test_process_has_the_lowest_priority() -> None:
    code = (
        "import os; from relax_tune.tuner.serve.improve.child import lowest_priority; lowest_priority(); "
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.nice(0))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "19"], done.stderr
