"""Reference times: seconds of fixed kernels on a unit, which show whether two units of one name are equally fast.

A target's records come from units whose reference times agree; `admit` is the gate for all that add records. `tuner.measure.reference`
measures reference times.

Tests: `tests/database/exchange/test_plan_origins.py`, `tests/tuner/measure/test_reference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from relax_tune.database.records import Target

Reference = Mapping[str, float]
"""Seconds by name of the reference kernel, and with `SPREAD` after the name the relative spread of its times."""
SPREAD = " spread"
TOLERANCE = 1.25
"""Factor by which reference times of one target may differ."""


class Targets(Protocol):
    """The part of a store that `admit` uses."""

    @property
    def where(self) -> str: ...

    def add_target(self, target: Target) -> str: ...

    def target(self, key: str) -> Target | None: ...


def kernels_of(reference: Reference) -> list[str]:
    """Return the names of the reference kernels, sorted."""
    return sorted(name for name in reference if not name.endswith(SPREAD))


def disagreement(expected: Reference, actual: Reference, tolerance: float = TOLERANCE) -> str:
    """List the reference times that differ by more than the factor `tolerance`; empty if none does."""
    lines = [
        f"reference kernel {name}: expected {expected[name] * 1e3:.3f} ms within a factor of {tolerance:g}, "
        f"got {actual[name] * 1e3:.3f} ms"
        for name in kernels_of(expected)
        if name in actual and max(expected[name], actual[name]) > tolerance * min(expected[name], actual[name])
    ]
    return "; ".join(lines)


def admit(store: Targets, target: Target) -> str:
    """Add a target to a store, and compare its reference times with the stored ones, which stay.

    Returns:
        A sentence if they contradict each other: no records of its units may then enter the store. Otherwise an empty text.
    """
    stored = store.target(store.add_target(target))
    if stored is None or not (why := disagreement(dict(stored.reference), dict(target.reference))):
        return ""
    return (
        f"the records of target {target.key[:12]} ({target.name}) come from other units than those stored in {store.where}: {why}; "
        "use a database of their own for them, or renew the stored times (`relax-tune db reference --renew`)"
    )
