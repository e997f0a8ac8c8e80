"""ONNX DeformConv: convolution whose windows read at positions from data (Dai et al. 2017; with a mask: Zhu et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product as tuples

from relax_tune.ir.core.dtype import DType, f32, f64, i64
from relax_tune.ir.core.expr import Expr, const, floordiv, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.images.sample import size_of
from relax_tune.ir.frontend.onnx.images.window import WindowAttributes, biased, of_kernel
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, MaximumScalar, Minimum, Mul, MulScalar, Sub
from relax_tune.ir.op.math.logic import Equal, LessEqual, LogicalAnd, LogicalNot, Where
from relax_tune.ir.op.math.numeric import Floor
from relax_tune.ir.op.reduction.linalg import Matmul


def _starts(w: Writer, own: WindowAttributes, axis: int, places: Sequence[Expr], work: DType) -> Value:
    """Return where the taps of windows lie along an axis without offsets, to broadcast to (kernel..., places...)."""
    n, kernel = len(places), own.kernel
    taps = w.emit(MulScalar(own.dilations[axis]), w.emit(Iota(kernel[axis])))
    taps = w.reshape(taps, [kernel[axis], *[const(1)] * (n - 1 - axis + n)])
    first = w.emit(Sub(), w.emit(MulScalar(own.strides[axis]), w.emit(Iota(places[axis]))), w.size(own.pads[axis][0]))
    first = w.reshape(first, [places[axis], *[const(1)] * (n - 1 - axis)])
    return cast_to(w, w.emit(Add(), taps, first), i64, work)


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
        at = w.emit(AddScalar(1.0), self.low) if above else self.low
        weight = self.part if above else w.emit(AddScalar(1.0), w.emit(MulScalar(-1.0), self.part))
        zero, last = w.literal(0, work), w.emit(AddScalar(-1.0), size_of(w, self.size, work))
        inside = w.emit(LogicalAnd(), w.emit(LessEqual(), zero, at), w.emit(LessEqual(), at, last))
        index = w.emit(Cast(i64), w.emit(Minimum(), w.emit(MaximumScalar(0.0), at), last))
        index = w.emit(MaximumScalar(0), w.emit(Minimum(), index, w.size(w.simplify(sub(self.size, 1)))))
        # the weight of a NaN stays NaN
        outside = w.emit(LogicalAnd(), w.emit(LogicalNot(), inside), w.emit(Equal(), at, at))
        return index, w.emit(Where(), outside, zero, weight)


def _sampled(w: Writer, images: Value, taps: Sequence[Taps]) -> Value:
    """Emit bilinear samples of images (n, c, dims...): sums over the corners around each position, (n, c, positions)."""
    shape = tensor_dims(images)
    flat = w.reshape(images, [*shape[:2], w.simplify(product(shape[2:]))])
    count = w.simplify(product(tensor_dims(taps[0].low)[1:]))
    found: Value | None = None
    for corner in tuples((False, True), repeat=len(taps)):
        at: Value | None = None
        weight: Value | None = None
        for t, above in zip(taps, corner, strict=True):
            index, own = t.element(above)
            at = index if at is None else w.emit(Add(), w.emit(Mul(), at, w.size(t.size)), index)
            weight = own if weight is None else w.emit(Mul(), weight, own)
        assert at is not None and weight is not None
        spread = w.emit(BroadcastTo((*shape[:2], count)), w.reshape(at, [shape[0], const(1), count]))
        value = w.emit(GatherElements(2), flat, spread)
        value = w.emit(Mul(), value, w.reshape(weight, [shape[0], const(1), count]))
        found = value if found is None else w.emit(Add(), found, value)
    assert found is not None
    return found


def _deform_conv(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import DeformConv: bilinear samples at the moved taps, 0 outside, times the mask and the weights."""
    x, kernel, offset, own = node.item(0), node.item(1), node.item(2), of_kernel(w, node)
    n, groups, shares = (
        len(own.sizes),
        int(node.attributes.get("group", 1)),
        int(node.attributes.get("offset_group", 1)),
    )
    if offset.ndim != x.ndim or groups < 1 or shares < 1 or not x.dtype.is_float:
        raise node.refuse(f"wanted floats and offsets of {x.ndim} dims, groups of at least 1, found {offset.info!r}")
    places, work = list(offset.shape[2:]), f64 if x.dtype is f64 else f32
    images, share = w.simplify(mul(x.shape[0], shares)), w.simplify(floordiv(x.shape[1], const(shares)))
    dims = [images, *own.kernel, *places]
    moved = w.reshape(w.tensor(offset), [images, *own.kernel, const(n), *places])
    moved = cast_to(w, moved, offset.dtype, work)
    taps = []
    for axis in range(n):
        mine = w.reshape(slice_axis(w, moved, 1 + n, const(axis), const(axis + 1)), dims)
        at = w.emit(Add(), mine, _starts(w, own, axis, places, work))
        low = w.emit(Floor(), at)
        taps.append(Taps(w, low, w.emit(Sub(), at, low), own.sizes[axis], work))
    found = _sampled(w, w.reshape(cast_to(w, w.tensor(x), x.dtype, work), [images, share, *own.sizes]), taps)
    reached, spots = w.simplify(product(own.kernel)), w.simplify(product(places))
    if node.has(4):
        mask = cast_to(w, w.tensor(node.item(4)), node.item(4).dtype, work)
        found = w.emit(Mul(), found, w.reshape(mask, [images, const(1), w.simplify(mul(reached, spots))]))
    each, depth = w.simplify(floordiv(kernel.shape[0], const(groups))), w.simplify(mul(kernel.shape[1], reached))
    found = w.reshape(found, [x.shape[0], const(groups), depth, spots])
    filters = w.reshape(cast_to(w, w.tensor(kernel), kernel.dtype, work), [const(groups), each, depth])
    y = w.reshape(w.emit(Matmul(), filters, found), [x.shape[0], kernel.shape[0], *places])
    return biased(w, node, cast_to(w, y, work, x.dtype), 3)


HANDLERS: Mapping[str, Handler] = {"DeformConv": _deform_conv}
