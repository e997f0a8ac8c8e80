"""Where an oracle is known to be wrong or to leave the result open, so that its opinion does not count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Given = Mapping[str, Any]


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    import onnx

    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _argument(node: Any, given: Given, position: int) -> Any:
    return given.get(node.input[position]) if position < len(node.input) else None


def _floats(node: Any, given: Given) -> list[np.ndarray[Any, Any]]:
    arrays = [given.get(name) for name in node.input]
    return [a for a in arrays if isinstance(a, np.ndarray) and a.dtype.kind == "f"]


def _not_finite(node: Any, given: Given) -> bool:
    return any(not np.isfinite(a).all() for a in _floats(node, given))


def _nan(node: Any, given: Given) -> bool:
    return any(np.isnan(a).any() for a in _floats(node, given))


def _pads_below_zero(node: Any) -> bool:
    """Return whether automatic padding of a pool may be negative: ONNX Runtime refuses that for float32, and not for float64."""
    strides, kernel = _attribute(node, "strides", ()), _attribute(node, "kernel_shape", ())
    return _attribute(node, "auto_pad", b"") in (b"SAME_UPPER", b"SAME_LOWER") and any(
        s > k for s, k in zip(strides, kernel)
    )


def _half(node: Any, given: Given) -> bool:
    return any(a.dtype.itemsize == 2 for a in _floats(node, given))


def _huge(node: Any, given: Given) -> bool:
    """Return whether sums may overflow, so that their order decides."""
    most = {2: 100.0, 4: 1e15, 8: 1e120}
    with np.errstate(all="ignore"):
        return any(bool((np.isfinite(a) & (np.abs(a) > most[a.dtype.itemsize])).any()) for a in _floats(node, given))


def _softmax(node: Any, given: Given, opset: int) -> bool:
    x = _argument(node, given, 0)
    return opset < 13 and x.ndim > 1 and _attribute(node, "axis", 1) not in (-1, x.ndim - 1)


def _is_wide(x: np.ndarray[Any, Any]) -> bool:
    """Return whether the exponential of some difference is below the normal numbers."""
    finite = x[np.isfinite(x)].astype(np.float64)
    return bool(finite.size and np.ptp(finite) > -np.log(float(np.finfo(x.dtype).tiny)) - 4)


def _wraps(node: Any, given: Given) -> bool:
    """Return whether a sum of integers, or of their squares, may exceed its type."""
    x = _argument(node, given, 0)
    if x.dtype.kind not in "iu":
        return _huge(node, given)
    wide = np.abs(x.astype(np.float64))
    return bool((wide * wide if node.op_type == "ReduceL2" else wide).sum() >= float(np.iinfo(x.dtype).max))


def _compressed(node: Any, given: Given) -> int:
    x, axis = _argument(node, given, 0), _attribute(node, "axis")
    return int(x.size if axis is None else x.shape[axis])


def _transform(node: Any) -> str:
    how = _attribute(node, "post_transform", b"NONE")
    return str(("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")[how] if isinstance(how, int) else how.decode())


def _one_target(node: Any) -> bool:
    return bool(_attribute(node, "n_targets", _attribute(node, "targets", 1)) == 1)


def _has_gaps(node: Any, given: Given) -> bool:
    """Return whether SAME stands for more elements than a transposed convolution without padding gives."""
    kernel = _argument(node, given, 1).shape[2:]
    strides, dilations = (_attribute(node, name, [1] * len(kernel)) for name in ("strides", "dilations"))
    gaps = any(s > (k - 1) * d + 1 for s, k, d in zip(strides, kernel, dilations, strict=True))
    return gaps and _attribute(node, "auto_pad", b"").startswith(b"SAME")


def _lacks_weights(node: Any) -> bool:
    """Return whether two classes have weights, and some leaf has one for only one of them."""
    names = ("class_ids", "class_treeids", "class_nodeids")
    every = {*zip(*(_attribute(node, name) for name in names), strict=True)}
    leaves = _attribute(node, "nodes_modes").count(b"LEAF")
    return (
        len(_attribute(node, "classlabels_int64s", ())) == 2
        and len({e[0] for e in every}) == 2
        and len(every) < 2 * leaves
    )


def _fit(node: Any, given: Given) -> bool:
    columns = _argument(node, given, 0).shape[-1:]
    names = ("scale", "offset", "imputed_value_floats", "imputed_value_int64s")
    return all(len(_attribute(node, name, [0])) in (1, *columns) for name in names)


def _leaves_integers(node: Any, given: Given) -> bool:
    """Return whether a quotient of a quantisation may not be an integer of 32 bits."""
    x, scale = _argument(node, given, 0), _argument(node, given, 1)
    if not np.isfinite(x).all() or not np.isfinite(scale).all() or not np.all(scale):
        return True
    most, least = np.abs(x.astype(np.float64)).max(initial=0), np.abs(scale.astype(np.float64)).min(initial=1)
    return bool(most / least >= 2**31)


def _leaves_numbers(x: np.ndarray[Any, Any]) -> bool:
    """Return whether the product of all integers may be beyond their type."""
    with np.errstate(all="ignore"):
        return x.dtype.kind in "iu" and bool(
            np.prod(np.maximum(np.abs(x.astype(np.float64)), 1)) >= float(np.iinfo(x.dtype).max)
        )


SUMS = frozenset([
    "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceProd", "ReduceLogSum", "ReduceLogSumExp", "CumSum", "CumProd", "LayerNormalization", "InstanceNormalization",
    "GroupNormalization", "BatchNormalization", "MeanVarianceNormalization", "RMSNormalization", "LpNormalization", "LRN",
    "AveragePool", "GlobalAveragePool", "LpPool", "GlobalLpPool", "Attention", "LSTM", "GRU", "RNN", "Det", "AffineGrid", "Col2Im",
    "RotaryEmbedding", "Adam", "Adagrad", "Momentum", "LinearRegressor", "LinearClassifier", "Normalizer", "ScatterND",
    "ScatterElements", "Sum", "Mean", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    "EmbedLayerNormalization", "GroupNorm", "SkipGroupNorm",
])  # fmt: skip
REFERENCE: Mapping[str, Callable[[Any, Given, int], bool]] = {
    # before opset 13 a matrix, whose columns begin at the axis, is normalised
    **dict.fromkeys(("Softmax", "Hardmax"), _softmax),
    # the logarithm of a softmax that is 0
    "LogSoftmax": lambda n, g, o: _softmax(n, g, o) or _is_wide(_argument(n, g, 0)),
    # `one * (on - off) + off` loses digits
    # and numbers below 0 count from the end before opset 11, too
    "OneHot": lambda n, g, o: bool(_floats(n, g)) or o < 11,
    # neither lengths nor activations other than the plain ones are read
    **dict.fromkeys(
        ("LSTM", "GRU", "RNN"), lambda n, g, o: bool(_attribute(n, "activations")) or _argument(n, g, 4) is not None
    ),
    # in single precision
    **dict.fromkeys(("Erf", "Gelu"), lambda n, g, o: any(a.dtype.itemsize == 8 for a in _floats(n, g))),
    # NaN stands for padding, and so does a window that begins in it where rounding up moves the last one
    **dict.fromkeys(
        ("AveragePool", "LpPool"),
        lambda n, g, o: _nan(n, g) or bool(_attribute(n, "ceil_mode", 0) and _attribute(n, "count_include_pad", 0)),
    ),
    # positions begin again in each channel of one dim, and SAME_LOWER pads at the end
    "MaxPool": lambda n, g, o: _nan(n, g) or len(n.output) > 1 or _attribute(n, "auto_pad") == b"SAME_LOWER",
    # integers in, integers out
    **dict.fromkeys(("LinearRegressor", "LinearClassifier", "Scaler"), lambda n, g, o: not _floats(n, g)),
    # computed in half precision throughout
    # the window's end counts batches
    "LRN": lambda n, g, o: True,
    # alpha and beta are floats, also beside integers
    "Gemm": lambda n, g, o: not _floats(n, g),
    # a function body without its casts
    "GroupNormalization": lambda n, g, o: any(a.dtype.itemsize != 4 for a in _floats(n, g)),
    # places and weights in single precision
    **dict.fromkeys(("Resize", "Upsample"), lambda n, g, o: _argument(n, g, 0).dtype == np.float64),
    **dict.fromkeys(("GridSample", "DeformConv"), lambda n, g, o: _argument(n, g, 0).dtype == np.float64),
    # every group has the bias of the first
    "ConvTranspose": lambda n, g, o: _attribute(n, "group", 1) > 1,
    # half pixels before opset 16, too
    "RoiAlign": lambda n, g, o: o < 16,
    # p = 1 without magnitudes
    "LpNormalization": lambda n, g, o: _attribute(n, "p", 2) == 1,
    # the larger score decides between two classes; a target without a weight is the largest number
    "TreeEnsembleClassifier": lambda n, g, o: len(_attribute(n, "classlabels_int64s", ())) < 3,
    **dict.fromkeys(
        ("TreeEnsembleRegressor", "TreeEnsemble"),
        lambda n, g, o: _attribute(n, "aggregate_function") in (b"MIN", b"MAX", 2, 3),
    ),
    # computed in double precision, whatever stash_type says
    "RMSNormalization": lambda n, g, o: any(a.dtype.itemsize == 8 for a in _floats(n, g)),
    # steps between places in single precision
    "AffineGrid": lambda n, g, o: any(a.dtype.itemsize == 8 for a in _floats(n, g)),
    # some rows of two dims are concatenated, not stacked
    "Loop": lambda n, g, o: np.ndim(_argument(n, g, 2)) > 1,
    # alpha in half precision
    "LeakyRelu": lambda n, g, o: _half(n, g),
    # before opset 14 the default momentum means training
    "BatchNormalization": lambda n, g, o: o < 14 or _half(n, g),
}
"""Operators that `onnx.reference` computes in another way than the standard says, by condition."""
RUNTIME: Mapping[str, Callable[[Any, Given, int], bool]] = {
    # 0 for NaN
    "Sign": lambda n, g, o: _nan(n, g),
    # numbers below 0 count from the end before opset 11, too
    "OneHot": lambda n, g, o: o < 11 and bool((_argument(n, g, 0) < 0).any()),
    # the first stage in single precision, as stash_type says
    "GroupNormalization": lambda n, g, o: any(a.dtype.itemsize == 8 for a in _floats(n, g)),
    # computed in double precision, whatever stash_type says
    "RMSNormalization": lambda n, g, o: any(a.dtype.itemsize == 8 for a in _floats(n, g)),
    # a function body whose constants are in single precision
    "Gelu": lambda n, g, o: any(a.dtype.itemsize == 8 for a in _floats(n, g)),
    # the least finite number for a window of -inf
    **dict.fromkeys(("MaxPool", "GlobalMaxPool"), lambda n, g, o: any(np.isneginf(a).any() for a in _floats(n, g))),
    # no negative padding, which a stride that is longer than the kernel needs
    "ConvTranspose": lambda n, g, o: _has_gaps(n, g),
    # bounds of sigmoid and tanh make numbers of NaN; a sigmoid of large negative numbers is some 1e-6, times a large state
    **dict.fromkeys(
        ("LSTM", "GRU", "RNN"),
        lambda n, g, o: _not_finite(n, g) or any(bool((np.abs(a) > 1e3).any()) for a in _floats(n, g)),
    ),
    # a running sum over channels, which NaN and infinities never leave
    "LRN": lambda n, g, o: _not_finite(n, g),
    # the sum of a row leaves NaN out, also that of infinity minus infinity
    **dict.fromkeys(
        ("Softmax", "LogSoftmax"), lambda n, g, o: _nan(n, g) or any(np.isposinf(a).any() for a in _floats(n, g))
    ),
    # one score has no softmax and no sigmoid
    **dict.fromkeys(
        ("TreeEnsembleRegressor", "TreeEnsemble", "LinearRegressor"),
        lambda n, g, o: _one_target(n) and _transform(n) not in ("NONE", "PROBIT"),
    ),
    "SVMRegressor": lambda n, g, o: _transform(n) != "NONE",
    # divides by the elements of the kernel, also where rounding up moves it beyond the padding
    "QLinearAveragePool": lambda n, g, o: bool(_attribute(n, "ceil_mode", 0) and _attribute(n, "count_include_pad", 0)),
    # one score s gives (1 - s, s)
    "SVMClassifier": lambda n, g, o: (
        len(_attribute(n, "rho", ())) == 1 and _transform(n) in ("SOFTMAX", "SOFTMAX_ZERO")
    ),
}
"""Operators that ONNX Runtime computes in another way than the standard says, by condition."""
BOTH: Mapping[str, Callable[[Any, Given, int], bool]] = {
    # transforms of numbers that are not finite, or huge, depend on the algorithm
    **dict.fromkeys(("DFT", "STFT"), lambda n, g, o: _not_finite(n, g) or _huge(n, g)),
    **dict.fromkeys(SUMS, lambda n, g, o: _huge(n, g)),
    # a bound that is left out is the largest finite number in ONNX Runtime, and none in `onnx.reference`
    "Clip": lambda n, g, o: (
        (_argument(n, g, 1) is None or _argument(n, g, 2) is None) and any(np.isinf(a).any() for a in _floats(n, g))
    ),
    # quotients that are NaN, or beyond the integers of 32 bits
    "QuantizeLinear": lambda n, g, o: _leaves_integers(n, g),
    # 0 times an infinite slope
    "PRelu": lambda n, g, o: not np.isfinite(_argument(n, g, 1)).all(),
    # a weight of 0 times infinity is NaN, or left out
    **dict.fromkeys(("Resize", "Upsample", "DeformConv"), lambda n, g, o: _not_finite(n, g)),
    # extremes and orders of NaN
    **dict.fromkeys(
        (
            "MaxPool",
            "GlobalMaxPool",
            "ReduceMax",
            "ReduceMin",
            "ArgMax",
            "ArgMin",
            "TopK",
            "Hardmax",
            "RoiAlign",
            "MaxRoiPool",
            "Unique",
        ),
        lambda n, g, o: (
            _nan(n, g) or ("Roi" in n.op_type and (_not_finite(n, g) or _huge(n, g))) or _pads_below_zero(n)
        ),
    ),
    **dict.fromkeys(("ReduceL2", "ReduceMean"), lambda n, g, o: _wraps(n, g)),
    "Det": lambda n, g, o: _huge(n, g) or _not_finite(n, g),
    # processors have several unsigned integers for NaN
    "Cast": lambda n, g, o: _attribute(n, "to") in (12, 13) and _not_finite(n, g),
    "CastLike": lambda n, g, o: _argument(n, g, 1).dtype.kind == "u" and _not_finite(n, g),
    # a weight below the normal numbers, or 0, times infinity; scores that are NaN and masked; the default scale of doubles, which is a
    # root in single precision in the function body of the standard, and in double precision in `onnx.reference`
    "Attention": lambda n, g, o: (
        _huge(n, g)
        or (not n.domain and (_nan(n, g) or not np.isfinite(_argument(n, g, 2)).all()))
        or (not n.domain and _attribute(n, "scale") is None and any(a.dtype.itemsize == 8 for a in _floats(n, g)))
    ),
    # processors have several signs and digits of NaN
    "BitCast": lambda n, g, o: _nan(n, g),
    # scores that are all 0 are NaN in ONNX Runtime, 0 or 0.5 elsewhere; the largest of scores that are NaN
    **dict.fromkeys(
        ("LinearRegressor", "LinearClassifier"),
        lambda n, g, o: (
            _huge(n, g)
            or not np.isfinite(_argument(n, g, 0)).all()
            or (_transform(n) == "SOFTMAX_ZERO" and bool((_argument(n, g, 0) == 0).all(-1).any()))
        ),
    ),
    # the place of a single element is 1 in ONNX Runtime, -1 in `onnx.reference`; infinity times a place that is nearly 0
    "AffineGrid": lambda n, g, o: (
        _not_finite(n, g) or (bool(_attribute(n, "align_corners", 0)) and 1 in _argument(n, g, 1)[2:])
    ),
    # random in training
    "Dropout": lambda n, g, o: bool(np.any(_argument(n, g, 2))) if len(n.input) > 2 and n.input[2] else False,
    # logarithms of integers, cut to integers, depend on the formula
    **dict.fromkeys(
        ("ReduceLogSum", "ReduceLogSumExp"), lambda n, g, o: _huge(n, g) or _not_finite(n, g) or not _floats(n, g)
    ),
    # products that leave the numbers of their type
    "ReduceProd": lambda n, g, o: _huge(n, g) or _not_finite(n, g) or _leaves_numbers(_argument(n, g, 0)),
    # the largest of votes that are NaN
    "SVMClassifier": lambda n, g, o: _not_finite(n, g) or _huge(n, g),
    # a leaf with a weight for one class of two
    "TreeEnsembleClassifier": lambda n, g, o: _lacks_weights(n),
    # attributes of another number of columns
    **dict.fromkeys(("Imputer", "Scaler"), lambda n, g, o: not _fit(n, g)),
    # a condition that is longer than the data
    "Compress": lambda n, g, o: _argument(n, g, 1).size > _compressed(n, g),
    # clamps positions in `onnx.reference`, elements in ONNX Runtime
    "GridSample": lambda n, g, o: (
        _not_finite(n, g)
        or (_attribute(n, "mode") in (b"cubic", b"bicubic") and _attribute(n, "padding_mode") == b"border")
    ),
}
"""Operators whose results are open, by condition."""


def reference_is_wrong(node: Any, given: Given, opset: int) -> bool:
    rule = REFERENCE.get(node.op_type)
    return rule is not None and rule(node, given, opset)


def runtime_is_wrong(node: Any, given: Given, opset: int) -> bool:
    rule = RUNTIME.get(node.op_type)
    return rule is not None and rule(node, given, opset)


def is_open(node: Any, given: Given, opset: int, results: Sequence[Any]) -> bool:
    """Return whether the standard leaves the results of a node open."""
    floats = [r for r in results if isinstance(r, np.ndarray) and r.dtype.kind == "f"]
    if node.op_type in SUMS and not _not_finite(node, given) and not all(np.isfinite(r).all() for r in floats):
        return True  # the order decides what overflows
    rule = BOTH.get(node.op_type)
    return rule is not None and rule(node, given, opset)
