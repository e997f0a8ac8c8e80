"""Texts of times and ratios."""

from __future__ import annotations

import math


def seconds_text(secs: float | None) -> str:
    """Format seconds with three digits and a unit: `12.3 us`; `-` for None and NaN."""
    if secs is None or not math.isfinite(secs):
        return "-"
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if secs >= s), ("us", 1e-6))
    value = secs / size
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def ratio_text(base: float | None, best: float | None) -> str:
    """Format the speedup over `base`: `1.52x`; `-` where either is unknown."""
    if base is None or best is None or not (math.isfinite(base) and math.isfinite(best)) or best <= 0:
        return "-"
    return f"{base / best:.2f}x"
