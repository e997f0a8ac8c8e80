"""ONNX convolutions and pooling: padding, then windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.expr import Expr, add, as_int, const, expr, floordiv, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import expressions
from relax_tune.ir.frontend.shared import windows
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.scatter import ScatterElements
from relax_tune.ir.op.math.elementwise import Add, Div, Mul, MulScalar, Sqrt, Sub
from relax_tune.ir.op.math.numeric import Abs, Modulo, Power, Quotient
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.window import Conv, Pool
from relax_tune.ir.op.reduction.reduce import Sum


class WindowAttributes:
    """Attributes of a windowed operator, for spatial dims `sizes`."""

    def __init__(self, w: Writer, node: OnnxNode, sizes: Sequence[Expr], kernel: Sequence[Expr | int]) -> None:
        self.w, self.node, self.sizes, n = w, node, list(sizes), len(sizes)
        self.kernel = tuple(expr(k) for k in kernel)
        self.strides = tuple(int(v) for v in node.attributes.get("strides") or [1] * n)
        self.dilations = tuple(int(v) for v in node.attributes.get("dilations") or [1] * n)
        known = [as_int(k) for k in self.kernel]
        if {len(self.kernel), len(self.strides), len(self.dilations)} != {n} or min(
            *self.strides, *self.dilations, *(1 if k is None else k for k in known)
        ) < 1:
            raise node.refuse(
                f"wanted kernel sizes, strides and dilations of at least 1 for {n} dims, found {self.kernel}, {self.strides} "
                f"and {self.dilations}"
            )
        self.pads = [(w.simplify(a), w.simplify(b)) for a, b in self._pads()]
        ceil = node.attributes.get("ceil_mode", 0)
        self.extra = [
            w.simplify(windows.beyond(size, own, self.reach(a), self.strides[a])) if ceil else const(0)
            for a, (size, own) in enumerate(zip(self.sizes, self.pads, strict=True))
        ]

    @property
    def fixed(self) -> tuple[int, ...]:
        """The kernel sizes of pooling, which are attributes."""
        return tuple(as_int(k) or 1 for k in self.kernel)

    @property
    def auto(self) -> str:
        return self.node.choice("auto_pad", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")

    def reach(self, axis: int) -> Expr:
        return windows.reach(self.kernel[axis], self.dilations[axis])

    def given(self) -> list[tuple[Expr, Expr]]:
        """Return the pads of the attribute. Raises ParseError."""
        n = len(self.sizes)
        found = [int(p) for p in self.node.attributes.get("pads") or [0] * (2 * n)]
        if len(found) != 2 * n or min(found) < 0:
            raise self.node.refuse(f"wanted {2 * n} pads of at least 0, found {found}")
        return [(const(a), const(b)) for a, b in zip(found[:n], found[n:], strict=True)]

    def _pads(self) -> list[tuple[Expr, Expr]]:
        auto = self.auto
        if auto == "NOTSET":
            return self.given()
        if auto == "VALID":
            return [(const(0), const(0))] * len(self.sizes)
        return [
            windows.same_pads(size, self.reach(a), self.strides[a], auto == "SAME_UPPER")
            for a, size in enumerate(self.sizes)
        ]

    @property
    def all_pads(self) -> windows.Pads:
        return [(a, self.w.simplify(add(b, e))) for (a, b), e in zip(self.pads, self.extra, strict=True)]


def _spatial(node: OnnxNode, x: ImportedValue) -> tuple[Expr, ...]:
    if x.ndim < 3:
        raise node.refuse(f"wanted a batch, channels and at least one more dim, found {x.info!r}")
    return x.shape[2:]


def of_kernel(w: Writer, node: OnnxNode) -> WindowAttributes:
    """Return the attributes of a convolution, whose kernel sizes are those of its weights, input 1."""
    x, kernel = node.item(0), node.item(1)
    if kernel.ndim != x.ndim:
        raise node.refuse(f"wanted kernels of {x.ndim} dims, found {kernel.info!r}")
    spatial, sizes = _spatial(node, x), list(kernel.shape[2:])
    for axis, given in enumerate(node.attributes.get("kernel_shape") or []):
        if axis >= len(sizes) or as_int(sizes[axis]) not in (None, int(given)):
            raise node.refuse(
                f"wanted a kernel_shape as the weights have it, {sizes}, found {node.attributes['kernel_shape']}"
            )
    return WindowAttributes(w, node, spatial, sizes)


def biased(w: Writer, node: OnnxNode, y: Value, position: int = 2) -> ImportedValue:
    """Add the bias of each channel, if input `position` gives one."""
    if not node.has(position):
        return w.of(y)
    bias = node.item(position)
    ones: list[Expr] = [const(1)] * (len(tensor_dims(y)) - 2)
    return w.of(w.emit(Add(), y, w.reshape(w.tensor(bias), [*bias.shape, *ones])))


def _conv(w: Writer, node: OnnxNode) -> ImportedValue:
    own = of_kernel(w, node)
    value = windows.padded(w, w.tensor(node.item(0)), own.all_pads, 0)
    op = Conv(own.strides, own.dilations, int(node.attributes.get("group", 1)))
    return biased(w, node, w.emit(op, value, w.tensor(node.item(1))))


def _conv_transpose(w: Writer, node: OnnxNode) -> ImportedValue:
    x, own = node.item(0), of_kernel(w, node)
    n, auto = len(own.sizes), own.auto
    more = [int(v) for v in node.attributes.get("output_padding") or [0] * n]
    shape = [int(v) for v in node.attributes.get("output_shape") or []]
    if len(more) != n or len(shape) not in (0, n):
        raise node.refuse(f"wanted output_padding and output_shape of {n} numbers, found {more} and {shape}")
    before: list[Expr] = []
    sizes: list[Expr] = []
    for axis, size in enumerate(own.sizes):
        whole = add(add(mul(sub(size, 1), own.strides[axis]), own.reach(axis)), more[axis])
        if shape or auto.startswith("SAME"):
            sizes.append(const(shape[axis]) if shape else mul(size, own.strides[axis]))
            total = sub(whole, sizes[-1])
            half = floordiv(total, const(2))
            before.append(half if auto == "SAME_UPPER" else sub(total, half))
            continue
        front, behind = (const(0), const(0)) if auto == "VALID" else own.given()[axis]
        before.append(front)
        sizes.append(sub(sub(whole, front), behind))
    groups = int(node.attributes.get("group", 1))
    y = windows.transposed(w, x, node.item(1), own.strides, own.dilations, groups, before, sizes)
    return biased(w, node, y)


def _pooled(w: Writer, node: OnnxNode) -> WindowAttributes:
    return WindowAttributes(w, node, _spatial(node, node.item(0)), node.attributes["kernel_shape"])


def _max_pool(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    x, own = node.item(0), _pooled(w, node)
    by_columns = bool(node.attributes.get("storage_order", 0))
    top = windows.max_pool(w, x, own.fixed, own.strides, own.dilations, own.all_pads)
    if not node.wants(1):
        return [w.of(top, x.natural)]
    where = windows.positions(w, x, top, own.fixed, own.strides, own.dilations, own.pads)
    plane = w.simplify(product(x.shape[2:]))
    if by_columns:
        where = _by_columns(w, where, x.shape[2:])
    first = w.emit(Mul(), w.emit(Iota(w.simplify(mul(x.shape[0], x.shape[1])))), w.size(plane))
    first = w.reshape(first, [*x.shape[:2], *[const(1)] * len(own.sizes)])
    return [w.of(top, x.natural), w.of(w.emit(Add(), where, first), True)]


def _by_columns(w: Writer, where: Value, dims: Sequence[Expr]) -> Value:
    """Return positions counted row by row as positions counted column by column."""
    found: Value | None = None
    step: Expr = const(1)
    for p, n in enumerate(dims):
        behind = w.simplify(product(dims[p + 1 :]))
        own = w.emit(Modulo(), w.emit(Quotient(), where, w.size(behind)), w.size(n))
        own = w.emit(Mul(), own, w.size(w.simplify(step)))
        found, step = own if found is None else w.emit(Add(), found, own), mul(step, n)
    assert found is not None
    return found


def _max_unpool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MaxUnpool: elements at positions in a tensor of zeros, plane by plane.

    Positions are those in a tensor of the size that follows from the attributes; another size crops it or adds zeros."""
    x, where, own = node.item(0), node.item(1), _pooled(w, node)
    plain: list[Expr] = []
    for axis, size in enumerate(own.sizes):
        cut = add(*own.pads[axis])
        plain.append(w.simplify(sub(add(mul(sub(size, 1), own.strides[axis]), own.reach(axis)), cut)))
    planes, count = w.simplify(mul(x.shape[0], x.shape[1])), w.simplify(product(own.sizes))
    full = w.simplify(product(plain))
    # positions count the planes in front too
    first = w.reshape(w.emit(Mul(), w.emit(Iota(planes)), w.size(full)), [planes, const(1)])
    at = w.emit(Sub(), w.reshape(w.tensor(where), [planes, count]), first)
    zeros = w.full([planes, full], 0, x.dtype)
    found = w.emit(ScatterElements("replace", 1), zeros, at, w.reshape(w.tensor(x), [planes, count]))
    found = w.reshape(found, [*x.shape[:2], *plain])
    if node.has(2):
        more = [sub(e, n) for e, n in zip(expressions(w, node, 2)[2:], plain, strict=True)]
        found = windows.padded(w, found, [(const(0), w.simplify(e)) for e in more], 0)
    return w.of(found, x.natural)


def _average_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    x, own = node.item(0), _pooled(w, node)
    counted = bool(node.attributes.get("count_include_pad", 0))
    sizes = (own.fixed, own.strides, own.dilations)
    return w.of(windows.average_pool(w, x, sizes, own.pads, own.extra, counted))


def _powered(w: Writer, node: OnnxNode) -> tuple[int, Value]:
    """Return p and the p-th power of the absolute elements."""
    x, p = node.item(0), int(node.attributes.get("p", 2))
    if p < 1 or x.dtype.is_half:
        raise node.refuse(f"wanted p of at least 1 and 32- or 64-bit floats, found {p} and {x.info!r}")
    value = w.emit(Abs(), w.tensor(x))
    if p == 2:
        return p, w.emit(Mul(), value, value)
    return p, w.emit(Power(), value, w.literal(p, x.dtype)) if p > 2 else value


def _root(w: Writer, node: OnnxNode, p: int, total: Value) -> ImportedValue:
    if p == 2:
        total = w.emit(Sqrt(), total)
    elif p > 2:
        total = w.emit(Power(), total, w.literal(1 / p, node.item(0).dtype))
    return w.of(total)


def _lp_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LpPool: the p-norm of each window."""
    own = _pooled(w, node)
    p, value = _powered(w, node)
    summed = Pool(own.fixed, own.strides, own.dilations, largest=False)
    return _root(w, node, p, w.emit(summed, windows.padded(w, value, own.all_pads, 0)))


def _global_lp_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    spatial = len(_spatial(node, node.item(0)))
    p, value = _powered(w, node)
    return _root(w, node, p, w.emit(Sum(tuple(range(2, 2 + spatial)), True), value))


def _lrn(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LRN: `x / (bias + alpha / size * sum of squares of the channels around) ** beta`."""
    x, size = node.item(0), int(node.attributes["size"])
    if size < 1 or not x.dtype.is_float or x.ndim < 2:
        raise node.refuse(f"wanted a size of at least 1 and floats (n, channels, ...), found {size} and {x.info!r}")
    alpha, beta, bias = (float(node.attributes.get(n, v)) for n, v in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    value = w.tensor(x)
    one = [x.shape[0], const(1), x.shape[1], w.simplify(product(x.shape[2:]))]
    square = w.reshape(w.emit(Mul(), value, value), one)
    sides = (const((size - 1) // 2), const(size // 2))
    square = windows.padded(w, square, [sides, (const(0), const(0))], 0)
    total = w.reshape(w.emit(Pool((size, 1), (1, 1), (1, 1), largest=False), square), x.shape)
    scale = w.emit(Add(), w.emit(MulScalar(alpha / size), total), w.literal(bias, x.dtype))
    return w.of(w.emit(Div(), value, w.emit(Power(), scale, w.literal(beta, x.dtype))))


def _col2im(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Col2Im: (n, channels * kernel, windows) to images, the sums of their windows."""
    x, sizes, kernel = node.item(0), expressions(w, node, 1), expressions(w, node, 2)
    if x.ndim != 3 or len(sizes) != len(kernel):
        raise node.refuse(
            f"wanted (n, channels * kernel, windows) and as many image dims as block dims, found {x.info!r}"
        )
    own = WindowAttributes(w, node, sizes, kernel)
    counts = [
        w.simplify(add(floordiv(sub(add(size, add(*own.pads[a])), own.reach(a)), const(own.strides[a])), 1))
        for a, size in enumerate(sizes)
    ]
    channels = w.simplify(floordiv(x.shape[1], product(kernel)))
    value = w.reshape(w.tensor(x), [x.shape[0], channels, *own.kernel, *counts])
    fold = Fold(tuple(map(w.simplify, sizes)), own.strides, own.dilations, tuple(a for a, _ in own.pads))
    return w.of(w.emit(fold, value))


HANDLERS: Mapping[str, Handler] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _max_pool, "MaxUnpool": _max_unpool,
    "AveragePool": _average_pool, "LpPool": _lp_pool, "GlobalLpPool": _global_lp_pool, "LRN": _lrn, "Col2Im": _col2im,
}  # fmt: skip
