"""ONNX operators whose sizes data decide, with symbolic dims: in the interpreter, built for C, against NumPy and greedy choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import Array, model, reference
from tests.support.effort import EFFORT
from tests.support.programs import agree, opened

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

BOXES = """(float[b, n, 4] boxes, float[b, c, n] scores, int64[1] most, float[1] overlap, float[1] least) => (int64[k, 3] y)
  { y = NonMaxSuppression(boxes, scores, most, overlap, least) }"""
THEN = """(float[n, m] x) => (float[k] y, float[k, k] z)
  { i = NonZero(x) t = Transpose(i) g = GatherND(x, t) y = Relu(g) axes = Constant<value_ints = [1]>()
    u = Unsqueeze(g, axes) v = Transpose(u) w = MatMul(u, v) z = Softmax(w) }"""


def whole(*shape: int, seed: int = 0, low: int = -2, high: int = 3) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def compare(text: str, calls: Sequence[tuple[Sequence[Array], Sequence[Array]]], built: bool = False) -> None:
    """Compare a program's results with wanted ones in the interpreter; where `built`, those for C with the interpreter's."""
    module = load_onnx(model(text))
    verify(module)
    for args, wanted in calls:
        found = run_function(module, "main", args)
        given: Sequence[Any] = found if isinstance(found, tuple) else (found,)
        for got, want in zip(given, wanted, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5)
    if built or EFFORT == "heavy":
        with opened("c") as device:
            agree(module, device, *(args for args, _ in calls))


def test_nonzero_of_symbolic_dims() -> None:
    arrays = [whole(n, m, seed=n) for n, m in ((5, 3), (1, 1), (7, 2))] + [np.zeros((4, 3), np.float32)]
    compare("(float[n, m] x) => (int64[2, k] y) { y = NonZero(x) }", [([a], [np.stack(a.nonzero())]) for a in arrays])


@pytest.mark.process
@pytest.mark.ccompiler
def test_size_from_data_is_a_dim_of_later_operators() -> None:
    calls = []
    for a in (whole(5, 3), whole(1, 2, low=1), np.zeros((2, 2), np.float32)):
        g = a[a != 0]
        e = np.exp(np.outer(g, g) - np.outer(g, g).max(1, keepdims=True, initial=-9)).astype(np.float32)
        calls.append(([a], [np.maximum(g, 0), e / e.sum(1, keepdims=True)]))
    compare(THEN, calls, built=True)


def test_compress_along_an_axis_and_of_all() -> None:
    x, kept = whole(4, 3), np.array([False, True, True])
    compare("(float[n, m] x, bool[c] kept) => (float[n, k] y) { y = Compress<axis = 1>(x, kept) }",
          [([x, k], [np.compress(k, x, 1)]) for k in (kept, kept[:2], ~kept & kept)])  # fmt: skip
    compare(
        "(float[n, m] x, bool[c] kept) => (float[k] y) { y = Compress(x, kept) }", [([x, kept], [x.reshape(-1)[1:3]])]
    )


@pytest.mark.parametrize("ascending", [1, 0])
def test_unique_of_all(ascending: int) -> None:
    calls = []
    for n in (7, 1, 13):
        x = whole(n, 2, seed=n)
        y, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(y if ascending else first, kind="stable")
        place = np.argsort(order)[inverse.reshape(-1)]
        calls.append(([x], [y[order], first[order], place, counts[order]]))
    text = f"(float[n, 2] x) => (float[k] y, int64[k] i, int64[m] j, int64[k] c) {{ y, i, j, c = Unique<sorted = {ascending}>(x) }}"
    compare(text, calls)


def test_unique_of_slices() -> None:
    calls = []
    for n in (9, 1):
        x = whole(2, n, 2, seed=n, low=0, high=2)
        y, first, inverse, counts = np.unique(x, axis=1, return_index=True, return_inverse=True, return_counts=True)
        calls.append(([x], [y, first, inverse.reshape(-1), counts]))
    compare(
        "(float[2, n, 2] x) => (float[2, k, 2] y, int64[k] i, int64[m] j, int64[k] c) { y, i, j, c = Unique<axis = 1>(x) }",
        calls,
    )


def greedy(boxes: Array, scores: Array, most: int, overlap: float, least: float) -> Array:
    """Greedy suppression, box by box."""
    found = []
    for b, c in np.ndindex(*scores.shape[:2]):
        kept: list[int] = []
        for i in np.argsort(-scores[b, c], kind="stable"):
            if len(kept) == most or not scores[b, c, i] > least:
                break
            if all(shared(boxes[b, i], boxes[b, j]) <= overlap for j in kept):
                kept.append(int(i))
        found += [(b, c, i) for i in kept]
    return np.array(found, np.int64).reshape(-1, 3)


def shared(a: Array, b: Array) -> float:
    (a0, a1), (b0, b1) = ((np.minimum(x[:2], x[2:]), np.maximum(x[:2], x[2:])) for x in (a, b))
    sides = np.maximum(np.minimum(a1, b1) - np.maximum(a0, b0), 0)
    inside = float(np.prod(sides))
    return inside / (float(np.prod(a1 - a0) + np.prod(b1 - b0)) - inside)


def test_suppression_is_greedy() -> None:
    calls = []
    rng = np.random.default_rng(3)
    for b, c, n, most, overlap, least in (
        (1, 1, 1, 3, 0.5, 0.0),
        (2, 3, 40, 5, 0.3, 0.2),
        (1, 2, 60, 60, 0.1, 0.5),
        (1, 1, 9, 2, 0.5, 2.0),
    ):
        corner = rng.random((b, n, 2)) * 3
        boxes = np.concatenate([corner, corner + rng.random((b, n, 2)) + 0.1], 2).astype(np.float32)
        boxes[:, ::3] = boxes[:, ::3, [2, 3, 0, 1]]
        scores = rng.random((b, c, n)).astype(np.float32)
        args = [boxes, scores, np.array([most]), np.float32([overlap]), np.float32([least])]
        calls.append((args, [greedy(boxes, scores, most, overlap, least)]))
    compare(BOXES, calls)


def test_unique_of_wide_slices_is_refused() -> None:
    with pytest.raises(ParseError, match=r"operator Unique .* at most 64 elements"):
        load_onnx(model("(float[n, m] x) => (float[k, m] y) { y = Unique<axis = 0>(x) }"))


@pytest.mark.parametrize(
    ("text", "opsets"),
    [
        ("(float[n, m] x) => (int64[2, k] y) { y = NonZero(x) }", (9, 13)),
        (
            "(float[n, m] x) => (float[k] y) { c = Cast<to = 9>(x) f = Flatten<axis = 0>(c) s = Squeeze(f) y = Compress(x, s) }",
            (11,),
        ),
        ("(float[n, m] x) => (float[k] y) { y = Unique(x) }", (11, 28)),
    ],
)
def test_older_definitions_mean_the_same(text: str, opsets: Sequence[int]) -> None:
    x = whole(4, 3)
    found = [
        run_function(load_onnx(model(text, opset)), "main", [x])
        for opset in (*opsets, 20 if "Squeeze" not in text else 11)
    ]
    for f in found:
        np.testing.assert_array_equal(f, found[-1])


def i64s(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


FROM_DATA: list[tuple[str, list[list[Array]]]] = [
    ("(float[a, 5] x, int64[1] k) => (float[a, 1] s, float[a, c] y, int64[a, c] i) <int64[1] axis = {1}> "
     "{ y, i = TopK(x, k) e = Exp(y) s = ReduceSum(e, axis) }", [[whole(3, 5), i64s(2)], [whole(1, 5), i64s(5)]]),
    ("(float[a, b] x, int64[1] k) => (float[c, b] y, int64[c, b] i) { y, i = TopK<axis = 0, largest = 0>(x, k) }",
     [[whole(4, 3), i64s(1)], [whole(2, 3), i64s(0)]]),
    ("(float[a, 1] x, int64[2] k) => (float[p, q] y) { z = Expand(x, k) y = Exp(z) }",
     [[whole(3, 1), i64s(3, 4)], [whole(3, 1), i64s(1, 4)], [whole(1, 1), i64s(5, 1)]]),
    ("(float[a, 3] x, int64[3] k) => (float[p, q, r] y) { y = Expand(x, k) }", [[whole(1, 3), i64s(2, 4, 1)]]),
    ("(float x, int64[2] k) => (float[p, q] y) { y = Expand(x, k) }", [[np.array(2, np.float32), i64s(2, 3)]]),
    ("(float[a, 2] x, int64[2] k) => (float[p, q] y) { y = Tile(x, k) }", [[whole(3, 2), i64s(2, 3)], [whole(3, 2), i64s(1, 0)]]),
    ("(int64[2] k) => (float[p, q] y) { z = ConstantOfShape(k) y = Exp(z) }", [[i64s(2, 3)], [i64s(0, 3)]]),
    ("(int64[n] x, int64 d, float[2] v) => (float[n, q] y) { y = OneHot(x, d, v) }",
     [[i64s(0, 3, -1), np.array(4), np.array([0, 1], np.float32)]]),
    *((f"(float[a, b] x, int64 k) => (float[a, b] y) {{ y = Trilu<upper = {upper}>(x, k) }}",
       [[whole(3, 5), np.array(k)] for k in (-1, 0, 2)]) for upper in (0, 1)),
    ("(float[a, b] x) => (float[a, b] y) <int64 zero = {0}> { s = Shape(x) k = Gather(s, zero) y = Trilu(x, k) }", [[whole(2, 5)]]),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize("text, calls", FROM_DATA)
def test_load_onnx_sizes_and_diagonals_from_data_agree_with_evaluator(text: str, calls: list[list[Array]]) -> None:
    compare(text, [(args, reference(model(text), args)) for args in calls], built=True)


@pytest.mark.parametrize("text, args", [
    ("(float[a, 5] x, int64[1] k) => (float[a, c] y, int64[a, c] i) { y, i = TopK(x, k) }", [whole(3, 5), i64s(6)]),
    ("(float[a, 5] x, int64[1] k) => (float[a, c] y, int64[a, c] i) { y, i = TopK(x, k) }", [whole(3, 5), i64s(-1)]),
    ("(float[a, 3] x, int64[2] k) => (float[p, q] y) { y = Expand(x, k) }", [whole(1, 3), i64s(4, 2)]),
    ("(float[a, 3] x, int64[2] k) => (float[p, q] y) { y = Expand(x, k) }", [whole(2, 3), i64s(4, 3)]),
    ("(int64[2] k) => (float[p, q] y) { y = ConstantOfShape(k) }", [i64s(-1, 2)]),
])  # fmt: skip
def test_run_impossible_sizes_from_data_raise(text: str, args: list[Array]) -> None:
    with pytest.raises(UserError, match="expected"):
        run_function(load_onnx(model(text)), "main", args)


def test_a_cache_may_be_empty_without_bounds() -> None:
    """At the first call of a decoder, which has a dim called past_sequence_length."""
    text = """(float[b, past_sequence_length, 4] cache, float[b, n, 4] x) => (float[b, total, 4] y, int64[1] count) {
      y = Concat<axis = 1>(cache, x) count = Shape<start = 1, end = 2>(y) }"""
    module = load_onnx(model(text))
    assert {b.var.name: b.lower for b in module.bounds} == {"b": 1, "past_sequence_length": 0, "n": 1}
    for past in (0, 3):
        cache, x = np.ones((2, past, 4), np.float32), np.zeros((2, 1, 4), np.float32)
        y, count = run_function(module, "main", [cache, x])
        assert y.shape == (2, past + 1, 4) and count == [past + 1]
