"""The choice of batches: every request once, nobody late who need not be, never dearer than one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from relax_tune.tuner.serve.policy import HORIZON, PlannedBatch, Shape, Waiting, next_batch, schedule

Times = dict[tuple[int, int], int]


class Table:
    """Costs of a table: any positive numbers, not even monotone, the same for the same shape."""

    def __init__(self, salt: int, fixed: int) -> None:
        self.salt, self.fixed = salt, fixed

    def cheapest(self, rows: int, length: int) -> Shape:
        noise = hash((self.salt, rows, length)) % 7
        return Shape(rows, length, float(self.fixed + noise + rows * length))


tables = st.builds(Table, st.integers(0, 99), st.sampled_from([0, 5, 40, 400]))
bounds = st.sampled_from([None, 4, 8])


@st.composite
def requests(draw: st.DrawFn, most: int = 6) -> list[Waiting]:
    count = draw(st.integers(1, most))
    return [
        Waiting(
            n, draw(st.integers(0, 600)), draw(st.integers(1, 4)), draw(st.integers(1, 9)), (draw(st.integers(0, 1)),)
        )
        for n in range(count)
    ]


@given(requests(most=80), st.integers(0, 100), tables, bounds)
def test_schedule_answers_every_request_once(waiting: list[Waiting], now: int, costs: Table, most: int | None) -> None:
    batches = schedule(waiting, now, costs, most)
    numbers = [w.number for b in batches for w in b.members]
    assert len(numbers) == len(set(numbers)) == min(len(waiting), HORIZON)
    assert next_batch(waiting, now, costs, most) == batches[0]


@given(requests(), st.integers(0, 100), tables, bounds)
def test_batches_fit_the_members_and_cost_at_most_the_sum(
    waiting: list[Waiting], now: int, costs: Table, most: int | None
) -> None:
    for batch in schedule(waiting, now, costs, most):
        assert len({w.group for w in batch.members}) == 1
        assert batch.shape.rows >= sum(w.rows for w in batch.members)
        assert batch.shape.length >= max(w.length for w in batch.members)
        assert len(batch.members) == 1 or most is None or sum(w.rows for w in batch.members) <= most
        assert batch.shape.secs <= sum(costs.cheapest(w.rows, w.length).secs for w in batch.members)


def compositions(ordered: Sequence[Waiting]) -> Iterator[list[Sequence[Waiting]]]:
    """Every way to cut a sequence into consecutive parts."""
    places = range(1, len(ordered))
    for count in range(len(ordered)):
        for cuts in combinations(places, count):
            ends = [0, *cuts, len(ordered)]
            yield [ordered[a:b] for a, b in zip(ends, ends[1:])]


def late_with(parts: Sequence[Sequence[Waiting]], now: float, costs: Table, most: int | None) -> set[int]:
    """The requests that are late, or all if the parts are no batches."""
    late = set()
    for part in parts:
        rows = sum(w.rows for w in part)
        if len({w.group for w in part}) > 1 or (len(part) > 1 and most is not None and rows > most):
            return {w.number for p in parts for w in p}
        now += costs.cheapest(rows, max(w.length for w in part)).secs
        late |= {w.number for w in part if now > w.due}
    return late


@given(requests(), st.integers(0, 100), tables, bounds)
def test_no_request_is_late_if_none_need_be_in_due_order(
    waiting: list[Waiting], now: int, costs: Table, most: int | None
) -> None:
    """Beside an exhaustive search over all batches of requests that are due one after the other."""
    ordered = sorted(waiting, key=lambda w: (w.due, w.number))
    hopeless = {w.number for w in waiting if now + costs.cheapest(w.rows, w.length).secs > w.due}
    possible = any(late_with(parts, now, costs, most) <= hopeless for parts in compositions(ordered))
    actual = late_with([b.members for b in schedule(waiting, now, costs, most)], now, costs, most)
    assert not possible or actual <= hopeless


@given(requests(), tables, bounds)
def test_without_urgency_batches_of_similar_length_are_the_cheapest(
    waiting: list[Waiting], costs: Table, most: int | None
) -> None:
    relaxed = [Waiting(w.number, math.inf, w.rows, w.length, w.group) for w in waiting]
    ordered = sorted(relaxed, key=lambda w: (w.group, w.length, w.number))
    least = min(
        sum(costs.cheapest(sum(w.rows for w in p), max(w.length for w in p)).secs for p in parts)
        for parts in compositions(ordered)
        if not late_with(parts, 0, costs, most)
    )
    assert math.isclose(sum(b.shape.secs for b in schedule(relaxed, 0, costs, most)), least)


@given(requests(most=24), st.lists(st.integers(0, 60), min_size=24, max_size=24), tables, bounds)
def test_every_arriving_request_is_answered_once_in_the_end(
    arriving: list[Waiting], gaps: list[int], costs: Table, most: int | None
) -> None:
    """A device that is never idle while requests wait, with arrivals between its batches."""
    arrivals = [(sum(gaps[: w.number + 1]), w) for w in arriving]
    now, queue, answered = 0.0, list[Waiting](), list[int]()
    while arrivals or queue:
        while arrivals and (not queue or arrivals[0][0] <= now):
            at, request = arrivals.pop(0)
            now = max(now, at)
            queue.append(request)
        batch = next_batch(queue, now, costs, most)
        now += batch.shape.secs
        answered += [w.number for w in batch.members]
        queue = [w for w in queue if w not in batch.members]
    assert sorted(answered) == [w.number for w in arriving]


class Flat:
    """Costs that no number of rows changes."""

    def cheapest(self, rows: int, length: int) -> Shape:
        return Shape(rows, length, 10.0)


class Linear:
    """Costs in proportion to the rows."""

    def cheapest(self, rows: int, length: int) -> Shape:
        return Shape(rows, length, 10.0 * rows)


def test_batches_follow_from_costs() -> None:
    four = [Waiting(n, 1000) for n in range(4)]
    assert [len(b.members) for b in schedule(four, 0, Flat(), None)] == [4]
    assert [len(b.members) for b in schedule(four, 0, Flat(), 2)] == [2, 2]
    assert [len(b.members) for b in schedule(four, 0, Linear(), None)] == [1, 1, 1, 1], "nothing is gained by waiting"


def test_urgent_request_does_not_wait_for_a_long_one() -> None:
    class Long:
        def cheapest(self, rows: int, length: int) -> Shape:
            return Shape(rows, length, 1.0 * length)

    urgent, long = Waiting(1, 12.0, 1, 10), Waiting(0, 1000.0, 1, 100)
    batches: list[PlannedBatch] = schedule([long, urgent], 0, Long(), None)
    assert [b.members for b in batches] == [(urgent,), (long,)]
