"""Matching of patterns against the dataflow of graph functions: every match, with its captures.

Tests: `tests/ir/rewrite/test_pattern.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, TypeVar

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import Expr, eq, expr
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import (
    AnyBinding,
    Binding,
    Call,
    CallDPSLibrary,
    CallTIR,
    Constant,
    FunctionRef,
    GVar,
    If,
    PrimValue,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.deduce.pattern_kinds import PatternKind, pattern_kind
from relax_tune.ir.rewrite.pattern import (
    Annotated,
    Anything,
    Conditional,
    Either,
    LibraryOperation,
    Named,
    Once,
    Operand,
    Operation,
    Packed,
    Pattern,
    TensorCall,
    TupleField,
    Weight,
    pattern,
)

Op = TypeVar("Op", bound=Operator)


@dataclass(frozen=True)
class Scope:
    """The region in which patterns are matched.

    Attributes:
        definitions: the value of each variable of the region.
        readers: number of values that read each variable.
    """

    module: IRModule
    env: Env
    definitions: Mapping[GVar, Value]
    readers: Mapping[GVar, int]
    kinds: dict[str, PatternKind] = field(default_factory=dict)

    @classmethod
    def over(cls, bindings: Sequence[AnyBinding], ret: Value, module: IRModule, env: Env) -> Scope:
        readers: dict[GVar, int] = {}
        for v in used_vars(ret):
            readers[v] = readers.get(v, 0) + 2  # a returned value may have further readers outside
        for b in bindings:
            for v in used_vars(b.value):
                readers[v] = readers.get(v, 0) + 1
        # A match_cast has no definition here: it asserts facts at its place, which a replacement of the whole match
        # would lose.
        definitions = {b.var: b.value for b in bindings if isinstance(b, Binding) and not isinstance(b.value, If)}
        return cls(module, env, definitions, readers)

    def source(self, v: Value) -> Value:
        """Return the value that aliases stand for."""
        while isinstance(v, GVar) and isinstance(self.definitions.get(v), (GVar, Constant)):
            v = self.definitions[v]
        return v

    def definition(self, v: Value) -> Value | None:
        """Return the definition of a variable of this region, None for one from outside."""
        return self.definitions.get(v) if isinstance(v, GVar) else None

    def call(self, v: Value) -> Call | None:
        """Return the operator call that defines a variable of this region, else None."""
        value = self.definition(v)
        return value if isinstance(value, Call) else None

    def kind(self, callee: str) -> PatternKind:
        f = self.module.functions.get(callee)
        if callee not in self.kinds and isinstance(f, PrimFunc):
            self.kinds[callee] = pattern_kind(f)
        return self.kinds.get(callee, PatternKind.OPAQUE)


@dataclass(frozen=True)
class Match:
    """A match of a pattern at the value `root`.

    Attributes:
        values: captures.
        dims: dims that `of` names.
        inside: variables whose computation the pattern describes, `root` first.
        unknown: conditions that the match needs and that are not proved.
    """

    scope: Scope = field(repr=False)
    root: Value
    values: Mapping[str, Value] = field(default_factory=dict)
    dims: Mapping[str, Expr] = field(default_factory=dict)
    inside: tuple[GVar, ...] = ()
    unknown: tuple[Expr, ...] = ()

    def __getitem__(self, name: str) -> Value:
        value = self.values.get(name)
        if value is None:
            known = ", ".join(self.values) or "none"
            raise UserError(f"match: expected a capture called {name!r}, which did not match here; there are: {known}")
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def definition(self, name: str) -> Value:
        """Return the definition of a capture, such as an operator's call; the capture itself if it comes from outside."""
        value = self[name]
        return self.scope.definition(value) or value

    def info(self, name: str) -> StructInfo:
        """Return the annotation of a capture."""
        return self[name].info

    def shape(self, name: str) -> tuple[Expr, ...]:
        """Return the dims of a capture; () for one that is no tensor of known dims."""
        info = self.info(name)
        return info.shape or () if isinstance(info, TensorInfo) else ()

    def operator(self, name: str, kind: type[Op]) -> Op:
        """Return the operator that computes a capture; the pattern guarantees that it is a `kind`."""
        call = self.definition(name)
        assert isinstance(call, Call) and isinstance(call.op, kind), f"the pattern does not make {name!r} a {kind}"
        return call.op

    @property
    def root_call(self) -> Call:
        """The operator's call at the root."""
        call = self.scope.definition(self.root)
        assert isinstance(call, Call), "the pattern has no operator at its root"
        return call

    def dim(self, name: str) -> Expr:
        """Return the dim that `of` calls `name`."""
        dim = self.dims.get(name)
        if dim is None:
            raise UserError(f"match: expected a dim called {name!r}; there are: {', '.join(self.dims) or 'none'}")
        return dim

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return the elements of a captured constant."""
        value = self[name]
        if not isinstance(value, Constant):
            raise UserError(f"match: expected a constant as {name!r}, got {value!r}; capture it with weight({name!r})")
        return self.scope.module.constants[value.name]


def find_matches(p: Operand, root: GVar, scope: Scope) -> Iterator[Match]:
    """Yield every match of the pattern at `root`, in a fixed order."""
    return _match(pattern(p), root, Match(scope, root))


def _match(p: Pattern, v: Value, m: Match) -> Iterator[Match]:
    v = m.scope.source(v)
    if isinstance(p, Anything):
        yield m
    elif isinstance(p, Named):
        for match in _match(p.inner, v, m):
            known = match.values.get(p.name)
            # The first occurrence of a name captures, each further one compares.
            if known is None:
                yield replace(match, values={**match.values, p.name: v})
            elif same_value(known, v):
                yield match
    elif isinstance(p, Either):
        for choice in p.choices:
            yield from _match(choice, v, m)
    elif isinstance(p, Once):
        if isinstance(v, GVar) and m.scope.readers.get(v, 0) == 1:
            yield from _match(p.inner, v, m)
    elif isinstance(p, Annotated):
        for match in _match(p.inner, v, m):
            yield from _annotated(p, v.info, match)
    elif isinstance(p, Conditional):
        for match in _match(p.inner, v, m):
            yield from _condition(p.condition(match), match)
    elif isinstance(p, Weight):
        if isinstance(v, Constant) and (p.number is None or _holds(m.scope.module.constants.get(v.name), p.number)):
            yield m
    else:
        yield from _computed(p, v, m)


def _computed(p: Pattern, v: Value, m: Match) -> Iterator[Match]:
    """Yield the matches of a pattern with the definition of a variable."""
    call = m.scope.definition(v)
    if call is None or not isinstance(v, GVar):
        return
    if isinstance(p, Operation) and not (isinstance(call, Call) and isinstance(call.op, p.operator)):
        return  # most values by far
    # A value that two parts of a pattern match is computed once, so it is listed once.
    inner = m if v in m.inside else replace(m, inside=(*m.inside, v))
    if isinstance(p, TupleField) and isinstance(call, TupleItem) and p.index in (None, call.index):
        yield from _match(p.inner, call.value, inner)
    elif isinstance(p, Packed) and isinstance(call, TupleValue):
        yield inner
    elif isinstance(p, Operation) and isinstance(call, Call) and isinstance(call.op, p.operator):
        if all(_has(getattr(call.op, name), expected) for name, expected in p.attributes):
            # Two equal patterns would give each match twice.
            turned = call.op.commutative and p.args is not None and p.args[0] != p.args[-1]
            for args in permutations(call.args) if turned else (call.args,):
                yield from _all(p.args, args, inner)
    elif isinstance(p, TensorCall) and isinstance(call, CallTIR):
        named = p.callee in (None, call.callee)
        if named and (p.kind is None or m.scope.kind(call.callee) is p.kind):
            yield from _all(p.args, call.args, inner)
    elif isinstance(p, LibraryOperation) and isinstance(call, CallDPSLibrary) and call.routine == p.routine:
        yield from _all(p.args, call.args, inner)


def _all(patterns: Sequence[Pattern] | None, values: Sequence[Value], m: Match) -> Iterator[Match]:
    """Yield the matches of all patterns with their values."""
    if patterns is None or (not patterns and not values):
        yield m
    elif len(patterns) == len(values):
        # Backtracking: a match of the first operand may bind names so that the others fail, and the next match of it
        # does not.
        for first in _match(patterns[0], values[0], m):
            yield from _all(patterns[1:], values[1:], first)


def _annotated(p: Annotated, info: StructInfo, m: Match) -> Iterator[Match]:
    if not isinstance(info, TensorInfo) or p.dtype not in (None, info.dtype) or p.ndim not in (None, info.ndim):
        return
    dims = p.dims
    if dims is not None:
        if info.shape is None:
            return
        sizes = info.shape
        if dims[0] is ...:
            dims = dims[1:]
            sizes = sizes[len(sizes) - len(dims) :] if len(sizes) >= len(dims) else sizes
        if len(sizes) != len(dims):
            return
        for dim, size in zip(dims, sizes, strict=True):
            if isinstance(dim, str) and dim not in m.dims:
                m = replace(m, dims={**m.dims, dim: size})
            elif dim is not None and dim is not ...:
                value = m.dims[dim] if isinstance(dim, str) else expr(dim)
                known = next(_condition(eq(value, size), m), None)
                if known is None:
                    return
                m = known
    yield m


def _condition(answer: bool | Expr | Proof, m: Match) -> Iterator[Match]:
    """Yield the match unless the condition is disproved; an unknown condition is recorded in it."""
    if isinstance(answer, Expr):
        if answer.dtype is not bool_:
            raise UserError(f"pattern: expected a condition, such as eq(m.dim('n') % 8, 0), got {answer!r}")
        proof = prove(answer, m.scope.env)
        if proof is Proof.UNKNOWN:
            yield m if answer in m.unknown else replace(m, unknown=(*m.unknown, answer))
    elif isinstance(answer, (bool, np.bool_)):
        proof = Proof.YES if answer else Proof.NO
    elif isinstance(answer, Proof):
        proof = answer
    else:
        raise UserError(f"pattern: expected a bool, an expression or a Proof of a condition, got {answer!r:.80}")
    if proof is Proof.YES:
        yield m


def _has(attribute: object, expected: Any) -> bool:
    """Return whether an attribute equals `expected`, or satisfies it if it is a predicate."""
    if isinstance(expected, (DType, Expr)) or not callable(expected):
        # True == 1 in Python, but transpose_b=True is not an attribute of 1.
        return isinstance(attribute, bool) == isinstance(expected, bool) and bool(attribute == expected)
    return bool(expected(attribute))


def _holds(array: np.ndarray[Any, Any] | None, number: float) -> bool:
    """Return whether every element is `number`, rounded to the array's dtype."""
    if array is None or array.size == 0 or array.dtype.kind not in "iuf":
        return False
    # Compared in the type of the array: 0.1 is not 0.1 in float32.
    return bool(np.all(array == np.asarray(number).astype(array.dtype)))


def same_value(a: Value, b: Value) -> bool:
    """Return whether two atoms are the same value."""
    if isinstance(a, (Constant, FunctionRef)) and type(a) is type(b):
        return a.name == b.name
    if isinstance(a, ShapeValue) and isinstance(b, ShapeValue):
        return a.values == b.values
    if isinstance(a, PrimValue) and isinstance(b, PrimValue):
        return a.value == b.value
    return a is b
