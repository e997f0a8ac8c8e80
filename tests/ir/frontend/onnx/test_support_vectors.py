"""Support vector machines of ai.onnx.ml, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, by_onnxruntime, compare, f, model_of

ML = "ai.onnx.ml"
KERNELS = [
    ("LINEAR", [0.0, 0.0, 0.0]),
    ("POLY", [0.3, 0.5, 3.0]),
    ("RBF", [0.4, 0.0, 0.0]),
    ("SIGMOID", [0.2, 0.1, 0.0]),
]


def check(op: str, x: Array, results: int, close: float = 1e-5, **attributes: Any) -> None:
    proto, arrays = model_of(op, [Input(x, "n 3")], results, ML, 1, **attributes)
    # ONNX Runtime 1.32 gives (1 - s, s) for the one score s of a pair, whatever the softmax
    pair = attributes.get("post_transform") == "SOFTMAX" and len(attributes["rho"]) == 1 and "prob_a" not in attributes
    judge = by_reference if pair else by_onnxruntime
    compare(proto, arrays, judge(proto, arrays), rtol=1e-4, atol=close)


def by_reference(proto: Any, inputs: Sequence[Array]) -> list[Array]:
    evaluator = pytest.importorskip("onnx.reference", reason="needs the onnx package").ReferenceEvaluator(proto)
    return list(evaluator.run(None, dict(zip((i.name for i in proto.graph.input), inputs, strict=True))))


def numbers(*shape: int) -> list[float]:
    return [float(v) for v in f(*shape).reshape(-1)]


@pytest.mark.parametrize("kernel, parameters", KERNELS)
@pytest.mark.parametrize("one_class", [0, 1])
@pytest.mark.parametrize("n", [1, 7])
def test_regressor(kernel: str, parameters: list[float], one_class: int, n: int) -> None:
    check("SVMRegressor", f(n, 3), 1, kernel_type=kernel, kernel_params=parameters, support_vectors=numbers(5, 3), n_supports=5,
          coefficients=numbers(5), rho=[0.25], one_class=one_class)  # fmt: skip


def test_regressor_without_support_vectors() -> None:
    check(
        "SVMRegressor",
        f(7, 3),
        1,
        coefficients=numbers(3),
        rho=[0.25],
        kernel_type="LINEAR",
        kernel_params=[0.0, 0.0, 0.0],
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("kernel, parameters", KERNELS)
@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("how", ["NONE", "SOFTMAX"])
def test_classifier(kernel: str, parameters: list[float], classes: int, probabilities: bool, how: str) -> None:
    per_class = [2, 3, 1, 2][:classes]
    count, pairs = sum(per_class), classes * (classes - 1) // 2
    more = (
        {"prob_a": [-v * v - 0.1 for v in numbers(pairs)], "prob_b": [v / 4 for v in numbers(pairs)]}
        if probabilities
        else {}
    )
    check("SVMClassifier", f(9, 3), 2, kernel_type=kernel, kernel_params=parameters, support_vectors=numbers(count, 3),
          coefficients=[-0.5, *numbers(classes - 1, count)[1:]], rho=numbers(pairs), vectors_per_class=per_class,
          classlabels_ints=[3 * k + 1 for k in range(classes)], post_transform=how,
          # ONNX Runtime stops its iteration for probabilities early
          close=5e-3 if probabilities else 1e-5, **more)  # fmt: skip


@pytest.mark.parametrize("classes", [3, 4])
def test_classifier_margin_of_a_pair_reads_no_other_vectors(classes: int) -> None:
    """A kernel that is infinite for vectors of another class makes no NaN."""
    x = np.array([[np.inf, 0.5, 1.0], [0.25, -1.0, 2.0]], np.float32)
    vectors = np.array([[1.0, 1.0, 2.0], [0.5, 0.0, 1.0], [1.5, 2.0, 0.0], [-2.0, 0.5, 1.0]], np.float32)[:classes]
    check("SVMClassifier", x, 2, kernel_type="LINEAR", kernel_params=[0.0, 0.0, 0.0], support_vectors=vectors.reshape(-1).tolist(),
          coefficients=[-0.5, *[0.25] * (classes * (classes - 1) - 1)], rho=numbers(classes * (classes - 1) // 2),
          vectors_per_class=[1] * classes, classlabels_ints=list(range(classes)), post_transform="NONE")  # fmt: skip


@pytest.mark.parametrize("classes", [2, 3])
def test_classifier_without_support_vectors(classes: int) -> None:
    check("SVMClassifier", f(9, 3), 2, coefficients=[-0.5, *numbers(classes, 3)[1:]], rho=[0.2], kernel_type="LINEAR",
          kernel_params=[0.0, 0.0, 0.0], classlabels_ints=list(range(1, classes + 1)))  # fmt: skip
