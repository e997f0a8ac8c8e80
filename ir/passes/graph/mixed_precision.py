"""Mixed precision: 16-bit floats in memory, float32 in computations."""

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
MOVING = ("moved", "gathered")
EXACT = (*MOVING, "allowed")
"""Values of `OperatorSpec.halves` under which 16-bit arguments and results lose only by the rounding of the result."""
ONE_BY_ONE = (Unary, Binary, ShapeOperator)


@dataclass(frozen=True, slots=True)
class ComputeWide:
    """Compute in float32 where operators need more digits than 16-bit floats hold.

    `OperatorSpec.halves` names these operators, such as sums over many elements. Their results are rounded once. Elementwise
    operators need no change: kernels hold 16-bit floats as float32."""

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value, info = out.value(binding.value), binding.var.info
            op = operator_of(value, OperatorSpec)
            exact = isinstance(op, ONE_BY_ONE) or (op is not None and op.halves in EXACT)
            half = next((d for d in map(_dtype, value.operands) if d is not None and d.is_half), None)
            if op is None or exact or half is None or not isinstance(info, TensorInfo):
                out.keep(binding)
                return
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

    A value is rounded to `dtype` once, when it is stored, if some reader wants that and none needs float32
    (`OperatorSpec.halves`). Each reader casts it up separately. Fused, the cast is a conversion while loading, so all
    computation is in float32. Weights that products or gathers read are converted now, once; those with numbers beyond
    the range of `dtype` stay. Parameters and results keep their types. A cast that undoes another is not made.
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
    """Weights of the module, and their rounded forms so far: None for one that cannot be rounded."""

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

    wants: a reader wants 16 bits.
    needs: a reader needs float32.
    named: a reader needs the variable itself.
    """

    wants: bool = False
    needs: bool = False
    named: bool = False


class _PrecisionRewriter:
    """Rewriter of one graph function."""

    def __init__(self, func: Function, dtype: DType, weights: _Weights) -> None:
        self.func, self.dtype, self.weights = func, dtype, weights
        self.results = returned(func)
        self.uses: dict[GVar, _ReaderNeeds] = {}
        self.chosen: set[GVar] = set()
        self.static: set[Value] = set()  # computed from weights only, such as unpacked ones; never stored
        self.halves: dict[Value, Value] = {}  # value -> its form stored as `dtype`
        self.sources: dict[Value, Value] = {}  # result of a cast in the program -> its argument of type `dtype`

    def run(self) -> Function:
        bindings = list(all_bindings(self.func))
        for b in bindings:
            args = b.value.args if isinstance(b.value, Call) else ()
            if args and all(isinstance(a, Constant) or a in self.static for a in args):
                self.static.add(b.var)
        self._name(self.func.ret)
        for binding in reversed(bindings):
            self._read(binding)
        return rewrite_function(self.func, self._visit)

    # needs of readers, last reader first

    def _use(self, v: GVar) -> _ReaderNeeds:
        return self.uses.setdefault(v, _ReaderNeeds())

    def _name(self, value: Value) -> None:
        for v in used_vars(value):
            self._use(v).named = self._use(v).needs = True

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
        own, moved = self._use(binding.var), op.halves in MOVING
        weights = [a for a in value.operands if isinstance(a, Constant) and _is_f32(a)] if moved else []
        large = op.halves == "gathered" and bool(weights)
        if _is_f32(binding.var) and not (isinstance(op, Cast) and _dtype(value.operands[0]) is self.dtype):
            wanted = large or (own.wants and not own.needs and binding.var not in self.static)
            if wanted and all(self.weights.half(a) is not None for a in weights):
                self.chosen.add(binding.var)
        for position, a in enumerate(value.operands):
            if not isinstance(a, GVar) or not _is_f32(a):
                if not isinstance(a, (GVar, Constant)):
                    self._name(a)
                continue
            said = op.reads(position)
            if said == "wanted" or (moved and binding.var in self.chosen):
                self._use(a).wants = True
            elif said == "never" and not self._rounds(value):
                self._use(a).needs = True

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
        held = [a in self.halves or a in self.sources for a in floats]
        weights = [isinstance(a, Constant) for a in floats]
        chosen = binding.var in self.chosen and any((*held, *weights))
        if value.op.halves in MOVING and floats and (chosen or all(held)):
            args = tuple(self._stored(out, a) if _is_f32(a) else a for a in value.args)
            self._hold(out, binding, Call(value.op, args))
            return
        said = [value.op.reads(p) for p in range(len(value.args))]
        args = tuple(self._read_up(out, a, s == "wanted") for a, s in zip(value.args, said, strict=True))
        stored = [a is not b or a in self.sources for a, b, s in zip(value.args, args, said) if s == "wanted"]
        operator = value.op.storing(self.dtype) if stored and all(stored) else value.op
        same = operator == value.op and all(a is b for a, b in zip(args, value.args, strict=True))
        kept = (
            binding
            if same and value is binding.value
            else replace(binding, value=value if same else Call(operator, args))
        )
        out.names.setdefault(binding.var.name, 1)
        out.bindings.append(kept)
        # a value that is only moved joins the product that reads it
        if binding.var in self.chosen and value.op.halves not in MOVING:
            self.halves[binding.var] = self._round(out, binding.var)

    def _cast(self, out: Emitter, binding: Binding, value: Call) -> bool:
        """Drop a cast of the program that undoes another one; return True if the binding is replaced."""
        (source,) = value.args
        known = self.halves.get(source) or self.sources.get(source)
        if self._rounds(value) and known is not None and binding.var not in self.results:
            out.mapping[binding.var] = known
            return True
        if _is_f32(binding.var) and _dtype(source) is self.dtype:
            self.sources[binding.var] = source
        return False

    def _hold(self, out: Emitter, binding: Binding, value: Call) -> None:
        """Store a value as `dtype`, and cast it to float32 under its own name for readers that need float32."""
        var = binding.var
        self.halves[var] = held = out.bind(value, _as(var, self.dtype), f"{var.name}_{self.dtype}")
        if self._use(var).named:
            out.bindings.append(Binding(var, Call(Cast(f32), (held,))))

    def _stored(self, out: Emitter, a: Value) -> Value:
        """Return a float32 value stored as `dtype`."""
        half = self.weights.half(a) if isinstance(a, Constant) else self.halves.get(a) or self.sources.get(a)
        if half is not None:
            return half
        key = ("half", a)
        if key not in out.known:
            out.known[key] = self._round(out, a)
        return out.known[key]

    def _round(self, out: Emitter, a: Value) -> GVar:
        assert isinstance(a, GVar)
        return out.bind(Call(Cast(self.dtype), (a,)), _as(a, self.dtype), f"{a.name}_{self.dtype}")

    def _read_up(self, out: Emitter, a: Value, wanted: bool) -> Value:
        """Return an argument in float32: for this reader, it is cast up if it is stored as `dtype`."""
        half = self.halves.get(a)
        if wanted and isinstance(a, Constant) and _is_f32(a):
            half = self.weights.half(a)
        if half is None:
            return a
        return out.bind(Call(Cast(f32), (half,)), _as(half, f32), "wide")


def _dtype(value: Value) -> DType | None:
    """Return the element type of a tensor, None for an unknown one and for other values."""
    info = value.info
    return info.dtype if isinstance(info, TensorInfo) else None


def _is_f32(value: Value) -> bool:
    return isinstance(value, (GVar, Constant)) and _dtype(value) is f32


def _as(value: Value, dtype: DType) -> TensorInfo:
    """Return the annotation of a tensor with another element type."""
    return replace(tensor_info(value), dtype=dtype)
