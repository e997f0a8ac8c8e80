"""ONNX convolutions and pooling: padding, then windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.compositions import cast_to, pad
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.elementwise import Add, Div, Mul, MulScalar, Sqrt
from relax_tune.ir.op.math.numeric import Abs, Power
from relax_tune.ir.op.neural.window import Conv, Pool

Pads = Sequence[tuple[int, int]]


def padded(w: Writer, value: Value, pads: Pads, fill: float) -> Value:
    """Pad `value` with (before, after) elements of `fill` along each axis after the channels."""
    return pad(w, value, [(0, 0), (0, 0), *pads], fill)


class WindowAttributes:
    """Attributes of a windowed operator, for spatial dims `sizes`."""

    def __init__(self, node: OnnxNode, sizes: Sequence[Expr], kernel: Sequence[int]) -> None:
        self.node, self.sizes, n = node, list(sizes), len(sizes)
        self.kernel = tuple(int(k) for k in kernel)
        self.strides = tuple(int(v) for v in node.attributes.get("strides") or [1] * n)
        self.dilations = tuple(int(v) for v in node.attributes.get("dilations") or [1] * n)
        if {len(self.kernel), len(self.strides), len(self.dilations)} != {n} or min(
            *self.strides, *self.dilations, *self.kernel
        ) < 1:
            raise node.refuse(
                f"wanted kernel sizes, strides and dilations of at least 1 for {n} dims, found {self.kernel}, {self.strides} "
                f"and {self.dilations}"
            )
        self.pads = self._pads()
        self.extra = self._extra() if node.attributes.get("ceil_mode", 0) else [0] * n

    def reach(self, axis: int) -> int:
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    def _size(self, axis: int) -> int:
        n = as_int(self.sizes[axis])
        if n is None:
            raise self.node.refuse(
                f"wanted dims that are numbers where padding depends on them, found {self.sizes[axis]!r}; give pads, "
                "strides of 1 or fixed dims"
            )
        return n

    def _pads(self) -> list[tuple[int, int]]:
        n = len(self.sizes)
        auto = self.node.choice("auto_pad", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
        if auto == "NOTSET":
            given = [int(p) for p in self.node.attributes.get("pads") or [0] * (2 * n)]
            if len(given) != 2 * n or min(given) < 0:
                raise self.node.refuse(f"wanted {2 * n} pads of at least 0, found {given}")
            return list(zip(given[:n], given[n:], strict=True))
        found = []
        for axis in range(n):
            total = 0
            if auto != "VALID":
                step = self.strides[axis]
                rest = 0 if step == 1 else -(-self._size(axis) // step) * step - step + 1 - self._size(axis)
                total = max(self.reach(axis) - 1 + rest, 0)
            less, more = total // 2, total - total // 2
            found.append((less, more) if auto == "SAME_UPPER" else (more, less))
        return found

    def _extra(self) -> list[int]:
        """Return the number of elements beyond the padding that the last, partial window reaches."""
        found = []
        for axis, (before, after) in enumerate(self.pads):
            step = self.strides[axis]
            if step == 1:
                found.append(0)
                continue
            size = self._size(axis)
            room = size + before + after - self.reach(axis)
            count = -(-room // step) + 1
            if (count - 1) * step >= size + before:  # a window must start within the input or its padding in front
                count -= 1
            found.append(max((count - 1) * step - room, 0))
        return found

    @property
    def all_pads(self) -> Pads:
        return [(a, b + e) for (a, b), e in zip(self.pads, self.extra, strict=True)]


def _spatial(node: OnnxNode, x: ImportedValue) -> tuple[Expr, ...]:
    if x.ndim < 3:
        raise node.refuse(f"wanted a batch, channels and at least one more dim, found {x.info!r}")
    return x.shape[2:]


def _conv(w: Writer, node: OnnxNode) -> ImportedValue:
    x, kernel = node.item(0), node.item(1)
    sizes = [as_int(d) for d in kernel.shape[2:]]
    if any(n is None for n in sizes) or kernel.ndim != x.ndim:
        raise node.refuse(f"wanted kernels of fixed size and {x.ndim} dims, found {kernel.info!r}")
    own = WindowAttributes(node, _spatial(node, x), [n or 0 for n in sizes])
    given = node.attributes.get("kernel_shape")
    if given is not None and tuple(given) != own.kernel:
        raise node.refuse(f"wanted a kernel_shape as the weights have it, {own.kernel}, found {tuple(given)}")
    value = padded(w, w.tensor(x), own.all_pads, 0)
    y = w.emit(Conv(own.strides, own.dilations, int(node.attributes.get("group", 1))), value, w.tensor(kernel))
    if node.has(2):
        bias = node.item(2)
        y = w.emit(Add(), y, w.reshape(w.tensor(bias), [*bias.shape, *[const(1)] * (x.ndim - 2)]))
    return w.of(y)


def _max_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    if node.wants(1):
        raise node.refuse("wanted only the largest elements, found a reader of their positions")
    x = node.item(0)
    own = WindowAttributes(node, _spatial(node, x), node.attributes["kernel_shape"])
    low = -np.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    value = padded(w, w.tensor(x), own.all_pads, low)
    return w.of(w.emit(Pool(own.kernel, own.strides, own.dilations), value), x.natural)


def _average_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    own = WindowAttributes(node, _spatial(node, x), node.attributes["kernel_shape"])
    summed = Pool(own.kernel, own.strides, own.dilations, largest=False)
    wide = f32 if x.dtype.is_half else x.dtype
    total = w.emit(summed, padded(w, cast_to(w, w.tensor(x), x.dtype, wide), own.all_pads, 0))
    padding = 1.0 if node.attributes.get("count_include_pad", 0) else 0.0
    if not any(own.extra) and (padding or not any(map(any, own.pads))):
        mean = w.emit(MulScalar(1 / float(np.prod(own.kernel))), total)
        return w.of(cast_to(w, mean, wide, x.dtype))
    one = const(1)
    counted = padded(w, w.full((one, one, *x.shape[2:]), 1.0, wide), own.pads, padding)
    counted = padded(w, counted, [(0, e) for e in own.extra], 0.0)
    return w.of(cast_to(w, w.emit(Div(), total, w.emit(summed, counted)), wide, x.dtype))


def _lp_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LpPool: the p-norm of each window."""
    x = node.item(0)
    own = WindowAttributes(node, _spatial(node, x), node.attributes["kernel_shape"])
    p = int(node.attributes.get("p", 2))
    if p < 1 or x.dtype.is_half:
        raise node.refuse(f"wanted p of at least 1 and 32- or 64-bit floats, found {p} and {x.info!r}")
    value = w.emit(Abs(), w.tensor(x))
    if p == 2:
        value = w.emit(Mul(), value, value)
    elif p > 2:
        value = w.emit(Power(), value, w.literal(p, x.dtype))
    total = w.emit(Pool(own.kernel, own.strides, own.dilations, largest=False), padded(w, value, own.all_pads, 0))
    if p == 2:
        total = w.emit(Sqrt(), total)
    elif p > 2:
        total = w.emit(Power(), total, w.literal(1 / p, x.dtype))
    return w.of(total)


HANDLERS: Mapping[str, Handler] = {
    "Conv": _conv, "MaxPool": _max_pool, "AveragePool": _average_pool, "LpPool": _lp_pool,
}  # fmt: skip
