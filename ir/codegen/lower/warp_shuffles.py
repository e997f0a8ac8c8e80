"""Keep `warp` buffers in registers and reduce them with warp shuffles, or put them into shared memory.

The last index of a `warp` buffer is the work-item's number along the first axis. A loop over that index that adds up the elements of
all items (or multiplies them, or takes an extremum) becomes an all-reduce by shuffles (PTX ISA, "shfl.sync").
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
    BufferStore,
    For,
    IfThenElse,
    LoopMarks,
    Stmt,
    own_accesses,
    redirect,
    rewrite,
    seq,
    when,
)
from relax_tune.ir.hardware.intrinsics import INTRINSICS, match

# Work-items of a warp; types and operations of its shuffles.
WARP = 32
SHUFFLED_TYPES = (f32, f64, i32, i64)
COMBINING_OPS = ("add", "mul", "max", "min")


def lower_warp_buffers(n: Stmt, algebra: Algebra, has_shuffles: bool) -> Stmt:
    """Replace `warp` buffers by registers of the work-items, or by shared memory.

    has_shuffles: the work-items of a warp can exchange registers.
    Registers require that the extent of the first axis is a power of two that divides the warp, and that each item writes only its
    own element. Elements of other items may be read only by an all-reduce (add, mul, min, max) or by an intrinsic with `warp_operands`.
    """
    found = dict.fromkeys(b for m in _walk(n, ()) for b, _i, _w in own_accesses(m[-1]) if b.scope == "warp")
    if not found:
        return n
    items = _thread_loop(n, algebra) if has_shuffles else None
    registers: dict[Buffer, Buffer] = {}
    if items is not None:
        registers = {
            b: replace(b, shape=b.shape[:-1], scope="local", row_alignment=None)
            for b in found
            if _fits_registers(b, n, items, algebra)
        }
        extent = items.extent
        n = rewrite(n, lambda m: _shuffled(m, extent, registers))
    shared = {b: replace(b, scope="shared") for b in found if b not in registers}

    def access(b: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]] | None:
        if b in registers:
            return registers[b], indices[:-1]
        return (shared[b], indices) if b in shared else None

    return redirect(n, access)


def _walk(n: Stmt, above: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """Yield the path to every statement."""
    here = (*above, n)
    yield here
    for c in n.children:
        yield from _walk(c, here)


def _thread_loop(n: Stmt, algebra: Algebra) -> For | None:
    """Return a loop over all work-items of the first axis if they divide a warp; None otherwise."""
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


def _fits_registers(b: Buffer, n: Stmt, items: For, algebra: Algebra) -> bool:
    """Tell whether a `warp` buffer can live in registers.

    Every access must be an item's to its own element, part of an all-reduce, or an intrinsic's that takes the warp's registers.
    """
    for path in _walk(n, ()):
        for buffer, indices, _written in own_accesses(path[-1]):
            if buffer is not b or _is_warp_operand(b, path, algebra):
                continue
            around = next((m for m in path if isinstance(m, For) and m.kind == "item" and m.axis == 0), None)
            if around is None:
                if b.dtype not in SHUFFLED_TYPES or not any(
                    isinstance(m, For) and _all_reduced(m, items.extent) is b for m in path
                ):
                    return False
            elif not _is_last(indices, items.var, algebra) or around.extent != items.extent:
                return False
    return True


def _is_last(indices: tuple[Expr, ...], var: Var, algebra: Algebra) -> bool:
    """Tell whether a variable is the last index and occurs in no other."""
    apart = not any(algebra.depends(algebra.static(e), (var,)) for e in indices[:-1])
    return apart and algebra.static(indices[-1]) == {(var,): 1}


def _is_warp_operand(b: Buffer, path: tuple[Stmt, ...], algebra: Algebra) -> bool:
    """Tell whether an access belongs to an intrinsic that takes the buffer from the registers of a warp."""
    nest = [m for m in path if isinstance(m, For) and m.marks.intrinsic]
    store, intrinsic = path[-1], INTRINSICS.get(nest[0].marks.intrinsic) if nest else None
    if intrinsic is None or not isinstance(store, BufferStore) or nest[-1].body is not store:
        return False
    found = match(intrinsic, nest, store)
    if found is None:
        return False
    parts = {f.var.name: found.loops[f.var] for f in intrinsic.loops if f.var in found.loops}
    return any(
        found.accesses[name][0] is b and _is_last(found.accesses[name][1], parts[loop], algebra)
        for name, loop in intrinsic.warp_operands.items()
    )


def _conditional(f: For) -> tuple[tuple[Expr, ...], Stmt]:
    """Return the conditions around a loop's body, and the body."""
    body, conditions = f.body, []
    while isinstance(body, IfThenElse) and body.orelse is None:
        conditions.append(body.cond)
        body = body.then
    return tuple(conditions), body


def _all_reduced(f: For, extent: Expr) -> Buffer | None:
    """Return the buffer whose last dimension a loop reduces into one fixed place; None for other loops."""
    conditions, s = _conditional(f)
    if f.kind not in ("serial", "unrolled") or f.extent != extent or not isinstance(s, BufferStore):
        return None
    value = s.value
    if not isinstance(value, Op) or value.op not in COMBINING_OPS:
        return None
    mine, source = value.args
    if not isinstance(mine, Load) or not isinstance(source, Load) or source.buffer is s.buffer:
        return None
    fixed = (*conditions, *mine.indices, *source.indices[:-1])
    if mine.buffer is not s.buffer or mine.indices != s.indices or f.var in free_vars(*fixed):
        return None
    return source.buffer if source.indices[-1] is f.var else None


def _shuffled(m: Stmt, extent: Expr, registers: dict[Buffer, Buffer]) -> Stmt:
    """Return a reduction as an all-reduce by shuffles, in which all work-items take part, and the update with its result."""
    b = _all_reduced(m, extent) if isinstance(m, For) else None
    if b not in registers:
        return m
    assert isinstance(m, For) and b is not None
    conditions, s = _conditional(m)
    assert isinstance(s, BufferStore) and isinstance(s.value, Op)
    mine, source = s.value.args
    assert isinstance(source, Load)
    whole = Buffer(f"{b.name}_whole", (), b.dtype, "local")
    offered = load(registers[b], source.indices[:-1])
    meeting = For(Var(m.var.name), extent, BufferStore(whole, (), offered), marks=LoopMarks(warp_reduce=s.value.op))
    done: Stmt = BufferStore(s.buffer, s.indices, op(s.value.op, (mine, load(whole, ())), s.value.dtype))
    for c in reversed(conditions):
        done = when(c, done)
    return seq(meeting, done)
