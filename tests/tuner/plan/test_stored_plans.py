"""Plans in the database: sets that replace one another whole, the way back, and whether they still fit what is served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tuner_models import (
    PAPER_DEVICE,
    QUICK,
    add_environment,
    add_records,
    ok_record,
    paper_job,
    row_scale,
)
from typer.testing import CliRunner

from relax_tune.database.records import PlanRecord
from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.shapes import Histogram, ShapeProfile
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.cli.commands import plan as plan_command
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.plan import select
from relax_tune.tuner.plan.drift import ALLOWED, drift
from relax_tune.tuner.plan.plans import TaskPlan, plan_task
from relax_tune.tuner.plan.select import DispatchPlan, PlanEntry
from relax_tune.tuner.plan.stored_plans import plan_texts, read_plan
from relax_tune.tuner.task.domain import Domain

Answers = Mapping[int, Sequence[float]]
"""Seconds of the generic form and of one candidate, at some n."""
FAST_WHERE_SMALL: Answers = {1: (1e-6, 9e-6), 8: (2e-6, 9e-6), 64: (9e-5, 3e-5)}


def recorded(job: DeviceJob, answers: Answers) -> DeviceJob:
    """The job with these times on record."""
    job.store.add_target(job.target)
    environment = add_environment(job)
    (task_variants,) = job.task_variants.values()
    forms = (
        task_variants.sketch_set.generic(),
        task_variants.sketch_set.record_of(task_variants.sketch_set.seeds(1)[0]),
    )
    records = [
        ok_record(task_variants.task, job.target.key, form, (n,), secs, environment=environment)
        for n, both in answers.items()
        for form, secs in zip(forms, both, strict=True)
    ]
    add_records(job.store, task_variants.task, records)
    return job


def with_points(job: DeviceJob, points: Sequence[int]) -> DeviceJob:
    """The job with anchors of one's own."""
    (task_variants,) = job.task_variants.values()
    domain = Domain(tuple((n,) for n in points), (1 / len(points),) * len(points))
    task = replace(task_variants.task, domain=domain)
    vars(job)["task_variants"] = {task.name: replace(task_variants, task=task)}
    return job


def small_job() -> DeviceJob:
    return recorded(with_points(paper_job(row_scale), tuple(FAST_WHERE_SMALL)), FAST_WHERE_SMALL)


@pytest.mark.slow
def test_a_set_is_stored_once_and_replaced_whole() -> None:
    job = small_job()
    (task_variants,) = job.task_variants.values()
    with pytest.raises(UserError, match=r"got none.*relax-tune tune"):
        job.current_plans()
    built = job.build()
    job.store_plans(built)
    job.store_plans(built)
    (first,) = job.plan_sets()
    assert [p.version for p in job.store.plans(job.target.key)] == [1]
    (made,) = built.plans.values()
    plan, variants = first.plan(task_variants.task.key)
    assert plan.entries == made.plan.entries and set(variants) == set(plan.variants)
    only = DispatchPlan((PlanEntry((), task_variants.sketch_set.generic().key),), 0.0)
    other = replace(
        built,
        plans={
            task_variants.task.name: TaskPlan(
                only, {task_variants.sketch_set.generic().key: task_variants.sketch_set.generic()}, {}
            )
        },
    )
    job.store_plans(other)
    assert [s.name == first.name for s in job.plan_sets()] == [True, False]
    stored = job.build("stored").plans[task_variants.task.name]
    assert stored.plan.entries == only.entries != job.build().plans[task_variants.task.name].plan.entries
    job.store.put_plans(job.target.key, {w: r.entries for w, r in first.records.items()})  # the way back
    assert job.current_plans().name == first.name and len(job.store.plans(job.target.key)) == 3
    assert job.build("stored").plans[task_variants.task.name].plan.entries == made.plan.entries


@pytest.mark.slow
def test_stored_plan_with_lost_kernels_gives_way_to_records() -> None:
    job = small_job()
    (task_variants,) = job.task_variants.values()
    gone = replace(
        task_variants.sketch_set.record_of(task_variants.sketch_set.seeds(1)[0]),
        trace='[["split", {"loop": "nowhere"}]]',
    )
    plan = TaskPlan(DispatchPlan((PlanEntry((), gone.key),), 0.0), {gone.key: gone}, {})
    job.store_plans(replace(job.build(), plans={task_variants.task.name: plan}))
    built = job.build("stored")
    found = built.plans[task_variants.task.name]
    assert found.plan.entries == job.build().plans[task_variants.task.name].plan.entries and gone.key in found.lost
    assert any("can no longer be generated" in note for note in built.notes)


tests_of_one_symbol = st.builds(
    select.GuardTest, st.just((0,)), st.integers(0, 64), st.sampled_from([1, 8]), st.sampled_from([0, 2, 16])
)


@pytest.mark.slow
@given(st.lists(st.lists(st.tuples(tests_of_one_symbol, st.booleans()), max_size=3), max_size=4))
def test_plan_text_round_trips(guards: list[list[tuple[select.GuardTest, bool]]]) -> None:
    (task_variants,) = paper_job(row_scale).task_variants.values()
    generic = task_variants.sketch_set.generic()
    entries = (*(PlanEntry(tuple(g), generic.key) for g in guards if g), PlanEntry((), generic.key))
    (text,) = plan_texts("m", {"w": TaskPlan(DispatchPlan(entries, 0.0), {generic.key: generic}, {})}).values()
    plan, variants = read_plan(PlanRecord("w", "t" * 32, 1, text))
    assert plan.entries == entries and variants == {generic.key: generic}


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: [],
        lambda d: d | {"entries": []},
        lambda d: d | {"variants": {}},
        lambda d: d | {"entries": [{"tests": [[{"axes": [0], "threshold": 1, "divisor": 0, "modulus": 0}, True]], "variant": "x"}]},
        lambda d: d | {"entries": [d["entries"][-1] | {"tests": [[{"axes": []}, True]]}]},
        lambda d: d | {"variants": {k: v | {"sketch": "other"} for k, v in d["variants"].items()}},
    ],
)  # fmt: skip
def test_read_plan_of_other_text_is_refused(spoil: Any) -> None:
    job = small_job()
    job.store_plans(job.build())
    (record,) = job.store.plans(job.target.key)
    with pytest.raises(DatabaseError, match="tune again"):
        read_plan(replace(record, entries=json.dumps(spoil(json.loads(record.entries)))))


def at(*points: int) -> Domain:
    """Calls that ask for these, equally often."""
    share = (1 / len(points),) * len(points)
    return Domain(tuple((n,) for n in points), share, share)


def test_drift_predicts_loss_between_timed_shapes() -> None:
    job = small_job()
    (task_variants,) = job.task_variants.values()
    records = job.records(task_variants.task.key, task_variants.task.regime)
    fits = plan_task(task_variants, records)
    generic = DispatchPlan((PlanEntry((), task_variants.sketch_set.generic().key),), 0.0)
    kept = (fits.plan, {k: fits.variants[k] for k in fits.plan.variants})
    only = (generic, {task_variants.sketch_set.generic().key: task_variants.sketch_set.generic()})
    for domain in (at(1, 2, 5), at(1, 8, 40, 64), at(64)):
        assert drift(task_variants, records, kept, domain).regret <= ALLOWED
    assert drift(task_variants, records, only, at(1, 2, 5)).regret == 0
    assert drift(task_variants, records, only, at(64)).regret == pytest.approx(2.0)
    between = drift(task_variants, records, only, at(1, 64))  # 1 us and 90 us, where 1 us and 30 us would do
    assert between.regret == pytest.approx(60 / 31)
    beyond = drift(task_variants, records, only, at(1, 300))
    assert beyond.unmeasured == 0.5 and beyond.regret == 0


@pytest.mark.slow
def test_the_command_shows_checks_and_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "device_info", lambda *_: PAPER_DEVICE)
    model, db = tmp_path / "m.relax", f"sqlite:///{tmp_path / 'r.db'}"
    model.write_text(print_text(row_scale()))
    args = ["plan", str(model), "--target", "c", "--db", db, "--effort", "quick"]

    def run(*more: str) -> Any:
        done = CliRunner().invoke(app, [*args, *more])
        assert done.exit_code == 0, done.output
        return done

    with open_store(db) as store:
        job = device_job(plan_command.load_model(str(model), {}), PAPER_DEVICE, store, QUICK)
        points = [n for (n,) in next(iter(job.task_variants.values())).task.domain.points]
        recorded(job, {n: ((1e-6, 2e-6) if n < 20 else (9e-5, 1e-5)) for n in points})
        (name,) = job.task_variants
        generic = job.task_variants[name].sketch_set.generic()
        first = job.build()
        job.store_plans(
            replace(
                first,
                plans={name: TaskPlan(DispatchPlan((PlanEntry((), generic.key),), 0.0), {generic.key: generic}, {})},
            )
        )
        old = job.current_plans().name
        job.store_plans(first)
        profile = ShapeProfile(job.key)
    profile.add("main", "n", Histogram.of({points[-1]: 100}))
    profile.save(tmp_path / "served.json")
    served = ("--profile", str(tmp_path / "served.json"))
    assert old in run().output
    assert "nothing to tune again" in run("--check", *served).output
    found = json.loads(run("--restore", old, "--json").stdout)
    assert found["current"] == old and set(found["versions"].values()) == {3}
    checked = json.loads(run("--check", "--json", *served).stdout)
    assert checked["loss"] == pytest.approx(8.0) and checked["tune_again"] == [name]
    again = ("relax-tune", "tune", str(model), *args[2:], *served)  # and all that this command was told
    assert f"run `{shlex.join(again)}`" in run("--check", *served).output
    for wrong in (["--restore", "none-such"], ["--c", "x.c"], ["--check", "--restore", old]):
        done = CliRunner().invoke(app, [*args, *wrong])
        assert done.exit_code == 2 and done.stderr.startswith("error: ")
