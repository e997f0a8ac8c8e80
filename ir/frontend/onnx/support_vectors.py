"""Support vector machines of ai.onnx.ml (Cortes and Vapnik 1995; probabilities of Platt 1999).

Tests: `tests/ir/frontend/onnx/test_support_vectors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from relax_tune.ir.core.dtype import f32, f64, i64
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.scores import column, label_at, labels_of, transform_of, transformed
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer


def _features(w: Writer, node: OnnxNode) -> Value:
    x = node.item(0)
    if x.ndim not in (1, 2):
        raise node.refuse(f"expected rows (n, features), got {x.info!r}")
    value = w.cast(w.tensor(x), f32)
    return w.reshape(value, [const(1), x.shape[0]]) if x.ndim == 1 else value


def _kernel(w: Writer, node: OnnxNode, x: Value, vectors: Array) -> Value:
    """Emit the kernel of rows (n, f) and vectors (count, f), (n, count)."""
    kind = node.choice("kernel_type", "LINEAR", "POLY", "RBF", "SIGMOID")
    gamma, start, degree = (float(v) for v in node.attributes.get("kernel_params") or (0.0, 0.0, 0.0))
    turned = w.tensor(w.constant(np.ascontiguousarray(vectors.T), "support_vectors"))
    if kind == "RBF":
        # differences, not |x|^2 - 2 x v + |v|^2, which cancels
        n, features = tensor_dims(x)
        others = w.tensor(w.constant(vectors[None], "support_vectors"))
        difference = w.sub(w.reshape(x, [n, const(1), features]), others)
        return w.exp(w.mul(w.sum(w.mul(difference, difference), (2,)), -gamma))
    dot = w.matmul(x, turned)
    if kind == "LINEAR":
        return dot
    scaled = w.add(w.mul(dot, gamma), start)
    if kind == "SIGMOID":
        return w.tanh(scaled)
    if degree.is_integer() and 0 < degree <= 8:
        y = scaled
        for _ in range(int(degree) - 1):
            y = w.mul(y, scaled)
        return y
    return w.power(scaled, degree)


def _array(node: OnnxNode, name: str, dtype: type = np.float32) -> Array:
    return np.asarray(node.attributes.get(name, ()), dtype)


def _regressor(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import SVMRegressor: a sum over support vectors, or a linear function; only the sign for one class."""
    x, coefficients, rho = _features(w, node), _array(node, "coefficients"), _array(node, "rho")
    count = node.integer("n_supports", 0)
    if count:
        weights = w.tensor(w.constant(coefficients.reshape(count, 1), "coefficients"))
        y = w.matmul(_kernel(w, node, x, _array(node, "support_vectors").reshape(count, -1)), weights)
    else:
        y = _kernel(w, node, x, coefficients.reshape(1, -1))
    y = w.add(y, float(rho[0])) if rho.size else y
    if node.flag("one_class"):
        return w.of(w.where(w.less(0.0, y), 1.0, w.full(tensor_dims(y), -1.0, f32)))
    return w.of(transformed(w, y, transform_of(node)))


def _margins(w: Writer, node: OnnxNode, x: Value, classes: int) -> Value:
    """Emit the margins of all pairs of classes, (n, pairs): above 0 for the first class of a pair."""
    per_class = _array(node, "vectors_per_class", np.int64)
    count, starts = int(per_class.sum()), np.concatenate([[0], np.cumsum(per_class)])
    coefficients = _array(node, "coefficients").reshape(-1, count)
    rho = _array(node, "rho")
    pairs = list(combinations(range(classes), 2))
    kernel = _kernel(w, node, x, _array(node, "support_vectors").reshape(count, -1))
    # sums for each class against each other one, since 0 times a kernel that is infinite is NaN
    sums = []
    for k in range(classes):
        own = w.slice(kernel, 1, const(int(starts[k])), const(int(starts[k + 1])))
        weights = np.ascontiguousarray(coefficients[:, starts[k] : starts[k + 1]].T)
        sums.append(w.matmul(own, w.tensor(w.constant(weights, "coefficients"))))
    # Column k * others + j holds the sum of class k against its j-th other class, which skips k itself.
    every, others = w.concat(1, *sums), classes - 1
    first, second = (
        w.take(every, 1, w.tensor(w.constant(np.asarray(places, np.int64), "pairs")))
        for places in ([i * others + j - 1 for i, j in pairs], [j * others + i for i, j in pairs])
    )
    return w.add(w.add(first, second), w.tensor(w.constant(rho[: len(pairs)], "rho")))


def _votes(w: Writer, margins: Value, classes: int) -> Value:
    """Emit the number of pairs that each class wins, (n, classes)."""
    pairs = list(combinations(range(classes), 2))
    first, second = np.zeros((len(pairs), classes), np.float32), np.zeros((len(pairs), classes), np.float32)
    for p, (i, j) in enumerate(pairs):
        first[p, i], second[p, j] = 1, 1
    wins = w.cast(w.less(0.0, margins), f32)
    lost = w.sub(1.0, wins)
    tables = (w.tensor(w.constant(t, name)) for t, name in ((first, "first"), (second, "second")))
    ahead, behind = tables
    return w.add(w.matmul(wins, ahead), w.matmul(lost, behind))


def _probabilities(w: Writer, node: OnnxNode, margins: Value, classes: int) -> Value:
    """Emit the probabilities of classes from the probabilities of pairs (Wu, Lin and Weng 2004, method 2), (n, classes)."""
    a, b = (w.tensor(w.constant(_array(node, name), name)) for name in ("prob_a", "prob_b"))
    # Platt: 1 / (1 + exp(a * margin + b)), within bounds that keep every pair undecided
    pair = w.sigmoid(w.mul(w.add(w.mul(margins, a), b), -1.0))
    pair = w.minimum(w.maximum(pair, 1e-7), 1 - 1e-7)
    if classes == 2:
        p = column(w, pair, 0)
        n = tensor_dims(p)[0]
        return w.concat(1, *(w.reshape(v, [n, const(1)]) for v in (p, w.sub(1.0, p))))
    return _coupled(w, pair, classes)


def _coupled(w: Writer, pair: Value, classes: int) -> Value:
    """Emit the probabilities that fit pairwise ones best.

    The equations are solved. LIBSVM and ONNX Runtime end their iterations at a residual of 0.005 / classes, so their probabilities
    are about 0.001 off these.
    """
    pairs = {key: p for p, key in enumerate(combinations(range(classes), 2))}
    n = tensor_dims(pair)[0]
    r: dict[tuple[int, int], Value] = {}
    for (i, j), p in pairs.items():
        r[i, j] = column(w, w.cast(pair, f64), p)
        r[j, i] = w.sub(1.0, r[i, j])
    # the minimum of sum over i, j of (r_ji p_i - r_ij p_j)^2 with sum 1: linear equations, with a multiplier
    q: list[list[Value]] = [[r[0, 1]] * classes for _ in range(classes)]
    for i in range(classes):
        total: Value | None = None
        for j in range(classes):
            if j != i:
                square = w.mul(r[j, i], r[j, i])
                total = square if total is None else w.add(total, square)
                q[i][j] = w.mul(w.mul(r[j, i], r[i, j]), -1.0)
        assert total is not None
        q[i][i] = total
    # p = Q^-1 1 / (1' Q^-1 1): Gaussian elimination of a positive definite matrix, which needs no pivots
    ones: list[Value] = [w.full([n], 1.0, f64)] * classes
    for k in range(classes):
        for i in range(k + 1, classes):
            factor = w.div(q[i][k], q[k][k])
            for j in range(k, classes):
                q[i][j] = w.sub(q[i][j], w.mul(factor, q[k][j]))
            ones[i] = w.sub(ones[i], w.mul(factor, ones[k]))
    solution: list[Value] = list(ones)
    for i in reversed(range(classes)):
        rest = ones[i]
        for j in range(i + 1, classes):
            rest = w.sub(rest, w.mul(q[i][j], solution[j]))
        solution[i] = w.div(rest, q[i][i])
    whole = w.concat(1, *(w.reshape(v, [n, const(1)]) for v in solution))
    return w.cast(w.div(whole, w.sum(whole, (1,), True)), f32)


def _classifier(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import SVMClassifier: pairs of classes by support vectors, or a linear function of each class."""
    labels, how = labels_of(node, "classlabels_ints"), transform_of(node)
    x = _features(w, node)
    if not node.attributes.get("vectors_per_class"):
        return _linear(w, node, x, labels, how)
    classes = len(node.attributes["vectors_per_class"])
    margins = _margins(w, node, x, classes)
    # the label is the winner of most pairs, with probabilities, too
    label = label_at(w, labels, w.arg_max(_votes(w, margins, classes), 1))
    scores = margins
    if _array(node, "prob_a").size:
        scores = _probabilities(w, node, margins, classes)
    elif classes == 2:
        scores = w.concat(1, w.mul(margins, -1.0), margins)
    return [w.of(label), w.of(transformed(w, scores, how))]


def _linear(w: Writer, node: OnnxNode, x: Value, labels: Array, how: str) -> list[ImportedValue]:
    """Emit the scores of linear functions, one for each class."""
    coefficients = _array(node, "coefficients")
    features = as_int(tensor_dims(x)[1]) or coefficients.size // labels.size
    if not features or coefficients.size % features:
        raise node.refuse(f"expected coefficients of each feature, got {coefficients.size} for {tensor_dims(x)!r}")
    scores = _kernel(w, node, x, coefficients.reshape(-1, features))
    rho = _array(node, "rho")
    scores = w.add(scores, float(rho[0])) if rho.size else scores
    label = label_at(w, labels, w.arg_max(scores, 1))
    if labels.size == 2:
        # ONNX Runtime takes the second class wherever the larger score is one of a match
        top = w.max(scores, (1,))
        matched = w.less_equal(0.5, top) if (coefficients >= 0).all() else w.less(0.0, top)
        label = w.where(matched, w.literal(int(labels[1]), i64), label)
    return [w.of(label), w.of(transformed(w, scores, how))]


ML = "ai.onnx.ml"

HANDLERS: Mapping[tuple[str, str], Handler] = {(ML, "SVMRegressor"): _regressor, (ML, "SVMClassifier"): _classifier}
