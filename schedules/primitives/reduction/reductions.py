"""Primitives for reductions: decompose_reduction, rfactor, tree_reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.injectivity import separates
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import (
    TRUE,
    Const,
    Expr,
    Var,
    and_,
    as_int,
    conjuncts,
    const,
    free_vars,
    le,
    load,
    lt,
    op,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import EMPTY, Block, BufferStore, For, IterVar, Stmt, blocks, seq
from relax_tune.ir.deduce.pattern_kinds import starts_neutral
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_block,
    find_loop,
    fresh,
    loop_env,
    replace_node,
    with_body,
)

ASSOCIATIVE = frozenset({"add", "max", "min", "mul"})


def decompose_reduction(func: PrimFunc, block: str, loop: str) -> PrimFunc:
    """Separate a reduction's initial value from its updates.

    Before: `for i: for k: (if k == 0: C[i] = 0); C[i] = C[i] + A[i, k]`
    After: `for i: C[i] = 0; for k: C[i] = C[i] + A[i, k]`
    Checks: `loop` encloses the block. No reduction iterator depends on a loop outside `loop`. No loop from there on repeats the
    reduction of an element. The initial value drops conditions on the reduction; these bound no spatial iterator of its domain.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    if node.init is None:
        raise ScheduleError(f"{func.name}: block {block!r} has no initial value to separate")
    path = enclosing(func, node)
    if target not in path:
        raise ScheduleError(f"{func.name}: {loop!r} is not around block {block!r}")
    outer, inner = path[: path.index(target)], path[path.index(target) :]
    for it, bound in zip(node.iters, node.bindings):
        if it.kind == "reduce" and any(p.var in free_vars(bound) for p in outer):
            raise ScheduleError(f"{func.name}: the reduction over {it.var.name!r} starts outside {loop!r}")
    _require_once(func, node, inner, path)
    spatial = [(i, b) for i, b in zip(node.iters, node.bindings) if i.kind == "spatial"]
    feeding = {v for _, b in spatial for v in free_vars(b)} & {p.var for p in path}
    copies: dict[Var, Expr] = {}
    nest: list[For] = []
    names: list[str] = []
    reduce_vars = {v for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    for p in inner:
        runs = prove(le(1, p.extent), loop_env(path[: path.index(p)])) is Proof.YES
        # a loop of at most one iteration selects no element, but may run zero times
        if p.var in feeding or (p.var not in reduce_vars and not runs):
            names.append(fresh(func, f"{p.var.name}_init", names))
            var = Var(names[-1])
            copies[p.var] = var
            nest.append(replace(p, var=var, body=EMPTY, tail="predicate"))
    skipped = reduce_vars - feeding
    conditions = [c for c in conjuncts(node.predicate) if not skipped & set(free_vars(c))]
    for c in conjuncts(node.predicate):
        if c not in conditions and not _stays_in_range(
            spatial, feeding & set(free_vars(c)), loop_env(path), conditions
        ):
            raise ScheduleError(
                f"{func.name}: the condition {c!r} of block {block!r} ties its reduction to the elements it writes"
            )
    vars_ = {i.var: Var(i.var.name) for i, _ in spatial}
    as_expr: dict[Var, Expr] = dict(vars_)
    init: Stmt = Block(
        fresh(func, f"{block}_init"),
        tuple(replace(i, var=vars_[i.var]) for i, _ in spatial),
        tuple(substitute(b, copies) for _, b in spatial),
        BufferStore(
            node.init.buffer,
            tuple(substitute(e, as_expr) for e in node.init.indices),
            substitute(node.init.value, as_expr),
        ),
        predicate=and_(*(substitute(c, copies) for c in conditions)),
    )
    for p in reversed(nest):
        init = replace(p, body=init)
    body = replace_node(target, node, replace(node, init=None))
    return with_body(func, replace_node(func.body, target, seq(init, body)))


def _require_once(func: PrimFunc, node: Block, inner: Sequence[For], path: Sequence[For]) -> None:
    """Check that each inner loop steps through the reduction or through the elements. Raises ScheduleError."""
    steps = {v for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    where = [block_value(node, e) for e in node.body.indices]
    env = loop_env(path)
    for at, p in enumerate(inner):
        ranges = {q.var: q.extent for q in inner[at + 1 :]}
        if p.var not in steps and not separates(where, p.var, ranges, env):
            raise ScheduleError(f"{func.name}: loop {p.var.name!r} may repeat the reduction of block {node.name!r}")


def _stays_in_range(spatial: Sequence[tuple[IterVar, Expr]], moved: set[Var], env: Env, facts: Sequence[Expr]) -> bool:
    """Return whether the spatial iterators that depend on `moved` stay inside their domains under the facts."""
    # The dropped condition may be all that keeps the store of an initial value inside the buffer.
    for fact in facts:
        env = env.with_fact(fact)
    return all(
        prove(and_(le(0, b), lt(b, i.extent)), env) is Proof.YES for i, b in spatial if moved & set(free_vars(b))
    )


def combiner(block: Block) -> tuple[str, Expr]:
    """Return (operation, x) of an update `C = op(C, x)`. Raises ScheduleError for any other form."""
    value = block.body.value
    accumulator = load(block.body.buffer, block.body.indices)
    if value.op in ASSOCIATIVE and value.args[0] is accumulator:
        return value.op, value.args[1]
    raise ScheduleError(
        f"block {block.name!r}: expected `C = op(C, x)` with op one of {sorted(ASSOCIATIVE)}, got {value!r}"
    )


def rfactor(
    func: PrimFunc, block: str, loop: str, scope: Literal["local", "global"] = "local", whole: bool = False
) -> PrimFunc:
    """Give every iteration of a reduction loop its own accumulator, and combine the accumulators afterwards.

    rfactor: Suriana, Adams & Kamil, CGO 2017.

    Before: `for i: for k0: for k1: B[i] += A[i, k0 * F + k1]`
    After: `for i: (for k0: for k1: R[i, k1] += A[i, k0 * F + k1]); (for r: B[i] += R[i, r])`
    Checks: `loop` feeds exactly one reduction iterator, linearly, with an extent that no loop around it changes. The block combines
    with an associative operation, from an initial value that may be combined more than once. If that is stored separately already,
    accumulators start from the neutral element. Nothing else in its outermost reduction loop touches the block's output. No loop is
    over elements and steps at once.

    The final combination follows the outermost reduction loop of the block; loops over elements inside that one get copies
    around it. Initial values are stored separately, as by `decompose_reduction`: a condition may keep an accumulator from its
    first point. They are stored inside `loop` if that is the outermost one. With `whole` they stay with the sums, which remain a
    reduction with its initial value; the block must have no condition.

    Above 60 lines, since the nests of the accumulators and of the combination share the checks and variables of one block.
    """
    if scope not in ("local", "global"):
        raise ScheduleError(f"{func.name}: rfactor expects accumulators in local or global memory, got {scope!r}")
    node, target = find_block(func, block), find_loop(func, loop)
    operation, term = combiner(node)
    old = node.body.buffer
    first = const(_neutral(operation, old.dtype), old.dtype) if node.init is None else node.init.value
    if node.init is not None and not starts_neutral(node):
        raise ScheduleError(
            f"{func.name}: rfactor would combine the initial value {first!r} of {block!r} once per accumulator"
        )
    path = enclosing(func, node)
    fed_iters = [(i, b) for i, b in zip(node.iters, node.bindings) if target.var in free_vars(b)]
    if target not in path or len(fed_iters) != 1 or fed_iters[0][0].kind != "reduce":
        raise ScheduleError(f"{func.name}: rfactor expects {loop!r} to feed one reduction iterator of {block!r}")
    it, bound = fed_iters[0]
    if {p.var for p in path} & set(free_vars(target.extent)):  # as many accumulators as the longest has
        raise ScheduleError(
            f"{func.name}: rfactor expects as many accumulators for every element, got {target.extent!r} iterations of {loop!r}"
        )
    reduce_loops = [
        p for p in path if any(p.var in free_vars(b) for i, b in zip(node.iters, node.bindings) if i.kind == "reduce")
    ]
    others = [p for p in reduce_loops if p is not target and p.var in free_vars(bound)]
    if linear(bound, tuple(p.var for p in (*others, target))) is None:
        raise ScheduleError(f"{func.name}: rfactor expects {it.var.name!r} linear in its loops, got {bound!r}")
    elements = {v for i, b in zip(node.iters, node.bindings) if i.kind == "spatial" for v in free_vars(b)}
    mixed = next((p for p in reduce_loops if p.var in elements), None)
    if mixed is not None:  # its elements have no loop where the combination is
        raise ScheduleError(
            f"{func.name}: rfactor expects loops of {block!r} over elements or over steps, got {mixed.var.name!r} over both"
        )
    top = reduce_loops[0]
    _require_own_nest(func, node, top)
    partial = Buffer(fresh(func, f"{old.name}_rf"), (*old.shape, target.extent), old.dtype, scope)
    lane = Var(f"v{target.var.name}")
    rest = [(IterVar(Var(f"v{p.var.name}"), p.extent, "reduce"), p.var) for p in others]
    inside: dict[Var, Expr] = {target.var: lane, **{v: i.var for i, v in rest}}
    index = substitute(bound, inside)
    where = (*node.body.indices, lane)
    rest_of_iters = [(i, b) for i, b in zip(node.iters, node.bindings) if i is not it]
    one_partial = not rest and all(i.kind == "spatial" for i, _ in rest_of_iters)
    # If every accumulator takes a single term, that is stored, and no initial value is read back.
    start = first if one_partial else load(partial, where)
    factored = Block(
        fresh(func, f"{block}_rf"),
        (*(i for i, _ in rest_of_iters), IterVar(lane, target.extent), *(i for i, _ in rest)),
        (*(b for _, b in rest_of_iters), target.var, *(v for _, v in rest)),
        BufferStore(partial, where, _combine(operation, start, substitute(term, {it.var: index}))),
        None if one_partial else BufferStore(partial, where, first),
        node.predicate,
    )
    names = [factored.name]
    names.append(fresh(func, f"{block}_r", names))
    r = Var(names[-1])
    copies: dict[Var, Expr] = {}
    reduce_vars = {p.var for p in reduce_loops}
    between = [p for p in path[path.index(top) :] if p not in reduce_loops]
    for p in between:
        if reduce_vars & set(free_vars(p.extent)):
            raise ScheduleError(
                f"{func.name}: rfactor expects loops over elements inside the reduction that do not depend on it, got "
                f"{p.extent!r} for {p.var.name!r}"
            )
        names.append(fresh(func, f"{p.var.name}_r", names))
        copies[p.var] = Var(names[-1])
    fresh_vars = {i.var: Var(i.var.name) for i, _ in rest_of_iters}
    as_expr: dict[Var, Expr] = dict(fresh_vars)
    v_r = Var("vr")
    spot = tuple(substitute(e, as_expr) for e in node.body.indices)
    spatial = [
        (replace(i, var=fresh_vars[i.var]), substitute(b, copies)) for i, b in rest_of_iters if i.kind == "spatial"
    ]
    guard = and_(*(c for c in conjuncts(node.predicate) if not reduce_vars & set(free_vars(c))))
    # The combination keeps the block's name: it writes the output, and rules go on scheduling that by name.
    final: Stmt = Block(
        block,
        (*(i for i, _ in spatial), IterVar(v_r, target.extent, "reduce")),
        (*(b for _, b in spatial), r),
        BufferStore(old, spot, _combine(operation, load(old, spot), load(partial, (*spot, v_r)))),
        None if node.init is None else BufferStore(old, spot, substitute(node.init.value, as_expr)),
        substitute(guard, copies),
    )
    for p in reversed(between):
        var = copies[p.var]
        assert isinstance(var, Var)
        kind = p.kind if p.kind in ("vectorized", "unrolled") else "serial"
        final = For(var, p.extent, final, kind)
    body = seq(replace_node(top, node, factored), For(r, target.extent, final))
    result = replace(func, body=replace_node(func.body, top, body), allocs=(*func.allocs, partial))
    if whole and not one_partial and node.predicate is not TRUE:
        raise ScheduleError(
            f"{func.name}: rfactor expects a block that runs everywhere to keep initial values with its sums, got {node.predicate!r}"
        )
    if not one_partial and not whole:
        inner = reduce_loops[1] if target is top and len(reduce_loops) > 1 else top
        return decompose_reduction(result, factored.name, inner.var.name)
    if any(target.var in free_vars(c) for c in conjuncts(node.predicate)):
        raise ScheduleError(
            f"{func.name}: some iterations of {loop!r} are skipped, whose accumulators nothing would set"
        )
    return result


def _require_own_nest(func: PrimFunc, node: Block, top: For) -> None:
    """Check that no other block inside the outermost reduction loop touches the block's output. Raises ScheduleError."""
    for other in blocks(top):
        buffer = node.body.buffer
        if other is not node and (other.body.buffer is buffer or buffer in (x.buffer for x in block_loads(other))):
            raise ScheduleError(
                f"{func.name}: rfactor expects no other block to use {buffer.name!r} next to {node.name!r} inside {top.var.name!r}, which "
                f"{other.name!r} touches"
            )


def _combine(operation: str, a: Expr, b: Expr) -> Expr:
    return op(operation, (a, b), a.dtype)


def tree_reduce(func: PrimFunc, block: str) -> PrimFunc:
    """Combine a small constant number of elements in one expression, as a balanced tree.

    Before: `for r in range(4): B[i] = B[i] + R[i, r]` (from an initial value that is neutral)
    After: `B[i] = (R[i, 0] + R[i, 1]) + (R[i, 2] + R[i, 3])`
    Checks: one reduction iterator, of constant extent at most 64, with its own loop. The initial value is neutral for the
    operation. No predicate depends on the loop.
    """
    node = find_block(func, block)
    operation, term = combiner(node)
    reduce = [(i, b) for i, b in zip(node.iters, node.bindings) if i.kind == "reduce"]
    if len(reduce) != 1 or node.init is None:
        raise ScheduleError(
            f"{func.name}: tree_reduce expects block {block!r} with one reduction iterator and its initial value"
        )
    it, bound = reduce[0]
    count = as_int(it.extent)
    loop = next((p for p in enclosing(func, node) if p.var is bound), None)
    if count is None or not 1 <= count <= 64 or loop is None or loop.body is not node:
        raise ScheduleError(
            f"{func.name}: tree_reduce expects a reduction over a small constant extent innermost, got {it.extent!r}"
        )
    if not _is_neutral(operation, node.init.value):
        raise ScheduleError(f"{func.name}: {node.init.value!r} is not neutral for {operation!r}")
    if loop.var in free_vars(node.predicate):
        raise ScheduleError(f"{func.name}: block {block!r} skips some elements of the reduction")
    level = [substitute(term, {it.var: const(a)}) for a in range(count)]
    while len(level) > 1:
        pairs = [_combine(operation, a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    others = [(i, b) for i, b in zip(node.iters, node.bindings) if i is not it]
    combined = replace(
        node,
        iters=tuple(i for i, _ in others),
        bindings=tuple(b for _, b in others),
        body=replace(node.body, value=level[0]),
        init=None,
    )
    return with_body(func, replace_node(func.body, loop, combined))


def _neutral(operation: str, dtype: DType) -> float:
    """Return the neutral element of the operation."""
    if operation in ("add", "mul"):
        return 0 if operation == "add" else 1
    if dtype.is_float:
        return -math.inf if operation == "max" else math.inf
    limits = np.iinfo(dtype.numpy)
    return int(limits.min if operation == "max" else limits.max)


def _is_neutral(operation: str, value: Expr) -> bool:
    if not isinstance(value, Const):
        return False
    neutral = {"add": 0.0, "mul": 1.0, "max": -math.inf, "min": math.inf}[operation]
    return value.value == neutral
