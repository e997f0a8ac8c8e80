"""Operators of ONNX domains beside the standard one, against onnx's own evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Input, by_onnxruntime, compare, model_of
from tests.ir.frontend.onnx.onnx_models import check, onnx

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx import support_vectors, trees
from relax_tune.ir.frontend.onnx.importer import MICROSOFT, OTHER_DOMAINS, load_onnx
from relax_tune.ir.frontend.onnx.learning import ReplacedResultWarning
from relax_tune.ir.interp.reference import evaluate_function

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
ML, TRAINING = "ai.onnx.ml", "ai.onnx.preview.training"


def f(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def proto(domain: str, op: str, inputs: list[Array], results: int = 1, version: int = 1, **attributes: Any) -> Any:
    """A model of one node, whose first dims are symbols."""
    h = onnx.helper
    names, outputs = [f"x{k}" for k in range(len(inputs))], [f"y{k}" for k in range(results)]
    given = [
        h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(a.dtype), [f"n{len(a)}", *a.shape[1:]] if a.ndim else [])
        for n, a in zip(names, inputs)
    ]
    node = h.make_node(op, names, outputs, domain=domain, **attributes)
    found = [h.make_empty_tensor_value_info(n) for n in outputs]
    graph = h.make_graph([node], "g", given, found)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 20), h.make_opsetid(domain, version)], ir_version=9)


NAN = np.array([[1, np.nan, 2], [np.nan, 3, np.nan]], np.float32)
CASES: list[tuple[str, list[Array], int, int, dict[str, Any]]] = [
    ("Binarizer", [f(3, 4, 5)], 1, 1, {"threshold": 0.25}),
    ("ArrayFeatureExtractor", [f(3, 7), np.array([5, 0, 5])], 1, 1, {}),
    ("Scaler", [f(5, 3)], 1, 1, {"offset": [0.5, 1.0, -1.0], "scale": [2.0, 3.0, 0.5]}),
    ("Imputer", [NAN], 1, 1, {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": float("nan")}),
    ("Imputer", [np.array([[1, 2], [2, 3]])], 1, 1, {"imputed_value_int64s": [9], "replaced_value_int64": 2}),
    *[("Normalizer", [f(5, 3)], 1, 1, {"norm": n}) for n in ("MAX", "L1", "L2")],
    ("LabelEncoder", [np.array([3, 1, 4, 1, 5])], 1, 2,
     {"keys_int64s": [1, 3, 1], "values_floats": [0.5, 1.5, 2.5], "default_float": -1.0}),
    ("LabelEncoder", [np.array([0.5, 2, 7], np.float32)], 1, 2,
     {"keys_floats": [0.5, 2.0], "values_int64s": [10, 20], "default_int64": -3}),
    ("LinearRegressor", [f(5, 3)], 1, 1, {"coefficients": [1.0, 2.0, 3.0, -1.0, 0.5, 0.25], "intercepts": [0.5, -0.5], "targets": 2}),
    *[("LinearClassifier", [f(7, 2)], 2, 1,
       {"coefficients": [1.0, 2.0, -3.0, -1.0, 0.5, 0.25], "intercepts": [0.5, -0.5, 0.0], "classlabels_ints": [3, 1, 2],
        "post_transform": how, "multi_class": 0}) for how in ("NONE", "LOGISTIC", "SOFTMAX")],
    ("OneHotEncoder", [np.array([[1, 3], [5, 2]])], 1, 1, {"cats_int64s": [1, 2, 3], "zeros": 1}),
    ("OneHotEncoder", [np.array([1, 3], np.float32)], 1, 1, {"cats_int64s": [3, 1], "zeros": 1}),
    ("FeatureVectorizer", [f(5, 2), f(5, 3)], 1, 1, {"inputdimensions": [2, 3]}),
    ("FeatureVectorizer", [f(5, 2), f(5, 3)], 1, 1, {"inputdimensions": [4, 2]}),
]  # fmt: skip
STEPS: list[tuple[str, int, dict[str, Any]]] = [
    ("Adagrad", 1, {"norm_coefficient": 0.001, "epsilon": 1e-5, "decay_factor": 0.1}),
    ("Adam", 2, {"norm_coefficient": 0.001, "alpha": 0.95, "beta": 0.1, "epsilon": 1e-7, "norm_coefficient_post": 0.01}),
    *[("Momentum", 1, {"norm_coefficient": 0.01, "alpha": 0.95, "beta": 0.85, "mode": m}) for m in ("standard", "nesterov")],
]  # fmt: skip


@pytest.mark.parametrize("op, inputs, results, version, attributes", CASES, ids=[c[0] for c in CASES])
def test_operator_of_machine_learning(
    op: str, inputs: list[Array], results: int, version: int, attributes: dict[str, Any]
) -> None:
    check(proto(ML, op, inputs, results, version, **attributes), inputs)


@pytest.mark.parametrize("columns", [1, 3, 5])
def test_feature_vectorizer_of_symbolic_columns_cuts_or_pads(columns: int) -> None:
    model, arrays = model_of("FeatureVectorizer", [Input(f(4, columns), "n m")], 1, ML, 1, inputdimensions=[3])
    compare(model, arrays, by_onnxruntime(model, arrays))


@pytest.mark.parametrize("op", ["LinearClassifier", "SVMClassifier"])
def test_linear_classifier_of_symbolic_features_equals_onnxruntime(op: str) -> None:
    more: dict[str, Any] = {"intercepts": [0.5, -0.25, 0.0]}
    if op == "SVMClassifier":
        more = {"rho": [0.25], "kernel_type": "LINEAR", "kernel_params": [0.0, 0.0, 0.0]}
    model, arrays = model_of(op, [Input(f(5, 2), "n m")], 2, ML, 1, coefficients=[1.0, 2.0, -3.0, -1.0, 0.5, 0.25],
                             classlabels_ints=[4, 5, 6], **more)  # fmt: skip
    compare(model, arrays, by_onnxruntime(model, arrays), atol=1e-5)


@pytest.mark.parametrize("op, states, attributes", STEPS)
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_optimiser_steps(op: str, states: int, attributes: dict[str, Any], step: int, count: int) -> None:
    tensors = [np.abs(f(k + 2, 3)) for _ in range(2 + states) for k in range(count)]
    inputs: list[Array] = [np.asarray(0.1, np.float32), np.asarray(step), *tensors]
    check(proto(TRAINING, op, inputs, count * (1 + states), **attributes), inputs, rtol=1e-4)


def test_every_operator_of_other_domains_is_tried() -> None:
    tried = {(ML, c[0]) for c in CASES} | {(TRAINING, s[0]) for s in STEPS}
    elsewhere = {*trees.HANDLERS, *support_vectors.HANDLERS, *(("com.microsoft", op) for op in MICROSOFT)}
    elsewhere.add(("", "SimplifiedLayerNormalization"))
    assert tried | {(ML, "ZipMap")} == set(OTHER_DOMAINS) - elsewhere


@pytest.mark.parametrize("op, attributes, why", [
    ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}, "expected keys that are numbers, got strings"),
    ("LinearClassifier", {"coefficients": [1.0], "classlabels_strings": ["a"]}, "expected classlabels_ints"),
    ("LinearRegressor", {"coefficients": [1.0, 1.0], "post_transform": "CAUCHIT"}, "expected post_transform 'NONE'"),
    ("OneHotEncoder", {"cats_strings": ["a"]}, "expected cats_int64s"),
    ("OneHotEncoder", {"cats_int64s": [1], "zeros": 0}, "expected zeros for an unknown category"),
    ("DictVectorizer", {}, "of the standard domain, got domain 'ai.onnx.ml'"),
])  # fmt: skip
def test_load_onnx_operator_of_strings_or_unknown_raises(op: str, attributes: dict[str, Any], why: str) -> None:
    with pytest.raises(ParseError, match=rf"operator {op} .*{why}"):
        load_onnx(proto(ML, op, [f(3, 2)], 1, 2, **attributes))


def test_zip_map_gives_the_array_with_a_warning_naming_the_labels() -> None:
    x = f(3, 2)
    with pytest.warns(ReplacedResultWarning, match="operator ZipMap.*7, 9"):
        module = load_onnx(proto(ML, "ZipMap", [x], classlabels_int64s=[7, 9]))
    np.testing.assert_array_equal(evaluate_function(module, [x]), x)


@pytest.mark.parametrize("op, attributes", [
    ("LinearRegressor", {"coefficients": [0.1, 0.2, -0.1, 0.3], "intercepts": [0.4, 0.5], "targets": 2}),
    ("LinearClassifier", {"coefficients": [0.1, 0.2, -0.1, 0.3, 0.2, 0.1], "intercepts": [0.4, 0.5, 0.3], "classlabels_ints": [4, 5, 6]}),
    ("LinearClassifier", {"coefficients": [0.1, 0.2], "intercepts": [0.1], "classlabels_ints": [4, 5]}),
])  # fmt: skip
@pytest.mark.parametrize("how", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"])
def test_linear_transforms_equal_onnxruntime(op: str, attributes: dict[str, Any], how: str) -> None:
    x = np.random.default_rng(1).random((7, 2)).astype(np.float32)
    results = 2 if op == "LinearClassifier" else 1
    model, arrays = model_of(op, [Input(x, "n 2")], results, ML, 1, **attributes, post_transform=how)
    if how == "PROBIT" and len(attributes["coefficients"]) == 2 and results == 2:
        pytest.skip("ONNX Runtime transforms the sum of both scores of a pair")
    compare(model, arrays, by_onnxruntime(model, arrays), rtol=1e-2 if how == "PROBIT" else 1e-4, atol=1e-5)
