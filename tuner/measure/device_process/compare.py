"""The comparison of an output with its reference, and a sentence on their difference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Elements compared at a time, so that what is computed on the way stays in caches.
BLOCK = 1 << 14


def difference(name: str, found: NDArray[Any], wanted: NDArray[Any], rtol: float, atol: float) -> str | None:
    """Compare by `abs(found - wanted) <= atol + rtol * abs(wanted)`; equal NaNs and equal infinities pass.

    Returns None when every element passes. Otherwise it says how many fail, which one is the worst, and what was wanted
    there.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return (
            f"output {name}: wanted {wanted.dtype} {wanted.shape}, found {found.dtype} {found.shape}; "
            "reference and program disagree on the signature"
        )
    if _all_near(found.reshape(-1), wanted.reshape(-1), rtol, atol):
        return None
    if wanted.dtype.kind in "biu":
        wrong = found != wanted
        excess = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            exact, reference = found.astype(np.float64), wanted.astype(np.float64)
            excess = np.abs(exact - reference) - (atol + rtol * np.abs(reference))
            same = (exact == reference) | (np.isnan(exact) & np.isnan(reference))
            wrong = ~same & ~(excess <= 0)
            excess = np.where(np.isnan(excess), np.inf, excess)
    if not wrong.any():
        return None
    worst = np.unravel_index(int(np.argmax(np.where(wrong, excess, -np.inf))), found.shape)
    place = tuple(int(index) for index in worst)
    tolerance = "exactly" if wanted.dtype.kind in "biu" else f"within {atol:g} + {rtol:g} * |wanted|"
    return (
        f"output {name}: {int(wrong.sum())} of {wrong.size} elements differ; the worst at {place}: wanted "
        f"{wanted[place].item()!r} {tolerance}, found {found[place].item()!r}"
        + ("" if found.dtype.kind in "biu" or not np.isnan(found[place]) else " (perhaps never written)")
    )


def _all_near(found: NDArray[Any], wanted: NDArray[Any], rtol: float, atol: float) -> bool:
    """Return True if every element passes by its distance; infinities and NaNs are not covered."""
    for start in range(0, found.size, BLOCK):
        ours, exact = found[start : start + BLOCK], wanted[start : start + BLOCK]
        if wanted.dtype.kind in "biu":
            near = ours == exact
        else:
            exact = exact.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                near = np.abs(ours - exact) - rtol * np.abs(exact) <= atol
        if not near.all():
            return False
    return True
