"""Random uses of ONNX reductions, products of matrices, norms and softmax."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tests.fuzz.importers.builder import F32, I64, Builder, types_of, within
from tests.fuzz.importers.elementwise import Use, positive, zero_range
from tests.fuzz.importers.program import Invalid


def reduction(b: Builder, op: str) -> None:
    x = b.x(op)
    rank = b.get(x).ndim
    axes = sorted(b.rng.sample(range(rank), b.rng.randint(0, rank)))
    if b.opset >= 11:
        axes = [a - rank if b.chance(0.3) else a for a in axes]
    keepdims = b.choose((None, 0, 1))
    if b.opset < (13 if op == "ReduceSum" else 18):
        b.node(op, [x], axes=axes or None, keepdims=keepdims)
        return
    noop = b.choose((None, 0, 1))
    b.node(op, [x, b.ints(axes)] if axes or b.chance(0.3) else [x], keepdims=keepdims, noop_with_empty_axes=noop)


def arg(b: Builder, op: str) -> None:
    x = b.x(op, least=1, low=1)
    rank = b.get(x).ndim
    axis = b.axis(rank) if b.opset >= 11 else b.axis(rank) % rank
    last = b.choose((None, 0, 1)) if b.opset >= 12 else None
    b.node(op, [x], axis=b.choose((None, axis)), keepdims=b.choose((None, 0, 1)), select_last_index=last)


def top_k(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    shape = b.get(x).shape
    axis = b.axis(len(shape)) if b.opset >= 11 else b.axis(len(shape)) % len(shape)
    k = b.rng.randint(0, shape[axis])
    if b.opset < 10:
        b.node(op, [x], 2, axis=axis, k=max(k, 1))
        return
    largest = b.choose((None, 0, 1)) if b.opset >= 11 else None
    b.node(op, [x, b.ints([k], b.chance(0.9))], 2, axis=axis, largest=largest)


def running(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    axis = b.literal(np.asarray(b.axis(b.get(x).ndim), b.choose((np.dtype("i4"), I64))))
    b.node(op, [x, axis], exclusive=b.choose((None, 0, 1)), reverse=b.choose((None, 0, 1)))


def softmax(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    rank = b.get(x).ndim
    axis = b.axis(rank) if b.opset >= 11 else b.axis(rank) % rank
    b.node(op, [x], axis=b.choose((None, axis)) if rank > 1 or b.opset >= 13 else axis)


def matmul(b: Builder, op: str) -> None:
    k = b.size()
    lead = b.shape(b.choose((0, 0, 1, 2)), 1, 2)
    other = tuple(d if b.chance(0.6) else 1 for d in lead)[b.rng.randrange(len(lead) + 1) :]
    left, right = (*lead, b.size(), k), (*other, k, b.size())
    if b.chance(0.15):
        left = (k,)
    elif b.chance(0.15):
        right = (k,)
    if op == "MatMulInteger":
        kinds = [b.choose((np.dtype("u1"), np.dtype("i1"))) for _ in range(2)]
        inputs = [b.given(left, kinds[0]), b.given(right, kinds[1])]
        if b.chance(0.6):
            inputs += [
                b.given((), kinds[0], within(0, 9, kinds[0]), True),
                b.given((), kinds[1], within(0, 9, kinds[1]), True),
            ]
        b.node(op, inputs)
        return
    x = b.existing(types_of(op, b.opset), least=2) if b.chance(0.4) else None
    if x is not None:
        left = b.get(x).shape
        right = (left[-1], b.size())
    x = x or b.x(op, shape=left)
    b.node(op, [x, b.given(right, b.get(x).dtype)])


def gemm(b: Builder, op: str) -> None:
    m, k, n = b.size(), b.size(), b.size()
    ta, tb = b.choose((0, 0, 1)), b.choose((0, 0, 1))
    x = b.x(op, shape=(k, m) if ta else (m, k))
    dtype = b.get(x).dtype
    inputs = [x, b.given((n, k) if tb else (k, n), dtype)]
    if b.opset < 11 or b.chance(0.7):
        inputs.append(b.given(b.choose(((m, n), (n,), (1, n), (m, 1), (), (1,))), dtype))
    more = {
        "transA": ta or None,
        "transB": tb or None,
        "alpha": b.choose((None, 0.5, 2.0)),
        "beta": b.choose((None, 0.25, 2.0)),
    }
    b.node(op, inputs, **more)


EQUATIONS = ("ij,jk->ik", "bij,bjk->bik", "ij->ji", "ij->", "ii->i", "ij,ij->i", "i,j->ij", "bhid,bhjd->bhij", "...ij,...jk->...ik",
             "ij,jk", "bij,bj->bi", "ijk->kj", "i,i->", "ij,kj,k->i", "ab,b")  # fmt: skip


def einsum(b: Builder, op: str) -> None:
    equation = b.choose(EQUATIONS)
    sizes: dict[str, int] = {}
    dtype = b.dtype(op)
    inputs = []
    for term in equation.partition("->")[0].split(","):
        dims = [sizes.setdefault(c, b.size(1, 5)) for c in term.replace("...", "")]
        inputs.append(b.given((2, *dims) if "..." in term else dims, dtype))
    b.node(op, inputs, equation=equation.replace(",", ", ") if b.chance(0.3) else equation)


def det(b: Builder, op: str) -> None:
    n = b.choose((1, 2, 3))
    b.node(op, [b.x(op, shape=(*b.shape(b.choose((0, 1)), 1), n, n))])


def layer_norm(b: Builder, op: str) -> None:
    x = b.x(op, least=1, low=1)
    shape = b.get(x).shape
    axis = b.rng.randrange(len(shape))
    dims = shape[axis:]
    dtype = b.get(x).dtype
    inputs = [x, b.given(dims, dtype), *([b.given(dims, dtype)] if b.chance(0.6) else [])]
    axis -= len(shape) if b.chance(0.5) else 0
    b.node(op, inputs, b.choose((1, 1, 3)), axis=None if axis == -1 else axis, epsilon=b.choose((None, 1e-3)))


def rms_norm(b: Builder, op: str) -> None:
    x = b.x(op, least=1, low=1)
    shape = b.get(x).shape
    axis = b.rng.randrange(len(shape))
    b.node(op, [x, b.given(shape[axis:], b.get(x).dtype)], axis=axis, epsilon=b.choose((None, 1e-3)))


def _image(b: Builder, op: str, channels: int | None = None, low: int = 1, ranks: tuple[int, ...] = (3, 4, 4)) -> str:
    rank = b.choose(ranks)
    dims = (b.size(1, 3), channels or b.size(1, 4), *(b.size(low, 7) for _ in range(rank - 2)))
    return b.x(op, shape=dims)


def batch_norm(b: Builder, op: str) -> None:
    x = _image(b, op, ranks=(2, 3, 4))
    c, dtype = b.get(x).shape[1], b.get(x).dtype
    inputs = [x, *(b.given((c,), dtype) for _ in range(3)), b.given((c,), dtype, positive(dtype))]
    b.node(op, inputs, epsilon=b.choose((None, 1e-3)))


def instance_norm(b: Builder, op: str) -> None:
    x = _image(b, op)
    c, dtype = b.get(x).shape[1], b.get(x).dtype
    b.node(op, [x, b.given((c,), dtype), b.given((c,), dtype)], epsilon=b.choose((None, 1e-3)))


def group_norm(b: Builder, op: str) -> None:
    groups = b.choose((1, 2, 3))
    x = _image(b, op, groups * b.choose((1, 2)))
    c, dtype = b.get(x).shape[1], b.get(x).dtype
    if b.opset < 21:
        raise Invalid("older form")
    b.node(op, [x, b.given((c,), dtype), b.given((c,), dtype)], num_groups=groups, epsilon=b.choose((None, 1e-3)))


def lp_norm(b: Builder, op: str) -> None:
    x = b.x(op, least=1)
    b.node(op, [x], axis=b.choose((None, b.axis(b.get(x).ndim))), p=b.choose((None, 1, 2)))


def mean_variance(b: Builder, op: str) -> None:
    x = _image(b, op, ranks=(4,))
    b.node(op, [x], axes=b.choose((None, [0, 2, 3], [0], [1, 2])))


def lrn(b: Builder, op: str) -> None:
    x = _image(b, op, ranks=(4,))
    b.node(
        op,
        [x],
        size=b.choose((1, 2, 3, 5)),
        alpha=b.choose((None, 0.5)),
        beta=b.choose((None, 0.5)),
        bias=b.choose((None, 2.0)),
    )


def qlinear_matmul(b: Builder, op: str) -> None:
    m, k, n = b.size(1), b.size(1), b.size(1)
    kinds = [b.choose((np.dtype("u1"), np.dtype("i1"))) for _ in range(2)]
    inputs = []
    for shape, kind in (((m, k), kinds[0]), ((k, n), kinds[1])):
        inputs += [
            b.given(shape, kind),
            b.given((), F32, positive(F32)),
            b.given((), kind, within(*zero_range(kind), kind)),
        ]
    inputs += [b.given((), F32, positive(F32)), b.given((), kinds[0], within(*zero_range(kinds[0]), kinds[0]))]
    b.node(op, inputs)


def attention(b: Builder, op: str) -> None:
    n, h, g, s, t, d = b.size(1, 2), b.choose((2, 4)), b.choose((1, 2)), b.size(1, 5), b.size(1, 5), b.choose((2, 4))
    dtype = b.dtype(op)
    flat = b.chance(0.4)
    shapes = [(n, s, h * d), (n, t, g * d), (n, t, g * d)] if flat else [(n, h, s, d), (n, g, t, d), (n, g, t, d)]
    inputs = [b.given(q, dtype) for q in shapes]
    if b.chance(0.4):
        kind = b.choose((dtype, np.dtype(bool)))
        inputs.append(b.given(b.choose(((s, t), (n, 1, s, t), (n, h, s, t))), kind))
    heads = {"q_num_heads": h, "kv_num_heads": g} if flat else {}
    more = {"is_causal": b.choose((None, 0, 1)), "scale": b.choose((None, 0.5)), "softcap": b.choose((None, 2.0))}
    b.node(op, inputs, **heads, **more)


def rotary(b: Builder, op: str) -> None:
    n, h, s, d = b.size(1, 2), b.size(1, 3), b.size(1, 5), b.choose((2, 4, 8))
    part = b.choose((0, 0, 2)) if d > 2 else 0
    half = (part or d) // 2
    dtype = b.dtype(op)
    flat = b.chance(0.4)
    x = b.given((n, s, h * d) if flat else (n, h, s, d), dtype)
    ids = b.chance(0.5)
    table = (9, half) if ids else (n, s, half)
    inputs = [
        x,
        b.given(table, dtype),
        b.given(table, dtype),
        *([b.given((n, s), I64, within(0, 9, I64))] if ids else []),
    ]
    more = {
        "interleaved": b.choose((None, 0, 1)),
        "rotary_embedding_dim": part or None,
        "num_heads": h if flat else None,
    }
    b.node(op, inputs, **more)


REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
              "ReduceSum", "ReduceSumSquare")  # fmt: skip
USES: Mapping[str, Use] = {
    **dict.fromkeys(REDUCTIONS, reduction), "ArgMax": arg, "ArgMin": arg, "TopK": top_k, "CumSum": running, "CumProd": running,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), softmax), "MatMul": matmul, "MatMulInteger": matmul, "Gemm": gemm,
    "Einsum": einsum, "Det": det, "LayerNormalization": layer_norm, "RMSNormalization": rms_norm, "BatchNormalization": batch_norm,
    "InstanceNormalization": instance_norm, "GroupNormalization": group_norm, "LpNormalization": lp_norm,
    "MeanVarianceNormalization": mean_variance, "LRN": lrn, "QLinearMatMul": qlinear_matmul, "Attention": attention,
    "RotaryEmbedding": rotary,
}  # fmt: skip
