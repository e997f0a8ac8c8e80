"""Graph functions: bindings of values in A-normal form, across levels (paper sections 3.1 to 3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Union

from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.struct_info import CallableInfo, StructInfo, TensorInfo


@dataclass(frozen=True, slots=True)
class Operator:
    """Base of graph operators: one frozen subclass per operator in `ir/op`, whose fields are its attributes.

    A subclass sets `name` and implements deduction, legalisation to a tensor function and evaluation in NumPy;
    see `relax_tune.ir.op.base.OperatorSpec`.
    """

    commutative: ClassVar[bool] = False
    """Whether it gives the same for its arguments in any order."""


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
    symbols; `scalars` are the explicit scalar arguments.

    inplace: `call_tir_inplace`, for each output the position of the argument whose memory it takes, or None. It says where
    results lie and never what they are: the function must read of such an argument only the element it is about to write."""

    callee: str
    args: tuple[Value, ...]
    out: tuple[TensorInfo, ...]
    scalars: tuple[Expr, ...] = ()
    inplace: tuple[int | None, ...] = ()


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


@dataclass(frozen=True, slots=True, eq=False)
class PrimValue:
    """A scalar over the shape symbols: a number, or a condition such as `n < 8`."""

    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class FunctionRef:
    """A graph function of the module as a value, by name, with its signature."""

    name: str
    info: CallableInfo


@dataclass(frozen=True, slots=True, eq=False)
class CallFunction:
    """A graph function called: one of the module, or whichever a variable holds."""

    callee: Value
    args: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CallHost:
    """A routine of the host program, opaque: `out` is all that is known of its result. Unless `pure` it may do more than
    compute that, so it stays where it is."""

    routine: str
    args: tuple[Value, ...]
    out: StructInfo
    pure: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One side of an `if`: its own bindings, and the atom (or tuple of atoms) it gives."""

    blocks: tuple[AnyBlock, ...]
    ret: Value

    @property
    def bindings(self) -> tuple[AnyBinding, ...]:
        return tuple(b for block in self.blocks for b in block.bindings)


@dataclass(frozen=True, slots=True, eq=False)
class If:
    """`then` where `cond`, a scalar of bool, holds, otherwise `orelse`; only that side is computed."""

    cond: Value
    then: Body
    orelse: Body


Atom = Union[GVar, Constant, ShapeValue, PrimValue, FunctionRef]
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


@dataclass(frozen=True, slots=True, eq=False)
class MatchCast:
    """`var = match_cast(value, info)`: asserted at run time; symbols of `info` not seen before are bound by it."""

    var: GVar
    value: Value
    info: StructInfo


AnyBinding = Union[Binding, MatchCast]


@dataclass(frozen=True, slots=True, eq=False)
class DataflowBlock:
    """Bindings without side effects and without branches: any of them may be removed, reordered or fused."""

    bindings: tuple[AnyBinding, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BindingBlock:
    """Bindings that may branch or have side effects: they run in order."""

    bindings: tuple[AnyBinding, ...]


AnyBlock = Union[DataflowBlock, BindingBlock]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A graph function; `ret` is an atom or a tuple of atoms, `ret_info` the declared or deduced annotation. `pure`: it does
    nothing but compute its result."""

    name: str
    params: tuple[GVar, ...]
    blocks: tuple[AnyBlock, ...]
    ret: Value
    ret_info: StructInfo
    pure: bool = True

    @property
    def bindings(self) -> tuple[AnyBinding, ...]:
        """The bindings of the function itself; those inside an `if` are its value's."""
        return tuple(b for block in self.blocks for b in block.bindings)


def operands(value: Value) -> Sequence[Value]:
    """The values a value is made of; of an `if` its condition and what its sides take from outside."""
    if isinstance(value, (Call, CallTIR, CallDPSLibrary, CallHost)):
        return value.args
    if isinstance(value, CallFunction):
        return (value.callee, *value.args)
    if isinstance(value, TupleValue):
        return value.fields
    if isinstance(value, If):
        return (value.cond, *captured(value))
    return (value.value,) if isinstance(value, TupleItem) else ()


def captured(value: If) -> tuple[Value, ...]:
    """The distinct variables, weights and functions that the sides of an `if` take from outside, in order."""
    found: dict[Value, None] = {}
    for body in (value.then, value.orelse):
        own = {b.var for b in body.bindings}
        for top in (*(b.value for b in body.bindings), body.ret):
            stack = [top]
            while stack:
                v = stack.pop()
                if isinstance(v, (Constant, FunctionRef)) or (isinstance(v, GVar) and v not in own):
                    found[v] = None
                stack.extend(reversed(operands(v)))
    return tuple(found)


def all_blocks(f: Function | Body) -> Iterator[AnyBlock]:
    """Every block in `f`, those of sides of an `if` before the block that branches."""
    for block in f.blocks:
        for b in block.bindings:
            if isinstance(b.value, If):
                yield from all_blocks(b.value.then)
                yield from all_blocks(b.value.orelse)
        yield block


def all_bindings(f: Function | Body) -> Iterator[AnyBinding]:
    """Every binding in `f`, after everything it reads, whichever sides of branches are taken: one side of an `if` after the other,
    then the `if` itself, which reads all of both."""
    for b in f.bindings:
        if isinstance(b.value, If):
            yield from all_bindings(b.value.then)
            yield from all_bindings(b.value.orelse)
        yield b


def all_uses(f: Function) -> Iterator[Value]:
    """What reads variables, each once: the value of every binding, for an `if` its condition and the results of its sides, and the
    result of `f`."""
    for b in all_bindings(f):
        yield from (b.value.cond, b.value.then.ret, b.value.orelse.ret) if isinstance(b.value, If) else (b.value,)
    yield f.ret


def callees(f: Function | Body) -> tuple[str, ...]:
    """The names of the graph functions that `f` speaks of, in order, each once."""
    return tuple(dict.fromkeys(v.name for v in nested_values(f) if isinstance(v, FunctionRef)))


def entries(functions: Mapping[str, object]) -> dict[str, Function]:
    """Those of a module's graph functions that no other one calls, and `main`: what a built model offers by name."""
    graphs = {n: f for n, f in functions.items() if isinstance(f, Function)}
    called = {callee for n, f in graphs.items() for callee in callees(f) if callee != n}
    return {n: f for n, f in graphs.items() if n not in called or n == "main"}


def nested_values(f: Function | Body) -> Iterator[Value]:
    """Every value in `f`, those inside branches and operands included."""
    stack: list[Value] = [f.ret, *(b.value for b in reversed(f.bindings))]
    while stack:
        v = stack.pop()
        yield v
        if isinstance(v, If):
            stack.append(v.cond)
            for body in (v.orelse, v.then):
                stack += [body.ret, *(b.value for b in reversed(body.bindings))]
        else:
            stack.extend(reversed(operands(v)))


def is_impure(value: Value) -> bool:
    """Whether computing `value` may do more than that, as far as its own annotation tells."""
    if isinstance(value, CallHost):
        return not value.pure
    if isinstance(value, CallFunction):
        info = value.callee.info if isinstance(value.callee, (GVar, FunctionRef)) else None
        return isinstance(info, CallableInfo) and not info.pure
    return isinstance(value, If) and any(is_impure(b.value) for s in (value.then, value.orelse) for b in s.bindings)


def regions(blocks: Sequence[AnyBlock]) -> tuple[tuple[bool, tuple[AnyBinding, ...]], ...]:
    """(dataflow, bindings) of each region: neighbouring binding blocks are one, and empty ones are none."""
    found: list[tuple[bool, tuple[AnyBinding, ...]]] = []
    for block in blocks:
        dataflow = isinstance(block, DataflowBlock)
        if not dataflow and found and not found[-1][0]:
            found[-1] = (False, found[-1][1] + block.bindings)
        elif dataflow or block.bindings:
            found.append((dataflow, block.bindings))
    return tuple(found)


def into_blocks(bindings: Sequence[AnyBinding]) -> tuple[AnyBlock, ...]:
    """Branches and side effects stand by themselves, everything between them is dataflow."""
    blocks: list[AnyBlock] = []
    plain: list[AnyBinding] = []
    for b in bindings:
        if isinstance(b.value, If) or is_impure(b.value):
            if plain:
                blocks.append(DataflowBlock(tuple(plain)))
                plain = []
            blocks.append(BindingBlock((b,)))
        else:
            plain.append(b)
    if plain or not blocks:
        blocks.append(DataflowBlock(tuple(plain)))
    return tuple(blocks)
