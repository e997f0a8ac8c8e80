"""Selection: optimal over guard trees, total, deterministic, and by measurement beyond noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tune.errors import UserError
from relax_tune.tuner.domain import Domain, Point
from relax_tune.tuner.select import LEAF_COST, Plan, select

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


def leaves(plan: Plan) -> int:
    return len(plan.entries)


@settings(max_examples=80, deadline=None)
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


@settings(max_examples=30, deadline=None)
@given(problems(dims=2, most=4))
def test_two_symbols_are_solved_as_well_as_every_tree(problem: tuple[Times, Domain]) -> None:
    times, domain = problem
    plan = select(times, domain)
    found = loss(times, domain, [plan.choose(p) for p in domain.points])
    # merging equal neighbours can only save leaves
    assert found + LEAF_COST * (leaves(plan) - 1) <= brute(times, domain, frozenset(range(len(domain.points)))) + 1e-9


@settings(max_examples=40, deadline=None)
@given(problems(dims=2), st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), max_size=5))
def test_every_point_gets_a_variant(problem: tuple[Times, Domain], far: list[Point]) -> None:
    times, domain = problem
    plan = select(times, domain)
    assert plan.entries[-1].tests == ()
    for point in [*far, (0, 0), (1, 10**15), *domain.points]:
        assert plan.choose(point) in times
    for a, point in enumerate(domain.points):
        assert times[plan.choose(point)][a] is not None


@settings(max_examples=30, deadline=None)
@given(problems(dims=2), st.randoms())
def test_the_order_of_variants_leaves_no_mark(problem: tuple[Times, Domain], random: object) -> None:
    times, domain = problem
    keys = list(times)
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert select({k: times[k] for k in keys}, domain) == select(times, domain)


def test_a_kernel_within_noise_of_the_library_does_not_win() -> None:
    domain = domain_of([(1,), (8,), (64,)])
    times: Times = {"tuned": [0.98, 0.98, 0.98], "library": [1.0, 1.0, 1.0]}
    assert select(times, domain, {"tuned": 1.03}).variants == ("library",)
    times["tuned"] = [0.9, 0.9, 0.9]
    assert select(times, domain, {"tuned": 1.03}).variants == ("tuned",)


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


def test_a_shape_nothing_was_measured_at_is_an_error_naming_it() -> None:
    with pytest.raises(UserError, match=r"\(8,\)"):
        select({"a": [1.0, None], "b": [2.0, None]}, domain_of([(1,), (8,)]))


def test_a_variant_without_a_time_is_never_chosen_there() -> None:
    plan = select({"fast": [0.1, None, 0.1], "slow": [1.0, 1.0, 1.0]}, domain_of([(1,), (8,), (64,)]))
    assert [plan.choose(p) for p in ((1,), (8,), (64,))] == ["fast", "slow", "fast"]
    assert plan.regret == pytest.approx(0.0)


def test_a_task_without_symbols_has_one_entry() -> None:
    plan = select({"a": [2.0], "b": [1.0]}, Domain(((),), (1.0,)))
    assert plan.choose(()) == "b" and leaves(plan) == 1
