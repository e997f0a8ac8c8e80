"""Dependence tests between blocks: may a block move, and does it write all of its buffer?"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.arith.injectivity import separates
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Expr, Load, Var, free_vars, loads, maximum, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, blocks
from relax_tune.schedules.loop_tree import block_loads, block_value, enclosing, loop_env, regroup_sums
from relax_tune.schedules.symbols import are_variables


def overwritten_later(func: PrimFunc, block: Block) -> Buffer | None:
    """Return a buffer that the block reads and a later block writes again; None without one.

    An output that also holds an intermediate is such a buffer.
    """
    order = blocks(func.body)
    later = {b.body.buffer for b in order[order.index(block) + 1 :]}
    return next((x.buffer for x in block_loads(block) if x.buffer in later and x.buffer is not block.body.buffer), None)


def writers(func: PrimFunc, buffer: Buffer) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if b.body.buffer is buffer)


def updates_in_place(block: Block) -> bool:
    """Return whether the block reads elements of the buffer it stores to, which another block wrote."""
    return any(x.buffer is block.body.buffer for x in block_loads(block))


def writes_everything(block: Block) -> bool:
    """Return whether the block by itself writes each element of its buffer.

    It does with plain distinct spatial iterators over the buffer's dimensions, and no condition but guards of split loops.
    """
    # Split loops need a predicate to end at the extent, and their bindings are sums; a predicate on plain loops
    # excludes elements.
    if block.predicate is not TRUE and are_variables(block.bindings):
        return False
    extents = {i.var: i.extent for i in block.iters if i.kind == "spatial"}
    where = block.body.indices
    return len(set(where)) == len(where) and all(
        isinstance(e, Var) and e in extents and simplify(d) in (simplify(extents[e]), simplify(maximum(extents[e], 0)))
        for e, d in zip(where, block.body.buffer.shape, strict=True)
    )


def other_points(block: Block) -> tuple[Load, ...]:
    """Return the loads of a block from its own buffer at another element than it stores."""
    stored_at = block.body.indices
    accesses = loads(block.body.value, *stored_at)
    return tuple(x for x in accesses if x.buffer is block.body.buffer and x.indices != stored_at)


def carried_read(func: PrimFunc, node: For, producer: Block) -> tuple[Block, Load] | None:
    """Return a read below a loop of an element that another iteration may store in `producer`; None if there is none.

    The indices of the read must equal the indices of the store, with other loop variables of the same extents, in dims that separate the
    iterations."""
    target, path = producer.body.buffer, enclosing(func, producer)
    inner = {f.var: f.extent for f in path[path.index(node) + 1 :]}
    env = loop_env(path)
    plain = [block_value(producer, e) for e in producer.body.indices]
    # Regrouped, an index is one bounded sum again, whose range the proof of separation needs.
    stored = [regroup_sums(e, producer.predicate) for e in plain]
    for block in blocks(node.body):
        below = enclosing(func, block)
        extents = {f.var: f.extent for f in below[below.index(node) + 1 :]}
        for x in loads(block.body.value, *block.body.indices):
            if x.buffer is not target or (block is producer and x.indices == producer.body.indices):
                continue
            pairs = zip(stored, plain, (block_value(block, e) for e in x.indices), strict=True)
            # If the terms differ, the loops are paired in their order, and the indices compared by the prover.
            names = {q: p for p, q in zip(inner, extents) if simplify(inner[p]) is simplify(extents[q])}
            alike, renamed = list[Expr](), dict[Var, Var]()
            for e, f, g in pairs:
                if not _renames(f, g, inner, extents, renamed):
                    if (
                        not names.items() >= renamed.items()
                        or prove_equal(f, substitute(g, names), env) is not Proof.YES
                    ):
                        continue
                    renamed.update(names)
                alike.append(e)
            if not separates(alike, node.var, inner, env, producer.predicate):
                return block, x
    return None


def _renames(f: Expr, g: Expr, inner: Mapping[Var, Expr], extents: Mapping[Var, Expr], names: dict[Var, Var]) -> bool:
    """Return whether `f` is `g` with its inner variables renamed, one to one, to variables of the same extents; keep the names."""
    extended = dict(names)
    if not _unify(f, g, inner, extents, extended):
        return False
    names.update(extended)
    return True


def _unify(f: Expr, g: Expr, inner: Mapping[Var, Expr], extents: Mapping[Var, Expr], names: dict[Var, Var]) -> bool:
    if isinstance(f, Var) and isinstance(g, Var) and f in inner and g in extents:
        is_one_to_one = names.setdefault(g, f) is f and sum(v is f for v in names.values()) == 1
        return is_one_to_one and simplify(inner[f]) is simplify(extents[g])
    if f is g and not any(v in inner or v in extents for v in free_vars(f)):
        return True
    if isinstance(f, Load) or isinstance(g, Load) or f.op != g.op or not f.op or len(f.args) != len(g.args):
        return False
    return f.dtype is g.dtype and all(_unify(a, b, inner, extents, names) for a, b in zip(f.args, g.args))
