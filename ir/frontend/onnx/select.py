"""ONNX operators: arg-extremes, top-k, scans and scatters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_tune.ir.core.dtype import bool_, i32, i64
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.old_forms import rows
from relax_tune.ir.frontend.onnx.shape import axis_of, expressions, integers
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.indexing import natural_indices
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.scatter import Mode, Scatter, ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, MulScalar, Sub
from relax_tune.ir.op.math.logic import Equal, Less, Where
from relax_tune.ir.op.math.numeric import Modulo
from relax_tune.ir.op.reduction.scan import ArgMax, CumProd, CumSum, TopK


def _arg(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axis = axis_of(node, int(node.attributes.get("axis", 0)), x.ndim)
    last = bool(node.attributes.get("select_last_index", 0))
    found = w.emit(ArgMax(axis, node.op == "ArgMin", last), w.tensor(x))
    if node.attributes.get("keepdims", 1):
        found = w.reshape(found, [const(1) if p == axis else d for p, d in enumerate(x.shape)])
    return w.of(found, True)


def _hardmax(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Hardmax: 1 at the first largest element along an axis, 0 elsewhere."""
    x = node.item(0)
    axis = int(node.attributes["axis"])
    found = w.emit(ArgMax(axis), w.tensor(x))
    found = w.reshape(found, [const(1) if p == axis else d for p, d in enumerate(x.shape)])
    slots = w.reshape(w.emit(Iota(x.shape[axis])), [x.shape[axis], *[const(1)] * (x.ndim - 1 - axis)])
    return w.of(cast_to(w, w.emit(Equal(), found, slots), bool_, x.dtype))


def _top_k(w: Writer, node: OnnxNode) -> list[ImportedValue]:
    x = node.item(0)
    axis = axis_of(node, int(node.attributes.get("axis", -1)), x.ndim)
    (k,) = expressions(w, node, 1)
    value = w.tensor(x)
    # unsorted results may have any order
    where = w.emit(TopK(w.simplify(k), axis, bool(node.attributes.get("largest", 1))), value)
    return [w.of(w.emit(GatherElements(axis), value, where), x.natural), w.of(where, True)]


def _running(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    axis = axis_of(node, integers(w, node, 1)[0], x.ndim)
    make = CumSum if node.op == "CumSum" else CumProd
    flags = (bool(node.attributes.get(name, 0)) for name in ("exclusive", "reverse"))
    return w.of(w.emit(make(axis, *flags), w.tensor(x)))


def _mode(node: OnnxNode) -> Mode:
    found = node.choice("reduction", "none", "add", "mul", "max", "min")
    modes: Mapping[str, Mode] = {"none": "replace", "add": "add", "mul": "mul", "max": "max", "min": "min"}
    return modes[found]


def _scattered(w: Writer, op: Scatter, x: ImportedValue, indices: Value, updates: Value) -> ImportedValue:
    """Emit a scatter; bools are scattered as int32."""
    value = w.tensor(x)
    if x.dtype is not bool_:
        return w.of(w.emit(op, value, indices, updates))
    found = w.emit(op, w.emit(Cast(i32), value), indices, w.emit(Cast(i32), updates))
    return w.of(cast_to(w, found, i32, bool_))


def _scatter_elements(w: Writer, node: OnnxNode) -> ImportedValue:
    x, mode = node.item(0), _mode(node)
    axis = axis_of(node, int(node.attributes.get("axis", 0)), x.ndim)
    indices = natural_indices(w, node.item(1), x.shape[axis])
    return _scattered(w, ScatterElements(mode, axis), x, indices, w.tensor(node.item(2)))


def _scatter_nd(w: Writer, node: OnnxNode) -> ImportedValue:
    x, indices, mode = node.item(0), node.item(1), _mode(node)
    depth = as_int(indices.shape[-1])
    if depth is None or not 1 <= depth <= x.ndim:
        raise node.refuse(f"wanted a last dim of indices in 1..{x.ndim}, found {indices.info!r}")
    rows: Expr = w.simplify(product(indices.shape[:-1]))
    where = _wrapped(w, indices, x.shape[:depth])
    updates = w.reshape(w.tensor(node.item(2)), [rows, *x.shape[depth:]])
    return _scattered(w, ScatterND(mode), x, w.reshape(where, [rows, const(depth)]), updates)


def _wrapped(w: Writer, indices: ImportedValue, sizes: tuple[Expr, ...]) -> Value:
    """Return indices (..., k) into dims `sizes`, with negative ones counted from the end."""
    value = w.tensor(indices)
    if indices.natural:
        return value
    limits = np.empty(len(sizes), object)
    limits[:] = sizes
    ends = cast_to(w, w.tensor(w.known(limits)), i64, indices.dtype)
    return w.emit(Where(), w.emit(Less(), value, w.literal(0, indices.dtype)), w.emit(Add(), value, ends), value)


def _tensor_scatter(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import TensorScatter: write updates (b, ..., m, ...) into a cache (b, ..., n, ...) from position `write_indices[b]` on."""
    cache, update = node.item(0), node.item(1)
    axis = axis_of(node, int(node.attributes.get("axis", -2)), cache.ndim)
    circular = node.choice("mode", "linear", "circular") == "circular"
    if axis == 0:
        raise node.refuse("wanted an axis behind the first, which is the batch")
    count = update.shape[axis]
    steps = w.reshape(w.emit(Iota(count)), [count, *[const(1)] * (cache.ndim - 1 - axis)])
    if node.has(2):
        start = cast_to(w, w.tensor(node.item(2)), node.item(2).dtype, i64)
        steps = w.emit(Add(), steps, w.reshape(start, [*node.item(2).shape, *[const(1)] * (cache.ndim - 1)]))
    where = w.emit(Add(), w.full(update.shape, 0, i64), steps)
    if circular:
        size = np.empty((), object)
        size[()] = cache.shape[axis]
        where = w.emit(Modulo(), where, w.tensor(w.known(size)))
    assert len(tensor_dims(where)) == cache.ndim
    return _scattered(w, ScatterElements("replace", axis), cache, where, w.tensor(update))


def _reverse_sequence(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ReverseSequence: the first `lengths[b]` steps of batch `b` in reverse, the others as they are."""
    x, lengths = node.item(0), node.item(1)
    time, batch = int(node.attributes.get("time_axis", 0)), int(node.attributes.get("batch_axis", 1))
    if sorted((time, batch)) != [0, 1]:
        raise node.refuse(f"wanted axes 0 and 1 of steps and batches, found {time} and {batch}")
    steps, tail = x.shape[time], [const(1)] * (x.ndim - 1 - time)
    at = w.reshape(w.emit(Iota(steps)), [steps, *tail])
    ends = cast_to(w, w.tensor(lengths), lengths.dtype, i64)
    ends = w.reshape(ends, [*lengths.shape, *[const(1)] * (x.ndim - 1 - batch)])
    back = w.emit(AddScalar(-1), w.emit(Sub(), ends, at))
    where = w.emit(Where(), w.emit(Less(), at, ends), back, w.emit(Add(), at, w.emit(MulScalar(0), ends)))
    where = w.emit(Add(), w.full(x.shape, 0, i64), where)
    return w.of(w.emit(GatherElements(time), w.tensor(x), where), x.natural)


HANDLERS: Mapping[str, Handler] = {
    "ArgMax": _arg, "ArgMin": _arg, "Hardmax": rows(_hardmax), "TopK": _top_k, "CumSum": _running, "CumProd": _running,
    "Scatter": _scatter_elements, "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd, "TensorScatter": _tensor_scatter,
    "ReverseSequence": _reverse_sequence,
}  # fmt: skip
