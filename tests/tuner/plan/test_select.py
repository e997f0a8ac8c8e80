"""Selection: optimal over guard trees, total, deterministic, and by measurement beyond noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import UserError
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder, evaluate
from relax_tune.tuner.emit.emit_graph import guard_slot
from relax_tune.tuner.plan.select import LEAF_COST, DispatchPlan, GuardTest, select, standard_error
from relax_tune.tuner.task.domain import Domain, Point

Times = dict[str, list[float | None]]


def domain_of(points: Sequence[Point], weights: Sequence[float] | None = None) -> Domain:
    total = sum(weights) if weights else len(points)
    return Domain(tuple(points), tuple(w / total for w in (weights or [1.0] * len(points))))


@st.composite
def problems(draw: st.DrawFn, dims: int = 1, most: int = 5) -> tuple[Times, Domain]:
    point = st.tuples(*[st.sampled_from((1, 2, 3, 7, 30, 200))] * dims)
    points = sorted(draw(st.sets(point, min_size=1, max_size=most)))
    weights = draw(st.lists(st.floats(0.1, 1), min_size=len(points), max_size=len(points)))
    time = st.sampled_from((1e-6, 1.02e-6, 2e-6, 3e-6, 1e-5))
    times: Times = {"g": draw(st.lists(time, min_size=len(points), max_size=len(points)))}
    for key in draw(st.sets(st.sampled_from("abc"), max_size=3)):
        times[key] = draw(st.lists(time | st.none(), min_size=len(points), max_size=len(points)))
    return times, domain_of(points, weights)


def loss(times: Times, domain: Domain, chosen: Sequence[str]) -> float:
    total = 0.0
    for a, key in enumerate(chosen):
        t = times[key][a]
        best = min(x for row in times.values() if (x := row[a]) is not None)
        total += math.inf if t is None else domain.weights[a] * math.log(t / best)
    return total


def leaves(plan: DispatchPlan) -> int:
    return len(plan.entries)


@settings(max_examples=examples(80), deadline=None)
@given(problems())
def test_one_symbol_is_solved_as_well_as_brute_force(problem: tuple[Times, Domain]) -> None:
    times, domain = problem
    plan = select(times, domain)
    found = loss(times, domain, [plan.choose(p) for p in domain.points]) + LEAF_COST * (leaves(plan) - 1)
    best = math.inf
    for chosen in itertools.product(sorted(times), repeat=len(domain.points)):
        runs = 1 + sum(a != b for a, b in zip(chosen, chosen[1:]))
        best = min(best, loss(times, domain, chosen) + LEAF_COST * (runs - 1))
    assert found == pytest.approx(best, abs=1e-9)


def brute(times: Times, domain: Domain, members: frozenset[int]) -> float:
    """The best guard tree over `members`: all splits of either symbol or their product, tried without memory."""
    best = min(
        sum(
            math.inf if (t := times[k][a]) is None else domain.weights[a] * math.log(t / _best(times, a))
            for a in members
        )
        for k in times
    )
    for value in (lambda p: p[0], lambda p: p[1], lambda p: p[0] * p[1]):
        levels = sorted({value(domain.points[a]) for a in members})
        for cut in levels[:-1]:
            low = frozenset(a for a in members if value(domain.points[a]) <= cut)
            best = min(best, brute(times, domain, low) + brute(times, domain, members - low) + LEAF_COST)
    return best


def _best(times: Times, anchor: int) -> float:
    return min(x for row in times.values() if (x := row[anchor]) is not None)


@settings(max_examples=examples(30), deadline=None)
@given(problems(dims=2, most=4))
def test_two_symbols_are_solved_as_well_as_every_tree(problem: tuple[Times, Domain]) -> None:
    times, domain = problem
    plan = select(times, domain)
    found = loss(times, domain, [plan.choose(p) for p in domain.points])
    # merging equal neighbours can only save leaves
    assert found + LEAF_COST * (leaves(plan) - 1) <= brute(times, domain, frozenset(range(len(domain.points)))) + 1e-9


@settings(max_examples=examples(40), deadline=None)
@given(problems(dims=2), st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), max_size=5))
def test_every_point_gets_a_variant(problem: tuple[Times, Domain], far: list[Point]) -> None:
    times, domain = problem
    plan = select(times, domain)
    assert plan.entries[-1].tests == ()
    for point in [*far, (0, 0), (1, 10**15), *domain.points]:
        assert plan.choose(point) in times
    for a, point in enumerate(domain.points):
        assert times[plan.choose(point)][a] is not None


@settings(max_examples=examples(30), deadline=None)
@given(problems(dims=2), st.randoms())
def test_the_order_of_variants_leaves_no_mark(problem: tuple[Times, Domain], random: object) -> None:
    times, domain = problem
    keys = list(times)
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert select({k: times[k] for k in keys}, domain) == select(times, domain)


def test_a_kernel_within_noise_of_the_library_does_not_win() -> None:
    domain = domain_of([(1,), (8,), (64,)])
    times: Times = {"tuned": [0.98, 0.98, 0.98], "library": [1.0, 1.0, 1.0]}
    assert select(times, domain, libraries={"library"}).variants == ("library",)
    times["tuned"] = [0.9, 0.9, 0.9]
    assert select(times, domain, libraries={"library"}).variants == ("tuned",)
    noisy = {"tuned": [0.08] * 3, "library": [0.08] * 3}
    assert select(times, domain, noisy, libraries={"library"}).variants == ("library",)


def test_select_counts_agreeing_neighbours_as_evidence() -> None:
    """6 % faster with errors of 2.5 % each says nothing at one shape; at six beside each other it does, unless they contradict."""
    domain = Domain(tuple((2**e,) for e in range(6)), (1 / 6,) * 6)
    errors = {k: [0.025] * 6 for k in ("kernel", "library")}
    library = [1.0] * 6
    faster = select({"kernel": [0.94] * 6, "library": library}, domain, errors, {"library"})
    assert faster.variants == ("kernel",)
    either = select({"kernel": [0.94, 1.06] * 3, "library": library}, domain, errors, {"library"})
    assert either.variants == ("library",)
    alone = Domain(domain.points[:1], (1.0,))
    one = {k: [0.025] for k in errors}
    assert select({"kernel": [0.94], "library": [1.0]}, alone, one, {"library"}).variants == ("library",)


def test_ties_go_to_the_smaller_key_and_fewer_leaves() -> None:
    domain = domain_of([(1,), (8,), (64,)])
    assert select({"b": [1.0] * 3, "a": [1.0] * 3}, domain).variants == ("a",)
    nearly: Times = {"a": [1.0, 1.0, 1.0], "b": [0.999, 1.001, 0.999]}
    assert leaves(select(nearly, domain)) == 1
    apart: Times = {"a": [1.0, 1.0, 5.0], "b": [5.0, 5.0, 1.0]}
    plan = select(apart, domain)
    assert [plan.choose(p) for p in ((1,), (8,), (64,))] == ["a", "a", "b"] and leaves(plan) == 2
    assert plan.choose((9,)) == "a" and plan.choose((63,)) == "b"  # the border lies between the anchors
    assert plan.regret == pytest.approx(0.0)


def test_select_shape_without_measurement_error_names_the_shape() -> None:
    with pytest.raises(UserError, match=r"\(8,\)"):
        select({"a": [1.0, None], "b": [2.0, None]}, domain_of([(1,), (8,)]))


def test_select_variant_without_time_is_not_chosen() -> None:
    plan = select({"fast": [0.1, None, 0.1], "slow": [1.0, 1.0, 1.0]}, domain_of([(1,), (8,), (64,)]))
    assert [plan.choose(p) for p in ((1,), (8,), (64,))] == ["fast", "slow", "fast"]
    assert plan.regret == pytest.approx(0.0)


def test_a_task_without_symbols_has_one_entry() -> None:
    plan = select({"a": [2.0], "b": [1.0]}, Domain(((),), (1.0,)))
    assert plan.choose(()) == "b" and leaves(plan) == 1


# -- noise ------------------------------------------------------------------------------------------------------------


def test_a_switch_gains_more_than_noise() -> None:
    domain = domain_of([(1,), (8,), (64,)])
    times: Times = {"a": [1.0, 1.0, 1.2], "b": [1.3, 1.3, 1.0]}
    assert len(select(times, domain).variants) == 2
    unsure = {"a": [0.02, 0.02, 0.3], "b": [0.02, 0.02, 0.3]}
    assert select(times, domain, unsure).variants == ("a",)
    assert len(select(times, domain, {k: [0.02] * 3 for k in times}).variants) == 2


def test_differences_within_noise_add_up() -> None:
    """What is a little faster nearly everywhere serves all shapes, although none of them tells alone."""
    domain = domain_of([(2**e,) for e in range(8)])
    times: Times = {"a": [1.0] * 8, "b": [0.95, 0.96, 0.94, 0.95, 1.01, 0.95, 0.96, 0.95]}
    assert select(times, domain, {k: [0.05] * 8 for k in times}).variants == ("b",)


def test_select_several_likely_differences_outweigh_one_sure() -> None:
    domain = domain_of([(2**e,) for e in range(4)])
    times: Times = {"a": [1.0, 1.1, 1.1, 1.1], "b": [1.02, 1.0, 1.0, 1.0]}
    errors = {k: [0.001, 0.05, 0.05, 0.05] for k in times}
    assert select(times, domain, errors).variants == ("b",)


@pytest.mark.slow
@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=9), st.floats(1e-9, 1e3))
def test_the_error_of_a_median_is_relative_and_shrinks(samples: list[float], scale: float) -> None:
    error = standard_error(samples)
    assert standard_error([scale * s for s in samples]) == pytest.approx(error, rel=1e-6, abs=1e-12)
    assert standard_error(samples * 4) == pytest.approx(error / 2, rel=1e-6, abs=1e-12)
    assert standard_error(samples[:1]) > 0


# -- many shapes --------------------------------------------------------------------------------------------------------


@st.composite
def surfaces(draw: st.DrawFn, dims: int) -> tuple[Times, Domain]:
    """Many shapes; each variant good around some sizes, and a few times missing."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    count = draw(st.integers(9, 60))
    points = sorted({tuple(int(x) for x in np.exp(rng.uniform(0, 8, dims)).round()) for _ in range(count)})
    times: Times = {"g": [float(3 + rng.uniform(0, 0.2)) for _ in points]}
    for key in "abcd"[: draw(st.integers(0, 4))]:
        middle, slope = rng.uniform(0, 8, dims), rng.uniform(0.1, 1, dims)
        row = [float(1 + (slope * np.abs(np.log(p) - middle)).sum()) * rng.uniform(0.98, 1.02) for p in points]
        times[key] = [None if rng.uniform() < 0.05 else t for t in row]
    return times, domain_of(points, [float(w) for w in rng.uniform(0.1, 1, len(points))])


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 2).flatmap(surfaces), st.sampled_from([(), (2, 8)]), st.integers(1, 4))
def test_many_shapes_are_never_served_worse_than_by_one_variant(
    problem: tuple[Times, Domain], steps: tuple[int, ...], workers: int
) -> None:
    times, domain = problem
    plan = select(times, domain, steps=steps, workers=workers)
    found = loss(times, domain, [plan.choose(p) for p in domain.points])
    assert (
        found + LEAF_COST * (leaves(plan) - 1)
        <= min(loss(times, domain, [k] * len(domain.points)) for k in times) + 1e-6
    )


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(1, 2).flatmap(surfaces))
def test_remainders_only_add_choices_and_prices_only_remove_leaves(problem: tuple[Times, Domain]) -> None:
    times, domain = problem

    def judged(plan: DispatchPlan) -> float:
        return loss(times, domain, [plan.choose(p) for p in domain.points]) + LEAF_COST * (leaves(plan) - 1)

    plain = select(times, domain)
    if len(domain.points[0]) == 1:
        assert judged(select(times, domain, steps=(2, 8), workers=3)) <= judged(plain) + 1e-6
        cheap, dear = (select(times, domain, leaf_cost=c) for c in (0.001, 0.1))
        assert leaves(cheap) >= leaves(plain) >= leaves(dear)
        losses = [loss(times, domain, [p.choose(x) for x in domain.points]) for p in (cheap, plain, dear)]
        assert losses == sorted(losses) or max(losses) - min(losses) < 1e-6


def brute_intervals(times: Times, domain: Domain) -> float:
    """The best intervals of one symbol, every border tried."""
    count, best = len(domain.points), [0.0]
    cost = {k: [loss(times, domain, [k] * count)] for k in times}
    assert cost
    for end in range(1, count + 1):
        found = math.inf
        for start in range(end):
            whole = min(
                sum(
                    math.inf if (t := times[k][a]) is None else domain.weights[a] * math.log(t / _best(times, a))
                    for a in range(start, end)
                )
                for k in times
            )
            found = min(found, best[start] + whole + (LEAF_COST if start else 0.0))
        best.append(found)
    return best[-1]


@settings(max_examples=examples(15), deadline=None)
@given(surfaces(1))
def test_intervals_of_many_shapes_are_optimal(problem: tuple[Times, Domain]) -> None:
    times, domain = problem
    plan = select(times, domain)
    found = loss(times, domain, [plan.choose(p) for p in domain.points]) + LEAF_COST * (leaves(plan) - 1)
    assert found == pytest.approx(brute_intervals(times, domain), abs=1e-6)


# -- borders and remainders ---------------------------------------------------------------------------------------------


def test_threshold_lies_at_the_crossing_of_times() -> None:
    domain = domain_of([(16,), (256,)])
    times: Times = {"a": [1.0, 4.0], "b": [2.0, 2.0]}
    plan = select(times, domain)
    # on log-log paper a rises from 1 to 4 and crosses 2 in the middle; b is flat
    assert plan.choose((63,)) == "a" and plan.choose((65,)) == "b"
    early = select({"a": [1.0, 16.0], "b": [2.0, 2.0]}, domain)
    assert early.choose((31,)) == "a" and early.choose((33,)) == "b"
    unknown = select({"a": [1.0, None], "b": [None, 2.0]}, domain)
    assert unknown.choose((63,)) == "a" and unknown.choose((65,)) == "b"


def test_select_negative_scalars_threshold_lies_between() -> None:
    plan = select({"a": [1.0, 4.0], "b": [2.0, 2.0]}, domain_of([(-9,), (1,)]))
    assert [plan.choose((x,)) for x in (-9, -4, -3, 1)] == ["a", "a", "b", "b"]


def test_multiples_of_a_tile_and_even_rounds_of_workers_are_told_by_remainders() -> None:
    domain = domain_of([(x,) for x in (8, 9, 16, 21, 32, 43, 64, 90, 128, 171, 256, 300)])
    fits: Times = {"tile": [1.0 if x % 8 == 0 else 2.0 for (x,) in domain.points], "other": [1.5] * 12}
    plan = select(fits, domain, steps=(8,))
    assert leaves(plan) == 2 and [plan.choose((x,)) for x in (8, 80, 81, 7)] == ["tile", "tile", "other", "other"]
    assert leaves(select(fits, domain)) > 4
    at = (5, 35, 52, 75, 95, 115, 135, 155, 175, 195, 215, 235)
    tiles: Times = {"even": [1.0 if -(-x // 10) % 4 == 0 else 2.0 for x in at], "other": [1.5] * 12}
    plan = select(tiles, domain_of([(x,) for x in at]), steps=(10,), workers=4)
    ((test, _),) = plan.entries[0].tests
    assert (test.modulus, test.divisor) == (4, 10) and plan.choose((32,)) == plan.choose((40,)) == "even"
    few: Times = {k: row[:4] for k, row in fits.items()}
    assert all(not t.modulus for e in select(few, domain_of(domain.points[:4]), steps=(8,)).entries for t, _ in e.tests)


TESTS = st.builds(
    GuardTest,
    st.sampled_from([(0,), (1,), (0, 1)]),
    st.integers(0, 99),
    st.sampled_from([1, 8, 10]),
    st.sampled_from([0, 2, 7]),
)


@settings(max_examples=examples(60), deadline=None)
@given(TESTS, st.tuples(st.integers(0, 2000), st.integers(0, 2000)))
def test_guards_mean_the_same_in_a_program(test: GuardTest, point: Point) -> None:
    builder = ScalarBuilder()
    product = builder.symbol(test.axes[0])
    for axis in test.axes[1:]:
        product = builder.op(Opcode.MUL, product, builder.symbol(axis))
    slot = guard_slot(builder, product, test)
    assert bool(evaluate(builder.code, point)[slot]) == test.holds(point)
