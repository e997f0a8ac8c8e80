"""Which values share memory: lifetimes of symbolic sizes packed into few bytes.

Values whose lives do not meet may share a storage, which is as large as the largest of them: a `max` where sizes cannot be
compared. That is sound however values are grouped, so the grouping may be chosen by numbers: it is made greedily in several orders (as
they come; the largest first, at each of a few points within the bounds), and the one is kept whose bytes are least, against the most that
live at one time, at the point where that ratio is worst.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, free_vars, maximum, substitute

# Where in the range of its symbols a plan is judged, as exponents between the least and the greatest value; a symbol without an
# upper bound is taken to reach _FAR times its least.
_GRID = (0.0, 0.35, 0.7, 1.0)
_FAR = 1024


@dataclass(frozen=True, slots=True)
class LiveRange:
    """`nbytes` of memory that are in use from step `first` to step `last`, both included."""

    first: int
    last: int
    nbytes: Expr


def pack(ranges: Sequence[LiveRange], env: Env) -> tuple[tuple[Expr, ...], tuple[int, ...]]:
    """Sizes of storages, and the storage of each span; spans of one storage are never in use at the same step."""
    sizes = _bytes_at_points(tuple(dict.fromkeys(s.nbytes for s in ranges)), env)
    bytes_at = [sizes[s.nbytes] for s in ranges]
    least = _peak_bytes(ranges, bytes_at)
    shares = [b / least for b in bytes_at]
    arrival = sorted(range(len(ranges)), key=lambda i: (ranges[i].first, i))
    orders = [arrival, sorted(arrival, key=lambda i: -shares[i].sum())]
    orders += [sorted(arrival, key=lambda i: -shares[i][p]) for p in range(len(least))]
    plans = [
        _group_greedily(ranges, shares, order, tight)
        for order in dict.fromkeys(map(tuple, orders))
        for tight in (False, True)
    ]
    groups = min(plans, key=lambda groups: _cost(groups, shares))
    groups = sorted(
        (sorted(g, key=lambda i: (ranges[i].first, i)) for g in groups), key=lambda g: (ranges[g[0]].first, g[0])
    )
    where = {i: slot for slot, group in enumerate(groups) for i in group}
    sizes_of = tuple(_storage_size([ranges[i].nbytes for i in group], env) for group in groups)
    return sizes_of, tuple(where[i] for i in range(len(ranges)))


def _storage_size(sizes: Iterable[Expr], env: Env) -> Expr:
    """What holds each of them."""
    out: Expr | None = None
    for size in dict.fromkeys(sizes):
        out = size if out is None else simplify(maximum(out, size), env)
    assert out is not None
    return out


def _group_greedily(
    ranges: Sequence[LiveRange], shares: Sequence[NDArray[np.float64]], order: Sequence[int], tight: bool
) -> list[list[int]]:
    """Each span in turn joins the group that grows least by it, or a new one when it meets all; among those that grow alike the
    first, or (tight) the one it leaves least of unused."""
    groups: list[list[int]] = []
    lives: list[list[tuple[int, int]]] = []
    sizes_of: list[NDArray[np.float64]] = []
    for i in order:
        life, share = (ranges[i].first, ranges[i].last), shares[i]
        best: tuple[tuple[float, float], int] | None = None
        for slot, taken in enumerate(lives):
            at = bisect(taken, life)
            if (at and taken[at - 1][1] >= life[0]) or (at < len(taken) and taken[at][0] <= life[1]):
                continue
            grown = np.maximum(sizes_of[slot], share)
            cost = (
                round(float((grown - sizes_of[slot]).sum()), 9),
                round(float((grown - share).sum()), 9) if tight else 0.0,
            )
            if best is None or cost < best[0]:
                best = cost, slot
        if best is None:
            groups.append([i])
            lives.append([life])
            sizes_of.append(share)
            continue
        slot = best[1]
        groups[slot].append(i)
        lives[slot].insert(bisect(lives[slot], life), life)
        sizes_of[slot] = np.maximum(sizes_of[slot], share)
    return groups


def _cost(groups: Sequence[Sequence[int]], shares: Sequence[NDArray[np.float64]]) -> tuple[float, float, int]:
    """Bytes against the live ones where that is worst, their mean, and how many storages there are."""
    total = sum(
        (np.max([shares[i] for i in g], axis=0) for g in groups), np.zeros_like(shares[0]) if shares else np.zeros(1)
    )
    return round(float(total.max()), 9), round(float(total.mean()), 9), len(groups)


def _peak_bytes(ranges: Sequence[LiveRange], bytes_at: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The most bytes in use at one step, at each point; at least one."""
    steps = max((s.last for s in ranges), default=0) + 2
    change = np.zeros((steps, len(bytes_at[0]) if ranges else 1))
    for span, size in zip(ranges, bytes_at, strict=True):
        change[span.first] += size
        change[span.last + 1] -= size
    live: NDArray[np.float64] = np.maximum(change.cumsum(axis=0).max(axis=0), 1)
    return live


def _bytes_at_points(sizes: Sequence[Expr], env: Env) -> dict[Expr, NDArray[np.float64]]:
    """Each size at every point; a point where one of them has no value is left out, and without any all count the same."""
    rows = []
    for point in _sample_points(free_vars(*sizes), env):
        row = [as_int(substitute(e, point)) for e in sizes]
        if None not in row:
            rows.append([max(x or 0, 0) for x in row])
    table = np.array(rows or [[1] * len(sizes)], dtype=np.float64)
    return {e: table[:, at] for at, e in enumerate(sizes)}


def _sample_points(symbols: Sequence[Var], env: Env) -> list[dict[Var, Expr]]:
    """All symbols together along their ranges, then each at its ends while the others are between."""
    ends: dict[Var, tuple[int, int]] = {}
    for v in symbols:
        low, high = env.range_of(v)
        start = max(low or 0, 1)
        ends[v] = start, max(start * _FAR if high is None else high, start)

    def at(where: dict[Var, float], others: float) -> dict[Var, Expr]:
        found: dict[Var, Expr] = {}
        for v, (low, high) in ends.items():
            found[v] = const(round(low * (high / low) ** where.get(v, others)), v.dtype)
        return found

    points = [at({}, t) for t in _GRID]
    if len(symbols) > 1:
        points += [at({v: end}, 0.5) for v in symbols for end in (0.0, 1.0)]
    return points
