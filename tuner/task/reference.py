"""The expected outputs of a task, and the tolerance of a correct kernel.

The reference is the unscheduled tensor function in vectorised NumPy (`ir/interp/reference`): independent of schedules and code
generation, so it can tell a wrong kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Load, Var, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.interp.reference import evaluate_prim, size_of
from relax_tune.ir.interp.rounding_errors import rounding_errors

Array = NDArray[Any]


def evaluate(func: PrimFunc, inputs: Sequence[Array], symbols: Mapping[Var, int]) -> tuple[Array, ...]:
    """Return the outputs of an unscheduled function, floats in float64.

    Args:
        inputs: In the order of the input buffers.

    Raises:
        VerifyError: The loops were already changed, or a reduction is not `C = op(C, x)`.
        UserError: The inputs do not fit the symbols.
    """
    shapes = [tuple(size_of(d, symbols) for d in b.shape) for b in func.output_buffers]
    return evaluate_prim(func, inputs, [symbols[v] for v in func.scalar_params], shapes)


def tolerances(func: PrimFunc, symbols: Mapping[Var, int], expected: Sequence[Array]) -> list[tuple[float, float]]:
    """Return (rtol, atol) per output, which grow with the longest reduction and the outputs' magnitude.

    Where a value is rounded to 16 bits, kernel and reference may round a near tie differently, by one epsilon of the
    type.
    """
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
        outer = b.dtype.epsilon if b.dtype.is_packed else 0.0
        atol = (1.2e-7 * 4 * longest**0.5 + _inner_rounding(func)) * max(magnitude, 1e-3) + 1e-6
        out.append((2e-5 + outer, atol))
    return out


def rounding_slack(
    func: PrimFunc,
    inputs: Sequence[Array],
    symbols: Mapping[Var, int],
    expected: Sequence[Array],
    limits: Sequence[tuple[float, float]],
) -> tuple[NDArray[np.float64] | None, ...]:
    """Return the tolerance of each element where amplified rounding exceeds `limits`; None for an output without such elements.

    An integer may differ only where the float that it is rounded from is as near to a tie as its error.
    """
    slacks: list[NDArray[np.float64] | None] = []
    for error, value, (rtol, atol) in zip(rounding_errors(func, inputs, symbols), expected, limits, strict=True):
        if value.dtype.kind in "biu":
            slack = np.ceil(error)
        else:
            with np.errstate(invalid="ignore"):
                known = atol + rtol * np.abs(value)
            slack = np.where(error > np.where(np.isfinite(known), known, np.inf), error, 0.0)
        slacks.append(slack if slack.any() else None)
    return tuple(slacks)


def _inner_rounding(func: PrimFunc) -> float:
    """Return the coarsest epsilon of the 16-bit types to which intermediate values are rounded.

    Only computed values count, since loaded ones round the same everywhere.
    """
    inner = [b.dtype for b in func.allocs]
    for block in blocks(func.body):
        for e in postorder((block.body.value,)):
            stored = e is block.body.value and block.body.buffer in func.output_buffers
            if e.op == "cast" and not stored and not isinstance(e.args[0], Load):
                inner.append(e.dtype)
    return max((d.epsilon for d in inner if d.is_packed and d.is_float), default=0.0)
