"""ATen operators of data movement: views, permutations, concatenation, slices, indexing, creation.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_, f64, i64, u8, u16, u32, u64
from relax_tune.ir.core.expr import Expr, as_int, const, eq, lt, mul, sub
from relax_tune.ir.core.expr import add as plus
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.indexing import counter_or_tensor, edge
from relax_tune.ir.frontend.shared.handlers.shape import consecutive, pad, triangle
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.operators import element_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_item, as_value, dim, wrapped
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.movement import Slice
from relax_tune.ir.op.math.bits import BitCast


def _view(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a view as a reshape to the dims that torch states."""
    x = n.item(0)
    # A tensor of one value has no memory yet, so a view of it only changes its dims.
    if x.uniform is not None:
        return w.uniform(n.dims, x.uniform, x.dtype)
    return w.of(w.reshape(w.tensor(x), n.dims), x.natural)


def _expand(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    if x.uniform is not None:
        return w.uniform(n.dims, x.uniform, x.dtype)
    if x.ndim == len(n.dims) and all(map(w.g.deduction.same, x.shape, n.dims)):
        return x
    return w.of(w.broadcast_to(w.tensor(x), n.dims), x.natural)


def _permute(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    return w.of(w.permute(w.tensor(x), n.axes(1, "dims", x.ndim) if x.ndim else ()), x.natural)


def _transpose(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    order = list(range(x.ndim))
    a, b = n.axis_at(1, "dim0", x.ndim), n.axis_at(2, "dim1", x.ndim)
    if order:
        order[a], order[b] = order[b], order[a]
    return w.of(w.permute(w.tensor(x), order), x.natural)


def _reversed_axes(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    return w.of(w.permute(w.tensor(x), range(x.ndim - 1, -1, -1)), x.natural)


def _slice(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis_at(1, "dim", x.ndim, 0)
    size, step = x.shape[axis], n.number(4, "step", 1)
    start, end = n.argument(2, "start"), n.argument(3, "end")
    begin = const(0) if start is None else edge(w, dim(start), size)
    stop = size if end is None else edge(w, dim(end), size)
    value = counter_or_tensor(w, x)
    if step == 1:
        return w.of(w.slice(value, axis, begin, stop), x.natural)
    return w.of(w.emit(Slice(axis, begin, stop, step), value), x.natural)


def _narrow(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `length` elements along an axis from `start` on."""
    x = n.item(0)
    axis = n.axis_at(1, "dim", x.ndim)
    begin = edge(w, dim(n.args[2]), x.shape[axis])
    end = w.simplify(plus(begin, n.dims[axis]))
    return w.of(w.slice(w.tensor(x), axis, begin, end), x.natural)


def _copy(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the elements of argument 1 in the dims and the type of argument 0."""
    source = n.typed(w, 1)
    return w.of(w.broadcast_to(w.tensor(source), n.dims), source.natural)


def _flip(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a reversal along some axes."""
    x = n.item(0)
    value = w.tensor(x)
    for axis in n.axes(1, "dims", x.ndim) if n.argument(1, "dims") else ():
        value = w.reversed(value, axis)
    return w.of(value, x.natural)


def _select(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis_at(1, "dim", x.ndim)
    at = dim(n.args[2])
    known = as_int(at)
    if known is not None and known < 0:
        at = w.simplify(plus(x.shape[axis], known))
    elif known is None and not w.natural(at):  # a number that the program reads from a tensor
        place = as_value(w, at, i64)
        place = w.where(w.less(place, 0), w.add(place, w.size(x.shape[axis])), place)
        return w.of(w.take(w.tensor(x), axis, place), x.natural)
    return w.of(w.reshape(w.slice(w.tensor(x), axis, at, w.simplify(plus(at, 1))), n.dims), x.natural)


def _split(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x = n.item(0)
    axis = n.axis_at(2, "dim", x.ndim, 0)
    # Torch states the sizes of the parts, however the operator gives them: as one size, as several, or as a number.
    sizes = [info.shape[axis] for info in n.results if info is not None and info.shape is not None]
    return consecutive(w, x, w.tensor(x), axis, sizes)


def _unbind(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import the parts of an axis, one element each."""
    x = n.item(0)
    axis = n.axis_at(1, "dim", x.ndim, 0)
    dims = [d for p, d in enumerate(x.shape) if p != axis]
    parts = consecutive(w, x, w.tensor(x), axis, [const(1)] * len(n.results))
    return [w.of(w.reshape(w.tensor(part), dims), x.natural) for part in parts]


def _cat(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a concatenation; empty tensors of one dim, such as an empty cache, are skipped as in torch."""
    tensors = n.items(0)
    items = [
        i for i in tensors if i.ndim == len(n.dims) and not (len(tensors) > 1 and [as_int(d) for d in i.shape] == [0])
    ]
    axis = n.axis_at(1, "dim", len(n.dims), 0)
    if len(items) == 1:
        return as_item(w, items[0], n.dtype)
    return w.of(w.concat(axis, *(as_value(w, i, n.dtype) for i in items)), all(i.natural for i in items))


def _repeat(w: Writer, n: TorchNode) -> ImportedValue:
    x, times = n.item(0), [dim(t) for t in n.args[1]]
    more = len(times) - x.ndim
    dims_of_x = [*[const(1)] * more, *x.shape]
    repeated_dims: list[Expr] = [d for t, s in zip(times, dims_of_x, strict=True) for d in (t, s)]
    value = w.reshape(w.tensor(x), [d for s in dims_of_x for d in (const(1), s)])
    return w.of(w.reshape(w.broadcast_to(value, tuple(repeated_dims)), n.dims), x.natural)


def _arange(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `start + step * (0, 1 ...)`; start and step may be symbolic."""
    start, step = n.args[0], n.argument(2, "step", 1)
    if len(n.args) == 1:
        start = 0
    if n.dtype.is_int:  # torch drops the fractions
        start, step = (int(e) if isinstance(e, float) else e for e in (start, step))
    elif any(isinstance(e, (float, ImportedValue)) for e in (start, step)):
        steps = w.mul(w.cast(w.iota(n.dims[0]), f64), as_value(w, step, f64))
        return as_item(w, w.of(w.add(steps, as_value(w, start, f64))), n.dtype)
    if any(not isinstance(e, (int, Expr)) for e in (start, step)):
        raise n.refuse("expected whole numbers as start and step")
    jump = number_of(step)
    value = w.iota(n.dims[0])
    if jump is None:
        value = w.mul(value, as_value(w, step, i64))
    elif jump != 1:
        value = w.mul(value, jump)
    first = number_of(start)
    if first is None:
        value = w.add(value, as_value(w, start, i64))
    elif first:
        value = w.add(value, first)
    positive = w.natural(dim(step)) and w.natural(dim(start))
    # The offsets of groups of equal length are such a progression, which `groups` reads.
    return replace(as_item(w, w.of(value, positive), n.dtype), progression=(dim(start), dim(step)))


def _full(w: Writer, n: TorchNode, value: object = None) -> ImportedValue:
    """Import a tensor filled with one value."""
    fill = n.args[1] if value is None else value
    known = number_of(fill)
    if known is None:
        return w.of(w.broadcast_to(as_value(w, fill, n.dtype), n.dims))
    known = bool(known) if n.dtype is bool_ else wrapped(known, n.dtype)
    if not n.dims:
        return w.constant(np.asarray(known, n.dtype.numpy), n.name)
    return w.uniform(n.dims, known, n.dtype)


def _scalar_tensor(w: Writer, n: TorchNode) -> ImportedValue:
    return n.typed(w, 0)


def triangular(upper: bool) -> Handler:
    return lambda w, n: triangle(w, n.item(0), n.number(1, "diagonal", 0), upper)


def _triangle_indices(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the places of a triangle as a constant of two rows."""
    rows, columns, offset = n.number(0, "row"), n.number(1, "col"), n.number(2, "offset", 0)
    places = np.tril_indices(rows, offset, columns) if "tril" in n.op else np.triu_indices(rows, offset, columns)
    return w.constant(np.stack(places).astype(n.dtype.numpy), n.name)


def _as_strided(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a view by strides: the tensor itself, a reshape, or elements gathered by their places in a tensor without gaps."""
    x, strides_of_x = n.item(0), [dim(e) for e in n.kwargs.get("strides", ())]
    dims, strides = ([dim(e) for e in n.args[p]] for p in (1, 2))
    start, first = n.argument(3, "storage_offset"), n.kwargs.get("first", 0)
    shift = const(0) if start is None else w.simplify(sub(dim(start), dim(first)))
    packed = _same_strides(w, x.shape, strides_of_x, _packed(w, x.shape))
    # Without gaps on both sides the view is a reshape; otherwise its elements are gathered, which needs an operand
    # without gaps, whose elements lie where their indices say.
    if as_int(shift) != 0 or (packed and not _same_strides(w, dims, strides, _packed(w, dims))):
        return _gathered_by_strides(w, n, shift, packed)
    unchanged = len(dims) == x.ndim and all(map(w.g.deduction.same, dims, x.shape))
    if unchanged and len(strides_of_x) == x.ndim and _same_strides(w, dims, strides, strides_of_x):
        return x
    if not all(_same_strides(w, d, s, _packed(w, d)) for d, s in ((dims, strides), (x.shape, strides_of_x))):
        raise n.refuse("expected strides of a tensor without gaps, or the strides of the tensor; use reshape or unfold")
    if w.g.deduction.proves(eq(product(dims), product(x.shape))) is Proof.NO:
        return _gathered_by_strides(w, n, shift, packed)
    if not w.require(eq(product(dims), product(x.shape))):
        raise n.refuse("expected as many elements as the tensor has; slice it first")
    return w.of(w.reshape(w.tensor(x), dims), x.natural)


def _gathered_by_strides(w: Writer, n: TorchNode, start: Expr, packed: bool) -> ImportedValue:
    """Import the elements of a tensor without gaps at `start` plus the products of positions and strides."""
    x = n.item(0)
    dims, strides = ([dim(e) for e in n.args[p]] for p in (1, 2))
    size = product(x.shape)
    last = start
    for d, s in zip(dims, strides, strict=True):
        last = plus(last, mul(sub(d, 1), s))
    if not packed or not all(map(w.natural, (start, *strides))):
        raise n.refuse(
            "expected places in a tensor without gaps, or the strides that the tensor has; use reshape or unfold"
        )
    # With strides that are not negative, the last element lies furthest, so this one check covers all.
    if not w.require(lt(last, size)):
        raise n.refuse(f"expected places among the {size!r} elements of the tensor, got {last!r}")
    at = w.size(w.simplify(start))
    for axis, (d, s) in enumerate(zip(dims, strides, strict=True)):
        steps = w.reshape(w.mul(w.iota(d), w.size(w.simplify(s))), [d, *[const(1)] * (len(dims) - 1 - axis)])
        at = w.add(at, steps)
    return w.of(w.take(w.reshape(w.tensor(x), [w.simplify(size)]), 0, at), x.natural)


def _packed(w: Writer, dims: Sequence[Expr]) -> list[Expr]:
    """Return the strides of a tensor without gaps, its last dim the innermost."""
    return [w.simplify(product(dims[p + 1 :])) for p in range(len(dims))]


def _same_strides(w: Writer, dims: Sequence[Expr], a: Iterable[Expr], b: Iterable[Expr]) -> bool:
    """Return whether strides are equal, except for dims of 1, whose strides do not matter."""
    triples = zip(dims, a, b, strict=True)
    return all(as_int(d) == 1 or w.g.deduction.same(w.simplify(s), w.simplify(t)) for d, s, t in triples)


def _pad(w: Writer, n: TorchNode) -> ImportedValue:
    """Import padding with a value, given as (before, after) from the last dim backwards; negative sizes crop."""
    x, pads = n.item(0), [dim(p) for p in n.args[1]]
    fill = number_of(n.argument(2, "value", 0))
    if fill is None:
        raise n.refuse("expected the value of the padding as a number")
    last = list(zip(pads[::2], pads[1::2]))[::-1]
    none: tuple[Expr, Expr] = (const(0), const(0))
    return w.of(pad(w, w.tensor(x), [none] * (x.ndim - len(last)) + last, fill), x.natural and fill >= 0)


def getitem(w: Writer, n: TorchNode) -> ImportedValue:
    """Select one result of a node."""
    results, position = n.args[0], n.number(1, "index")
    item = results[position] if isinstance(results, Sequence) and position < len(results) else None
    if not isinstance(item, ImportedValue):
        raise n.refuse(f"expected result {position} of a node, which is not supported; {n.neighbours}")
    return item


UNSIGNED: Mapping[int, DType] = {1: u8, 2: u16, 4: u32, 8: u64}
"""The unsigned integers by bytes."""


def _view_as_type(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the bits read as another type; of other sizes the last dim is longer or shorter. The lowest bytes come first."""
    x, target = n.item(0), n.dtype
    wide, narrow = x.dtype.bytes, target.bytes
    if x.dtype is target:
        return x
    bits = bits_as(w, w.tensor(x), UNSIGNED[wide])
    if wide > narrow:
        parts = [
            w.cast(w.shift_right(bits, 8 * narrow * k) if k else bits, UNSIGNED[narrow]) for k in range(wide // narrow)
        ]
        bits = w.concat(x.ndim, *(w.expand_dims(p, (x.ndim,)) for p in parts))
    elif wide < narrow:
        pieces = w.reshape(bits, [*n.dims, const(narrow // wide)])
        bits = w.full(n.dims, 0, UNSIGNED[narrow])
        for k in range(narrow // wide):
            piece = w.reshape(w.slice(pieces, x.ndim, const(k), const(k + 1)), n.dims)
            bits = w.add(bits, w.shift_left(w.cast(piece, UNSIGNED[narrow]), 8 * wide * k))
    return w.of(bits_as(w, w.reshape(bits, n.dims), target))


def bits_as(w: Writer, value: Value, target: DType) -> Value:
    """Return the bits of numbers read as another type of as many bits."""
    source = element_of(value)
    return value if source is target else w.emit(BitCast(target, source), value)


HANDLERS: Mapping[str, Handler] = {
    "aten.view.default": _view, "aten.view.dtype": _view_as_type,
    "aten._unsafe_view.default": _view,
    "aten.reshape.default": _view,
    "aten.unsqueeze.default": _view,
    "aten.squeeze.dims": _view,
    "aten.squeeze.dim": _view,
    "aten.squeeze.default": _view,
    "aten.expand.default": _expand,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _reversed_axes,
    "aten.slice.Tensor": _slice,
    "aten.flip.default": _flip,
    "aten.select.int": _select,
    "aten.view_copy.default": _view,
    "aten.permute_copy.default": _permute,
    "aten.narrow_copy.default": _narrow,
    "aten.copy.default": _copy,
    "aten.empty.memory_format": lambda w, n: _full(w, n, 0),
    "aten.unbind_copy.int": _unbind,
    "aten.split_with_sizes.default": _split,
    "aten.split.Tensor": _split,
    "aten.cat.default": _cat,
    "aten.repeat.default": _repeat,
    "aten.arange.start_step": _arange,
    "aten.arange.default": _arange,
    "aten.full.default": _full,
    "aten.full_like.default": _full,
    "aten.zeros_like.default": lambda w, n: _full(w, n, 0),
    "aten.ones_like.default": lambda w, n: _full(w, n, 1),
    "aten.scalar_tensor.default": _scalar_tensor,
    "aten.empty_permuted.default": lambda w, n: _full(w, n, 0),
    "aten.tril.default": triangular(False),
    "aten.triu.default": triangular(True),
    "aten.constant_pad_nd.default": _pad,
    "aten.tril_indices.default": _triangle_indices,
    "aten.triu_indices.default": _triangle_indices,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_copy.default": _as_strided,
    "getitem": getitem,
}  # fmt: skip
