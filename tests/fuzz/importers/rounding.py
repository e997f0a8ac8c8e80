"""Which ONNX operators round once or not at all, and how far the results of the others may be off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

EXACT = frozenset([
    "Abs", "Add", "And", "ArgMax", "ArgMin", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast",
    "CastLike", "Ceil", "CenterCropPad", "Clip", "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape",
    "ConvInteger", "DepthToSpace", "Div", "Dropout", "Equal", "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements",
    "GatherND", "GlobalMaxPool", "Greater", "GreaterOrEqual", "Hardmax", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "MatMulInteger", "Max", "MaxPool", "MaxUnpool", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "OneHot", "Optional",
    "OptionalGetElement", "OptionalHasElement", "Or", "PRelu", "Pad", "Reciprocal", "ReduceMax", "ReduceMin", "Relu", "Reshape",
    "ReverseSequence", "Round", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
    "Shape", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "SplitToSequence", "Sqrt", "Squeeze", "Sub", "TensorScatter",
    "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where", "Xor", "If", "ArrayFeatureExtractor",
    "Binarizer", "LabelEncoder", "Imputer",
])  # fmt: skip
"""Operators whose results are rounded correctly or not at all."""

ULPS: Mapping[str, float] = {
    "LSTM": 64, "GRU": 64, "RNN": 64, "Pow": 4, "Attention": 16, "DFT": 32, "STFT": 32, "Det": 32, "Tan": 4, "Gelu": 4, "Mish": 4,
    "LpNormalization": 4, "MelWeightMatrix": 64, "Resize": 8, "GridSample": 16, "RoiAlign": 16, "DeformConv": 16, "LRN": 8,
    "QAttention": 64, "GroupNorm": 16, "SkipGroupNorm": 16,
    "DynamicQuantizeLSTM": 16, "MultiHeadAttention": 16, "GroupQueryAttention": 16,
    "AffineGrid": 4, "Adam": 512, "Adagrad": 16, "Momentum": 16,
}  # fmt: skip
"""Units by which results of inexact operators are moved; 2 for others."""
STATES = (
    "LSTM", "GRU", "RNN", "Gelu", "LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier", "LinearRegressor",
    "TreeEnsembleRegressor", "TreeEnsemble", "Adam",
    "QuickGelu", "FastGelu", "BiasGelu", "FusedGemm", "FusedConv", "DynamicQuantizeLSTM",
    "LogSoftmax", "ReduceLogSumExp", "HannWindow", "HammingWindow", "BlackmanWindow", "BiasSplitGelu", "GroupNorm", "SkipGroupNorm",
)  # fmt: skip
"""Operators that subtract numbers of magnitude 1, so that their errors are absolute: the oracles' sigmoid of -x is 1 - sigmoid(x).

BiasSplitGelu multiplies such a difference, and norms of groups one of large numbers: their errors are in units of the largest result.
"""
LARGEST = ("BiasSplitGelu", "GroupNorm", "SkipGroupNorm")
EXPONENTIALS = ("Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention", "QAttention")
"""Operators whose exponentials below the normal numbers are rounded or taken as 0."""
PLACED = ("Resize", "Upsample", "GridSample", "RoiAlign", "DeformConv", "LRN")
"""Operators that round places between elements, or whose running sums pass others: a result is off by units of those around it."""
FIXED_ARGUMENTS: Mapping[str, tuple[int, ...]] = {"Resize": (1, 2), "Upsample": (1,)}
"""Arguments of an operator that decide shapes, which are not moved."""
SCATTERS = ("Scatter", "ScatterElements", "ScatterND")


def _growth(node: Any, given: Mapping[str, Any]) -> float:
    """Return by how much the errors of partial sums exceed those of as many terms: by the root of their number."""
    if node.domain == "com.microsoft" and node.op_type.startswith("Q"):
        return 64.0  # a step decides, which is rounded with or without the zero point
    if node.op_type == "AveragePool":
        return float(np.sqrt(np.prod(next(a.ints for a in node.attribute if a.name == "kernel_shape"))))
    if node.op_type not in ("Conv", "ConvTranspose", "MatMul", "Gemm"):
        return 1.0
    weights = given[node.input[1]]
    terms = weights.size // max(1, weights.shape[0] if node.op_type == "Conv" else weights.shape[-1])
    return max(1.0, float(np.sqrt(terms)))


def is_exact(node: Any, given: Mapping[str, Any], results: Sequence[Any]) -> bool:
    """Return whether a node rounds each result correctly. results: empty before they are known."""
    if node.op_type in EXACT:
        return True
    if node.op_type in SCATTERS:
        kinds = [a.s for a in node.attribute if a.name == "reduction"]
        if not kinds or kinds[0] in (b"none", b"max", b"min"):
            return True
    arrays = [a for name in node.input if name and isinstance(a := given.get(name), np.ndarray)]
    whole = all(a.dtype.kind in "iub" for a in arrays)
    return (
        bool(results)
        and whole
        and all(isinstance(r, np.ndarray) and r.dtype.kind in "iub" for r in results if r is not None)
    )


@dataclass
class Jitter:
    """Moves of one evaluation: upwards, downwards, or at random; zeros are moved in evaluations from the third on.

    With the same generator, an evaluation of an odd number moves everything against the one before it.

    Attributes:
        number: Number of the evaluation.
    """

    number: int
    rng: np.random.Generator

    def steps(self, shape: tuple[int, ...]) -> Array:
        if self.number < 2:
            return np.full(shape, 1.0 - 2.0 * self.number)
        return self.rng.choice([-1.0, -0.5, 0.5, 1.0], shape) * (1 - 2 * (self.number % 2))

    def moved(self, a: Array, ulps: float, zeros: bool = False) -> Array:
        """Move floats by some units in the last place; numbers below the normal ones by steps of the smallest."""
        info = np.finfo(a.dtype)
        with np.errstate(all="ignore"):
            wide = a.astype(np.float64)
            steps = self.steps(a.shape)
            result = wide * (1 + ulps * float(info.eps) * steps)
            small = (np.abs(wide) < float(info.smallest_normal)) & ((wide != 0) | (zeros and self.number > 1))
            signs = np.where(wide == 0, 5.0 - 2.0 * self.number, np.sign(steps))  # zeros upwards, then downwards
            result = np.where(small, wide + float(info.smallest_subnormal) * signs * 2, result)
            return np.where(np.isfinite(wide), result, wide).astype(a.dtype)

    def result(self, node: Any, given: Mapping[str, Any], value: Any) -> Any:
        """Move a result of an inexact node."""
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        ulps = max(ULPS.get(node.op_type, 2), _growth(node, given))
        if node.op_type in STATES:
            finite = np.abs(value, where=np.isfinite(value), out=np.zeros_like(value))
            most = max(1.0, float(finite.max(initial=0))) if node.op_type in LARGEST else 1.0
            value = value + (4 * most * np.finfo(value.dtype).eps * self.steps(value.shape)).astype(value.dtype)
        if node.op_type in EXPONENTIALS and value.dtype.itemsize > 2:
            value = value + (np.finfo(value.dtype).smallest_normal * self.steps(value.shape)).astype(value.dtype)
        return self.moved(value, 8 * ulps if value.dtype.itemsize == 2 else ulps, zeros=True)

    def displaced(self, a: Array) -> Array:
        """Move floats by units of the largest one, times the extent in which places are counted."""
        ulps = max(8, 2 * max(a.shape[2:], default=0))
        with np.errstate(all="ignore"):
            wide = a.astype(np.float64)
            most = np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide))
            return (
                wide + ulps * float(np.finfo(a.dtype).eps) * most * Jitter(2 + self.number % 2, self.rng).steps(a.shape)
            ).astype(a.dtype)

    def equal(self, node: Any, given: Mapping[str, Any], results: list[Any]) -> list[Any]:
        """Return results of Equal that change from one evaluation to the next where rounded operands are close."""
        a, b = (given[name] for name in node.input)
        if a.dtype.kind != "f":
            return results
        with np.errstate(all="ignore"):
            near = np.isclose(a.astype(np.float64), b.astype(np.float64), *[64 * float(np.finfo(a.dtype).eps)] * 2)
        return [np.where(near, self.number % 2 == 0, results[0])]

    def given(self, node: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Move what an inexact node reads, so that sums whose terms cancel show it."""
        fixed = {node.input[p] for p in FIXED_ARGUMENTS.get(node.op_type, ()) if p < len(node.input)}
        result = {}
        for name, a in given.items():
            if not isinstance(a, np.ndarray) or a.dtype.kind != "f" or name in fixed:
                result[name] = a
            elif node.op_type in PLACED:
                result[name] = self.displaced(a)
            else:
                result[name] = Jitter(2 + self.number % 2, self.rng).moved(
                    a, (4 if a.dtype.itemsize == 2 else 2) * _growth(node, given)
                )
        return result
