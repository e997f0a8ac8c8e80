"""Assign local buffers to named scalar and vector registers.

A local buffer is assigned to registers if every access has constant indices after unrolling: constants in all dimensions but the last,
and there a constant or an aligned vector of consecutive elements. Other local buffers are arrays.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_dead_lanes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.guards import slack_below
from relax_tune.ir.codegen.lower.vectors import chunks, is_expanded, loop_lanes
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, as_int, conjuncts
from relax_tune.ir.core.stmt import Declare, For, IfThenElse, Stmt, accesses, own_accesses, walk

# Far more than any processor has: the compiler spills what does not fit. The limit is on the size of the text.
REGISTER_LIMIT = 512
PLACES_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class RegisterLayout:
    """Registers along a buffer's last dimension.

    Attributes:
        unit: (start, width) of the register of each offset.
    """

    unit: tuple[tuple[int, int], ...]


def register_layouts(n: Stmt, algebra: Algebra, lanes: int) -> dict[Buffer, RegisterLayout]:
    """Return the layouts of the local buffers below `n` that are assigned to registers."""
    spans: dict[Buffer, set[tuple[int, int]] | None] = {}
    _visit(n, {}, spans, algebra, lanes)
    layouts: dict[Buffer, RegisterLayout] = {}
    for b, places in spans.items():
        layout = None if places is None else _layout(b, places)
        if layout is not None:
            layouts[b] = layout
    return layouts


def _visit(
    n: Stmt, loops: dict[Expr, For], spans: dict[Buffer, set[tuple[int, int]] | None], algebra: Algebra, lanes: int
) -> None:
    if isinstance(n, For):
        loops = loops | {n.var: n} if is_expanded(n, lanes) else loops
        if n.marks.intrinsic:  # intrinsics take pointers, and registers have no address
            spans.update(dict.fromkeys((b for b, _i, _w in accesses(n)), None))
    for b, indices, _written in own_accesses(n):
        if b.scope != "local" or spans.get(b, ()) is None:
            continue
        places = _places(indices, loops, algebra, lanes)
        spans[b] = None if places is None else (spans.get(b) or set()) | places
    for c in n.children:
        _visit(c, loops, spans, algebra, lanes)


def _places(
    indices: tuple[Expr, ...], loops: dict[Expr, For], algebra: Algebra, lanes: int
) -> set[tuple[int, int]] | None:
    """Return the (start, width) ranges of the last dimension that an access covers; None if its indices are not constant."""
    for d, i in enumerate(indices):
        last = d == len(indices) - 1
        for m, c in algebra.static(i).items():
            if not m:
                continue
            loop = loops.get(m[0]) if len(m) == 1 else None
            if loop is None or (loop.kind == "vectorized" and not (last and c == 1)):
                return None
    if not indices:
        return {(0, 1)}
    start = 0
    terms: list[list[tuple[int, int]]] = []
    for m, c in algebra.static(indices[-1]).items():
        if not m:
            start = c
            continue
        loop = loops[m[0]]
        extent = as_int(loop.extent) or 0
        if loop.kind == "vectorized":
            terms.append(list(chunks(extent, loop_lanes(loop, lanes))))
        else:
            terms.append([(c * k, 1) for k in range(extent)])
    count = 1
    for t in terms:
        count *= len(t)
    if count > PLACES_LIMIT:
        return None
    return {(start + sum(a for a, _w in p), max((w for _a, w in p), default=1)) for p in product(*terms)}


def _layout(b: Buffer, places: set[tuple[int, int]]) -> RegisterLayout | None:
    dims = [as_int(d) or 0 for d in b.shape]
    size = dims[-1] if dims else 1
    unit: list[tuple[int, int] | None] = [None] * size
    # wide registers first: a scalar access may use a lane of one, but vectors of different starts or widths must not overlap
    for start, width in sorted(places, key=lambda p: (-p[1], p[0])):
        # A vector beyond the end would need lanes that no element has; the buffer stays an array.
        if start < 0 or start + width > size:
            return None
        register = unit[start]
        if register is not None and (width == 1 or register == (start, width)):
            continue
        if any(u is not None for u in unit[start : start + width]):
            return None
        unit[start : start + width] = [(start, width)] * width
    rows = 1
    for d in dims[:-1]:
        rows *= d
    units = tuple(u if u is not None else (k, 1) for k, u in enumerate(unit))
    return RegisterLayout(units) if rows * len(set(units)) <= REGISTER_LIMIT else None


Bounds = frozenset[frozenset[tuple[tuple[Expr, ...], int]]]
"""Bounds on the lanes of an access, each as the terms of its slack without the term of the lane."""


def dead_lanes(n: Stmt, layouts: Mapping[Buffer, RegisterLayout], algebra: Algebra) -> frozenset[Buffer]:
    """Return the buffers in registers whose lanes beyond a bound are never read, so that stores need no mask.

    Every read, and every store with a bound, has the same bound, which does not change during the buffer's lifetime.
    """
    unread: set[Buffer] = set()
    for d in walk(n):
        if isinstance(d, Declare):
            inside = frozenset(v for m in walk(d.body) for v in m.bound_vars)
            bounds_of = dict[Buffer, set[Bounds | None]]()
            for b, bounds in _bounded(d.body, (), algebra):
                bounds_of.setdefault(b, set()).add(bounds)
            for b in d.buffers:
                (one, *others) = bounds_of.get(b, {None})
                fixed = one is not None and all(
                    algebra.free(a).isdisjoint(inside) for terms in one for m, _ in terms for a in m
                )
                if b in layouts and one and fixed and not others:
                    unread.add(b)
    return frozenset(unread)


def _bounded(n: Stmt, around: tuple[Stmt, ...], algebra: Algebra) -> Iterator[tuple[Buffer, Bounds | None]]:
    """Yield the bounds on the lanes of every read and of every bounded store; None for scalar accesses."""
    for b, indices, written in own_accesses(n):
        lanes = [m.var for m in around if isinstance(m, For) and m.kind == "vectorized"]
        if len(lanes) != 1 or not indices or lanes[0] not in algebra.free(indices[-1]):
            yield b, None
            continue
        conditions = [c for m in around if isinstance(m, IfThenElse) for c in conjuncts(m.cond)]
        bounds = frozenset(_terms(c, lanes[0], algebra) for c in conditions if lanes[0] in algebra.free(c))
        if bounds or not written:
            yield b, bounds
    for c in n.children:
        yield from _bounded(c, (*around, n), algebra)


def _terms(c: Expr, lane: Var, algebra: Algebra) -> frozenset[tuple[tuple[Expr, ...], int]]:
    slack = slack_below(c, algebra.static)
    # `choose_vectors` turned loops with other conditions into serial ones.
    assert slack is not None, f"{c!r} is no bound on lanes"
    return frozenset((m, k) for m, k in slack.items() if m != (lane,))
