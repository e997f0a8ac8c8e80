"""One catalogue of operators with arguments, for the suites that compare meanings: NumPy, loops, compiled code, ONNX.

Elementwise operators without attributes get arguments by the element types that they state, so that a new one is tested
without an entry. Other operators have entries in `SAMPLES`; a test requires that every operator has one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import (
    SMALL,
    f8e4m3fn,
    f8e4m3fnuz,
    f8e5m2,
    f8e8m0,
    f16,
    f32,
    f64,
    i4,
    i8,
    i32,
    u4,
    u8,
    u16,
)
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Iota, Scalars
from relax_tune.ir.op.indexing.gather import GatherElements, GatherND
from relax_tune.ir.op.indexing.movement import (
    BroadcastTo,
    Concat,
    ExpandDims,
    Flatten,
    Permute,
    Reshape,
    Slice,
    Split,
    Take,
)
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.indexing.scatter import ScatterElements, ScatterND
from relax_tune.ir.op.math.bits import (
    BitCast,
    BitwiseNot,
)
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    DivScalar,
    Elementwise,
    MaximumScalar,
    Mul,
    MulScalar,
    Relu,
)
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import (
    Abs,
    Modulo,
    Quotient,
    Rint,
)
from relax_tune.ir.op.math.quantize import Dequantize, Pack4, Quantize, Unpack4
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import CausalSoftmax, RmsNorm, Rotary
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.neural.paged import PagedAttention, PagedWrite
from relax_tune.ir.op.neural.resize import Resize
from relax_tune.ir.op.neural.window import Conv, Pool, PoolPositions
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import (
    L2Normalize,
    LayerNorm,
    Max,
    MaxOrLowest,
    Mean,
    MeanPool,
    Min,
    MinOrHighest,
    Softmax,
    Sum,
)
from relax_tune.ir.op.reduction.scan import ArgMax, CumProd, CumSum, Prod, TopK
from relax_tune.ir.op.reduction.trees import TreeEnsemble
from relax_tune.ir.op.registry import ELEMENTWISE

Array = np.ndarray[Any, Any]
Sample = tuple[OperatorSpec, list[Array]]
RNG = np.random.default_rng(7)


# tables of two texts, of blocks that they share and others; text and position of five tokens
PLACES = [np.array([[3, 0, 2], [3, 6, 5]]), np.array([0, 0, 1, 1, 0]), np.array([10, 1, 0, 5, 11])]


def rand(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(low: int, high: int, *shape: int) -> Array:
    return RNG.integers(low, high, shape, dtype=np.int64)


def bools(*shape: int) -> Array:
    return RNG.integers(0, 2, shape).astype(bool)


def hiding_bias(*shape: int) -> Array:
    """Return a bias of attention scores that is minus infinity at random places, and in the whole first row."""
    bias = np.where(RNG.random(shape) < 0.4, -np.inf, rand(*shape)).astype(np.float32)
    bias[0] = -np.inf
    return bias


def positive(*shape: int) -> Array:
    return np.asarray(RNG.random(shape) + 0.1, np.float32)


def dims(*shape: int) -> tuple[Any, ...]:
    return tuple(const(d) for d in shape)


def resize(size: int, n: int, axis: int, **more: Any) -> Resize:
    """Return a resize from `n` to `size` elements that keeps the centre."""
    return Resize((axis,), dims(size), dims(2 * n), dims(n - size), dims(max(2 * size, 1)), **more)


PLAIN_ELEMENTWISE = [operator for operator in ELEMENTWISE.values() if not fields(operator)]
"""Elementwise operators without attributes."""
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt", "power")
"""Functions whose first operand is positive."""
UNIT = ("tan", "asin", "acos", "atanh")
"""Functions whose operand lies in (-1, 1)."""


def elementwise_arguments(operator: type[Elementwise], shape: tuple[int, ...]) -> list[Array]:
    """Return operands in the domain of an elementwise operator: of `shape`, and of its last dim for a second one."""
    match operator.operands:
        case "integers":
            first, second = ints(-9, 9, *shape), ints(-3, 6, *shape[-1:])
        case "bools":
            first, second = bools(*shape), bools(*shape[-1:])
        case _:
            first, second = rand(*shape) * 3, np.abs(rand(*shape[-1:])) + 1
            if operator.name in POSITIVE:
                first = np.abs(first) + np.float32(0.1)
            elif operator.name == "acosh":
                first = np.abs(first) + 1
            elif operator.name in UNIT:
                first = np.tanh(first) * np.float32(0.9)
    return [first, second][: operator.arity]


SAMPLES: list[Sample] = [
    *[(operator(), elementwise_arguments(operator, (3, 5))) for operator in PLAIN_ELEMENTWISE],
    *[(op, [rand(2, 3)]) for op in (AddScalar(1.5), MulScalar(-0.25), DivScalar(0.3), MaximumScalar(0.1))],
    (AddScalar(3), [ints(0, 9, 4)]),
    (Relu(), [ints(-5, 5, 4)]),
    (Cast(i32), [rand(9) * 10]),
    (Cast(f32), [ints(0, 2, 3, 4)]),
    *((Cast(d, d.is_float), [rand(40) * 400]) for d in SMALL),
    (Cast(f8e4m3fn), [converted(np.array([1.0625 + 2**-30, 464, 465, -np.inf, np.nan, 0]), f64)]),
    *(
        (Cast(f8e8m0, True, way), [np.array([0, 1, 1.1, 5, 6, 2**-126.5, 1e38, 3e38, np.inf], "f4")])
        for way in ("up", "down")
    ),
    (Quantize(dtype=f8e5m2), [rand(3, 5) * 9e5, np.array(0.7, np.float32)]),
    (Quantize(1, dtype=i4), [rand(3, 5) * 9, positive(5), converted(ints(-3, 3, 5), i4)]),
    (Dequantize(), [converted(rand(3, 5) * 90, f8e4m3fn), np.array(0.7, np.float32)]),
    (Dequantize(0), [converted(ints(0, 16, 3, 5), u4), positive(3), converted(ints(0, 9, 3), u4)]),
    *((Concat(0), [converted(rand(3, 2) * 9, d), converted(rand(1, 2), d)]) for d in (f8e4m3fnuz, i4)),
    (Pad((1, 0), (0, 2), value=2.0), [converted(rand(3, 2), f8e5m2)]),
    (Add(), [rand(3, 1, 5), rand(4, 1)]),
    (Mul(), [rand(1, 5), rand(3, 5)]),
    (Add(), [rand(0, 4), rand(4)]),
    (Matmul(), [rand(3, 5), rand(5, 7)]),
    (Matmul(True), [rand(3, 5), rand(7, 5)]),
    (Matmul(), [rand(2, 3, 5), rand(5, 7)]),
    (Matmul(), [rand(2, 3, 5, 4), rand(2, 3, 4, 6)]),
    (Matmul(True), [rand(2, 1, 5, 4), rand(3, 6, 4)]),
    (Matmul(), [rand(0, 5), rand(5, 7)]),
    (Softmax(), [rand(4, 13) * 5]),
    (Softmax(), [rand(2, 3, 1)]),
    (LayerNorm(1e-6), [rand(3, 17), rand(17), rand(17)]),
    (LayerNorm(1e-12), [rand(2, 3, 8) + 3, rand(8), rand(8)]),
    (LayerNorm(1e-5, 2), [rand(2, 3, 8) + 3, rand(1), rand(2, 3, 1)]),
    (LayerNorm(1e-5, 2), [rand(2, 3, 2, 5), rand(3, 2, 1), rand(2, 5)]),
    (LayerNorm(1e-5, 3), [rand(3, 2, 5), rand(3, 2, 5), rand(1, 1)]),
    (RmsNorm(1e-6), [rand(2, 3, 17), rand(17)]),
    (CausalSoftmax(const(0)), [rand(2, 5, 5) * 5]),
    (CausalSoftmax(const(3), 2), [rand(6, 6) * 5]),
    (CausalSoftmax(const(1)), [rand(2, 3, 1)]),
    (CausalSoftmax(const(2), 1, 3), [rand(4, 6) * 5]),
    (CausalSoftmax(const(9), 1, 3), [rand(2, 3) * 5]),
    (Attention(0.5), [rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)]),
    (Attention(0.5, softcap=0.7), [rand(5, 4), rand(7, 4), rand(7, 6)]),
    (Attention(0.5, True, const(2)), [rand(1, 6, 5, 4), rand(2, 2, 7, 4), rand(1, 2, 7, 3)]),
    (Attention(0.5, True, const(2), 2), [rand(3, 10, 4), rand(3, 7, 4), rand(3, 7, 4)]),
    (Attention(0.5, True, const(0), 1, 2), [rand(3, 5, 4), rand(1, 5, 4), rand(1, 5, 4)]),
    (Attention(0.5, True, const(6)), [rand(2, 1, 4), rand(2, 7, 4), rand(2, 7, 4)]),
    (Attention(0.5), [rand(2, 4, 3, 4), rand(2, 2, 5, 4), rand(2, 2, 5, 4), bools(2, 4, 3, 5)]),
    (Attention(0.5), [rand(2, 4, 3, 4), rand(2, 2, 5, 4), rand(2, 2, 5, 4), np.zeros((3, 5), bool)]),
    (Attention(0.5), [rand(2, 3, 4), rand(2, 5, 4), rand(2, 5, 4), hiding_bias(3, 5)]),
    (Attention(0.5, True, hides_rows=False), [rand(2, 3, 4), rand(2, 3, 4), rand(2, 3, 4), rand(2, 1, 3)]),
    (Attention(0.5), [rand(2, 3, 4), rand(2, 0, 4), rand(2, 0, 4)]),
    (PagedWrite(), [rand(7, 4, 2, 3), rand(5, 2, 3), *PLACES]),
    (PagedWrite(), [rand(7, 4, 2, 3), rand(0, 2, 3), PLACES[0], *(p[:0] for p in PLACES[1:])]),
    (PagedAttention(0.5), [rand(5, 2, 3, 4), rand(7, 4, 2, 4), rand(7, 4, 2, 6), *PLACES]),
    (PagedAttention(0.5, 3, 0.7), [rand(5, 2, 1, 4), rand(7, 4, 2, 4), rand(7, 4, 2, 4), *PLACES]),
    (PagedAttention(0.5), [rand(5, 2, 1, 4), *(rand(7, 4, 2, 4).astype(np.float16) for _ in range(2)), *PLACES]),
    (Attention(0.5, True), [rand(2, 0, 4), rand(2, 3, 4), rand(2, 3, 4)]),
    # indices into an empty dim, the result empty too
    (Take(), [rand(0, 0), np.zeros(2, np.int64)]),
    (GatherND(), [rand(0, 0), np.zeros((2, 1), np.int64)]),
    (Resize((0,), (const(3),), (const(0),), (const(-3),), (const(6),), "cubic"), [rand(0, 0)]),
    (GridSample("nearest"), [rand(2, 0, 0, 3), rand(2, 4, 5, 2)]),
    (PoolPositions((2,), (1,), (1,), (const(1),)), [rand(2, 0, 0), rand(2, 0, 1)]),
    (Quantize(), [rand(3, 5) * 90, np.array(0.7, np.float32), np.array(3, np.int8)]),
    (Quantize(dtype=u8), [rand(3, 5) * 90, np.array(0.7, np.float32), np.array(130, np.uint8)]),
    (
        Quantize(),
        [np.array([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 128.5, -300, 1e30], np.float32), np.array(1, np.float32)],
    ),
    (Quantize(1, None, i8, 4), [rand(3, 5, 2) * 4, positive(5)]),
    (Quantize(-1, 4, u8, 2), [rand(3, 10), positive(3, 3), ints(0, 3, 3, 3).astype(np.uint8)]),
    (Quantize(0), [rand(0, 5), positive(0)]),
    (Dequantize(), [ints(-128, 128, 3, 5).astype(np.int8), positive()]),
    (Dequantize(0), [ints(0, 256, 3, 5).astype(np.uint8), positive(3), ints(0, 256, 3).astype(np.uint8)]),
    (Dequantize(0, 3), [ints(-8, 8, 7, 5).astype(np.int8), positive(3, 5), ints(-8, 8, 3, 5).astype(np.int8)]),
    (Dequantize(1), [ints(-(2**31), 2**31, 3, 5).astype(np.int32), positive(5)]),
    *[(Pack4(a), [ints(-8, 8, 3, 5).astype(np.int8)]) for a in (0, -1)],
    (Pack4(0), [ints(0, 16, 4, 3).astype(np.uint8)]),
    *[
        (Unpack4(a, const(n), signed), [ints(0, 256, 3, 2).astype(np.uint8)])
        for a, n, signed in ((0, 5, True), (0, 6, False), (-1, 3, True))
    ],
    (Pack4(0), [ints(0, 16, 0, 3).astype(np.uint8)]),
    *[
        (Slice(1, const(b), const(e), step), [rand(2, 7)])
        for b, e, step in ((0, 7, 2), (1, 6, 3), (5, 2, 2), (6, -1, -1), (9, 1, -2), (2, 5, -1), (4, -1, -3))
    ],
    (Slice(0, const(-1), const(-1), -1), [rand(0, 2)]),
    *[
        (Einsum(text), [rand(*s) for s in shapes])
        for text, *shapes in (
            ("ij->ji", (3, 4)),
            ("ij,ij->ij", (1, 3), (1, 3)),
            ("bij,bjk->bik", (1, 2, 3), (1, 3, 1)),
            ("ij", (3, 4)),
            ("ba", (3, 4)),
            ("ijk->j", (2, 3, 4)),
            ("ii->i", (4, 4)),
            ("ij,jk->ik", (3, 4), (4, 5)),
            ("ij,kj->ik", (3, 4), (5, 4)),
            ("bhid,bhjd->bhij", (2, 3, 5, 4), (2, 3, 6, 4)),
            ("i,j->ij", (3,), (4,)),
            ("ij,ij->ij", (3, 4), (3, 4)),
            ("ij,ij->", (3, 4), (3, 4)),
            ("bij,bjk->kb", (2, 3, 4), (2, 4, 5)),
            ("...ij,jk", (2, 3, 4), (4, 5)),
            ("a...b,b...c->c...a", (2, 1, 3, 4), (4, 5, 3, 6)),
            ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
            ("ij,j,k->ik", (2, 3), (3,), (4,)),
            ("ij,jk->ik", (3, 1), (4, 5)),
            ("ij,jj->i", (2, 3), (3, 3)),
            ("ij,jk->ik", (3, 0), (0, 5)),
            ("bnd,hde->bhne", (2, 3, 4), (5, 4, 6)),
        )
    ],
    *[(Pad(dims(1, 0, 2), dims(0, 0, 3), mode), [rand(2, 3, 4)]) for mode in ("constant", "edge", "reflect", "wrap")],
    (Pad(dims(2, 1), dims(3, 0), "constant", -1.5), [rand(0, 2)]),
    (Pad(dims(2), dims(1), "constant", 7.0), [ints(0, 9, 3)]),
    (Pad(dims(2), dims(1), "constant", 1.0), [bools(3)]),
    (Pad(dims(5), dims(4), "edge"), [rand(1)]),
    (Rotary(const(0), 1), [rand(2, 5, 3, 8), rand(7, 4), rand(7, 4)]),
    (Rotary(const(2), -2), [rand(5, 6), rand(7, 3), rand(7, 3)]),
    (L2Normalize(1e-12), [rand(3, 11)]),
    (L2Normalize(1e-12), [np.zeros((2, 3), np.float32)]),
    (MeanPool(1e-9), [rand(3, 4, 5), (ints(0, 2, 3, 4)).astype(np.float32)]),
    (MeanPool(1e-9), [rand(1, 4, 5), np.zeros((1, 4), np.float32)]),
    *[(op, [rand(3, 4, 5)]) for op in (Sum(), Sum((1,)), Sum((0, -1), True), Mean((0,)), Max((-1,)), Max(None, True))],
    (Sum((0,)), [ints(-3, 9, 5, 2)]),
    (Take(), [rand(9, 3), ints(0, 9, 2, 4)]),
    (Take(), [rand(9), ints(0, 9, 5)]),
    (Reshape(dims(2, 6)), [rand(3, 4)]),
    (Reshape(dims(3, 2, 2)), [rand(3, 4)]),
    (Flatten(), [rand(3, 4)]),
    (ExpandDims((1, -1)), [rand(3, 4)]),
    (Permute((2, 0, 1)), [rand(2, 3, 4)]),
    (BroadcastTo(dims(2, 3, 4)), [rand(3, 1)]),
    (Concat(1), [rand(2, 3), rand(2, 1), rand(2, 4)]),
    (Concat(0), [rand(0, 2), rand(3, 2)]),
    (Slice(0, const(1), const(3)), [rand(5, 2)]),
    (Slice(1, const(0), const(9)), [rand(2, 4)]),
    (Slice(1, const(6), const(9)), [rand(2, 4)]),
    *[(Split(3), [rand(n, 2)]) for n in (0, 1, 2, 3, 7)],
    (Split(2, 1), [rand(2, 6)]),
    (Min((1,)), [rand(3, 4, 5)]),
    *[(op, [rand(3, 4, 5)]) for op in (MaxOrLowest((1,)), MinOrHighest((0, 2), True))],
    (Min((0,)), [ints(-3, 9, 5, 2)]),
    (Abs(), [np.array([-(2**31), -7, 0, 5], np.int32)]),
    *[(op, [ints(0, 3, 4, 5), ints(0, 3, 5)]) for op in (Equal(), NotEqual(), Less(), LessEqual())],
    (Less(), [rand(3, 1), rand(4)]),
    *[(op, [bools(4, 5), bools(5)]) for op in (LogicalAnd(), LogicalOr(), NotEqual())],
    (Where(), [bools(4, 1), rand(5), rand(4, 5)]),
    (Where(), [bools(4, 5), ints(0, 9, 1), ints(0, 9, 4, 1)]),
    (GatherND(), [rand(3, 4, 5), ints(0, 3, 2, 6, 2)]),
    (GatherND(), [rand(3, 4), ints(0, 3, 7, 1)]),
    (GatherElements(1), [rand(3, 6), ints(0, 6, 2, 4)]),
    (GatherElements(-2), [rand(3, 6), ints(0, 3, 5, 6)]),
    (Iota(const(5)), []),
    (Scalars(dims(4, 2, 9)), []),
    (Rint(), [np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4999], np.float32)]),
    (BitwiseNot(), [np.uint16([0, 5, 65535])]),
    (BitCast(i32, f32), [rand(3, 5)]),
    (BitCast(f16, u16), [np.uint16([0, 15360, 50000])]),
    *[
        (op, [np.array([-(2**31), 2**31 - 1, 7], np.int32), np.array([-1, -1, 0], np.int32)])
        for op in (Quotient(), Modulo())
    ],
    *[(op, [np.array([200, 7, 9], np.uint8), np.array([3, 0, 255], np.uint8)]) for op in (Quotient(), Modulo())],
    *[(op, [rand(3, 4, 5)]) for op in (Prod(), Prod((1,)), Prod((0, -1), True))],
    *[
        (CumSum(a, e, r), [rand(3, 4, 5)])
        for a, e, r in ((0, False, False), (1, True, False), (-1, False, True), (2, True, True))
    ],
    *[
        (CumProd(a, e, r), [rand(3, 4)])
        for a, e, r in ((0, False, False), (1, True, False), (-1, False, True), (1, True, True))
    ],
    (CumSum(0), [ints(-3, 4, 6)]),
    (CumSum(0, True), [rand(0, 2)]),
    *[
        (ArgMax(a, least, last), [ints(0, 3, 3, 4, 5)])
        for a in (0, 1, -1)
        for least in (False, True)
        for last in (False, True)
    ],
    (ArgMax(0), [rand(7)]),
    *[
        (TopK(const(k), a, largest), [ints(0, 5, 4, 6)])
        for k, a, largest in ((1, 0, True), (3, 1, True), (6, -1, False))
    ],
    (TopK(const(2), 0), [rand(2, 3)]),
    *[
        (TreeEnsemble(2, 3, how, nan_first), [
            rand(5, 3), ints(0, 3, 7).astype(np.int32), ints(0, 6, 7).astype(np.int32), rand(7), ints(0, 4, 7).astype(np.int32), rand(4, 2),
        ])
        for how in ("sum", "min", "max")
        for nan_first in (False, True)
    ],
    *[(ScatterND(m), [rand(4, 5, 3), ints(0, 4, 6, 2), rand(6, 3)]) for m in ("add", "mul", "max", "min")],
    (ScatterND(), [rand(4, 5), np.array([[2], [0]]), rand(2, 5)]),
    (ScatterND(), [ints(0, 9, 6), np.array([[2], [0], [2]]), ints(0, 9, 3)]),
    *[(ScatterElements(m, 1), [rand(3, 4), ints(0, 4, 3, 6), rand(3, 6)]) for m in ("add", "mul", "max", "min")],
    (ScatterElements("replace", -1), [rand(3, 4), np.array([[0, 2], [3, 1], [2, 0]]), rand(3, 2)]),
    (Conv((1,), (1,)), [rand(2, 3, 7), rand(4, 3, 3)]),
    (Conv((2, 1), (1, 2), 2), [rand(1, 4, 7, 6), rand(6, 2, 3, 2)]),
    (Conv((1, 1, 1), (1, 1, 1), 3), [rand(1, 3, 3, 3, 4), rand(3, 1, 2, 2, 2)]),
    (Pool((3,), (2,), (1,)), [rand(2, 3, 8)]),
    (Pool((2, 3), (1, 2), (2, 1), False), [rand(1, 2, 6, 7)]),
    (Pool((2, 2), (2, 2), (1, 1)), [ints(-9, 9, 1, 2, 4, 4)]),
    *[(Fold(dims(n), (s,), (d,), dims(b)), [rand(2, 3, 3, 4)])
      for n, s, d, b in ((9, 1, 2, 1), (8, 2, 1, 0), (5, 3, 1, 4), (9, 2, 3, -1), (0, 1, 1, 0))],
    (Fold(dims(3, 5), (1, 2), (1, 1), dims(1, 2)), [ints(-9, 9, 1, 2, 2, 3, 3, 4)]),
    (PoolPositions((3,), (2,), (1,), dims(1)), [
        np.array([[[1, 1, 0, np.nan, 5, 9]]], np.float32), np.array([[[1, np.nan, np.nan]]], np.float32)]),
    (PoolPositions((3,), (1,), (1,), dims(0)), [
        np.array([[[np.nan, np.nan, 2, -np.inf]]], np.float32), np.array([[[np.nan, np.nan]]], np.float32)]),
    (PoolPositions((2, 2), (2, 1), (1, 1), dims(0, 0)), [
        np.arange(12).reshape(1, 1, 4, 3) // 2, np.array([[[[2, 2], [5, 5]]]])]),
    *[(GridSample(k, p, a), [rand(2, 3, 4, 5), rand(2, 3, 4, 2)])
      for k in ("nearest", "linear", "cubic") for p in ("zeros", "border", "reflection") for a in (False, True)],
    *[(GridSample("linear", p, True), [rand(1, 2, 1, 3, 2), 2 * rand(1, 5, 3)]) for p in ("zeros", "reflection")],
    (GridSample("nearest", "border"), [ints(0, 9, 1, 2, 3), np.array([[[np.nan], [-9.0], [np.inf]]], np.float32)]),
    (GridSample(), [rand(0, 2, 3), rand(0, 4, 1)]),
    *[(resize(7, 5, 0, kernel="nearest", rounding=r), [ints(0, 9, 5, 2)])
      for r in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")],
    *[(resize(n, 6, 1, kernel=k, within=within), [rand(2, 6)])
      for n in (1, 4, 13) for k in ("linear", "cubic") for within in (False, True)],
    *[(resize(n, 9, 0, kernel=k, within=within, wide=dims(9), narrow=dims(n)), [rand(9, 2)])
      for n in (2, 4, 12) for k in ("linear", "cubic") for within in (False, True)],
    (Resize((2, 1), dims(5, 3), dims(3, 2), dims(-4, 1), dims(2, 3), fill=7.0), [rand(2, 4, 6)]),
    (Resize((1, 2), dims(1, 3), dims(9, 1), dims(0, 0), dims(1, 2), "cubic", sharpness=-0.5, fill=-1.0), [rand(2, 1, 3)]),
    (resize(4, 3, 0), [rand(3, 0)]),
    (resize(0, 3, 0), [rand(3, 2)]),
]  # fmt: skip
