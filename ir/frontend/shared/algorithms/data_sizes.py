"""Results whose sizes data decide: positions of true elements, distinct elements, boxes that non-maximum suppression keeps.

A size that data decide has a bound, a dim of the operands. Tensor functions compute a result of the bound's size, and a count of
its elements. The runtime reads the count as a symbol, and the first elements are the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.shared.compositions import cast_to, permute, slice_axis, take
from relax_tune.ir.frontend.shared.control import LoopBody, Values, loop
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims
from relax_tune.ir.op.indexing.scatter import ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Maximum, Minimum, Mul, Sub
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, LogicalNot, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import Modulo, Quotient
from relax_tune.ir.op.reduction.reduce import MaxOrLowest, Sum
from relax_tune.ir.op.reduction.scan import CumSum, TopK
from relax_tune.ir.op.shapes import TensorToShape
from relax_tune.ir.rewrite.emitter import tensor_info

COLUMNS = 64
"""Most elements of a slice for distinct slices, which are sorted by each."""


def size_from_data(w: Writer, count: Value, hint: str = "count") -> Var:
    """Return a symbol for the one element of an int64 tensor, read at run time and at least 0."""
    found = w.g.call(TensorToShape(), w.reshape(count, [const(1)]))
    symbol = Var(w.g.fresh(hint))
    w.g.match_cast(found, ShapeInfo((symbol,)))
    return symbol


def first_rows(w: Writer, value: Value, count: Var) -> Value:
    """Return the first `count` rows, which is at most the number of rows."""
    dims = tensor_dims(value)
    return w.reshape(slice_axis(w, value, 0, const(0), count), [count, *dims[1:]])


def flat(w: Writer, value: Value) -> Value:
    """Return the elements in row-major order, in one dim."""
    return w.reshape(value, [w.simplify(product(tensor_dims(value)))])


def true_positions(w: Writer, mask: Value) -> Value:
    """Return the positions of true elements, in order (stream compaction). mask: (n,) of truth values; result: (count,) of int64"""
    places, count = first_places(w, mask, tensor_dims(mask)[0], 0)
    return first_rows(w, places, size_from_data(w, count))


def first_places(w: Writer, mask: Value, size: Expr, fill: int) -> tuple[Value, Value]:
    """Return the first `size` positions of true elements, `fill` behind the last, and the number of all true elements."""
    (n,) = tensor_dims(mask)
    ones = w.emit(Cast(i64), mask)
    target = w.emit(Where(), mask, w.emit(AddScalar(-1), w.emit(CumSum(0), ones)), w.size(size))
    # updates for places from `size` on are dropped
    room = w.full([size], fill, i64)
    places = w.emit(ScatterND("replace"), room, w.emit(ExpandDims((1,)), target), w.emit(Iota(n)))
    return places, w.emit(Sum((0,)), ones)


def coordinates(w: Writer, positions: Value, dims: Sequence[Expr]) -> list[Value]:
    """Return the index along each dim of positions in row-major order."""
    found, rest = list[Value](), positions
    for d in reversed(dims[1:]):
        found.append(w.emit(Modulo(), rest, w.size(d)))
        rest = w.emit(Quotient(), rest, w.size(d))
    return [*([rest] if dims else []), *reversed(found)]


def truth(w: Writer, x: ImportedValue) -> Value:
    """Return whether each element is other than 0."""
    return cast_to(w, w.tensor(x), x.dtype, bool_)


def nonzero(w: Writer, x: ImportedValue, axis: int) -> Value:
    """Return the indices of elements other than 0 in row-major order, (count, rank), or (rank, count) for axis 0.

    A tensor without dims has rank 0, and one element or none."""
    where = true_positions(w, flat(w, truth(w, x)))
    parts = coordinates(w, where, x.shape)
    if not parts:
        (count,) = tensor_dims(where)
        return w.full([const(0), count] if axis == 0 else [count, const(0)], 0, i64)
    return stacked(w, parts, axis)


def stacked(w: Writer, parts: Sequence[Value], axis: int) -> Value:
    """Stack tensors along a new axis."""
    rows = [w.emit(ExpandDims((axis,)), p) for p in parts]
    return w.emit(Concat(axis), *rows) if len(rows) > 1 else rows[0]


def slices_as_rows(w: Writer, value: Value, axis: int) -> Value:
    """Return the slices along an axis as rows (n, elements). Raises ParseError for more than `COLUMNS` elements, or a symbol."""
    order, dims = _in_front(value, axis), tensor_dims(value)
    count = as_int(w.simplify(product([dims[p] for p in order[1:]])))
    if count is None or count > COLUMNS:
        raise ParseError(
            f"wanted slices of at most {COLUMNS} elements, a number of them, found {value.info!r} along axis {axis}"
        )
    return w.reshape(permute(w, value, order), [dims[axis], const(count)])


def rows_as_slices(w: Writer, rows: Value, like: Value, axis: int) -> Value:
    """Return rows as the slices along an axis of a tensor with the other dims of `like`."""
    order, dims = _in_front(like, axis), tensor_dims(like)
    value = w.reshape(rows, [tensor_dims(rows)[0], *(dims[p] for p in order[1:])])
    return permute(w, value, [order.index(p) for p in range(len(order))])


def _in_front(value: Value, axis: int) -> list[int]:
    return [axis, *(p for p in range(len(tensor_dims(value))) if p != axis)]


@dataclass(frozen=True, slots=True)
class Distinct:
    """Distinct elements of n, as (count, rest) along the first dim.

    values: in ascending order, or in order of their first place
    first: (count,) the first place of each; inverse: (n,) the place in `values` of each element; counts: (count,) of occurrences"""

    values: Value
    first: Value
    inverse: Value
    counts: Value


def distinct(w: Writer, x: Value, ascending: bool = True) -> Distinct:
    """Return the distinct elements of (n,) or rows of (n, m) with m a number. Each NaN is distinct."""
    n = tensor_dims(x)[0]
    columns = columns_of(w, x)
    order: Value = w.emit(Iota(n))
    for c in reversed(columns):  # sorts are stable: the last column first
        order = w.emit(GatherElements(0), order, w.emit(TopK(n, 0, False), w.emit(GatherElements(0), c, order)))
    return grouped(w, x, columns, order, ascending)


def columns_of(w: Writer, x: Value) -> list[Value]:
    """Return the columns of rows (n, m), or the one of (n,)."""
    dims = tensor_dims(x)
    return [x] if len(dims) == 1 else [_column(w, x, k) for k in range(as_int(dims[1]) or 0)]


def _column(w: Writer, x: Value, k: int) -> Value:
    return w.reshape(slice_axis(w, x, 1, const(k), const(k + 1)), [tensor_dims(x)[0]])


def grouped(w: Writer, x: Value, columns: Sequence[Value], order: Value, ascending: bool = True) -> Distinct:
    """Return what differs from the element before it, in an order of (n,) places that puts equal ones together.

    columns: what is compared, each of (n,)"""
    n = tensor_dims(order)[0]
    places = w.emit(Iota(n))
    before = w.emit(GatherElements(0), order, w.emit(Maximum(), w.emit(AddScalar(-1), places), w.literal(0, i64)))
    new = w.emit(LessEqual(), places, w.literal(0, i64))
    for c in columns:
        here, there = w.emit(GatherElements(0), c, order), w.emit(GatherElements(0), c, before)
        new = w.emit(LogicalOr(), new, w.emit(NotEqual(), here, there))
    starts = true_positions(w, new)
    (count,) = tensor_dims(starts)
    group = w.emit(AddScalar(-1), w.emit(CumSum(0), w.emit(Cast(i64), new)))
    first = w.emit(GatherElements(0), order, starts)
    counts = w.emit(ScatterND("add"), w.full([count], 0, i64), w.emit(ExpandDims((1,)), group), w.full([n], 1, i64))
    if not ascending:
        by_place = w.emit(TopK(count, 0, False), first)
        first, counts = (w.emit(GatherElements(0), v, by_place) for v in (first, counts))
        rank = w.emit(ScatterElements("replace", 0), w.full([count], 0, i64), by_place, w.emit(Iota(count)))
        group = w.emit(GatherElements(0), rank, group)
    inverse = w.emit(ScatterElements("replace", 0), w.full([n], 0, i64), order, group)
    return Distinct(take(w, x, 0, first), first, inverse, counts)


def non_max_suppression(w: Writer, boxes: Value, classes: Value | None, most: Value | None, overlap: Value) -> Value:
    """Return the places of boxes that greedy suppression keeps, of (n, 4) in order of falling scores; result: (count,).

    A box is kept unless one before it, kept and of its class, overlaps it by more than `overlap` (Felzenszwalb et al. 2010). The
    greedy choice is the one fixed point of a condition on all boxes, and an iteration settles at least one more box.

    boxes: (low, low, high, high); classes: (n,) of int64; most: the largest number of boxes of a class, an int64 without dims"""
    n = tensor_dims(boxes)[0]
    places = w.emit(Iota(n))
    ahead = w.emit(Less(), _across(w, places), _down(w, places))
    if classes is not None:
        ahead = w.emit(LogicalAnd(), ahead, w.emit(Equal(), _across(w, classes), _down(w, classes)))
    rivals = w.of(w.emit(LogicalAnd(), ahead, w.emit(Less(), overlap, intersection_over_union(w, boxes))))
    every = w.of(w.full([n], True, bool_))

    def step(body: LoopBody) -> tuple[ImportedValue, Values, Values]:
        v, (before,) = body.w, body.state
        beaten = v.emit(LogicalAnd(), v.tensor(body.outside(rivals)), v.tensor(before))
        now = v.emit(LogicalNot(), _any(v, beaten, 1))
        return v.of(_any(v, v.emit(NotEqual(), now, v.tensor(before)), 0)), [v.of(now)], []

    (kept,), _ = loop(w, [every], step, going=w.constant(np.asarray(True), "begin"))
    found = w.tensor(kept)
    if most is not None:
        before = w.emit(Where(), w.emit(LogicalAnd(), ahead, found), w.literal(1, i64), w.literal(0, i64))
        found = w.emit(LogicalAnd(), found, w.emit(Less(), w.emit(Sum((1,)), before), most))
    return true_positions(w, found)


def _any(w: Writer, x: Value, axis: int) -> Value:
    return w.emit(Less(), w.literal(0, i64), w.emit(MaxOrLowest((axis,)), w.emit(Cast(i64), x)))


def intersection_over_union(w: Writer, boxes: Value) -> Value:
    """Return the intersection over union of each two boxes. boxes: (n, 4) as (low, low, high, high); result: (n, n)"""
    low, high = ([_column(w, boxes, k) for k in side] for side in ((0, 1), (2, 3)))
    zero = w.literal(0, tensor_info(boxes).dtype or f32)
    sides, lengths = [], []
    for a, b in zip(low, high, strict=True):
        upper, lower = w.emit(Minimum(), _down(w, b), _across(w, b)), w.emit(Maximum(), _down(w, a), _across(w, a))
        sides.append(w.emit(Maximum(), w.emit(Sub(), upper, lower), zero))
        lengths.append(w.emit(Sub(), b, a))
    inside, area = w.emit(Mul(), *sides), w.emit(Mul(), *lengths)
    return w.emit(Div(), inside, w.emit(Sub(), w.emit(Add(), _down(w, area), _across(w, area)), inside))


def _down(w: Writer, value: Value) -> Value:
    return w.emit(ExpandDims((1,)), value)


def _across(w: Writer, value: Value) -> Value:
    return w.emit(ExpandDims((0,)), value)
