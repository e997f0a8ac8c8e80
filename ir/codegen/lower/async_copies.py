"""Place the commits and waits of asynchronous copies, with one barrier per iteration of a pipelined loop.

A circular buffer is a shared buffer with a dimension of S slots. A loop fills slot (k + d) % S and reads slot k % S. The two slots
always differ, so one barrier per iteration, before both, is enough. With asynchronous copies each work-item then has the commit groups
of d - 1 iterations in flight and waits for the older ones. All other asynchronous copies are waited for immediately.
PTX ISA, "Asynchronous copy: non-bulk copies" (`cp.async`, commit groups).

Tests: `tests/schedules/rules/test_async_copies.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.codegen.lower.affine import Algebra, Poly, as_constant, plus
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import Expr, Var, as_int
from relax_tune.ir.core.stmt import (
    AsyncFence,
    Barrier,
    Declare,
    For,
    IfThenElse,
    Seq,
    Stmt,
    accesses,
    loops,
    seq,
    stores,
    walk,
)


@dataclass(frozen=True, slots=True)
class CircularBuffer:
    """A shared buffer that a loop fills some iterations before it reads.

    Attributes:
        dim: Dimension of the slots.
        read_at: Slot that an iteration reads, minus the loop's variable.
        distance: Iterations between the fill of a slot and its read.
    """

    dim: int
    read_at: Poly
    distance: int


def circular_buffers(f: For, algebra: Algebra) -> Mapping[Buffer, CircularBuffer]:
    """Return the circular buffers of a serial loop around a sequence of statements."""
    if f.kind != "serial" or not isinstance(_undeclared(f.body), Seq):
        return {}
    uses: dict[Buffer, list[tuple[tuple[Expr, ...], bool]]] = {}
    for b, indices, written in accesses(f.body):
        if b.scope == "shared":
            uses.setdefault(b, []).append((indices, written))
    stored = [s.buffer for s in stores(f.body)]
    inner = {m.var for m in loops(f.body)}
    circular: dict[Buffer, CircularBuffer] = {}
    for b, places in uses.items():
        for dim, size in enumerate(b.shape):
            slots = _circular_buffer(dim, as_int(size) or 0, [(i[dim], w) for i, w in places], f.var, inner, algebra)
            # With a second store, the distance between filling and reading would not be one number.
            if slots is not None and stored.count(b) == 1:
                circular[b] = slots
                break
    return circular


def _undeclared(n: Stmt) -> Stmt:
    """Return the statement inside declarations."""
    while isinstance(n, Declare):
        n = n.body
    return n


def _with_undeclared(n: Stmt, new: Stmt) -> Stmt:
    return replace(n, body=_with_undeclared(n.body, new)) if isinstance(n, Declare) else new


def _circular_buffer(
    dim: int, size: int, uses: Iterable[tuple[Expr, bool]], var: Var, inner: set[Var], algebra: Algebra
) -> CircularBuffer | None:
    places: dict[bool, Poly] = {}
    for e, written in uses:
        at = _slot(e, size, algebra)
        if at is None or at.get((var,)) != 1:
            return None
        rest = plus(at, {(var,): 1}, -1)
        if algebra.depends(rest, (var, *inner)) or places.setdefault(written, rest) != rest:
            return None
    # A buffer that is only filled or only read here is no ring of this loop.
    if len(places) != 2:
        return None
    ahead = as_constant(plus(places[True], places[False], -1))
    return CircularBuffer(dim, places[False], ahead) if ahead is not None and 0 < ahead < size else None


def _slot(e: Expr, size: int, algebra: Algebra) -> Poly | None:
    """Return p for an index `p % size`, and the index itself if it is always below `size`; None for other indices."""
    p = algebra.static(e)
    ((m, c),) = p.items() if len(p) == 1 else (((), 0),)
    if c == 1 and len(m) == 1 and m[0].op == "floormod" and as_int(m[0].args[1]) == size:
        return algebra.static(m[0].args[0])
    low, high = algebra.interval(p)
    return p if low is not None and high is not None and 0 <= low <= high < size else None


def async_filled(n: Stmt) -> frozenset[Buffer]:
    """Return the buffers that asynchronous copies fill at or below a statement."""
    return frozenset(s.buffer for f in loops(n) if f.marks.async_copy for s in stores(f))


def pipelined_loop(
    f: For, circular: Mapping[Buffer, CircularBuffer], scopes: frozenset[Scope], algebra: Algebra
) -> Stmt:
    """Return a loop over circular buffers with one commit group, one wait and one barrier per iteration.

    The wait and the barrier for `scopes` are at the start of the body, the commit is after the last copy.
    """
    steps = _undeclared(f.body)
    assert isinstance(steps, Seq)
    late = async_filled(steps) & circular.keys()
    barrier = (Barrier(scopes),) if scopes else ()
    if not late:
        return replace(f, body=_with_undeclared(f.body, seq(*barrier, insert_waits(steps, {}, algebra))))
    parts: list[Stmt] = []
    last = 0
    for c in steps.stmts:
        filled = async_filled(c)
        parts.append(c if filled <= late else insert_waits(c, {}, algebra))
        last = len(parts) if filled & late else last
    parts.insert(last, AsyncFence())
    # An iteration reads what was committed `distance` iterations ago; the distance - 1 newer groups may be in flight.
    pending = min(circular[b].distance for b in late) - 1
    body = _with_undeclared(f.body, seq(AsyncFence(pending), *barrier, *parts))
    # the copies of the last iterations are never read, but must have arrived before the memory is used again
    return seq(replace(f, body=body), AsyncFence(0))


def insert_waits(
    n: Stmt, circular: Mapping[Buffer, CircularBuffer], algebra: Algebra, around: tuple[For, ...] = ()
) -> Stmt:
    """Fence all asynchronous copies outside of pipelined loops.

    A copy that fills the first slots of a pipelined loop becomes a commit group. Other copies are waited for immediately.
    """
    if not async_filled(n) or (isinstance(n, Seq) and isinstance(n.stmts[0], AsyncFence)):
        return n
    if isinstance(n, Seq):
        parts: list[Stmt] = []
        for at, c in enumerate(n.stmts):
            if not _is_copy_stage(c):
                parts.append(insert_waits(c, circular, algebra, around))
                continue
            parts.append(c)
            fence = _fence_after(c, circular, algebra, around)
            following = n.stmts[at + 1] if at + 1 < len(n.stmts) else None
            if (
                following is None
                or not _is_copy_stage(following)
                or _fence_after(following, circular, algebra, around).pending != fence.pending
            ):
                parts.append(fence)
        return seq(*parts)
    if _is_copy_stage(n):
        return seq(n, _fence_after(n, circular, algebra, around))
    if isinstance(n, For) and n.kind == "serial":
        around = (*around, n)
    return n.with_children(tuple(insert_waits(c, circular, algebra, around) for c in n.children))


def _is_copy_stage(n: Stmt) -> bool:
    """Return whether a statement is a copy without barriers that either all work-items execute or none."""
    if isinstance(n, Seq) or not async_filled(n) or any(isinstance(m, (Barrier, AsyncFence)) for m in walk(n)):
        return False
    return isinstance(n, IfThenElse) or (isinstance(n, For) and (n.kind == "item" or n.marks.async_copy))


def _fence_after(
    stage: Stmt, circular: Mapping[Buffer, CircularBuffer], algebra: Algebra, around: Sequence[For]
) -> AsyncFence:
    inner = {m.var for m in loops(stage)}
    for b, indices, written in accesses(stage):
        if written and not (b in circular and _fills_slots(circular[b], b, indices, inner, algebra, around)):
            return AsyncFence(0)
    return AsyncFence()


def _fills_slots(
    slots: CircularBuffer,
    b: Buffer,
    indices: tuple[Expr, ...],
    inner: set[Var],
    algebra: Algebra,
    around: Sequence[For],
) -> bool:
    """Return whether a store and the loop around it fill enough successive slots of a circular buffer.

    They are enough if `distance` commit groups precede the read of the first slot.
    """
    at = _slot(indices[slots.dim], as_int(b.shape[slots.dim]) or 0, algebra)
    if at is None:
        return False
    loop = next((f for f in reversed(around) if at.get((f.var,)) == 1), None)
    first = plus(at, slots.read_at, -1) if loop is None else plus(plus(at, {(loop.var,): 1}, -1), slots.read_at, -1)
    lots, start = 1 if loop is None else as_int(loop.extent), as_constant(first)
    if lots is None or start is None or algebra.depends(at, inner):
        return False
    return start >= 0 and start + lots >= slots.distance
