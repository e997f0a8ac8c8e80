"""Regression trees as arrays: a plain file format, checked when it is read.

xgboost trusts the numbers of the models that it loads: an index of a node or a feature beyond its array reads foreign memory. So files
contain arrays, which are checked here, and xgboost gets a model that is generated from them.

Tests: `tests/tuner/learn/test_trees.py`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TREES, MOST_NODES = 10_000, 1_000_000
DEEPEST = 64
"""Inner nodes between the root and a leaf of a file's trees."""
NO_CHILD = -1
_COLUMNS = (("left", "<i4"), ("right", "<i4"), ("feature", "<i4"), ("value", "<f4"), ("default_left", "<u1"))
"""The arrays of a file over the nodes of all trees, one tree after the other, and their types."""
_NODE_BYTES = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)
_NO_PARENT = (1 << 31) - 1
_TOLERANCE = np.float32(2.0**-20)
"""By how much of itself a threshold is lowered. Thresholds are values of training rows, to which equal values are larger or equal.
Features are logarithms, whose last digits depend on the processor: NumPy computes them with other instructions on AVX-512."""


@dataclass(frozen=True, eq=False)
class Trees:
    """The sum of regression trees.

    The children of a node have larger indices within its tree than the node; a leaf has none. A row goes left where its feature is
    smaller than the value of the node, and where it is NaN if `default_left`.

    Attributes:
        counts: (T,) number of nodes of each tree.
        left: (N,) index of the left child within the tree, `NO_CHILD` for a leaf.
        right: (N,) index of the right child, alike.
        feature: (N,) column of the rows that a node tests; 0 for a leaf.
        value: (N,) f32 threshold of a node, or summand of a leaf.
        default_left: (N,) 1 where NaN goes left.
        base: summand of every row.
    """

    counts: NDArray[np.int64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    feature: NDArray[np.int32]
    value: NDArray[np.float32]
    default_left: NDArray[np.uint8]
    base: float

    @staticmethod
    def of(booster: Any) -> Trees:
        """Return the trees of a trained xgboost model with one output and without categories."""
        learner = json.loads(bytes(booster.save_raw("json")))["learner"]
        trees = learner["gradient_booster"]["model"]["trees"]
        base = float(learner["learner_model_param"]["base_score"].strip("[]"))

        def column(name: str, kind: str) -> NDArray[Any]:
            return np.concatenate([np.asarray(t[name], kind) for t in trees])

        leaf = column("left_children", "<i4") == NO_CHILD
        return Trees(
            np.asarray([len(t["left_children"]) for t in trees], np.int64),
            column("left_children", "<i4"),
            column("right_children", "<i4"),
            np.where(leaf, 0, column("split_indices", "<i4")).astype("<i4"),
            column("split_conditions", "<f4"),
            np.where(leaf, 0, column("default_left", "<u1")).astype("<u1"),
            base,
        )

    def to_bytes(self) -> bytes:
        """Return the compressed arrays of a file."""
        return zlib.compress(b"".join(np.ascontiguousarray(a, k).tobytes() for a, k in self._columns()), 9)

    def _columns(self) -> Iterator[tuple[NDArray[Any], str]]:
        yield self.counts, "<u4"
        for name, kind in _COLUMNS:
            yield getattr(self, name), kind

    @staticmethod
    def from_bytes(data: bytes, trees: object, nodes: object, base: object, features: int) -> Trees:
        """Read and check the arrays of a file.

        Args:
            trees: number of trees, as the file states it.
            nodes: number of nodes of all trees, as the file states it.
            base: summand of every row, as the file states it.
            features: columns of the rows.

        Raises:
            ValueError: the data is no sum of trees over the features, or beyond the limits.
            zlib.error: the data is damaged.
        """
        if (
            type(trees) is not int
            or type(nodes) is not int
            or not 0 < trees <= MOST_TREES
            or not trees <= nodes <= MOST_NODES
        ):
            raise ValueError(
                f"expected 1 to {MOST_TREES} trees and at most {MOST_NODES} nodes, got {trees!r:.20} and {nodes!r:.20}"
            )
        if type(base) not in (int, float) or not abs(base) <= 1e30:  # type: ignore[arg-type]
            raise ValueError(f"expected a finite base value, got {base!r:.40}")
        size = 4 * trees + _NODE_BYTES * nodes
        stream = zlib.decompressobj()
        # At most one byte more than the file states: a small file could otherwise expand to gigabytes.
        plain = stream.decompress(data, size + 1)
        if len(plain) != size or not stream.eof or stream.unused_data:
            raise ValueError(f"expected {size} bytes of trees, got another number")
        arrays, at = {}, 4 * trees
        for name, kind in _COLUMNS:
            arrays[name] = np.frombuffer(plain, kind, nodes, at)
            at += arrays[name].nbytes
        result = Trees(np.frombuffer(plain, "<u4", trees).astype(np.int64), **arrays, base=float(base))  # type: ignore[arg-type]
        result._check(features)
        return result

    def _check(self, features: int) -> None:
        if self.counts.min() < 1 or int(self.counts.sum()) != len(self.left):
            raise ValueError("expected trees of at least one node each, got other counts")
        starts = np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        own = np.arange(len(self.left)) - starts
        ends = np.repeat(self.counts, self.counts)
        leaf = (self.left == NO_CHILD) & (self.right == NO_CHILD)
        for child in (self.left, self.right):
            # Children after their parent: then no path can run in a circle.
            if not (leaf | ((child > own) & (child < ends))).all():
                raise ValueError("expected children after their parent within the tree, got other indices")
        inner = np.flatnonzero(~leaf)
        children = np.concatenate([starts[inner] + self.left[inner], starts[inner] + self.right[inner]])
        parents = np.bincount(children, minlength=len(own))
        if not (parents == (own > 0)).all():
            raise ValueError("expected one parent for each node but the root, got another number")
        if not np.isfinite(self.value).all():
            raise ValueError("expected finite values of nodes, got others")
        if self.feature.min() < 0 or self.feature.max() >= features or self.default_left.max() > 1:
            raise ValueError(f"expected features 0 to {features - 1} and default directions 0 and 1, got others")
        level = starts[own == 0]
        for _ in range(DEEPEST + 1):
            level = level[~leaf[level]]
            if not len(level):
                return
            level = np.concatenate([starts[level] + self.left[level], starts[level] + self.right[level]])
        raise ValueError(f"expected trees of at most {DEEPEST} levels, got deeper ones")

    def booster(self, features: int) -> Any:
        """Return a model of xgboost with these trees over a number of features."""
        import xgboost as xgb

        ends = np.cumsum(self.counts)
        model = {
            "version": [3, 0, 0],
            "learner": {
                "attributes": {}, "feature_names": [], "feature_types": [],
                "gradient_booster": {
                    "name": "gbtree",
                    "model": {
                        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(ends))},
                        "iteration_indptr": list(range(len(ends) + 1)), "tree_info": [0] * len(ends),
                        "trees": [
                            self._tree(n, int(end - count), int(end), features)
                            for n, (end, count) in enumerate(zip(ends, self.counts, strict=True))
                        ],
                    },
                },
                "learner_model_param": {
                    "base_score": repr(self.base), "boost_from_average": "1", "num_class": "0", "num_feature": str(features),
                    "num_target": "1",
                },
                "objective": {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}},
            },
        }  # fmt: skip
        booster = xgb.Booster()
        booster.load_model(bytearray(_universal_binary_json(model)))
        return booster

    def _tree(self, number: int, start: int, end: int, features: int) -> dict[str, Any]:
        left, right = self.left[start:end], self.right[start:end]
        count, inner = end - start, np.flatnonzero(left != NO_CHILD)
        parents = np.full(count, _NO_PARENT, np.int32)
        parents[left[inner]] = parents[right[inner]] = inner
        zeros, none = np.zeros(count, np.float32), np.zeros(0, np.int32)
        conditions = self.value[start:end].copy()
        conditions[inner] -= np.abs(conditions[inner]) * _TOLERANCE
        return {
            "base_weights": zeros, "categories": none, "categories_nodes": none, "categories_segments": none.astype(np.int64),
            "categories_sizes": none.astype(np.int64), "default_left": self.default_left[start:end], "id": number, "left_children": left,
            "loss_changes": zeros, "parents": parents, "right_children": right, "split_conditions": conditions,
            "split_indices": self.feature[start:end], "split_type": np.zeros(count, np.uint8), "sum_hessian": zeros,
            "tree_param": {"num_deleted": "0", "num_feature": str(features), "num_nodes": str(count), "size_leaf_vector": "1"},
        }  # fmt: skip


_MARKERS = {"f4": b"d", "i4": b"l", "i8": b"L", "u1": b"U"}


def _universal_binary_json(value: Any) -> bytes:
    """Return a value in UBJSON, which xgboost reads many times faster than JSON: objects, lists, texts, integers and arrays."""
    match value:
        case dict():
            items = (_ubj_text(name) + _universal_binary_json(item) for name, item in value.items())
            return b"{" + b"".join(items) + b"}"
        case list():
            return b"[" + b"".join(map(_universal_binary_json, value)) + b"]"
        case str():
            return b"S" + _ubj_text(value)
        case int():
            return b"L" + struct.pack(">q", value)
        case _:
            marker = _MARKERS[value.dtype.str[1:]]
            # UBJSON is big-endian.
            data: bytes = value.astype(value.dtype.newbyteorder(">")).tobytes()
            return b"[$" + marker + b"#L" + struct.pack(">q", len(value)) + data


def _ubj_text(text: str) -> bytes:
    return b"L" + struct.pack(">q", len(text.encode())) + text.encode()
