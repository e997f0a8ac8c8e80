"""The build: a pure function of the records' set, and which records may win."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.tuner_models import (
    PAPER_DEVICE,
    QUICK,
    RecordedRunner,
    add_records,
    attention,
    feed_forward,
    ok_record,
    paper_job,
    row_scale,
    task_variants_of,
)

from relax_tune.database.records import Environment, Measurement, Target, Workload
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.errors import UserError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.program.program import program_from_json
from relax_tune.schedules.sketch import generate_sketches, iter_sketches
from relax_tune.tuner.emit.build import check_policy
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.plan.plans import plan_task, times_of
from relax_tune.tuner.plan.select import NOISE
from relax_tune.tuner.task import sketch_set as sketch_set_module

FOUR = replace(QUICK, trials=4)
Make = Callable[[], IRModule]


def answer(program: Any, symbols: Any) -> float | str:
    """The winner changes over the range: kernels have a start-up cost and a rate that depend on their text."""
    size = sum(len(k.source) for k in program.kernels) % 97
    return 1e-6 * (1 + size) + 1e-9 * (97 - size) * sum(symbols.values()) ** 2


@cache
def _tuned(make: Make) -> tuple[DeviceJob, list[Measurement]]:
    job = paper_job(make, settings=FOUR)
    job.tune(RecordedRunner(answer))
    return job, [r for t in job.tasks for r in job.store.query(job.target.key, t.key)]


def filled(job: DeviceJob, store: Store, records: Sequence[Measurement]) -> Store:
    store.add_target(job.target)
    store.add_environment(Environment(tuple(job.libraries.items())))
    for task in job.tasks:
        add_records(store, task, [r for r in records if r.workload == task.key])
    return store


@pytest.mark.slow
@pytest.mark.parametrize("make", [feed_forward, attention])
def test_other_orders_and_stores_give_the_same_bytes(make: Make, tmp_path: Path) -> None:
    job, records = _tuned(make)
    built = job.build()
    assert any(len(p.plan.entries) > 1 for p in built.plans.values())
    expected = job.artifact(built).save(tmp_path / "first.rta").read_bytes()
    shuffled = list(records)
    for number in range(2):
        random.Random(number).shuffle(shuffled)
        url = f"sqlite:///{tmp_path / f'{number}.db'}"
        with MemoryStore() if number == 0 else open_store(url) as store:
            for r in shuffled[:10]:  # some come alone, some together, some twice
                filled(job, store, [r])
            filled(job, store, shuffled)
            other = paper_job(make, store, FOUR, fresh=number == 1)
            again = other.build()
            assert again.program.to_json() == built.program.to_json()
            assert other.artifact(again).save(tmp_path / f"{number}.rta").read_bytes() == expected


BUILD = """
import sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from relax_tune.database.store import open_store
from tests.support import tuner_models

job = tuner_models.paper_job(tuner_models.feed_forward, open_store(sys.argv[2], read_only=True),
                             replace(tuner_models.QUICK, trials=4))
job.artifact(job.build()).save(sys.argv[3])
"""


@pytest.mark.process
def test_another_process_with_another_hash_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    job, records = _tuned(feed_forward)
    expected = job.artifact(job.build()).save(tmp_path / "here.rta").read_bytes()
    url = f"sqlite:///{tmp_path / 't.db'}"
    with open_store(url) as store:
        filled(job, store, records)
    root = str(Path(__file__).parents[3])
    for seed in ("2718",):
        path = tmp_path / f"{seed}.rta"
        subprocess.run(
            [sys.executable, "-c", BUILD, root, url, str(path)], check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        assert path.read_bytes() == expected


def test_a_build_does_not_change_the_store() -> None:
    job, _ = _tuned(feed_forward)
    before = [job.store.query(job.target.key, t.key) for t in job.tasks]
    job.build()
    assert [job.store.query(job.target.key, t.key) for t in job.tasks] == before
    assert not job.store.plans(job.target.key)


def test_program_verifies_and_follows_the_plan() -> None:
    job, _ = _tuned(feed_forward)
    built = job.build()
    assert program_from_json(built.program.to_json()) == built.program
    for call in built.program.calls:
        plan = next(p for p in built.plans.values() if p.plan.variants == tuple(v.key for v in call.variants))
        assert [v.label for v in call.variants] == [plan.variants[k].kind for k in plan.plan.variants]


def test_build_without_records_dispatches_predicted_kernels_with_a_note() -> None:
    job = paper_job(feed_forward)
    built = job.build()
    assert {v.label for c in built.program.calls for v in c.variants} == {"predicted"}
    assert len(built.notes) == len(job.tasks)
    assert all("predicted" in n and "relax-tune tune" in n for n in built.notes)
    tuned, _ = _tuned(feed_forward)
    assert tuned.build().notes == ()


@pytest.mark.parametrize("policy", ["library", "generic"])
def test_policies_narrow_the_choice(policy: Any) -> None:
    job, _ = _tuned(feed_forward)
    for plan in job.build(policy).plans.values():
        kinds = {plan.variants[k].kind for k in plan.plan.variants}
        assert kinds == {policy} or (
            policy == "library" and not any(v.kind == "library" for v in plan.variants.values())
        )


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(UserError, match="measured, stored, predicted, library, generic; got 'best'"):
        check_policy("best")


# -- who may win ------------------------------------------------------------------------------------------------------


class Stage:
    """One task with a fast and a slow candidate, whose records a test can spoil."""

    def __init__(self, make: Make = row_scale) -> None:
        self.job = paper_job(make)
        self.task = self.job.tasks[0]
        self.task_variants = self.job.task_variants[self.task.name]
        self.fast, self.slow = (
            self.task_variants.sketch_set.record_of(c) for c in self.task_variants.sketch_set.seeds(2)
        )

    def records(self, variant: Any, seconds: float, **more: Any) -> list[Measurement]:
        return [ok_record(self.task, self.job.target.key, variant, p, seconds, **more) for p in self.task.domain.points]

    def winners(self, *records: Measurement) -> set[str]:
        return set(plan_task(self.task_variants, records).plan.variants)


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


def test_the_faster_wins(stage: Stage) -> None:
    slow = stage.records(stage.slow, 1e-3)
    assert stage.winners(*stage.records(stage.fast, 1e-6), *slow) == {stage.fast.key}


def test_unchecked_records_never_win(stage: Stage) -> None:
    slow = stage.records(stage.slow, 1e-3)
    assert stage.winners(*stage.records(stage.fast, 1e-6, checked=False), *slow) == {stage.slow.key}
    assert stage.winners(*stage.records(stage.fast, 1e-6, checked=False)) == {
        stage.task_variants.sketch_set.best_guess().key
    }


@pytest.mark.parametrize("where", [0, -1])
def test_failed_variant_never_wins(stage: Stage, where: int) -> None:
    task, target = stage.task, stage.job.target.key
    failure = Measurement("f", task.key, target, stage.fast, {}, "failed", "wrong-result", "element 3 is off")
    records = stage.records(stage.fast, 1e-6)
    records.insert(where % (len(records) + 1), failure)
    assert stage.winners(*records, *stage.records(stage.slow, 1e-3)) == {stage.slow.key}


def test_a_failed_generic_form_is_dispatched_only_with_a_note(stage: Stage) -> None:
    generic = stage.task_variants.sketch_set.generic()
    failure = Measurement("f", stage.task.key, stage.job.target.key, generic, {}, "failed", "wrong-result", "is off")
    job = paper_job(row_scale)
    filled(job, job.store, [failure])
    assert any("wrong-result" in n and "is off" in n for n in job.build("generic").notes)


def test_records_of_another_target_never_win(stage: Stage) -> None:
    store = MemoryStore()
    other = Target(PAPER_DEVICE.kind, "another device")
    store.add_target(other)
    job = paper_job(row_scale, store)
    filled(job, store, stage.records(stage.slow, 1e-3))
    foreign = [replace(r, id=f"o{n}", target=other.key) for n, r in enumerate(stage.records(stage.fast, 1e-6))]
    add_records(store, stage.task, foreign)
    assert store.count(other.key) == len(foreign)
    (plan,) = job.build().plans.values()
    assert plan.plan.variants == (stage.slow.key,)


def test_zero_times_and_other_shapes_say_nothing(stage: Stage) -> None:
    slow = stage.records(stage.slow, 1e-3)
    elsewhere = ok_record(stage.task, stage.job.target.key, stage.fast, (10**6,), 1e-6)
    assert stage.winners(*stage.records(stage.fast, 0.0), elsewhere, *slow) == {stage.slow.key}


def test_all_samples_of_a_variant_count(stage: Stage) -> None:
    first = stage.records(stage.fast, 1e-6)
    again = [replace(r, id=f"{r.id}b", samples_secs=(5e-6,) * 7) for r in first]
    times, _ = times_of(stage.task_variants, [*first, *again])
    assert times[stage.fast.key] == [5e-6] * len(first)


@pytest.mark.parametrize("records", ["not a trace", "value outside its domain", "no such tunable"])
def test_inapplicable_record_is_passed_over(stage: Stage, records: str) -> None:
    trace = json.loads(stage.fast.trace)
    odd = {
        "not a trace": replace(stage.fast, trace="[1, 2]"),
        "value outside its domain": replace(stage.fast, parameters=json.dumps(dict.fromkeys(stage.fast.values, 77))),
        "no such tunable": replace(stage.fast, trace=json.dumps(trace | {"tunables": {}}), parameters="{}"),
    }[records]
    for kind in ("tuned", "library", "generic"):
        spoiled = stage.records(replace(odd, kind=kind), 1e-7)
        assert stage.winners(*spoiled, *stage.records(stage.slow, 1e-3)) == {stage.slow.key}
        assert stage.winners(*spoiled) == {stage.task_variants.sketch_set.best_guess().key}


def test_removed_sketch_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No rule makes it: found out only when the winner is put together."""
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    stage = Stage()
    job = paper_job(row_scale, fresh=True)
    (task_variants,) = job.task_variants.values()

    def fewer(func: Any, machine: Any, rules: Any = None) -> Any:
        return tuple(s for s in generate_sketches(func, machine, rules) if s.trace.to_json() != stage.fast.trace)

    monkeypatch.setattr(sketch_set_module, "iter_sketches", fewer)
    records = [*stage.records(stage.fast, 1e-6), *stage.records(stage.slow, 1e-3)]
    assert plan_task(task_variants, records).plan.variants == (stage.slow.key,)
    job.store.add_target(job.target)
    job.store.add_workload(Workload(task_variants.task.key, task_variants.task.text, 1, task_variants.task.name))
    job.store.add_measurements(records)
    (note,) = job.build().notes
    assert "1 of the kernels on record" in note and "of another version or hand" in note and "relax-tune tune" in note


@pytest.mark.parametrize("change", ["steps", "values", "name", "long", "parts"])
def test_record_of_another_hand_is_not_dispatched(change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A legal trace whose steps, numbers or name our rules would not make, with the best times on record."""
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    stage = Stage()
    trace = json.loads(stage.fast.trace)
    loop = next(args["loop"] for name, args in trace["steps"] if name == "split")
    more = {"tunables": {}, "steps": [["split", {"divides": False, "factors": [None, 2], "loop": loop}]]}
    nested = ["tuned", stage.fast.sketch, trace]
    odd = {
        "steps": replace(stage.fast, trace=json.dumps(more), parameters="{}"),
        "values": replace(stage.fast, parameters=json.dumps(dict.fromkeys(stage.fast.values, 3))),
        "name": replace(stage.fast, sketch="another"),
        "long": replace(stage.fast, trace=json.dumps(more | {"steps": more["steps"] * 100}), parameters="{}"),
        "parts": replace(stage.fast, trace=json.dumps({"parts": [nested], "begins": []}, separators=(",", ":"))),
    }[change]
    forbidden: list[str] = []
    monkeypatch.setattr(sketch_set_module, "replay_with", lambda trace, *_: forbidden.append(trace))
    assert stage.winners(*stage.records(odd, 1e-9), *stage.records(stage.slow, 1e-3)) == {stage.slow.key}
    assert forbidden == []


def test_record_found_to_be_own_is_replayed_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    stage = Stage()
    first = replace(stage.task_variants)
    made = first.stages(stage.fast)
    later = replace(stage.task_variants)

    def no_sketches(*_: Any) -> Iterator[Any]:
        yield pytest.fail("expected no sketches generated again")

    monkeypatch.setattr(sketch_set_module, "iter_sketches", no_sketches)
    (again,), (before,) = later.stages(stage.fast), made
    assert structural_equal(again.func, before.func)


def test_records_of_one_task_make_each_sketch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    task_variants = replace(stage.task_variants)
    made: list[str] = []

    def counted(func: Any, machine: Any, rules: Any) -> Any:
        for sketch in iter_sketches(func, machine, rules):
            made.append(sketch.name)
            yield sketch

    monkeypatch.setattr(sketch_set_module, "iter_sketches", counted)
    found = [
        task_variants.sketch_set.sketch_of(variant) for variant in (stage.slow, stage.fast, stage.slow, stage.fast)
    ]
    assert found[0] is found[2] is not None and found[1] is found[3] is not None
    assert 0 < len(made) <= len(generate_sketches(stage.task.func, task_variants.hardware))
    assert task_variants.sketch_set.sketch_of(replace(stage.fast, sketch="another")) is None


def test_a_kernel_must_beat_the_library_beyond_noise() -> None:
    stage = Stage(feed_forward)
    (library, *_) = stage.task_variants.library.variants
    measured = stage.records(library, 1.0)
    near, far = stage.records(stage.fast, 1.0 / (1 + NOISE) + 0.005), stage.records(stage.fast, 0.9)
    assert stage.winners(*measured, *near) == {library.key}
    assert stage.winners(*measured, *far) == {stage.fast.key}


def test_records_of_missing_library_do_not_win() -> None:
    stage = Stage(feed_forward)
    (library, *_) = stage.task_variants.library.variants
    without = replace(stage.task_variants, alternatives=())
    records = [*stage.records(library, 1e-6), *stage.records(stage.slow, 1e-3)]
    assert set(plan_task(without, records).plan.variants) == {stage.slow.key}


def test_library_variants_keep_recorded_keys() -> None:
    task = next(iter(paper_job(feed_forward).task_variants.values())).task
    found = {v.sketch: v.key[:10] for v in task_variants_of(task.func, task.domain).library.variants}
    assert found == {
        "openblas.sgemm+injective.parallel": "393e0077e3",
        "openblas.sgemm+injective.serial": "d9b3bfe533",
    }
