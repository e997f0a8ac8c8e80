"""Elements of small tensors that a graph computes only from constants and sizes.

Importers need such tensors as shapes. Tensors of numbers are evaluated by the operators themselves. Of others each element is an
expression: operators that only move elements are evaluated on the positions of elements, arithmetic is written by its rule.

Tests: `tests/ir/frontend/onnx/test_shape_values.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import Expr, as_int, expr, maximum, minimum
from relax_tune.ir.core.graph import Call, Constant, GVar, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.shared.element_rules import RULES, Element, ElementArithmetic, Unknown, bulky, literal_of
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.gather import GatherElements, GatherND
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Flatten, Permute, Reshape, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.indexing.scatter import Scatter, ScatterElements, ScatterND
from relax_tune.ir.op.math.logic import Where
from relax_tune.ir.op.math.numeric import IntegerDivision
from relax_tune.ir.op.reduction.reduce import Max, MaxOrLowest, Min, MinOrHighest, Reduce, Sum
from relax_tune.ir.op.reduction.scan import CumProd, CumSum, Prod

Array = NDArray[Any]
LARGEST = 256
"""Most elements of a tensor that is followed."""

MOVES: Mapping[type[OperatorSpec], tuple[int, ...] | None] = {
    **dict.fromkeys((BroadcastTo, Concat, ExpandDims, Flatten, Permute, Reshape, Slice, Pad), None),
    **dict.fromkeys((Take, GatherElements, GatherND), (0,)),
    **dict.fromkeys((ScatterElements, ScatterND), (0, 2)),
    Where: (1, 2),
}  # fmt: skip
"""Operators that only move elements, with the arguments whose elements they move (None: all); the others are indices."""

FOLDS: Mapping[type[OperatorSpec], Callable[[Expr, Expr], Expr]] = {
    Sum: lambda a, b: a + b, Prod: lambda a, b: a * b,
    **dict.fromkeys((Max, MaxOrLowest), maximum), **dict.fromkeys((Min, MinOrHighest), minimum),
}  # fmt: skip
"""Reductions of integers: of one element and the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Elements of a tensor.

    Attributes:
        elements: Numbers of the dtype, or objects: expressions, and quotients of them for floats.
        needs: Conditions on the symbols under which they are right.
    """

    elements: Array
    needs: tuple[Expr, ...] = ()


class ElementTable:
    """Elements of the values of one graph function, computed on demand.

    definitions: the computation of each variable
    constants: arrays by name
    known: elements so far; None for values that are not known
    """

    def __init__(self, definitions: Mapping[GVar, Value], constants: Mapping[str, Array], deduction: Deduction) -> None:
        self.definitions, self.constants, self.deduction = definitions, constants, deduction
        self.known: dict[Value, Known | None] = {}

    def of(self, value: Value) -> Known | None:
        """Return the elements of a value; None for a large tensor, or one computed from data."""
        stack = [value]
        while stack:
            v = stack[-1]
            if v in self.known:
                stack.pop()
                continue
            definition = self.definitions.get(v) if isinstance(v, GVar) else None
            args = definition.args if isinstance(definition, Call) and _size(v) is not None else ()
            missing = [a for a in args if a not in self.known]
            # If one argument is unknown, so is the value, and the others need not be followed.
            if missing and not any(self.known.get(a, v) is None for a in args):
                stack.extend(missing)
            else:
                self.known[v] = self._step(v, definition)
        return self.known[value]

    def obstacle(self, value: Value) -> str | None:
        """Return the name of the operator that makes a value unknown; None if data do."""
        self.of(value)
        visited: set[Value] = set()
        stack = [value]
        while stack:
            v = stack.pop()
            definition = self.definitions.get(v) if isinstance(v, GVar) else None
            if v in visited or not isinstance(definition, Call) or not isinstance(definition.op, OperatorSpec):
                continue
            visited.add(v)
            unknown = [a for a in definition.args if self.of(a) is None]
            if not unknown and _size(v) is not None:
                return definition.op.name
            stack.extend(unknown)
        return None

    def _step(self, v: Value, definition: Value | None) -> Known | None:
        """Return the elements of a value whose arguments were followed before."""
        if _size(v) is None:
            return None
        if isinstance(v, Constant):
            array = self.constants.get(v.name)
            return None if array is None else Known(array)
        if not isinstance(definition, Call) or not isinstance(definition.op, OperatorSpec):
            return None
        args = [self.known.get(a) for a in definition.args]
        if any(a is None for a in args):
            return None
        known = [a for a in args if a is not None]
        try:
            return self._computed(definition.op, known, v, [a.info for a in definition.args])
        except (Unknown, RelaxTuneError, ValueError, IndexError, TypeError, OverflowError):
            return None  # the caller that needs the value raises

    def _computed(self, op: OperatorSpec, args: Sequence[Known], v: Value, infos: Sequence[Any]) -> Known:
        info = v.info
        assert isinstance(info, TensorInfo) and info.dtype is not None and info.shape is not None
        shape = tuple(as_int(d) for d in info.shape)
        arrays, element = [a.elements for a in args], info.dtype
        work = ElementArithmetic(self.deduction, element, [n for a in args for n in a.needs])
        if isinstance(op, Scalars):
            elements = _objects(list(op.values), (len(op.values),))
        elif not any(a.dtype == object for a in arrays):
            return Known(_evaluated(op, arrays).astype(element.numpy, copy=False))
        elif type(op) in MOVES and not (isinstance(op, Where) and arrays[0].dtype == object):
            elements = _moved(op, arrays, [i.dtype for i in infos])
        elif type(op) in FOLDS and isinstance(op, Reduce) and element.is_int:
            elements = _reduced(op, arrays[0], work)
        elif isinstance(op, (CumSum, CumProd)) and element.is_int:
            elements = op.evaluate(arrays)
            elements = _objects([work.fit(expr(e)) for e in elements.reshape(-1)], elements.shape)
        else:
            elements = _pointwise(op, arrays, [i.dtype for i in infos], work)
        if elements.shape != shape:
            raise Unknown
        return Known(self._numbers(elements, element), tuple(dict.fromkeys(work.needs)))

    def _numbers(self, elements: Array, dtype: DType) -> Array:
        """Return numbers of the dtype if all elements are literals, else the simplified elements."""
        flat = [self._simplified(e) for e in elements.reshape(-1)]
        values = [e.value if isinstance(e, Expr) else e.number(dtype) for e in flat]
        if all(v is not None for v in values):
            return np.array(values, dtype.numpy).reshape(elements.shape)
        return _objects(flat, elements.shape)

    def _simplified(self, e: Any) -> Element:
        e = expr(e) if isinstance(e, int) else e
        if bulky(e if isinstance(e, Expr) else e.above):
            raise Unknown
        if isinstance(e, Expr):
            if e.dtype is bool_:
                proof = self.deduction.proves(e) if e.value is None else Proof.UNKNOWN
                return e if proof is Proof.UNKNOWN else expr(proof is Proof.YES)
            return self.deduction.simplify(e)
        simplified: Element = replace(e, above=self.deduction.simplify(e.above))
        return simplified


def _size(v: Value) -> int | None:
    """Return the number of elements of a small tensor, else None."""
    info = v.info
    if not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None:
        return None
    size = reduce(lambda a, b: a * b, info.shape, expr(1)).value
    return int(size) if size is not None and size <= LARGEST else None


def _objects(flat: Sequence[Any], shape: tuple[int, ...]) -> Array:
    objects = np.empty(len(flat), object)
    objects[:] = flat
    return objects.reshape(shape)


def _evaluated(op: OperatorSpec, arrays: Sequence[Array]) -> Array:
    # NumPy returns 0 with a warning there; on a device the result is undefined.
    if isinstance(op, IntegerDivision) and (arrays[1] == 0).any():
        raise Unknown
    with np.errstate(all="ignore"):
        result = op.evaluate(arrays)
    if isinstance(result, tuple):
        raise Unknown
    return np.asarray(result)


def _elements(array: Array, dtype: DType) -> list[Element]:
    return [e if array.dtype == object else literal_of(e, dtype) for e in array.reshape(-1)]


def _moved(op: OperatorSpec, arrays: Sequence[Array], dtypes: Sequence[DType]) -> Array:
    """Evaluate an operator that only moves elements on their positions in `pool`; position 0 is the padding."""
    if isinstance(op, Scatter) and op.mode != "replace":
        raise Unknown
    where = MOVES[type(op)]
    pool = [literal_of(0, dtypes[-1])]
    if isinstance(op, Pad):
        pool, op = [literal_of(op.value, dtypes[0])], replace(op, value=0.0)
    positions = []
    for p, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if where is None or p in where:
            positions.append(np.arange(len(pool), len(pool) + array.size).reshape(array.shape))
            pool += _elements(array, dtype)
        elif array.dtype == object:
            raise Unknown
        else:
            positions.append(array)
    # The operator runs on numbers of elements instead of the elements: its NumPy form moves either alike.
    moved = _evaluated(op, positions)
    return _objects([pool[int(p)] for p in moved.reshape(-1)], moved.shape)


def _reduced(op: Reduce, array: Array, work: ElementArithmetic) -> Array:
    axes = op.positions(array.ndim)
    others = [p for p in range(array.ndim) if p not in axes]
    rows = array.transpose([*others, *axes]).reshape([*(array.shape[p] for p in others), -1])
    if rows.shape[-1] == 0:
        raise Unknown
    flat = [work.fit(reduce(FOLDS[type(op)], row)) for row in rows.reshape(-1, rows.shape[-1])]
    dims = [1 if p in axes else n for p, n in enumerate(array.shape)]
    return _objects(flat, tuple(dims if op.keepdims else (array.shape[p] for p in others)))


def _pointwise(op: OperatorSpec, arrays: Sequence[Array], dtypes: Sequence[DType], work: ElementArithmetic) -> Array:
    rule = RULES.get(type(op))
    if rule is None:
        raise Unknown
    objects = [_objects(_elements(a, d), a.shape) for a, d in zip(arrays, dtypes, strict=True)]
    aligned = np.broadcast_arrays(*objects)
    flat = [rule(work, op, *items) for items in zip(*(a.reshape(-1) for a in aligned), strict=True)]
    return _objects(flat, aligned[0].shape)
