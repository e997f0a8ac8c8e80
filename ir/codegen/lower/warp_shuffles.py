"""Keep `warp` buffers in registers and reduce them with warp shuffles, or put them into shared memory.

The last index of a `warp` buffer is the work-item's index along the first axis. A loop over that index that combines the elements of all
items by add, mul, min or max becomes an all-reduce by shuffles (PTX ISA, "shfl.sync").

Tests: `tests/cuda_emulation/test_emulation.py`, `tests/ir/codegen/test_grid.py`.
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
from relax_tune.ir.core.stmt import BufferStore, For, LoopMarks, Stmt, loops, own_accesses, redirect, rewrite, seq, when
from relax_tune.ir.hardware.intrinsic import match
from relax_tune.ir.hardware.intrinsics import INTRINSICS

# Work-items of a warp.
WARP = 32
# Types that shuffles can exchange.
SHUFFLED_TYPES = (f32, f64, i32, i64)


def lower_warp_buffers(n: Stmt, algebra: Algebra, has_shuffles: bool) -> Stmt:
    """Replace `warp` buffers by registers of the work-items, or by shared memory.

    Registers require that the extent of the first axis is a power of two that divides the warp, and that each item writes only the
    element with its index. Only an all-reduce (add, mul, min, max) or an intrinsic with `warp_operands` may read elements of other items.

    Args:
        has_shuffles: Whether the work-items of a warp can exchange registers.
    """
    buffers = dict.fromkeys(b for m in _walk(n, ()) for b, _i, _w in own_accesses(m[-1]) if b.scope == "warp")
    if not buffers:
        return n
    items = _thread_loop(n, algebra) if has_shuffles else None
    registers: dict[Buffer, Buffer] = {}
    if items is not None:
        registers = {
            b: replace(b, shape=b.shape[:-1], scope="local", row_alignment=None)
            for b in buffers
            if _fits_registers(b, n, items, algebra)
        }
        extent = items.extent
        n = rewrite(n, lambda m: _shuffled(m, extent, registers))
    shared = {b: replace(b, scope="shared") for b in buffers if b not in registers}

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
    # all shuffles stay within a warp, and every warp is complete, as `__shfl_xor_sync` with a full mask requires
    fits = 1 < size <= WARP and size & (size - 1) == 0 and prod(sizes.values()) % WARP == 0
    return longest if fits else None


def _fits_registers(b: Buffer, n: Stmt, items: For, algebra: Algebra) -> bool:
    """Return whether a `warp` buffer can be in registers.

    Every access must be to the element with the item's index, part of an all-reduce, or an operand of an intrinsic of the warp.
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
    in_others = any(algebra.depends(algebra.static(e), (var,)) for e in indices[:-1])
    return not in_others and algebra.static(indices[-1]) == {(var,): 1}


def _is_warp_operand(b: Buffer, path: tuple[Stmt, ...], algebra: Algebra) -> bool:
    """Return whether an access belongs to an intrinsic whose operand is in the registers of a warp."""
    nest = [m for m in path if isinstance(m, For) and m.marks.intrinsic]
    store, intrinsic = path[-1], INTRINSICS.get(nest[0].marks.intrinsic) if nest else None
    if intrinsic is None or not isinstance(store, BufferStore) or nest[-1].body is not store:
        return False
    nest_match = match(intrinsic, nest, store)
    if nest_match is None:
        return False
    parts = {f.var.name: nest_match.loops[f.var] for f in intrinsic.loops if f.var in nest_match.loops}
    return any(
        nest_match.accesses[name][0] is b and _is_last(nest_match.accesses[name][1], parts[loop], algebra)
        for name, loop in intrinsic.warp_operands.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class _AllReduce:
    """A loop `x = op(x, source[..., loop variable])` under conditions, over all work-items of the first axis."""

    conditions: tuple[Expr, ...]
    store: BufferStore
    op: str
    source: Load


def _all_reduce(f: Stmt, extent: Expr) -> _AllReduce | None:
    """Return a loop of this extent as an all-reduce; None for other statements."""
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
    """Return a reduction as an all-reduce by shuffles that all work-items execute, followed by the update with its result."""
    reduction = _all_reduce(m, extent)
    if reduction is None or reduction.source.buffer not in registers:
        return m
    b, s = reduction.source.buffer, reduction.store
    total = Buffer(f"{b.name}_whole", (), b.dtype, "local")
    operand = load(registers[b], reduction.source.indices[:-1])
    shuffles = For(
        Var(m.bound_vars[0].name), extent, BufferStore(total, (), operand), marks=LoopMarks(warp_reduce=reduction.op)
    )
    combined = op(reduction.op, (load(s.buffer, s.indices), load(total, ())), s.value.dtype)
    update: Stmt = BufferStore(s.buffer, s.indices, combined)
    for c in reversed(reduction.conditions):
        update = when(c, update)
    return seq(shuffles, update)
