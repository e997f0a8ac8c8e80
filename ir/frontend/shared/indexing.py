"""Elements of tensors at positions: slices, rows, gathers, for importers of every format."""

from __future__ import annotations

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, add, as_int, const, maximum, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis, take
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements, GatherND
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.elementwise import Add, AddScalar
from relax_tune.ir.op.math.logic import Less, Where


def edge(w: Writer, e: Expr, n: Expr) -> Expr:
    """Return the end of a slice in a dim of size `n`; a negative end counts from the back. Raises ParseError for an
    unknown sign.
    """
    number = as_int(e)
    if number is not None:
        if number < 0:
            return w.simplify(maximum(add(n, number), 0)) if number > -(2**62) else const(0)
        return n if number > 2**62 or number == 2**31 - 1 else e
    if not w.natural(e):
        if w.natural(sub(-1, e)):
            return w.simplify(maximum(add(n, e), 0))
        raise ParseError(f"wanted an end whose sign is certain, found {e!r}; give its symbols bounds")
    return e


def counter_or_tensor(w: Writer, x: ImportedValue) -> Value:
    """Return the tensor, a table 0, 1, 2 ... as `Iota`, whose prefixes are again `Iota`."""
    a = x.array
    if a is None or x.dtype is not i64 or a.size < 2 or max(a.shape) != a.size or a.size > 1 << 20:
        return w.tensor(x)
    if not np.array_equal(a.reshape(-1), np.arange(a.size)):
        return w.tensor(x)
    return w.reshape(w.emit(Iota(const(a.size))), x.shape)


def natural_indices(w: Writer, item: ImportedValue, size: Expr) -> Value:
    """Return indices into a dim of `size`, negative ones counted from its end."""
    if item.natural:
        return cast_to(w, w.tensor(item), item.dtype, item.dtype)
    n = as_int(size)
    if item.array is not None and n is not None:
        return w.tensor(
            w.constant(np.where(item.array < 0, item.array + n, item.array).astype(item.array.dtype), item.name)
        )
    value = w.tensor(item)
    zero = w.literal(0, item.dtype)
    if n is not None:
        wrapped = w.emit(AddScalar(n), value)
    else:
        scalar = np.empty((), object)
        scalar[()] = size
        wrapped = w.emit(Add(), value, cast_to(w, w.tensor(w.known(scalar)), i64, item.dtype))
    return w.emit(Where(), w.emit(Less(), value, zero), wrapped, value)


def gather(w: Writer, x: ImportedValue, axis: int, indices: ImportedValue) -> ImportedValue:
    """Emit the elements of `x` along `axis` at `indices`, whose dims replace the axis."""
    known = w.scalars(indices)
    if known is not None and known.ndim == 0:
        at = known.reshape(-1)[0]
        if w.natural(at):
            row = slice_axis(w, w.tensor(x), axis, at, w.simplify(at + 1))
            return w.of(w.reshape(row, [d for p, d in enumerate(x.shape) if p != axis]), x.natural)
    if indices.uniform is not None and indices.natural:
        at = const(int(indices.uniform))
        row = w.reshape(
            slice_axis(w, w.tensor(x), axis, at, w.simplify(at + 1)), [d for p, d in enumerate(x.shape) if p != axis]
        )
        own = [*x.shape[:axis], *[const(1)] * indices.ndim, *x.shape[axis + 1 :]]
        wide = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        return w.of(w.emit(BroadcastTo(wide), w.reshape(row, own) if axis else row), x.natural)
    where = natural_indices(w, indices, x.shape[axis])
    return w.of(take(w, w.tensor(x), axis, where), x.natural)


def gather_elements(w: Writer, x: ImportedValue, axis: int, indices: ImportedValue) -> ImportedValue:
    """Emit the elements of `x` at `indices` along `axis`, position by position."""
    if x.uniform is not None:
        return w.uniform(indices.shape, x.uniform, x.dtype)
    where = natural_indices(w, indices, x.shape[axis])
    return w.of(w.emit(GatherElements(axis), w.tensor(x), where), x.natural)


def gather_nd(w: Writer, x: ImportedValue, indices: ImportedValue) -> ImportedValue:
    """Emit the elements of `x` at `indices` (..., k) into its first k dims."""
    depth = as_int(indices.shape[-1])
    sizes = [as_int(d) for d in x.shape[: depth or 0]]
    if not indices.natural and len(set(sizes)) == 1 and sizes[0] is not None:
        where = natural_indices(w, indices, const(sizes[0]))
    elif not indices.natural and indices.array is not None and None not in sizes:
        limits = np.array(sizes, indices.array.dtype)
        where = w.tensor(w.constant(np.where(indices.array < 0, indices.array + limits, indices.array), indices.name))
    elif indices.natural:
        where = w.tensor(indices)
    else:
        limits_item = w.known(np.array(list(x.shape[: depth or 0]), object))
        value = w.tensor(indices)
        wrapped = w.emit(Add(), value, cast_to(w, w.tensor(limits_item), i64, indices.dtype))
        where = w.emit(Where(), w.emit(Less(), value, w.literal(0, indices.dtype)), wrapped, value)
    return w.of(w.emit(GatherND(), w.tensor(x), where), x.natural)
