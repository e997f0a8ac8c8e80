"""Random decision trees of ai.onnx.ml, and rows whose elements often equal a split."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.trees import TreeEnsemble

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
Array = np.ndarray[Any, Any]


def rows(n: int, features: int, nan: bool = False, dtype: Any = np.float32, seed: int | None = None) -> Array:
    """Rows whose elements often equal a split."""
    x = np.random.default_rng(n if seed is None else seed).integers(-3, 4, (n, features)).astype(dtype)
    if nan and n:
        x[::2, 0] = np.nan
    return x


def random_trees(
    seed: int,
    count: int,
    depth: int,
    what: str,
    targets: list[int],
    modes: list[str],
    tracks: str = "",
    positive: bool = False,
) -> dict[str, Any]:
    """The attributes of random trees. tracks: "" (none), "all" or "some" nodes send NaN to the true branch."""
    rng = np.random.default_rng(seed)
    nodes: dict[str, list[Any]] = {
        k: [] for k in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids", "missing_value_tracks_true")
    }  # fmt: skip
    votes: dict[str, list[Any]] = {k: [] for k in ("treeids", "nodeids", "ids", "weights")}
    for t in range(count):
        open_nodes, count_of_nodes = [(0, 0)], 1
        while open_nodes:
            at, level = open_nodes.pop(0)
            leaf = level == depth or (level > 0 and rng.random() < 0.25)
            mode = "LEAF" if leaf else str(rng.choice(modes))
            sides = (0, 0) if leaf else (count_of_nodes, count_of_nodes + 1)
            track = int(tracks == "all" or (tracks == "some" and rng.random() < 0.5)) if not leaf else 0
            feature, value = int(rng.integers(4)), float(rng.integers(-2, 3))
            for k, v in zip(nodes, (t, at, feature, value, mode, *sides, track)):
                nodes[k].append(v)
            if leaf:
                for target in targets if rng.random() < 0.5 else [int(rng.choice(targets))]:
                    weight = float(rng.random() if positive else rng.standard_normal())
                    for k, v in zip(votes, (t, at, target, weight)):
                        votes[k].append(v)
            else:
                open_nodes += [(count_of_nodes, level + 1), (count_of_nodes + 1, level + 1)]
                count_of_nodes += 2
    attributes = {f"nodes_{k}": v for k, v in nodes.items()}
    if not tracks:
        del attributes["nodes_missing_value_tracks_true"]
    return {**attributes, **{f"{what}_{k}": v for k, v in votes.items()}}


def forest(trees: int, depth: int, features: int, targets: int, seed: int, nan_first: bool) -> list[Array]:
    """The tables of random trees, some of whose leaves come early."""
    rng = np.random.default_rng(seed)
    feature, child, split, leaves = [0] * trees, [0] * trees, [0.0] * trees, []
    row, open_nodes = [0] * trees, [(t, 0) for t in range(trees)]
    while open_nodes:
        at, level = open_nodes.pop(0)
        if level == depth or (level and rng.random() < 0.2):
            child[at], split[at], row[at] = at - (not nan_first), np.nan, len(leaves)
            leaves.append(rng.standard_normal(targets))
            continue
        feature[at], split[at], child[at] = int(rng.integers(features)), float(rng.integers(-2, 3)), len(child)
        for _ in range(2):
            open_nodes.append((len(child), level + 1))
            feature.append(0), child.append(0), split.append(0.0), row.append(0)
    ints = [np.array(v, np.int32) for v in (feature, child)]
    return [*ints, np.array(split, np.float32), np.array(row, np.int32), np.array(leaves, np.float32)]


def forest_module(op: TreeEnsemble, tables: list[Array], features: int) -> Any:
    g = GraphBuilder()
    n = g.symbol("n", 0)
    x = g.input("x", [n, features], f32)
    return g.finish(g.call(op, x, *(g.constant(f"t{k}", t) for k, t in enumerate(tables))))
