"""Measuring survives bad tasks, missing devices and failing candidates, and only checked results win."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import create_engine, inspect, text
from tests.database.conftest import POSTGRES
from tests.support.effort import thinned
from tests.support.tuner_models import (
    QUICK,
    RecordedRunner,
    add_records,
    feed_forward,
    feed_forward_reference,
    ok_record,
    paper_job,
    row_scale,
)
from tests.tuner.cli.cli_model import make_bert
from tests.tuner.measure.cluster.lent import lend
from tests.tuner.measure.measure_programs import LIMIT_SECS, request
from typer.testing import CliRunner

from relax_tune.database.records import STAGES, Measurement
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.job import loop
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.learn.similar_devices import SearchKnowledge
from relax_tune.tuner.measure.cluster.processes import ClusterProcess, start_scheduler
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, failed
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task import check

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")


# -- a symbolic task is tuned, not skipped, and one bad task never aborts the rest ---------------------------------


def kinds(job: DeviceJob, name: str) -> set[str]:
    """The kinds of variants of a task that were timed."""
    return {r.variant.kind for r in job.store.query(job.target.key, job.task_variants[name].task.key, status="ok")}


@pytest.mark.slow
@pytest.mark.parametrize("make", [feed_forward, row_scale])
def test_symbolic_tasks_are_tuned_over_whole_range(make: Any) -> None:
    job = paper_job(make)
    job.tune(RecordedRunner(lambda p, _: 1e-6 if p.calls[0].variants[0].label == "tuned" else 3e-6))
    for task in job.tasks:
        assert task.func.symbols, "not a symbolic task: this says nothing"
        points = {tuple(p) for p in task.domain.points}
        assert len(points) >= 4
        tuned = [r for r in job.store.query(job.target.key, task.key, status="ok", kinds=("tuned",))]
        for key in {r.variant.key for r in tuned}:
            assert {tuple(r.symbols.values()) for r in tuned if r.variant.key == key} >= points
        assert tuned, task.name
    assert any(v.label == "tuned" for c in job.build().program.calls for v in c.variants)


@dataclass(eq=False)
class Spoilt(RecordedRunner):
    """Every request of one task fails differently."""

    task: str = ""
    how: str = ""

    def _result(self, request: MeasureRequest) -> MeasureResult:
        good = super()._result(request)
        if json.loads(request.program_json)["name"] != self.task:
            return good
        if self.how == "unchecked":
            return replace(good, status="ok", stage=None, checked=False)
        if self.how == "no times":
            return replace(good, status="ok", stage=None, checked=True, timings=())
        return failed(request.id, self.how, f"it failed at {self.how}")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("how", [*STAGES, "unchecked", "no times"])
def test_task_with_only_failing_candidates_never_aborts_the_rest(how: str) -> None:
    job = paper_job(feed_forward)
    bad = job.tasks[0].name
    job.tune(Spoilt(lambda p, _: 1e-6 if p.calls[0].variants[0].label == "tuned" else 3e-6, task=bad, how=how))
    for task in job.tasks:
        assert kinds(job, task.name) >= ({"tuned", "generic"} if task.name != bad else set()), task.name
    built = job.build()
    expected = "predicted" if how in ("unchecked", "no times") else "generic"  # the guess did not fail
    assert {v.label for c in built.program.calls if c.task == job.tasks[0].key for v in c.variants} == {expected}
    assert any(v.label == "tuned" for c in built.program.calls for v in c.variants)
    assert any(bad in note for note in built.notes)
    assert [j.state for j in job.store.jobs()] == ["done"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::relax_tune.errors.UnexpectedErrorWarning")  # check 0 is left out with one
@pytest.mark.parametrize("where", thinned(["check", "ask", "tell"], 2))
def test_raising_task_never_aborts_the_rest(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = paper_job(feed_forward, fresh=True)
    bad = job.tasks[1]

    def explode(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    if where == "check":
        plain_at = check.check_at
        monkeypatch.setattr(
            check, "check_at", lambda t, *a, **k: explode() if t.key == bad.key else plain_at(t, *a, **k)
        )
    else:
        plain_make = loop.make_strategy
        number = iter(range(100))

        def make(name: str, problem: Any, rng: Any) -> Any:
            made = plain_make(name, problem, rng)
            if next(number) == 1:
                monkeypatch.setattr(made, where, explode, raising=True)
            return made

        monkeypatch.setattr(loop, "make_strategy", make)
        monkeypatch.setattr(SearchKnowledge, "seeds", lambda *_: [])  # strategies name the first candidates
    work = job.tune(RecordedRunner())
    assert bad.name in [name for name, _ in work.problems]
    assert all("a bug" in why for _, why in work.problems)
    for task in job.tasks:
        if task.key != bad.key:
            assert kinds(job, task.name) >= {"tuned", "generic"}, task.name
    noted = job.store.query(job.target.key, bad.key, status="failed")
    assert any("ZeroDivisionError" in r.message for r in noted)
    assert [j.state for j in job.store.jobs()] == ["done"]
    assert job.build().program.calls


@pytest.mark.process
@needs_gcc
@pytest.mark.ccompiler
def test_wrong_reference_on_real_device_fails_one_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that is right about the task looks wrong, so nothing of it may be used; the model still runs and is right."""
    plain = check.check_at
    with LocalRunner("c") as runner, open_store(f"sqlite:///{tmp_path / 't.db'}") as store:
        module = feed_forward(upper=16)
        job = device_job(module, runner.device_info(), store, Settings(target="c", trials=1, effort="quick"))
        bad = job.tasks[0]

        def check_at(task: Any, *rest: Any, **named: Any) -> Any:
            case = plain(task, *rest, **named)
            return replace(case, expected=tuple(e + 1 for e in case.expected)) if task.key == bad.key else case

        monkeypatch.setattr(check, "check_at", check_at)
        job.tune(runner)
        assert kinds(job, bad.name) == set()
        result = store.query(job.target.key, bad.key)
        assert result and {r.stage for r in result} == {"wrong-result"} and all("differ" in r.message for r in result)
        assert all(kinds(job, t.name) >= {"tuned", "generic"} for t in job.tasks if t.key != bad.key)
        saved = job.artifact(job.build()).save(tmp_path / "m.rta")
    x = np.random.default_rng(3).standard_normal((7, 24)).astype(np.float32)
    with load_artifact(saved).open() as model:
        (y,) = model.run({"x": x})
    np.testing.assert_allclose(y, feed_forward_reference(module, x), atol=1e-4)


# -- a device that does not exist or is busy: a clear error within the limit ------------------------------


@pytest.mark.process
@pytest.mark.parametrize("spec", ["abacus", "opencl:abacus", "cuda", "", "c:no such processor"])
def test_missing_device_is_refused_in_bounded_time(spec: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises((MeasureError, UserError)) as raised:
        open_runner(Settings(target=spec)).close()
    assert time.monotonic() - began < 60
    assert repr(spec) in str(raised.value)
    make_bert(tmp_path / "bert")
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(app, ["tune", "bert", "--target", spec, "--db", "sqlite:///t.db"])
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and repr(spec) in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "bert.rta").exists()


@pytest.mark.process
@needs_gcc
@pytest.mark.ccompiler
def test_device_never_opening_is_refused_in_bounded_time(tmp_path: Path) -> None:
    """A driver that hangs while it is opened: here a compiler that never says who it is."""
    (tmp_path / "gcc").write_text("#!/bin/sh\nsleep 600\n")
    (tmp_path / "gcc").chmod(0o755)
    began = time.monotonic()
    with pytest.raises(MeasureError, match=r"'c' .*no answer"):
        LocalRunner("c", open_secs=1.0, environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert time.monotonic() - began < 30


@pytest.fixture(scope="module")
def scheduler() -> Iterator[tuple[ClusterProcess, str]]:
    pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
    process, address = start_scheduler()
    with process:
        yield process, address


@pytest.mark.process
def test_a_scheduler_without_such_a_worker(scheduler: tuple[ClusterProcess, str]) -> None:
    began = time.monotonic()
    with pytest.raises(MeasureError, match=r"'abacus'.* within 0\.5 s"):
        DaskRunner(scheduler[1], "abacus", open_secs=0.5)
    assert time.monotonic() - began < 30


@pytest.mark.process
def test_no_scheduler_at_all(scheduler: object) -> None:
    began = time.monotonic()
    with pytest.raises(MeasureError, match=r"scheduler at tcp://127.0.0.1:9 within 0\.5 s"):
        DaskRunner("tcp://127.0.0.1:9", "c", open_secs=0.5)
    assert time.monotonic() - began < 30


@pytest.mark.heavy
@pytest.mark.process
@needs_gcc
@pytest.mark.ccompiler
def test_busy_device_is_waited_for_with_a_word(scheduler: tuple[ClusterProcess, str]) -> None:
    """The only worker with the label measures something endless for another job."""
    endless = request("hang", "c", deadline_secs=600.0)
    with lend(scheduler[1]), DaskRunner(scheduler[1], "c", open_secs=60.0) as first:
        assert first.submit([request("good", "c")]).result(LIMIT_SECS)[0].status == "ok"
        batch = first.submit([endless])
        with pytest.raises(TimeoutError):
            batch.result(2.0)
        notices: list[str] = []
        with (
            DaskRunner(scheduler[1], "c", open_secs=30.0, notice=notices.append) as second,
            pytest.raises(TimeoutError),
        ):
            second.submit([request("good", "c")]).result(5.0)
        assert any("waiting behind batches of other jobs, 1 on " in line for line in notices)


@pytest.mark.process
@needs_gcc
@pytest.mark.ccompiler
def test_hanging_measurement_ends_in_bounded_time(tmp_path: Path) -> None:
    """The job ends, and the record says what hung and for how long."""
    with LocalRunner("c") as runner:
        began = time.monotonic()
        (result,) = runner.submit([request("hang", "c", deadline_secs=1.0)]).result(LIMIT_SECS)
        assert time.monotonic() - began < 60
    assert result.stage == "timeout" and "within 1 s" in result.message


# -- every failure has its stage and message; nothing is encoded as a huge time ------------------------------------

SABOTAGE = {
    "syntax": "compile",
    "hang": "timeout",
    "wrong": "wrong-result",
    "silent": "wrong-result",
    "no-library": "launch",
    "crash": "crash",
    "stale": "wrong-result",
    "overrun": "wrong-result",
}


@dataclass(eq=False)
class Sabotaged:
    """A real runner that is given broken programs in place of the candidates."""

    real: LocalRunner
    asked: dict[str, str] = field(default_factory=dict)

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        worse = []
        for one in batch:
            kind = list(SABOTAGE)[len(self.asked) % len(SABOTAGE)]
            self.asked[one.id] = kind
            worse.append(request(kind, "c", id=one.id, deadline_secs=1.0 if kind == "hang" else 60.0))
        return self.real.submit(worse)

    def device_info(self) -> Any:
        return self.real.device_info()

    def calibrate(self, reference: Any) -> Any:
        return reference

    def slots(self) -> int:
        return 1

    def close(self) -> None:
        self.real.close()


def rows_of(url: str) -> list[dict[str, Any]]:
    """The table of measurements, without any code of ours."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        assert "measurements" in inspect(connection).get_table_names()
        query = (
            "SELECT m.*, p.symbols, t.text FROM measurements m JOIN points p ON p.number = m.point "
            "LEFT JOIN messages t ON t.number = m.message"
        )
        result = [dict(row) for row in connection.execute(text(query)).mappings()]
    for row in result:
        id, stage = bytes(row["id"]), row["stage"]
        row["id"] = id[1:].decode() if id[:1] == b"\1" else id[1:17].hex() + id[17:].decode()
        row["stage"] = STAGES[stage - 1] if stage else None
    engine.dispose()
    return result


def sound(row: dict[str, Any]) -> None:
    """A failure has a stage and a message and no time, anything else times that can be."""
    samples = row["samples"][1:]
    if row["stage"]:
        assert row["text"].strip() and samples == b"" and not row["checked"]
    else:
        assert row["text"] is None and row["samples"][:1] == b"f" and len(samples) % 4 == 0
        assert samples and all(0 < secs < 60 for (secs,) in struct.iter_unpack("<f", samples))
    assert 0 <= row["build_secs"] < 600
    assert json.loads(row["symbols"]) == {} or not row["stage"]


@pytest.mark.process
@needs_gcc
@pytest.mark.ccompiler
@pytest.mark.parametrize("sql_url", thinned(["sqlite", POSTGRES]), indirect=True)
def test_every_way_to_fail_on_a_real_device_is_a_row_with_stage_and_message(sql_url: str) -> None:
    with LocalRunner("c") as real, open_store(sql_url) as store:
        runner = Sabotaged(real)
        job = device_job(
            feed_forward(upper=16), runner.device_info(), store, Settings(target="c", trials=2, effort="quick")
        )
        job.tune(runner)
        assert job.build().notes
        stats = store.stats(job.target.key)
        assert stats is not None and stats.ok == 0
    assert set(runner.asked.values()) == set(SABOTAGE)
    rows = rows_of(sql_url)
    assert {row["id"].split(".")[0] for row in rows} == set(runner.asked)
    for row in rows:
        sound(row)
        assert row["stage"] == SABOTAGE[runner.asked[row["id"].split(".")[0]]]
    assert dict(stats.failures) == {s: sum(r["stage"] == s for r in rows) for s in set(SABOTAGE.values())}


@pytest.mark.slow
def test_every_stage_a_runner_can_answer_is_a_row_with_stage_and_message(sql_url: str) -> None:
    """Also for a runner that forgot its message, and for times and failures in one batch."""
    stages = iter([*STAGES] * 20)

    class Failing(RecordedRunner):
        def _result(self, request: MeasureRequest) -> MeasureResult:
            good = super()._result(request)
            stage = next(stages)
            return good if stage == "runtime" else failed(request.id, stage, "")  # type: ignore[arg-type]

    with open_store(sql_url) as store:
        paper_job(feed_forward, store, replace(QUICK, trials=8)).tune(Failing())
    rows = rows_of(sql_url)
    for row in rows:
        sound(row)
    assert {row["stage"] for row in rows} >= {*STAGES, None} - {"runtime"}


# -- 30: a record may win only after its output was checked ------------------------------------------------------------


def test_30_unchecked_and_wrong_records_are_never_dispatched() -> None:
    """The fastest of all by far: one never checked, one found wrong once, one found wrong after it was checked."""
    store = MemoryStore()
    job = paper_job(row_scale, store, QUICK)
    job.tune(RecordedRunner(lambda program, symbols: 1e-3))
    (task,) = job.tasks
    task_variants = job.task_variants[task.name]
    before = job.build()
    key = job.target.key
    unchecked, wrong, later = (
        task_variants.sketch_set.record_of(c)
        for c in task_variants.sketch_set.space.candidates(task_variants.sketch_set.space.listed()[:3])
    )  # type: ignore[index]
    points = task.domain.points
    records = [ok_record(task, key, unchecked, p, 1e-7, checked=False) for p in points]
    records += [ok_record(task, key, wrong, points[0], 1e-7), *(ok_record(task, key, later, p, 1e-7) for p in points)]
    records += [
        Measurement(f"bad{n}", task.key, key, v, status="failed", stage="wrong-result", message="3 elements differ")
        for n, v in enumerate((wrong, later))
    ]
    add_records(store, task, records)
    built = job.build()
    assert built.program.to_json() == before.program.to_json()
    assert not {v.key for v in (unchecked, wrong, later)} & set(built.plans[task.name].times)
    for policy in ("measured", "library", "generic"):
        used = job.build(policy).plans[task.name].plan.variants  # type: ignore[arg-type]
        assert not {v.key for v in (unchecked, wrong, later)} & set(used)
    # the same times, checked and never judged wrong, do win: the comparison is not vacuous
    good = task_variants.sketch_set.record_of(
        task_variants.sketch_set.space.candidates(task_variants.sketch_set.space.listed()[3:4])[0]
    )  # type: ignore[index]
    add_records(store, task, [ok_record(task, key, good, p, 1e-7) for p in points])
    assert job.build().plans[task.name].plan.variants == (good.key,)


@pytest.mark.slow
def test_unchecked_results_never_win() -> None:
    class Careless(RecordedRunner):
        def _result(self, request: MeasureRequest) -> MeasureResult:
            return replace(super()._result(request), checked=False)

    job = paper_job(feed_forward)
    job.tune(Careless())
    stats = job.store.stats(job.target.key)
    assert stats is not None and stats.ok > 0 and stats.checked == 0
    built = job.build()
    assert built.notes and {v.label for c in built.program.calls for v in c.variants} <= {"predicted", "generic"}
    careful = RecordedRunner()
    paper_job(feed_forward, job.store).tune(careful)
    assert careful.batches, "what was never checked counts as measured"


@pytest.mark.slow
def test_every_request_of_a_job_asks_for_checks() -> None:
    runner = RecordedRunner()
    job = paper_job(feed_forward, settings=replace(QUICK, trials=4))
    job.tune(runner)
    for batch in runner.batches:
        for one in batch:
            assert len(one.checks) >= 2 and all(case.expected for case in one.checks)
    # at least two shapes, one of them off every tile
    sizes = {tuple(case.symbols.values()) for batch in runner.batches for one in batch for case in one.checks}
    assert len(sizes) >= 2 and any(size[0] % 4 and size[0] % 2 for size in sizes)


@pytest.mark.process
@needs_gcc
@pytest.mark.ccompiler
def test_a_fast_and_wrong_kernel_is_measured_as_wrong() -> None:
    with LocalRunner("c") as runner:
        results = runner.submit([request(kind, "c") for kind in ("good", "wrong", "silent")]).result(LIMIT_SECS)
    assert [(r.status, r.checked, bool(r.timings)) for r in results] == [
        ("ok", True, True),
        ("failed", False, False),
        ("failed", False, False),
    ]
    assert {r.stage for r in results[1:]} == {"wrong-result"}
