"""Models of scikit-learn converted by skl2onnx, against ONNX Runtime: whole pipelines of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import by_onnxruntime, compare

skl2onnx = pytest.importorskip("skl2onnx", reason="needs skl2onnx and scikit-learn: pip install skl2onnx")
sklearn = pytest.importorskip("sklearn", reason="needs skl2onnx and scikit-learn: pip install skl2onnx")

RNG = np.random.default_rng(3)
X = RNG.standard_normal((120, 5)).astype(np.float32)
Y = (X[:, 0] * 2 - X[:, 1] + 0.3 * RNG.standard_normal(120)).astype(np.float32)
TWO, THREE = (Y > 0).astype(np.int64), np.digitize(Y, [-1, 1]).astype(np.int64)


def models() -> dict[str, tuple[Callable[[], Any], Any]]:
    """Fitted models by name, with the target that each is fitted to."""
    from sklearn import ensemble, linear_model, pipeline, preprocessing, svm, tree

    small = {"n_estimators": 9, "random_state": 0}
    return {
        "tree": (lambda: tree.DecisionTreeClassifier(max_depth=5), THREE),
        "tree regressor": (lambda: tree.DecisionTreeRegressor(max_depth=6), Y),
        "forest of two": (lambda: ensemble.RandomForestClassifier(**small), TWO),
        "forest of three": (lambda: ensemble.RandomForestClassifier(**small), THREE),
        "forest regressor": (lambda: ensemble.RandomForestRegressor(**small), Y),
        "extra trees": (lambda: ensemble.ExtraTreesClassifier(**small), THREE),
        "boosting of two": (lambda: ensemble.GradientBoostingClassifier(**small), TWO),
        "boosting of three": (lambda: ensemble.GradientBoostingClassifier(**small), THREE),
        "boosting regressor": (lambda: ensemble.GradientBoostingRegressor(**small), Y),
        "isolation": (lambda: ensemble.IsolationForest(n_estimators=9, random_state=0), None),
        "logistic of two": (lambda: linear_model.LogisticRegression(), TWO),
        "logistic of three": (lambda: linear_model.LogisticRegression(), THREE),
        "linear": (lambda: linear_model.LinearRegression(), Y),
        "support vectors of three": (lambda: svm.SVC(), THREE),
        "support vectors": (lambda: svm.SVC(kernel="poly"), TWO),
        "support regressor": (lambda: svm.SVR(), Y),
        "pipeline": (lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), preprocessing.Normalizer(), linear_model.Ridge()), Y),
        "scaled forest": (lambda: pipeline.make_pipeline(preprocessing.MinMaxScaler(), ensemble.RandomForestClassifier(**small)), THREE),
        "polynomial": (lambda: pipeline.make_pipeline(preprocessing.PolynomialFeatures(2), linear_model.Ridge()), Y),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "tree", "tree regressor", "forest of two", "forest of three", "forest regressor", "extra trees", "boosting of two",
    "boosting of three", "boosting regressor", "isolation", "logistic of two",
    "logistic of three", "linear", "support vectors of three", "support vectors", "support regressor", "pipeline",
    "scaled forest", "polynomial",
])  # fmt: skip
def test_converted_model_equals_onnxruntime(name: str) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    make, target = models()[name]
    fitted = make().fit(X, target)
    options = (
        {id(fitted): {"zipmap": False}}
        if hasattr(fitted, "predict_proba") or name.startswith("support vectors")
        else None
    )
    proto = skl2onnx.convert_sklearn(
        fitted,
        initial_types=[("x", FloatTensorType([None, 5]))],
        target_opset={"": 18, "ai.onnx.ml": 3},
        options=options,
    )
    for rows in (X[:1], X[:23]):
        compare(proto, [rows], by_onnxruntime(proto, [rows]), rtol=1e-4, atol=1e-4, lowered=len(rows) > 1)
