"""Padding of tensors.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import (
    Expr,
    add,
    and_,
    as_int,
    const,
    eq,
    floormod,
    le,
    lt,
    maximum,
    minimum,
    mul,
    or_,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import Array, Deduction, HalfPolicy, OperatorBuilder, OperatorSpec

Mode = Literal["constant", "edge", "reflect", "wrap"]


@dataclass(frozen=True, slots=True)
class Pad(OperatorSpec):
    """Padding (modes of ONNX Pad and `numpy.pad`).

    Attributes:
        before, after: number of elements to add at each axis, at least 0.
        mode: `constant` (`value`), `edge` (nearest element), `reflect` (mirrored without the edge), `wrap` (periodic).
    """

    before: tuple[Expr, ...]
    after: tuple[Expr, ...]
    mode: str = "constant"
    value: float = 0.0
    name: ClassVar[str] = "pad"
    half_policy: ClassVar[HalfPolicy] = "pass_through"
    arity: ClassVar[int] = 1

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        if self.mode not in get_args(Mode):
            raise DeduceError(f"pad: expected a mode among {', '.join(get_args(Mode))}, got {self.mode!r}")
        if len(self.before) != len(self.after) or x.ndim not in (None, len(self.before)):
            raise DeduceError(
                f"pad: expected sizes before and after each dim of {x!r}, got {self.before} and {self.after}"
            )
        for e in (*self.before, *self.after):
            ctx.require_at_least(e, 0, "pad: more elements")
        if x.shape is None:
            return TensorInfo(None, x.dtype, len(self.before))
        for p, (n, a, b) in enumerate(zip(x.shape, self.before, self.after)):
            most = maximum(a, b)
            if self.mode != "constant" and as_int(most) != 0:
                enough = or_(lt(most if self.mode == "reflect" else const(0), n), eq(most, 0))
                self._require(
                    ctx,
                    enough,
                    f"pad: expected a dim {p} long enough to {self.mode} {{0}} elements, got {{1}}",
                    most,
                    n,
                )
        dims = (ctx.simplify(add(add(n, a), b)) for n, a, b in zip(x.shape, self.before, self.after))
        return TensorInfo(tuple(dims), x.dtype)

    @staticmethod
    def _require(ctx: Deduction, cond: Expr, message: str, *values: Expr) -> None:
        proof = ctx.proves(cond)
        if proof is Proof.NO:
            raise DeduceError(message.format(*(repr(ctx.simplify(v)) for v in values)))
        if proof is Proof.UNKNOWN:
            ctx.require(cond, message, *values)

    def build(self, b: OperatorBuilder) -> None:
        ctx = b.ctx
        shape, dtype = b.shape(0), b.dtype(0)
        x = b.argument(0, "x")
        dims = [ctx.simplify(add(add(n, s), e)) for n, s, e in zip(shape, self.before, self.after)]
        y = b.output("y", dims, dtype)
        padded = [p for p, pair in enumerate(zip(self.before, self.after)) if any(as_int(e) != 0 for e in pair)]
        fill = const(bool(self.value) if dtype is bool_ else self.value if dtype.is_float else int(self.value), dtype)
        if self.mode == "constant" and any(ctx.proves(lt(0, shape[p])) is not Proof.YES for p in padded):
            # an empty tensor must not be read: fill first, then copy the existing elements
            b.compute(y, lambda *i: fill, "pad_fill")
            b.place(y, dict(enumerate(self.before)), x, "pad")
            return
        b.compute(y, lambda *i: self._element(x, i, padded, fill), "pad")

    def _element(self, x: Tensor, i: Sequence[Expr], padded: Sequence[int], fill: Expr) -> Expr:
        where, inside = list(i), []
        for p in padded:
            n, at = x.buffer.shape[p], sub(i[p], self.before[p])
            nearest = maximum(minimum(at, sub(n, 1)), 0)
            if self.mode == "wrap":
                nearest = floormod(at, n)
            elif self.mode == "reflect":
                back = maximum(at, sub(const(0), at))
                # Reflected at the first element by the absolute value, at the last one by 2 (n - 1) - position.
                nearest = minimum(back, sub(mul(sub(n, 1), 2), back))
            where[p] = nearest
            inside += [le(self.before[p], i[p]), lt(at, n)]
        element: Expr = x[tuple(where)]
        return select(and_(*inside), element, fill) if self.mode == "constant" and inside else element

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        sizes = [(as_int(a), as_int(b)) for a, b in zip(self.before, self.after)]
        if any(n is None for pair in sizes for n in pair):
            raise DeduceError(f"pad: expected numbers to evaluate with, got {self.before} and {self.after}")
        if not sizes:  # numpy.pad rejects a 0-d array
            return arrays[0]
        mode: Any = self.mode
        more = {"constant_values": np.asarray(self.value).astype(arrays[0].dtype)} if mode == "constant" else {}
        return np.pad(arrays[0], sizes, mode, **more)  # type: ignore[arg-type]
