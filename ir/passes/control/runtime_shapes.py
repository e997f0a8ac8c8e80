"""Inlining for functions with control flow, which check shapes where they are computed.

A function that branches cannot check everything when it is called. A side of a branch, or a callee, is checked when it is executed, and
data-dependent dims become symbols there.

Tests: `tests/ir/passes/control/test_outline.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from relax_tune.ir.core.expr import Expr, Var, free_vars
from relax_tune.ir.core.function import Bound, IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Function, GVar, MatchCast, Value
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, StructInfo, TensorInfo, info_symbols
from relax_tune.ir.deduce.deduce import require_bounds, signature
from relax_tune.ir.deduce.relations import check_annotation, solve
from relax_tune.ir.op.base import Deduction
from relax_tune.ir.passes.control.inline_walk import Frame, Walk


class RuntimeShapeInliner(Walk):
    """Rebuilds one function with calls inlined, checks as match_casts, and a symbol for every unknown dim.

    Attributes:
        bounds: Bounds of the new symbols.
    """

    def __init__(self, module: IRModule, recursive: Collection[str]) -> None:
        super().__init__(module)
        self.recursive = recursive
        self.declared = {b.var: b for b in module.bounds}
        self.bounds: list[Bound] = []
        self.symbols: set[str] = set()

    def parameters(self, f: Function, sharper: tuple[GVar, ...], frame: Frame) -> tuple[GVar, ...]:
        """Return the parameters with a symbol for every unknown dim. Symbols are solved for at run time."""
        infos = [p.info for p in sharper]
        frame.meaning.update({v: v for i in infos for v in info_symbols(i)})
        self.symbols.update(v.name for v in frame.meaning)
        params = tuple(self.named(p) for p in sharper)
        frame.values.update({p: q for p, q in zip(f.params, params, strict=True) if p is not q})
        return params

    def named(self, v: GVar) -> GVar:
        info = self.with_dims(v.info, v.name)
        return v if info is v.info else GVar(v.name, info)

    def with_dims(self, info: StructInfo, hint: str) -> StructInfo:
        """Give a tensor of known rank but unknown shape a new symbol for each dim; return other annotations unchanged."""
        if not isinstance(info, TensorInfo) or info.shape is not None or info.ndim is None:
            return info
        return TensorInfo(
            tuple(self.bound_symbol(Var(f"{hint}_{axis}"), True) for axis in range(info.ndim)), info.dtype
        )

    def bound_symbol(self, v: Var, again: bool) -> Var:
        """Return a symbol with a unique name in the function and the bounds of `v`."""
        self.symbols.add(name := fresh(v.name, self.symbols))
        if name == v.name and not again:
            return v
        symbol = Var(name, v.dtype)
        if v in self.declared:
            self.bounds.append(replace(self.declared[v], var=symbol))
        return symbol

    def emit(self, b: Binding, value: Value, info: StructInfo, frame: Frame) -> None:
        super().emit(b, value, info, frame)
        var = frame.values.get(b.var, b.var)
        assert isinstance(var, GVar)
        # A data-dependent dim gets a name right where it is computed. Operators that follow are lowered over that
        # symbol.
        dims = self.with_dims(var.info, var.name)
        if dims is not var.info:
            cast = GVar(self.fresh(var.name), dims)
            self.out.append(MatchCast(cast, var, dims))
            frame.values[b.var] = cast

    def match_cast(self, b: MatchCast, frame: Frame) -> None:
        value = self.value(b.value, frame)
        actual = value.info
        new = [v for v in info_symbols(b.info) if v not in frame.meaning]
        solved = solve(CallableInfo((b.info,), ObjectInfo()), (actual,), self.env)
        if not any(self.unsure(v, solved[v], frame, b) for v in new):
            info = self.with_dims(b.info, b.var.name)
            super().match_cast(b if info is b.info else replace(b, info=info), frame)
            return
        # The cast stays, with symbols that it binds at run time: replacing them by their solved values would lose the
        # check of their bounds.
        known = free_vars(*(frame.meaning[v] for v in info_symbols(b.info) if v not in new))
        for v in new:
            frame.meaning[v] = self.bound_symbol(v, len(self.stack) > 1)
        info = self.with_dims(self.info(b.info, frame), b.var.name)
        name = b.subject
        ctx = Deduction(self.env, choices=True)
        self.guarded(lambda: check_annotation(f"match_cast of {name}", actual, info, ctx, known), ctx, frame, b)
        var = GVar(self.name(b), info)
        self.out.append(MatchCast(var, value, info))
        frame.values[b.var] = var

    def stays(self, f: Function, infos: Sequence[StructInfo], b: Binding, frame: Frame) -> bool:
        if f.name in self.recursive:
            return True
        solved = solve(signature(f), infos, self.env)
        # A call whose sizes may violate the bounds of the callee stays a call, which checks them on entry. Inlined,
        # the bounds would be assumed without a check.
        return any(v in self.declared and self.unsure(v, size, frame, b) for v, size in solved.items())

    def unsure(self, v: Var, size: Expr | None, frame: Frame, b: AnyBinding) -> bool:
        """Return whether the value of `v`, or whether it is within its bounds, is known only at run time."""
        if size is None:
            return True
        ctx = Deduction(self.env, choices=True)
        self.guarded(lambda: require_bounds(b.var.name, {v: size}, ctx), ctx, frame, b)
        return bool(ctx.checks)
