"""Primitives that compute blocks over padded extents: pad, pad_spatial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    ExprLike,
    Load,
    Var,
    and_,
    ceildiv,
    const,
    free_vars,
    load,
    loads,
    lt,
    minimum,
    mul,
    postorder,
    select,
    substitute,
    transform,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, blocks, replace_buffers, seq
from relax_tune.schedules.independence import updates_in_place, writers, writes_everything
from relax_tune.schedules.loop_tree import (
    block_loads,
    find_block,
    fresh,
    readers,
    replace_node,
    require_compute_block,
    trivial_loops,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.memory.buffers import copy_nest
from relax_tune.schedules.primitives.reduction.reductions import combiner
from relax_tune.schedules.symbols import variables_of

NEUTRAL = {"add": 0.0, "mul": 1.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class PaddedCopy:
    """A buffer that the block reads, and its padded copy.

    Attributes:
        valid: Per dimension the extent that holds elements of `source`; None for all of it.
    """

    source: Buffer
    copy: Buffer
    valid: tuple[Expr | None, ...]


def pad(func: PrimFunc, block: str, factors: Sequence[ExprLike | None]) -> PrimFunc:
    """Compute a block over extents padded to multiples of factors, on padded copies of its inputs.

    Padding holds the reduction's neutral element. A padded output goes to a wider buffer, whose valid part is copied.

    factors: one for each iterator of the block; None leaves it.

    Before: `C[i] = 0; for k in range(K): C[i] += A[i, k] * W[k]`
    After, with factors [None, 4]: `A_pad[i, p] = A[i, p] if p < K else 0`, `W_pad[p] = ...`, then
    `C[i] = 0; for k in range(ceil(K / 4) * 4): C[i] += A_pad[i, k] * W_pad[k]`; a padded spatial iterator also makes
    `C_pad`, copied to `C` by a new block `C_pad_take`
    Checks: the factors are positive. The block has its own trivial nest and no predicate, is the only writer of its whole buffer, and
    does not update in place. Padded iterators are plain indices, and index no divisor. Along a padded reduction the
    neutral elements do not change the result: the block combines reads at all padded reduction iterators, or adds
    products of such reads.
    """
    node = find_block(func, block)
    path = trivial_loops(func, node)
    require_compute_block(func, "pad", node)
    target = node.body.buffer
    wider = _padded_extents(func, node, factors)
    if not wider:
        return func
    fill = _fill_value(func, node, wider)
    copies, names = dict[tuple[object, ...], PaddedCopy](), list[str]()

    def padded(x: Expr) -> Expr | None:
        if not isinstance(x, Load) or x.buffer is target or not wider.keys() & set(free_vars(x)):
            return None
        valid = valid_extents(func, node, x, wider)
        shape = tuple(room.get(i, d) if isinstance(i, Var) else d for i, d in zip(x.indices, x.buffer.shape))
        # Two reads of one buffer may be padded along different dims, and then need different copies.
        key = x.buffer, valid, shape
        if key not in copies:
            names.append(fresh(func, f"{x.buffer.name}_pad", names))
            copies[key] = PaddedCopy(x.buffer, Buffer(names[-1], shape, x.dtype), valid)
        return load(copies[key].copy, x.indices)

    room = {i.var: wider.get(i.var, i.extent) for i in node.iters}

    value = transform(node.body.value, padded)
    iters = tuple(replace(i, extent=wider.get(i.var, i.extent)) for i in node.iters)
    changed: Stmt = replace(node, iters=iters, body=replace(node.body, value=value))
    allocs, after = [o.copy for o in copies.values()], list[Stmt]()
    if any(v in wider for v in node.body.indices):
        shape = tuple(wider.get(i, d) if isinstance(i, Var) else d for i, d in zip(node.body.indices, target.shape))
        names.append(fresh(func, f"{target.name}_pad", names))
        roomy = Buffer(names[-1], shape, target.dtype)
        changed = replace_buffers(changed, {target: roomy})
        take = fresh(func, f"{roomy.name}_take", names)
        after.append(copy_nest(func, take, roomy, target, names))
        allocs.append(roomy)
    for p, i in reversed(list(zip(path, iters))):
        changed = replace(p, extent=i.extent, body=changed)
    before = []
    for o in copies.values():
        before.append(fill_nest(func, o, const(fill, o.copy.dtype), names))
    body = replace_node(func.body, path[0] if path else node, seq(*before, changed, *after))
    return replace(func, body=body, allocs=(*func.allocs, *allocs))


def _padded_extents(func: PrimFunc, node: Block, factors: Sequence[ExprLike | None]) -> dict[Var, Expr]:
    """Return the extents of the iterators that `pad` widens; ScheduleError unless it can pad the block."""
    if len(factors) != len(node.iters):
        raise ScheduleError(
            f"{func.name}: pad expects a factor or None for each of the {len(node.iters)} iterators of {node.name!r}, got "
            f"{len(factors)}"
        )
    multiples = [None if f is None else positive(func, f"pad({node.name!r})", f) for f in factors]
    target = node.body.buffer
    if updates_in_place(node) or len(writers(func, target)) != 1 or not writes_everything(node):
        raise ScheduleError(f"{func.name}: pad expects {node.name!r} to write all of {target.name!r} by itself")
    return {i.var: simplify(mul(ceildiv(i.extent, f), f)) for i, f in zip(node.iters, multiples) if f is not None}


def valid_extents(func: PrimFunc, node: Block, x: Load, wider: dict[Var, Expr]) -> tuple[Expr | None, ...]:
    """Return per dimension the extent of `x` that holds elements; None for all of it.

    Raises:
        ScheduleError: Unless the copied elements were all written.
    """
    extents = {i.var: i.extent for i in node.iters}
    exact = len(set(x.indices)) == len(x.indices) and all(e in extents for e in x.indices)
    producers = writers(func, x.buffer)
    if producers and not exact and not any(writes_everything(b) for b in producers):
        raise ScheduleError(
            f"{func.name}: pad expects all of {x.buffer.name!r} written, got it in parts or with padding"
        )
    for e in x.indices:
        if e not in wider and wider.keys() & set(free_vars(e)):
            raise ScheduleError(
                f"{func.name}: pad expects the padded iterators of {node.name!r} as plain indices, got {x!r}"
            )
    return tuple(extents[e] if isinstance(e, Var) and e in wider else None for e in x.indices)


def _fill_value(func: PrimFunc, node: Block, wider: dict[Var, Expr]) -> float:
    """Return the value of the padding, neutral for the padded reduction. Raises ScheduleError without such a value."""
    # An initial value that is read would be read at padded positions, too.
    if node.init is not None and loads(node.init.value):
        raise ScheduleError(f"{func.name}: pad expects an initial value of {node.name!r} that reads nothing")
    for e in postorder((node.body.value,)):
        if e.op in ("floordiv", "floormod") and loads(e.args[1]):
            raise ScheduleError(f"{func.name}: pad would let {node.name!r} divide by padding: {e!r}")
    steps = {i.var for i in node.iters if i.kind == "reduce" and i.var in wider}
    if not steps:
        return 0.0
    operation, term = combiner(node)
    is_element = isinstance(term, Load) and term.dtype.is_float and steps <= set(free_vars(term))
    if is_element or (operation == "add" and _is_product(term, steps)):
        return NEUTRAL[operation]
    raise ScheduleError(
        f"{func.name}: pad cannot make padding neutral in {node.name!r}: it expects to combine reads at "
        f"{', '.join(sorted(v.name for v in steps))}, or to add products of such, got {term!r} combined by {operation!r}"
    )


def _is_product(e: Expr, steps: set[Var]) -> bool:
    """Return whether `e` is a product whose factors all read at each of the steps: zero inputs make it 0."""
    if isinstance(e, Load):
        return steps <= set(variables_of(e.indices))
    if e.op == "cast":
        return _is_product(e.args[0], steps)
    if e.op == "mul":
        a, b = e.args
        # the product of an infinite factor and a zero of the padding is NaN
        fixed = [isinstance(x, Const) and math.isfinite(x.value) for x in e.args]
        return (fixed[0] or _is_product(a, steps)) and (fixed[1] or _is_product(b, steps)) and not all(fixed)
    return False


def fill_nest(func: PrimFunc, o: PaddedCopy, fill: Const, names: list[str]) -> Stmt:
    """Make the nest `copy[i...] = source[i...]` over valid elements, `fill` at the others."""
    block = fresh(func, f"{o.copy.name}_fill", names)
    names.append(block)
    iters, vars_, where, inside = [], [], [], []
    for letter, dim, valid in zip("ijlpqst", o.copy.shape, o.valid):
        names.append(fresh(func, f"{block}_{letter}", names))
        vars_.append(Var(names[-1]))
        it = IterVar(Var(f"v{letter}"), dim)
        iters.append(it)
        # A select may evaluate both sides: the read stays inside the source also where the fill is chosen.
        where.append(it.var if valid is None else minimum(it.var, valid - 1))
        inside += [] if valid is None else [lt(it.var, valid)]
    value = select(and_(*inside), load(o.source, where), fill)
    s: Stmt = Block(block, tuple(iters), tuple(vars_), BufferStore(o.copy, tuple(i.var for i in iters), value))
    for var, dim in reversed(list(zip(vars_, o.copy.shape))):
        s = For(var, dim, s)
    return s


def pad_spatial(func: PrimFunc, block: str, dim: int, factor: ExprLike) -> PrimFunc:
    """Pad one dimension of intermediates to a multiple of a factor, so that tiles of `factor` need no conditions.

    Padding repeats the last element, and nothing reads it. The dimension is `dim` of the block's output, and the same one of
    every intermediate that it reads or that reads it, index by index. Other blocks read the valid elements.

    Before: `B[i] = f(A[i])`, `C[i] = g(B[i])`, `Y[i] = C[i]`
    After, with factor 16: `B[p] = f(A[min(p, n - 1)]); C[p] = g(B[p])` for p below `ceil(n / 16) * 16`, then `Y[i] = C[i]`
    Checks: the blocks have their own trivial nests and no predicate, and are the only writers of their intermediates. All of them run
    through the same extent, by a spatial iterator of their own. The factor is positive.
    """
    f, first = positive(func, f"pad_spatial({block!r})", factor), find_block(func, block)
    if first.body.buffer not in func.allocs or not 0 <= dim < len(first.body.indices):
        raise ScheduleError(
            f"{func.name}: pad_spatial expects a dimension of an intermediate, got {dim} of {first.body.buffer!r}"
        )
    dims = _aligned_dims(func, first, dim)
    along: dict[Block, Var] = {}
    for b in blocks(func.body):
        if b.body.buffer in dims:
            where = b.body.indices[dims[b.body.buffer]]
            iterator = next((i for i in b.iters if i.var is where and i.kind == "spatial"), None)
            trivial_loops(func, b)
            require_compute_block(func, "pad_spatial", b)
            is_only_writer = len(writers(func, b.body.buffer)) == 1 and not updates_in_place(b)
            if iterator is None or not is_only_writer or sum(i is iterator.var for i in b.body.indices) != 1:
                raise ScheduleError(
                    f"{func.name}: pad_spatial expects {b.name!r} to be the only writer of {b.body.buffer.name!r}, with dimension "
                    f"{dims[b.body.buffer]} indexed by its own iterator"
                )
            along[b] = iterator.var
    extents = {i.extent for b, v in along.items() for i in b.iters if i.var is v}
    extents |= {b.shape[d] for b, d in dims.items()}
    if len(extents) != 1:
        raise ScheduleError(f"{func.name}: pad_spatial expects one extent, got {sorted(map(repr, extents))}")
    (extent,) = extents
    wider = simplify(mul(ceildiv(extent, f), f))
    grown = {b: replace(b, shape=(*b.shape[:d], wider, *b.shape[d + 1 :])) for b, d in dims.items()}

    def widened(b: Block) -> Block:
        v = along.get(b)
        if v is None:
            return b

        def read(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.buffer in dims or v not in free_vars(e):
                return None
            return load(e.buffer, (substitute(i, {v: minimum(v, extent - 1)}) for i in e.indices))

        body = replace(b.body, value=transform(b.body.value, read))
        return replace(b, iters=tuple(replace(i, extent=wider) if i.var is v else i for i in b.iters), body=body)

    body = func.body
    for b in along:
        path = trivial_loops(func, b)
        changed: Stmt = widened(b)
        for p, i in reversed(list(zip(path, b.iters))):
            changed = replace(p, extent=wider if i.var is along[b] else p.extent, body=changed)
        body = replace_node(body, path[0], changed)
    return replace(func, body=replace_buffers(body, grown), allocs=tuple(grown.get(a, a) for a in func.allocs))


def _aligned_dims(func: PrimFunc, first: Block, dim: int) -> dict[Buffer, int]:
    """Return the dimension of each intermediate that runs with `dim` of the output of `first`."""
    dims, todo = {first.body.buffer: dim}, [first.body.buffer]
    producers = {b.body.buffer: b for b in blocks(func.body) if b.body.buffer in func.allocs}

    def note(b: Buffer, d: int) -> None:
        if dims.setdefault(b, d) != d:
            raise ScheduleError(f"{func.name}: pad_spatial expects one dimension of {b.name!r}, got {dims[b]} and {d}")
        if b not in todo:
            todo.append(b)

    for buffer in todo:
        d = dims[buffer]
        producer = producers[buffer]
        for x in block_loads(producer):
            at = [k for k, e in enumerate(x.indices) if producer.body.indices[d] in free_vars(e)]
            if x.buffer in producers and at:
                if len(at) != 1 or x.indices[at[0]] is not producer.body.indices[d]:
                    raise ScheduleError(
                        f"{func.name}: pad_spatial expects {producer.name!r} to read {x!r} index by index"
                    )
                note(x.buffer, at[0])
        for reader in readers(func, buffer):
            for x in block_loads(reader):
                if x.buffer is not buffer or reader.body.buffer not in producers:
                    continue
                v = x.indices[d]
                places = [k for k, e in enumerate(reader.body.indices) if e is v]
                if len(places) == 1 and isinstance(v, Var):
                    note(reader.body.buffer, places[0])
                # any other reader reads valid elements only
    return dims
