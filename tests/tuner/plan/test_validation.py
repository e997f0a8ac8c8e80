"""Plans at shapes nobody trained on: what turns out wrong or slow there is dispatched no longer; bounded, and resumable."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support.tuner_models import QUICK, RecordedRunner, feed_forward, paper_job, row_scale

from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, failed
from relax_tune.tuner.plan.select import DispatchPlan, GuardTest, PlanEntry
from relax_tune.tuner.plan.task_rows import task_rows
from relax_tune.tuner.plan.validation import SHAPES, VALIDATIONS, shapes_on_product, validation_of, validation_shapes
from relax_tune.tuner.report.builds import dispatch_table
from relax_tune.tuner.search.base import SearchProblem
from relax_tune.tuner.task.domain import Point


def trained(job: DeviceJob) -> set[Point]:
    return set(job.tasks[0].domain.points)


class Surprising(RecordedRunner):
    """Generic kernels take a millisecond. Tuned ones are somewhat faster at anchors; elsewhere wrong, or slower."""

    def __init__(self, anchors: set[Point], wrong: bool) -> None:
        self.anchors, self.wrong = anchors, wrong
        super().__init__(self.secs)

    def _elsewhere(self, symbols: Mapping[str, int]) -> bool:
        return tuple(symbols.values()) not in self.anchors

    def secs(self, program: Program, symbols: Mapping[str, int]) -> float:
        if program.calls[0].variants[0].label == "generic":
            return 1e-3
        return 9e-3 if self._elsewhere(symbols) else 6e-4 + 1e-9 * len(program.kernels[0].source)

    def _result(self, request: MeasureRequest) -> MeasureResult:
        tuned = '"label":"tuned"' in request.program_json.replace(" ", "")
        if self.wrong and tuned and any(map(self._elsewhere, request.timings)):
            return failed(request.id, "wrong-result", "element 3 is off")
        return super()._result(request)


def plan_of(job: DeviceJob) -> Any:
    (plan,) = job.build().plans.values()
    return plan


@pytest.mark.parametrize("wrong", [True, False])
def test_variant_wrong_or_slow_between_anchors_is_not_dispatched(wrong: bool) -> None:
    job = paper_job(row_scale, settings=QUICK)
    runner = Surprising(trained(job), wrong)
    work = job.tune(runner)
    task = job.tasks[0]
    records = job.store.query(job.target.key, task.key)
    extra = [r for r in records if tuple(r.symbols.values()) not in trained(job) and r.status == "ok"]
    asked = [[r for r in batch if any(map(runner._elsewhere, r.timings))] for batch in runner.batches]
    asked = [batch for batch in asked if batch]
    looked = {tuple(t.values()) for batch in asked for r in batch for t in r.timings}
    assert 0 < len(looked) <= VALIDATIONS * SHAPES["quick"]
    assert all(len(r.timings) <= SHAPES["quick"] for batch in asked for r in batch)
    assert all(
        [tuple(c.symbols.values()) for c in r.checks] == [tuple(t.values()) for t in r.timings] for r in asked[0]
    )
    plan = plan_of(job)
    rows = task_rows(job.task_variants, {task.name: plan}, {task.name: records})
    found = rows[0].to_json()["validation"]
    if wrong:
        gone = {r.variant.key for r in records if r.stage == "wrong-result"}
        assert gone and not gone & set(plan.plan.variants) and found["wrong"] == len(gone)
    else:
        assert plan.added and set(map(tuple, found["added"])) == set(plan.added)
        assert extra and "changed a plan" in str(dispatch_table(rows).caption)
    assert work.trials == len({r.variant.key for r in records if r.variant.kind == "tuned"})


def test_finished_job_validates_nothing_again_and_reports_results() -> None:
    job = paper_job(row_scale, settings=QUICK)
    job.tune(RecordedRunner(lambda program, _: 1e-3 if program.calls[0].variants[0].label == "generic" else 1e-4))
    again = RecordedRunner()
    assert paper_job(row_scale, job.store, QUICK).tune(again).measurements == 0 and not again.batches
    task = job.tasks[0]
    found = validation_of(job.task_variants[task.name], plan_of(job), job.store.query(job.target.key, task.key))
    assert found.shapes == SHAPES["quick"] and found.worst == pytest.approx(1.0) and not found.added


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 19, 23, 26])
def test_a_finished_job_is_finished_however_times_fall_out(seed: int) -> None:
    """Plans change with every validation here, since each variant is fast or slow anywhere by chance."""

    def secs(program: Program, symbols: Mapping[str, int]) -> float:
        text = f"{seed}:{program.calls[0].variants[0].label}:{program.kernels[0].source}:{symbols}"
        return 1e-3 * (1 + zlib.crc32(text.encode()) % 1000 / 250)

    job = paper_job(feed_forward, settings=QUICK)
    job.tune(RecordedRunner(secs))
    again = RecordedRunner(secs)
    assert paper_job(feed_forward, job.store, QUICK).tune(again).measurements == 0 and not again.batches
    for task in job.tasks:
        records = job.store.query(job.target.key, task.key)
        looked = {tuple(r.symbols.values()) for r in records if r.status == "ok"} - set(task.domain.points)
        assert 0 < len(looked) <= VALIDATIONS * SHAPES["quick"]


def test_shapes_are_new_within_bounds_and_on_both_sides_of_thresholds() -> None:
    job = paper_job(row_scale)
    (task,) = job.tasks
    low, high = min(task.domain.points), max(task.domain.points)
    assert task.domain.others and all(low <= p <= high and p not in task.domain.points for p in task.domain.others)
    entries = (PlanEntry(((GuardTest((0,), 37), True),), "a"), PlanEntry((), "b"))
    plan: Any = type("", (), {"plan": DispatchPlan(entries, 0.0)})
    for count in (3, 6, 12):
        shapes = validation_shapes(task, plan, count)
        assert len(set(shapes)) == len(shapes) <= count
        assert (
            (37,) in shapes and (count == 3 or {(37,), (38,)} <= set(shapes)) and high[0] - 1 in {p[0] for p in shapes}
        )


def test_threshold_of_a_product_is_validated_between_neighbours() -> None:
    points = ((1, 1), (9, 9), (160, 160))
    assert list(shapes_on_product(points, GuardTest((0, 1), 1444))) == [(38, 38)]
    assert list(shapes_on_product(points, GuardTest((0, 1), 10**6))) == []


def test_search_baseline_is_the_best_measured_form() -> None:
    """Proposals are compared with the library and generic forms that were measured, wherever the search is asked."""
    job = paper_job(row_scale, settings=QUICK)
    problems: list[SearchProblem] = []
    bests: list[Sequence[float]] = []
    real = SearchProblem.__init__

    def remember(self: SearchProblem, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        problems.append(self)

    def on_batch(_: Sequence[MeasureRequest]) -> None:
        if problems:
            bests.append(problems[0].baseline())

    patch = pytest.MonkeyPatch()
    patch.setattr(SearchProblem, "__init__", remember)
    try:
        job.tune(RecordedRunner(lambda program, _: 2**-10, on_batch=on_batch))
    finally:
        patch.undo()
    count = len(trained(job))
    assert bests and all(list(found) == [2**-10] * count for found in bests)
