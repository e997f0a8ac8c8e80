"""The NumPy interpreter for graph functions: operators through their own evaluation, tensor functions through `run_prim`,
library and host routines through callables that are passed in. Every value is checked against its annotation, which
reveals wrong deductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_tune.errors import DeduceError, UserError, VerifyError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, Var, as_int, const, free_vars
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    info_dims,
    info_symbols,
)
from relax_tune.ir.deduce.deduce import infer_value, signature
from relax_tune.ir.deduce.index_ranges import IndexTrace
from relax_tune.ir.deduce.relations import differences, is_base, solve, undetermined
from relax_tune.ir.interp.graph_values import (
    Array,
    Result,
    actual_info,
    as_given,
    describe,
    describe_info,
    is_shape,
    outside_place,
    scalar_dtype,
)
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.interp.interp_expr import Env, Fault, Tape
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.text.printer import excerpt

Library = Callable[[Sequence[Array], Sequence[Array], Sequence[int]], None]
"""A library routine: inputs, outputs to fill, integer arguments."""

Host = Callable[..., Any]
"""A host routine: from arguments to results."""

MAX_DEPTH = 100
"""Greatest depth of nested calls of graph functions. A tail call does not count."""


@dataclass(frozen=True, slots=True)
class _TailCall:
    """A recursive call in tail position.

    Attributes:
        inner: for each argument, True if the function computed it.
    """

    args: Sequence[Result]
    inner: Sequence[bool]


@dataclass(frozen=True, slots=True)
class _Outside:
    """Routines from outside the module."""

    libraries: Mapping[str, Library] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    checks: bool = False


def run_function(
    module: IRModule,
    name: str,
    args: Sequence[Result],
    libraries: Mapping[str, Library] | None = None,
    hosts: Mapping[str, Host] | None = None,
    checks: bool = False,
) -> Result:
    """Run the graph function `name` of `module` on `args`.

    Args:
        libraries: implementations for `call_dps_library`, by routine.
        hosts: implementations for `call_host`, by routine.
        checks: a computed index outside its dim is an error, as in a build with `--checks`.

    Raises:
        UserError: an argument, a declared bound, a match_cast or a run-time check that does not hold; names the function, the
            value, the dim, and what was expected and given.
        VerifyError: a value that contradicts its annotation, or an invalid tensor function.
    """
    return _Run(module, _graph(module, name), _Outside(libraries or {}, hosts or {}, checks)).run(args)


def _rounded(value: Result, info: StructInfo) -> Result:
    """Round floats to their deduced dtype: `evaluate` returns float64 for float64 arguments, for references."""
    if isinstance(info, TupleInfo) and isinstance(value, tuple):
        return tuple(map(_rounded, value, info.fields))
    if not isinstance(info, TensorInfo) or info.dtype is None or not info.dtype.is_float:
        return value
    with np.errstate(over="ignore"):  # too large numbers become infinite
        return value.astype(info.dtype.numpy, copy=False)


def _graph(module: IRModule, name: str) -> g.Function:
    function = module.functions.get(name)
    if not isinstance(function, g.Function):
        known = ", ".join(module.graphs) or "none"
        raise UserError(f"expected a graph function called {name!r}; the module has {known}")
    return function


class _Run:
    def __init__(
        self, module: IRModule, f: g.Function, routines: _Outside, depth: int = 0, inner: Sequence[bool] = ()
    ) -> None:
        self.module = module
        self.f = f
        self.routines = routines
        self.depth = depth
        self.symbols: Env = {}
        self.definitions: dict[g.GVar, g.Value] = {}
        self.outside = {p: n for n, p in enumerate(f.params) if not (n < len(inner) and inner[n])}
        self.values: dict[g.GVar, Result] = {}
        self.deduction = env_of(module.bounds)

    def run(self, args: Sequence[Result]) -> Result:
        result = self.until_tail(args)
        while isinstance(result, _TailCall):
            result = _Run(self.module, self.f, self.routines, self.depth, result.inner).until_tail(result.args)
        undecided = any(d.proof is not Proof.NO for d in differences(self.f.ret_info, self.f.ret.info))
        self.agree(self.f.ret_info, result, "the result", self.f.ret, UserError if undecided else VerifyError)
        return result

    def until_tail(self, args: Sequence[Result]) -> Result:
        """Run the function up to its result, or up to a call in tail position."""
        params = self.f.params
        if len(args) < len(params):
            p = params[len(args)]
            raise UserError(f"{self.f.name}: parameter {p.name}: expected {p.info!r}, got no argument")
        if len(args) > len(params):
            raise UserError(f"{self.f.name}: expected {len(params)} arguments, got {len(args)}")
        # symbols of every parameter first: a later parameter may bind what an earlier one computes with
        args = [as_given(p.info, a) for p, a in zip(params, args, strict=True)]
        self.bind([p.info for p in params], args)
        self.check_bounds(self.f.name)
        for p, a in zip(params, args, strict=True):
            self.match(p.info, a, f"{self.f.name}: parameter {p.name}")
        for p in params:
            for v in info_symbols(p.info):
                if v not in self.symbols:
                    raise VerifyError(f"{self.f.name}: parameter {p.name}: {undetermined(v, p.info)}")
        self.values.update(zip(params, args, strict=True))
        return self.body(self.f.bindings, self.f.ret)

    def body(self, bindings: Sequence[g.AnyBinding], ret: g.Value) -> Result:
        """Run a body in tail position. A recursive tail call is left to `run`."""
        last = bindings[-1] if bindings and bindings[-1].var is ret else None
        value = last.value if isinstance(last, g.Binding) else None
        again = isinstance(value, g.CallFunction) and self.calls_itself(value)
        ends = again or isinstance(value, g.If)
        for binding in bindings[: len(bindings) - ends]:
            self.values[binding.var] = self.binding(binding)
        if last is not None and isinstance(value, g.CallFunction) and again:
            return _TailCall(self.arguments(value.args, last), self.computed(value.args))
        if last is not None and isinstance(value, g.If):
            side = value.then if bool(self.value(value.cond)) else value.orelse
            result = self.body(side.bindings, side.ret)
            return result if isinstance(result, _TailCall) else self.checked(last, result)
        return self.value(ret)

    def calls_itself(self, v: g.CallFunction) -> bool:
        return isinstance(v.callee, g.FunctionRef) and v.callee.name == self.f.name

    # annotations

    def bind(self, infos: Sequence[StructInfo], args: Sequence[Result]) -> None:
        """Give the new symbols of annotations the values that the arguments determine."""
        meaning = solve(CallableInfo(tuple(infos), ObjectInfo()), [describe_info(i, a) for i, a in zip(infos, args)])
        for var, size in meaning.items():
            number = None if size is None else as_int(size)
            if number is not None:
                self.symbols.setdefault(var, number)

    def check_bounds(self, where: str) -> None:
        for var, value in self.symbols.items():
            lower, upper = self.deduction.bounds.get(var, (const(0), None))
            least, most = as_int(lower), None if upper is None else as_int(upper)
            if value < (least or 0) or (most is not None and value > most):
                limits = f"{least} <= {var.name}" + ("" if most is None else f" <= {most}")
                raise UserError(f"{where}: expected {limits}, got {var.name} = {value}")

    def match(self, info: StructInfo, value: Result, where: str) -> None:
        """Check a value against `info`, as far as its symbols have values. Raises UserError."""
        match info, value:
            case ObjectInfo(), _:
                pass
            case TupleInfo(parts), tuple() if len(value) == len(parts):
                for i, (part, v) in enumerate(zip(parts, value, strict=True)):
                    self.match(part, v, f"{where}, field {i}")
            case TensorInfo(shape, dtype, ndim), np.ndarray():
                if ndim is not None and value.ndim != ndim:
                    raise UserError(f"{where}: expected {info!r} with {ndim} dims, got {value.ndim} dims {value.shape}")
                if dtype is not None and value.dtype != dtype.numpy:
                    raise UserError(f"{where}: expected {info!r} of {dtype.name}, got {value.dtype}")
                self.dims(shape, value.shape, info, where)
            case ShapeInfo(values, ndim), tuple() if is_shape(value) and ndim in (None, len(value)):
                self.dims(values, value, info, where)
            case PrimInfo() as prim, _:
                self.scalar(prim, value, where)
            case CallableInfo(), g.FunctionRef(name):
                real = signature(_graph(self.module, name))
                if is_base(info, real, self.deduction) is Proof.NO:
                    raise UserError(f"{where}: expected {info!r}, got {name}, which is {real!r}")
            case _:
                raise UserError(f"{where}: expected {info!r}, got {describe(value)}")

    def scalar(self, info: PrimInfo, value: Result, where: str) -> None:
        kind = scalar_dtype(value)
        if kind is None or kind.is_float is not info.dtype.is_float or (kind is bool_) is not (info.dtype is bool_):
            raise UserError(f"{where}: expected {info!r}, got {describe(value)}")
        if info.value is not None and all(v in self.symbols for v in free_vars(info.value)):
            expected = self.number(info.value)
            if expected != value:
                raise UserError(f"{where}: expected {info!r} equal to {expected}, got {value}")

    def dims(self, dims: Sequence[Expr] | None, shape: Sequence[int], info: StructInfo, where: str) -> None:
        for axis, (dim, size) in enumerate(zip(dims or (), shape)):
            if all(v in self.symbols for v in free_vars(dim)):
                expected = self.number(dim)
                if expected != size:
                    raise UserError(
                        f"{where}: expected {info!r} with dim {axis} ({dim!r}) equal to {expected}, "
                        f"got {size} (shape {tuple(shape)})"
                    )

    def agree(
        self, info: StructInfo, value: Result, what: str, node: object, kind: type[Exception] = VerifyError
    ) -> None:
        """Check `value` against its annotation. A mismatch is an error of deduction or of a pass."""
        try:
            self.match(info, value, f"{self.f.name}: {what}")
        except UserError as e:
            raise kind(f"{e}\n{excerpt(self.f, node)}") from None

    def number(self, e: Expr) -> int:
        try:
            return int(self.compute(e))
        except Fault as fault:
            raise UserError(f"{self.f.name}: {e!r}: {fault}") from None

    def scalars(self, values: Sequence[Expr]) -> list[Any]:
        """Return scalar values of the program.

        Raises:
            UserError: a value divides by 0.
        """
        ctx = Deduction(self.deduction)
        ctx.require_divisors(values)
        for check in ctx.checks:
            if not self.number(check.cond):
                raise UserError(f"{self.f.name}: {check.message}")
        return [self.compute(e) for e in values]

    def compute(self, e: Expr) -> Any:
        return Tape((e,), {}).run(self.symbols)[0]

    # values

    def binding(self, b: g.AnyBinding) -> Result:
        value = self.value(b.value, b)
        self.definitions[b.var] = b.value
        if isinstance(b, g.MatchCast):
            name = b.subject
            try:
                self.bind([b.info], [value])
                self.match(b.info, value, f"{self.f.name}: match_cast of {name}")
                self.check_bounds(f"{self.f.name}: match_cast of {name}")
            except UserError as e:
                raise UserError(f"{e}\n{excerpt(self.f, b)}") from None
        return self.checked(b, value)

    def checked(self, b: g.AnyBinding, value: Result) -> Result:
        """Return the value of a binding. A value that contradicts its annotation is an error."""
        try:
            self.agree(b.var.info, value, f"value {b.var.name}", b, UserError)
        except UserError as e:
            if self.says_more(b):
                raise
            raise VerifyError(str(e)) from None
        return value

    def says_more(self, b: g.AnyBinding) -> bool:
        """Return whether the annotation of a binding states more than deduction."""
        if isinstance(b, g.MatchCast):
            return False
        deduced = infer_value(b.value, Deduction(self.deduction))
        return {d.proof for d in differences(b.var.info, deduced, self.deduction)} == {Proof.UNKNOWN}

    def value(self, v: g.Value, at: object = None) -> Result:
        match v:
            case g.GVar():
                return self.values[v]
            case g.Constant(name):
                return self.module.constants[name]
            case g.ShapeValue(dims):
                return tuple(int(x) for x in self.scalars(dims))
            case g.PrimValue(scalar):
                return self.scalars((scalar,))[0]
            case g.FunctionRef():
                return v
            case g.TupleValue(parts):
                return tuple(self.value(f, at) for f in parts)
            case g.TupleItem(whole, index):
                return self.value(whole, at)[index]
            case g.If():
                return self.branch(v)
            case g.CallFunction(args=args):
                return self.call(v, self.arguments(args, at), at)
            case g.CallHost(args=args):
                return self.host(v, self.arguments(args, at))
            case g.Call(args=args):
                return self.operator(v, self.arguments(args, at), at)
            case g.CallTIR(args=args) | g.CallDPSLibrary(args=args):
                return self.destination(v, self.arguments(args, at), at)
        raise TypeError(f"the interpreter has no case for the value {type(v).__name__}")

    def arguments(self, args: Sequence[g.Value], at: object) -> list[Result]:
        return [self.value(a, at) for a in args]

    def branch(self, v: g.If) -> Result:
        """Run one branch in its own scope."""
        side: g.Body = v.then if bool(self.value(v.cond)) else v.orelse
        values, symbols = dict(self.values), dict(self.symbols)
        for b in side.bindings:
            self.values[b.var] = self.binding(b)
        result = self.value(side.ret)
        self.values, self.symbols = values, symbols
        return result

    def call(self, v: g.CallFunction, args: Sequence[Result], at: object) -> Result:
        target = self.value(v.callee)
        assert isinstance(target, g.FunctionRef)
        if self.depth >= MAX_DEPTH:
            raise UserError(
                f"{self.f.name}: expected at most {MAX_DEPTH} calls inside one another, got more at the call of {target.name}"
            )
        try:
            inner = self.computed(v.args)
            return _Run(self.module, _graph(self.module, target.name), self.routines, self.depth + 1, inner).run(args)
        except UserError as e:
            where = f"\n{excerpt(self.f, at)}" if self.depth < 3 else ""
            raise UserError(f"{e}{where}") from None

    def computed(self, args: Sequence[g.Value]) -> list[bool]:
        """Return for each argument whether this function has computed it."""
        trace = self.trace()
        return [not trace.sources(a) for a in args]

    def host(self, v: g.CallHost, args: Sequence[Result]) -> Result:
        routine = self.routines.hosts.get(v.routine)
        if routine is None:
            known = ", ".join(self.routines.hosts) or "none"
            raise UserError(f"{self.f.name}: expected the host routine {v.routine!r}; given: {known}")
        return routine(*args)

    def operator(self, call: g.Call, args: Sequence[Any], at: object) -> Result:
        if not isinstance(call.op, OperatorSpec):
            raise VerifyError(f"{self.f.name}: expected an operator with a meaning, got {call.op!r}")
        self.undecided(call, at)
        op = call.op.substituted({s: const(n) for s, n in self.symbols.items()})
        try:
            infos = [actual_info(a) for a in args]
            deduced = op.infer(infos, Deduction())  # conditions that annotations leave open are decided by the values
            self.check_indices(call, infos, args)
            return _rounded(op.evaluate(args), deduced)
        except DeduceError as e:
            raise UserError(f"{self.f.name}: {e}\n{excerpt(self.f, at)}") from None
        except (ValueError, IndexError, ArithmeticError, MemoryError) as e:
            # NumPy's limits, such as the largest size of an array.
            problem = f"expected arguments and sizes that NumPy can compute with, got {e}"
            raise UserError(f"{self.f.name}: {op.name}: {problem}\n{excerpt(self.f, at)}") from None

    def trace(self) -> IndexTrace:
        symbols: dict[Var, Expr] = {s: const(n) for s, n in self.symbols.items()}
        return IndexTrace(self.outside, self.definitions, self.module.constants, symbols)

    def check_indices(self, call: g.Call, infos: Sequence[StructInfo], args: Sequence[Array]) -> None:
        """Refuse parameters that an operator uses as indices outside their dims, and with checks also computed values.

        Raises:
            DeduceError: an index is outside; names the first.
        """
        if not isinstance(call.op, OperatorSpec) or not call.op.indexed(
            [i for i in infos if isinstance(i, TensorInfo)]
        ):
            return
        trace = self.trace()
        for used, r in trace.uses(call, infos):
            if r is not None:
                p = self.f.params[r.position]
                low, high = self.number(r.low), self.number(r.high)
                place = outside_place(self.values[p], low, high, r.stride, r.offset)
                if place:
                    raise DeduceError(
                        f"parameter {p.name}: expected values from {low} to {high - 1}, which {call.op.name} uses as indices, "
                        f"got {place}"
                    )
            elif self.routines.checks or trace.sources(call.args[used.position]):
                size = self.number(used.size)
                place = outside_place(args[used.position], 0, size, used.stride, used.offset)
                if place:
                    expected = f"expected indices of at least 0 and below {size}"
                    raise DeduceError(f"{call.op.name}: {expected}, got {place}")

    def undecided(self, call: g.Call | g.CallTIR | g.CallDPSLibrary, at: object) -> None:
        """Check the conditions that deduction leaves to run time, at the symbols' values. Raises UserError,
        VerifyError.
        """
        deduction = Deduction(self.deduction)
        try:
            info = infer_value(call, deduction)
        except DeduceError as e:
            raise VerifyError(f"{self.f.name}: {e}\n{excerpt(self.f, at)}") from None
        for d in info_dims(info) or ():  # a dim that divides by 0 has no value
            if all(s in self.symbols for s in free_vars(d)):
                self.number(d)
        for check in deduction.checks:
            if all(s in self.symbols for s in free_vars(check.cond, *check.values)) and not self.number(check.cond):
                message = check.text([self.number(x) for x in check.values])
                raise UserError(f"{self.f.name}: {message}\n{excerpt(self.f, at)}")

    def destination(self, call: g.CallTIR | g.CallDPSLibrary, args: Sequence[Any], at: object) -> Result:
        self.undecided(call, at)
        outs: list[Array] = []
        for info in call.out:
            if info.shape is None or info.dtype is None:
                raise VerifyError(f"{self.f.name}: expected a full annotation for an output, got {info!r}")
            outs.append(np.zeros([self.number(d) for d in info.shape], info.dtype.numpy))
        scalars = [self.number(s) for s in call.scalars]
        for number, at in enumerate(call.inplace if isinstance(call, g.CallTIR) else ()):
            if at is not None and args[at].shape != outs[number].shape:
                raise UserError(
                    f"{self.f.name}: output {number} in place of argument {at}: expected shape {outs[number].shape}, "
                    f"got {args[at].shape}"
                )
        if isinstance(call, g.CallTIR):
            run_prim(self.module.prim(call.callee), [*args, *outs], scalars)
        else:
            routine = self.routines.libraries.get(call.routine)
            if routine is None:
                known = ", ".join(self.routines.libraries) or "none"
                raise UserError(f"{self.f.name}: library routine {call.routine!r} is missing; given: {known}")
            routine(args, outs, scalars)
        return outs[0] if len(outs) == 1 else tuple(outs)
