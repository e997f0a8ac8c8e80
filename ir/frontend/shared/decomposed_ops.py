"""Decompositions that exporters write, recognised while the graph is written: each gives the operator it spells.

A rule looks back from the last operation of the decomposition; what it leaves unread is dropped by dead-code elimination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, as_int
from relax_tune.ir.core.graph import Call, Constant, Value
from relax_tune.ir.core.graph_builder import info_of
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.attention import Attention
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.elementwise import Add, AddScalar, Div, Erf, Gelu, MaximumScalar, Mul, MulScalar, Rsqrt, Sqrt, Sub
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.op.movement import BroadcastTo, ExpandDims, Permute, Reshape
from relax_tune.ir.op.reduce import L2Normalize, LayerNorm, Mean, MeanPool, Softmax, Sum

Made = dict[Value, Call]
Emit = Callable[..., Value]
Rule = Callable[[OperatorSpec, Sequence[Value], Made, Emit], "Value | None"]


def rewritten(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """What `op(args)` is better written as, or None."""
    for rule in RULES.get(type(op), ()):
        found = rule(op, args, made, emit)
        if found is not None:
            return found
    return None


def _made(v: Value, kind: type[OperatorSpec], made: Made) -> Call | None:
    found = made.get(v)
    return found if found is not None and type(found.op) is kind else None


def _shape(v: Value) -> tuple[Expr, ...]:
    info = info_of(v)
    return (info.shape or ()) if isinstance(info, TensorInfo) else ()


def _near(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=1e-6)


def _scaled(v: Value, factor: float, made: Made) -> Value | None:
    """`x` when `v = x * factor`."""
    call = _made(v, MulScalar, made)
    if call is None or not isinstance(call.op, MulScalar) or not _near(call.op.value, factor):
        return None
    return call.args[0]


def _matmul_scale(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """(a * c) @ b = (a @ b) * c: factors of both operands become one, behind the product."""
    factors, plain = [], []
    for a in args:
        call = _made(a, MulScalar, made)
        info = info_of(a)
        if call is not None and isinstance(call.op, MulScalar) and isinstance(info, TensorInfo) and info.dtype is f32:
            factors.append(call.op.value)
            a = call.args[0]
        plain.append(a)
    factor = _attention_scale(factors, _shape(plain[0])[-1] if _shape(plain[0]) else None)
    if all(a is b for a, b in zip(plain, args, strict=True)) or not 1e-6 < abs(factor) < 1e6:
        return None
    return emit(MulScalar(factor), emit(op, *plain))


def _attention_scale(factors: Sequence[float], width: Expr | None) -> float:
    """The product of factors; exactly 1 / sqrt(k) where an exporter gives each operand of a product over k the rounded
    fourth root of 1 / k, within the error of that rounding."""
    total = math.prod(factors)
    k = None if width is None else as_int(width)
    if k and len(factors) == 2 and factors[0] == factors[1] and math.isclose(total, k**-0.5, rel_tol=3e-7):
        return float(k**-0.5)
    return total


def _matmul_transposed(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """a @ transpose(b) reads b as it lies."""
    assert isinstance(op, Matmul)
    call = _made(args[1], Permute, made)
    if op.transpose_b or call is None or isinstance(call.args[0], Constant):
        return None
    assert isinstance(call.op, Permute)
    n = len(call.op.axes)
    if n < 2 or call.op.axes != (*range(n - 2), n - 1, n - 2):
        return None
    return emit(Matmul(transpose_b=True), args[0], call.args[0])


def _attention(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """softmax(q @ transpose(k) * scale + mask) @ v, with or without the mask."""
    weights = _made(args[0], Softmax, made)
    if weights is None or op != Matmul():
        return None
    added = _made(weights.args[0], Add, made)
    pairs = [(weights.args[0], None)] if added is None else [added.args, added.args[::-1]]
    for scores, mask in pairs:
        scaled = _made(scores, MulScalar, made)
        product = None if scaled is None else _made(scaled.args[0], Matmul, made)
        if scaled is None or product is None or product.op != Matmul(transpose_b=True):
            continue
        assert isinstance(scaled.op, MulScalar)
        (q, k), v = product.args, args[1]
        lead = _shape(q)[:-2]
        whole = (*lead, *_shape(q)[-2:-1], *_shape(k)[-2:-1])
        if len(whole) < 2 or _shape(k)[:-2] != lead or _shape(v)[:-1] != _shape(k)[:-1] or _shape(scores) != whole:
            continue
        if mask is None:
            return emit(Attention(scaled.op.value, hides_rows=False), q, k, v)
        own = _shape(mask)
        if len(own) <= len(whole) and all(as_int(d) == 1 or d == w for d, w in zip(own[::-1], whole[::-1])):
            return emit(Attention(scaled.op.value, hides_rows=False), q, k, v, mask)
    return None


def _reshape(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """A view of a view is one view; a transposition of the last two dims under merged leading ones needs no merging."""
    assert isinstance(op, Reshape)
    inner = _made(args[0], Reshape, made)
    if inner is not None:
        return emit(op, inner.args[0])
    permute = _made(args[0], Permute, made)
    if permute is None or not isinstance(permute.op, Permute) or permute.op.axes != (0, 2, 1):
        return None
    merged = _made(permute.args[0], Reshape, made)
    if merged is None:
        return None
    x = merged.args[0]
    dims, middle, n = _shape(x), _shape(permute.args[0]), len(_shape(x))
    if n < 3 or middle[1:] != dims[-2:] or op.shape != (*dims[:-2], dims[-1], dims[-2]):
        return None
    return emit(Permute((*range(n - 2), n - 1, n - 2)), x)


def _gelu(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """x * (1 + erf(x / sqrt 2)) / 2, with the half anywhere."""
    if isinstance(op, MulScalar):
        product = _made(args[0], Mul, made)
        if not _near(op.value, 0.5) or product is None:
            return None
        pairs = [(product.args[0], product.args[1]), (product.args[1], product.args[0])]
    else:
        pairs = []
        for left, right in ((args[0], args[1]), (args[1], args[0])):
            half = _scaled(left, 0.5, made)
            if half is not None:
                pairs += [(half, right), (right, half)]
    for x, tail in pairs:
        one = _made(tail, AddScalar, made)
        if one is None or not isinstance(one.op, AddScalar) or one.op.value != 1.0:
            continue
        erf = _made(one.args[0], Erf, made)
        if erf is not None and _scaled(erf.args[0], math.sqrt(0.5), made) is x:
            return emit(Gelu(), x)
    return None


def _last_axis(call: Call | None, x: Value) -> bool:
    """Whether `call` reduces the last axis of `x` and keeps it as 1."""
    if call is None or call.args[0] is not x or not isinstance(call.op, (Sum, Mean)) or not call.op.keepdims:
        return False
    return call.op.axes in ((-1,), (len(_shape(x)) - 1,))


def _square(v: Value, made: Made) -> Value | None:
    call = _made(v, Mul, made)
    return call.args[0] if call is not None and call.args[0] is call.args[1] else None


def _centred(v: Value, made: Made) -> Value | None:
    """`x` when `v = x - mean(x)` over the last axis."""
    call = _made(v, Sub, made)
    if call is None or not _last_axis(_made(call.args[1], Mean, made), call.args[0]):
        return None
    return call.args[0]


def _deviation(v: Value, x: Value, made: Made) -> float | None:
    """`eps` when `v = mean((x - mean(x)) ** 2) + eps` over the last axis."""
    shifted = _made(v, AddScalar, made)
    variance = None if shifted is None else _made(shifted.args[0], Mean, made)
    if shifted is None or variance is None or not _last_axis(variance, variance.args[0]):
        return None
    root = _square(variance.args[0], made)
    assert isinstance(shifted.op, AddScalar)
    return shifted.op.value if root is not None and _centred(root, made) is x else None


def _normal(v: Value, made: Made) -> tuple[Value, float] | None:
    """(x, eps) when `v = (x - mean) / sqrt(var + eps)` over the last axis."""
    found = _made(v, Div, made) or _made(v, Mul, made)
    if found is None:
        return None
    top = _centred(found.args[0], made)
    kind = Sqrt if isinstance(found.op, Div) else Rsqrt
    below = _made(found.args[1], kind, made)
    eps = None if top is None or below is None else _deviation(below.args[0], top, made)
    return None if top is None or eps is None else (top, eps)


def _layer_norm(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """(x - mean) / sqrt(var + eps) * gamma + beta, with gamma and beta along the last axis."""
    for scaled, beta in ((args[0], args[1]), (args[1], args[0])):
        product = _made(scaled, Mul, made)
        if product is None:
            continue
        for normal, gamma in ((product.args[0], product.args[1]), (product.args[1], product.args[0])):
            found = _normal(normal, made)
            if found is not None and _shape(gamma) == _shape(beta) == _shape(found[0])[-1:]:
                return emit(LayerNorm(found[1]), found[0], gamma, beta)
    return None


def _l2_normalize(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """x / max(sqrt(sum(x * x)), eps) over the last axis."""
    wide = _made(args[1], BroadcastTo, made)
    floor = _made(args[1] if wide is None else wide.args[0], MaximumScalar, made)
    root = None if floor is None else _made(floor.args[0], Sqrt, made)
    total = None if root is None else _made(root.args[0], Sum, made)
    if (
        floor is None
        or total is None
        or not _last_axis(total, total.args[0])
        or _square(total.args[0], made) is not args[0]
    ):
        return None
    assert isinstance(floor.op, MaximumScalar)
    return emit(L2Normalize(floor.op.value), args[0]) if floor.op.value > 0 else None


def _mask_of(v: Value, made: Made) -> Value | None:
    """The (b, n) mask that `v` is under dims (b, n, 1)."""
    call = made.get(v)
    if call is None or not isinstance(call.op, (ExpandDims, Reshape)):
        return None
    own, now = _shape(call.args[0]), _shape(v)
    return call.args[0] if len(own) == 2 and len(now) == 3 and now[:2] == own and as_int(now[2]) == 1 else None


def _mean_pool(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit) -> Value | None:
    """sum(x * mask, 1) / max(sum(mask, 1), eps) for x (b, n, c) and a mask (b, n, 1)."""
    top, floor = _made(args[0], Sum, made), _made(args[1], MaximumScalar, made)
    bottom = None if floor is None else _made(floor.args[0], Sum, made)
    product = None if top is None else _made(top.args[0], Mul, made)
    if floor is None or bottom is None or top is None or product is None:
        return None
    assert isinstance(floor.op, MaximumScalar) and isinstance(top.op, Sum) and isinstance(bottom.op, Sum)
    if top.op != Sum((1,)) or bottom.op != Sum((1,)) or not floor.op.value > 0:
        return None
    for x, wide in (product.args, product.args[::-1]):
        mask = _mask_of(wide, made)
        if wide is bottom.args[0] and mask is not None and _shape(x)[:2] == _shape(mask) and len(_shape(x)) == 3:
            return emit(MeanPool(floor.op.value), x, mask)
    return None


RULES: Mapping[type[OperatorSpec], tuple[Rule, ...]] = {
    Matmul: (_matmul_scale, _matmul_transposed, _attention),
    Reshape: (_reshape,),
    Mul: (_gelu,),
    MulScalar: (_gelu,),
    Add: (_layer_norm,),
    Div: (_l2_normalize, _mean_pool),
}
