"""Primitives on the iterators of a block, and on inputs laid out by them: fuse_block_iters, flatten_rows, reindex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import (
    Expr,
    Load,
    Var,
    and_,
    const,
    floormod,
    free_vars,
    le,
    load,
    loads,
    lt,
    maximum,
    mul,
    substitute,
    transform,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, seq
from relax_tune.schedules.independence import writers, writes_everything
from relax_tune.schedules.loop_tree import (
    block_loads,
    find_block,
    find_loop,
    fresh,
    replace_node,
    require_compute_block,
    require_rectangular,
    trivial_loops,
    with_body,
    with_iters,
)
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.memory.buffers import require_scope
from relax_tune.schedules.primitives.memory.layouts import with_layout

LETTERS = "ijlpqstuwxyz"


def fuse_block_iters(func: PrimFunc, block: str, names: Sequence[str]) -> PrimFunc:
    """Fuse neighbouring loops of a block together with their iterators.

    `fuse` leaves the block its iterators. A region of the fused iterator is an interval for any extents.

    Before: `for i in range(N): for j in range(M): C[vi, vj] = A[vi, vj]` with `vi = i; vj = j`
    After: `for i_j_fused in range(N * M): C[v // M, v % M] = A[v // M, v % M]` with `v = i_j_fused`
    Checks: the block has its own trivial nest, of loops in any order, and no predicate. The loops are serial, directly nested
    in this order, and feed iterators of one kind. Extents are independent of each other.
    """
    node = find_block(func, block)
    path = trivial_loops(func, node, any_order=True)
    require_compute_block(func, "fuse_block_iters", node)
    nest = [find_loop(func, n) for n in names]
    if len(nest) < 2:
        return func
    at = path.index(nest[0]) if nest[0] in path else len(path)
    if list(path[at : at + len(nest)]) != nest:
        raise ScheduleError(
            f"{func.name}: fuse_block_iters expects loops of {block!r} directly inside each other, got {', '.join(names)} among "
            f"{', '.join(p.var.name for p in path)}"
        )
    for loop in nest:
        require_serial(func, loop, "fuse_block_iters")
    # An extent that depends on another loop (a triangle) has no quotient and remainder that give both loops back.
    require_rectangular(func, path, "fuse_block_iters")
    joined = [next(i for i, b in zip(node.iters, node.bindings) if b is loop.var) for loop in nest]
    if len({i.kind for i in joined}) != 1:
        raise ScheduleError(
            f"{func.name}: fuse_block_iters expects iterators of one kind, got several kinds for {', '.join(names)}"
        )
    total: Expr = const(1)
    for i in joined:
        total = mul(total, i.extent)
    one = IterVar(Var("_".join([joined[0].var.name, *(i.var.name.removeprefix("v") for i in joined[1:])])),
                  simplify(total), joined[0].kind)  # fmt: skip
    values: dict[Var, Expr] = {}
    rest: Expr = one.var
    for i in reversed(joined[1:]):
        values[i.var] = floormod(rest, i.extent)
        rest = rest // i.extent
    values[joined[0].var] = rest
    var = Var(fresh(func, "_".join(names) + "_fused"))
    pairs: list[tuple[IterVar, Expr]] = []
    for loop in path:  # iterators in the order of their loops
        i = next(i for i, b in zip(node.iters, node.bindings) if b is loop.var)
        if i is joined[0]:
            pairs.append((one, var))
        elif i not in joined:
            pairs.append((i, loop.var))
    body: Stmt = with_iters(node, pairs, values)
    for loop in reversed(path[at + len(nest) :]):
        body = replace(loop, body=body)
    return with_body(func, replace_node(func.body, nest[0], For(var, one.extent, body)))


def flatten_rows(func: PrimFunc, block: str, names: Sequence[str], buffer: str) -> PrimFunc:
    """Flatten the last two loops of a block into one loop along whole rows of an input.

    The loop also runs through the gaps between the rows of the output. Neighbouring iterations then read neighbouring
    elements at any shift, as convolutions need.

    Before: `for i in range(N): for j in range(M): B[i, j] = A[i + a, j + b]` with rows of `A` of P elements
    After: `for i_j_rows in range((N - 1) * P + M): B[v] = A[(v + a * P + b) // P, (v + a * P + b) % P]`; others read `B[i * P + j]`
    Checks: the block has its own trivial nest and no predicate. It is the only writer of an intermediate of floats, with the iterators of
    the two loops as its last two indices. It reads `buffer` so in its last two dimensions, and nothing else there. Elements
    between the rows, which no block reads, are computed from written elements inside the buffer.
    """
    node = find_block(func, block)
    path = trivial_loops(func, node)
    require_compute_block(func, "flatten_rows", node)
    require_rectangular(func, path, "flatten_rows")
    out = node.body.buffer
    i, j = _row_and_column(func, node, path, names)
    pitch, shifts = _rows_of(func, node, buffer, i, j)
    total = simplify((i.extent - 1) * pitch + j.extent)
    one = IterVar(Var(f"{i.var.name}_{j.var.name.removeprefix('v')}"), total)
    var = Var(fresh(func, f"{names[0]}_{names[1]}_rows"))

    def read(e: Expr) -> Expr:
        def leaf(n: Expr) -> Expr | None:
            if isinstance(n, Load) and n in shifts:
                at = one.var + shifts[n]
                return load(n.buffer, (*n.indices[:-2], at // pitch, at % pitch))
            return None

        return transform(e, leaf)

    value = transform(
        read(node.body.value), lambda n: load(out, n.indices) if isinstance(n, Load) and n.buffer is out else None
    )
    pairs = [(one, var) if it is i else (it, b) for it, b in zip(node.iters, node.bindings) if it is not j]
    moved = replace(node, body=replace(node.body, value=value))
    # Without rows the total would be negative.
    rows = replace(out, shape=(*out.shape[:-2], total if prove(le(0, total)) is Proof.YES else maximum(total, 0)))
    body: Stmt = replace(moved, iters=tuple(it for it, _ in pairs), bindings=tuple(b for _, b in pairs))
    first = path.index(find_loop(func, names[0]))
    for loop in reversed(path[first + 2 :]):
        body = replace(loop, body=body)
    flattened = with_body(func, replace_node(func.body, path[first], For(var, one.extent, body)))

    def where(indices: Sequence[Expr]) -> tuple[Expr, ...]:
        is_store = indices[-2:] == (i.var, j.var)
        return (*indices[:-2], one.var if is_store else simplify(indices[-2] * pitch + indices[-1]))

    return with_layout(flattened, out, rows, where)


def _row_and_column(func: PrimFunc, node: Block, path: Sequence[For], names: Sequence[str]) -> tuple[IterVar, IterVar]:
    """Return the iterators of the two loops that `flatten_rows` flattens; ScheduleError unless it can."""
    if len(names) != 2 or [p.var.name for p in path if p.var.name in names] != list(names):
        raise ScheduleError(
            f"{func.name}: flatten_rows expects two loops of {node.name!r} in their order, got {list(names)}"
        )
    outer, inner = (find_loop(func, name) for name in names)
    for loop in (outer, inner):
        require_serial(func, loop, "flatten_rows")
    i, j = (next(it for it, b in zip(node.iters, node.bindings) if b is loop.var) for loop in (outer, inner))
    if path.index(inner) != path.index(outer) + 1:
        raise ScheduleError(f"{func.name}: flatten_rows expects {names[1]!r} directly inside {names[0]!r}")
    out = node.body.buffer
    # Floats only: elements in the gaps are computed too, from arbitrary neighbours, where a division of integers
    # could trap.
    plain = out in func.allocs and out.dtype.is_float and len(writers(func, out)) == 1 and writes_everything(node)
    if not plain or node.body.indices[-2:] != (i.var, j.var):
        raise ScheduleError(
            f"{func.name}: flatten_rows expects {node.name!r} to write all of an intermediate of floats by itself, at {i.var.name}, "
            f"{j.var.name} last, got {out!r} at {node.body.indices!r}"
        )
    return i, j


def _rows_of(func: PrimFunc, node: Block, buffer: str, i: IterVar, j: IterVar) -> tuple[Expr, dict[Load, Expr]]:
    """Return the row length of the input, and the shift of each read along the rows."""
    shifts: dict[Load, Expr] = {}
    env = Env()
    for it in node.iters:
        env = env.with_loop(it.var, it.extent)
    pitch: Expr = const(0)
    for x in block_loads(node):
        if not {i.var, j.var} & set(free_vars(x)):
            continue
        parts = [linear(e, (i.var, j.var)) for e in x.indices[-2:]]
        leading = {i.var, j.var} & set(free_vars(*x.indices[:-2]))
        steps = [p and p[0] for p in parts]
        # Strides of 1 in both dims: only then is the read at a fixed distance from the flat position.
        if x.buffer.name != buffer or leading or loads(*x.indices) or steps != [{i.var: const(1)}, {j.var: const(1)}]:
            raise ScheduleError(
                f"{func.name}: flatten_rows expects {node.name!r} to read {buffer!r} at {i.var.name} and {j.var.name} and shifts in "
                f"its last two dims, got {x!r}"
            )
        producers = writers(func, x.buffer)
        if producers and not any(writes_everything(b) for b in producers):
            raise ScheduleError(f"{func.name}: flatten_rows expects all of {buffer!r} written, got it in parts")
        (_, a), (_, b) = (p for p in parts if p is not None)
        pitch = x.buffer.shape[-1]
        # The gaps lie between the first and the last element that are read, so they are inside whenever both ends
        # are.
        inside = and_(le(0, a), le(i.extent + a, x.buffer.shape[-2]), le(0, b), le(j.extent + b, pitch))
        if prove(inside, env) is not Proof.YES:
            raise ScheduleError(f"{func.name}: flatten_rows cannot prove that {x!r} stays inside {x.buffer!r}")
        shifts[x] = a * pitch + b
    if not shifts:
        raise ScheduleError(f"{func.name}: flatten_rows expects {node.name!r} to read {buffer!r} along {j.var.name}")
    return pitch, shifts


def reindex(func: PrimFunc, block: str, buffer: str, dims: Sequence[int], scope: Scope = "global") -> PrimFunc:
    """Let a block read a copy of an input, laid out by the block's iterators in the given dimensions (as im2col does).

    Each iterator that indexes such a dimension becomes a dimension of the copy, in the block's order. A new block
    `<buffer>_reindex_copy` makes the copy.

    Before: `C[i] += A[i * 2 + k] * W[k]`
    After, with dims [0]: `A_reindex[i, k] = A[i * 2 + k]` then `C[i] += A_reindex[i, k] * W[k]`
    Checks: the block has its own trivial nest and no predicate. It reads the buffer at one place, in the given dimensions at
    expressions of its iterators and symbols. Every element of the buffer was written, by nothing in the block's own nest. The
    copy reads inside the buffer for all values of the other iterators.
    """
    node = find_block(func, block)
    path = trivial_loops(func, node)
    require_compute_block(func, "reindex", node)
    require_scope(func, scope)
    access = _access_to_copy(func, node, buffer, dims)
    source = access.buffer
    require_rectangular(func, path, "reindex")
    _require_inside(func, node, access, dims)
    name = fresh(func, f"{buffer}_reindex")
    copy_name = fresh(func, f"{name}_copy", (name,))
    steps: dict[Var, IterVar] = {}
    iters: list[IterVar] = []
    read: list[Expr] = []  # the block's indices in the copy
    where: list[Expr] = []  # the copy's indices in the source
    for d, (index, dim) in enumerate(zip(access.indices, source.shape)):
        if d not in dims:
            iters.append(IterVar(Var(f"v{LETTERS[len(iters)]}"), dim))
            read.append(index)
            where.append(iters[-1].var)
            continue
        for i in node.iters:
            if i.var in free_vars(index) and i.var not in steps:
                steps[i.var] = IterVar(Var(f"v{LETTERS[len(iters)]}"), i.extent)
                iters.append(steps[i.var])
                read.append(i.var)
        where.append(substitute(index, {v: i.var for v, i in steps.items()}))
    copy = Buffer(name, tuple(i.extent for i in iters), source.dtype, scope)
    reserved = [name, copy_name]
    for letter in LETTERS[: len(iters)]:
        reserved.append(fresh(func, f"{copy_name}_{letter}", reserved))
    vars_ = [Var(n) for n in reserved[2:]]
    copying: Stmt = Block(
        copy_name,
        tuple(iters),
        tuple(vars_),
        BufferStore(copy, tuple(i.var for i in iters), load(source, tuple(where))),
    )
    for var, i in reversed(list(zip(vars_, iters))):
        copying = For(var, i.extent, copying)
    new = load(copy, tuple(read))
    value = transform(node.body.value, lambda n: new if n is access else None)
    changed = replace(node, body=replace(node.body, value=value))
    top: Stmt = path[0] if path else node
    body = replace_node(func.body, top, seq(copying, replace_node(top, node, changed)))
    return replace(func, body=body, allocs=(*func.allocs, copy))


def _access_to_copy(func: PrimFunc, node: Block, buffer: str, dims: Sequence[int]) -> Load:
    """Return the one place where a block reads a buffer; ScheduleError unless `reindex` can copy it in these dimensions."""
    accesses = [x for x in block_loads(node) if x.buffer.name == buffer]
    if len(accesses) != 1 or accesses[0].buffer is node.body.buffer:
        raise ScheduleError(
            f"{func.name}: reindex expects {node.name!r} to read {buffer!r} at one place, got {len(accesses)}"
        )
    (access,) = accesses
    source = access.buffer
    if not dims or len(set(dims)) != len(dims) or any(not 0 <= d < len(source.shape) for d in dims):
        raise ScheduleError(f"{func.name}: reindex expects distinct dimensions of {source!r}, got {list(dims)}")
    producers = writers(func, source)
    if producers and not any(writes_everything(b) for b in producers):
        raise ScheduleError(f"{func.name}: reindex expects all of {buffer!r} written, got it in parts or with padding")
    if any(loads(access.indices[d]) for d in dims):
        raise ScheduleError(f"{func.name}: reindex expects indices of {buffer!r} that read nothing, got {access!r}")
    return access


def _require_inside(func: PrimFunc, node: Block, access: Load, dims: Sequence[int]) -> None:
    """Check that the copy reads inside the buffer.

    It does provably, or because the block makes the same reads for each value of the iterators.
    """
    env, used = Env(), {v for d in dims for v in free_vars(access.indices[d])}
    for i in node.iters:
        # The copy runs over the iterators of the index only. If another loop of the block is empty, the block reads
        # nothing, and the copy must be proved without it.
        env = env.with_loop(i.var, i.extent, i.var in used)
    if all(i.var in used or prove(le(1, i.extent)) is Proof.YES for i in node.iters):
        return
    for d in dims:
        inside = and_(le(0, access.indices[d]), lt(access.indices[d], access.buffer.shape[d]))
        if prove(inside, env) is not Proof.YES:
            raise ScheduleError(
                f"{func.name}: reindex cannot prove that {access.indices[d]!r} stays in dimension {d} of {access.buffer!r} "
                f"where {node.name!r} may have no other iterations"
            )
