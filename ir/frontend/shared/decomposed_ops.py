"""Rules that recompose operators which exporters decompose into smaller ones.

Importers apply them while they write a graph (`Writer.emit`). The root of a pattern is the last operation of the decomposition;
the others are left to dead-code elimination.

Tests: `tests/ir/rewrite/test_rule_tables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, as_int
from relax_tune.ir.core.graph import Call, Constant, Value
from relax_tune.ir.op.indexing.movement import BroadcastTo, ExpandDims, Permute, Reshape
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Div,
    DivScalar,
    Erf,
    Gelu,
    MaximumScalar,
    Mul,
    MulScalar,
    Rsqrt,
    Sigmoid,
    Sqrt,
    Sub,
    Tanh,
)
from relax_tune.ir.op.math.logic import NotEqual, Where
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import L2Normalize, LayerNorm, Mean, MeanPool, Reduce, Softmax, Sum
from relax_tune.ir.rewrite.match import Match
from relax_tune.ir.rewrite.movement_rules import VIEW_OF_VIEW, swaps_last_two
from relax_tune.ir.rewrite.pattern import Operand, Pattern, op, value, weight
from relax_tune.ir.rewrite.rules import Rule, Site


def near(expected: float) -> Callable[[float], bool]:
    """Return a test for a number that an exporter may have rounded to single precision."""
    return lambda value: math.isclose(value, expected, rel_tol=1e-6)


def scaled(p: Operand, factor: float) -> Pattern:
    """Return the pattern `p * factor`, or `p / (1 / factor)`."""
    return op(MulScalar, p, value=near(factor)) | op(DivScalar, p, value=near(1 / factor))


def by_number(p: Operand) -> Pattern:
    """Match a product with a number, or a quotient by one."""
    return op(MulScalar, p) | op(DivScalar, p)


def factor_of(site: Site, name: str) -> float:
    """Return the factor of a capture of `by_number`."""
    call = site.definition(name)
    assert isinstance(call, Call) and isinstance(call.op, (DivScalar, MulScalar))
    if isinstance(call.op, DivScalar):
        return 1 / call.op.value if call.op.value else math.inf
    return float(call.op.value)


def over_last_axis(reduction: type[Reduce], p: Operand, name: str) -> Pattern:
    """Match a reduction over the last axis that keeps it as a dim of 1."""

    def last(m: Match) -> bool:
        return m.operator(name, reduction).axes in ((-1,), (len(m.shape(name)) - 1,))

    return op(reduction, p, keepdims=True).named(name).where(last)


# factors of the operands of scores. A softmax hides the rounding; without one (a * c) @ b and (a @ b) * c may differ by more,
# as where b is a row of the identity and the result is rounded down


def _factor(operand: str, name: str) -> Pattern:
    return by_number(operand).of(dtype=f32).named(name)


def _plain(operand: str) -> Pattern:
    """Match an operand without a factor."""

    def has_no_factor(m: Match) -> bool:
        call, info = m.scope.call(m[operand]), m.info(operand)
        return (
            call is None or not isinstance(call.op, (MulScalar, DivScalar)) or getattr(info, "dtype", None) is not f32
        )

    return value(operand).where(has_no_factor)


SCALED_PRODUCT = (
    op(Matmul, _factor("a", "left"), _factor("b", "right"))
    | op(Matmul, _factor("a", "left"), _plain("b"))
    | op(Matmul, _plain("a"), _factor("b", "right"))
).named("product")
# heads that share keys, as `repeated_heads` writes them
SCALED_GROUPS = op(
    Reshape, op(Matmul, op(Reshape, _factor("a", "left")).named("grouped"), _plain("b")).named("product")
).named("heads")
SCALED_SCORES = SCALED_PRODUCT | SCALED_GROUPS
SCALED_WEIGHTS = op(Softmax, SCALED_SCORES) | op(Softmax, op(Add, SCALED_SCORES, "mask"))


def _scale_after(site: Site) -> Value | None:
    factors = [factor_of(site, name) for name in ("left", "right") if name in site]
    rows = site.shape("a")
    factor = _product_of_scales(factors, rows[-1] if rows else None)
    # Behind the product, a large or small factor could overflow or vanish where the scaled operands do not.
    if not 1e-6 < abs(factor) < 1e6:
        return None
    a = site.call(Reshape(site.shape("grouped")), "a") if "grouped" in site else site["a"]
    scores = site.call(site.operator("product", Matmul), a, "b")
    scores = site.call(Reshape(site.shape("heads")), scores) if "heads" in site else scores
    scores = site.call(MulScalar(factor), scores)
    return site.call(site.root.op, site.call(Add(), scores, "mask") if "mask" in site else scores)


def _product_of_scales(factors: Sequence[float], width: Expr | None) -> float:
    """Return the product of factors, exactly `k ** -0.5` where both are `k ** -0.25` rounded to single precision."""
    total = math.prod(factors)
    k = None if width is None else as_int(width)
    # Exporters scale queries and keys by the root of the scale; its square is off by the rounding of the root.
    if k and len(factors) == 2 and factors[0] == factors[1] and math.isclose(total, k**-0.5, rel_tol=3e-7):
        return float(k**-0.5)
    return total


def _read_transposed(site: Site) -> Value | None:
    # A weight is transposed once at import instead.
    return None if isinstance(site["b"], Constant) else site.call(Matmul(transpose_b=True), "a", "b")


def weights_of(scores: Pattern) -> Pattern:
    """Match the weights of attention: the softmax of `scores`, perhaps with a mask."""
    weights = op(Softmax, scores | op(Add, scores, "mask")).named("weights")
    # rows that see no column have NaN as weights, which exporters to ONNX replace by 0
    return weights | op(Where, op(NotEqual, weights, "weights"), weight(number=0), "weights").named("guarded")


SCORES = by_number(op(Matmul, "q", "k", transpose_b=True)).named("scores")
ATTENTION = op(Matmul, weights_of(SCORES), "v", transpose_b=False)


def _attention(site: Site) -> Value | None:
    q, k, v = (site.shape(name) for name in ("q", "k", "v"))
    whole = (*q[:-1], *k[-2:-1])
    if len(whole) < 2 or k[:-2] != q[:-2] or v[:-1] != k[:-1] or site.shape("scores") != whole:
        return None
    return attention_of(site, whole, site["k"], site["v"])


def attention_of(site: Site, whole: tuple[Expr, ...], k: Value, v: Value) -> Value | None:
    """Return attention by the captures of `weights_of`; None where a mask does not fit. whole: dims of the scores"""
    attention = Attention(factor_of(site, "scores"), hides_rows="guarded" in site)
    if "mask" not in site:
        return site.call(attention, "q", k, v)
    mask = site.shape("mask")
    # The dims of a mask must be certain: attention does not check them at run time.
    broadcasts = len(mask) <= len(whole) and all(as_int(d) == 1 or d == w for d, w in zip(mask[::-1], whole[::-1]))
    return site.call(attention, "q", k, v, "mask") if broadcasts else None


MERGED_TRANSPOSITION = op(Reshape, op(Permute, op(Reshape, "x").named("merged"), axes=(0, 2, 1)))


def _transpose_unmerged(site: Site) -> Value | None:
    dims, merged, split = site.shape("x"), site.shape("merged"), site.root.op
    assert isinstance(split, Reshape)
    lead, n = split.shape[:-2], len(split.shape)
    if n < 3 or len(dims) < 3 or merged[1:] != dims[-2:] or split.shape[-2:] != (dims[-1], dims[-2]):
        return None
    x = site["x"] if dims[:-2] == lead else site.call(Reshape((*lead, *dims[-2:])), "x")
    return site.call(Permute((*range(n - 2), n - 1, n - 2)), x)


FLAT_PRODUCT = op(Matmul, op(Reshape, "x"), weight("w"), transpose_b=False).named("flat")
MERGED_ROWS = op(Reshape, FLAT_PRODUCT | op(Add, FLAT_PRODUCT, weight("bias")))


def _product_of_rows(site: Site) -> Value | None:
    """Leave the leading dims separate, which exporters merge for a product with weights."""
    view, x, flat, w = site.root.op, site.shape("x"), site.shape("flat"), site.shape("w")
    assert isinstance(view, Reshape)
    if len(w) != 2 or len(flat) != 2 or not x or x[-1] != w[0] or view.shape != (*x[:-1], w[1]):
        return None
    product = site.call(Matmul(), "x", "w")
    return site.call(Add(), product, "bias") if "bias" in site else product


TAIL = op(AddScalar, op(Erf, scaled("x", math.sqrt(0.5))), value=1.0)
GELU = scaled(op(Mul, "x", TAIL), 0.5) | op(Mul, scaled("x", 0.5), TAIL) | op(Mul, "x", scaled(TAIL, 0.5))


def _gelu(site: Site) -> Value:
    return site.call(Gelu(), "x")


CUBE = op(Mul, op(Mul, "x", "x"), "x")
INNER = scaled(op(Add, "x", scaled(CUBE, 0.044715)), math.sqrt(2 / math.pi))
TANH_TAIL = op(AddScalar, op(Tanh, INNER), value=1.0)
TANH_GELU = (
    scaled(op(Mul, "x", TANH_TAIL), 0.5) | op(Mul, scaled("x", 0.5), TANH_TAIL) | op(Mul, "x", scaled(TANH_TAIL, 0.5))
)


def _tanh_gelu(site: Site) -> Value:
    factor = site.call(AddScalar(1.0), site.call(MulScalar(0.044715), site.call(Mul(), "x", "x")))
    inner = site.call(MulScalar(2 * math.sqrt(2 / math.pi)), site.call(Mul(), "x", factor))
    return site.call(Mul(), "x", site.call(Sigmoid(), inner))


CENTRED = op(Sub, "x", over_last_axis(Mean, "x", "mean"))
SQUARE = op(Mul, op(Sub, "x", over_last_axis(Mean, "x", "mean_again")).named("centred"), "centred")
SHIFTED_VARIANCE = op(AddScalar, over_last_axis(Mean, SQUARE, "variance")).named("shifted")
STANDARDISED = op(Div, CENTRED, op(Sqrt, SHIFTED_VARIANCE)) | op(Mul, CENTRED, op(Rsqrt, SHIFTED_VARIANCE))
LAYER_NORM = op(Add, op(Mul, STANDARDISED, "gamma"), "beta")


def _layer_norm(site: Site) -> Value | None:
    if not site.shape("gamma") == site.shape("beta") == site.shape("x")[-1:]:
        return None
    return site.call(LayerNorm(site.operator("shifted", AddScalar).value), "x", "gamma", "beta")


def _positive(eps: float) -> bool:
    return eps > 0


NORM = op(MaximumScalar, op(Sqrt, over_last_axis(Sum, op(Mul, "x", "x"), "total")), value=_positive).named("floor")
L2_NORMALIZE = op(Div, "x", op(BroadcastTo, NORM) | NORM)


def _l2_normalize(site: Site) -> Value:
    return site.call(L2Normalize(site.operator("floor", MaximumScalar).value), "x")


WIDE_MASK = (op(ExpandDims, "mask") | op(Reshape, "mask")).named("wide")
COUNT = op(MaximumScalar, op(Sum, "wide", axes=(1,), keepdims=False), value=_positive).named("floor")
MEAN_POOL = op(Div, op(Sum, op(Mul, "x", WIDE_MASK), axes=(1,), keepdims=False), COUNT)


def _mean_pool(site: Site) -> Value | None:
    x, mask, wide = site.shape("x"), site.shape("mask"), site.shape("wide")
    fits = len(mask) == 2 and len(wide) == 3 and wide[:2] == mask and as_int(wide[2]) == 1
    if not fits or len(x) != 3 or x[:2] != mask:
        return None
    return site.call(MeanPool(site.operator("floor", MaximumScalar).value), "x", "mask")


RULES = (
    Rule(
        SCALED_WEIGHTS, _scale_after, "scale behind scores", level="import",
        equation="softmax((a * c) @ b + mask) = softmax((a @ b) * c + mask)",
    ),
    Rule(
        op(Matmul, "a", op(Permute, "b", axes=swaps_last_two), transpose_b=False), _read_transposed,
        "product with a transposed value", level="import", equation="a @ permute(b) = matmul(a, b, transpose_b=True)",
    ),
    Rule(
        ATTENTION, _attention, "attention", level="import",
        equation="softmax(q @ k.T * scale + mask) @ v = attention(q, k, v, mask); so with weights that are 0 where they are NaN",
    ),
    VIEW_OF_VIEW,
    Rule(
        MERGED_TRANSPOSITION, _transpose_unmerged, "transposition under merged dims", level="import",
        equation="reshape(permute(reshape(x, (a * b, i, j)), (0, 2, 1)), (a, b, j, i)) = permute(x, (0, 1, 3, 2))",
    ),
    Rule(GELU, _gelu, "gelu", level="import", equation="x * (1 + erf(x / sqrt(2))) / 2 = gelu(x)"),
    Rule(
        MERGED_ROWS, _product_of_rows, "product under merged dims", level="import",
        equation="reshape(reshape(x, (a * b, k)) @ w + c, (a, b, n)) = x @ w + c",
    ),
    Rule(
        TANH_GELU, _tanh_gelu, "gelu by tanh", level="import",
        equation="x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2 = "
        "x * sigmoid(2 * sqrt(2 / pi) * x * (1 + 0.044715 * x ** 2))",
    ),
    Rule(
        LAYER_NORM, _layer_norm, "layer norm", level="import",
        equation="(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * gamma + beta = layer_norm(x, gamma, beta)",
    ),
    Rule(
        L2_NORMALIZE, _l2_normalize, "l2 normalize", level="import",
        equation="x / max(sqrt(sum(x * x)), eps) = l2_normalize(x)",
    ),
    Rule(
        MEAN_POOL, _mean_pool, "mean pool", level="import",
        equation="sum(x * mask, 1) / max(sum(mask, 1), eps) = mean_pool(x, mask)",
    ),
)  # fmt: skip
"""The order matters: factors and transpositions of a product are removed before attention is matched."""
