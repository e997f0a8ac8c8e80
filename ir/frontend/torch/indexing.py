"""ATen gathers and scatters, indices, and elements that patterns of positions pick.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.ir.core.dtype import bool_, i32, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const, maximum
from relax_tune.ir.core.expr import add as plus
from relax_tune.ir.core.expr import sub as minus
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.indexing import (
    edge,
    gather,
    gather_elements,
    gather_nd,
    natural_indices,
    surrounded,
)
from relax_tune.ir.frontend.shared.handlers.reduce import ordered
from relax_tune.ir.frontend.shared.handlers.sizes import coordinates, flat, true_positions
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode, as_item, as_value, dim
from relax_tune.ir.frontend.torch.sizes import masked_rows, require_as_many
from relax_tune.ir.op.base import product
from relax_tune.ir.op.indexing.gather import GatherND
from relax_tune.ir.op.indexing.scatter import Mode, Scatter, ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.ir.op.math.logic import LogicalOr


def _embedding(w: Writer, n: TorchNode) -> ImportedValue:
    """Import rows of a table; torch refuses negative indices."""
    return gather(w, n.item(0), 0, replace(n.item(1), natural=True))


def _index_select(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis_at(1, "dim", x.ndim)
    if not x.ndim:
        return w.of(w.reshape(w.tensor(x), n.dims), x.natural)
    return gather(w, x, axis, replace(n.item(2), natural=True))


def _gather(w: Writer, n: TorchNode) -> ImportedValue:
    x, indices = n.item(0), n.item(2)
    indices = indices if indices.dtype in (i32, i64) else as_item(w, indices, i64)
    return gather_elements(w, x, n.axis_at(1, "dim", x.ndim), replace(indices, natural=True))


def _index(w: Writer, n: TorchNode) -> ImportedValue:
    """Import advanced indexing: `x[i]`, `x[:, i]`, `x[i, j ...]`, `x[:, i, j]`, `x[i, :, j]`.

    The dims of the indices replace the first indexed dim, or come first if the indexed dims are not adjacent."""
    x = n.item(0)
    indices = of_places(w, n, n.args[1])
    at = [p for p, i in enumerate(indices) if i is not None]
    items = [i for i in indices if i is not None]
    if len(items) == 1:
        return gather(w, x, at[0], items[0])
    rest = [p for p in range(x.ndim) if p not in at]
    # NumPy's rule: the dims of adjacent indices take their place; of separate ones they come first.
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    lead = broadcast_dims(n, w, items)
    count = len(lead)
    parts: list[Value] = []
    for i in items:
        value = as_value(w, i, i64)
        if tensor_dims(value) != lead:
            value = w.broadcast_to(value, lead)
        parts.append(w.expand_dims(value, (count,)))
    where = w.of(w.concat(count, *parts), all(i.natural for i in items))
    permuted = w.of(w.permute(w.tensor(x), [*at, *rest]), x.natural)
    rows = w.tensor(gather_nd(w, permuted, where))
    order = [*range(count, count + front), *range(count), *range(count + front, count + len(rest))]
    return w.of(w.permute(rows, order), x.natural)


def of_places(w: Writer, n: TorchNode, items: Sequence[ImportedValue | None]) -> list[ImportedValue | None]:
    """Return indices with the places of its true elements for each mask, a vector for each of its dims."""
    indices: list[ImportedValue | None] = []
    for i in items:
        if i is None or i.dtype is not bool_:
            indices.append(i)
        elif not i.ndim:
            raise n.refuse("expected masks with dims as indices, got one without")
        else:
            places = true_positions(w, flat(w, w.tensor(i)))
            indices += [w.of(c, True) for c in coordinates(w, places, i.shape)]
    return indices


def broadcast_dims(n: TorchNode, w: Writer, items: Sequence[ImportedValue]) -> tuple[Expr, ...]:
    """Return the dims that indices broadcast to. Raises ParseError where that is not certain."""
    dims: list[Expr] = []
    for p in range(-max(i.ndim for i in items), 0):
        sizes = [i.shape[p] for i in items if i.ndim >= -p and as_int(i.shape[p]) != 1]
        if any(not w.g.deduction.same(sizes[0], f) for f in sizes):
            raise n.refuse(f"expected indices that broadcast for certain, got {[i.info for i in items]!r}")
        dims.append(sizes[0] if sizes else const(1))
    return tuple(dims)


REDUCTIONS: Mapping[str, Mode] = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def scattered(w: Writer, op: Scatter, x: ImportedValue, indices: Value, updates: Value) -> ImportedValue:
    """Emit a scatter; truth values are scattered as bytes."""
    value = w.cast(updates, u8) if x.dtype is bool_ else updates
    return w.of(w.cast(w.emit(op, ordered(w, x), indices, value), x.dtype))


def scatter(mode: Mode | None) -> Handler:
    """Make a handler of a scatter along an axis; None: the reduction that argument 4 names."""

    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        x, indices = n.item(0), n.item(2)
        if not x.ndim:
            raise n.refuse("expected a tensor with dims; unsqueeze it first")
        axis = n.axis_at(1, "dim", x.ndim)
        fewer = [p for p in range(x.ndim) if p != axis and not w.g.deduction.same(x.shape[p], indices.shape[p])]
        source = n.args[3]
        if isinstance(source, ImportedValue) and source.ndim:
            updates = as_value(w, source, n.dtype)
            for p, d in enumerate(indices.shape):
                updates = w.slice(updates, p, const(0), d)
        else:
            updates = w.broadcast_to(as_value(w, source, n.dtype), indices.shape)
        part = w.tensor(x)
        for p in fewer:
            part = w.slice(part, p, const(0), indices.shape[p])
        into, where = w.of(part), w.tensor(indices)
        if mode is None:
            source = str(n.args[4]), bool(n.argument(5, "include_self", True))
            y = _reduced(w, n, *source, into, where, updates, lambda m: ScatterElements(m, axis))
        else:
            y = w.tensor(scattered(w, ScatterElements(mode, axis), into, where, updates))
        return w.of(surrounded(w, x, y, fewer, indices.shape))

    return handler


def _reduced(
    w: Writer,
    n: TorchNode,
    name: str,
    include_self: bool,
    x: ImportedValue,
    where: Value,
    updates: Value,
    make: Callable[[Mode], Scatter],
) -> Value:
    """Emit a scatter by the reduction that torch calls `name`. include_self: Whether the elements of `x` take part."""
    mode: Mode | None = "add" if name == "mean" else REDUCTIONS.get(name)
    if mode is None or (name == "mean" and not x.dtype.is_float) or (x.dtype is bool_ and not include_self):
        raise n.refuse(f"expected a reduction of {', '.join(REDUCTIONS)}, or mean of floats, got {name} of {x.dtype}")
    dims = tensor_dims(updates)
    if not include_self:
        low, high = (-math.inf, math.inf) if x.dtype.is_float else x.dtype.limits
        # Only the elements that are written lose their old value: the neutral element is scattered there first.
        neutral = w.full(dims, {"add": 0, "mul": 1, "max": low, "min": high}[mode], x.dtype)
        x = scattered(w, make("replace"), x, where, neutral)
    y = w.tensor(scattered(w, make(mode), x, where, updates))
    if name != "mean":
        return y
    ones = w.full(dims, 1.0, x.dtype)
    count = w.tensor(scattered(w, make("add"), w.of(w.full(x.shape, float(include_self), x.dtype)), where, ones))
    # Elements without updates have a count of 0 if the old ones do not count; they stay as they are.
    return w.div(y, w.maximum(count, 1.0))


def _index_reduce(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a reduction of rows of a source into rows of `x` along an axis."""
    x, indices = n.item(0), n.item(2)
    axis = n.axis_at(1, "dim", x.ndim)
    if not x.ndim:
        raise n.refuse("expected a tensor with dims; unsqueeze it first")
    order = [axis, *(p for p in range(x.ndim) if p != axis)]
    where = w.reshape(w.tensor(indices), [w.simplify(product(indices.shape)), const(1)])
    updates = w.permute(n.operand(w, 3), order)
    front = w.of(w.permute(w.tensor(x), order))
    include_self = bool(n.argument(5, "include_self", True))
    y = _reduced(w, n, str(n.args[4]), include_self, front, where, updates, ScatterND)
    return w.of(w.permute(y, [order.index(p) for p in range(x.ndim)]))


def _put(w: Writer, n: TorchNode) -> ImportedValue:
    """Import elements of `x`, counted row by row, replaced or added to."""
    x, indices = n.item(0), n.item(1)
    size, count = (w.simplify(product(i.shape)) for i in (x, indices))
    where = w.reshape(natural_indices(w, as_item(w, indices, i64), size), [count, const(1)])
    updates = w.reshape(n.operand(w, 2), [count])
    mode: Mode = "add" if n.argument(3, "accumulate", False) else "replace"
    y = scattered(w, ScatterND(mode), w.of(w.reshape(w.tensor(x), [size])), where, updates)
    return w.of(w.reshape(w.tensor(y), n.dims))


def _index_put(w: Writer, n: TorchNode) -> ImportedValue:
    """Import `x[i, :, j ...] = values`, or `x[mask] = value`; `accumulate` adds."""
    x, indices = n.item(0), list(n.args[1])
    items, at = n.items(1), [p for p, i in enumerate(indices) if i is not None]
    adds = bool(n.argument(3, "accumulate", False))
    if [i.dtype for i in items] == [bool_] and at == [0]:
        # With as many dims as a row, the value is broadcast to every true place; with one more it has a row for each
        # of them.
        same = n.item(2).ndim <= x.ndim - items[0].ndim
        written = n.operand(w, 2)
        if same or all(as_int(d) == 1 for d in n.item(2).shape):
            written = w.reshape(written, [*n.item(2).shape] if same else [])
        else:
            require_as_many(w, w.tensor(items[0]), n.item(2).shape[0])
            rows_of_mask = masked_rows(w, flat(w, w.tensor(items[0])), written)
            written = w.reshape(rows_of_mask, [*items[0].shape, *tensor_dims(rows_of_mask)[1:]])
        return _masked(w, n, x, items[0], adds, written)
    if not x.ndim:
        raise n.refuse("expected a tensor with dims; unsqueeze it first")
    indices = of_places(w, n, indices)
    items, at = [i for i in indices if i is not None], [p for p, i in enumerate(indices) if i is not None]
    lead = broadcast_dims(n, w, items)
    rows, depth = w.simplify(product(lead)), len(items)
    parts = [
        w.expand_dims(w.reshape(w.broadcast_to(natural_indices(w, as_item(w, i, i64), x.shape[p]), lead), [rows]), (1,))
        for p, i in zip(at, items)
    ]
    where = parts[0] if depth == 1 else w.concat(1, *parts)
    rest = [p for p in range(x.ndim) if p not in at]
    first = at[0] if at == list(range(at[0], at[0] + depth)) else 0
    dims = [x.shape[p] for p in rest]
    target = (*dims[:first], *lead, *dims[first:])
    updates = w.broadcast_to(w.agreeing((n.operand(w, 2), w.full(target, 0, n.dtype)))[0], target)
    last = first + len(lead)
    updates = w.permute(updates, [*range(first, last), *range(first), *range(last, len(lead) + len(rest))])
    order = [*at, *rest]
    mode: Mode = "add" if adds else "replace"
    front = w.of(w.permute(w.tensor(x), order), x.natural)
    y = scattered(w, ScatterND(mode), front, where, w.reshape(updates, [rows, *dims]))
    return w.of(w.permute(w.tensor(y), [order.index(p) for p in range(x.ndim)]))


def _masked(w: Writer, n: TorchNode, x: ImportedValue, mask: ImportedValue, adds: bool, value: Value) -> ImportedValue:
    """Import values, broadcast to `x`, written wherever a mask of the first dims is true."""
    if adds:
        value = w.emit(LogicalOr() if n.dtype is bool_ else Add(), w.tensor(x), value)
    wide_mask = w.reshape(w.tensor(mask), [*mask.shape, *[const(1)] * (x.ndim - mask.ndim)])
    return w.of(w.where(wide_mask, value, w.tensor(x)))


def _between(w: Writer, x: ImportedValue, axis: int, begin: Expr, end: Expr, middle: Value) -> ImportedValue:
    """Replace `x[begin:end]` along an axis."""
    value, size = w.tensor(x), x.shape[axis]
    parts = [w.slice(value, axis, const(0), begin), middle, w.slice(value, axis, end, size)]
    filled = [p for p in parts if as_int(tensor_dims(p)[axis]) != 0]
    return w.of(w.concat(axis, *filled) if len(filled) > 1 else filled[0])


def _slice_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis_at(2, "dim", x.ndim, 0)
    step = n.number(5, "step", 1)
    start, source = n.argument(3, "start"), n.operand(w, 1)
    begin = const(0) if start is None else edge(w, dim(start), x.shape[axis])
    if step != 1:
        # update k takes place begin + k * step: places between, and behind the last update, keep their elements
        size, count = x.shape[axis], tensor_dims(source)[axis]
        behind = w.sub(w.iota(size), w.size(begin))
        update = w.quotient(behind, w.size(const(step)))
        hit = w.logical_and(w.equal(w.mul(update, step), behind), w.less(update, w.size(count)))
        hit = w.logical_and(hit, w.less_equal(0, behind))
        place = w.maximum(w.minimum(update, w.size(w.simplify(minus(maximum(count, 1), 1)))), 0)
        some = (
            source
            if as_int(count) != 0
            else w.full([*tensor_dims(source)[:axis], const(1), *tensor_dims(source)[axis + 1 :]], 0, x.dtype)
        )
        spread = w.take(some, axis, place)
        wide = w.reshape(hit, [size if p == axis else const(1) for p in range(x.ndim)])
        return w.of(w.where(wide, spread, w.tensor(x)))
    return _between(w, x, axis, begin, w.simplify(plus(begin, tensor_dims(source)[axis])), source)


def _select_scatter(w: Writer, n: TorchNode) -> ImportedValue:
    x = n.item(0)
    axis = n.axis_at(2, "dim", x.ndim)
    begin = edge(w, dim(n.args[3]), x.shape[axis])
    source = w.expand_dims(n.operand(w, 1), (axis,))
    return _between(w, x, axis, begin, w.simplify(plus(begin, 1)), source)


def diagonal_places(w: Writer, size: Expr, offset: int) -> Value:
    """Return the (row, column) of each element of a diagonal."""
    steps = w.iota(size)
    rows, columns = (steps if k <= 0 else w.add(steps, k) for k in (-offset, offset))
    return w.concat(1, *(w.expand_dims(p, (1,)) for p in (rows, columns)))


def _diagonal(w: Writer, n: TorchNode) -> ImportedValue:
    """Import the diagonal of two dims, which becomes the last dim."""
    x, offset = n.item(0), n.number(1, "offset", 0)
    axes = (n.axis_at(2, "dim1", x.ndim, 0), n.axis_at(3, "dim2", x.ndim, 1))
    rest = [p for p in range(x.ndim) if p not in axes]
    value = w.permute(w.tensor(x), [*axes, *rest])
    elements = w.emit(GatherND(), value, diagonal_places(w, n.dims[-1], offset))
    return w.of(w.permute(elements, [*range(1, len(rest) + 1), 0]), x.natural)


def _unfold(w: Writer, n: TorchNode) -> ImportedValue:
    """Import windows of `size` elements at multiples of `step` along an axis; they become the last dim."""
    x, size, step = n.item(0), n.number(2, "size"), n.number(3, "step")
    axis = n.axis_at(1, "dimension", x.ndim)
    if not x.ndim:
        return w.of(w.reshape(w.tensor(x), n.dims), x.natural)
    first = w.expand_dims(w.mul(w.iota(n.dims[axis]), step), (1,))
    where = w.add(first, w.iota(const(size)))
    windows = w.take(w.tensor(x), axis, where)
    return w.of(w.permute(windows, [*(p for p in range(x.ndim + 1) if p != axis + 1), axis + 1]), x.natural)


HANDLERS: Mapping[str, Handler] = {
    "aten.scatter.src": scatter("replace"), "aten.scatter.value": scatter("replace"),
    "aten.scatter_add.default": scatter("add"), "aten.scatter_reduce.two": scatter(None),
    "aten.index_put.default": _index_put, "aten.index_reduce.default": _index_reduce, "aten.put.default": _put,
    "aten.slice_scatter.default": _slice_scatter, "aten.select_scatter.default": _select_scatter,
    "aten.diagonal.default": _diagonal, "aten.unfold.default": _unfold, "aten.embedding.default": _embedding,
    "aten.index_select.default": _index_select, "aten.gather.default": _gather, "aten.index.Tensor": _index,
}  # fmt: skip
