"""Buffers that a warp of work-items shares: registers of its items where these can exchange them, shared memory elsewhere.

The last index of a `warp` buffer is the number of the item along the first axis. Where a loop over that index adds up what all of them
left (or takes the largest, ...), every item offers its own element, and the machine's exchanges give each of them the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, f64, i32, i64
from relax_tune.ir.core.expr import Expr, Load, Op, Var, as_int, free_vars, load, op
from relax_tune.ir.core.stmt import (
    For,
    If,
    LoopMarks,
    Stmt,
    Store,
    own_accesses,
    redirect,
    rewrite,
    seq,
    when,
)
from relax_tune.ir.hardware.intrinsics import INTRINSICS, match

# Items of a warp, and what they can exchange.
WARP = 32
EXCHANGED = (f32, f64, i32, i64)
COMBINED = ("add", "mul", "max", "min")


def hold_in_warps(n: Stmt, algebra: Algebra, exchanges: bool) -> Stmt:
    """A kernel without `warp` buffers. exchanges: whether items of a warp can exchange registers.

    They do where the items along the first axis are a power of two that warps are made of, each writes elements of its own and all
    that is read of others is their sum (product, extremum), by all of them, or what an operation of the warp takes from their
    registers.
    """
    found = dict.fromkeys(b for m in _walk(n, ()) for b, _i, _w in own_accesses(m[-1]) if b.scope == "warp")
    if not found:
        return n
    items = _items(n, algebra) if exchanges else None
    registers: dict[Buffer, Buffer] = {}
    if items is not None:
        registers = {
            b: replace(b, shape=b.shape[:-1], scope="local", row=None) for b in found if _is_held(b, n, items, algebra)
        }
        extent = items.extent
        n = rewrite(n, lambda m: _exchanged(m, extent, registers))
    shared = {b: replace(b, scope="shared") for b in found if b not in registers}

    def access(b: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]] | None:
        if b in registers:
            return registers[b], indices[:-1]
        return (shared[b], indices) if b in shared else None

    return redirect(n, access)


def _walk(n: Stmt, above: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """The path to every node."""
    here = (*above, n)
    yield here
    for c in n.children:
        yield from _walk(c, here)


def _items(n: Stmt, algebra: Algebra) -> For | None:
    """A loop over all items of the first axis, where these are whole parts of warps; None where they are not."""
    sizes: dict[int, int] = {}
    longest: For | None = None
    for path in _walk(n, ()):
        m = path[-1]
        if isinstance(m, For) and m.kind == "item":
            size = as_int(algebra.expr(algebra.static(m.extent))) or 0
            if m.axis == 0 and size > sizes.get(0, 0):
                longest = m
            sizes[m.axis] = max(sizes.get(m.axis, 1), size)
    size = sizes.get(0, 1)
    fits = 1 < size <= WARP and size & (size - 1) == 0 and prod(sizes.values()) % WARP == 0
    return longest if fits else None


def _is_held(b: Buffer, n: Stmt, items: For, algebra: Algebra) -> bool:
    """Whether every access is an item's to its own element, part of a fold over all of them, or of an operation that takes what they
    hold."""
    for path in _walk(n, ()):
        for buffer, indices, _written in own_accesses(path[-1]):
            if buffer is not b or _is_operand(b, path, algebra):
                continue
            around = next((m for m in path if isinstance(m, For) and m.kind == "item" and m.axis == 0), None)
            if around is None:
                if b.dtype not in EXCHANGED or not any(
                    isinstance(m, For) and _folded(m, items.extent) is b for m in path
                ):
                    return False
            elif not _is_last(indices, items.var, algebra) or around.extent != items.extent:
                return False
    return True


def _is_last(indices: tuple[Expr, ...], var: Var, algebra: Algebra) -> bool:
    """Whether a variable is the last index, and in none of the others."""
    apart = not any(algebra.depends(algebra.static(e), (var,)) for e in indices[:-1])
    return apart and algebra.static(indices[-1]) == {(var,): 1}


def _is_operand(b: Buffer, path: tuple[Stmt, ...], algebra: Algebra) -> bool:
    """Whether an access belongs to an operation that takes the buffer from the registers of a warp."""
    nest = [m for m in path if isinstance(m, For) and m.marks.intrinsic]
    store, intrinsic = path[-1], INTRINSICS.get(nest[0].marks.intrinsic) if nest else None
    if intrinsic is None or not isinstance(store, Store) or nest[-1].body is not store:
        return False
    found = match(intrinsic, nest, store)
    if found is None:
        return False
    parts = {f.var.name: found.loops[f.var] for f in intrinsic.loops if f.var in found.loops}
    return any(
        found.accesses[name][0] is b and _is_last(found.accesses[name][1], parts[loop], algebra)
        for name, loop in intrinsic.held.items()
    )


def _conditional(f: For) -> tuple[tuple[Expr, ...], Stmt]:
    """The conditions around what a loop does, and that."""
    body, conditions = f.body, []
    while isinstance(body, If) and body.orelse is None:
        conditions.append(body.cond)
        body = body.then
    return tuple(conditions), body


def _folded(f: For, extent: Expr) -> Buffer | None:
    """The buffer whose elements along the last dimension a loop combines into one place that does not move with it."""
    conditions, s = _conditional(f)
    if f.kind not in ("serial", "unrolled") or f.extent != extent or not isinstance(s, Store):
        return None
    value = s.value
    if not isinstance(value, Op) or value.op not in COMBINED:
        return None
    mine, source = value.args
    if not isinstance(mine, Load) or not isinstance(source, Load) or source.buffer is s.buffer:
        return None
    fixed = (*conditions, *mine.indices, *source.indices[:-1])
    if mine.buffer is not s.buffer or mine.indices != s.indices or f.var in free_vars(*fixed):
        return None
    return source.buffer if source.indices[-1] is f.var else None


def _exchanged(m: Stmt, extent: Expr, registers: dict[Buffer, Buffer]) -> Stmt:
    """A fold as an exchange, which all items take part in, and what an item then does with the whole."""
    b = _folded(m, extent) if isinstance(m, For) else None
    if b not in registers:
        return m
    assert isinstance(m, For) and b is not None
    conditions, s = _conditional(m)
    assert isinstance(s, Store) and isinstance(s.value, Op)
    mine, source = s.value.args
    assert isinstance(source, Load)
    whole = Buffer(f"{b.name}_whole", (), b.dtype, "local")
    offered = load(registers[b], source.indices[:-1])
    meeting = For(Var(m.var.name), extent, Store(whole, (), offered), marks=LoopMarks(warp_reduce=s.value.op))
    done: Stmt = Store(s.buffer, s.indices, op(s.value.op, (mine, load(whole, ())), s.value.dtype))
    for c in reversed(conditions):
        done = when(c, done)
    return seq(meeting, done)
