"""Every ONNX operator that is imported, on symbolic dims, against onnx's own evaluator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, onnx
from tests.support.effort import some

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.frontend.onnx import random, recurrent, sizes
from relax_tune.ir.frontend.onnx.importer import SUPPORTED, load_onnx
from relax_tune.ir.frontend.onnx.shape_values import KNOWN
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Split
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

RNG = np.random.default_rng(3)


def f(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def i(low: int, high: int, *shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(low, high, shape, dtype=np.int64)


def truths(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 2, shape).astype(bool)


def u8(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def i8(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(-128, 128, shape, dtype=np.int8)


def positive(*shape: int) -> np.ndarray[Any, Any]:
    return np.abs(f(*shape)) + np.float32(0.1)


UNKNOWN_TO_ONNX = {"GlobalLpPool", "MaxRoiPool", "OptionalGetElement"}
"""Operators that onnx's own evaluator lacks, or gives a list for."""
RANDOM = set(random.HANDLERS) - {"Dropout"}
"""Operators whose results differ from those of any other evaluator."""
ONE = "(float[a, b] x) => (float[a, b] y)"
CASES: list[tuple[str, list[np.ndarray[Any, Any]]]] = [
    *[(f"{ONE} {{ y = {op}(x) }}", [f(3, 5)]) for op in (
        "Exp", "Erf", "Tanh", "Sigmoid", "Relu", "Gelu", 'Gelu<approximate = "tanh">', "Abs", "Neg", "Floor", "Ceil", "Sign",
        "Identity", "Elu", "Elu<alpha = 0.5>", "Selu", "LeakyRelu<alpha = 0.1>", "HardSigmoid", "HardSwish", "Softplus",
        "Softsign", "Mish", "Celu", "ThresholdedRelu<alpha = 0.5>", "Dropout", "Softmax", "Softmax<axis = 0>", "LogSoftmax",
        "LogSoftmax<axis = 0>", "MeanVarianceNormalization<axes = [0]>", "Cast<to = 1>",
    )],
    *[(f"{ONE} {{ y = {op}(x) }}", [positive(3, 5)]) for op in ("Sqrt", "Reciprocal", "Log")],
    *[(f"(float[a, b] x, float[b] y) => (float[a, b] z) {{ z = {op}(x, y) }}", [f(3, 5), positive(5)]) for op in (
        "Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu", "CastLike")],
    *[(f"(float[a, b] x, float[b] y) => (bool[a, b] z) {{ z = {op}(x, y) }}", [i(0, 3, 3, 5).astype("f4"), f(5).round()])
      for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")],
    *[(f"{ONE} <float c = {{3.0}}> {{ y = {op} }}", [f(3, 5)])
      for op in ("Add(x, c)", "Add(c, x)", "Sub(x, c)", "Sub(c, x)", "Mul(c, x)", "Div(x, c)", "Div(c, x)", "Pow(x, c)")],
    *[(f"{ONE} <float c = {{{v}}}> {{ y = Pow(x, c) }}", [positive(3, 5)]) for v in ("2.0", "0.5", "-0.5", "1.0", "1.7")],
    ("(int64[a] x) => (int64[a] y) <int64 c = {3}> { t = Mul(x, c)\n y = Add(t, c) }", [i(-4, 4, 6)]),
    ("(int32[a] x, int32[a] z) => (int32[a] y) { y = Sub(x, z) }", [i(-4, 4, 6).astype("i4"), i(-4, 4, 6).astype("i4")]),
    *[(f"(float[b, 2, h, w] x) => (float[b, 2, p, q] y) {{ y = {op}(x) }}", [f(2, 2, 6, 7)]) for op in (
        'MaxPool<auto_pad = "SAME_UPPER", kernel_shape = [3, 2], strides = [2, 3]>',
        "MaxPool<kernel_shape = [2, 2], strides = [4, 2], pads = [1, 0, 1, 1], ceil_mode = 1>",
        'AveragePool<auto_pad = "SAME_LOWER", kernel_shape = [2, 3], strides = [2, 2]>',
        "AveragePool<kernel_shape = [3, 2], strides = [2, 2], dilations = [2, 1], pads = [1, 1, 1, 1], ceil_mode = 1>",
        "LRN<size = 2, alpha = 0.5, beta = 0.6>",
    )],
    *[("(float[b, 4, h, w] x, float[4, c, k, 2] v) => (float[b, d, p, q] y) { y = ConvTranspose<strides = [2, 1], "
       f"{more}>(x, v) }}", [f(2, 4, 3, 4), f(4, 3, 3, 2)])
      for more in ("dilations = [1, 2], pads = [1, 0, 0, 1], output_padding = [1, 0]", "dilations = [3, 1]")],
    ('(float[b, 1, n] x, float[1, c, 4] v, float[c] o) => (float[b, c, p] y) { y = ConvTranspose<auto_pad = "SAME_UPPER", '
     "strides = [3]>(x, v, o) }", [f(2, 1, 5), f(1, 2, 4), f(2)]),
    ("(float[b, 2, h, w] x, float[c, 2, k, k] v) => (float[b, c, p, q] y) { y = Conv<auto_pad = \"SAME_LOWER\", strides = [2, 3]>"
     "(x, v) }", [f(2, 2, 6, 7), f(3, 2, 3, 3)]),
    ("(float[b, 12, n] x) => (float[b, c, 5, 6] y) <int64[2] s = {5, 6}, int64[2] k = {2, 3}> { y = Col2Im<strides = [1, 2], "
     "pads = [0, 1, 0, 1]>(x, s, k) }", [f(2, 12, 12)]),
    ("(float[h, w] x) => (float[h, w] y) { z = EyeLike<k = -1>(x)\n y = Add(x, z) }", [f(4, 5)]),
    *[("(float[h, w, 3] x) => (float[7, 4, 3] y) <int64[2] s = {7, 4}> { y = CenterCropPad<axes = [0, 1]>(x, s) }", [f(h, w, 3)])
      for h, w in ((4, 9), (10, 4))],
    *[(f"(bool[a, b] x, bool[b] y) => (bool[a, b] z) {{ z = {op}(x, y) }}", [truths(3, 5), truths(5)]) for op in ("And", "Or", "Xor")],
    ("(bool[a] x) => (bool[a] y) { y = Not(x) }", [truths(6)]),
    ("(float[b, n, 1] x) => (float[b, k, 2] y) { y = DFT<onesided = 1>(x) }", [f(2, 7, 1)]),
    ("(float[b, n, 1] x) => (float[b, p, k, 2] y) <int64 s = {2}, int64 l = {5}> { y = STFT(x, s, , l) }", [f(2, 9, 1)]),
    ("(float[n, k] x) => (float[n, c] y) <int64 m = {4}, int64 d = {12}, int64 r = {8000}, float u = {60.0}, float v = {3000.0}> "
     "{ w = MelWeightMatrix(m, d, r, u, v)\n y = MatMul(x, w) }", [f(3, 7)]),
    ("(bool[a, 1] c, float[b] x, float[a, b] y) => (float[a, b] z) { z = Where(c, x, y) }", [truths(3, 1), f(5), f(3, 5)]),
    ("(float[a] x) => (bool[a] y) { y = IsNaN(x) }", [np.array([1, np.nan, np.inf], "f4")]),
    ("(float[a] x) => (bool[a] y) { y = IsInf(x) }", [np.array([1, np.nan, -np.inf, np.inf], "f4")]),
    ("(float[a] x) => (bool[a] y) { y = IsInf<detect_positive = 0>(x) }", [np.array([1, -np.inf, np.inf], "f4")]),
    ("(float[a] x) => (int32[a] y) { y = Cast<to = 6>(x) }", [f(6) * 9]),
    ("(float[a] x) => (bool[a] y) { y = Cast<to = 9>(x) }", [np.array([0, 0.5, -2], "f4")]),
    ("(bool[a] x) => (float[a] y) { y = Cast<to = 1>(x) }", [truths(6)]),
    ("(float[a] x) => (bool[a] y) { z = Cast<to = 22>(x) y = Cast<to = 9>(z) }", [np.array([0, 0.5, -2, 16], "f4")]),
    ("(float[a] x) => (float[a] y) { z = Cast<to = 17, saturate = 0>(x) y = Cast<to = 1>(z) }", [np.array([0.3, 449, -1e4], "f4")]),
    (f"{ONE} <float lo = {{-0.5}}, float hi = {{0.25}}> {{ y = Clip(x, lo, hi) }}", [f(3, 5)]),
    (f"{ONE} <float hi = {{0.25}}> {{ y = Clip(x, , hi) }}", [f(3, 5)]),
    ("(float[a, k] x, float[k, b] y) => (float[a, b] z) { z = MatMul(x, y) }", [f(3, 5), f(5, 4)]),
    ("(float[n, a, k] x, float[k, b] y) => (float[n, a, b] z) { z = MatMul(x, y) }", [f(2, 3, 5), f(5, 4)]),
    ("(float[k] x, float[n, k, b] y) => (float[n, b] z) { z = MatMul(x, y) }", [f(5), f(2, 5, 4)]),
    ("(float[n, a, k] x, float[k] y) => (float[n, a] z) { z = MatMul(x, y) }", [f(2, 3, 5), f(5)]),
    ("(float[k] x, float[k] y) => (float z) { z = MatMul(x, y) }", [f(5), f(5)]),
    ("(float[a, k] x, float[k, b] y, float[b] c) => (float[a, b] z) { z = Gemm(x, y, c) }", [f(3, 5), f(5, 4), f(4)]),
    ("(float[k, a] x, float[b, k] y, float[1, b] c) => (float[a, b] z) "
     "{ z = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(x, y, c) }", [f(5, 3), f(4, 5), f(1, 4)]),
    ("(float[a, b, c] x, float[c] g, float[c] h) => (float[a, b, c] y) { y = LayerNormalization<epsilon = 0.001>(x, g, h) }",
     [f(2, 3, 5), f(5), f(5)]),
    ("(float[a, b, c] x, float[b, c] g) => (float[a, b, c] y) { y = LayerNormalization<axis = 1>(x, g) }", [f(2, 3, 5), f(3, 5)]),
    ("(float[a, b] x, float[b] g, float[b] h) => (float[a, b] y, float[a, 1] m, float[a, 1] s) "
     "{ y, m, s = LayerNormalization(x, g, h) }", [f(3, 5), f(5), f(5)]),
    ("(float[n, c, h] x, float[c] s, float[c] b, float[c] m, float[c] v) => (float[n, c, h] y) "
     "{ y = BatchNormalization(x, s, b, m, v) }", [f(2, 3, 5), f(3), f(3), f(3), positive(3)]),
    ("(float[n, c, h] x, float[c] s, float[c] b) => (float[n, c, h] y) { y = InstanceNormalization(x, s, b) }",
     [f(2, 3, 5), f(3), f(3)]),
    *[(f"(float[a, b, c] x) => (float[q] y) <int64[1] axes = {{1}}> {{ y = {op}(x, axes) }}", [f(2, 3, 5)]) for op in (
        "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2<keepdims = 0>", "ReduceSumSquare",
        "ReduceLogSumExp", "ReduceLogSumExp<keepdims = 0>")],
    ("(float[a, b] x) => (float[q] y) { y = ReduceSum(x) }", [f(3, 5)]),
    ("(float[a, b] x) => (float[q] y) { y = ReduceLogSum(x) }", [positive(3, 5)]),
    (f"{ONE} <int64[1] axes = {{-1}}> {{ m = ReduceMean<keepdims = 1>(x, axes)\n y = Sub(x, m) }}", [f(3, 5)]),
    ("(float[n, c, h, w] x) => (float[n, c, 1, 1] y) { y = GlobalAveragePool(x) }", [f(2, 3, 4, 5)]),
    ("(float[n, c, h, w] x) => (float[n, c, 1, 1] y) { y = GlobalMaxPool(x) }", [f(2, 3, 4, 5)]),
    ("(float[v, c] x, int64[a, b] k) => (float[a, b, c] y) { y = Gather(x, k) }", [f(7, 3), i(-7, 7, 2, 4)]),
    ("(float[v, c, d] x, int32[a, b] k) => (float[q] y) { y = Gather<axis = 1>(x, k) }", [f(3, 5, 2), i(-5, 5, 2, 4).astype("i4")]),
    ("(float[v, 5] x) => (float[q] y) <int64[2] k = {-1, 1}> { y = Gather<axis = 1>(x, k) }", [f(3, 5)]),
    ("(float[v, c] x) => (float[c] y) <int64 k = {2}> { y = Gather(x, k) }", [f(4, 5)]),
    ("(float[a, b] x, int64[c, d] k) => (float[c, d] y) { y = GatherElements<axis = 1>(x, k) }", [f(3, 5), i(-5, 5, 3, 4)]),
    ("(float[a, b, c] x, int64[m, 2] k) => (float[m, c] y) { y = GatherND(x, k) }", [f(3, 4, 5), i(-3, 3, 6, 2)]),
    ("(float[a, b] x) => (float[a, b] y) <int64 k = {1}> { y = Trilu(x, k) }", [f(4, 5)]),
    ("(float[a, b] x) => (float[a, b] y) { y = Trilu<upper = 0>(x) }", [f(4, 5)]),
    ("(int64[a] x) => (float[a, 4] y) <int64 depth = {4}, float[2] v = {-1.0, 2.0}> { y = OneHot(x, depth, v) }", [i(-4, 4, 5)]),
    ("(float[a, b, c] x) => (float[q] y) { y = Transpose<perm = [2, 0, 1]>(x) }", [f(2, 3, 4)]),
    ("(float[a, b, c] x) => (float[q] y) { y = Transpose(x) }", [f(2, 3, 4)]),
    *[(f"(float[a, b, 6] x) => (float[q] y) <int64[{len(s)}] s = {{{', '.join(map(str, s))}}}> {{ y = Reshape(x, s) }}", [f(2, 3, 6)])
      for s in ((0, -1), (-1,), (-1, 3, 2), (0, 0, 2, -1))],
    ("(float[a, b, c] x) => (float[q] y) { y = Flatten(x) }", [f(2, 3, 4)]),
    ("(float[a, b, c] x) => (float[q] y) { y = Flatten<axis = -1>(x) }", [f(2, 3, 4)]),
    ("(float[a, 1, c] x) => (float[q] y) { y = Squeeze(x) }", [f(2, 1, 4)]),
    ("(float[a, 1, c] x) => (float[q] y) <int64[1] k = {-2}> { y = Squeeze(x, k) }", [f(2, 1, 4)]),
    ("(float[a, c] x) => (float[q] y) <int64[2] k = {0, -1}> { y = Unsqueeze(x, k) }", [f(2, 4)]),
    ("(float[a, 1] x) => (float[q] y) <int64[3] s = {2, 1, 4}> { y = Expand(x, s) }", [f(3, 1)]),
    ("(float[a, b] x, float[a, c] z) => (float[q] y) { y = Concat<axis = -1>(x, z) }", [f(3, 5), f(3, 2)]),
    ("(float[a, 7] x) => (float[q] y, float[r] z) { y, z = Split<axis = 1, num_outputs = 2>(x) }", [f(3, 7)]),
    ("(float[a, 7] x) => (float[q] y, float[r] z) <int64[2] s = {2, 5}> { y, z = Split<axis = 1>(x, s) }", [f(3, 7)]),
    *[(f"(float[a, b] x) => (float[q] y) <int64[1] s = {{{s}}}, int64[1] e = {{{e}}}, int64[1] k = {{1}}> {{ y = Slice(x, s, e, k) }}",
       [f(3, 6)]) for s, e in ((1, 4), (0, -1), (-3, 9223372036854775807), (-99, 2), (5, 2))],
    ("(float[a, 6] x) => (float[q] y) <int64[1] s = {4}, int64[1] e = {-99}, int64[1] k = {1}, int64[1] t = {-2}> "
     "{ y = Slice(x, s, e, k, t) }", [f(3, 6)]),
    ("(float[a, b] x) => (float[q] y) <int64[2] r = {2, 3}> { y = Tile(x, r) }", [f(2, 4)]),
    ("(float[a, b] x) => (float[q] y) <int64[4] p = {1, 0, 0, 2}, float v = {0.5}> { y = Pad(x, p, v) }", [f(3, 4)]),
    ("(float[n, 8, h, w] x) => (float[q] y) { y = DepthToSpace<blocksize = 2>(x) }", [f(1, 8, 2, 3)]),
    ('(float[n, 8, h, w] x) => (float[q] y) { y = DepthToSpace<blocksize = 2, mode = "CRD">(x) }', [f(1, 8, 2, 3)]),
    ("(float[n, c, 4, 6] x) => (float[q] y) { y = SpaceToDepth<blocksize = 2>(x) }", [f(1, 2, 4, 6)]),
    ("(float[a, b] x) => (int64[2] y) { y = Shape(x) }", [f(3, 5)]),
    ("(float[a, b] x) => (int64 y) { y = Size(x) }", [f(3, 5)]),
    ("(float[a, b] x) => (float[b] y) { s = Shape<start = 1>(x)\n z = ConstantOfShape<value = float[1] {2.5}>(s)\n"
     " m = ReduceSum<keepdims = 0>(x)\n y = Mul(z, m) }", [f(3, 5)]),
    ("(float[a, b] x) => (int64[b] y) <int64 zero = {1}, int64 two = {2}, int64 at = {1}> "
     "{ s = Shape(x)\n n = Gather(s, at)\n y = Range(zero, n, two) }", [f(3, 8)]),
    *[(f"{ONE} {{ y = {op}(x) }}", [np.tanh(f(3, 5)) * np.float32(0.9)]) for op in (
        "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Atanh", "LpNormalization",
        "Hardmax", "Hardmax<axis = 0>")],
    (f"{ONE} {{ y = Acosh(x) }}", [positive(3, 5) + 1]),
    (f"{ONE} {{ y = LpNormalization<p = 1, axis = 0>(x) }}", [positive(3, 5)]),
    ("(float[n] x) => (float[n] y) { y = Round(x) }", [np.array([0.5, 1.5, -0.5, 2.4], "f4")]),
    *[(f"(float[a, b] x, float[b] y) => (float[a, b] z) {{ z = Mod<fmod = {k}>(x, y) }}", [f(4, 5) * 7, f(5) + 2]) for k in (1,)],
    *[(f"(int32[a, b] x, int32[b] y) => (int32[a, b] z) {{ z = {op}(x, y) }}", [i(-99, 99, 4, 5).astype("i4"), np.int32([1, 0, 31, 7, 2])])
      for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Pow")],
    *[(f"(uint16[a, b] x, uint16[b] y) => (uint16[a, b] z) {{ z = BitShift<direction = \"{d}\">(x, y) }}",
       [i(0, 60000, 4, 5).astype("u2"), np.uint16([1, 0, 15, 7, 16])]) for d in ("LEFT", "RIGHT")],
    ("(int32[a, b] x) => (uint16[a, b] y) { y = EyeLike<dtype = 4, k = 1>(x) }", [np.zeros((3, 5), "i4")]),
    ("(float[t, b, c] x, int64[b] n) => (float[t, b, c] y) { y = ReverseSequence<time_axis = 0, batch_axis = 1>(x, n) }",
     [f(4, 3, 2), np.array([4, 1, 2])]),
    ("(float[b, t] x, int64[b] n) => (float[b, t] y) { y = ReverseSequence<time_axis = 1, batch_axis = 0>(x, n) }",
     [f(3, 4), np.array([4, 1, 3])]),
    ("(uint64[a] x) => (uint64[a] y) { y = BitwiseNot(x) }", [np.uint64([0, 5, 2**64 - 1])]),
    ("(int32[a] x, float[a] y) => (int32[a] z) { z = Pow(x, y) }", [np.int32([9, 4, -3]), np.float32([0.5, -1, 3])]),
    *[(f"(int64[a, b] x, int64[b] y) => (int64[a, b] z) {{ z = {op}(x, y) }}", [i(-9, 9, 4, 5), np.array([-3, -1, 2, 5, 1])])
      for op in ("Mod", "Mod<fmod = 1>")],
    ("(int32[a, b] x, int32[b] y) => (int32[a, b] z) { z = Div(x, y) }", [i(0, 9, 4, 5).astype("i4"), np.array([3, 1, 2, 5, 1], "i4")]),
    *[(f"(float[a, b, c] x) => (int64[q] y) {{ y = {op}(x) }}", [f(2, 3, 5).round()]) for op in (
        "ArgMax", "ArgMax<axis = -1, keepdims = 0>", "ArgMin<axis = 1, select_last_index = 1>", "ArgMin")],
    *[(f"(float[a, b] x) => (float[q] y, int64[r] z) <int64[1] k = {{2}}> {{ y, z = TopK<axis = {a}, largest = {big}>(x, k) }}", [f(4, 5)])
      for a, big in ((0, 1), (-1, 0))],
    *[(f"(float[a, b] x) => (float[a, b] y) <int64 k = {{{a}}}> {{ y = {op}(x, k) }}", [f(4, 5)])
      for op in ("CumSum", "CumSum<exclusive = 1, reverse = 1>") for a in (0, -1)],
    *[(f"(float[a, b] x, int64[a, c] k, float[a, c] u) => (float[a, b] y) {{ y = ScatterElements<axis = 1{m}>(x, k, u) }}",
       [f(3, 6), np.array([[0, -1], [2, 1], [-6, 3]]), f(3, 2)]) for m in ("", ', reduction = "add"', ', reduction = "max"')],
    *[(f"(float[a, b, c] x, int64[m, 2] k, float[m, c] u) => (float[a, b, c] y) {{ y = ScatterND{m}(x, k, u) }}",
       [f(3, 4, 2), np.array([[0, -1], [2, 1]]), f(2, 2)]) for m in ("", '<reduction = "mul">')],
    ("(float[a, b, c] x) => (float[q] y) <int64[1] axes = {1}> { y = ReduceProd(x, axes) }", [f(2, 3, 5)]),
    ("(bool[a, b] x) => (bool[q] y) <int64[1] axes = {1}> { y = ReduceMax<keepdims = 0>(x, axes) }", [truths(4, 3)]),
    ("(float[n, 3, h] x, float[4, 3, 3] k, float[4] b) => (float[q] y) { y = Conv<pads = [1, 1]>(x, k, b) }",
     [f(2, 3, 7), f(4, 3, 3), f(4)]),
    ("(float[n, 4, h, w] x, float[6, 2, 3, 2] k) => (float[q] y) { y = Conv<group = 2, dilations = [2, 1]>(x, k) }",
     [f(1, 4, 8, 6), f(6, 2, 3, 2)]),
    ('(float[n, c, 7, 6] x, float[4, c, 3, 2] k) => (float[q] y) { y = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(x, k) }',
     [f(1, 2, 7, 6), f(4, 2, 3, 2)]),
    ("(float[n, c, h, w] x) => (float[q] y) { y = MaxPool<kernel_shape = [3, 2], pads = [1, 1, 1, 1]>(x) }", [f(2, 3, 5, 6)]),
    ("(float[n, c, 8] x) => (float[q] y) { y = MaxPool<kernel_shape = [3], strides = [2], ceil_mode = 1>(x) }", [f(2, 3, 8)]),
    *[(f"(float[n, c, 7, 8] x) => (float[q] y) {{ y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]{m}>(x) }}",
       [f(2, 3, 7, 8)]) for m in ("", ", count_include_pad = 1", ", ceil_mode = 1", ", ceil_mode = 1, count_include_pad = 1")],
    ("(float[n, c, h, w] x) => (float[q] y) { y = AveragePool<kernel_shape = [2, 2]>(x) }", [f(2, 3, 5, 6)]),
    *[(f"(float[n, c, h] x) => (float[q] y) {{ y = LpPool<kernel_shape = [2], p = {p}>(x) }}", [f(2, 3, 6)]) for p in (1, 2, 3)],
    ("(float[a, b] x) => (uint8[a, b] y) <float s = {0.05}, uint8 z = {100}> { y = QuantizeLinear(x, s, z) }", [f(3, 5) * 4]),
    ("(float[a, 3] x) => (int8[a, 3] y) <float[3] s = {0.05, 0.1, 0.2}, int8[3] z = {1, 2, -3}> { y = QuantizeLinear<axis = 1>(x, s, z) }",
     [f(4, 3)]),
    ("(uint8[3, b] x) => (float[3, b] y) <float[3] s = {0.05, 0.1, 0.2}, uint8[3] z = {1, 2, 3}> "
     "{ y = DequantizeLinear<axis = 0>(x, s, z) }",
     [i(0, 255, 3, 5).astype("u1")]),
    ("(uint8[a, k] x, uint8[k, b] w) => (int32[a, b] y) <uint8 z = {12}> { y = MatMulInteger(x, w, z) }",
     [i(0, 255, 3, 5).astype("u1"), i(0, 255, 5, 4).astype("u1")]),
    *[(f"(uint8[{x}] x, uint8[{w}] w) => (int32[{y}] y) <uint8 z = {{12}}> {{ y = MatMulInteger(x, w, z) }}",
       [i(0, 255, *(3, 5)[x == "k":]).astype("u1"), i(0, 255, *(5, 4)[:2 - (w == "k")]).astype("u1")])
      for x, w, y in (("k", "k, b", "b"), ("a, k", "k", "a"))],
    ("(uint8[k] x, uint8[k] w) => (int32[1] y) <uint8 z = {12}, int64[1] s = {1}> { v = MatMulInteger(x, w, z) y = Reshape(v, s) }",
     [i(0, 255, 5).astype("u1"), i(0, 255, 5).astype("u1")]),
    ("(uint8[a, k] x, int8[k, b] w) => (uint8[a, b] y) <float s = {0.01}, uint8 z = {12}, float t = {0.02}, int8 v = {3}, float r = {0.1}, "
     "uint8 o = {118}> { y = QLinearMatMul(x, s, z, w, t, v, r, o) }", [i(0, 255, 3, 5).astype("u1"), i(-128, 127, 5, 4).astype("i1")]),
    *[(f'(float[a, b, c] x) => (float[q] y) {{ y = Einsum<equation = "{e}">(x) }}', [f(2, 3, 4)])
      for e in ("abc->cab", "abc->b", "...c->...", "abc")],
    *[(f'(float[b, n, k] x, float[b, m, k] z) => (float[q] y) {{ y = Einsum<equation = "{e}">(x, z) }}', [f(2, 3, 4), f(2, 5, 4)])
      for e in ("bnk,bmk->bnm", "bnk,bmk->mbn", "...nk,...mk->...nm", "bnk,bmk->", "bnk,bmk->bk")],
    (f"{ONE} {{ c = Constant<value_float = 2.5>()\n y = Mul(x, c) }}", [f(3, 5)]),
    ("(float[a] x) => (float[a] y) { c = Constant<value = float[1] {2.5}>()\n y = Mul(x, c) }", [f(3)]),
    *[(f"(float[a, b] x) => (float[q, r] y) <int64[4] p = {{1, 2, 0, 3}}> {{ y = Pad<mode = \"{mode}\">(x, p) }}", [f(3, 5)])
      for mode in ("edge", "reflect")],
    *[(f"(float[a, b] x) => (float[q, b] y) <int64[1] s = {{{s}}}, int64[1] e = {{{e}}}, int64[1] z = {{0}}, int64[1] t = {{{t}}}> "
       "{ y = Slice(x, s, e, z, t) }", [f(7, 5)])
      for s, e, t in ((1, 6, 2), (-1, -9223372036854775807, -1), (5, 1, -2), (-2, -6, -3), (100, 0, -1))],
    # sequences
    ("(float[n, 3] x, float[m, 3] z) => (float[k, 3] y, int64 l) { s = SequenceConstruct(x, z, x) l = SequenceLength(s) "
     "y = ConcatFromSequence<axis = 0>(s) }", [f(2, 3), f(4, 3)]),
    ("(float[n, 3] x) => (float[n, a, b] y) { z = Neg(x) s = SequenceConstruct(x, z) y = ConcatFromSequence<axis = -1, new_axis = 1>(s) }",
     [f(2, 3)]),
    ("(float[n] x, float[m] z) => (float[k] y) <int64 first = {0}> { e = SequenceEmpty() s = SequenceInsert(e, x) "
     "t = SequenceInsert(s, z, first) u = SequenceInsert(t, z) v = SequenceErase(u, first) y = ConcatFromSequence<axis = 0>(v) }",
     [f(2), f(3)]),
    ("(float[n] x, float[m] z) => (float[k] y) <int64 last = {-1}> { s = SequenceConstruct(x, z) y = SequenceAt(s, last) }",
     [f(2), f(3)]),
    ("(float[n] x, int64 at) => (float[n] y) { z = Neg(x) s = SequenceConstruct(x, z) y = SequenceAt(s, at) }",
     [f(2), np.array(1)]),
    ("(float[n, 7] x) => (float[n, k] y) <int64 size = {3}, int64 at = {2}> { s = SplitToSequence<axis = 1>(x, size) "
     "y = SequenceAt(s, at) }", [f(2, 7)]),
    ("(float[n, 7] x) => (float[n, k] y) <int64[2] sizes = {3, 4}, int64 at = {1}> { s = SplitToSequence<axis = -1>(x, sizes) "
     "y = SequenceAt(s, at) }", [f(2, 7)]),
    ("(float[n, 3] x) => (float[m, k] y, int64 l) { s = SplitToSequence(x) l = SequenceLength(s) y = ConcatFromSequence<axis = 1>(s) }",
     [f(4, 3)]),
    ("(float[n, 3] x, int64 at) => (float[3] y) { s = SplitToSequence<keepdims = 0>(x) y = SequenceAt(s, at) }",
     [f(4, 3), np.array(-2)]),
]  # fmt: skip

QKV, HEADS = (
    "(float[a, 4, n, 6] q, float[a, 2, m, 6] k, float[a, 2, m, 6] v",
    [f(2, 4, 3, 6), f(2, 2, 5, 6), f(2, 2, 5, 6)],
)
# Operators that came after the opset of the cases above.
NEWER: list[tuple[int, str, list[np.ndarray[Any, Any]]]] = [
    (26, "(float[n] x) => (int32[n] y) { y = BitCast<to = 6>(x) }", [f(5)]),
    *[(26, f"(float[a, b] x) => (float[a, b] y) <int64 k = {{1}}> {{ y = {op}(x, k) }}", [f(4, 5)])
      for op in ("CumProd", "CumProd<exclusive = 1>", "CumProd<reverse = 1>")],
    (24, "(float[b, h, n, c] x, float[b, h, m, c] u, int64[b] k) => (float[b, h, n, c] y) { y = TensorScatter(x, u, k) }",
     [f(2, 3, 7, 4), f(2, 3, 2, 4), np.array([1, 4])]),
    (24, "(float[b, h, n, c] x, float[b, h, m, c] u, int64[b] k) => (float[b, h, n, c] y) "
     "{ y = TensorScatter<mode = \"circular\">(x, u, k) }", [f(2, 3, 7, 4), f(2, 3, 2, 4), np.array([6, 4])]),
    *[(21, f"(float[a] x, float s, {t}int16 z) => ({t}int16[a] y) {{ y = QuantizeLinear(x, s, z) }}",
       [np.float32([0, 0.5, -70000, 1e9, 3]), np.float32(0.5), np.dtype(f"{t}int16").type(7)]) for t in ("", "u")],
    (21, "(uint16[a] x, float s, uint16 z) => (float[a] y) { y = DequantizeLinear(x, s, z) }",
     [np.uint16([0, 7, 65535]), np.float32(0.5), np.uint16(7)]),
    (24, f"{QKV}) => (float[a, 4, n, 6] y) {{ y = Attention(q, k, v) }}", HEADS),
    (24, f"{QKV}, bool[n, m] x) => (float[a, 4, n, 6] y) {{ y = Attention<softcap = 2.0>(q, k, v, x) }}", [*HEADS, truths(3, 5)]),
    (24, f"{QKV}, float[a, 2, p, 6] r, float[a, 2, p, 6] s) => (float[a, 4, n, 6] y, float[a, 2, t, 6] i, float[a, 2, t, 6] j) "
     "{ y, i, j = Attention<is_causal = 1>(q, k, v, , r, s) }", [*HEADS, f(2, 2, 7, 6), f(2, 2, 7, 6)]),
    (25, "(float[a, n, 8] q) => (float[a, n, 8] y) { y = Attention<q_num_heads = 2, kv_num_heads = 2, left_window_size = 1, "
     "right_window_size = 0>(q, q, q) }", [f(2, 5, 8)]),
    (25, "(float[a, n, 8] q) => (float[a, n, 8] y) { y = Attention<q_num_heads = 2, kv_num_heads = 2>(q, q, q) }", [f(2, 5, 8)]),
    (25, "(float[a, h, n, s] q, float[a, g, n, s] k) => (float[a, h, n, s] y) { y = Attention(q, k, k) }",
     [f(2, 4, 5, 3), f(2, 2, 5, 3)]),
    (13, '(float[b, h, w] x) => (float[b, p, q] y) <float[3] s = {1.0, 2.0, 0.75}> { y = Resize<mode = "linear">'
     "(x, , s) }", [f(2, 3, 4)]),
    *some([(19, f'(float[b, h, w] x) => (float[b, p, q] y) <{given}> {{ y = Resize<axes = [1, 2], mode = "{mode}", '
       f'coordinate_transformation_mode = "{where}", exclude_outside = {within}, antialias = {smooth}, '
       f'extrapolation_value = 9.5>(x, {inputs}) }}', [f(2, h, w)])
      for given, inputs in (("float[2] s = {1.5, 0.625}", ", s"), ("int64[2] s = {4, 7}", ", , s"))
      for where in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")
      for mode, within, smooth in (("nearest", 0, 0), ("linear", 0, 0), ("linear", 0, 1), ("cubic", 1, 0), ("cubic", 1, 1))
      for h, w in ((5, 9), (6, 4))], 5),
    *[(22, "(float[b, 2, h, w] x) => (float[b, 2, 4, 6] y, int64[b, 2, p, q] i) <int64[4] s = {2, 2, 4, 6}> { y, i = MaxPool<"
       f"kernel_shape = [2, 2], strides = [2, 2], storage_order = {o}>(x) }}", [f(2, 2, 4, 6)]) for o in (0, 1)],
    (22, "(float[b, 2, h, w] x) => (float[b, 2, 4, 6] y) { z, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)\n"
     " y = MaxUnpool<kernel_shape = [2, 2], strides = [2, 2]>(z, i) }", [f(2, 2, 4, 6)]),
    *[(20, '(float[b, c, h, w] x, float[b, p, q, d] g) => (float[b, c, p, q] y) { y = GridSample<mode = '
       f'"{mode}", padding_mode = "{pad}", align_corners = {align}>(x, g) }}', [f(2, 3, 4, 5), f(2, 3, 2, 2)])
      for mode in ("linear", "nearest", "cubic") for pad, align in (("zeros", 0), ("border", 1), ("border", 0), ("reflection", 0))],
    *[(20, f"(float[b, d, e] t) => (float[b, {dims}] y) <int64[{n + 2}] s = {{2, 3, {dims}}}> {{ y = AffineGrid<align_corners = {a}>"
       "(t, s) }", [f(2, n, n + 1)]) for n, dims in ((2, "4, 5"), (3, "2, 3, 4")) for a in (0, 1)],
    *[(22, "(float[b, c, h, w] x, float[r, k] i, int64[r] j) => (float[r, c, 2, 3] y) { y = RoiAlign<output_height = 2, "
       f'output_width = 3, sampling_ratio = 2, spatial_scale = 0.5, coordinate_transformation_mode = "{mode}">(x, i, j) }}',
       [f(2, 3, 6, 5), np.array([[1, 2, 8, 9], [-8, 0, 3, 30], [4, 4, 4, 4]], "f4"), np.array([0, 1, 1])])
      for mode in ("half_pixel", "output_half_pixel")],
    *[(19, '(float[b, h, w] x) => (float[b, p, q] y) <int64[2] s = {6, 8}> { y = Resize<axes = [2, 1], '
       f'keep_aspect_ratio_policy = "{policy}", nearest_mode = "{kind}">(x, , , s) }}', [f(2, 5, 9)])
      for policy in ("not_larger", "not_smaller") for kind in ("floor", "round_prefer_ceil")],
    *[(19, '(float[b, h, w] x) => (float[b, p, q] y) <int64[2] s = {6, 7}, float[4] r = {0.25, -0.125, 0.875, 1.125}> { y = Resize<'
       f'axes = [2, 1], coordinate_transformation_mode = "tf_crop_and_resize", mode = "{mode}", extrapolation_value = 3.0>'
       '(x, r, , s) }', [f(2, 5, 9)]) for mode in ("nearest", "linear", "cubic")],
    *[(22, "(float[b, c, h, w] x, float[r, k] i, int64[r] j) => (float[r, c, 2, 3] y) { y = RoiAlign<output_height = 2, "
       f'output_width = 3, sampling_ratio = {ratio}, mode = "{kind}", coordinate_transformation_mode = "{mode}">(x, i, j) }}',
       [f(2, 3, 6, 5), np.array([[1, 2, 8, 9], [-8, 0, 3, 30], [4, 4, 4, 4], [3, 5, 1, 1], [0.3, 0.7, 23, 17]], "f4"),
        np.array([0, 1, 1, 0, 1])])
      for mode in ("half_pixel", "output_half_pixel") for ratio, kind in ((0, "avg"), (2, "max"))],
    (21, "(uint8[n, 4, h, w] x, uint8[6, 2, 2, 3] k, uint8 z, uint8[6] o) => (int32[n, 6, p, q] y) { y = ConvInteger<group = 2, "
     "pads = [1, 0, 2, 1], strides = [2, 1]>(x, k, z, o) }", [u8(2, 4, 7, 5), u8(6, 2, 2, 3), np.uint8(7), u8(6)]),
    (21, "(int8[n, 4, h, w] x, float s, int8 z, int8[6, 2, 2, 3] k, float[6] t, int8[6] o, float r, int8 a, int32[6] b) => "
     "(int8[n, 6, p, q] y) { y = QLinearConv<group = 2, pads = [1, 0, 2, 1], dilations = [2, 1]>(x, s, z, k, t, o, r, a, b) }",
     [i8(2, 4, 7, 5), np.float32(0.013), np.int8(4), i8(6, 2, 2, 3), positive(6), i8(6), np.float32(9.7), np.int8(-6),
      i(-999, 999, 6).astype("i4")]),
    (21, "(float[n, 4, h, w] x, float[6, 2, 2, 3] k, float[n, t, p, q] o, float[6] b, float[n, v, p, q] m) => (float[n, 6, p, q] y) "
     "{ y = DeformConv<group = 2, offset_group = 2, pads = [1, 0, 2, 1], dilations = [2, 1]>(x, k, o, b, m) }",
     [f(2, 4, 7, 5), f(6, 2, 2, 3), f(2, 24, 8, 4), f(6), f(2, 12, 8, 4)]),
    *[(21, f"(float[b, {n}, {n}] x) => (float[b] y) {{ y = Det(x) }}", [f(3, n, n)]) for n in (1, 2, 5)],
    (21, "(float[n] x) => (float[n] y) { o = Optional(x)\n h = OptionalHasElement(o)\n z = Cast<to = 1>(h)\n y = Add(x, z) }", [f(3)]),
    (21, "(float[n, m] x, float v) => (float[p, q] y) <int64[4] s = {1, 0, 2, 3}> { w = Exp(v)\n y = Pad(x, s, w) }",
     [f(2, 3), np.float32(0.5)]),
    (21, "(float[n, c, h] x, float[c] s, float[c] b, float[c] m, float[c] v) => (float[n, c, h] y, float[c] p, float[c] q) "
     "{ y, p, q = BatchNormalization<training_mode = 1, momentum = 0.75>(x, s, b, m, v) }", [f(3, 2, 5), f(2), f(2), f(2), positive(2)]),
    (21, "(float[n, 6, h] x, float[6] s, float[6] b) => (float[n, 6, h] y) "
     "{ y = GroupNormalization<num_groups = 2, epsilon = 0.01>(x, s, b) }", [f(2, 6, 5), f(6), f(6)]),
    (21, "(float[n, c, h] x, float[c] s, float[c] b) => (float[n, c, h] y) { y = GroupNormalization<num_groups = 2>(x, s, b) }",
     [f(2, 6, 5), f(6), f(6)]),
]  # fmt: skip


def title(case: tuple[str, Any]) -> str:
    return re.sub(r"\W+", "-", case[0].partition("{ ")[2] or case[0])[:50]


@pytest.mark.parametrize("case", [c for c in NEWER if "Attention" in c[1]], ids=lambda c: title(c[1:]))
def test_attention_is_one_operator(case: tuple[int, str, list[np.ndarray[Any, Any]]]) -> None:
    assert "attention" in operators(load_onnx(model(case[1], case[0])))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=title)
def test_operator(case: tuple[str, list[np.ndarray[Any, Any]]]) -> None:
    module = check(model(case[0]), case[1])
    text = print_text(module)
    again = parse_module(text, operators=OPERATORS, constants=module.constants)
    assert structural_equal(module, again)


@pytest.mark.parametrize("case", NEWER, ids=lambda c: title(c[1:]))
def test_newer_operator(case: tuple[int, str, list[np.ndarray[Any, Any]]]) -> None:
    check(model(case[1], case[0]), case[2])


def test_every_handler_is_exercised() -> None:
    text = " ".join(t for t, _ in (*CASES, *(c[1:] for c in NEWER)))
    used = set(re.findall(r"= (\w+)(?:<[^(]*>)?\(", text))
    # tested with old opsets, with control flow, by their statistics, and by greedy choice
    elsewhere = {"Scatter", "Upsample", *recurrent.HANDLERS, *RANDOM, *sizes.HANDLERS}
    assert set(SUPPORTED) - used == UNKNOWN_TO_ONNX | elsewhere


def test_global_lp_pool() -> None:
    texts = (f"(float[b, 2, h, w] x) => (float[b, 2, 1, 1] y) {{ y = {op}(x) }}" for op in (
        "GlobalLpPool<p = 3>", "LpPool<p = 3, kernel_shape = [3, 4]>"))  # fmt: skip
    own, same = map(model, texts)
    check(own, [f(2, 2, 3, 4)], same_as=same)


def test_load_onnx_optional_certain_at_import_is_resolved() -> None:
    own, same = (
        model(f"(float[n] x) => (float[n] y) {{ o = {op}(x)\n y = {get}(o) }}", 21)
        for op, get in (("Optional", "OptionalGetElement"), ("Identity", "Identity"))
    )
    check(own, [f(3)], same_as=same)
    empty = "(float[n] x) => (float[n] y) { o = Optional()\n"
    added = model(f"{empty} h = OptionalHasElement(o)\n z = Cast<to = 1>(h)\n y = Add(x, z) }}", 21)
    check(added, [f(3)], same_as=model("(float[n] x) => (float[n] y) { y = Identity(x) }"))
    with pytest.raises(ParseError, match=r"operator OptionalGetElement .*got one without"):
        load_onnx(model(f"{empty} y = OptionalGetElement(o) }}", 21))
    with pytest.raises(ParseError, match=r"operator Add .*optional without a value"):
        load_onnx(model(f"{empty} y = Add(x, o) }}", 21))


def operators(module: IRModule) -> list[str]:
    main = module.functions["main"]
    assert isinstance(main, Function)
    return [b.value.op.name for b in main.bindings if isinstance(b.value, Call)]  # type: ignore[attr-defined]


def test_splits_are_slices() -> None:
    """Tensor functions with several outputs are not built: a split is several slices."""
    module = load_onnx(model("(float[a, 8] x) => (float[q] y, float[r] z) { y, z = Split<axis = 1>(x) }", 13))
    assert operators(module) == ["slice", "slice"]
    assert Split.name not in operators(module)


def test_axes_as_attributes_of_older_opsets() -> None:
    check(model("(float[a, b, c] x) => (float[q] y) { y = ReduceMax<axes = [-1], keepdims = 0>(x) }", 13), [f(2, 3, 4)])
    check(model("(float[a, b, c] x) => (float[q] y) { y = ReduceMean<axes = [0, 2]>(x) }", 13), [f(2, 3, 4)])


def test_load_onnx_results_keep_names_and_own_memory() -> None:
    text = (
        "(float[a] x) => (float[a] p, float[a] q, float[a] same) { p = Identity(x)\n q = Relu(x)\n same = Identity(q) }"
    )
    module = check(model(text), [f(4)])
    main = module.functions["main"]
    assert isinstance(main, Function)
    assert [v.name for v in main.ret.fields] == ["p", "q", "same"]  # type: ignore[attr-defined]
    assert operators(module) == ["relu", "permute", "permute"]


def test_a_function_of_the_model_is_inlined() -> None:
    text = """<ir_version: 9, opset_import: ["" : 20, "mine" : 1]>
    graph (float[a] x) => (float[a] y) { t = mine.scaled<by = 3.0>(x)
      y = Relu(t) }
    <domain: "mine", opset_import: ["" : 20]>
    scaled <by> (x) => (y) { c = Constant<value_float : float = @by>()
      y = Mul(x, c) }"""
    module = check(onnx.parser.parse_model(text), [f(5)])
    assert operators(module) == ["mul_scalar", "relu"]


def test_load_onnx_unsupported_operator_names_node_and_similar() -> None:
    with pytest.raises(ParseError) as caught:
        load_onnx(model('(float[a, 4] x) => (float[q] y) { t = Relu(x)\n ["arg"] y = ImageDecoder(t) }'))
    said = str(caught.value)
    assert "ImageDecoder (domain ai.onnx, opset 20, version 20)" in said and "fed by Relu" in said
    assert "Tensor((a, 4), f32)" in said and "expected one of the" in said
    with pytest.raises(ParseError, match="near in name and supported: Concat"):
        load_onnx(model("(float[n] x, float[n] r) => (float[n] y) { y = StringConcat(x, r) }"))


def test_load_onnx_data_dependent_reshape_raises() -> None:
    with pytest.raises(ParseError, match=r"operator Reshape .* known from constants"):
        load_onnx(model("(float[a] x, int64[2] s) => (float[q] y) { y = Reshape(x, s) }"))


def test_load_onnx_unequal_inner_dims_name_node() -> None:
    with pytest.raises(ParseError, match=r"operator MatMul .* got 3 and 4"):
        load_onnx(model("(float[a, 3] x, float[4, b] z) => (float[q] y) { y = MatMul(x, z) }"))


def test_load_onnx_undecided_dims_checked_at_run_time() -> None:
    z = f(3, 4)
    sums = "(float[a, b] x, float[c, d] z) => (float[q] y) { s = Add(x, z)\n t = Mul(s, x)\n y = Sub(t, s) }"
    for first, second in (((3, 4), (3, 4)), ((1, 4), (3, 1)), ((3, 1), (1, 1))):  # dims may be 1 beside another
        check(model(sums), [f(*first), f(*second)])
        check(model(sums.replace("[a, b] x, float[c, d]", "[?, ?] x, float[?, ?]")), [f(*first), f(*second)])
    check(model("(float[a] x, float[c, d] z) => (float[q] y) { s = Shape(z)\n y = Expand(x, s) }"), [f(4), z])
    checks = lower(load_onnx(model("(float[a] x, float[c] z) => (float[q] y) { y = Add(x, z) }"))).checks["main"]
    assert checks
    with pytest.raises(UserError, match="expected"):
        run_function(load_onnx(model(sums)), "main", [f(2, 4), f(3, 4)])
    bounds = {"a": (2, None), "c": (2, None)}
    two = load_onnx(model("(float[a] x, float[c] z) => (float[q] y) { y = Add(x, z) }"), bounds)
    assert {repr(c.cond) for c in lower(two).checks["main"]} == {"a == c", "c == a"}  # neither can be 1


JOINED = [
    ("(float[a, 2, 3] x, float[b, 3, 4] z) => (float[c, 2, 4] y) { y = MatMul(x, z) }", (2, 3), (3, 4)),
    ('(float[a, 2, 3] x, float[b, 3, 4] z) => (float[c, 2, 4] y) { y = Einsum<equation = "bij,bjk->bik">(x, z) }', (2, 3), (3, 4)),
    ('(float[a, 2, 3] x, float[b, 3, 4] z) => (float[c, 2, 4] y) { y = Einsum<equation = "...ij,...jk->...ik">(x, z) }', (2, 3), (3, 4)),
    ("(float[a, 4] x, float[b, 4] z) => (float[c, 4] y) { q = Less(x, z)\n y = Where(q, x, z) }", (4,), (4,)),
    ("(float[a, 4] x, float[b, 4] z) => (float[c, 4] y) { s = Add(x, z)\n t = Pow(x, s)\n y = Mul(t, z) }", (4,), (4,)),
]  # fmt: skip


@pytest.mark.parametrize("text, first, second", JOINED, ids=lambda x: x[-60:] if isinstance(x, str) else "")
def test_dims_of_two_names_broadcast(text: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    for a, b in ((1, 3), (3, 1), (3, 3), (1, 1)):
        check(model(text), [abs(f(a, *first)), f(b, *second)], rtol=1e-4)


def test_diagonal_of_two_names_wants_equal_dims() -> None:
    text = '(float[a, b] x) => (float[c] y) { y = Einsum<equation = "ii->i">(x) }'
    check(model(text), [f(3, 3)])
    with pytest.raises(UserError, match="expected"):
        run_function(load_onnx(model(text)), "main", [f(1, 3)])


def test_named_dim_beside_a_number_may_be_1() -> None:
    text = "(float[a, h] x) => (float[a, 4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"
    for size in (1, 4):
        check(model(text), [f(3, size)])
    with pytest.raises(UserError, match="h to be 4 or 1, got 3"):
        run_function(load_onnx(model(text)), "main", [f(2, 3)])


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_other_floats(dtype: str) -> None:
    name = {"f2": "float16", "f8": "double"}[dtype]
    check(model(f"({name}[a, b] x) => ({name}[a, b] y) {{ y = Tanh(x) }}"), [f(2, 3).astype(dtype)], rtol=2e-3)


def test_known_operators_are_handled_as_tensors_too() -> None:
    assert set(KNOWN) <= set(SUPPORTED)


def test_weight_returned_as_result_takes_another_name() -> None:
    module = check(
        model("(float[n, 4] x) => (float[n, 4] y, float[4] w) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"), [f(3, 4)]
    )
    assert set(module.constants) == {"w_1"}


@pytest.mark.parametrize("n", [1, 4, 6, 9])
def test_quotients_of_dims_round_towards_zero(n: int) -> None:
    """Common factors cancel, so that the quotient is a dim also where the divisor may be 0, which a call refuses."""
    text = """(float[n, m] x) => (int64[a] q, float[h, k] y, int64[n] s) <int64[1] five = {5}, int64[1] three = {3},
      int64[1] one = {1}, int64[1] more = {-1}> {
      a = Shape<end = 1>(x) b = Shape<start = 1>(x) d = Sub(a, five) q = Div(d, three)
      u = Mul(a, b) v = Mul(u, three) e = Mul(a, three) t = Div(v, e) z = Concat<axis = 0>(t, more) y = Reshape(x, z)
      g = Add(b, one) s = Sign(g) }"""
    module = check(model(text), [f(n, 3)], {"n": (0, 64)})
    with pytest.raises(UserError, match=r"n \* 3 != 0"):
        run_function(module, "main", [f(0, 3)])


def test_load_onnx_group_norm_takes_work_on_the_result() -> None:
    text = """(float[n, 6, h] x, float[6] s, float[6] b) => (float[n, 6, h] y) {
      g = GroupNormalization<num_groups = 2>(x, s, b) t = Sigmoid(g) y = Mul(g, t) }"""
    module = check(model(text, 21), [f(2, 6, 5), f(6), f(6)])
    assert [c.callee for c in lower(module).calls()] == ["fused_layer_norm_sigmoid_mul"]
