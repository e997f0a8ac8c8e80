"""Proofs that each element of a buffer is touched by one work-item only.

Loops over the work-items of one axis share one index of the launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.injectivity import separates
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, ceildiv, const, free_vars, mul, postorder, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import AXES, Block, For, blocks
from relax_tune.schedules.loop_tree import block_loads, block_value, enclosing, loop_env

# Stride of the work-item in an index, (stride, extent) of loops, and the rest of the index.
_ThreadIndex = tuple[Expr, frozenset[tuple[tuple[Expr, Expr], int]], Expr]


def require_thread_private(func: PrimFunc, buffer: Buffer) -> None:
    """Check that every element a work-item writes is touched by only that work-item.

    Blocks outside all loops over an axis run in every work-item.
    """
    paths = {b: enclosing(func, b) for b in blocks(func.body)}
    users = [b for b in paths if b.body.buffer is buffer or any(x.buffer is buffer for x in block_loads(b))]
    for axis in range(AXES["item"]):
        around = {b: next((p for p in paths[b] if p.kind == "item" and p.axis == axis), None) for b in users}
        thread_loops = [p for b, p in around.items() if p is not None and b.body.buffer is buffer]
        # All accesses below one loop see the same work-item, so there is nothing to prove.
        if not thread_loops or all(p is thread_loops[0] for p in around.values()):
            continue
        outside = next((b for b, p in around.items() if p is None), None)
        if outside is not None or not _same_thread_index(buffer, around, paths):
            raise ScheduleError(
                f"{func.name}: set_scope gives every work-item its own {buffer.name!r}, but block {(outside or users[0]).name!r} "
                "uses elements that another item writes; make its scope shared"
            )


def _same_thread_index(buffer: Buffer, around: dict[Block, For | None], paths: dict[Block, tuple[For, ...]]) -> bool:
    """Return whether all accesses identify the work-item alike.

    One dimension identifies the work-item's number, or one dimension for each of its digits.
    """
    loops = [p for p in around.values() if p is not None]
    if all(simplify(p.extent) is const(1) for p in loops):
        return True  # the first item is the only one
    whole: dict[Var, Expr] = {Var("item"): loops[0].extent}
    base = _digit_base([b for b, _ in around.items()], loops)
    if base is None:
        return _identifies_thread(buffer, around, paths, whole, next(iter(whole)))
    # Blocks that divide the number of the work-item, into warp and lane for instance, use the digits separately.
    digits: dict[Var, Expr] = {Var("high"): ceildiv(loops[0].extent, base), Var("low"): base}
    return any(
        all(_identifies_thread(buffer, around, paths, numbers, one) for one in numbers) for numbers in (whole, digits)
    )


def _digit_base(users: Sequence[Block], loops: Sequence[For]) -> Expr | None:
    """Return the number by which blocks divide the work-item's number; None unless there is exactly one."""
    variables = {p.var for p in loops}
    bases = {
        n.args[1]
        for b in users
        for n in postorder(b.bindings)
        if n.op in ("floordiv", "floormod") and n.args[0] in variables
    }
    return bases.pop() if len(bases) == 1 else None


def _identifies_thread(
    buffer: Buffer,
    around: dict[Block, For | None],
    paths: dict[Block, tuple[For, ...]],
    numbers: Mapping[Var, Expr],
    one: Var,
) -> bool:
    """Return whether some dimension has the same injective form in `one`, a part of the work-item's number, in all accesses."""
    total: Expr = const(0)
    for v, size in numbers.items():
        total = mul(total, size) + v
    indices: list[list[_ThreadIndex | None]] = []
    for block, loop in around.items():
        assert loop is not None
        inner = {p.var: p.extent for p in paths[block] if p is not loop and p.kind != "group"}
        env = loop_env((*paths[block], *(For(v, size, loop.body) for v, size in numbers.items())))
        spots = [block.body.indices] if block.body.buffer is buffer else []
        spots += [x.indices for x in block_loads(block) if x.buffer is buffer]
        for where in spots:
            placed = (simplify(substitute(block_value(block, e), {loop.var: total}), env) for e in where)
            indices.append([_thread_index(e, one, inner, env) for e in placed])
    return any(len({w[d] for w in indices}) == 1 and indices[0][d] is not None for d in range(len(buffer.shape)))


def _thread_index(e: Expr, one: Var, inner: Mapping[Var, Expr], env: Env) -> _ThreadIndex | None:
    """Return the form of an index: stride of the work-item, strides and extents of loops, and the rest.

    None if the index does not identify the work-item.
    """
    extents = {v: inner[v] for v in free_vars(e) if v in inner}
    parts = linear(e, (one, *extents), env)
    if parts is None or one not in parts[0] or not separates((e,), one, extents, env):
        return None
    steps = frozenset(Counter((step, extents[v]) for v, step in parts[0].items() if v in extents).items())
    return parts[0][one], steps, parts[1]
