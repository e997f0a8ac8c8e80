"""Primitives on buffers: cache_read, cache_write, set_scope, tile_layout, reuse_output, mark_prepare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.buffer import Buffer, Scope
from relax_tune.ir.expr import Expr, ExprLike, Load, Var, ceildiv, expr, free_vars, load, transform
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import Block, For, IterVar, Stmt, Store, blocks, map_exprs, replace_buffers, rewrite, seq
from relax_tune.schedules.nest import (
    block_loads,
    enclosing,
    find_alloc,
    find_block,
    fresh,
    readers,
    replace_node,
    with_body,
    writer,
)


def _copy_nest(func: PrimFunc, name: str, source: Buffer, target: Buffer, taken: Sequence[str]) -> Stmt:
    """`target[i...] = source[i...]` over the whole buffer."""
    names = [*taken, name]
    iters, vars_ = [], []
    for d, dim in enumerate(source.shape):
        names.append(fresh(func, f"{name}_{'ijlpqst'[d]}", names))
        vars_.append(Var(names[-1]))
        iters.append(IterVar(Var(f"v{'ijlpqst'[d]}"), dim))
    where = tuple(i.var for i in iters)
    body: Stmt = Block(name, tuple(iters), tuple(vars_), Store(target, where, load(source, where)))
    for var, dim in reversed(list(zip(vars_, source.shape))):
        body = For(var, dim, body)
    return body


def cache_read(func: PrimFunc, block: str, buffer: str, scope: Scope = "global") -> PrimFunc:
    """Let a block read a copy of one of its inputs, made by a new block `<buffer>_cache` before it.

    Before: `C[i] = f(A[g(i)])`
    After: `A_cache[p] = A[p]` then `C[i] = f(A_cache[g(i)])`
    Checks: the block reads the buffer.
    """
    node = find_block(func, block)
    source = next((x.buffer for x in block_loads(node) if x.buffer.name == buffer), None)
    if source is None:
        found = ", ".join(sorted({x.buffer.name for x in block_loads(node)}))
        raise ScheduleError(f"{func.name}: block {block!r} does not read {buffer!r}; it reads {found}")
    name = fresh(func, f"{buffer}_cache")
    copy = Buffer(name, source.shape, source.dtype, scope)
    nest = _copy_nest(func, fresh(func, f"{name}_copy", (name,)), source, copy, (name,))
    path = enclosing(func, node)
    top: Stmt = path[0] if path else node
    changed = replace_buffers(node, {source: copy})
    new_top = replace_node(top, node, changed)
    body = replace_node(func.body, top, seq(nest, new_top))
    return replace(func, body=body, allocs=(*func.allocs, copy))


def cache_write(func: PrimFunc, block: str, scope: Scope = "local") -> PrimFunc:
    """Let a block write a new intermediate, copied to the original buffer by a new block `<buffer>_write`.

    Before: `C[i] = f(i)`
    After: `C_local[i] = f(i)` then `C[p] = C_local[p]`
    """
    node = find_block(func, block)
    target = node.body.buffer
    name = fresh(func, f"{target.name}_local")
    temp = Buffer(name, target.shape, target.dtype, scope)
    path = enclosing(func, node)
    top: Stmt = path[0] if path else node
    if isinstance(top, For) and len(blocks(top)) != 1:
        raise ScheduleError(f"{func.name}: cache_write wants block {block!r} alone in its nest")
    nest = _copy_nest(func, fresh(func, f"{target.name}_write", (name,)), temp, target, (name,))
    changed = replace_buffers(node, {target: temp})
    body = replace_node(func.body, top, seq(replace_node(top, node, changed), nest))
    return replace(func, body=body, allocs=(*func.allocs, temp))


def _swap_alloc(func: PrimFunc, old: Buffer, new: Buffer) -> PrimFunc:
    return replace(
        func,
        body=replace_buffers(func.body, {old: new}),
        allocs=tuple(new if a is old else a for a in func.allocs),
    )


def set_scope(func: PrimFunc, buffer: str, scope: Scope) -> PrimFunc:
    """Keep an intermediate in `global`, `shared` or `local` memory; lowering shrinks it to what one iteration touches."""
    old = find_alloc(func, buffer)
    return func if old.scope == scope else _swap_alloc(func, old, replace(old, scope=scope))


def tile_layout(func: PrimFunc, buffer: str, dim: int, factor: ExprLike, order: Sequence[int]) -> PrimFunc:
    """Store an intermediate with dimension `dim` cut into (dim // factor, dim % factor), then dimensions permuted.

    Before: `B: (K, N)` read at `B[k, n]`
    After, with dim 1, factor T, order (1, 0, 2): `B: (ceil(N / T), K, T)` read at `B[n // T, k, n % T]`
    Checks: an intermediate; `order` is a permutation of the new dimensions. `factor` None-like 1 keeps the dimension.
    """
    old = find_alloc(func, buffer)
    f = expr(factor)
    if sorted(order) != list(range(len(old.shape) + 1)) or not 0 <= dim < len(old.shape):
        raise ScheduleError(f"{func.name}: tile_layout({buffer!r}) wants a permutation of the new dims, found {order}")

    def relayout(parts: Sequence[Expr], outer: Expr, inner: Expr) -> tuple[Expr, ...]:
        wide = (*parts[:dim], outer, inner, *parts[dim + 1 :])
        return tuple(wide[o] for o in order)

    shape = relayout(old.shape, simplify(ceildiv(old.shape[dim], f)), f)
    new = replace(old, shape=shape)

    def where(indices: Sequence[Expr]) -> tuple[Expr, ...]:
        return relayout(indices, indices[dim] // f, indices[dim] % f)

    return _relaid(func, old, new, where)


def permute_layout(func: PrimFunc, buffer: str, order: Sequence[int]) -> PrimFunc:
    """Store an intermediate with its dimensions permuted.

    Before: `B: (J, D)` read at `B[j, d]`; after, with order (1, 0): `B: (D, J)` read at `B[d, j]`.
    """
    old = find_alloc(func, buffer)
    if sorted(order) != list(range(len(old.shape))):
        raise ScheduleError(f"{func.name}: permute_layout({buffer!r}) wants a permutation, found {order}")
    new = replace(old, shape=tuple(old.shape[o] for o in order))
    return _relaid(func, old, new, lambda indices: tuple(indices[o] for o in order))


def _relaid(func: PrimFunc, old: Buffer, new: Buffer, where: Callable[[Sequence[Expr]], tuple[Expr, ...]]) -> PrimFunc:
    def read(e: Expr) -> Expr:
        return transform(e, lambda n: load(new, where(n.indices)) if isinstance(n, Load) and n.buffer is old else None)

    def write(node: Stmt) -> Stmt | None:
        if isinstance(node, Block) and node.body.buffer is old:
            body = replace(node.body, buffer=new, indices=where(node.body.indices))
            init = node.init and replace(node.init, buffer=new, indices=where(node.init.indices))
            return replace(node, body=body, init=init)
        return None

    body = rewrite(map_exprs(func.body, read), write)
    return replace(func, body=body, allocs=tuple(new if a is old else a for a in func.allocs))


def reuse_output(func: PrimFunc, buffer: str, output: str) -> PrimFunc:
    """Keep an intermediate in the memory of an output that is written later from it, element by element.

    Before: `E[i] = exp(x[i])`, `S += E[i]`, `Y[i] = E[i] / S`
    After: `Y[i] = exp(x[i])`, `S += Y[i]`, `Y[i] = Y[i] / S`
    Checks: same shape and dtype; the block writing the output reads the intermediate at exactly the element it writes, and
    every other reader comes before it (in program order) inside the loops they share.
    """
    old = find_alloc(func, buffer)
    target = next((b for b in func.output_buffers if b.name == output), None)
    if target is None or target.shape != old.shape or target.dtype is not old.dtype:
        raise ScheduleError(f"{func.name}: reuse_output wants an output shaped like {old!r}, found {target!r}")
    last = writer(func, target)
    users = readers(func, old)
    order = list(blocks(func.body))
    if (
        last is None
        or last not in users
        or any(x.indices != last.body.indices for x in block_loads(last) if x.buffer is old)
    ):
        raise ScheduleError(f"{func.name}: the block writing {output!r} must read {buffer!r} at the element it writes")
    if any(order.index(u) > order.index(last) for u in users):
        raise ScheduleError(f"{func.name}: {buffer!r} is read after {output!r} is written")
    if any(x.buffer is target for u in blocks(func.body) if u is not last for x in block_loads(u)):
        raise ScheduleError(f"{func.name}: {output!r} is read by another block")
    body = replace_buffers(func.body, {old: target})
    return replace(func, body=body, allocs=tuple(a for a in func.allocs if a is not old))


def mark_prepare(func: PrimFunc, block: str) -> PrimFunc:
    """Run a block once, before any call, because everything it reads is constant.

    Checks: the block reads only constant parameters, writes a global intermediate, stands in its own nest at the top, and
    its extents hold no shape symbol.
    """
    node = find_block(func, block)
    found = [x.buffer for x in block_loads(node) if x.buffer not in func.consts]
    if found:
        raise ScheduleError(
            f"{func.name}: {block!r} cannot run once: it reads {found[0].name!r}, which is not constant"
        )
    if node.body.buffer not in func.allocs or node.body.buffer.scope != "global":
        raise ScheduleError(f"{func.name}: {block!r} must write a global intermediate to run once")
    symbols = set(func.symbols)
    path = enclosing(func, node)
    if path and len(blocks(path[0])) != 1:
        raise ScheduleError(f"{func.name}: {block!r} must stand in a nest of its own to run once")
    for loop in path:
        if symbols & set(free_vars(loop.extent)):
            raise ScheduleError(f"{func.name}: {block!r} cannot run once: loop {loop.var.name!r} has a symbolic extent")
    return with_body(func, replace_node(func.body, node, replace(node, role="prepare")))
