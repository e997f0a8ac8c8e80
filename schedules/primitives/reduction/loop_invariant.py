"""The primitive that moves loop-invariant factors out of a sum of products: hoist_factors."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Load,
    Var,
    and_,
    free_vars,
    le,
    load,
    loads,
    lt,
    mul,
    substitute,
    transform,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, blocks, map_blocks
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import find_block, require_compute_block, with_body
from relax_tune.schedules.primitives.blocks.compute_location import spatial_of
from relax_tune.schedules.primitives.reduction.reductions import combiner


def hoist_factors(func: PrimFunc, block: str) -> PrimFunc:
    """Move the factors that are invariant in the reduction out of a sum of products; readers of the sum multiply by them.

    Before: `C[i] += A[i, k] * (B[k] * S[i])`, `D[i] = f(C[i])`
    After: `C[i] += A[i, k] * B[k]`, `D[i] = f(C[i] * S[i])`
    Checks: the block adds products of floats at plain iterators into an intermediate that starts at 0 and nothing else writes.
    Its reduction is not empty. The factors are constants or in-range reads of buffers that only `prepack` blocks write. At
    least one factor stays. It rounds and overflows at other places, like any other order of summing.
    """
    node = find_block(func, block)
    operation, term = combiner(node)
    target = node.body.buffer
    steps = [i for i in node.iters if i.kind == "reduce"]
    if operation != "add" or not steps or not term.dtype.is_float or target not in func.allocs:
        raise ScheduleError(
            f"{func.name}: hoist_factors expects a sum of products of floats in an intermediate, got {block!r}"
        )
    require_compute_block(func, "hoist_factors", node)
    starts = [b.body.value for b in writers(func, target) if b is not node]
    starts += [] if node.init is None else [node.init.value]
    if not starts or any(v.value != 0 for v in starts):
        raise ScheduleError(f"{func.name}: hoist_factors expects {target.name!r} to start at 0, got {starts}")
    env = Env()
    for i in node.iters:
        env = env.with_loop(i.var, i.extent)
    if any(prove(le(1, i.extent)) is not Proof.YES for i in steps):
        raise ScheduleError(f"{func.name}: hoist_factors expects block {block!r} to sum over something")
    spatial = spatial_of(node)
    remaining: list[Expr] = []
    moved: list[Expr] = []
    for factor in _factors(term):
        plain = _simplified(factor, env)
        (moved if _may_move(func, plain, {i.var for i in steps}, spatial, env) else remaining).append(plain)
    if not moved or not remaining:
        raise ScheduleError(f"{func.name}: no factor of {block!r} can leave the sum while another stays, got {term!r}")
    constant = reduce(mul, moved)
    inner = reduce(mul, remaining)
    total = load(target, node.body.indices)
    changed = replace(node, body=replace(node.body, value=total + inner))

    def read(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer is target:
            return mul(e, substitute(constant, dict(zip(spatial, e.indices, strict=True))))
        return None

    def visit(b: Block) -> Block:
        if b is node:
            return changed
        if b.body.buffer is target or not any(x.buffer is target for x in loads(b.body.value)):
            return b
        return replace(b, body=BufferStore(b.body.buffer, b.body.indices, transform(b.body.value, read)))

    if any(x.buffer is target for b in blocks(func.body) for x in loads(*b.body.indices)):
        raise ScheduleError(f"{func.name}: {target.name!r} is an index somewhere")
    return with_body(func, map_blocks(func.body, visit))


def _factors(e: Expr) -> list[Expr]:
    """Return the leaves of a product, left to right."""
    factors: list[Expr] = []
    stack = [e]
    while stack:
        n = stack.pop()
        if n.op == "mul":
            stack.extend(reversed(n.args))
        else:
            factors.append(n)
    return factors


def _simplified(e: Expr, env: Env) -> Expr:
    """Simplify the indices of the loads in `e`."""
    return transform(
        e, lambda n: load(n.buffer, tuple(simplify(i, env) for i in n.indices)) if isinstance(n, Load) else None
    )


def _may_move(func: PrimFunc, e: Expr, steps: set[Var], spatial: list[Var], env: Env) -> bool:
    """Return whether a factor has the same value wherever the element it belongs to is read."""
    if isinstance(e, Const):
        return True
    variables = set(free_vars(e))
    accesses = loads(e)
    if not accesses or steps & variables or variables - set(spatial) - set(func.symbols):
        return False
    return all(
        all(w.role == "prepack" for w in writers(func, x.buffer))
        and all(
            prove(and_(le(0, i), lt(i, d)), env) is Proof.YES for i, d in zip(x.indices, x.buffer.shape, strict=True)
        )
        for x in accesses
    )
