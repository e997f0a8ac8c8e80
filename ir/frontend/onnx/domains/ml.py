"""ONNX operators of the domain ai.onnx.ml on tensors of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import DType, f32, f64, i64
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis, take
from relax_tune.ir.frontend.shared.indexing import natural_indices
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.math.elementwise import Add, Cast, Div, MaximumScalar, Mul, MulScalar, Sigmoid, Sqrt, Sub
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, NotEqual, Where
from relax_tune.ir.op.math.numeric import Abs
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Max, Softmax, Sum
from relax_tune.ir.op.reduction.scan import ArgMax

STRINGS = "; give the model numbers, and map strings to them outside"


def _numbers(w: Writer, node: OnnxNode, name: str, element: DType) -> Value | None:
    """Return an attribute of numbers as a tensor of one dim; None without it."""
    given = node.attributes.get(name)
    return None if given is None or not len(given) else w.tensor(w.constant(np.asarray(given, element.numpy), name))


def _work(x: ImportedValue) -> DType:
    return f64 if x.dtype is f64 else f32


def _binarizer(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    above = w.emit(Less(), w.literal(float(node.attributes.get("threshold", 0.0)), x.dtype), w.tensor(x))
    return w.of(w.emit(Cast(x.dtype), above), x.dtype.is_int)


def _features(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ArrayFeatureExtractor: the columns at indices; a vector counts as one row."""
    x, where = node.item(0), node.item(1)
    count = w.simplify(product(where.shape))
    flat = w.of(w.reshape(w.tensor(where), [count]), where.natural)
    found = take(w, w.tensor(x), x.ndim - 1, natural_indices(w, flat, x.shape[-1]))
    return w.of(w.reshape(found, [*(x.shape[:-1] if x.ndim > 1 else [const(1)]), count]), x.natural)


def _scaler(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    value = cast_to(w, w.tensor(x), x.dtype, f32)
    offset, scale = (_numbers(w, node, name, f32) for name in ("offset", "scale"))
    value = value if offset is None else w.emit(Sub(), value, offset)
    return w.of(value if scale is None else w.emit(Mul(), value, scale))


def _imputer(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Imputer: a number in place of another, or of NaN, by column."""
    x = node.item(0)
    kind = "float" if x.dtype.is_float else "int64"
    by, old = _numbers(w, node, f"imputed_value_{kind}s", x.dtype), node.attributes.get(f"replaced_value_{kind}", 0)
    if by is None:
        raise node.refuse(f"wanted imputed_value_{kind}s for {x.info!r}, found none; state them")
    value = w.tensor(x)
    hit = w.emit(NotEqual(), value, value) if np.isnan(old) else w.emit(Equal(), value, w.literal(old, x.dtype))
    return w.of(w.emit(Where(), hit, by, value))


def _normalizer(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Normalizer: rows divided by their largest magnitude, their sum of magnitudes or their length."""
    x, kind = node.item(0), node.choice("norm", "MAX", "L1", "L2")
    value = cast_to(w, w.tensor(x), x.dtype, f32)
    axis = (max(x.ndim - 1, 0),)
    size = w.emit(Abs(), value)
    if kind == "MAX":
        total = w.emit(Max(axis, True), size)
    else:
        total = w.emit(Sum(axis, True), size if kind == "L1" else w.emit(Mul(), value, value))
        total = total if kind == "L1" else w.emit(Sqrt(), total)
    return w.of(w.emit(Div(), value, w.emit(MaximumScalar(1e-30), total)))


def _table(node: OnnxNode, side: str) -> tuple[Array, str]:
    """Return the keys or values of a LabelEncoder, and their kind. Raises ParseError for strings."""
    for kind, dtype in (("tensor", None), ("floats", np.float32), ("int64s", np.int64)):
        given: Any = node.attributes.get(f"{side}_{kind}")
        if given is not None and len(given):
            return np.asarray(given, dtype).reshape(-1), kind
    raise node.refuse(f"wanted {side} that are numbers, found strings or none{STRINGS}")


def _label_encoder(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LabelEncoder of numbers: the value of the last key that equals an element, or the default."""
    x, (keys, _), (values, kind) = node.item(0), _table(node, "keys"), _table(node, "values")
    if keys.size != values.size:
        raise node.refuse(f"wanted as many values as keys, found {keys.size} and {values.size}")
    plain = {"floats": ("default_float", -0.0), "int64s": ("default_int64", -1), "tensor": ("default_tensor", 0)}[kind]
    default = np.asarray(node.attributes.get(*plain), values.dtype).reshape(())
    element = w.reshape(w.tensor(x), [*x.shape, const(1)])
    hits = w.emit(Equal(), element, w.tensor(w.constant(keys.astype(x.dtype.numpy), "keys")))
    hits = w.emit(Cast(i64), hits)
    found = take(w, w.tensor(w.constant(values, "values")), 0, w.emit(ArgMax(x.ndim, last=True), hits))
    some = w.emit(Less(), w.tensor(w.number(const(0))), w.emit(Max((x.ndim,), False), hits))
    return w.of(w.emit(Where(), some, found, w.tensor(w.constant(default, "default"))))


def _scores(w: Writer, node: OnnxNode, outputs: int | None) -> Value:
    """Emit the scores of a linear model (rows, outputs)."""
    x = node.item(0)
    given = np.asarray(node.attributes.get("coefficients", ()), _work(x).numpy)
    depth = as_int(x.shape[-1]) if x.ndim == 2 else None
    rows = outputs if outputs else given.size // depth if depth else 0
    if x.ndim != 2 or not rows or given.size % rows or depth not in (None, given.size // rows):
        raise node.refuse(f"wanted rows (n, features) and coefficients for each output and feature, found {x.info!r}")
    weights = w.tensor(w.constant(np.ascontiguousarray(given.reshape(rows, -1).T), "coefficients"))
    found = w.emit(Matmul(), cast_to(w, w.tensor(x), x.dtype, _work(x)), weights)
    bias = _numbers(w, node, "intercepts", _work(x))
    return found if bias is None else w.emit(Add(), found, bias)


def _transformed(w: Writer, node: OnnxNode, scores: Value) -> Value:
    how = node.text("post_transform", "NONE")
    if how not in ("NONE", "LOGISTIC", "SOFTMAX"):
        raise node.refuse(f"wanted post_transform NONE, LOGISTIC or SOFTMAX, found {how}; leave it to the caller")
    return scores if how == "NONE" else w.emit(Sigmoid() if how == "LOGISTIC" else Softmax(), scores)


def _linear_regressor(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(_transformed(w, node, _scores(w, node, int(node.attributes.get("targets", 1)))))


def _linear_classifier(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import LinearClassifier: the class of the largest score, and the scores; one score tells two classes apart."""
    labels = np.asarray(node.attributes.get("classlabels_ints", ()), np.int64)
    if not labels.size or node.attributes.get("classlabels_strings"):
        raise node.refuse(f"wanted classlabels_ints, found {sorted(node.attributes)}{STRINGS}")
    scores = _scores(w, node, None)
    one: Expr = tensor_dims(scores)[1]
    if as_int(one) == 1 and labels.size == 2:
        scores = w.emit(Concat(1), w.emit(MulScalar(-1.0), scores), scores)
    elif as_int(one) != labels.size:
        raise node.refuse(f"wanted a class for each of {one!r} scores, or two for one, found {labels.size}")
    scores = _transformed(w, node, scores)
    if labels.size == 1:
        whole = w.reshape(slice_axis(w, scores, 1, const(0), const(1)), tensor_dims(scores)[:1])
        limit = 0.0 if node.text("post_transform", "NONE") == "NONE" else 0.5
        hit = w.emit(LessEqual(), w.literal(limit, _work(node.item(0))), whole)
        best = w.emit(Where(), hit, w.literal(int(labels[0]), i64), w.literal(0, i64))
    else:
        best = take(w, w.tensor(w.constant(labels, "classlabels_ints")), 0, w.emit(ArgMax(1), scores))
    return [w.of(best), w.of(scores)]


DOMAIN = "ai.onnx.ml"
HANDLERS: Mapping[tuple[str, str], Handler] = {
    (DOMAIN, "Binarizer"): _binarizer, (DOMAIN, "ArrayFeatureExtractor"): _features, (DOMAIN, "Scaler"): _scaler,
    (DOMAIN, "Imputer"): _imputer, (DOMAIN, "Normalizer"): _normalizer, (DOMAIN, "LabelEncoder"): _label_encoder,
    (DOMAIN, "LinearRegressor"): _linear_regressor, (DOMAIN, "LinearClassifier"): _linear_classifier,
}  # fmt: skip
