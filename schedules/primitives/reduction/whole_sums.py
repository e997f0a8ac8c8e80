"""The primitive that sums products of whole numbers in int32: sum_as.

Tests: `tests/schedules/primitives/test_golden.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import f32, i32
from relax_tune.ir.core.expr import Const, Expr, Load, as_int, cast, const, load, loads, mul, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, blocks, map_blocks
from relax_tune.schedules.loop_tree import find_block, require_compute_block, swap_alloc, with_body
from relax_tune.schedules.primitives.reduction.reductions import combiner


def sum_as(func: PrimFunc, block: str, dtype: str) -> PrimFunc:
    """Sum products of whole numbers of at most 16 bits, which are multiplied as f32, in int32; readers of the sum cast it.

    Before: `C[i] += cast(A[i, k], f32) * cast(B[k], f32)`, `D[i] = f(C[i])`
    After: `C[i] += cast(A[i, k], i32) * cast(B[k], i32)`, `D[i] = f(cast(C[i], f32))`
    Checks: nothing else writes the intermediate but its start at 0. The reduction has a constant extent, over which sums of such
    types stay below 2^31. A sum that f32 would round on the way is exact until its end.
    """
    node = find_block(func, block)
    operation, term = combiner(node)
    target = node.body.buffer
    if dtype != "i32" or operation != "add" or target.dtype is not f32 or target not in func.allocs:
        raise ScheduleError(
            f"{func.name}: sum_as expects a sum of products in an intermediate of f32, and i32, got {block!r} and {dtype!r}"
        )
    require_compute_block(func, "sum_as", node)
    steps = [as_int(i.extent) for i in node.iters if i.kind == "reduce"]
    product, largest = _whole(func, term)
    # Below 2^31 the sum is exact in int32, and f32 would round it from 2^24 on.
    if None in steps or prod(n or 0 for n in steps) * largest >= 1 << 31:
        raise ScheduleError(f"{func.name}: sums of {block!r} over {steps} steps may pass 2^31")
    new = replace(target, dtype=i32)
    total = load(new, node.body.indices)

    def read(e: Expr) -> Expr | None:
        return cast(load(new, e.indices), f32) if isinstance(e, Load) and e.buffer is target else None

    def start(s: BufferStore) -> BufferStore:
        if not isinstance(s.value, Const) or s.value.value != 0:
            raise ScheduleError(f"{func.name}: sum_as expects {target.name!r} to start at 0, got {s.value!r}")
        return BufferStore(new, s.indices, const(0, i32))

    def visit(b: Block) -> Block:
        if b is node:
            first = None if b.init is None else start(b.init)
            return replace(b, init=first, body=BufferStore(new, b.body.indices, total + product))
        if b.body.buffer is target:
            return replace(b, body=start(b.body))
        if not any(x.buffer is target for x in loads(b.body.value)):
            return b
        return replace(b, body=BufferStore(b.body.buffer, b.body.indices, transform(b.body.value, read)))

    if any(x.buffer is target for b in blocks(func.body) for x in loads(*b.body.indices)):
        raise ScheduleError(f"{func.name}: {target.name!r} is used as an index")
    changed = with_body(func, map_blocks(func.body, visit))
    return swap_alloc(changed, target, new)


def _whole(func: PrimFunc, e: Expr) -> tuple[Expr, int]:
    """Return a product of casts of whole numbers in i32, and the largest magnitude that their types allow."""
    if e.op == "mul":
        (a, most_a), (b, most_b) = (_whole(func, x) for x in e.args)
        return mul(a, b), most_a * most_b
    (x,) = e.args if e.op == "cast" else (e,)
    if e.op != "cast" or not x.dtype.is_int or x.dtype.bits > 16:
        raise ScheduleError(f"{func.name}: sum_as expects factors that are whole numbers of at most 16 bits, got {e!r}")
    return cast(x, i32), max(abs(n) for n in x.dtype.limits)
