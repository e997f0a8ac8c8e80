"""Einstein summation: sums of products over named indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, add, as_int, const, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, all_tensors
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.base import (
    Array,
    Decomposer,
    Deduction,
    OperatorSpec,
    dtype_of,
    float_result,
    is_const,
    product,
    shape_of,
    wide,
)
from relax_tune.ir.op.indexing.movement import Permute, Reshape
from relax_tune.ir.op.math.elementwise import Mul
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum

FIRST_OF_DOTS = 0x391
"""Code of the first capital Greek letter; they name the dims of `...`, aligned at the last one."""


@dataclass(frozen=True, slots=True)
class Einsum(OperatorSpec):
    """Einsum with the notation of `numpy.einsum`.

    `equation` names the dims of each operand by letters, broadcast dims by `...`, and after `->` the dims of the result. Without
    `->` the result has `...` and the letters that occur once, sorted. Letters absent from the result are summed over. A letter
    twice in one operand reads its diagonal. A dim of 1 broadcasts to the other dims of its letter."""

    equation: str
    name: ClassVar[str] = "einsum"

    def letters(self, ndims: Sequence[int]) -> tuple[tuple[str, ...], str]:
        """Return the letters of each operand and of the result, with `...` expanded. Raises DeduceError."""
        text = self.equation.replace(" ", "")
        left, arrow, right = text.partition("->")
        terms = left.split(",")
        if len(terms) != len(ndims):
            raise DeduceError(f"einsum: wanted the {len(terms)} operands of {self.equation!r}, found {len(ndims)}")
        if not set(left.replace("...", "") + right.replace("...", "")) <= set(_LETTERS + ","):
            raise DeduceError(f"einsum: wanted letters, commas, ... and ->, found {self.equation!r}")
        more = [n - len(t.replace("...", "")) for n, t in zip(ndims, terms)]
        for p, (term, extra) in enumerate(zip(terms, more)):
            if extra < 0 or (extra and "..." not in term):
                raise DeduceError(
                    f"einsum: wanted as many letters as dims in operand {p} of {self.equation!r}, found {ndims[p]} dims"
                )
        most = max((m for m, t in zip(more, terms) if "..." in t), default=0)
        dots = "".join(chr(FIRST_OF_DOTS + p) for p in range(most))
        found = tuple(t.replace("...", dots[most - m :] if m else "") for t, m in zip(terms, more))
        every = "".join(found)
        if not arrow:
            right = "..." + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in dots))
        result = right.replace("...", dots)
        if len(set(result)) != len(result) or not set(result) <= set(every):
            raise DeduceError(
                f"einsum: wanted each letter of the result once and in an operand, found {self.equation!r}"
            )
        return found, result

    @staticmethod
    def sizes(terms: Sequence[str], shapes: Sequence[Sequence[Expr]]) -> dict[str, Expr]:
        """Return the dim of each letter: the first that is not 1."""
        found: dict[str, Expr] = {}
        for term, shape in zip(terms, shapes):
            for c, d in zip(term, shape):
                if c not in found or as_int(found[c]) == 1:
                    found[c] = d
        return found

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        found = all_tensors(infos)
        if not found:
            raise DeduceError(f"einsum: wanted at least one tensor and only tensors, found {list(infos)!r}")
        dtype = self.same_dtype(found)
        shapes = [i.shape for i in found if i.shape is not None]
        if len(shapes) != len(found):
            return TensorInfo(None, dtype)
        terms, result = self.letters([len(s) for s in shapes])
        sizes = self.sizes(terms, shapes)
        for p, (term, shape) in enumerate(zip(terms, shapes)):
            for k, (c, d) in enumerate(zip(term, shape)):
                if term.index(c) < k:  # a diagonal of equal dims: 1 is not read as broadcast
                    ctx.require_equal(shape[term.index(c)], d, f"einsum {self.equation!r}: {c!r} in operand {p}")
                if as_int(d) != 1:
                    ctx.require_equal(sizes[c], d, f"einsum {self.equation!r}: {c!r} in operand {p}")
        return TensorInfo(tuple(sizes[c] for c in result), dtype)

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        b = TensorBuilder(name)
        shapes, dtype = [shape_of(i) for i in infos], dtype_of(infos[0])
        terms, result = self.letters([len(s) for s in shapes])
        sizes = self.sizes(terms, shapes)
        xs = [b.input(f"x{p}", s, dtype, is_const(consts, p)) for p, s in enumerate(shapes)]
        y = b.output("y", [sizes[c] for c in result], dtype)
        summed = [c for c in sizes if c not in result]

        def value(*i: Expr) -> Expr:
            at = dict(zip([*result, *summed], i))
            found: Expr | None = None
            for x, term, shape in zip(xs, terms, shapes):
                one = x[tuple(const(0) if as_int(d) == 1 else at[c] for c, d in zip(term, shape))]
                found = one if found is None else mul(found, one)
            assert found is not None
            return found

        if summed:
            b.reduce(y, [sizes[c] for c in summed], const(0, dtype), lambda old, *i: add(old, value(*i)), "einsum")
        else:
            b.compute(y, value, "einsum")
        return b.finish()

    def decompose(self, args: Sequence[Value], infos: Sequence[TensorInfo], g: Decomposer) -> Value | None:
        """Decompose into matrix products, two operands at a time from the left; None for diagonals.

        Letters of one operand only are summed first. Letters of both operands that are needed later are batch dims. The others
        are rows, columns and the inner dim."""
        shapes = [shape_of(i) for i in infos]
        terms, result = self.letters([len(s) for s in shapes])
        if any(len(set(t)) != len(t) for t in terms):
            return None
        step = _Step(g, self.sizes(terms, shapes))
        left = step.plain(args[0], terms[0], shapes[0], "".join(terms[1:]))
        for p in range(1, len(args)):
            later = "".join(terms[p + 1 :])
            after = result + later
            right = step.plain(args[p], terms[p], shapes[p], left[1] + later)
            left = step.product(left, right, after)
        value, letters = step.summed(*left, result)
        return step.turned(value, letters, result)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        terms, result = self.letters([a.ndim for a in arrays])
        plain = {c: _LETTERS[p] for p, c in enumerate(dict.fromkeys("".join(terms)))}
        spelled = ",".join("".join(plain[c] for c in t) for t in terms)
        found = np.einsum(f"{spelled}->{''.join(plain[c] for c in result)}", *map(wide, arrays))
        return float_result(found, arrays, np.result_type(*arrays))


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
Part = tuple[Value, str]
"""A value, and the letters of its dims."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Emitter of the steps of one equation. sizes: dim of each letter."""

    g: Decomposer
    sizes: dict[str, Expr]

    def dims(self, letters: Sequence[str]) -> list[Expr]:
        return [self.sizes[c] for c in letters]

    def view(self, value: Value, dims: Sequence[Expr]) -> Value:
        return self.g.call(Reshape(tuple(dims)), value)

    def plain(self, value: Value, letters: str, shape: Sequence[Expr], others: str) -> Part:
        """Drop the dims of 1 that are wider in other operands."""
        kept = "".join(c for c, d in zip(letters, shape) if as_int(d) != 1 or c not in others)
        return (value if kept == letters else self.view(value, self.dims(kept))), kept

    def summed(self, value: Value, letters: str, kept: str) -> Part:
        """Sum over the letters outside `kept`."""
        axes = tuple(p for p, c in enumerate(letters) if c not in kept)
        if not axes:
            return value, letters
        return self.g.call(Sum(axes), value), "".join(c for c in letters if c in kept)

    def turned(self, value: Value, letters: str, wanted: Sequence[str]) -> Value:
        axes = tuple(letters.index(c) for c in wanted)
        return value if axes == tuple(range(len(axes))) else self.g.call(Permute(axes), value)

    def product(self, left: Part, right: Part, wanted: str) -> Part:
        """Multiply two operands, summing over the letters outside `wanted`."""
        a, own = self.summed(*left, wanted + right[1])
        b, other = self.summed(*right, wanted + own)
        batch = [c for c in own if c in other and c in wanted]
        inner = [c for c in own if c in other and c not in wanted]
        rows, columns = ([c for c in term if c not in batch and c not in inner] for term in (own, other))
        letters = "".join([*batch, *rows, *columns])
        if not inner:
            ones = [const(1)] * len(columns)
            a = self.view(self.turned(a, own, [*batch, *rows]), [*self.dims([*batch, *rows]), *ones])
            ones = [const(1)] * len(rows)
            b = self.view(self.turned(b, other, [*batch, *columns]), [*self.dims(batch), *ones, *self.dims(columns)])
            return self.g.call(Mul(), a, b), letters
        flat = [self.g.deduction.simplify(product(self.dims(part))) for part in (rows, inner, columns)]
        a = self.view(self.turned(a, own, [*batch, *rows, *inner]), [*self.dims(batch), *flat[:2]])
        # a second operand with its inner dim last is read transposed
        lies = (
            own != other
            and [c for c in other if c in inner] == inner
            and list(other[len(other) - len(inner) :]) == inner
        )
        last = [*columns, *inner] if lies else [*inner, *columns]
        width = [flat[2], flat[1]] if lies else flat[1:]
        b = self.view(self.turned(b, other, [*batch, *last]), [*self.dims(batch), *width])
        return self.view(self.g.call(Matmul(lies), a, b), self.dims(letters)), letters
