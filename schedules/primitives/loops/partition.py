"""Primitives that divide a loop in two: partition, by its iterations, and fission, by its statements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, ExprLike, Var, and_, conjuncts, free_vars, le, mul, substitute, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import (
    Block,
    For,
    IterKind,
    IterVar,
    Stmt,
    blocks,
    loops,
    map_blocks,
    replace_buffers,
    rewrite,
    seq,
    statements,
)
from relax_tune.schedules.loop_tree import (
    block_value,
    clone_stmt,
    enclosing,
    find_loop,
    fresh,
    loop_env,
    rebind,
    replace_node,
    require_compute_block,
    with_body,
    with_iters,
)
from relax_tune.schedules.primitives.arguments import positive, scalar
from relax_tune.schedules.primitives.loops.loops import (
    accesses,
    require_same_iteration,
    require_serial,
    same_disjoint_stride,
)


def partition(func: PrimFunc, loop: str, factor: ExprLike | None = None, at: ExprLike | None = None) -> PrimFunc:
    """Divide the iterations of a loop into a main loop and a tail.

    The main loop covers a multiple of `factor` iterations, or the first `at` ones.

    Before: `for i in range(N): S(i)`
    After: `for i in range(N // f * f): S(i)` then `for i_tail in range(N % f): S(N // f * f + i_tail)`; with `at` = p:
    `for i in range(p): S(i)` then `for i_tail in range(N - p): S(p + i_tail)`
    Checks: the loop is serial; either `factor` is positive or `at` provably within the loop. No grid axis and no `prepack`
    block is below it. It feeds either spatial or reduction iterators of a block, over rectangular loops. The order of the
    iterations stays, so every function keeps its meaning. The tail continues the sums of the main loop. A local or shared
    buffer that is private to an iteration gets a copy for the tail. Splitting the main loop by the factor needs no predicate.
    Conditions and clamps that a part's iterations decide are dropped.
    """
    node = find_loop(func, loop)
    require_serial(func, node, "partition")
    for below in loops(node.body):
        # A grid axis is the launch itself; two loops over it would need two launches.
        if below.kind in ("group", "item"):
            raise ScheduleError(f"{func.name}: partition would run the grid axis {below.var.name!r} in two loops")
    require_compute_block(func, "partition", *blocks(node.body))
    outer = enclosing(func, node)
    length, left = _split_extents(func, node, factor, at)
    rest = Var(fresh(func, f"{loop}_tail"))
    paths = {b: (*outer, *enclosing(func, b)[len(outer) :]) for b in blocks(node.body)}
    main = map_blocks(node.body, lambda b: _over_subdomain(func, b, node, paths[b], None, length))
    tail = map_blocks(node.body, lambda b: _over_subdomain(func, b, node, paths[b], length, left))
    tail = clone_stmt(func, _shift_tail(tail, node.var, rest, length), "_tail")
    # Lowering shrinks a buffer to what one iteration touches, which it can do only if a single loop moves through it.
    clones = {b: replace(b, name=fresh(func, f"{b.name}_tail")) for b in _iteration_private_buffers(func, node)}
    after = For(rest, left, replace_buffers(tail, clones))
    body = replace_node(func.body, node, seq(replace(node, extent=length, body=main), after))
    return replace(func, body=body, allocs=(*func.allocs, *clones.values()))


def fission(func: PrimFunc, loop: str, block: str) -> PrimFunc:
    """Divide the body of a loop after the statement that holds a block, into two loops (loop fission).

    Undoes `fuse_sibling_loops`.

    Before: `for i in range(N): P(i); Q(i)`
    After: `for i in range(N): P(i)` then `for i_after in range(N): Q(i_after)`
    Checks: the loop is serial; its body has statements after the one with the block, and no `prepack` block. Accesses of Q that
    conflict with P are at the same iteration.
    """
    node = find_loop(func, loop)
    require_serial(func, node, "fission")
    parts = statements(node.body)
    at = next((k for k, p in enumerate(parts) if any(b.name == block for b in blocks(p))), None)
    if at is None or at + 1 == len(parts):
        names = ", ".join(b.name for b in blocks(node.body))
        raise ScheduleError(
            f"{func.name}: fission expects statements of {loop!r} behind the one with {block!r}; in it are {names}"
        )
    require_compute_block(func, "fission", *blocks(node.body))
    first, second = replace(node, body=seq(*parts[: at + 1])), seq(*parts[at + 1 :])
    require_same_iteration(func, "fission", node, first.body, second)
    var = Var(fresh(func, f"{loop}_after"))
    after = replace(node, var=var, body=rebind(second, {node.var: var}))
    return with_body(func, replace_node(func.body, node, seq(first, after)))


def _split_extents(func: PrimFunc, node: For, factor: ExprLike | None, at: ExprLike | None) -> tuple[Expr, Expr]:
    """Return the extents of the main loop and of the tail. Raises ScheduleError."""
    name = f"partition({node.var.name!r})"
    if factor is not None and at is None:
        f = positive(func, name, factor)
        return simplify(mul(node.extent // f, f)), simplify(node.extent % f)
    if at is None or factor is not None:
        raise ScheduleError(f"{func.name}: {name} expects either a factor or where to cut, got {factor!r} and {at!r}")
    point = scalar(func, name, at)
    if prove(and_(le(0, point), le(point, node.extent)), loop_env(enclosing(func, node))) is not Proof.YES:
        raise ScheduleError(
            f"{func.name}: {name} cannot prove that {point!r} is from 0 to the extent {node.extent!r}, which "
            f"min({point!r}, {node.extent!r}) would be"
        )
    return simplify(point), simplify(node.extent - point)


def _over_subdomain(
    func: PrimFunc, block: Block, node: For, path: Sequence[For], start: Expr | None, extent: Expr
) -> Block:
    """Restrict a block to this part's domain, with one new iterator for each loop that `node` shares iterators with.

    Args:
        start: The first iteration of a tail, which stores no initial value where it continues a reduction.
    """
    around = {p.var: p for p in path}
    moved, fed = {node.var}, set[Var]()
    while True:
        # An iterator can be restricted only together with all loops that feed it, and these with all iterators that they feed.
        moving = {i.var for i, b in zip(block.iters, block.bindings) if moved & set(free_vars(b))}
        wider = {v for i, b in zip(block.iters, block.bindings) if i.var in moving for v in free_vars(b) if v in around}
        if moving == fed and wider <= moved:
            break
        fed, moved = moving, moved | wider
    if not fed:
        return block
    kinds = {i.kind for i in block.iters if i.var in fed}
    # If the main loop may be empty, the first iteration of the tail would have to store the initial values, which the
    # tail does not do.
    runs = prove(le(1, extent if start is None else start)) is Proof.YES
    _require_unmixed_loops(func, block, node, moved if runs else set(around), kinds)
    moving_loops = [p for p in path if p.var in moved]
    for p in moving_loops:
        if set(free_vars(p.extent)) & set(around):
            raise ScheduleError(
                f"{func.name}: partition expects rectangular loops, got {p.extent!r} for {p.var.name!r}"
            )
    (kind,) = kinds
    iterators = {p.var: IterVar(Var(f"v{p.var.name}"), extent if p is node else p.extent, kind) for p in moving_loops}
    inside = {p.var: iterators[p.var].var + (0 if start is None or p is not node else start) for p in moving_loops}
    values = {i.var: substitute(b, inside) for i, b in zip(block.iters, block.bindings) if i.var in fed}
    others = [(i, b) for i, b in zip(block.iters, block.bindings) if i.var not in fed]
    new = _simplified(with_iters(block, [*((iterators[p.var], p.var) for p in moving_loops), *others], values))
    return replace(new, init=None) if start is not None and kind == "reduce" else new


def _simplified(block: Block) -> Block:
    """Drop the conditions and clamps of a block that its domain decides.

    The extents of its iterators stay as they are, since they become dims of buffers even where the loops do not run (`reindex`).
    If one expression is simplified, all are, so that an update reads the element that it stores.
    """
    env = Env()
    for i in block.iters:
        env = env.with_loop(i.var, i.extent, i.kind == "spatial" or block.init is None)

    def decided(e: Expr) -> Expr | None:
        return simplify(e, env) if e.op in ("le", "lt", "min", "max") and e.args[0].dtype is i64 else None

    decided_block = block.map_own_exprs(lambda e: transform(e, decided))
    return block if decided_block is block else replace(decided_block.map_own_exprs(simplify), iters=block.iters)


def _require_unmixed_loops(
    func: PrimFunc, block: Block, node: For, moved: set[Var], kinds: Collection[IterKind]
) -> None:
    """Check that loops over elements and over reduction points are distinct, so that empty sums get their initial values.

    Args:
        moved: The loops that matter; all of them where the main loop, which stores the initial value, may run no iteration.
    """
    pairs = list(zip(block.iters, block.bindings))
    steps = {v for i, b in pairs if i.kind == "reduce" for v in free_vars(b)}
    places = {v for i, b in pairs if i.kind == "spatial" for v in free_vars(b)} - {v for v in func.symbols}
    tied = "reduce" in kinds and any(
        steps & set(free_vars(c)) and places & set(free_vars(c)) for c in conjuncts(block.predicate)
    )
    if len(kinds) != 1 or (block.init is not None and "reduce" in kinds and (steps & places & moved or tied)):
        raise ScheduleError(
            f"{func.name}: partition expects {node.var.name!r} to feed either spatial or reduction iterators of {block.name!r}, "
            "which their conditions separate; use decompose_reduction first"
        )


def _shift_tail(s: Stmt, var: Var, rest: Var, start: Expr) -> Stmt:
    """Shift the tail: extents and conditions see `start + rest`; the new iterators, which hold the offset, see `rest`."""
    moved, renamed = {var: start + rest}, {var: rest}

    def fix(n: Stmt) -> Stmt:
        if isinstance(n, For):
            return replace(n, extent=substitute(n.extent, moved))
        if isinstance(n, Block):
            bindings = tuple(substitute(b, renamed) for b in n.bindings)
            return replace(n, bindings=bindings, predicate=substitute(n.predicate, moved))
        return n

    return rewrite(s, fix)


def _iteration_private_buffers(func: PrimFunc, node: For) -> list[Buffer]:
    """Return the local and shared buffers whose elements are private to an iteration of the loop."""
    inside, private = set(blocks(node.body)), []
    for buffer in func.allocs:
        users = [b for b in blocks(func.body) if any(t is buffer for t, _ in accesses(b))]
        if buffer.scope == "global" or not users or not inside.issuperset(users):
            continue
        env = loop_env((*enclosing(func, node), node))
        ranges = {p.var: p.extent for p in loops(node.body)}
        where = [tuple(block_value(b, e) for e in at) for b in users for t, at in accesses(b) if t is buffer]
        if any(same_disjoint_stride([at[d] for at in where], node.var, ranges, env) for d in range(len(buffer.shape))):
            private.append(buffer)
    return private
