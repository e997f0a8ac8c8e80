"""Tasks: the unique tensor functions of a model, each with its call sites and the shapes it is tuned for.

Tests: `tests/tuner/task/test_domain.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_tune.database.records import Regime
from relax_tune.ir.core.expr import Expr, Var
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.intervals import Interval
from relax_tune.tuner.task.allowed_sizes import AllowedSizes
from relax_tune.tuner.task.domain import Domain, Point, is_allowed

FORMAT_VERSION = 1
"""Version of the text form that workloads are recorded in."""


@dataclass(frozen=True, eq=False)
class Task:
    """One unique tensor function of a model. Its shape symbols are recorded as s0, s1 ..., independently of their names.

    Attributes:
        key: Structural hash of the function (`workload_key`).
        text: Normalised text of the function.
        sites: For every call site, the task's symbols as expressions over the model's symbols.
        regime: State of the caches when it is timed (`learn.device_records.records_in_regime`).
        ranges: Least and largest value of each symbol in the model, which may exceed the tuned range; an end is None without a
            bound. Empty if unknown.
        allowed: Sizes that the model's symbols may have together; None if unknown.
    """

    key: str
    text: str
    func: PrimFunc
    sites: tuple[tuple[Expr, ...], ...]
    domain: Domain
    regime: Regime = "warm"
    ranges: tuple[Interval, ...] = ()
    allowed: AllowedSizes[Var] | None = None

    @property
    def name(self) -> str:
        return self.func.name

    @property
    def symbol_names(self) -> Mapping[Var, str]:
        return {v: f"s{a}" for a, v in enumerate(self.func.symbols)}

    def allows(self, point: Point) -> bool:
        """Return True if a call of the model may have this shape, or nothing is known of the model."""
        return self.allowed is None or is_allowed(point, self.sites, self.allowed)

    def bindings(self) -> tuple[dict[str, int], ...]:
        """Return the anchors as symbol bindings."""
        return tuple(map(binding, self.domain.points))


def binding(point: Sequence[int]) -> dict[str, int]:
    """Return a point as symbol binding."""
    return {f"s{a}": x for a, x in enumerate(point)}


def points_array(points: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the anchors as an (S, D) array."""
    return np.asarray(points, dtype=np.int64).reshape(len(points), -1)
