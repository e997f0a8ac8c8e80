"""Primitives for softmax and attention: split_k_update, rolling_update (Neptune, arXiv:2510.08726).

`rolling_update` gives the online softmax (Milakov & Gimelshein 2018) of FlashAttention (Dao et al. 2022);
`split_k_update` gives the split over keys of flash-decoding (Dao et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import is_dense
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    ExprLike,
    Load,
    Var,
    call,
    cast,
    ceildiv,
    const,
    eq,
    free_vars,
    load,
    loads,
    lt,
    maximum,
    mul,
    op,
    select,
    sub,
    substitute,
    transform,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Seq, Stmt, blocks, loops, seq, walk
from relax_tune.schedules.independence import writers
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
    require_rectangular,
    trivial_loops,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.blocks.compute_location import DimRegion, region_of, spatial_of
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.reduction.mask_ranges import unmasked_range
from relax_tune.schedules.primitives.reduction.reductions import combiner, decompose_reduction
from relax_tune.schedules.symbols import by_variable, variables_of


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """A sum `A[...] = A[...] + term` over the keys.

    Attributes:
        access: The weight, a factor of `term`.
        step: The iterator of the keys.
    """

    block: Block
    access: Load
    step: IterVar


@dataclass(frozen=True, slots=True)
class SoftmaxPattern:
    """Row maxima `M[i] = max_k s(i, k)`, weights `W[i, k] = exp(s(i, k) - M[i])`, and weighted sums over k.

    W may hold 16-bit floats, which the sums cast up.

    Attributes:
        row_max: The block that makes M.
        step: The iterator of the keys in `row_max`.
        score: The scores s(i, k).
        rows: The iterators of `weights` that index M, in the order of its dimensions.
        key: The iterator of `weights` over keys.
    """

    row_max: Block
    step: IterVar
    score: Expr
    weights: Block
    rows: tuple[Var, ...]
    key: Var
    sums: tuple[WeightedSum, ...]

    def weight(self) -> Expr:
        """Return the value of a weight, 0 for a score of minus infinity."""
        m = load(self.row_max.body.buffer, self.rows)
        value = _masked_exp(_score_at(self.row_max, self.step, self.score, self.rows, self.key), m)
        return cast(value, self.weights.body.buffer.dtype)

    def rows_of(self, s: WeightedSum) -> tuple[Expr, ...]:
        """Return the indices of the maximum of a sum's row."""
        at = dict(zip(self.weights.body.indices, s.access.indices))
        return tuple(at[v] for v in self.rows)


def split_k_update(func: PrimFunc, block: str, factor: ExprLike) -> PrimFunc:
    """Split the keys of a softmax into blocks, each with its own maximum; combine their sums afterwards (Neptune's split-K update).

    Before: `M[i] = max(M[i], s[i, k])`, `W[i, k] = exp(s[i, k] - M[i])`, `A[i] = A[i] + W[i, k] * x[k]`
    After: `M_rf[b, i] = max(M_rf[b, i], s[i, b * F + t])`, `W[i, k] = exp(s[i, k] - M_rf[k // F, i])`,
    `A_rf[b, i] = A_rf[b, i] + W[i, b * F + t] * x[b * F + t]`, then `M[i] = max(M[i], M_rf[b, i])`,
    `M_scale[b, i] = exp(M_rf[b, i] - M[i])`, `A[i] = A[i] + A_rf[b, i] * M_scale[b, i]`
    Checks: `block` is a maximum over one iterator from minus infinity. One block that feeds sums reads it, and makes those
    weights (or 0 for a score of minus infinity). The weights are read by sums over the same iterator, from 0, once each as a
    factor. All have their own trivial nests; the factor is positive. Results differ by rounding. A row whose scores are all
    minus infinity sums up to 0.

    Above 60 lines, since each member's two nests share buffers and fresh names.
    """
    f = positive(func, f"split_k_update({block!r})", factor)
    pattern = softmax_of(func, block)
    members = (pattern.row_max, pattern.weights, *(s.block for s in pattern.sums))
    require_compute_block(func, "split_k_update", *members)
    nests = {b: (trivial_loops(func, b) or (b,))[0] for b in members}
    names: list[str] = []
    count = simplify(ceildiv(pattern.step.extent, f))

    def new(name: str) -> str:
        names.append(fresh(func, name, names))
        return names[-1]

    def partial(b: Buffer, suffix: str) -> Buffer:
        return Buffer(new(f"{b.name}_{suffix}"), (count, *b.shape), b.dtype)

    top = pattern.row_max.body.buffer
    local, scale = partial(top, "rf"), partial(top, "scale")
    parts = {s.block: partial(s.block.body.buffer, "rf") for s in pattern.sums}

    def factored(b: Block, step: IterVar, target: Buffer) -> Stmt:
        """Reduce each block of keys."""
        assert b.init is not None
        part, inside = IterVar(Var("vb"), count), IterVar(Var("vt"), f, "reduce")

        def moved(x: Expr) -> Expr | None:
            return load(target, (part.var, *x.indices)) if isinstance(x, Load) and x.buffer is b.body.buffer else None

        value = substitute(transform(b.body.value, moved), {step.var: part.var * f + inside.var})
        spatial = tuple(i for i in b.iters if i is not step)
        where = (part.var, *b.body.indices)
        body = BufferStore(target, where, value)
        iterators = (*spatial, part, inside)
        nest = _block_nest(new(f"{b.name}_rf"), iterators, body, replace(b.init, buffer=target, indices=where), new)
        return _limit_keys(nest, f, step.extent)

    def combined(b: Block, step: IterVar, value: Expr, part: Var) -> Stmt:
        """Reduce over the blocks of keys."""
        spatial = tuple(i for i in b.iters if i is not step)
        merged = op(b.body.value.op, (b.body.value.args[0], value), value.dtype)
        iterators = (*spatial, IterVar(part, count, "reduce"))
        return _block_nest(b.name, iterators, BufferStore(b.body.buffer, b.body.indices, merged), b.init, new)

    over = Var("vb")
    at = pattern.row_max.body.indices
    row_iters = tuple(i for i in pattern.row_max.iters if i.kind == "spatial")
    local_maximum = load(local, (over, *at))
    # A block whose keys are all masked has a maximum of minus infinity. In a row without any key so has the whole:
    # the plain `exp(-inf - -inf)` would be NaN and spoil the sums.
    weight = _masked_exp(local_maximum, load(top, at))
    stmts: dict[Block, Stmt] = {pattern.row_max: factored(pattern.row_max, pattern.step, local)}
    late: dict[Block, Stmt] = {
        pattern.row_max: seq(
            combined(pattern.row_max, pattern.step, local_maximum, over),
            _block_nest(
                new(f"{block}_scale"),
                (*row_iters, IterVar(over, count)),
                BufferStore(scale, (over, *at), weight),
                None,
                new,
            ),
        )
    }

    def partial_maximum(e: Expr) -> Expr | None:
        # Weights are relative to the maximum of their own block, so that no block of keys waits for another one.
        return load(local, (pattern.key // f, *e.indices)) if isinstance(e, Load) and e.buffer is top else None

    w = pattern.weights
    stmts[w] = replace_node(
        nests[w], w, replace(w, body=replace(w.body, value=transform(pattern.weight(), partial_maximum)))
    )
    for s in pattern.sums:
        part = Var("vb")
        buffer = parts[s.block]
        value = mul(load(buffer, (part, *s.block.body.indices)), load(scale, (part, *pattern.rows_of(s))))
        stmts[s.block] = factored(s.block, s.step, buffer)
        late[s.block] = combined(s.block, s.step, value, part)
    # all partial results first, then the combinations, unless a block in between reads a result
    order = sorted(late, key=blocks(func.body).index)
    ends = [order[-1]] * len(order) if _may_combine_last(func, members) else order
    for b, end in zip(order, ends, strict=True):
        stmts[end] = seq(stmts[end], late[b])
    body = func.body
    for b in members:
        body = replace_node(body, nests[b], stmts[b])
    return replace(func, body=body, allocs=(*func.allocs, local, scale, *parts.values()))


def _may_combine_last(func: PrimFunc, members: Sequence[Block]) -> bool:
    """Return whether no block between the members reads their results, so that combining may follow all of them."""
    every = blocks(func.body)
    places = [every.index(b) for b in members]
    between = [b for b in every[min(places) : max(places)] if b not in members]
    written = {b.body.buffer for b in members}
    return not any(x.buffer in written for b in between for x in block_loads(b))


def _block_nest(
    name: str, iters: Sequence[IterVar], body: BufferStore, init: BufferStore | None, new: Callable[[str], str]
) -> Stmt:
    """Build a block with one loop for each iterator."""
    new_iters = tuple(replace(i, var=Var(i.var.name)) for i in iters)
    values: dict[Var, Expr] = {old.var: i.var for old, i in zip(iters, new_iters, strict=True)}
    names = tuple(Var(new(f"{name}_{i.var.name.removeprefix('v')}")) for i in iters)

    def placed(s: BufferStore) -> BufferStore:
        return BufferStore(s.buffer, tuple(substitute(e, values) for e in s.indices), substitute(s.value, values))

    s: Stmt = Block(name, new_iters, names, placed(body), init and placed(init))
    for var, i in reversed(list(zip(names, new_iters, strict=True))):
        s = For(var, i.extent, s)
    return s


def _limit_keys(nest: Stmt, f: Expr, extent: Expr) -> Stmt:
    """Guard a nest by `keys < extent`; its last two loops are over blocks of `f` keys and the keys of a block."""
    (block,), around = blocks(nest), loops(nest)
    # A condition of the block, not a shorter last loop: the primitives that follow expect rectangular nests.
    condition = lt(around[-2].var * f + around[-1].var, extent)
    if prove(condition, loop_env(around)) is Proof.YES:
        return nest
    return replace_node(nest, block, replace(block, predicate=condition))


def masked_score(dtype: DType) -> Const:
    """Return the score of a masked key, minus infinity."""
    return const(-math.inf, dtype)


def _masked_exp(score: Expr, top: Expr) -> Expr:
    """Return `exp(score - top)`, 0 for a score of minus infinity."""
    return select(eq(score, masked_score(score.dtype)), const(0, score.dtype), call("exp", sub(score, top)))


def _score_at(top: Block, step: IterVar, score: Expr, rows: Sequence[Expr], key: Expr) -> Expr:
    return substitute(score, {**by_variable(top.body.indices, rows), step.var: key})


def softmax_of(func: PrimFunc, block: str) -> SoftmaxPattern:
    """Match the softmax whose maximum is `block`. Raises ScheduleError for anything else."""
    top = find_block(func, block)
    step, score = _reduced(func, top, "max", -math.inf)
    spatial_of(top)
    maxima = top.body.buffer
    if any(x.buffer is maxima for x in loads(score)):
        raise ScheduleError(f"{func.name}: the scores of {block!r} depend on their maximum")
    inner = [b for b in readers(func, maxima) if b is not top and _feeds_sum(func, b)]
    if len(inner) != 1:
        raise ScheduleError(
            f"{func.name}: expected one block that makes weights of the maxima of {block!r}, got "
            f"{', '.join(b.name for b in inner) or 'none'}"
        )
    (weights,) = inner
    rows, key = _weights(func, weights, top, step, score)
    target = weights.body.buffer
    if target not in func.allocs or len(writers(func, target)) != 1:
        raise ScheduleError(
            f"{func.name}: expected {weights.name!r} to be the only writer of an intermediate, got {target.name!r}"
        )
    sums = tuple(_sum(func, b, weights, key) for b in readers(func, target))
    intermediates = {top.body.buffer, target, *(s.block.body.buffer for s in sums)}
    for s in sums:
        unexpected = [x for x in block_loads(s.block) if x.buffer in intermediates and x is not s.access]
        if any(x.buffer is not s.block.body.buffer for x in unexpected):
            raise ScheduleError(
                f"{func.name}: {s.block.name!r} reads {unexpected[0]!r}, which the same pattern computes"
            )
    return SoftmaxPattern(top, step, score, weights, rows, key, sums)


def _feeds_sum(func: PrimFunc, b: Block) -> bool:
    """Return whether a reduction reads the block's result; a last use of the maxima does not count."""
    return any(r.is_reduction for r in readers(func, b.body.buffer))


def _reduced(func: PrimFunc, node: Block, operation: str, start: float) -> tuple[IterVar, Expr]:
    """Return the one reduction iterator and the term of a reduction by `operation` from `start`. Raises ScheduleError."""
    combined, term = combiner(node)
    steps = [i for i in node.iters if i.kind == "reduce"]
    init = node.init.value if node.init is not None else None
    if combined != operation or len(steps) != 1 or init is None or init.value != start:
        raise ScheduleError(
            f"{func.name}: expected {node.name!r} to combine by {operation!r} over one iterator from {start}, got {combined!r} "
            f"over {len(steps)} from {init!r}"
        )
    if len(writers(func, node.body.buffer)) != 1 or not term.dtype.is_float:
        raise ScheduleError(
            f"{func.name}: expected {node.name!r} to be the only writer of floats, got {node.body.buffer!r}"
        )
    return steps[0], term


def _weights(func: PrimFunc, node: Block, top: Block, step: IterVar, score: Expr) -> tuple[tuple[Var, ...], Var]:
    """Return the row iterators and the key iterator of a block that makes `exp(score - maximum)`. Raises ScheduleError."""
    iterators = spatial_of(node)
    maxima = dict.fromkeys(x.indices for x in block_loads(node) if x.buffer is top.body.buffer)
    rows = next(iter(maxima), ())
    left = [v for v in iterators if v not in rows]
    plain = tuple(v for v in variables_of(rows) if v in iterators)
    if (
        node.is_reduction
        or len(maxima) != 1
        or len(plain) != len(rows)
        # (`M[i, i]` would leave the rows off the diagonal without weights.)
        or len(set(rows)) != len(rows)
        or len(left) != 1
    ):
        raise ScheduleError(
            f"{func.name}: expected {node.name!r} to make a weight for each row and key of {top.name!r}"
        )
    s, m = _score_at(top, step, score, plain, left[0]), load(top.body.buffer, plain)
    target = node.body.buffer.dtype
    # Operators make the plain form, masked attention the guarded one. Both become the guarded one
    # (`SoftmaxPattern.weight`), since the maximum of a part may be minus infinity where the row's is finite.
    if node.body.value not in (cast(_masked_exp(s, m), target), cast(call("exp", sub(s, m)), target)):
        raise ScheduleError(
            f"{func.name}: expected {node.name!r} to make exp(score - maximum) of the scores of {top.name!r}, got "
            f"{node.body.value!r}"
        )
    extents = {i.var: i.extent for i in node.iters}
    pairs = [(extents[left[0]], step.extent), *zip((extents[v] for v in plain), top.body.buffer.shape)]
    if any(prove(eq(a, b)) is not Proof.YES for a, b in pairs):
        raise ScheduleError(f"{func.name}: {node.name!r} makes weights of other keys or rows than {top.name!r} sees")
    return plain, left[0]


def _sum(func: PrimFunc, node: Block, weights: Block, key: Var) -> WeightedSum:
    """Match a sum over all keys of weights times a factor. Raises ScheduleError."""
    step, term = _reduced(func, node, "add", 0.0)
    spatial_of(node)
    target = weights.body.buffer
    accesses = [x for x in loads(term) if x.buffer is target]
    keys = next(i.extent for i in weights.iters if i.var is key)
    # A new maximum changes every weight by one factor. A sum of their squares, say, would have to be rescaled by its
    # square.
    if len(accesses) != 1 or not _is_factor(term, accesses[0]) or prove(eq(step.extent, keys)) is not Proof.YES:
        raise ScheduleError(
            f"{func.name}: expected {node.name!r} to add up weights of {weights.name!r}, once as a factor, got {term!r}"
        )
    at = dict(zip(weights.body.indices, accesses[0].indices))
    if at[key] is not step.var or any(step.var in free_vars(e) for v, e in at.items() if v is not key):
        raise ScheduleError(
            f"{func.name}: {node.name!r} reads {accesses[0]!r}, expected keys at {step.var.name!r} only"
        )
    return WeightedSum(node, accesses[0], step)


def _is_factor(e: Expr, access: Load) -> bool:
    """Return whether `e` is `access`, cast up or plain, times expressions that do not read it."""
    if e in (access, cast(access, e.dtype)):
        return True
    if e.op != "mul":
        return False
    with_it = [a for a in e.args if access in loads(a)]
    return len(with_it) == 1 and _is_factor(with_it[0], access)


def rolling_update(func: PrimFunc, block: str, skip: Literal["none", "after_last", "masked"] = "none") -> PrimFunc:
    """Compute the maxima of a softmax while its sums run, and rescale the sums when a maximum grows (Neptune's rolling update).

    This is the online softmax (Milakov & Gimelshein 2018).

    Before: `for k: M[i] = max(M[i], s[i, k])`, `for k: W[i, k] = exp(s[i, k] - M[i])`, `for k: A[i] = A[i] + W[i, k] * x[k]`
    After: `M[i] = -inf; A[i] = 0`, then `for k: f[k, i] = exp(M[i] - max(M[i], s[i, k])); M[i] = max(M[i], s[i, k]);
    W[i, k] = exp(s[i, k] - M[i]); A[i] = A[i] * f[k, i] + W[i, k] * x[k]`
    Checks: maximum, weights and sums as for `split_k_update`; nothing else reads the weights. Each nest begins with its loop
    over the keys, unsplit and serial, whose iterations all run. The nests follow each other in one body and cover the same rows.
    Afterwards the order of the loops is part of the meaning: with no initial values left, nothing may reorder or spread them.
    Results differ by rounding. A row whose scores are all minus infinity sums up to 0.

    skip: `none`; `after_last`, the iterations after the last that the mask `select(c, s, -inf)` leaves to some row of the tile;
        or `masked`, those before the first one, too: `for k in range(min(N, last + 1) - first)` at `first + k`. Both bounds may
        depend on outer loops. A skipped iteration has weights of 0 and leaves the maximum, so that it would add nothing. Its
        other factors may then be infinite or NaN without effect.
    Checks also: the condition has comparisons that are linear in the step and monotonic in the rows, and mask a step.
    """
    if skip not in ("none", "after_last", "masked"):
        raise ScheduleError(f"{func.name}: rolling_update expects skip to be none, after_last or masked, got {skip!r}")
    pattern = softmax_of(func, block)
    members = (pattern.row_max, pattern.weights, *(s.block for s in pattern.sums))
    require_compute_block(func, "rolling_update", *members)
    keys, start = _consecutive_nests(func, pattern, members)
    order = list(keys.values())
    env = loop_env(enclosing(func, order[0]))
    first: Expr = const(0)
    count = order[0].extent
    if skip != "none":
        path = enclosing(func, pattern.row_max)
        rows = {p.var: p.extent for p in path[path.index(order[0]) + 1 :]}
        first, count = unmasked_range(
            func, block_value(pattern.row_max, pattern.score), order[0], rows, env, skip == "masked"
        )
    updated = func
    # Initial values leave the loop over keys first, because each iteration now reads the sum of the one before in
    # order to rescale it.
    for b in (pattern.row_max, *(s.block for s in pattern.sums)):
        updated = decompose_reduction(updated, b.name, keys[b].var.name)
    body = next(
        n for n in walk(updated.body) if isinstance(n, Seq) and find_loop(updated, order[0].var.name) in n.stmts
    )
    part = body.stmts[start : start + len(order) + len(pattern.sums) + 1]  # with their initial values
    loops_ = [find_loop(updated, k.var.name) for k in order]
    maxima = pattern.row_max.body.buffer
    name = fresh(func, f"{maxima.name}_factor")
    factor = Buffer(name, (pattern.step.extent, *maxima.shape), pattern.score.dtype, maxima.scope)
    nests = [_factor_nest(updated, pattern, loops_[0], factor)]
    for b, k in zip(members, loops_):
        (node,) = blocks(k)
        changed = replace_node(k.body, node, _rescaled(pattern, b, node, factor))
        nests.append(rebind(changed, {k.var: loops_[0].var}))
    body_ = seq(*nests) if first is const(0) else rebind(seq(*nests), {loops_[0].var: first + loops_[0].var})
    rolled = replace(loops_[0], extent=count, body=body_)
    stmts = (*body.stmts[:start], *(s for s in part if s not in loops_), rolled, *body.stmts[start + len(part) :])
    return replace(updated, body=replace_node(updated.body, body, seq(*stmts)), allocs=(*updated.allocs, factor))


def _consecutive_nests(
    func: PrimFunc, pattern: SoftmaxPattern, members: Sequence[Block]
) -> tuple[dict[Block, For], int]:
    """Return the loop over keys of each member, and the position of the first in its sequence.

    Raises:
        ScheduleError: Unless the loops follow each other with equal extents, over the same rows.
    """
    steps = (pattern.step.var, pattern.key, *(s.step.var for s in pattern.sums))
    keys = {b: _key_loop(func, b, v) for b, v in zip(members, steps)}
    order = list(keys.values())
    parent = next((n for n in walk(func.body) if isinstance(n, Seq) and order[0] in n.stmts), None)
    start = -1 if parent is None else parent.stmts.index(order[0])
    if parent is None or not pattern.sums or list(parent.stmts[start : start + len(order)]) != order:
        raise ScheduleError(
            f"{func.name}: rolling_update expects the nests of {', '.join(b.name for b in members)} one after the other in one "
            "body; move what is between them first"
        )
    env = loop_env(enclosing(func, order[0]))
    if any(prove(eq(k.extent, order[0].extent), env) is not Proof.YES for k in order):
        raise ScheduleError(f"{func.name}: rolling_update expects equal extents, got {[k.extent for k in order]}")
    _require_same_rows(func, pattern, keys)
    return keys, start


def _key_loop(func: PrimFunc, node: Block, key: Var) -> For:
    """Return the loop over the keys: the outermost one around only this block, whole and serial. Raises ScheduleError."""
    bound = next(b for i, b in zip(node.iters, node.bindings) if i.var is key)
    extent = next(i.extent for i in node.iters if i.var is key)
    path = enclosing(func, node)
    loop = next((p for p in path if p.var is bound), None)
    if loop is None or blocks(loop) != (node,):
        raise ScheduleError(
            f"{func.name}: rolling_update expects a loop over all keys of {node.name!r} around nothing else, got {bound!r}"
        )
    require_serial(func, loop, "rolling_update")
    inner = path[path.index(loop) :]
    if loop.var in free_vars(node.predicate) or prove(eq(loop.extent, extent), loop_env(path)) is not Proof.YES:
        raise ScheduleError(
            f"{func.name}: rolling_update expects {loop.var.name!r} to run through all keys of {node.name!r}"
        )
    require_rectangular(func, inner, "rolling_update")
    return loop


def _require_same_rows(func: PrimFunc, p: SoftmaxPattern, keys: Mapping[Block, For]) -> None:
    """Check that all nests cover the same rows of maxima and weights. Raises ScheduleError."""
    maxima, weights = p.row_max.body, p.weights.body
    at = [weights.indices.index(v) for v in p.rows]

    def rows(node: Block, indices: Sequence[Expr], buffer: Buffer) -> list[DimRegion]:
        path = enclosing(func, node)
        env = loop_env(path[: path.index(keys[node]) + 1])
        where = [block_value(node, e) for e in indices]
        for e in where:
            inner = {q.var: q.extent for q in path[path.index(keys[node]) + 1 :] if q.var in free_vars(e)}
            if not is_dense(e, inner, env):
                raise ScheduleError(f"{func.name}: the rows of {node.name!r} are no interval: {e!r}")
        return region_of(where, path, keys[node], buffer, env)

    expected = rows(p.row_max, maxima.indices, maxima.buffer)
    by_block = [(p.weights, rows(p.weights, p.rows, maxima.buffer))]
    by_block += [(s.block, rows(s.block, tuple(s.access.indices[d] for d in at), maxima.buffer)) for s in p.sums]
    for node, spans in by_block:
        if spans != expected:
            raise ScheduleError(
                f"{func.name}: rolling_update expects {node.name!r} to run through the rows of {p.row_max.name!r}, got {spans!r} "
                f"for {expected!r}"
            )


def _factor_nest(func: PrimFunc, p: SoftmaxPattern, loop: For, factor: Buffer) -> Stmt:
    """Make the nest of the factors that rescale the sums, ahead of the update of the maxima."""
    (node,) = blocks(loop)
    old = load(p.row_max.body.buffer, p.row_max.body.indices)
    value = _masked_exp(old, maximum(old, p.score))
    where = (p.step.var, *p.row_max.body.indices)
    iters = tuple(replace(i, kind="spatial") for i in node.iters)
    changed = replace(node, iters=iters, body=BufferStore(factor, where, value), init=None)
    return clone_stmt(func, replace_node(loop.body, node, changed), "_factor")


def _rescaled(p: SoftmaxPattern, old: Block, node: Block, factor: Buffer) -> Block:
    """Return the block as it runs in the fused loop: weights guarded, sums rescaled."""
    if old is p.weights:
        return replace(node, body=replace(node.body, value=p.weight()))
    s = next((s for s in p.sums if s.block is old), None)
    if s is None:
        return node
    total, term = node.body.value.args
    value = op("add", (mul(total, load(factor, (s.step.var, *p.rows_of(s)))), term), term.dtype)
    return replace(node, body=replace(node.body, value=value))
