"""A kernel of an experiment: a model of one operator or a few, and the same in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import Expr, as_int, const, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant, Function, GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.passes.graph.quantize import QuantizeWeights

Array = NDArray[Any]
Dims = Mapping[str, Expr]
Torch = Callable[[Any, Mapping[str, Any]], Any]


class Model:
    """The parts of a kernel's model: inputs, weights drawn from a fixed seed, and the dims that may be symbols."""

    def __init__(self, dims: Mapping[str, int], symbolic: bool) -> None:
        self.graph = GraphBuilder()
        self._rng = np.random.default_rng(0)
        self.dims = {name: self.graph.symbol(name, 1, size) if symbolic else const(size) for name, size in dims.items()}

    def input(self, name: str, *shape: int | str, element: DType = f32) -> GVar:
        return self.graph.input(name, [self.dims[d] if isinstance(d, str) else const(d) for d in shape], element)

    def weight(self, name: str, *shape: int) -> Constant:
        array = self._rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))
        return self.graph.constant(name, array)

    def __call__(self, op: Any, *args: Any) -> GVar:
        return self.graph.call(op, *args)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a table.

    make: its model; torch: `(torch, arrays by name) -> result`; flops: of one run, 0 for memory-bound kernels; bytes: least bytes read and
    written; bar: microseconds of hand-written prototypes as `c` and `opencl`, and of `torch`, on two Zen4 cores; index_limit: exclusive
    upper bound of integer inputs; bits: bits of quantised weights; transposed: the kernel multiplies `x` by the transposed `w` or `y`.
    """

    name: str
    dims: Mapping[str, int]
    make: Callable[[Model], GVar]
    torch: Torch
    flops: float = 0.0
    bytes: float = 0.0
    bar: Mapping[str, float] = field(default_factory=dict)
    index_limit: int = 1
    bits: int = 32
    transposed: bool = False

    def module(self, symbolic: bool = False) -> IRModule:
        model = Model(self.dims, symbolic)
        made = model.graph.finish(self.make(model))
        return made if self.bits == 32 else QuantizeWeights(self.bits)(made)

    def quantized(self) -> dict[str, Array]:
        """Return the parts of the quantised weight `w`: `numbers` (N, K) i8 and `scale` (N, K / group) f32."""
        held = self.module().constants
        if self.bits == 8:
            return {"numbers": held["w.int8"], "scale": held["w.scale"].reshape(-1, 1)}
        packed = held["w.int4"].astype(np.int8)
        numbers = np.stack([packed << 4 >> 4, packed >> 4], axis=-1).reshape(len(packed), -1)
        return {"numbers": numbers, "scale": held["w.scale"]}

    def weights(self) -> dict[str, Array]:
        """The weights in 32 bits: of a quantised model the numbers that it computes with."""
        if self.bits == 32:
            return dict(self.module().constants)
        parts = self.quantized()
        group = parts["numbers"].shape[1] // parts["scale"].shape[1]
        return {"w": parts["numbers"] * np.repeat(parts["scale"], group, axis=1)}

    def factors(self, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return the arrays that NumPy multiplies if the kernel is a product, of its inputs and weights by name."""
        right = arrays["w"] if "w" in arrays else arrays["y"]
        return arrays["x"], np.swapaxes(right, -1, -2) if self.transposed else right

    def arrays(self, sizes: Mapping[str, int] | None = None, seed: int = 1) -> dict[str, Array]:
        """The inputs by name; `sizes` of dims other than the table's."""
        model = Model(self.dims, True)
        function = model.graph.finish(self.make(model)).functions["main"]
        assert isinstance(function, Function)
        known = dict(self.dims) | dict(sizes or {})
        values = {v: const(known[n]) for n, v in model.dims.items() if not isinstance(v, int)}
        rng = np.random.default_rng(seed)
        found: dict[str, Array] = {}
        for p in function.params:
            assert isinstance(p.info, TensorInfo) and p.info.shape is not None and p.info.dtype is not None
            shape = tuple(as_int(substitute(d, values)) or 0 for d in p.info.shape)  # type: ignore[arg-type]
            if p.info.dtype.is_float:
                found[p.name] = rng.standard_normal(shape, np.float32)
            else:
                found[p.name] = rng.integers(0, self.index_limit, shape, dtype=p.info.dtype.numpy)
        return found
