"""Mixed precision: 16-bit floats in memory, float32 arithmetic.

Tests: `tests/ir/passes/graph/test_mixed_precision.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Constant, Function, GVar, If, Value
from relax_tune.ir.core.graph_walk import all_bindings, operator_of, used_vars
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.base import Deduction, OperatorSpec, env_of
from relax_tune.ir.op.math.elementwise import Binary, Cast, Unary
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, returned, rewrite_function, tensor_info

Array = NDArray[Any]
MOVING = ("pass_through", "table")
EXACT = (*MOVING, "allow")
"""Values of `OperatorSpec.half_policy` for operators that lose no accuracy on 16-bit floats except by rounding the result."""
ONE_BY_ONE = (Unary, Binary, ShapeOperator)


@dataclass(frozen=True, slots=True)
class ComputeWide:
    """Compute operators in float32 that are inaccurate on 16-bit floats, such as sums over many elements.

    `OperatorSpec.half_policy` states which operators these are. Their results are rounded once. Elementwise operators need no change,
    since kernels compute on 16-bit floats in float32.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value, info = out.value(binding.value), binding.var.info
            op = operator_of(value, OperatorSpec)
            exact = isinstance(op, ONE_BY_ONE) or (op is not None and op.half_policy in EXACT)
            half = next((d for d in map(_dtype, value.operands) if d is not None and d.is_half), None)
            if op is None or exact or half is None or not isinstance(info, TensorInfo):
                out.keep(binding)
                return
            # Intermediate values may stay in 16 bits, as the operator decides; only its arithmetic is widened.
            wide = Call(op.storing(half), tuple(self._up(out, a) for a in value.operands))
            result = infer_value(wide, Deduction(out.env, choices=True))
            assert isinstance(result, TensorInfo)
            if result.dtype is not info.dtype and info.dtype is not None:
                wide = Call(Cast(info.dtype), (out.bind(wide, result, f"{binding.var.name}_{f32}"),))
            out.bindings.append(Binding(binding.var, wide))

        return map_graphs(module, lambda f, _: rewrite_function(f, visit, env))

    @staticmethod
    def _up(out: Emitter, a: Value) -> Value:
        dtype = _dtype(a)
        return a if dtype is None or not dtype.is_half else out.bind(Call(Cast(f32), (a,)), _as(a, f32), "wide")


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Store float32 values and weights as `dtype`, a 16-bit float, where matmuls read them.

    A value is rounded to `dtype` once, when it is stored, if a reader prefers that and none needs float32 (`OperatorSpec.half_policy`).
    Each reader casts it to float32 separately. Fusion turns the cast into a conversion while loading, so all arithmetic is in float32.
    Weights that products or gathers read are converted when building, unless a number is beyond the range of `dtype`. Parameters and
    results keep their types. Casts that undo each other are removed.
    """

    dtype: DType

    def __call__(self, module: IRModule) -> IRModule:
        if not self.dtype.is_half:
            return module
        weights = _Weights(self.dtype, dict(module.constants))
        new = map_graphs(module, lambda f, _: _PrecisionRewriter(f, self.dtype, weights).run())
        return module if new is module else replace(new, constants=weights.arrays)


@dataclass(slots=True)
class _Weights:
    """Weights of the module, and their rounded forms; None for a weight that cannot be rounded."""

    dtype: DType
    arrays: dict[str, Array]
    rounded: dict[str, Constant | None] = field(default_factory=dict)

    def half(self, weight: Constant) -> Constant | None:
        if weight.name not in self.rounded:
            self.rounded[weight.name] = self._make(weight)
        return self.rounded[weight.name]

    def _make(self, weight: Constant) -> Constant | None:
        array = self.arrays[weight.name]
        with np.errstate(over="ignore"):
            result = array.astype(self.dtype.numpy)
        # float16 ends at 65504: a larger weight would become infinite
        if not np.array_equal(np.isfinite(result), np.isfinite(array)):
            return None
        name = f"{weight.name}.{self.dtype}"
        while name in self.arrays:
            name += "_"
        self.arrays[name] = result
        return Constant(name, _as(weight, self.dtype))


@dataclass(slots=True)
class _ReaderNeeds:
    """The needs of a value's readers.

    Attributes:
        prefers_half: Whether a reader prefers 16 bits.
        needs_f32: Whether a reader needs float32.
        needs_variable: Whether a reader needs the original variable, such as a result or a branch.
    """

    prefers_half: bool = False
    needs_f32: bool = False
    needs_variable: bool = False


class _PrecisionRewriter:
    """Rewriter of one graph function."""

    def __init__(self, func: Function, dtype: DType, weights: _Weights) -> None:
        self.func, self.dtype, self.weights = func, dtype, weights
        self.results = returned(func)
        self.uses: dict[GVar, _ReaderNeeds] = {}
        self.chosen: set[GVar] = set()
        # Computed from weights only, such as unpacked weights, which fusion does not store.
        self.static: set[Value] = set()
        self.halves: dict[Value, Value] = {}  # the form stored as `dtype` of each value that has one
        self.sources: dict[Value, Value] = {}  # for the result of a cast in the program, its argument of type `dtype`

    def run(self) -> Function:
        bindings = list(all_bindings(self.func))
        for b in bindings:
            args = b.value.args if isinstance(b.value, Call) else ()
            if args and all(isinstance(a, Constant) or a in self.static for a in args):
                self.static.add(b.var)
        self._name(self.func.ret)
        # readers first: whether a value is stored in 16 bits depends on what its readers need
        for binding in reversed(bindings):
            self._read(binding)
        return rewrite_function(self.func, self._visit)

    # needs of readers, last reader first

    def _use(self, v: GVar) -> _ReaderNeeds:
        return self.uses.setdefault(v, _ReaderNeeds())

    def _name(self, value: Value) -> None:
        for v in used_vars(value):
            # Results, branches and called functions have declared types, which the pass does not change.
            self._use(v).needs_variable = self._use(v).needs_f32 = True

    def _read(self, binding: AnyBinding) -> None:
        value = binding.value
        if isinstance(value, If):
            for part in (value.cond, value.then.ret, value.orelse.ret):
                self._name(part)
            return
        op = operator_of(value, OperatorSpec)
        if not isinstance(binding, Binding) or op is None:
            self._name(value)
            return
        needs, moved = self._use(binding.var), op.half_policy in MOVING
        weights = [a for a in value.operands if isinstance(a, Constant) and _is_f32(a)] if moved else []
        # A table is read a few rows at a time: halving it saves memory even if the readers of the rows need float32.
        large = op.half_policy == "table" and bool(weights)
        # A cast from 16 bits has its stored form already, which is its argument.
        if _is_f32(binding.var) and not (isinstance(op, Cast) and _dtype(value.operands[0]) is self.dtype):
            is_half = large or (needs.prefers_half and not needs.needs_f32 and binding.var not in self.static)
            # All or none: with one weight that does not fit, the operator would have operands of two types.
            if is_half and all(self.weights.half(a) is not None for a in weights):
                self.chosen.add(binding.var)
        for position, a in enumerate(value.operands):
            if not isinstance(a, GVar) or not _is_f32(a):
                if not isinstance(a, (GVar, Constant)):
                    self._name(a)
                continue
            policy = op.reads(position)
            if policy == "prefer" or (moved and binding.var in self.chosen):
                self._use(a).prefers_half = True
            elif policy == "never" and not self._rounds(value):
                self._use(a).needs_f32 = True

    def _rounds(self, value: Value) -> bool:
        cast = operator_of(value, Cast)
        return cast is not None and cast.dtype is self.dtype

    # the new program

    def _visit(self, out: Emitter, binding: AnyBinding) -> None:
        value = out.value(binding.value)
        if not isinstance(binding, Binding) or not isinstance(value, Call) or not isinstance(value.op, OperatorSpec):
            out.keep(binding)
            return
        if isinstance(value.op, Cast) and self._cast(out, binding, value):
            return
        floats = [a for a in value.args if _is_f32(a)]
        stored_half = [a in self.halves or a in self.sources for a in floats]
        weights = [isinstance(a, Constant) for a in floats]
        chosen = binding.var in self.chosen and any((*stored_half, *weights))
        if value.op.half_policy in MOVING and floats and (chosen or all(stored_half)):
            args = tuple(self._stored(out, a) if _is_f32(a) else a for a in value.args)
            self._store(out, binding, Call(value.op, args))
            return
        policies = [value.op.reads(p) for p in range(len(value.args))]
        args = tuple(self._read_up(out, a, p == "prefer") for a, p in zip(value.args, policies, strict=True))
        stored = [a is not b or a in self.sources for a, b, p in zip(value.args, args, policies) if p == "prefer"]
        operator = value.op.storing(self.dtype) if stored and all(stored) else value.op
        unchanged = operator == value.op and all(a is b for a, b in zip(args, value.args, strict=True))
        new_binding = (
            binding
            if unchanged and value is binding.value
            else replace(binding, value=value if unchanged else Call(operator, args))
        )
        # `out.bind` did not create this binding, so its name has to be reserved here.
        out.names.setdefault(binding.var.name, 1)
        out.bindings.append(new_binding)
        # an operator that only moves values gets no cast of its result: it fuses into the product that reads it
        if binding.var in self.chosen and value.op.half_policy not in MOVING:
            self.halves[binding.var] = self._round(out, binding.var)

    def _cast(self, out: Emitter, binding: Binding, value: Call) -> bool:
        """Drop a cast of the program that undoes another one. Return whether the binding was replaced."""
        (source,) = value.args
        known = self.halves.get(source) or self.sources.get(source)
        if self._rounds(value) and known is not None and binding.var not in self.results:
            out.mapping[binding.var] = known
            return True
        if _is_f32(binding.var) and _dtype(source) is self.dtype:
            self.sources[binding.var] = source
        return False

    def _store(self, out: Emitter, binding: Binding, value: Call) -> None:
        """Bind a value of type `dtype`, and cast it to float32 for readers that need the original variable."""
        var = binding.var
        self.halves[var] = half = out.bind(value, _as(var, self.dtype), f"{var.name}_{self.dtype}")
        if self._use(var).needs_variable:
            out.bindings.append(Binding(var, Call(Cast(f32), (half,))))

    def _stored(self, out: Emitter, a: Value) -> Value:
        """Return a float32 value stored as `dtype`."""
        half = self.weights.half(a) if isinstance(a, Constant) else self.halves.get(a) or self.sources.get(a)
        if half is not None:
            return half
        # One rounded copy of a value for all its readers, whereas casts to float32 are per reader, since they fuse.
        key = ("half", a)
        if key not in out.known:
            out.known[key] = self._round(out, a)
        return out.known[key]

    def _round(self, out: Emitter, a: Value) -> GVar:
        assert isinstance(a, GVar)
        return out.bind(Call(Cast(self.dtype), (a,)), _as(a, self.dtype), f"{a.name}_{self.dtype}")

    def _read_up(self, out: Emitter, a: Value, prefers_half: bool) -> Value:
        """Return an argument in float32; it is cast for this reader if it is stored as `dtype`."""
        half = self.halves.get(a)
        if prefers_half and isinstance(a, Constant) and _is_f32(a):
            half = self.weights.half(a)
        if half is None:
            return a
        return out.bind(Call(Cast(f32), (half,)), _as(half, f32), "wide")


def _dtype(value: Value) -> DType | None:
    """Return the element type of a tensor; None if it is unknown, and for other values."""
    info = value.info
    return info.dtype if isinstance(info, TensorInfo) else None


def _is_f32(value: Value) -> bool:
    return isinstance(value, (GVar, Constant)) and _dtype(value) is f32


def _as(value: Value, dtype: DType) -> TensorInfo:
    """Return the annotation of a tensor with another element type."""
    return replace(tensor_info(value), dtype=dtype)
