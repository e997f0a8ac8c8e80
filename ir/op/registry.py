"""Table of all operators, by printed name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Iota, Scalars
from relax_tune.ir.op.devices import HintOnDevice, ToDevice
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
    BitwiseAnd,
    BitwiseNot,
    BitwiseOr,
    BitwiseXor,
    IntegerPower,
    ShiftLeft,
    ShiftRight,
)
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    Erf,
    Exp,
    Gelu,
    Maximum,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Relu,
    Rsqrt,
    Sigmoid,
    Sqrt,
    Sub,
    Tanh,
)
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, LogicalNot, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import (
    Abs,
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atan2,
    Atanh,
    Cos,
    Cosh,
    Floor,
    Fmod,
    Log,
    Log2,
    Log10,
    Modulo,
    Power,
    Quotient,
    Rint,
    Sin,
    Sinh,
    Tan,
)
from relax_tune.ir.op.math.quantize import Dequantize, Pack4, Quantize, Unpack4
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import CausalSoftmax, RmsNorm, Rotary
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.grid_sample import GridSample
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
from relax_tune.ir.op.shapes import ReshapeTo, ShapeOf, TensorToShape, Unique


def registry(operators: Iterable[type[OperatorSpec]]) -> Mapping[str, type[OperatorSpec]]:
    """Index operators by name. Raises ValueError for a name used twice."""
    found: dict[str, type[OperatorSpec]] = {}
    for operator in operators:
        if operator.name in found:
            raise ValueError(
                f"wanted one operator called {operator.name!r}, found {found[operator.name]} and {operator}"
            )
        found[operator.name] = operator
    return found


OPERATORS: Mapping[str, type[OperatorSpec]] = registry(
    (
        Add, Sub, Mul, Div, Maximum, Minimum, AddScalar, MulScalar, MaximumScalar,
        Exp, Erf, Tanh, Sqrt, Rsqrt, Sigmoid, Gelu, Relu, Cast,
        Matmul, Softmax, LayerNorm, L2Normalize, MeanPool, Sum, Mean, Max, Min, MaxOrLowest, MinOrHighest,
        Take, Reshape, Flatten, ExpandDims, Permute, BroadcastTo, Concat, Split, Slice,
        Abs, Log, Floor, Power, Equal, NotEqual, Less, LessEqual, LogicalAnd, LogicalOr, LogicalNot, Where,
        GatherND, GatherElements, Iota, Scalars,
        Sin, Cos, Tan, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh, Atanh, Atan2, Log2, Log10, 
        BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseNot, ShiftLeft, ShiftRight, IntegerPower, BitCast, Rint, Fmod, Quotient, Modulo,
        Prod, CumSum, CumProd, ArgMax, TopK, ScatterND, ScatterElements, Conv, Pool,
        ShapeOf, ReshapeTo, TensorToShape, Unique, RmsNorm, CausalSoftmax, Rotary, Attention,
        Quantize, Dequantize, Pack4, Unpack4, Einsum, Pad, Resize, Fold, PoolPositions, GridSample,
        ToDevice, HintOnDevice,
    )
)  # fmt: skip
