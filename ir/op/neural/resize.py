"""Resampling of images: separable kernels at rational positions (ONNX Resize, torch interpolate).

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import (  # fmt: skip
    Expr,
    add,
    and_,
    as_int,
    cast,
    ceildiv,
    const,
    div,
    floordiv,
    floormod,
    le,
    lt,
    maximum,
    minimum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder
from relax_tune.ir.op.base import Array, Deduction, HalfPolicy, OperatorBuilder, OperatorSpec, float_result
from relax_tune.ir.op.indexing.indices import inside, require_elements
from relax_tune.ir.op.neural.interpolation import cubic_at, cubic_weights, linear_at, linear_weights

Kernel = Literal["nearest", "linear", "cubic"]
Rounding = Literal["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
SUPPORT = {"linear": 1, "cubic": 2}
"""Half of the width of a kernel, in elements."""


@dataclass(frozen=True, slots=True)
class Resize(OperatorSpec):
    """Resampling of some axes of x, one after the other.

    Element `i` of a result lies at `(i * step + start) / part` of x, an exact quotient. It is the sum of the elements around,
    weighted by the kernel of their distance; beyond the ends the nearest element counts.

    Attributes:
        axes: axes that are resampled.
        sizes, steps, starts, parts: size of the result, step, start and part of each.
        kernel: `nearest` (the element at the rounded position), `linear`, or `cubic` (Keys 1981).
        rounding: rounding of `nearest`.
        sharpness: coefficient of the cubic kernel.
        within: leave out elements beyond the ends, and divide by the sum of the other weights.
        wide, narrow: with antialiasing, the kernel of each axis is `max(wide / narrow, 1)` times as wide; else none.
        fill: result at a position beyond the first and last element; None: no such limit.
    """

    axes: tuple[int, ...]
    sizes: tuple[Expr, ...]
    steps: tuple[Expr, ...]
    starts: tuple[Expr, ...]
    parts: tuple[Expr, ...]
    kernel: str = "linear"
    rounding: str = "floor"
    sharpness: float = -0.75
    within: bool = False
    wide: tuple[Expr, ...] = ()
    narrow: tuple[Expr, ...] = ()
    fill: float | None = None
    name: ClassVar[str] = "resize"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        for what, value, allowed in (
            ("kernel", self.kernel, get_args(Kernel)),
            ("rounding", self.rounding, get_args(Rounding)),
        ):
            if value not in allowed:
                raise DeduceError(f"resize: expected a {what} among {', '.join(allowed)}, got {value!r}")
        lengths = {len(v) for v in (self.axes, self.sizes, self.steps, self.starts, self.parts)}
        lengths |= {len(self.axes) if self.wide else 0, len(self.wide), len(self.narrow)} if self.wide else set()
        if len(lengths) != 1 or len(set(self.axes)) != len(self.axes):
            raise DeduceError(f"resize: expected a size, step, start and part for each of the axes {self.axes}")
        if self.kernel != "nearest" and x.dtype is not None and not x.dtype.is_float:
            raise DeduceError(f"resize: expected floats for kernel {self.kernel!r}, got {x!r}; cast them first")
        for size in self.sizes:
            ctx.require_at_least(size, 0, "resize: size")
        for e in (*self.parts, *self.wide, *self.narrow):
            ctx.require_at_least(e, 1, "resize: parts")
        if x.shape is None:
            return x
        if not all(0 <= a < len(x.shape) for a in self.axes):
            raise DeduceError(f"resize: expected axes in 0..{len(x.shape) - 1}, got {self.axes}")
        dims = self._dims(x.shape, self.axes)
        for a in self.axes:
            require_elements(self.name, ctx, x.shape[a], dims)
        return TensorInfo(tuple(ctx.simplify(d) for d in dims), x.dtype)

    def _dims(self, shape: Sequence[Expr], axes: Sequence[int]) -> tuple[Expr, ...]:
        """Return the dims after `axes`, the first ones of `self.axes`, are resampled."""
        sizes = dict(zip(axes, self.sizes))
        return tuple(sizes.get(p, d) for p, d in enumerate(shape))

    def build(self, b: OperatorBuilder) -> None:
        shape, dtype = b.shape(0), b.dtype(0)
        work = dtype if dtype.bytes > 2 or not dtype.is_float else f32
        x = b.argument(0, "x")
        y = b.output("y", self._dims(shape, self.axes), dtype)
        if self.kernel == "nearest" or (self.kernel == "linear" and not self.wide):
            every = range(len(self.axes))
            b.compute(y, lambda *i: self._filled(self._value(x, i, every, work), i, shape, dtype), "resize")
            return
        value = x
        for k in range(len(self.axes)):
            last = k + 1 == len(self.axes)
            step = y if last else b.alloc(f"step{k}", self._dims(shape, self.axes[: k + 1]), work)
            if self.wide:
                self._antialiased(b, value, step, k, shape, work, last)
            else:
                b.compute(step, self._pass(value, k, shape, work, dtype if last else None), f"resize{k}")
            value = step

    def _pass(self, x: Tensor, k: int, shape: Sequence[Expr], work: DType, last: DType | None) -> Callable[..., Expr]:
        def value(*i: Expr) -> Expr:
            element = self._value(x, i, (k,), work)
            return element if last is None else self._filled(element, i, shape, last)

        return value

    def _antialiased(
        self, b: TensorBuilder, x: Tensor, y: Tensor, k: int, shape: Sequence[Expr], work: DType, last: bool
    ) -> None:
        """Emit the pass along axis `k` by a table of weights."""
        axis, n, size = self.axes[k], x.buffer.shape[self.axes[k]], self.sizes[k]
        half = maximum(ceildiv(mul(SUPPORT[self.kernel], self.wide[k]), self.narrow[k]), SUPPORT[self.kernel])
        taps = mul(half, 2)
        share = minimum(div(cast(self.narrow[k], work), cast(self.wide[k], work)), const(1.0, work))

        def element(i: Expr, t: Expr) -> Expr:
            return add(floordiv(self._top(k, i), self.parts[k]), add(sub(t, half), 1))

        def raw(i: Expr, t: Expr) -> Expr:
            away = sub(cast(add(sub(t, half), 1), work), self._rest(k, i, work))
            far = mul(away, share)
            weight = linear_at(far) if self.kernel == "linear" else cubic_at(far, self.sharpness)
            if not self.within:
                return weight
            at = element(i, t)
            return select(and_(le(0, at), lt(at, n)), weight, const(0.0, work))

        whole = b.alloc(f"whole{k}", (size,), work)
        b.reduce(whole, (taps,), const(0.0, work), lambda old, i, t: add(old, raw(i, t)), f"whole{k}")
        weights = b.alloc(f"weights{k}", (size, taps), work)
        b.compute(weights, lambda i, t: div(raw(i, t), whole[i]), f"weights{k}")
        total = (
            y if not last or (self.fill is None and y.buffer.dtype is work) else b.alloc("total", y.buffer.shape, work)
        )

        def step(old: Expr, *i: Expr) -> Expr:
            place, t = i[:-1], i[-1]
            at = inside(element(place[axis], t), n)
            return add(old, mul(weights[place[axis], t], cast(x[(*place[:axis], at, *place[axis + 1 :])], work)))

        b.reduce(total, (taps,), const(0.0, work), step, f"resize{k}")
        if total is not y:
            b.compute(y, lambda *i: self._filled(total[i], i, shape, y.buffer.dtype), "rounded")

    def _top(self, k: int, i: Expr) -> Expr:
        """Return the numerator of a position."""
        return add(mul(i, self.steps[k]), self.starts[k])

    def _rest(self, k: int, i: Expr, work: DType) -> Expr:
        """Return the distance of a position from the element before it, in [0, 1)."""
        return div(cast(floormod(self._top(k, i), self.parts[k]), work), cast(self.parts[k], work))

    def _taps(self, k: int, i: Expr, n: Expr, work: DType) -> list[tuple[Expr, Expr | None]]:
        """Return (index, weight) of the elements around the position of `i`; without a weight it is 1."""
        top, part = self._top(k, i), self.parts[k]
        if self.kernel == "nearest":
            # ceil(a / b) is -(-a // b); rounding to nearest is floor or ceil of (2 a +- b) / (2 b), exact in integers
            up = self.rounding in ("ceil", "round_prefer_floor")
            if self.rounding.startswith("round"):
                top, part = add(mul(top, 2), -part if up else part), mul(part, 2)
            return [(inside(sub(0, floordiv(sub(0, top), part)) if up else floordiv(top, part), n), None)]
        if self.kernel == "linear":
            top = maximum(minimum(top, mul(sub(n, 1), part)), 0)
            first, rest = floordiv(top, part), div(cast(floormod(top, part), work), cast(part, work))
            return [(first, linear_weights(rest)[0]), (inside(add(first, 1), n), linear_weights(rest)[1])]
        first = floordiv(top, part)
        places = [add(first, p) for p in (-1, 0, 1, 2)]
        weights = cubic_weights(self._rest(k, i, work), self.sharpness)
        if self.within:
            weights = [select(and_(le(0, p), lt(p, n)), w, const(0.0, work)) for p, w in zip(places, weights)]
            whole = add(add(weights[0], weights[1]), add(weights[2], weights[3]))
            weights = [div(w, whole) for w in weights]
        return [(inside(p, n), w) for p, w in zip(places, weights)]

    def _value(self, x: Tensor, i: Sequence[Expr], which: Sequence[int], work: DType) -> Expr:
        """Return the element of the result of the passes `which` at `i`."""
        if not which:
            element: Expr = x[tuple(i)]
            return element if self.kernel == "nearest" else cast(element, work)
        k, axis = which[0], self.axes[which[0]]
        total: Expr | None = None
        for place, weight in self._taps(k, i[axis], x.buffer.shape[axis], work):
            part = self._value(x, (*i[:axis], place, *i[axis + 1 :]), which[1:], work)
            part = part if weight is None else mul(weight, part)
            total = part if total is None else add(total, part)
        assert total is not None
        return total

    def _filled(self, value: Expr, i: Sequence[Expr], shape: Sequence[Expr], dtype: DType) -> Expr:
        value = cast(value, dtype)
        if self.fill is None:
            return value
        tests = []
        for k, axis in enumerate(self.axes):
            top = self._top(k, i[axis])
            tests += [le(0, top), le(top, mul(sub(shape[axis], 1), self.parts[k]))]
        fill: Any = self.fill if dtype.is_float else bool(self.fill) if dtype.short == "bool" else int(self.fill)
        return select(and_(*tests), value, const(fill, dtype)) if tests else value

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        result = x if self.kernel == "nearest" else x.astype(np.float64)
        beyond = np.zeros((1,) * x.ndim, bool)
        for k, axis in enumerate(self.axes):
            n, size, step, start, part = x.shape[axis], *self._numbers(k)
            top = np.arange(size) * step + start
            places, weights = self._row(k, top, part, n)
            rows = np.take(result, places, axis=axis, mode="clip")
            column = (1,) * axis + places.shape + (1,) * (x.ndim - axis - 1)
            if weights is None:
                result = rows.squeeze(axis + 1)
            else:
                with np.errstate(invalid="ignore"):
                    result = (rows * weights.reshape(column)).sum(axis=axis + 1)
            outside = (top < 0) | (top > (n - 1) * part)
            beyond = beyond | outside.reshape((size,) + (1,) * (x.ndim - axis - 1))
        if self.fill is not None:
            result = np.where(beyond, np.asarray(self.fill).astype(result.dtype), result)
        return result if self.kernel == "nearest" else float_result(result, arrays, x.dtype)

    def _numbers(self, k: int) -> tuple[int, ...]:
        numbers = [as_int(e[k]) for e in (self.sizes, self.steps, self.starts, self.parts)]
        if any(n is None for n in numbers):
            raise DeduceError("resize: expected numbers to evaluate with, got symbols; bind them first")
        return tuple(n for n in numbers if n is not None)

    def _row(self, k: int, top: Array, part: int, n: int) -> tuple[Array, Array | None]:
        """Return the elements (size, taps) that are summed along axis `k`, and their weights; without weights one each."""
        if self.kernel == "nearest":
            # ceil(a / b) is -(-a // b); rounding to nearest is floor or ceil of (2 a +- b) / (2 b), exact in integers
            up = self.rounding in ("ceil", "round_prefer_floor")
            if self.rounding.startswith("round"):
                top, part = 2 * top + (-part if up else part), 2 * part
            return (-(-top // part) if up else top // part)[:, None], None
        if self.kernel == "linear" and not self.wide:
            top = np.clip(top, 0, max(n - 1, 0) * part)
        half, share = SUPPORT[self.kernel], 1.0
        if self.wide:
            wide, narrow = as_int(self.wide[k]) or 1, as_int(self.narrow[k]) or 1
            half, share = max(-(-half * wide // narrow), half), min(narrow / wide, 1.0)
        taps = np.arange(1 - half, half + 1)
        places = (top // part)[:, None] + taps
        far = np.abs((taps - (top % part / part)[:, None]) * share)
        if self.kernel == "linear":
            weights = np.maximum(1 - far, 0)
        else:
            a = self.sharpness
            weights = np.where(
                far <= 1, ((a + 2) * far - (a + 3)) * far * far + 1, ((far - 5) * far + 8) * far * a - 4 * a
            )
            weights = np.where(far < 2, weights, 0)
        if self.within and not (self.kernel == "linear" and not self.wide):
            weights = np.where((places >= 0) & (places < n), weights, 0)
        return places, weights / weights.sum(axis=1, keepdims=True)
