"""Comparison of an output with its reference, and a message that describes the difference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Elements compared at a time: the intermediate arrays of one block stay in the cache.
BLOCK = 1 << 14


def difference(
    name: str,
    actual: NDArray[Any],
    expected: NDArray[Any],
    rtol: float,
    atol: float,
    slack: NDArray[Any] | None = None,
) -> str | None:
    """Compare by `abs(actual - expected) <= atol + rtol * abs(expected) + slack`; equal NaNs and equal infinities pass.

    Args:
        name: name of the output in the message.
        slack: a number for each element, None for 0. Integers may differ by `slack` at most.

    Returns:
        None if every element passes; otherwise a message with the number of failures, and index, expected and actual value of the
        worst one.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"output {name}: expected {expected.dtype} {expected.shape}, got {actual.dtype} {actual.shape}; "
            "reference and program disagree on the signature"
        )
    if _all_near(actual.reshape(-1), expected.reshape(-1), rtol, atol):
        return None
    more: Any = 0.0 if slack is None else slack
    if expected.dtype.kind in "biu":
        low, high = (f(actual, expected).astype(np.uint64) for f in (np.minimum, np.maximum))
        excess = high - low  # exact: modulo 2 ** 64 the distance of two 64-bit integers is unsigned
        wrong = excess > np.asarray(more).astype(np.uint64)
        excess = excess.astype(np.float64)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            value, reference = actual.astype(np.float64), expected.astype(np.float64)
            excess = np.abs(value - reference) - (atol + rtol * np.abs(reference) + more)
            same = (value == reference) | (np.isnan(value) & np.isnan(reference))
            wrong = ~same & ~(excess <= 0)
            excess = np.where(np.isnan(excess), np.inf, excess)
    if not wrong.any():
        return None
    worst = np.unravel_index(int(np.argmax(np.where(wrong, excess, -np.inf))), actual.shape)
    place = tuple(int(index) for index in worst)
    room = 0.0 if slack is None else float(slack[place])
    tolerance = f"within {atol:g} + {rtol:g} * |expected|{f' + {room:g}' if room else ''}"
    if expected.dtype.kind in "biu":
        tolerance = f"within {room:g}" if room else "exactly"
    return (
        f"output {name}: {int(wrong.sum())} of {wrong.size} elements differ; the worst at {place}: expected "
        f"{expected[place].item()!r} {tolerance}, got {actual[place].item()!r}"
        + ("" if actual.dtype.kind in "biu" or not np.isnan(actual[place]) else " (perhaps never written)")
    )


def _all_near(actual: NDArray[Any], expected: NDArray[Any], rtol: float, atol: float) -> bool:
    """Return True if every element is finite and within the tolerance: the fast path, without arrays of the full size."""
    for start in range(0, actual.size, BLOCK):
        values, reference = actual[start : start + BLOCK], expected[start : start + BLOCK]
        if expected.dtype.kind in "biu":
            near = values == reference
        else:
            reference = reference.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                near = np.abs(values - reference) - rtol * np.abs(reference) <= atol
        # Comparisons with NaN are false, so arrays with NaN take the slow path.
        if not near.all():
            return False
    return True
