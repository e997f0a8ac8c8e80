"""Gaussian elimination with partial pivoting, written out for small matrices, for importers of every format."""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import slice_axis
from relax_tune.ir.frontend.shared.writer import Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.elementwise import AddScalar, Div, Mul, Sub
from relax_tune.ir.op.math.logic import Equal, Where
from relax_tune.ir.op.math.numeric import Abs
from relax_tune.ir.op.reduction.scan import ArgMax

LARGEST = 32
"""Largest number of rows that is written out."""


def rows_of(dims: Sequence[Expr]) -> int:
    """Return the number of rows of square matrices. Raises ParseError for a number that is unknown or large."""
    n = as_int(dims[-1]) if len(dims) >= 2 else None
    if n is None or as_int(dims[-2]) != n or not 0 <= n <= LARGEST:
        found = " x ".join(map(repr, dims[-2:]))
        raise ParseError(
            f"wanted square matrices of at most {LARGEST} rows, a number that is known at import, found {found}; export the model "
            "with numbers as the last two dims"
        )
    return n


def pivots(w: Writer, matrices: Value, element: DType) -> tuple[list[Value], Value]:
    """Emit the pivots of matrices (..., n, n) and the sign of the row exchanges, each (...)."""
    dims = tensor_dims(matrices)
    n, batch = rows_of(dims), w.simplify(product(dims[:-2]))
    left = w.reshape(matrices, [batch, const(n), const(n)])
    one, zero = w.literal(1, element), w.literal(0, element)
    sign, found = one, []
    for m in range(n, 0, -1):
        if m == 1:
            found.append(w.reshape(left, dims[:-2]))
            break
        column = w.reshape(slice_axis(w, left, 2, const(0), const(1)), [batch, const(m)])
        best = w.emit(ArgMax(1), w.emit(Abs(), column))
        where = w.reshape(best, [batch, const(1), const(1)])
        row = w.emit(GatherElements(1), left, w.emit(BroadcastTo((batch, const(1), const(m))), where))
        top = slice_axis(w, row, 2, const(0), const(1))
        swapped = w.emit(Where(), w.emit(Equal(), best, w.tensor(w.number(const(0)))), one, w.literal(-1, element))
        sign = w.emit(Mul(), sign, w.reshape(swapped, dims[:-2]))
        found.append(w.reshape(top, dims[:-2]))
        number = w.reshape(w.emit(AddScalar(1), w.emit(Iota(const(m - 1)))), [const(m - 1), const(1)])
        first, others = (slice_axis(w, left, 1, const(a), const(b)) for a, b in ((0, 1), (1, m)))
        others = w.emit(Where(), w.emit(Equal(), number, where), first, others)
        # a pivot of 0 stands above zeros, which take nothing away
        over = w.emit(Where(), w.emit(Equal(), top, zero), one, top)
        factor = w.emit(Div(), slice_axis(w, others, 2, const(0), const(1)), over)
        rest = (slice_axis(w, v, 2, const(1), const(m)) for v in (others, row))
        kept, taken = rest
        left = w.emit(Sub(), kept, w.emit(Mul(), factor, taken))
    return found, sign


def determinant(w: Writer, matrices: Value, element: DType) -> Value:
    """Emit the determinants of matrices (..., n, n)."""
    found, sign = pivots(w, matrices, element)
    if not found:
        return w.full(tensor_dims(matrices)[:-2], 1, element)
    for p in found:
        sign = w.emit(Mul(), sign, p)
    return sign
