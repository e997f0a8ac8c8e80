"""DynamicQuantizeLSTM, against NumPy in double precision with the same quantisation, and ONNX Runtime.

ONNX Runtime quantises the states of the rows that one thread has, so its results differ by some steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, by_onnxruntime, compare, f, model_of, whole


def seen(x: Array) -> Array:
    """Quantise to unsigned bytes by the range with 0, and back."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((high - low) / 255 or 1)
    zero = np.rint(-low / scale)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


def lstm(x: Array, weights: Array, state: Array, bias: Array, start: tuple[Array, Array], back: bool) -> list[Array]:
    """One direction: gates i, o, f, c. weights (in, 4h), state (h, 4h), bias (8h,)."""
    hidden = state.shape[0]
    h, c = (s.astype(np.float64) for s in start)
    projected = seen(x) @ weights + bias[: 4 * hidden] + bias[4 * hidden :]
    rows = []
    for t in range(len(x))[:: -1 if back else 1]:
        gates = projected[t] + seen(h) @ state
        i, o, forget, new = np.split(gates, 4, axis=1)
        i, o, forget = (1 / (1 + np.exp(-g)) for g in (i, o, forget))
        c = forget * c + i * np.tanh(new)
        h = o * np.tanh(c)
        rows.append(h)
    return [np.stack(rows[:: -1 if back else 1]), h, c]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("directions", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("n, b", [(1, 1), (5, 3)])
def test_dynamic_quantize_lstm(kind: Any, columns: bool, directions: str, n: int, b: int) -> None:
    d, size, hidden = 1 + (directions == "bidirectional"), 6, 8
    low, high = (0, 128) if kind is np.uint8 else (-64, 64)
    weights = [whole(low, high, d, k, 4 * hidden, dtype=kind) for k in (size, hidden)]
    scales = [
        np.abs(f(d, *((4 * hidden,) if columns else ()))) * np.float32(0.01) + np.float32(0.001) for _ in range(2)
    ]
    zeros = [np.full(s.shape, 64 if kind is np.uint8 else 0, kind) for s in scales]
    x, bias, h, c = f(n, b, size), f(d, 8 * hidden), f(d, b, hidden, scale=0.3), f(d, b, hidden)
    inputs = [
        Input(x, f"n b {size}"), *weights, bias, None, Input(h, f"{d} b {hidden}"), Input(c, f"{d} b {hidden}"), None,
        scales[0], zeros[0], scales[1], zeros[1],
    ]  # fmt: skip
    proto, arrays = model_of("DynamicQuantizeLSTM", inputs, 3, hidden_size=hidden, direction=directions)
    numbers = [
        (w.astype(np.float64) - z.reshape(d, 1, -1)) * s.reshape(d, 1, -1) for w, z, s in zip(weights, zeros, scales)
    ]
    back = [directions == "reverse"] if d == 1 else [False, True]
    each = [lstm(x, numbers[0][k], numbers[1][k], bias[k], (h[k], c[k]), back[k]) for k in range(d)]
    wanted = [np.stack([e[0] for e in each], 1), np.stack([e[1] for e in each]), np.stack([e[2] for e in each])]
    wanted = [v.astype(np.float32) for v in wanted]
    # a rounding to another step moves a result
    compare(proto, arrays, wanted, rtol=0, atol=2e-2, lowered=False)
    for got, want in zip(by_onnxruntime(proto, arrays), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-2)


def test_every_operator_of_the_domain_is_tested() -> None:
    from pathlib import Path

    from relax_tune.ir.frontend.onnx.importer import MICROSOFT

    tests = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    assert [op for op in MICROSOFT if f'"{op}"' not in tests] == []
