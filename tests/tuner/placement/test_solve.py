"""The choice of devices equals the best of all combinations, on random trees and small graphs, by every way to solve it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import UserError
from relax_tune.tuner.placement.solve import (
    MovedValue,
    PlacementProblem,
    by_combinations,
    by_elimination,
    by_milp,
    is_forest,
    solve,
)

QUICK = settings(max_examples=examples(60), deadline=None)
SECS = st.integers(0, 12).map(float)  # whole numbers, so that there are ties
NAMES = ("c", "opencl", "cuda")


def links(draw: st.DrawFn, devices: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    away = st.lists(SECS, min_size=devices - 1, max_size=devices - 1)
    return (0.0, *draw(away)), (0.0, *draw(away))


@st.composite
def costs(draw: st.DrawFn, calls: int, devices: int) -> tuple[tuple[float, ...], ...]:
    """Seconds of calls; some cannot run on some devices."""
    rows = st.lists(st.one_of(SECS, SECS, SECS, st.just(math.inf)), min_size=devices - 1, max_size=devices - 1)
    return tuple((draw(SECS), *draw(rows)) for _ in range(calls))


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> PlacementProblem:
    """Every value joins calls that nothing else joins: chains, trees of arguments, values with many readers."""
    devices, calls = draw(st.integers(1, 3)), draw(st.integers(1, most))
    readers: dict[int, list[int]] = {}
    values = []
    for call in range(1, calls):
        other = draw(st.integers(0, call - 1))
        kind = draw(st.integers(0, 2))
        if kind == 0:  # one of several readers of the other's value
            readers.setdefault(other, []).append(call)
        else:
            maker, reader = (other, call) if kind == 1 else (call, other)
            values.append(MovedValue(maker, (reader,), draw(st.booleans()), *links(draw, devices)))
    values += [MovedValue(m, tuple(r), draw(st.booleans()), *links(draw, devices)) for m, r in readers.items()]
    values.append(MovedValue(None, (draw(st.integers(0, calls - 1)),), False, *links(draw, devices)))
    return PlacementProblem(NAMES[:devices], draw(costs(calls, devices)), tuple(values))


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> PlacementProblem:
    """Values that several calls read, and parameters."""
    devices, calls = draw(st.integers(1, 3)), draw(st.integers(1, most))
    values = []
    for maker in range(-1, calls):
        later = range(maker + 1, calls)
        readers = tuple(draw(st.lists(st.sampled_from(later), max_size=3, unique=True))) if later else ()
        returned = maker >= 0 and (not readers or draw(st.booleans()))
        if readers or returned:
            values.append(MovedValue(None if maker < 0 else maker, readers, returned, *links(draw, devices)))
    return PlacementProblem(NAMES[:devices], draw(costs(calls, devices)), tuple(values))


def least(problem: PlacementProblem) -> float:
    every = itertools.product(range(len(problem.devices)), repeat=len(problem.secs))
    return min(problem.total(chosen) for chosen in every)


@QUICK
@given(trees())
def test_dynamic_programming_on_trees_equals_the_best_combination(problem: PlacementProblem) -> None:
    assert is_forest(problem)
    assert problem.total(by_elimination(problem)) == least(problem)
    assert solve(problem).method == "dynamic programming"


@QUICK
@given(graphs())
def test_combinations_and_integer_programming_on_graphs_equal_the_best_combination(problem: PlacementProblem) -> None:
    wanted = least(problem)
    assert problem.total(by_combinations(problem)) == wanted
    assert problem.total(by_milp(problem)) == pytest.approx(wanted)
    assert solve(problem).secs == wanted


@settings(max_examples=examples(8), deadline=None)
@given(trees(most=40))
def test_integer_programming_on_large_trees_equals_dynamic_programming(problem: PlacementProblem) -> None:
    assert problem.total(by_milp(problem)) == pytest.approx(problem.total(by_elimination(problem)))


def test_moves_through_the_host_are_paid_once_for_all_devices() -> None:
    value = MovedValue(0, (1, 2, 3), True, (0.0, 10.0, 20.0), (0.0, 1.0, 2.0))
    assert value.secs(1, frozenset({1})) == 10.0  # it is a result
    assert value.secs(1, frozenset({0, 1, 2})) == 12.0
    assert value.secs(0, frozenset({1, 2})) == 3.0
    inner = MovedValue(0, (1,), False, (0.0, 10.0, 20.0), (0.0, 1.0, 2.0))
    assert inner.secs(1, frozenset({1})) == 0.0 and inner.secs(2, frozenset({1})) == 21.0


def test_solve_refuses_a_call_without_any_device() -> None:
    with pytest.raises(UserError, match="call 0: none of the devices c"):
        solve(PlacementProblem(("c",), ((math.inf,),)))
