"""Attention without padding: ONNX Runtime has it for GPUs only, so the same with padding is ONNX Runtime's or NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, by_onnxruntime, check, compare, f, model_of

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
LENGTHS = [[1], [3, 5, 2], [7, 1], [2, 2]]


def packing(lengths: list[int], n: int) -> tuple[Array, Array, Array]:
    """Return the places of tokens and padding (b, n), the sums of lengths, and the places of tokens alone."""
    inside = (np.arange(n) < np.array(lengths)[:, None]).reshape(-1)
    places = np.concatenate([inside.nonzero()[0], (~inside).nonzero()[0]]).astype(np.int32).reshape(len(lengths), n)
    return places, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), inside.nonzero()[0]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_remove_padding(lengths: list[int]) -> None:
    b, n = len(lengths), max(lengths) + 1
    x, (places, sums, inside) = f(b, n, 4), packing(lengths, max(lengths) + 1)
    wanted = [x.reshape(-1, 4)[inside], places, sums, np.array([max(lengths)], np.int32)]
    inputs = [Input(x, "b n 4"), Input(np.array(lengths, np.int32), "b")]
    check("RemovePadding", inputs, 4, reference=lambda: wanted)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_restore_padding(lengths: list[int]) -> None:
    b, n = len(lengths), max(lengths) + 1
    places, _, inside = packing(lengths, n)
    x, wanted = f(len(inside), 4), np.zeros((b * n, 4), np.float32)
    wanted[inside] = x
    check("RestorePadding", [Input(x, "t 4"), Input(places, "b n")], reference=lambda: [wanted.reshape(b, n, 4)])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sizes", [None, [8, 8, 6]])
def test_packed_attention(lengths: list[int], sizes: list[int] | None) -> None:
    b, n = len(lengths), max(lengths)
    x, (places, sums, inside) = f(b, n, 12), packing(lengths, max(lengths))
    weights, bias, added = f(12, sum(sizes or [24])), f(sum(sizes or [24])), f(b, 2, n, n)
    attributes: dict[str, Any] = {"num_heads": 2, **({"qkv_hidden_sizes": sizes} if sizes else {})}
    inputs = [Input(x.reshape(-1, 12)[inside], "t 12"), weights, bias, Input(places, "b n"), Input(sums, str(b + 1))]
    inputs[3] = Input(places, f"{b} n")
    proto, arrays = model_of("PackedAttention", [*inputs, Input(added, f"{b} 2 n n")], **attributes)
    padded = [Input(x, "b n 12"), weights, bias, Input(np.array(lengths, np.int32), "b"), None, Input(added, "b 2 n n")]
    (y,) = by_onnxruntime(*model_of("Attention", padded, **attributes))
    compare(proto, arrays, [y.reshape(b * n, -1)[inside]], **CLOSE)


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bias", [None, f(24)], ids=["none", "bias"])
def test_packed_multi_head_attention(lengths: list[int], together: bool, bias: Array | None) -> None:
    b, n = len(lengths), max(lengths)
    x, (places, sums, inside) = f(b, n, 2, 3, 4), packing(lengths, max(lengths))
    tokens = x.reshape(-1, 2, 3, 4)[inside]
    parts: list[Any] = [Input(tokens, "t 2 3 4"), None, None]
    if not together:
        parts = [Input(np.ascontiguousarray(tokens[:, :, p]).reshape(-1, 8), "t 8") for p in range(3)]
    inputs = [*parts, bias, Input(places, f"{b} n"), Input(sums, str(b + 1))]
    proto, arrays = model_of("PackedMultiHeadAttention", inputs, num_heads=2)
    padded = [Input(np.ascontiguousarray(x[:, :, :, p]).reshape(b, n, 8), "b n 8") for p in range(3)]
    same, rows = model_of("MultiHeadAttention", [*padded, bias, Input(np.array(lengths, np.int32), "b")], num_heads=2)
    compare(proto, arrays, [by_onnxruntime(same, rows)[0].reshape(b * n, 8)[inside]], **CLOSE)


def test_packed_multi_head_attention_of_very_low_scores_ignores_padding() -> None:
    """The only score of the first row, -40,000, is below what the masks of padded attention add."""
    q, k, v = np.array([[200.0], [1.0], [1.0]], "f4"), np.array([[-200.0], [1.0], [1.0]], "f4"), f(3, 1)
    places, sums, _ = packing([1, 2], 2)
    inputs = [*(Input(a, "t 1") for a in (q, k, v)), None, Input(places, "2 n"), Input(sums, "3")]
    wanted = np.stack([v[0], (v[1] + v[2]) / 2, (v[1] + v[2]) / 2])
    check("PackedMultiHeadAttention", inputs, num_heads=1, reference=lambda: [wanted])
