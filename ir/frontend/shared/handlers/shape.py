"""Dims and movements of both formats: missing dims, padding, triangles.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, ExprLike, add, as_int, const, expr, floordiv, le, maximum, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.pad import Pad


def _factors(dims: Sequence[Expr]) -> tuple[int, list[Expr]]:
    """Return a product of dims as a number and other factors."""
    number, rest, stack = 1, [], list(dims)
    while stack:
        e = stack.pop()
        if e.value is not None:
            number *= int(e.value)
        elif e.op == "mul":
            stack.extend(e.args)
        else:
            rest.append(e)
    return number, rest


def cancelled(w: Writer, have: Sequence[Expr], others: Sequence[Expr]) -> tuple[Expr, Expr]:
    """Return the quotient of two products as (numerator, denominator) without common factors."""
    top, upper = _factors([w.simplify(d) for d in have])
    bottom, lower = _factors([w.simplify(d) for d in others])
    for e in list(lower):
        if e in upper:
            upper.remove(e)
            lower.remove(e)
    if bottom and top % bottom == 0:
        top, bottom = top // bottom, 1
    return w.simplify(mul(product(upper), const(top))), w.simplify(mul(product(lower), const(bottom)))


def missing_dim(w: Writer, have: Sequence[Expr], others: Sequence[Expr]) -> Expr:
    """Return the dim that makes the products of both equal: common factors cancel."""
    above, below = cancelled(w, have, others)
    return above if as_int(below) in (0, 1) else w.simplify(floordiv(above, below))


def pad(
    w: Writer, value: Value, pads: Sequence[tuple[ExprLike, ExprLike]], fill: float = 0.0, mode: str = "constant"
) -> Value:
    """Pad `value` by (before, after) elements along each axis; negative numbers crop. Raises DeduceError."""
    grown: list[list[Expr]] = []
    for axis, pair in enumerate(pads):
        before, after = (w.simplify(expr(e)) for e in pair)
        begin, cut = (const(0) if w.natural(e) else w.simplify(maximum(mul(e, -1), 0)) for e in (before, after))
        size = tensor_dims(value)[axis]
        off, end = as_int(w.simplify(add(begin, cut))), sub(size, cut)
        if off is None:  # of computed numbers the sign may be unknown
            end = maximum(end, 0)
        elif not w.require(le(off, size)):
            raise DeduceError(f"pad: expected {off} or more elements along axis {axis} to crop, got {size!r}")
        value = w.slice(value, axis, begin, w.simplify(end))
        grown.append([e if w.natural(e) else w.simplify(maximum(e, 0)) for e in (before, after)])
    if all(as_int(e) == 0 for pair in grown for e in pair):
        return value
    front, back = (tuple(pair[side] for pair in grown) for side in (0, 1))
    return w.emit(Pad(front, back, mode, fill), value)


def triangle(w: Writer, x: ImportedValue, k: int | Value, upper: bool) -> ImportedValue:
    """Zero the elements below (upper) or above the diagonal `k` places right of the main one."""
    rows = w.expand_dims(w.iota(x.shape[-2]), (1,))
    columns = w.iota(x.shape[-1])
    diagonal = w.add(rows, k)
    inside = w.less_equal(diagonal, columns) if upper else w.less_equal(columns, diagonal)
    return w.of(w.where(inside, w.tensor(x), 0), x.natural)


def consecutive(w: Writer, x: ImportedValue, value: Value, axis: int, sizes: Iterable[Expr]) -> list[ImportedValue]:
    """Emit consecutive slices along an axis of a value, which has the elements of `x`."""
    begin: Expr = const(0)
    parts = []
    for size in sizes:
        end = w.simplify(add(begin, size))
        parts.append(w.of(w.slice(value, axis, begin, end), x.natural))
        begin = end
    return parts
