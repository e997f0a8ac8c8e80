"""The tuning loop on recorded answers: determinism, failures, resuming, several jobs on one store."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import (
    PAPER_DEVICE,
    QUICK,
    RecordedRunner,
    add_environment,
    add_records,
    by_text,
    feed_forward,
    narrowed,
    ok_record,
    paper_job,
    row_scale,
)

from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import MeasureError, VerifyError
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job import loop, task_leases
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.loop import JobContext, Tuner
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.learn.similar_devices import SearchKnowledge
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.messages import MeasureRequest
from relax_tune.tuner.task import check
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.sketch_set import SketchSet
from relax_tune.tuner.task.unfused_variants import in_parts
from relax_tune.tuner.task.variants import TaskVariants

FOUR = replace(QUICK, trials=4)


def all_records(job: DeviceJob) -> list[Any]:
    return [r for t in job.tasks for r in job.store.query(job.target.key, t.key)]


def asked(runner: RecordedRunner) -> list[list[str]]:
    return [sorted(r.program_json for r in batch) for batch in runner.batches]


# -- determinism ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_answers_lead_elsewhere() -> None:
    """The search listens: otherwise it would say nothing that the same answers lead to the same candidates."""
    settings = replace(QUICK, trials=24)

    def upside_down(program: Any, symbols: Any) -> float | str:
        found = by_text(program, symbols)
        return found if isinstance(found, str) else 1e-8 / found

    runners = []
    for answer in (by_text, upside_down):
        runners.append(RecordedRunner(answer))
        paper_job(row_scale, settings=settings).tune(runners[-1])
    assert asked(runners[0]) != asked(runners[1])


# -- what is recorded -------------------------------------------------------------------------------------------------


def half_fail(program: Any, symbols: Any) -> float | str:
    """`by_text`, and of the tuned programs every other one fails, whichever they are."""
    odd = sum(len(k.source) for k in program.kernels) % 2
    tuned = program.calls[0].variants[0].label == "tuned"
    return "too many registers" if odd and tuned else by_text(program, symbols)


@pytest.mark.slow
def test_loop_records_trials_and_failures_and_second_run_measures_nothing() -> None:
    store, runner, seen = MemoryStore(), RecordedRunner(half_fail), list[TuningProgress]()
    job = paper_job(feed_forward, store, FOUR)
    result = job.tune(runner, seen.append)
    records = all_records(job)
    assert result.measurements == len(records) == store.count(job.target.key)
    assert {r.variant.kind for r in records} == {"generic", "library", "tuned"}
    for task in job.tasks:
        tuned = {r.variant.key for r in records if r.workload == task.key and r.variant.kind == "tuned"}
        assert len(tuned) >= FOUR.trials  # type: ignore[operator]
        for r in records:
            if r.workload == task.key and r.status == "ok":
                assert tuple(r.symbols.values()) in (*task.domain.points, *task.domain.others) and r.checked
    failures = [r for r in records if r.status == "failed"]
    assert failures and result.failures == len(failures)
    assert all(r.stage == "compile" and r.message == "too many registers" and not r.samples_secs for r in failures)
    assert [p.trials for p in seen if p.task == job.tasks[0].name][-1] >= FOUR.trials  # type: ignore[operator]

    again = RecordedRunner()
    second = paper_job(feed_forward, store, FOUR).tune(again)
    assert not again.batches and second.measurements == second.trials == 0
    assert [j.state for j in store.jobs()] == ["done", "done"]


@pytest.mark.slow
def test_loop_with_more_trials_continues_the_last_job() -> None:
    store = MemoryStore()
    paper_job(feed_forward, store, QUICK).tune(RecordedRunner())
    runner = RecordedRunner()
    result = paper_job(feed_forward, store, FOUR).tune(runner)
    assert result.trials == 2 * len(paper_job(feed_forward).tasks)


@pytest.mark.slow
def test_loop_over_another_range_shares_records() -> None:
    """Records are of shapes: a range with other anchors asks for those, and first of the candidates that did well."""
    store = MemoryStore()
    narrow = paper_job(row_scale, store, FOUR)
    narrow.tune(RecordedRunner())
    ok = [r for r in all_records(narrow) if r.status == "ok" and r.variant.kind == "tuned"]
    by_shape = [[r for r in ok if r.symbols == s] for s in narrow.tasks[0].bindings()]
    fastest = {min(found, key=lambda r: r.samples_secs).variant.key for found in by_shape}
    wide = paper_job(row_scale, store, FOUR, fresh=True)
    narrowed(wide, {"n": Range(1, 300)})
    assert wide.tasks[0].key == narrow.tasks[0].key and wide.tasks[0].domain != narrow.tasks[0].domain
    wide.tune(RecordedRunner())
    complete = set(wide.tasks[0].domain.points)
    times: dict[str, set[tuple[int, ...]]] = {}
    for r in all_records(wide):
        if r.status == "ok":
            times.setdefault(r.variant.key, set()).add(tuple(r.symbols.values()))
    assert all(complete <= times[key] for key in fastest)
    assert wide.build().plans[wide.tasks[0].name].plan.variants
    third = RecordedRunner()
    again = paper_job(row_scale, store, FOUR, fresh=True)
    narrowed(again, {"n": Range(1, 300)})
    again.tune(third)
    assert not third.batches


def test_loop_times_contenders_twice_and_hopeless_variants_once() -> None:
    def answer(program: Any, symbols: Any) -> float | str:
        return 1e-3 if program.calls[0].variants[0].label == "generic" else 1e-9 * len(program.kernels[0].source)

    job = paper_job(row_scale, settings=FOUR)
    job.tune(RecordedRunner(answer))
    task = job.tasks[0]
    visits = Counter(r.variant.key for r in all_records(job) if r.symbols == {"s0": 1})
    assert visits[job.task_variants[task.name].sketch_set.generic().key] == 1
    dispatched = job.build().plans[task.name].plan.variants
    assert dispatched and all(visits[key] >= 2 for key in dispatched)


@pytest.mark.slow
def test_no_trials_still_times_the_library_and_the_generic_form() -> None:
    job = paper_job(feed_forward, settings=replace(QUICK, trials=0))
    result = job.tune(RecordedRunner())
    assert result.trials == 0 and {r.variant.kind for r in all_records(job)} == {"generic", "library"}


@pytest.mark.slow
def test_loop_measures_all_baselines_before_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops a job early finds the library's times."""
    runner, begun, make = RecordedRunner(), list[int](), loop.make_strategy
    monkeypatch.setattr(loop, "make_strategy", lambda *x: (begun.append(len(runner.batches)), make(*x))[1])
    job = paper_job(feed_forward, settings=FOUR)
    job.tune(runner)
    assert len(job.tasks) > 1 and len(begun) == len(job.tasks) and begun[0] == len(job.tasks)


# -- interruptions ----------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """What a key press is."""


@pytest.mark.slow
@pytest.mark.parametrize("error", [Stop("interrupted"), MeasureError("the device is gone")])
def test_interrupted_loop_resumes_to_the_same_total(error: BaseException) -> None:
    whole = paper_job(feed_forward, settings=FOUR)
    whole.tune(RecordedRunner())

    store, batches = MemoryStore(), [0]

    def on_batch(_: Sequence[MeasureRequest]) -> None:
        batches[0] += 1
        if batches[0] == 4:
            raise error

    class Interrupting(RecordedRunner):
        def submit(self, batch: Sequence[MeasureRequest]) -> Any:
            on_batch(batch)
            return super().submit(batch)

    job = paper_job(feed_forward, store, FOUR)
    with pytest.raises(type(error)):
        job.tune(Interrupting())
    assert [j.state for j in store.jobs()] == ["interrupted"]
    assert 0 < store.count(job.target.key) < whole.store.count(whole.target.key)
    assert all(store.lease(t.key, job.target.key) is None for t in job.tasks)  # given back on the way out

    paper_job(feed_forward, store, FOUR).tune(RecordedRunner())

    def tried(j: DeviceJob) -> dict[str, int]:
        records = all_records(j)
        return {
            t.key: len({r.variant.key for r in records if r.workload == t.key and r.variant.kind == "tuned"})
            for t in j.tasks
        }

    assert tried(job) == tried(whole)


# -- tasks and candidates that go wrong -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", ["sketches", "reference", "program"])
def test_untunable_task_does_not_stop_the_loop(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    job = paper_job(feed_forward, store, QUICK, fresh=part != "reference")
    bad = job.tasks[1]
    if part == "reference":
        real = check.check_at

        def check_at(task: Any, *rest: Any, **named: Any) -> Any:
            if task.key == bad.key:
                raise VerifyError("the reference cannot read this")
            return real(task, *rest, **named)

        monkeypatch.setattr(check, "check_at", check_at)
    else:
        owner: Any = TaskVariants if part == "program" else SketchSet
        original = getattr(owner, part)

        def broken(self: Any, *rest: Any) -> Any:
            if self.task.key == bad.key:
                raise (KeyError if part == "program" else RuntimeError)(f"a bug in {part}")
            return original.__get__(self)(*rest) if part != "sketches" else original.func(self)

        patched: Any = broken
        if part == "sketches":
            patched = cached_property(broken)
            patched.__set_name__(SketchSet, "sketches")
        monkeypatch.setattr(owner, part, patched)
    result = job.tune(RecordedRunner(lambda _program, _symbols: 1e-3))  # no candidate fails by itself
    failures = store.query(job.target.key, bad.key, status="failed")
    assert failures and all(r.stage == "constraint" and r.message for r in failures)
    assert result.failures >= len(failures)
    expected = {"reference": "the reference cannot read this", "program": "KeyError"}.get(part, f"bug in {part}")
    assert any(expected in r.message for r in failures)
    if part != "program":
        assert {name for name, _ in result.problems} == {bad.name}
    for task in job.tasks:
        kinds = {r.variant.kind for r in store.query(job.target.key, task.key, status="ok")}
        assert ("tuned" in kinds) == (task.key != bad.key), task.name
    if part == "sketches":
        assert {r.variant.kind for r in store.query(job.target.key, bad.key, status="ok")} >= {"generic"}
    again = RecordedRunner()
    if part != "program":
        assert paper_job(feed_forward, store, QUICK, fresh=part != "reference").tune(again).measurements == 0


def test_failing_reference_leaves_a_working_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_at(*_: Any, **__: Any) -> Any:
        raise VerifyError("the reference cannot read this")

    monkeypatch.setattr(check, "check_at", check_at)
    job = paper_job(feed_forward)
    job.tune(RecordedRunner())
    built = job.build()
    assert {v.label for c in built.program.calls for v in c.variants} == {"predicted"} and built.notes


def test_a_lost_device_is_no_candidate_s_fault() -> None:
    """What a lost device took with it is tried again by the next job."""
    store = MemoryStore()
    lost = paper_job(row_scale, store, QUICK)

    class Losing(RecordedRunner):
        def _result(self, request: MeasureRequest) -> Any:
            return replace(super()._result(request), status="failed", stage="device-lost", message="gone", timings=())

    lost.tune(Losing())
    assert {r.stage for r in all_records(lost)} == {"device-lost"}
    again = paper_job(row_scale, store, QUICK)
    again.tune(RecordedRunner())
    ok = {r.variant.kind for r in all_records(again) if r.status == "ok"}
    assert ok == {"generic", "tuned"}
    assert not again.build().notes


# -- several jobs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_another_job_holds_is_left_for_last_and_not_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LEASE_POLL_SECS", 0.01)
    store = MemoryStore()
    job = paper_job(feed_forward, store, QUICK)
    held = job.tasks[0]
    other = paper_job(feed_forward, settings=QUICK)
    other.tune(RecordedRunner())
    store.add_target(job.target)
    add_records(store, held, ())
    lease = store.acquire_lease(held.key, job.target.key, "another", secs=1000.0)
    assert lease is not None
    runner = RecordedRunner()
    worked: list[str] = []

    def sleep(_: float) -> None:
        """Nothing but the held task is left: the other job ends, its records are there."""
        assert held.key not in worked and set(worked) == {t.key for t in job.tasks} - {held.key}
        assert not [r for r in store.query(job.target.key, held.key)]
        add_records(store, held, other.store.query(job.target.key, held.key))
        store.release_lease(lease)

    monkeypatch.setattr(loop.time, "sleep", sleep)
    said: list[str] = []
    job.tune(runner, lambda p: worked.append(next(t.key for t in job.tasks if t.name == p.task)), said.append)
    assert held.key not in worked and said == [f"waiting for {held.name}, leased by job another"]
    assert store.query(job.target.key, held.key) == other.store.query(job.target.key, held.key)


def test_a_lease_is_held_while_measuring_and_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_leases, "LEASE_SECS", 0.3)
    store = MemoryStore()
    job = paper_job(row_scale, store, replace(QUICK, trials=0))
    ends: list[float] = []
    done = threading.Event()

    class Slow(RecordedRunner):
        def submit(self, batch: Sequence[MeasureRequest]) -> Any:
            future: Any = super().submit(batch)
            later: Any = type(future)()

            def answer() -> None:
                while len(ends) < 2 or ends[-1] == ends[0]:
                    lease = store.lease(job.tasks[0].key, job.target.key)
                    assert lease is not None
                    ends.append(lease.expires_at)
                    done.wait(0.02)
                later.set_result(future.result())

            threading.Thread(target=answer, daemon=True).start()
            return later

    job.tune(Slow())
    assert ends[-1] > ends[0] and store.lease(job.tasks[0].key, job.target.key) is None


WORKER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from relax_tune.database.store import open_store
from relax_tune.tuner.job.batches import ROUNDS
from tests.support.tuner_models import QUICK, RecordedRunner, feed_forward, paper_job

times = []

class Slow(RecordedRunner):
    def submit(self, batch):
        began = time.monotonic()
        time.sleep(0.03)
        future = super().submit(batch)
        task = json.loads(batch[0].program_json)["name"]
        trial = (batch[0].policy.min_repeats, batch[0].policy.max_repeats) == ROUNDS
        times.append((task, began, time.monotonic(), trial, [r.program_json for r in self.batches[-1]]))
        return future

with open_store(sys.argv[2]) as store:
    result = paper_job(feed_forward, store, replace(QUICK, trials=4)).tune(Slow())
print(json.dumps({"times": times, "measurements": result.measurements}))
"""


@pytest.mark.process
def test_two_processes_on_one_file_share_the_work(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    open_store(url).close()
    root = str(Path(__file__).parents[3])
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, root, url], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    reports = [json.loads(w.communicate(timeout=120)[0]) for w in workers]
    job = paper_job(feed_forward, open_store(url), FOUR)
    with job.store:
        # nothing is left to do, nothing was lost
        alone = RecordedRunner()
        assert job.tune(alone).measurements == 0 and not alone.batches
        records = all_records(job)
        assert len(records) == job.store.count(job.target.key) == sum(r["measurements"] for r in reports)
        tuned = {r.variant.key for r in records if r.variant.kind == "tuned"}
        assert len(tuned) == FOUR.candidates * len(job.tasks)
        assert not job.store.check()
    # no candidate was tried twice, and never did both work on one task at a time
    trials = [p for r in reports for _, _, _, trial, programs in r["times"] if trial for p in programs]
    assert len(trials) == len(set(trials))
    for task, begin, end, _, _ in reports[0]["times"]:
        for other, begin2, end2, _, _ in reports[1]["times"]:
            assert task != other or end <= begin2 or end2 <= begin


def test_a_job_is_given_records_of_a_bad_database_without_harm() -> None:
    """Rows may come from anybody: unknown traces, zero times and unchecked ones change nothing but are no error."""
    job = paper_job(row_scale, settings=QUICK)
    job.store.add_target(job.target)
    task = job.tasks[0]
    task_variants = job.task_variants[task.name]
    tuned = [task_variants.sketch_set.record_of(c) for c in task_variants.sketch_set.seeds(1)]
    odd = [
        replace(tuned[0], trace='{"tunables": {}, "steps": [["nothing", {}]]}'),
        replace(tuned[0], parameters='{"Z": 3}'),
    ]
    records = [ok_record(task, job.target.key, v, p, 1e-9) for v in odd for p in task.domain.points]
    records += [ok_record(task, job.target.key, tuned[0], p, 0.0) for p in task.domain.points]
    add_records(job.store, task, records)
    job.tune(RecordedRunner())
    built = job.build()
    assert not {v.key for v in odd} & set(built.plans[task.name].plan.variants)


def test_records_of_other_rules_do_not_end_the_search() -> None:
    """No build dispatches them: were they the best known, no other candidate would seem worth its trial."""
    settings = replace(QUICK, trials=24)
    runners = []
    for others in (False, True):
        job = paper_job(feed_forward, settings=settings)
        job.store.add_target(job.target)
        (task, *_) = job.tasks
        (own,) = (
            job.task_variants[task.name].sketch_set.record_of(c)
            for c in job.task_variants[task.name].sketch_set.seeds(1)
        )
        foreign = [replace(own, sketch=f"{own.sketch}.{n}") for n in range(8)]
        records = [ok_record(task, job.target.key, v, p, 1e-9) for v in foreign for p in task.domain.points]
        add_records(job.store, task, records if others else ())
        runners.append(RecordedRunner())
        job.tune(runners[-1])
    assert asked(runners[0]) == asked(runners[1])


def test_guesses_of_a_changed_sketch_are_tried() -> None:
    """Its records say nothing of it any more, however many trials other candidates have had."""
    first = paper_job(row_scale, settings=replace(QUICK, trials=24))
    first.tune(RecordedRunner())
    (task,) = first.tasks
    (seed,) = (
        first.task_variants[task.name].sketch_set.record_of(c)
        for c in first.task_variants[task.name].sketch_set.seeds(1)
    )
    records = all_records(first)
    assert seed.sketch in {r.variant.sketch for r in records}
    for changed in (False, True):
        store = MemoryStore()
        job = paper_job(row_scale, store, FOUR)
        store.add_target(job.target)
        add_environment(job)
        old = [replace(r, id=f"old{n}") for n, r in enumerate(records)]
        if changed:
            own = [r.variant.sketch == seed.sketch for r in old]
            old = [replace(r, variant=replace(r.variant, trace="[]")) if o else r for r, o in zip(old, own)]
        add_records(store, task, old)
        job.tune(RecordedRunner())
        guesses = {v.key for v in job.task_variants[task.name].sketch_set.guesses({seed.sketch})}
        assert {r.variant.key for r in all_records(job) if r.id[:3] != "old"} == (guesses if changed else set())


def test_no_sketch_is_left_untried_where_others_are_slow() -> None:
    """Candidates of other sketches say nothing about one that may be the only good one."""

    def slow(program: Program, symbols: Mapping[str, int]) -> float:
        return 1e-3 if program.calls[0].variants[0].label == "tuned" else 1e-6

    g = GraphBuilder()
    weights = np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)
    module = g.finish(g.call(Matmul(), g.input("x", (1, 256)), g.constant("w", weights)))
    settings = replace(QUICK, trials=24, weights="int4", activations="int8")
    job = device_job(module, PAPER_DEVICE, MemoryStore(), settings)
    job.tune(RecordedRunner(slow))
    for task_variants in job.task_variants.values():
        records = job.store.query(job.target.key, task_variants.task.key)
        tried = {r.variant.sketch for r in records if r.variant.kind == "tuned" and not in_parts(r.variant)}
        assert {s.name for s in task_variants.sketch_set.sketches} <= tried
    assert max(len(c.sketch_set.sketches) for c in job.task_variants.values()) > QUICK.batch


ALTERATIONS = {
    "deleted": "DELETE FROM measurements WHERE id = (SELECT min(id) FROM measurements)",
    "samples": "UPDATE measurements SET samples = x'00'",
    "moment": "UPDATE measurements SET measured_at = 'text' WHERE id = (SELECT min(id) FROM measurements)",
    "variant": "UPDATE measurements SET variant = 99999 WHERE id = (SELECT min(id) FROM measurements)",
    "tally": "UPDATE tallies SET count = count + 1000",
}


@pytest.mark.parametrize("alteration", ALTERATIONS.values(), ids=ALTERATIONS.keys())
def test_database_with_altered_rows_is_tuned_further(tmp_path: Path, alteration: str) -> None:
    """Rows that are deleted or invalid are still counted. They stop no job, and none waits for them."""
    file = tmp_path / "t.db"
    with open_store(f"sqlite:///{file}") as store:
        paper_job(row_scale, store, FOUR).tune(RecordedRunner())
        with closing(sqlite3.connect(file)) as connection:
            connection.execute(alteration)
            connection.commit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            summary = paper_job(row_scale, store, replace(QUICK, trials=24)).tune(RecordedRunner())
        assert summary.trials >= 24 - 2 * FOUR.trials and store.check()


def test_tuner_asks_nothing_of_an_empty_model() -> None:
    job = paper_job(row_scale)
    job.store.add_target(job.target)
    knowledge = SearchKnowledge(job.target, RecordedHistory(job.store, job.target.key, ()))
    tuner = Tuner([], job.device_records, RecordedRunner(), QUICK, knowledge, JobContext("job"))
    assert tuner.run().measurements == 0
