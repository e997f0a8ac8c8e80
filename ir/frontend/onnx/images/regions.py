"""ONNX operators that pool regions of images: RoiAlign, MaxRoiPool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from relax_tune.ir.core.dtype import DType, f32, f64, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.images.sample import columns, size_of
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.compositions import cast_to, clip, permute, sign, slice_axis, take
from relax_tune.ir.frontend.shared.indexing import natural_indices
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Relu,
    Sub,
)
from relax_tune.ir.op.math.logic import Less, LessEqual, LogicalAnd, LogicalOr, Where
from relax_tune.ir.op.math.numeric import Abs, Floor
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.neural.window import Pool
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Max, Sum


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Regions along one axis of the images.

    first: begin (r, 1); span: length (r, 1); bins: number of results; size: elements of the image
    """

    w: Writer
    first: Value
    span: Value
    bins: int
    size: Expr
    work: DType

    def counter(self, n: int | Expr) -> Value:
        return cast_to(self.w, self.w.emit(Iota(const(n) if isinstance(n, int) else n)), i64, self.work)

    def samples(self, ratio: int) -> Value:
        """Return the positions of `ratio` samples of each bin (r, bins * ratio), in elements."""
        w, n = self.w, self.bins * ratio
        at = w.emit(MulScalar(1 / n), w.emit(AddScalar(0.5), self.counter(n)))
        return w.emit(Add(), self.first, w.emit(Mul(), at, self.span))

    def inside(self, at: Value) -> Value:
        """Return whether positions are at most one element beyond the image."""
        w = self.w
        low = w.emit(LessEqual(), w.literal(-1, self.work), at)
        return w.emit(LogicalAnd(), low, w.emit(LessEqual(), at, size_of(w, self.size, self.work)))

    def bounded(self, at: Value) -> Value:
        """Return positions moved between the first and last element."""
        w = self.w
        last = w.emit(AddScalar(-1.0), size_of(w, self.size, self.work))
        return w.emit(Minimum(), clip(w, at, self.work, 0.0, None), last)

    def mean_weights(self) -> Value:
        """Return the weight of each element in the means of bins (r, bins, size), with a sample for about each element.

        A bin of length b has `ceil(b)` samples, more than half an element apart, so at most four touch an element. The six from
        `begin` on therefore hold all of them."""
        w, work = self.w, self.work
        dims = [tensor_dims(self.first)[0], const(1), const(1), const(1)]
        first, span = (w.reshape(v, dims) for v in (self.first, self.span))
        length = w.emit(MulScalar(1 / self.bins), span)
        count = w.emit(MaximumScalar(0.0), w.emit(MulScalar(-1.0), w.emit(Floor(), w.emit(MulScalar(-1.0), length))))
        some = w.emit(MaximumScalar(1.0), count)
        step = w.emit(Div(), length, some)
        own = w.reshape(self.counter(self.bins), [const(self.bins), const(1), const(1)])
        first = w.emit(Add(), first, w.emit(Mul(), own, length))
        element = w.reshape(self.counter(self.size), [self.size, const(1)])
        begin = w.emit(Div(), w.emit(Sub(), w.emit(AddScalar(-1.0), element), first), step)
        begin = w.emit(Floor(), w.emit(AddScalar(-0.5), begin))
        begin = w.emit(Minimum(), w.emit(MaximumScalar(0.0), begin), w.emit(AddScalar(-1.0), some))
        number = w.emit(Add(), begin, self.counter(6))
        at = w.emit(Add(), first, w.emit(Mul(), w.emit(AddScalar(0.5), number), step))
        far = w.emit(Abs(), w.emit(Sub(), element, self.bounded(at)))
        weight = w.emit(Relu(), w.emit(AddScalar(1.0), w.emit(MulScalar(-1.0), far)))
        counts = w.emit(LogicalAnd(), self.inside(at), w.emit(Less(), number, count))
        total = w.emit(Sum((3,), False), w.emit(Where(), counts, weight, w.literal(0, work)))
        return w.emit(Div(), total, w.reshape(some, dims[:3]))

    def neighbours(self, ratio: int) -> tuple[Value, Value]:
        """Return the two elements around each of `ratio` samples of a bin, and their weights: (r, bins * ratio * 2) each."""
        w, raw = self.w, self.samples(ratio)
        at = self.bounded(raw)
        low = w.emit(Floor(), at)
        high = self.bounded(w.emit(AddScalar(1.0), low))
        part = w.emit(Sub(), at, low)
        weights = w.emit(AddScalar(1.0), w.emit(MulScalar(-1.0), part)), part
        dims = list(tensor_dims(at))
        flat = [dims[0], const(self.bins * ratio * 2)]
        zero, inside = w.literal(0, self.work), self.inside(raw)
        both = [w.reshape(columns(w, list(pair), dims), flat) for pair in ((low, high), weights)]
        inside = w.reshape(w.emit(BroadcastTo((*dims, const(2))), w.reshape(inside, [*dims, const(1)])), flat)
        where, weight = (w.emit(Where(), inside, v, zero) for v in both)
        return w.emit(Cast(i64), where), weight


def _roi_align(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import RoiAlign: means, or maxima, of bilinear samples of parts of images; positions far beyond an image count as 0."""
    x, rois, batch = node.item(0), node.item(1), node.item(2)
    half = node.choice("coordinate_transformation_mode", "half_pixel", "output_half_pixel") == "half_pixel"
    half = half and node.opset >= 16
    largest, ratio = node.choice("mode", "avg", "max") == "max", int(node.attributes.get("sampling_ratio", 0))
    if largest and ratio < 1:
        raise node.refuse(
            "wanted a sampling_ratio of at least 1 beside mode 'max', found 0: as many samples as the regions are large; "
            "export it with a number of samples, or with mode 'avg'"
        )
    if x.ndim != 4 or rois.ndim != 2 or not x.dtype.is_float:
        raise node.refuse(f"wanted floats (n, c, height, width) and regions (r, 4), found {x.info!r} and {rois.info!r}")
    work, count = f64 if x.dtype is f64 else f32, rois.shape[0]
    table = w.reshape(cast_to(w, w.tensor(rois), rois.dtype, work), [count, const(4)])
    table = w.emit(
        AddScalar(-0.5 if half else 0.0), w.emit(MulScalar(float(node.attributes.get("spatial_scale", 1.0))), table)
    )
    sides = []
    for k, name in ((1, "output_height"), (0, "output_width")):
        first, end = (slice_axis(w, table, 1, const(p), const(p + 1)) for p in (k, k + 2))
        span = w.emit(Sub(), end, first)
        span = span if half else w.emit(MaximumScalar(1.0), span)
        sides.append(Side(w, first, span, int(node.attributes.get(name, 1)), x.shape[3 - k], work))
    images = cast_to(w, take(w, w.tensor(x), 0, natural_indices(w, batch, x.shape[0])), x.dtype, work)
    if ratio < 1:
        found = _adaptive(w, images, sides[0], sides[1])
    else:
        found = (_largest if largest else _sampled)(w, images, sides[0], sides[1], ratio)
    return w.of(cast_to(w, found, work, x.dtype))


def _adaptive(w: Writer, images: Value, rows: Side, across: Side) -> Value:
    """Emit means of as many samples as bins are large, by products with the weights of elements."""
    count, channels = tensor_dims(images)[:2]
    right = permute(w, across.mean_weights(), (0, 2, 1))
    right = w.reshape(right, [count, const(1), across.size, const(across.bins)])
    left = w.reshape(rows.mean_weights(), [count, const(1), const(rows.bins), rows.size])
    spread = w.emit(BroadcastTo((count, channels, const(rows.bins), rows.size)), left)
    return w.emit(Matmul(), spread, w.emit(Matmul(), images, right))


def _sampled(w: Writer, images: Value, rows: Side, across: Side, ratio: int) -> Value:
    """Emit the means of `ratio` by `ratio` samples."""
    count, positions, inside = tensor_dims(images)[0], [], []
    for side, dims in (
        (across, [count, const(1), const(across.bins * ratio)]),
        (rows, [count, const(rows.bins * ratio), const(1)]),
    ):
        at = side.samples(ratio)
        inside.append(w.reshape(side.inside(at), [count, const(1), *dims[1:]]))
        at = w.emit(AddScalar(1.0), w.emit(MulScalar(2.0), side.bounded(at)))
        at = w.emit(AddScalar(-1.0), w.emit(Div(), at, size_of(w, side.size, side.work)))
        positions.append(w.reshape(at, dims))
    grid = columns(w, positions, [count, const(rows.bins * ratio), const(across.bins * ratio)])
    found = w.emit(GridSample("linear", "border"), images, grid)
    found = w.emit(Where(), w.emit(LogicalAnd(), *inside), found, w.literal(0, rows.work))
    total = w.emit(Pool((ratio, ratio), (ratio, ratio), (1, 1), largest=False), found)
    return w.emit(MulScalar(1 / ratio**2), total)


def _largest(w: Writer, images: Value, rows: Side, across: Side, ratio: int) -> Value:
    """Emit the largest of the weighted neighbours of `ratio` by `ratio` samples."""
    found = images
    for axis, side in ((2, rows), (3, across)):
        where, weight = side.neighbours(ratio)
        dims = list(tensor_dims(found))
        own = [dims[0], const(1), const(1), const(1)]
        own[axis] = dims[axis] = tensor_dims(where)[1]
        found = w.emit(GatherElements(axis), found, w.emit(BroadcastTo(tuple(dims)), w.reshape(where, own)))
        found = w.emit(Mul(), found, w.reshape(weight, own))
    return w.emit(Pool((2 * ratio, 2 * ratio), (2 * ratio, 2 * ratio), (1, 1)), found)


def _bounds(w: Writer, first: Value, end: Value, bins: int, size: Expr) -> tuple[Value, Value]:
    """Return the first element of each bin and the one behind its last, within the image."""
    length = w.emit(MaximumScalar(1.0), w.emit(AddScalar(1.0), w.emit(Sub(), end, first)))
    length = w.emit(Div(), length, w.literal(bins, f32))
    at = cast_to(w, w.emit(Iota(const(bins))), i64, f32)
    begin = w.emit(Floor(), w.emit(Mul(), at, length))
    behind = w.emit(Mul(), w.emit(AddScalar(1.0), at), length)
    behind = w.emit(MulScalar(-1.0), w.emit(Floor(), w.emit(MulScalar(-1.0), behind)))
    whole = size_of(w, size, f32)
    begin, behind = (
        w.emit(Minimum(), w.emit(MaximumScalar(0.0), w.emit(Add(), v, first)), whole) for v in (begin, behind)
    )
    return begin, behind


def _max_roi_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MaxRoiPool: the largest elements of the bins of regions (Girshick 2015), along one axis after the other.

    A bin without elements gives 0."""
    x, rois = node.item(0), node.item(1)
    bins = [int(v) for v in node.attributes.get("pooled_shape", ())]
    if x.ndim != 4 or rois.ndim != 2 or len(bins) != 2 or min(bins) < 1 or not x.dtype.is_float:
        raise node.refuse(
            f"wanted floats (n, c, height, width), regions (r, 5) and a pooled_shape of 2 numbers, found {x.info!r}, "
            f"{rois.info!r} and {bins}"
        )
    count = rois.shape[0]
    table = w.reshape(cast_to(w, w.tensor(rois), rois.dtype, f32), [count, const(5)])
    batch = w.reshape(w.emit(Cast(i64), slice_axis(w, table, 1, const(0), const(1))), [count])
    scaled = w.emit(MulScalar(float(node.attributes.get("spatial_scale", 1.0))), table)
    size = w.emit(Floor(), w.emit(AddScalar(0.5), w.emit(Abs(), scaled)))
    table = w.emit(Mul(), sign(w, scaled, f32), size)  # halves are rounded away from 0
    found, empty = take(w, w.tensor(x), 0, batch), []
    low = w.literal(-math.inf, x.dtype)
    for axis, column in ((3, 1), (2, 2)):
        first, end = (slice_axis(w, table, 1, const(p), const(p + 1)) for p in (column, column + 2))
        n, extent = bins[axis - 2], x.shape[axis]
        begin, behind = _bounds(w, first, end, n, extent)
        none = w.emit(LessEqual(), behind, begin)
        empty.append(w.reshape(none, [count, const(1), *([const(n), const(1)] if axis == 2 else [const(1), const(n)])]))
        at = cast_to(w, w.emit(Iota(extent)), i64, f32)
        begin, behind = (w.reshape(v, [count, const(n), const(1)]) for v in (begin, behind))
        inside = w.emit(LogicalAnd(), w.emit(LessEqual(), begin, at), w.emit(Less(), at, behind))
        # a new axis for the bins, in front of the axis that they cover
        dims = list(tensor_dims(found))
        inside = w.reshape(
            inside, [count, const(1), *[const(1)] * (axis - 2), const(n), extent, *[const(1)] * (3 - axis)]
        )
        wide = w.reshape(found, [*dims[:axis], const(1), *dims[axis:]])
        found = w.emit(Max((axis + 1,), False), w.emit(Where(), inside, wide, low))
    return w.of(w.emit(Where(), w.emit(LogicalOr(), *empty), w.literal(0, x.dtype), found))


HANDLERS: Mapping[str, Handler] = {"RoiAlign": _roi_align, "MaxRoiPool": _max_roi_pool}
