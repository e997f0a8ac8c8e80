"""Operators as opsets 7 to 12 define them, against onnx's evaluator or NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, onnx
from tests.ir.frontend.onnx.test_operators import f

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.frontend.onnx.old_forms import FIRST, LARGEST
from relax_tune.ir.frontend.onnx.versions import VERSIONS
from relax_tune.ir.interp.reference import evaluate_function

Array = np.ndarray[Any, Any]


def softmax(x: Array) -> Array:
    """Softmax of the rows of a matrix."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def flat(x: Array, axis: int) -> Array:
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


X = f(2, 3, 4)
BIG = "(float[a, b, c] x) => (float[q] y)"
# (opset, nodes, input, result)
CASES: list[tuple[int, str, Array, Array]] = [
    *[(o, f"{BIG} {{ y = Softmax<axis = {a}>(x) }}", X, softmax(flat(X, a)).reshape(X.shape)) for o, a in ((7, 0), (11, 2), (12, 1))],
    (7, f"{BIG} {{ y = Upsample<scales = [1.0, 2.0, 1.5]>(x) }}", X, X.repeat(2, 1)[:, :, [0, 0, 1, 2, 2, 3]]),
    (9, f"{BIG} <float[3] s = {{1.0, 2.0, 1.0}}> {{ y = Upsample(x, s) }}", X, X.repeat(2, 1)),
    (10, f"{BIG} <float[3] s = {{1.0, 2.0, 1.0}}> {{ y = Resize(x, s) }}", X, X.repeat(2, 1)),
    # along a dim that becomes smaller, positions are rounded up, by scale: 1 / 0.75 = 1.33 becomes 2
    (10, f"{BIG} <float[3] s = {{1.0, 0.6, 0.75}}> {{ y = Resize(x, s) }}", X, X[:, [0], :][:, :, [0, 2, 3]]),
    (10, f"{BIG} <float[3] s = {{1.0, 0.7, 1.5}}> {{ y = Resize(x, s) }}", X, X[:, [0, 2], :][:, :, [0, 0, 1, 2, 2, 3]]),
    (7, f"{BIG} {{ y = Softmax(x) }}", X, softmax(flat(X, 1)).reshape(X.shape)),
    (11, f"{BIG} {{ y = Softmax<axis = -2>(x) }}", X, softmax(flat(X, 1)).reshape(X.shape)),
    (11, f"{BIG} {{ y = LogSoftmax(x) }}", X, np.log(softmax(flat(X, 1))).reshape(X.shape)),
    (8, f"{BIG} {{ y = Hardmax(x) }}", X, (flat(X, 1) == flat(X, 1).max(1, keepdims=True)).astype("f4").reshape(X.shape)),
    (7, f"{BIG} {{ y = Clip<min = -0.5, max = 0.25>(x) }}", X, X.clip(-0.5, 0.25)),
    (10, f"{BIG} {{ y = Clip<max = 0.25>(x) }}", X, X.clip(None, 0.25)),
    *[(o, f"{BIG} {{ y = Clip<{bound}>(x) }}", np.array([[[-np.inf, 1.0, np.inf]]], "f4"), y)
      for o, bound, y in ((7, "min = -2.0", np.array([[[-2.0, 1.0, LARGEST]]])), (10, "max = 2.0", np.array([[[-LARGEST, 1.0, 2.0]]])))],
    (10, "(double[a, b] x) => (double[a, b] y) { y = Clip(x) }", np.array([[-1e300, 2.0]]), np.array([[-LARGEST, 2.0]])),
    (7, f"{BIG} {{ y = Dropout<ratio = 0.9>(x) }}", X, X),
    (10, f"{BIG} {{ y, mask = Dropout(x) }}", X, X),
    (9, f"{BIG} {{ y = Slice<axes = [2, 0], starts = [-3, 1], ends = [100, 2]>(x) }}", X, X[1:2, :, -3:]),
    (9, f"{BIG} {{ y = Slice<starts = [1], ends = [2]>(x) }}", X, X[1:2]),
    (10, f"{BIG} <int64[1] s = {{3}}, int64[1] e = {{0}}, int64[1] a = {{2}}, int64[1] t = {{-2}}>"
        " { y = Slice(x, s, e, a, t) }", X, X[:, :, 3:0:-2]),
    (7, f"{BIG} {{ y = Pad<pads = [0, 1, 0, 0, 0, 2], value = 1.5>(x) }}", X, np.pad(X, ((0, 0), (1, 0), (0, 2)), constant_values=1.5)),
    (7, f"{BIG} {{ y = Pad<pads = [0, 1, 0, 0, 0, 2]>(x) }}", X, np.pad(X, ((0, 0), (1, 0), (0, 2)))),
    (7, f"{BIG} {{ y = Pad<mode = \"reflect\", pads = [0, 0, 1, 0, 0, 2]>(x) }}", X, np.pad(X, ((0, 0), (0, 0), (1, 2)), "reflect")),
    (11, f"{BIG} {{ z, y = Split<axis = 2, split = [1, 3]>(x) }}", X, X[:, :, 1:]),
    (7, "(float[a, b, 4] x) => (float[q] y) { z, y = Split<axis = 2>(x) }", X, X[:, :, 2:]),
    (11, "(float[1, 3, 1] x) => (float[q] y) { y = Squeeze<axes = [-1]>(x) }", f(1, 3, 1), np.zeros(0)),
    (7, "(float[1, 3, 1] x) => (float[q] y) { y = Squeeze(x) }", f(1, 3, 1), np.zeros(0)),
    (11, f"{BIG} {{ y = Unsqueeze<axes = [0, -1]>(x) }}", X, X[None, ..., None]),
    *[(o, f"{BIG} {{ y = ReduceSum<axes = [{a}], keepdims = 0>(x) }}", X, X.sum(a)) for o, a in ((7, 1), (11, -1))],
    (8, f"{BIG} {{ y, i = TopK<axis = 2, k = 2>(x) }}", X, -np.sort(-X, 2)[:, :, :2]),
    (10, f"{BIG} <int64[1] k = {{2}}> {{ y, i = TopK<axis = 2>(x, k) }}", X, -np.sort(-X, 2)[:, :, :2]),
    (9, "(int64[n] x) => (float[q] y) <int64 d = {3}, float[2] v = {0, 1}> { y = OneHot(x, d, v) }",
        np.array([0, 2, -1, 3]), np.eye(5, dtype="f4")[[0, 2, 4, 3], :3]),
    (9, "(float[n, m] x) => (float[n, m] y) <int64[1, 1] i = {1}, float[1, 1] u = {9}> { y = Scatter(x, i, u) }", f(2, 1), np.zeros(0)),
    # the axes decide a shape that is computed while importing
    (7, f"{BIG} {{ s = Shape(x) a = Slice<starts = [0], ends = [1]>(s) b = Squeeze<axes = [0]>(a) c = Unsqueeze<axes = [0]>(b)"
        " one = Constant<value = int64[1] {-1}>() d = Concat<axis = 0>(c, one) y = Reshape(x, d) }", X, X.reshape(2, -1)),
]  # fmt: skip
CASES = [(o, t, x, w if w.size else x if "Scatter" not in t else np.array([x[0], [9]], "f4")) for o, t, x, w in CASES]


@pytest.mark.parametrize(
    "opset, text, x, wanted", CASES, ids=[f"{o}-{t.split('{ ', 1)[1][:40]}" for o, t, _, _ in CASES]
)
def test_load_onnx_old_form_keeps_meaning(opset: int, text: str, x: Array, wanted: Array) -> None:
    onnx.checker.check_model(proto := model(text, opset))
    found = evaluate_function(load_onnx(proto), [x])
    assert not isinstance(found, tuple)
    if "Squeeze<axes = [-1]" in text or "Squeeze(x)" in text:
        wanted = wanted.squeeze(-1 if "[-1]" in text else None)
    assert found.shape == wanted.shape and found.dtype.kind == wanted.dtype.kind
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [7, 10, 12])
def test_load_onnx_old_network_agrees_with_evaluator(opset: int) -> None:
    text = """(float[n, 3, 8, 8] x) => (float[n, k] y) <float[4, 3, 3, 3] w = {%s}, float[4] one = {1, 2, 3, 4}, float[256, 5] m = {%s}>
    { c = Conv<pads = [1, 1, 1, 1]>(x, w) b = BatchNormalization(c, one, one, one, one) r = Relu(b) p = MaxPool<kernel_shape = [2, 2]>(r)
      a = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [1, 1]>(p) s = Concat<axis = 1>(a) t = GlobalAveragePool(r)
      g = Mul(s, t) e = Flatten(g) y = MatMul(e, m) }"""
    numbers = [", ".join(f"{v:.3f}" for v in f(n)) for n in (108, 196 * 5)]
    proto = model(text.replace("256", "196") % tuple(numbers), opset)
    check(proto, [f(2, 3, 8, 8)], rtol=1e-3, same_as=model(text.replace("256", "196") % tuple(numbers), 15))


def test_versions_table_has_every_old_definition_of_a_known_operator() -> None:
    for op in VERSIONS:
        for opset in range(7, FIRST):
            try:
                version = onnx.defs.get_schema(op, opset).since_version
            except onnx.defs.SchemaError:
                continue
            assert version in VERSIONS[op] or onnx.defs.get_schema(op, opset).deprecated, (op, version)


@pytest.mark.parametrize(
    "opset, text, why",
    [
        (7, "(float[n, 2] x, float[2] s) => (float[n, 2] y) { y = BatchNormalization<spatial = 0>(x, s, s, s, s) }", "spatial 1"),
        (9, "(float[n, 2] x, float[2] s) => (float[n, 2] y, float[2] m) { y, m, v, o, r = BatchNormalization(x, s, s, s, s) }",
         "expected inference"),
        (7, "(float[n] x) => (float[n] y, float[n] m) { y, m = Dropout(x) }", "expected no mask"),
        (9, "(float[n] x) => (float[n] y) { y = Softmax<axis = 3>(x) }", "expected an axis in -1..0, got 3"),
        (6, "(float[n] x) => (float[n] y) { y = Add<broadcast = 1>(x, x) }", "got its definition of opset 6"),
    ],
)  # fmt: skip
def test_load_onnx_old_form_beyond_inference_raises(opset: int, text: str, why: str) -> None:
    with pytest.raises(ParseError, match=why):
        load_onnx(model(text, opset))
