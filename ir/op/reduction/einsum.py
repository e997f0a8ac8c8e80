"""Einstein summation: sums of products over named indices.

Tests: `tests/ir/op/test_semantics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, add, as_int, const, mul
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, all_tensors
from relax_tune.ir.op.base import (
    Array,
    Decomposer,
    Deduction,
    OperatorBuilder,
    OperatorSpec,
    float_result,
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
            raise DeduceError(f"einsum: expected the {len(terms)} operands of {self.equation!r}, got {len(ndims)}")
        if not set(left.replace("...", "") + right.replace("...", "")) <= set(_LETTERS + ","):
            raise DeduceError(f"einsum: expected letters, commas, ... and ->, got {self.equation!r}")
        more = [n - len(t.replace("...", "")) for n, t in zip(ndims, terms)]
        for p, (term, extra) in enumerate(zip(terms, more)):
            if extra < 0 or (extra and "..." not in term):
                raise DeduceError(
                    f"einsum: expected as many letters as dims in operand {p} of {self.equation!r}, got {ndims[p]} dims"
                )
        most = max((m for m, t in zip(more, terms) if "..." in t), default=0)
        dots = "".join(chr(FIRST_OF_DOTS + p) for p in range(most))
        spelled_terms = tuple(t.replace("...", dots[most - m :] if m else "") for t, m in zip(terms, more))
        every = "".join(spelled_terms)
        if not arrow:
            # NumPy's implicit form: letters that occur once, in alphabetical order.
            right = "..." + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in dots))
        result = right.replace("...", dots)
        if len(set(result)) != len(result) or not set(result) <= set(every):
            raise DeduceError(
                f"einsum: expected each letter of the result once and in an operand, got {self.equation!r}"
            )
        return spelled_terms, result

    @staticmethod
    def sizes(terms: Sequence[str], shapes: Sequence[Sequence[Expr]]) -> dict[str, Expr]:
        """Return the dim of each letter: the first that is not 1."""
        sizes: dict[str, Expr] = {}
        for term, shape in zip(terms, shapes):
            for c, d in zip(term, shape):
                if c not in sizes or as_int(sizes[c]) == 1:
                    sizes[c] = d
        return sizes

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        tensors = all_tensors(infos)
        if not tensors:
            raise DeduceError(f"einsum: expected at least one tensor and only tensors, got {list(infos)!r}")
        dtype = self.same_dtype(tensors)
        shapes = [i.shape for i in tensors if i.shape is not None]
        if len(shapes) != len(tensors):
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

    def build(self, b: OperatorBuilder) -> None:
        shapes, dtype = [shape_of(i) for i in b.infos], b.dtype(0)
        terms, result = self.letters([len(s) for s in shapes])
        sizes = self.sizes(terms, shapes)
        xs = [b.argument(p, f"x{p}") for p in range(len(shapes))]
        y = b.output("y", [sizes[c] for c in result], dtype)
        summed = [c for c in sizes if c not in result]

        def value(*i: Expr) -> Expr:
            at = dict(zip([*result, *summed], i))
            product: Expr | None = None
            for x, term, shape in zip(xs, terms, shapes):
                one = x[tuple(const(0) if as_int(d) == 1 else at[c] for c, d in zip(term, shape))]
                product = one if product is None else mul(product, one)
            assert product is not None
            return product

        if summed:
            b.reduce(y, [sizes[c] for c in summed], const(0, dtype), lambda old, *i: add(old, value(*i)), "einsum")
        else:
            b.compute(y, value, "einsum")

    def decompose(self, args: Sequence[Value], infos: Sequence[TensorInfo], g: Decomposer) -> Value | None:
        """Decompose into matrix products, two operands at a time from the left; None for diagonals.

        Letters of one operand only are summed first. Letters of both operands that are needed later are batch dims. The others
        are rows, columns and the inner dim."""
        shapes = [shape_of(i) for i in infos]
        terms, result = self.letters([len(s) for s in shapes])
        # A letter twice in one operand is a diagonal, which no matrix product reads.
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
        value = np.einsum(f"{spelled}->{''.join(plain[c] for c in result)}", *map(wide, arrays))
        return float_result(value, arrays, np.result_type(*arrays))


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
Part = tuple[Value, str]
"""A value, and the letters of its dims."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Emitter of the steps of one equation.

    Attributes:
        sizes: dim of each letter.
    """

    g: Decomposer
    sizes: dict[str, Expr]

    def dims(self, letters: Sequence[str]) -> list[Expr]:
        return [self.sizes[c] for c in letters]

    def view(self, value: Value, dims: Sequence[Expr]) -> Value:
        return self.g.call(Reshape(tuple(dims)), value)

    def plain(self, value: Value, letters: str, shape: Sequence[Expr], others: str) -> Part:
        """Drop the dims of 1 that are wider in other operands."""
        letters_left = "".join(c for c, d in zip(letters, shape) if as_int(d) != 1 or c not in others)
        return (value if letters_left == letters else self.view(value, self.dims(letters_left))), letters_left

    def summed(self, value: Value, letters: str, remaining: str) -> Part:
        """Sum over the letters outside `remaining`."""
        axes = tuple(p for p, c in enumerate(letters) if c not in remaining)
        if not axes:
            return value, letters
        return self.g.call(Sum(axes), value), "".join(c for c in letters if c in remaining)

    def turned(self, value: Value, letters: str, order: Sequence[str]) -> Value:
        axes = tuple(letters.index(c) for c in order)
        return value if axes == tuple(range(len(axes))) else self.g.call(Permute(axes), value)

    def product(self, left: Part, right: Part, result: str) -> Part:
        """Multiply two operands, summing over the letters outside `result`."""
        # Letters of one operand only are summed before the product, which then has fewer elements.
        a, left_letters = self.summed(*left, result + right[1])
        b, right_letters = self.summed(*right, result + left_letters)
        batch = [c for c in left_letters if c in right_letters and c in result]
        inner = [c for c in left_letters if c in right_letters and c not in result]
        rows, columns = (
            [c for c in term if c not in batch and c not in inner] for term in (left_letters, right_letters)
        )
        letters = "".join([*batch, *rows, *columns])
        # Nothing to sum over: an elementwise product with broadcasting.
        if not inner:
            ones = [const(1)] * len(columns)
            a = self.view(self.turned(a, left_letters, [*batch, *rows]), [*self.dims([*batch, *rows]), *ones])
            ones = [const(1)] * len(rows)
            b = self.view(
                self.turned(b, right_letters, [*batch, *columns]), [*self.dims(batch), *ones, *self.dims(columns)]
            )
            return self.g.call(Mul(), a, b), letters
        flat = [self.g.deduction.simplify(product(self.dims(part))) for part in (rows, inner, columns)]
        a = self.view(self.turned(a, left_letters, [*batch, *rows, *inner]), [*self.dims(batch), *flat[:2]])
        # a second operand with its inner dim last is read transposed
        lies = (
            left_letters != right_letters
            and [c for c in right_letters if c in inner] == inner
            and list(right_letters[len(right_letters) - len(inner) :]) == inner
        )
        last = [*columns, *inner] if lies else [*inner, *columns]
        width = [flat[2], flat[1]] if lies else flat[1:]
        b = self.view(self.turned(b, right_letters, [*batch, *last]), [*self.dims(batch), *width])
        return self.view(self.g.call(Matmul(lies), a, b), self.dims(letters)), letters
