"""Pack live ranges of symbolic sizes into few storages.

Values with disjoint live ranges may share a storage, whose size is the largest of their sizes: a `max` if sizes cannot be compared.
Every such grouping is correct, so a good one is chosen numerically. Several greedy packings are computed, in order of arrival and in
order of size at a few sample points of the symbols. The result is the packing whose largest ratio of bytes to peak live bytes, over the
sample points, is smallest.

Tests: `tests/ir/passes/memory/test_buffer_packing.py`.
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

# Sample points within the range of a symbol, as fractions of the way from its least to its greatest value on a logarithmic scale. A
# symbol without an upper bound is assumed to reach _FAR times its least value.
_GRID = (0.0, 0.35, 0.7, 1.0)
_FAR = 1024


@dataclass(frozen=True, slots=True)
class LiveRange:
    """`nbytes` of memory in use from step `first` to step `last`, both inclusive."""

    first: int
    last: int
    nbytes: Expr


def pack(ranges: Sequence[LiveRange], env: Env) -> tuple[tuple[Expr, ...], tuple[int, ...]]:
    """Return the sizes of the storages, and the storage of each live range. Live ranges of one storage never overlap."""
    sizes = _bytes_at_points(tuple(dict.fromkeys(s.nbytes for s in ranges)), env)
    bytes_at = [sizes[s.nbytes] for s in ranges]
    least = _peak_bytes(ranges, bytes_at)
    # relative to the peak of each point, so that points with large sizes do not dominate
    shares = [b / least for b in bytes_at]
    arrival = sorted(range(len(ranges)), key=lambda i: (ranges[i].first, i))
    # Largest first wastes least where sizes differ much: small ranges then fill the gaps. Arrival order is best where
    # sizes are alike, as it follows the chain of layers.
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
    """Return the maximum of sizes."""
    out: Expr | None = None
    for size in dict.fromkeys(sizes):
        out = size if out is None else simplify(maximum(out, size), env)
    assert out is not None
    return out


def _group_greedily(
    ranges: Sequence[LiveRange], shares: Sequence[NDArray[np.float64]], order: Sequence[int], tight: bool
) -> list[list[int]]:
    """Assign live ranges greedily, in `order`, to the group that grows least.

    A live range that overlaps every group starts a new one.

    Args:
        shares: Size of each live range at the sample points, as a fraction of the peak.
        tight: Whether ties go to the group with the least unused memory instead of the first.
    """
    groups: list[list[int]] = []
    lives: list[list[tuple[int, int]]] = []
    sizes_of: list[NDArray[np.float64]] = []
    for i in order:
        life, share = (ranges[i].first, ranges[i].last), shares[i]
        best: tuple[tuple[float, float], int] | None = None
        for slot, occupied in enumerate(lives):
            # The ranges of a group are disjoint and sorted, so only the two neighbours of the new one can overlap it.
            at = bisect(occupied, life)
            if (at and occupied[at - 1][1] >= life[0]) or (at < len(occupied) and occupied[at][0] <= life[1]):
                continue
            grown = np.maximum(sizes_of[slot], share)
            cost = (
                # Rounded, so that no rounding error of a sum decides between equal groups.
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
    """Return the worst ratio of bytes to peak live bytes, the mean ratio, and the number of storages."""
    total = sum(
        (np.max([shares[i] for i in g], axis=0) for g in groups), np.zeros_like(shares[0]) if shares else np.zeros(1)
    )
    return round(float(total.max()), 9), round(float(total.mean()), 9), len(groups)


def _peak_bytes(ranges: Sequence[LiveRange], bytes_at: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the peak of live bytes at each sample point; at least 1."""
    steps = max((s.last for s in ranges), default=0) + 2
    change = np.zeros((steps, len(bytes_at[0]) if ranges else 1))
    for span, size in zip(ranges, bytes_at, strict=True):
        change[span.first] += size
        # a value that is used last by a step is still live in it
        change[span.last + 1] -= size
    live: NDArray[np.float64] = np.maximum(change.cumsum(axis=0).max(axis=0), 1)
    return live


def _bytes_at_points(sizes: Sequence[Expr], env: Env) -> dict[Expr, NDArray[np.float64]]:
    """Evaluate each size at the sample points.

    Points at which a size is undefined are dropped. If no point remains, all sizes count as 1.
    """
    rows = []
    for point in _sample_points(free_vars(*sizes), env):
        row = [as_int(substitute(e, point)) for e in sizes]
        if None not in row:
            rows.append([max(x or 0, 0) for x in row])
    # float64, since products of large dims exceed int64 at the far ends of open ranges.
    table = np.array(rows or [[1] * len(sizes)], dtype=np.float64)
    return {e: table[:, at] for at, e in enumerate(sizes)}


def _sample_points(symbols: Sequence[Var], env: Env) -> list[dict[Var, Expr]]:
    """Return sample points: all symbols at one fraction of their ranges, then each symbol at its ends."""
    ends: dict[Var, tuple[int, int]] = {}
    for v in symbols:
        low, high = env.range_of(v)
        # The scale is logarithmic, so the range may not start at 0.
        start = max(low or 0, 1)
        ends[v] = start, max(start * _FAR if high is None else high, start)

    def at(where: dict[Var, float], others: float) -> dict[Var, Expr]:
        point: dict[Var, Expr] = {}
        for v, (low, high) in ends.items():
            point[v] = const(round(low * (high / low) ** where.get(v, others)), v.dtype)
        return point

    points = [at({}, t) for t in _GRID]
    if len(symbols) > 1:
        # Symbols that grow together cannot tell which of two sizes is larger when only one symbol grows.
        points += [at({v: end}, 0.5) for v in symbols for end in (0.0, 1.0)]
    return points
