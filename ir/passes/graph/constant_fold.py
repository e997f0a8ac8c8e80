"""Constant folding of weights, where it makes the model no larger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import DeduceError, UserError, VerifyError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.expr import as_int, expr, free_vars
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, CallTIR, Constant, Function, GVar, TupleItem, Value
from relax_tune.ir.core.graph_walk import operator_of
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, info_parts
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.interp.reference import evaluate_prim
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, returned, rewrite_function
from relax_tune.ir.text.printer import excerpt

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class FoldConstants:
    """Compute values that depend only on weights, and make them weights.

    A value larger than its weights stays: unpacking 4-bit weights costs less memory and time inside the matmul that
    reads them. Values that make it smaller again, such as its sums, are folded. Results of the function stay, too.

    limit: elements of the largest value computed on the way.
    small: bytes up to which a value may be larger than its weights, if only operators compute it: tables, masks, shape
        arithmetic. Tensor functions over weights, and operators with `unpacks`, serve to unpack weights and are
        excluded.

    Raises DeduceError, showing the binding, for a value that can never be computed, such as an index outside a table.
    On a side of a branch that error is left to run time.
    """

    limit: int = 64 * 1024 * 1024
    small: int = 1 << 20

    def __call__(self, module: IRModule) -> IRModule:
        constants: dict[str, Array] = dict(module.constants)
        env = env_of(module.bounds)

        def function(f: Function, table: FunctionTable) -> Function:
            held, results = _Held(constants, table), returned(f)

            def visit(out: Emitter, binding: AnyBinding) -> None:
                value = out.value(binding.value)
                info = self._static(value, binding, held, Deduction(out.env))
                if info is None or binding.var in results:
                    out.keep(binding)
                    return
                held.values[binding.var] = value
                steps, sources = held.origin(binding.var)
                small = 0 if any(map(_unpacks, steps)) else self.small
                most = max(small, sum(constants[name].nbytes for name in sources))
                fits = isinstance(info, TensorInfo) and _nbytes(info) <= most
                try:
                    result = held.evaluate(binding.var) if fits else None
                except (DeduceError, UserError) as error:
                    if out.depth == 0:
                        raise DeduceError(f"{f.name}: {error}\n{excerpt(f, binding)}") from None
                    result = None
                if result is None:
                    out.keep(binding)
                    return
                out.mapping[binding.var] = add_constant(constants, binding.var.name, result)

            return rewrite_function(f, visit, env)

        new = map_graphs(module, function)
        return module if new is module else replace(new, constants=constants)

    def _static(self, value: Value, binding: AnyBinding, held: _Held, ctx: Deduction) -> StructInfo | None:
        """Return the annotation of a value that depends only on weights and is small enough to compute, else None."""
        computes = isinstance(value, (CallTIR, TupleItem)) or operator_of(value, OperatorSpec) is not None
        args = value.operands
        if not isinstance(binding, Binding) or not computes or not args or _has_symbols(value):
            return None
        if not all(isinstance(a, Constant) or a in held.values for a in args):
            return None
        info = infer_value(value, ctx)
        parts = info_parts(info)
        for p in parts:
            dims = [as_int(d) for d in p.shape] if isinstance(p, TensorInfo) and p.shape is not None else [None]
            if None in dims or math.prod(d for d in dims if d is not None) > self.limit:
                return None
        return info


def _has_symbols(value: Value) -> bool:
    """Return whether an operator's attributes or a tensor function's scalars mention symbols."""
    if isinstance(value, CallTIR):
        return bool(free_vars(*value.scalars))
    return isinstance(value, Call) and bool(value.op.symbols())


def _unpacks(value: Value) -> bool:
    op = operator_of(value, OperatorSpec)
    return isinstance(value, CallTIR) or (op is not None and op.unpacks)


def _nbytes(info: TensorInfo) -> int:
    """Return bytes of a tensor whose dims are numbers."""
    return math.prod(as_int(d) or 0 for d in info.shape or ()) * (info.dtype.bytes if info.dtype else 8)


def add_constant(constants: dict[str, Array], hint: str, array: Array) -> Constant:
    """Add a weight under a name of its own, and return it."""
    name = fresh(hint, constants)
    constants[name] = array
    return Constant(name, TensorInfo(tuple(expr(d) for d in array.shape), dtype(array.dtype)))


@dataclass(slots=True)
class _Held:
    """Values that depend only on weights, computed on demand."""

    constants: Mapping[str, Array]
    table: FunctionTable
    values: dict[Value, Value] = field(default_factory=dict)

    def origin(self, var: GVar) -> tuple[list[Value], set[str]]:
        """Return the computations that lead to `var`, and the names of the weights they read."""
        steps = [self.values[v] for v in self._order(var)]
        return steps, {a.name for v in steps for a in v.operands if isinstance(a, Constant)}

    def evaluate(self, var: GVar) -> Array | None:
        """Return the array of `var`; None where a scheduled function is involved.

        Raises DeduceError or UserError for a value that can never be computed."""
        done: dict[Value, Any] = {}
        try:
            for v in self._order(var):
                done[v] = self._value(self.values[v], [done[a] for a in self._arguments(v, done)])
        except VerifyError:
            return None
        found = done[var]
        return found if isinstance(found, np.ndarray) else None

    def _arguments(self, v: Value, done: dict[Value, Any]) -> Sequence[Value]:
        args = self.values[v].operands
        done.update((a, self.constants[a.name]) for a in args if isinstance(a, Constant))
        return args

    def _order(self, var: GVar) -> list[Value]:
        """Return `var` and all values it depends on, each after its operands."""
        found: dict[Value, None] = {}
        stack: list[tuple[Value, bool]] = [(var, False)]
        while stack:
            v, ready = stack.pop()
            if ready:
                found[v] = None
            elif v not in found:
                stack.append((v, True))
                stack += [(a, False) for a in self.values[v].operands if a in self.values]
        return list(found)

    def _value(self, value: Value, args: Sequence[Any]) -> Any:
        if isinstance(value, TupleItem):
            return args[0][value.index]
        op = operator_of(value, OperatorSpec)
        if op is not None:
            # float64 arguments stand for references in double precision: a cast of one stays float64
            dtypes = [p.dtype for p in info_parts(infer_value(value, Deduction())) if isinstance(p, TensorInfo)]
            computed = op.evaluate(args)
            if isinstance(computed, np.ndarray) and len(dtypes) == 1 and dtypes[0] is not None:
                with np.errstate(over="ignore"):
                    return computed.astype(dtypes[0].numpy, copy=False)
            return computed
        assert isinstance(value, CallTIR)
        func = self.table.prim(value.callee)
        scalars = [int(n) for n in map(as_int, value.scalars) if n is not None]
        shapes = [tuple(as_int(d) or 0 for d in o.shape or ()) for o in value.out]
        found = evaluate_prim(func, args, scalars, shapes)
        # floats were computed in float64
        results = [a.astype(o.dtype.numpy, copy=False) if o.dtype else a for a, o in zip(found, value.out, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)
