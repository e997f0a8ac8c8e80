"""Transforms of the scores of classifiers and regressors of ai.onnx.ml, and the labels of classes.

Tests: `tests/ir/frontend/onnx/test_learning.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.op.math.elementwise import Sigmoid
from relax_tune.ir.op.reduction.reduce import Softmax

STRINGS = "; give the model numbers, and map strings to them outside"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
WINITZKI = 0.147
"""The constant of Winitzki's approximation of the inverse error function (2008)."""
NEAR_ZERO = 1e-7
"""Scores at most this far from 0 keep probability 0 under SOFTMAX_ZERO."""


def transform_of(node: OnnxNode) -> str:
    """Return the name of the transform, which TreeEnsemble states by number. Raises WrongValueError."""
    value = node.attributes.get("post_transform")
    if isinstance(value, int):
        if not 0 <= value < len(TRANSFORMS):
            raise node.refuse(f"expected post_transform 0 to {len(TRANSFORMS) - 1}, got {value}")
        return TRANSFORMS[value]
    return node.choice("post_transform", *TRANSFORMS)


def transformed(w: Writer, scores: Value, how: str) -> Value:
    """Emit a transform of scores (rows, outputs)."""
    if how == "LOGISTIC":
        return w.emit(Sigmoid(), scores)
    if how == "SOFTMAX":
        return w.emit(Softmax(), scores)
    if how == "PROBIT":
        return _probit(w, scores)
    return _softmax_zero(w, scores) if how == "SOFTMAX_ZERO" else scores


def _probit(w: Writer, p: Value) -> Value:
    """Emit `sqrt(2) * erfinv(2 p - 1)` by Winitzki's approximation, as ONNX Runtime does."""
    x = w.add(w.mul(p, 2.0), -1.0)
    log = w.log(w.mul(w.sub(1.0, x), w.add(x, 1.0)))
    v = w.add(w.mul(log, 0.5), 2 / (math.pi * WINITZKI))
    root = w.sqrt(w.sub(w.sqrt(w.sub(w.mul(v, v), w.mul(log, 1 / WINITZKI))), v))
    return w.mul(w.where(w.less(x, 0.0), w.mul(root, -1.0), root), math.sqrt(2))


def _softmax_zero(w: Writer, scores: Value) -> Value:
    """Emit a softmax in whose sum scores of 0 do not count."""
    axis = len(tensor_dims(scores)) - 1
    top = w.max(scores, (axis,), True)
    powers = w.exp(w.sub(scores, top))
    counts = w.less(NEAR_ZERO, w.abs(scores))
    total = w.sum(w.where(counts, powers, 0.0), (axis,), True)
    # Scores near 0 are multiplied instead of exponentiated, as ONNX Runtime does: exactly 0 stays 0.
    at_zero = w.mul(scores, w.exp(w.mul(top, -1.0)))
    return w.div(w.where(counts, powers, at_zero), w.where(w.equal(total, 0.0), 1.0, total))


def labels_of(node: OnnxNode, name: str = "classlabels_int64s") -> Array:
    """Return the labels of classes, which are integers. Raises ParseError for strings."""
    labels = np.asarray(node.attributes.get(name, ()), np.int64)
    if not labels.size or node.attributes.get("classlabels_strings"):
        raise node.refuse(f"expected {name}, got {sorted(node.attributes)}{STRINGS}")
    return labels


def label_at(w: Writer, labels: Array, places: Value) -> Value:
    return w.take(w.tensor(w.constant(labels, "classlabels")), 0, places)


def label_where(w: Writer, condition: Value, first: int, second: int) -> Value:
    """Return one label where a condition of rows holds, and another in the other rows."""
    return w.where(condition, w.literal(first, i64), w.literal(second, i64))


def column(w: Writer, scores: Value, at: int) -> Value:
    """Return one column of scores as (rows,)."""
    return w.reshape(w.slice(scores, 1, const(at), const(at + 1)), tensor_dims(scores)[:1])


def numbers(node: OnnxNode, name: str, dtype: type = np.float32) -> Array:
    """Return an attribute of numbers, or its form as a tensor of doubles."""
    tensor = node.attributes.get(f"{name}_as_tensor")
    values: Sequence[float] = node.attributes.get(name, ())
    return np.asarray(values, dtype) if tensor is None else np.asarray(tensor)
