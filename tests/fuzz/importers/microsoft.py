"""Random uses of the operators of com.microsoft: activations, products, norms and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.fuzz.importers.builder import F16, F32, I32, I64, Builder, numbers, within
from tests.fuzz.importers.elementwise import Use
from tests.fuzz.importers.formulas import MICROSOFT
from tests.fuzz.importers.program import Array

F64, U8, I8 = np.dtype("f8"), np.dtype("u1"), np.dtype("i1")
CALM = ("plain", "small", "halves")
"""Styles of floats without infinities."""
ACTIVATIONS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("", ()), ("Relu", ()), ("Tanh", ()), ("Sigmoid", ()), ("LeakyRelu", (0.25,)), ("HardSigmoid", (0.25, 0.5)),
)  # fmt: skip
"""Activations of fused products, with their parameters."""
MORE_ACTIVATIONS: tuple[tuple[str, tuple[float, ...]], ...] = (
    *ACTIVATIONS, ("Elu", (0.5,)), ("Celu", (0.5,)), ("Softplus", ()), ("Softsign", ()), ("ScaledTanh", (0.5, 2.0)),
    ("ThresholdedRelu", (0.25,)),
)  # fmt: skip
"""Activations of FusedGemm."""


def windows(b: Builder, kernel: list[int], pads: list[int]) -> dict[str, Any]:
    """Return the padding of windows, stated or automatic."""
    auto = b.choose((None, None, None, "SAME_UPPER", "SAME_LOWER", "VALID"))
    return {"kernel_shape": kernel, "auto_pad": auto, "pads": None if auto else b.choose((None, pads))}


def floats(b: Builder, *shape: int, constant: bool | None = None, dtype: np.dtype[Any] = F32) -> str:
    """Return a new value of finite floats."""
    return b.given(shape, dtype, numbers(b.choose(CALM), dtype), constant)


def rows(b: Builder, rank: int, width: int | None = None, known: bool = True, dtype: np.dtype[Any] = F32) -> str:
    """Return a value of floats, an earlier one or new. known: whether attributes or weights state its last dim."""
    x = b.existing([dtype], rank, 1) if width is None and b.chance(0.4) else None
    x = x or floats(b, *(b.size(1, 5) for _ in range(rank - 1)), b.size(1) if width is None else width, dtype=dtype)
    if known:
        b.p.stated |= {b.get(x).shape[-1]}
    return x


def ids(b: Builder, high: int, *shape: int, dtype: np.dtype[Any] = I32, low: int = 0) -> str:
    return b.given(shape, dtype, within(low, high, dtype))


def trimmed(inputs: list[str]) -> list[str]:
    """Return the inputs without omitted ones at the end."""
    while not inputs[-1]:
        inputs.pop()
    return inputs


def _node(b: Builder, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
    return b.node(op, trimmed(inputs), outputs, MICROSOFT, **attributes)


# activations


def activation(b: Builder, op: str) -> None:
    x = b.existing([F32], low=1, least=1) if b.chance(0.6) else None
    x = x or b.given(b.shape(b.choose((1, 2, 3)), 1), F32)
    b.p.stated |= {b.get(x).shape[-1]}
    bias = floats(b, b.get(x).shape[-1])
    more = {"alpha": b.choose((None, 1.0, 0.5))} if op == "QuickGelu" else {}
    with_bias = op == "BiasGelu" or (op == "FastGelu" and b.chance(0.5))
    _node(b, op, [x, bias] if with_bias else [x], **more)


def biased(b: Builder, op: str) -> None:
    if op == "BiasSoftmax":
        shape = tuple(b.size(1, 4) for _ in range(4))
        inner = b.choose((0, 1))
        bias = (shape[0], 1, 1, shape[3]) if inner else (1, 1, *shape[2:])
        _node(b, op, [floats(b, *shape), floats(b, *bias)], axis=3, is_inner_broadcast=inner)
        return
    x = rows(b, 3, 2 * b.size(1, 4) if op == "BiasSplitGelu" else None)
    n, m, width = b.get(x).shape
    _node(b, op, [x, floats(b, width), *([floats(b, n, m, width)] if op == "BiasAdd" else [])])


# products


def fused_matmul(b: Builder, op: str) -> None:
    dtype = b.choose((F32, F32, F64)) if op == "FusedMatMul" else F32
    batch = b.choose(((), (), (b.size(1, 3),), (b.size(1, 3), b.size(1, 2))))
    n, k, m = b.size(1, 5), b.size(0, 5), b.size(1, 5)
    more: dict[str, Any] = {
        "transA": b.choose((0, 1)),
        "transB": b.choose((0, 1)),
        "alpha": b.choose((None, 0.5, -2.0)),
    }
    a = [*batch, *((k, n) if more["transA"] else (n, k))]
    other = [*(batch if b.chance(0.5) else ()), *((m, k) if more["transB"] else (k, m))]
    if op == "FusedMatMul" and len(batch) == 1 and b.chance(0.3):
        more["transBatchA"] = 1
        a = [a[1], a[0], a[2]]
    _node(b, op, [floats(b, *a, dtype=dtype), floats(b, *other, dtype=dtype)], **more)


def fused_gemm(b: Builder, op: str) -> None:
    n, k, m = b.size(1, 5), b.size(1, 5), b.size(1, 5)
    ta, tb = b.choose((0, 1)), b.choose((0, 1))
    name, parameters = b.choose(MORE_ACTIVATIONS)
    more = dict(zip(("activation_alpha", "activation_beta"), parameters, strict=False))
    c = floats(b, *b.choose(((m,), (1, m), (n, m), (n, 1), ()))) if b.chance(0.7) else ""
    inputs = [floats(b, *((k, n) if ta else (n, k))), floats(b, *((m, k) if tb else (k, m))), c]
    scales = {"alpha": b.choose((None, 0.5)), "beta": b.choose((None, 2.0, 0.0))}
    _node(b, op, inputs, transA=ta, transB=tb, activation=name or None, **scales, **more)


def fused_conv(b: Builder, op: str) -> None:
    group = b.choose((1, 1, 2))
    n, c, h, w, m = b.size(1, 2), group * b.choose((1, 2)), b.size(2, 5), b.size(2, 5), group * b.choose((1, 2))
    kernel = [b.choose((1, 2)), b.choose((1, 2))]
    more: dict[str, Any] = {
        **windows(b, kernel, [1, 0, 1, 1]), "strides": b.choose((None, [1, 2])), "group": group,
        "dilations": b.choose((None, None, [2, 1])) if kernel[0] * 2 <= h else None,
    }  # fmt: skip
    if more["auto_pad"] not in (None, "VALID"):
        more["dilations"] = None
    b.p.stated |= {c, *kernel}
    bias = floats(b, m) if b.chance(0.6) else ""
    if op == "NhwcConv":
        _node(b, op, [floats(b, n, h, w, c), floats(b, m, *kernel, c // group, constant=True), bias], **more)
        return
    name, parameters = b.choose((*ACTIVATIONS, ("Clip", (-0.5, 0.75))))
    weights = floats(b, m, c // group, *kernel, constant=True)
    if op == "NhwcFusedConv":
        more["activation"] = b.choose((None, "Relu"))
        inputs = [floats(b, n, h, w, c), weights, bias]
        if b.chance(0.3):
            inputs.append(_node(b, op, [*inputs], **more)[0])
        _node(b, op, inputs, **more)
        return
    x = floats(b, n, c, h, w)
    more |= {"activation": name or None, "activation_params": [*parameters] or None}
    inputs = [x, weights, bias]
    if b.chance(0.3):  # the result of a convolution without it has the dims of the summand
        (y,) = b.node("Conv", [x, weights], **{k: v for k, v in more.items() if not k.startswith("activation")})
        inputs.append(y)
    _node(b, op, inputs, **more)


# norms


def skip_norm(b: Builder, op: str) -> None:
    dtype = b.choose((F32, F32, F16))
    x = rows(b, 3, dtype=dtype)
    n, m, width = b.get(x).shape
    b.p.stated |= {1}
    skip = floats(b, *b.choose(((n, m, width), (n, m, width), (1, m, width), (m, width))), dtype=dtype)
    beta = [floats(b, width, dtype=dtype) if b.chance(0.6) else ""] if op == "SkipLayerNormalization" else []
    bias = floats(b, width, dtype=dtype) if b.chance(0.5) else ""
    inputs, more = trimmed([x, skip, floats(b, width, dtype=dtype), *beta, bias]), {"epsilon": b.choose((1e-5, 1e-3))}
    if b.chance(0.5):
        _node(b, op, inputs, **more)
        return
    y, total = b.name(), b.name() + "s"
    b.named_node(op, inputs, [y, "", "", total], MICROSOFT, **more)


def simplified_norm(b: Builder, op: str) -> None:
    x = rows(b, b.choose((2, 3)))
    shape = b.get(x).shape
    axis = b.choose((-1, len(shape) - 1, 1))
    gamma = shape[axis:] if axis != -1 else shape[-1:]
    b.p.stated |= {*gamma}
    domain = b.choose(("", "", MICROSOFT))
    b.node(op, [x, floats(b, *gamma)], 1, domain, axis=axis, epsilon=b.choose((1e-5, 1e-3)), stash_type=1)


def embed_norm(b: Builder, op: str) -> None:
    n, m, width = b.size(1, 3), b.size(1, 5), b.size(1)
    b.p.stated |= {m, width}
    segments, mask, place = b.chance(0.5), b.chance(0.5), b.choose((None, None, n, 1))
    inputs = [
        ids(b, 11, n, m),
        ids(b, 2, n, m) if segments else "",
        floats(b, 11, width, constant=True),
        floats(b, 9, width, constant=True),
    ]
    inputs += [
        floats(b, 2, width, constant=True) if segments else "",
        *(floats(b, width, constant=True) for _ in range(2)),
    ]
    inputs += [ids(b, 2, n, m) if mask else "", ids(b, 9, place, m) if place else ""]
    _node(b, op, inputs, b.choose((2, 3)), epsilon=b.choose((1e-5, 1e-3)), mask_index_type=b.choose((None, 0, 1)))


def group_norm(b: Builder, op: str) -> None:
    groups = b.choose((1, 2, 3))
    n, h, w, c = b.size(1, 2), b.size(1, 4), b.size(1, 4), groups * b.choose((1, 2))
    b.p.stated |= {c}
    last = op == "SkipGroupNorm" or b.chance(0.5)
    x = floats(b, *((n, h, w, c) if last else (n, c, h, w)))
    inputs = [x, floats(b, c), floats(b, c)]
    more = {
        "groups": groups,
        "activation": b.choose((0, 1)),
        "epsilon": b.choose((1e-5, 1e-3)),
        "channels_last": int(last),
    }
    if op == "GroupNorm":
        _node(b, op, inputs, **more)
        return
    skip = floats(b, *b.choose(((n, h, w, c), (n, 1, 1, c), (n, c))))
    _node(b, op, [*inputs, skip, floats(b, c) if b.chance(0.5) else ""], b.choose((1, 2)), **more)


# attention


def _flags(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return 0 and 1, and 1 in the first column: a row that sees nothing loses digits by the summand of hidden columns."""
    flags = rng.integers(0, 2, shape)
    flags[..., :1] = 1
    return flags.astype(I32)


def _mask(b: Builder, n: int, m: int, columns: int) -> str:
    """Return a mask: a flag for each column, for each row and column, or the end of each row; "" for none."""
    form = b.choose(("", "flags", "rows", "ends"))
    if form == "flags":
        return b.given((n, columns), I32, _flags)
    if form == "rows":
        return b.given((n, m, columns), I32, _flags)
    if form == "ends":
        b.p.stated |= {columns}
        return ids(b, columns + 1, n, low=1)
    return ""


def attention(b: Builder, op: str) -> None:
    heads, size = b.choose((1, 2, 3)), b.choose((1, 2, 4))
    n, m, width = b.size(1, 3), b.size(1, 5), b.size(1)
    b.p.stated |= {width, heads, size, 2}
    value = b.choose((size, size, 3)) if op == "Attention" else size
    total = heads * (2 * size + value)
    past = b.size(1, 3) if value == size and b.chance(0.3) else 0
    b.p.stated |= {n, m, past, past + m} if past else set()
    cache = floats(b, 2, n, heads, past, size) if past else ""
    mask = _mask(b, n, m, past + m)
    scale = {"scale": b.choose((None, 0.4)), "mask_filter_value": b.choose((None, None, -50.0))}
    more = {"num_heads": heads, "unidirectional": b.choose((None, 0, 1)), **scale}
    if op == "QAttention":
        kind = b.choose((U8, I8))
        weights = b.given(
            (width, 3 * heads * size), kind, within(0 if kind == U8 else -64, 128 if kind == U8 else 64, kind)
        )
        inputs = [ids(b, 256, n, m, width, dtype=U8), weights, floats(b, 3 * heads * size), b.literal(np.float32(0.02))]
        zeros = [b.literal(np.uint8(3)), b.literal(np.zeros((), kind))] if b.chance(0.6) else ["", ""]
        _node(b, op, [*inputs, b.literal(np.float32(0.01)), mask, *zeros, cache], 2 if past else 1, **more)
        return
    bias = floats(b, total) if b.chance(0.8) else ""
    added = floats(b, b.choose((n, 1)), heads, m, m) if not past and b.chance(0.3) else ""
    inputs = [
        rows(b, 3, width) if b.chance(0.5) else floats(b, n, m, width),
        floats(b, width, total),
        bias,
        mask,
        cache,
        added,
    ]
    sizes = None if value == size and b.chance(0.7) else [heads * size, heads * size, heads * value]
    _node(b, op, inputs, 2 if past else 1, qkv_hidden_sizes=sizes, **more)


def multi_head(b: Builder, op: str) -> None:
    heads, size, value = b.choose((1, 2, 3)), b.choose((1, 2, 4)), b.choose((2, 4))
    n, m, k = b.size(1, 3), b.size(1, 4), b.size(1, 5)
    b.p.stated |= {heads, size, value, heads * size, heads * value}
    past = b.size(1, 3) if b.chance(0.3) else 0
    if past:
        k, value = m, size
        b.p.stated |= {n, m, past, past + m}
    q, key, v = floats(b, n, m, heads * size), floats(b, n, k, heads * size), floats(b, n, k, heads * value)
    if not past and b.chance(0.2):
        key, v = floats(b, n, heads, k, size), floats(b, n, heads, k, value)
    bias = floats(b, heads * (2 * size + value)) if b.chance(0.4) and b.get(key).ndim == 3 else ""
    cache = [floats(b, n, heads, past, d) for d in (size, value)] if past else []
    mask = _mask(b, n, m, past + k)
    added = floats(b, b.choose((n, 1)), b.choose((heads, 1)), m, past + k) if b.chance(0.3) else ""
    more = {"scale": b.choose((None, 0.4)), "mask_filter_value": b.choose((None, None, -50.0))}
    more["unidirectional"] = b.choose((None, 0, 1)) if k == m else None
    b.p.stated |= {m} if more["unidirectional"] else set()
    _node(b, op, [q, key, v, bias, mask, added, *cache], 3 if past else 1, num_heads=heads, **more)


def grouped(b: Builder, op: str) -> None:
    """GroupQueryAttention of a prompt, or of one position behind a full cache."""
    shared, size = b.choose((1, 2)), b.choose((8, 16))
    heads = shared * b.choose((1, 2))
    n, past = b.size(1, 2), b.choose((0, 0, 3))
    m = 1 if past else b.size(1, 4)
    b.p.stated |= {size, heads * size, shared * size, (heads + 2 * shared) * size, shared, n, m, past, past + m, heads}
    packed, rotary = b.chance(0.4), b.choose((0, 1))
    q = floats(b, n, m, ((heads + 2 * shared) if packed else heads) * size)
    keys = ["", ""] if packed else [floats(b, n, m, shared * size) for _ in range(2)]
    cache = [b.given((n, shared, past, size), F32, numbers("plain", F32)) for _ in range(2)]
    total = past + m
    ends = b.literal(np.full(n, total - 1, np.int32), b.chance(0.5))
    tables = [floats(b, 9, size // 2) for _ in range(2)] if rotary else ["", ""]
    place = ""
    if rotary and b.chance(0.2):
        place = b.literal(np.broadcast_to(np.arange(past, total), (n, m)).astype(I64))
    added = floats(b, b.choose((n, 1)), b.choose((heads, 1)), m, total) if b.chance(0.2) else ""
    sink = floats(b, heads) if b.chance(0.2) else ""
    more = {
        "local_window_size": b.choose((None, None, 2)), "softcap": b.choose((None, None, 1.5)), "scale": b.choose((None, 0.3)),
        "smooth_softmax": b.choose((None, None, 1)) if not sink else None, "rotary_interleaved": b.choose((None, 1)) if rotary else None,
    }  # fmt: skip
    inputs = [q, *keys, *cache, ends, b.literal(np.int32(total)), *tables, place, added, sink]
    _node(b, op, inputs, 3, num_heads=heads, kv_num_heads=shared, do_rotary=rotary, **more)


def rotary(b: Builder, op: str) -> None:
    n, m, heads, size = b.size(1, 3), b.size(1, 4), b.choose((1, 2, 3)), b.choose((2, 4, 8))
    b.p.stated |= {heads, size, heads * size}
    pairs = size // 2 if b.chance(0.6) else max(1, size // 4)
    b.p.stated |= {pairs}
    x = floats(b, *((n, heads, m, size) if b.chance(0.4) else (n, m, heads * size)))
    place = b.literal(np.array([2])) if b.chance(0.4) else ids(b, 11, n, m, dtype=I64)
    more = {"num_heads": heads, "rotary_embedding_dim": 2 * pairs} if 2 * pairs < size else {}
    more |= {"scale": b.choose((None, None, 2.0)), "is_packed_batching": b.choose((None, None, 1))}
    inputs = [x, place, floats(b, 11, pairs), floats(b, 11, pairs)]
    _node(b, op, inputs, interleaved=b.choose((None, 0, 1)), **more)


# tokens without padding


def packing(b: Builder) -> tuple[list[int], int, str, str]:
    """Return lengths of rows, the largest one, and the places of their tokens and the sums of lengths as values."""
    lengths = [b.size(1, 4) for _ in range(b.size(1, 3))]
    n = max(lengths)
    inside = (np.arange(n) < np.array(lengths)[:, None]).reshape(-1)
    places = np.concatenate([inside.nonzero()[0], (~inside).nonzero()[0]]).astype(I32).reshape(len(lengths), n)
    sums = np.concatenate([[0], np.cumsum(lengths)]).astype(I32)
    fixed = b.chance(0.5)
    b.p.stated |= {len(lengths), n, int(sums[-1]), len(sums)}
    return lengths, n, b.literal(places, fixed), b.literal(sums, fixed)


def padding(b: Builder, op: str) -> None:
    if op == "RemovePadding":
        n, m, width = b.size(1, 3), b.size(2, 5), b.size(1, 4)
        b.p.stated |= {m}
        _node(b, op, [floats(b, n, m, width), ids(b, m + 1, n, low=1)], 4)
        return
    lengths, _, places, _ = packing(b)
    _node(b, op, [floats(b, sum(lengths), b.size(1, 4)), places])


def packed_attention(b: Builder, op: str) -> None:
    lengths, n, places, sums = packing(b)
    heads, size, tokens = b.choose((1, 2)), b.choose((2, 4)), sum(lengths)
    b.p.stated |= {heads, size, heads * size, 3 * heads * size}
    added = floats(b, len(lengths), heads, n, n) if b.chance(0.3) else ""
    more = {"num_heads": heads, "scale": b.choose((None, 0.4))}
    if op == "PackedAttention":
        width = b.size(1)
        b.p.stated |= {width}
        inputs = [floats(b, tokens, width), floats(b, width, 3 * heads * size), floats(b, 3 * heads * size)]
        _node(b, op, [*inputs, places, sums, added], **more)
        return
    together = b.chance(0.4)
    parts = (
        [floats(b, tokens, heads, 3, size), "", ""] if together else [floats(b, tokens, heads * size) for _ in range(3)]
    )
    bias = floats(b, 3 * heads * size) if b.chance(0.5) else ""
    _node(b, op, [*parts, bias, places, sums, added], **more)


PLAIN: Mapping[str, Use] = {
    **dict.fromkeys(("Gelu", "QuickGelu", "FastGelu", "BiasGelu"), activation),
    **dict.fromkeys(("BiasAdd", "BiasSplitGelu", "BiasSoftmax"), biased),
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), fused_matmul), "FusedGemm": fused_gemm,
    **dict.fromkeys(("FusedConv", "NhwcConv", "NhwcFusedConv"), fused_conv),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), skip_norm), "EmbedLayerNormalization": embed_norm,
    "SimplifiedLayerNormalization": simplified_norm, **dict.fromkeys(("GroupNorm", "SkipGroupNorm"), group_norm),
    **dict.fromkeys(("Attention", "QAttention"), attention),
    "MultiHeadAttention": multi_head, "GroupQueryAttention": grouped, "RotaryEmbedding": rotary,
    **dict.fromkeys(("RemovePadding", "RestorePadding"), padding),
    **dict.fromkeys(("PackedAttention", "PackedMultiHeadAttention"), packed_attention),
}  # fmt: skip
