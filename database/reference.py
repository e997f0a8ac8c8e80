"""Reference times: seconds of fixed kernels on a unit, which show whether two units of one name are equally fast.

A target's records come from units whose reference times agree. `tuner.measure.cluster.reference` measures them.

Tests: `tests/database/exchange/test_plan_origins.py`, `tests/tuner/measure/cluster/test_fleet.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

Reference = Mapping[str, float]
"""Seconds by name of the reference kernel."""
TOLERANCE = 1.25
"""Factor by which reference times of one target may differ."""


def disagreement(expected: Reference, actual: Reference, tolerance: float = TOLERANCE) -> str:
    """List the reference times that differ by more than the factor `tolerance`; empty if none does."""
    lines = [
        f"reference kernel {name}: expected {expected[name] * 1e3:.3f} ms within a factor of {tolerance:g}, "
        f"got {actual[name] * 1e3:.3f} ms"
        for name in sorted(expected.keys() & actual.keys())
        if max(expected[name], actual[name]) > tolerance * min(expected[name], actual[name])
    ]
    return "; ".join(lines)
