"""Fused operators of decoder layers: RMSNorm, causal softmax, rotary embedding.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.expr import (
    Expr,
    add,
    and_,
    as_int,
    call,
    cast,
    const,
    div,
    eq,
    le,
    lt,
    maximum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    HalfPolicy,
    OperatorBuilder,
    OperatorSpec,
    axis_index,
    float_result,
    wide,
)
from relax_tune.ir.op.reduction.reduce import RowOperator, lowest


@dataclass(frozen=True, slots=True)
class RmsNorm(RowOperator):
    """RMSNorm (Zhang & Sennrich 2019): `x / sqrt(mean(x * x) + eps) * gamma` over the last axis: x (..., c), gamma (c,)."""

    eps: float = 1e-6
    name: ClassVar[str] = "rms_norm"
    arity: ClassVar[int] = 2

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        gamma = b.argument(1, "gamma", shape[-1:])
        y = b.output("y", shape, dtype)
        square, count = b.alloc("square", shape[:-1], dtype), cast(shape[-1], dtype)
        b.reduce(square, shape[-1:], const(0, dtype), lambda old, *i: add(old, mul(x[i], x[i])), "rms_sum")
        b.compute(
            y,
            lambda *i: mul(
                mul(x[i], call("rsqrt", add(div(square[i[:-1]], count), const(self.eps, dtype)))), gamma[i[-1]]
            ),
            "rms_scale",
        )

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, gamma = map(wide, arrays)
        with np.errstate(invalid="ignore"):
            mean = (x * x).sum(axis=-1, keepdims=True) / np.float64(x.shape[-1])
        return float_result(x / np.sqrt(mean + self.eps) * gamma, arrays, arrays[0].dtype)


@dataclass(frozen=True, slots=True)
class CausalSoftmax(RowOperator):
    """Softmax over the last axis under a causal mask: x (..., r, m).

    Row `i`, at position `offset + i // group`, sees the columns up to its position; the others give 0.

    Attributes:
        offset: number of earlier positions, at least 0.
        group: number of neighbouring rows that share a position.
        window: number of columns that a row sees, up to its own position; None: all.
    """

    offset: Expr
    group: int = 1
    window: int | None = None
    name: ClassVar[str] = "causal_softmax"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.group < 1:
            raise DeduceError(f"{self.name}: expected a group of at least 1 row, got {self.group}")
        if self.window is not None and self.window < 1:
            raise DeduceError(f"{self.name}: expected a window of at least 1 position, got {self.window}")
        if x.ndim is not None and x.ndim < 2:
            raise DeduceError(f"{self.name}: expected at least 2 dims, got {x!r}")
        return RowOperator.infer(self, infos, ctx)

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        y = b.output("y", shape, dtype)
        # The largest score is subtracted, so that no exponential overflows; the quotient does not change.
        top, total = b.alloc("top", shape[:-1], dtype), b.alloc("total", shape[:-1], dtype)
        power = b.alloc("power", shape, dtype)
        zero = const(0, dtype)

        def masked(i: Sequence[Expr], value: Expr, hidden: Expr) -> Expr:
            # Neighbouring rows of a group are heads at one position.
            row = add(self.offset, i[-2] // self.group)
            near = le(i[-1], row)
            near = near if self.window is None else and_(near, lt(sub(row, self.window), i[-1]))
            return select(near, value, hidden)

        b.reduce(
            top, shape[-1:], lowest(dtype), lambda old, *i: maximum(old, masked(i, x[i], lowest(dtype))), "softmax_max"
        )
        b.compute(power, lambda *i: masked(i, call("exp", sub(x[i], top[i[:-1]])), zero), "softmax_exp")
        b.reduce(total, shape[-1:], zero, lambda old, *i: add(old, power[i]), "softmax_sum")
        # only with a window can a row have no visible column
        by = (lambda t: t) if self.window is None else (lambda t: select(eq(t, zero), const(1, dtype), t))
        b.compute(y, lambda *i: div(power[i], by(total[i[:-1]])), "softmax")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, offset = wide(arrays[0]), _number(self.offset, self.name)
        rows, columns = x.shape[-2:]
        if columns == 0:
            return float_result(x, arrays, arrays[0].dtype)
        row = offset + np.arange(rows)[:, None] // self.group
        visible = np.arange(columns) <= row
        visible = visible if self.window is None else visible & (row - self.window < np.arange(columns))
        top = np.where(visible, x, -np.inf).max(axis=-1, keepdims=True)
        e = np.where(visible, np.exp(np.where(visible, x - top, 0)), 0)
        total = e.sum(axis=-1, keepdims=True)
        return float_result(e / np.where(total == 0, 1, total), arrays, arrays[0].dtype)


@dataclass(frozen=True, slots=True)
class Rotary(OperatorSpec):
    """Rotary position embedding (RoPE; Su et al. 2021, section 3.4), pairing the halves of the last axis.

    x: (..., n, ..., d), positions along `axis`; cos, sin: (p, d/2), one row a position. Position `i` rotates the pair
    (x[k], x[k + d/2]) by the angle of row `offset + i`, which must be in [0, p).
    """

    offset: Expr
    axis: int
    name: ClassVar[str] = "rotary"
    half_policy: ClassVar[HalfPolicy] = "allow"
    arity: ClassVar[int] = 3

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, cos, sin = self.tensors(infos)
        dtype = self.same_dtype((x, cos, sin))
        if x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"rotary: expected a floating-point tensor, got {x!r}; cast it first")
        for what, t in (("cos", cos), ("sin", sin)):
            if t.ndim is not None and t.ndim != 2:
                raise DeduceError(f"rotary: expected 2 dims in {what}, got {t!r}")
        if x.ndim is not None and axis_index(self.name, self.axis, x.ndim) == x.ndim - 1:
            raise DeduceError(f"rotary: expected positions along another axis than the last, got {self.axis} of {x!r}")
        if x.shape is not None:
            for what, t in (("cos", cos), ("sin", sin)):
                if t.shape is not None:
                    ctx.require_equal(
                        mul(t.shape[1], 2), x.shape[-1], f"rotary: twice dim 1 of {what} and the last of x"
                    )
                    self._require_rows(ctx, add(self.offset, x.shape[self.axis]), t.shape[0], what)
        return TensorInfo(x.shape, dtype, x.ndim)

    @staticmethod
    def _require_rows(ctx: Deduction, needed: Expr, rows: Expr, what: str) -> None:
        proof = ctx.proves(le(needed, rows))
        if proof is Proof.NO:
            raise DeduceError(f"rotary: expected a row of {what} for each of {needed!r} positions, got {rows!r}")
        if proof is Proof.UNKNOWN:
            message = f"rotary: expected a row of {what} for each of {{0}} positions, got {{1}}"
            ctx.require(le(needed, rows), message, needed, rows)

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        axis = axis_index(self.name, self.axis, len(shape))
        x = b.argument(0, "x")
        cos, sin = b.argument(1, "cos"), b.argument(2, "sin")
        y = b.output("y", shape, dtype)
        half = b.shape(1)[1]

        def value(*i: Expr) -> Expr:
            k, row = i[-1], add(self.offset, i[axis])
            first = lt(k, half)
            pair, other = select(first, k, sub(k, half)), x[(*i[:-1], select(first, add(k, half), sub(k, half)))]
            turned = select(first, mul(const(-1, dtype), other), other)  # 0 - 0 is not -0
            return add(mul(x[i], cos[row, pair]), mul(turned, sin[row, pair]))

        b.compute(y, value, "rotary")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, cos, sin = map(wide, arrays)
        axis, offset = self.axis % x.ndim, _number(self.offset, self.name)
        n, half = x.shape[axis], x.shape[-1] // 2
        dims = [n if p == axis else half if p == x.ndim - 1 else 1 for p in range(x.ndim)]
        c, s = (t[offset : offset + n].reshape(dims) for t in (cos, sin))
        a, b = x[..., :half], x[..., half:]
        return float_result(np.concatenate((a * c - b * s, b * c + a * s), axis=-1), arrays, arrays[0].dtype)


def _number(e: Expr, what: str) -> int:
    number = as_int(e)
    if number is None:
        raise DeduceError(f"{what}: expected a number to evaluate with, got {e!r}; bind its symbols first")
    return number
