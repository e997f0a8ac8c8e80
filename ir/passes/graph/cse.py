"""Common subexpression elimination, and sharing of equal weights.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.check.inplace import ordering_constrained
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.core.struct_info import CallableInfo
from relax_tune.ir.deduce.pattern_kinds import PatternKind, pattern_kind
from relax_tune.ir.deduce.relations import is_certain
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, returned, rewrite_function

Array = NDArray[Any]
# Weights of one shape differ in most elements, so a sample decides almost all comparisons without reading whole
# arrays.
SAMPLE = 64
"""Elements of a weight that are compared first, before all elements."""


@dataclass(frozen=True, slots=True)
class CommonSubexpressions:
    """Replace a pure call that repeats an earlier one by the earlier value.

    Calls are equal if they apply the same operator or function to the same values or equal weights, over provably equal dims. A value
    computed on one side of an `if` is shared only within that side. Results of a function, and values that a `call_tir_inplace`
    overwrites, are computed separately. A host routine that is not declared pure is called every time.

    Attributes:
        repeat_spatial: Do not share spatial tensor functions, nor operators other than views. Before fusion, each of them may still fuse
            into the kernel that reads it, which costs less than a kernel and memory for the shared value.
        least_bytes: Minimum size of equal weights that are stored once. Sharing smaller ones saves nothing, and the arguments of a kernel
            must not depend on whether two biases happen to be zero.
    """

    repeat_spatial: bool = False
    least_bytes: int = 1 << 16

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        first = equal_weights(module.constants)
        spatial: dict[str, bool] = {}

        def function(f: g.Function, table: FunctionTable) -> g.Function:
            results, fixed = returned(f), ordering_constrained(f)
            values = (b for b in graph_walk.all_bindings(f) if b.var in fixed)
            overwritten = {v for b in values for v in used_vars(b.value)}  # or read just before an overwrite
            # Value numbering: the first equal value or weight.
            number: dict[g.Value | str, g.Value | str] = dict(first.items())

            def repeats(value: g.Value) -> bool:
                if self.repeat_spatial and isinstance(value, g.Call):
                    return not is_view(value)
                func = table.functions.get(value.callee) if isinstance(value, g.CallTIR) else None
                if not self.repeat_spatial or not isinstance(func, PrimFunc):
                    return False
                if func.name not in spatial:
                    spatial[func.name] = pattern_kind(func) <= PatternKind.INJECTIVE
                return spatial[func.name]

            def visit(out: Emitter, binding: g.AnyBinding) -> None:
                value, ctx = out.value(binding.value), Deduction(out.env)
                key = _key(value, number, ctx) if isinstance(binding, g.Binding) else None
                known = None if key is None else out.known.setdefault(key, binding.var)
                if (
                    isinstance(known, g.GVar)
                    and known is not binding.var
                    and is_certain(binding.var.info, known.info, ctx.env)
                ):
                    # Also for values that are computed again: their readers are still equal to readers of the first
                    # one.
                    number[binding.var] = known
                    if binding.var not in results | fixed and known not in overwritten and not repeats(value):
                        out.mapping[binding.var] = known
                        return
                out.keep(binding)

            large = {new: old for new, old in first.items() if module.constants[new].nbytes >= self.least_bytes}
            weights = (v for v in graph_walk.nested_values(f) if isinstance(v, g.Constant) and v.name in large)
            shared: dict[g.Value, g.Value] = {v: g.Constant(large[v.name], v.info) for v in weights}
            return rewrite_function(f, visit, env, shared)

        return map_graphs(module, function)


def equal_weights(constants: Mapping[str, Array]) -> dict[str, str]:
    """Map every weight with the same bytes as an earlier one to the name of the first."""
    first: dict[str, str] = {}
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, array in constants.items():
        flat = array.reshape(-1)
        sample = flat[:: max(1, flat.size // SAMPLE)][:SAMPLE].tobytes()
        others = alike.setdefault((array.dtype.str, array.shape, sample), [])
        same = next((o for o in others if _same_bytes(array, constants[o])), None)
        if same is None:
            others.append(name)
        else:
            first[name] = same
    return first


def _same_bytes(a: Array, b: Array) -> bool:
    """Compare bytes, since -0.0 == 0.0 and nan != nan."""
    if a is b:
        return True
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(left, right)


def _key(value: g.Value, number: Mapping[g.Value | str, g.Value | str], ctx: Deduction) -> object:
    """Return a key that is equal for equal computations; None for a value that is never shared."""
    if graph_walk.is_impure(value):
        return None
    if isinstance(value, g.CallFunction):
        info = value.callee.info
        if not isinstance(info, CallableInfo) or not info.pure:
            return None
    # Both sides of an `if` would have to be compared. Their parts are shared one by one.
    elif isinstance(value, (*g.ATOMS, g.If)):
        return None
    args = tuple(_atom(a, number, ctx) for a in value.operands)
    return (type(value), _plain(value.attributes, ctx), args)


def _atom(value: g.Value, number: Mapping[g.Value | str, g.Value | str], ctx: Deduction) -> object:
    if isinstance(value, g.Constant):
        return ("weight", number.get(value.name, value.name))
    if isinstance(value, g.FunctionRef):
        return ("function", value.name)
    if isinstance(value, (g.ShapeValue, g.PrimValue)):
        return _plain(value, ctx)
    return number.get(value, value)


def _plain(x: object, ctx: Deduction) -> object:
    """Return attributes and annotations in comparable form: simplified dims, numbers with their type and sign."""
    if isinstance(x, Expr):
        return ctx.simplify(x) if x.dtype.is_int else x
    # 0.0 == -0.0 and 1 == 1.0 == True in Python, but they are different attributes; NaN is not equal to itself.
    if isinstance(x, float):
        return ("float", repr(x))
    if isinstance(x, tuple):
        return tuple(_plain(y, ctx) for y in x)
    if is_dataclass(x) and not isinstance(x, type):
        return (type(x), *_fields(x, ctx))
    return (type(x), x)


def _fields(x: Any, ctx: Deduction) -> Iterable[object]:
    return (_plain(getattr(x, f.name), ctx) for f in fields(x))
