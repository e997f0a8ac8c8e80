"""Primitives that remove blocks: compute_inline, reverse_compute_inline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.injectivity import separates
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Expr, Load, Var, and_, eq, loads, lt, substitute, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import EMPTY, Block, BufferStore, blocks, map_exprs
from relax_tune.ir.deduce.copies import compares_copies
from relax_tune.schedules.independence import updates_in_place, writers
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_block,
    loop_env,
    readers,
    replace_node,
    require_compute_block,
    trivial_loops,
    writer,
)
from relax_tune.schedules.primitives.blocks.compute_location import check_movable, require_repeatable, spatial_of


def compute_inline(func: PrimFunc, block: str) -> PrimFunc:
    """Substitute a spatial block's expression for reads of its output, and drop the block and its buffer.

    Before: `B[i] = f(i)` then `C[j] = g(B[h(j)])`
    After: `C[j] = g(f(h(j)))`
    Checks: the block is spatial in its own trivial nest and the only writer of an intermediate, at distinct iterators. It has no
    predicate that could skip elements. Its inputs are not written again later. Copies that compilers may round differently are
    not compared with one another.
    """
    node = find_block(func, block)
    buffer = node.body.buffer
    if node.is_reduction or node.init is not None:
        raise ScheduleError(f"{func.name}: compute_inline expects a spatial block, {block!r} is a reduction")
    if buffer not in func.allocs:
        raise ScheduleError(f"{func.name}: compute_inline expects an intermediate, {buffer.name!r} is an output")
    iterators = spatial_of(node)
    old = trivial_loops(func, node)
    require_repeatable(func, "compute_inline", node)
    if compares_inlined(func, node):
        raise ScheduleError(
            f"{func.name}: compute_inline of {block!r} would compare copies of its values, which may be rounded differently"
        )
    inline = _substitution(node, iterators)
    body = replace_node(func.body, old[0] if old else node, EMPTY)
    return replace(func, body=map_exprs(body, inline), allocs=tuple(a for a in func.allocs if a is not buffer))


def _substitution(node: Block, iterators: Sequence[Var]) -> Callable[[Expr], Expr]:
    """Return the substitution of a block's expression for reads of its output, which it writes at `iterators`."""
    buffer, value = node.body.buffer, node.body.value

    def leaf(n: Expr) -> Expr | None:
        if isinstance(n, Load) and n.buffer is buffer:
            return substitute(value, dict(zip(iterators, n.indices)))
        return None

    return lambda e: transform(e, leaf)


def compares_inlined(func: PrimFunc, node: Block) -> bool:
    """Return whether readers of a spatial block would compare copies of its expression (`ir/deduce/copies`)."""
    buffer = node.body.buffer
    readers = [b for b in blocks(func.body) if b is not node]
    iterators = [v for v in node.body.indices if isinstance(v, Var)]
    return compares_copies(buffer, readers, _substitution(node, iterators))


def reverse_compute_inline(func: PrimFunc, block: str) -> PrimFunc:
    """Substitute a spatial block's expression into the producer of its input, and drop the block and the buffer between.

    Before: `for i: for j: B[i, j] = f(i, j)` then `for p: for q: C[q, p] = g(B[p, q])`
    After: `for i: for j: C[j, i] = g(f(i, j))`
    Checks: the block is spatial with its own trivial nest and no predicate, and does not update in place. It reads the
    producer's output, an intermediate that nothing else touches, at all its iterators, each once. The producer is
    spatial and does not read the block's output. Nothing from the producer on makes another input of the block, or touches its
    output. Parallel and vectorized loops around the producer write different elements. Neither is a `prepack` block.
    """
    node = find_block(func, block)
    old = trivial_loops(func, node)
    if node.is_reduction:
        raise ScheduleError(f"{func.name}: reverse_compute_inline expects a spatial block, {block!r} is a reduction")
    if updates_in_place(node):
        raise ScheduleError(f"{func.name}: {block!r} updates {node.body.buffer.name!r} in place and cannot move")
    producer, access = _producer(func, node)
    target = node.body.buffer
    if any(x.buffer is target for x in block_loads(producer)):
        raise ScheduleError(f"{func.name}: {producer.name!r} reads {target.name!r}, which {block!r} writes")
    path = enclosing(func, producer)
    require_compute_block(func, "reverse_compute_inline", node, producer)
    check_movable(func, node, (producer,), producer, path[0] if path else producer)
    stored = dict(zip(access.indices, producer.body.indices))
    substitution: dict[Var, Expr] = {v: stored[v] for v in stored if isinstance(v, Var)}

    def inline(e: Expr) -> Expr | None:
        return producer.body.value if e is stand_in else None

    # a variable replaces the load, so that substituting the block's iterators does not touch the producer's
    stand_in = Var("value", producer.body.value.dtype)
    value = transform(node.body.value, lambda n: stand_in if n is access else None)
    value = transform(substitute(value, substitution), inline)
    where = tuple(substitute(e, substitution) for e in node.body.indices)
    extents = {i.var: i.extent for i in node.iters}
    conditions = []
    for v, dim in zip(access.indices, access.buffer.shape):
        assert isinstance(v, Var)
        if prove(eq(extents[v], dim)) is not Proof.YES:
            conditions.append(lt(block_value(producer, stored[v]), extents[v]))
    joined = replace(producer, body=BufferStore(target, where, value), predicate=and_(producer.predicate, *conditions))
    env = loop_env(path)
    spots = [block_value(joined, e) for e in where]
    for at, p in enumerate(path):
        inner = {q.var: q.extent for q in path[at + 1 :]}
        # The producer's stores were distinct per iteration. The block stores at other indices, so this is checked
        # again.
        if p.kind not in ("serial", "unrolled") and not separates(spots, p.var, inner, env):
            raise ScheduleError(
                f"{func.name}: iterations of the {p.kind} loop {p.var.name!r} may write the same element of {target.name!r}"
            )
    body = replace_node(replace_node(func.body, producer, joined), old[0] if old else node, EMPTY)
    return replace(func, body=body, allocs=tuple(a for a in func.allocs if a is not access.buffer))


def _producer(func: PrimFunc, node: Block) -> tuple[Block, Load]:
    """Return the last spatial block that makes an intermediate for only `node`, and the load that reads it."""
    order, iters = blocks(func.body), {i.var for i in node.iters}
    # With several producers, the last one has all others computed before it, so that the block can move to its place.
    candidates: list[tuple[int, Block, Load]] = []
    for access in block_loads(node):
        producer = writer(func, access.buffer)
        whole = set(access.indices) == iters and len(access.indices) == len(iters)
        if access.buffer in func.allocs and producer is not None and whole:
            candidates.append((order.index(producer), producer, access))
    if not candidates:
        raise ScheduleError(
            f"{func.name}: reverse_compute_inline expects {node.name!r} to read an intermediate at all of its iterators, each once"
        )
    _, producer, access = max(candidates, key=lambda x: x[0])
    buffer = access.buffer
    others = [b.name for b in (*writers(func, buffer), *readers(func, buffer)) if b is not node and b is not producer]
    if others or order.index(producer) > order.index(node):
        raise ScheduleError(
            f"{func.name}: reverse_compute_inline expects {buffer.name!r} to be written by {producer.name!r}, read by {node.name!r} only; "
            f"got {', '.join(others) or 'a later producer'}"
        )
    if any(x.buffer is buffer and x is not access for x in loads(node.body.value, *node.body.indices)):
        raise ScheduleError(f"{func.name}: {node.name!r} reads {buffer.name!r} at several places")
    if producer.is_reduction or updates_in_place(producer):
        raise ScheduleError(
            f"{func.name}: reverse_compute_inline expects a spatial producer, {producer.name!r} reduces or updates in place"
        )
    return producer, access
