"""The view of one task in `relax-tune show`, section by section, as plain values computed from records; nothing is
measured.

Tests: `tests/tuner/cli/test_show.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from relax_tune.database.records import Measurement, VariantRecord, Workload
from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.expr import Expr, Var
from relax_tune.ir.text.parser import RECORD_CHARACTERS, parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.cli.report.explanation import opinion
from relax_tune.tuner.plan.plans import TaskPlan, plan_task, times_of
from relax_tune.tuner.plan.task_rows import (
    dispatched,
    shape_times,
    symbol_labels,
    variant_text,
)
from relax_tune.tuner.program.program_builder import KernelStage
from relax_tune.tuner.search.space import ParameterSpace, SketchSpace
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.domain import Domain, anchors
from relax_tune.tuner.task.extract import DEFAULT_UPPER
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.unfused_variants import in_parts, parts_of
from relax_tune.tuner.task.variants import TaskVariants

BEST, GENERIC, LIBRARY = "best", "generic", "library"
# Points of a sketch too large to list at which its constraints are tried, to estimate how many are legal.
SAMPLED = 1 << 16


def recorded_task(workload: Workload, records: Sequence[Measurement]) -> Task:
    """Return the task of a recorded workload, without the model it came from.

    It has no call sites. Its anchors are the shapes at which most variants were timed, all of one weight. Without
    records they are shapes up to the default bound.

    Raises UserError for a workload whose text this version cannot read, or whose key does not match its text.
    """
    try:
        func = parse_prim_func(workload.text, RECORD_CHARACTERS)
        key = workload_key(func)
    except ParseError as error:
        raise UserError(f"workload {workload.key[:12]}: expected a text of this version, got: {error}") from None
    if key != workload.key:
        raise UserError(
            f"workload {workload.key[:12]}: its text has the key {key[:12]}; the record was "
            "altered or written by another version: tune the model again"
        )
    func = replace(func, name=workload.hint or "task")
    symbols: tuple[Expr, ...] = func.symbols
    at: dict[str, set[tuple[int, ...]]] = {}
    for r in records:
        if r.status == "ok" and r.checked and len(r.symbols) == len(symbols):
            at.setdefault(r.variant.key, set()).add(tuple(r.symbols.get(f"s{a}", 0) for a in range(len(symbols))))
    if at:
        ((points, _),) = Counter(tuple(sorted(points)) for points in at.values()).most_common(1)
        domain = Domain(points, tuple(1 / len(points) for _ in points))
    else:
        ranges: dict[Var, Range] = {v: Range(1, DEFAULT_UPPER) for v in func.symbols}
        domain = anchors([symbols], ranges)
    return Task(workload.key, workload.text, func, (), domain)


@dataclass(frozen=True, eq=False)
class TaskView:
    """A task with its possible variants and its records for one target.

    of: the variant whose loops, trace and source are shown: `best`, `generic`, `library`, a sketch's name or the start of a
    variant's key; None: the fastest variant.
    planned: the plan that a build dispatches; None: the plan that follows from the records and the rules
    """

    task_variants: TaskVariants
    records: Sequence[Measurement]
    of: str | None = None
    planned: TaskPlan | None = None
    _labels: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_labels", symbol_labels(self.task_variants.task))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the task's symbols."""
        return self._labels

    @cached_property
    def _times(self) -> tuple[dict[str, list[float | None]], dict[str, VariantRecord]]:
        return times_of(self.task_variants, self.records)

    @cached_property
    def plan(self) -> TaskPlan:
        """The plan that a build would dispatch."""
        return self.planned or plan_task(self.task_variants, self.records)

    # -- the selected variant ---------------------------------------------------------------------------------------------

    @cached_property
    def variant(self) -> tuple[VariantRecord, str]:
        """The variant that `of` names, and a sentence on how it was chosen. Raises UserError when there is none."""
        tuned = self._fastest(lambda v: v.kind == "tuned")
        if self.of is None:
            if tuned is not None:
                return tuned, "the fastest over all shapes"
            return self.plan.variants[self.plan.plan.variants[0]], "dispatched, since nothing tuned is on record"
        if self.of == BEST:
            if tuned is None:
                raise UserError(
                    f"--of {BEST} expects a tuned candidate on record, got none; run `relax-tune tune`, or choose generic"
                )
            return tuned, "the fastest over all shapes"
        if self.of == GENERIC:
            return self.task_variants.sketch_set.generic(), "the schedule without any tuning"
        if self.of == LIBRARY:
            known = {v.key: v for v in self.task_variants.calling_libraries()}
            if not known:
                raise UserError(
                    f"--of {LIBRARY}: expected a library routine for {self.task_variants.task.name}, got none"
                )
            fastest = self._fastest(lambda v: v.key in known)
            return (fastest, "the fastest library form") if fastest else (next(iter(known.values())), "not measured")
        return self._named(self.of)

    def _named(self, name: str) -> tuple[VariantRecord, str]:
        on_record = {r.variant.key: r.variant for r in self.records}
        matching = [v for key, v in on_record.items() if key.startswith(name)]
        if len(matching) == 1:
            return matching[0], "by its key"
        names = [s.name for s in self.task_variants.sketch_set.sketches]
        if name not in names:
            known = ", ".join((BEST, GENERIC, LIBRARY, *names))
            raise UserError(f"--of expects {known} or the start of one variant's key; got {name!r}")
        fastest = self._fastest(lambda v: v.kind == "tuned" and v.sketch == name)
        if fastest is not None:
            return fastest, "the fastest of this sketch"
        for seed in self.task_variants.sketch_set.seeds():
            if names[seed.sketch] == name:
                return self.task_variants.sketch_set.record_of(seed), "not measured: where the search begins"
        raise UserError(f"--of {name}: expected parameters that its constraints allow, got none")

    def _fastest(self, matches: Callable[[VariantRecord], bool]) -> VariantRecord | None:
        """Return the variant timed at most anchors; ties are resolved by the smallest weighted log time."""
        times, variants = self._times
        weights = self.task_variants.task.domain.weights
        ranked: list[tuple[int, float, str]] = []
        for key, row in times.items():
            timed = [(w, math.log(t)) for w, t in zip(weights, row) if t is not None]
            if timed and matches(variants[key]):
                ranked.append((-len(timed), sum(w * t for w, t in timed) / sum(w for w, _ in timed), key))
        return variants[min(ranked)[2]] if ranked else None

    # -- sections --------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the normalised program."""
        return self.task_variants.task.text

    def sketches(self) -> list[dict[str, Any]]:
        """Describe every sketch: parameters with domains, constraints, sizes, trials and the best time.

        The number of legal points is an estimate unless `exact`. The time belongs to the fastest candidate over all shapes.
        """
        tried: dict[str, set[str]] = {}
        for r in self.records:
            if r.variant.kind == "tuned":
                tried.setdefault(r.variant.sketch, set()).add(r.variant.key)
        times, variants = self._times
        weights = self.task_variants.task.domain.weights
        rows = []
        for sketch, space in zip(self.task_variants.sketch_set.sketches, self.task_variants.sketch_set.space.sketches):
            legal, exact = _legal(space)
            whole = [
                sum(w * t for w, t in zip(weights, row) if t is not None)
                for key, row in times.items()
                if variants[key].kind == "tuned" and variants[key].sketch == sketch.name and None not in row
            ]
            mine = tried.get(sketch.name, set())
            rows.append(
                {
                    "name": sketch.name,
                    "parameters": {t.name: list(t.domain) for t in sketch.tunables},
                    "constraints": [str(c) for c in sketch.constraints],
                    "box": space.box,
                    "legal": legal,
                    "exact": exact,
                    "tried": len(mine),
                    "failed": len(mine - times.keys()),
                    "best_secs": min(whole, default=None),
                }
            )
        return rows

    def times(self) -> list[dict[str, Any]]:
        """Return the best median seconds of each kind and the dispatched variant, for each anchor."""
        return [asdict(row) for row in shape_times(self.task_variants, self.plan, *self._times)]

    def dispatch(self) -> list[dict[str, str]]:
        """List ranges and their dispatched variants; the first range that fits counts."""
        return [{"where": where, "variant": what} for where, what in dispatched(self.plan, self.labels)]

    def chosen(self) -> dict[str, Any]:
        """Describe the variant that loops, trace and source show."""
        variant, why = self.variant
        row = self._times[0].get(variant.key, [None] * len(self.task_variants.task.domain.points))
        return {
            "text": variant_text(variant),
            "why": why,
            "kind": variant.kind,
            "sketch": variant.sketch,
            "parameters": variant.values,
            "key": variant.key,
            "median_secs": row,
        }

    def trace(self) -> dict[str, Any]:
        """Return the steps from the program to the variant's loops.

        They are given as Python over a schedule `s` of the program and as JSON.
        """
        variant, _ = self.variant
        if variant.trace == "[]":
            return {"python": "", "json": []}
        parts = parts_of(variant).variants if in_parts(variant) else (variant,)
        scheduled = [(Trace.from_json(v.trace), v.values) for v in parts if v.trace != "[]"]
        return {"python": "\n".join(t.as_python(values) for t, values in scheduled), "json": variant.trace}

    def loops(self) -> list[str]:
        """Return the scheduled program of each kernel, and each library call, in order."""
        texts = []
        for stage in self.task_variants.stages(self.variant[0]):
            if isinstance(stage, KernelStage):
                texts.append(print_text(stage.func))
            else:
                arguments = ", ".join([*(b.name for b in stage.buffers), *map(str, stage.scalars)])
                texts.append(f"{stage.routine}({arguments})")
        return texts

    def source(self) -> list[dict[str, str]]:
        """Return the generated kernels of the variant."""
        kernels = self.task_variants.program(self.variant[0]).kernels
        return [{"name": k.name, "language": k.language, "source": k.source} for k in kernels]

    def model(self) -> dict[str, Any]:
        """Return the cost model's opinion; see `opinion`."""
        return opinion(self.task_variants, self.records)


SECTIONS: Mapping[str, Callable[[TaskView], Any]] = {
    "text": TaskView.text,
    "sketches": TaskView.sketches,
    "times": TaskView.times,
    "dispatch": TaskView.dispatch,
    "trace": TaskView.trace,
    "loops": TaskView.loops,
    "source": TaskView.source,
    "model": TaskView.model,
}
"""Every section of a task by its name, in the order they are shown."""

OF_VARIANT = frozenset({"trace", "loops", "source"})
"""Sections that are about one variant."""


def _legal(space: SketchSpace) -> tuple[int, bool]:
    """Return the number of legal points in a sketch's box, and whether it is exact.

    A large box is estimated from a sample (False).
    """
    listed = ParameterSpace([space]).listed()
    if listed is not None:
        return len(listed), True
    if space.valid is None:
        return space.box, True
    generator = np.random.default_rng(0)
    rows = np.stack([generator.choice(np.asarray(p.domain), SAMPLED) for p in space.parameters], axis=1)
    return round(space.box * float(space.valid(rows.astype(np.int64)).mean())), False
