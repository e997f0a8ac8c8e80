"""The sketches of a task on a machine: their parameter space, candidates to start with, and the sketch of a record.

Tests: `tests/tuner/emit/test_build.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError, ScheduleError, left_out
from relax_tune.ir.core.function import PrimFunc
from relax_tune.runtime.device.binaries import cache_folder, hashed, is_own_file, private_folder
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.cost.vectorized import ConstraintFunction
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import (
    Sketch,
    generic_schedule,
    instantiate,
    iter_sketches,
    replay_with,
    rules_for,
)
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.search.space import Candidate, Parameter, ParameterSpace, SketchSpace
from relax_tune.tuner.task.legal_values import first_legal
from relax_tune.tuner.task.task import Task, points_array

SEED_ROWS = 4096
"""Rows sampled per sketch to find a starting candidate for sketches without guesses."""
OWN_RECORDS = "own-records"
"""Cache folder of hashes of the records that this version's rules generate."""


@dataclass(frozen=True, eq=False)
class SketchSet:
    """All sketches that the schedule rules generate for a task. Sketches are generated once, on first use."""

    task: Task
    hardware: HardwareInfo

    @cached_property
    def sketches(self) -> tuple[Sketch, ...]:
        """Tunable sketches, in the order of the rules.

        The fallback is dispatched as the generic variant, so it is searched only if no other sketch exists.
        """
        generated = tuple(chain.from_iterable(self._by_rule.values()))
        tunable = tuple(s for s in generated if s.name != "fallback")
        return (
            tunable or generated or (Sketch("fallback", self.generic_schedule.func, self.generic_schedule.trace, ()),)
        )

    @cached_property
    def first(self) -> Sketch:
        """The sketch to try when only one is tried. Sketches that are not needed for this choice are not generated.

        It is the first one; for a product with one row, the first GEMV sketch for few rows.
        """
        products = (s for name, sketches in self._by_rule.items() if name.endswith("gemv") for s in sketches)
        few_rows = (s for s in products if all(max(t.domain) == 1 for t in s.tunables if t.name == "MR"))
        tunable = (s for s in chain.from_iterable(self._by_rule.values()) if s.name != "fallback")
        return next(few_rows, None) or next(tunable, None) or self.sketches[0]

    @cached_property
    def _by_rule(self) -> Mapping[str, _GeneratedOnDemand]:
        rules = rules_for(self.hardware)
        return {
            name: _GeneratedOnDemand(iter(iter_sketches(self.task.func, self.hardware, {name: rule})))
            for name, rule in rules.items()
        }

    # -- the parameter space ------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> ParameterSpace:
        """The union of the sketches as integer rows, with vectorised constraints and features.

        A sketch whose constraints or features cannot be computed has no legal candidate.
        """
        spaces = []
        for sketch in self.sketches:
            parameters = tuple(Parameter(t.name, t.domain) for t in sketch.tunables)
            space = SketchSpace(sketch.name, parameters, lambda rows: np.zeros(len(rows), np.bool_))
            with left_out(f"the schedule {sketch.name}", self.task.name):
                space = self._sketch_space(sketch, parameters)
            spaces.append(space)
        return ParameterSpace(spaces)

    def _sketch_space(self, sketch: Sketch, parameters: tuple[Parameter, ...]) -> SketchSpace:
        names, features = [t.name for t in sketch.tunables], FeatureFunction(sketch, self.hardware)
        valid, symbols = ConstraintFunction(sketch), [v.name for v in self.task.func.symbols]

        def constraint(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
            return valid(dict(zip(names, rows.T))) if names else np.ones(len(rows), np.bool_)

        def describe(rows: NDArray[np.int64], shapes: NDArray[np.int64]) -> NDArray[np.float32]:
            return features(dict(zip(names, rows.T)), dict(zip(symbols, shapes.T)))

        # Evaluate both once: an error in a closed form must surface here, where it costs one sketch, and not in a search.
        first = np.asarray([[p.domain[0] for p in parameters]], np.int64).reshape(1, -1)
        constraint(first)
        describe(first, np.ones((1, len(symbols)), np.int64))
        return SketchSpace(sketch.name, parameters, constraint, describe, features.names)

    def record_of(self, candidate: Candidate) -> VariantRecord:
        """Return the record identity of a candidate of the space."""
        sketch = self.sketches[candidate.sketch]
        values = {t.name: v for t, v in zip(sketch.tunables, candidate.values, strict=True)}
        return _record(sketch, values)

    def candidate_of(self, record: VariantRecord) -> Candidate | None:
        """Return the point of the space that a tuned record describes; None if the space does not contain it."""
        for number, sketch in enumerate(self.sketches):
            if sketch.name == record.sketch and sketch.trace.to_json() == record.trace:
                values = tuple(record.values.get(t.name, -1) for t in sketch.tunables)
                return self._if_legal(Candidate(number, values))
        return None

    def similar_candidate(self, record: VariantRecord) -> Candidate | None:
        """Return the candidate nearest to a variant of another task: same sketch name, nearest values on a log scale.

        Returns None if no sketch has this name and these tunables, or if the nearest values violate its constraints.
        """
        for number, sketch in enumerate(self.sketches):
            domains = {t.name: t.domain for t in sketch.tunables}
            if sketch.name == record.sketch and domains.keys() == record.values.keys():
                nearest = (
                    min(d, key=lambda x: (abs(math.log((x + 1) / (record.values[n] + 1))), x))
                    for n, d in domains.items()
                )
                return self._if_legal(Candidate(number, tuple(nearest)))
        return None

    def _if_legal(self, candidate: Candidate) -> Candidate | None:
        return candidate if self.space.contains(candidate) else None

    # -- candidates to start with -------------------------------------------------------------------------------------

    def seeds(self, count: int | None = None) -> tuple[Candidate, ...]:
        """Return up to `count` candidates (None: all) that are likely fast before anything is measured.

        The guesses of the rules come first, the best guess of each sketch before any second one. Then follows one sampled
        candidate for each sketch without guesses: few loads per point, little padding and evenly used workers at the
        middle anchor.
        """
        return self._seeds[:count]

    @cached_property
    def _seeds(self) -> tuple[Candidate, ...]:
        ranked = [
            (rank, number, Candidate(number, tuple(values[t.name] for t in sketch.tunables)))
            for number, sketch in enumerate(self.sketches)
            for rank, values in enumerate(sketch.guesses)
        ]
        guessed = [c for _, _, c in sorted(ranked, key=lambda g: g[:2]) if self.space.contains(c)]
        return (*guessed, *self._sampled_seeds(exclude={c.sketch for c in guessed}))

    def _sampled_seeds(self, exclude: Collection[int]) -> list[Candidate]:
        """Return the best sampled candidate of each sketch that is not excluded, best first."""
        points = points_array(self.task.domain.points)[len(self.task.domain.points) // 2 :][:1]
        sampled = self.space.sample(np.random.default_rng(0), SEED_ROWS * len(self.sketches))
        seeds = []
        for number in range(len(self.sketches)):
            codes = sampled[sampled[:, 0] == number]
            if number in exclude or not len(codes):
                continue
            names = self.space.sketches[number].feature_names
            rows = self.space.features(codes, points)[:, 0, :]
            padding, loads = (rows[:, names.index(n)] for n in ("padding", "loads_per_point"))
            score = loads + padding - rows[:, names.index("wave_use")]
            best = int(np.argmin(score))
            seeds.append((float(score[best]), number, self.space.candidates(codes[best : best + 1])[0]))
        return [c for _, _, c in sorted(seeds, key=lambda s: s[:2])]

    def guesses(self, sketches: Collection[str]) -> list[VariantRecord]:
        """Return the seeds of the sketches with these names."""
        return [self.record_of(c) for c in self.seeds() if self.sketches[c.sketch].name in sketches]

    def first_guesses(self, exclude: Collection[str]) -> list[VariantRecord]:
        """Return the first seed of each sketch whose name is not excluded."""
        first: dict[str, Candidate] = {}
        for c in self.seeds():
            first.setdefault(self.sketches[c.sketch].name, c)
        return [self.record_of(c) for name, c in first.items() if name not in exclude]

    def best_guess(self) -> VariantRecord:
        """Return the first legal guess of the sketch to try first, or its legal values nearest to the middle.

        Returns the generic variant if no legal values are near the middle.
        """
        values, sketch = None, self.first
        with left_out(f"the schedule {sketch.name}", self.task.name):
            values = first_legal(sketch)
        return self.generic() if values is None else _record(sketch, values)

    # -- scheduled functions ------------------------------------------------------------------------------------------

    def generic(self) -> VariantRecord:
        """Return the record of the schedule without tunables, which fits every function."""
        return VariantRecord("generic", "fallback", self.generic_schedule.trace.to_json(), "{}")

    @cached_property
    def generic_schedule(self) -> Schedule:
        return generic_schedule(self.task.func, self.hardware)

    def scheduled(self, record: VariantRecord) -> PrimFunc | None:
        """Return the scheduled function of a tuned record; None if the rules of this version do not generate it.

        Anybody may have written the record, so its trace is compared with the sketches' traces before it is applied. Records
        that passed once are remembered in this user's cache and replayed directly, which is faster than generating sketches.
        """
        identity = (self.task.text, repr(self.hardware), record.trace, record.parameters)
        if not all(rule.exhausted for rule in self._by_rule.values()) and _is_known(*identity):
            with suppress(ScheduleError):  # remembered by a version with other primitives
                return replay_with(Trace.from_json(record.trace), self.task.func, record.values)
        sketch = self.sketch_of(record)
        if sketch is None:
            return None
        _remember(*identity)
        return instantiate(sketch, record.values)

    def sketch_of(self, record: VariantRecord) -> Sketch | None:
        """Return the sketch that a tuned record instantiates; None if no sketch has its trace or permits its values."""
        steps = trace_steps(record)
        sketch = next((s for s in self.named(record.sketch) if json.loads(s.trace.to_json()) == steps), None)
        if sketch is None or any(record.values.get(t.name) not in t.domain for t in sketch.tunables):
            return None
        values = {t.name: np.asarray([record.values[t.name]], np.int64) for t in sketch.tunables}
        return sketch if not values or ConstraintFunction(sketch)(values)[0] else None

    def named(self, name: str) -> Iterator[Sketch]:
        """Yield the sketches of a name, generating no more than the caller consumes.

        The rule that the name begins with comes first, since it most likely generates the sketch.
        """
        family = name.partition(".")[0]
        for rule in sorted(self._by_rule, key=lambda rule: not rule.endswith(family)):
            yield from (s for s in self._by_rule[rule] if s.name == name)


class _GeneratedOnDemand:
    """The sketches of one rule: each is generated when an iteration first reaches it, and reused by later iterations."""

    def __init__(self, generator: Iterator[Sketch]) -> None:
        self._generator = generator
        self._sketches: list[Sketch] = []
        self.exhausted = False

    def __iter__(self) -> Iterator[Sketch]:
        # By position, not by `yield from self._sketches`: another iteration may extend the list meanwhile.
        position = 0
        while True:
            if position == len(self._sketches):
                sketch = next(self._generator, None)
                if sketch is None:
                    self.exhausted = True
                    return
                self._sketches.append(sketch)
            yield self._sketches[position]
            position += 1


def _record(sketch: Sketch, values: Mapping[str, int]) -> VariantRecord:
    return VariantRecord("tuned", sketch.name, sketch.trace.to_json(), json.dumps(dict(values)))


def trace_steps(record: VariantRecord) -> object:
    """Return a record's trace as data; None if it is not JSON.

    Traces are compared as data, not as text: unfused records write theirs with blanks.
    """
    try:
        return json.loads(record.trace)
    except (ValueError, RecursionError):
        return None


def _is_known(*parts: str) -> bool:
    with suppress(OSError, BuildError), private_folder(cache_folder() / OWN_RECORDS) as folder:
        return is_own_file(folder / hashed(parts))
    return False


def _remember(*parts: str) -> None:
    with suppress(OSError, BuildError), private_folder(cache_folder() / OWN_RECORDS) as folder:
        (folder / hashed(parts)).touch(mode=0o600)
