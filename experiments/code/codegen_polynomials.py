"""Fit the coefficients of `ir/codegen/print/math.py`: weighted minimax by Lawson's iteratively reweighted least squares.

`python -m experiments.code.codegen_polynomials` prints them with the largest relative error of the exact polynomial, in units of
2**-24. Evaluation in f32 adds its rounding, which `tests/ir/codegen/test_math.py` measures.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def chebyshev(low: float, high: float, count: int = 3001) -> Array:
    """Points that crowd at both ends."""
    return np.asarray((low + high) / 2 + (high - low) / 2 * np.cos(np.linspace(0, np.pi, count)))


def polynomial(x: Array, f: Array, weight: Array, degree: int, rounds: int = 200) -> tuple[float, Array]:
    """(largest weighted error, coefficients) of the polynomial nearest to f."""
    powers = np.vander(x, degree + 1, increasing=True)
    share = np.ones_like(x) / len(x)
    for _ in range(rounds):
        s = np.sqrt(share) * weight
        found = np.linalg.lstsq(powers * s[:, None], f * s, rcond=None)[0]
        error = np.abs(weight * (powers @ found - f))
        share *= error
        share /= share.sum()
    return float(error.max()), found


def rational(x: Array, f: Array, weight: Array, top: int, bottom: int, rounds: int = 60) -> tuple[float, Array, Array]:
    """(largest weighted error, numerator, denominator) with the denominator's constant term 1."""
    p, q = np.vander(x, top + 1, increasing=True), np.vander(x, bottom + 1, increasing=True)[:, 1:]
    share, below = np.ones_like(x) / len(x), np.ones_like(x)
    best: Any = (math.inf, None, None)
    for _ in range(rounds):
        s = np.sqrt(share) * weight / np.abs(below)
        system = np.concatenate([p, -f[:, None] * q], axis=1) * s[:, None]
        scale = np.abs(system).max(axis=0)
        found = np.linalg.lstsq(system / scale, f * s, rcond=1e-17)[0] / scale
        above, below = p @ found[: top + 1], 1 + q @ found[top + 1 :]
        error = np.abs(weight * (above / below - f))
        if error.max() < best[0]:
            best = float(error.max()), found[: top + 1], np.concatenate([[1.0], found[top + 1 :]])
        share *= error
        share /= share.sum()
    return best[0], best[1], best[2]


def show(name: str, error: float, *coefficients: Array) -> None:
    print(f"{name}: error {error * 2**24:.3f}")
    for c in coefficients:
        print("  ", [float(np.float32(v)) for v in c])


def main() -> None:
    r = chebyshev(-math.log(2) / 2 * 1.01, math.log(2) / 2 * 1.01)
    r = r[np.abs(r) > 1e-4]
    show("exp", *polynomial(r, (np.expm1(r) - r) / r**2, r * r / np.exp(r), 4))
    f = chebyshev(math.sqrt(0.5) - 1, math.sqrt(2) - 1)
    f = f[np.abs(f) > 1e-3]
    show("log", *polynomial(f, (np.log1p(f) - f + f * f / 2) / f**3, np.abs(f**3 / np.log1p(f)), 8))
    u = chebyshev(1e-6, 4.0)
    erf = np.array([math.erf(v) for v in u]) / u
    show("erf", *rational(u * u, erf, 1 / erf, 5, 5))
    u = chebyshev(1e-6, 9.1)
    tanh = np.tanh(u) / u
    show("tanh", *rational(u * u, tanh, 1 / tanh, 4, 4))


if __name__ == "__main__":
    main()
