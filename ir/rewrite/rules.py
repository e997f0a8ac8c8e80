"""Rules that rewrite graph functions by patterns, and the pass that applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, Union

from numpy.typing import NDArray

from relax_tune.errors import DeduceError, RelaxTuneError, UserError, VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.verify_graph import verify_function
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.expr import Expr, ExprLike, and_, eq, expr
from relax_tune.ir.core.function import AnyFunction, Bound, IRModule, PrimFunc
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, info_parts
from relax_tune.ir.deduce.deduce import infer_value, side_env, signature
from relax_tune.ir.deduce.relations import call_differences, differences, is_known
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.rewrite.dead_code import Liveness
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable
from relax_tune.ir.rewrite.match import Match, Scope, find_matches
from relax_tune.ir.rewrite.pattern import Operand, Pattern, pattern
from relax_tune.ir.text.printer import excerpt

Given = Union[g.Value, str]
"""An argument of a rule's value: a value, or the name of a capture."""

T = TypeVar("T")
Op = TypeVar("Op", bound=Operator)
LevelName = Literal["import", "operators", "functions", "fused"]
LEVELS: tuple[LevelName, ...] = ("import", "operators", "functions", "fused")
MAX_ROUNDS = 100
"""Rounds of rewriting after which rules count as having no fixpoint."""


class Unfit(Exception):
    """The new value of a rule does not fit at the place."""


@dataclass(frozen=True)
class Rule:
    """Replacement of every value that `pattern` matches by another computation.

    Attributes:
        put: builds the new value with the methods of `Site`; returns None to change nothing.
        guarded: if a condition is unknown until run time, emit an `if` on it, with the old computation on the other side. Otherwise such
            a place is not changed. A place whose own run-time checks would be lost is never changed.
        level: the point of the pipeline where `tune` and `build` apply the rule: "import" (the imported program, to a fixpoint),
            "operators", "functions" (the tensor functions that operators become) or "fused".
        equation: old and new side as text, for readers.
    """

    pattern: Pattern
    put: Callable[[Site], g.Value | None]
    name: str = ""
    guarded: bool = False
    level: LevelName = "operators"
    equation: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern) or not callable(self.put):
            raise UserError(f"rule: expected a pattern and a function of what it matched, got {self.pattern!r:.80}")
        if self.level not in LEVELS:
            raise UserError(f"rule {self.title}: expected a level among {', '.join(LEVELS)}, got {self.level!r}")
        if self.guarded and self.level != "operators":
            raise UserError(
                f"rule {self.title}: a guard is an `if`, which no level below operators has; drop one of the two"
            )

    @property
    def title(self) -> str:
        return self.name or getattr(self.put, "__name__", "rule")


@dataclass
class Site:
    """A match with methods that build the new value from its captures.

    Values may be nested; each part gets a binding. `call_tir` and `call_dps_library` write results annotated
    like the matched value, unless `out` is given.
    """

    match: Match
    info: StructInfo
    level: LevelName
    module: Parts

    def __getitem__(self, name: str) -> g.Value:
        return self.match[name]

    def __contains__(self, name: object) -> bool:
        return name in self.match

    def definition(self, name: str) -> g.Value:
        """Return the definition of a capture; see `Match.definition`."""
        return self.match.definition(name)

    def dim(self, name: str) -> Expr:
        """Return a dim of a capture; see `Match.dim`."""
        return self.match.dim(name)

    def shape(self, name: str) -> tuple[Expr, ...]:
        """Return the dims of a capture; see `Match.shape`."""
        return self.match.shape(name)

    def operator(self, name: str, kind: type[Op]) -> Op:
        """Return the operator of a capture; see `Match.operator`."""
        return self.match.operator(name, kind)

    @property
    def root(self) -> g.Call:
        """The operator's call that the pattern matched."""
        return self.match.root_call

    @property
    def deduction(self) -> Deduction:
        """The facts about the symbols here."""
        return Deduction(self.match.scope.env)

    def _args(self, args: Sequence[Given]) -> tuple[g.Value, ...]:
        return tuple(self.match[a] if isinstance(a, str) else a for a in args)

    def _out(self, out: TensorInfo | Sequence[TensorInfo] | None) -> tuple[TensorInfo, ...]:
        if isinstance(out, TensorInfo):
            return (out,)
        fields: Sequence[StructInfo] = out or info_parts(self.info)
        known = tuple(i for i in fields if is_known(i))
        if len(known) != len(fields):
            raise Unfit
        return known

    def call(self, operator: Operator, *args: Given) -> g.Call:
        """Make a call of an operator on captures or values."""
        return g.Call(operator, self._args(args))

    def tir(
        self,
        func: PrimFunc | str,
        *args: Given,
        scalars: Sequence[ExprLike] = (),
        out: TensorInfo | Sequence[TensorInfo] | None = None,
    ) -> g.CallTIR:
        """Make a `call_tir` of a tensor function.

        Args:
            func: a function, which joins the module, or the name of one in the module.
        """
        callee = self.module.table.add(func) if isinstance(func, PrimFunc) else func
        return g.CallTIR(callee, self._args(args), self._out(out), tuple(expr(s) for s in scalars))

    def library(
        self,
        routine: str,
        *args: Given,
        scalars: Sequence[ExprLike] = (),
        out: TensorInfo | Sequence[TensorInfo] | None = None,
    ) -> g.CallDPSLibrary:
        """Make a `call_dps_library` of a routine such as `openblas.sgemm`."""
        return g.CallDPSLibrary(routine, self._args(args), self._out(out), tuple(expr(s) for s in scalars))

    def function(self, module: IRModule, *args: Given) -> g.CallFunction:
        """Make a call of the one graph function of another module, which joins this module.

        The module comes from a `GraphBuilder` with a free name. Only rules of level "operators" may call this, since
        calls are inlined before the other levels.
        """
        if self.level != "operators":
            raise UserError(
                f"expected a graph function at level 'operators', got level {self.level!r}; put a tensor function"
            )
        return g.CallFunction(self.module.include(module), self._args(args))


@dataclass
class Parts:
    """Functions, weights and bounds of a module under construction."""

    table: FunctionTable
    constants: dict[str, NDArray[Any]]
    bounds: tuple[Bound, ...]

    @classmethod
    def none(cls) -> Parts:
        """Return an empty set of parts, for rules that emit operators only."""
        return cls(FunctionTable({}), {}, ())

    def include(self, other: IRModule) -> g.FunctionRef:
        graphs = list(other.graphs.values())
        if len(graphs) != 1:
            raise UserError(f"expected a module with one graph function, got {len(graphs)}")
        (f,) = graphs
        _join(self.table.functions, other.functions, "function")
        _join(self.constants, other.constants, "weight")
        known = {b.var for b in self.bounds}
        self.bounds += tuple(b for b in other.bounds if b.var not in known)
        return g.FunctionRef(f.name, signature(f))


def _join(table: dict[str, T], added: Mapping[str, T], what: str) -> None:
    for name, new in added.items():
        if table.setdefault(name, new) is not new:
            raise UserError(f"the module already has a {what} called {name!r}; rename the new one")


@dataclass(frozen=True)
class _Chosen:
    """The replacement of one value: bindings, and the value over them.

    Attributes:
        unknown: conditions that it needs.
    """

    match: Match
    bindings: tuple[g.Binding, ...]
    value: g.Value
    unknown: tuple[Expr, ...]


@dataclass(frozen=True, repr=False)
class RewriteByPattern:
    """Replace every value that a rule's pattern matches by the rule's value.

    Deterministic: values are visited from the last to the first, so the outermost match wins, and among several rules the
    first. A value read only by replaced values is dropped and matches nothing. A value with other readers stays, and
    may match itself. A match stays within one region (a function, or a side of an `if`) and does not pass a match_cast.
    New values are not matched again, unless `to_fixpoint` repeats until nothing matches.

    Raises:
        VerifyError: a rule's value does not fit; shows the place.
    """

    rules: tuple[Rule, ...]
    to_fixpoint: bool = False

    def __repr__(self) -> str:
        return f"RewriteByPattern({', '.join(r.title for r in self.rules)})"

    def __call__(self, module: IRModule) -> IRModule:
        for _ in range(MAX_ROUNDS if self.to_fixpoint else 1):
            new = self._once(module)
            if new is module or not self.to_fixpoint:
                return new
            module = new
        raise UserError(f"{self!r}: expected rules that come to an end, got changes in {MAX_ROUNDS} rounds")

    def _once(self, module: IRModule) -> IRModule:
        parts = Parts(FunctionTable.of(module.functions), dict(module.constants), module.bounds)
        changed: dict[str, g.Function] = {}
        for name, f in module.functions.items():
            if isinstance(f, g.Function):
                new = _Rewriter(self.rules, module, parts, f).run()
                if new is not f:
                    changed[name] = new
        if not changed:
            return module
        functions: dict[str, AnyFunction] = {**parts.table.functions, **changed}
        result = IRModule(functions, parts.constants, parts.bounds)
        for f in changed.values():
            try:
                verify_function(f, result)
            except VerifyError as error:
                raise VerifyError(f"after {self!r}: {error}") from None
        # Only new tensor functions: the others were examined when the module was read, and trial runs are slow.
        examine(result, functions.keys() - module.functions.keys())
        return result


def rewrite(module: IRModule, rules: Rule | Iterable[Rule]) -> IRModule:
    """Rewrite every place that a rule matches, of any level. Returns the same object when none matches.

    Raises: as `RewriteByPattern`.
    """
    return RewriteByPattern((rules,) if isinstance(rules, Rule) else tuple(rules))(module)


def matches(module: IRModule, operand: Operand) -> Iterator[Match]:
    """Yield every match in the module's graph functions outside branches, from the last value to the first.

    It serves to try a pattern.
    """
    for f in module.functions.values():
        if isinstance(f, g.Function):
            scope = Scope.over(f.bindings, f.ret, module, env_of(module.bounds))
            for b in reversed(f.bindings):
                yield from find_matches(pattern(operand), b.var, scope)


class _Rewriter:
    """Rewriter of one graph function."""

    def __init__(self, rules: Sequence[Rule], module: IRModule, parts: Parts, f: g.Function) -> None:
        self.rules, self.module, self.parts, self.f = rules, module, parts, f
        self.env: Env = env_of(module.bounds)
        self.out = Emitter(
            names={p.name: 1 for p in f.params}
            | {b.var.name: 1 for block in graph_walk.all_blocks(f) for b in block.bindings}
        )

    def run(self) -> g.Function:
        bindings = self.region(self.f.bindings, self.f.ret)
        ret = self.out.value(self.f.ret)
        if bindings is None:
            return self.f
        return replace(self.f, blocks=graph_walk.into_blocks(bindings), ret=ret)

    def region(self, bindings: Sequence[g.AnyBinding], ret: g.Value) -> list[g.AnyBinding] | None:
        """Rewrite the bindings of a function or of a side of an `if`; None when no rule applies."""
        scope = Scope.over(bindings, ret, self.module, self.env)
        chosen: dict[g.GVar, _Chosen] = {}
        claimed: set[g.GVar] = set()
        live = Liveness()
        live.reads(ret)
        dropped: dict[g.GVar, g.Binding] = {}
        for b in reversed(bindings):
            # Only a value that a match covers is dropped here. Other dead code is the task of `DeadCode`.
            if isinstance(b, g.Binding) and not live.is_read(b) and b.var in claimed:
                dropped[b.var] = b
                continue
            choice = self.choose(b, scope) if isinstance(b, g.Binding) and live.is_read(b) else None
            if choice is None:
                live.reads(b.value)
                continue
            chosen[b.var] = choice
            claimed.update(choice.match.inside)
            live.reads(*(x.value for x in choice.bindings), choice.value)
            if choice.unknown:  # the other side of the `if` computes the matched values
                inside = set(choice.match.inside)
                live.read.update(v for i in inside for v in used_vars(scope.definitions[i]) if v not in inside)
        mark, changed = len(self.out.bindings), bool(chosen)
        for b in bindings:
            if b.var in dropped:
                continue
            choice = chosen.get(b.var)
            if choice is not None:
                self.emit(b, choice, [dropped[v] for v in dropped if v in choice.match.inside])
            else:
                changed = self.keep(b) or changed
        rewritten = self.out.bindings[mark:]
        del self.out.bindings[mark:]
        return rewritten if changed else None

    def keep(self, b: g.AnyBinding) -> bool:
        """Emit the binding over the new values of its operands. Returns whether anything inside it was rewritten."""
        if not isinstance(b.value, g.If):
            self.out.keep(b)
            return False
        sides: list[g.Body] = []
        env = self.env
        for holds, side in ((True, b.value.then), (False, b.value.orelse)):
            # What a side maps to its own variables must not be used after the `if`.
            before = dict(self.out.mapping)
            self.env = side_env(env, b.value.cond, holds)
            inner = self.region(side.bindings, side.ret)
            sides.append(side if inner is None else g.Body(graph_walk.into_blocks(inner), self.out.value(side.ret)))
            self.out.mapping, self.env = before, env
        same = sides[0] is b.value.then and sides[1] is b.value.orelse
        self.out.keep(b if same else replace(b, value=g.If(b.value.cond, sides[0], sides[1])))
        return not same

    # choosing

    def choose(self, b: g.Binding, scope: Scope) -> _Chosen | None:
        """Return the replacement by the first rule that fits."""
        if b.value.is_atom:
            return None  # an alias
        for rule in self.rules:
            for match in find_matches(rule.pattern, b.var, scope):
                if match.unknown and not rule.guarded:
                    continue
                choice = self.fill(rule, match, b)
                if choice is not None and (rule.guarded or not choice.unknown):
                    return choice
        return None

    def fill(self, rule: Rule, match: Match, b: g.Binding) -> _Chosen | None:
        ctx, old = Deduction(self.env), Deduction(self.env)
        if not match.inside:  # a pattern of any value or of a weight, which has no computation to replace
            return None
        try:
            put = rule.put(Site(match, b.var.info, rule.level, self.parts))
            if put is None:
                return None
            bindings: list[g.Binding] = []
            value = self.flat(put, bindings, ctx, rule)
            info = self.infer(value, ctx)
            # The readers of the old value rely on its annotation, so the new value must prove it, or the guard must
            # check it.
            for d in differences(b.var.info, info, self.env):
                if d.proof is Proof.NO or d.dims is None:
                    raise DeduceError(f"it gives {info!r}: {d}")
                ctx.require(eq(d.dims[1], d.dims[2]), "the result", *d.dims[1:])
            # The checks of the matched operators are computed for comparison: a replacement that needs fewer would
            # accept inputs that were errors.
            for v in match.inside:
                self.infer(match.scope.definitions[v], old)
        except Unfit:
            return None
        except RelaxTuneError as error:
            raise VerifyError(
                f"{self.f.name}: what rule {rule.title} puts for {b.var.name} does not fit: {error}\n{excerpt(self.f, b)}"
            ) from None
        required, before = (dict.fromkeys(c.cond for c in checks) for checks in (ctx.checks, old.checks))
        if not required.keys() >= before.keys():
            return None  # a run-time check of the replaced value would be lost
        more = [c for c in required if c not in before]
        return _Chosen(match, tuple(bindings), value, tuple(dict.fromkeys((*match.unknown, *more))))

    def flat(self, value: g.Value, bindings: list[g.Binding], ctx: Deduction, rule: Rule) -> g.Value:
        """Return `value` over atoms, with a binding for each part that is no atom."""
        if not isinstance(value, (*g.ATOMS, g.Call, g.CallTIR, g.CallDPSLibrary, g.CallFunction, g.TupleValue)):
            raise DeduceError(f"expected a value that the site's methods make, got a {type(value).__name__}")
        args: list[g.Value] = []
        for a in value.operands:
            inner = self.flat(a, bindings, ctx, rule)
            if not inner.is_atom:
                var = g.GVar(self.out.fresh(_hint(inner)), self.infer(inner, ctx))
                bindings.append(g.Binding(var, inner))
                inner = var
            args.append(inner)
        return value.with_operands(args)

    def infer(self, value: g.Value, ctx: Deduction) -> StructInfo:
        """Return the annotation of a value; conditions left to run time go into `ctx`."""
        if isinstance(value, g.CallTIR):
            callee = self.parts.table.functions.get(value.callee)
            if not isinstance(callee, PrimFunc):
                raise DeduceError(f"the module has no tensor function called {value.callee!r}")
            infos = [*(a.info for a in value.args), *value.out]
            for buffer, differences in call_differences(callee, infos, value.scalars, self.env):
                for d in differences:
                    if d.proof is Proof.NO or d.dims is None:
                        raise DeduceError(f"{value.callee}: parameter {buffer.name}: {d}")
                    ctx.require(eq(d.dims[1], d.dims[2]), f"parameter {buffer.name}", *d.dims[1:])
        return infer_value(value, ctx)

    # emitting

    def emit(self, b: g.AnyBinding, choice: _Chosen, inside: Sequence[g.Binding]) -> None:
        out = self.out
        if not choice.unknown:
            for new in choice.bindings:
                out.keep(new)
            if choice.value.is_atom:
                out.mapping[b.var] = out.value(choice.value)
            else:
                out.bindings.append(g.Binding(b.var, out.value(choice.value)))
            return
        cond = choice.unknown[0]
        for other in choice.unknown[1:]:
            cond = and_(cond, other)
        then = self.side([*choice.bindings], choice.value, b)
        old = [*(g.Binding(x.var, x.value) for x in reversed(inside))]
        orelse = self.side(old, b.value, b)
        out.bindings.append(g.Binding(b.var, g.If(g.PrimValue(cond), then, orelse)))

    def side(self, bindings: Sequence[g.Binding], value: g.Value, b: g.AnyBinding) -> g.Body:
        """Emit one side of a guard: `bindings` under new variables, then `value` annotated as before."""
        out, mark, before = self.out, len(self.out.bindings), dict(self.out.mapping)
        for x in bindings:
            # New variables, since both sides of the guard may hold a copy of the same binding.
            var = out.bind(out.value(x.value), x.var.info, x.var.name)
            out.mapping[x.var] = var
        result = out.value(value)
        if not result.is_atom:
            result = out.bind(result, self.infer(result, Deduction(self.env)), b.var.name)
        if any(True for _ in differences(b.var.info, result.info, self.env)):
            cast = g.GVar(out.fresh(b.var.name), b.var.info)
            out.bindings.append(g.MatchCast(cast, result, b.var.info))
            result = cast
        emitted = out.bindings[mark:]
        del out.bindings[mark:]
        out.mapping = before
        return g.Body(graph_walk.into_blocks(emitted), result)


def _hint(value: g.Value) -> str:
    """Return a name for the result of a value."""
    if isinstance(value, g.Call):
        return str(getattr(value.op, "name", "v"))
    if isinstance(value, g.CallTIR):
        return value.callee
    return value.routine.rpartition(".")[2] if isinstance(value, g.CallDPSLibrary) else "v"
