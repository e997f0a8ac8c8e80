"""Weights that several variants or functions read have one layout, unless a second one gains much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, add_environment, add_records, ok_record

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.plan.layouts import Layouts, loss, share_layouts, weights_of
from relax_tune.tuner.plan.plans import TaskPlan, plan_task
from relax_tune.tuner.task.variants import TaskVariants


def products(*rows: int | None) -> IRModule:
    """Products of one weight by matrices of so many rows; None for n of them."""
    g = GraphBuilder()
    w = g.constant("w", np.random.default_rng(0).standard_normal((96, 192)).astype(np.float32))
    n = g.symbol("n", 1, 64)
    xs = [g.input(f"x{i}", (n if r is None else r, 96)) for i, r in enumerate(rows)]
    return g.finish([g.call(Matmul(), x, w) for x in xs])


def two_layouts(task_variants: TaskVariants, layouts: Layouts) -> list[VariantRecord]:
    """Tuned variants that pack the weight in two ways."""
    sketches, space = task_variants.sketch_set.sketches, task_variants.sketch_set.space
    (name,) = layouts.task_variants
    found: dict[str, VariantRecord] = {}
    for candidate in space.candidates(space.sample(np.random.default_rng(5), 200)):
        if sketches[candidate.sketch].name.endswith("panels.packed"):
            record = task_variants.sketch_set.record_of(candidate)
            layout = layouts.of(name, record)
            if layout is not None:
                found.setdefault(layout[1], record)
    return list(found.values())[:2]


def job_of_two(gain: float) -> DeviceJob:
    """A job whose records have variants of two layouts, each faster by a factor at every second anchor."""
    job = device_job(products(None), PAPER_DEVICE, MemoryStore(), QUICK)
    job.store.add_target(job.target)
    (task,), environment = job.tasks, add_environment(job)
    variants = two_layouts(job.task_variants[task.name], Layouts(job.task_variants))
    assert len(variants) == 2
    records = [
        ok_record(task, job.target.key, v, p, 1e-3 * (1 if at % 2 == k else gain), environment=environment)
        for at, p in enumerate(task.domain.points)
        for k, v in enumerate(variants)
    ]
    add_records(job.store, task, records)
    return job


@pytest.mark.parametrize(("gain", "layouts"), [(1.04, 1), (1.5, 2)])
def test_measured_plan_with_large_gain_has_second_layout(gain: float, layouts: int) -> None:
    job = job_of_two(gain)
    (plan,) = job.build().plans.values()
    (name,) = job.task_variants
    known = Layouts(job.task_variants)
    assert len({str(known.of(name, plan.variants[k])) for k in plan.plan.variants}) == layouts


def test_loss_is_the_weighted_log_time_between_two_plans() -> None:
    job = job_of_two(1.5)
    (plan,), (variants,) = job.build().plans.values(), job.task_variants.values()
    first = min(plan.times)
    one = replace(plan, plan=replace(plan.plan, entries=(replace(plan.plan.entries[-1], tests=(), variant=first),)))
    assert loss(plan, plan, plan.times, variants) == 0
    assert 0 < loss(one, plan, plan.times, variants) < math.log(1.5)
    assert loss(one, plan, {**plan.times, first: [None] * len(plan.times[first])}, variants) == math.inf


def test_functions_of_one_weight_share_layout() -> None:
    """Without sharing, the product with one row packs the weight into narrower panels than the one with many."""
    job = device_job(products(None, 1), PAPER_DEVICE, MemoryStore(), QUICK)
    built = job.build("predicted")
    artifact = job.artifact(built)
    assert len(artifact.constants) == 1 and artifact.constants.keys() != {"w"}
    assert _layouts(_unshared(job), job) == {"", *_layouts(built.plans, job)}


def test_share_layouts_with_expensive_restriction_keeps_plans() -> None:
    job = device_job(products(None, 1), PAPER_DEVICE, MemoryStore(), QUICK)
    plans, asked = _unshared(job), list[str]()

    def restrict(function: str, fits: object) -> tuple[TaskPlan, float]:
        asked.append(function)
        return plans[function], 1.01

    assert share_layouts(plans, job.lowered.module, Layouts(job.task_variants), restrict) == plans
    assert set(asked) == set(plans) and len(plans) == 2
    assert {n: set(by[1]) for n, by in weights_of(job.lowered.module).items()} == {n: {"w"} for n in plans}


def _unshared(job: DeviceJob) -> dict[str, TaskPlan]:
    tasks = job.task_variants.items()
    return {name: plan_task(variants, (), "predicted", predictor=job.predictor) for name, variants in tasks}


def _layouts(plans: Mapping[str, TaskPlan], job: DeviceJob) -> set[str]:
    known = Layouts(job.task_variants)
    found = [known.of(name, plan.variants[k]) for name, plan in plans.items() for k in plan.plan.variants]
    return {layout[1] for layout in found if layout is not None}
