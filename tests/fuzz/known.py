"""Differences that are known: elements whose values no test can ask for, with the reason. The list shrinks as defects are mended."""

from __future__ import annotations

import math
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


LINEAR = frozenset(["sum", "mean", "cum_sum", "matmul", "einsum", "conv"])
ROWS = frozenset(["softmax", "causal_softmax", "layer_norm", "rms_norm", "l2_normalize"])
OTHERS = frozenset([
    "prod", "cum_prod", "pool", "mean_pool", "attention", "rotary", "scatter_nd", "scatter_elements", "dequantize",
    "resize", "fold", "grid_sample",
])  # fmt: skip


def overflowing(op: OperatorSpec, args: Sequence[Any], result: Array, target: str) -> Any:
    """Sums that may overflow on the way: the order of the sum decides."""
    if op.name in LINEAR and _floats(args):
        wide = [np.nan_to_num(np.abs(_wide(a)), nan=0, posinf=0) if is_floating(a.dtype) else a for a in args]
        total = op.evaluate(wide) * (args[0].size / max(1, result.size) if op.name == "mean" else 1)
        return total > min(_summed(a)[0] for a in _floats(args)) / 8
    if op.name in ROWS:
        odd, *others = (_odd(a, "norm" in op.name) for a in _floats(args))
        row = tuple(range(-getattr(op, "axes", 1), 0))
        return np.broadcast_to(odd.any(row, keepdims=True) | any(o.any() for o in others), result.shape)
    if op.name in OTHERS:
        product = "prod" in op.name or getattr(op, "mode", "") == "mul"
        odd = [
            _odd(a, product or op.name == "mean_pool") if is_floating(a.dtype) else np.zeros(a.shape, bool)
            for a in args
        ]
        mask = reached(op, args, odd) if any(o.any() for o in odd) else np.zeros(result.shape, bool)
        return mask | far(op, args) if product and _floats(args) else mask
    return None


def far(op: OperatorSpec, args: Sequence[Any]) -> Array:
    """Products that may leave the range of numbers on the way, in one order or another; scatters round each step to their type."""
    info = ml_dtypes.finfo(_floats(args)[0].dtype)
    most, least = _summed(_floats(args)[0]) if "prod" in op.name else (float(info.max), float(info.smallest_normal))
    sizes = [np.where(a == 0, 1, np.nan_to_num(np.abs(_wide(a)), nan=1)) if is_floating(a.dtype) else a for a in args]
    above, below = (
        op.evaluate([limit(a, 1) if a.dtype == np.float64 else a for a in sizes]) for limit in (np.maximum, np.minimum)
    )
    return np.asarray((above > most / 8) | (below < least * 8))


def reached(op: OperatorSpec, args: Sequence[Any], marked: Sequence[Array]) -> Array:
    """The elements of a result that marked elements of the arguments have a part in: NaN where these are NaN."""
    rng = np.random.default_rng(0)
    drawn = [rng.uniform(1, 2, a.shape) if is_floating(a.dtype) else a for a in args]
    marked_args = [np.where(m, math.nan, a) if m.any() else a for a, m in zip(drawn, marked)]
    if op.name != "grid_sample":
        return np.isnan(op.evaluate(marked_args))
    if marked[1].any():  # places decide what is read
        return np.ones(op.evaluate(drawn).shape, bool)
    near = _wide(args[1]), 4 * float(ml_dtypes.finfo(args[1].dtype).eps)
    return np.logical_or.reduce([np.isnan(op.evaluate([marked_args[0], near[0] + k * near[1]])) for k in (-1, 0, 1)])


def periodic(op: OperatorSpec, args: Sequence[Any], result: Array, target: str) -> Any:
    """Trigonometric functions of numbers whose last place is a fair part of the period."""
    if op.name not in ("sin", "cos", "tan"):
        return None
    least = 2.0**-10 if op.name == "tan" else 0.25  # between its poles, tan has values that no run may come near
    return np.abs(_wide(args[0])) * float(ml_dtypes.finfo(args[0].dtype).eps) > least


def nearly_whole(op: OperatorSpec, args: Sequence[Any], result: Array, target: str) -> Any:
    """Powers of negative numbers whose exponent may be a whole number or not."""
    if op.name != "power":
        return None
    base, exponent = (_wide(a) for a in args)
    distance = np.abs(exponent - np.rint(exponent)) / np.maximum(np.abs(exponent), 1)
    return (base < 0) & (distance > 0) & (distance < 16 * float(ml_dtypes.finfo(args[1].dtype).eps))


def _odd(a: Array, divided: bool) -> Array:
    """The elements whose square is near no number of the type that sums have. divided: or whose square may be 0."""
    most, least = _summed(a)
    wide = np.abs(_wide(a))
    small = least**0.5 if divided else 0.0
    return ~np.isfinite(wide) | (wide > most**0.5 / 8) | ((wide > 0) & (wide < small))


def _summed(a: Array) -> tuple[float, float]:
    """The largest and the smallest normal number of the type that sums of this one are computed in."""
    info = ml_dtypes.finfo(a.dtype if a.dtype.itemsize > 2 else np.float32)
    return float(info.max), float(info.smallest_normal)


def _wide(a: Array) -> Array:
    return a.astype(np.float64)


KNOWN: tuple[Known, ...] = (
    Known("the order of a sum decides whether it overflows", overflowing, defect=False),
    Known("an exponent off by one has a value or none", nearly_whole, defect=False),
    Known("an argument off by one lies at another point of the period", periodic, defect=False),
)

READS_NO_ELEMENTS = "shape_of"
"""The operator that reads no elements. Values that only it reads are not computed, nor are their checks."""
