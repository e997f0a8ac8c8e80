"""Graph functions: bindings of values in A-normal form, across levels (paper sections 3.1 to 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from relax_tune.ir.expr import Expr
from relax_tune.ir.struct_info import StructInfo, TensorInfo


@dataclass(frozen=True, slots=True)
class Operator:
    """Base of graph operators: one frozen subclass per operator in `ir/op`, whose fields are its attributes.

    A subclass sets `name` and implements deduction, legalisation to a tensor function and evaluation in NumPy;
    see `relax_tune.ir.op.base.OperatorSpec`.
    """


@dataclass(frozen=True, slots=True, eq=False)
class GVar:
    """A graph variable: identity; `info` is its annotation."""

    name: str
    info: StructInfo

    def __repr__(self) -> str:
        return f"{self.name}: {self.info!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A weight, by its name in `IRModule.constants`."""

    name: str
    info: TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A graph operator applied to values."""

    op: Operator
    args: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CallTIR:
    """`call_tir`: a tensor function called in destination-passing style. `out` annotates each output and carries the
    symbols; `scalars` are the explicit scalar arguments."""

    callee: str
    args: tuple[Value, ...]
    out: tuple[TensorInfo, ...]
    scalars: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CallDPSLibrary:
    """`call_dps_library`: a library routine called in destination-passing style, with integer arguments `scalars`."""

    routine: str
    args: tuple[Value, ...]
    out: tuple[TensorInfo, ...]
    scalars: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TupleValue:
    fields: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TupleItem:
    value: Value
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class ShapeValue:
    """A first-class shape."""

    values: tuple[Expr, ...]


Atom = Union[GVar, Constant, ShapeValue]
Value = Union[GVar, Constant, ShapeValue, Call, CallTIR, CallDPSLibrary, TupleValue, TupleItem]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """`var = value`."""

    var: GVar
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class MatchCast:
    """`var = match_cast(value, info)`: asserted at run time; symbols of `info` not seen before are bound by it."""

    var: GVar
    value: Value
    info: StructInfo


AnyBinding = Union[Binding, MatchCast]


@dataclass(frozen=True, slots=True, eq=False)
class DataflowBlock:
    """Bindings without side effects: any of them may be removed, reordered or fused."""

    bindings: tuple[AnyBinding, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A graph function; `ret` is an atom or a tuple of atoms, `ret_info` the declared or deduced annotation."""

    name: str
    params: tuple[GVar, ...]
    blocks: tuple[DataflowBlock, ...]
    ret: Value
    ret_info: StructInfo

    @property
    def bindings(self) -> tuple[AnyBinding, ...]:
        return tuple(b for block in self.blocks for b in block.bindings)


def operands(value: Value) -> Sequence[Value]:
    """The values a value is made of."""
    if isinstance(value, (Call, CallTIR, CallDPSLibrary)):
        return value.args
    if isinstance(value, TupleValue):
        return value.fields
    return (value.value,) if isinstance(value, TupleItem) else ()
