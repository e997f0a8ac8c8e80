"""Keep `warp` buffers in registers and reduce them with warp shuffles, or put them into shared memory.

The last index of a `warp` buffer is the work-item's number along the first axis. A loop over that index that adds up the elements of
all items (or multiplies them, or takes an extremum) becomes an all-reduce by shuffles (PTX ISA, "shfl.sync").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.guards import split_conditions
from relax_tune.ir.codegen.lower.lowered import combined_load
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, f64, i32, i64
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, free_vars, load, op
from relax_tune.ir.core.stmt import (
    BufferStore,
    For,
    LoopMarks,
    Stmt,
    loops,
    own_accesses,
    redirect,
    rewrite,
    seq,
    when,
)
from relax_tune.ir.hardware.intrinsic import match
from relax_tune.ir.hardware.intrinsics import INTRINSICS

# Work-items of a warp; types of its shuffles.
WARP = 32
SHUFFLED_TYPES = (f32, f64, i32, i64)


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
    for f in loops(n, "item"):
        size = as_int(algebra.expr(algebra.static(f.extent))) or 0
        if f.axis == 0 and size > sizes.get(0, 0):
            longest = f
        sizes[f.axis] = max(sizes.get(f.axis, 1), size)
    size = sizes.get(0, 1)
    fits = 1 < size <= WARP and size & (size - 1) == 0 and prod(sizes.values()) % WARP == 0
    return longest if fits else None


def _fits_registers(b: Buffer, n: Stmt, items: For, algebra: Algebra) -> bool:
    """Return whether a `warp` buffer can live in registers.

    Every access must be an item's to its own element, part of an all-reduce, or an intrinsic's that takes the warp's registers.
    """
    for path in _walk(n, ()):
        for buffer, indices, _written in own_accesses(path[-1]):
            if buffer is not b or _is_warp_operand(b, path, algebra):
                continue
            around = next((m for m in path if isinstance(m, For) and m.kind == "item" and m.axis == 0), None)
            if around is None:
                reductions = (_all_reduce(m, items.extent) for m in path)
                if b.dtype not in SHUFFLED_TYPES or not any(r is not None and r.source.buffer is b for r in reductions):
                    return False
            elif not _is_last(indices, items.var, algebra) or around.extent != items.extent:
                return False
    return True


def _is_last(indices: tuple[Expr, ...], var: Var, algebra: Algebra) -> bool:
    """Return whether a variable is the last index and occurs in no other."""
    apart = not any(algebra.depends(algebra.static(e), (var,)) for e in indices[:-1])
    return apart and algebra.static(indices[-1]) == {(var,): 1}


def _is_warp_operand(b: Buffer, path: tuple[Stmt, ...], algebra: Algebra) -> bool:
    """Return whether an access belongs to an intrinsic that takes the buffer from the registers of a warp."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _AllReduce:
    """A loop `place = op(place, source[..., loop variable])` below conditions, over all work-items of the first axis."""

    conditions: tuple[Expr, ...]
    store: BufferStore
    op: str
    source: Load


def _all_reduce(f: Stmt, extent: Expr) -> _AllReduce | None:
    """Return the all-reduce that a loop of this extent is; None for other statements."""
    if not isinstance(f, For) or f.kind not in ("serial", "unrolled") or f.extent != extent:
        return None
    conditions, s = split_conditions(f.body)
    source = combined_load(s) if isinstance(s, BufferStore) else None
    if not isinstance(s, BufferStore) or source is None:
        return None
    fixed = (*conditions, *s.indices, *source.indices[:-1])
    if source.indices[-1] is not f.var or f.var in free_vars(*fixed):
        return None
    return _AllReduce(conditions, s, s.value.op, source)


def _shuffled(m: Stmt, extent: Expr, registers: dict[Buffer, Buffer]) -> Stmt:
    """Return a reduction as an all-reduce by shuffles, in which all work-items take part, and the update with its result."""
    found = _all_reduce(m, extent)
    if found is None or found.source.buffer not in registers:
        return m
    b, s = found.source.buffer, found.store
    whole = Buffer(f"{b.name}_whole", (), b.dtype, "local")
    offered = load(registers[b], found.source.indices[:-1])
    meeting = For(
        Var(m.bound_vars[0].name), extent, BufferStore(whole, (), offered), marks=LoopMarks(warp_reduce=found.op)
    )
    done: Stmt = BufferStore(
        s.buffer, s.indices, op(found.op, (load(s.buffer, s.indices), load(whole, ())), s.value.dtype)
    )
    for c in reversed(found.conditions):
        done = when(c, done)
    return seq(meeting, done)
