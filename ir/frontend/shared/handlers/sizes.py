"""Results of both formats whose sizes data decide: positions of true elements, distinct elements, non-maximum suppression.

A size that data decide has a bound, a dim of the operands. Tensor functions compute a result of the bound's size, and a count of
its elements. The runtime reads the count as a symbol, and the first elements are the result.

Tests: `tests/ir/frontend/onnx/test_sizes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.control import LoopBody, Values, loop, size_from_data
from relax_tune.ir.frontend.shared.node import FIXED_DIMS
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.scatter import ScatterElements, ScatterND
from relax_tune.ir.rewrite.emitter import tensor_info

COLUMNS = 64
"""Most elements of a slice for distinct slices, which are sorted by each."""


def first_rows(w: Writer, value: Value, count: Var) -> Value:
    """Return the first `count` rows, which is at most the number of rows."""
    dims = tensor_dims(value)
    return w.reshape(w.slice(value, 0, const(0), count), [count, *dims[1:]])


def flat(w: Writer, value: Value) -> Value:
    """Return the elements in row-major order, in one dim."""
    return w.reshape(value, [w.simplify(product(tensor_dims(value)))])


def true_positions(w: Writer, mask: Value) -> Value:
    """Return the positions of true elements, in order (stream compaction). mask: (n,) of truth values; result: (count,) of int64"""
    places, count = first_places(w, mask, tensor_dims(mask)[0], 0)
    return first_rows(w, places, size_from_data(w, count))


def first_places(w: Writer, mask: Value, size: Expr, fill: int) -> tuple[Value, Value]:
    """Return the first `size` positions of true elements, `fill` after the last, and the number of all true elements."""
    (n,) = tensor_dims(mask)
    ones = w.cast(mask, i64)
    target = w.where(mask, w.add(w.cum_sum(ones, 0), -1), w.size(size))
    # updates for places from `size` on are dropped
    room = w.full([size], fill, i64)
    places = w.emit(ScatterND("replace"), room, w.expand_dims(target, (1,)), w.iota(n))
    return places, w.sum(ones, (0,))


def coordinates(w: Writer, positions: Value, dims: Sequence[Expr]) -> list[Value]:
    """Return the index along each dim of positions in row-major order."""
    reversed_indices, rest = list[Value](), positions
    for d in reversed(dims[1:]):
        reversed_indices.append(w.modulo(rest, w.size(d)))
        rest = w.quotient(rest, w.size(d))
    return [*([rest] if dims else []), *reversed(reversed_indices)]


def truth(w: Writer, x: ImportedValue) -> Value:
    """Return whether each element is other than 0."""
    return w.cast(w.tensor(x), bool_)


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
    rows = [w.expand_dims(p, (axis,)) for p in parts]
    return w.concat(axis, *rows) if len(rows) > 1 else rows[0]


def slices_as_rows(w: Writer, value: Value, axis: int) -> Value:
    """Return the slices along an axis as rows (n, elements). Raises ParseError for more than `COLUMNS` elements, or a symbol."""
    order, dims = _in_front(value, axis), tensor_dims(value)
    count = as_int(w.simplify(product([dims[p] for p in order[1:]])))
    if count is None or count > COLUMNS:
        raise ParseError(
            f"expected slices of at most {COLUMNS} elements, a number of them, got {value.info!r} along axis {axis}; {FIXED_DIMS}"
        )
    return w.reshape(w.permute(value, order), [dims[axis], const(count)])


def rows_as_slices(w: Writer, rows: Value, like: Value, axis: int) -> Value:
    """Return rows as the slices along an axis of a tensor with the other dims of `like`."""
    order, dims = _in_front(like, axis), tensor_dims(like)
    value = w.reshape(rows, [tensor_dims(rows)[0], *(dims[p] for p in order[1:])])
    return w.permute(value, [order.index(p) for p in range(len(order))])


def _in_front(value: Value, axis: int) -> list[int]:
    return [axis, *(p for p in range(len(tensor_dims(value))) if p != axis)]


@dataclass(frozen=True, slots=True)
class Distinct:
    """Distinct elements of n, as (count, rest) along the first dim.

    Attributes:
        values: In ascending order, or in order of their first place.
        first: (count,) the first place of each.
        inverse: (n,) the place in `values` of each element.
        counts: (count,) the number of occurrences of each.
    """

    values: Value
    first: Value
    inverse: Value
    counts: Value


def distinct(w: Writer, x: Value, ascending: bool = True) -> Distinct:
    """Return the distinct elements of (n,) or rows of (n, m) with m a number. Each NaN is distinct."""
    n = tensor_dims(x)[0]
    columns = columns_of(w, x)
    order: Value = w.iota(n)
    for c in reversed(columns):  # sorts are stable: the last column first
        order = w.gather_elements(order, w.top_k(w.gather_elements(c, order, 0), n, 0, False), 0)
    return grouped(w, x, columns, order, ascending)


def columns_of(w: Writer, x: Value) -> list[Value]:
    """Return the columns of rows (n, m), or the one of (n,)."""
    dims = tensor_dims(x)
    return [x] if len(dims) == 1 else [_column(w, x, k) for k in range(as_int(dims[1]) or 0)]


def _column(w: Writer, x: Value, k: int) -> Value:
    return w.reshape(w.slice(x, 1, const(k), const(k + 1)), [tensor_dims(x)[0]])


def grouped(w: Writer, x: Value, columns: Sequence[Value], order: Value, ascending: bool = True) -> Distinct:
    """Return what differs from the element before it, in an order of (n,) places that puts equal ones together.

    Args:
        columns: The compared values, each (n,).
    """
    n = tensor_dims(order)[0]
    places = w.iota(n)
    before = w.gather_elements(order, w.maximum(w.add(places, -1), w.literal(0, i64)), 0)
    new = w.less_equal(places, 0)
    for c in columns:
        here, there = w.gather_elements(c, order, 0), w.gather_elements(c, before, 0)
        new = w.logical_or(new, w.not_equal(here, there))
    starts = true_positions(w, new)
    (count,) = tensor_dims(starts)
    group = w.add(w.cum_sum(w.cast(new, i64), 0), -1)
    first = w.gather_elements(order, starts, 0)
    counts = w.emit(ScatterND("add"), w.full([count], 0, i64), w.expand_dims(group, (1,)), w.full([n], 1, i64))
    if not ascending:
        by_place = w.top_k(first, count, 0, False)
        first, counts = (w.gather_elements(v, by_place, 0) for v in (first, counts))
        rank = w.emit(ScatterElements("replace", 0), w.full([count], 0, i64), by_place, w.iota(count))
        group = w.gather_elements(rank, group, 0)
    inverse = w.emit(ScatterElements("replace", 0), w.full([n], 0, i64), order, group)
    return Distinct(w.take(x, 0, first), first, inverse, counts)


def non_max_suppression(w: Writer, boxes: Value, classes: Value | None, most: Value | None, overlap: Value) -> Value:
    """Return the places of boxes that greedy suppression keeps, of (n, 4) in order of falling scores; result: (count,).

    A box is selected unless a selected box before it, of its class, overlaps it by more than `overlap` (Felzenszwalb et al. 2010). The
    greedy choice is the one fixed point of a condition on all boxes, and an iteration settles at least one more box.

    Args:
        boxes: (n, 4) as (low, low, high, high).
        classes: (n,) of int64.
        most: The largest number of boxes of a class, an int64 without dims.
    """
    n = tensor_dims(boxes)[0]
    places = w.iota(n)
    ahead = w.less(_across(w, places), _down(w, places))
    if classes is not None:
        ahead = w.logical_and(ahead, w.equal(_across(w, classes), _down(w, classes)))
    rivals = w.of(w.logical_and(ahead, w.less(overlap, intersection_over_union(w, boxes))))
    every = w.of(w.full([n], True, bool_))

    def step(body: LoopBody) -> tuple[ImportedValue, Values, Values]:
        v, (before,) = body.w, body.state
        beaten = v.logical_and(v.tensor(body.outside(rivals)), v.tensor(before))
        now = v.logical_not(_any(v, beaten, 1))
        return v.of(_any(v, v.not_equal(now, v.tensor(before)), 0)), [v.of(now)], []

    (unbeaten,), _ = loop(w, [every], step, going=w.constant(np.asarray(True), "begin"))
    selected = w.tensor(unbeaten)
    if most is not None:
        before = w.where(w.logical_and(ahead, selected), w.literal(1, i64), w.literal(0, i64))
        selected = w.logical_and(selected, w.less(w.sum(before, (1,)), most))
    return true_positions(w, selected)


def _any(w: Writer, x: Value, axis: int) -> Value:
    return w.less(w.literal(0, i64), w.max_or_lowest(w.cast(x, i64), (axis,)))


def intersection_over_union(w: Writer, boxes: Value) -> Value:
    """Return the intersection over union of each two boxes. boxes: (n, 4) as (low, low, high, high); result: (n, n)"""
    low, high = ([_column(w, boxes, k) for k in side] for side in ((0, 1), (2, 3)))
    zero = w.literal(0, tensor_info(boxes).dtype or f32)
    sides, lengths = [], []
    for a, b in zip(low, high, strict=True):
        upper, lower = w.minimum(_down(w, b), _across(w, b)), w.maximum(_down(w, a), _across(w, a))
        sides.append(w.maximum(w.sub(upper, lower), zero))
        lengths.append(w.sub(b, a))
    inside, area = w.mul(*sides), w.mul(*lengths)
    return w.div(inside, w.sub(w.add(_down(w, area), _across(w, area)), inside))


def _down(w: Writer, value: Value) -> Value:
    return w.expand_dims(value, (1,))


def _across(w: Writer, value: Value) -> Value:
    return w.expand_dims(value, (0,))
