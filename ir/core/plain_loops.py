"""Unscheduled tensor functions as a list of blocks, each under its own plain loops.

Tests: `tests/ir/passes/fusion/test_unfuse.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Expr, Load, Var, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.stmt import Block, For, IterVar, Stmt, seq, statements


def plain_blocks(func: PrimFunc) -> tuple[Block, ...] | None:
    """Return the blocks of an unscheduled function in order, or None when it is scheduled.

    Unscheduled: each block is under a perfect nest of serial loops whose variables are, in order, its iterators."""
    blocks: list[Block] = []
    for nest in statements(func.body):
        loops: list[For] = []
        node: Stmt = nest
        while isinstance(node, For):
            loops.append(node)
            node = node.body
        if not isinstance(node, Block) or node.predicate is not TRUE or node.role != "compute":
            return None
        if tuple(f.var for f in loops) != node.bindings or any(f.kind != "serial" for f in loops):
            return None
        if any(f.extent is not i.extent for f, i in zip(loops, node.iters, strict=True)):
            return None
        blocks.append(node)
    return tuple(blocks)


def with_blocks(
    func: PrimFunc, blocks: Sequence[Block], leaf: Callable[[Expr], Expr | None] = lambda e: None
) -> PrimFunc:
    """Return `func` with other blocks under fresh plain loops, without unused allocations.

    Args:
        leaf: rewriting of the blocks' expressions (`transform`).
    """
    names: set[str] = set()
    nests = [_nest(b, names, leaf) for b in blocks]
    used = {buffer for block, _ in nests for buffer in (*read_buffers(block), block.body.buffer)}
    return replace(func, body=seq(*(n for _, n in nests)), allocs=tuple(a for a in func.allocs if a in used))


def _unique(hint: str, names: set[str]) -> str:
    names.add(hint := fresh(hint, names))
    return hint


def _nest(block: Block, names: set[str], leaf: Callable[[Expr], Expr | None]) -> tuple[Block, Stmt]:
    """Return the block over fresh iterators, and the nest of fresh loops around it."""
    name = _unique(block.name, names)
    fresh_iters = {i.var: Var(i.var.name) for i in block.iters}

    def fresh_vars(e: Expr) -> Expr | None:
        return new if isinstance(e, Var) and (new := fresh_iters.get(e)) is not None else leaf(e)

    block = block.map_own_exprs(lambda e: transform(e, fresh_vars))
    iters = tuple(IterVar(fresh_iters[i.var], i.extent, i.kind) for i in block.iters)
    loops = tuple(Var(_unique(f"{name}_{i.var.name.removeprefix('v')}", names)) for i in iters)
    block = replace(block, name=name, iters=iters, bindings=loops)
    body: Stmt = block
    for var, i in reversed(list(zip(loops, iters, strict=True))):
        body = For(var, i.extent, body)
    return block, body


def block_loads(block: Block) -> tuple[Load, ...]:
    """Return the distinct reads of a block's body, including reads inside indices."""
    return all_loads((block.body.value, *block.body.indices))


def all_loads(roots: Iterable[Expr]) -> tuple[Load, ...]:
    distinct: dict[Load, None] = {}
    for root in roots:
        stack = [root]
        visited: set[Expr] = set()
        while stack:
            e = stack.pop()
            if e in visited:
                continue
            visited.add(e)
            if isinstance(e, Load):
                distinct.setdefault(e)
            stack.extend(reversed(e.children))
    return tuple(distinct)


def read_buffers(block: Block) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(x.buffer for x in block_loads(block)))
