"""Random uses of the operators of ai.onnx.ml, and of the optimisers of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper
from tests.fuzz.importers.builder import F32, I64, Builder, within
from tests.fuzz.importers.elementwise import Use, positive
from tests.fuzz.importers.program import Draw
from tests.support.random_trees import MODES, random_trees, rows

ML, TRAINING = "ai.onnx.ml", "ai.onnx.preview.training"
TRANSFORMS = (None, "NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
NO_ARRAYS = frozenset({(ML, "ZipMap")})
"""Operators whose results are no arrays, of which no program is made."""


def _features(b: Builder, columns: int, dtype: Any = F32, draw: Draw | None = None) -> str:
    """Return rows of a number of columns that attributes state, so that another call has as many."""
    b.p.stated |= {columns}
    return b.given((b.size(1), columns), dtype, draw)


def extractor(b: Builder, op: str) -> None:
    x = b.x(op, 2, 1, domain=ML)
    n = b.get(x).shape[-1]
    b.p.stated |= {n}
    b.node(op, [x, b.given((b.size(1, 4),), I64, within(0, n, I64))], domain=ML)


def binarizer(b: Builder, op: str) -> None:
    b.node(op, [b.x(op, domain=ML, least=1)], domain=ML, threshold=b.choose((None, 0.5, -1.0)))


def imputer(b: Builder, op: str) -> None:
    if b.chance(0.5):
        x = _features(b, 3)
        b.node(
            op,
            [x],
            domain=ML,
            imputed_value_floats=b.choose(([1.5], [1.5, 2.5, -3.0])),
            replaced_value_float=b.choose((None, 1.0)),
        )
        return
    x = _features(b, 3, I64)
    b.node(
        op, [x], domain=ML, imputed_value_int64s=b.choose(([7], [7, 8, 9])), replaced_value_int64=b.choose((None, 2))
    )


def label_encoder(b: Builder, op: str) -> None:
    kinds = b.choose((("int64s", "floats"), ("int64s", "int64s"), ("floats", "int64s"), ("floats", "floats")))
    values = {"int64s": [1, 2, -3], "floats": [1.0, 2.5, -3.0]}
    shape = b.shape(b.choose((1, 2)))
    x = b.given(shape, I64, within(-4, 5, I64)) if kinds[0] == "int64s" else b.given(shape, F32)
    more = {f"keys_{kinds[0]}": values[kinds[0]], f"values_{kinds[1]}": values[kinds[1]]}
    more["default_int64" if kinds[1] == "int64s" else "default_float"] = b.choose((-7, 9))
    if "default_float" in more:
        more["default_float"] = float(more["default_float"])
    b.node(op, [x], domain=ML, **more)


def linear(b: Builder, op: str) -> None:
    c, m = b.choose((1, 2, 3)), b.choose((1, 2, 3))
    x = _features(b, c, b.choose((F32, F32, np.dtype("i4"))))
    weights = [float(v) for v in b.np_rng.standard_normal(m * c).round(2)]
    offsets = [float(v) for v in b.np_rng.standard_normal(m).round(2)]
    if op == "LinearRegressor":
        b.node(
            op,
            [x],
            domain=ML,
            coefficients=weights,
            intercepts=offsets if b.chance(0.7) else None,
            targets=m,
            post_transform=b.choose(TRANSFORMS),
        )
        return
    m = max(m, 2)
    weights = [float(v) for v in b.np_rng.standard_normal(m * c).round(2)]
    offsets = [float(v) for v in b.np_rng.standard_normal(m).round(2)]
    more = {
        "classlabels_ints": list(range(3, 3 + m)),
        "multi_class": b.choose((None, 0, 1)),
        "post_transform": b.choose(TRANSFORMS),
    }
    b.node(op, [x], 2, domain=ML, coefficients=weights, intercepts=offsets, **more)


def normalizer(b: Builder, op: str) -> None:
    b.node(op, [b.given((b.size(1), b.size(1)), F32)], domain=ML, norm=b.choose(("MAX", "L1", "L2")))


def scaler(b: Builder, op: str) -> None:
    x = _features(b, 3, b.choose((F32, F32, I64)))
    b.node(op, [x], domain=ML, scale=b.choose(([0.5], [0.5, 1.0, 3.0])), offset=b.choose(([0.25], [0.5, 0.0, -1.0])))


def one_hot(b: Builder, op: str) -> None:
    dtype = b.choose((I64, F32))
    x = b.given(b.shape(b.choose((1, 2)), 1), dtype, within(-2, 5, I64) if dtype == I64 else None)
    b.node(op, [x], domain=ML, cats_int64s=b.choose(([1], [3, 0, 1], [2, -1])), zeros=b.choose((None, 1)))


def vectorizer(b: Builder, op: str) -> None:
    n, widths = b.size(1), [b.size(1, 4) for _ in range(b.choose((1, 2, 3)))]
    stated = [w if b.chance(0.7) else b.size(1, 4) for w in widths]
    b.node(op, [b.given((n, w), F32) for w in widths], domain=ML, inputdimensions=stated)


def _floats(b: Builder, *shape: int) -> list[float]:
    return [float(v) for v in b.np_rng.standard_normal(shape).round(2).reshape(-1)]


def _kernel(b: Builder) -> dict[str, Any]:
    kind = b.choose(("LINEAR", "POLY", "RBF", "SIGMOID"))
    return {"kernel_type": kind, "kernel_params": [b.choose((0.25, 0.5)), b.choose((0.0, 0.5)), b.choose((2.0, 3.0))]}


def support_vectors(b: Builder, op: str) -> None:
    features = b.choose((1, 2, 3))
    x = _features(b, features)
    if op == "SVMRegressor":
        count = b.choose((0, 1, 4))
        more = {"n_supports": count, "support_vectors": _floats(b, count, features)} if count else {}
        kernel = _kernel(b) if count else {"kernel_type": "LINEAR", "kernel_params": [0.0, 0.0, 0.0]}
        coefficients = _floats(b, count or features)
        b.node(
            op,
            [x],
            domain=ML,
            coefficients=coefficients,
            rho=_floats(b, 1),
            one_class=b.choose((0, 0, 1)),
            **more,
            **kernel,
        )
        return
    classes = b.choose((2, 3, 4))
    per_class = [b.choose((1, 2, 3)) for _ in range(classes)]
    count, pairs = sum(per_class), classes * (classes - 1) // 2
    b.node(
        op, [x], 2, domain=ML, vectors_per_class=per_class, support_vectors=_floats(b, count, features), rho=_floats(b, pairs),
        coefficients=[-0.5, *_floats(b, classes - 1, count)[1:]], classlabels_ints=[3 * k + 1 for k in range(classes)],
        post_transform=b.choose(TRANSFORMS), **_kernel(b),
    )  # fmt: skip


def old_trees(b: Builder, op: str) -> None:
    outputs, seed = b.choose((1, 2, 3)), b.rng.randrange(1 << 30)
    x = _features(b, 4, F32, lambda rng, shape: rows(*shape, seed=int(rng.integers(1 << 30))))
    what = "target" if op == "TreeEnsembleRegressor" else "class"
    modes = [b.choose(MODES)] if b.chance(0.5) else list(MODES)
    made = random_trees(
        seed, b.choose((1, 3)), b.choose((1, 3)), what, [*range(outputs)], modes, b.choose(("", "all", "some"))
    )
    made["post_transform"] = b.choose(TRANSFORMS)
    if what == "target":
        b.node(
            op, [x], domain=ML, n_targets=outputs, aggregate_function=b.choose((None, "AVERAGE", "MIN", "MAX")), **made
        )
        return
    b.node(op, [x], 2, domain=ML, classlabels_int64s=[2 * k + 3 for k in range(max(outputs, 2))], **made)


def trees(b: Builder, op: str) -> None:
    """TreeEnsemble: trees of depth 1 or 2 over integers, so that elements equal splits."""
    dtype = b.choose((F32, np.dtype("f8")))
    x = _features(b, 3, dtype, lambda rng, shape: rows(*shape, seed=int(rng.integers(1 << 30)), dtype=dtype))
    targets, leaves = b.choose((1, 2)), b.choose((2, 3))
    inner = leaves - 1
    modes = [b.choose((0, 1, 2, 3, 4, 5)) for _ in range(inner)]

    def tensor(values: Any, kind: Any) -> Any:
        return numpy_helper.from_array(np.asarray(values, kind), "")

    more: dict[str, Any] = {
        "nodes_featureids": [b.choose((0, 1, 2)) for _ in range(inner)],
        "nodes_splits": tensor([b.choose((-1, 0, 2)) for _ in range(inner)], dtype),
        "nodes_modes": tensor(modes, np.uint8),
        # a chain: the true side of a node is a leaf, and the false side the next node
        "nodes_truenodeids": [*range(inner)],
        "nodes_trueleafs": [1] * inner,
        "nodes_falsenodeids": [k + 1 for k in range(inner - 1)] + [inner],
        "nodes_falseleafs": [0] * (inner - 1) + [1],
        "leaf_targetids": [b.choose(tuple(range(targets))) for _ in range(leaves)],
        "leaf_weights": tensor(_floats(b, leaves), dtype),
        "tree_roots": [0],
    }
    if b.chance(0.5):
        more["nodes_missing_value_tracks_true"] = [b.choose((0, 1)) for _ in range(inner)]
    b.node(op, [x], domain=ML, n_targets=targets, aggregate_function=b.choose((0, 1, 2, 3)), post_transform=0, **more)


def training(b: Builder, op: str) -> None:
    shape = b.shape(b.choose((1, 2)), 1)
    rate, step = b.given((), F32, positive(F32)), b.given((), I64, within(0, 5, I64))
    tensors = [b.given(shape, F32) for _ in range({"Adagrad": 3, "Adam": 4, "Momentum": 3}[op])]
    if op in ("Adagrad", "Adam"):
        tensors[-1] = b.given(shape, F32, within(0, 3, F32))
    more: dict[str, Any] = {
        "Adagrad": {"decay_factor": b.choose((None, 0.1))},
        "Adam": {"norm_coefficient": b.choose((None, 0.1))},
    }.get(op, {})
    if op == "Momentum":
        more = {"norm_coefficient": 0.01, "beta": 1.0, "alpha": 0.9, "mode": b.choose(("standard", "nesterov"))}
    b.node(op, [rate, step, *tensors], len(tensors) - 1, domain=TRAINING, **more)


OTHER_DOMAINS: Mapping[tuple[str, str], Use] = {
    (ML, "ArrayFeatureExtractor"): extractor, (ML, "Binarizer"): binarizer, (ML, "Imputer"): imputer, (ML, "LabelEncoder"): label_encoder,
    (ML, "LinearClassifier"): linear, (ML, "LinearRegressor"): linear, (ML, "Normalizer"): normalizer, (ML, "Scaler"): scaler,
    (ML, "OneHotEncoder"): one_hot, (ML, "FeatureVectorizer"): vectorizer, (ML, "SVMRegressor"): support_vectors,
    (ML, "SVMClassifier"): support_vectors, (ML, "TreeEnsembleRegressor"): old_trees, (ML, "TreeEnsembleClassifier"): old_trees,
    (ML, "TreeEnsemble"): trees, **{(TRAINING, op): training for op in ("Adagrad", "Adam", "Momentum")},
}  # fmt: skip
