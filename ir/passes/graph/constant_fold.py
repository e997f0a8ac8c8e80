"""Constant folding of computations on weights that does not make the model larger.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

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
    """Replace values that depend only on weights by new weights.

    A value larger than its weights is not folded: unpacking 4-bit weights costs less memory and time inside the matmul that reads them.
    Smaller values computed from it, such as sums, are folded. Results of the function are not folded.

    Attributes:
        limit: Largest number of elements of an intermediate value.
        small: Bytes up to which a value may be larger than its weights, if only operators compute it: tables, masks, shape arithmetic.
            Tensor functions over weights, and operators with `unpacks`, are excluded, since their purpose is to unpack weights.

    Raises:
        DeduceError: A value can never be computed, for example because of an index out of range. Inside a branch, the error is left to
            run time.
    """

    limit: int = 64 * 1024 * 1024
    small: int = 1 << 20

    def __call__(self, module: IRModule) -> IRModule:
        constants: dict[str, Array] = dict(module.constants)
        env = env_of(module.bounds)

        def function(f: Function, table: FunctionTable) -> Function:
            static, results = _StaticValues(constants, table), returned(f)

            def visit(out: Emitter, binding: AnyBinding) -> None:
                value = out.value(binding.value)
                info = self._static(value, binding, static, Deduction(out.env))
                if info is None or binding.var in results:
                    out.keep(binding)
                    return
                # Remembered even if it is not folded: a value computed from it may be small enough again.
                static.values[binding.var] = value
                steps, sources = static.origin(binding.var)
                # larger results pay only if they save operators at every call; unpacking is cheaper in the kernel that reads it
                small = 0 if any(map(_unpacks, steps)) else self.small
                most = max(small, sum(constants[name].nbytes for name in sources))
                fits = isinstance(info, TensorInfo) and _nbytes(info) <= most
                try:
                    result = static.evaluate(binding.var) if fits else None
                except (DeduceError, UserError) as error:
                    # On a side of a branch the error belongs to run time, since the side may never run.
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

    def _static(self, value: Value, binding: AnyBinding, static: _StaticValues, ctx: Deduction) -> StructInfo | None:
        """Return the annotation of a value that depends only on weights and is small enough to compute, else None."""
        computes = isinstance(value, (CallTIR, TupleItem)) or operator_of(value, OperatorSpec) is not None
        args = value.operands
        if not isinstance(binding, Binding) or not computes or not args or _has_symbols(value):
            return None
        if not all(isinstance(a, Constant) or a in static.values for a in args):
            return None
        info = infer_value(value, ctx)
        parts = info_parts(info)
        for p in parts:
            dims = [as_int(d) for d in p.shape] if isinstance(p, TensorInfo) and p.shape is not None else [None]
            # The limit is on elements of any intermediate value, since folding a large one could exhaust the memory
            # of the compiler.
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
    """Return the bytes of a tensor with constant dims."""
    return math.prod(as_int(d) or 0 for d in info.shape or ()) * (info.dtype.bytes if info.dtype else 8)


def add_constant(constants: dict[str, Array], hint: str, array: Array) -> Constant:
    """Add a weight under a new name, and return it."""
    name = fresh(hint, constants)
    constants[name] = array
    return Constant(name, TensorInfo(tuple(expr(d) for d in array.shape), dtype(array.dtype)))


@dataclass(slots=True)
class _StaticValues:
    """Values that depend only on weights, computed on demand."""

    constants: Mapping[str, Array]
    table: FunctionTable
    values: dict[Value, Value] = field(default_factory=dict)

    def origin(self, var: GVar) -> tuple[list[Value], set[str]]:
        """Return the computations that lead to `var`, and the names of the weights they read."""
        steps = [self.values[v] for v in self._order(var)]
        return steps, {a.name for v in steps for a in v.operands if isinstance(a, Constant)}

    def evaluate(self, var: GVar) -> Array | None:
        """Return the array of `var`; None if a scheduled function would have to be evaluated.

        Raises:
            DeduceError, UserError: The value can never be computed.
        """
        done: dict[Value, Any] = {}
        try:
            for v in self._order(var):
                done[v] = self._value(self.values[v], [done[a] for a in self._arguments(v, done)])
        except VerifyError:
            return None
        result = done[var]
        return result if isinstance(result, np.ndarray) else None

    def _arguments(self, v: Value, done: dict[Value, Any]) -> Sequence[Value]:
        args = self.values[v].operands
        done.update((a, self.constants[a.name]) for a in args if isinstance(a, Constant))
        return args

    def _order(self, var: GVar) -> list[Value]:
        """Return `var` and all values it depends on, each after its operands."""
        order: dict[Value, None] = {}
        # With an explicit stack, since chains of operators on weights may be longer than Python's recursion limit.
        stack: list[tuple[Value, bool]] = [(var, False)]
        while stack:
            v, ready = stack.pop()
            if ready:
                order[v] = None
            elif v not in order:
                stack.append((v, True))
                stack += [(a, False) for a in self.values[v].operands if a in self.values]
        return list(order)

    def _value(self, value: Value, args: Sequence[Any]) -> Any:
        if isinstance(value, TupleItem):
            return args[0][value.index]
        op = operator_of(value, OperatorSpec)
        if op is not None:
            # `evaluate` may compute in float64 independently of the result type, so the result is converted
            dtypes = [p.dtype for p in info_parts(infer_value(value, Deduction())) if isinstance(p, TensorInfo)]
            computed = op.evaluate(args)
            if isinstance(computed, np.ndarray) and len(dtypes) == 1 and dtypes[0] is not None:
                # Kernels give infinity where a value exceeds the type, without a warning.
                with np.errstate(over="ignore"):
                    return computed.astype(dtypes[0].numpy, copy=False)
            return computed
        assert isinstance(value, CallTIR)
        func = self.table.prim(value.callee)
        scalars = [int(n) for n in map(as_int, value.scalars) if n is not None]
        shapes = [tuple(as_int(d) or 0 for d in o.shape or ()) for o in value.out]
        arrays = evaluate_prim(func, args, scalars, shapes)
        # `evaluate_prim` computes floats in float64
        results = [
            a.astype(o.dtype.numpy, copy=False) if o.dtype else a for a, o in zip(arrays, value.out, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results)
