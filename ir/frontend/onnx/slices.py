"""ONNX slices, also with ends that are computed from tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, Var, add, as_int, const, maximum, sub
from relax_tune.ir.core.graph import Call, Constant, GVar, Value
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.shape import axis_of, expressions, integers
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis
from relax_tune.ir.frontend.shared.indexing import counter_or_tensor, edge
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.movement import Slice
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Maximum
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.shapes import TensorToShape


def _counted(w: Writer, node: OnnxNode, position: int, sizes: Sequence[Expr]) -> list[Expr]:
    """Return the ends of slices of dims of these sizes. Those computed from tensors become symbols, which the runtime reads."""
    item = node.item(position)
    if w.scalars(item) is not None:
        return expressions(w, node, position)
    values = cast_to(w, w.reshape(w.tensor(item), [const(len(sizes))]), item.dtype, i64)
    below = w.emit(Less(), values, w.literal(0, i64))
    values = w.emit(Where(), below, w.emit(Add(), values, w.emit(Scalars(tuple(sizes)))), values)
    found = w.g.call(TensorToShape(), w.emit(Maximum(), values, w.literal(0, i64)))
    symbols = tuple(Var(w.g.fresh("edge")) for _ in sizes)
    w.g.match_cast(found, ShapeInfo(symbols))
    return list(symbols)


def _base(w: Writer, value: Value) -> tuple[Value, int]:
    """Return what integers are computed from by adding numbers, and the sum of these numbers."""
    total = 0
    while isinstance(value, GVar):
        definition = w.definitions.get(value)
        if not isinstance(definition, Call):
            break
        if isinstance(definition.op, AddScalar):
            total += int(definition.op.value)
        elif isinstance(definition.op, Add) and isinstance(definition.args[1], Constant):
            held = w.g.so_far.constants[definition.args[1].name]
            if held.size != 1:
                break
            total += int(held.reshape(-1)[0])
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
    axes = integers(w, node, 3) if node.has(3) else list(range(number))
    steps = integers(w, node, 4) if node.has(4) else [1] * number
    sizes = [x.shape[axis_of(node, a, x.ndim)] for a in axes]
    starts, ends = (_counted(w, node, position, sizes) for position in (1, 2))
    value, one = counter_or_tensor(w, x), number == 1 and _is_one(w, node)
    for start, end, a, step in zip(starts, ends, axes, steps, strict=True):
        axis = axis_of(node, a, x.ndim)
        n = tensor_dims(value)[axis]
        if step == 1:
            value = slice_axis(w, value, axis, edge(w, start, n), edge(w, end, n))
            if one:
                value = w.reshape(value, [const(1) if p == axis else d for p, d in enumerate(tensor_dims(value))])
            continue
        if step > 0:
            value = w.emit(Slice(axis, edge(w, start, n), edge(w, end, n), step), value)
            continue
        # an end below -size stops before the first element
        low, high = as_int(start), as_int(end)
        if low is None or high is None:
            raise node.refuse(f"wanted ends that are numbers where the step is below 0, found {start!r} and {end!r}")
        if low < 0:
            begin = w.simplify(maximum(add(n, low), -1)) if low > -(2**31) else const(-1)
        else:
            begin = sub(n, 1) if low >= 2**31 - 1 else const(low)
        if high < 0:
            stop = w.simplify(maximum(add(n, high), -1)) if high > -(2**31) else const(-1)
        else:
            stop = const(high)
        value = w.emit(Slice(axis, w.simplify(begin), stop, step), value)
    return w.of(value, x.natural)


HANDLERS: Mapping[str, Handler] = {"Slice": _slice}
