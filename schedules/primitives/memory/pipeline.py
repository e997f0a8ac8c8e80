"""The primitive that prefetches into a circular buffer: software_pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import extent_of, is_dense, linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    Tunable,
    Var,
    and_,
    as_int,
    conjuncts,
    const,
    expr,
    floormod,
    free_vars,
    le,
    loads,
    lt,
    mul,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, Stmt, blocks, map_blocks, seq, statements
from relax_tune.schedules.independence import updates_in_place, writers
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    clone_stmt,
    enclosing,
    find_block,
    find_loop,
    fresh,
    loop_env,
    readers,
    rebind,
    replace_node,
    require_compute_block,
    with_body,
)
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.memory.layouts import with_layout

MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """The part of a dimension that one iteration writes.

    Attributes:
        start, extent: The interval.
        step: Stride of `start` per iteration.
    """

    start: Expr
    extent: Expr
    step: Expr


def software_pipeline(func: PrimFunc, block: str, loop: str, stages: ExprLike = 2) -> PrimFunc:
    """Fill an intermediate for a later iteration of a loop while this one uses earlier data (stages 2: double buffering).

    Before: `for k in range(N): (for r in range(T): B[k * T + r] = f(k * T + r)); S(B)`
    After, with stages 2: `B` is a circular buffer of 2 * T elements, `for p in range(1): if p < N: B[...] = f(p * T + r)`, then
    `for k in range(N): (if k + 1 < N: for r in range(T): B[((k + 1) * T + r) % (2 * T)] = f((k + 1) * T + r)); S(B)`
    Checks: there are 2 to 16 stages, a number or a tunable. The block's nest is one of several statements of a serial
    loop. Only the block writes the intermediate. One iteration writes a box that moves with the loop along one
    dimension, and no condition but bounds omits elements that others read. All readers come later in the loop and read
    only elements of their own iteration. Nothing in the loop writes the block's inputs; no `prepack` block is in it.
    Outer loops that move the same dimension are sequential, unless the buffer is local to their threads.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    require_serial(func, target, "software_pipeline")
    stages = expr(stages)
    known = stages.domain if isinstance(stages, Tunable) else (as_int(stages) or 0,)
    if not all(2 <= number <= MAX_STAGES for number in known):
        raise ScheduleError(f"{func.name}: software_pipeline expects from two to {MAX_STAGES} stages, got {stages!r}")
    stmt = _statement(func, node, target)
    buffer = node.body.buffer
    path = enclosing(func, node)
    at = path.index(target) + 1
    env = loop_env(path[:at])
    spans = written_ranges(func, node, path, at, env)
    moving = [d for d, s in enumerate(spans) if s.step is not const(0)]
    # a single iteration (some value of a tunable) moves nothing: any dimension will do
    still = not moving and bool(spans) and prove(le(target.extent, 1), env) is Proof.YES
    moving = [0] if still else moving
    if len(moving) != 1 or (not still and prove(le(1, spans[moving[0]].step), env) is not Proof.YES):
        raise ScheduleError(
            f"{func.name}: software_pipeline expects {loop!r} to move what {block!r} writes along one dimension of "
            f"{buffer.name!r}, got {len(moving)}"
        )
    (along,) = moving
    _require_own_storage(func, buffer, spans[along], path[:at])
    for reader in readers(func, buffer):
        require_reads_own_iteration(func, node, reader, target, spans, env)
    # The data of all stages. Neighbouring stages may overlap, so each further one adds only its step.
    ring = simplify(mul(spans[along].step, stages - 1) + spans[along].extent)
    shape = (*buffer.shape[:along], ring, *buffer.shape[along + 1 :])

    def where(indices: Sequence[Expr]) -> tuple[Expr, ...]:
        return (*indices[:along], floormod(indices[along], ring), *indices[along + 1 :])

    first = Var(fresh(func, f"{loop}_first"))
    # the loop may not run at all, so its bounds are no facts here
    before = loop_env(path[: at - 1]).with_loop(first, stages - 1)
    early = _only_where(rebind(stmt, {target.var: first}), lt(first, target.extent), before)
    prologue = For(first, simplify(stages - 1), clone_stmt(func, early, "_first"))
    ahead = _only_where(
        rebind(stmt, {target.var: target.var + (stages - 1)}), lt(target.var + (stages - 1), target.extent), env
    )
    changed = replace(target, body=replace_node(target.body, stmt, ahead))
    pipelined = with_body(func, replace_node(func.body, target, seq(prologue, changed)))
    return with_layout(pipelined, buffer, replace(buffer, shape=shape), where)


def _only_where(s: Stmt, condition: Expr, env: Env) -> Stmt:
    # a condition that depends on outer loops is never always true, and the search for a proof takes long
    differs = any(v in env.bounds for v in free_vars(condition.children[1]))
    if not differs and prove(condition, env) is Proof.YES:
        return s
    return map_blocks(s, lambda b: replace(b, predicate=and_(condition, b.predicate)))


def _statement(func: PrimFunc, node: Block, target: For) -> Stmt:
    """Return the statement of the loop's body that is the block's nest. Raises ScheduleError."""
    buffer, inside = node.body.buffer, blocks(target.body)
    parts = statements(target.body)
    stmt = next((s for s in parts if blocks(s) == (node,)), None)
    if stmt is None or len(parts) < 2:
        raise ScheduleError(
            f"{func.name}: software_pipeline expects the nest of {node.name!r} as one of several statements of {target.var.name!r}"
        )
    require_compute_block(func, "software_pipeline", *inside)
    if buffer not in func.allocs or len(writers(func, buffer)) != 1 or updates_in_place(node):
        raise ScheduleError(f"{func.name}: software_pipeline expects {node.name!r} to make an intermediate by itself")
    after = set(inside[inside.index(node) + 1 :])
    early = [b.name for b in readers(func, buffer) if b not in after]
    if early:
        raise ScheduleError(
            f"{func.name}: software_pipeline expects readers of {buffer.name!r} after {node.name!r} in {target.var.name!r}; "
            f"got {', '.join(early)}"
        )
    used = {x.buffer for x in block_loads(node)} | {
        x.buffer for x in loads(*(() if node.init is None else (node.init.value,)))
    }
    for other in inside:
        if other is not node and other.body.buffer in used:
            raise ScheduleError(
                f"{func.name}: {node.name!r} cannot run ahead of {other.name!r}, which makes what it reads"
            )
    return stmt


def written_ranges(func: PrimFunc, node: Block, path: Sequence[For], at: int, env: Env) -> list[WrittenRange]:
    """Return the range that one iteration of `path[at - 1]` writes per dimension. Raises ScheduleError unless it is a box."""
    target, inner = path[at - 1], {p.var: p.extent for p in path[at:]}
    for it, bound in zip(node.iters, node.bindings):
        if it.kind == "reduce" and {p.var for p in path[:at]} & set(free_vars(bound)):
            raise ScheduleError(
                f"{func.name}: the reduction over {it.var.name!r} of {node.name!r} goes on through iterations"
            )
    ranges, used, inside = list[WrittenRange](), set[Var](), loop_env(path)
    for e in (simplify(block_value(node, i), inside) for i in node.body.indices):
        extents = {v: inner[v] for v in free_vars(e) if v in inner}
        parts = linear(e, (target.var, *extents), env)
        if parts is None or used & set(extents) or not is_dense(e, extents, env):
            raise ScheduleError(
                f"{func.name}: what {node.name!r} writes in one iteration of {target.var.name!r} is no box: {e!r}"
            )
        used |= set(extents)
        step = parts[0].get(target.var, const(0))
        ranges.append(WrittenRange(simplify(parts[1] + mul(step, target.var), env), extent_of(e, extents, env), step))
    return ranges


def _require_own_storage(func: PrimFunc, buffer: Buffer, span: WrittenRange, around: Sequence[For]) -> None:
    for p in around[:-1]:
        threads = p.kind in ("parallel", "group", "item")
        # The ring holds one sequence of iterations. Two threads at different positions of it would overwrite each
        # other's slots.
        if p.var in free_vars(span.start) and not (
            p.kind in ("serial", "unrolled") or (threads and buffer.scope == "local")
        ):
            raise ScheduleError(
                f"{func.name}: iterations of the {p.kind} loop {p.var.name!r} would share the ring of {buffer.name!r}; "
                "make it local first"
            )


def require_reads_own_iteration(
    func: PrimFunc, node: Block, reader: Block, target: For, spans: Sequence[WrittenRange], env: Env
) -> None:
    """Check that a reader reads only elements that the block writes in the same iteration. Raises ScheduleError."""
    buffer, known = node.body.buffer, conjuncts(reader.predicate)
    bounds: list[Expr] = []
    for e, dim in zip(node.body.indices, buffer.shape):
        for it, bound in zip(node.iters, node.bindings):
            if it.var is e and simplify(it.extent) is simplify(dim):
                bounds += [le(0, bound), lt(bound, it.extent)]
    unknown = [c for c in conjuncts(node.predicate) if c not in known and c not in bounds]
    if unknown:
        raise ScheduleError(
            f"{func.name}: {node.name!r} runs only where {unknown[0]!r}, which {reader.name!r} does not ask for"
        )
    path = enclosing(func, reader)
    inner, inside = {p.var: p.extent for p in path[path.index(target) + 1 :]}, loop_env(path)
    for access in block_loads(reader):
        if access.buffer is not buffer:
            continue
        for e, span in zip((simplify(block_value(reader, i), inside) for i in access.indices), spans):
            extents = {v: inner[v] for v in free_vars(e) if v in inner}
            parts = None if loads(e) else linear(e, tuple(extents), env)
            ends = None
            if parts is not None and all(prove(le(0, k), env) is Proof.YES for k in parts[0].values()):
                ends = [le(span.start, parts[1]), le(parts[1] + extent_of(e, extents, env), span.start + span.extent)]
            if ends is None or any(prove(c, env) is not Proof.YES for c in ends):
                raise ScheduleError(
                    f"{func.name}: {reader.name!r} may read elements of {buffer.name!r} that another iteration of "
                    f"{target.var.name!r} makes: {e!r}"
                )
