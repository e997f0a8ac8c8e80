"""Attention of com.microsoft, against ONNX Runtime, or NumPy where it has no kernel for processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import (
    Array,
    Input,
    by_onnxruntime,
    check,
    compare,
    f,
    model_of,
    whole,
)

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
SIZES = [(1, 1), (2, 5), (3, 7)]


def ones_of_length(b: int, n: int) -> Array:
    """A mask (b, n) of 1 up to a length of at least 1, then 0."""
    return (np.arange(n) < whole(1, n + 1, b, 1)).astype(np.int32)


@pytest.mark.pairwise
@pytest.mark.parametrize("b, n", SIZES)
@pytest.mark.parametrize("mask", [None, "raw", "rows", "ends", "starts"])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_masks(b: int, n: int, mask: str | None, causal: int) -> None:
    masks: dict[str | None, Input | None] = {
        None: None,
        "raw": Input(ones_of_length(b, n), "b n"),
        "rows": Input(whole(0, 2, b, n, n, dtype=np.int32), "b n n"),
        "ends": Input(whole(1, n + 1, b, dtype=np.int32), "b"),
        "starts": Input(np.concatenate([np.full(b, n), whole(0, n, b)]).astype(np.int32), str(2 * b)),
    }
    x = Input(f(b, n, 12), f"{b if mask == 'starts' else 'b'} n 12")
    # a row that sees nothing loses digits by its -10000
    close = {"rtol": 1e-3, "atol": 1e-3} if mask == "rows" or (mask == "starts" and causal) else CLOSE
    check("Attention", [x, f(12, 24), f(24), masks[mask]], num_heads=2, unidirectional=causal, **close)


@pytest.mark.parametrize(
    "b, ends", [(2, [2, 4]), (2, [5, 3, 0, 1]), (2, [2, 5, 0, 2, 5, 0, 2, 5]), (1, [4]), (1, [4, 2])]
)
@pytest.mark.parametrize("constant", [False, True])
def test_attention_mask_of_one_dim_is_read_by_the_size_at_the_call(b: int, ends: list[int], constant: bool) -> None:
    """Ends of the rows; ends, then starts; lengths, then offsets."""
    mask = np.array(ends, np.int32)
    inputs = [Input(f(b, 5, 12), "b n 12"), f(12, 24), f(24), mask if constant else Input(mask, "k")]
    check("Attention", inputs, num_heads=2, **CLOSE)


def test_attention_without_bias_of_other_value_size_scale_and_filter() -> None:
    x = Input(f(2, 5, 12), "b n 12")
    inputs = [x, f(12, 8 + 8 + 6), f(22), Input(ones_of_length(2, 5), "b n"), None, Input(f(2, 2, 5, 5), "b 2 n n")]
    check("Attention", inputs, num_heads=2, qkv_hidden_sizes=[8, 8, 6], scale=0.4, mask_filter_value=-50.0, **CLOSE)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_past(past: int, causal: int) -> None:
    mask = Input(ones_of_length(2, past + 5), "b t")
    inputs = [Input(f(2, 5, 12), "b n 12"), f(12, 24), f(24), mask, Input(f(2, 2, 2, past, 4), "2 b 2 p 4")]
    check("Attention", inputs, 2, num_heads=2, unidirectional=causal, **CLOSE, bounds={"p": (0, 9)})


@pytest.mark.pairwise
@pytest.mark.parametrize("b, n", SIZES)
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("bias", [None, f(32)], ids=["none", "bias"])
@pytest.mark.parametrize("mask", [None, "raw", "ends"])
def test_multi_head_attention_of_separate_keys(b: int, n: int, m: int, bias: Array | None, mask: str | None) -> None:
    padding = {
        None: None,
        "raw": Input(ones_of_length(b, m), "b m"),
        "ends": Input(whole(1, m + 1, b, dtype=np.int32), "b"),
    }
    inputs = [
        Input(f(b, n, 8), "b n 8"), Input(f(b, m, 8), "b m 8"), Input(f(b, m, 16), "b m 16"), bias, padding[mask],
        Input(f(1, 2, n, m), "1 2 n m"),
    ]  # fmt: skip
    check("MultiHeadAttention", inputs, num_heads=2, **CLOSE)


@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_of_packed_inputs(causal: int) -> None:
    """ONNX Runtime has packed queries for GPUs only: the same with separate inputs."""
    packed = f(2, 5, 2, 3, 4)
    proto, arrays = model_of("MultiHeadAttention", [Input(packed, "b n 2 3 4")], num_heads=2, unidirectional=causal)
    parts = [Input(packed[:, :, :, p].reshape(2, 5, 8), "b n 8") for p in range(3)]
    plain, same = model_of("MultiHeadAttention", parts, num_heads=2, unidirectional=causal)
    compare(proto, arrays, by_onnxruntime(plain, same), **CLOSE)
    query, both = f(2, 5, 8), f(2, 3, 2, 2, 4)
    proto, arrays = model_of("MultiHeadAttention", [Input(query, "b n 8"), Input(both, "b m 2 2 4")], num_heads=2)
    parts = [Input(query, "b n 8"), *(Input(both[:, :, :, p].reshape(2, 3, 8), "b m 8") for p in range(2))]
    plain, same = model_of("MultiHeadAttention", parts, num_heads=2)
    compare(proto, arrays, by_onnxruntime(plain, same), **CLOSE)


def test_multi_head_attention_of_keys_by_heads() -> None:
    inputs = [Input(f(2, 5, 8), "b n 8"), Input(f(2, 2, 3, 4), "b 2 m 4"), Input(f(2, 2, 3, 4), "b 2 m 4")]
    check("MultiHeadAttention", inputs, num_heads=2, **CLOSE)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_past(past: int, causal: int) -> None:
    row = [Input(f(2, 5, 8), "b n 8") for _ in range(3)]
    cache = [Input(f(2, 2, past, 4), "b 2 p 4") for _ in range(2)]
    check(
        "MultiHeadAttention",
        [*row, None, None, None, *cache],
        3,
        num_heads=2,
        unidirectional=causal,
        **CLOSE,
        bounds={"p": (0, 9)},
    )


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_rotary_embedding(interleaved: int, offset: bool, by_heads: bool, partial: bool) -> None:
    b, n, heads, size, pairs = 2, 5, 3, 8, 2 if partial else 4
    x = Input(f(b, heads, n, size), "b 3 n 8") if by_heads else Input(f(b, n, heads * size), "b n 24")
    place = Input(np.array([2]), "1") if offset else Input(whole(0, 9, b, n), "b n")
    more = {"num_heads": heads, "rotary_embedding_dim": 2 * pairs} if partial else {}
    check("RotaryEmbedding", [x, place, f(9, pairs), f(9, pairs)], interleaved=interleaved, **more, **CLOSE)


@pytest.mark.parametrize("more", [{"scale": 2.0}, {"is_packed_batching": 1}])
def test_rotary_embedding_attributes_without_effect(more: dict[str, Any]) -> None:
    inputs = [Input(f(2, 5, 24), "b n 24"), Input(whole(0, 9, 2, 5), "b n"), f(9, 4), f(9, 4)]
    check("RotaryEmbedding", inputs, **more, **CLOSE)


def grouped(
    b: int, n: int, past: int, filled: int, packed: bool = False, rotary: bool = False, by_data: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a GroupQueryAttention of 4 heads and 2 shared ones of size 16, whose cache holds `filled` positions.

    by_data: whether the total number of positions is an input of the model."""
    total = np.array(filled + n, np.int32)
    q = Input(f(b, n, 128), "b n 128") if packed else Input(f(b, n, 64), "b n 64")
    kv: list[Any] = [None, None] if packed else [Input(f(b, n, 32), "b n 32") for _ in range(2)]
    cache = [Input(f(b, 2, past, 16), "b 2 p 16") for _ in range(2)]
    lengths = [Input(np.full(b, total - 1, np.int32), "b"), Input(total, "") if by_data else total]
    tables: list[Any] = [f(32, 8), f(32, 8)] if rotary else [None, None]
    return [q, *kv, *cache, *lengths, *tables], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": int(rotary)}


def check_grouped(inputs: list[Any], attributes: dict[str, Any], cache: bool = True, lowered: bool = False) -> None:
    """Compare a GroupQueryAttention. Without results of the cache, ONNX Runtime ignores the cache.

    cache: whether to compare the cache, whose rows behind the filled ones are not specified."""
    proto, arrays = model_of("GroupQueryAttention", inputs, 3, **attributes)
    wanted = by_onnxruntime(proto, arrays)
    wanted[1:] = wanted[1:] if cache else [None, None]
    compare(proto, arrays, wanted, **CLOSE, bounds={"p": (0, 32)}, lowered=lowered)


@pytest.mark.parametrize("n, past", [(5, 0), (1, 4)])
def test_group_query_attention_total_from_data(n: int, past: int) -> None:
    inputs, attributes = grouped(2, n, past, past, rotary=True, by_data=True)
    check_grouped(inputs, attributes)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "b, n, past, filled", [(1, 1, 0, 0), (2, 5, 0, 0), (1, 3, 4, 4), (2, 1, 7, 7), (2, 1, 7, 3), (1, 5, 16, 4)]
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_group_query_attention(b: int, n: int, past: int, filled: int, packed: bool, rotary: bool) -> None:
    inputs, attributes = grouped(b, n, past, filled, packed, rotary)
    check_grouped(inputs, attributes, past <= filled, lowered=packed and rotary)


@pytest.mark.parametrize("attributes", [
    {"local_window_size": 2}, {"softcap": 1.5}, {"scale": 0.3}, {"smooth_softmax": 1}, {"rotary_interleaved": 1, "do_rotary": 1},
])  # fmt: skip
@pytest.mark.parametrize("b, n, past, filled", [(2, 5, 0, 0), (1, 3, 4, 4), (2, 1, 7, 5)])
def test_group_query_attention_attributes(attributes: dict[str, Any], b: int, n: int, past: int, filled: int) -> None:
    inputs, more = grouped(b, n, past, filled, rotary=True)
    check_grouped(inputs, {**more, **attributes}, past <= filled)


@pytest.mark.parametrize("n, past", [(5, 0), (1, 4)])
def test_group_query_attention_lengths_by_row(n: int, past: int) -> None:
    inputs, more = grouped(3, n, past, past, rotary=True)
    if past:
        inputs[5] = Input(np.array([past, past - 1, past - 2], np.int32), "b")
    check_grouped(inputs, more, cache=not past)


@pytest.mark.parametrize("extra", ["bias", "sink", "positions", "both"])
@pytest.mark.parametrize("b, n, past", [(2, 5, 0), (1, 1, 4)])
def test_group_query_attention_optional_inputs(extra: str, b: int, n: int, past: int) -> None:
    inputs, more = grouped(b, n, past, past, rotary=True)
    bias, sink, place = Input(f(b, 1, n, past + n), f"b 1 n {past + n}"), f(4), None
    if extra == "positions":
        place = Input(np.broadcast_to(np.arange(past, past + n), (b, n)).copy(), "b n")
    inputs += [place, bias if extra in ("bias", "both") else None, sink if extra in ("sink", "both") else None]
    check_grouped(inputs, more)


def resident(total: int, capacity: int, window: int) -> int:
    """Rows of a window's cache that the documentation of ONNX Runtime states."""
    evicted = capacity - window + 1
    return total if total <= capacity else total + evicted * ((capacity - total) // evicted)


WINDOWS = [
    (2, 5, 0, 4, 4),
    (1, 9, 0, 4, 4),
    (1, 3, 4, 4, 4),
    (2, 1, 7, 4, 4),
    (2, 1, 3, 6, 4),
    (1, 5, 9, 6, 3),
    (1, 6, 2, 8, 3),
]


@pytest.mark.parametrize("b, n, before, capacity, window", WINDOWS)
@pytest.mark.parametrize("extra", ["", "sink", "bias"])
def test_group_query_attention_cache_of_a_window(
    b: int, n: int, before: int, capacity: int, window: int, extra: str
) -> None:
    inputs, more = grouped(b, n, capacity, before, rotary=True)
    bias = Input(f(b, 1, n, before + n), "b 1 n t") if extra == "bias" else None
    inputs += [None, bias, f(4) if extra == "sink" else None]
    proto, arrays = model_of("GroupQueryAttention", inputs, 3, **more, sliding_window_cache=1, local_window_size=window)
    wanted = by_onnxruntime(proto, arrays)
    results = run_function(load_onnx(proto), "main", arrays)
    kept = resident(before + n, capacity, window)
    np.testing.assert_allclose(results[0], wanted[0], **CLOSE)
    for got, want in zip(results[1:], wanted[1:], strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got[:, :, :kept], want[:, :, :kept], **CLOSE)


def test_group_query_attention_cache_of_a_window_over_several_steps() -> None:
    """Rows of several lengths: each step adds a position to each row, and evicts at other steps of the rows."""
    cache: list[Any] = []
    for step in range(4):
        inputs, more = grouped(2, 1, 5, 6 + step, rotary=True)
        inputs[3:5] = cache or inputs[3:5]
        inputs[5] = Input(np.array([6 + step, 3 + step], np.int32), "b")
        proto, arrays = model_of("GroupQueryAttention", inputs, 3, **more, sliding_window_cache=1, local_window_size=4)
        found, wanted = run_function(load_onnx(proto), "main", arrays), by_onnxruntime(proto, arrays)
        np.testing.assert_allclose(found[0], wanted[0], **CLOSE)
        for row, total in enumerate((7 + step, 4 + step)):
            kept = resident(total, 5, 4)
            for got, want in zip(found[1:], wanted[1:], strict=True):
                np.testing.assert_allclose(got[row, :, :kept], want[row, :, :kept], **CLOSE)
        cache = [Input(t, "b 2 p 16") for t in found[1:]]


def test_group_query_attention_cache_below_the_window_is_refused() -> None:
    inputs, more = grouped(2, 1, 3, 3)
    proto, _ = model_of("GroupQueryAttention", inputs, 3, **more, sliding_window_cache=1, local_window_size=4)
    with pytest.raises(ParseError, match="at least local_window_size 4 rows, got 3"):
        load_onnx(proto, {"p": (3, 3)})


def test_group_query_attention_norms_of_heads() -> None:
    """ONNX Runtime's kernel for processors refuses them: the same without, of normalised queries and keys."""
    inputs, more = grouped(2, 5, 0, 0)
    q, k = (f(16) for _ in range(2))
    proto, arrays = model_of("GroupQueryAttention", [*inputs, None, None, None, None, None, q, k], 3, **more)

    def normed(x: Array, gamma: Array) -> Array:
        v = x.reshape(*x.shape[:2], -1, 16).astype(np.float64)
        return (v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * gamma).astype(np.float32).reshape(x.shape)

    plain, same = model_of("GroupQueryAttention", inputs, 3, **more)
    same[0], same[1] = normed(same[0], q), normed(same[1], k)
    compare(proto, arrays, by_onnxruntime(plain, same), **CLOSE, bounds={"p": (0, 32)})


@pytest.mark.parametrize("op, attributes, why", [
    ("Attention", {"num_heads": 2, "past_present_share_buffer": 1}, "past_present_share_buffer"),
    ("Attention", {"num_heads": 2, "do_rotary": 1}, "do_rotary"),
])  # fmt: skip
def test_attention_of_unsupported_kind_raises(op: str, attributes: dict[str, Any], why: str) -> None:
    with pytest.raises(ParseError, match=why):
        check(op, [Input(f(2, 5, 12), "b n 12"), f(12, 24), f(24)], **attributes, reference=lambda: [])


def test_multi_head_attention_dims_of_other_names_are_required_to_agree() -> None:
    """Batches, positions and the heads of the bias have names of their own; the bias has one row of heads at this call."""
    q, k, v = Input(f(2, 3, 8), "b n 8"), Input(f(2, 4, 8), "c m 8"), Input(f(2, 4, 6), "d k 6")
    inputs = [q, k, v, None, Input(ones_of_length(2, 4), "e t"), Input(f(2, 1, 3, 4), "g h i j")]
    check("MultiHeadAttention", inputs, num_heads=2, **CLOSE)


def test_group_query_attention_dims_of_other_names_are_required_to_agree() -> None:
    inputs, more = grouped(2, 1, 3, 3)
    names = ("b n 64", "c i 32", "d j 32", "e 2 p 16", "g 2 q 16")
    inputs[:5] = [Input(a.array, dims) for a, dims in zip(inputs[:5], names, strict=True)]
    inputs += [None, Input(f(2, 1, 1, 4), "h u v w")]
    check_grouped(inputs, more)
