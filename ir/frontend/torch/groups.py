"""ATen operators over groups of rows: bags of embeddings, counts by bin, products by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, add, as_int, const, mul
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis
from relax_tune.ir.frontend.shared.indexing import gather
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value, number_of
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import ExpandDims, Take
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.math.elementwise import AddScalar, Cast, Div, MaximumScalar, Minimum, Mul, MulScalar
from relax_tune.ir.op.math.logic import Equal, LessEqual, LogicalAnd
from relax_tune.ir.op.math.numeric import Floor
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean, Sum

MODES = ("sum", "mean", "max")


def _group_of_each(w: Writer, starts: Value, count: ImportedValue) -> Value:
    """Return the number of `starts` up to each row, for as many rows as `count` has."""
    place = w.emit(ExpandDims((1,)), w.emit(Iota(count.shape[0])))
    begun = w.emit(Cast(i64), w.emit(LessEqual(), w.emit(ExpandDims((0,)), starts), place))
    return w.emit(Sum((1,), False), begun)


def _embedding_bag(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import the rows of a table added up by bag; the row's bag is the number of offsets up to it, minus 1."""
    table, indices, offsets = n.item(0), n.item(1), n.item(2)
    mode, weights = n.number(4, "mode", 0), n.given(6, "per_sample_weights")
    if mode > 1:
        raise n.refuse(f"wanted mode 'sum' or 'mean', found {MODES[mode]!r}")
    if n.number(8, "padding_idx", -1) != -1:
        raise n.refuse("wanted no padding_idx; leave the padding out of the bags")
    element, count = n.dtype, n.dims[0]
    if (length := _bag_length(w, offsets, indices, count)) is not None:
        return [_bags_of_one_length(w, n, length), None, None, None]
    starts = as_value(w, offsets, i64)
    if n.given(7, "include_last_offset", False):
        starts = slice_axis(w, starts, 0, const(0), count)
    work = f32 if element.is_half else element
    rows = cast_to(w, w.tensor(gather(w, table, 0, replace(indices, natural=True))), element, work)
    if isinstance(weights, ImportedValue):
        rows = w.emit(Mul(), rows, w.emit(ExpandDims((1,)), as_value(w, weights, work)))
    bag = w.emit(ExpandDims((1,)), w.emit(AddScalar(-1), _group_of_each(w, starts, indices)))
    found = w.emit(ScatterND("add"), w.full(n.dims, 0, work), bag, rows)
    if mode == 1:
        size = w.emit(ScatterND("add"), w.full((count,), 0, i64), bag, w.full(indices.shape, 1, i64))
        divisor = w.emit(ExpandDims((1,)), cast_to(w, w.emit(MaximumScalar(1), size), i64, work))
        found = w.emit(Div(), found, divisor)
    return [w.of(cast_to(w, found, work, element)), None, None, None]


def _bag_length(w: Writer, offsets: ImportedValue, indices: ImportedValue, count: Expr) -> Expr | None:
    """Return the length of all bags if the offsets are known to be its multiples."""
    if offsets.progression is None or as_int(offsets.progression[0]) != 0:
        return None
    length = offsets.progression[1]
    return length if w.g.deduction.same(indices.shape[0], mul(count, length)) else None


def _bags_of_one_length(w: Writer, n: TorchNode, length: Expr) -> ImportedValue:
    """Import sums or means of bags that are rows of a matrix of indices."""
    table, indices, weights = n.item(0), n.item(1), n.given(6, "per_sample_weights")
    element, count = n.dtype, n.dims[0]
    work = f32 if element.is_half else element
    places = w.of(w.reshape(w.tensor(indices), (count, length)), True)
    rows = cast_to(w, w.tensor(gather(w, table, 0, places)), element, work)
    if isinstance(weights, ImportedValue):
        share = w.reshape(as_value(w, weights, work), (count, length))
        rows = w.emit(Mul(), rows, w.emit(ExpandDims((2,)), share))
    found = w.emit(Mean((1,)) if n.number(4, "mode", 0) else Sum((1,)), rows)
    return w.of(cast_to(w, found, work, element))


def _histogram(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the numbers of elements in bins of one width; NaN and elements outside count nowhere."""
    bins = n.number(1, "bins", 100)
    low, high = (number_of(n.given(p, name, 0)) for p, name in ((2, "min"), (3, "max")))
    if low is None or high is None or not low < high:
        raise n.refuse(f"wanted min and max as numbers, min below max, found {low} and {high}")
    x = w.reshape(w.tensor(n.item(0)), [w.simplify(product(n.item(0).shape))])
    inside = w.emit(
        LogicalAnd(), w.emit(LessEqual(), w.literal(low, n.dtype), x), w.emit(LessEqual(), x, w.literal(high, n.dtype))
    )
    place = w.emit(MulScalar(float(bins)), w.emit(AddScalar(-low), x) if low else x)
    place = w.emit(Floor(), w.emit(Div(), place, w.literal(high - low, n.dtype)))
    place = w.emit(Minimum(), place, w.literal(bins - 1, n.dtype))
    every = w.emit(ExpandDims((1,)), w.emit(Cast(n.dtype), w.emit(Iota(const(bins)))))
    hit = w.emit(
        LogicalAnd(), w.emit(Equal(), every, w.emit(ExpandDims((0,)), place)), w.emit(ExpandDims((0,)), inside)
    )
    return w.of(w.emit(Cast(n.dtype), w.emit(Sum((1,), False), w.emit(Cast(i64), hit))), True)


def _grouped_product(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the products of rows with the matrix of their group; a group ends where its offset says."""
    x, weight, ends = n.item(0), n.item(1), n.given(2, "offs")
    if x.ndim != 2 or weight.ndim != 3 or not isinstance(ends, ImportedValue):
        raise n.refuse("wanted rows (s, k), matrices (groups, k, n) and offsets; use torch.bmm for products of stacks")
    if n.given(3, "bias") is not None:
        raise n.refuse("wanted no bias; add it to the result")
    group = _group_of_each(w, as_value(w, ends, i64), x)
    last = w.size(w.simplify(add(weight.shape[0], -1)))
    table = w.emit(Take(), w.tensor(weight), w.emit(Minimum(), group, last))
    found = w.emit(Matmul(), w.emit(ExpandDims((1,)), w.tensor(x)), table)
    return w.of(cast_to(w, w.reshape(found, n.dims), x.dtype, n.dtype))


HANDLERS: Mapping[str, Handler] = {
    "aten._embedding_bag.default": _embedding_bag, "aten._embedding_bag_forward_only.default": _embedding_bag,
    "aten.histc.default": _histogram, "aten._grouped_mm.default": _grouped_product,
    "transformers.grouped_mm_fallback.default": _grouped_product,
}  # fmt: skip
