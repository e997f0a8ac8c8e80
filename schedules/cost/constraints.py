"""Constraints of a sketch as one vectorised function: candidates are rejected before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from relax_tune.schedules.cost.vectorized import compile_numpy
from relax_tune.schedules.sketch import Sketch


class ConstraintFunction:
    """True where every constraint of the sketch holds."""

    def __init__(self, sketch: Sketch) -> None:
        self._run, self.variables = compile_numpy(list(sketch.constraints))

    def __call__(self, tunables: Mapping[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
        """Evaluate the constraints for each row of tunables (R,): (R,) bool."""
        rows = len(next(iter(tunables.values()))) if tunables else 1
        result = np.ones(rows, bool)
        columns = {n: np.asarray(a, np.float64) for n, a in tunables.items()}
        for value in self._run(columns):
            result &= value.astype(bool)
        return result
