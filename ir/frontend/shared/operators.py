"""Methods of a writer that write one operator each, so that handlers read like arithmetic.

Tests: `tests/ir/frontend/shared/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_, f32
from relax_tune.ir.core.expr import Expr, as_int, const, le, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Slice, Take
from relax_tune.ir.op.math import elementwise as ew
from relax_tune.ir.op.math import logic, numeric
from relax_tune.ir.op.math.bits import BitwiseAnd, ShiftLeft, ShiftRight
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Max, MaxOrLowest, Mean, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, CumSum, TopK

Axes = tuple[int, ...]
Operand = Union[Value, float]


def tensor_dims(value: Value) -> tuple[Expr, ...]:
    """Return the dims of a tensor, which importers always know."""
    info = value.info
    assert isinstance(info, TensorInfo) and info.shape is not None
    return info.shape


def element_of(value: Value) -> DType:
    """Return the element type of a tensor, which importers always know."""
    info = value.info
    assert isinstance(info, TensorInfo) and info.dtype is not None
    return info.dtype


def _unary(op: OperatorSpec) -> Callable[[Any, Value], Value]:
    return lambda w, x: w.emit(op, x)


def _binary(op: OperatorSpec) -> Callable[[Any, Operand, Operand], Value]:
    return lambda w, a, b: w.emit(op, *w.operands(a, b))


def _with_number(
    op: OperatorSpec, with_number: Callable[[float], OperatorSpec]
) -> Callable[[Any, Value, Operand], Value]:
    """Make a method of a binary operator whose second operand may be a number, then an attribute of another operator."""
    return lambda w, a, b: w.emit(with_number(b), a) if isinstance(b, (int, float)) else w.emit(op, a, b)


def _around(op: OperatorSpec, with_number: Callable[[float], OperatorSpec]) -> Callable[[Any, Value, Operand], Value]:
    """Make such a method of a sum or product, for which an integer beyond the type of integers wraps around."""
    plain = _with_number(op, with_number)

    def method(w: Any, a: Value, b: Operand) -> Value:
        if not isinstance(b, int) or not element_of(a).is_int:
            return plain(w, a, b)
        # Modulo 2^bits, then read as the type: the wrap-around that arithmetic of this type has anyway.
        number = int(np.asarray(b % (1 << element_of(a).bits), np.uint64).astype(element_of(a).numpy))
        return plain(w, a, number if abs(number) < 1 << 53 else w.literal(number, element_of(a)))

    return method


class OperatorMethods:
    """Base of `Writer` with a method for each operator that handlers use often.

    Operands are tensors. One of the two operands of a binary operator may be a Python number: the second one of `add`, `mul`,
    `div` and `maximum`, which keep it as an attribute, and either one of others, which take it as a constant of the element type.
    """

    __slots__ = ()
    g: GraphBuilder

    def emit(self, op: OperatorSpec, *args: Value) -> Value:
        raise NotImplementedError

    abs, sqrt, rsqrt, exp, log = map(_unary, (numeric.Abs(), ew.Sqrt(), ew.Rsqrt(), ew.Exp(), numeric.Log()))
    sin, cos, tanh, erf = map(_unary, (numeric.Sin(), numeric.Cos(), ew.Tanh(), ew.Erf()))
    floor, rint, relu, sigmoid = map(_unary, (numeric.Floor(), numeric.Rint(), ew.Relu(), ew.Sigmoid()))
    logical_not = _unary(logic.LogicalNot())
    add = _around(ew.Add(), ew.AddScalar)
    mul = _around(ew.Mul(), ew.MulScalar)
    maximum = _with_number(ew.Maximum(), ew.MaximumScalar)
    div = _with_number(ew.Div(), ew.division_by)
    sub, minimum, power = map(_binary, (ew.Sub(), ew.Minimum(), numeric.Power()))
    quotient, modulo = map(_binary, (numeric.Quotient(), numeric.Modulo()))
    equal, not_equal, less, less_equal = map(
        _binary, (logic.Equal(), logic.NotEqual(), logic.Less(), logic.LessEqual())
    )
    logical_and, logical_or = map(_binary, (logic.LogicalAnd(), logic.LogicalOr()))
    bitwise_and, shift_left, shift_right = map(_binary, (BitwiseAnd(), ShiftLeft(), ShiftRight()))
    matmul = _binary(Matmul())

    # `where` and `operands` take numbers as constants: an attribute form exists only for the four operators above

    def where(self, condition: Value, a: Operand, b: Operand) -> Value:
        return self.emit(logic.Where(), condition, *self.operands(a, b))

    def operands(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        """Return two operands as tensors; a number gets the element type of the other operand."""
        if isinstance(a, (int, float)):
            assert not isinstance(b, (int, float))
            return self.literal(a, element_of(b)), b
        return a, self.literal(b, element_of(a)) if isinstance(b, (int, float)) else b

    def cast(self, x: Value, target: DType) -> Value:
        """Cast to another element type, `x` itself if it has that type. As a bool, every value but zero is true."""
        source = element_of(x)
        if source is target:
            return x
        if target is not bool_:
            return self.emit(ew.Cast(target), x)
        # Devices compare no floats of 8 bits.
        if source.is_small:
            x, source = self.emit(ew.Cast(f32), x), f32
        return self.emit(logic.NotEqual(), x, self.literal(0, source))

    def literal(self, value: float, element: DType) -> Value:
        raise NotImplementedError

    def iota(self, size: Expr) -> Value:
        return self.emit(Iota(size))

    # reductions

    def sum(self, x: Value, axes: Axes, keepdims: bool = False) -> Value:
        return self.emit(Sum(axes, keepdims), x)

    def mean(self, x: Value, axes: Axes, keepdims: bool = False) -> Value:
        return self.emit(Mean(axes, keepdims), x)

    def max(self, x: Value, axes: Axes, keepdims: bool = False) -> Value:
        return self.emit(Max(axes, keepdims), x)

    def max_or_lowest(self, x: Value, axes: Axes, keepdims: bool = False) -> Value:
        return self.emit(MaxOrLowest(axes, keepdims), x)

    def arg_max(self, x: Value, axis: int, least: bool = False, last: bool = False) -> Value:
        return self.emit(ArgMax(axis, least, last), x)

    def top_k(self, x: Value, k: Expr, axis: int, largest: bool = True) -> Value:
        return self.emit(TopK(k, axis, largest), x)

    def cum_sum(self, x: Value, axis: int) -> Value:
        return self.emit(CumSum(axis), x)

    # movement

    def expand_dims(self, x: Value, axes: Axes) -> Value:
        return self.emit(ExpandDims(axes), x)

    def broadcast_to(self, x: Value, dims: Sequence[Expr]) -> Value:
        return self.emit(BroadcastTo(tuple(dims)), x)

    def concat(self, axis: int, *parts: Value) -> Value:
        return self.emit(Concat(axis), *parts)

    def permute(self, x: Value, axes: Sequence[int]) -> Value:
        """Permute the axes, `x` itself if they are in order."""
        return x if tuple(axes) == tuple(range(len(axes))) else self.emit(Permute(tuple(axes)), x)

    def slice(self, x: Value, axis: int, begin: Expr, end: Expr) -> Value:
        """Return `x[..., begin:end, ...]`, `x` itself if the slice covers the dim."""
        size, deduction = tensor_dims(x)[axis], self.g.deduction
        if as_int(begin) == 0 and (deduction.same(end, size) or deduction.proves(le(size, end)) is Proof.YES):
            return x
        return self.emit(Slice(axis, begin, end), x)

    def reversed(self, x: Value, axis: int) -> Value:
        """Return `x[..., ::-1, ...]`."""
        last = self.g.deduction.simplify(sub(tensor_dims(x)[axis], 1))
        return self.emit(Slice(axis, last, const(-1), -1), x)

    def take(self, table: Value, axis: int, indices: Value) -> Value:
        """Take rows along `axis` at indices of 0 or more, whose dims replace the axis."""
        n, k = len(tensor_dims(table)), len(tensor_dims(indices))
        rows = self.emit(Take(), self.permute(table, [axis, *(p for p in range(n) if p != axis)]), indices)
        return self.permute(rows, [*range(k, k + axis), *range(k), *range(k + axis, n + k - 1)])

    def gather_elements(self, x: Value, indices: Value, axis: int) -> Value:
        return self.emit(GatherElements(axis), x, indices)
