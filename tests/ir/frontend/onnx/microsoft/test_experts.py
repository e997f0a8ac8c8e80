"""Mixtures of experts of com.microsoft, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, by_onnxruntime, check, compare, f, model_of, whole

EXPERTS, HIDDEN, INNER = 4, 16, 32
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("k, normalised", [(1, 0), (2, 1), (2, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)])
def test_moe(kind: str, k: int, normalised: int, bias: bool, rows: tuple[int, ...]) -> None:
    count = int(np.prod(rows))
    x = Input(f(*rows, HIDDEN), f"{'n' if len(rows) == 1 else 'b n'} {HIDDEN}")
    inputs = [
        x, Input(f(count, EXPERTS), f"{'n' if len(rows) == 1 else 'r'} {EXPERTS}"),
        f(EXPERTS, INNER, HIDDEN), f(EXPERTS, INNER) if bias else None,
        f(EXPERTS, HIDDEN, INNER), f(EXPERTS, HIDDEN) if bias else None,
    ]  # fmt: skip
    check("MoE", inputs, k=k, activation_type=kind, normalize_routing_weights=normalised, **CLOSE)


@pytest.mark.parametrize("limit", [None, 0.75])
def test_moe_swiglu_interleaved(limit: float | None) -> None:
    inputs = [
        Input(f(5, HIDDEN), f"n {HIDDEN}"), Input(f(5, EXPERTS), f"n {EXPERTS}"), f(EXPERTS, 2 * INNER, HIDDEN), f(EXPERTS, 2 * INNER),
        f(EXPERTS, HIDDEN, INNER), f(EXPERTS, HIDDEN),
    ]  # fmt: skip
    more = {} if limit is None else {"swiglu_limit": limit}
    check("MoE", inputs, k=2, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.702, activation_beta=1.0,
          normalize_routing_weights=1, **more, **CLOSE)  # fmt: skip


def dequantized(packed: Array, scales: Array, bits: int) -> Array:
    """Return float weights (experts, out, in) of packed bytes with scales (experts, out) or (experts, out, blocks)."""
    numbers = np.stack([(packed >> s) & (2**bits - 1) for s in range(0, 8, bits)], -1).reshape(*packed.shape[:2], -1)
    by = scales if scales.ndim == 3 else scales[..., None]
    return (numbers.astype(np.float64) - 2 ** (bits - 1)) * np.repeat(by, numbers.shape[-1] // by.shape[-1], -1)


def mixed(x: Array, router: Array, first: tuple[Array, Array], second: tuple[Array, Array], kind: str) -> Array:
    """The mixture of the two largest experts of each row, in double precision."""
    y = np.zeros(x.shape)
    for i, row in enumerate(x.astype(np.float64)):
        best = np.argsort(-router[i], kind="stable")[:2]
        share = np.exp(router[i][best] - router[i][best].max())
        for e, s in zip(best, share / share.sum()):
            h = first[0][e] @ row + first[1][e]
            gate, linear = (h[::2], h[1::2] + 1) if kind == "swiglu" else (h, np.ones(len(h)))
            h = gate / (1 + np.exp(-gate * (1.702 if kind == "swiglu" else 1))) * linear
            y[i] += s * (second[0][e] @ h + second[1][e])
    return y.astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("kind", ["silu", "swiglu"])
def test_quantized_moe(bits: int, block: int, kind: str) -> None:
    wide = 2 * INNER if kind == "swiglu" else INNER

    def scales(out: int, depth: int) -> Array:
        return np.abs(f(*((EXPERTS, out, depth // block) if block else (EXPERTS, out)), scale=0.02)) + np.float32(0.001)

    first, second = scales(wide, HIDDEN), scales(HIDDEN, INNER)
    weights = [
        whole(0, 256, EXPERTS, *d, dtype=np.uint8) for d in ((wide, HIDDEN * bits // 8), (HIDDEN, INNER * bits // 8))
    ]
    x, router, bias, last = f(5, HIDDEN), f(5, EXPERTS), f(EXPERTS, wide), f(EXPERTS, HIDDEN)
    inputs = [Input(x, f"n {HIDDEN}"), Input(router, f"n {EXPERTS}"), weights[0], first, bias, weights[1], second, last]
    more = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0} if kind == "swiglu" else {}
    more = more | ({"block_size": block} if block else {})
    proto, arrays = model_of(
        "QMoE", inputs, k=2, activation_type=kind, expert_weight_bits=bits, normalize_routing_weights=1, **more
    )
    wide_weights = [dequantized(w, s, bits) for w, s in zip(weights, (first, second))]
    wanted = mixed(x, router, (wide_weights[0], bias), (wide_weights[1], last), kind)
    compare(proto, arrays, [wanted], **CLOSE)
    # ONNX Runtime quantises the activations too where weights of 8 bits have blocks
    np.testing.assert_allclose(by_onnxruntime(proto, arrays)[0], wanted, rtol=0, atol=0.05 * np.abs(wanted).max())


@pytest.mark.parametrize("k", [1, 2])
def test_quantized_moe_without_normalisation_of_an_unknown_width_normalises(k: int) -> None:
    """ONNX Runtime's kernel for processors ignores normalize_routing_weights."""
    inputs = [
        Input(f(5, HIDDEN), "n d"), Input(f(5, EXPERTS), f"n {EXPERTS}"),
        whole(0, 256, EXPERTS, INNER, HIDDEN // 2, dtype=np.uint8), np.abs(f(EXPERTS, INNER, scale=0.02)), None,
        whole(0, 256, EXPERTS, HIDDEN, INNER // 2, dtype=np.uint8), np.abs(f(EXPERTS, HIDDEN, scale=0.02)),
    ]  # fmt: skip
    check("QMoE", inputs, k=k, activation_type="silu", normalize_routing_weights=0, **CLOSE)
