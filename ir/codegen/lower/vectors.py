"""Choose the vectorised loops that become vectors, and their widths.

A loop becomes vectors if its extent is constant, it holds no other vectorised loop and few gathers, and every condition on its variable
has the form `x + variable < bound` (a prefix of the lanes). Any other vectorised loop becomes a plain one.
"""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.guards import room_below
from relax_tune.ir.codegen.print.transpose_registers import mark_transpose
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, conjuncts, loads
from relax_tune.ir.core.stmt import BufferStore, For, IfThenElse, Stmt, accesses, loops, rewrite, walk

UNROLL_LIMIT = 64
FOLD_LIMIT = 256
CHUNK_LIMIT = 16
GATHER_LIMIT = 32
"""Gathers of a vector at most: each is written out for every lane, with the text of its index."""


def choose_vectors(n: Stmt, algebra: Algebra, lanes: int) -> Stmt:
    """Make vectorised loops that cannot be vectors serial or unrolled. Two loops around a transposing copy both stay."""

    def visit(m: Stmt) -> Stmt:
        if not isinstance(m, For) or m.kind != "vectorized":
            return m
        extent = as_int(m.extent)
        if extent is None:
            return replace(m, kind="serial")
        if loops(m.body, "vectorized"):
            marked = mark_transpose(m, algebra, lanes)
            if marked.marks.transpose:
                return marked
            return replace(m, kind="unrolled" if extent <= 8 else "serial")
        return m if _is_ready(m, algebra) else replace(m, kind="serial")

    return rewrite(n, visit)


def _is_ready(f: For, algebra: Algebra) -> bool:
    v = f.var
    reads = {x for m in walk(f.body) for x in loads(*m.own_exprs)}
    if sum(_is_gather(x, v, algebra) for x in reads) > GATHER_LIMIT:
        return False
    for m in walk(f.body):
        if m.bound_vars:
            if any(v in algebra.free(e) for e in m.own_exprs):
                return False
        elif isinstance(m, IfThenElse):
            if any(v in algebra.free(c) and not is_prefix(c, v, algebra) for c in conjuncts(m.cond)):
                return False
            if m.orelse is not None and v in algebra.free(m.cond):
                return False
        elif isinstance(m, BufferStore) and not any(v in algebra.free(i) for i in m.indices):
            # every lane stores to one place: fine only when all store the same value
            carried = any(x.buffer is m.buffer for x in loads(m.value))
            if carried or v in algebra.free(m.value):
                return False
    return True


def _is_gather(x: Load, v: Var, algebra: Algebra) -> bool:
    """Return whether the places that iterations of `v` read are no fixed distance apart."""
    return any(v in algebra.free(a) for i in x.indices for m in algebra.static(i) for a in m if m != (v,))


def is_prefix(c: Expr, v: Var, algebra: Algebra) -> bool:
    """Return whether `c` is `x + v < bound` (or <=) with neither x nor bound depending on v."""
    room = room_below(c, algebra.static)
    if room is None or room.get((v,)) != -1:
        return False
    return not any(v in algebra.free(a) for m in room if m != (v,) for a in m)


def loop_lanes(f: For, lanes: int) -> int:
    """Return the lanes of a loop: fewer if it computes with elements wider than f32."""
    wide = max((b.dtype.bytes for b, _i, _w in accesses(f.body) if b.dtype.is_float), default=4)
    return max(lanes * 4 // max(wide, 4), 1)


def chunks(extent: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """Return (start, width) of the chunks of a vectorised loop: full vectors, then descending powers of two."""
    found: list[tuple[int, int]] = []
    at, width = 0, lanes
    while at < extent:
        while width > extent - at:
            width //= 2
        found.append((at, width))
        at += width
    return tuple(found)


def is_expanded(f: For, lanes: int) -> bool:
    """Return whether the printer writes out every iteration (or vector) of a loop."""
    extent = as_int(f.extent)
    if extent is None:
        return False
    if f.kind == "unrolled":
        return extent <= (FOLD_LIMIT if f.marks.tree_reduce else UNROLL_LIMIT)
    return f.kind == "vectorized" and len(chunks(extent, loop_lanes(f, lanes))) <= CHUNK_LIMIT
