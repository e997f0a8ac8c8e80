"""ONNX operators of shapes and data movement: views, permutations, concatenation, slices.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_, f32, i64
from relax_tune.ir.core.expr import Expr, ExprLike, Var, add, as_int, const, eq, floordiv, le, maximum, mul, or_, sub
from relax_tune.ir.core.graph import Call, Constant, GVar, Value
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode, integers
from relax_tune.ir.frontend.onnx.shape_values import objects
from relax_tune.ir.frontend.shared.handlers.indexing import counter_or_tensor, edge
from relax_tune.ir.frontend.shared.handlers.shape import consecutive, missing_dim, pad
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.movement import Permute, Slice
from relax_tune.ir.op.math.elementwise import Add, AddScalar
from relax_tune.ir.op.shapes import TensorToShape

# Largest number of elements of a constant that the importer computes; larger ones are computed at run time.
LARGEST = 1 << 20


def _shape(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    dims = list(x.shape[slice(node.integer("start", 0), node.attributes.get("end"))])
    return w.known(objects(dims) if dims else np.empty(0, object), i64, node.outputs[0])


def _size(w: Writer, node: OnnxNode) -> ImportedValue:
    scalar = np.empty((), object)
    scalar[()] = product(node.item(0).shape)
    return w.known(scalar, i64, node.outputs[0])


def _reshape(w: Writer, node: OnnxNode) -> ImportedValue:
    x, target = node.item(0), node.expressions(w, 1)
    dims: list[Expr] = []
    for p, d in enumerate(target):
        if as_int(d) == 0 and not node.flag("allowzero"):
            if p >= x.ndim:
                raise node.refuse(f"expected at most {x.ndim} dims to copy, got a 0 at {p}")
            d = x.shape[p]
        dims.append(d)
    open_ = [p for p, d in enumerate(dims) if as_int(d) == -1]
    if len(open_) > 1:
        raise node.refuse(f"expected at most one -1 in the shape, got {len(open_)}")
    for p in open_:
        dims[p] = missing_dim(w, x.shape, [d for q, d in enumerate(dims) if q != p])
    return w.of(w.reshape(w.tensor(x), [w.simplify(d) for d in dims]), x.natural)


def _flatten(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axis = node.integer("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise node.refuse(f"expected an axis in {-x.ndim}..{x.ndim}, got {axis}")
    axis = axis + x.ndim if axis < 0 else axis
    dims = [w.simplify(product(part)) for part in (x.shape[:axis], x.shape[axis:])]
    return w.of(w.reshape(w.tensor(x), dims), x.natural)


def _squeeze(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axes = node.axes(w, 1, x.ndim)
    if axes is None:
        axes = tuple(p for p, d in enumerate(x.shape) if as_int(d) == 1)
    dims = [d for p, d in enumerate(x.shape) if p not in axes]
    return w.of(w.reshape(w.tensor(x), dims), x.natural)


def _unsqueeze(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    attribute = node.attributes.get("axes")
    axes = node.integers(w, 1) if attribute is None else [int(a) for a in attribute]
    return w.of(w.expand_dims(w.tensor(x), tuple(node.normalised(a, x.ndim + len(axes)) for a in axes)), x.natural)


def _transpose(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axes = node.attributes.get("perm") or range(x.ndim - 1, -1, -1)
    return w.of(w.permute(w.tensor(x), [int(a) for a in axes]), x.natural)


def _expand(w: Writer, node: OnnxNode) -> ImportedValue:
    x, target = node.item(0), node.sizes(w, 1)
    known = [w.simplify(d) for d in target]
    rank = max(x.ndim, len(known))
    dims_of_x, known = ([const(1)] * (rank - len(dims)) + list(dims) for dims in (x.shape, known))
    joint = [w.joint(pair) for pair in zip(dims_of_x, known)]
    if None in joint:
        raise node.refuse(f"expected dims that are 1 or equal to the dims of the shape, got {x.info!r} and {target!r}")
    dims = [d for d in joint if d is not None]
    for d, to in zip(known, dims):
        w.require(or_(eq(d, to), eq(d, 1)))
    if x.uniform is not None and not all(map(w.g.deduction.same, dims_of_x, dims)):
        return w.uniform(dims, x.uniform, x.dtype)
    value = w.broadcast(w.tensor(x), dims)
    return x if value is x.value else w.of(value, x.natural)


def _concat(w: Writer, node: OnnxNode) -> ImportedValue:
    items = [node.item(p) for p in range(len(node.inputs))]
    axis = node.axis(items[0].ndim)
    if len(items) == 1:
        return items[0]
    return w.of(w.concat(axis, *map(w.tensor, items)), all(i.natural for i in items))


def _split(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    x = node.item(0)
    axis = node.axis(x.ndim, 0)
    n, parts = x.shape[axis], node.integer("num_outputs", len(node.outputs))
    if node.has(1):
        sizes = node.expressions(w, 1)
    else:
        # Parts of equal size, rounded up; the last one takes what is left and may be smaller.
        size = w.simplify(floordiv(add(n, parts - 1), parts))
        sizes = [size] * (parts - 1)
        sizes.append(w.simplify(sub(n, mul(size, parts - 1))))
    value = w.tensor(x)
    if node.has(1):
        total = w.simplify(sum(sizes[1:], start=sizes[0]) if sizes else const(0))
        if w.g.deduction.equal(total, n) is Proof.NO:
            raise node.refuse(f"expected parts that add up to {n!r}, got {total!r}")
        # The reshape states that the parts add up to the dim, where only a call can tell.
        value = w.reshape(value, [*x.shape[:axis], total, *x.shape[axis + 1 :]])
    return consecutive(w, x, value, axis, sizes)


def _range(w: Writer, node: OnnxNode) -> ImportedValue:
    element = node.item(0).dtype
    start, limit, delta = (w.whole(node.item(p)) for p in range(3))
    step = None if delta is None else as_int(delta)
    if start is not None and limit is not None and (step or element.is_int):
        if not step:
            raise node.refuse(f"expected a step that is a number other than 0, got {delta!r}")
        span = sub(limit, start) if step > 0 else sub(start, limit)
        size = w.simplify(maximum(floordiv(add(span, abs(step) - 1), abs(step)), 0))
        value = w.iota(size)
        if step != 1:
            value = w.mul(value, step)
        first = as_int(start)
        if first is None:
            value = w.add(value, w.size(start))
        elif first:
            value = w.add(value, first)
        if element is not i64:
            value = w.cast(value, element)
        return w.of(value, element.is_int and w.natural(start) and step > 0)
    arrays = [w.numbers(node.item(p)) for p in range(3)]
    if any(a is None for a in arrays):
        raise node.refuse("expected start, limit and step known from constants and shapes")
    begin, end, by = (a.reshape(-1)[0].item() for a in arrays if a is not None)
    if not by or not all(map(np.isfinite, (begin, end, by))):
        raise node.refuse(f"expected a finite start and limit and a step other than 0, got {begin}, {end} and {by}")
    count = max(int(np.ceil((end - begin) / by)), 0)
    if count > LARGEST:
        raise node.refuse(f"expected at most {LARGEST} numbers, got {count}")
    return w.constant((begin + by * np.arange(count)).astype(element.numpy), node.outputs[0])


def _constant_of_shape(w: Writer, node: OnnxNode) -> ImportedValue:
    value = node.attributes.get("value")
    array = np.zeros(1, np.float32) if value is None else np.asarray(value)
    if array.size != 1:
        raise node.refuse(f"expected a value of one element, got dims {array.shape}")
    dims = node.sizes(w, 0)
    known = integers(objects(dims)) if dims else []
    element: DType = f32 if value is None else w.constant(array).dtype
    if known is not None and 0 <= int(np.prod(known, dtype=object)) <= LARGEST:
        return w.constant(np.full(known, array.reshape(-1)[0], element.numpy), node.outputs[0])
    if any(w.g.deduction.proves(le(const(0), d)) is Proof.NO for d in dims):
        raise node.refuse(f"expected dims of 0 or more, got {dims!r}")
    return w.uniform(dims, array.reshape(-1)[0].item(), element)


def _tile(w: Writer, node: OnnxNode) -> ImportedValue:
    x, times = node.item(0), node.sizes(w, 1)
    pairs: list[Expr] = [d for r, n in zip(times, x.shape, strict=True) for d in (r, n)]
    # Each dim n becomes (1, n), is broadcast to (times, n), and joined again: repetition without an operator for it.
    value = w.expand_dims(w.tensor(x), tuple(range(0, 2 * x.ndim, 2)))
    value = w.broadcast_to(value, tuple(pairs))
    return w.of(w.reshape(value, [w.simplify(mul(r, n)) for r, n in zip(times, x.shape, strict=True)]), x.natural)


def _pad(w: Writer, node: OnnxNode) -> ImportedValue:
    mode = node.choice("mode", "constant", "edge", "reflect", "wrap")
    x, pads = node.item(0), node.expressions(w, 1)
    axes = node.integers(w, 3) if node.has(3) else list(range(x.ndim))
    fill, fill_item = 0.0, node.item(2) if node.has(2) else None
    if fill_item is not None and fill_item.array is not None:
        fill, fill_item = fill_item.array.reshape(-1)[0].item(), None
    sizes: list[tuple[ExprLike, ExprLike]] = [(0, 0)] * x.ndim
    for a, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        sizes[node.normalised(a, x.ndim)] = before, after
    padded = pad(w, w.tensor(x), sizes, fill, mode)
    if fill_item is None or mode != "constant":
        return w.of(padded)
    # A value computed from tensors takes the place of the zeros outside.
    outside = pad(w, w.full(x.shape, False, bool_), sizes, 1.0)
    return w.of(w.where(outside, w.reshape(w.tensor(fill_item), ()), padded))


def _blocks(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import DepthToSpace and SpaceToDepth: (b, c, h, w), blocks of `blocksize` move between channels and positions."""
    x, size = node.item(0), const(node.integer("blocksize"))
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
    """Import CenterCropPad: crop or pad both ends equally; the odd element is at the end."""
    x, sizes = node.item(0), node.expressions(w, 1)
    axes = [node.normalised(int(a), x.ndim) for a in node.attributes.get("axes") or range(x.ndim)]
    if len(axes) != len(sizes):
        raise node.refuse(f"expected {len(axes)} sizes, got {len(sizes)}")
    value = w.tensor(x)
    pads: list[tuple[ExprLike, ExprLike]] = [(0, 0)] * x.ndim
    for axis, size in zip(axes, sizes):
        # An axis is either cropped or padded: of the two, one amount is 0.
        begin = w.simplify(floordiv(maximum(sub(x.shape[axis], size), 0), 2))
        value = w.slice(value, axis, begin, w.simplify(add(begin, size)))
        more = w.simplify(sub(size, tensor_dims(value)[axis]))
        before = w.simplify(floordiv(more, 2))
        pads[axis] = before, w.simplify(sub(more, before))
    return w.of(pad(w, value, pads), x.natural)


def _counted(w: Writer, node: OnnxNode, position: int, sizes: Sequence[Expr]) -> list[Expr]:
    """Return the ends of slices of dims `sizes`. Ends computed from tensors become symbols, which the runtime reads."""
    item = node.item(position)
    if w.scalars(item) is not None:
        return node.expressions(w, position)
    values = w.cast(w.reshape(w.tensor(item), [const(len(sizes))]), i64)
    # Ends from data may count from the back; a symbol of the runtime has to be the number from the front.
    below = w.less(values, 0)
    values = w.where(below, w.add(values, w.emit(Scalars(tuple(sizes)))), values)
    shape = w.g.call(TensorToShape(), w.maximum(values, w.literal(0, i64)))
    symbols = tuple(Var(w.g.fresh("edge")) for _ in sizes)
    w.g.match_cast(shape, ShapeInfo(symbols))
    return list(symbols)


def _base(w: Writer, value: Value) -> tuple[Value, int]:
    """Return the value to which numbers were added, and the sum of the numbers."""
    total = 0
    while isinstance(value, GVar):
        definition = w.definitions.get(value)
        if not isinstance(definition, Call):
            break
        if isinstance(definition.op, AddScalar):
            total += int(definition.op.value)
        elif isinstance(definition.op, Add) and isinstance(definition.args[1], Constant):
            array = w.g.so_far.constants[definition.args[1].name]
            if array.size != 1:
                break
            total += int(array.reshape(-1)[0])
        else:
            break
        value = definition.args[0]
    return value, total


def _is_one(w: Writer, node: OnnxNode) -> bool:
    """Return whether a slice from data is `i : i + 1`, whose one element is assumed, and checked at run time."""
    start, end = node.item(1), node.item(2)
    if w.scalars(start) is not None or w.scalars(end) is not None:
        return False
    (low, less), (high, more) = _base(w, w.tensor(start)), _base(w, w.tensor(end))
    return low is high and more - less == 1


def _slice(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    known = [
        as_int(node.item(position).shape[0]) for position in range(1, min(4, len(node.inputs))) if node.has(position)
    ]
    number = next((n for n in known if n is not None), 1)  # assumed where data decide it, and checked at run time
    axes = node.integers(w, 3) if node.has(3) else list(range(number))
    steps = node.integers(w, 4) if node.has(4) else [1] * number
    sizes = [x.shape[node.normalised(a, x.ndim)] for a in axes]
    starts, ends = (_counted(w, node, position, sizes) for position in (1, 2))
    value, one = counter_or_tensor(w, x), number == 1 and _is_one(w, node)
    for start, end, a, step in zip(starts, ends, axes, steps, strict=True):
        axis = node.normalised(a, x.ndim)
        n = tensor_dims(value)[axis]
        if step == 1:
            value = w.slice(value, axis, edge(w, start, n), edge(w, end, n))
            if one:
                value = w.reshape(value, [const(1) if p == axis else d for p, d in enumerate(tensor_dims(value))])
            continue
        if step > 0:
            value = w.emit(Slice(axis, edge(w, start, n), edge(w, end, n), step), value)
            continue
        # an end below -size stops before the first element
        low, high = as_int(start), as_int(end)
        if low is None or high is None:
            raise node.refuse(f"expected ends that are numbers where the step is below 0, got {start!r} and {end!r}")
        if low < 0:
            # Exporters write the smallest or largest int32 or int64 for "to the end".
            begin = w.simplify(maximum(add(n, low), -1)) if low > -(2**31) else const(-1)
        else:
            begin = sub(n, 1) if low >= 2**31 - 1 else const(low)
        if high < 0:
            stop = w.simplify(maximum(add(n, high), -1)) if high > -(2**31) else const(-1)
        else:
            stop = const(high)
        value = w.emit(Slice(axis, w.simplify(begin), stop, step), value)
    return w.of(value, x.natural)


HANDLERS: Mapping[str, Handler] = {
    "Shape": _shape, "Size": _size, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Transpose": _transpose, "Expand": _expand, "Concat": _concat, "Split": _split,
    "Range": _range, "ConstantOfShape": _constant_of_shape, "Tile": _tile, "Pad": _pad, "CenterCropPad": _center_crop_pad,
    "DepthToSpace": _blocks, "SpaceToDepth": _blocks, "Slice": _slice,
}  # fmt: skip
