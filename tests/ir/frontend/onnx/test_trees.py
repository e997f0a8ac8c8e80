"""Tree ensembles of ai.onnx.ml with random trees, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, by_onnxruntime, compare, model_of, onnx
from tests.support.random_trees import MODES, random_trees, rows

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.importer import load_onnx

ML = "ai.onnx.ml"
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]


def check(op: str, x: Array, results: int, version: int = 3, rtol: float = 1e-5, **attributes: Any) -> None:
    proto, arrays = model_of(op, [Input(x, "n 4")], results, ML, version, **attributes)
    compare(proto, arrays, by_onnxruntime(proto, arrays), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("mode", [*([m] for m in MODES), MODES], ids=[*MODES, "all"])
@pytest.mark.parametrize("tracks", ["", "all", "some"])
def test_regressor_modes_and_missing_values(mode: list[str], tracks: str) -> None:
    check(
        "TreeEnsembleRegressor",
        rows(7, 4, nan=True),
        1,
        **random_trees(1, 5, 4, "target", [0], mode, tracks),
        n_targets=1,
    )


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("base", [False, True])
def test_regressor_aggregates(n: int, how: str, targets: int, base: bool) -> None:
    more = {"base_values": [0.25 * (k + 1) for k in range(targets)]} if base else {}
    # without base values no tree has a weight for target 1
    ids = list(range(targets)) if base or targets == 1 else [0, 2]
    check("TreeEnsembleRegressor", rows(n, 4), 1, **random_trees(2, 7, 3, "target", ids, MODES[:1]), n_targets=targets,
          aggregate_function=how, **more)  # fmt: skip


@pytest.mark.parametrize("how", TRANSFORMS)
def test_regressor_transforms(how: str) -> None:
    attributes = random_trees(3, 2, 3, "target", [0, 1], MODES[:1], positive=True)
    attributes["target_weights"] = [w / 4 + 0.1 for w in attributes["target_weights"]]
    check("TreeEnsembleRegressor", rows(7, 4), 1, **attributes, n_targets=2, post_transform=how, rtol=1e-4)


def test_regressor_of_doubles_and_of_integers() -> None:
    attributes = random_trees(4, 3, 3, "target", [0], MODES)
    check("TreeEnsembleRegressor", rows(5, 4, dtype=np.float64), 1, **attributes, n_targets=1)
    # ONNX Runtime has no kernel of integers for regressors: the same numbers as floats
    proto, arrays = model_of(
        "TreeEnsembleRegressor", [Input(rows(5, 4, dtype=np.int64), "n 4")], 1, ML, 3, **attributes, n_targets=1
    )
    plain, same = model_of("TreeEnsembleRegressor", [Input(rows(5, 4), "n 4")], 1, ML, 3, **attributes, n_targets=1)
    compare(proto, arrays, by_onnxruntime(plain, same))
    values, weights = attributes.pop("nodes_values"), attributes.pop("target_weights")
    h = onnx.helper
    tensors = {
        "nodes_values_as_tensor": h.make_tensor(
            "v", onnx.TensorProto.DOUBLE, [len(values)], [v + 1e-12 for v in values]
        ),
        "target_weights_as_tensor": h.make_tensor("w", onnx.TensorProto.DOUBLE, [len(weights)], weights),
    }
    check("TreeEnsembleRegressor", rows(5, 4, dtype=np.float64) + 1e-12, 1, **attributes, **tensors, n_targets=1)


def test_regressor_of_one_leaf_and_of_deep_trees() -> None:
    check("TreeEnsembleRegressor", rows(3, 4), 1, **random_trees(5, 3, 0, "target", [0], MODES), n_targets=1)
    check("TreeEnsembleRegressor", rows(9, 4), 1, **random_trees(6, 2, 12, "target", [0], MODES[:2]), n_targets=1)


@pytest.mark.parametrize("classes", [3, 5])
@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("base", [False, True])
def test_classifier_of_many_classes(classes: int, how: str, base: bool) -> None:
    attributes = random_trees(7, 5, 3, "class", list(range(classes)), MODES[:1], positive=True)
    attributes["class_weights"] = [w / 8 + 0.01 for w in attributes["class_weights"]]
    more = {"base_values": [0.01 * (k + 1) for k in range(classes)]} if base else {}
    check("TreeEnsembleClassifier", rows(9, 4), 2, **attributes, classlabels_int64s=[3 * k + 1 for k in range(classes)],
          post_transform=how, **more, rtol=1e-4)  # fmt: skip


def test_classifier_label_is_the_class_of_the_largest_result() -> None:
    """A softmax without zeros gives the only class with a score 1, though its score is below 0."""
    attributes = random_trees(1, 1, 1, "class", [0, 1, 2], MODES[:1])
    for name, values in (("ids", [2, 2]), ("nodeids", [1, 2]), ("treeids", [0, 0]), ("weights", [-0.75, -2.5])):
        attributes[f"class_{name}"] = values
    labels = {"classlabels_int64s": [3, 5, 7], "post_transform": "SOFTMAX_ZERO"}
    check("TreeEnsembleClassifier", rows(5, 4), 2, **attributes, **labels)


@pytest.mark.pairwise
@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
@pytest.mark.parametrize("how", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("base", [0, 1, 2])
def test_classifier_of_two_classes(used: list[int], how: str, positive: bool, base: int) -> None:
    attributes = random_trees(8, 3, 3, "class", used, MODES[:1], positive=positive)
    attributes["class_weights"] = [w / 3 for w in attributes["class_weights"]]
    more = {"base_values": [0.1, -0.2][:base]} if base else {}
    check("TreeEnsembleClassifier", rows(9, 4), 2, **attributes, classlabels_int64s=[7, 9], post_transform=how, **more)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
def test_tree_ensemble(dtype: Any, aggregate: int) -> None:
    tensor = onnx.numpy_helper.from_array
    attributes = {
        "tree_roots": [0, 3], "n_targets": 2, "aggregate_function": aggregate, "post_transform": 0,
        "nodes_featureids": [0, 1, 2, 3], "nodes_modes": tensor(np.array([0, 6, 3, 6], np.uint8)),
        "nodes_splits": tensor(np.array([0.5, 7, -1, 7], dtype)),
        "membership_values": tensor(np.array([1, 3, np.nan, -2, 0, 2, np.nan], dtype)),
        "nodes_truenodeids": [1, 0, 2, 4], "nodes_trueleafs": [0, 1, 1, 1],
        "nodes_falsenodeids": [2, 1, 3, 0], "nodes_falseleafs": [0, 1, 1, 1],
        "leaf_targetids": [0, 1, 0, 1, 1], "leaf_weights": tensor(np.array([1, 2, 4, 8, 16], dtype)),
    }  # fmt: skip
    check("TreeEnsemble", rows(17, 4, dtype=dtype), 1, 5, **attributes)


def test_classifier_of_strings_raises() -> None:
    attributes = random_trees(7, 1, 1, "class", [0, 1, 2], MODES[:1])
    proto, _ = model_of(
        "TreeEnsembleClassifier",
        [Input(rows(3, 4), "n 4")],
        2,
        ML,
        3,
        **attributes,
        classlabels_strings=["a", "b", "c"],
    )
    with pytest.raises(ParseError, match="classlabels_int64s"):
        load_onnx(proto)
