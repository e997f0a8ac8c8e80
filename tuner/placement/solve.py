"""The choice of a device for each call that minimises the total time of calls and transfers.

Values move through the host: a value that several devices read is brought home once, and from there to each device once. The total is
minimised exactly: by dynamic programming where calls and values form a forest (min-sum elimination; Dechter, Bucket Elimination,
1999), by trying every combination of few, by integer programming (HiGHS, through SciPy) otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError

Method = Literal["dynamic programming", "every combination", "integer programming"]
MOST_COMBINATIONS = 3**10
HOME_DEVICE = 0
"""Position of the device whose memory is the host's."""


@dataclass(frozen=True, slots=True)
class MovedValue:
    """A value that calls compute and read.

    Attributes:
        maker: Call that computes it; None for a parameter, which is in the host's memory.
        readers: Calls that read it, each once.
        returned: It is a result, so the host reads it.
        down, up: Seconds from each device to the host, and from the host to each device; 0 for the host itself.
    """

    maker: int | None
    readers: tuple[int, ...]
    returned: bool
    down: tuple[float, ...]
    up: tuple[float, ...]

    def secs(self, maker: int, readers: frozenset[int]) -> float:
        """Return the time of its transfers from the device that computes it to the devices that read it."""
        away = readers - {maker, HOME_DEVICE}
        home = maker != HOME_DEVICE and (self.returned or HOME_DEVICE in readers or bool(away))
        return (self.down[maker] if home else 0.0) + sum(self.up[d] for d in sorted(away))


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Calls, the values between them, and the seconds of each call on each device.

    Attributes:
        devices: Names; the first is the host's.
        secs: By call and device; `inf` where the call cannot run.
    """

    devices: tuple[str, ...]
    secs: tuple[tuple[float, ...], ...]
    values: tuple[MovedValue, ...] = ()

    def total(self, chosen: Sequence[int]) -> float:
        """Return the seconds of a choice of devices, one for each call."""
        return sum(row[d] for row, d in zip(self.secs, chosen, strict=True)) + self.moved(chosen)

    def moved(self, chosen: Sequence[int]) -> float:
        """Return the seconds of the transfers of a choice of devices."""
        return sum(
            v.secs(HOME_DEVICE if v.maker is None else chosen[v.maker], frozenset(chosen[r] for r in v.readers))
            for v in self.values
        )


@dataclass(frozen=True, slots=True)
class SolvedPlacement:
    """The device of each call, by position, the total seconds, and the method of the choice."""

    chosen: tuple[int, ...]
    secs: float
    method: Method


def solve(problem: PlacementProblem) -> SolvedPlacement:
    """Return a choice of devices with the least total time; ties are broken deterministically.

    Raises:
        UserError: A call can run on no device.
    """
    for call, row in enumerate(problem.secs):
        if not any(math.isfinite(s) for s in row):
            raise UserError(f"call {call}: none of the devices {', '.join(problem.devices)} can run it")
    if is_forest(problem):
        return _solved(problem, by_elimination(problem), "dynamic programming")
    if math.prod(sum(map(math.isfinite, row)) for row in problem.secs) <= MOST_COMBINATIONS:
        return _solved(problem, by_combinations(problem), "every combination")
    return _solved(problem, by_milp(problem), "integer programming")


def _solved(problem: PlacementProblem, chosen: tuple[int, ...], method: Method) -> SolvedPlacement:
    return SolvedPlacement(chosen, problem.total(chosen), method)


def _touched(value: MovedValue) -> tuple[int, ...]:
    """Return the calls that a value depends on, the maker first."""
    return tuple(dict.fromkeys((*(() if value.maker is None else (value.maker,)), *value.readers)))


def is_forest(problem: PlacementProblem) -> bool:
    """Return whether no cycle of calls and values exists."""
    parent = list(range(len(problem.secs) + len(problem.values)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for at, value in enumerate(problem.values):
        for call in _touched(value):
            a, b = root(call), root(len(problem.secs) + at)
            # A value that touches two calls which are connected already closes a cycle.
            if a == b:
                return False
            parent[a] = b
    return True


def by_combinations(problem: PlacementProblem) -> tuple[int, ...]:
    """Choose devices by trying every combination, all at once as arrays."""
    allowed = [[d for d, s in enumerate(row) if math.isfinite(s)] for row in problem.secs]
    rows = np.array(list(itertools.product(*allowed)), np.int64).reshape(-1, len(problem.secs))
    total = np.zeros(len(rows))
    for call, secs in enumerate(problem.secs):
        total += np.asarray(secs)[rows[:, call]]
    for value in problem.values:
        maker = np.zeros(len(rows), np.int64) if value.maker is None else rows[:, value.maker]
        away = np.zeros(len(rows), np.bool_)
        for d in range(len(problem.devices)):
            read = (rows[:, list(value.readers)] == d).any(axis=1)
            if d != HOME_DEVICE:
                read &= maker != d
                total += value.up[d] * read
            away |= read & (maker != d)
        total += np.asarray(value.down)[maker] * ((away | value.returned) & (maker != HOME_DEVICE))
    return tuple(int(d) for d in rows[int(np.argmin(total))])


def by_elimination(problem: PlacementProblem) -> tuple[int, ...]:
    """Choose devices by dynamic programming over a forest of calls and values, leaves first."""
    count, devices = len(problem.secs), range(len(problem.devices))
    around: list[list[int]] = [[] for _ in range(count)]
    for at, value in enumerate(problem.values):
        for call in _touched(value):
            around[call].append(at)
    order: list[tuple[int, int | None]] = []  # a call, and the value that leads to it from its parent
    visited = [False] * count
    for start in range(count):
        stack: list[tuple[int, int | None]] = [] if visited[start] else [(start, None)]
        while stack:
            call, via = stack.pop()
            visited[call] = True
            order.append((call, via))
            for at in around[call]:
                stack += [(c, at) for c in _touched(problem.values[at]) if at != via and not visited[c]]
    below = [list(row) for row in problem.secs]  # seconds of all that hangs on a call
    best: dict[tuple[int, int], dict[int, int]] = {}  # by value and its parent's device: the devices of its other calls
    for call, via in reversed(order):
        for at in [a for a in around[call] if a != via]:
            for d in devices:
                secs, chosen = _cheapest(problem.values[at], call, d, below)
                below[call][d] += secs
                best[at, d] = chosen
    device_of = [0] * count
    for call, via in order:
        if via is None:
            device_of[call] = min(devices, key=lambda d: below[call][d])
        for at in [a for a in around[call] if a != via]:
            for other, d in best[at, device_of[call]].items():
                device_of[other] = d
    return tuple(device_of)


def _cheapest(
    value: MovedValue, parent: int, device: int, below: Sequence[Sequence[float]]
) -> tuple[float, dict[int, int]]:
    """Return the least seconds of a value and all behind it, and the devices of its other calls."""
    devices = range(len(value.up))
    others = [r for r in value.readers if r not in (parent, value.maker)]
    makers = [HOME_DEVICE] if value.maker is None else [device] if value.maker == parent else list(devices)
    reads = {device} if parent in value.readers else set()
    least: tuple[float, dict[int, int]] | None = None
    for maker, away in itertools.product(makers, _subsets(devices)):
        open_at = away | reads | ({maker} if value.maker in value.readers else set())
        if others and not open_at:
            continue
        # A value is uploaded once for each device. With the set of devices given, every reader is free to take the
        # one that is best for it, so trying the sets is enough: 2^devices instead of devices^readers.
        chosen = {r: min(sorted(open_at), key=lambda d: below[r][d]) for r in others}
        secs = value.secs(maker, frozenset(open_at)) + sum(below[r][d] for r, d in chosen.items())
        if value.maker is not None and value.maker != parent:
            chosen[value.maker] = maker
            secs += below[value.maker][maker]
        if least is None or secs < least[0]:
            least = secs, chosen
    assert least is not None
    return least


def _subsets(devices: Sequence[int]) -> Iterator[set[int]]:
    """Yield the sets of devices on which a value may be read, small ones first."""
    for size in range(len(devices) + 1):
        yield from (set(c) for c in itertools.combinations(devices, size))


def by_milp(problem: PlacementProblem) -> tuple[int, ...]:
    """Choose devices by integer programming: 0/1 for each call and device, versions of values between them."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # a dependency of tuning only
    from scipy.sparse import csr_matrix

    count, devices = len(problem.secs), len(problem.devices)
    cost: list[float] = [s if math.isfinite(s) else 0.0 for row in problem.secs for s in row]
    upper: list[float] = [float(math.isfinite(s)) for row in problem.secs for s in row]
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def require(terms: Mapping[int, float], least: float, most: float = math.inf) -> None:
        rows.append(dict(terms))
        low.append(least)
        high.append(most)

    at: Callable[[int, int], int] = lambda call, d: call * devices + d
    for call in range(count):
        require({at(call, d): 1.0 for d in range(devices)}, 1.0, 1.0)
    for value in problem.values:
        at_home = [1.0 if value.maker is None and d == HOME_DEVICE else 0.0 for d in range(devices)]
        # moves to each device; the move home starts at the device that computes the value
        moves = range(len(cost), len(cost) + devices)
        cost += [0.0 if d == HOME_DEVICE else value.up[d] for d in range(devices)]
        downs = range(moves.stop, moves.stop + devices)  # home, from each device
        cost += list(value.down)
        upper += [1.0] * (2 * devices)
        for d in range(devices):
            here = {} if value.maker is None else {at(value.maker, d): 1.0}
            for reader in value.readers:
                if reader != value.maker:  # it is there, or moves there
                    require({moves[d]: 1.0, **here, at(reader, d): -1.0}, -at_home[d])
            if d != HOME_DEVICE and value.maker is not None:  # what moves from d goes home first
                for to in range(devices):
                    if to != d:
                        require({downs[d]: 1.0, at(value.maker, d): -1.0, moves[to]: -1.0}, -1.0)
                if value.returned:
                    require({downs[d]: 1.0, at(value.maker, d): -1.0}, 0.0)
    # The solver's tolerances are absolute, and microseconds would be below them.
    scale = max(cost, default=0.0) or 1.0
    entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
    i, j, x = zip(*entries) if entries else ((), (), ())
    matrix = csr_matrix((x, (i, j)), shape=(len(rows), len(cost)))
    # Only the devices of calls need to be whole numbers: with them fixed, the least moves that satisfy the rows are
    # whole.
    whole: NDArray[np.int64] = np.array([1] * (count * devices) + [0] * (len(cost) - count * devices))
    solution = milp(
        np.array(cost) / scale,
        constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
        bounds=Bounds(np.zeros(len(cost)), np.array(upper)),
        integrality=whole,
        # The default gap would accept a placement that is slightly worse than the best.
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        raise UserError(f"no placement of {count} calls: {solution.message}")
    return tuple(int(np.argmax(solution.x[at(call, 0) : at(call, devices)])) for call in range(count))
