"""Histories: what of a database is told to the search of a task, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, paper_job, row_scale

from relax_tune.database.records import Measurement, Target, Workload
from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.learn import warm_start
from relax_tune.tuner.learn.recorded_rows import roofline
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.search.base import Result, SearchProblem, TrainingRows
from relax_tune.tuner.search.strategies.evolution import ENOUGH, EvolutionarySearch
from relax_tune.tuner.task.task import FORMAT_VERSION, points_array
from relax_tune.tuner.task.variants import TaskVariants

OTHER = Target(PAPER_DEVICE.kind, "another", (("compiler", "newer"),))


def product(inner: int, outer: int, rows: int = 256) -> IRModule:
    """(n, inner) by (inner, outer)."""
    g = GraphBuilder()
    n = g.symbol("n", 1, rows)
    weight = g.constant("w", np.zeros((inner, outer), np.float32))
    return g.finish(g.call(Matmul(), g.input("x", (n, inner)), weight))


def job_of(module: IRModule) -> DeviceJob:
    return device_job(module, PAPER_DEVICE, MemoryStore(), QUICK)


@pytest.fixture(scope="module")
def small() -> TaskVariants:
    return next(iter(job_of(product(96, 160)).task_variants.values()))


@pytest.fixture(scope="module")
def wide() -> TaskVariants:
    return next(iter(job_of(product(128, 512)).task_variants.values()))


def seconds(task_variants: TaskVariants, codes: Any, points: Any) -> Any:
    """A machine made of the features alone: flops over the lanes in use, and the bytes that tiles load again."""
    functions = {f: i for i, f in enumerate(feature_names(task_variants))}
    f = task_variants.sketch_set.space.features(codes, points).astype(np.float64)
    log = {n: f[:, :, i] for n, i in functions.items()}
    work = log["flops"] + 2.0 * np.abs(log["registers"] - 4) - 1.5 * log["lane_use"] + log["padding"]
    return 1e-9 * (np.exp2(0.7 * work) + np.exp2(0.5 * log["traffic"] + log["loads_per_point"]))


def feature_names(task_variants: TaskVariants) -> tuple[str, ...]:
    return FeatureFunction(task_variants.sketch_set.sketches[0], task_variants.hardware).names


def records(
    task_variants: TaskVariants, target: str, count: int, points: Sequence[Sequence[int]], seed: int = 0
) -> list[Measurement]:
    codes = task_variants.sketch_set.space.sample(np.random.default_rng(seed), count)
    times = seconds(task_variants, codes, points_array(points))
    found = []
    for number, candidate in enumerate(task_variants.sketch_set.space.candidates(codes)):
        variant = task_variants.sketch_set.record_of(candidate)
        for spot, point in enumerate(points):
            symbols = {f"s{a}": x for a, x in enumerate(point)}
            text = f"{variant.key}-{target[:6]}.{spot}"
            if number % 10 == 9:
                failed: dict[str, Any] = {"status": "failed", "stage": "compile", "message": "no"}
                found.append(Measurement(text, task_variants.task.key, target, variant, **failed))
                break
            samples = (float(times[number, spot]),) * 3
            found.append(
                Measurement(text, task_variants.task.key, target, variant, symbols, samples_secs=samples, checked=True)
            )
    return found


def store_with(task_variants: TaskVariants, made: Sequence[Measurement], order: int | None = None) -> MemoryStore:
    store = MemoryStore()
    store.add_target(Target(PAPER_DEVICE.kind, PAPER_DEVICE.name, PAPER_DEVICE.fingerprint))
    store.add_target(OTHER)
    store.add_workload(
        Workload(task_variants.task.key, task_variants.task.text, FORMAT_VERSION, task_variants.task.name)
    )
    rows = list(made)
    if order is not None:
        rows = [rows[int(i)] for i in np.random.default_rng(order).permutation(len(rows))]
    for record in rows:
        store.add_measurements([record])
    return store


HERE = Target(PAPER_DEVICE.kind, PAPER_DEVICE.name, PAPER_DEVICE.fingerprint).key
POINTS = ((8,), (200,))


def history(store: MemoryStore, of: TaskVariants, model: set[str] | None = None) -> TrainingRows | None:
    return RecordedHistory(store, HERE, {of.task.key} if model is None else model).rows(of.sketch_set)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["other shapes", "another device", "another task"])
def test_each_source_is_told(small: TaskVariants, wide: TaskVariants, source: str) -> None:
    of = wide if source == "another task" else small
    store = store_with(of, records(of, OTHER.key if source == "another device" else HERE, 40, POINTS))
    found = history(store, small)
    assert found is not None and found.features.dtype == np.float32
    example = small.sketch_set.space.features(
        small.sketch_set.space.sample(np.random.default_rng(0), 3), points_array(small.task.domain.points)
    )
    assert found.features.shape == (len(found.log_time), example.shape[2]) and len(found.log_time) >= 24
    assert set(found.groups.tolist()) == {0, 1} and np.isnan(found.log_time).any()
    assert np.isfinite(found.features[:, : len(feature_names(small))]).all()
    # the very features the search computes: the best-known row is described as its own candidate would be
    assert np.nanmin(found.log_time) > -12 and np.nanmax(found.log_time) < 12


def test_history_leaves_out_unusable_records(small: TaskVariants, wide: TaskVariants) -> None:
    anchors = small.task.domain.points
    assert (
        history(store_with(small, records(small, HERE, 20, anchors)), small) is None
    )  # those are told to the search itself
    assert history(store_with(small, []), small) is None
    made = records(wide, HERE, 40, POINTS)
    assert history(store_with(wide, made), small, {small.task.key, wide.task.key}) is None  # tuned by the same job
    stranger = Target("opencl", "gpu")
    store = store_with(small, [])
    store.add_target(stranger)
    store.add_measurements(records(small, stranger.key, 20, POINTS))
    assert history(store, small) is None
    odd = [
        replace(r, id=f"odd{i}", variant=replace(r.variant, **change))
        for i, (r, change) in enumerate(
            zip(
                made,
                [
                    {"trace": '{"tunables": {}, "steps": [["nothing", {}]]}'},
                    {"trace": "[]"},
                    {"parameters": '{"RB": 3}'},
                ],
            )
        )
    ]
    odd += [replace(made[3], id="unchecked", checked=False), replace(made[4], id="elsewhere", symbols={"q": 5})]
    assert history(store_with(wide, odd), small) is None


@pytest.mark.slow
def test_any_order_of_records_gives_the_same_history_and_the_same_candidates(
    small: TaskVariants, wide: TaskVariants
) -> None:
    made = records(wide, HERE, 120, POINTS)
    found = [history(store_with(wide, made, order), small) for order in (None, 1, 2)]
    asked = []
    for rows in found:
        assert rows is not None
        assert np.array_equal(rows.features, found[0].features, equal_nan=True)  # type: ignore[union-attr]
        problem = SearchProblem(
            small.sketch_set.space, points_array(small.task.domain.points), history=lambda rows=rows: rows
        )
        asked.append(EvolutionarySearch(problem, np.random.default_rng(3)).ask(8))
    assert asked[0] == asked[1] == asked[2]
    cold = EvolutionarySearch(
        SearchProblem(small.sketch_set.space, points_array(small.task.domain.points)), np.random.default_rng(3)
    )
    assert cold.ask(8) != asked[0]


def test_the_cost_is_bounded(small: TaskVariants, wide: TaskVariants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "OTHER_ROWS", 20)
    asked: list[int | None] = []

    class Counting(MemoryStore):
        def query(self, *args: Any, **more: Any) -> Any:
            asked.append(more.get("limit"))
            return super().query(*args, **more)

    plain = store_with(wide, records(wide, HERE, 200, POINTS))
    store = Counting()
    store.__dict__.update(plain.__dict__)
    found = history(store, small)
    assert found is not None and len(found.log_time) <= 20
    assert asked and all(limit is not None and limit <= 4 * warm_start.OWN_ROWS for limit in asked)


@pytest.mark.slow
def test_history_of_another_task_speeds_up_search(small: TaskVariants, wide: TaskVariants) -> None:
    """Sixteen trials of one product with and without the records of a wider one; times are those of `seconds`."""
    rows = history(store_with(wide, records(wide, HERE, 150, POINTS)), small)
    points = points_array(small.task.domain.points)
    scale, weights = roofline(small.sketch_set.space, points, small.hardware), list(small.task.domain.weights)

    def reached(told: TrainingRows | None, seed: int) -> float:
        problem = SearchProblem(small.sketch_set.space, points, weights, scale, history=lambda: told)
        search, best = EvolutionarySearch(problem, np.random.default_rng(seed)), np.inf
        for _ in range(2):
            asked = search.ask(8)
            times = seconds(small, small.sketch_set.space.encode(asked), points)
            search.tell([Result(c, dict(enumerate(map(float, t)))) for c, t in zip(asked, times)])
            best = min(best, float((np.log(times) @ np.asarray(weights)).min()))
        return best

    warm, cold = ([reached(told, seed) for seed in range(4)] for told in (rows, None))
    assert np.mean(warm) < np.mean(cold) and max(warm) <= max(cold)


@pytest.mark.slow
def test_the_loop_reads_the_records_of_another_model() -> None:
    """The same seed asks other candidates once there is a history, and the same ones again with the same history."""
    store = MemoryStore()
    paper_job(row_scale, store, replace(QUICK, trials=10)).tune(RecordedRunner())

    def programs(first: MemoryStore) -> list[list[str]]:
        runner = RecordedRunner()
        job = device_job(softmax_of(24), PAPER_DEVICE, first, replace(QUICK, trials=8))
        job.tune(runner)
        return [sorted(r.program_json for r in batch) for batch in runner.batches]

    assert len(store.query(HERE, kinds=("tuned",), status="ok")) > ENOUGH
    warm, cold = programs(copied(store)), programs(MemoryStore())
    assert warm != cold and warm == programs(copied(store))


def softmax_of(width: int) -> IRModule:
    g = GraphBuilder()
    return g.finish(g.call(Softmax(), g.input("x", (g.symbol("n", 1, 64), width))))


def copied(store: MemoryStore) -> MemoryStore:
    fresh = MemoryStore()
    for environment in store.environments():
        fresh.add_environment(environment)
    for target in store.targets():
        fresh.add_target(target)
        for workload in store.workloads(target.key):
            fresh.add_workload(workload)
        fresh.add_measurements(store.query(target.key))
    return fresh


def test_fastest_of_similar_functions_are_tried_first(small: TaskVariants, wide: TaskVariants) -> None:
    made = records(wide, HERE, 40, POINTS)
    found = RecordedHistory(store_with(wide, made), HERE, {small.task.key}).of_similar_functions(small.sketch_set, 4)
    assert found and all(small.sketch_set.space.contains(c) for c in found)
    timed = [m for m in made if m.status == "ok" and m.symbols == {"s0": 200}]
    best = min(timed, key=lambda m: m.median_secs).variant
    like = small.sketch_set.similar_candidate(best)
    if like is not None:
        assert like in found and small.sketch_set.sketches[like.sketch].name == best.sketch
    assert RecordedHistory(store_with(wide, []), HERE, {small.task.key}).of_similar_functions(small.sketch_set, 4) == []
    assert (
        RecordedHistory(store_with(wide, made), HERE, {small.task.key, wide.task.key}).of_similar_functions(
            small.sketch_set, 4
        )
        == []
    )


def test_candidate_like_needs_the_sketch_and_equal_tunables(small: TaskVariants, wide: TaskVariants) -> None:
    candidate = wide.sketch_set.space.candidates(wide.sketch_set.space.sample(np.random.default_rng(1), 1))[0]
    variant = wide.sketch_set.record_of(candidate)
    assert wide.sketch_set.similar_candidate(variant) == candidate
    assert small.sketch_set.similar_candidate(replace(variant, sketch="no such")) is None
    assert small.sketch_set.similar_candidate(replace(variant, parameters="{}")) is None
