"""Variants of a task that call a library routine: the routine computes a matmul or the whole task, and kernels the rest.

Tests: `tests/tuner/program/test_program_builder.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError, left_out
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.passes.library.library_forms import Alternative
from relax_tune.ir.passes.library.library_lowering import LibraryForm, library_forms
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.library.registry import how_to_install
from relax_tune.schedules.sketch import (
    epilogues,
    generic_schedule,
    instantiate,
    iter_sketches,
    replay_with,
    simplify_func,
)
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.program.program_builder import LibraryStage, Stage
from relax_tune.tuner.task.legal_values import first_legal, widest
from relax_tune.tuner.task.sketch_set import trace_steps
from relax_tune.tuner.task.step_stages import stage_of

NO_TRACE = "[]"
"""Trace of a variant whose epilogue is scheduled by `default_schedule`, or that has no epilogue."""


@dataclass(frozen=True, eq=False)
class LibraryVariants:
    """The variants that call one of the available library routines.

    Attributes:
        alternatives: Routines that are available on the machine.
    """

    func: PrimFunc
    hardware: HardwareInfo
    alternatives: tuple[Alternative, ...]
    _epilogues: dict[str, list[tuple[str, Trace, Mapping[str, int]]]] = field(default_factory=dict, init=False)

    @cached_property
    def forms(self) -> tuple[LibraryForm, ...]:
        """The function split around a library call, once for each routine that can compute the split-off part."""
        return library_forms(self.func, self.alternatives)

    @cached_property
    def variants(self) -> tuple[VariantRecord, ...]:
        """Each form with the schedules of its epilogue, or one variant if it has no epilogue."""
        return tuple(v for form in self.forms for v in self._variants_of(form))

    @property
    def first_of_each_routine(self) -> tuple[VariantRecord, ...]:
        """The first variant of each form."""
        # Later entries of the dictionary replace earlier ones, so in reverse the first variant of each routine stays.
        first = {_routine(v): v for v in reversed(self.variants)}
        return tuple(first[form.routine] for form in self.forms)

    def _variants_of(self, form: LibraryForm) -> tuple[VariantRecord, ...]:
        if form.after is None:
            return (VariantRecord("library", form.routine, NO_TRACE, "{}"),)
        scheduled = tuple(
            VariantRecord("library", f"{form.routine}+{name}", trace.to_json(), json.dumps(values))
            for name, trace, values in self._epilogue_schedules(form.after.func)
        )
        return scheduled or (VariantRecord("library", f"{form.routine}+fallback", NO_TRACE, "{}"),)

    def _epilogue_schedules(self, func: PrimFunc) -> list[tuple[str, Trace, Mapping[str, int]]]:
        # Different routines often leave the same epilogue, so the sketches are cached by its text.
        text = print_text(func)
        if text not in self._epilogues:
            self._epilogues[text] = [(s.name, s.trace, widest(s)) for s in epilogues(func, self.hardware)]
        return self._epilogues[text]

    def stages(self, record: VariantRecord) -> tuple[Stage, ...] | None:
        """Return the stages of a library record; None if this version has no such variant.

        Raises:
            BuildError: The routine is not available.
        """
        routine = _routine(record)
        form = next((f for f in self.forms if f.routine == routine), None)
        if form is None:
            raise BuildError(
                f"{self.func.name}: the library routine {routine!r} is not available; "
                f"{how_to_install(routine.split('.')[0])}, or build with another policy"
            )
        if not any(_same(record, variant) for variant in self.variants):
            return None
        stages: list[Stage] = [stage_of(step, default_schedule(step.func, self.hardware)) for step in form.before]
        if form.packing is not None:
            stages.append(LibraryStage(form.packing.routine, form.packing.buffers, form.packing.scalars, once=True))
        stages.append(LibraryStage(form.routine, form.buffers, form.scalars))
        if form.after is not None:
            func = form.after.func
            if record.trace == NO_TRACE:
                scheduled = default_schedule(func, self.hardware)
            else:
                scheduled = replay_with(Trace.from_json(record.trace), func, record.values)
            stages.append(stage_of(form.after, scheduled))
        return tuple(stages)


def default_schedule(func: PrimFunc, hardware: HardwareInfo) -> PrimFunc:
    """Schedule a function that is not searched, by the first sketch that has legal values."""
    for sketch in iter_sketches(func, hardware):
        with left_out(f"the schedule {sketch.name}", func.name):
            values = first_legal(sketch)
            if values is not None:
                return instantiate(sketch, values)
    return simplify_func(generic_schedule(func, hardware).func)


def _routine(record: VariantRecord) -> str:
    return record.sketch.split("+")[0]


def _same(a: VariantRecord, b: VariantRecord) -> bool:
    return (a.sketch, a.values) == (b.sketch, b.values) and trace_steps(a) == trace_steps(b)
