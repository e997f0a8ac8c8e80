"""Sampling of images at positions from data (torch grid_sample, ONNX GridSample).

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as tuples
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import DType, f32, f64, i64
from relax_tune.ir.core.expr import (  # fmt: skip
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
    minimum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import Array, Deduction, OperatorBuilder, OperatorSpec, float_result, shape_of
from relax_tune.ir.op.indexing.indices import inside, readable, require_elements
from relax_tune.ir.op.neural.interpolation import cubic_weights, linear_weights

Kernel = Literal["nearest", "linear", "cubic"]
Padding = Literal["zeros", "border", "reflection"]
SHARPNESS = -0.75


@dataclass(frozen=True, slots=True)
class GridSample(OperatorSpec):
    """Elements of x (n, c, dims...) at the positions grid (n, places..., d), as (n, c, places...).

    A position is -1 at the start and 1 at the end of a dim, the last dim first.

    Attributes:
        kernel: `nearest` (ties to even), `linear` or `cubic` (Keys 1981).
        padding: elements beyond the ends: `zeros`, `border` (the nearest element), or `reflection`.
        align: -1 and 1 are the centres of the first and last element, not their outer edges.
    """

    kernel: str = "linear"
    padding: str = "zeros"
    align: bool = False
    name: ClassVar[str] = "grid_sample"
    arity: ClassVar[int] = 2

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        x, grid = self.tensors(infos)
        for what, value, allowed in (
            ("kernel", self.kernel, get_args(Kernel)),
            ("padding", self.padding, get_args(Padding)),
        ):
            if value not in allowed:
                raise DeduceError(f"grid_sample: expected a {what} among {', '.join(allowed)}, got {value!r}")
        for t in (grid,) if self.kernel == "nearest" else (x, grid):
            if t.dtype is not None and not t.dtype.is_float:
                raise DeduceError(f"grid_sample: expected floats, got {t!r}; cast them first")
        if x.shape is None or grid.shape is None:
            return TensorInfo(None, x.dtype, grid.ndim)
        depth = len(x.shape) - 2
        if depth < 1 or len(grid.shape) < 2 or as_int(grid.shape[-1]) != depth:
            raise DeduceError(
                f"grid_sample: expected (n, c, dims...) and (n, ..., number of dims), got {x!r} and {grid!r}"
            )
        ctx.require_equal(x.shape[0], grid.shape[0], "grid_sample: dim 0")
        dims = (*x.shape[:2], *grid.shape[1:-1])
        for d in x.shape[2:]:
            require_elements(self.name, ctx, d, dims)
        return TensorInfo(dims, x.dtype)

    def build(self, b: OperatorBuilder) -> None:
        dims, places, dtype, grid_dtype = *map(shape_of, b.infos), b.dtype(0), b.dtype(1)
        x, grid = b.argument(0, "x"), b.argument(1, "grid")
        y = b.output("y", (*dims[:2], *places[1:-1]), dtype)
        work, depth = f64 if grid_dtype is f64 else f32, len(dims) - 2
        sizes = dims[2:]
        at = b.alloc("at", (*places[:-1], const(depth)), work)

        def position(*i: Expr) -> Expr:
            coordinate: Expr = const(0.0, work)
            for a in range(depth):
                along_axis = self._position(cast(grid[(*i[:-1], depth - 1 - a)], work), sizes[a], work)
                coordinate = along_axis if a == 0 else select(eq(i[-1], a), along_axis, coordinate)
            return coordinate

        # Positions are stored, since every channel and every corner of an element reads the same one.
        b.compute(at, position, "positions")
        total = f64 if dtype is f64 else work
        if dtype.is_float:
            b.compute(y, lambda *i: cast(self._value(x, at, i, total), dtype), "grid_sample")
        else:
            b.compute(y, lambda *i: self._value(x, at, i, dtype), "grid_sample")

    def _position(self, g: Expr, n: Expr, work: DType) -> Expr:
        """Return the position of a grid value, in elements."""
        one, two, size = const(1.0, work), const(2.0, work), cast(n, work)
        if self.align:
            place = mul(div(add(g, one), two), sub(size, one))
        else:
            place = div(sub(mul(add(g, one), size), one), two)
        if self.kernel == "cubic" or self.padding == "zeros":
            return place
        return self._bounded(place, n, work)

    def _bounded(self, at: Expr, n: Expr, work: DType) -> Expr:
        """Return a position moved between the first and last element."""
        zero, last = const(0.0, work), cast(sub(n, 1), work)
        if self.padding == "reflection":
            low = const(0.0 if self.align else -0.5, work)
            span = cast(sub(n, 1) if self.align else n, work)
            away = call("abs", sub(at, low))
            # A reflection is a zigzag: an even number of whole spans leads forwards, an odd number backwards. The
            # maximum keeps an image of one element from a division by 0.
            whole = call("floor", div(away, maximum(span, const(0.5, work))))
            rest = sub(away, mul(whole, span))
            odd = sub(whole, mul(call("floor", mul(whole, const(0.5, work))), const(2.0, work)))
            at = add(select(eq(odd, zero), rest, sub(span, rest)), low)
        return maximum(minimum(at, last), zero)

    def _taps(self, c: Expr, n: Expr, total: DType) -> list[tuple[Expr, Expr | None, Expr | None]]:
        """Return (index, weight, condition) of the elements around a position; without a weight it is 1."""
        if self.kernel == "nearest":
            first = cast(call("rint", c), i64)
            return [(inside(first, n), None, self._within(first, n))]
        whole = call("floor", c)
        rest, first = cast(sub(c, whole), total), cast(whole, i64)
        if self.kernel == "linear":
            both = (first, add(first, 1))
            return [(inside(p, n), w, self._within(p, n)) for p, w in zip(both, linear_weights(rest))]
        taps: list[tuple[Expr, Expr | None, Expr | None]] = []
        for k, weight in zip((-1, 0, 1, 2), cubic_weights(rest, SHARPNESS)):
            place = add(first, k)
            if self.padding == "reflection":
                exact = self._bounded(add(whole, const(float(k), c.dtype)), n, c.dtype)
                place = cast(exact, i64)
            taps.append((inside(place, n), weight, self._within(place, n)))
        return taps

    def _within(self, place: Expr, n: Expr) -> Expr | None:
        return and_(le(0, place), lt(place, n)) if self.padding == "zeros" else None

    def _value(self, x: Tensor, at: Tensor, i: Sequence[Expr], dtype: DType) -> Expr:
        sizes = x.buffer.shape[2:]
        places = (i[0], *i[2:])
        taps = [self._taps(at[(*places, a)], n, dtype) for a, n in enumerate(sizes)]
        total: Expr | None = None
        for chosen in tuples(*taps):
            term: Expr = x[(*i[:2], *(t[0] for t in chosen))]
            term = cast(term, dtype) if dtype.is_float else term
            for _, weight, _ in chosen:
                term = term if weight is None else mul(term, weight)
            tests = [t[2] for t in chosen if t[2] is not None]
            if tests:
                term = select(and_(*tests), term, const(0.0 if dtype.is_float else 0, dtype))
            total = term if total is None else add(total, term)
        assert total is not None
        return total

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        x, grid = arrays
        work = grid.dtype if grid.dtype.itemsize >= 4 else np.dtype(np.float32)
        sizes, depth = x.shape[2:], x.ndim - 2
        with np.errstate(all="ignore"):
            taps = [self._weights(grid[..., depth - 1 - a].astype(work), n) for a, n in enumerate(sizes)]
            source = np.moveaxis(readable(x, range(2, x.ndim)), 1, -1)
            batch = np.arange(x.shape[0]).reshape(-1, *(1,) * (grid.ndim - 2))
            total: Any = 0
            for chosen in tuples(*taps):
                term = source[(batch, *(t[0] for t in chosen))]
                inside = np.ones(grid.shape[:-1], bool)
                for _, weight, test in chosen:
                    term = term if weight is None else term * weight[..., None]
                    inside = inside if test is None else inside & test
                total = total + np.where(inside[..., None], term, np.zeros((), term.dtype))
        total = np.moveaxis(total, -1, 1)
        return total if self.kernel == "nearest" else float_result(total, arrays, x.dtype)

    def _weights(self, g: Array, n: int) -> list[tuple[Array, Array | None, Array | None]]:
        """Apply `_taps` to arrays."""
        kind = g.dtype.type
        if self.align:
            c = (g + kind(1)) / kind(2) * kind(n - 1)
        else:
            c = ((g + kind(1)) * kind(n) - kind(1)) / kind(2)
        if self.kernel != "cubic":
            c = self._moved(c, n)
        whole = np.rint(c) if self.kernel == "nearest" else np.floor(c)
        rest = (c - whole).astype(np.float64)
        rows: list[tuple[int, Array | None]] = [(0, None)]
        if self.kernel == "linear":
            rows = [(0, 1 - rest), (1, rest)]
        elif self.kernel == "cubic":
            a, far = SHARPNESS, [rest + 1, rest, 1 - rest, 2 - rest]
            near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in far]
            rows = [(k - 1, near[k] if k in (1, 2) else (((d - 5) * d + 8) * d - 4) * a) for k, d in enumerate(far)]
        taps: list[tuple[Array, Array | None, Array | None]] = []
        for k, weight in rows:
            at = self._moved(whole + kind(k), n) if self.kernel == "cubic" else whole + kind(k)
            test = (at >= 0) & (at <= n - 1) if self.padding == "zeros" else None
            safe = np.clip(np.where(np.isnan(at), kind(0), at), 0, max(n - 1, 0)).astype(np.int64)
            taps.append((safe, weight, test))
        return taps

    def _moved(self, c: Array, n: int) -> Array:
        if self.padding == "zeros":
            return c
        kind = c.dtype.type
        if self.padding == "reflection":
            low, span = kind(0 if self.align else -0.5), kind(n - 1 if self.align else n)
            away = np.abs(c - low)
            whole = np.floor(away / max(span, kind(0.5)))
            rest = away - whole * span
            c = np.where(whole - np.floor(whole * kind(0.5)) * kind(2) == 0, rest, span - rest) + low
        return np.asarray(np.maximum(np.minimum(c, kind(n - 1)), kind(0)))
