"""Patterns over the dataflow of graph functions: what to look for, with names for the parts and conditions on them.

A pattern is a frozen value that describes a value and what it was computed from. Patterns are put together with functions
and Python's operators:

    x, w = "x", "w"                                       # a text is a capture: any value, known by that name
    product = op(Matmul, x, w)                            # an operator by its class, with attributes: transpose_b=True
    biased = maybe(product, lambda p: p + "bias")         # with a bias or without one
    silu = value("h") * op(Sigmoid, "h")                  # the same name is the same value; + and * in either order
    half = 0.5 * value("h")                               # a number in an operator, or a constant that is it everywhere
    kernel = tir(x, kind=PatternKind.ELEMENTWISE)         # call_tir, by the loops of its function or by its name
    small = product.once().of("n", 64, dtype=f32)         # read by one other value; dims by name, number or expression
    even = small.where(lambda m: eq(m.dim("n") % 8, 0))   # proved, never guessed

Dims and conditions are decided with yes, no or unknown. An unknown one is noted in `Match.unknown`; a rewrite
(`relax_tune.ir.passes.rewrite`) then leaves the place alone, or puts an `if` around what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from types import EllipsisType
from typing import Any, Union

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.deduce import info_of
from relax_tune.ir.dtype import DType, bool_
from relax_tune.ir.expr import Expr, eq, expr
from relax_tune.ir.function import IRModule, PrimFunc
from relax_tune.ir.graph import (
    AnyBinding,
    Binding,
    Call,
    CallDPSLibrary,
    CallTIR,
    Constant,
    FunctionRef,
    GVar,
    If,
    Operator,
    PrimValue,
    ShapeValue,
    TupleItem,
    Value,
)
from relax_tune.ir.op.elementwise import Add, AddScalar, Div, Mul, MulScalar, Sub
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.passes.patterns import PatternKind, pattern_kind
from relax_tune.ir.passes.rewriter import used_vars
from relax_tune.ir.struct_info import StructInfo, TensorInfo

Operand = Union["Pattern", str, int, float]
"""Where a pattern is wanted: one, the name of a capture, or a number that a constant holds everywhere."""

Dim = Union[Expr, int, str, None, EllipsisType]
"""A dim: an expression or number it must equal, a name for it, None for any; `...` first for any number of leading dims."""


@dataclass(frozen=True)
class Pattern:
    """What a value is. Base of all patterns."""

    def named(self, name: str) -> Pattern:
        """The value is known as `name`; one that has the name already must be the same."""
        return Named(name, self)

    def once(self) -> Pattern:
        """One binding alone reads the value, and the function does not return it."""
        return Once(self)

    def of(self, *dims: Dim, dtype: DType | None = None, ndim: int | None = None) -> Pattern:
        """The value is a tensor of these dims (any when none are given), element type and number of dims."""
        return Annotated(self, dims or None, dtype, ndim)

    def where(self, condition: Callable[[Match], bool | Expr | Proof]) -> Pattern:
        """`condition`, asked once this pattern matches: a bool, an answer, or an expression over the shape symbols to prove."""
        return Where(self, condition)

    def __or__(self, other: Pattern) -> Pattern:
        """This, or where that does not match, `other`."""
        choices = [c for p in (self, pattern(other)) for c in (p.choices if isinstance(p, Either) else (p,))]
        return choices[0] if len(choices) == 1 else Either(tuple(choices))

    def __getitem__(self, index: int) -> Pattern:
        """One field of a tuple."""
        if type(index) is not int or index < 0:
            raise UserError(f"pattern: wanted the number of a tuple's field, found {index!r}; such as split[0]")
        return Item(self, index)

    def __add__(self, other: Operand) -> Pattern:
        return _with_number(AddScalar, self, other) | op(Add, self, other)

    def __radd__(self, other: Operand) -> Pattern:
        return self + other

    def __sub__(self, other: Operand) -> Pattern:
        return _with_number(AddScalar, self, other, -1) | op(Sub, self, other)

    def __mul__(self, other: Operand) -> Pattern:
        return _with_number(MulScalar, self, other) | op(Mul, self, other)

    def __rmul__(self, other: Operand) -> Pattern:
        return self * other

    def __truediv__(self, other: Operand) -> Pattern:
        return op(Div, self, other)

    def __matmul__(self, other: Operand) -> Pattern:
        return op(Matmul, self, other, transpose_b=False)


@dataclass(frozen=True)
class Anything(Pattern):
    """Any value."""


@dataclass(frozen=True)
class Named(Pattern):
    name: str
    inner: Pattern = Anything()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise UserError(f"pattern: wanted a name for a capture, such as 'x', found {self.name!r:.80}")


@dataclass(frozen=True)
class Operation(Pattern):
    """An operator of a class; `args` None for any arguments. An attribute is a value or a predicate of one."""

    operator: type[Operator]
    args: tuple[Pattern, ...] | None
    attributes: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TensorCall(Pattern):
    """A `call_tir` of the function `callee`, or of any of a pattern kind; `args` None for any arguments."""

    callee: str | None
    kind: PatternKind | None
    args: tuple[Pattern, ...] | None


@dataclass(frozen=True)
class LibraryCall(Pattern):
    routine: str
    args: tuple[Pattern, ...] | None


@dataclass(frozen=True)
class Weight(Pattern):
    """A constant, every element of which is `number` unless that is None."""

    number: float | None


@dataclass(frozen=True)
class Either(Pattern):
    choices: tuple[Pattern, ...]


@dataclass(frozen=True)
class Item(Pattern):
    inner: Pattern
    index: int


@dataclass(frozen=True)
class Once(Pattern):
    inner: Pattern


@dataclass(frozen=True)
class Annotated(Pattern):
    inner: Pattern
    dims: tuple[Dim, ...] | None
    dtype: DType | None
    ndim: int | None

    def __post_init__(self) -> None:
        for position, d in enumerate(self.dims or ()):
            if d is ... and position > 0:
                raise UserError("pattern: wanted `...` as the first of the dims, found it later; move it")
            if not (d is None or d is ... or isinstance(d, (str, Expr)) or type(d) is int):
                raise UserError(f"pattern: wanted a dim as a number, a name, an expression or None, found {d!r:.80}")


@dataclass(frozen=True)
class Where(Pattern):
    inner: Pattern
    condition: Callable[[Match], bool | Expr | Proof]


# -- writing patterns ------------------------------------------------------------------------------------------------------


def pattern(x: Operand) -> Pattern:
    """What `x` says as a pattern. Raises UserError for anything else."""
    if isinstance(x, Pattern):
        return x
    if isinstance(x, str):
        return Named(x)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return Weight(x)
    raise UserError(f"pattern: wanted a pattern, the name of a capture or a number, found {x!r:.80}")


def value(name: str) -> Pattern:
    """Any value, known as `name`."""
    return Named(name)


def op(operator: type[Operator], *args: Operand, **attributes: Any) -> Pattern:
    """An operator of this class (or of one below it) on `args`, or on anything when none are given. attributes: values it has,
    or predicates of them. The arguments of a commutative operator match in either order, first as they are written."""
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        raise UserError(f"pattern: wanted the class of an operator, such as Matmul, found {operator!r:.80}")
    known = [f.name for f in fields(operator)]
    for name in attributes:
        if name not in known:
            has = f"its attributes are {', '.join(known)}" if known else "it has none"
            raise UserError(f"pattern: wanted an attribute of {operator.__name__}, found {name!r}; {has}")
    return Operation(operator, _args(args), tuple(attributes.items()))


def tir(*args: Operand, callee: str | None = None, kind: PatternKind | None = None) -> Pattern:
    """A `call_tir` of the tensor function called `callee`, of any of this kind, or of any; on `args`, or on anything."""
    return TensorCall(callee, kind, _args(args))


def library(routine: str, *args: Operand) -> Pattern:
    """A `call_dps_library` of `routine`."""
    return LibraryCall(routine, _args(args))


def weight(name: str | None = None, number: float | None = None) -> Pattern:
    """A constant; `number` is what each of its elements is."""
    return Weight(number) if name is None else Named(name, Weight(number))


def maybe(base: Pattern, wrap: Callable[[Pattern], Pattern]) -> Pattern:
    """`wrap(base)`, or `base` alone."""
    return wrap(base) | base


def _args(args: Sequence[Operand]) -> tuple[Pattern, ...] | None:
    return tuple(pattern(a) for a in args) if args else None


def _with_number(operator: type[Operator], p: Pattern, other: Operand, sign: int = 1) -> Pattern:
    """The operator that holds the number itself, as importers write it; nothing for an operand that is no number."""
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        return Either(())
    wanted = np.float32(sign * other)
    return op(operator, p, value=lambda held: np.float32(held) == wanted)


def names_of(p: Pattern) -> tuple[str, ...]:
    """The names of the captures in a pattern, in order."""
    own = (p.name,) if isinstance(p, Named) else ()
    parts = [x for f in fields(p) for x in _patterns(getattr(p, f.name))]
    return tuple(dict.fromkeys((*own, *(n for x in parts for n in names_of(x)))))


def _patterns(x: object) -> Sequence[Pattern]:
    if isinstance(x, Pattern):
        return (x,)
    return [i for i in x if isinstance(i, Pattern)] if isinstance(x, tuple) else ()


# -- matching --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """Where patterns are looked for: the bindings of one region, how many of them read each value, and the module."""

    module: IRModule
    env: Env
    definitions: Mapping[GVar, Value]
    readers: Mapping[GVar, int]
    kinds: dict[str, PatternKind] = field(default_factory=dict)

    @classmethod
    def over(cls, bindings: Sequence[AnyBinding], ret: Value, module: IRModule, env: Env) -> Scope:
        readers: dict[GVar, int] = {}
        for v in used_vars(ret):
            readers[v] = readers.get(v, 0) + 2  # what is returned is read by who knows how many
        for b in bindings:
            for v in used_vars(b.value):
                readers[v] = readers.get(v, 0) + 1
        made = {b.var: b.value for b in bindings if isinstance(b, Binding) and not isinstance(b.value, If)}
        return cls(module, env, made, readers)

    def source(self, v: Value) -> Value:
        """The value behind other names for it."""
        while isinstance(v, GVar) and isinstance(self.definitions.get(v), (GVar, Constant)):
            v = self.definitions[v]
        return v

    def made(self, v: Value) -> Value | None:
        """What computes a variable of this region."""
        return self.definitions.get(v) if isinstance(v, GVar) else None

    def kind(self, callee: str) -> PatternKind:
        f = self.module.functions.get(callee)
        if callee not in self.kinds and isinstance(f, PrimFunc):
            self.kinds[callee] = pattern_kind(f)
        return self.kinds.get(callee, PatternKind.OPAQUE)


@dataclass(frozen=True)
class Match:
    """How a pattern matches the value `root`.

    values: captures; dims: the dims that `of` names; inside: the variables the pattern looked into, `root` first; unknown: what
    must hold besides and nothing proves."""

    scope: Scope
    root: Value
    values: Mapping[str, Value] = field(default_factory=dict)
    dims: Mapping[str, Expr] = field(default_factory=dict)
    inside: tuple[GVar, ...] = ()
    unknown: tuple[Expr, ...] = ()

    def __getitem__(self, name: str) -> Value:
        found = self.values.get(name)
        if found is None:
            known = ", ".join(self.values) or "none"
            raise UserError(f"match: wanted a capture called {name!r}, which did not match here; there are: {known}")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def made(self, name: str) -> Value:
        """What computes the capture: an operator's call, a `call_tir`; the value itself when it comes from outside."""
        found = self[name]
        return self.scope.made(found) or found

    def info(self, name: str) -> StructInfo:
        """The annotation of a capture."""
        return info_of(self[name])

    def dim(self, name: str) -> Expr:
        """The dim that `of` calls `name`."""
        found = self.dims.get(name)
        if found is None:
            raise UserError(f"match: wanted a dim called {name!r}; there are: {', '.join(self.dims) or 'none'}")
        return found

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The elements of a captured constant."""
        found = self[name]
        if not isinstance(found, Constant):
            raise UserError(f"match: wanted a constant as {name!r}, found {found!r}; capture it with weight({name!r})")
        return self.scope.module.constants[found.name]


def find_matches(p: Operand, root: GVar, scope: Scope) -> Iterator[Match]:
    """Every way in which the pattern matches `root`, in a fixed order."""
    return _match(pattern(p), root, Match(scope, root))


def _match(p: Pattern, v: Value, m: Match) -> Iterator[Match]:
    v = m.scope.source(v)
    if isinstance(p, Anything):
        yield m
    elif isinstance(p, Named):
        for found in _match(p.inner, v, m):
            known = found.values.get(p.name)
            if known is None:
                yield replace(found, values={**found.values, p.name: v})
            elif same_value(known, v):
                yield found
    elif isinstance(p, Either):
        for choice in p.choices:
            yield from _match(choice, v, m)
    elif isinstance(p, Once):
        if isinstance(v, GVar) and m.scope.readers.get(v, 0) == 1:
            yield from _match(p.inner, v, m)
    elif isinstance(p, Annotated):
        for found in _match(p.inner, v, m):
            yield from _annotated(p, info_of(v), found)
    elif isinstance(p, Where):
        for found in _match(p.inner, v, m):
            yield from _condition(p.condition(found), found)
    elif isinstance(p, Weight):
        if isinstance(v, Constant) and (p.number is None or _holds(m.scope.module.constants.get(v.name), p.number)):
            yield m
    else:
        yield from _computed(p, v, m)


def _computed(p: Pattern, v: Value, m: Match) -> Iterator[Match]:
    """Patterns of what computes a variable."""
    made = m.scope.made(v)
    if made is None or not isinstance(v, GVar):
        return
    inner = m if v in m.inside else replace(m, inside=(*m.inside, v))
    if isinstance(p, Item) and isinstance(made, TupleItem) and made.index == p.index:
        yield from _match(p.inner, made.value, inner)
    elif isinstance(p, Operation) and isinstance(made, Call) and isinstance(made.op, p.operator):
        if all(_has(getattr(made.op, name), wanted) for name, wanted in p.attributes):
            turned = made.op.commutative and p.args is not None and p.args[0] != p.args[-1]
            for args in permutations(made.args) if turned else (made.args,):
                yield from _all(p.args, args, inner)
    elif isinstance(p, TensorCall) and isinstance(made, CallTIR):
        named = p.callee in (None, made.callee)
        if named and (p.kind is None or m.scope.kind(made.callee) is p.kind):
            yield from _all(p.args, made.args, inner)
    elif isinstance(p, LibraryCall) and isinstance(made, CallDPSLibrary) and made.routine == p.routine:
        yield from _all(p.args, made.args, inner)


def _all(patterns: Sequence[Pattern] | None, values: Sequence[Value], m: Match) -> Iterator[Match]:
    """Every pattern matches its value."""
    if patterns is None or (not patterns and not values):
        yield m
    elif len(patterns) == len(values):
        for found in _match(patterns[0], values[0], m):
            yield from _all(patterns[1:], values[1:], found)


def _annotated(p: Annotated, info: StructInfo, m: Match) -> Iterator[Match]:
    if not isinstance(info, TensorInfo) or p.dtype not in (None, info.dtype) or p.ndim not in (None, info.ndim):
        return
    wanted = p.dims
    if wanted is not None:
        if info.shape is None:
            return
        have = info.shape
        if wanted[0] is ...:
            wanted = wanted[1:]
            have = have[len(have) - len(wanted) :] if len(have) >= len(wanted) else have
        if len(have) != len(wanted):
            return
        for want, size in zip(wanted, have, strict=True):
            if isinstance(want, str) and want not in m.dims:
                m = replace(m, dims={**m.dims, want: size})
            elif want is not None and want is not ...:
                meant = m.dims[want] if isinstance(want, str) else expr(want)
                known = next(_condition(eq(meant, size), m), None)
                if known is None:
                    return
                m = known
    yield m


def _condition(answer: bool | Expr | Proof, m: Match) -> Iterator[Match]:
    """The match when the answer is yes; with the condition noted when it is unknown."""
    if isinstance(answer, Expr):
        if answer.dtype is not bool_:
            raise UserError(f"pattern: wanted a condition, such as eq(m.dim('n') % 8, 0), found {answer!r}")
        proof = prove(answer, m.scope.env)
        if proof is Proof.UNKNOWN:
            yield m if answer in m.unknown else replace(m, unknown=(*m.unknown, answer))
    elif isinstance(answer, (bool, np.bool_)):
        proof = Proof.YES if answer else Proof.NO
    elif isinstance(answer, Proof):
        proof = answer
    else:
        raise UserError(f"pattern: wanted a bool, an expression or a Proof of a condition, found {answer!r:.80}")
    if proof is Proof.YES:
        yield m


def _has(found: object, wanted: Any) -> bool:
    """An attribute is `wanted`, or what that accepts."""
    if isinstance(wanted, (DType, Expr)) or not callable(wanted):
        return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
    return bool(wanted(found))


def _holds(array: np.ndarray[Any, Any] | None, number: float) -> bool:
    """Whether every element is `number`, as exactly as the array's dtype can say it."""
    if array is None or array.size == 0 or array.dtype.kind not in "iuf":
        return False
    return bool(np.all(array == np.asarray(number).astype(array.dtype)))


def same_value(a: Value, b: Value) -> bool:
    """Whether two atoms are one value."""
    if isinstance(a, (Constant, FunctionRef)) and type(a) is type(b):
        return a.name == b.name
    if isinstance(a, ShapeValue) and isinstance(b, ShapeValue):
        return a.values == b.values
    if isinstance(a, PrimValue) and isinstance(b, PrimValue):
        return a.value == b.value
    return a is b
