"""ONNX operators of the domains ai.onnx.ml, on tensors of numbers, and ai.onnx.preview.training, optimisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relax_tune.errors import RelaxTuneWarning, warn
from relax_tune.ir.core.dtype import DType, f32, f64, i64
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.scores import (
    STRINGS,
    column,
    label_at,
    label_where,
    labels_of,
    transform_of,
    transformed,
)
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.handlers.indexing import natural_indices
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product


class ReplacedResultWarning(RelaxTuneWarning):
    """A result of a model has another form than the model states."""


def _numbers(w: Writer, node: OnnxNode, name: str, element: DType) -> Value | None:
    """Return an attribute of numbers as a tensor of one dim; None without it."""
    attribute = node.attributes.get(name)
    return (
        None
        if attribute is None or not len(attribute)
        else w.tensor(w.constant(np.asarray(attribute, element.numpy), name))
    )


def _work(x: ImportedValue) -> DType:
    return f64 if x.dtype is f64 else f32


def _binarizer(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    above = w.less(w.literal(node.real("threshold", 0.0), x.dtype), w.tensor(x))
    return w.of(w.cast(above, x.dtype), x.dtype.is_int)


def _features(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ArrayFeatureExtractor: the columns at indices; a vector counts as one row."""
    x, where = node.item(0), node.item(1)
    count = w.simplify(product(where.shape))
    flat = w.of(w.reshape(w.tensor(where), [count]), where.natural)
    columns = w.take(w.tensor(x), x.ndim - 1, natural_indices(w, flat, x.shape[-1]))
    return w.of(w.reshape(columns, [*(x.shape[:-1] if x.ndim > 1 else [const(1)]), count]), x.natural)


def _scaler(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    value = w.cast(w.tensor(x), f32)
    offset, scale = (_numbers(w, node, name, f32) for name in ("offset", "scale"))
    value = value if offset is None else w.sub(value, offset)
    return w.of(value if scale is None else w.mul(value, scale))


def _imputer(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Imputer: a number in place of another, or of NaN, by column."""
    x = node.item(0)
    kind = "float" if x.dtype.is_float else "int64"
    by, old = _numbers(w, node, f"imputed_value_{kind}s", x.dtype), node.attributes.get(f"replaced_value_{kind}", 0)
    if by is None:
        raise node.refuse(f"expected imputed_value_{kind}s for {x.info!r}, got none; state them")
    value = w.tensor(x)
    # NaN equals nothing, itself included.
    hit = w.not_equal(value, value) if np.isnan(old) else w.equal(value, old)
    return w.of(w.where(hit, by, value))


def _normalizer(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Normalizer: rows divided by their largest magnitude, their sum of magnitudes or their length."""
    x, kind = node.item(0), node.choice("norm", "MAX", "L1", "L2")
    value = w.cast(w.tensor(x), f32)
    axis = (max(x.ndim - 1, 0),)
    size = w.abs(value)
    if kind == "MAX":
        total = w.max(size, axis, True)
    else:
        total = w.sum(size if kind == "L1" else w.mul(value, value), axis, True)
        total = total if kind == "L1" else w.sqrt(total)
    return w.of(w.div(value, w.maximum(total, 1e-30)))


def _table(node: OnnxNode, side: str) -> tuple[Array, str]:
    """Return the keys or values of a LabelEncoder, and their kind. Raises ParseError for strings."""
    for kind, dtype in (("tensor", None), ("floats", np.float32), ("int64s", np.int64)):
        attribute: Any = node.attributes.get(f"{side}_{kind}")
        if attribute is not None and len(attribute):
            return np.asarray(attribute, dtype).reshape(-1), kind
    raise node.refuse(f"expected {side} that are numbers, got strings or none{STRINGS}")


def _label_encoder(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LabelEncoder of numbers: the value of the last key that equals an element, or the default."""
    x, (keys, _), (values, kind) = node.item(0), _table(node, "keys"), _table(node, "values")
    if keys.size != values.size:
        raise node.refuse(f"expected as many values as keys, got {keys.size} and {values.size}")
    # The defaults of the standard (ai.onnx.ml, LabelEncoder).
    plain = {"floats": ("default_float", -0.0), "int64s": ("default_int64", -1), "tensor": ("default_tensor", 0)}[kind]
    default = np.asarray(node.attributes.get(*plain), values.dtype).reshape(())
    element = w.reshape(w.tensor(x), [*x.shape, const(1)])
    hits = w.equal(element, w.tensor(w.constant(keys.astype(x.dtype.numpy), "keys")))
    hits = w.cast(hits, i64)
    # Of equal keys the last one counts, as in a dictionary that is filled in order; without a hit the place is not
    # used.
    value = w.take(w.tensor(w.constant(values, "values")), 0, w.arg_max(hits, x.ndim, last=True))
    some = w.less(w.tensor(w.number(const(0))), w.max(hits, (x.ndim,), False))
    return w.of(w.where(some, value, w.tensor(w.constant(default, "default"))))


def _scores(w: Writer, node: OnnxNode, outputs: int) -> Value:
    """Emit the scores of a linear model (rows, outputs)."""
    x = node.item(0)
    coefficients = np.asarray(node.attributes.get("coefficients", ()), _work(x).numpy)
    depth = as_int(x.shape[-1]) if x.ndim == 2 else None
    rows = outputs
    if x.ndim != 2 or not rows or coefficients.size % rows or depth not in (None, coefficients.size // rows):
        raise node.refuse(f"expected rows (n, features) and coefficients for each output and feature, got {x.info!r}")
    weights = w.tensor(w.constant(np.ascontiguousarray(coefficients.reshape(rows, -1).T), "coefficients"))
    scores = w.matmul(w.cast(w.tensor(x), _work(x)), weights)
    bias = _numbers(w, node, "intercepts", _work(x))
    return scores if bias is None else w.add(scores, bias)


def _linear_regressor(w: Writer, node: OnnxNode) -> ImportedValue:
    scores = _scores(w, node, node.integer("targets", 1))
    return w.of(transformed(w, scores, transform_of(node)))


def _linear_classifier(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import LinearClassifier: the class of the largest score, and the scores; one score decides between two classes."""
    labels, how = labels_of(node, "classlabels_ints"), transform_of(node)
    x, coefficients = node.item(0), len(node.attributes.get("coefficients", ()))
    features = as_int(x.shape[-1]) if x.ndim == 2 else None
    # a model whose features are a symbol has a score for each intercept, or for each class
    scores = _scores(
        w, node, coefficients // features if features else len(node.attributes.get("intercepts", ())) or labels.size
    )
    one: Expr = tensor_dims(scores)[1]
    if as_int(one) == 1 and labels.size == 2:
        # as ONNX Runtime has it: the score of the second class, and what it lacks to 1
        label = label_where(w, w.less(0.0, column(w, scores, 0)), int(labels[1]), int(labels[0]))
        score = transformed(w, scores, how) if how in ("LOGISTIC", "PROBIT") else scores
        return [w.of(label), w.of(w.concat(1, w.sub(1.0, score), score))]
    if as_int(one) != labels.size:
        raise node.refuse(f"expected a class for each of {one!r} scores, or two for one, got {labels.size}")
    if labels.size == 1:
        scores = transformed(w, scores, how)
        hit = w.less_equal(0.0 if how == "NONE" else 0.5, column(w, scores, 0))
        return [w.of(label_where(w, hit, int(labels[0]), 0)), w.of(scores)]
    return [w.of(label_at(w, labels, w.arg_max(scores, 1))), w.of(transformed(w, scores, how))]


def _one_hot(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import OneHotEncoder of numbers: a new last dim, 1 at the category of an element."""
    categories = np.asarray(node.attributes.get("cats_int64s", ()), np.int64)
    if not categories.size:
        raise node.refuse(f"expected cats_int64s, got {sorted(node.attributes)}{STRINGS}")
    if not node.flag("zeros", True):
        raise node.refuse("expected zeros for an unknown category, got zeros 0, which fails at such data")
    x = node.item(0)
    element = w.reshape(w.cast(w.tensor(x), i64), [*x.shape, const(1)])
    return w.of(w.cast(w.equal(element, w.tensor(w.constant(categories, "categories"))), f32))


def _feature_vectorizer(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import FeatureVectorizer: the columns of all inputs side by side, as floats; a vector counts as one row."""
    parts = []
    for p in range(len(node.inputs)):
        x = node.item(p)
        value = w.cast(w.tensor(x), f32)
        value = w.reshape(value, [const(1), x.shape[0]]) if x.ndim == 1 else value
        stated = node.attributes.get("inputdimensions", ())
        parts.append(_of_columns(w, value, int(stated[p])) if p < len(stated) else value)
    return w.of(parts[0] if len(parts) == 1 else w.concat(1, *parts))


def _of_columns(w: Writer, value: Value, count: int) -> Value:
    """Emit the first `count` columns of (n, columns); missing ones are zeros."""
    n, columns = tensor_dims(value)
    known = as_int(columns)
    if known is None or known < count:
        zeros = w.full([n, const(count - (known or 0))], 0.0, f32)
        value = w.concat(1, value, zeros)
    return value if known is not None and known <= count else w.slice(value, 1, const(0), const(count))


def _zip_map(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ZipMap: the array of its values, whose columns are in the order of the labels."""
    labels = node.attributes.get("classlabels_int64s") or node.attributes.get("classlabels_strings") or ()
    shown = ", ".join(v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in labels[:8])
    more = " ..." if len(labels) > 8 else ""
    warn(
        f"node {node.name!r}, operator ZipMap: its dictionaries are given as an array, with a column for each of the labels "
        f"{shown}{more}",
        ReplacedResultWarning,
    )
    return node.item(0)


ML = "ai.onnx.ml"


Update = Callable[[Writer, OnnxNode, Sequence[Value]], Sequence[Value]]
"""Emits a step of an optimiser for one tensor: the tensor, its gradient and states give the new tensor and states."""


def optimiser(update: Update, states: int) -> Handler:
    """Make a handler of an optimiser whose inputs are the rate, the step, and lists of tensors, gradients and states."""

    def handler(w: Writer, node: OnnxNode) -> list[ImportedValue]:
        lists = 2 + states
        count, rest = divmod(len(node.inputs) - 2, lists)
        if rest or count < 1:
            raise node.refuse(
                f"expected a rate, a step and {lists} lists of as many tensors, got {len(node.inputs)} inputs"
            )
        updates = [update(w, node, [node.operand(w, 2 + k * count + i) for k in range(lists)]) for i in range(count)]
        # Results are grouped by kind, all tensors first, then the states of each kind.
        return [w.of(values[k]) for k in range(1 + states) for values in updates]

    return handler


def _scalar(w: Writer, node: OnnxNode, position: int) -> Value:
    """Return the rate, input 0, or the step, input 1, in the element type of the tensors."""
    return w.reshape(w.cast(node.operand(w, position), node.item(2).dtype), [])


def _regularised(w: Writer, node: OnnxNode, x: Value, g: Value) -> Value:
    """Add the gradient of `norm_coefficient / 2 * x^2` to a gradient."""
    return w.add(w.mul(x, node.real("norm_coefficient", 0.0)), g)


def _after_first(w: Writer, node: OnnxNode, then: Value, first: Value) -> Value:
    """Return one value at steps above 0 and another at step 0."""
    return w.where(w.less(0, _scalar(w, node, 1)), then, first)


def _adagrad(w: Writer, node: OnnxNode, tensors: Sequence[Value]) -> Sequence[Value]:
    """Emit a step of Adagrad (Duchi et al. 2011)."""
    x, g, h = tensors
    decay = w.add(w.mul(_scalar(w, node, 1), node.real("decay_factor", 0.0)), 1.0)
    g = _regularised(w, node, x, g)
    h = w.add(h, w.mul(g, g))
    root = w.add(w.sqrt(h), node.real("epsilon", 1e-6))
    return w.sub(x, w.div(w.mul(g, w.div(_scalar(w, node, 0), decay)), root)), h


def _adam(w: Writer, node: OnnxNode, tensors: Sequence[Value]) -> Sequence[Value]:
    """Emit a step of Adam (Kingma and Ba 2015)."""
    x, g, v, h = tensors
    # 1 - beta loses digits, so that beta has to be the 32-bit number of the file
    alpha, beta = (float(np.float32(node.real(name, default))) for name, default in (("alpha", 0.9), ("beta", 0.999)))
    rate = _scalar(w, node, 0)
    g = _regularised(w, node, x, g)
    v = w.add(w.mul(v, alpha), w.mul(g, 1 - alpha))
    h = w.add(w.mul(h, beta), w.mul(w.mul(g, g), 1 - beta))
    of_h, of_v = (w.sub(1, w.power(base, _scalar(w, node, 1))) for base in (beta, alpha))
    rate = _after_first(w, node, w.div(w.mul(rate, w.sqrt(of_h)), of_v), rate)
    x = w.sub(x, w.mul(w.div(v, w.add(w.sqrt(h), node.real("epsilon", 1e-6))), rate))
    return w.mul(x, 1 - node.real("norm_coefficient_post", 0.0)), v, h


def _momentum(w: Writer, node: OnnxNode, tensors: Sequence[Value]) -> Sequence[Value]:
    """Emit a step of gradient descent with momentum, by Polyak (1964) or Nesterov (1983)."""
    x, g, v = tensors
    alpha, beta = node.real("alpha", 0.9), node.real("beta", 1.0)
    nesterov = node.choice("mode", "standard", "nesterov") == "nesterov"
    g = _regularised(w, node, x, g)
    v = w.add(w.mul(v, alpha), _after_first(w, node, w.mul(g, beta), g))
    return w.sub(x, w.mul(w.add(g, w.mul(v, alpha)) if nesterov else v, _scalar(w, node, 0))), v


TRAINING = "ai.onnx.preview.training"


HANDLERS: Mapping[tuple[str, str], Handler] = {
    (ML, "Binarizer"): _binarizer, (ML, "ArrayFeatureExtractor"): _features, (ML, "Scaler"): _scaler,
    (ML, "Imputer"): _imputer, (ML, "Normalizer"): _normalizer, (ML, "LabelEncoder"): _label_encoder,
    (ML, "OneHotEncoder"): _one_hot, (ML, "FeatureVectorizer"): _feature_vectorizer, (ML, "ZipMap"): _zip_map,
    (ML, "LinearRegressor"): _linear_regressor, (ML, "LinearClassifier"): _linear_classifier,
    (TRAINING, "Adagrad"): optimiser(_adagrad, 1), (TRAINING, "Adam"): optimiser(_adam, 2),
    (TRAINING, "Momentum"): optimiser(_momentum, 1),
}  # fmt: skip
