"""ONNX operators of shapes and data movement: views, permutations, concatenation, slices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_, f32, i64
from relax_tune.ir.core.expr import Expr, ExprLike, add, as_int, const, floordiv, le, maximum, mul, sub
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape_values import numbers, objects
from relax_tune.ir.frontend.shared.compositions import missing_dim, pad, permute, slice_axis
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute
from relax_tune.ir.op.math.elementwise import AddScalar, Cast, MulScalar, broadcast_dims
from relax_tune.ir.op.math.logic import Where

# Largest number of elements of a constant made while importing; larger ones are computed at run time.
LARGEST = 1 << 20


def axis_of(node: OnnxNode, axis: int, ndim: int) -> int:
    """Normalise a possibly negative axis to 0 .. ndim-1. Raises ParseError."""
    if not -ndim <= axis < max(ndim, 1):
        raise node.refuse(f"wanted an axis in {-ndim}..{ndim - 1}, found {axis}")
    return axis % ndim if ndim else 0


def integers(w: Writer, node: OnnxNode, position: int) -> list[int]:
    """Return an input that must be integer literals. Raises ParseError."""
    found = numbers(w.scalars(node.item(position)))
    if found is None:
        raise node.refuse(f"wanted input {position} to be constant, found {node.item(position).info!r}")
    return found


def expressions(w: Writer, node: OnnxNode, position: int) -> list[Expr]:
    """Return an input that must be known from shapes and constants. Raises ParseError."""
    found = w.scalars(node.item(position))
    if found is None:
        raise node.refuse(
            f"wanted input {position} to be known from constants and shapes, found values computed from tensors"
        )
    return list(found.reshape(-1))


def axes_of(w: Writer, node: OnnxNode, position: int, ndim: int) -> tuple[int, ...] | None:
    """Return axes given as attribute or input; None without them."""
    given = node.attributes.get("axes")
    if given is None and node.has(position):
        given = integers(w, node, position)
    return None if given is None else tuple(axis_of(node, int(a), ndim) for a in given)


def _shape(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    dims = list(x.shape[slice(int(node.attributes.get("start", 0)), node.attributes.get("end"))])
    return w.known(objects(dims) if dims else np.empty(0, object), i64, node.outputs[0])


def _size(w: Writer, node: OnnxNode) -> ImportedValue:
    scalar = np.empty((), object)
    scalar[()] = product(node.item(0).shape)
    return w.known(scalar, i64, node.outputs[0])


def _reshape(w: Writer, node: OnnxNode) -> ImportedValue:
    x, target = node.item(0), expressions(w, node, 1)
    dims: list[Expr] = []
    for p, d in enumerate(target):
        if as_int(d) == 0 and not node.attributes.get("allowzero", 0):
            if p >= x.ndim:
                raise node.refuse(f"wanted at most {x.ndim} dims to copy, found a 0 at {p}")
            d = x.shape[p]
        dims.append(d)
    open_ = [p for p, d in enumerate(dims) if as_int(d) == -1]
    if len(open_) > 1:
        raise node.refuse(f"wanted at most one -1 in the shape, found {len(open_)}")
    for p in open_:
        dims[p] = missing_dim(w, x.shape, [d for q, d in enumerate(dims) if q != p])
    return w.of(w.reshape(w.tensor(x), [w.simplify(d) for d in dims]), x.natural)


def _flatten(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axis = int(node.attributes.get("axis", 1))
    if not -x.ndim <= axis <= x.ndim:
        raise node.refuse(f"wanted an axis in {-x.ndim}..{x.ndim}, found {axis}")
    axis = axis + x.ndim if axis < 0 else axis
    dims = [w.simplify(product(part)) for part in (x.shape[:axis], x.shape[axis:])]
    return w.of(w.reshape(w.tensor(x), dims), x.natural)


def _squeeze(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axes = axes_of(w, node, 1, x.ndim)
    if axes is None:
        axes = tuple(p for p, d in enumerate(x.shape) if as_int(d) == 1)
    dims = [d for p, d in enumerate(x.shape) if p not in axes]
    return w.of(w.reshape(w.tensor(x), dims), x.natural)


def _unsqueeze(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    given = node.attributes.get("axes")
    axes = integers(w, node, 1) if given is None else [int(a) for a in given]
    return w.of(w.emit(ExpandDims(tuple(axis_of(node, a, x.ndim + len(axes)) for a in axes)), w.tensor(x)), x.natural)


def _transpose(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axes = node.attributes.get("perm") or range(x.ndim - 1, -1, -1)
    return w.of(permute(w, w.tensor(x), [int(a) for a in axes]), x.natural)


def _expand(w: Writer, node: OnnxNode) -> ImportedValue:
    x, target = node.item(0), expressions(w, node, 1)
    known = [w.simplify(d) for d in target]
    value = w.tensor(x)
    own = list(x.shape)
    for p in range(1, min(x.ndim, len(known)) + 1):
        # undecided dims are assumed to be equal, and checked at run time
        certain = (
            1 in (as_int(own[-p]), as_int(known[-p])) or w.g.deduction.equal(own[-p], known[-p]) is not Proof.UNKNOWN
        )
        own[-p] = own[-p] if certain else known[-p]
    value = w.reshape(value, own)
    dims, _ = broadcast_dims("Expand", tensor_dims(value), known, w.g.deduction)
    if dims is None:
        raise node.refuse(f"wanted a shape that is certain to fit {x.info!r}, found {target!r}")
    if len(dims) == x.ndim and all(map(w.g.deduction.same, dims, tensor_dims(value))):
        return x if value is x.value else w.of(value, x.natural)
    if x.uniform is not None:
        return w.uniform(dims, x.uniform, x.dtype)
    return w.of(w.emit(BroadcastTo(dims), value), x.natural)


def _concat(w: Writer, node: OnnxNode) -> ImportedValue:
    items = [node.item(p) for p in range(len(node.inputs))]
    axis = axis_of(node, int(node.attributes["axis"]), items[0].ndim)
    if len(items) == 1:
        return items[0]
    return w.of(w.emit(Concat(axis), *map(w.tensor, items)), all(i.natural for i in items))


def _split(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    x = node.item(0)
    axis = axis_of(node, int(node.attributes.get("axis", 0)), x.ndim)
    n, parts = x.shape[axis], int(node.attributes.get("num_outputs", len(node.outputs)))
    if node.has(1):
        sizes = expressions(w, node, 1)
    else:
        size = w.simplify(floordiv(add(n, parts - 1), parts))
        sizes = [size] * (parts - 1)
        sizes.append(w.simplify(sub(n, mul(size, parts - 1))))
    value, begin, found = w.tensor(x), const(0), []
    if node.has(1):
        total = w.simplify(sum(sizes[1:], start=sizes[0]) if sizes else const(0))
        if w.g.deduction.equal(total, n) is Proof.NO:
            raise node.refuse(f"wanted parts that add up to {n!r}, found {total!r}")
        value = w.reshape(value, [*x.shape[:axis], total, *x.shape[axis + 1 :]])
    for size in sizes:
        end = w.simplify(add(begin, size))
        found.append(w.of(slice_axis(w, value, axis, begin, end), x.natural))
        begin = end  # type: ignore[assignment]
    return found


def _range(w: Writer, node: OnnxNode) -> ImportedValue:
    known = [w.scalars(node.item(p)) for p in range(3)]
    element = node.item(0).dtype
    if all(k is not None for k in known) and element.is_int:
        start, limit, delta = (k.reshape(-1)[0] for k in known if k is not None)
        step = as_int(delta)
        if not step:
            raise node.refuse(f"wanted a step that is a number other than 0, found {delta!r}")
        span = sub(limit, start) if step > 0 else sub(start, limit)
        size = w.simplify(maximum(floordiv(add(span, abs(step) - 1), abs(step)), 0))
        value = w.emit(Iota(size))
        if step != 1:
            value = w.emit(MulScalar(step), value)
        first = as_int(start)
        if first is None:
            raise node.refuse(f"wanted a start that is a number, found {start!r}")
        if first:
            value = w.emit(AddScalar(first), value)
        if element is not i64:
            value = w.emit(Cast(element), value)
        return w.of(value, first >= 0 and step > 0)
    arrays = [node.item(p).array for p in range(3)]
    if any(a is None for a in arrays):
        raise node.refuse("wanted start, limit and step known from constants and shapes")
    begin, end, by = (a.reshape(-1)[0].item() for a in arrays if a is not None)
    if not by or not all(map(np.isfinite, (begin, end, by))):
        raise node.refuse(f"wanted a finite start and limit and a step other than 0, found {begin}, {end} and {by}")
    count = max(int(np.ceil((end - begin) / by)), 0)
    if count > LARGEST:
        raise node.refuse(f"wanted at most {LARGEST} numbers, found {count}")
    return w.constant((begin + by * np.arange(count)).astype(element.numpy), node.outputs[0])


def _constant_of_shape(w: Writer, node: OnnxNode) -> ImportedValue:
    value = node.attributes.get("value")
    array = np.zeros(1, np.float32) if value is None else np.asarray(value)
    if array.size != 1:
        raise node.refuse(f"wanted a value of one element, found dims {array.shape}")
    dims = expressions(w, node, 0)
    sizes = numbers(objects(dims)) if dims else []
    element: DType = f32 if value is None else w.constant(array).dtype
    if sizes is not None and 0 <= int(np.prod(sizes, dtype=object)) <= LARGEST:
        return w.constant(np.full(sizes, array.reshape(-1)[0], element.numpy), node.outputs[0])
    if any(w.g.deduction.proves(le(const(0), d)) is Proof.NO for d in dims):
        raise node.refuse(f"wanted dims of 0 or more, found {dims!r}")
    return w.uniform(dims, array.reshape(-1)[0].item(), element)


def _tile(w: Writer, node: OnnxNode) -> ImportedValue:
    x, times = node.item(0), expressions(w, node, 1)
    pairs: list[Expr] = [d for r, n in zip(times, x.shape, strict=True) for d in (r, n)]
    value = w.emit(ExpandDims(tuple(range(0, 2 * x.ndim, 2))), w.tensor(x))
    value = w.emit(BroadcastTo(tuple(pairs)), value)
    return w.of(w.reshape(value, [w.simplify(mul(r, n)) for r, n in zip(times, x.shape, strict=True)]), x.natural)


def _pad(w: Writer, node: OnnxNode) -> ImportedValue:
    mode = node.choice("mode", "constant", "edge", "reflect", "wrap")
    x, pads = node.item(0), expressions(w, node, 1)
    axes = integers(w, node, 3) if node.has(3) else list(range(x.ndim))
    fill, given = 0.0, node.item(2) if node.has(2) else None
    if given is not None and given.array is not None:
        fill, given = given.array.reshape(-1)[0].item(), None
    sizes: list[tuple[ExprLike, ExprLike]] = [(0, 0)] * x.ndim
    for a, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        sizes[axis_of(node, a, x.ndim)] = before, after
    found = pad(w, w.tensor(x), sizes, fill, mode)
    if given is None or mode != "constant":
        return w.of(found)
    outside = pad(
        w, w.full(x.shape, False, bool_), sizes, 1.0
    )  # a value computed from tensors takes the place of zeros
    return w.of(w.emit(Where(), outside, w.reshape(w.tensor(given), ()), found))


def _blocks(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import DepthToSpace and SpaceToDepth: (b, c, h, w), blocks of `blocksize` move between channels and positions."""
    x, size = node.item(0), const(int(node.attributes["blocksize"]))
    b, c, h, wide = x.shape
    if node.op == "SpaceToDepth":
        value = w.reshape(
            w.tensor(x), [b, c, w.simplify(floordiv(h, size)), size, w.simplify(floordiv(wide, size)), size]
        )
        first = node.choice("mode", "DCR", "CRD") == "DCR"
        value = w.emit(Permute((0, 3, 5, 1, 2, 4) if first else (0, 1, 3, 5, 2, 4)), value)
        d = tensor_dims(value)
        return w.of(w.reshape(value, [b, w.simplify(product(d[1:4])), d[4], d[5]]))
    deep = w.simplify(floordiv(c, mul(size, size)))
    first = node.choice("mode", "DCR", "CRD") == "DCR"
    value = w.reshape(w.tensor(x), [b, size, size, deep, h, wide] if first else [b, deep, size, size, h, wide])
    value = w.emit(Permute((0, 3, 4, 1, 5, 2) if first else (0, 1, 4, 2, 5, 3)), value)
    return w.of(w.reshape(value, [b, deep, w.simplify(mul(h, size)), w.simplify(mul(wide, size))]))


def _center_crop_pad(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import CenterCropPad: as many elements off or on both ends; the odd one is behind."""
    x, sizes = node.item(0), expressions(w, node, 1)
    axes = [axis_of(node, int(a), x.ndim) for a in node.attributes.get("axes") or range(x.ndim)]
    if len(axes) != len(sizes):
        raise node.refuse(f"wanted {len(axes)} sizes, found {len(sizes)}")
    value = w.tensor(x)
    pads: list[tuple[ExprLike, ExprLike]] = [(0, 0)] * x.ndim
    for axis, size in zip(axes, sizes):
        begin = w.simplify(floordiv(maximum(sub(x.shape[axis], size), 0), 2))
        value = slice_axis(w, value, axis, begin, w.simplify(add(begin, size)))
        more = w.simplify(sub(size, tensor_dims(value)[axis]))
        before = w.simplify(floordiv(more, 2))
        pads[axis] = before, w.simplify(sub(more, before))
    return w.of(pad(w, value, pads), x.natural)


HANDLERS: Mapping[str, Handler] = {
    "Shape": _shape, "Size": _size, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Transpose": _transpose, "Expand": _expand, "Concat": _concat, "Split": _split,
    "Range": _range, "ConstantOfShape": _constant_of_shape, "Tile": _tile, "Pad": _pad,
    "CenterCropPad": _center_crop_pad, "DepthToSpace": _blocks, "SpaceToDepth": _blocks,
}  # fmt: skip
