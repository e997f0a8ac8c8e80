"""Determinants by Gaussian elimination with partial pivoting, written out for small matrices.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from relax_tune.errors import ParseError
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.math import sign as sign_of
from relax_tune.ir.frontend.shared.node import FIXED_DIMS
from relax_tune.ir.frontend.shared.operators import element_of, tensor_dims
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.op.base import product

LARGEST_MATRIX = 32
"""Largest number of rows that is written out."""


def rows_of(dims: Sequence[Expr]) -> int:
    """Return the number of rows of square matrices. Raises ParseError for a number that is unknown or large."""
    n = as_int(dims[-1]) if len(dims) >= 2 else None
    if n is None or as_int(dims[-2]) != n or not 0 <= n <= LARGEST_MATRIX:
        got = " x ".join(map(repr, dims[-2:]))
        raise ParseError(
            f"expected square matrices of at most {LARGEST_MATRIX} rows, a number that is known at import, got {got}; {FIXED_DIMS}"
        )
    return n


def pivots(w: Writer, matrices: Value) -> tuple[list[Value], Value]:
    """Emit the pivots of matrices (..., n, n) and the sign of the row exchanges, each (...)."""
    dims, element = tensor_dims(matrices), element_of(matrices)
    n, batch = rows_of(dims), w.simplify(product(dims[:-2]))
    left = w.reshape(matrices, [batch, const(n), const(n)])
    # written out, since a loop would need a kernel launch for each step of matrices of at most 32 rows
    one, zero = w.literal(1, element), w.literal(0, element)
    sign, results = one, []
    for m in range(n, 0, -1):
        if m == 1:
            results.append(w.reshape(left, dims[:-2]))
            break
        column = w.reshape(w.slice(left, 2, const(0), const(1)), [batch, const(m)])
        best = w.arg_max(w.abs(column), 1)
        where = w.reshape(best, [batch, const(1), const(1)])
        row = w.gather_elements(left, w.broadcast_to(where, (batch, const(1), const(m))), 1)
        top = w.slice(row, 2, const(0), const(1))
        swapped = w.where(w.equal(best, w.tensor(w.number(const(0)))), one, -1)
        sign = w.mul(sign, w.reshape(swapped, dims[:-2]))
        results.append(w.reshape(top, dims[:-2]))
        # the row of the pivot changes places with the first row; the elimination leaves the other rows
        number = w.reshape(w.add(w.iota(const(m - 1)), 1), [const(m - 1), const(1)])
        first, others = (w.slice(left, 1, const(a), const(b)) for a, b in ((0, 1), (1, m)))
        others = w.where(w.equal(number, where), first, others)
        # below a pivot of 0 all elements of the column are 0, so that nothing is subtracted
        divisor = w.where(w.equal(top, zero), one, top)
        factor = w.div(w.slice(others, 2, const(0), const(1)), divisor)
        minuend, subtrahend = (w.slice(v, 2, const(1), const(m)) for v in (others, row))
        left = w.sub(minuend, w.mul(factor, subtrahend))
    return results, sign


def determinant(w: Writer, matrices: Value) -> Value:
    """Emit the determinants of matrices (..., n, n)."""
    factors, sign = pivots(w, matrices)
    if not factors:
        return w.full(tensor_dims(matrices)[:-2], 1, element_of(matrices))
    return reduce(w.mul, factors, sign)


def sign_and_log_determinant(w: Writer, matrices: Value) -> tuple[Value, Value]:
    """Emit the signs of determinants and the logarithms of their magnitudes, sums over the pivots."""
    factors, signs = pivots(w, matrices)
    if not factors:
        dims, element = tensor_dims(matrices)[:-2], element_of(matrices)
        return w.full(dims, 1, element), w.full(dims, 0, element)
    total = reduce(w.add, (w.log(w.abs(p)) for p in factors))
    return reduce(w.mul, (sign_of(w, p) for p in factors), signs), total
