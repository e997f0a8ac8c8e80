"""Ensembles of decision trees.

Tests: `tests/ir/op/test_trees.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import i32
from relax_tune.ir.core.expr import Expr, add, cast, const, le, lt, maximum, minimum, ne, select, sub
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    IndexUse,
    OperatorBuilder,
    OperatorSpec,
    float_result,
    shape_of,
    wide,
)

AGGREGATES = ("sum", "min", "max")


@dataclass(frozen=True, slots=True)
class TreeEnsemble(OperatorSpec):
    """Sum, minimum or maximum, over trees, of the values of the leaves that a row of features reaches.

    A node compares one feature with its split: features up to the split go on at node `child`, others at node `child + 1`. A leaf
    goes on at itself: by a split of NaN, for which no comparison is true. The first nodes are the roots.

    Arguments: rows of features (n, f); per node, (nodes,): feature and child, int32, split, of the type of the features, and the
    row of values, int32; values (leaves, targets), of that type; per node, where trees send NaN to different sides, 0 for the
    first and 1 for the second, int32.

    Attributes:
        trees: number of trees.
        depth: largest number of comparisons from a root to a leaf.
        aggregate: "sum", "min" or "max".
        nan_first: a NaN goes on at the first child; otherwise at the second one. Without effect if nodes state it.
    """

    trees: int
    depth: int
    aggregate: str = "sum"
    nan_first: bool = False
    name: ClassVar[str] = "tree_ensemble"
    arity: ClassVar[int] = 6

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        tensors = tuple(t for t in infos if isinstance(t, TensorInfo))
        if len(tensors) != len(infos) or not 6 <= len(tensors) <= 7:
            raise DeduceError(f"tree_ensemble: expected 6 or 7 tensors, got {list(infos)!r}")
        if self.aggregate not in AGGREGATES or self.trees < 1 or self.depth < 0:
            raise DeduceError(
                f"tree_ensemble: expected at least 1 tree, and an aggregate of {AGGREGATES}, got {self!r}"
            )
        x, features, children, splits, rows, values = tensors[:6]
        dtype = self.same_dtype((x, splits, values))
        if x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"tree_ensemble: expected floating-point features, got {x!r}; cast them first")
        for what, t in (
            ("features", features),
            ("children", children),
            ("rows", rows),
            *(("sides", t) for t in tensors[6:]),
        ):
            if t.dtype not in (None, i32):
                raise DeduceError(f"tree_ensemble: expected {what} of int32, got {t!r}")
        if x.shape is None or values.shape is None:
            return TensorInfo(None, dtype, 2)
        if len(x.shape) != 2 or len(values.shape) != 2:
            raise DeduceError(
                f"tree_ensemble: expected rows (n, f) and values (leaves, targets), got {x!r} and {values!r}"
            )
        for t in (*tensors[2:5], *tensors[6:]):
            if t.shape is not None and features.shape is not None:
                ctx.require_equal(t.shape[0], features.shape[0], "tree_ensemble: nodes")
        return TensorInfo((x.shape[0], values.shape[1]), dtype)

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        nodes = shape_of(infos[1])[0]
        return (
            IndexUse(1, shape_of(infos[0])[1]),
            # the node behind a child is read, too
            IndexUse(2, maximum(sub(nodes, 1), 1)),
            IndexUse(4, shape_of(infos[5])[0]),
        )

    def build(self, b: OperatorBuilder) -> None:
        (n, _), (_, targets), dtype = b.shape(0), b.shape(5), b.dtype(0)
        names = ("x", "feature", "child", "split", "row", "value", "side")
        x, feature, child, split, row, value, *side = (
            b.argument(p, name) for p, name in enumerate(names[: len(b.infos)])
        )
        trees = const(self.trees)
        node, leaf = b.alloc("node", (n, trees), i32), b.alloc("leaf", (n, trees), i32)
        y = b.output("y", (n, targets), dtype)
        first, second = const(0, i32), const(1, i32)

        def step(old: Expr, i: Expr, _tree: Expr, _level: Expr) -> Expr:
            number, limit = x[i, feature[old]], split[old]
            if side:
                behind = select(ne(number, number), side[0][old], select(lt(limit, number), second, first))
            elif self.nan_first:
                behind = select(lt(limit, number), second, first)
            else:
                behind = select(le(number, limit), first, second)
            return add(child[old], behind)

        b.reduce(node, (const(self.depth),), lambda _, tree: cast(tree, i32), step, "descend")
        b.compute(leaf, lambda i, t: row[node[i, t]], "leaf")
        start = {"sum": 0.0, "min": np.inf, "max": -np.inf}[self.aggregate]
        combines: dict[str, Callable[[Expr, Expr], Expr]] = {"sum": add, "min": minimum, "max": maximum}
        combine = combines[self.aggregate]
        b.reduce(y, (trees,), const(start, dtype), lambda old, i, c, t: combine(old, value[leaf[i, t], c]), "aggregate")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, feature, child, split, row, value = arrays[:6]
        rows = np.arange(len(x))[:, None]
        node = np.broadcast_to(np.arange(self.trees), (len(x), self.trees))
        with np.errstate(invalid="ignore"):
            for _ in range(self.depth):
                number, limit = x[rows, feature[node]], split[node]
                if len(arrays) == 7:
                    behind = np.where(np.isnan(number), arrays[6][node], number > limit)
                else:
                    behind = number > limit if self.nan_first else ~(number <= limit)
                node = child[node] + behind
        aggregates: dict[str, Callable[..., Array]] = {"sum": np.sum, "min": np.min, "max": np.max}
        return float_result(aggregates[self.aggregate](wide(value)[row[node]], axis=1), (x, value), value.dtype)
