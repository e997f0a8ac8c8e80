"""Fold ONNX operators on integers that are expressions over shape symbols, so that none of them runs.

Exporters compute shapes with Shape, Gather, Concat and arithmetic; the importer needs the resulting dims as expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core import expr as ex
from relax_tune.ir.core.dtype import DType, bool_, i64
from relax_tune.ir.core.expr import FALSE, TRUE, Expr, as_int, const
from relax_tune.ir.frontend.onnx.node import OnnxNode, integers
from relax_tune.ir.frontend.onnx.tensors import DTYPES
from relax_tune.ir.frontend.shared.element_rules import bulky, fitting
from relax_tune.ir.frontend.shared.handlers.shape import cancelled
from relax_tune.ir.frontend.shared.writer import SCALAR_LIMIT, ImportedValue, Writer

Scalars = NDArray[np.object_]
Known = Callable[[Writer, OnnxNode, Sequence[Scalars]], "tuple[Scalars, DType] | None"]


def evaluate_known(w: Writer, node: OnnxNode) -> ImportedValue | None:
    """Return the one result of a node as expressions; None unless all inputs are known and the operator is supported."""
    handler = KNOWN.get(node.op)
    if handler is None or not node.inputs or len([o for o in node.outputs if o]) != 1:
        return None
    arrays: list[Scalars] = []
    for i in node.inputs:
        if i is None:
            return None
        scalars = w.scalars(i)
        if scalars is None:
            return None
        arrays.append(scalars)
    try:
        result = handler(w, node, arrays)
        # Expressions that grow with each operator would make every later proof slower; a tensor holds them as one
        # value.
        if result is None or result[0].size > SCALAR_LIMIT or any(map(bulky, result[0].reshape(-1))):
            return None
        if not _fit(w, result[0], result[1]):
            return None
        return w.known(result[0], result[1], node.outputs[0])
    except OverflowError:  # the tensor form wraps around in its type
        return None
    except (KeyError, ValueError, IndexError):  # the handler of tensors raises with the reason
        return None


def _fit(w: Writer, scalars: Scalars, element: DType) -> bool:
    """Return whether integers are of a type; what a run decides is required."""
    conditions = [fitting(w.g.deduction, e, element) for e in scalars.reshape(-1) if e.value is None]
    return None not in conditions and all(w.require(c) for every in conditions for c in every or ())


def objects(values: Any) -> Scalars:
    """Make an object array of expressions, in the shape of a nested sequence or array."""
    return np.array(values, object)


def _pointwise(fn: Callable[..., Expr | None], w: Writer, arrays: Sequence[Scalars]) -> Scalars | None:
    aligned = np.broadcast_arrays(*arrays)
    flat = [fn(*items) for items in zip(*(a.reshape(-1) for a in aligned), strict=True)]
    if any(e is None for e in flat):
        return None
    result = np.empty(len(flat), object)
    result[:] = flat
    return result.reshape(aligned[0].shape)


def _same(fn: Callable[..., Expr | None]) -> Known:
    """Make a handler of an elementwise function whose result has the type of its integers."""

    def handler(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
        element = node.item(0).dtype
        if not element.is_int:
            return None
        values = _pointwise(fn, w, arrays)
        return None if values is None else (values, element)

    return handler


def _truth(fn: Callable[..., Expr]) -> Known:
    """Make a handler of a comparison. It returns None unless the comparison is decided."""

    def handler(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
        def decided(*args: Expr) -> Expr | None:
            proof = w.g.deduction.proves(fn(*args))
            return TRUE if proof is Proof.YES else FALSE if proof is Proof.NO else None

        truths = _pointwise(decided, w, arrays)
        return None if truths is None else (truths, bool_)

    return handler


def _quotient(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    """Divide towards zero; divisors must be proved positive. For factors of both a check remains."""

    def one(a: Expr, b: Expr) -> Expr | None:
        x, y = as_int(a), as_int(b)
        if y == 0:
            return None
        if x is not None and y is not None:
            return const(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1))
        # Common factors are cancelled first: (2 * n) / n is 2, and its only condition is that n is not 0.
        above, below = (a, b) if w.natural(ex.sub(b, 1)) else cancelled(w, [a], [b])
        if not w.natural(ex.sub(below, 1)) or not w.require(ex.ne(b, 0)):
            return None
        if as_int(below) == 1:
            return above
        down = ex.floordiv(above, below)
        if w.natural(above):
            return down
        # Towards 0: -(-a // b) for a below 0, a // b otherwise.
        up = ex.mul(ex.floordiv(ex.mul(above, -1), below), -1)
        return ex.select(ex.lt(above, 0), up, down)

    return _same(one)(w, node, arrays)


def _sign(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    """Fold the signs of numbers, and of expressions that are certainly above or below 0."""

    def one(e: Expr) -> Expr | None:
        n = as_int(e)
        if n is not None:
            return const((n > 0) - (n < 0))
        return const(1) if w.natural(ex.sub(e, 1)) else const(-1) if w.natural(ex.sub(-1, e)) else None

    return _same(one)(w, node, arrays)


def _mod(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    if node.flag("fmod"):
        return None
    return _same(lambda a, b: ex.floormod(a, b) if w.natural(ex.sub(b, 1)) else None)(w, node, arrays)


def _cast(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    to = DTYPES.get(node.integer("to", 0))
    source = node.item(0).dtype
    if to is i64 and source.is_int:
        return arrays[0], to
    if (
        to is not None
        and not to.is_small
        and (to.is_int or to is bool_)
        and all(e.value is not None for e in arrays[0].reshape(-1))
    ):
        values = [int(e.value) for e in arrays[0].reshape(-1)]
        low, high = (0, 1) if to is bool_ else (int(np.iinfo(to.numpy).min), int(np.iinfo(to.numpy).max))
        if to is not bool_ and not all(low <= v <= high for v in values):
            return None
        flat = np.empty(len(values), object)
        flat[:] = [const(bool(v)) if to is bool_ else const(v) for v in values]
        return flat.reshape(arrays[0].shape), to
    return None


def _concat(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType]:
    return np.concatenate(list(arrays), axis=node.integer("axis")), node.item(0).dtype


def _gather(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    where = integers(arrays[1])
    axis = node.integer("axis", 0)
    if where is None or not -arrays[0].ndim <= axis < arrays[0].ndim:
        return None
    n = arrays[0].shape[axis]
    if any(not -n <= i < n for i in where):
        return None
    indices = np.array(where, np.int64).reshape(arrays[1].shape)
    return np.asarray(np.take(arrays[0], indices, axis=axis), object), node.item(0).dtype


def _slice(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    parts = [integers(a) for a in arrays[1:]]
    if any(p is None for p in parts):
        return None
    starts, ends = parts[0] or [], parts[1] or []
    axes = parts[2] if len(parts) > 2 and parts[2] is not None else list(range(len(starts)))
    steps = parts[3] if len(parts) > 3 and parts[3] is not None else [1] * len(starts)
    where = [slice(None)] * arrays[0].ndim
    for s, e, a, step in zip(starts, ends, axes, steps, strict=True):
        # a backward slice past the first element has end None in Python: -n - 1 would be clipped to -1
        where[a] = slice(s, None if step < 0 and e < -arrays[0].shape[a] else e, step)
    return arrays[0][tuple(where)], node.item(0).dtype


def _unsqueeze(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    axes = integers(arrays[1])
    return None if axes is None else (np.expand_dims(arrays[0], tuple(axes)), node.item(0).dtype)


def _squeeze(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    axes = None if len(arrays) < 2 else integers(arrays[1])
    if len(arrays) > 1 and axes is None:
        return None
    return np.squeeze(arrays[0], None if axes is None else tuple(axes)), node.item(0).dtype


def _reshape(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    shape = integers(arrays[1])
    if shape is None or 0 in shape:
        return None
    return arrays[0].reshape(shape), node.item(0).dtype


def _where(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    values = _pointwise(lambda c, a, b: a if c is TRUE else b if c is FALSE else None, w, arrays)
    return None if values is None else (values, node.item(1).dtype)


def _product(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    """Multiply all values; exporters count elements by ReduceProd."""
    whole = len(arrays) == 1 and node.attributes.get("axes") is None and not node.flag("noop_with_empty_axes")
    if not whole or arrays[0].ndim > 1:
        return None
    total: Expr = const(1)
    for e in arrays[0].reshape(-1):
        total = ex.mul(total, e)
    result = np.empty(1 if node.flag("keepdims", True) and arrays[0].ndim else 0, object)
    if result.size:
        result[0] = total
        return result, node.item(0).dtype
    scalar = np.empty((), object)
    scalar[()] = total
    return scalar, node.item(0).dtype


def _range(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    """Fold a short Range between numbers."""
    known = integers(np.concatenate([a.reshape(-1) for a in arrays]))
    if known is None or len(known) != 3 or known[2] == 0:
        return None
    numbers = range(known[0], known[1], known[2])
    if len(numbers) > 16:
        return None
    result = np.empty(len(numbers), object)
    result[:] = [const(n) for n in numbers]
    return result, node.item(0).dtype


def _nonzero(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    """Fold the places of elements other than 0, where each is decided."""
    truths = _decided(w, arrays[0])
    return None if truths is None else (_literals(np.array(np.nonzero(np.atleast_1d(truths)))), i64)


def _compress(w: Writer, node: OnnxNode, arrays: Sequence[Scalars]) -> tuple[Scalars, DType] | None:
    truths, axis = _decided(w, arrays[1]), node.attributes.get("axis")
    if truths is None:
        return None
    return np.compress(truths, arrays[0], None if axis is None else int(axis)), node.item(0).dtype


def _decided(w: Writer, scalars: Scalars) -> NDArray[np.bool_] | None:
    """Return which values are true or other than 0; None where a run decides it."""
    conditions = (e if e.dtype is bool_ else ex.ne(e, 0) for e in scalars.reshape(-1))
    proofs = [w.g.deduction.proves(c) for c in conditions]
    if Proof.UNKNOWN in proofs:
        return None
    return np.array([p is Proof.YES for p in proofs], bool).reshape(scalars.shape)


def _literals(array: NDArray[np.int64]) -> Scalars:
    literals = np.empty(array.size, object)
    literals[:] = [const(int(n)) for n in array.reshape(-1)]
    return literals.reshape(array.shape)


KNOWN: Mapping[str, Known] = {
    "Add": _same(ex.add), "Sub": _same(ex.sub), "Mul": _same(ex.mul), "Neg": _same(lambda a: ex.mul(a, -1)), "Div": _quotient,
    "Mod": _mod, "Sign": _sign, "Max": _same(lambda *a: _fold(ex.maximum, a)), "Min": _same(lambda *a: _fold(ex.minimum, a)),
    "Equal": _truth(ex.eq), "Less": _truth(ex.lt), "LessOrEqual": _truth(ex.le), "Greater": _truth(lambda a, b: ex.lt(b, a)),
    "GreaterOrEqual": _truth(lambda a, b: ex.le(b, a)), "And": _truth(ex.and_), "Or": _truth(ex.or_), "Not": _truth(ex.not_),
    "Cast": _cast, "Concat": _concat, "Gather": _gather, "Slice": _slice, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze,
    "Reshape": _reshape, "Where": _where, "ReduceProd": _product, "Range": _range,
    "NonZero": _nonzero, "Compress": _compress, "Identity": lambda w, n, a: (a[0], n.item(0).dtype),
}  # fmt: skip


def _fold(fn: Callable[[Expr, Expr], Expr], args: Sequence[Expr]) -> Expr:
    result = args[0]
    for a in args[1:]:
        result = fn(result, a)
    return result
