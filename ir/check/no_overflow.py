"""Run-time checks that keep the integers of untrusted programs within 64 bits.

Proofs and simplifications assume unbounded integers; kernels compute in int64, where a product of sizes may wrap around. So each
expression over sizes is bounded here, with sizes up to their declared bounds, or up to `SIZE_LIMIT`, which a call checks. One that
may leave `LIMIT` gets a check of its magnitude at the sizes of the call, which is computed exactly and refuses the call.
All other expressions have the same value in proofs and in kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import takewhile

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.bounds import Env, interval, wraps
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.dtype import bool_, i64
from relax_tune.ir.core.expr import (
    TRUE,
    Const,
    Expr,
    Var,
    add,
    as_int,
    const,
    floordiv,
    free_vars,
    le,
    loads,
    maximum,
    mul,
    ne,
    not_,
    postorder,
    sub,
    substitute,
)
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph_walk import all_bindings
from relax_tune.ir.core.intervals import Interval
from relax_tune.ir.core.names import fresh, same_objects
from relax_tune.ir.core.stmt import Block, For, IfThenElse, Stmt, loops, walk
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    info_dims,
    info_parts,
    info_symbols,
)
from relax_tune.ir.deduce.deduce import side_env
from relax_tune.ir.deduce.relations import solve

SIZE_LIMIT = (1 << 31) - 1
"""The largest size of a symbol without a declared upper bound; `runtime.executor` refuses larger ones."""
LIMIT = 1 << 62
"""The largest magnitude of an integer expression: twice as much still fits."""
# Operations whose result may exceed their operands. `floordiv` is one of them because of -2**63 // -1.
_ARITHMETIC = frozenset({"add", "sub", "mul", "abs", "floordiv", "shift_left", "integer_power"})


def require_no_overflow(module: IRModule) -> IRModule:
    """Return the module with the checks that it needs; the same object where it needs none.

    Raises:
        VerifyError: an expression has no bound, or overflows at every size.
    """
    known: dict[object, tuple[Expr, ...]] = {}
    changed = {}
    for name, f in module.graphs.items():
        new = _Checked(f, module, known).function()
        if new is not f:
            changed[name] = new
    return replace(module, functions={**module.functions, **changed}) if changed else module


class _Magnitudes:
    """Bounds of expressions over symbols. `conditions` are the conditions on symbols that a call has to check.

    Attributes:
        symbols: an expression of at least 0 that bounds each symbol's absolute value, for symbols and loop variables.
    """

    def __init__(self, name: str, symbols: Mapping[Var, Expr]) -> None:
        self.name = name
        self.symbols = dict(symbols)
        self.free = frozenset(symbols)
        self.conditions: dict[Expr, None] = {}
        self._undivided: set[Expr] = set()
        self._visited: set[tuple[Expr, bool]] = set()

    def examine(self, e: Expr, env: Env) -> None:
        """Find the largest parts of an expression that may exceed `LIMIT`."""
        waiting = [(e, False)]
        while waiting:
            n, covered = item = waiting.pop()
            if not n.children or item in self._visited:
                continue
            self._visited.add(item)
            # arithmetic on elements of tensors may wrap: the algebra treats it as opaque
            far = n.dtype is i64 and n.op in _ARITHMETIC and not _near(interval(n, env)) and not (wraps(n) and loads(n))
            if far and not covered:
                self.require(self.of(n, env), env)
            # The magnitude of a sum adds up the magnitudes of its parts, so a bound of the sum also bounds each part.
            below = (far or covered) and n.op in ("add", "sub")
            waiting += [
                (a, below or ((far or covered) and n.op == "mul" and self._shows(n, a, env))) for a in n.children
            ]

    def _shows(self, product: Expr, factor: Expr, env: Env) -> bool:
        """Return whether a bound of a product also bounds this factor: the other factor is not 0, or else this one is small."""
        (other,) = [a for a in product.args if a is not factor] or [factor]
        if isinstance(other, Const):
            return bool(other.value)
        small = substitute(self.of(factor, env), {other: const(0)}) if other in self.free else None
        return isinstance(small, Const) and small.value <= LIMIT

    def require(self, magnitude: Expr, env: Env) -> None:
        """Require a magnitude of at most `LIMIT`.

        Raises:
            VerifyError: the magnitude is never that small.
        """
        if _near(interval(magnitude, env)):
            return
        if any(isinstance(n, Const) and n.value > LIMIT for n in postorder((magnitude,))):
            raise VerifyError(f"{self.name}: Expected integer expressions of at most 64 bits, got {magnitude!r:.200}.")
        self.conditions[le(magnitude, LIMIT)] = None

    def divisors(self, e: Expr, env: Env) -> None:
        """Require divisors other than 0, which proofs assume.

        Raises:
            VerifyError: a divisor inside a loop may be 0.
        """
        if e in self._undivided:
            return
        if not any(n.op in ("floordiv", "floormod") and as_int(n.args[1]) is None for n in postorder((e,))):
            self._undivided.add(e)
            return
        if e.op == "select":
            self.divisors(e.args[0], env)
            for side, fact in ((e.args[1], e.args[0]), (e.args[2], not_(e.args[0]))):
                self.divisors(side, env.with_fact(fact))
            return
        for a in e.children:
            self.divisors(a, env)
        divisor = e.args[1] if e.op in ("floordiv", "floormod") else None
        if divisor is None or as_int(divisor) is not None or loads(divisor):
            return  # operators guard divisions of tensor elements
        needed = ne(divisor, 0)
        if prove(needed, env) is Proof.YES:
            return
        if any(v not in self.free for v in free_vars(divisor)):
            raise VerifyError(
                f"{self.name}: Expected a divisor other than 0, got {divisor!r:.200}. Divide by max({divisor!r:.80}, 1)."
            )
        self.conditions[needed] = None

    def of(self, e: Expr, env: Env) -> Expr:
        """Return an expression of at least 0 over the symbols only that bounds the absolute value of `e`."""
        done: dict[Expr, Expr] = {}
        for n in postorder((e,)):
            done[n] = self._of(n, done, env)
        return done[e]

    def _of(self, n: Expr, done: Mapping[Expr, Expr], env: Env) -> Expr:
        if not n.dtype.is_int:  # a condition, or a float that a cast takes
            return const(1)
        # Data are known only by their interval. A bound over sizes stays symbolic: the sizes of a call are mostly far
        # below their declared bounds.
        low, high = interval(n, env)
        if low is not None and high is not None and max(-low, high) <= LIMIT and (loads(n) or not free_vars(n)):
            return const(max(-low, high, 0))
        if isinstance(n, Const):
            return const(abs(int(n.value)))
        if isinstance(n, Var) and n in self.symbols:
            return self.symbols[n]
        parts = [done[a] for a in n.children]
        match n.op:
            case "add" | "sub":
                return add(*parts)
            case "mul":
                return mul(*parts)
            case "floordiv":
                # Rounding towards minus infinity may enlarge a magnitude by one: |x // d| <= ceil(|x| / d).
                divisor = as_int(n.args[1])
                return floordiv(add(parts[0], divisor - 1), const(divisor)) if divisor and divisor > 0 else parts[0]
            case "floormod":
                # |x % d| < |d|, however large x is.
                return parts[1]
            case "min" | "max":
                return maximum(*parts)
            case "select":
                return maximum(*parts[1:])
            case "abs":
                return parts[0]
            case "cast" if n.args[0].dtype.is_int:
                return parts[0]
        if n.dtype is i64:
            raise VerifyError(
                f"{self.name}: Expected integer expressions with a bound, got {n!r:.200}, which may leave 64 bits. "
                "Clamp its operands, or declare bounds of its sizes."
            )
        # Narrower integers are computed in their own type, which bounds every operation's result.
        return const(max(-n.dtype.limits[0], n.dtype.limits[1]))


def _magnitude_of(v: Var, span: Interval) -> Expr:
    return v if span[0] is not None and span[0] >= 0 else maximum(v, sub(const(0), v))


def _near(span: Interval) -> bool:
    return span[0] is not None and span[1] is not None and span[0] >= -LIMIT and span[1] <= LIMIT


def _of_tensor_function(func: PrimFunc, spans: Mapping[Var, Interval]) -> tuple[Expr, ...]:
    """Return the conditions of a tensor function on its symbols. spans: their ranges"""
    out = _Magnitudes(func.name, {v: _magnitude_of(v, span) for v, span in spans.items()})
    env = Env({v: (_end(lo, -LIMIT), const(_end(hi, LIMIT))) for v, (lo, hi) in spans.items()})
    for b in (*func.buffers, *func.allocs):
        for d in b.shape:
            out.examine(d, env)
    _statement(func.body, env, (), out)
    if any(n.op in ("floordiv", "floormod") and as_int(n.args[1]) is None for n in postorder(_expressions(func.body))):
        _divisors(func.body, env, out)
    return tuple(out.conditions)


def _end(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _statement(s: Stmt, env: Env, nest: tuple[Expr, ...], out: _Magnitudes) -> None:
    """Examine a statement. nest: magnitudes of the extents of the loops around it, whose product is the extent of a fused loop"""
    if not isinstance(s, Block):
        for e in s.own_exprs:
            out.examine(e, env)
    match s:
        case For():
            out.symbols[s.var] = out.of(s.extent, env)
            env, nest = env.with_loop(s.var, s.extent, runs=False), (*nest, out.symbols[s.var])
            # Only the innermost loop is asked: its product contains the extents of all loops around it.
            if not loops(s.body):
                out.require(_product(nest), env)
        case Block():
            for i, binding in zip(s.iters, s.bindings, strict=True):
                out.examine(binding, env)
                out.symbols[i.var] = out.of(binding, env)
                lo, hi = interval(binding, env)
                # An open end is LIMIT, since `examine` above has just required it of the binding.
                env = env.with_bound(i.var, _end(lo, -LIMIT), _end(hi, LIMIT))
            for e in s.own_exprs:
                out.examine(e, env)
    for child in s.children:
        _statement(child, env, nest, out)


def _expressions(body: Stmt) -> tuple[Expr, ...]:
    return tuple(e for s in walk(body) for e in s.own_exprs)


def _divisors(s: Stmt, env: Env, out: _Magnitudes) -> None:
    """Require divisors of a statement, given the loops and conditions around it."""
    match s:
        case For():
            out.divisors(s.extent, env)
            return _divisors(s.body, env.with_loop(s.var, s.extent), out)
        case IfThenElse():
            out.divisors(s.cond, env)
            _divisors(s.then, env.with_fact(s.cond), out)
            return None if s.orelse is None else _divisors(s.orelse, env.with_fact(not_(s.cond)), out)
        case Block():
            known = dict(zip((i.var for i in s.iters), s.bindings, strict=True))
            for e in (*s.bindings, s.predicate):
                out.divisors(e, env)
            runs = env if s.predicate is TRUE else env.with_fact(s.predicate)
            for e in (x for store in s.own_stores for x in store.own_exprs):
                out.divisors(substitute(e, known), runs)
        case _:
            for e in s.own_exprs:
                out.divisors(e, env)
    for child in s.children:
        _divisors(child, env, out)


def _product(parts: Sequence[Expr]) -> Expr:
    whole: Expr = const(1)
    for p in parts:
        whole = mul(whole, p)
    return whole


class _Checked:
    """A graph function with its checks, each before the first binding that needs it."""

    def __init__(self, f: g.Function, module: IRModule, known: dict[object, tuple[Expr, ...]]) -> None:
        self.f, self.module, self.known = f, module, known
        self.names = {v.name for v in f.params} | {b.var.name for b in all_bindings(f)}
        declared = {b.var: (b.lower, SIZE_LIMIT if b.upper is None else b.upper) for b in module.bounds}
        symbols = dict.fromkeys(v for p in f.params for v in info_symbols(p.info))
        symbols |= dict.fromkeys(v for b in all_bindings(f) for v in b.symbols())
        # Without the facts of branches, since the tables `examined` and `known` hold for both sides.
        self.sizes = Env({v: declared.get(v, (0, SIZE_LIMIT)) for v in symbols})
        self.env = self.sizes  # and the facts on the side of a branch
        self.symbols = {v: _magnitude_of(v, self.sizes.range_of(v)) for v in symbols}
        self.examined: dict[tuple[Expr, ...], tuple[Expr, ...]] = {}
        self.parameter_symbols = frozenset(v for p in f.params for v in info_symbols(p.info))
        self.bound = set(self.parameter_symbols)
        self.first: list[g.AnyBinding] = []
        self.hoisted: set[Expr] = set()
        self.asserted: set[Expr] = set()  # before the current binding, in its block and in enclosing blocks

    def function(self) -> g.Function:
        """Return the function with its checks; the same object where it needs none."""
        leading = takewhile(lambda b: isinstance(b, g.MatchCast), self.f.bindings)
        self.asserted.update(c for c in map(_assertion, leading) if c is not None)
        for p in self.f.params:  # their elements are in memory: only dims count
            self.check(
                c for part in info_parts(p.info) for d in info_dims(part) or () if d.dtype.is_int for c in self.of(d)
            )
        blocks = self.blocks(self.f.blocks)
        if self.first:
            within = blocks[:1] if blocks and isinstance(blocks[0], g.DataflowBlock) else ()
            start = g.DataflowBlock((*self.first, *(b for block in within for b in block.bindings)))
            blocks = (start, *blocks[len(within) :])
        return self.f if same_objects(blocks, self.f.blocks) else replace(self.f, blocks=blocks)

    def blocks(self, blocks: Sequence[g.AnyBlock]) -> tuple[g.AnyBlock, ...]:
        checked: list[g.AnyBlock] = []
        for block in blocks:
            new: list[g.AnyBinding] = []
            for b in block.bindings:
                needed = self.needs(b)
                new += self.check(c for c in needed if self.bound.issuperset(free_vars(c)))
                new.append(self.binding(b))
                self.bound.update(b.symbols())
                new += self.check(needed)  # conditions on symbols that this binding binds
                if (cond := _assertion(b)) is not None:
                    self.asserted.add(cond)
            checked.append(block if same_objects(new, block.bindings) else type(block)(tuple(new)))
        return tuple(checked)

    def binding(self, b: g.AnyBinding) -> g.AnyBinding:
        """Return a binding with the checks of its sides."""
        if not isinstance(b.value, g.If):
            return b
        around, env, sides = set(self.asserted), self.env, []
        for side, holds in zip(b.value.bodies, (True, False), strict=True):
            self.env = side_env(env, b.value.cond, holds)
            blocks = self.blocks(side.blocks)
            sides.append(side if same_objects(blocks, side.blocks) else replace(side, blocks=blocks))
            self.env, self.asserted = env, set(around)
        value = b.value.with_bodies(sides)
        return b if value is b.value else replace(b, value=value)

    def check(self, conditions: Iterable[Expr]) -> list[g.AnyBinding]:
        """Assert conditions: at the start of the function where its parameters decide them, else by the bindings returned."""
        checks: list[g.AnyBinding] = []
        for cond in conditions:
            if cond in self.asserted or cond in self.hoisted or prove(cond, self.env) is Proof.YES:
                continue
            self.names.add(name := fresh("fits", self.names))
            info = PrimInfo(bool_, const(True))
            first = self.parameter_symbols.issuperset(free_vars(cond))
            (self.first if first else checks).append(g.MatchCast(g.GVar(name, info), g.PrimValue(cond), info))
            (self.hoisted if first else self.asserted).add(cond)
        return checks

    def needs(self, b: g.AnyBinding) -> Sequence[Expr]:
        """Return the conditions of a binding."""
        if _assertion(b) is not None:
            return ()  # computed exactly
        infos: list[StructInfo] = [b.var.info]
        if isinstance(b, g.MatchCast):
            infos.append(b.info)
        if isinstance(b.value, (g.CallTIR, g.CallDPSLibrary)):
            infos += b.value.out
        needed = dict.fromkeys(self.infos(infos))
        for e in _attributes(b.value.cond if isinstance(b.value, g.If) else b.value):
            needed |= dict.fromkeys(self.of(e))
        if isinstance(b.value, g.CallTIR):
            needed |= dict.fromkeys(self.call(b.value))
        return tuple(needed)

    def of(self, *parts: Expr) -> tuple[Expr, ...]:
        """Return the conditions of expressions, and of their product if there are several."""
        if parts not in self.examined:
            out = _Magnitudes(self.f.name, self.symbols)
            for e in parts:
                out.examine(e, self.sizes)
            if len(parts) > 1:
                out.require(_product([out.of(e, self.sizes) for e in parts]), self.sizes)
            self.examined[parts] = tuple(out.conditions)
        return self.examined[parts]

    def infos(self, infos: Sequence[StructInfo]) -> tuple[Expr, ...]:
        """Return the conditions of dims and of numbers of elements."""
        conditions: dict[Expr, None] = {}
        for info in (part for i in infos for part in info_parts(i)):
            dims = [d for d in info_dims(info) or () if d.dtype.is_int]
            if isinstance(info, TensorInfo):
                conditions |= dict.fromkeys(self.of(*dims))
            else:
                conditions |= dict.fromkeys(m for d in dims for m in self.of(d))
        return tuple(conditions)

    def call(self, call: g.CallTIR) -> tuple[Expr, ...]:
        """Return the conditions of a tensor function at a call of it, over the graph's symbols."""
        func = self.module.prim(call.callee)
        params = tuple(TensorInfo(b.shape, b.dtype) for b in func.buffers)
        # A tensor function and the graph have different symbols. Matching the call with the signature gives their
        # values here.
        whole = CallableInfo((ShapeInfo(func.scalar_params), *params), ObjectInfo())
        infos = (ShapeInfo(call.scalars), *(a.info for a in call.args), *call.out)
        meaning = solve(whole, infos, self.sizes)
        spans = {v: (0, SIZE_LIMIT) if e is None else interval(e, self.sizes) for v, e in meaning.items()}
        key = (call.callee, tuple(spans.values()))
        if key not in self.known:
            self.known[key] = _of_tensor_function(func, spans)
        known_symbols = {v: e for v, e in meaning.items() if e is not None}
        conditions = [substitute(c, known_symbols) for c in self.known[key]]
        unknown = [v.name for c in self.known[key] for v in free_vars(c) if v not in known_symbols]
        if unknown:
            raise VerifyError(
                f"{self.f.name}: {call.callee}: Expected a known size {unknown[0]}, since expressions over it may leave 64 bits. "
                "Add a match_cast before the call."
            )
        return tuple(conditions)


def _assertion(b: g.AnyBinding) -> Expr | None:
    """Return the condition that a binding asserts; None for another binding."""
    if not isinstance(b, g.MatchCast) or not isinstance(b.value, g.PrimValue) or not isinstance(b.info, PrimInfo):
        return None
    holds = b.info.value
    return b.value.value if isinstance(holds, Const) and holds.dtype is bool_ and holds.value else None


def _attributes(value: object) -> Iterator[Expr]:
    """Yield the expressions among the attributes of a value or operator."""
    if isinstance(value, Expr):
        if value.dtype.is_int or value.dtype is bool_:
            yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _attributes(v)
    elif isinstance(value, (g.GVar, g.Constant, TensorInfo, ShapeInfo, PrimInfo, TupleInfo, CallableInfo)):
        return  # its own binding and annotation are examined
    elif is_dataclass(value):
        for field in fields(value):
            yield from _attributes(getattr(value, field.name))
