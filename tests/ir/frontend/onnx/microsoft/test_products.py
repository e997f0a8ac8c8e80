"""Activations and fused products of com.microsoft, against ONNX Runtime, or NumPy where it has no kernel for processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, check, f

from relax_tune.errors import ParseError

SIZES = [(1, 1), (2, 5), (3, 7), (0, 3)]


@pytest.mark.parametrize("b, n", SIZES)
@pytest.mark.parametrize("op, more, attributes", [
    ("Gelu", (), {}), ("BiasGelu", (f(6),), {}), ("FastGelu", (), {}), ("FastGelu", (f(6),), {}), ("QuickGelu", (), {}),
    ("QuickGelu", (), {"alpha": 0.5}),
])  # fmt: skip
def test_activation(op: str, more: tuple[Array, ...], attributes: dict[str, Any], b: int, n: int) -> None:
    check(op, [Input(f(b, n, 6), "b n 6"), *more], **attributes, rtol=1e-4)


def gelu(x: Array) -> Array:
    from math import erf

    return x * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2))) / 2


@pytest.mark.parametrize("b, n", SIZES)
def test_bias_split_gelu(b: int, n: int) -> None:
    x, bias = f(b, n, 10), f(10)

    def reference() -> list[Array]:
        total = x.astype(np.float64) + bias
        return [(total[..., :5] * gelu(total[..., 5:])).astype(np.float32)]

    check("BiasSplitGelu", [Input(x, "b n 10"), bias], reference=reference)


def test_bias_add() -> None:
    x, bias, skip = f(2, 5, 7), f(7), f(2, 5, 7)
    check("BiasAdd", [Input(x, "b n 7"), bias, Input(skip, "b n 7")], reference=lambda: [x + bias + skip])


@pytest.mark.parametrize("dims, inner", [((2, 1, 1, 5), 1), ((1, 1, 4, 5), 0)])
def test_bias_softmax(dims: tuple[int, ...], inner: int) -> None:
    x, bias = f(2, 3, 4, 5), f(*dims)

    def reference() -> list[Array]:
        e = np.exp((x + bias).astype(np.float64))
        return [(e / e.sum(-1, keepdims=True)).astype(np.float32)]

    check("BiasSoftmax", [Input(x, "b 3 n m"), bias], reference=reference, axis=3, is_inner_broadcast=inner)


@pytest.mark.parametrize("a, b, dims_a, dims_b, attributes", [
    ((3, 4), (4, 5), "n 4", "4 5", {"alpha": 0.25}),
    ((4, 3), (5, 4), "4 n", "m 4", {"transA": 1, "transB": 1}),
    ((2, 3, 4), (4, 5), "b n 4", "4 5", {}),
    ((2, 3, 4, 6), (2, 3, 5, 6), "b 3 n 6", "b 3 m 6", {"transB": 1, "alpha": 0.125}),
    ((3, 2, 4), (2, 4, 5), "n b 4", "b 4 5", {"transBatchA": 1}),
    ((4, 2, 5, 3), (2, 5, 4, 7), "4 2 5 n", "2 5 4 7", {"transBatchA": 1, "transA": 0}),
    ((2, 3, 4), (4, 2, 5), "b n 4", "4 b 5", {"transBatchB": 1}),
    ((4,), (4, 5), "4", "4 5", {"transA": 1}),
    ((2, 0), (0, 3), "n k", "k 3", {}),
])  # fmt: skip
def test_fused_matmul(a: Any, b: Any, dims_a: str, dims_b: str, attributes: dict[str, Any]) -> None:
    if attributes.get("transBatchA") and len(a) == 4:
        a, dims_a = (3, 2, 5, 4), "n 2 5 4"
    check("FusedMatMul", [Input(f(*a), dims_a), Input(f(*b), dims_b)], **attributes)


def test_transpose_matmul() -> None:
    check("TransposeMatMul", [Input(f(3, 4), "n 4"), f(5, 4)], transB=1, alpha=2.0)


@pytest.mark.parametrize("activation", [
    {"activation": "Relu"}, {"activation": "LeakyRelu", "activation_alpha": 0.2}, {"activation": "Tanh"},
    {"activation": "Sigmoid"}, {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
    {"activation": "Selu", "activation_alpha": 1.5, "activation_gamma": 1.1}, {"activation": "Softplus"}, {"activation": "Softsign"},
    {"activation": "ThresholdedRelu", "activation_alpha": 0.2}, {"activation": "Celu", "activation_alpha": 0.5},
    {"activation": "ScaledTanh", "activation_alpha": 0.5, "activation_beta": 2.0}, {"activation": "Elu", "activation_alpha": 0.5},
])  # fmt: skip
@pytest.mark.parametrize("bias", [None, f(5), f(1, 5)], ids=["none", "vector", "row"])
def test_fused_gemm(activation: dict[str, Any], bias: Array | None) -> None:
    check("FusedGemm", [Input(f(3, 4), "n 4"), f(5, 4), bias], transB=1, alpha=0.5, beta=2.0, **activation)


@pytest.mark.parametrize("activation", [
    {}, {"activation": "Relu"}, {"activation": "LeakyRelu", "activation_params": [0.2]}, {"activation": "Tanh"},
    {"activation": "Clip", "activation_params": [-0.5, 0.75]},
    {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
])  # fmt: skip
@pytest.mark.parametrize("added", [False, True])
def test_fused_conv(activation: dict[str, Any], added: bool) -> None:
    z = Input(f(2, 4, 5, 7), "b 4 h w") if added else None
    inputs = [Input(f(2, 6, 5, 7), "b 6 h w"), f(4, 3, 3, 3), f(4), z]
    check("FusedConv", inputs, group=2, pads=[1, 1, 1, 1], kernel_shape=[3, 3], rtol=1e-4, **activation)


def test_nhwc_conv_has_channels_last_in_input_and_weights() -> None:
    x, weights, bias = f(2, 5, 7, 6), f(4, 3, 3, 6), f(4)

    def reference() -> list[Array]:
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
        y = np.einsum("bhwcij,oijc->bhwo", windows, weights.astype(np.float64)) + bias
        return [y.astype(np.float32)]

    check("NhwcConv", [Input(x, "b h w 6"), weights, bias], kernel_shape=[3, 3], reference=reference)


def test_nhwc_fused_conv_has_channels_last_in_input_and_summand() -> None:
    x, weights, bias, z = f(2, 5, 7, 6), f(4, 3, 3, 3), f(4), f(2, 3, 5, 4)

    def reference() -> list[Array]:
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
        parts = [
            np.einsum(
                "bhwcij,ocij->bhwo", windows[:, :, :, g * 3 : g * 3 + 3], weights[g * 2 : g * 2 + 2].astype(float)
            )
            for g in range(2)
        ]
        return [np.maximum(np.concatenate(parts, -1) + bias + z, 0).astype(np.float32)]

    inputs = [Input(x, "b h w 6"), weights, bias, Input(z, "b p q 4")]
    check("NhwcFusedConv", inputs, kernel_shape=[3, 3], group=2, activation="Relu", reference=reference, rtol=1e-4)


def test_fused_gemm_of_unknown_activation_raises() -> None:
    with pytest.raises(ParseError, match="expected an activation among"):
        check("FusedGemm", [Input(f(3, 4), "n 4"), f(4, 5)], activation="Maxout", reference=lambda: [])
