"""Differences that are known: elements whose values no test can ask for, with the reason. The list shrinks as defects are mended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from relax_tune.ir.core.dtype import is_floating
from relax_tune.ir.op.base import OperatorSpec

Array = np.ndarray[Any, Any]
Where = Callable[[OperatorSpec, Sequence[Any], Array, str], Any]


@dataclass(frozen=True)
class Known:
    """where: the elements of an operator's result, given the operator, its arguments, the result and the target; None: none.

    defect: it is to be mended; else no value can be asked for at all"""

    reason: str
    where: Where
    defect: bool = True


def _floats(args: Sequence[Any]) -> list[Array]:
    return [a for a in args if isinstance(a, np.ndarray) and is_floating(a.dtype)]


SUMS = frozenset([
    "sum", "mean", "cum_sum", "prod", "cum_prod", "matmul", "einsum", "conv", "pool", "mean_pool", "softmax", "causal_softmax",
    "layer_norm", "rms_norm", "l2_normalize", "attention", "rotary", "scatter_nd", "scatter_elements", "dequantize",
])  # fmt: skip


def overflowing(op: OperatorSpec, args: Sequence[Any], found: Array, target: str) -> Any:
    """Sums whose terms are infinite or may overflow on the way: the order of the sum decides."""
    if op.name not in SUMS:
        return None
    for a in _floats(args):
        limit = float(ml_dtypes.finfo(a.dtype).max) ** 0.5 / 8
        small = float(ml_dtypes.finfo(a.dtype).smallest_normal) ** 0.5 if "norm" in op.name else 0.0
        wide = np.abs(a.astype(np.float64))
        if np.any(~np.isfinite(wide) | (wide > limit) | ((wide > 0) & (wide < small))):
            return np.ones(found.shape, bool)
    return None


def nan_extremes(op: OperatorSpec, args: Sequence[Any], found: Array, target: str) -> Any:
    """Orders of NaN."""
    if op.name not in ("arg_max", "top_k", "max", "min", "maximum", "minimum", "relu", "maximum_scalar", "unique", "pool",
                       "scatter_nd", "scatter_elements"):  # fmt: skip
        return None
    return np.ones(found.shape, bool) if any(np.isnan(a).any() for a in _floats(args)) else None


KNOWN: tuple[Known, ...] = (
    Known("the order of a sum decides whether it overflows", overflowing, defect=False),
    Known("NaN in extremes and orders", nan_extremes),
)

KNOWN_REFUSALS = (
    # an index into a dim of 0 where the result is empty: the interpreter refuses, built programs read nothing
    r"wanted indices in \[0, 0\)",
)
"""Messages of the interpreter for calls that built programs may answer."""
