"""ONNX gathers and scatters, and patterns of positions: triangles, diagonals, one-hot rows.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_tune.ir.core.dtype import bool_, i32, i64
from relax_tune.ir.core.expr import Expr, as_int, const, le
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.math import literal_of
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.indexing import (
    gather,
    gather_elements,
    gather_nd,
    natural_indices,
    surrounded,
    wrapped_indices,
)
from relax_tune.ir.frontend.shared.handlers.shape import triangle
from relax_tune.ir.frontend.shared.node import FIXED_DIMS
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.scatter import Mode, Scatter, ScatterElements, ScatterND


def _gather(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    return gather(w, x, node.axis(x.ndim, 0), node.item(1))


def _gather_elements(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    return gather_elements(w, x, node.axis(x.ndim, 0), node.item(1))


def _gather_nd(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import GatherND: with `batch_dims`, positions in these dims are prepended to the indices."""
    x, indices, batch = node.item(0), node.item(1), node.integer("batch_dims", 0)
    if not 0 <= batch < min(x.ndim, indices.ndim):
        raise node.refuse(f"expected batch_dims in 0..{min(x.ndim, indices.ndim) - 1}, got {batch}")
    if as_int(indices.shape[-1]) is None:
        raise node.refuse(f"expected a number as last dim of the indices, got {indices.info!r}", FIXED_DIMS)
    if not batch:
        return gather_nd(w, x, indices)
    rows = [*x.shape[:batch], *indices.shape[batch:-1]]
    parts = [w.viewed(w.tensor(indices), [*rows, indices.shape[-1]])]
    for p in reversed(range(batch)):
        at = w.reshape(w.cast(w.iota(rows[p]), indices.dtype), [rows[p], *[const(1)] * (len(rows) - p)])
        parts.insert(0, w.broadcast_to(at, (*rows, const(1))))
    return gather_nd(w, x, w.of(w.concat(len(rows), *parts), indices.natural))


def _scalar(w: Writer, item: ImportedValue) -> Value:
    """Return the one element of integers as an int64 without dims."""
    return w.cast(w.reshape(w.tensor(item), []), i64)


def _trilu(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Trilu: zero above or below a diagonal, which data may decide."""
    k: int | Value = 0
    if node.has(1):
        number = literal_of(node.item(1))
        k = _scalar(w, node.item(1)) if number is None else int(number)
    return triangle(w, node.item(0), k, node.flag("upper", True))


def _eye_like(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import EyeLike: ones on the diagonal `k` places right of the main one, in the dims of a matrix."""
    x = node.item(0)
    target = node.element("dtype", x.dtype)
    rows, columns = (w.iota(d) for d in x.shape)
    rows = w.expand_dims(w.add(rows, node.integer("k", 0)), (1,))
    return w.of(w.cast(w.equal(rows, columns), target), target.is_int)


def _one_hot(w: Writer, node: OnnxNode) -> ImportedValue:
    indices, pair = node.item(0), node.item(2)
    count = literal_of(node.item(1))
    depth = node.sizes(w, 1, scalar=True)[0] if count is None else const(int(count))
    axis = node.axis(indices.ndim + 1, -1)
    whole = w.of(w.cast(w.tensor(indices), i64), indices.natural and indices.dtype.is_int)
    # before version 11 an index below 0 is outside
    where = w.tensor(whole) if (node.version or 11) < 11 else natural_indices(w, whole, depth)
    where = w.expand_dims(where, (axis,))
    slots = w.reshape(w.iota(depth), [depth, *[const(1)] * (indices.ndim - axis)])
    off, on = (w.reshape(w.slice(w.tensor(pair), 0, const(p), const(p + 1)), []) for p in (0, 1))
    return w.of(w.where(w.equal(where, slots), on, off))


def _mode(node: OnnxNode) -> Mode:
    reduction = node.choice("reduction", "none", "add", "mul", "max", "min")
    modes: Mapping[str, Mode] = {"none": "replace", "add": "add", "mul": "mul", "max": "max", "min": "min"}
    return modes[reduction]


def _scattered(w: Writer, op: Scatter, x: ImportedValue, indices: Value, updates: Value) -> ImportedValue:
    """Emit a scatter; bools are scattered as int32."""
    value = w.tensor(x)
    if x.dtype is not bool_:
        return w.of(w.emit(op, value, indices, updates))
    y = w.emit(op, w.cast(value, i32), indices, w.cast(updates, i32))
    return w.of(w.cast(y, bool_))


def _scatter_elements(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ScatterElements. In axes but the scattered one, indices may have fewer elements than the data."""
    x, mode, item = node.item(0), _mode(node), node.item(1)
    if item.ndim != x.ndim:
        raise node.refuse(f"expected indices of {x.ndim} dims, got {item.info!r}")
    axis = node.axis(x.ndim, 0)
    fewer = [p for p in range(x.ndim) if p != axis and not w.g.deduction.same(x.shape[p], item.shape[p])]
    part = w.tensor(x)
    for p in fewer:
        if not w.require(le(item.shape[p], x.shape[p])):
            raise node.refuse(f"expected at most {x.shape[p]!r} indices along axis {p}, got {item.shape[p]!r}")
        # Updates touch only the first elements of such axes, so the rest is put back around the result.
        part = w.slice(part, p, const(0), item.shape[p])
    indices = natural_indices(w, item, x.shape[axis])
    y = _scattered(w, ScatterElements(mode, axis), w.of(part) if fewer else x, indices, w.tensor(node.item(2)))
    return w.of(surrounded(w, x, w.tensor(y), fewer, item.shape)) if fewer else y


def _scatter_nd(w: Writer, node: OnnxNode) -> ImportedValue:
    x, indices, mode = node.item(0), node.item(1), _mode(node)
    depth = as_int(indices.shape[-1])
    if depth is None or not 1 <= depth <= x.ndim:
        raise node.refuse(f"expected a last dim of indices in 1..{x.ndim}, got {indices.info!r}")
    rows: Expr = w.simplify(product(indices.shape[:-1]))
    where = wrapped_indices(w, indices, x.shape[:depth])
    source, dims = node.item(2), [*indices.shape[:-1], *x.shape[depth:]]
    if source.ndim != len(dims):
        raise node.refuse(f"expected updates of dims {dims!r}, got {source.info!r}")
    updates = w.reshape(w.viewed(w.tensor(source), dims), [rows, *x.shape[depth:]])
    return _scattered(w, ScatterND(mode), x, w.reshape(where, [rows, const(depth)]), updates)


def _tensor_scatter(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import TensorScatter: write updates (b, ..., m, ...) into a cache (b, ..., n, ...) from position `write_indices[b]` on."""
    cache, update = node.item(0), node.item(1)
    axis = node.axis(cache.ndim, -2)
    circular = node.choice("mode", "linear", "circular") == "circular"
    if axis == 0:
        raise node.refuse("expected an axis after the first, which is the batch")
    count = update.shape[axis]
    steps = w.reshape(w.iota(count), [count, *[const(1)] * (cache.ndim - 1 - axis)])
    if node.has(2):
        start = w.cast(w.tensor(node.item(2)), i64)
        steps = w.add(steps, w.reshape(start, [*node.item(2).shape, *[const(1)] * (cache.ndim - 1)]))
    where = w.add(w.full(update.shape, 0, i64), steps)
    if circular:
        size = np.empty((), object)
        size[()] = cache.shape[axis]
        where = w.modulo(where, w.tensor(w.known(size)))
    assert len(tensor_dims(where)) == cache.ndim
    return _scattered(w, ScatterElements("replace", axis), cache, where, w.tensor(update))


def _reverse_sequence(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ReverseSequence: the first `lengths[b]` steps of batch `b` in reverse, the others as they are."""
    x, lengths = node.item(0), node.item(1)
    time, batch = node.integer("time_axis", 0), node.integer("batch_axis", 1)
    if sorted((time, batch)) != [0, 1]:
        raise node.refuse(f"expected axes 0 and 1 of steps and batches, got {time} and {batch}")
    steps, tail = x.shape[time], [const(1)] * (x.ndim - 1 - time)
    at = w.reshape(w.iota(steps), [steps, *tail])
    ends = w.cast(w.tensor(lengths), i64)
    ends = w.reshape(ends, [*lengths.shape, *[const(1)] * (x.ndim - 1 - batch)])
    back = w.add(w.sub(ends, at), -1)
    # `ends * 0` broadcasts the positions to the dims of the other branch.
    where = w.where(w.less(at, ends), back, w.add(at, w.mul(ends, 0)))
    where = w.add(w.full(x.shape, 0, i64), where)
    return w.of(w.gather_elements(w.tensor(x), where, time), x.natural)


HANDLERS: Mapping[str, Handler] = {
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd, "Trilu": _trilu, "EyeLike": _eye_like,
    "OneHot": _one_hot, "Scatter": _scatter_elements, "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter, "ReverseSequence": _reverse_sequence,
}  # fmt: skip
