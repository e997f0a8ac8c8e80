"""What a task's outputs should be, and how far from that a right kernel may be (DESIGN 8).

The reference is the unscheduled tensor function in vectorised NumPy (`ir/passes/reference`): independent of schedules and code
generation, so it can tell a wrong kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.expr import Var
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.passes.reference import evaluate_prim, size_of
from relax_tune.ir.stmt import blocks

Array = NDArray[Any]


def evaluate(func: PrimFunc, inputs: Sequence[Array], symbols: Mapping[Var, int]) -> tuple[Array, ...]:
    """The outputs of an unscheduled function, floats in float64. `inputs` in the order of its input buffers.

    Raises: VerifyError for a function whose loops were already changed, or a reduction that is not `C = op(C, x)`; UserError
    for inputs that do not fit the symbols.
    """
    shapes = [tuple(size_of(d, symbols) for d in b.shape) for b in func.output_buffers]
    return evaluate_prim(func, inputs, [symbols[v] for v in func.scalar_params], shapes)


def tolerances(func: PrimFunc, symbols: Mapping[Var, int], expected: Sequence[Array]) -> list[tuple[float, float]]:
    """(rtol, atol) per output: grows with the longest reduction and the outputs' magnitude (f32 epsilon 1.2e-7)."""
    longest = 1
    for block in blocks(func.body):
        size = 1
        for i in block.iters:
            if i.kind == "reduce":
                size *= max(1, size_of(i.extent, symbols))
        longest = max(longest, size)
    out = []
    for b, e in zip(func.output_buffers, expected, strict=True):
        if not b.dtype.is_float:
            out.append((0.0, 0.0))
            continue
        magnitude = float(np.max(np.abs(e[np.isfinite(e)]), initial=0.0))
        out.append((2e-5, 1.2e-7 * 4 * longest**0.5 * max(magnitude, 1e-3) + 1e-6))
    return out
