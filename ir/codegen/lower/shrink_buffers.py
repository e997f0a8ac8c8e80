"""Shrink local and shared buffers to the region that one thread (or work-group) accesses, and declare them there.

The declaration surrounds the innermost statement that contains all accesses. It is outside of vectorised loops, and outside of every loop
whose variable does not occur in the indices of the stores, since such a loop may carry values between iterations. A nest over the parts
of a fused index counts as one loop. A shared buffer is declared outside of loops over work-items.

The region is computed with the variables of outer loops fixed, while inner variables range over their values. For a local buffer the
variables of item loops are fixed too, since each item has a separate copy.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_lane_conditions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import ONE, Algebra, Poly, constant, plus
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, as_int, const
from relax_tune.ir.core.stmt import Declare, For, Let, Stmt, own_accesses, redirect

SPARE_LANES = 16

Access = tuple[tuple[Expr, ...], bool, tuple[Stmt, ...]]
"""Indices, whether it is a store, and the enclosing statements, outermost first."""


def shrink_buffers(n: Stmt, algebra: Algebra, threads: frozenset[str]) -> Stmt:
    """Declare and shrink every local and shared buffer of the tree.

    Args:
        threads: Kinds of loops whose iterations have separate storage.

    Raises:
        BuildError: The extents of a buffer are not constant.
    """
    uses: dict[Buffer, list[Access]] = {}
    _collect(n, (), uses)
    homes: dict[Stmt, list[Buffer]] = {}
    shrunk: dict[Buffer, tuple[Buffer, tuple[Expr, ...]]] = {}
    for buffer, accesses in uses.items():
        depth = _home(buffer, accesses, algebra, threads)
        starts, extents = _region(buffer, accesses, depth, algebra)
        small = replace(buffer, shape=tuple(const(e) for e in _aligned(buffer, extents)))
        shrunk[buffer] = small, starts
        homes.setdefault(accesses[0][2][depth], []).append(small)
    return _rebase(_declare(n, homes), shrunk, algebra) if shrunk else n


def _collect(n: Stmt, path: tuple[Stmt, ...], uses: dict[Buffer, list[Access]]) -> None:
    path = (*path, n)
    for b, indices, written in own_accesses(n):
        if b.scope != "global":
            uses.setdefault(b, []).append((indices, written, path))
    for c in n.children:
        _collect(c, path, uses)


def _home(buffer: Buffer, accesses: Sequence[Access], algebra: Algebra, threads: frozenset[str]) -> int:
    """Return the depth of the statement that the declaration surrounds."""
    paths = [p for _i, _w, p in accesses]
    shortest = min(len(p) for p in paths)
    # The innermost common statement, so that each buffer lives as briefly as possible and several may share
    # registers.
    depth = 0
    while depth + 1 < shortest and all(p[depth + 1] is paths[0][depth + 1] for p in paths):
        depth += 1
    binding = threads if buffer.scope == "local" else threads - {"item"}
    above = paths[0][: depth + 1]
    first = max((d + 1 for d, m in enumerate(above[:-1]) if isinstance(m, For) and m.kind in binding), default=0)
    stores = [i for i, written, _p in accesses if written]
    for d in range(first, depth):
        m = above[d]
        if buffer.scope == "shared" and isinstance(m, For) and m.kind == "item":
            return d  # all items share one array
        if isinstance(m, For) and m.kind == "vectorized":
            return d  # the lanes are elements of one buffer
        # only a loop of several iterations within a thread can carry values from one to the next
        if not isinstance(m, For) or m.kind in threads or as_int(m.extent) == 1:
            continue
        dependent = _dependent(algebra.nests.get(m.var, frozenset()) | {m.var}, above, algebra)
        if not all(any(not dependent.isdisjoint(algebra.free(e)) for e in indices) for indices in stores):
            return d
    return depth


def _dependent(variables: frozenset[Var], path: Sequence[Stmt], algebra: Algebra) -> set[Var]:
    """Return the variables, and the variables that statements of the path bind to values depending on them."""
    dependent = set(variables)
    for m in path:
        if isinstance(m, Let) and not dependent.isdisjoint(algebra.free(m.value)):
            dependent.add(m.var)
    return dependent


def _region(
    buffer: Buffer, accesses: Sequence[Access], depth: int, algebra: Algebra
) -> tuple[tuple[Expr, ...], tuple[int, ...]]:
    """Return the start and the extent of the accessed region in each dimension."""
    starts: list[Expr] = []
    extents: list[int] = []
    for d, dim in enumerate(buffer.shape):
        whole = as_int(dim)
        fixed: Poly | None = None
        low, high = 0, -1
        for indices, _written, path in accesses:
            inner = {v for m in path[depth:] if not _is_private(buffer, m) for v in m.bound_vars}
            with _item_ranges(path, algebra):
                part = _relax(algebra.static(indices[d]), inner, algebra)
            # Accesses that start at different places have no common region of known size.
            if part is None or (fixed is not None and part[0] != fixed):
                fixed = None
                break
            if fixed is None:
                fixed, low, high = part
            else:
                low, high = min(low, part[1]), max(high, part[2])
        # a vector register may be longer than the buffer; the lanes after the last element are not used
        padded = whole is not None and buffer.scope == "local" and low >= 0 and high - low < whole + SPARE_LANES
        if fixed is not None and (whole is None or fixed or padded or high - low < whole):
            starts.append(algebra.expr(plus(fixed, constant(low))))
            extents.append(high - low + 1)
        elif whole is not None:
            starts.append(const(0))
            extents.append(whole)
        else:
            where = ", ".join(repr(i[d]) for i, _w, _p in accesses[:3])
            raise BuildError(
                f"expected a constant extent for dimension {d} of {buffer.scope} buffer {buffer!r}, got accesses at {where} "
                "over loops of symbolic extent; tile the loop by a constant or give the buffer global scope"
            )
    return tuple(starts), tuple(extents)


@contextmanager
def _item_ranges(path: Sequence[Stmt], algebra: Algebra) -> Iterator[None]:
    """Narrow the ranges of launch indices to the extents of the enclosing item loops, inside the block."""
    before = dict(algebra.ranges)
    for m in path:
        if isinstance(m, For) and m.kind == "item" and (size := as_int(m.extent)) is not None:
            algebra.ranges[m.var] = (0, max(size - 1, 0))
    yield
    algebra.ranges.clear()
    algebra.ranges.update(before)


def _is_private(buffer: Buffer, m: Stmt) -> bool:
    """Return whether each iteration of a loop has a separate copy of a buffer that is declared outside of it.

    The registers of a work-item persist from one item loop to the next.
    """
    return buffer.scope == "local" and isinstance(m, For) and m.kind == "item"


def _aligned(buffer: Buffer, extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents with rows padded for `storage_align`."""
    if buffer.row_alignment is None or len(extents) < 2:
        return extents
    factor, offset = as_int(buffer.row_alignment[0]), buffer.row_alignment[1]
    if factor is None:
        raise BuildError(f"expected a constant alignment for the rows of {buffer!r}, got {buffer.row_alignment[0]!r}")
    return (*extents[:-1], -(-extents[-1] // factor) * factor + offset)


def _relax(p: Poly, inner: set[Var], algebra: Algebra) -> tuple[Poly, int, int] | None:
    """Return (terms without inner variables, smallest and largest value of the others); None if these have no constant range."""
    inner_terms = {m: c for m, c in p.items() if m == ONE or any(not algebra.free(a).isdisjoint(inner) for a in m)}
    low, high = algebra.interval(inner_terms)
    if low is None or high is None:
        return None
    return plus(p, inner_terms, -1), low, high


def _declare(n: Stmt, homes: dict[Stmt, list[Buffer]]) -> Stmt:
    new = n.with_children(tuple(_declare(c, homes) for c in n.children))
    buffers = homes.get(n)
    return new if buffers is None else Declare(tuple(buffers), new)


def _rebase(n: Stmt, shrunk: dict[Buffer, tuple[Buffer, tuple[Expr, ...]]], algebra: Algebra) -> Stmt:
    def access(b: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]] | None:
        if b not in shrunk:
            return None
        small, starts = shrunk[b]
        shifted = (plus(algebra.static(i), algebra.static(s), -1) for i, s in zip(indices, starts, strict=True))
        return small, tuple(algebra.expr(p) for p in shifted)

    return redirect(n, access)
