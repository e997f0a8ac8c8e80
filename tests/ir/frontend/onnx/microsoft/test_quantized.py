"""Operators of com.microsoft on 8-bit integers, against ONNX Runtime.

ONNX Runtime rounds in other orders, so that some results differ by one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, check, f, whole

KINDS = [np.uint8, np.int8]
STEPS = {"steps": 0.05}


def q(kind: Any, *shape: int) -> Array:
    info = np.iinfo(kind)
    return whole(info.min, info.max + 1, *shape, dtype=kind)


def weights(kind: Any, *shape: int) -> Array:
    """Integers of 7 bits: on processors without dot products of bytes, ONNX Runtime's sums of wider ones saturate."""
    return whole(0, 128, *shape, dtype=kind) if kind is np.uint8 else whole(-64, 64, *shape, dtype=kind)


def scale(value: float) -> Array:
    return np.array(value, np.float32)


def zero(kind: Any, value: int) -> Array:
    return np.array(value + (128 if kind is np.uint8 else 0), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("a, b, dims_a, dims_b", [
    ((2, 5, 7), (2, 5, 7), "b n 7", "b n 7"), ((1, 1, 7), (7,), "b n 7", "7"), ((3, 1), (1, 5), "b 1", "1 m"), ((0, 3), (3,), "n 3", "3"),
])  # fmt: skip
def test_binary(op: str, kind: Any, a: Any, b: Any, dims_a: str, dims_b: str) -> None:
    z = [zero(kind, v) for v in (3, -5, 1)]
    big = 0.05 if op == "QLinearAdd" else 1.0
    inputs = [
        Input(q(kind, *a), dims_a),
        scale(0.03),
        z[0],
        Input(q(kind, *b), dims_b),
        scale(0.02),
        z[1],
        scale(big),
        z[2],
    ]
    check(op, inputs, **STEPS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op, attributes", [
    ("QLinearSigmoid", {}), ("QLinearLeakyRelu", {}), ("QLinearLeakyRelu", {"alpha": 0.2}),
    ("QLinearSoftmax", {"opset": 13, "axis": -1}), ("QLinearSoftmax", {"opset": 13, "axis": 1}),
    ("QLinearSoftmax", {"opset": 11, "axis": 1}),
    ("QLinearAveragePool", {"kernel_shape": [2, 2], "strides": [2, 1]}),
    ("QLinearAveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("QLinearAveragePool", {"kernel_shape": [2, 3], "channels_last": 1}),
    ("QLinearAveragePool", {"kernel_shape": [2, 2], "ceil_mode": 1, "strides": [2, 2]}),
    ("QLinearAveragePool", {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("QLinearAveragePool", {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER", "count_include_pad": 1}),
    ("QLinearAveragePool", {"kernel_shape": [2, 2], "auto_pad": "VALID", "channels_last": 1}),
    ("QLinearAveragePool", {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 2], "ceil_mode": 1, "channels_last": 1}),
    ("QLinearGlobalAveragePool", {}), ("QLinearGlobalAveragePool", {"channels_last": 1}),
])  # fmt: skip
def test_unary(op: str, attributes: dict[str, Any], kind: Any) -> None:
    out = 1 / 256 if op in ("QLinearSigmoid", "QLinearSoftmax") else 0.0391  # no quotient is a tie
    z = zero(kind, -128) if out < 0.01 else zero(kind, 2)
    dims = "b c h w" if op in ("QLinearSigmoid", "QLinearLeakyRelu") else "b 4 5 w"
    inputs = [Input(q(kind, 2, 4, 5, 7), dims), scale(0.0503), zero(kind, -7), scale(out), z]
    check(op, inputs, **STEPS, **attributes)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op, more", [
    ("QLinearAveragePool", {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}), ("QLinearGlobalAveragePool", {}),
])  # fmt: skip
def test_pools_of_signals(op: str, more: dict[str, Any], last: int) -> None:
    z = [zero(np.uint8, v) for v in (-7, 2)]
    inputs = [Input(q(np.uint8, 2, 9, 9), "b c n"), scale(0.0503), z[0], scale(0.0391), z[1]]
    check(op, inputs, channels_last=last, **more, **STEPS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER"}, {"kernel_shape": [2, 2], "dilations": [1, 2]},
])  # fmt: skip
def test_nhwc_max_pool(more: dict[str, Any], kind: Any) -> None:
    check("NhwcMaxPool", [Input(q(kind, 2, 5, 7, 4), "b h w c")], **more)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("channels, more", [
    (2, {"group": 2}), (1, {"group": 4, "pads": [1, 1, 1, 1]}), (4, {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    (4, {"dilations": [2, 1]}),
])  # fmt: skip
def test_conv_of_symbolic_channels(channels: int, more: dict[str, Any], last: int) -> None:
    x = Input(q(np.uint8, 2, 6, 7, 4), "b h w c") if last else Input(q(np.uint8, 2, 4, 6, 7), "b c h w")
    by = np.linspace(0.01, 0.03, 8, dtype=np.float32)
    inputs = [x, scale(0.05), zero(np.uint8, -7), weights(np.int8, 8, channels, 2, 3), by, np.zeros(8, np.int8)]
    inputs += [scale(0.3), zero(np.uint8, 4), whole(-999, 999, 8, dtype=np.int32)]
    check("QLinearConv", inputs, channels_last=last, **more, **STEPS)


@pytest.mark.parametrize("keep", [0, 1])
def test_reduce_mean(keep: int) -> None:
    """ONNX Runtime has no kernel for it on processors: NumPy."""
    x = q(np.uint8, 2, 5, 7)
    mean = ((x.astype(np.float64) - 121) * 0.05).mean(1, keepdims=bool(keep))
    wanted = np.clip(np.rint(mean / 0.03) + 128, 0, 255).astype(np.uint8)
    inputs = [Input(x, "b n 7"), scale(0.05), np.array(121, np.uint8), scale(0.03), np.array(128, np.uint8)]
    check("QLinearReduceMean", inputs, axes=[1], keepdims=keep, reference=lambda: [wanted], **STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_concat(kind: Any) -> None:
    parts = [[Input(q(kind, 2, n, 3), f"b n{n} 3"), scale(0.02 * n), zero(kind, n)] for n in (1, 4, 5)]
    check("QLinearConcat", [scale(0.07), zero(kind, 2), *(a for p in parts for a in p)], axis=1, **STEPS)


def test_where() -> None:
    sides = [
        Input(q(np.uint8, 2, 5), "b n"),
        scale(0.023),
        zero(np.uint8, 3),
        Input(q(np.uint8, 2, 1), "b 1"),
        scale(0.05),
        zero(np.uint8, -9),
    ]
    condition = Input(whole(0, 2, 5).astype(bool), "n")
    check("QLinearWhere", [condition, *sides, scale(0.04), zero(np.uint8, 1)], **STEPS)


@pytest.mark.parametrize("last", [0, 1])
def test_conv(last: int) -> None:
    x = Input(q(np.uint8, 2, 5, 7, 6), "b h w 6") if last else Input(q(np.uint8, 2, 6, 5, 7), "b 6 h w")
    inputs = [
        x, scale(0.02), zero(np.uint8, 3), weights(np.int8, 4, 6, 3, 3), f(4) ** 2 * np.float32(0.01) + np.float32(0.001),
        np.zeros(4, np.int8), scale(0.6), zero(np.uint8, 0), whole(-99, 99, 4, dtype=np.int32),
    ]  # fmt: skip
    check("QLinearConv", inputs, channels_last=last, pads=[1, 1, 1, 1], kernel_shape=[3, 3], **STEPS)


@pytest.mark.parametrize("kinds", [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [None, f(5)], ids=["none", "bias"])
@pytest.mark.parametrize("zeros", [True, False])
def test_matmul_integer_to_float(kinds: Any, columns: bool, bias: Array | None, zeros: bool) -> None:
    a, b = kinds
    by = np.abs(f(5)) + np.float32(0.1) if columns else scale(0.02)
    z = (q(b, 5) if columns else zero(b, -3)) if zeros else None
    inputs = [Input(q(a, 2, 3, 8), "b n 8"), weights(b, 8, 5), scale(0.03), by, zero(a, 4) if zeros else None, z, bias]
    check("MatMulIntegerToFloat", inputs, rtol=1e-4, atol=1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [None, f(5)], ids=["none", "bias"])
@pytest.mark.parametrize("b, n", [(1, 1), (2, 7)])
def test_dynamic_quantize_matmul(kind: Any, columns: bool, bias: Array | None, b: int, n: int) -> None:
    by = np.abs(f(5)) + np.float32(0.1) if columns else scale(0.02)
    z = (q(kind, 5) if columns else zero(kind, -3)) if bias is not None else None
    check("DynamicQuantizeMatMul", [Input(f(b, n, 8), "b n 8"), weights(kind, 8, 5), by, z, bias], rtol=1e-3, atol=1e-3)


def test_dynamic_quantize_matmul_of_zeros_and_of_one_sign() -> None:
    for x in (np.zeros((2, 8), np.float32), np.abs(f(2, 8)), -np.abs(f(2, 8))):
        check("DynamicQuantizeMatMul", [Input(x, "n 8"), weights(np.int8, 8, 5), scale(0.02)], rtol=1e-3, atol=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", [None, (5,), (1, 5)])
@pytest.mark.parametrize("columns", [False, True])
def test_gemm(quantized: bool, transposed: int, bias: tuple[int, ...] | None, columns: bool) -> None:
    by = np.abs(f(5)) * np.float32(0.1) + np.float32(0.01) if columns else scale(0.02)
    a = Input(q(np.uint8, *((8, 3) if transposed else (3, 8))), "8 n" if transposed else "n 8")
    b, z = weights(np.int8, *((5, 8) if transposed else (8, 5))), np.zeros(5, np.int8) if columns else zero(np.int8, 4)
    c = None if bias is None else whole(-999, 999, *bias, dtype=np.int32)
    out = [scale(5.0), zero(np.uint8, 3)] if quantized else []
    inputs = [a, scale(0.5), zero(np.uint8, 2), b, by, z, c, *out]
    check("QGemm", inputs, transA=transposed, transB=transposed, alpha=0.5, rtol=1e-4, atol=1e-4, **STEPS)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("past", [None, 3])
def test_attention(columns: bool, past: int | None) -> None:
    by = np.abs(f(24)) * np.float32(0.01) + np.float32(0.001) if columns else scale(0.01)
    mask = Input(np.array([4, 2], np.int32) + (past or 0), "b")
    cache = [] if past is None else [Input(f(2, 2, 2, past, 4), "2 b 2 p 4")]
    inputs = [
        Input(q(np.uint8, 2, 5, 12), "b n 12"), weights(np.int8, 12, 24), f(24), scale(0.02), by, mask, zero(np.uint8, 3),
        np.zeros(24, np.int8) if columns else zero(np.int8, -2), *cache,
    ]  # fmt: skip
    check("QAttention", inputs, 1 if past is None else 2, num_heads=2, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("segments", [True, False])
def test_embed_layer_normalization(segments: bool) -> None:
    def ids(high: int) -> Input:
        return Input(whole(0, high, 2, 5, dtype=np.int32), "b n")

    there = [0, 1, 2, 3, 4] if segments else [0, 1, 3, 4]
    tables = [q(np.uint8, 11, 8), q(np.uint8, 9, 8), q(np.uint8, 2, 8), q(np.uint8, 8), q(np.uint8, 8)]
    scales: list[Any] = [scale(0.01 * (k + 1)) for k in range(5)]
    zeros: list[Any] = [zero(np.uint8, k) for k in range(5)]
    if not segments:
        tables[2] = scales[2] = zeros[2] = None  # type: ignore[call-overload]
    inputs = [ids(11), ids(2) if segments else None, *tables, ids(2), *scales, *zeros]
    assert len(there) == sum(t is not None for t in tables)
    check("QEmbedLayerNormalization", inputs, 2, epsilon=1e-5, rtol=1e-4, atol=1e-5, bounds={"n": (1, 9)})


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("axis", [None, 1])
def test_quantize_and_dequantize_linear(kind: Any, axis: int | None) -> None:
    one = axis is None
    by, z = (scale(0.05), np.array(7, kind)) if one else (np.abs(f(5)) + np.float32(0.01), np.arange(5).astype(kind))
    attributes = {} if one else {"axis": axis}
    check("QuantizeLinear", [Input(f(2, 5, 7), "b 5 n"), by, z], **attributes)
    check("DequantizeLinear", [Input(q(kind, 2, 5, 7), "b 5 n"), by, z], **attributes)
