"""Normalisations of com.microsoft, against ONNX Runtime, or NumPy where it has no kernel for processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, by_onnxruntime, check, compare, f, model_of, whole

from relax_tune.errors import ParseError

SIZES = [(1, 1), (2, 5), (3, 7)]


@pytest.mark.parametrize("b, n", SIZES)
@pytest.mark.parametrize("beta, bias", [(True, True), (True, False), (False, True), (False, False)])
def test_skip_layer_normalization(b: int, n: int, beta: bool, bias: bool) -> None:
    x, skip = Input(f(b, n, 8), "b n 8"), Input(f(b, n, 8), "b n 8")
    more = [f(8) if given else None for given in (beta, bias)]
    proto, inputs = model_of("SkipLayerNormalization", [x, skip, f(8), *more], 4, epsilon=1e-5)
    del proto.graph.output[1:3]
    proto.graph.node[0].output[1] = proto.graph.node[0].output[2] = ""
    compare(proto, inputs, by_onnxruntime(proto, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims, names", [((1, 5, 8), "1 n 8"), ((5, 8), "n 8")])
def test_skip_layer_normalization_skip_without_batch(dims: tuple[int, ...], names: str) -> None:
    inputs = [Input(f(2, 5, 8), "b n 8"), Input(f(*dims), names), f(8), f(8)]
    check("SkipLayerNormalization", inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_skip_normalization_saved_moments(op: str) -> None:
    """ONNX Runtime gives them only when it trains: NumPy."""
    x, skip, gamma = f(2, 5, 8), f(2, 5, 8), f(8)
    mean_removed = op == "SkipLayerNormalization"
    total = (x + skip).astype(np.float64)
    mean = total.mean(-1, keepdims=True) if mean_removed else np.zeros((2, 5, 1))
    inverse = 1 / np.sqrt(((total - mean) ** 2).mean(-1, keepdims=True) + 1e-12)
    y = (total - mean) * inverse * gamma
    proto, inputs = model_of(op, [Input(x, "b n 8"), Input(skip, "b n 8"), gamma], 4)
    wanted = [v.astype(np.float32) for v in (y, mean, inverse, total)]
    if not mean_removed:
        del proto.graph.output[1], wanted[1]
        proto.graph.node[0].output[1] = ""
    compare(proto, inputs, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("b, n", SIZES)
@pytest.mark.parametrize("bias", [None, f(8)], ids=["none", "bias"])
def test_skip_simplified_layer_normalization(b: int, n: int, bias: Array | None) -> None:
    x, skip = Input(f(b, n, 8), "b n 8"), Input(f(b, n, 8), "b n 8")
    check("SkipSimplifiedLayerNormalization", [x, skip, f(8), bias], epsilon=1e-5, rtol=1e-4)


@pytest.mark.parametrize("axis, gamma", [(-1, (8,)), (2, (8,)), (1, (5, 8))])
def test_simplified_layer_normalization_of_the_standard_domain(axis: int, gamma: tuple[int, ...]) -> None:
    dims = "b n 8" if len(gamma) == 1 else "b 5 8"
    inputs = [Input(f(2, 5, 8), dims), f(*gamma)]
    proto, arrays = model_of("SimplifiedLayerNormalization", inputs, 2, domain="", axis=axis, epsilon=1e-5)
    compare(proto, arrays, by_onnxruntime(proto, arrays), rtol=1e-4)


@pytest.mark.parametrize("b, n", SIZES)
@pytest.mark.parametrize("segments, mask, positions", [
    (True, False, None), (False, False, None), (True, True, None), (True, True, "batch"), (False, True, "one"),
])  # fmt: skip
def test_embed_layer_normalization(b: int, n: int, segments: bool, mask: bool, positions: str | None) -> None:
    def ids(high: int) -> Input:
        return Input(whole(0, high, b, n, dtype=np.int32), "b n")

    place = (
        None
        if positions is None
        else Input(
            whole(0, 9, b if positions == "batch" else 1, n, dtype=np.int32), "b n" if positions == "batch" else "1 n"
        )
    )
    arguments = [
        ids(11), ids(2) if segments else None, f(11, 8), f(9, 8), f(2, 8) if segments else None, f(8), f(8),
        ids(2) if mask else None, place,
    ]  # fmt: skip
    check("EmbedLayerNormalization", arguments, 3, epsilon=1e-5, rtol=1e-4, atol=1e-5, bounds={"n": (1, 9)})


def grouped(x: Array, groups: int, gamma: Array, beta: Array, eps: float, silu: bool) -> Array:
    n, c = x.shape[0], x.shape[-1]
    v = x.astype(np.float64).reshape(n, -1, groups, c // groups)
    mean = v.mean((1, 3), keepdims=True)
    y = ((v - mean) / np.sqrt(((v - mean) ** 2).mean((1, 3), keepdims=True) + eps)).reshape(x.shape) * gamma + beta
    return (y / (1 + np.exp(-y)) if silu else y).astype(np.float32)


@pytest.mark.parametrize("silu", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_group_norm(silu: int, last: int) -> None:
    x, gamma, beta = f(2, 3, 5, 8), f(8), f(8)
    wanted = grouped(x, 4, gamma, beta, 1e-5, bool(silu))
    given = Input(x, "b h w 8") if last else Input(np.moveaxis(x, -1, 1), "b 8 h w")
    results = [wanted if last else np.moveaxis(wanted, -1, 1)]
    check("GroupNorm", [given, gamma, beta], groups=4, activation=silu, channels_last=last, rtol=1e-4, atol=1e-5,
          reference=lambda: results)  # fmt: skip


@pytest.mark.parametrize("dims, names", [((2, 3, 5, 8), "b h w 8"), ((2, 1, 1, 8), "b 1 1 8"), ((2, 8), "b 8")])
def test_skip_group_norm(dims: tuple[int, ...], names: str) -> None:
    x, skip, bias, gamma, beta = f(2, 3, 5, 8), f(*dims), f(8), f(8), f(8)
    total = x + (skip.reshape(2, 1, 1, 8) if skip.ndim == 2 else skip) + bias
    results = [grouped(total, 2, gamma, beta, 1e-5, True), total]
    arguments = [Input(x, "b h w 8"), gamma, beta, Input(skip, names), bias]
    check("SkipGroupNorm", arguments, 2, groups=2, activation=1, rtol=1e-4, atol=1e-5, reference=lambda: results)


def test_group_norm_of_unknown_channels_has_as_many_as_the_scale() -> None:
    x, skip, gamma, beta = f(2, 3, 5, 8), f(2, 8), f(8), f(8)
    total = x + skip.reshape(2, 1, 1, 8)
    results = [grouped(total, 2, gamma, beta, 1e-5, False), total]
    arguments = [Input(x, "b h w c"), gamma, Input(beta, "d"), Input(skip, "b c")]
    check("SkipGroupNorm", arguments, 2, groups=2, activation=0, rtol=1e-4, atol=1e-5, reference=lambda: results)


def test_group_norm_of_symbolic_channels() -> None:
    x, gamma, beta = f(2, 3, 5, 8), f(8), f(8)
    arguments = [Input(x, "b h w c"), Input(gamma, "c"), Input(beta, "c")]
    wanted = [grouped(x, 4, gamma, beta, 1e-5, False)]
    check("GroupNorm", arguments, groups=4, activation=0, rtol=1e-4, atol=1e-5, reference=lambda: wanted)


def test_mean_of_a_norm_without_mean_raises() -> None:
    inputs = [Input(f(2, 5, 8), "b n 8"), Input(f(2, 5, 8), "b n 8"), f(8)]
    with pytest.raises(ParseError, match="result mean"):
        check("SkipSimplifiedLayerNormalization", inputs, 2, reference=lambda: [])


def test_group_norm_of_indivisible_groups_raises() -> None:
    arguments: list[Any] = [Input(f(2, 3, 5, 8), "b h w 8"), f(8), f(8)]
    with pytest.raises(ParseError, match="expected groups that divide the channels"):
        check("GroupNorm", arguments, groups=3, activation=0, reference=lambda: [])
