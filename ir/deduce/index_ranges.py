"""Ranges of values from outside that operators use as indices, traced through the graph before it is lowered.

An index from outside is computed from parameters of a function by moving, casting, comparing, choosing and adding constants. If it
lies outside its dim, the call is in error: the parameter is checked if it is used whole or by columns, else the index itself
(`ir/passes/control/checked_indices`). Any other index is computed: gathers clamp it and scatters drop its update, or the call fails if
the model is built with checks.

Tests: `tests/tuner/emit/test_moved_indices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr, Var, as_int, const, sub, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import Call, CallTIR, Constant, Function, GVar, ShapeValue, TupleItem, Value
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, tensor_dims
from relax_tune.ir.deduce.loaded_indices import loaded_ranges
from relax_tune.ir.op.base import IndexUse, OperatorSpec
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.movement import VIEWS, BroadcastTo, Concat, Permute, Slice, Split
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Sub
from relax_tune.ir.op.math.logic import Compare, Less, LogicalNot, Where

INDEX_BITS = 32
"""Integers of fewer bits may wrap into the range of an index."""
MOVES: tuple[type, ...] = (
    *VIEWS, Permute, BroadcastTo, Slice, Concat, Split, Pad, Cast, Compare, LogicalNot, Where, AddScalar, Add, Sub,
)  # fmt: skip
"""Operators that an index from outside may have passed: moving, casting, comparing, choosing, adding constants."""


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The permitted values of elements of a parameter: in [low, high).

    Attributes:
        position: position of the parameter.
        stride, offset: flattened elements `offset`, `offset + stride`, ...; (1, 0) selects all.
    """

    position: int
    low: Expr
    high: Expr
    stride: int = 1
    offset: int = 0


def index_ranges(f: Function, module: IRModule, outside: frozenset[int] | None = None) -> tuple[IndexRange, ...]:
    """Return the ranges of the parameters that operators and tensor functions of a straight-line function use as indices.

    Args:
        outside: positions of the parameters that come from outside; None: all do.
    """
    trace = _trace(f, module.constants, outside)
    ranges = [r for call in _operators(f) for r in trace.ranges(call, [a.info for a in call.args])]
    for binding in f.bindings:
        call = binding.value
        if isinstance(call, CallTIR):
            func = module.functions[call.callee]
            assert isinstance(func, PrimFunc)
            for position, (low, high) in loaded_ranges(func, trace.numbers(call, func)):
                solved = trace.solve(call.args[position], const(low), const(high), 1, 0)
                ranges += [] if solved is None else [solved]
    return tuple(dict.fromkeys(ranges))


def computed_indices(
    f: Function, constants: Mapping[str, NDArray[Any]], outside: frozenset[int] | None = None, computed: bool = False
) -> Iterator[tuple[str, Value, IndexUse]]:
    """Iterate over indices from outside in a straight-line function for which `index_ranges` has no range.

    Yields the name of the operator, the index argument and its use.

    Args:
        computed: yield computed indices as well.
    """
    trace = _trace(f, constants, outside)
    for call in _operators(f):
        if isinstance(call.op, OperatorSpec):
            for used, index_range in trace.uses(call, [a.info for a in call.args]):
                index = call.args[used.position]
                if index_range is None and (computed or trace.sources(index)):
                    yield call.op.name, index, used


def _trace(f: Function, constants: Mapping[str, NDArray[Any]], outside: frozenset[int] | None) -> IndexTrace:
    params = {p: n for n, p in enumerate(f.params) if outside is None or n in outside}
    return IndexTrace(params, {b.var: b.value for b in f.bindings}, constants)


def _operators(f: Function) -> Iterator[Call]:
    return (b.value for b in f.bindings if isinstance(b.value, Call))


@dataclass(frozen=True, slots=True)
class IndexTrace:
    """The definitions that an index is traced through.

    Attributes:
        params: positions of the parameters that come from outside.
        definitions: values of variables.
        constants: arrays of the module.
        symbols: known symbols.
    """

    params: Mapping[GVar, int]
    definitions: Mapping[GVar, Value]
    constants: Mapping[str, NDArray[Any]]
    symbols: Mapping[Var, Expr] = field(default_factory=dict)
    known: dict[GVar, frozenset[int] | None] = field(default_factory=dict)

    def ranges(self, call: Call, infos: Sequence[StructInfo]) -> Iterator[IndexRange]:
        """Iterate over the ranges of parameters that an operator uses as indices.

        Args:
            infos: annotations of its arguments.
        """
        return (index_range for _, index_range in self.uses(call, infos) if index_range is not None)

    def uses(self, call: Call, infos: Sequence[StructInfo]) -> Iterator[tuple[IndexUse, IndexRange | None]]:
        """Iterate over uses of values as indices, each with the range of its parameter; None where there is no such range."""
        tensors = [i for i in infos if isinstance(i, TensorInfo) and i.shape is not None]
        if isinstance(call.op, OperatorSpec) and len(tensors) == len(infos):
            for used in call.op.indexed(tensors):
                yield used, self.solve(call.args[used.position], const(0), used.size, used.stride, used.offset)

    def numbers(self, call: CallTIR, func: PrimFunc) -> dict[Buffer, int]:
        """Return the values of the integer constants without dims that a tensor function is given."""
        constants = [
            (b, self.constants[a.name]) for b, a in zip(func.input_buffers, call.args) if isinstance(a, Constant)
        ]
        return {b: int(a) for b, a in constants if a.ndim == 0 and a.dtype.kind in "iu"}

    def solve(self, v: Value, low: Expr, high: Expr, stride: int, offset: int) -> IndexRange | None:
        """Return the range of the parameter whose elements, all or one column of them, `v` has; None for any other value."""
        while True:
            if isinstance(v, GVar) and v in self.params:
                return IndexRange(self.params[v], low, high, stride, offset)
            call = self.call(v)
            if call is None or isinstance(call, GVar):
                return None
            op = call.op
            if isinstance(op, VIEWS) or _keeps(call) or (isinstance(op, (Permute, BroadcastTo)) and stride == 1):
                v = call.args[0]
            elif isinstance(op, Slice):
                width, begin, end = (as_int(e) for e in (tensor_dims(call.args[0].info)[-1], op.begin, op.end))
                last = op.step == 1 and op.axis in (-1, len(tensor_dims(call.args[0].info)) - 1)
                # Only one column of the last axis is every width-th element of the flattened parameter. A column of a
                # column would need two strides.
                if stride > 1 or not last or width is None or begin is None or end != begin + 1 or begin >= width:
                    return None
                v, stride, offset = call.args[0], width, begin
            elif isinstance(op, AddScalar) and getattr(_dtype(call.args[0]), "bits", 0) >= INDEX_BITS:
                step: Expr | None = const(int(op.value))
                v, low, high = call.args[0], simplify(sub(low, step)), simplify(sub(high, step))  # type: ignore[arg-type]
            elif isinstance(op, Where):
                plain, step = self.from_the_end(call, stride, offset)
                # an index below 0 counts from the end only if adding the size cannot exceed the other end
                if plain is None or step is None or as_int(low) != 0 or (as_int(simplify(sub(high, step))) or 0) < 0:
                    return None
                v, low = plain, simplify(sub(low, step))
            else:
                return None

    def sources(self, v: Value) -> frozenset[int] | None:
        """Return the positions of the parameters that an index from outside is computed from; None for a computed one."""
        if isinstance(v, (Constant, ShapeValue)):
            return frozenset()
        if isinstance(v, GVar) and v in self.params:
            return frozenset((self.params[v],))
        if isinstance(v, GVar) and v in self.definitions:
            if v not in self.known:
                for (
                    earlier,
                    value,
                ) in self.definitions.items():  # in program order, so that a long chain needs no deep recursion
                    if earlier not in self.known:
                        self.known[earlier] = self.sources(value)
                    if earlier is v:
                        break
            return self.known[v]
        if isinstance(v, TupleItem):
            whole = self.call(v.value)
            return self.sources(whole) if whole is not None and isinstance(whole.op, Split) else None
        # Other operators are not traced: the search would cover the whole model.
        if not isinstance(v, Call) or (v.args and not isinstance(v.op, MOVES)):
            return None
        sources_of_args = [self.sources(a) for a in v.args]
        known = [f for f in sources_of_args if f is not None]
        # A sum of two indices from outside is arithmetic of the model: each may be within its own range, and the sum
        # is not.
        sums = isinstance(v.op, (Add, Sub)) and sum(map(bool, known)) > 1
        return frozenset().union(*known) if len(known) == len(sources_of_args) and not sums else None

    def call(self, v: Value) -> Call | None:
        while isinstance(v, GVar) and v in self.definitions:
            v = self.definitions[v]
        return v if isinstance(v, Call) else None

    def from_the_end(self, where: Call, stride: int, offset: int) -> tuple[Value | None, Expr | None]:
        """Return `x` and `step` of `where(x < 0, x + step, x)`."""
        cond, moved, plain = where.args
        less, sum_ = self.call(cond), self.call(moved)
        if less is None or sum_ is None or not isinstance(less.op, Less):
            return None, None
        if less.args[0] is not plain or sum_.args[0] is not plain or self.number(less.args[1], 1, 0) is not const(0):
            return None, None
        if isinstance(sum_.op, AddScalar):
            return plain, const(int(sum_.op.value))
        return plain, self.number(sum_.args[1], stride, offset) if isinstance(sum_.op, Add) else None

    def number(self, v: Value, stride: int, offset: int) -> Expr | None:
        """Return the value of a constant or of `Scalars`, or its value at a column."""
        if isinstance(v, Constant):
            array = np.asarray(self.constants[v.name])
            if array.dtype.kind not in "iu" or not array.size:
                return None
            flat = array.reshape(-1)
            if stride > 1 and flat.size == stride:
                return const(int(flat[offset]))
            return const(int(flat[0])) if (flat == flat[0]).all() else None
        call = self.call(v)
        if call is None:
            return (
                self.number(self.definitions[v], stride, offset)
                if isinstance(v, GVar) and v in self.definitions
                else None
            )
        if isinstance(call.op, Scalars):
            values = [substitute(e, self.symbols) for e in call.op.values]
            return values[0] if len(values) == 1 else values[offset] if len(values) == stride else None
        return self.number(call.args[0], stride, offset) if isinstance(call.op, (Cast, *VIEWS, BroadcastTo)) else None


def _keeps(cast: Call) -> bool:
    """Return whether a cast preserves every integer that can be an index."""
    if not isinstance(cast.op, Cast) or not cast.op.dtype.is_int:
        return False
    source = _dtype(cast.args[0])
    if source is None or not source.is_int:
        return False
    return cast.op.dtype.holds(source) or min(cast.op.dtype.bits, source.bits) >= INDEX_BITS


def _dtype(v: Value) -> DType | None:
    return v.info.dtype if isinstance(v.info, TensorInfo) else None
