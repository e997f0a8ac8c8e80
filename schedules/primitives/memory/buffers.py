"""Primitives on buffers: cache_read, cache_write, set_scope, store_as, reuse_output, mark_prepack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.injectivity import separates
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.dtype import bf16, f16, f32, i8, i16, i32, u8
from relax_tune.ir.core.expr import Expr, Load, Var, cast, free_vars, load, loads, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, blocks, map_blocks, replace_buffers, seq
from relax_tune.schedules.independence import updates_in_place, writers, writes_everything
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_alloc,
    find_block,
    fresh,
    loop_env,
    readers,
    replace_node,
    require_compute_block,
    swap_alloc,
    with_body,
    writer,
)
from relax_tune.schedules.thread_ownership import require_thread_private


def require_scope(func: PrimFunc, scope: Scope) -> None:
    """Check that `scope` names a memory scope. Raises ScheduleError."""
    if scope not in get_args(Scope):
        raise ScheduleError(f"{func.name}: expected a scope, one of {', '.join(get_args(Scope))}, got {scope!r}")


def copy_nest(func: PrimFunc, name: str, source: Buffer, target: Buffer, reserved: Sequence[str]) -> Stmt:
    """Make the nest `target[i...] = source[i...]` over the whole target."""
    names = [*reserved, name]
    iters, vars_ = [], []
    for d, dim in enumerate(target.shape):
        names.append(fresh(func, f"{name}_{'ijlpqst'[d]}", names))
        vars_.append(Var(names[-1]))
        iters.append(IterVar(Var(f"v{'ijlpqst'[d]}"), dim))
    where = tuple(i.var for i in iters)
    body: Stmt = Block(name, tuple(iters), tuple(vars_), BufferStore(target, where, load(source, where)))
    for var, dim in reversed(list(zip(vars_, target.shape))):
        body = For(var, dim, body)
    return body


def cache_read(func: PrimFunc, block: str, buffer: str, scope: Scope = "global") -> PrimFunc:
    """Let a block read a copy of one of its inputs, which a new block `<buffer>_cache` before it writes.

    Before: `C[i] = f(A[g(i)])`
    After: `A_cache[p] = A[p]` then `C[i] = f(A_cache[g(i)])`
    Checks: the block reads the buffer; nothing in the block's own nest writes it; every element of it was written.
    """
    node = find_block(func, block)
    source = next((x.buffer for x in block_loads(node) if x.buffer.name == buffer), None)
    if source is None:
        read_names = ", ".join(sorted({x.buffer.name for x in block_loads(node)}))
        raise ScheduleError(f"{func.name}: block {block!r} does not read {buffer!r}; it reads {read_names}")
    around = enclosing(func, node)[:1] or (node,)
    # The copy is filled before the whole nest, when a producer inside of it has not run yet.
    if any(b.body.buffer is source for b in blocks(around[0])):
        raise ScheduleError(
            f"{func.name}: cache_read expects {buffer!r} complete before the nest of {block!r}, which writes it"
        )
    producers = writers(func, source)
    if producers and not any(writes_everything(b) for b in producers):
        raise ScheduleError(
            f"{func.name}: cache_read expects all of {buffer!r} written, got it in parts or with padding"
        )
    require_scope(func, scope)
    name = fresh(func, f"{buffer}_cache")
    copy = Buffer(name, source.shape, source.dtype, scope)
    nest = copy_nest(func, fresh(func, f"{name}_copy", (name,)), source, copy, (name,))
    path = enclosing(func, node)
    top: Stmt = path[0] if path else node
    changed = replace_buffers(node, {source: copy})
    new_top = replace_node(top, node, changed)
    body = replace_node(func.body, top, seq(nest, new_top))
    return replace(func, body=body, allocs=(*func.allocs, copy))


def cache_write(func: PrimFunc, block: str, scope: Scope = "local", readers: Sequence[str] = ()) -> PrimFunc:
    """Let a block write a new intermediate, copied to the original buffer by a new block `<buffer>_write`.

    Before: `C[i] = f(i)`, `D[i] = g(C[i])`
    After, with D among the readers: `C_local[i] = f(i)` then `C[p] = C_local[p]`, `D[i] = g(C_local[i])`
    Checks: the block is the only writer of all elements of its buffer, from its own initial value if it is a reduction. No
    other block is in its nest. The readers read the buffer later.
    """
    node = find_block(func, block)
    target = node.body.buffer
    name = fresh(func, f"{target.name}_local")
    temp = Buffer(name, target.shape, target.dtype, scope)
    require_scope(func, scope)
    if updates_in_place(node) or len(writers(func, target)) != 1 or not writes_everything(node):
        raise ScheduleError(f"{func.name}: cache_write expects {block!r} to write all of {target.name!r} by itself")
    require_compute_block(func, "cache_write", node)
    path = enclosing(func, node)
    top: Stmt = path[0] if path else node
    if isinstance(top, For) and len(blocks(top)) != 1:
        raise ScheduleError(f"{func.name}: cache_write expects no other block in the nest of {block!r}")
    nest = copy_nest(func, fresh(func, f"{target.name}_write", (name,)), temp, target, (name,))
    changed = replace_buffers(node, {target: temp})
    order = blocks(func.body)
    body = func.body
    for reader in (find_block(func, r) for r in readers):
        if order.index(reader) <= order.index(node) or all(x.buffer is not target for x in block_loads(reader)):
            raise ScheduleError(
                f"{func.name}: cache_write expects readers of {target.name!r} after {block!r}, got {reader.name!r}"
            )
        body = replace_node(body, reader, replace_buffers(reader, {target: temp}))
    body = replace_node(body, top, seq(replace_node(top, node, changed), nest))
    return replace(func, body=body, allocs=(*func.allocs, temp))


def set_scope(func: PrimFunc, buffer: str, scope: Scope) -> PrimFunc:
    """Keep an intermediate in `global`, `shared`, `warp` or `local` memory; lowering shrinks it to the part one iteration touches.

    Before: `B = alloc((I, J), f32, scope="global")`
    After: `B = alloc((I, J), f32, scope="local")`
    Checks: it is an intermediate. One that a `prepack` block fills stays global, and aligned rows stay off global memory. Each
    element of a `local` buffer is touched by one work-item only.
    """
    old = find_alloc(func, buffer)
    require_scope(func, scope)
    if scope == "local":
        require_thread_private(func, old)
    if scope != "global":
        # A `prepack` block runs before any call, and only global memory outlives it.
        require_compute_block(func, "set_scope", *writers(func, old))
    if old.row_alignment is not None and (scope == "global" or (old.swizzle and scope != old.scope)):
        raise ScheduleError(
            f"{func.name}: set_scope expects {buffer!r} before storage_align or swizzle; its rows are laid out for {old.scope} memory"
        )
    return func if old.scope == scope else swap_alloc(func, old, replace(old, scope=scope))


def store_as(func: PrimFunc, buffer: str, dtype: str) -> PrimFunc:
    """Store an intermediate as numbers of more bits, which represent each of its numbers exactly.

    Before: `B = alloc((I, J), i8)`, `B[i] = A[i]`, then `C[i] = f(cast(B[i], f32))`
    After, with dtype `f16`: `B = alloc((I, J), f16)`, `B[i] = cast(cast(A[i], f32), f16)`, then the same
    Checks: it is an intermediate of 8 bits, and the type is a 16-bit float or i16; or of 16-bit floats, and the type is f32. Every
    read is cast at once, to f32 or, from i16, to i32. Nothing accumulates into it.
    """
    old = find_alloc(func, buffer)
    target = next((d for d in (f16, bf16, i16, f32) if d.short == dtype), None)
    if target is None or old.dtype not in ((f16, bf16) if target is f32 else (i8, u8)):
        raise ScheduleError(
            f"{func.name}: store_as expects numbers of 8 bits and f16, bf16 or i16, or 16-bit floats and f32, got {old.dtype} and {dtype!r}"
        )
    new, wide = replace(old, dtype=target), f32 if target.is_float else i32

    def read(e: Expr) -> Expr | None:
        if e.op == "cast" and e.dtype is wide:
            (x,) = e.args
            if isinstance(x, Load) and x.buffer is old:
                return load(new, x.indices) if target is wide else cast(load(new, x.indices), wide)
        return None

    def visit(b: Block) -> Block:
        value, where = transform(b.body.value, read), b.body.indices
        if b.body.buffer is not old:
            return replace(b, body=BufferStore(b.body.buffer, where, value)) if value is not b.body.value else b
        if b.init is not None:
            raise ScheduleError(f"{func.name}: store_as expects {buffer!r} stored once, got sums by {b.name!r}")
        widened = cast(value, wide)
        return replace(b, body=BufferStore(new, where, widened if target is wide else cast(widened, target)))

    body = map_blocks(func.body, visit)
    left = [b.name for b in blocks(body) if any(x.buffer is old for s in (b.body, b.init) if s for x in _reads(s))]
    if left:
        raise ScheduleError(
            f"{func.name}: store_as expects what is read of {buffer!r} to become {wide} at once, unlike in block {left[0]!r}"
        )
    return replace(func, body=body, allocs=tuple(new if a is old else a for a in func.allocs))


def _reads(s: BufferStore) -> tuple[Load, ...]:
    return loads(s.value, *s.indices)


def reuse_output(func: PrimFunc, buffer: str, output: str) -> PrimFunc:
    """Keep an intermediate in the memory of an output that is written later from it, element by element.

    Before: `E[i] = exp(x[i])`, `S += E[i]`, `Y[i] = E[i] / S`
    After: `Y[i] = exp(x[i])`, `S += Y[i]`, `Y[i] = Y[i] / S`
    Checks: the intermediate has the output's shape and dtype. The block that writes the output does not reduce, and reads the
    intermediate at exactly the element it writes. Every other reader comes before it and, inside loops they share, reads
    elements that no earlier iteration wrote. Nothing else touches the output.
    """
    old = find_alloc(func, buffer)
    target = next((b for b in func.output_buffers if b.name == output), None)
    if target is None or target.shape != old.shape or target.dtype is not old.dtype:
        raise ScheduleError(f"{func.name}: reuse_output expects an output shaped like {old!r}, got {target!r}")
    last = writer(func, target)
    users = readers(func, old)
    order = list(blocks(func.body))
    if (
        last is None
        or last not in users
        or any(x.indices != last.body.indices for x in block_loads(last) if x.buffer is old)
    ):
        raise ScheduleError(f"{func.name}: the block writing {output!r} must read {buffer!r} at the element it writes")
    if last.init is not None or len(writers(func, target)) != 1:
        raise ScheduleError(f"{func.name}: {output!r} must be written once, by a block without an initial value")
    if any(order.index(u) > order.index(last) for u in (*users, *writers(func, old))):
        raise ScheduleError(f"{func.name}: {buffer!r} is read after {output!r} is written")
    if any(x.buffer is target for u in blocks(func.body) if u is not last for x in block_loads(u)):
        raise ScheduleError(f"{func.name}: {output!r} is read by another block")
    for user in users:
        if user is not last:
            _require_not_overwritten(func, user, last, old)
    body = replace_buffers(func.body, {old: target})
    return replace(func, body=body, allocs=tuple(a for a in func.allocs if a is not old))


def _require_not_overwritten(func: PrimFunc, user: Block, last: Block, buffer: Buffer) -> None:
    """Check that `user` reads no element of `buffer` that `last` overwrote in an earlier iteration of a shared loop."""
    paths = enclosing(func, user), enclosing(func, last)
    shared = [a for a, b in zip(*paths) if a is b]
    if not shared:
        return
    known = {p.var for p in shared}
    env = loop_env(shared)
    written = [simplify(block_value(last, e), env) for e in last.body.indices]
    for access in block_loads(user):
        if access.buffer is not buffer:
            continue
        read = [simplify(block_value(user, e), env) for e in access.indices]
        local = {p.var for path in paths for p in path if p.var not in known}
        # Dims in which both use the same index can separate iterations. In all others, the two may touch any element.
        alike = [a for a, b in zip(read, written) if a is b and not local & set(free_vars(a))]
        for at, p in enumerate(shared):
            if not separates(alike, p.var, {q.var: q.extent for q in shared[at + 1 :]}, env):
                raise ScheduleError(
                    f"{func.name}: in loop {p.var.name!r} block {user.name!r} may read elements of {buffer.name!r} that "
                    f"{last.name!r} wrote in an earlier iteration"
                )


def mark_prepack(func: PrimFunc, block: str) -> PrimFunc:
    """Run a block once, before any call, because everything it reads is constant (weight prepacking).

    Before: `for i in range(4): W_cache[i] = W[i]` in every call
    After: the same in `block(..., role="prepack")`, once
    Checks: the block reads only constant parameters, is the only writer of a global intermediate, and has its own nest
    at the top. No extent or value of it, and no extent of the intermediate, mentions a shape symbol.
    """
    node = find_block(func, block)
    variable = [x.buffer for x in block_loads(node) if x.buffer not in func.consts]
    if variable:
        raise ScheduleError(
            f"{func.name}: {block!r} cannot run once: it reads {variable[0].name!r}, which is not constant"
        )
    is_only_writer = len(writers(func, node.body.buffer)) == 1
    if node.body.buffer not in func.allocs or node.body.buffer.scope != "global" or not is_only_writer:
        raise ScheduleError(f"{func.name}: {block!r} must write a global intermediate to run once")
    symbols = set(func.symbols)
    path = enclosing(func, node)
    if path and len(blocks(path[0])) != 1:
        raise ScheduleError(f"{func.name}: {block!r} must have its own nest to run once")
    for loop in path:
        if symbols & set(free_vars(loop.extent)):
            raise ScheduleError(f"{func.name}: {block!r} cannot run once: loop {loop.var.name!r} has a symbolic extent")
    inside = [e for s in (node.body, node.init) if s is not None for e in (s.value, *s.indices)]
    if symbols & set(free_vars(*inside, node.predicate, *node.bindings, *node.body.buffer.shape)):
        raise ScheduleError(f"{func.name}: {block!r} cannot run once: what it computes depends on a shape symbol")
    return with_body(func, replace_node(func.body, node, replace(node, role="prepack")))
