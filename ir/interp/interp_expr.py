"""Evaluation of scalar expressions in NumPy, for one point or for many at once.

A value is a Python int (int64), a Python or NumPy bool, a NumPy scalar of the declared dtype, or an array of them over many
points. Every float operation rounds to its dtype; transcendental functions are computed in float64 and rounded once.

Tests: `tests/ir/core/test_scalar_ops.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.arith.bounds import wraps
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bool_, f32, i64
from relax_tune.ir.core.expr import Const, Expr, Load, Var, postorder
from relax_tune.ir.core.scalar_ops import SCALAR_OPS, converted, reinterpreted, wrapped

Array = NDArray[Any]
Env = dict[Var, Any]


class Fault(Exception):
    """An error of an evaluation; the interpreter adds the place in the program."""


@dataclass(slots=True)
class Storage:
    """The elements of one buffer in row-major order.

    Attributes:
        written: elements that may be read; None: all.
    """

    name: str
    shape: tuple[int, ...]
    data: Array
    written: NDArray[np.bool_] | None

    @classmethod
    def poisoned(cls, name: str, shape: tuple[int, ...], dtype: DType) -> Storage:
        """Return storage without a written element."""
        size = math.prod(shape)
        # An unlikely value, so that results that depend on it are visibly wrong.
        fill = math.nan if dtype.is_float else True if dtype is bool_ else ml_dtypes.iinfo(dtype.numpy).min
        return cls(name, shape, np.full(size, fill, dtype.numpy), np.zeros(size, np.bool_))

    def flat(self, indices: Sequence[Any], verb: str) -> Any:
        """Return row-major offsets of `indices`. Raises Fault naming the first index outside the shape."""
        flat: Any = 0
        for axis, (index, extent) in enumerate(zip(indices, self.shape, strict=True)):
            if isinstance(index, np.ndarray):
                outside = (index < 0) | (index >= extent)
                if outside.any():
                    self._outside(indices, int(np.argmax(outside)), axis, verb)
                index = index.astype(np.int64, copy=False)
            else:
                index = int(index)
                if not 0 <= index < extent:
                    self._outside(indices, 0, axis, verb)
            flat = flat * extent + index
        return flat

    def read(self, *indices: Any) -> Any:
        flat = self.flat(indices, "read")
        if self.written is not None and not np.all(self.written[flat]):
            if isinstance(flat, np.ndarray):
                flat = flat[int(np.argmin(self.written[flat]))]
            raise Fault(f"read of {self.name}{self.index_of(int(flat))}, which nothing has written yet")
        return self.data[flat]

    def write(self, flat: Any, value: Any) -> None:
        self.data[flat] = value
        if self.written is not None:
            self.written[flat] = True

    def index_of(self, flat: int) -> list[int]:
        return [int(i) for i in np.unravel_index(flat, self.shape)] if self.shape else []

    def _outside(self, indices: Sequence[Any], point: int, axis: int, verb: str) -> None:
        indices_of_point = [int(i[point]) if isinstance(i, np.ndarray) else int(i) for i in indices]
        raise Fault(
            f"{verb} of {self.name}{indices_of_point} is out of bounds: expected index {axis} in 0..{self.shape[axis] - 1}, "
            f"got {indices_of_point[axis]} (shape {self.shape})"
        )


class Tape:
    """Expressions compiled to a list of steps over numbered values; shared parts run once. Not re-entrant."""

    __slots__ = ("_inputs", "_outputs", "_steps", "_values")

    def __init__(self, exprs: Sequence[Expr], storages: Mapping[Buffer, Storage]) -> None:
        self._values: list[Any] = []
        self._inputs: list[tuple[int, Var]] = []
        self._steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        slots: dict[Expr, int] = {}
        for node in postorder(exprs):
            slot = slots[node] = len(self._values)
            self._values.append(_constant(node) if isinstance(node, Const) else None)
            if isinstance(node, Var):
                self._inputs.append((slot, node))
            elif not isinstance(node, Const):
                self._steps.append((slot, _step(node, storages), tuple(slots[c] for c in node.children)))
        self._outputs = tuple(slots[e] for e in exprs)

    def run(self, env: Env) -> list[Any]:
        """Return the values of the expressions, in order. Raises Fault."""
        values = self._values
        for slot, var in self._inputs:
            if var not in env:
                raise Fault(f"{var.name} has no value: nothing in the parameters or loops around binds it")
            values[slot] = env[var]
        for slot, fn, args in self._steps:
            values[slot] = fn(*[values[a] for a in args])
        return [values[o] for o in self._outputs]


def _constant(node: Const) -> Any:
    if node.dtype is i64 or node.dtype is bool_:
        return node.value
    # 16-bit floats are computed in float32, as on devices.
    return (f32 if node.dtype.is_half else node.dtype).numpy.type(node.value)


def _step(node: Expr, storages: Mapping[Buffer, Storage]) -> Callable[..., Any]:
    if isinstance(node, Load):
        storage = storages.get(node.buffer)
        if storage is None:
            raise Fault(f"buffer {node.buffer.name} is neither a parameter nor allocated")
        if node.dtype is not i64:
            return storage.read
        read = storage.read
        return lambda *i: _python_int(read(*i))
    if node.op == "cast":
        return _cast(node.dtype)
    if node.op == "bitcast":
        return _bitcast(node.args[0].dtype, node.dtype)
    # a quotient wraps for the smallest number and -1
    return _WRAPPING[node.op] if node.dtype is i64 and (wraps(node) or node.op == "floordiv") else _STEPS[node.op]


def _python_int(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else int(x)


def _cast(dtype: DType) -> Callable[[Any], Any]:
    if dtype is i64:
        return lambda x: _python_int(x if isinstance(x, int) else converted(x, dtype))
    return lambda x: converted(x, dtype)


def _bitcast(source: DType, dtype: DType) -> Callable[[Any], Any]:
    if dtype is i64:
        return lambda x: _python_int(reinterpreted(x, source, dtype))
    return lambda x: reinterpreted(x, source, dtype)


def _wrapping(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Python's integers, which have no width, as int64; arrays wrap by themselves."""

    def run(*args: Any) -> Any:
        value = fn(*args)
        return wrapped(value, i64) if isinstance(value, int) else value

    return run


def _rounded(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        dtype = np.result_type(args[0])
        result = fn(*(np.asarray(a, np.float64) for a in args))
        return result.astype(dtype) if isinstance(result, np.ndarray) and result.ndim else dtype.type(result)

    return run


def _checked(fn: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Refuse divisors of zero."""

    def run(a: Any, b: Any) -> Any:
        if not np.all(b):
            raise Fault(f"integer {what} by zero")
        return fn(a, b)

    return run


_EVALUATE: Mapping[str, Callable[..., Any]] = {
    o.name: o.evaluate if o.exact else _rounded(o.evaluate) for o in SCALAR_OPS.values() if o.evaluate is not None
}
_STEPS = dict(_EVALUATE) | {
    "floordiv": _checked(_EVALUATE["floordiv"], "division"),
    "floormod": _checked(_EVALUATE["floormod"], "remainder"),
}
_WRAPPING = {name: _wrapping(fn) for name, fn in _STEPS.items()}
