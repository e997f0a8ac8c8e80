"""ATen operators of data movement: views, permutations, concatenation, slices, indexing, creation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import bool_, i32, i64
from relax_tune.ir.core.expr import Expr, as_int, const, eq, lt, mul, sub
from relax_tune.ir.core.expr import add as plus
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.algorithms.data_sizes import coordinates, flat, true_positions
from relax_tune.ir.frontend.shared.compositions import pad, permute, reversed_along, slice_axis, take, triangle
from relax_tune.ir.frontend.shared.indexing import counter_or_tensor, edge, gather, gather_elements, gather_nd
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_item, as_value, dim, number_of
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Slice
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Mul, MulScalar


def _view(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a view as a reshape to the dims that torch states."""
    x = n.item(0)
    if x.uniform is not None:
        return w.uniform(n.dims, x.uniform, x.dtype)
    return w.of(w.reshape(w.tensor(x), n.dims), x.natural)


def _expand(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    if x.uniform is not None:
        return w.uniform(n.dims, x.uniform, x.dtype)
    if x.ndim == len(n.dims) and all(map(w.g.deduction.same, x.shape, n.dims)):
        return x
    return w.of(w.emit(BroadcastTo(n.dims), w.tensor(x)), x.natural)


def _permute(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    return w.of(permute(w, w.tensor(x), n.axes(1, "dims", x.ndim) if x.ndim else ()), x.natural)


def _transpose(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    order = list(range(x.ndim))
    a, b = n.axis(1, "dim0", x.ndim), n.axis(2, "dim1", x.ndim)
    if order:
        order[a], order[b] = order[b], order[a]
    return w.of(permute(w, w.tensor(x), order), x.natural)


def _turned(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    return w.of(permute(w, w.tensor(x), range(x.ndim - 1, -1, -1)), x.natural)


def _slice(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis(1, "dim", x.ndim, 0)
    size, step = x.shape[axis], n.number(4, "step", 1)
    start, end = n.given(2, "start"), n.given(3, "end")
    begin = const(0) if start is None else edge(w, dim(start), size)
    stop = size if end is None else edge(w, dim(end), size)
    value = counter_or_tensor(w, x)
    if step == 1:
        return w.of(slice_axis(w, value, axis, begin, stop), x.natural)
    return w.of(w.emit(Slice(axis, begin, stop, step), value), x.natural)


def _narrow(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `length` elements along an axis from `start` on."""
    x = n.item(0)
    axis = n.axis(1, "dim", x.ndim)
    begin = edge(w, dim(n.args[2]), x.shape[axis])
    end = w.simplify(plus(begin, n.dims[axis]))
    return w.of(slice_axis(w, w.tensor(x), axis, begin, end), x.natural)


def _copy(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the elements of argument 1 in the dims and the type of argument 0."""
    source = as_item(w, n.args[1], n.dtype)
    return w.of(w.emit(BroadcastTo(n.dims), w.tensor(source)), source.natural)


def _flip(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a reversal along some axes."""
    x = n.item(0)
    value = w.tensor(x)
    for axis in n.axes(1, "dims", x.ndim) if n.given(1, "dims") else ():
        value = reversed_along(w, value, axis)
    return w.of(value, x.natural)


def _select(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis(1, "dim", x.ndim)
    at = dim(n.args[2])
    known = as_int(at)
    if known is not None and known < 0:
        at = w.simplify(plus(x.shape[axis], known))
    return w.of(w.reshape(slice_axis(w, w.tensor(x), axis, at, w.simplify(plus(at, 1))), n.dims), x.natural)


def _split(w: Writer, n: TorchNode) -> list[ImportedValue]:
    x = n.item(0)
    axis = n.axis(2, "dim", x.ndim, 0)
    begin: Expr = const(0)
    found = []
    for info in n.results:
        assert info is not None and info.shape is not None
        end = w.simplify(plus(begin, info.shape[axis]))
        found.append(w.of(slice_axis(w, w.tensor(x), axis, begin, end), x.natural))
        begin = end
    return found


def _unbind(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import the parts of an axis, one element each."""
    x = n.item(0)
    axis = n.axis(1, "dim", x.ndim, 0)
    found = []
    for p, info in enumerate(n.results):
        assert info is not None and info.shape is not None
        part = slice_axis(w, w.tensor(x), axis, const(p), const(p + 1))
        found.append(w.of(w.reshape(part, info.shape), x.natural))
    return found


def _cat(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a concatenation; empty tensors of one dim, such as an empty cache, are skipped as in torch."""
    given = n.items(0)
    items = [i for i in given if i.ndim == len(n.dims) and not (len(given) > 1 and [as_int(d) for d in i.shape] == [0])]
    axis = n.axis(1, "dim", len(n.dims), 0)
    if len(items) == 1:
        return as_item(w, items[0], n.dtype)
    return w.of(w.emit(Concat(axis), *(as_value(w, i, n.dtype) for i in items)), all(i.natural for i in items))


def _repeat(w: Writer, n: TorchNode) -> ImportedValue:
    x, times = n.item(0), [dim(t) for t in n.args[1]]
    more = len(times) - x.ndim
    own = [*[const(1)] * more, *x.shape]
    spread: list[Expr] = [d for t, s in zip(times, own, strict=True) for d in (t, s)]
    value = w.reshape(w.tensor(x), [d for s in own for d in (const(1), s)])
    return w.of(w.reshape(w.emit(BroadcastTo(tuple(spread)), value), n.dims), x.natural)


def _embedding(w: Writer, n: TorchNode) -> ImportedValue:
    """Import rows of a table; torch refuses negative indices."""
    return gather(w, n.item(0), 0, replace(n.item(1), natural=True))


def _index_select(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis(1, "dim", x.ndim)
    if not x.ndim:
        return w.of(w.reshape(w.tensor(x), n.dims), x.natural)
    return gather(w, x, axis, replace(n.item(2), natural=True))


def _gather(w: Writer, n: TorchNode) -> ImportedValue:
    x, indices = n.item(0), n.item(2)
    indices = indices if indices.dtype in (i32, i64) else as_item(w, indices, i64)
    return gather_elements(w, x, n.axis(1, "dim", x.ndim), replace(indices, natural=True))


def _index(w: Writer, n: TorchNode) -> ImportedValue:
    """Import advanced indexing: `x[i]`, `x[:, i]`, `x[i, j ...]`, `x[:, i, j]`, `x[i, :, j]`.

    Dims of the indices stand where the first indexed dim was, or in front if the indexed dims are not next to each other."""
    x = n.item(0)
    given = of_places(w, n, n.args[1])
    at = [p for p, i in enumerate(given) if i is not None]
    items = [i for i in given if i is not None]
    if len(items) == 1:
        return gather(w, x, at[0], items[0])
    rest = [p for p in range(x.ndim) if p not in at]
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    lead = broadcast_dims(n, w, items)
    count = len(lead)
    parts: list[Value] = []
    for i in items:
        value = as_value(w, i, i64)
        if tensor_dims(value) != lead:
            value = w.emit(BroadcastTo(lead), value)
        parts.append(w.emit(ExpandDims((count,)), value))
    where = w.of(w.emit(Concat(count), *parts), all(i.natural for i in items))
    turned = w.of(permute(w, w.tensor(x), [*at, *rest]), x.natural)
    found = w.tensor(gather_nd(w, turned, where))
    order = [*range(count, count + front), *range(count), *range(count + front, count + len(rest))]
    return w.of(permute(w, found, order), x.natural)


def of_places(w: Writer, n: TorchNode, given: Sequence[ImportedValue | None]) -> list[ImportedValue | None]:
    """Return indices with the places of its true elements for each mask, a vector for each of its dims."""
    found: list[ImportedValue | None] = []
    for i in given:
        if i is None or i.dtype is not bool_:
            found.append(i)
        elif not i.ndim:
            raise n.refuse("wanted masks with dims as indices, found one without")
        else:
            places = true_positions(w, flat(w, w.tensor(i)))
            found += [w.of(c, True) for c in coordinates(w, places, i.shape)]
    return found


def broadcast_dims(n: TorchNode, w: Writer, items: Sequence[ImportedValue]) -> tuple[Expr, ...]:
    """Return the dims that indices broadcast to. Raises ParseError where that is not certain."""
    dims: list[Expr] = []
    for p in range(-max(i.ndim for i in items), 0):
        found = [i.shape[p] for i in items if i.ndim >= -p and as_int(i.shape[p]) != 1]
        if any(not w.g.deduction.same(found[0], f) for f in found):
            raise n.refuse(f"wanted indices that broadcast for certain, found {[i.info for i in items]!r}")
        dims.append(found[0] if found else const(1))
    return tuple(dims)


def _arange(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `start + step * (0, 1 ...)`; start and step may be symbolic."""
    start, step = n.args[0], n.given(2, "step", 1)
    if len(n.args) == 1:
        start = 0
    if any(not isinstance(e, (int, Expr)) for e in (start, step)):
        raise n.refuse("wanted whole numbers as start and step")
    jump = number_of(step)
    value = w.emit(Iota(n.dims[0]))
    if jump is None:
        value = w.emit(Mul(), value, as_value(w, step, i64))
    elif jump != 1:
        value = w.emit(MulScalar(jump), value)
    first = number_of(start)
    if first is None:
        value = w.emit(Add(), value, as_value(w, start, i64))
    elif first:
        value = w.emit(AddScalar(first), value)
    positive = w.natural(dim(step)) and w.natural(dim(start))
    return replace(as_item(w, w.of(value, positive), n.dtype), progression=(dim(start), dim(step)))


def _full(w: Writer, n: TorchNode, value: object = None) -> ImportedValue:
    """Import a tensor filled with one value."""
    given = n.args[1] if value is None else value
    known = number_of(given)
    if known is None:
        return w.of(w.emit(BroadcastTo(n.dims), as_value(w, given, n.dtype)))
    known = bool(known) if n.dtype is bool_ else known
    if not n.dims:
        return w.constant(np.asarray(known, n.dtype.numpy), n.name)
    return w.uniform(n.dims, known, n.dtype)


def _scalar_tensor(w: Writer, n: TorchNode) -> ImportedValue:
    return as_item(w, n.args[0], n.dtype)


def triangular(upper: bool) -> Handler:
    return lambda w, n: triangle(w, n.item(0), n.number(1, "diagonal", 0), upper)


def _triangle_indices(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the places of a triangle as a constant of two rows."""
    rows, columns, offset = n.number(0, "row"), n.number(1, "col"), n.number(2, "offset", 0)
    found = np.tril_indices(rows, offset, columns) if "tril" in n.op else np.triu_indices(rows, offset, columns)
    return w.constant(np.stack(found).astype(n.dtype.numpy), n.name)


def _as_strided(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a view by strides: the tensor itself, a reshape, or elements gathered by their places in a tensor without gaps."""
    x, own = n.item(0), [dim(e) for e in n.kwargs.get("strides", ())]
    dims, strides = ([dim(e) for e in n.args[p]] for p in (1, 2))
    start, first = n.given(3, "storage_offset"), n.kwargs.get("first", 0)
    moved = const(0) if start is None else w.simplify(sub(dim(start), dim(first)))
    packed = _same_strides(w, x.shape, own, _packed(w, x.shape))
    if as_int(moved) != 0 or (packed and not _same_strides(w, dims, strides, _packed(w, dims))):
        return _gathered_by_strides(w, n, moved, packed)
    kept = len(dims) == x.ndim and all(map(w.g.deduction.same, dims, x.shape))
    if kept and len(own) == x.ndim and _same_strides(w, dims, strides, own):
        return x
    if not all(_same_strides(w, d, s, _packed(w, d)) for d, s in ((dims, strides), (x.shape, own))):
        raise n.refuse("wanted strides of a tensor without gaps, or those that the tensor has; use reshape or unfold")
    if w.g.deduction.proves(eq(product(dims), product(x.shape))) is Proof.NO:
        return _gathered_by_strides(w, n, moved, packed)
    if not w.require(eq(product(dims), product(x.shape))):
        raise n.refuse("wanted as many elements as the tensor has; slice it first")
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
            "wanted places in a tensor without gaps, or the strides that the tensor has; use reshape or unfold"
        )
    if not w.require(lt(last, size)):
        raise n.refuse(f"wanted places among the {size!r} elements of the tensor, found {last!r}")
    at = w.size(w.simplify(start))
    for axis, (d, s) in enumerate(zip(dims, strides, strict=True)):
        own = w.reshape(
            w.emit(Mul(), w.emit(Iota(d)), w.size(w.simplify(s))), [d, *[const(1)] * (len(dims) - 1 - axis)]
        )
        at = w.emit(Add(), at, own)
    return w.of(take(w, w.reshape(w.tensor(x), [w.simplify(size)]), 0, at), x.natural)


def _packed(w: Writer, dims: Sequence[Expr]) -> list[Expr]:
    """Return the strides of a tensor without gaps, its last dim the innermost."""
    return [w.simplify(product(dims[p + 1 :])) for p in range(len(dims))]


def _same_strides(w: Writer, dims: Sequence[Expr], a: Iterable[Expr], b: Iterable[Expr]) -> bool:
    """Return whether strides are equal but for those of dims of 1, which nothing depends on."""
    triples = zip(dims, a, b, strict=True)
    return all(as_int(d) == 1 or w.g.deduction.same(w.simplify(s), w.simplify(t)) for d, s, t in triples)


def _pad(w: Writer, n: TorchNode) -> ImportedValue:
    """Import padding with a value, given as (before, after) from the last dim backwards; negative sizes crop."""
    x, pads = n.item(0), [dim(p) for p in n.args[1]]
    fill = number_of(n.given(2, "value", 0))
    if fill is None:
        raise n.refuse("wanted the value of the padding as a number")
    last = list(zip(pads[::2], pads[1::2]))[::-1]
    none: tuple[Expr, Expr] = (const(0), const(0))
    return w.of(pad(w, w.tensor(x), [none] * (x.ndim - len(last)) + last, fill), x.natural and fill >= 0)


def getitem(w: Writer, n: TorchNode) -> ImportedValue:
    """Select one result of a node."""
    found, position = n.args[0], n.number(1, "index")
    item = found[position] if isinstance(found, Sequence) and position < len(found) else None
    if not isinstance(item, ImportedValue):
        raise n.refuse(f"wanted result {position} of a node, which is not supported; {n.beside}")
    return item


HANDLERS: Mapping[str, Handler] = {
    "aten.view.default": _view, "aten._unsafe_view.default": _view, "aten.reshape.default": _view, "aten.unsqueeze.default": _view,
    "aten.squeeze.dims": _view, "aten.squeeze.dim": _view, "aten.squeeze.default": _view, "aten.expand.default": _expand,
    "aten.permute.default": _permute, "aten.transpose.int": _transpose, "aten.t.default": _turned,
    "aten.slice.Tensor": _slice, "aten.flip.default": _flip, "aten.select.int": _select,
    "aten.view_copy.default": _view, "aten.permute_copy.default": _permute, "aten.narrow_copy.default": _narrow,
    "aten.copy.default": _copy, "aten.empty.memory_format": lambda w, n: _full(w, n, 0),
    "aten.unbind_copy.int": _unbind,
    "aten.split_with_sizes.default": _split, "aten.split.Tensor": _split, "aten.cat.default": _cat, "aten.repeat.default": _repeat,
    "aten.embedding.default": _embedding, "aten.index_select.default": _index_select, "aten.gather.default": _gather,
    "aten.index.Tensor": _index, "aten.arange.start_step": _arange, "aten.arange.default": _arange, "aten.full.default": _full,
    "aten.full_like.default": _full, "aten.zeros_like.default": lambda w, n: _full(w, n, 0),
    "aten.ones_like.default": lambda w, n: _full(w, n, 1), "aten.scalar_tensor.default": _scalar_tensor,
    "aten.empty_permuted.default": lambda w, n: _full(w, n, 0),
    "aten.tril.default": triangular(False), "aten.triu.default": triangular(True), "aten.constant_pad_nd.default": _pad,
    "aten.tril_indices.default": _triangle_indices, "aten.triu_indices.default": _triangle_indices,
    "aten.as_strided.default": _as_strided, "aten.as_strided_copy.default": _as_strided, "getitem": getitem,
}  # fmt: skip
