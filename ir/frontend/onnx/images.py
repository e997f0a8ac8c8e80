"""ONNX operators that read images at positions from data: GridSample, AffineGrid, RoiAlign, MaxRoiPool, DeformConv."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product as tuples

import numpy as np

from relax_tune.ir.core.dtype import DType, f32, f64, i64
from relax_tune.ir.core.expr import Expr, const, floordiv, maximum, minimum, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.onnx.window import biased, of_kernel
from relax_tune.ir.frontend.shared.handlers.indexing import natural_indices
from relax_tune.ir.frontend.shared.handlers.math import clip, sign
from relax_tune.ir.frontend.shared.handlers.window import SpatialWindow
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.neural.grid_sample import GridSample
from relax_tune.ir.op.neural.window import Pool

KERNELS = {"linear": "linear", "bilinear": "linear", "nearest": "nearest", "cubic": "cubic", "bicubic": "cubic"}


def _grid_sample(w: Writer, node: OnnxNode) -> ImportedValue:
    x, grid = node.item(0), node.item(1)
    mode = node.choice("mode", "linear", "nearest", "cubic", "bilinear", "bicubic")
    padding = node.choice("padding_mode", "zeros", "border", "reflection")
    if x.ndim < 3 or grid.ndim != x.ndim:
        raise node.refuse(
            f"expected (n, c, dims...) and (n, places..., number of dims), got {x.info!r} and {grid.info!r}"
        )
    positions = w.viewed(w.tensor(grid), [x.shape[0], *grid.shape[1:-1], const(x.ndim - 2)])
    if KERNELS[mode] == "cubic" and padding == "border":
        positions = _nearest_ends(w, node, positions)
    op = GridSample(KERNELS[mode], padding, node.flag("align_corners"))
    return w.of(w.emit(op, w.tensor(x), positions), x.natural and mode == "nearest")


def _nearest_ends(w: Writer, node: OnnxNode, positions: Value) -> Value:
    """Move positions beyond the edges to the first and last element, as ONNX does before cubic sampling."""
    x, element = node.item(0), node.item(1).dtype
    one = w.literal(1, element)
    first: Value = one
    if not node.flag("align_corners"):
        sizes = np.empty(x.ndim - 2, object)
        sizes[:] = x.shape[:1:-1]
        whole = w.cast(w.tensor(w.known(sizes)), element)
        first = w.sub(one, w.div(one, whole))
    low = w.less(positions, -1)
    positions = w.where(low, w.mul(first, -1.0), positions)
    return w.where(w.less(one, positions), first, positions)


def size_of(w: Writer, n: Expr, element: DType) -> Value:
    """Return a size as a float without dims."""
    return w.cast(w.size(n), element)


def _steps(w: Writer, n: Expr, aligned: bool, element: DType) -> Value:
    """Return the positions (n,) of the elements of a dim from -1 to 1."""
    at = w.cast(w.iota(n), element)
    if aligned:
        steps = w.simplify(maximum(sub(n, 1), 1))
        # -1, and 1 for the place of a single element, as of ONNX Runtime
        first = size_of(w, w.simplify(sub(1, mul(minimum(sub(n, 1), 1), 2))), element)
        return w.add(w.div(w.mul(at, 2.0), size_of(w, steps, element)), first)
    odd = w.add(w.mul(at, 2.0), 1.0)
    return w.add(w.div(odd, size_of(w, n, element)), -1.0)


def columns(w: Writer, parts: list[Value], dims: list[Expr]) -> Value:
    """Return values that broadcast to `dims` side by side in a new last dim."""
    aligned = [w.broadcast_to(p, tuple(dims)) for p in parts]
    return w.concat(len(dims), *(w.reshape(p, [*dims, const(1)]) for p in aligned))


def _affine_grid(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import AffineGrid: the positions of the elements of an image, times a matrix for each image."""
    theta, dims = node.item(0), node.expressions(w, 1)[2:]
    n = len(dims)
    if theta.ndim != 3 or n not in (2, 3):
        raise node.refuse(f"expected matrices (n, dims, dims + 1) and a size (n, c, 2 or 3 dims), got {theta.info!r}")
    aligned = node.flag("align_corners")
    work = theta.dtype if not theta.dtype.is_half else f32
    matrix = w.viewed(w.cast(w.tensor(theta), work), [theta.shape[0], const(n), const(n + 1)])
    parts = []
    for axis in range(n - 1, -1, -1):
        steps = _steps(w, dims[axis], aligned, work)
        parts.append(w.reshape(steps, [dims[axis], *[const(1)] * (n - 1 - axis)]))
    parts.append(w.full([const(1)] * n, 1.0, work))
    places = w.simplify(dims[0] * dims[1] * (dims[2] if n == 3 else 1))
    plain = w.reshape(columns(w, parts, dims), [places, const(n + 1)])
    positions = w.matmul(plain, w.permute(matrix, (0, 2, 1)))
    return w.of(w.cast(w.reshape(positions, [theta.shape[0], *dims, const(n)]), theta.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Regions along one axis of the images.

    Attributes:
        first: Begin (r, 1).
        span: Length (r, 1).
        bins: Number of results.
        size: Elements of the image.
    """

    w: Writer
    first: Value
    span: Value
    bins: int
    size: Expr
    work: DType

    def counter(self, n: int | Expr) -> Value:
        return self.w.cast(self.w.iota(const(n) if isinstance(n, int) else n), self.work)

    def samples(self, ratio: int) -> Value:
        """Return the positions of `ratio` samples of each bin (r, bins * ratio), in elements.

        In the order of ONNX Runtime, `first + bin * length + (sample + 0.5) * length / ratio`, since the ends of an image are jumps.
        """
        w, length = self.w, self.w.div(self.span, self.bins)
        bin_of_sample, sample = np.divmod(np.arange(self.bins * ratio), ratio)
        begin = w.add(self.first, w.mul(self._numbers("bins", bin_of_sample), length))
        within = w.mul(self._numbers("samples", sample + 0.5), length)
        return w.add(begin, w.div(within, ratio))

    def _numbers(self, name: str, numbers: Array) -> Value:
        return self.w.tensor(self.w.constant(numbers.astype(self.work.numpy), name))

    def inside(self, at: Value) -> Value:
        """Return whether positions are at most one element beyond the image."""
        w = self.w
        low = w.less_equal(-1, at)
        return w.logical_and(low, w.less_equal(at, size_of(w, self.size, self.work)))

    def bounded(self, at: Value) -> Value:
        """Return positions moved between the first and last element."""
        w = self.w
        last = w.add(size_of(w, self.size, self.work), -1.0)
        return w.minimum(clip(w, at, 0.0, None), last)

    def mean_weights(self) -> Value:
        """Return the weight of each element in the means of bins (r, bins, size), with a sample for about each element.

        A bin of length b has `ceil(b)` samples, with distances of more than half an element, so at most four touch an element. The six from
        `begin` on therefore hold all of them."""
        w = self.w
        dims = [tensor_dims(self.first)[0], const(1), const(1), const(1)]
        first, span = (w.reshape(v, dims) for v in (self.first, self.span))
        length = w.div(span, self.bins)
        # -floor(-x) is ceil(x).
        count = w.maximum(w.mul(w.floor(w.mul(length, -1.0)), -1.0), 0.0)
        some = w.maximum(count, 1.0)
        step = w.div(length, some)
        bin_index = w.reshape(self.counter(self.bins), [const(self.bins), const(1), const(1)])
        first = w.add(first, w.mul(bin_index, length))
        element = w.reshape(self.counter(self.size), [self.size, const(1)])
        begin = w.div(w.sub(w.add(element, -1.0), first), step)
        begin = w.floor(w.add(begin, -0.5))
        begin = w.minimum(w.maximum(begin, 0.0), w.add(some, -1.0))
        # Only samples less than one element away have a weight. If there are several, they lie at least half an
        # element from each other, so six consecutive ones from the first are enough.
        number = w.add(begin, self.counter(6))
        within = w.mul(w.add(number, 0.5), length)
        at = w.add(first, w.div(within, some))
        far = w.abs(w.sub(element, self.bounded(at)))
        weight = w.relu(w.add(w.mul(far, -1.0), 1.0))
        counts = w.logical_and(self.inside(at), w.less(number, count))
        total = w.sum(w.where(counts, weight, 0), (3,), False)
        return w.div(total, w.reshape(some, dims[:3]))

    def neighbours(self, ratio: int) -> tuple[Value, Value]:
        """Return the two elements around each of `ratio` samples of a bin, and their weights: (r, bins * ratio * 2) each."""
        w, raw = self.w, self.samples(ratio)
        at = self.bounded(raw)
        low = w.floor(at)
        high = self.bounded(w.add(low, 1.0))
        part = w.sub(at, low)
        weights = w.add(w.mul(part, -1.0), 1.0), part
        dims = list(tensor_dims(at))
        flat = [dims[0], const(self.bins * ratio * 2)]
        zero, inside = w.literal(0, self.work), self.inside(raw)
        both = [w.reshape(columns(w, list(pair), dims), flat) for pair in ((low, high), weights)]
        inside = w.reshape(w.broadcast_to(w.reshape(inside, [*dims, const(1)]), (*dims, const(2))), flat)
        where, weight = (w.where(inside, v, zero) for v in both)
        return w.cast(where, i64), weight


def _roi_align(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import RoiAlign: means, or maxima, of bilinear samples of parts of images; positions far beyond an image count as 0."""
    x, rois, batch = node.item(0), node.item(1), node.item(2)
    half = node.choice("coordinate_transformation_mode", "half_pixel", "output_half_pixel") == "half_pixel"
    half = half and node.opset >= 16
    largest, ratio = node.choice("mode", "avg", "max") == "max", node.integer("sampling_ratio", 0)
    if largest and ratio < 1:
        raise node.refuse(
            "expected a sampling_ratio of at least 1 for mode 'max', got 0, which takes the number of samples from the regions; "
            "export it with a number of samples, or with mode 'avg'"
        )
    if x.ndim != 4 or rois.ndim != 2 or not x.dtype.is_float:
        raise node.refuse(f"expected floats (n, c, height, width) and regions (r, 4), got {x.info!r} and {rois.info!r}")
    work, count = f64 if x.dtype is f64 else f32, rois.shape[0]
    table = w.viewed(w.cast(w.tensor(rois), work), [count, const(4)])
    table = w.add(w.mul(table, node.real("spatial_scale", 1.0)), -0.5 if half else 0.0)
    sides = []
    for k, name in ((1, "output_height"), (0, "output_width")):
        first, end = (w.slice(table, 1, const(p), const(p + 1)) for p in (k, k + 2))
        span = w.sub(end, first)
        # Without half-pixel positions, regions are at least one element large (the older definition of RoiAlign).
        span = span if half else w.maximum(span, 1.0)
        sides.append(Side(w, first, span, node.integer(name, 1), x.shape[3 - k], work))
    images = w.cast(w.take(w.tensor(x), 0, natural_indices(w, batch, x.shape[0])), work)
    if ratio < 1:
        pooled = _adaptive(w, images, sides[0], sides[1])
    else:
        pooled = (_largest if largest else _sampled)(w, images, sides[0], sides[1], ratio)
    return w.of(w.cast(pooled, x.dtype))


def _adaptive(w: Writer, images: Value, rows: Side, across: Side) -> Value:
    """Emit means of as many samples as bins are large, by products with the weights of elements."""
    count, channels = tensor_dims(images)[:2]
    right = w.permute(across.mean_weights(), (0, 2, 1))
    right = w.reshape(right, [count, const(1), across.size, const(across.bins)])
    left = w.reshape(rows.mean_weights(), [count, const(1), const(rows.bins), rows.size])
    repeated = w.broadcast_to(left, (count, channels, const(rows.bins), rows.size))
    return w.matmul(repeated, w.matmul(images, right))


def _sampled(w: Writer, images: Value, rows: Side, across: Side, ratio: int) -> Value:
    """Emit the means of `ratio` by `ratio` samples."""
    count, positions, inside = tensor_dims(images)[0], [], []
    for side, dims in (
        (across, [count, const(1), const(across.bins * ratio)]),
        (rows, [count, const(rows.bins * ratio), const(1)]),
    ):
        at = side.samples(ratio)
        inside.append(w.reshape(side.inside(at), [count, const(1), *dims[1:]]))
        # GridSample takes positions from -1 to 1: element i of n lies at (2 i + 1) / n - 1.
        at = w.add(w.mul(side.bounded(at), 2.0), 1.0)
        at = w.add(w.div(at, size_of(w, side.size, side.work)), -1.0)
        positions.append(w.reshape(at, dims))
    grid = columns(w, positions, [count, const(rows.bins * ratio), const(across.bins * ratio)])
    samples = w.emit(GridSample("linear", "border"), images, grid)
    samples = w.where(w.logical_and(*inside), samples, 0)
    total = w.emit(Pool((ratio, ratio), (ratio, ratio), (1, 1), largest=False), samples)
    return w.div(total, ratio**2)


def _largest(w: Writer, images: Value, rows: Side, across: Side, ratio: int) -> Value:
    """Emit the largest of the weighted neighbours of `ratio` by `ratio` samples."""
    values = images
    for axis, side in ((2, rows), (3, across)):
        where, weight = side.neighbours(ratio)
        dims = list(tensor_dims(values))
        index_dims = [dims[0], const(1), const(1), const(1)]
        index_dims[axis] = dims[axis] = tensor_dims(where)[1]
        values = w.gather_elements(values, w.broadcast_to(w.reshape(where, index_dims), tuple(dims)), axis)
        values = w.mul(values, w.reshape(weight, index_dims))
    return w.emit(Pool((2 * ratio, 2 * ratio), (2 * ratio, 2 * ratio), (1, 1)), values)


def _bounds(w: Writer, first: Value, end: Value, bins: int, size: Expr) -> tuple[Value, Value]:
    """Return the first element of each bin and the element after its last, within the image."""
    # The last element of a region belongs to it, hence the 1.
    length = w.maximum(w.add(w.sub(end, first), 1.0), 1.0)
    length = w.div(length, w.literal(bins, f32))
    at = w.cast(w.iota(const(bins)), f32)
    begin = w.floor(w.mul(at, length))
    stop = w.mul(w.add(at, 1.0), length)
    stop = w.mul(w.floor(w.mul(stop, -1.0)), -1.0)
    whole = size_of(w, size, f32)
    begin, stop = (w.minimum(w.maximum(w.add(v, first), 0.0), whole) for v in (begin, stop))
    return begin, stop


def _max_roi_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MaxRoiPool: the largest elements of the bins of regions (Girshick 2015), along one axis after the other.

    A bin without elements gives 0."""
    x, rois = node.item(0), node.item(1)
    bins = [int(v) for v in node.attributes.get("pooled_shape", ())]
    if x.ndim != 4 or rois.ndim != 2 or len(bins) != 2 or min(bins) < 1 or not x.dtype.is_float:
        raise node.refuse(
            f"expected floats (n, c, height, width), regions (r, 5) and a pooled_shape of 2 numbers, got {x.info!r}, "
            f"{rois.info!r} and {bins}"
        )
    count = rois.shape[0]
    table = w.viewed(w.cast(w.tensor(rois), f32), [count, const(5)])
    batch = w.reshape(w.cast(w.slice(table, 1, const(0), const(1)), i64), [count])
    scaled = w.mul(table, node.real("spatial_scale", 1.0))
    size = w.floor(w.add(w.abs(scaled), 0.5))
    table = w.mul(sign(w, scaled), size)  # halves are rounded away from 0
    pooled, empty = w.take(w.tensor(x), 0, batch), []
    low = w.literal(-math.inf, x.dtype)
    for axis, column in ((3, 1), (2, 2)):
        first, end = (w.slice(table, 1, const(p), const(p + 1)) for p in (column, column + 2))
        n, extent = bins[axis - 2], x.shape[axis]
        begin, stop = _bounds(w, first, end, n, extent)
        none = w.less_equal(stop, begin)
        empty.append(w.reshape(none, [count, const(1), *([const(n), const(1)] if axis == 2 else [const(1), const(n)])]))
        at = w.cast(w.iota(extent), f32)
        begin, stop = (w.reshape(v, [count, const(n), const(1)]) for v in (begin, stop))
        inside = w.logical_and(w.less_equal(begin, at), w.less(at, stop))
        # a new axis for the bins, in front of the axis that they cover
        dims = list(tensor_dims(pooled))
        inside = w.reshape(
            inside, [count, const(1), *[const(1)] * (axis - 2), const(n), extent, *[const(1)] * (3 - axis)]
        )
        wide = w.reshape(pooled, [*dims[:axis], const(1), *dims[axis:]])
        pooled = w.max(w.where(inside, wide, low), (axis + 1,), False)
    return w.of(w.where(w.logical_or(*empty), 0, pooled))


def _starts(w: Writer, window: SpatialWindow, axis: int, places: Sequence[Expr], work: DType) -> Value:
    """Return where the taps of windows lie along an axis without offsets, to broadcast to (kernel..., places...)."""
    n, kernel = len(places), window.kernel
    taps = w.mul(w.iota(kernel[axis]), window.dilations[axis])
    taps = w.reshape(taps, [kernel[axis], *[const(1)] * (n - 1 - axis + n)])
    first = w.sub(w.mul(w.iota(places[axis]), window.strides[axis]), w.size(window.pads[axis][0]))
    first = w.reshape(first, [places[axis], *[const(1)] * (n - 1 - axis)])
    return w.cast(w.add(taps, first), work)


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Positions of taps along one axis: the element below, and the part that counts of the one above.

    Each is (images, kernel..., places...).
    """

    w: Writer
    low: Value
    part: Value
    size: Expr
    work: DType

    def element(self, above: bool) -> tuple[Value, Value]:
        """Return the index of the lower or upper element, moved into the image, and its weight, 0 outside."""
        w, work = self.w, self.work
        at = w.add(self.low, 1.0) if above else self.low
        weight = self.part if above else w.add(w.mul(self.part, -1.0), 1.0)
        zero, last = w.literal(0, work), w.add(size_of(w, self.size, work), -1.0)
        inside = w.logical_and(w.less_equal(zero, at), w.less_equal(at, last))
        index = w.cast(w.minimum(w.maximum(at, 0.0), last), i64)
        index = w.maximum(w.minimum(index, w.size(w.simplify(sub(self.size, 1)))), 0)
        # the weight of a NaN stays NaN
        outside = w.logical_and(w.logical_not(inside), w.equal(at, at))
        return index, w.where(outside, zero, weight)


def _sampled_at(w: Writer, images: Value, taps: Sequence[Taps]) -> Value:
    """Emit bilinear samples of images (n, c, dims...): sums over the corners around each position, (n, c, positions)."""
    shape = tensor_dims(images)
    flat = w.reshape(images, [*shape[:2], w.simplify(product(shape[2:]))])
    count = w.simplify(product(tensor_dims(taps[0].low)[1:]))
    total: Value | None = None
    for corner in tuples((False, True), repeat=len(taps)):
        at: Value | None = None
        weight: Value | None = None
        for t, above in zip(taps, corner, strict=True):
            index, part = t.element(above)
            at = index if at is None else w.add(w.mul(at, w.size(t.size)), index)
            weight = part if weight is None else w.mul(weight, part)
        assert at is not None and weight is not None
        repeated = w.broadcast_to(w.reshape(at, [shape[0], const(1), count]), (*shape[:2], count))
        value = w.gather_elements(flat, repeated, 2)
        value = w.mul(value, w.reshape(weight, [shape[0], const(1), count]))
        total = value if total is None else w.add(total, value)
    assert total is not None
    return total


def _deform_conv(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import DeformConv: bilinear samples at the moved taps, 0 outside, times the mask and the weights."""
    x, kernel, offset, window = node.item(0), node.item(1), node.item(2), of_kernel(w, node)
    n, groups, shares = (
        len(window.sizes),
        node.integer("group", 1),
        node.integer("offset_group", 1),
    )
    if offset.ndim != x.ndim or groups < 1 or shares < 1 or not x.dtype.is_float:
        raise node.refuse(f"expected floats and offsets of {x.ndim} dims, groups of at least 1, got {offset.info!r}")
    places, work = list(offset.shape[2:]), f64 if x.dtype is f64 else f32
    images, share = w.simplify(mul(x.shape[0], shares)), w.simplify(floordiv(x.shape[1], const(shares)))
    dims = [images, *window.kernel, *places]
    offsets = w.reshape(w.tensor(offset), [images, *window.kernel, const(n), *places])
    offsets = w.cast(offsets, work)
    taps = []
    for axis in range(n):
        offset_of_axis = w.reshape(w.slice(offsets, 1 + n, const(axis), const(axis + 1)), dims)
        at = w.add(offset_of_axis, _starts(w, window, axis, places, work))
        low = w.floor(at)
        taps.append(Taps(w, low, w.sub(at, low), window.sizes[axis], work))
    samples = _sampled_at(w, w.reshape(w.cast(w.tensor(x), work), [images, share, *window.sizes]), taps)
    reached, spots = w.simplify(product(window.kernel)), w.simplify(product(places))
    if node.has(4):
        mask = w.cast(w.tensor(node.item(4)), work)
        samples = w.mul(samples, w.reshape(mask, [images, const(1), w.simplify(mul(reached, spots))]))
    each, depth = w.simplify(floordiv(kernel.shape[0], const(groups))), w.simplify(mul(kernel.shape[1], reached))
    samples = w.reshape(samples, [x.shape[0], const(groups), depth, spots])
    filters = w.reshape(w.cast(w.tensor(kernel), work), [const(groups), each, depth])
    y = w.reshape(w.matmul(filters, samples), [x.shape[0], kernel.shape[0], *places])
    return biased(w, node, w.cast(y, x.dtype), 3)


HANDLERS: Mapping[str, Handler] = {
    "GridSample": _grid_sample, "AffineGrid": _affine_grid, "RoiAlign": _roi_align, "MaxRoiPool": _max_roi_pool,
    "DeformConv": _deform_conv,
}  # fmt: skip
