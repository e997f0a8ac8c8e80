"""Decision trees of ai.onnx.ml: TreeEnsemble, and the older TreeEnsembleRegressor and TreeEnsembleClassifier.

Every comparison becomes "a feature is at most a split" (`TreeEnsemble` of `ir/op/reduction/trees.py`).

Tests: `tests/ir/frontend/onnx/test_trees.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

import numpy as np

from relax_tune.ir.core.dtype import DType, f32, f64
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.scores import (
    column,
    label_at,
    label_where,
    labels_of,
    numbers,
    transform_of,
    transformed,
)
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.reduction.trees import TreeEnsemble

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
"""Modes of nodes, at their numbers in TreeEnsemble."""


@dataclass(slots=True, eq=False)
class TreeSplit:
    """A node: rows whose feature is at most the split go on at `low`, others at `high`, and NaN at `high` if `nan_high`."""

    feature: int
    split: float
    low: Tree
    high: Tree
    nan_high: bool


@dataclass(slots=True, eq=False)
class TreeLeaf:
    """A leaf. row: the row of its values."""

    row: int


Tree = Union[TreeSplit, TreeLeaf]


@dataclass(slots=True, eq=False)
class Comparison:
    """A node of the model.

    Attributes:
        mode: number of the mode in `MODES`.
        members: values of a set membership.
        nan_true: whether NaN goes on at the true branch, even though no comparison with it holds.
    """

    feature: int
    mode: int
    split: float
    members: Sequence[float]
    nan_true: bool


def split_of(c: Comparison, true: Tree, false: Tree, dtype: np.dtype) -> Tree:
    """Return a comparison as splits by "at most"."""

    def below(value: float) -> float:
        # x < v is x <= the number before v.
        return float(np.nextafter(dtype.type(value), dtype.type(-np.inf)))

    mode = MODES[c.mode]
    if mode in ("BRANCH_LEQ", "BRANCH_LT"):
        return TreeSplit(c.feature, c.split if mode == "BRANCH_LEQ" else below(c.split), true, false, not c.nan_true)
    if mode in ("BRANCH_GT", "BRANCH_GTE"):
        return TreeSplit(c.feature, c.split if mode == "BRANCH_GT" else below(c.split), false, true, c.nan_true)
    values = c.members if mode == "BRANCH_MEMBER" else (c.split,)
    equal, other = (false, true) if mode == "BRANCH_NEQ" else (true, false)
    nan_equal = c.nan_true and mode != "BRANCH_NEQ"
    for value in sorted(set(map(float, values)), reverse=True):
        if value != value:
            continue
        # up to the value: equal to it, or below it, which is another value or none
        inner = TreeSplit(c.feature, below(value), other, equal, nan_equal)
        other = TreeSplit(c.feature, value, inner, other, not nan_equal)
    return other


def tree_of(
    root: int,
    comparisons: Sequence[Comparison | None],
    children: Sequence[tuple[int, int]],
    leaf: Callable[[int], TreeLeaf],
    dtype: np.dtype,
) -> Tree:
    """Return the tree below a node of the model. children: (true, false) nodes. Raises ValueError for nodes in a cycle."""
    done: dict[int, Tree] = {}
    stack, path = [root], set[int]()
    while stack:
        at = stack[-1]
        c = comparisons[at]
        if at in done:
            stack.pop()
        elif c is None:
            done[at] = leaf(at)
        elif all(k in done for k in children[at]):
            path.discard(at)
            below, other = (done[k] for k in children[at])
            done[at] = split_of(c, below, other, dtype)
        elif at in path:
            raise ValueError(f"node {at} of a tree is among its own descendants")
        else:
            path.add(at)
            stack.extend(k for k in children[at] if k not in done)
    return done[root]


@dataclass(slots=True, eq=False)
class Tables:
    """The nodes of all trees, as `TreeEnsemble` reads them: children in pairs, roots first."""

    feature: list[int] = field(default_factory=list)
    child: list[int] = field(default_factory=list)
    split: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    side: list[int] = field(default_factory=list)
    depth: int = 0

    @staticmethod
    def of(trees: Sequence[Tree]) -> Tables:
        tables = Tables()
        tables._grow(len(trees))
        pairs: dict[int, int] = {}
        waiting = deque((place, tree, 0) for place, tree in enumerate(trees))
        deepest: dict[int, int] = {}
        while waiting:
            place, tree, level = waiting.popleft()
            if isinstance(tree, TreeLeaf):
                tables.depth = max(tables.depth, level)
                tables.row[place], tables.child[place], tables.split[place] = tree.row, place, np.nan
                continue
            first = pairs.get(id(tree))
            # Nodes may be shared (`tree_of` builds each once), so a pair of children is stored once.
            if first is None:
                first = pairs[id(tree)] = len(tables.feature)
                tables._grow(2)
            if deepest.get(id(tree), -1) < level:  # of a node that several share, the longest way counts
                deepest[id(tree)] = level
                waiting.extend([(first, tree.low, level + 1), (first + 1, tree.high, level + 1)])
            tables.feature[place], tables.child[place] = tree.feature, first
            tables.split[place], tables.side[place] = tree.split, int(tree.nan_high)
        return tables

    def _grow(self, count: int) -> None:
        for entries in (self.feature, self.child, self.row, self.side):
            entries.extend([0] * count)
        self.split.extend([np.nan] * count)


def emit(w: Writer, x: Value, trees: Sequence[Tree], values: Array, aggregate: str, name: str) -> Value:
    """Emit the aggregate of the values (leaves, targets) that rows reach."""
    element = element_of(x)
    tables = Tables.of(trees)
    inner = np.array([s == s for s in tables.split], bool)
    side, child = np.array(tables.side, np.int32), np.array(tables.child, np.int32)
    sides = set(side[inner].tolist())
    op = TreeEnsemble(len(trees), tables.depth, aggregate, nan_first=sides == {0})
    if sides <= {1}:  # NaN is not below its split, so a leaf goes on at the second child
        child = np.where(inner, child, child - 1).astype(np.int32)
    arrays = [
        ("feature", np.array(tables.feature, np.int32)), ("child", child), ("split", np.array(tables.split, element.numpy)),
        ("row", np.array(tables.row, np.int32)), ("value", np.ascontiguousarray(values, element.numpy)),
        *([("side", side)] if len(sides) > 1 else []),
    ]  # fmt: skip
    if len(sides) > 1:
        # a leaf states its side, too, and no comparison with its split holds
        assert not side[~inner].any()
    return w.emit(op, x, *(w.tensor(w.constant(a, f"{name}.{what}")) for what, a in arrays))


def _rows(w: Writer, node: OnnxNode, dtype: np.dtype) -> Value:
    """Return the features (n, f) in the type of the splits; a vector is one row."""
    x = node.item(0)
    if x.ndim not in (1, 2) or (x.ndim == 2 and as_int(x.shape[1]) == 0):
        raise node.refuse(f"expected rows (n, features), got {x.info!r}")
    element: DType = f64 if dtype == np.float64 else f32
    value = w.cast(w.tensor(x), element)
    return w.reshape(value, [const(1), x.shape[0]]) if x.ndim == 1 else value


def _older(node: OnnxNode, what: str) -> tuple[list[Tree], Array, Array, np.dtype]:
    """Read the trees of TreeEnsembleRegressor or TreeEnsembleClassifier.

    Returns:
        The trees; weights (leaves, targets); whether a leaf has a weight for a target; the type of the splits.
    """
    given = node.attributes
    splits, weights = numbers(node, "nodes_values"), numbers(node, f"{what}_weights")
    dtype = splits.dtype if splits.dtype == np.float64 else np.dtype(np.float32)
    tree_ids, node_ids = (np.asarray(given.get(f"nodes_{n}", ()), np.int64) for n in ("treeids", "nodeids"))
    place = {(int(t), int(k)): p for p, (t, k) in enumerate(zip(tree_ids, node_ids, strict=True))}
    modes = [m.decode() if isinstance(m, bytes) else str(m) for m in given["nodes_modes"]]
    missing = given.get("nodes_missing_value_tracks_true") or [0] * len(modes)
    comparisons: list[Comparison | None] = [
        None if m == "LEAF" else Comparison(int(feature), MODES.index(m), float(split), (), bool(nan))
        for m, feature, split, nan in zip(modes, given["nodes_featureids"], splits, missing, strict=True)
    ]
    children = [
        (-1, -1) if m == "LEAF" else (place[int(t), int(a)], place[int(t), int(b)])
        for m, t, a, b in zip(modes, tree_ids, given["nodes_truenodeids"], given["nodes_falsenodeids"], strict=True)
    ]
    rows = {p: r for r, p in enumerate(p for p, m in enumerate(modes) if m == "LEAF")}
    targets = node.integer("n_targets", 1) if what == "target" else len(labels_of(node))
    table, has = np.zeros((len(rows), targets)), np.zeros((len(rows), targets), bool)
    ids = zip(given[f"{what}_treeids"], given[f"{what}_nodeids"], given[f"{what}_ids"], weights, strict=True)
    for t, k, target, weight in ids:
        # A leaf may list a target more than once; its weights add up.
        row = rows[place[int(t), int(k)]]
        table[row, int(target)] += weight
        has[row, int(target)] = True
    below = {k for pair in children for k in pair}
    # The older operators do not name the roots: a root is a node that is no child.
    roots = [p for p in range(len(modes)) if p not in below]
    trees = [tree_of(r, comparisons, children, lambda p: TreeLeaf(rows[p]), dtype) for r in roots]
    return trees, table, has, dtype


def _aggregated(
    w: Writer, node: OnnxNode, x: Value, trees: Sequence[Tree], table: Array, has: Array, how: str
) -> Value:
    """Emit the aggregate of trees; a target without a weight counts only in sums."""
    kind = {"AVERAGE": "sum", "SUM": "sum", "MIN": "min", "MAX": "max"}[how]
    # A leaf without a weight for a target must not win: the neutral element of the minimum or maximum stands for it.
    if kind != "sum":
        table = np.where(has, table, np.inf if kind == "min" else -np.inf)
    scores = emit(w, x, trees, table, kind, node.name or "trees")
    if kind != "sum" and not has.all():
        scores = w.where(w.equal(w.abs(scores), np.inf), 0.0, scores)
    return w.div(scores, len(trees)) if how == "AVERAGE" else scores


def _based(w: Writer, scores: Value, base: Array) -> Value:
    return w.add(scores, w.tensor(w.constant(base.astype(element_of(scores).numpy), "base"))) if base.size else scores


def _regressor(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import TreeEnsembleRegressor."""
    trees, table, has, dtype = _older(node, "target")
    how = node.choice("aggregate_function", "SUM", "AVERAGE", "MIN", "MAX")
    scores = _aggregated(w, node, _rows(w, node, dtype), trees, table, has, how)
    scores = _based(w, scores, numbers(node, "base_values"))
    return w.of(transformed(w, w.cast(scores, f32), transform_of(node)))


def _classifier(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    """Import TreeEnsembleClassifier: the label of the largest score, and the scores."""
    labels, how = labels_of(node), transform_of(node)
    trees, table, has, dtype = _older(node, "class")
    base = numbers(node, "base_values")
    scores = _aggregated(w, node, _rows(w, node, dtype), trees, table, has, "SUM")
    used = sorted({int(c) for c in node.attributes.get("class_ids", ())})
    if labels.size > 2:
        scores = w.cast(_based(w, scores, base), f32)
        results = transformed(w, scores, how)
        # a softmax without zeros changes the order of scores below 0
        top = w.arg_max(results if how == "SOFTMAX_ZERO" else scores, 1)
        return [w.of(label_at(w, labels, top)), w.of(results)]
    weights = numbers(node, "class_weights")
    label, two = _of_two(w, w.cast(scores, f32), labels, used, bool((weights >= 0).all()), base, how)
    return [w.of(label), w.of(two)]


def _of_two(
    w: Writer, scores: Value, labels: Array, used: Sequence[int], positive: bool, base: Array, how: str
) -> tuple[Value, Value]:
    """Return the labels and scores of one or two classes, as ONNX Runtime decides between them.

    Weights of class 0 only, without a base value for each class, are the score of the second class: a probability if all are
    positive, else a margin. A class without weights has score 0. Two base values serve the score of only class 0.
    """
    # Which score decides, against which limit, depends on the number of classes with weights and of base values, and
    # on the signs of the weights. The standard does not say so; the cases below give the labels of ONNX Runtime.
    first, second = int(labels[0]), int(labels[-1])
    limit = 0.5 if positive else 0.0
    at = [w.reshape(column(w, scores, c), [tensor_dims(scores)[0], const(1)]) for c in range(labels.size)]
    bases = [float(b) for b in base]
    if labels.size == 1:
        score = w.add(at[0], bases[0]) if bases else at[0]
        return label_where(w, w.less(0.0, column(w, score, 0)), 1, 0), transformed(w, score, how)
    if list(used) == [0] and len(bases) < 2:
        score = w.add(at[0], bases[0]) if bases else at[0]
        label = label_where(w, w.less(limit, column(w, score, 0)), second, first)
        if how == "PROBIT":
            return label, transformed(w, score, how)
        if how == "LOGISTIC":
            return label, w.concat(1, w.sigmoid(w.mul(score, -1.0)), w.sigmoid(score))
        return label, w.concat(1, w.sub(1.0, score) if positive else w.mul(score, -1.0), score)
    one, two = at
    if len(bases) == 2 and list(used) == [0]:
        one = w.add(one, bases[0])
        deciding = one
    elif len(bases) == 2:
        deciding = two = w.add(one, bases[1])
        one = w.mul(two, -1.0 if 0 in used else 0.0)
    else:
        one = w.add(one, bases[0]) if bases and 0 in used else one
        deciding = two
    pair = transformed(w, w.concat(1, one, two), how)
    if len(used) == 1:
        return label_where(w, w.less(limit, column(w, deciding, 0)), second, first), pair
    return label_where(w, w.less(0.0, column(w, deciding, 0)), 1, 0), pair


def _ensemble(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import TreeEnsemble, version 5: the nodes are comparisons, with separate leaves."""
    given = node.attributes
    splits, weights = np.asarray(given["nodes_splits"]), np.asarray(given["leaf_weights"])
    dtype = np.dtype(np.float64) if splits.dtype == np.float64 else np.dtype(np.float32)
    members = iter(_member_sets(given.get("membership_values")))
    missing = given.get("nodes_missing_value_tracks_true") or [0] * len(splits)
    comparisons: list[Comparison | None] = []
    for feature, mode, split, nan in zip(
        given["nodes_featureids"], np.asarray(given["nodes_modes"]), splits, missing, strict=True
    ):
        values = next(members, ()) if int(mode) == MODES.index("BRANCH_MEMBER") else ()
        comparisons.append(Comparison(int(feature), int(mode), float(split), values, bool(nan)))
    count, leaves = len(comparisons), len(weights)
    comparisons += [None] * leaves
    children = [
        tuple(int(k) + count * bool(leaf) for k, leaf in ends)
        for ends in zip(
            zip(given["nodes_truenodeids"], given["nodes_trueleafs"], strict=True),
            zip(given["nodes_falsenodeids"], given["nodes_falseleafs"], strict=True),
            strict=True,
        )
    ]
    pairs = [(a, b) for a, b in children]
    trees = [tree_of(int(r), comparisons, pairs, lambda p: TreeLeaf(p - count), dtype) for r in given["tree_roots"]]
    targets = node.integer("n_targets", 1)
    table, has = np.zeros((leaves, targets)), np.zeros((leaves, targets), bool)
    ids = np.asarray(given["leaf_targetids"], np.int64)
    table[np.arange(leaves), ids], has[np.arange(leaves), ids] = weights, True
    how = ("AVERAGE", "SUM", "MIN", "MAX")[node.integer("aggregate_function", 1)]
    scores = _aggregated(w, node, _rows(w, node, dtype), trees, table, has, how)
    return w.of(transformed(w, scores, transform_of(node)))


def _member_sets(values: Array | None) -> deque[list[float]]:
    """Return the sets of a list whose sets end at NaN."""
    sets: deque[list[float]] = deque([[]])
    for v in () if values is None else np.asarray(values).tolist():
        if v != v:
            sets.append([])
        else:
            sets[-1].append(v)
    return sets


ML = "ai.onnx.ml"

HANDLERS: Mapping[tuple[str, str], Handler] = {
    (ML, "TreeEnsemble"): _ensemble, (ML, "TreeEnsembleRegressor"): _regressor, (ML, "TreeEnsembleClassifier"): _classifier,
}  # fmt: skip
