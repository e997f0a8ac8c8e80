"""Elements of tensors at positions, of both formats: slices, rows, gathers.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, add, as_int, const, maximum, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.indexing.gather import GatherND
from relax_tune.ir.op.indexing.movement import Slice


def edge(w: Writer, e: Expr, n: Expr) -> Expr:
    """Return the end of a slice in a dim of size `n`; a negative end counts from the back. Raises ParseError for an
    unknown sign.
    """
    number = as_int(e)
    if number is not None:
        if number < 0:
            return w.simplify(maximum(add(n, number), 0)) if number > -(2**62) else const(0)
        # Exporters write the largest int32 or int64 for "to the end".
        return n if number > 2**62 or number == 2**31 - 1 else e
    if not w.natural(e):
        if w.natural(sub(-1, e)):
            return w.simplify(maximum(add(n, e), 0))
        raise ParseError(f"expected an end whose sign is certain, got {e!r}; give its symbols bounds")
    return e


def counter_or_tensor(w: Writer, x: ImportedValue) -> Value:
    """Return the tensor, a table 0, 1, 2 ... as `Iota`, whose prefixes are again `Iota`."""
    a = x.array
    if a is None or x.dtype is not i64 or a.size < 2 or max(a.shape) != a.size or a.size > 1 << 20:
        return w.tensor(x)
    if not np.array_equal(a.reshape(-1), np.arange(a.size)):
        return w.tensor(x)
    return w.reshape(w.iota(const(a.size)), x.shape)


def natural_indices(w: Writer, item: ImportedValue, size: Expr) -> Value:
    """Return indices into a dim of `size`, negative ones counted from its end."""
    if item.natural:
        return w.cast(w.tensor(item), item.dtype)
    n = as_int(size)
    if item.array is not None and n is not None:
        return w.tensor(
            w.constant(np.where(item.array < 0, item.array + n, item.array).astype(item.array.dtype), item.name)
        )
    value = w.tensor(item)
    zero = w.literal(0, item.dtype)
    if n is not None:
        wrapped = w.add(value, n)
    else:
        scalar = np.empty((), object)
        scalar[()] = size
        wrapped = w.add(value, w.cast(w.tensor(w.known(scalar)), item.dtype))
    return w.where(w.less(value, zero), wrapped, value)


def gather(w: Writer, x: ImportedValue, axis: int, indices: ImportedValue) -> ImportedValue:
    """Emit the elements of `x` along `axis` at `indices`, whose dims replace the axis."""
    known = w.scalars(indices)
    if known is not None and known.ndim == 0:
        at = known.reshape(-1)[0]
        if w.natural(at):
            row = w.slice(w.tensor(x), axis, at, w.simplify(at + 1))
            return w.of(w.reshape(row, [d for p, d in enumerate(x.shape) if p != axis]), x.natural)
    if indices.uniform is not None and indices.natural:
        at = const(int(indices.uniform))
        row = w.reshape(
            w.slice(w.tensor(x), axis, at, w.simplify(at + 1)), [d for p, d in enumerate(x.shape) if p != axis]
        )
        row_dims = [*x.shape[:axis], *[const(1)] * indices.ndim, *x.shape[axis + 1 :]]
        wide = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        return w.of(w.broadcast_to(w.reshape(row, row_dims) if axis else row, wide), x.natural)
    where = natural_indices(w, indices, x.shape[axis])
    return w.of(w.take(w.tensor(x), axis, where), x.natural)


def gather_elements(w: Writer, x: ImportedValue, axis: int, indices: ImportedValue) -> ImportedValue:
    """Emit the elements of `x` at `indices` along `axis`, position by position."""
    if x.uniform is not None:
        return w.uniform(indices.shape, x.uniform, x.dtype)
    where = natural_indices(w, indices, x.shape[axis])
    return w.of(w.gather_elements(w.tensor(x), where, axis), x.natural)


def wrapped_indices(w: Writer, indices: ImportedValue, sizes: Sequence[Expr]) -> Value:
    """Return indices (..., k) into dims `sizes`, negative ones counted from the end."""
    value = w.tensor(indices)
    if indices.natural:
        return value
    ends = np.empty(len(sizes), object)
    ends[:] = sizes
    limits = w.cast(w.tensor(w.known(ends)), indices.dtype)
    return w.where(w.less(value, 0), w.add(value, limits), value)


def gather_nd(w: Writer, x: ImportedValue, indices: ImportedValue) -> ImportedValue:
    """Emit the elements of `x` at `indices` (..., k) into its first k dims."""
    dims = x.shape[: as_int(indices.shape[-1]) or 0]
    sizes = [as_int(d) for d in dims]
    if not indices.natural and len(set(sizes)) == 1 and sizes[0] is not None:
        where = natural_indices(w, indices, const(sizes[0]))
    elif not indices.natural and indices.array is not None and None not in sizes:
        limits = np.array(sizes, indices.array.dtype)
        where = w.tensor(w.constant(np.where(indices.array < 0, indices.array + limits, indices.array), indices.name))
    else:
        where = wrapped_indices(w, indices, dims)
    return w.of(w.emit(GatherND(), w.tensor(x), where), x.natural)


def surrounded(w: Writer, x: ImportedValue, value: Value, axes: Sequence[int], sizes: Sequence[Expr]) -> Value:
    """Return `value`, a block from the origin with `sizes` along `axes`, with the elements of `x` around it."""
    for done, p in enumerate(axes):
        rest = w.emit(Slice(p, sizes[p], x.shape[p]), w.tensor(x))
        for q in axes[done + 1 :]:
            rest = w.slice(rest, q, const(0), sizes[q])
        value = w.concat(p, value, rest)
    return value
