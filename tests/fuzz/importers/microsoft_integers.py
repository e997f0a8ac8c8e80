"""Random uses of the operators of com.microsoft on integers: quantised tensors, weights in blocks, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.fuzz.importers.builder import F32, I32, I64, Builder, numbers, within
from tests.fuzz.importers.elementwise import Use, positive
from tests.fuzz.importers.formulas import MICROSOFT
from tests.fuzz.importers.microsoft import I8, PLAIN, U8, floats, ids, rows, trimmed, windows

WIDE = {"u1": (0, 256), "i1": (-128, 128), "u2": (0, 1 << 16), "i2": (-(1 << 15), 1 << 15), "i4": (-9999, 9999)}
STEPS = (0.03, 0.0503, 0.011, 0.25, 0.7)


def _node(b: Builder, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
    return b.node(op, trimmed(inputs), outputs, MICROSOFT, **attributes)


def integers(b: Builder, kind: np.dtype[Any], *shape: int) -> str:
    """Return a value of integers of the whole range of a type."""
    known = b.existing([kind], len(shape), 1) if b.chance(0.2) else None
    if known is not None and b.get(known).shape == shape:
        return known
    return b.given(shape, kind, within(*WIDE[kind.str[1:]], kind))


def weights(b: Builder, kind: np.dtype[Any], *shape: int) -> str:
    """Return integers of 7 bits: on processors without dot products of bytes, ONNX Runtime's sums of wider ones saturate."""
    low, high = (0, 128) if kind == U8 else (-64, 64)
    return b.given(shape, kind, within(low, high, kind), True)


def scale(b: Builder) -> str:
    return b.literal(np.float32(b.choose(STEPS)), b.chance(0.7))


def zero(b: Builder, kind: np.dtype[Any]) -> str:
    """Return a zero point around the middle of the range. ONNX Runtime dies of omitted ones of the QLinear operators."""
    return b.literal(np.asarray(b.rng.randint(-20, 20) + (128 if kind == U8 else 0), kind), b.chance(0.7))


def quantized(b: Builder, kind: np.dtype[Any], *shape: int) -> list[str]:
    """Return a tensor of integers, its scale and its zero point."""
    return [integers(b, kind, *shape), scale(b), zero(b, kind)]


def unary(b: Builder, op: str) -> None:
    kind = b.choose((U8, I8))
    pools = op.endswith("Pool")
    shape = (b.size(1, 2), b.size(2, 4), b.size(2, 5), b.size(2, 5)) if pools else b.shape(b.choose((2, 3)), 1)
    more: dict[str, Any] = {}
    if pools:
        more["channels_last"] = b.choose((None, 0, 1))
    if op == "QLinearAveragePool":
        kernel = [1, 2] if b.chance(0.3) else [2, 2]
        flat = b.chance(0.3)
        shape, kernel = (shape[:3], kernel[1:]) if flat else (shape, kernel)
        pads = [1] * len(kernel) * 2 if flat else [1, 0, 1, 1] if kernel[0] == 2 else [0] * 4
        more |= {**windows(b, kernel, pads), "strides": b.choose((None, [2, 1][: len(kernel)])),
                 "count_include_pad": b.choose((None, 1)), "ceil_mode": b.choose((None, 1))}  # fmt: skip
        # smaller planes have no window
        b.p.stated |= {*shape[1:]}
    if op == "QLinearLeakyRelu":
        more["alpha"] = b.choose((None, 0.2))
    if op == "QLinearSoftmax":
        more = {"opset": b.choose((11, 13)), "axis": b.axis(len(shape))}
    if op == "QLinearReduceMean":
        more = {"axes": [b.axis(len(shape))], "keepdims": b.choose((0, 1))}
    after = [scale(b), zero(b, kind)]
    if op in ("QLinearSigmoid", "QLinearSoftmax"):
        after = [b.literal(np.float32(1 / 256)), b.literal(np.asarray(0 if kind == U8 else -128, kind))]
    _node(b, op, [*quantized(b, kind, *shape), *after], **more)


def binary(b: Builder, op: str) -> None:
    kind = b.choose((U8, I8))
    shape = b.shape(b.choose((1, 2, 3)), 1)
    other = [d if b.chance(0.7) else 1 for d in shape][b.rng.randrange(len(shape)) :]
    sides = [quantized(b, kind, *shape), quantized(b, kind, *other)]
    b.rng.shuffle(sides)
    _node(b, op, [*sides[0], *sides[1], scale(b), zero(b, kind)])


def concat(b: Builder, op: str) -> None:
    kind, shape = b.choose((U8, I8)), b.shape(b.choose((1, 2, 3)), 1)
    axis = b.axis(len(shape))
    parts = []
    for _ in range(b.choose((1, 2, 3))):
        dims = [*shape]
        dims[axis] = b.size(1)
        parts += quantized(b, kind, *dims)
    _node(b, op, [scale(b), zero(b, kind), *parts], axis=axis)


def where(b: Builder, op: str) -> None:
    """QLinearWhere: ONNX Runtime dies of scales and zero points that are no constants, and of some operands that broadcast."""
    kind, shape = b.choose((U8, I8)), b.shape(b.choose((1, 2)), 1)

    def parameters() -> list[str]:
        middle = b.rng.randint(-20, 20) + (128 if kind == U8 else 0)
        return [b.literal(np.float32(b.choose(STEPS))), b.literal(np.asarray(middle, kind))]

    sides = [[integers(b, kind, *shape), *parameters()] for _ in range(2)]
    _node(b, op, [b.given(shape, np.dtype(bool)), *sides[0], *sides[1], *parameters()])


def conv(b: Builder, op: str) -> None:
    kind = b.choose((U8, I8))
    group = b.choose((1, 1, 2))
    n, h, w = b.size(1, 2), b.size(2, 5), b.size(2, 5)
    c, m = group * b.choose((1, 2, 3)), group * b.choose((1, 2, 4))
    kernel, last = b.choose(([1, 1], [2, 2], [2, 1])), b.choose((None, 0, 1))
    b.p.stated |= {c, *kernel, h, w}
    other = I8 if kind == I8 else b.choose((U8, I8))
    by = b.given((m,), F32, positive(F32), True) if b.chance(0.5) else scale(b)
    # ONNX Runtime takes one zero point of weights, or as many that are equal
    zeros = np.full(b.get(by).shape, 0 if other == I8 else 64, other)
    x = quantized(b, kind, *((n, h, w, c) if last else (n, c, h, w)))
    bias = ids(b, 999, m, low=-999) if b.chance(0.5) else ""
    inputs = [*x, weights(b, other, m, c // group, *kernel), by, b.literal(zeros), scale(b), zero(b, kind), bias]
    more = {**windows(b, kernel, [1, 0, 1, 1]), "strides": b.choose((None, [1, 2]))}
    dilations = b.choose((None, [2, 1])) if more["auto_pad"] in (None, "VALID") and kernel[0] * 2 <= h else None
    _node(b, op, inputs, channels_last=last, group=group, dilations=dilations, **more)


def max_pool(b: Builder, op: str) -> None:
    """NhwcMaxPool, which ONNX Runtime's optimizer writes for integers."""
    shape, kernel = (b.size(1, 2), b.size(3, 5), b.size(3, 5), b.choose((1, 2, 4))), [b.choose((1, 2)), 2]
    b.p.stated |= {*shape[1:], *kernel}
    more = {**windows(b, kernel, [kernel[0] - 1, 0, 0, 1]), "strides": b.choose((None, [2, 1]))}
    more |= {"ceil_mode": b.choose((None, 1)), "dilations": None if more["auto_pad"] else b.choose((None, [1, 2]))}
    _node(b, op, [integers(b, b.choose((U8, I8)), *shape)], **more)


def by_columns(b: Builder, kind: np.dtype[Any], columns: int, optional: bool = True) -> tuple[str, str]:
    """Return the scales and zero points of weights, one or one for each column."""
    if b.chance(0.5):
        return scale(b), zero(b, kind) if not optional or b.chance(0.6) else ""
    by = b.given((columns,), F32, positive(F32))
    zeros = b.given((columns,), kind, within(0, 9, kind)) if not optional or b.chance(0.6) else ""
    return by, zeros


def product(b: Builder, op: str) -> None:
    """MatMulIntegerToFloat and DynamicQuantizeMatMul."""
    kind = b.choose((U8, I8))
    other = I8 if kind == I8 else b.choose((U8, I8))
    k, m = b.size(1), b.size(1, 5)
    b.p.stated |= {k, m}
    shape = (*b.shape(b.choose((1, 2)), 1), k)
    bias = floats(b, m) if b.chance(0.5) else ""
    by, zeros = by_columns(b, other, m)
    if op == "DynamicQuantizeMatMul":
        _node(b, op, [rows(b, len(shape), k), weights(b, other, k, m), by, zeros, bias])
        return
    x = integers(b, kind, *shape)
    _node(b, op, [x, weights(b, other, k, m), scale(b), by, zero(b, kind) if b.chance(0.7) else "", zeros, bias])


def gemm(b: Builder, op: str) -> None:
    kind = b.choose((U8, I8))
    other = I8 if kind == I8 else b.choose((U8, I8))
    n, k, m = b.size(1, 5), b.size(1), b.size(1, 5)
    b.p.stated |= {k, m}
    ta, tb = b.choose((0, 1)), b.choose((0, 1))
    a = [integers(b, kind, *((k, n) if ta else (n, k))), scale(b), zero(b, kind)]
    by, zeros = by_columns(b, other, m, False)
    c = ids(b, 999, *b.choose(((m,), (1, m), (n, m), (n, 1))), low=-999) if b.chance(0.6) else ""
    out = [scale(b), zero(b, kind)] if b.chance(0.5) else []
    inputs = [*a, weights(b, other, *((m, k) if tb else (k, m))), by, zeros, c, *out]
    _node(b, op, inputs, transA=ta, transB=tb, alpha=b.choose((None, 0.5)))


def lstm(b: Builder, op: str) -> None:
    """DynamicQuantizeLSTM of one row: ONNX Runtime quantises the states of a batch together, or by threads."""
    kind, d = b.choose((U8, I8)), b.choose((1, 2))
    m, size, hidden = b.size(1, 3), b.choose((1, 3)), b.choose((1, 2))
    b.p.stated |= {size, hidden, 4 * hidden, 8 * hidden, d, 1, m}
    direction = "bidirectional" if d == 2 else b.choose(("forward", "reverse"))
    by = [b.given((d, *((4 * hidden,) if b.chance(0.3) else ())), F32, within(0.01, 0.03, F32), True) for _ in range(2)]
    zeros = [b.literal(np.full(b.get(s).shape, 64 if kind == U8 else 0, kind)) for s in by]
    state = [floats(b, d, 1, hidden), floats(b, d, 1, hidden)] if b.chance(0.5) else ["", ""]
    peepholes = b.given((d, 3 * hidden), F32, within(-0.5, 0.5, F32), True) if b.chance(0.3) else ""
    inputs = [floats(b, m, 1, size), *(weights(b, kind, d, k, 4 * hidden) for k in (size, hidden))]
    inputs += [
        floats(b, d, 8 * hidden) if b.chance(0.7) else "",
        "",
        *state,
        peepholes,
        by[0],
        zeros[0],
        by[1],
        zeros[1],
    ]
    functions = b.choose((None, ["HardSigmoid", "Relu", "Tanh"] * d))
    more = {
        "activations": functions, "activation_alpha": [0.25] * d if functions else None,
        "activation_beta": [0.5] * d if functions else None, "clip": b.choose((None, None, 0.5)),
        "input_forget": b.choose((None, None, 1)),
    }  # fmt: skip
    _node(b, op, inputs, 3, hidden_size=hidden, direction=direction, **more)


def embed(b: Builder, op: str) -> None:
    n, m, width = b.size(1, 3), b.size(1, 5), b.size(1)
    b.p.stated |= {m, width}
    segments, kind = b.chance(0.5), U8
    tables = [weights(b, kind, 11, width), weights(b, kind, 9, width), weights(b, kind, 2, width) if segments else ""]
    tables += [weights(b, kind, width), weights(b, kind, width)]
    scales, zeros = [[f(b) for _ in range(5)] for f in (scale, lambda b: zero(b, kind))]
    if not segments:
        scales[2] = zeros[2] = ""
    inputs = [ids(b, 11, n, m), ids(b, 2, n, m) if segments else "", *tables, ids(b, 2, n, m) if b.chance(0.5) else ""]
    _node(b, op, [*inputs, *scales, *zeros], 2, epsilon=b.choose((1e-5, 1e-3)))


def linear(b: Builder, op: str) -> None:
    """QuantizeLinear and DequantizeLinear of the domain."""
    kind = np.dtype(b.choose(("u1", "i1", "u2", "i2", *(("i4",) if op[0] == "D" else ()))))
    shape = b.shape(b.choose((1, 2, 3)), 1)
    axis = b.choose((None, b.axis(len(shape))))
    dims = () if axis is None else (shape[axis],)
    low, high = (0, 1) if kind.itemsize > 2 else (0, 41)
    inputs = [integers(b, kind, *shape) if op[0] == "D" else b.given(shape, F32), b.given(dims, F32, positive(F32))]
    inputs.append(b.given(dims, kind, within(low, high, kind)) if op[0] == "Q" or b.chance(0.7) else "")
    _node(b, op, inputs, axis=axis)


# weights in blocks


def packed(b: Builder, *shape: int) -> str:
    return b.given(shape, U8, within(0, 256, U8), True)


def matmul_bits(b: Builder, op: str) -> None:
    bits, block = b.choose((2, 4, 4, 8)), b.choose((16, 32))
    k, n = b.choose((16, 32) if bits == 2 else (16, 24, 32, 40)), b.choose((1, 3, 5))
    count = -(-k // block)
    b.p.stated |= {k, n}
    zeros = b.choose(("", "packed", "floats" if bits == 4 else ""))
    zeros = {"": "", "packed": "p", "floats": "f"}[zeros]
    if zeros:
        zeros = (
            packed(b, n, -(-count * bits // 8)) if zeros == "p" else b.given((n, count), F32, within(0, 15, F32), True)
        )
    by = b.given((n, count), F32, within(0.01, 0.2, F32), True)
    bias = floats(b, n) if b.chance(0.4) else ""
    x = floats(b, *b.shape(b.choose((1, 2)), 1), k)
    groups = ""
    # ONNX Runtime has groups of 4 bits, and does not read packed zero points beside them
    if bits == 4 and k % block == 0 and (not zeros or b.get(zeros).dtype == F32) and b.chance(0.4):
        order = b.np_rng.permutation(np.arange(k) // block) if b.chance(0.7) else b.np_rng.integers(0, count, k)
        groups = b.literal(order.astype(I32))
    inputs = [x, packed(b, n, count, block * bits // 8), by, zeros, groups, bias]
    _node(b, op, inputs, K=k, N=n, bits=bits, block_size=block)


def table_of_floats(b: Builder, op: str) -> None:
    """MatMulBnb4."""
    k, n, block = b.choose((16, 24, 32)), b.choose((2, 3, 5)), b.choose((16, 32))
    b.p.stated |= {k, n}
    by = b.given((-(-n * k // block),), F32, within(0.01, 0.5, F32), True)
    inputs = [floats(b, *b.shape(b.choose((1, 2)), 1), k), packed(b, n * k // 2), by]
    _node(b, op, inputs, K=k, N=n, block_size=block, quant_type=b.choose((0, 1)))


def gather_blocks(b: Builder, op: str) -> None:
    bits, count, kind = b.choose((4, 8)), b.choose((3, 11)), b.choose((I32, I64))
    width = b.choose((16, 32, 40))
    blocks = -(-width // 16)
    b.p.stated |= {width}
    zeros = packed(b, count, -(-blocks * bits // 8)) if b.chance(0.5) else ""
    indices = b.given(b.shape(b.choose((0, 1, 2)), 1), kind, within(-count, count, kind))
    by = b.given((count, blocks), F32, within(0.01, 0.2, F32), True)
    _node(
        b,
        op,
        [packed(b, count, width * bits // 8), indices, by, zeros],
        bits=bits,
        gather_axis=0,
        quantize_axis=1,
        block_size=16,
    )


# mixtures of experts


def _gates(b: Builder) -> tuple[dict[str, Any], int]:
    """Return the attributes of an activation, and how many numbers of the first layer make one of its results."""
    kind = b.choose(("relu", "gelu", "silu", "identity", "swiglu"))
    if kind != "swiglu":
        return {"activation_type": kind}, 1
    more = {
        "activation_alpha": b.choose((1.0, 1.702)),
        "activation_beta": b.choose((0.0, 1.0)),
        "swiglu_limit": b.choose((None, 0.75)),
    }
    return {"activation_type": kind, "swiglu_fusion": 1, **more}, 2


def experts(b: Builder, op: str) -> None:
    count, hidden, inner = b.choose((2, 4)), b.choose((16, 32)), b.choose((16, 32))
    lead = (b.size(1, 5),) if b.chance(0.6) else (b.size(1, 2), b.size(1, 3))
    gates, wide = _gates(b)
    b.p.stated |= {count, hidden, inner, wide * inner}
    if len(lead) == 2:
        b.p.stated |= {*lead}
    n = int(np.prod(lead))
    b.p.stated |= {n} if len(lead) == 2 else set()
    more = {**gates, "k": b.choose((1, 2)), "normalize_routing_weights": b.choose((0, 1))}
    # no two experts of a row are equal
    x = [floats(b, *lead, hidden), b.given((n, count), F32, numbers("plain", F32))]
    if op == "MoE":
        first = [
            floats(b, count, wide * inner, hidden, constant=True),
            floats(b, count, wide * inner) if b.chance(0.6) else "",
        ]
        second = [floats(b, count, hidden, inner, constant=True), floats(b, count, hidden) if b.chance(0.6) else ""]
        _node(b, op, [*x, *first, *second], **more)
        return
    # ONNX Runtime quantises the activations too where weights of 8 bits have blocks
    bits = b.choose((4, 8))
    block = 16 if bits == 4 and b.chance(0.5) else None

    def layer(out: int, depth: int) -> list[str]:
        dims = (count, out, depth // block) if block else (count, out)
        by = b.given(dims, F32, within(0.002, 0.03, F32), True)
        return [packed(b, count, out, depth * bits // 8), by, floats(b, count, out) if b.chance(0.6) else ""]

    _node(
        b,
        op,
        [*x, *layer(wide * inner, hidden), *layer(hidden, inner)],
        expert_weight_bits=bits,
        block_size=block,
        **more,
    )


USES: Mapping[str, Use] = {
    **PLAIN,
    **dict.fromkeys(("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool", "QLinearGlobalAveragePool",
                     "QLinearReduceMean"), unary),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), binary), "QLinearConcat": concat, "QLinearWhere": where, "QLinearConv": conv,
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul"), product), "QGemm": gemm, "DynamicQuantizeLSTM": lstm,
    "QEmbedLayerNormalization": embed, **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), linear), "MatMulNBits": matmul_bits,
    "MatMulBnb4": table_of_floats, "NhwcMaxPool": max_pool,
    "GatherBlockQuantized": gather_blocks, **dict.fromkeys(("MoE", "QMoE"), experts),
}  # fmt: skip
"""Random uses of the operators of com.microsoft."""
