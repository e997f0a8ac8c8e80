"""Matching of patterns against the dataflow of graph functions: every match, with its captures."""

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

    definitions: the value of each variable of the region.
    readers: number of values that read each variable."""

    module: IRModule
    env: Env
    definitions: Mapping[GVar, Value]
    readers: Mapping[GVar, int]
    kinds: dict[str, PatternKind] = field(default_factory=dict)

    @classmethod
    def over(cls, bindings: Sequence[AnyBinding], ret: Value, module: IRModule, env: Env) -> Scope:
        readers: dict[GVar, int] = {}
        for v in used_vars(ret):
            readers[v] = readers.get(v, 0) + 2  # a returned value may have any number of readers
        for b in bindings:
            for v in used_vars(b.value):
                readers[v] = readers.get(v, 0) + 1
        made = {b.var: b.value for b in bindings if isinstance(b, Binding) and not isinstance(b.value, If)}
        return cls(module, env, made, readers)

    def source(self, v: Value) -> Value:
        """Return the value behind renamings."""
        while isinstance(v, GVar) and isinstance(self.definitions.get(v), (GVar, Constant)):
            v = self.definitions[v]
        return v

    def made(self, v: Value) -> Value | None:
        """Return the definition of a variable of this region, None for one from outside."""
        return self.definitions.get(v) if isinstance(v, GVar) else None

    def call(self, v: Value) -> Call | None:
        """Return the operator call that defines a variable of this region, else None."""
        found = self.made(v)
        return found if isinstance(found, Call) else None

    def kind(self, callee: str) -> PatternKind:
        f = self.module.functions.get(callee)
        if callee not in self.kinds and isinstance(f, PrimFunc):
            self.kinds[callee] = pattern_kind(f)
        return self.kinds.get(callee, PatternKind.OPAQUE)


@dataclass(frozen=True)
class Match:
    """A match of a pattern at the value `root`.

    values: captures.
    dims: dims that `of` names.
    inside: variables whose computation the pattern describes, `root` first.
    unknown: conditions that the match needs and that are not proved."""

    scope: Scope = field(repr=False)
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
        """Return the definition of a capture, such as an operator's call; the capture itself if it comes from outside."""
        found = self[name]
        return self.scope.made(found) or found

    def info(self, name: str) -> StructInfo:
        """Return the annotation of a capture."""
        return self[name].info

    def shape(self, name: str) -> tuple[Expr, ...]:
        """Return the dims of a capture; () for one that is no tensor of known dims."""
        info = self.info(name)
        return info.shape or () if isinstance(info, TensorInfo) else ()

    def operator(self, name: str, kind: type[Op]) -> Op:
        """Return the operator that computes a capture; the pattern guarantees that it is a `kind`."""
        made = self.made(name)
        assert isinstance(made, Call) and isinstance(made.op, kind), f"the pattern does not make {name!r} a {kind}"
        return made.op

    @property
    def root_call(self) -> Call:
        """The operator's call at the root."""
        made = self.scope.made(self.root)
        assert isinstance(made, Call), "the pattern has no operator at its root"
        return made

    def dim(self, name: str) -> Expr:
        """Return the dim that `of` calls `name`."""
        found = self.dims.get(name)
        if found is None:
            raise UserError(f"match: wanted a dim called {name!r}; there are: {', '.join(self.dims) or 'none'}")
        return found

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return the elements of a captured constant."""
        found = self[name]
        if not isinstance(found, Constant):
            raise UserError(f"match: wanted a constant as {name!r}, found {found!r}; capture it with weight({name!r})")
        return self.scope.module.constants[found.name]


def find_matches(p: Operand, root: GVar, scope: Scope) -> Iterator[Match]:
    """Return every way in which the pattern matches `root`, in a fixed order."""
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
            yield from _annotated(p, v.info, found)
    elif isinstance(p, Conditional):
        for found in _match(p.inner, v, m):
            yield from _condition(p.condition(found), found)
    elif isinstance(p, Weight):
        if isinstance(v, Constant) and (p.number is None or _holds(m.scope.module.constants.get(v.name), p.number)):
            yield m
    else:
        yield from _computed(p, v, m)


def _computed(p: Pattern, v: Value, m: Match) -> Iterator[Match]:
    """Yield the matches of a pattern with the definition of a variable."""
    made = m.scope.made(v)
    if made is None or not isinstance(v, GVar):
        return
    inner = m if v in m.inside else replace(m, inside=(*m.inside, v))
    if isinstance(p, TupleField) and isinstance(made, TupleItem) and p.index in (None, made.index):
        yield from _match(p.inner, made.value, inner)
    elif isinstance(p, Packed) and isinstance(made, TupleValue):
        yield inner
    elif isinstance(p, Operation) and isinstance(made, Call) and isinstance(made.op, p.operator):
        if all(_has(getattr(made.op, name), wanted) for name, wanted in p.attributes):
            turned = made.op.commutative and p.args is not None and p.args[0] != p.args[-1]
            for args in permutations(made.args) if turned else (made.args,):
                yield from _all(p.args, args, inner)
    elif isinstance(p, TensorCall) and isinstance(made, CallTIR):
        named = p.callee in (None, made.callee)
        if named and (p.kind is None or m.scope.kind(made.callee) is p.kind):
            yield from _all(p.args, made.args, inner)
    elif isinstance(p, LibraryOperation) and isinstance(made, CallDPSLibrary) and made.routine == p.routine:
        yield from _all(p.args, made.args, inner)


def _all(patterns: Sequence[Pattern] | None, values: Sequence[Value], m: Match) -> Iterator[Match]:
    """Yield the matches of all patterns with their values."""
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
    """Yield the match unless the answer is no; an unknown condition is recorded in it."""
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
    """Return whether an attribute equals `wanted`, or satisfies it if it is a predicate."""
    if isinstance(wanted, (DType, Expr)) or not callable(wanted):
        return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
    return bool(wanted(found))


def _holds(array: np.ndarray[Any, Any] | None, number: float) -> bool:
    """Return whether every element is `number`, rounded to the array's dtype."""
    if array is None or array.size == 0 or array.dtype.kind not in "iuf":
        return False
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
