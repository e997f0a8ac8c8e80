"""The primitive that pads the softmax axis: pad_softmax_axis.

Tests: `tests/schedules/primitives/reduction/test_online_softmax.py`.
"""

from __future__ import annotations

from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, ExprLike, Load, ceildiv, const, free_vars, load, lt, mul, select, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import IterVar, Stmt, seq
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import find_block, fresh, replace_node, require_compute_block, trivial_loops
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.blocks.padding import PaddedCopy, fill_nest, pad_spatial, valid_extents
from relax_tune.schedules.primitives.reduction.online_softmax import masked_score, softmax_of


def pad_softmax_axis(func: PrimFunc, block: str, factor: ExprLike) -> PrimFunc:
    """Pad the axis of a softmax (the keys of attention) to a multiple of `factor`, with scores of -inf beyond the axis.

    Before: `S[i, k] = f(B[i, k])`, `M[i] = max(M[i], S[i, k])`, `W[i, k] = exp(S[i, k] - M[i])`, `A[i] = A[i] + W[i, k] * x[k]`
    After, with factor 16, for p below `ceil(m / 16) * 16`: `S[i, p] = f(B[i, p]) if p < m else -inf`; `M` and `W` over p, with
    weights of 0 for scores of -inf; `x_pad[p] = x[p] if p < m else 0`, `A[i] = A[i] + W[i, p] * x_pad[p]`
    Checks: maximum, weights and sums as for `split_k_update`. The scores are an intermediate, which the maximum reads key by
    key, and `pad_spatial` may extend them. The sums read their other factors by iterators of their own. The factor is positive.
    A row whose scores are all minus infinity sums up to 0.
    """
    f = positive(func, f"pad_softmax_axis({block!r})", factor)
    pattern = softmax_of(func, block)
    score, extent = pattern.score, pattern.step.extent
    at = [d for d, e in enumerate(score.indices) if e is pattern.step.var] if isinstance(score, Load) else []
    producers = writers(func, score.buffer) if isinstance(score, Load) else []
    if len(at) != 1 or len(producers) != 1 or not isinstance(score, Load) or score.buffer not in func.allocs:
        raise ScheduleError(
            f"{func.name}: pad_softmax_axis expects {block!r} to read scores of an intermediate, got {score!r}"
        )
    require_compute_block(func, "pad_softmax_axis", pattern.row_max, *(s.block for s in pattern.sums))
    # Without the guard a row of -inf scores only would give exp(-inf - -inf), which is NaN.
    guarded = replace(pattern.weights, body=replace(pattern.weights.body, value=pattern.weight()))
    func = replace(func, body=replace_node(func.body, pattern.weights, guarded))
    func = pad_spatial(func, producers[0].name, at[0], f)
    maker = find_block(func, producers[0].name)
    # The padding that `pad_spatial` computes repeats the last key; -inf takes it out of the maximum, and its weight
    # is exp(-inf) = 0.
    masked = select(lt(maker.body.indices[at[0]], extent), maker.body.value, masked_score(score.dtype))
    func = replace(func, body=replace_node(func.body, maker, replace(maker, body=replace(maker.body, value=masked))))
    wider = simplify(mul(ceildiv(extent, f), f))
    func = _over(func, block, pattern.step, wider)
    for s in pattern.sums:
        func = _over(func, s.block.name, s.step, wider, pattern.weights.body.buffer.name)
    return func


def _over(func: PrimFunc, block: str, step: IterVar, wider: Expr, weights: str = "") -> PrimFunc:
    """Extend a reduction to `wider` keys.

    A weighted sum reads its other factors from copies that hold zeros beyond the last key.
    """
    node = find_block(func, block)
    path = trivial_loops(func, node)
    iters = tuple(replace(i, extent=wider) if i.var is step.var else i for i in node.iters)
    room = {i.var: i.extent for i in iters}
    copies, names = dict[tuple[object, ...], PaddedCopy](), list[str]()

    def padded(x: Expr) -> Expr | None:
        # The weights were padded with their scores. The other factor needs zeros: a weight of 0 times NaN would be
        # NaN.
        if not isinstance(x, Load) or x.buffer.name == weights or step.var not in free_vars(x):
            return None
        valid = valid_extents(func, node, x, {step.var: wider})
        shape = tuple(room.get(i, d) if i is step.var else d for i, d in zip(x.indices, x.buffer.shape))
        key = x.buffer, valid
        if key not in copies:
            names.append(fresh(func, f"{x.buffer.name}_pad", names))
            copies[key] = PaddedCopy(x.buffer, Buffer(names[-1], shape, x.dtype), valid)
        return load(copies[key].copy, x.indices)

    value = transform(node.body.value, padded) if weights else node.body.value
    changed: Stmt = replace(node, iters=iters, body=replace(node.body, value=value))
    for p, i in reversed(list(zip(path, iters))):
        changed = replace(p, extent=i.extent, body=changed)
    before = [fill_nest(func, o, const(0.0, o.copy.dtype), names) for o in copies.values()]
    body = replace_node(func.body, path[0], seq(*before, changed))
    return replace(func, body=body, allocs=(*func.allocs, *(o.copy for o in copies.values())))
