"""Texts of times, ratios, moments and names.

Tests: `tests/tuner/cli/test_report_table.py`, `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime


def named(key: str, hint: str) -> str:
    """Return the name of a workload, or the start of its key."""
    return hint or key[:12]


def seconds_text(secs: float | None) -> str:
    """Format seconds with three digits and a unit: `12.3 us`; `-` for None and NaN."""
    if secs is None or not math.isfinite(secs):
        return "-"
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if secs >= s), ("us", 1e-6))
    value = secs / size
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def ratio_text(base: float | None, best: float | None) -> str:
    """Format the speedup over `base` with three digits: `1.52x`, `75,100x`; `-` if a time is unknown."""
    if base is None or best is None or not (math.isfinite(base) and math.isfinite(best)) or best <= 0:
        return "-"
    ratio = float(f"{base / best:.3g}")
    digits = 0 if ratio >= 100 else 1 if ratio >= 10 else 2
    return f"{ratio:,.{digits}f}x"


def percent_text(fraction: float) -> str:
    """Format a fraction in percent with two digits: `12 %`, `1.5 %`, `0.3 %`."""
    percent = 100 * fraction
    return f"{percent:.{0 if percent >= 10 else 1}f} %"


def moment_text(secs: object, *, local: bool = False) -> str:
    """Format Unix seconds as date and time, in UTC or in this machine's time zone; `-` for an unknown or invalid time."""
    if not isinstance(secs, int | float) or not 0 < secs < 2**35:
        return "-"
    if local:
        return datetime.fromtimestamp(secs).isoformat(" ", "seconds")
    return datetime.fromtimestamp(secs, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
