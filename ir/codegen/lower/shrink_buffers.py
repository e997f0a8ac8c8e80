"""Shrink local and shared buffers to the region that one thread (or work-group) touches, and declare them there.

The declaration surrounds the innermost statement that holds all accesses. It stands outside of every loop whose variable does not move
the stores, since such a loop may carry values between iterations, and outside of vectorised loops. A nest over the parts of a fused index
is one loop in this. A shared buffer is declared outside of loops over work-items.
Loop variables outside the declaration are fixed; inner ones are relaxed over their ranges. For a local buffer the variables of
item loops stay fixed: each item has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import ONE, Algebra, Poly, constant, plus
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, as_int, const
from relax_tune.ir.core.stmt import Declare, For, Let, Stmt, own_accesses, redirect

SPARE_LANES = 16

Access = tuple[tuple[Expr, ...], bool, tuple[Stmt, ...]]


@dataclass(slots=True)
class _BufferAccesses:
    """The accesses of one buffer, each with its enclosing statements, outermost first."""

    found: list[Access] = field(default_factory=list)


def shrink_buffers(n: Stmt, algebra: Algebra, threads: frozenset[str]) -> Stmt:
    """Declare and shrink every local and shared buffer of the tree.

    threads: the loop kinds that give each iteration storage of its own.

    Raises:
        BuildError: when a buffer's extents are not constant.
    """
    uses: dict[Buffer, _BufferAccesses] = {}
    _collect(n, (), uses)
    homes: dict[int, list[Buffer]] = {}
    moved: dict[Buffer, tuple[Buffer, tuple[Expr, ...]]] = {}
    for buffer, use in uses.items():
        depth = _home(buffer, use, algebra, threads)
        starts, extents = _region(buffer, use, depth, algebra)
        small = replace(buffer, shape=tuple(const(e) for e in _aligned(buffer, extents)))
        moved[buffer] = small, starts
        homes.setdefault(id(use.found[0][2][depth]), []).append(small)
    return _rebase(_declare(n, homes), moved, algebra) if moved else n


def _collect(n: Stmt, path: tuple[Stmt, ...], uses: dict[Buffer, _BufferAccesses]) -> None:
    here = (*path, n)
    for b, indices, written in own_accesses(n):
        if b.scope != "global":
            uses.setdefault(b, _BufferAccesses()).found.append((indices, written, here))
    for c in n.children:
        _collect(c, here, uses)


def _home(buffer: Buffer, use: _BufferAccesses, algebra: Algebra, threads: frozenset[str]) -> int:
    """Return the depth of the statement that the declaration surrounds."""
    paths = [p for _i, _w, p in use.found]
    shortest = min(len(p) for p in paths)
    depth = 0
    while depth + 1 < shortest and all(p[depth + 1] is paths[0][depth + 1] for p in paths):
        depth += 1
    binding = threads if buffer.scope == "local" else threads - {"item"}
    above = paths[0][: depth + 1]
    first = max((d + 1 for d, m in enumerate(above[:-1]) if isinstance(m, For) and m.kind in binding), default=0)
    stores = [i for i, written, _p in use.found if written]
    for d in range(first, depth):
        m = above[d]
        if buffer.scope == "shared" and isinstance(m, For) and m.kind == "item":
            return d  # one array for all items
        if isinstance(m, For) and m.kind == "vectorized":
            return d  # each lane has an element of its own
        if not isinstance(m, For) or m.kind in threads or as_int(m.extent) == 1:
            continue
        moved = _moved_with(algebra.nests.get(m.var, frozenset()) | {m.var}, above, algebra)
        if not all(any(not moved.isdisjoint(algebra.free(e)) for e in indices) for indices in stores):
            return d
    return depth


def _moved_with(variables: frozenset[Var], path: Sequence[Stmt], algebra: Algebra) -> set[Var]:
    """Return the variables, and others that statements of the path bind to values depending on them."""
    found = set(variables)
    for m in path:
        if isinstance(m, Let) and not found.isdisjoint(algebra.free(m.value)):
            found.add(m.var)
    return found


def _region(
    buffer: Buffer, use: _BufferAccesses, depth: int, algebra: Algebra
) -> tuple[tuple[Expr, ...], tuple[int, ...]]:
    starts: list[Expr] = []
    extents: list[int] = []
    for d, dim in enumerate(buffer.shape):
        whole = as_int(dim)
        fixed: Poly | None = None
        low, high = 0, -1
        for indices, _written, path in use.found:
            inner = {v for m in path[depth:] if not _is_own(buffer, m) for v in m.bound_vars}
            with _items_of(path, algebra):
                part = _relax(algebra.static(indices[d]), inner, algebra)
            if part is None or (fixed is not None and part[0] != fixed):
                fixed = None
                break
            if fixed is None:
                fixed, low, high = part
            else:
                low, high = min(low, part[1]), max(high, part[2])
        # lanes behind the last element are not used, but a vector register has them
        roomy = whole is not None and buffer.scope == "local" and low >= 0 and high - low < whole + SPARE_LANES
        if fixed is not None and (whole is None or fixed or roomy or high - low < whole):
            starts.append(algebra.expr(plus(fixed, constant(low))))
            extents.append(high - low + 1)
        elif whole is not None:
            starts.append(const(0))
            extents.append(whole)
        else:
            where = ", ".join(repr(i[d]) for i, _w, _p in use.found[:3])
            raise BuildError(
                f"wanted a constant extent for dimension {d} of {buffer.scope} buffer {buffer!r}, found accesses at {where} "
                "over loops of symbolic extent; tile the loop by a constant or give the buffer global scope"
            )
    return tuple(starts), tuple(extents)


@contextmanager
def _items_of(path: Sequence[Stmt], algebra: Algebra) -> Iterator[None]:
    """Narrow the ranges of launch indices to the extents of the enclosing item loops."""
    before = dict(algebra.ranges)
    for m in path:
        if isinstance(m, For) and m.kind == "item" and (size := as_int(m.extent)) is not None:
            algebra.ranges[m.var] = (0, max(size - 1, 0))
    yield
    algebra.ranges.clear()
    algebra.ranges.update(before)


def _is_own(buffer: Buffer, m: Stmt) -> bool:
    """Return whether each iteration has the buffer to itself, declared outside.

    Work-items keep registers from one item loop to the next.
    """
    return buffer.scope == "local" and isinstance(m, For) and m.kind == "item"


def _aligned(buffer: Buffer, extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents with rows padded for `storage_align`."""
    if buffer.row_alignment is None or len(extents) < 2:
        return extents
    factor, offset = as_int(buffer.row_alignment[0]), buffer.row_alignment[1]
    if factor is None:
        raise BuildError(f"wanted a constant alignment for the rows of {buffer!r}, found {buffer.row_alignment[0]!r}")
    return (*extents[:-1], -(-extents[-1] // factor) * factor + offset)


def _relax(p: Poly, inner: set[Var], algebra: Algebra) -> tuple[Poly, int, int] | None:
    """Return (fixed terms, smallest and largest value of the others); None if the others have no constant range."""
    moving = {m: c for m, c in p.items() if m == ONE or any(not algebra.free(a).isdisjoint(inner) for a in m)}
    low, high = algebra.interval(moving)
    if low is None or high is None:
        return None
    return plus(p, moving, -1), low, high


def _declare(n: Stmt, homes: dict[int, list[Buffer]]) -> Stmt:
    new = n.with_children(tuple(_declare(c, homes) for c in n.children))
    found = homes.get(id(n))
    return new if found is None else Declare(tuple(found), new)


def _rebase(n: Stmt, moved: dict[Buffer, tuple[Buffer, tuple[Expr, ...]]], algebra: Algebra) -> Stmt:
    def access(b: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]] | None:
        if b not in moved:
            return None
        small, starts = moved[b]
        shifted = (plus(algebra.static(i), algebra.static(s), -1) for i, s in zip(indices, starts, strict=True))
        return small, tuple(algebra.expr(p) for p in shifted)

    return redirect(n, access)
