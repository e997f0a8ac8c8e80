"""Measured times of shapes, and what they say about other shapes.

Times are stored on a grid of rows and lengths. Between its points their logarithms are interpolated, linearly in the logarithms of rows
and lengths. A point that was not timed is estimated from the nearest one that was, in proportion to the work. Batches that run later
correct the points around them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from relax_tune.tuner.serve.policy import Shape

CORRECTION = 0.25
"""Share of the difference between an expected and a measured time that the next expectation takes over."""
MOST_SHAPES = 1 << 16
"""Compared shapes that are remembered."""
NOTICEABLE = 0.02
"""Relative change of a time from which shapes are compared again: comparing them all takes longer than small calls."""


def log_axis(lower: int, upper: int) -> tuple[int, ...]:
    """Return the powers of two between two bounds, and the bounds."""
    least = max(lower, 1)
    powers = [1 << k for k in range(upper.bit_length())]
    return tuple(sorted({least, *(p for p in powers if least < p < upper), max(upper, least)}))


class ShapeCosts:
    """Times of a model's shapes.

    Args:
        rows: Numbers of rows to time, ascending.
        lengths: Lengths to time, ascending.
        pad_rows: Whether rows may be added to a batch.
        pad_length: Whether a batch may be longer than its requests.
    """

    def __init__(
        self, rows: Sequence[int], lengths: Sequence[int], pad_rows: bool = True, pad_length: bool = False
    ) -> None:
        self.rows, self.lengths = tuple(rows), tuple(lengths)
        self._pads = pad_rows, pad_length
        self._times: dict[tuple[int, int], float] = {}
        self._skipped: set[tuple[int, int]] = set()
        self._logs: dict[tuple[int, int], float] = {}
        self._shapes: dict[tuple[int, int], Shape] = {}

    def missing(self) -> list[tuple[int, int]]:
        """Return the points of the grid that are still to be timed, those with the least work first."""
        points = [(r, n) for r in self.rows for n in self.lengths if (r, n) not in {*self._times, *self._skipped}]
        return sorted(points, key=lambda p: (p[0] * p[1], p))

    def take_over(self, other: ShapeCosts) -> None:
        """Take the times that another grid has or estimates for the points of this one, if it has any."""
        if other.has_times:
            self._times = {(r, n): other.secs(r, n) for r in self.rows for n in self.lengths}
            self._logs, self._shapes = {}, {}

    def skip(self, rows: int, length: int) -> None:
        """Leave a point to estimates: it is `missing` no more."""
        self._skipped.add((rows, length))

    def skip_all(self) -> None:
        """Leave all points to estimates."""
        self._skipped.update(self.missing())

    @property
    def has_times(self) -> bool:
        """Whether any shape has been timed."""
        return bool(self._times)

    def corners(self) -> list[tuple[int, int]]:
        """Return the points to time first: ends and middle of both axes, those with the least work first."""
        rows, lengths = ({axis[0], axis[len(axis) // 2], axis[-1]} for axis in (self.rows, self.lengths))
        return [p for p in self.missing() if p[0] in rows and p[1] in lengths]

    def add(self, rows: int, length: int, secs: float) -> None:
        """Record the time of a point of the grid, or correct the points around another shape by it."""
        if rows in self.rows and length in self.lengths:
            old = self._times.get((rows, length))
            self._set((rows, length), secs if old is None else old * (secs / old) ** CORRECTION)
        elif self._times:
            ratio = secs / self.secs(rows, length)
            for point, weight in self._around(rows, length):
                if point in self._times:
                    self._set(point, self._times[point] * ratio ** (CORRECTION * weight))

    def _set(self, point: tuple[int, int], secs: float) -> None:
        """Set the time of a point; what was derived from the times is dropped if this changes it noticeably."""
        is_new = point not in self._times
        self._times[point] = secs
        if is_new or (self._logs and abs(math.log(secs) - self._logs[point]) > NOTICEABLE):
            self._logs, self._shapes = {}, {}

    def secs(self, rows: int, length: int) -> float:
        """Return the expected time of a shape. Without any measured time it is proportional to the work."""
        if not self._logs:
            self._logs = {(r, n): math.log(self._estimate(r, n)) for r in self.rows for n in self.lengths}
        total = sum(weight * self._logs[point] for point, weight in self._around(rows, length))
        # beyond the grid, in proportion to the work
        beyond = max(1.0, rows / self.rows[-1]) * max(1.0, length / self.lengths[-1])
        return math.exp(total) * beyond

    def cheapest(self, rows: int, length: int) -> Shape:
        """Return the shape of at least `rows` and `length` that takes the least time, the smallest one of equal times."""
        shape = self._shapes.get((rows, length))
        if shape is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            more_rows = self._above(self.rows, rows) if self._pads[0] else (rows,)
            longer = self._above(self.lengths, length) if self._pads[1] else (length,)
            shapes = [Shape(r, n, self.secs(r, n)) for r in more_rows for n in longer]
            shape = self._shapes[rows, length] = min(shapes, key=lambda s: s.secs)
        return shape

    @staticmethod
    def _above(axis: Sequence[int], value: int) -> tuple[int, ...]:
        at = bisect_left(axis, value)
        return (value, axis[at]) if at < len(axis) and axis[at] > value else (value,)

    def _around(self, rows: int, length: int) -> list[tuple[tuple[int, int], float]]:
        """Return the points of the grid around a shape, with weights whose sum is 1."""
        return [((r, n), u * v) for r, u in _between(self.rows, rows) for n, v in _between(self.lengths, length)]

    def _estimate(self, rows: int, length: int) -> float:
        """Return the time of a point, or an estimate between the times of smaller and larger points."""
        measured = self._times.get((rows, length))
        if measured is not None:
            return measured
        if not self._times:
            return rows * length * 1e-9
        nearest = min(self._times, key=lambda p: (abs(math.log(p[0] / rows)) + abs(math.log(p[1] / length)), p))
        secs = self._times[nearest] * (rows * length) / (nearest[0] * nearest[1])
        smaller = [t for (r, n), t in self._times.items() if r <= rows and n <= length]
        larger = [t for (r, n), t in self._times.items() if r >= rows and n >= length]
        return max(min(secs, *larger, math.inf), *smaller, 0.0)


def _between(axis: Sequence[int], value: int) -> list[tuple[int, float]]:
    """Return one or two neighbours of a value on an axis, with weights."""
    at = bisect_left(axis, value)
    if at == len(axis):
        return [(axis[-1], 1.0)]
    if at == 0 or axis[at] == value:
        return [(axis[at], 1.0)]
    low, high = axis[at - 1], axis[at]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
