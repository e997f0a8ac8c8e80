"""Running tensor functions before and after scheduling in the interpreter, on the same random data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, Tunable, as_int, const, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.struct_info import TupleInfo
from relax_tune.ir.interp.interp import run_prim
from relax_tune.tuner.program.program_builder import input_fill

Array = NDArray[Any]


def size_of(e: Expr, dims: Mapping[str, int], func: PrimFunc) -> int:
    value = as_int(substitute(e, {v: const(dims[v.name]) for v in func.symbols}))
    assert value is not None, e
    return value


def make_inputs(func: PrimFunc, dims: Mapping[str, int], seed: int = 0) -> list[Array]:
    """Random inputs in call order; integers stay inside what they index."""
    rng = np.random.default_rng(seed)
    made: list[Array] = []
    for b in func.input_buffers:
        shape = tuple(size_of(d, dims, func) for d in b.shape)
        if b.dtype is bool_:
            made.append(rng.random(shape) < 0.6)
        elif b.dtype.is_int:
            fill = input_fill(func, b)
            made.append(rng.integers(int(fill.low), int(fill.high), shape).astype(b.dtype.numpy))
        else:
            made.append(rng.standard_normal(shape).astype(b.dtype.numpy))
    return made


def outputs_of(
    func: PrimFunc, dims: Mapping[str, int], inputs: Sequence[Array], tunables: Mapping[Tunable, int] | None = None
) -> list[Array]:
    """Return the function's outputs at these dimensions (by name), computed by the interpreter."""
    outputs = [np.full(tuple(size_of(d, dims, func) for d in b.shape), 77, b.dtype.numpy) for b in func.output_buffers]
    scalars = [dims[v.name] for v in func.scalar_params]
    run_prim(func, [*inputs, *outputs], scalars, tunables=tunables or {})
    return outputs


def own_results(found: Any, module: IRModule) -> tuple[Any, ...]:
    """The results that the main function of the module itself has, as a tuple; a lowered form may return indices behind them."""
    ret = module.graphs["main"].ret
    return (
        found[: len(ret.info.fields) if isinstance(ret.info, TupleInfo) else 1]
        if isinstance(found, tuple)
        else (found,)
    )


def assert_same_meaning(
    before: PrimFunc,
    after: PrimFunc,
    dims: Mapping[str, int],
    seed: int = 0,
    tunables: Mapping[Tunable, int] | None = None,
) -> None:
    """Assert that two functions have the same outputs, up to the rounding of another order of additions."""
    verify(after)
    inputs = make_inputs(before, dims, seed)
    wanted = outputs_of(before, dims, inputs)
    found = outputs_of(after, dims, inputs, tunables)
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_allclose(f, w, rtol=3e-5, atol=3e-5, err_msg=f"{before.name} at {dict(dims)}")
