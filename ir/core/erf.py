"""Vectorised error function in double precision (W. J. Cody's rational approximations, Math. Comp. 1969)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALL_P = (3.16112374387056560e00, 1.13864154151050156e02, 3.77485237685302021e02, 3.20937758913846947e03)
_SMALL_Q = (2.36012909523441209e01, 2.44024637934444173e02, 1.28261652607737228e03, 2.84423683343917062e03)
_SMALL_LEAD = 1.85777706184603153e-1
_LARGE_P = (
    5.64188496988670089e-1, 8.88314979438837594e00, 6.61191906371416295e01, 2.98635138197400131e02,
    8.81952221241769090e02, 1.71204761263407058e03, 2.05107837782607147e03, 1.23033935479799725e03,
)  # fmt: skip
_LARGE_Q = (
    1.57449261107098347e01, 1.17693950891312499e02, 5.37181101862009858e02, 1.62138957456669019e03,
    3.29079923573345963e03, 4.36261909014324716e03, 3.43936767414372164e03, 1.23033935480374942e03,
)  # fmt: skip
_LARGE_LEAD = 2.15311535474403846e-8


def _ratio(x: NDArray[Any], lead: float, p: tuple[float, ...], q: tuple[float, ...]) -> NDArray[Any]:
    top, bottom = lead * x + p[0], x + q[0]
    for a, b in zip(p[1:], q[1:], strict=True):
        top *= x
        top += a
        bottom *= x
        bottom += b
    return np.asarray(top / bottom)


def erf(x: NDArray[Any]) -> NDArray[Any]:
    """Compute erf(x) in float64, with an absolute error below 1e-15."""
    x = np.asarray(x, np.float64)
    size = np.abs(x)
    near = np.minimum(size, 0.46875)
    small = x * _ratio(near * near, _SMALL_LEAD, _SMALL_P, _SMALL_Q)
    # Beyond 6, 1 - erf is below the last digit of 1, and the exponential would only cause underflow.
    far = np.clip(size, 0.46875, 6.0)
    large = np.copysign(1.0 - np.exp(-far * far) * _ratio(far, _LARGE_LEAD, _LARGE_P, _LARGE_Q), x)
    return np.where(np.isnan(x), x, np.where(size <= 0.46875, small, large))
