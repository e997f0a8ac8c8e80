"""Alias analysis of graph functions: the allocated tensors that each variable may name.

It follows the order of bindings; both sides of a branch are joined.

Tests: `tests/ir/check/test_inplace.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_tune.ir.core import graph as g
from relax_tune.ir.core.graph import (
    Call,
    CallDPSLibrary,
    CallFunction,
    CallHost,
    CallTIR,
    GVar,
    If,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.graph_walk import operator_of, used_vars
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, TupleInfo, info_parts
from relax_tune.ir.op.indexing.movement import VIEWS

AllocatedTensor = tuple[GVar, int]
"""A tensor in separate memory: the variable that a binding defines, and the number of its field."""


def is_view(value: g.Value) -> bool:
    """Return whether a value is a view: another value's memory under other dims."""
    return operator_of(value, *VIEWS) is not None


@dataclass(slots=True)
class AliasSets:
    """Alias sets: for each variable the allocated tensors it may name, through views, tuples and branches.

    Attributes:
        inplace: an output written in place is an alias of the overwritten argument; False: it counts as a new tensor.
    """

    inplace: bool = True
    _of: dict[GVar, tuple[AllocatedTensor, ...]] = field(default_factory=dict)
    _by_field: dict[GVar, tuple[tuple[AllocatedTensor, ...], ...]] = field(default_factory=dict)

    def bind(self, var: GVar, value: Value) -> None:
        """Add the next binding, in program order."""
        if self.inplace and isinstance(value, CallTIR) and value.inplace:
            fields = [
                ((var, i),) if at is None else self.tensors_of(value.args[at]) for i, at in enumerate(value.inplace)
            ]
            self._of[var] = tuple(t for tensors in fields for t in tensors)
            self._by_field[var] = tuple(fields)
        # A variable without an entry names new memory, so only views, tuples and results of callees are entered.
        elif not isinstance(value, CallTIR) and not allocated_tensors(value, var.info):
            self._of[var] = self.tensors_of(value)
            parts = self.tensors_by_field(value)
            if parts is not None:
                self._by_field[var] = parts

    def tensors_by_field(self, value: Value) -> tuple[tuple[AllocatedTensor, ...], ...] | None:
        """Return the alias set of each field of a tuple, or None when only their union is known."""
        if isinstance(value, TupleValue):
            return tuple(map(self.tensors_of, value.fields))
        if isinstance(value, GVar) and value not in self._of and isinstance(value.info, TupleInfo):
            return tuple((t,) for t in self.tensors_of(value))
        return self._by_field.get(value) if isinstance(value, GVar) else None

    def tensors_of(self, value: Value) -> tuple[AllocatedTensor, ...]:
        """Return every allocated tensor that `value` may be or hold."""
        match value:
            case GVar(info=info):
                allocated = tuple((value, i) for i in range(len(info_parts(info))))
                return self._of.get(value, allocated)
            case TupleItem(whole, index):
                parts = self.tensors_by_field(whole)
                return self.tensors_of(whole) if parts is None else parts[index]
            case TupleValue(fields):
                return tuple(k for f in fields for k in self.tensors_of(f))
            case If():  # the result of either side
                return tuple(k for side in value.bodies for k in self.tensors_of(side.ret))
            case Call() | CallFunction() | CallHost():  # a callee may return an argument
                return tuple(k for v in used_vars(value) for k in self.tensors_of(v))
        return ()

    def read_tensors(self, value: Value) -> set[AllocatedTensor]:
        """Return every allocated tensor that computing `value` reads, or that it may be."""
        if isinstance(value, TupleItem):
            return set(self.tensors_of(value))
        read = (*used_vars(value), *(side.ret for side in value.bodies))
        return {k for v in read for k in self.tensors_of(v)}


def allocated_tensors(value: Value, info: StructInfo) -> Sequence[tuple[int, TensorInfo]]:
    """Return the fields of a binding that need new memory; none for views and tuples."""
    match value:
        case CallTIR(out=out, inplace=places) if places:
            return [(i, t) for i, (t, at) in enumerate(zip(out, places, strict=True)) if at is None]
        case CallTIR(out=out) | CallDPSLibrary(out=out):
            return list(enumerate(out))
        case Call() if not is_view(value):
            return [(i, f) for i, f in enumerate(info_parts(info)) if isinstance(f, TensorInfo)]
    return ()
