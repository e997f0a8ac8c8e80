"""Graph functions: bindings of values in A-normal form, across levels (paper sections 3.1 to 3.3).

Every value class says how it is traversed: `operands`, `with_operands`, `attributes`, `symbols` and `with_symbols`. A class
without one of them fails with its name.

Tests: `tests/ir/check/test_verify.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, Union

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, Var, free_vars, substitute
from relax_tune.ir.core.graph_base import AtomBase, ComputationBase, MapInfo, Operator
from relax_tune.ir.core.names import same_objects
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    info_symbols,
)


@dataclass(frozen=True, slots=True, eq=False)
class GVar(AtomBase):
    """A graph variable, compared by identity; `info` is its annotation."""

    name: str
    info: StructInfo

    def __repr__(self) -> str:
        return f"{self.name}: {self.info!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Constant(AtomBase):
    """A weight, by its name in `IRModule.constants`."""

    name: str
    info: TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class Call(ComputationBase):
    """A call of a graph operator on values."""

    op: Operator
    args: tuple[Value, ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.args

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.op,)

    def _computed_from(self, new: tuple[Value, ...]) -> Call:
        return Call(self.op, new)

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> Call:
        op = self.op.substituted(meaning)
        return self if op is self.op else Call(op, self.args)


@dataclass(frozen=True, slots=True, eq=False)
class CallTIR(ComputationBase):
    """A call of a tensor function in destination-passing style (`call_tir`).

    Attributes:
        out: annotation of each output, which carries the symbols.
        scalars: explicit scalar arguments.
        inplace: for each output the position of the argument whose memory it takes, or None (`call_tir_inplace`). It never changes
            results: of such an argument the function reads only the element that it then writes.
    """

    callee: str
    args: tuple[Value, ...]
    out: tuple[TensorInfo, ...]
    scalars: tuple[Expr, ...] = ()
    inplace: tuple[int | None, ...] = ()

    @property
    def info(self) -> StructInfo:
        return self.out[0] if len(self.out) == 1 else TupleInfo(self.out)

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.args

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.callee, self.scalars, self.out)

    def _computed_from(self, new: tuple[Value, ...]) -> CallTIR:
        # a weight must not be overwritten
        inplace = tuple(None if at is None or isinstance(new[at], Constant) else at for at in self.inplace)
        return replace(self, args=new, inplace=inplace if any(at is not None for at in inplace) else ())

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> CallTIR:
        out, scalars = _outputs(self.out, info), tuple(substitute(s, meaning) for s in self.scalars)
        return self if (out, scalars) == (self.out, self.scalars) else replace(self, out=out, scalars=scalars)


@dataclass(frozen=True, slots=True, eq=False)
class CallDPSLibrary(ComputationBase):
    """`call_dps_library`: a library routine called in destination-passing style, with integer arguments `scalars`."""

    routine: str
    args: tuple[Value, ...]
    out: tuple[TensorInfo, ...]
    scalars: tuple[Expr, ...] = ()

    @property
    def info(self) -> StructInfo:
        return self.out[0] if len(self.out) == 1 else TupleInfo(self.out)

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.args

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.routine, self.scalars, self.out)

    def _computed_from(self, new: tuple[Value, ...]) -> CallDPSLibrary:
        return replace(self, args=new)

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> CallDPSLibrary:
        out, scalars = _outputs(self.out, info), tuple(substitute(s, meaning) for s in self.scalars)
        return self if (out, scalars) == (self.out, self.scalars) else replace(self, out=out, scalars=scalars)


def _outputs(out: tuple[TensorInfo, ...], info: MapInfo) -> tuple[TensorInfo, ...]:
    return tuple(i for i in map(info, out) if isinstance(i, TensorInfo))


@dataclass(frozen=True, slots=True, eq=False)
class TupleValue(ComputationBase):
    fields: tuple[Value, ...]

    @property
    def info(self) -> TupleInfo:
        return TupleInfo(tuple(f.info for f in self.fields))

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.fields

    def _computed_from(self, new: tuple[Value, ...]) -> TupleValue:
        return TupleValue(new)


@dataclass(frozen=True, slots=True, eq=False)
class TupleItem(ComputationBase):
    value: Value
    index: int

    @property
    def info(self) -> StructInfo:
        """The annotation of the field.

        Raises:
            DeduceError: the value is no tuple, or has no such field.
        """
        owner = self.value.info
        if isinstance(owner, ObjectInfo):
            return owner
        if not isinstance(owner, TupleInfo):
            raise DeduceError(f"expected a tuple to take item {self.index} of, got {owner!r}")
        if not 0 <= self.index < len(owner.fields):
            raise DeduceError(f"expected an item in 0..{len(owner.fields) - 1}, got {self.index}")
        return owner.fields[self.index]

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.value,)

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.index,)

    def _computed_from(self, new: tuple[Value, ...]) -> TupleItem:
        return TupleItem(new[0], self.index)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeValue(AtomBase):
    """A first-class shape."""

    values: tuple[Expr, ...]

    @property
    def info(self) -> ShapeInfo:
        return ShapeInfo(self.values)

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.values,)

    def symbols(self) -> Iterator[Var]:
        yield from free_vars(*self.values)

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> ShapeValue:
        dims = tuple(substitute(d, meaning) for d in self.values)
        return self if same_objects(dims, self.values) else ShapeValue(dims)


@dataclass(frozen=True, slots=True, eq=False)
class PrimValue(AtomBase):
    """A scalar over the shape symbols: a number, or a condition such as `n < 8`."""

    value: Expr

    @property
    def info(self) -> PrimInfo:
        return PrimInfo(self.value.dtype, self.value)

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.value,)

    def symbols(self) -> Iterator[Var]:
        yield from free_vars(self.value)

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> PrimValue:
        new = substitute(self.value, meaning)
        return self if new is self.value else PrimValue(new)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionRef(AtomBase):
    """A graph function of the module as a value, by name, with its signature."""

    name: str
    info: CallableInfo


@dataclass(frozen=True, slots=True, eq=False)
class CallFunction(ComputationBase):
    """A call of a graph function: one of the module, or one that a variable holds."""

    callee: Value
    args: tuple[Value, ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.callee, *self.args)

    def _computed_from(self, new: tuple[Value, ...]) -> CallFunction:
        return CallFunction(new[0], new[1:])


@dataclass(frozen=True, slots=True, eq=False)
class CallHost(ComputationBase):
    """A call of an opaque routine of the host program; `out` annotates its result. Unless `pure` it may have side
    effects, and is not reordered.
    """

    routine: str
    args: tuple[Value, ...]
    out: StructInfo
    pure: bool = False

    @property
    def info(self) -> StructInfo:
        return self.out

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.args

    @property
    def attributes(self) -> tuple[object, ...]:
        return (self.routine, self.out)

    def _computed_from(self, new: tuple[Value, ...]) -> CallHost:
        return replace(self, args=new)

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> CallHost:
        out = info(self.out)
        return self if out == self.out else replace(self, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One side of an `if`: its own bindings, and its result, an atom or tuple of atoms."""

    blocks: tuple[AnyBlock, ...]
    ret: Value

    @property
    def bindings(self) -> tuple[AnyBinding, ...]:
        return tuple(b for block in self.blocks for b in block.bindings)

    def replaced(self, mapping: Mapping[Value, Value]) -> Body:
        """Replace variables, weights and functions on this side. Returns the same object when none occurs."""
        blocks = tuple(block.replaced(mapping) for block in self.blocks)
        ret = replace_operands(self.ret, mapping)
        return self if ret is self.ret and same_objects(blocks, self.blocks) else Body(blocks, ret)


@dataclass(frozen=True, slots=True, eq=False)
class If(ComputationBase):
    """`then` where `cond`, a scalar of bool, holds, otherwise `orelse`; only that side is computed."""

    cond: Value
    then: Body
    orelse: Body

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.then, self.orelse)

    def with_bodies(self, bodies: Sequence[Body], cond: Value | None = None) -> If:
        """Replace the sides of this branch, and the condition if given. Returns the same object when nothing changes."""
        cond = cond or self.cond
        return self if same_objects((cond, *bodies), (self.cond, *self.bodies)) else If(cond, *bodies)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The condition, and the values that the sides read from outside."""
        return (self.cond, *captured(self))

    def _computed_from(self, new: tuple[Value, ...]) -> If:
        mapping = dict(zip(captured(self), new[1:], strict=True))
        return If(new[0], self.then.replaced(mapping), self.orelse.replaced(mapping))

    def symbols(self) -> Iterator[Var]:
        yield from self.cond.symbols()
        for side in self.bodies:
            yield from (v for b in side.bindings for v in b.symbols())
            yield from side.ret.symbols()


ATOMS = (GVar, Constant, ShapeValue, PrimValue, FunctionRef)
Value = Union[
    GVar, Constant, ShapeValue, PrimValue, FunctionRef,
    Call, CallTIR, CallDPSLibrary, CallFunction, CallHost, TupleValue, TupleItem, If,
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """`var = value`."""

    var: GVar
    value: Value

    def symbols(self) -> Iterator[Var]:
        """Yield the symbols that the value and its annotation mention."""
        yield from self.value.symbols()
        yield from info_symbols(self.var.info)


@dataclass(frozen=True, slots=True, eq=False)
class MatchCast:
    """`var = match_cast(value, info)`: asserted at run time; new symbols of `info` are bound by it."""

    var: GVar
    value: Value
    info: StructInfo

    @property
    def subject(self) -> str:
        """Name in messages: the variable or weight whose annotation is asserted, else the result."""
        return self.value.name if isinstance(self.value, (GVar, Constant)) else self.var.name

    def symbols(self) -> Iterator[Var]:
        """Yield the symbols that the value and both annotations mention."""
        yield from self.value.symbols()
        yield from info_symbols(self.var.info)
        yield from info_symbols(self.info)


AnyBinding = Union[Binding, MatchCast]


class _BlockBase:
    __slots__ = ()
    bindings: tuple[AnyBinding, ...]

    def replaced(self, mapping: Mapping[Value, Value]) -> Self:
        """Replace variables, weights and functions in this block. Returns the same object when none occurs."""
        new: list[AnyBinding] = []
        for b in self.bindings:
            value = replace_operands(b.value, mapping)
            new.append(b if value is b.value else replace(b, value=value))
        return self if same_objects(new, self.bindings) else type(self)(tuple(new))  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True, eq=False)
class DataflowBlock(_BlockBase):
    """Bindings without side effects and without branches: any of them may be removed, reordered or fused."""

    bindings: tuple[AnyBinding, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BindingBlock(_BlockBase):
    """Bindings that may branch or have side effects: they run in order."""

    bindings: tuple[AnyBinding, ...]


AnyBlock = Union[DataflowBlock, BindingBlock]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A graph function; `ret` is an atom or a tuple of atoms, `ret_info` the declared or deduced annotation. `pure`: it
    has no side effects.
    """

    name: str
    params: tuple[GVar, ...]
    blocks: tuple[AnyBlock, ...]
    ret: Value
    ret_info: StructInfo
    pure: bool = True

    @property
    def bindings(self) -> tuple[AnyBinding, ...]:
        """The bindings of the function itself; bindings inside an `if` belong to its value."""
        return tuple(b for block in self.blocks for b in block.bindings)


def replace_operands(value: Value, mapping: Mapping[Value, Value]) -> Value:
    """Replace variables, weights and functions in `value`, inside branches too. Returns the same object when none
    occurs.
    """
    if value.is_atom:
        return mapping.get(value, value)
    return value.with_operands([replace_operands(v, mapping) for v in value.operands])


def captured(value: If) -> tuple[Value, ...]:
    """Return the distinct variables, weights and functions that the sides of an `if` read from outside, in order."""
    outer: dict[Value, None] = {}
    for body in value.bodies:
        bound = {b.var for b in body.bindings}
        for top in (*(b.value for b in body.bindings), body.ret):
            stack = [top]
            while stack:
                v = stack.pop()
                if isinstance(v, (Constant, FunctionRef)) or (isinstance(v, GVar) and v not in bound):
                    outer[v] = None
                stack.extend(reversed(v.operands))
    return tuple(outer)


def name_of(value: Value, otherwise: str) -> str:
    """Return the name of a variable or weight; `otherwise` for other values."""
    return value.name if isinstance(value, (GVar, Constant)) else otherwise
