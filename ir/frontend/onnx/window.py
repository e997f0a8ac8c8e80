"""ONNX convolutions and pooling: padding, then windows.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.expr import Expr, add, as_int, const, expr, floordiv, mul, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers import window as windows
from relax_tune.ir.frontend.shared.handlers.neural import per_channel
from relax_tune.ir.frontend.shared.handlers.window import SpatialWindow
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.scatter import ScatterElements
from relax_tune.ir.op.neural.window import Pool


def window_of(w: Writer, node: OnnxNode, sizes: Sequence[Expr], kernel: Sequence[Expr | int]) -> SpatialWindow:
    """Return the windows of an operator over dims `sizes`. Raises ParseError."""
    n, elements = len(sizes), tuple(expr(k) for k in kernel)
    strides, dilations = (tuple(map(int, node.attribute(name) or [1] * n)) for name in ("strides", "dilations"))
    known = (k for k in map(as_int, elements) if k is not None)
    if {len(elements), len(strides), len(dilations)} != {n} or min(*strides, *dilations, *known, 1) < 1:
        raise node.refuse(
            f"expected kernel sizes, strides and dilations of at least 1 for {n} dims, got {elements}, {strides} and {dilations}"
        )
    auto = auto_pad(node)
    if auto.startswith("SAME"):
        extents = zip(sizes, map(windows.reach, elements, dilations), strides, strict=True)
        pads = [windows.same_pads(size, extent, stride, auto == "SAME_UPPER") for size, extent, stride in extents]
    else:
        pads = [(const(0), const(0))] * n if auto == "VALID" else stated_pads(node, n)
    pads = [(w.simplify(a), w.simplify(b)) for a, b in pads]
    return windows.make_window(w, sizes, elements, strides, dilations, pads, node.flag("ceil_mode"))


def auto_pad(node: OnnxNode) -> str:
    return node.choice("auto_pad", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def stated_pads(node: OnnxNode, n: int) -> list[tuple[Expr, Expr]]:
    """Return the pads of the attribute. Raises ParseError."""
    pads = [int(p) for p in node.attribute("pads") or [0] * (2 * n)]
    if len(pads) != 2 * n or min(pads) < 0:
        raise node.refuse(f"expected {2 * n} pads of at least 0, got {pads}")
    return [(const(a), const(b)) for a, b in zip(pads[:n], pads[n:], strict=True)]


def _spatial(node: OnnxNode, x: ImportedValue) -> tuple[Expr, ...]:
    if x.ndim < 3:
        raise node.refuse(f"expected a batch, channels and at least one more dim, got {x.info!r}")
    return x.shape[2:]


def of_kernel(w: Writer, node: OnnxNode) -> SpatialWindow:
    """Return the windows of a convolution, whose kernel sizes are the dims of its weights, input 1."""
    x, kernel = node.item(0), node.item(1)
    if kernel.ndim != x.ndim:
        raise node.refuse(f"expected kernels of {x.ndim} dims, got {kernel.info!r}")
    spatial, sizes = _spatial(node, x), list(kernel.shape[2:])
    stated = node.attribute("kernel_shape") or []
    if len(stated) > len(sizes) or any(as_int(s) not in (None, int(k)) for s, k in zip(sizes, stated)):
        raise node.refuse(f"expected a kernel_shape as the weights have it, {sizes}, got {stated}")
    return window_of(w, node, spatial, sizes)


def biased(w: Writer, node: OnnxNode, y: Value, position: int = 2) -> ImportedValue:
    """Add the bias of each channel, if there is an input `position`."""
    bias = node.optional(position)
    return w.of(y if bias is None else w.add(y, per_channel(w, w.tensor(bias), len(tensor_dims(y)))))


def _conv(w: Writer, node: OnnxNode) -> ImportedValue:
    groups = node.integer("group", 1)
    return biased(w, node, windows.convolved(w, node.operand(w, 0), node.operand(w, 1), of_kernel(w, node), groups))


def _conv_transpose(w: Writer, node: OnnxNode) -> ImportedValue:
    x, window = node.item(0), of_kernel(w, node)
    n, auto = len(window.sizes), auto_pad(node)
    more = [int(v) for v in node.attributes.get("output_padding") or [0] * n]
    shape = [int(v) for v in node.attributes.get("output_shape") or []]
    if len(more) != n or len(shape) not in (0, n):
        raise node.refuse(f"expected output_padding and output_shape of {n} numbers, got {more} and {shape}")
    before: list[Expr] = []
    sizes: list[Expr] = []
    for axis, size in enumerate(window.sizes):
        whole = add(add(mul(sub(size, 1), window.strides[axis]), window.reach(axis)), more[axis])
        if shape or auto.startswith("SAME"):
            sizes.append(const(shape[axis]) if shape else mul(size, window.strides[axis]))
            # The stated size decides the padding. The odd element goes after with SAME_UPPER, before otherwise.
            total = sub(whole, sizes[-1])
            half = floordiv(total, const(2))
            before.append(half if auto == "SAME_UPPER" else sub(total, half))
            continue
        front, after = (const(0), const(0)) if auto == "VALID" else stated_pads(node, n)[axis]
        before.append(front)
        sizes.append(sub(sub(whole, front), after))
    groups = node.integer("group", 1)
    y = windows.transposed(w, x, node.item(1), window.strides, window.dilations, groups, before, sizes)
    return biased(w, node, y)


def _pooled(w: Writer, node: OnnxNode) -> SpatialWindow:
    return window_of(w, node, _spatial(node, node.item(0)), node.attributes["kernel_shape"])


def _max_pool(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    x, window = node.item(0), _pooled(w, node)
    by_columns = node.flag("storage_order")
    top = windows.max_pool(w, x, window)
    if not node.is_read(1):
        return [w.of(top, x.natural)]
    where = windows.positions(w, x, top, window)
    plane = w.simplify(product(x.shape[2:]))
    if by_columns:
        where = _by_columns(w, where, x.shape[2:])
    # ONNX counts positions through the whole tensor, batch and channels included.
    first = w.mul(w.iota(w.simplify(mul(x.shape[0], x.shape[1]))), w.size(plane))
    first = w.reshape(first, [*x.shape[:2], *[const(1)] * len(window.sizes)])
    return [w.of(top, x.natural), w.of(w.add(where, first), True)]


def _by_columns(w: Writer, where: Value, dims: Sequence[Expr]) -> Value:
    """Return positions counted row by row as positions counted column by column."""
    total: Value | None = None
    step: Expr = const(1)
    for p, n in enumerate(dims):
        inner = w.simplify(product(dims[p + 1 :]))
        coordinate = w.modulo(w.quotient(where, w.size(inner)), w.size(n))
        coordinate = w.mul(coordinate, w.size(w.simplify(step)))
        total, step = coordinate if total is None else w.add(total, coordinate), mul(step, n)
    assert total is not None
    return total


def _max_unpool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MaxUnpool: elements at positions in a tensor of zeros, plane by plane.

    Positions refer to a tensor of the size that follows from the attributes; another size crops it or adds zeros."""
    x, where, window = node.item(0), node.item(1), _pooled(w, node)
    plain: list[Expr] = []
    for axis, size in enumerate(window.sizes):
        cut = add(*window.pads[axis])
        plain.append(w.simplify(sub(add(mul(sub(size, 1), window.strides[axis]), window.reach(axis)), cut)))
    planes, count = w.simplify(mul(x.shape[0], x.shape[1])), w.simplify(product(window.sizes))
    full = w.simplify(product(plain))
    # positions count the planes in front too
    first = w.reshape(w.mul(w.iota(planes), w.size(full)), [planes, const(1)])
    at = w.sub(w.reshape(w.viewed(w.tensor(where), x.shape), [planes, count]), first)
    zeros = w.full([planes, full], 0, x.dtype)
    y = w.emit(ScatterElements("replace", 1), zeros, at, w.reshape(w.tensor(x), [planes, count]))
    y = w.reshape(y, [*x.shape[:2], *plain])
    if node.has(2):
        more = [sub(e, n) for e, n in zip(node.expressions(w, 2)[2:], plain, strict=True)]
        y = windows.padded(w, y, [(const(0), w.simplify(e)) for e in more], 0)
    return w.of(y, x.natural)


def _average_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.of(windows.average_pool(w, node.item(0), _pooled(w, node), node.flag("count_include_pad")))


def _powered(w: Writer, node: OnnxNode) -> tuple[int, Value]:
    """Return p and the p-th power of the absolute elements."""
    x, p = node.item(0), node.integer("p", 2)
    if p < 1 or x.dtype.is_half:
        raise node.refuse(f"expected p of at least 1 and 32- or 64-bit floats, got {p} and {x.info!r}")
    value = w.abs(w.tensor(x))
    if p == 2:
        return p, w.mul(value, value)
    return p, w.power(value, p) if p > 2 else value


def _root(w: Writer, node: OnnxNode, p: int, total: Value) -> ImportedValue:
    if p == 2:
        total = w.sqrt(total)
    elif p > 2:
        total = w.power(total, 1 / p)
    return w.of(total)


def _lp_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LpPool: the p-norm of each window."""
    window = _pooled(w, node)
    p, value = _powered(w, node)
    return _root(w, node, p, w.emit(Pool(*window.attributes, largest=False), window.padded(w, value, 0)))


def _global_lp_pool(w: Writer, node: OnnxNode) -> ImportedValue:
    spatial = len(_spatial(node, node.item(0)))
    p, value = _powered(w, node)
    return _root(w, node, p, w.sum(value, tuple(range(2, 2 + spatial)), True))


def _lrn(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import LRN: `x / (bias + alpha / size * sum of squares of the channels around) ** beta`."""
    x, size = node.item(0), node.integer("size")
    if size < 1 or not x.dtype.is_float or x.ndim < 2:
        raise node.refuse(f"expected a size of at least 1 and floats (n, channels, ...), got {size} and {x.info!r}")
    alpha, beta, bias = (node.real(n, v) for n, v in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    value = w.tensor(x)
    one = [x.shape[0], const(1), x.shape[1], w.simplify(product(x.shape[2:]))]
    square = w.reshape(w.mul(value, value), one)
    # An even size has one more channel after than before.
    sides = (const((size - 1) // 2), const(size // 2))
    square = windows.padded(w, square, [sides, (const(0), const(0))], 0)
    total = w.reshape(w.emit(Pool((size, 1), (1, 1), (1, 1), largest=False), square), x.shape)
    scale = w.add(w.mul(total, alpha / size), w.literal(bias, x.dtype))
    return w.of(w.div(value, w.power(scale, beta)))


def _col2im(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Col2Im: (n, channels * kernel, windows) to images, the sums of their windows."""
    x, sizes, kernel = node.item(0), node.expressions(w, 1), node.expressions(w, 2)
    if x.ndim != 3 or len(sizes) != len(kernel):
        raise node.refuse(
            f"expected (n, channels * kernel, windows) and as many image dims as block dims, got {x.info!r}"
        )
    return w.of(windows.col2im(w, x, window_of(w, node, sizes, kernel)))


HANDLERS: Mapping[str, Handler] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _max_pool, "MaxUnpool": _max_unpool,
    "AveragePool": _average_pool, "LpPool": _lp_pool, "GlobalLpPool": _global_lp_pool, "LRN": _lrn, "Col2Im": _col2im,
}  # fmt: skip
