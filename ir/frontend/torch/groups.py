"""ATen operators over groups of rows: bags of embeddings, counts by bin, products by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, add, as_int, const, mul
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.indexing import gather
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_value
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.indexing.scatter import ScatterND
from relax_tune.ir.op.reduction.reduce import MaxOrLowest, Mean, Sum

MODES = ("sum", "mean", "max")


def _group_of_each(w: Writer, starts: Value, count: ImportedValue) -> Value:
    """Return the number of `starts` up to each row, for as many rows as `count` has."""
    place = w.expand_dims(w.iota(count.shape[0]), (1,))
    begun = w.cast(w.less_equal(w.expand_dims(starts, (0,)), place), i64)
    return w.sum(begun, (1,), False)


def _embedding_bag(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import the rows of a table added up, or their maxima, by bag; the row's bag is the number of offsets up to it, minus 1."""
    table, indices, offsets = n.item(0), n.item(1), n.item(2)
    mode, weights = n.number(4, "mode", 0), n.argument(6, "per_sample_weights")
    if mode not in range(len(MODES)):
        raise n.refuse(f"expected a mode among {', '.join(MODES)}, got {mode}")
    if n.number(8, "padding_idx", -1) != -1:
        raise n.refuse("expected no padding_idx; leave the padding out of the bags")
    element, count = n.dtype, n.dims[0]
    if (length := _bag_length(w, offsets, indices, count)) is not None:
        return [_bags_of_one_length(w, n, length), None, None, None]
    starts = as_value(w, offsets, i64)
    if n.argument(7, "include_last_offset", False):
        starts = w.slice(starts, 0, const(0), count)
    work = f32 if element.is_half else element
    rows = w.cast(w.tensor(gather(w, table, 0, replace(indices, natural=True))), work)
    if isinstance(weights, ImportedValue):
        rows = w.mul(rows, w.expand_dims(as_value(w, weights, work), (1,)))
    bag = w.expand_dims(w.add(_group_of_each(w, starts, indices), -1), (1,))
    if mode == 2:  # an empty bag gives 0
        top = w.emit(ScatterND("max"), w.full(n.dims, float("-inf"), work), bag, rows)
        return [w.of(w.cast(w.where(w.equal(top, float("-inf")), 0.0, top), element)), None, None, None]
    sums = w.emit(ScatterND("add"), w.full(n.dims, 0, work), bag, rows)
    if mode == 1:
        size = w.emit(ScatterND("add"), w.full((count,), 0, i64), bag, w.full(indices.shape, 1, i64))
        divisor = w.expand_dims(w.cast(w.maximum(size, 1), work), (1,))
        sums = w.div(sums, divisor)
    return [w.of(w.cast(sums, element)), None, None, None]


def _bag_length(w: Writer, offsets: ImportedValue, indices: ImportedValue, count: Expr) -> Expr | None:
    """Return the length of all bags if the offsets are known to be its multiples."""
    if offsets.progression is None or as_int(offsets.progression[0]) != 0:
        return None
    length = offsets.progression[1]
    return length if w.g.deduction.same(indices.shape[0], mul(count, length)) else None


def _bags_of_one_length(w: Writer, n: TorchNode, length: Expr) -> ImportedValue:
    """Import sums, means or maxima of bags that are rows of a matrix of indices."""
    table, indices, weights = n.item(0), n.item(1), n.argument(6, "per_sample_weights")
    element, count = n.dtype, n.dims[0]
    work = f32 if element.is_half else element
    places = w.of(w.reshape(w.tensor(indices), (count, length)), True)
    rows = w.cast(w.tensor(gather(w, table, 0, places)), work)
    if isinstance(weights, ImportedValue):
        share = w.reshape(as_value(w, weights, work), (count, length))
        rows = w.mul(rows, w.expand_dims(share, (2,)))
    reduction = (Sum((1,)), Mean((1,)), MaxOrLowest((1,)))[n.number(4, "mode", 0)]
    y = w.emit(reduction, rows)
    return w.of(w.cast(y, element))


def _histogram(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the numbers of elements in bins of one width; NaN and elements outside count nowhere."""
    bins = n.number(1, "bins", 100)
    low, high = (number_of(n.argument(p, name, 0)) for p, name in ((2, "min"), (3, "max")))
    if low is None or high is None or not low < high:
        raise n.refuse(f"expected min and max as numbers, min below max, got {low} and {high}")
    x = w.reshape(w.tensor(n.item(0)), [w.simplify(product(n.item(0).shape))])
    inside = w.logical_and(w.less_equal(low, x), w.less_equal(x, high))
    place = w.mul(w.add(x, -low) if low else x, float(bins))
    place = w.floor(w.div(place, w.literal(high - low, n.dtype)))
    place = w.minimum(place, bins - 1)
    every = w.expand_dims(w.cast(w.iota(const(bins)), n.dtype), (1,))
    hit = w.logical_and(w.equal(every, w.expand_dims(place, (0,))), w.expand_dims(inside, (0,)))
    return w.of(w.cast(w.sum(w.cast(hit, i64), (1,), False), n.dtype), True)


def _grouped_product(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the products of rows with the matrix of their group; the offset of a group is its end."""
    x, weight, ends = n.item(0), n.item(1), n.argument(2, "offs")
    if x.ndim != 2 or weight.ndim != 3 or not isinstance(ends, ImportedValue):
        raise n.refuse(
            "expected rows (s, k), matrices (groups, k, n) and offsets; use torch.bmm for products of stacks"
        )
    if n.argument(3, "bias") is not None:
        raise n.refuse("expected no bias; add it to the result")
    group = _group_of_each(w, as_value(w, ends, i64), x)
    last = w.size(w.simplify(add(weight.shape[0], -1)))
    table = w.emit(Take(), w.tensor(weight), w.minimum(group, last))
    products = w.matmul(w.expand_dims(w.tensor(x), (1,)), table)
    return w.of(w.cast(w.reshape(products, n.dims), n.dtype))


HANDLERS: Mapping[str, Handler] = {
    "aten._embedding_bag.default": _embedding_bag, "aten._embedding_bag_forward_only.default": _embedding_bag,
    "aten.histc.default": _histogram, "aten._grouped_mm.default": _grouped_product,
    "transformers.grouped_mm_fallback.default": _grouped_product,
}  # fmt: skip
