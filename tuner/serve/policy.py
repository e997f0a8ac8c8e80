"""Which waiting requests run together, in which order and at which shape: a function of times, without clock and I/O.

A batch costs what its shape costs. Requests that may run together have the same group; a batch has the sum of their rows and their
greatest length. Nothing waits for a batch to fill: when the device becomes free, a batch is taken of the requests that wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

HORIZON = 64
"""Requests that are planned at a time, the most urgent ones; it bounds the time of planning, at about a millisecond."""


class Shape(NamedTuple):
    """A shape that a model runs at, and the seconds that it takes."""

    rows: int
    length: int
    secs: float


class Costs(Protocol):
    """What shapes cost. It is asked for the same shape many times in each plan."""

    def cheapest(self, rows: int, length: int) -> Shape:
        """Return the shape of at least `rows` and `length` that takes the least time."""
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits.

    Attributes:
        number: Its number; later requests have greater ones.
        due: Time at which it should be answered, in seconds of any clock.
        rows: Rows along the batch dim.
        length: Extent of the other dims.
        group: Requests of different groups never run together.
    """

    number: int
    due: float
    rows: int = 1
    length: int = 1
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Requests that run together, and their shape."""

    members: tuple[Waiting, ...]
    shape: Shape

    @property
    def due(self) -> float:
        """The earliest time at which a member should be answered."""
        return min(m.due for m in self.members)


def next_batch(waiting: Iterable[Waiting], now: float, costs: Costs, most_rows: int | None) -> PlannedBatch:
    """Return the batch to run now; arguments as of `schedule`, with at least one request."""
    requests = list(waiting)
    if len(requests) == 1:
        return PlannedBatch((requests[0],), costs.cheapest(requests[0].rows, requests[0].length))
    return schedule(requests, now, costs, most_rows)[0]


def schedule(waiting: Iterable[Waiting], now: float, costs: Costs, most_rows: int | None) -> list[PlannedBatch]:
    """Return batches in the order in which they should run, each of the `HORIZON` most urgent requests in one of them.

    1. The cheapest batches of requests of similar length, in the order of their most urgent members, if nobody is late with them.
    2. Otherwise the batches of requests that follow each other in the order in which they are due, such that nobody is late.
    3. Otherwise the first ones again: they answer the most requests per second. The most urgent come first, so nobody starves.

    A request that would be late even if it ran first counts as late in no case. A batch never costs more than its members one by one.

    Args:
        waiting: The requests, each with at most `most_rows` rows.
        now: Time of the same clock as `Waiting.due`.
        costs: What shapes cost.
        most_rows: Most rows of a batch; None: any number.
    """
    urgent = sorted(waiting, key=lambda w: (w.due, w.number))[:HORIZON]
    shape_of = costs.cheapest
    late = {w.number for w in urgent if now + shape_of(w.rows, w.length).secs > w.due}
    by_length = sorted(urgent, key=lambda w: (w.group, w.length, w.number))
    cheap = _consecutive(by_length, 0.0, shape_of, most_rows, lambda w: math.inf)
    assert cheap is not None  # without times to meet there is a schedule: one by one
    cheap.sort(key=lambda b: (b.due, b.members[0].number))
    if not _is_late(cheap, now, late):
        return cheap
    due = lambda w: math.inf if w.number in late else w.due
    return _consecutive(urgent, now, shape_of, most_rows, due) or cheap


def _is_late(batches: Sequence[PlannedBatch], now: float, late: set[int]) -> bool:
    for batch in batches:
        now += batch.shape.secs
        if any(now > w.due and w.number not in late for w in batch.members):
            return True
    return False


def _consecutive(
    requests: Sequence[Waiting],
    now: float,
    shape_of: Callable[[int, int], Shape],
    most_rows: int | None,
    due: Callable[[Waiting], float],
) -> list[PlannedBatch] | None:
    """Return the batches of consecutive requests that end first; None if no such batches end in time.

    Dynamic programming over the number of requests that have been answered: an earlier end is never worse for the following ones.
    """
    ends = [now] + [math.inf] * len(requests)
    starts = [0] * (len(requests) + 1)
    for end in range(1, len(requests) + 1):
        rows, length, earliest = 0, 0, math.inf
        group = requests[end - 1].group
        for start in range(end - 1, -1, -1):
            first = requests[start]
            rows, length, earliest = rows + first.rows, max(length, first.length), min(earliest, due(first))
            if first.group != group or (most_rows is not None and rows > most_rows):
                break
            finish = ends[start] + shape_of(rows, length).secs
            if finish <= earliest and finish < ends[end]:
                ends[end], starts[end] = finish, start
    if math.isinf(ends[-1]):
        return None
    batches, end = list[PlannedBatch](), len(requests)
    while end:
        members = tuple(requests[starts[end] : end])
        shape = shape_of(sum(w.rows for w in members), max(w.length for w in members))
        batches.append(PlannedBatch(members, shape))
        end = starts[end]
    return batches[::-1]
