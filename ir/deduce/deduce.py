"""Forward deduction of annotations (Relax, section 3.3): operators, calls of functions and branches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.dtype import bool_, f32, i32
from relax_tune.ir.core.expr import Const, Expr, Var, const, ge, le, not_
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    devices_of,
    info_dims,
    info_parts,
    info_symbols,
    on_device,
    own_symbols,
)
from relax_tune.ir.deduce.relations import differences, join, require_all, solve, substitute_info, without_symbols
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.devices import DeviceOperator


@singledispatch
def infer_value(value: g.Value, ctx: Deduction) -> StructInfo:
    """Deduce the annotation of a value. Bindings inside an `if` keep their annotations. Raises DeduceError."""
    return value.info


@infer_value.register
def _(value: g.Call, ctx: Deduction) -> StructInfo:
    if not isinstance(value.op, OperatorSpec):
        raise DeduceError(f"expected an operator with deduction, got {value.op!r}")
    args = [a.info for a in value.args]
    require_arithmetic(value.op, args)
    info = value.op.infer(args, ctx)
    require_dims(value.op.name, args, info, ctx)
    return info if isinstance(value.op, DeviceOperator) else placed(value.op.name, args, info)


def placed(name: str, args: Sequence[StructInfo], result: StructInfo) -> StructInfo:
    """Return the annotation of a result on the device of the arguments.

    Raises:
        DeduceError: the arguments lie on several devices.
    """
    devices = dict.fromkeys(d for a in args for d in devices_of(a))
    if not devices:
        return result
    # Only now: without arguments on a device, a stated device of the result is not contradicted by anything.
    devices |= dict.fromkeys(devices_of(result))
    if len(devices) > 1:
        raise DeduceError(
            f"{name}: expected arguments and result on one device, got {' and '.join(devices)}; put in to_device"
        )
    return on_device(result, next(iter(devices)))


def require_arithmetic(op: OperatorSpec, args: Sequence[StructInfo]) -> None:
    """Refuse arguments of small types to operators that compute with them. Raises DeduceError."""
    for a in args:
        if isinstance(a, TensorInfo) and a.dtype is not None and a.dtype.is_small and not op.takes_small():
            raise DeduceError(
                f"{op.name}: expected an element type that has arithmetic, got {a.dtype}; cast it to "
                f"{f32 if a.dtype.is_float else i32} first"
            )


@infer_value.register
def _(value: g.CallTIR, ctx: Deduction) -> StructInfo:
    require_inplace_infos(value, ctx)
    infos = [a.info for a in value.args]
    require_dims(value.callee, infos, value.info, ctx)
    return placed(value.callee, infos, value.info)


@infer_value.register
def _(value: g.CallDPSLibrary, ctx: Deduction) -> StructInfo:
    infos = [a.info for a in value.args]
    require_dims(value.routine, infos, value.info, ctx)
    return placed(value.routine, infos, value.info)


def require_dims(name: str, args: Sequence[StructInfo], result: StructInfo, ctx: Deduction) -> None:
    """Require non-negative dims of `result`, given non-negative dims of the arguments.

    Raises:
        DeduceError: dims that never fit; undecided dims become run-time checks.
    """
    known = dict.fromkeys(d for a in args if isinstance(a, TensorInfo) for d in a.shape or ())
    new = [
        (p, d)
        for t in info_parts(result)
        if isinstance(t, TensorInfo)
        for p, d in enumerate(t.shape or ())
        if d not in known and not isinstance(d, Var) and not _natural(d, ctx.env)
    ]
    if not new:
        return
    env = ctx.env
    # Each argument exists, so its dims are >= 0. n - 4 among the arguments makes n - 3 valid.
    for d in known:
        if not isinstance(d, (Var, Const)):
            env = env.with_fact(ge(d, 0))
    for p, d in new:
        proof = prove(ge(d, 0), env)
        if proof is Proof.NO:
            raise DeduceError(f"{name}: dim {p} of the result: expected at least 0, got {d!r}")
        if proof is Proof.UNKNOWN:
            ctx.require(ge(d, 0), f"{name}: dim {p} of the result: expected at least 0, got {{0}} ({d!r})", d)


def _natural(e: Expr, env: Env) -> bool:
    low = interval(e, env)[0]
    return low is not None and low >= 0


def require_inplace_infos(call: g.CallTIR, ctx: Deduction) -> None:
    """Require each in-place output to have the dims and dtype of its argument.

    Raises:
        DeduceError: dims that never fit; undecided dims become run-time checks.
    """
    if call.inplace and len(call.inplace) != len(call.out):
        raise DeduceError(
            f"{call.callee}: expected a place for each of {len(call.out)} outputs (None: new memory), got {len(call.inplace)}"
        )
    for number, (out, at) in enumerate(zip(call.out, call.inplace)):
        if at is None:
            continue
        where = f"{call.callee}: output {number} in place of argument {at}"
        if not 0 <= at < len(call.args):
            raise DeduceError(f"{where}: expected an argument in 0..{len(call.args) - 1}, got {at}")
        info = call.args[at].info
        if not isinstance(info, TensorInfo) or info.shape is None or out.shape is None or info.dtype is not out.dtype:
            raise DeduceError(
                f"{where}: expected {out!r}, got {info!r}; an output takes the memory of a tensor like it"
            )
        if len(info.shape) != len(out.shape):
            raise DeduceError(f"{where}: expected {len(out.shape)} dims, got {len(info.shape)}")
        for dim, (expected, actual) in enumerate(zip(out.shape, info.shape, strict=True)):
            ctx.require_equal(expected, actual, f"{where}, dim {dim}")


def signature(f: g.Function) -> CallableInfo:
    """Return the signature of a graph function for its callers; dims over symbols bound in its body become unknown."""
    whole = CallableInfo(tuple(p.info for p in f.params), f.ret_info, f.pure, tuple(p.name for p in f.params))
    return CallableInfo(whole.params, without_symbols(f.ret_info, own_symbols(whole)), f.pure, whole.names)


@infer_value.register
def infer_call(value: g.CallFunction, ctx: Deduction) -> StructInfo:
    """Deduce the result of calling a graph function: bind its symbols to the arguments, substitute them in its result.

    Raises:
        DeduceError: names the function, the parameter, the dim and both sizes when an argument never fits.
    """
    callee = value.callee
    name = callee.name if isinstance(callee, (g.GVar, g.FunctionRef)) else "the callee"
    info = callee.info
    if not isinstance(info, CallableInfo):
        raise DeduceError(f"{name}: expected a function to call, got {info!r}")
    return apply_signature(name, info, [a.info for a in value.args], ctx)


def apply_signature(name: str, callee: CallableInfo, args: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
    """Deduce the result of calling `callee`; undetermined symbols make it coarser.

    Raises:
        DeduceError: a condition never holds; undecided conditions become run-time checks of `ctx`.
    """
    if callee.params is None:
        return callee.ret
    titles = [f"parameter {n}" for n in callee.names] or [f"argument {i}" for i in range(len(callee.params))]
    if len(args) != len(callee.params):
        missing = f"; {titles[len(args)]} has none" if len(args) < len(callee.params) else ""
        raise DeduceError(f"{name}: expected {len(callee.params)} arguments, got {len(args)}{missing}")
    meaning = solve(callee, args, ctx.env)
    for title, param, arg in zip(titles, callee.params, args, strict=True):
        require_all(f"{name}: {title}", differences(param, arg, ctx.env, meaning), ctx)
    require_bounds(name, meaning, ctx, bare=_bare(callee))
    return substitute_info(callee.ret, meaning, ctx.env)


def _bare(callee: CallableInfo) -> frozenset[Expr]:
    """Return the symbols that are bare dims of parameters, hence never negative."""
    return frozenset(d for info in callee.params or () for d in _bare_dims(info))


def _bare_dims(info: StructInfo) -> Iterable[Expr]:
    if isinstance(info, TupleInfo):
        return (d for f in info.fields for d in _bare_dims(f))
    return info_dims(info) or () if isinstance(info, (TensorInfo, ShapeInfo)) else ()


def require_bounds(
    name: str, meaning: Mapping[Var, Expr | None], ctx: Deduction, bare: frozenset[Expr] = frozenset()
) -> None:
    """Require the value of each symbol to lie within its declared bounds (at least 0).

    Args:
        bare: symbols that are dims, hence never negative.

    Raises:
        DeduceError: a value can never lie within its bounds; undecided bounds become run-time checks.
    """
    for symbol, value in meaning.items():
        # The caller uses the same symbol, whose bounds hold there as well.
        if value is None or value is symbol:
            continue
        lower, upper = ctx.env.bounds.get(symbol, (const(0), None))
        limits = f"{lower!r} <= {symbol.name}" + ("" if upper is None else f" <= {upper!r}")
        conditions = [] if lower.value == 0 and symbol in bare else [ge(value, lower)]
        for cond in conditions if upper is None else [*conditions, le(value, upper)]:
            proof = ctx.proves(cond)
            if proof is Proof.NO:
                raise DeduceError(f"{name}: expected {limits}, got {symbol.name} = {value!r}")
            if proof is Proof.UNKNOWN:
                ctx.require(cond, f"{name}: expected {limits}, got {symbol.name} = {{0}}", value)


@infer_value.register
def infer_if(value: g.If, ctx: Deduction) -> StructInfo:
    """Join the annotations of both sides, without symbols bound on one side. Raises DeduceError."""
    check_condition(value.cond)
    outer = {v for o in value.operands for v in info_symbols(o.info)}
    sides = []
    for body in value.bodies:
        # A match_cast may also check a symbol that was bound outside; that one keeps its meaning after the `if`.
        inside = {v for b in body.bindings if isinstance(b, g.MatchCast) for v in info_symbols(b.info)} - outer
        info = body.ret.info
        sides.append(without_symbols(info, set(info_symbols(info)) - inside))
    return join(sides[0], sides[1], ctx.env)


def side_env(env: Env, cond: g.Value, holds: bool) -> Env:
    """Return the facts on one side of an `if`: `env` and the condition or its negation, if it is over symbols."""
    info = cond.info
    if not isinstance(info, PrimInfo) or info.value is None or isinstance(info.value, Const):
        return env
    return env.with_fact(info.value if holds else not_(info.value))


def check_condition(cond: g.Value) -> None:
    """Require a condition that can be a scalar of bool. Raises DeduceError."""
    info = cond.info
    if isinstance(info, PrimInfo) and info.dtype is bool_:
        return
    if isinstance(info, ObjectInfo):
        return
    if isinstance(info, TensorInfo) and info.dtype in (None, bool_) and info.ndim in (None, 0):
        return
    raise DeduceError(f"if: expected a scalar of bool as condition, got {info!r}")
