"""Weights that may be stored in fewer bits, and the times of the calls that read them.

Tests: `tests/tuner/quality/test_choose.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.graph import CallTIR, Constant
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.job.lowered_model import WeightType
from relax_tune.tuner.plan.plans import plan_task
from relax_tune.tuner.plan.task_rows import task_rows

TYPES: tuple[WeightType, ...] = get_args(WeightType)
_FORM = re.compile(r"(.+)\.(bf16|f16|int8|int4|scale)(_\d*)?")


@dataclass(frozen=True, slots=True)
class GroupTime:
    """The time of a group.

    Attributes:
        stored: All of its weights have the type.
        secs: Seconds of its calls in one run; None if unknown.
    """

    stored: bool
    secs: float | None


@dataclass(eq=False)
class WeightGroups:
    """The weights of a model that get a type together, since one call reads them.

    Attributes:
        exact: The job of the model with its declared types.
    """

    exact: DeviceJob

    @cached_property
    def jobs(self) -> Mapping[WeightType, DeviceJob]:
        """For each type, the job of the model with every weight stored so that can be."""
        return {kind: self.exact.storing(dict.fromkeys(self._candidates, kind)) for kind in TYPES}

    @cached_property
    def _candidates(self) -> dict[str, int]:
        """The finite float weights of at least two dims, in the model's order."""
        arrays = self.exact.module.constants
        names = (n for n, a in arrays.items() if a.ndim >= 2 and a.dtype.kind == "f" and _is_finite(a))
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """The names of the weights of each group, in the model's order."""
        joint: dict[str, set[str]] = {}
        for job in (self.exact, *self.jobs.values()):
            for call in job.lowered.calls():
                together = {name for name, _ in self._read_by(call)}
                joined = together.union(*(joint.get(name, set()) for name in together))
                joint |= dict.fromkeys(joined, joined)
        order = self._candidates
        groups = {tuple(sorted(g, key=order.__getitem__)) for g in joint.values()}
        return tuple(sorted(groups, key=lambda names: order[names[0]]))

    def times(self, kind: WeightType | None) -> list[GroupTime]:
        """Return the recorded time of each group with its weights stored as `kind`; None: in their declared types."""
        job = self.exact if kind is None else self.jobs[kind]
        plans, records = {}, {}
        for name, variants in job.task_variants.items():
            records[name] = job.records(variants.task.key, variants.task.regime)
            plans[name] = plan_task(variants, records[name], predictor=job.predictor)
        each = {
            r.name: None if r.secs is None else r.secs / r.calls for r in task_rows(job.task_variants, plans, records)
        }
        where = {name: number for number, names in enumerate(self.weights) for name in names}
        secs: list[float | None] = [0.0 for _ in self.weights]
        stored: list[set[str]] = [set() for _ in self.weights]
        for call in job.lowered.calls():
            read = self._read_by(call)
            for number in sorted({where[name] for name, _ in read}):
                before, own_secs = secs[number], each.get(call.callee)
                secs[number] = None if before is None or own_secs is None else before + own_secs
                stored[number] |= {name for name, form in read if form == kind}
        return [
            GroupTime(variants == set(names), s) for variants, names, s in zip(stored, self.weights, secs, strict=True)
        ]

    def _read_by(self, call: CallTIR) -> set[tuple[str, str | None]]:
        """Return the weights that a call reads, each with the type it is stored in; None for its declared type."""
        read: set[tuple[str, str | None]] = set()
        for a in call.operands:
            if not isinstance(a, Constant):
                continue
            form = _FORM.fullmatch(a.name)
            if a.name in self._candidates:
                read.add((a.name, None))
            elif form is not None and form[1] in self._candidates and form[2] != "scale":
                read.add((form[1], form[2]))
        return read


def _is_finite(array: NDArray[Any]) -> bool:
    return bool(np.isfinite(array.astype(np.float32)).all())
