"""The NumPy interpreter for graph functions: operators through their own evaluation, tensor functions through `run_prim`,
library routines through callables that are passed in. Every value is checked against its annotation, so a wrong deduction shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import DeduceError, UserError, VerifyError
from relax_tune.ir.expr import Expr, Var, const, free_vars
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph import (
    AnyBinding,
    Call,
    CallDPSLibrary,
    CallTIR,
    Constant,
    Function,
    GVar,
    MatchCast,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.graph_builder import info_of
from relax_tune.ir.interp import run_prim
from relax_tune.ir.interp_expr import Env, Fault, Tape
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.printer import excerpt
from relax_tune.ir.struct_info import ShapeInfo, StructInfo, TensorInfo, TupleInfo

Array = NDArray[Any]
Result = Union[Array, tuple[Any, ...]]
"""An array, a shape as a tuple of ints, or a tuple of results."""

Library = Callable[[Sequence[Array], Sequence[Array], Sequence[int]], None]
"""A library routine: inputs, outputs to fill, integer arguments."""


def run_function(
    module: IRModule, name: str, args: Sequence[Result], libraries: Mapping[str, Library] | None = None
) -> Result:
    """The result of the graph function `name` of `module` on `args`.

    libraries: what `call_dps_library` calls, by routine.

    Raises:
        UserError: an argument, a declared bound, a match_cast or a run-time check that does not hold; names the function, the
            value, the dim, the wanted and the found.
        VerifyError: a value that is not what its annotation says, or a tensor function that misbehaves.
    """
    found = module.functions.get(name)
    if not isinstance(found, Function):
        known = ", ".join(n for n, f in module.functions.items() if isinstance(f, Function)) or "none"
        raise UserError(f"wanted a graph function called {name!r}; the module has {known}")
    return _Run(module, found, libraries or {}).run(args)


class _Run:
    def __init__(self, module: IRModule, f: Function, libraries: Mapping[str, Library]) -> None:
        self.module = module
        self.f = f
        self.libraries = libraries
        self.symbols: Env = {}
        self.values: dict[GVar, Result] = {}
        self.deduction = env_of(module.bounds)

    def run(self, args: Sequence[Result]) -> Result:
        params = self.f.params
        if len(args) < len(params):
            p = params[len(args)]
            raise UserError(f"{self.f.name}: parameter {p.name}: wanted {p.info!r}, found no argument")
        if len(args) > len(params):
            raise UserError(f"{self.f.name}: wanted {len(params)} arguments, found {len(args)}")
        # bare dims of every parameter first: a later parameter may bind what an earlier one computes with
        for check in (False, True):
            for p, a in zip(params, args, strict=True):
                self.match(p.info, a, f"{self.f.name}: parameter {p.name}", check)
        for b in self.module.bounds:
            value = self.symbols.get(b.var)
            if value is not None and (value < b.lower or (b.upper is not None and value > b.upper)):
                limits = f"{b.lower} <= {b.var.name}" + ("" if b.upper is None else f" <= {b.upper}")
                raise UserError(f"{self.f.name}: wanted {limits}, found {b.var.name} = {value}")
        self.values.update(zip(params, args, strict=True))
        for binding in self.f.bindings:
            self.values[binding.var] = self.binding(binding)
        result = self.value(self.f.ret)
        self.agree(self.f.ret_info, result, "the result", self.f.ret)
        return result

    # annotations

    def match(self, info: StructInfo, value: Result, where: str, check: bool = True) -> None:
        """Bind the new symbols of `info` to the value's dims; with `check`, require everything else. Raises UserError."""
        if isinstance(info, TupleInfo):
            if not isinstance(value, tuple) or len(value) != len(info.fields):
                raise UserError(f"{where}: wanted {info!r}, found {describe(value)}")
            for i, (field, v) in enumerate(zip(info.fields, value, strict=True)):
                self.match(field, v, f"{where}, field {i}", check)
        elif isinstance(info, TensorInfo):
            if not isinstance(value, np.ndarray):
                raise UserError(f"{where}: wanted {info!r}, found {describe(value)}")
            if info.ndim is not None and value.ndim != info.ndim:
                raise UserError(
                    f"{where}: wanted {info!r} with {info.ndim} dims, found {value.ndim} dims {value.shape}"
                )
            if info.dtype is not None and value.dtype != info.dtype.numpy:
                raise UserError(f"{where}: wanted {info!r} of {info.dtype.name}, found {value.dtype}")
            self.dims(info.shape, value.shape, info, where, check)
        elif isinstance(info, ShapeInfo):
            if not isinstance(value, tuple) or (info.ndim is not None and len(value) != info.ndim):
                raise UserError(f"{where}: wanted {info!r}, found {describe(value)}")
            self.dims(info.values, value, info, where, check)

    def dims(
        self, dims: Sequence[Expr] | None, found: Sequence[int], info: StructInfo, where: str, check: bool
    ) -> None:
        for axis, (dim, size) in enumerate(zip(dims or (), found)):
            if isinstance(dim, Var):
                self.symbols.setdefault(dim, int(size))
            if check and all(v in self.symbols for v in free_vars(dim)):
                wanted = self.number(dim)
                if wanted != size:
                    raise UserError(
                        f"{where}: wanted {info!r} with dim {axis} ({dim!r}) equal to {wanted}, "
                        f"found {size} (shape {tuple(found)})"
                    )

    def agree(self, info: StructInfo, value: Result, what: str, node: object) -> None:
        try:
            self.match(info, value, f"{self.f.name}: {what}")
        except UserError as e:
            raise VerifyError(f"{e}\n{excerpt(self.f, node)}") from None

    def number(self, e: Expr) -> int:
        try:
            return int(Tape((e,), {}).run(self.symbols)[0])
        except Fault as fault:
            raise VerifyError(f"{self.f.name}: {e!r}: {fault}") from None

    # values

    def binding(self, b: AnyBinding) -> Result:
        value = self.value(b.value, b)
        if isinstance(b, MatchCast):
            name = b.value.name if isinstance(b.value, (GVar, Constant)) else b.var.name
            self.match(b.info, value, f"{self.f.name}: match_cast of {name}")
        self.agree(b.var.info, value, f"value {b.var.name}", b)
        return value

    def value(self, v: Value, at: object = None) -> Result:
        if isinstance(v, GVar):
            return self.values[v]
        if isinstance(v, Constant):
            return self.module.constants[v.name]
        if isinstance(v, ShapeValue):
            return tuple(self.number(d) for d in v.values)
        if isinstance(v, TupleValue):
            return tuple(self.value(f, at) for f in v.fields)
        if isinstance(v, TupleItem):
            item: Result = self.value(v.value, at)[v.index]
            return item
        args = [self.value(a, at) for a in v.args]
        return self.operator(v, args, at) if isinstance(v, Call) else self.destination(v, args)

    def operator(self, call: Call, args: Sequence[Any], at: object) -> Result:
        if not isinstance(call.op, OperatorSpec):
            raise VerifyError(f"{self.f.name}: wanted an operator with a meaning, found {call.op!r}")
        deduction = Deduction(self.deduction)
        try:
            call.op.infer([info_of(a) for a in call.args], deduction)
        except DeduceError as e:
            raise VerifyError(f"{self.f.name}: {e}\n{excerpt(self.f, at)}") from None
        for check in deduction.checks:
            if all(s in self.symbols for s in free_vars(check.cond, *check.values)) and not self.number(check.cond):
                found = check.message.format(*(self.number(x) for x in check.values))
                raise UserError(f"{self.f.name}: {found}\n{excerpt(self.f, at)}")
        known = {s: const(n) for s, n in self.symbols.items()}
        return call.op.substituted(known).evaluate(args)

    def destination(self, call: CallTIR | CallDPSLibrary, args: Sequence[Any]) -> Result:
        outs: list[Array] = []
        for info in call.out:
            if info.shape is None or info.dtype is None:
                raise VerifyError(f"{self.f.name}: wanted a full annotation for an output, found {info!r}")
            outs.append(np.zeros([self.number(d) for d in info.shape], info.dtype.numpy))
        scalars = [self.number(s) for s in call.scalars]
        if isinstance(call, CallTIR):
            run_prim(self.module.prim(call.callee), [*args, *outs], scalars)
        else:
            routine = self.libraries.get(call.routine)
            if routine is None:
                known = ", ".join(self.libraries) or "none"
                raise UserError(f"{self.f.name}: wanted the library routine {call.routine!r}; given: {known}")
            routine(args, outs, scalars)
        return outs[0] if len(outs) == 1 else tuple(outs)


def describe(value: object) -> str:
    """A value in an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")
