"""Static memory planning over symbolic sizes (paper section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.expr import Expr, const, free_vars, mul
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph import (
    Body,
    Call,
    CallDPSLibrary,
    CallFunction,
    CallHost,
    CallTIR,
    Function,
    GVar,
    If,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.op.base import env_of, product
from relax_tune.ir.op.movement import VIEWS
from relax_tune.ir.passes.rewriter import used_vars
from relax_tune.ir.passes.storages import Span, pack
from relax_tune.ir.struct_info import StructInfo, TensorInfo, TupleInfo

Tensor = tuple[GVar, int]
"""A tensor that is made: the variable, and which field of it."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """Where intermediate values live.

    storages: bytes of each, over the graph's symbols. assignment: for a variable, the storage of each tensor it holds (one,
    or one per field of a tuple, None for a field that is returned). Parameters, constants and returned values are not in it;
    views share what they view, and what an `if` gives is what the side taken gave. workspaces: the storages a call needs while
    it runs, for the variable it is bound to.
    """

    storages: tuple[Expr, ...]
    assignment: Mapping[GVar, tuple[int | None, ...]]
    workspaces: Mapping[GVar, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Assign storages by liveness: values that are never in use together may share one, which is as large as the largest of them.

    constant: replace sizes by the largest they can be within the declared bounds, so that memory can be taken once for all calls."""

    constant: bool = False

    def plan(
        self, module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
    ) -> MemoryPlan:
        """The plan of one graph function. workspaces: bytes that the calls of these variables need while they run.

        Raises BuildError when `constant` and a size has no upper bound."""
        env = env_of(module.bounds)
        assignment: dict[GVar, list[int | None]] = {}
        spaces: dict[GVar, list[int]] = {}
        lives = lifetimes(module, name, workspaces)
        sizes = [_at_bounds(life, env) if self.constant else life.nbytes for life in lives]
        storages, slots = pack([Span(x.first, x.last, e) for x, e in zip(lives, sizes, strict=True)], env)
        for life, slot in zip(lives, slots, strict=True):
            if life.index is None:
                spaces.setdefault(life.var, []).append(slot)
                continue
            fields = life.var.info.fields if isinstance(life.var.info, TupleInfo) else (None,)
            assignment.setdefault(life.var, [None] * len(fields))[life.index] = slot
        return MemoryPlan(
            storages, {v: tuple(s) for v, s in assignment.items()}, {v: tuple(s) for v, s in spaces.items()}
        )


SYMBOLIC = PlanMemory()


def _at_bounds(life: Lifetime, env: Env) -> Expr:
    """Its largest size within the declared bounds."""
    largest = interval(life.nbytes, env)[1]
    if largest is None:
        missing = [v.name for v in free_vars(life.nbytes) if env.range_of(v)[1] is None]
        raise BuildError(
            f"{life.var.name}: wanted an upper bound of {', '.join(missing) or repr(life.nbytes)} for a constant memory plan, "
            "found none; declare one or plan symbolically"
        )
    return const(largest)


@dataclass(frozen=True, slots=True, eq=False)
class Lifetime:
    """A tensor that needs memory of its own: field `index` of `var`, `nbytes` over the graph's symbols, from the position of the
    step that makes it to that of the last one that reads it. index None: a workspace of the call that makes `var`."""

    var: GVar
    index: int | None
    nbytes: Expr
    first: int
    last: int


def lifetimes(
    module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
) -> tuple[Lifetime, ...]:
    """Every tensor a plan of the graph function `name` places, in the order they are made: neither views nor what is returned;
    after those a call makes, its workspaces.

    Raises BuildError, naming the value, for one whose dims or dtype are not known."""
    func = module.functions[name]
    assert isinstance(func, Function)
    env = env_of(module.bounds)
    roots = _Roots()
    last: dict[Tensor, int] = {}
    made: list[tuple[int, GVar, int, TensorInfo]] = []
    for position, (var, value) in enumerate(_steps(func)):
        outs = _made(value, var.info)
        made += [(position, var, i, t) for i, t in enumerate(outs)]
        if not outs:
            roots.alias(var, value)
        for read in roots.of_all(value):
            last[read] = position
    kept = roots.of_all(func.ret)
    placed = [m for m in made if (m[1], m[2]) not in kept]
    lives = [Lifetime(v, i, _nbytes(v, t, env), at, last.get((v, i), at)) for at, v, i, t in placed]
    where = {v: at for at, (v, _) in enumerate(_steps(func))}
    for v, sizes in (workspaces or {}).items():
        lives += [Lifetime(v, None, simplify(size, env), where[v], where[v]) for size in sizes]
    return tuple(sorted(lives, key=lambda life: life.first))


def _nbytes(var: GVar, info: TensorInfo, env: Env) -> Expr:
    if info.shape is None or info.dtype is None:
        raise BuildError(f"{var.name}: wanted known dims and dtype to plan memory, found {info!r}; add a match_cast")
    return simplify(mul(product(info.shape), info.dtype.bytes), env)


def overlay(groups: Sequence[Sequence[Expr]], env: Env) -> tuple[tuple[Expr, ...], tuple[tuple[int, ...], ...]]:
    """Sizes of places that hold any one group of arrays at a time, and for each group the places of its arrays."""
    sizes, places = pack([Span(at, at, size) for at, group in enumerate(groups) for size in group], env)
    left = iter(places)
    return sizes, tuple(tuple(next(left) for _ in group) for group in groups)


def _steps(body: Function | Body) -> Iterator[tuple[GVar, Value]]:
    """Bindings in an order in which everything comes after what it reads, whichever sides of branches are taken: one side of an
    `if` after the other, then the `if` itself, which reads all of both."""
    for b in body.bindings:
        if isinstance(b.value, If):
            yield from _steps(b.value.then)
            yield from _steps(b.value.orelse)
        yield b.var, b.value


class _Roots:
    """Which made tensors a variable stands for: itself, or through views, tuples and branches others."""

    def __init__(self) -> None:
        self._of: dict[GVar, tuple[Tensor, ...]] = {}
        self._parts: dict[GVar, tuple[tuple[Tensor, ...], ...]] = {}

    def alias(self, var: GVar, value: Value) -> None:
        self._of[var] = self.fields(value)
        parts = self.parts(value)
        if parts is not None:
            self._parts[var] = parts

    def parts(self, value: Value) -> tuple[tuple[Tensor, ...], ...] | None:
        """What each field of a tuple stands for, where that is known apart."""
        if isinstance(value, TupleValue):
            return tuple(map(self.fields, value.fields))
        if isinstance(value, GVar) and value not in self._of and isinstance(value.info, TupleInfo):
            return tuple((t,) for t in self.fields(value))
        return self._parts.get(value) if isinstance(value, GVar) else None

    def fields(self, value: Value) -> tuple[Tensor, ...]:
        """Everything that `value` may be or hold."""
        if isinstance(value, GVar):
            if value in self._of:
                return self._of[value]
            count = len(value.info.fields) if isinstance(value.info, TupleInfo) else 1
            return tuple((value, i) for i in range(count))
        if isinstance(value, TupleItem):
            parts = self.parts(value.value)
            return self.fields(value.value) if parts is None else parts[value.index]
        if isinstance(value, TupleValue):
            return tuple(k for f in value.fields for k in self.fields(f))
        if isinstance(value, If):  # either side's result
            return (*self.fields(value.then.ret), *self.fields(value.orelse.ret))
        if isinstance(value, (Call, CallFunction, CallHost)):  # a callee may give back an argument
            return tuple(k for v in used_vars(value) for k in self.fields(v))
        return ()

    def of_all(self, value: Value) -> set[Tensor]:
        """Every made tensor a value reads, or may be."""
        if isinstance(value, TupleItem):
            return set(self.fields(value))
        found = {k for v in used_vars(value) for k in self.fields(v)}
        return found | set(self.fields(value)) if isinstance(value, If) else found


def _made(value: Value, info: StructInfo) -> Sequence[TensorInfo]:
    """The tensors a binding makes in new memory; none for views, tuples and casts."""
    if isinstance(value, (CallTIR, CallDPSLibrary)):
        return value.out
    if isinstance(value, Call) and not isinstance(value.op, VIEWS):
        fields = info.fields if isinstance(info, TupleInfo) else (info,)
        return [f for f in fields if isinstance(f, TensorInfo)]
    return ()
