"""Traversal that inlines calls and branches of one function, binding by binding.

Tests: `tests/ir/passes/test_graph_passes.py`, `tests/ir/interp/test_random_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import interval
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.expr import Expr, Var, free_vars, substitute
from relax_tune.ir.core.function import Bound, IRModule, PrimFunc
from relax_tune.ir.core.graph_walk import operator_of
from relax_tune.ir.core.names import fresh, same_objects
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    info_dims,
    info_symbols,
    own_symbols,
    tensor_dims,
)
from relax_tune.ir.deduce.deduce import apply_signature, infer_value, require_bounds, side_env, signature
from relax_tune.ir.deduce.relations import (
    call_differences,
    check_annotation,
    differences,
    is_known,
    require_all,
    solve,
    substitute_info,
)
from relax_tune.ir.op.base import Deduction, RuntimeCheck, env_of
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.shapes import ReshapeTo, ShapeOf
from relax_tune.ir.text.printer import Excerpts

T = TypeVar("T")

MAX_LINE = 240
"""Most characters of a program line in the message of a run-time check, which is stored in the built program."""


@dataclass(slots=True)
class Frame:
    """A function or a side of a branch that is being traversed.

    Attributes:
        where: Names of the inlined functions around it, for messages.
        values: New values of its variables.
        meaning: New expressions of its symbols.
    """

    f: g.Function
    where: str
    values: dict[g.GVar, g.Value] = field(default_factory=dict)
    meaning: dict[Var, Expr] = field(default_factory=dict)
    excerpts: Excerpts | None = None

    def excerpt(self, node: object) -> str:
        self.excerpts = self.excerpts or Excerpts(self.f)
        return self.excerpts.around(node)


class DivergentBranch(DeduceError):
    """Shapes on a side of a branch contradict each other, so the program is correct only if that side is not executed."""


class Walk:
    """Rebuilds one function with calls inlined.

    Attributes:
        checks: Checks that are left to run time.
        tuples: Variables bound to tuples of known fields.
        stack: Names of the functions being inlined, outermost first.
        names: Names of all variables of the new function.
        origins: For each symbol that no annotation mentions, what it stands for.
        dims: Bounds of the symbols created for dims of parameters.
        certain: Whether the present binding is executed in every call, so that its checks apply to every call.
    """

    def __init__(self, module: IRModule) -> None:
        self.module = module
        self.env = env_of(module.bounds)
        self.checks: list[RuntimeCheck] = []
        self.out: list[g.AnyBinding] = []
        self.tuples: dict[g.GVar, g.TupleValue] = {}
        self.stack: list[str] = []
        self.names: set[str] = set()
        self.origins: dict[Var, str] = {}
        self.dims: list[Bound] = []
        self.certain = True

    def root(self, f: g.Function, sharper: tuple[g.GVar, ...]) -> g.Function:
        frame = Frame(f, "")
        self.stack.append(f.name)
        self.names.update(p.name for p in sharper)
        self.names.update(b.var.name for b in graph_walk.all_bindings(f))
        params = self.parameters(f, sharper, frame)
        self.bindings(f.bindings, frame)
        ret = self.value(f.ret, frame)
        ctx = Deduction(self.env, choices=True)
        declared = self.info(f.ret_info, frame)
        self.guarded(lambda: check_annotation("the result", ret.info, declared, ctx), ctx, frame, f.ret)
        if same_objects(self.out, f.bindings) and ret is f.ret and same_objects(f.params, params):
            return f
        info = self.sharper(declared, ret.info)
        return replace(f, params=params, blocks=graph_walk.into_blocks(self.out), ret=ret, ret_info=info)

    def parameters(self, f: g.Function, sharper: tuple[g.GVar, ...], frame: Frame) -> tuple[g.GVar, ...]:
        """Return the parameters, changed such that every symbol is the whole of some dim.

        A dim such as `2 * n` becomes a new symbol m, and `n` is replaced by `m // 2`.
        """
        infos = tuple(p.info for p in sharper)
        frame.meaning.update({v: v for i in infos for v in info_symbols(i)})
        dims = [d for i in infos for d in (info_dims(i) if isinstance(i, ShapeInfo) else tensor_dims(i)) or ()]
        dim_vars = [d for d in dims if isinstance(d, Var)]
        free = dict.fromkeys(v for i in infos for v in info_symbols(i) if v not in dim_vars)
        fresh: dict[tuple[g.GVar, int], Var] = {}
        for _ in tuple(free):
            for q in sharper:
                for axis, d in enumerate(tensor_dims(q.info)):
                    unknown = [v for v in free_vars(d) if v in free]
                    if len(unknown) == 1:
                        fresh[q, axis] = Var(f"{q.name}_{axis}")
                        del free[unknown[0]]
        known = [(v, v) for v in dim_vars] + [(tensor_dims(q.info)[axis], new) for (q, axis), new in fresh.items()]
        original, changed = (ShapeInfo(tuple(side)) for side in (zip(*known, strict=True) if known else ((), ())))
        meaning = solve(CallableInfo((original,), ObjectInfo()), (changed,), self.env)
        # All symbols are solved for or none: a dim that mentions two unknown symbols determines neither.
        if not fresh or free or None in meaning.values():
            frame.values.update({p: q for p, q in zip(f.params, sharper, strict=True) if p is not q})
            return sharper
        frame.meaning.update({v: e for v, e in meaning.items() if e is not None})
        for (q, axis), v in fresh.items():
            low, high = interval(tensor_dims(q.info)[axis], self.env)
            self.dims.append(Bound(v, max(low or 0, 0), high, implied=True))
        self.origins |= {v: f"{v.name}: dim {axis} of parameter {q.name}" for (q, axis), v in fresh.items()}
        params: list[g.GVar] = []
        for old, q in zip(f.params, sharper, strict=True):
            info = declared = self.info(q.info, frame)
            if isinstance(declared, TensorInfo) and declared.shape is not None:
                shape = tuple(fresh.get((q, axis), d) for axis, d in enumerate(declared.shape))
                info = TensorInfo(shape, declared.dtype)
            params.append(q if info == q.info else g.GVar(q.name, info))
            frame.values[old] = params[-1]
            if info != declared:
                self.solved_dims(q, params[-1], declared, meaning, frame, old)
        ctx = Deduction(self.env, choices=True)
        self.guarded(lambda: require_bounds("arguments", meaning, ctx, frozenset(dim_vars)), ctx, frame, f.params[0])
        return tuple(params)

    def solved_dims(
        self,
        q: g.GVar,
        new: g.GVar,
        declared: StructInfo,
        meaning: Mapping[Var, Expr | None],
        frame: Frame,
        old: g.GVar,
    ) -> None:
        """Cast a parameter whose dims were solved for to its declared annotation."""
        ctx = Deduction(self.env, choices=True)
        required = differences(q.info, new.info, self.env, meaning)
        self.guarded(lambda: require_all(f"parameter {q.name}", required, ctx), ctx, frame, old)
        cast = g.GVar(self.fresh(new.name), declared)
        self.out.append(g.MatchCast(cast, new, declared))
        frame.values[old] = cast

    # values and annotations in terms of the new function

    def expr(self, e: Expr, frame: Frame) -> Expr:
        changed = {v: m for v, m in frame.meaning.items() if m is not v}
        return substitute(e, changed) if changed else e

    def info(self, info: StructInfo, frame: Frame) -> StructInfo:
        changed = {v: m for v, m in frame.meaning.items() if m is not v}
        return substitute_info(info, changed, self.env) if changed else info

    def value(self, v: g.Value, frame: Frame) -> g.Value:
        """Return `v` over the new variables and symbols; the same object if it does not change."""
        if isinstance(v, g.GVar):
            return frame.values.get(v, v)
        assert not isinstance(v, g.If)
        meaning = {s: m for s, m in frame.meaning.items() if m is not s}
        new = v.with_operands([self.value(a, frame) for a in v.operands])
        return new.with_symbols(meaning, lambda info: self.info(info, frame)) if meaning else new

    def fresh(self, hint: str) -> str:
        """Return a name that no other variable has; a built program identifies its arrays by name."""
        self.names.add(name := fresh(hint, self.names))
        return name

    def bound_symbol(self, v: Var, again: bool) -> Var:
        """Return the new symbol for a symbol that is bound at run time.

        Args:
            again: Whether the function may be inlined more than once, so that each copy needs a separate symbol.
        """
        return Var(v.name, v.dtype) if again else v

    def name(self, b: g.AnyBinding) -> str:
        """Return the name of the new variable for `b`; bindings that are not inlined keep their names."""
        return b.var.name if len(self.stack) == 1 else self.fresh(b.var.name)

    # bindings

    def guarded(self, ask: Callable[[], T], ctx: Deduction, frame: Frame, node: object) -> T:
        """Return `ask()`; add an excerpt of the program to its errors, and to the checks that it adds to `ctx`."""
        try:
            result = ask()
        except DeduceError as e:
            # On a side of a branch a contradiction is no error yet, since the side may never be executed.
            kind = DeduceError if self.certain else DivergentBranch
            raise kind(f"{self.stack[0]}: {frame.where}{e}\n{frame.excerpt(node)}") from None
        # Checks run when the function is called, so only bindings that every call executes may add one.
        if self.certain:
            known = {(c.cond, c.values) for c in self.checks}
            for c in ctx.checks:
                if (c.cond, c.values) not in known:
                    excerpt = "\n".join(line[:MAX_LINE] for line in frame.excerpt(node).splitlines())
                    new = [self.origins[v] for v in free_vars(c.cond, *c.values) if v in self.origins]
                    origin = f" ({'; '.join(new)})" if new else ""
                    self.checks.append(replace(c, message=f"{frame.where}{c.message}{origin}\n{excerpt}"))
        return result

    def bindings(self, bindings: Sequence[g.AnyBinding], frame: Frame) -> None:
        for b in bindings:
            if isinstance(b, g.MatchCast):
                self.match_cast(b, frame)
            else:
                self.binding(b, frame)

    def binding(self, b: g.Binding, frame: Frame) -> None:
        if isinstance(b.value, g.If):
            self.branch(b, b.value, frame)
            return
        value = self.value(b.value, frame)
        # A second name of a value needs no binding: readers get the first one.
        if value.is_atom:
            frame.values[b.var] = value
            return
        if isinstance(value, g.TupleItem):
            value = self.item(value)
            if not isinstance(value, g.TupleItem):
                frame.values[b.var] = value
                return
        ctx = Deduction(self.env, choices=True)
        if isinstance(value, g.CallFunction) and isinstance(value.callee, g.FunctionRef):
            self.call(b, value.callee, value.args, frame)
            return
        deduced = self.guarded(lambda: infer_value(value, ctx), ctx, frame, b)
        if isinstance(value, g.CallTIR):
            self.fits(value, b, frame)
        declared = self.info(b.var.info, frame)
        ctx = Deduction(self.env, choices=True)
        self.guarded(lambda: check_annotation(f"value {b.var.name}", deduced, declared, ctx), ctx, frame, b)
        if ctx.checks and self.certain and is_known(deduced) and is_known(declared):
            var = g.GVar(self.fresh(b.var.name), deduced)
            cast = g.GVar(self.name(b), declared)  # so that later passes can rely on the declared annotation
            self.out += [g.Binding(var, value), g.MatchCast(cast, var, declared)]
            frame.values[b.var] = cast
            return
        if operator_of(value, ShapeOf) is not None and isinstance(deduced, ShapeInfo) and deduced.values:
            frame.values[b.var] = g.ShapeValue(deduced.values)
            return
        if operator_of(value, ReshapeTo) is not None:
            to = value.operands[1].info
            if isinstance(to, ShapeInfo) and to.values is not None:
                value = g.Call(Reshape(to.values), (value.operands[0],))
        self.emit(b, value, self.sharper(declared, deduced), frame)

    def fits(self, call: g.CallTIR, b: g.Binding, frame: Frame) -> None:
        """Check that the arguments and outputs of a call have the dims of the tensor function's parameters."""
        ctx = Deduction(self.env, choices=True)
        infos = [*(a.info for a in call.args), *call.out]

        def ask() -> None:
            callee = self.module.functions.get(call.callee)
            if not isinstance(callee, PrimFunc):
                raise DeduceError(f"the module has no tensor function {call.callee!r}")
            for buffer, equations in call_differences(callee, infos, call.scalars, self.env):
                require_all(f"{call.callee}: parameter {buffer.name}", equations, ctx)

        self.guarded(ask, ctx, frame, b)

    def emit(self, b: g.Binding, value: g.Value, info: StructInfo, frame: Frame) -> None:
        """Emit a binding; the original one if its value is unchanged and it is not inlined."""
        if value is b.value and info == b.var.info and len(self.stack) == 1:
            var = b.var
            self.out.append(b)
        else:
            var = g.GVar(self.name(b), info)
            self.out.append(g.Binding(var, value))
            frame.values[b.var] = var
        if isinstance(value, g.TupleValue):
            self.tuples[var] = value

    def sharper(self, declared: StructInfo, deduced: StructInfo) -> StructInfo:
        """Return the more precise annotation: the declared one (checked if uncertain) or the deduced one."""
        if any(True for _ in differences(declared, deduced, self.env)):
            return declared
        return deduced if any(True for _ in differences(deduced, declared, self.env)) else declared

    def item(self, value: g.TupleItem) -> g.Value:
        """Return the field of a known tuple, else the value itself."""
        fields = self.tuples.get(value.value) if isinstance(value.value, g.GVar) else None
        if isinstance(fields, g.TupleValue) and 0 <= value.index < len(fields.fields):
            return fields.fields[value.index]
        return value

    def match_cast(self, b: g.MatchCast, frame: Frame) -> None:
        value = self.value(b.value, frame)
        name = b.subject
        actual = value.info
        ctx = Deduction(self.env, choices=True)
        new = [v for v in info_symbols(b.info) if v not in frame.meaning]
        solved = solve(CallableInfo((b.info,), ObjectInfo()), (actual,), self.env)

        def ask() -> None:
            require_bounds(f"match_cast of {name}", {v: solved[v] for v in new}, ctx)
            expected = self.info(b.info, frame)
            check_annotation(f"match_cast of {name}", actual, expected, ctx)

        for v in new:
            size = solved[v]
            # Before the checks, which refer to these symbols.
            frame.meaning[v] = self.bound_symbol(v, len(self.stack) > 1) if size is None else size
        self.guarded(ask, ctx, frame, b)
        info = self.info(b.info, frame)
        if not any(True for _ in differences(info, actual, self.env)):
            frame.values[b.var] = value
            return
        if value is b.value and info == b.info == b.var.info and len(self.stack) == 1:
            self.out.append(b)
            return
        var = g.GVar(self.name(b), info)
        self.out.append(g.MatchCast(var, value, info))
        frame.values[b.var] = var

    def call(self, b: g.Binding, callee: g.FunctionRef, args: Sequence[g.Value], frame: Frame) -> None:
        """Inline the body of the callee in place of the call."""
        f = self.module.functions[callee.name]
        assert isinstance(f, g.Function)
        ctx = Deduction(self.env, choices=True)
        infos = [a.info for a in args]
        callee_info = signature(f)
        result = self.guarded(lambda: apply_signature(f.name, callee_info, infos, ctx), ctx, frame, b)
        if self.stays(f, infos, b, frame):
            self.emit(b, g.CallFunction(callee, tuple(args)), result, frame)
            return
        mark, checks = len(self.out), list(self.checks)
        try:
            frame.values[b.var] = self.body(b, f, args, frame)
        except DivergentBranch:
            # The contradiction is on a side of a branch that this call may never take. Keep the call: the program may
            # be right.
            del self.out[mark:]
            self.checks = checks
            self.emit(b, g.CallFunction(callee, tuple(args)), result, frame)

    def stays(self, f: g.Function, infos: Sequence[StructInfo], b: g.Binding, frame: Frame) -> bool:
        """Return whether a call of `f` is not inlined, because `f` is being inlined already."""
        return f.name in self.stack

    def body(self, b: g.Binding, f: g.Function, args: Sequence[g.Value], frame: Frame) -> g.Value:
        """Emit the bindings of `f` called with `args`; return its result."""
        callee_info, infos = signature(f), [a.info for a in args]
        solved = solve(callee_info, infos, self.env)
        inner = Frame(f, f"{frame.where}{f.name}: ")
        for v in own_symbols(callee_info):
            size = solved[v]
            # A new symbol for every inlined copy: two calls may have different sizes.
            inner.meaning[v] = self.bound_symbol(v, True) if size is None else size
        for p, a in zip(f.params, args, strict=True):
            info = self.info(p.info, inner)
            if any(True for _ in differences(info, a.info, self.env)):
                var = g.GVar(self.fresh(p.name), info)
                self.out.append(g.MatchCast(var, a, info))
                inner.values[p] = var
            else:
                inner.values[p] = a
        self.stack.append(f.name)
        try:
            self.bindings(f.bindings, inner)
        finally:
            self.stack.pop()
        ret = self.value(f.ret, inner)
        info = self.info(f.ret_info, inner)
        ctx = Deduction(self.env, choices=True)
        self.guarded(lambda: check_annotation("the result", ret.info, info, ctx), ctx, inner, f.ret)
        if any(True for _ in differences(info, ret.info, self.env)):
            var = g.GVar(self.name(b), info)
            self.out.append(g.MatchCast(var, ret, info))
            ret = var
        elif isinstance(ret, g.TupleValue):
            ret = self.atom(ret, b)
        return ret

    def branch(self, b: g.Binding, value: g.If, frame: Frame) -> None:
        """Inline the side of a decided branch, or rebuild both sides."""
        cond = self.value(value.cond, frame)
        known = cond.info
        ctx = Deduction(self.env, choices=True)
        answer = ctx.proves(known.value) if isinstance(known, PrimInfo) and known.value is not None else Proof.UNKNOWN
        if answer is not Proof.UNKNOWN:
            side = value.then if answer is Proof.YES else value.orelse
            self.stack.append(self.stack[-1])  # so that variables of the side get new names
            self.bindings(side.bindings, frame)
            self.stack.pop()
            frame.values[b.var] = self.atom(self.value(side.ret, frame), b)
            return
        certain, out, env, sides = self.certain, self.out, self.env, []
        try:
            self.certain = False
            for is_true, body in ((True, value.then), (False, value.orelse)):
                self.out = []
                self.env = side_env(env, cond, is_true)
                # Each side starts from what is known before the branch; what it binds must not reach the other side.
                inner = replace(frame, values=dict(frame.values), meaning=dict(frame.meaning))
                self.bindings(body.bindings, inner)
                ret = self.value(body.ret, inner)
                unchanged = same_objects(self.out, body.bindings) and ret is body.ret
                sides.append(body if unchanged else g.Body(graph_walk.into_blocks(self.out), ret))
        finally:
            self.certain, self.out, self.env = certain, out, env
        unchanged = cond is value.cond and sides[0] is value.then and sides[1] is value.orelse
        new = value if unchanged else g.If(cond, sides[0], sides[1])
        deduced = self.guarded(lambda: infer_value(new, ctx), ctx, frame, b)
        self.emit(b, new, b.var.info if unchanged else deduced, frame)

    def atom(self, value: g.Value, b: g.Binding) -> g.Value:
        """Return a value that may replace a variable."""
        if value.is_atom:
            return value
        var = g.GVar(self.fresh(b.var.name), value.info)
        self.out.append(g.Binding(var, value))
        if isinstance(value, g.TupleValue):
            self.tuples[var] = value
        return var
