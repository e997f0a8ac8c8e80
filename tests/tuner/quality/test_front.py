"""The walk along the front of time and loss, against every choice there is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.tuner.quality.front import TypeOption, lower_hull, steps_of, walk

KINDS = ("bf16", "f16", "int8", "int4")
NUMBERS = st.integers(1, 100).map(lambda n: n / 100)
GROUPS = st.lists(
    st.tuples(NUMBERS, st.lists(st.tuples(NUMBERS, st.integers(0, 120).map(lambda n: n / 100)), max_size=4)), max_size=5
)
Table = list[tuple[float, list[TypeOption]]]


def table_of(drawn: Sequence[tuple[float, Sequence[tuple[float, float]]]]) -> Table:
    """Groups with options that are faster than the exact one."""
    return [
        (secs, [TypeOption(k, secs * share, loss) for k, (share, loss) in zip(KINDS, own) if share < 1])
        for secs, own in drawn
    ]


def added(table: Table, kinds: Mapping[int, str]) -> float:
    """The loss of a choice if losses add."""
    return sum(o.loss for p, k in kinds.items() for o in table[p][1] if o.kind == k)


def secs_of(table: Table, kinds: Mapping[int, str]) -> float:
    return sum(next((o.secs for o in own if kinds.get(p) == o.kind), secs) for p, (secs, own) in enumerate(table))


def fastest(table: Table, holds: float) -> float:
    """The least time of any choice whose added loss is at most `holds`."""
    every = itertools.product(*([None, *own] for _, own in table))
    chosen = ({p: o.kind for p, o in enumerate(c) if o is not None} for c in every)
    return min(secs_of(table, kinds) for kinds in chosen if added(table, kinds) <= holds + 1e-12)


@settings(max_examples=examples(150), deadline=None)
@given(GROUPS)
def test_walk_is_within_one_step_of_every_choice(drawn: list[tuple[float, list[tuple[float, float]]]]) -> None:
    table = table_of(drawn)
    secs, options = [s for s, _ in table], [o for _, o in table]
    points = walk(secs, options, lambda kinds: added(table, kinds), lambda loss: loss <= 1 + 1e-12, float)
    found = secs_of(table, points[-1].kinds)
    assert added(table, points[-1].kinds) <= 1 + 1e-12
    longest = max((step.saved for step in steps_of(secs, options)), default=0.0)
    assert found <= fastest(table, 1) + longest + 1e-9
    for before, after in itertools.pairwise(points):
        assert after.saved > before.saved
    for before, after in itertools.pairwise(points[1:]):
        assert after.quality > before.quality
    for point in points:
        assert abs(sum(secs) - point.saved - secs_of(table, point.kinds)) < 1e-9


@settings(max_examples=examples(80), deadline=None)
@given(GROUPS)
def test_walk_without_losses_takes_the_fastest(drawn: list[tuple[float, list[tuple[float, float]]]]) -> None:
    table = [(s, [TypeOption(o.kind, o.secs, 0.0) for o in own]) for s, own in table_of(drawn)]
    points = walk([s for s, _ in table], [o for _, o in table], lambda _: 0.0, lambda _: True, float)
    assert abs(secs_of(table, points[-1].kinds) - fastest(table, 0)) < 1e-9


def test_hull_keeps_the_options_of_best_rate() -> None:
    fine, wasteful, coarse = TypeOption("f16", 8.0, 0.1), TypeOption("bf16", 7.9, 0.4), TypeOption("int8", 4.0, 0.5)
    assert lower_hull(10.0, [coarse, wasteful, fine]) == [fine, coarse]
    assert lower_hull(10.0, [coarse, wasteful]) == [coarse]
    assert (
        lower_hull(10.0, [TypeOption("f16", 10.0, 0.0), TypeOption("int8", 11.0, 0.1), TypeOption("int4", 1.0, 1.1)])
        == []
    )


def test_walk_measures_losses_beyond_the_sum() -> None:
    """Each group alone holds, both together do not: the one that saves more for its loss stays."""
    options = [[TypeOption("int8", 5.0, 0.2)], [TypeOption("int8", 2.0, 0.2), TypeOption("f16", 7.0, 0.1)]]

    def loss(kinds: Mapping[int, str]) -> float:
        return 5.0 if len(kinds) == 2 and "f16" not in kinds.values() else 0.5

    points = walk([10.0, 10.0], options, loss, lambda found: found <= 1, float)
    assert [dict(p.kinds) for p in points] == [{}, {1: "int8"}]
    swapped = walk([10.0, 10.0], options[::-1], loss, lambda found: found <= 1, float)
    assert [dict(p.kinds) for p in swapped] == [{}, {0: "int8"}]


def test_walk_tries_options_off_the_hull_where_the_hull_does_not_hold() -> None:
    options = [[TypeOption("int8", 1.0, 0.5), TypeOption("f16", 6.0, 0.3)]]
    points = walk(
        [10.0], options, lambda kinds: 2.0 if kinds.get(0) == "int8" else 0.5, lambda found: found <= 1, float
    )
    assert [dict(p.kinds) for p in points] == [{}, {0: "f16"}] and points[-1].saved == 4.0
