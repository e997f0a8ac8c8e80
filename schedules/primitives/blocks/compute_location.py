"""Primitives that move a block into another loop: compute_at, reverse_compute_at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import extent_of, is_dense, linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Load,
    Tunable,
    Var,
    and_,
    conjuncts,
    const,
    free_vars,
    le,
    loads,
    lt,
    maximum,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import EMPTY, Block, For, Stmt, blocks, seq
from relax_tune.schedules.independence import overwritten_later, updates_in_place, writers
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_block,
    find_loop,
    fresh,
    loop_env,
    readers,
    replace_node,
    require_compute_block,
    trivial_loops,
    with_body,
    writer,
)
from relax_tune.schedules.symbols import by_variable

# Start and extent of the region in a dimension; extent None: the loops around choose one element.
DimRegion = tuple[Expr, Expr | None]


def region_of(indices: Sequence[Expr], path: Sequence[For], loop: For, buffer: Buffer, env: Env) -> list[DimRegion]:
    """Return the region that `indices` cover per dimension while the loops inside `loop` run; a superset for non-affine indices.

    Its form depends on which loops an index mentions, never on the value of a tunable: a trace with numbers makes the same
    loops.
    """
    at = path.index(loop) + 1
    outer, inner = {p.var for p in path[:at]}, {p.var: p.extent for p in path[at:]}
    box: list[DimRegion] = []
    for e, dim in zip(indices, buffer.shape):
        relaxed = {v: inner[v] for v in free_vars(e) if v in inner}
        parts = linear(e, tuple(relaxed), env)
        if parts is None and not loads(e):  # digits of sums: drop the terms that inner loops do not change
            e = simplify(e, loop_env(path, env))
            relaxed = {v: inner[v] for v in free_vars(e) if v in inner}
            parts = linear(e, tuple(relaxed), env)
        used = set(free_vars(e))
        # An index that no outer loop changes covers the same region in every iteration; the whole dim is the simplest
        # bound.
        if loads(e) or parts is None or (relaxed and not used & outer):
            box.append((const(0), dim))
            continue
        if not relaxed:
            box.append((simplify(e, env), None))
            continue
        start = parts[1]
        for v, step in parts[0].items():
            # a decreasing index is smallest at its variable's last value
            if prove(le(0, step), env) is not Proof.YES:
                if prove(le(step, 0), env) is not Proof.YES:
                    raise ScheduleError(
                        f"region inference: the sign of {step!r}, the stride of {v.name} in {e!r}, is not known"
                    )
                start = start + step * (relaxed[v] - 1)
        box.append((simplify(start, env), extent_of(e, relaxed, env)))
    return box


def _union(boxes: Sequence[Sequence[DimRegion]], buffer: Buffer) -> list[DimRegion]:
    result: list[DimRegion] = []
    for d, dim in enumerate(buffer.shape):
        options = dict.fromkeys(b[d] for b in boxes)
        starts = {start for start, _ in options}
        if len(options) == 1:
            result.append(next(iter(options)))
        elif len(starts) == 1:
            extents = [const(1) if extent is None else extent for _, extent in options]
            result.append((starts.pop(), simplify(reduce(maximum, extents))))
        else:
            # Two starts have no common interval that is smaller than the dim for all sizes, unless their order can be
            # proved.
            result.append((const(0), dim))
    return result


def spatial_of(block: Block) -> list[Var]:
    """Return the iterators that index the output, in order. Raises ScheduleError unless they are plain and distinct."""
    iterators: list[Var] = []
    for e in block.body.indices:
        if not isinstance(e, Var) or e in iterators or e not in {i.var for i in block.iters if i.kind == "spatial"}:
            raise ScheduleError(
                f"block {block.name!r}: expected distinct spatial iterators as store indices, got {e!r}"
            )
        iterators.append(e)
    return iterators


def _outer_guards(others: Sequence[Block], path: Sequence[For]) -> list[Expr]:
    """Return the conditions over only the loops of `path` that all the blocks share."""
    known = {p.var for p in path}
    # A producer needs to run only where its readers do. Only conditions that all readers share may be inherited,
    # since any reader may be the one that runs.
    sets = [[c for c in conjuncts(b.predicate) if set(free_vars(c)) <= known | _not_loops(c, path)] for b in others]
    return [c for c in sets[0] if all(c in rest for rest in sets[1:])] if sets else []


def _not_loops(e: Expr, path: Sequence[For]) -> set[Var]:
    """Return the variables of `e` that no loop of `path` binds but its extents mention: shape symbols and tunables."""
    mentioned = {v for p in path for v in free_vars(p.extent)} | {v for v in free_vars(e) if isinstance(v, Tunable)}
    return mentioned - {p.var for p in path}


def _nest_over(
    func: PrimFunc,
    block: Block,
    where: Mapping[Var, DimRegion],
    inherited: Sequence[Expr],
    env: Env,
    trusted: Collection[Var],
) -> Stmt:
    """Make a fresh nest of the block over the region `where` of its spatial iterators and all of its reductions.

    The loops around choose the value of an iterator without an extent. A `trusted` iterator is in range whenever the
    `inherited` conditions hold.
    """
    names: list[str] = []
    new_loops: list[tuple[Var, Expr]] = []
    bindings: list[Expr] = []
    guards: list[Expr] = []
    inner_env = env
    for it in block.iters:
        start, extent = where.get(it.var, (const(0), it.extent))
        if extent is None:
            bindings.append(start)
            if it.var not in trusted:
                guards += [le(0, start), lt(start, it.extent)]
            continue
        name = fresh(func, f"{block.name}_{it.var.name.removeprefix('v')}", names)
        names.append(name)
        var = Var(name)
        new_loops.append((var, extent))
        # An empty reduction still stores its initial value, so nothing may follow from its loop running.
        inner_env = inner_env.with_loop(var, extent, it.kind == "spatial" or block.init is None)
        bindings.append(start + var)
        guards += [le(0, start + var), lt(start + var, it.extent)]
    # After the loops: the conditions mention loop variables, whose bounds make the proofs below possible.
    for fact in inherited:
        inner_env = inner_env.with_fact(fact)
    needed = [*inherited, *(g for g in guards if prove(g, inner_env) is not Proof.YES)]
    moved = by_variable(block.bindings, bindings)
    needed += [c for c in conjuncts(substitute(block.predicate, moved)) if prove(c, inner_env) is not Proof.YES]
    body: Stmt = replace(block, bindings=tuple(bindings), predicate=and_(*needed))
    for var, extent in reversed(new_loops):
        body = For(var, extent, body)
    return body


def compute_at(func: PrimFunc, block: str, loop: str) -> PrimFunc:
    """Move a producer to the start of a consumer's loop, and compute there just the region that the iteration needs.

    Before: `for p: B[p] = f(p)` then `for i: for j: C[i, j] = g(B[i])`
    After: `for i: B[i] = f(i); for j: C[i, j] = g(B[i])`
    Checks: every reader of the block's output is inside `loop`. The block has its own trivial nest and no predicate.
    Its output is an intermediate that only it writes, from its own initial value if it is a reduction. Its inputs are
    not written again later. It is no `prepack` block. A reduction may have a condition that holds at its first point.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    buffer = node.body.buffer
    if buffer not in func.allocs:
        raise ScheduleError(f"{func.name}: compute_at moves producers of intermediates; {buffer.name!r} is an output")
    old = trivial_loops(func, node, conditional=_starts_everywhere(node))
    require_compute_block(func, "compute_at", node, *blocks(target.body))
    require_repeatable(func, "compute_at", node)
    inside = set(blocks(target.body))
    consumers = readers(func, buffer)
    outside = [b.name for b in consumers if b not in inside and b is not node]
    if node in inside or outside or not consumers:
        raise ScheduleError(
            f"{func.name}: compute_at({block!r}, {loop!r}) expects every reader of {buffer.name!r} inside the loop; "
            f"outside it: {', '.join(outside) or 'the block itself' if node in inside else ', '.join(outside) or 'no reader'}"
        )
    path = (*enclosing(func, target), target)
    env = loop_env(path)
    boxes = []
    for reader in consumers:
        full_path = enclosing(func, reader)
        for access in block_loads(reader):
            if access.buffer is buffer:
                where = tuple(block_value(reader, i) for i in access.indices)
                boxes.append(region_of(where, full_path, target, buffer, env))
    box = _union(boxes, buffer)
    inherited = _outer_guards(consumers, path)
    alike = all(len(_outer_guards((b,), path)) == len(inherited) for b in consumers)
    iterators = spatial_of(node)
    nest = _nest_over(func, node, dict(zip(iterators, box)), inherited, env, iterators if alike else ())
    # At the start of the body, before all readers, wherever these are in the loop.
    moved = replace(target, body=seq(nest, target.body))
    body = replace_node(func.body, target, moved)
    return with_body(func, replace_node(body, old[0] if old else node, EMPTY))


def _starts_everywhere(node: Block) -> bool:
    """Return whether a reduction's condition holds at the first point of each element, which stores the initial value."""
    if node.init is None:
        return False
    first = {b: const(0) for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" and isinstance(b, Var)}
    env = Env()
    for i, b in zip(node.iters, node.bindings):
        if i.kind == "spatial" and isinstance(b, Var):
            env = env.with_loop(b, i.extent)
    return prove(substitute(node.predicate, first), env) is Proof.YES


def require_repeatable(func: PrimFunc, step: str, node: Block) -> None:
    """Check that the block may run later, and more than once for the same element. Raises ScheduleError."""
    if updates_in_place(node) or len(writers(func, node.body.buffer)) != 1:
        raise ScheduleError(
            f"{func.name}: {step} expects the only writer of {node.body.buffer.name!r}; {node.name!r} updates what "
            "another block wrote"
        )
    buffer = overwritten_later(func, node)
    if buffer is not None:
        raise ScheduleError(
            f"{func.name}: {step} would let {node.name!r} read {buffer.name!r} after it was written again"
        )


def reverse_compute_at(func: PrimFunc, block: str, loop: str) -> PrimFunc:
    """Move a consumer to the end of its producer's loop, and consume there the region that the iteration produced.

    Before: `for i: for j: B[i, j] = f(i, j)` then `for p, q: C[p, q] = g(B[p, q])`
    After: `for i: (for j: B[i, j] = f(i, j)); (for q: C[i, q] = g(B[i, q]))`
    Checks: the consumer is spatial with its own trivial nest and no predicate. It reads the outputs of its producers at its own
    iterators, in one region, and at numbers in dimensions that an iteration produces whole. It does not update in place. The
    regions of different iterations tile the output without overlap. Each region is a box and complete (no reduction outside
    `loop`). Nothing from `loop` on makes another input of the consumer, or touches its output. Neither is a `prepack` block.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    old = trivial_loops(func, node)
    if node.is_reduction:
        raise ScheduleError(f"{func.name}: reverse_compute_at expects a spatial block, {block!r} is a reduction")
    if updates_in_place(node):
        raise ScheduleError(f"{func.name}: {block!r} updates {node.body.buffer.name!r} in place and cannot move")
    inside = blocks(target.body)
    sources = [(p, x) for x in block_loads(node) if (p := writer(func, x.buffer)) in inside and p is not None]
    if not sources:
        raise ScheduleError(f"{func.name}: {block!r} reads nothing that is produced inside {loop!r}")
    path = (*enclosing(func, target), target)
    env = loop_env(path)
    producers = dict.fromkeys(p for p, _ in sources)
    for producer in producers:
        for it, bound in zip(producer.iters, producer.bindings):
            # Inside the loop the sum is a partial one; a consumer may only read it after the loop.
            if it.kind == "reduce" and any(v in {p.var for p in path} for v in free_vars(bound)):
                raise ScheduleError(
                    f"{func.name}: inside {loop!r} the reduction over {it.var.name!r} of {producer.name!r} is not complete"
                )
    require_compute_block(func, "reverse_compute_at", node, *inside)
    check_movable(func, node, producers, target, path[0])
    regions: dict[Var, DimRegion] = {}
    for producer, access in sources:
        for v, span in _consumed(func, node, producer, access, path, env).items():
            if not _same_region(regions.setdefault(v, span), span):
                raise ScheduleError(f"{func.name}: {block!r} reads different regions of {v.name!r} inside {loop!r}")
    extents = {i.var: i.extent for i in node.iters}
    stored = {e: dim for _, x in sources for e, dim in zip(x.indices, x.buffer.shape)}
    trusted = [v for v in extents if v not in stored or prove(le(stored[v], extents[v]), env) is Proof.YES]
    nest = _nest_over(func, node, regions, _outer_guards(tuple(producers), path), env, trusted)
    moved = replace(target, body=seq(target.body, nest))
    body = replace_node(func.body, target, moved)
    return with_body(func, replace_node(body, old[0] if old else node, EMPTY))


def _consumed(
    func: PrimFunc, node: Block, producer: Block, access: Load, path: Sequence[For], env: Env
) -> dict[Var, DimRegion]:
    """Return the region of each iterator of a consumer in one iteration of the last loop of `path`, by one of its reads."""
    loop, full_path = path[-1], enclosing(func, producer)
    written = tuple(block_value(producer, i) for i in producer.body.indices)
    for e in written:
        within = {p.var: p.extent for p in full_path[len(path) :] if p.var in free_vars(e)}
        if not is_dense(e, within, env):
            raise ScheduleError(
                f"{func.name}: the values of {e!r} in one iteration of {loop.var.name!r} are not an interval"
            )
        ranges = {p.var: p.extent for p in full_path if p.var in free_vars(e)}
        # A tile that overlaps another would be consumed before the other has changed it again; a gap would never be
        # consumed.
        if linear(e, tuple(ranges)) is not None and not is_dense(e, ranges):
            raise ScheduleError(f"{func.name}: the tiles of {producer.name!r} overlap or leave gaps: {e!r}")
    box = region_of(written, full_path, loop, access.buffer, env)
    regions: dict[Var, DimRegion] = {}
    for e, span, dim in zip(access.indices, box, access.buffer.shape):
        if _same_region(span, (const(0), dim)) and isinstance(e, Const):
            continue
        if not isinstance(e, Var) or e in regions:
            raise ScheduleError(
                f"{func.name}: {node.name!r} must read {access.buffer.name!r} at distinct iterators, got {e!r}"
            )
        regions[e] = span
    return regions


def _same_region(a: DimRegion, b: DimRegion) -> bool:
    """Return whether two regions are provably equal."""
    if a[1] is None or b[1] is None:
        return a[1] is b[1] and simplify(a[0] - b[0]) is const(0)
    return all(x is y or simplify(x - y) is const(0) for x, y in zip(a, b) if x is not None and y is not None)


def check_movable(func: PrimFunc, node: Block, producers: Collection[Block], place: Stmt, around: Stmt) -> None:
    """Check that no block in between makes inputs of `node` or touches its output.

    Args:
        producers: Blocks that make inputs of `node` where it moves to.
        place, around: `node` moves before `place`, into the loops `around` it.
    """
    order = blocks(func.body)
    passed = set(order[order.index(blocks(place)[0]) : order.index(node)]) | set(blocks(around))
    reads = {x.buffer for x in block_loads(node)}
    for other in order:
        if other in passed and other not in producers:
            touched = {other.body.buffer, *(x.buffer for x in block_loads(other))}
            if other.body.buffer in reads or node.body.buffer in touched:
                raise ScheduleError(
                    f"{func.name}: {node.name!r} cannot move before {other.name!r}, which it depends on"
                )
