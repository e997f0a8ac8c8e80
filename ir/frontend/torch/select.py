"""ATen operators that sort, scatter, or pick elements by patterns of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from relax_tune.ir.core.dtype import bool_, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.expr import add as plus
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.algorithms.data_sizes import flat
from relax_tune.ir.frontend.shared.compositions import cast_to, permute, slice_axis, take
from relax_tune.ir.frontend.shared.indexing import edge, natural_indices
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.frontend.torch.control.data_sizes import masked_rows, ordered, require_as_many
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_item, as_value, dim
from relax_tune.ir.frontend.torch.shape import broadcast_dims, of_places
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements, GatherND
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Slice
from relax_tune.ir.op.indexing.scatter import Mode, Scatter, ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, MaximumScalar, MulScalar
from relax_tune.ir.op.math.logic import LogicalOr, Where
from relax_tune.ir.op.reduction.scan import CumProd, TopK

REDUCTIONS: Mapping[str, Mode] = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def first_of_all(w: Writer, x: ImportedValue) -> list[ImportedValue]:
    """Return (value, index) of the only element of a tensor without dims."""
    return [x, w.of(w.literal(0, i64), True)]


def _sort(w: Writer, n: TorchNode) -> list[ImportedValue]:
    """Import a sort as the places of all elements, best first; it is always stable."""
    x = n.item(0)
    at = 2 if n.op == "aten.sort.stable" else 1
    if not x.ndim:
        return first_of_all(w, x)
    axis = n.axis(at, "dim", x.ndim, -1)
    value = ordered(w, x)
    where = w.emit(TopK(x.shape[axis], axis, bool(n.given(at + 1, "descending", False))), value)
    return [w.of(w.emit(GatherElements(axis), w.tensor(x), where), x.natural), w.of(where, True)]


def _cumprod(w: Writer, n: TorchNode) -> ImportedValue:
    x = as_item(w, n.item(0), n.dtype)
    return w.of(w.emit(CumProd(n.axis(1, "dim", x.ndim)), w.tensor(x)), x.natural) if x.ndim else x


def scattered(w: Writer, op: Scatter, x: ImportedValue, indices: Value, updates: Value) -> ImportedValue:
    """Emit a scatter; truth values are scattered as bytes."""
    value = cast_to(w, updates, x.dtype, u8) if x.dtype is bool_ else updates
    return w.of(cast_to(w, w.emit(op, ordered(w, x), indices, value), u8 if x.dtype is bool_ else x.dtype, x.dtype))


def scatter(mode: Mode | None) -> Handler:
    """Make a handler of a scatter along an axis; None: the reduction that argument 4 names."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, indices = n.item(0), n.item(2)
        if not x.ndim:
            raise n.refuse("wanted a tensor with dims; unsqueeze it first")
        axis = n.axis(1, "dim", x.ndim)
        fewer = [p for p in range(x.ndim) if p != axis and not w.g.deduction.same(x.shape[p], indices.shape[p])]
        given = n.args[3]
        if isinstance(given, ImportedValue) and given.ndim:
            updates = as_value(w, given, n.dtype)
            for p, d in enumerate(indices.shape):
                updates = slice_axis(w, updates, p, const(0), d)
        else:
            updates = w.emit(BroadcastTo(indices.shape), as_value(w, given, n.dtype))
        part = w.tensor(x)
        for p in fewer:
            part = slice_axis(w, part, p, const(0), indices.shape[p])
        into, where = w.of(part), w.tensor(indices)
        if mode is None:
            given = str(n.args[4]), bool(n.given(5, "include_self", True))
            found = _reduced(w, n, *given, into, where, updates, lambda m: ScatterElements(m, axis))
        else:
            found = w.tensor(scattered(w, ScatterElements(mode, axis), into, where, updates))
        return w.of(_beyond(w, x, found, fewer, indices.shape))

    return handler


def _reduced(
    w: Writer,
    n: TorchNode,
    name: str,
    own: bool,
    x: ImportedValue,
    where: Value,
    updates: Value,
    make: Callable[[Mode], Scatter],
) -> Value:
    """Emit a scatter by the reduction that torch calls `name`. own: elements of `x` that are hit take part."""
    mode: Mode | None = "add" if name == "mean" else REDUCTIONS.get(name)
    if mode is None or (name == "mean" and not x.dtype.is_float) or (x.dtype is bool_ and not own):
        raise n.refuse(f"wanted a reduction of {', '.join(REDUCTIONS)}, or mean of floats, found {name} of {x.dtype}")
    dims = tensor_dims(updates)
    if not own:
        low, high = (-math.inf, math.inf) if x.dtype.is_float else x.dtype.limits
        neutral = w.full(dims, {"add": 0, "mul": 1, "max": low, "min": high}[mode], x.dtype)
        x = scattered(w, make("replace"), x, where, neutral)
    found = w.tensor(scattered(w, make(mode), x, where, updates))
    if name != "mean":
        return found
    ones = w.full(dims, 1.0, x.dtype)
    count = w.tensor(scattered(w, make("add"), w.of(w.full(x.shape, float(own), x.dtype)), where, ones))
    return w.emit(Div(), found, w.emit(MaximumScalar(1.0), count))


def _index_reduce(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a reduction of rows of a source into rows of `x` along an axis."""
    x, indices = n.item(0), n.item(2)
    axis = n.axis(1, "dim", x.ndim)
    if not x.ndim:
        raise n.refuse("wanted a tensor with dims; unsqueeze it first")
    order = [axis, *(p for p in range(x.ndim) if p != axis)]
    where = w.reshape(w.tensor(indices), [w.simplify(product(indices.shape)), const(1)])
    updates = permute(w, as_value(w, n.item(3), n.dtype), order)
    front = w.of(permute(w, w.tensor(x), order))
    own = bool(n.given(5, "include_self", True))
    found = _reduced(w, n, str(n.args[4]), own, front, where, updates, ScatterND)
    return w.of(permute(w, found, [order.index(p) for p in range(x.ndim)]))


def _put(w: Writer, n: TorchNode) -> ImportedValue:
    """Import elements of `x`, counted row by row, replaced or added to."""
    x, indices = n.item(0), n.item(1)
    size, count = (w.simplify(product(i.shape)) for i in (x, indices))
    where = w.reshape(natural_indices(w, as_item(w, indices, i64), size), [count, const(1)])
    updates = w.reshape(as_value(w, n.item(2), n.dtype), [count])
    mode: Mode = "add" if n.given(3, "accumulate", False) else "replace"
    found = scattered(w, ScatterND(mode), w.of(w.reshape(w.tensor(x), [size])), where, updates)
    return w.of(w.reshape(w.tensor(found), n.dims))


def _beyond(w: Writer, x: ImportedValue, value: Value, axes: Sequence[int], sizes: Sequence[Expr]) -> Value:
    """Return `value`, a block from the origin with `sizes` along `axes`, with the elements of `x` around it."""
    for done, p in enumerate(axes):
        rest = w.emit(Slice(p, sizes[p], x.shape[p]), w.tensor(x))
        for q in axes[done + 1 :]:
            rest = slice_axis(w, rest, q, const(0), sizes[q])
        value = w.emit(Concat(p), value, rest)
    return value


def _index_put(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x[i, :, j ...] = values`, or `x[mask] = value`; `accumulate` adds."""
    x, given = n.item(0), list(n.args[1])
    items, at = n.items(1), [p for p, i in enumerate(given) if i is not None]
    adds = bool(n.given(3, "accumulate", False))
    if [i.dtype for i in items] == [bool_] and at == [0]:
        same = n.item(2).ndim <= x.ndim - items[0].ndim
        written = as_value(w, n.item(2), n.dtype)
        if same or all(as_int(d) == 1 for d in n.item(2).shape):
            written = w.reshape(written, [*n.item(2).shape] if same else [])
        else:
            require_as_many(w, w.tensor(items[0]), n.item(2).shape[0])
            taken = masked_rows(w, flat(w, w.tensor(items[0])), written)
            written = w.reshape(taken, [*items[0].shape, *tensor_dims(taken)[1:]])
        return _masked(w, n, x, items[0], adds, written)
    if not x.ndim:
        raise n.refuse("wanted a tensor with dims; unsqueeze it first")
    given = of_places(w, n, given)
    items, at = [i for i in given if i is not None], [p for p, i in enumerate(given) if i is not None]
    lead = broadcast_dims(n, w, items)
    rows, depth = w.simplify(product(lead)), len(items)
    parts = [
        w.emit(
            ExpandDims((1,)),
            w.reshape(w.emit(BroadcastTo(lead), natural_indices(w, as_item(w, i, i64), x.shape[p])), [rows]),
        )
        for p, i in zip(at, items)
    ]
    where = parts[0] if depth == 1 else w.emit(Concat(1), *parts)
    rest = [p for p in range(x.ndim) if p not in at]
    first = at[0] if at == list(range(at[0], at[0] + depth)) else 0
    dims = [x.shape[p] for p in rest]
    wanted = (*dims[:first], *lead, *dims[first:])
    updates = w.emit(BroadcastTo(wanted), w.agreeing((as_value(w, n.item(2), n.dtype), w.full(wanted, 0, n.dtype)))[0])
    last = first + len(lead)
    updates = permute(w, updates, [*range(first, last), *range(first), *range(last, len(lead) + len(rest))])
    order = [*at, *rest]
    mode: Mode = "add" if adds else "replace"
    front = w.of(permute(w, w.tensor(x), order), x.natural)
    found = scattered(w, ScatterND(mode), front, where, w.reshape(updates, [rows, *dims]))
    return w.of(permute(w, w.tensor(found), [order.index(p) for p in range(x.ndim)]))


def _masked(w: Writer, n: TorchNode, x: ImportedValue, mask: ImportedValue, adds: bool, value: Value) -> ImportedValue:
    """Import values, broadcast to `x`, written wherever a mask of the first dims is true."""
    if adds:
        value = w.emit(LogicalOr() if n.dtype is bool_ else Add(), w.tensor(x), value)
    spread = w.reshape(w.tensor(mask), [*mask.shape, *[const(1)] * (x.ndim - mask.ndim)])
    return w.of(w.emit(Where(), spread, value, w.tensor(x)))


def _between(w: Writer, x: ImportedValue, axis: int, begin: Expr, end: Expr, middle: Value) -> ImportedValue:
    """Replace `x[begin:end]` along an axis."""
    value, size = w.tensor(x), x.shape[axis]
    parts = [slice_axis(w, value, axis, const(0), begin), middle, slice_axis(w, value, axis, end, size)]
    kept = [p for p in parts if as_int(tensor_dims(p)[axis]) != 0]
    return w.of(w.emit(Concat(axis), *kept) if len(kept) > 1 else kept[0])


def _slice_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis(2, "dim", x.ndim, 0)
    if n.number(5, "step", 1) != 1:
        raise n.refuse("wanted step 1")
    start, source = n.given(3, "start"), as_value(w, n.item(1), n.dtype)
    begin = const(0) if start is None else edge(w, dim(start), x.shape[axis])
    return _between(w, x, axis, begin, w.simplify(plus(begin, tensor_dims(source)[axis])), source)


def _select_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis(2, "dim", x.ndim)
    begin = edge(w, dim(n.args[3]), x.shape[axis])
    source = w.emit(ExpandDims((axis,)), as_value(w, n.item(1), n.dtype))
    return _between(w, x, axis, begin, w.simplify(plus(begin, 1)), source)


def diagonal_places(w: Writer, size: Expr, offset: int) -> Value:
    """Return the (row, column) of each element of a diagonal."""
    steps = w.emit(Iota(size))
    rows, columns = (steps if k <= 0 else w.emit(AddScalar(k), steps) for k in (-offset, offset))
    return w.emit(Concat(1), *(w.emit(ExpandDims((1,)), p) for p in (rows, columns)))


def _diagonal(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the diagonal of two dims, which becomes the last dim."""
    x, offset = n.item(0), n.number(1, "offset", 0)
    axes = (n.axis(2, "dim1", x.ndim, 0), n.axis(3, "dim2", x.ndim, 1))
    rest = [p for p in range(x.ndim) if p not in axes]
    value = permute(w, w.tensor(x), [*axes, *rest])
    found = w.emit(GatherND(), value, diagonal_places(w, n.dims[-1], offset))
    return w.of(permute(w, found, [*range(1, len(rest) + 1), 0]), x.natural)


def _unfold(w: Writer, n: TorchNode) -> ImportedValue:
    """Import windows of `size` elements, `step` apart, along an axis; they become the last dim."""
    x, size, step = n.item(0), n.number(2, "size"), n.number(3, "step")
    axis = n.axis(1, "dimension", x.ndim)
    if not x.ndim:
        return w.of(w.reshape(w.tensor(x), n.dims), x.natural)
    first = w.emit(ExpandDims((1,)), w.emit(MulScalar(step), w.emit(Iota(n.dims[axis]))))
    where = w.emit(Add(), first, w.emit(Iota(const(size))))
    found = take(w, w.tensor(x), axis, where)
    return w.of(permute(w, found, [*(p for p in range(x.ndim + 1) if p != axis + 1), axis + 1]), x.natural)


HANDLERS: Mapping[str, Handler] = {
    "aten.sort.default": _sort, "aten.sort.stable": _sort, "aten.cumprod.default": _cumprod,
    "aten.scatter.src": scatter("replace"), "aten.scatter.value": scatter("replace"), "aten.scatter_add.default": scatter("add"),
    "aten.scatter_reduce.two": scatter(None), "aten.index_put.default": _index_put,
    "aten.index_reduce.default": _index_reduce, "aten.put.default": _put, "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter, "aten.diagonal.default": _diagonal, "aten.unfold.default": _unfold,
}  # fmt: skip
