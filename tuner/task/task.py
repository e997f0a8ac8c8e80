"""Tasks: a workload on a target, with its domain; and the space of everything that can be tried for it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relax_tune.database.records import Regime, VariantRecord
from relax_tune.errors import BuildError, ParseError, ScheduleError
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.intervals import Interval
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.passes.fusion.symbol_interface import bind_symbols
from relax_tune.ir.passes.fusion.unfuse import FunctionStep, cut_points, split_at
from relax_tune.ir.passes.library.library_forms import Alternative
from relax_tune.ir.passes.library.library_lowering import LibraryForm, library_forms
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.library.registry import how_to_install
from relax_tune.runtime.program.program import Program
from relax_tune.schedules.cost.constraints import ConstraintFunction
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import (
    Sketch,
    epilogues,
    first_to_try,
    generate_sketches,
    generic_schedule,
    instantiate,
    iter_sketches,
    replay_with,
    rules_for,
    simplify_func,
)
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.program.program_builder import KernelStage, LibraryStage, Stage, candidate_program
from relax_tune.tuner.search import space as search_space
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.loop_limit import check_loop_passes
from relax_tune.tuner.task.own_records import keep_as_own, known_as_own
from relax_tune.tuner.task.unfused_variants import UnfusedVariant, choices_of_parts, in_parts, parts_of

# Rows of a sketch that are scored to seed a search.
SEED_ROWS = 4096
# Combinations of values near the middle that are tried as a guess.
GUESSES = 4096


@dataclass(frozen=True, eq=False)
class Task:
    """One unique tensor function of a model. `symbols` are its shape symbols, recorded as s0, s1 ... whatever their names.

    `sites`: for every call site, the task's symbols as expressions over the model's symbols. regime: state of the
    caches when it is timed (`plan/regimes` says which records stand for it). ranges: the least and the largest value that each symbol may
    have, whatever range is tuned, None where nothing bounds it; empty if they are not known.
    """

    key: str
    text: str
    func: PrimFunc
    sites: tuple[tuple[Expr, ...], ...]
    domain: Domain
    regime: Regime = "warm"
    ranges: tuple[Interval, ...] = ()

    @property
    def name(self) -> str:
        return self.func.name

    @property
    def symbol_names(self) -> Mapping[Var, str]:
        return {v: f"s{a}" for a, v in enumerate(self.func.symbols)}

    def bindings(self) -> tuple[dict[str, int], ...]:
        """Return the anchors as symbol bindings."""
        return tuple(map(binding, self.domain.points))


def binding(point: Sequence[int]) -> dict[str, int]:
    """Return a point as symbol binding."""
    return {f"s{a}": x for a, x in enumerate(point)}


@dataclass(frozen=True, eq=False)
class Choices:
    """Everything that can be tried for a task on a machine: sketches, library forms, generic form.

    alternatives: the library routines there are on this machine."""

    task: Task
    hardware: HardwareInfo
    target: CodeTarget
    alternatives: tuple[Alternative, ...] = ()
    _programs: dict[str, Program] = field(default_factory=dict)
    _stages: dict[str, tuple[Stage, ...]] = field(default_factory=dict)
    _cuts: dict[tuple[str, ...], tuple[tuple[FunctionStep, Choices], ...]] = field(default_factory=dict)
    _drawn: dict[str, tuple[list[Sketch], Iterator[Sketch]]] = field(default_factory=dict)
    _after: dict[str, list[tuple[str, Trace, Mapping[str, int]]]] = field(default_factory=dict)

    @cached_property
    def sketches(self) -> tuple[Sketch, ...]:
        """Tunable sketches (the fallback is the generic variant and not searched when anything else fits)."""
        found = generate_sketches(self.task.func, self.hardware)
        tunable = tuple(s for s in found if s.name != "fallback")
        return tunable or found

    @cached_property
    def space(self) -> search_space.ParameterSpace:
        """The union of the sketches as integers, with vectorised constraints and features."""
        return search_space.ParameterSpace([self._sketch_space(*s) for s in zip(self.sketches, self._features)])

    @cached_property
    def _features(self) -> tuple[FeatureFunction, ...]:
        return tuple(FeatureFunction(sketch, self.hardware) for sketch in self.sketches)

    def _sketch_space(self, sketch: Sketch, features: FeatureFunction) -> search_space.SketchSpace:
        names = [t.name for t in sketch.tunables]
        valid, symbols = ConstraintFunction(sketch), [v.name for v in self.task.func.symbols]

        def constraint(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
            return valid(dict(zip(names, rows.T))) if names else np.ones(len(rows), np.bool_)

        def describe(rows: NDArray[np.int64], shapes: NDArray[np.int64]) -> NDArray[np.float32]:
            return features(dict(zip(names, rows.T)), dict(zip(symbols, shapes.T)))

        parameters = tuple(search_space.Parameter(t.name, t.domain) for t in sketch.tunables)
        return search_space.SketchSpace(sketch.name, parameters, constraint, describe)

    def seeds(self, count: int | None = None) -> tuple[search_space.Candidate, ...]:
        """Return up to `count` candidates (None: all) that are likely fast before anything is measured.

        The rules' guesses come first, the best of each sketch before the others. One sampled candidate of each sketch
        without guesses follows, of few loads per point, little padding and evenly used workers at the middle anchor.
        """
        return self._seeds[:count]

    @cached_property
    def _seeds(self) -> tuple[search_space.Candidate, ...]:
        ranked = [
            (rank, number, search_space.Candidate(number, tuple(values[t.name] for t in sketch.tunables)))
            for number, sketch in enumerate(self.sketches)
            for rank, values in enumerate(sketch.guesses)
        ]
        guessed = [c for _, _, c in sorted(ranked, key=lambda g: g[:2]) if self.space.contains(c)]
        return (*guessed, *self._sampled({c.sketch for c in guessed}))

    def guesses(self, sketches: Collection[str]) -> list[VariantRecord]:
        """Return the rules' guesses of the sketches of these names, or one sampled candidate of a sketch without."""
        return [self.tuned(c) for c in self.seeds() if self.sketches[c.sketch].name in sketches]

    def first_guesses(self, but: Collection[str]) -> list[VariantRecord]:
        """Return the first of the `guesses` of each sketch whose name is not among these."""
        first: dict[str, search_space.Candidate] = {}
        for c in self.seeds():
            first.setdefault(self.sketches[c.sketch].name, c)
        return [self.tuned(c) for name, c in first.items() if name not in but]

    def _sampled(self, known: Collection[int]) -> list[search_space.Candidate]:
        """Return the best sampled candidate of every sketch but the known ones, best first."""
        points = points_array(self.task.domain.points)[len(self.task.domain.points) // 2 :][:1]
        drawn = self.space.sample(np.random.default_rng(0), SEED_ROWS * len(self.sketches))
        found = []
        for number in range(len(self.sketches)):
            codes = drawn[drawn[:, 0] == number]
            if number in known or not len(codes):
                continue
            names = self._features[number].names
            rows = self.space.features(codes, points)[:, 0, :]
            padding, loads = (rows[:, names.index(n)] for n in ("padding", "loads_per_point"))
            score = loads + padding - rows[:, names.index("wave_use")]
            best = int(np.argmin(score))
            found.append((float(score[best]), number, self.space.candidates(codes[best : best + 1])[0]))
        return [c for _, _, c in sorted(found, key=lambda f: f[:2])]

    # -- records and programs -----------------------------------------------------------------------------------------

    def tuned(self, candidate: search_space.Candidate) -> VariantRecord:
        """Return the record identity of a candidate of the space."""
        sketch = self.sketches[candidate.sketch]
        values = {t.name: v for t, v in zip(sketch.tunables, candidate.values, strict=True)}
        return VariantRecord("tuned", sketch.name, sketch.trace.to_json(), json.dumps(values))

    def candidate_of(self, record: VariantRecord) -> search_space.Candidate | None:
        """Return the point of the space that a tuned record describes; None without such a sketch or value."""
        for number, sketch in enumerate(self.sketches):
            if sketch.name == record.sketch and sketch.trace.to_json() == record.trace:
                values = tuple(record.values.get(t.name, -1) for t in sketch.tunables)
                found = search_space.Candidate(number, values)
                return found if self.space.contains(found) else None
        return None

    def candidate_like(self, record: VariantRecord) -> search_space.Candidate | None:
        """Return the legal point of the sketch of that name that is nearest to the numbers of another task's variant.

        None without such a sketch, other tunables, or where the nearest values are not legal."""
        for number, sketch in enumerate(self.sketches):
            domains = {t.name: t.domain for t in sketch.tunables}
            if sketch.name == record.sketch and domains.keys() == record.values.keys():
                nearest = (
                    min(d, key=lambda x: (abs(math.log((x + 1) / (record.values[n] + 1))), x))
                    for n, d in domains.items()
                )
                found = search_space.Candidate(number, tuple(nearest))
                return found if self.space.contains(found) else None
        return None

    def generic(self) -> VariantRecord:
        """Return the always-correct schedule."""
        return VariantRecord("generic", "fallback", self._generic.trace.to_json(), "{}")

    @cached_property
    def _generic(self) -> Schedule:
        return generic_schedule(self.task.func, self.hardware)

    @cached_property
    def forms(self) -> tuple[LibraryForm, ...]:
        """The unfused forms around library calls, one for each routine that can take the work."""
        return library_forms(self.task.func, self.alternatives)

    def library_variants(self) -> tuple[VariantRecord, ...]:
        """Return each library call with a few settings of its epilogue's schedule (one when it has none)."""
        return self._library_variants

    @cached_property
    def _library_variants(self) -> tuple[VariantRecord, ...]:
        return tuple(v for form in self.forms for v in self._variants_of(form))

    def _variants_of(self, form: LibraryForm) -> tuple[VariantRecord, ...]:
        if form.after is None:
            return (VariantRecord("library", form.routine, "[]", "{}"),)
        found = []
        for name, trace, values in self._epilogues(form.after.func):
            found.append(VariantRecord("library", f"{form.routine}+{name}", trace.to_json(), json.dumps(values)))
        return tuple(found) or (VariantRecord("library", f"{form.routine}+fallback", "[]", "{}"),)

    def _epilogues(self, func: PrimFunc) -> list[tuple[str, Trace, Mapping[str, int]]]:
        """Return a schedule of each sketch of what follows a library's call, which is much the same for each routine."""
        text = print_text(func)
        if text not in self._after:
            self._after[text] = [(s.name, s.trace, _widest(s)) for s in epilogues(func, self.hardware)]
        return self._after[text]

    def of_libraries(self) -> tuple[VariantRecord, ...]:
        """Return the variants with a library call: of the whole task, or unfused ones if no routine takes the whole."""
        return self.library_variants() or tuple(v for v in self.variants_in_parts() if v.kind == "library")

    def variants_in_parts(self) -> tuple[VariantRecord, ...]:
        """Return the unfused variants: the task cut around its matmuls.

        Each part is computed by a library's routine or as the rules guess.
        """
        return self._in_parts

    @cached_property
    def _in_parts(self) -> tuple[VariantRecord, ...]:
        begins = cut_points(self.task.func)
        if not begins:
            return ()
        options = [part._options() for _, part in self._parts(begins)]
        return tuple(UnfusedVariant(begins, chosen).record() for chosen in choices_of_parts(options))

    def _parts(self, begins: tuple[str, ...]) -> tuple[tuple[FunctionStep, Choices], ...]:
        """Return the parts of the task cut at these blocks, each with its choices, which all unfused variants share."""
        if begins not in self._cuts:
            self._cuts[begins] = tuple((step, self._of_part(step)) for step in split_at(self.task.func, begins))
        return self._cuts[begins]

    def _of_part(self, step: FunctionStep) -> Choices:
        """Return the choices for a part. A part is never measured by itself, so its domain has no points."""
        key, text = workload_key(step.func), print_text(step.func, normalise=True)
        return replace(self, task=Task(key, text, step.func, (), Domain((), ())), _programs={}, _stages={}, _cuts={})

    def _options(self) -> tuple[VariantRecord, ...]:
        """Return one variant of each routine, and the one that the rules rank first."""
        first = {v.sketch.split("+")[0]: v for v in reversed(self.library_variants())}
        return (*(first[form.routine] for form in self.forms), self.guess())

    def guess(self) -> VariantRecord:
        """Return the first legal guess of the sketch to try, or its legal values nearest to the middle.

        Returns the generic form where no values are legal."""
        sketch = first_to_try(self.sketches)
        values = _first_legal(sketch)
        if values is None:
            return self.generic()
        return VariantRecord("tuned", sketch.name, sketch.trace.to_json(), json.dumps(dict(values)))

    def stages(self, record: VariantRecord) -> tuple[Stage, ...]:
        """Return the scheduled functions and library calls of a variant, replayed from its record.

        Raises BuildError when the record does not apply to this task with this version of the tool, and for loops that the device
        would end (`loop_limit`).
        """
        found = self._stages.get(record.key)
        if found is None:
            try:
                found = self._made_stages(record)
            except (ScheduleError, ParseError) as error:
                raise BuildError(
                    f"the record {record.key} of task {self.task.name!r} does not apply: {error}"
                ) from None
            check_loop_passes(found, self.task.func.symbols, self.task.ranges, self.target)
            self._stages[record.key] = found
        return found

    def _made_stages(self, record: VariantRecord) -> tuple[Stage, ...]:
        if in_parts(record):
            parts = parts_of(record)
            if not parts.begins or parts.begins != cut_points(self.task.func):
                raise self._foreign(record)
            return self._stages_in_parts(parts)
        if record.kind == "library":
            return self._library_stages(record)
        if record.kind == "generic":
            return (KernelStage(simplify_func(self._generic.func)),)  # what a replay would give
        identity = (self.task.text, repr(self.hardware), record.trace, record.parameters)
        if "sketches" not in self.__dict__ and known_as_own(*identity):
            with suppress(ScheduleError):  # of a version whose primitives were others
                return (KernelStage(replay_with(Trace.from_json(record.trace), self.task.func, record.values)),)
        sketch = self.own_sketch(record)
        if sketch is None:
            raise self._foreign(record)
        keep_as_own(*identity)
        return (KernelStage(instantiate(sketch, record.values)),)

    def _foreign(self, record: VariantRecord) -> BuildError:
        return BuildError(
            f"the record {record.key} of task {self.task.name!r} does not apply: wanted a variant that the rules of this version "
            f"make, found {record.sketch!r:.80} of another version or hand; tune again"
        )

    def own_sketch(self, record: VariantRecord) -> Sketch | None:
        """Return the sketch that a tuned record was drawn from. None if the rules make none like it, or forbid its numbers.

        What the record says is compared and not replayed, since anybody may have written it."""
        said = _steps(record)
        sketch = next((s for s in self._sketches_like(record) if json.loads(s.trace.to_json()) == said), None)
        if sketch is None or any(record.values.get(t.name) not in t.domain for t in sketch.tunables):
            return None
        values = {t.name: np.asarray([record.values[t.name]], np.int64) for t in sketch.tunables}
        return sketch if not values or ConstraintFunction(sketch)(values)[0] else None

    def _sketches_like(self, record: VariantRecord) -> Iterator[Sketch]:
        """Yield the sketches of the record's name. The rule that the name begins with makes its own first.

        A sketch is made once for all records, and none is made beyond the one that a record was drawn from."""
        if "sketches" in self.__dict__:
            yield from (s for s in self.sketches if s.name == record.sketch)
            return
        family = record.sketch.partition(".")[0]
        rules = rules_for(self.hardware)
        for name in sorted(rules, key=lambda name: not name.endswith(family)):
            if name not in self._drawn:
                self._drawn[name] = [], iter(iter_sketches(self.task.func, self.hardware, {name: rules[name]}))
            made, more = self._drawn[name]
            yield from (s for s in made if s.name == record.sketch)
            for sketch in more:
                made.append(sketch)
                if sketch.name == record.sketch:
                    yield sketch

    def _library_stages(self, record: VariantRecord) -> tuple[Stage, ...]:
        routine = record.sketch.split("+")[0]
        form = next((f for f in self.forms if f.routine == routine), None)
        if form is None:
            raise BuildError(
                f"task {self.task.name!r}: wanted the library routine {routine!r}, which is not at hand; "
                f"{how_to_install(routine.split('.')[0])}, or build with another policy"
            )
        if not any(_same(record, own) for own in self.library_variants()):
            raise self._foreign(record)
        stages: list[Stage] = [_stage(step, self._plain(step.func)) for step in form.before]
        if form.packing is not None:
            stages.append(LibraryStage(form.packing.routine, form.packing.buffers, form.packing.scalars, once=True))
        stages.append(LibraryStage(form.routine, form.buffers, form.scalars))
        if form.after is not None:
            after = form.after.func
            if record.trace == "[]":
                stages.append(_stage(form.after, self._plain(after)))
            else:
                stages.append(_stage(form.after, replay_with(Trace.from_json(record.trace), after, record.values)))
        return tuple(stages)

    def _stages_in_parts(self, parts: UnfusedVariant) -> tuple[Stage, ...]:
        made = zip(self._parts(parts.begins), parts.variants, strict=True)
        return tuple(stage for (step, part), v in made for stage in _outside(step, part.stages(v)))

    def _plain(self, func: PrimFunc) -> PrimFunc:
        """Schedule a function that is not searched, by the first sketch that has a legal setting."""
        made = ((sketch, _first_legal(sketch)) for sketch in iter_sketches(func, self.hardware))
        return next(instantiate(sketch, values) for sketch, values in made if values is not None)

    def program(self, record: VariantRecord) -> Program:
        """Return the program that measures a variant."""
        found = self._programs.get(record.key)
        if found is None:
            stages = self.stages(record)
            found = candidate_program(self.task.func, record.kind, stages, self.target, self.task.symbol_names)
            self._programs[record.key] = found
        return found


def _stage(step: FunctionStep, scheduled: PrimFunc) -> KernelStage:
    """Return a scheduled step of a library form, in terms of the fused function's buffers and symbols."""
    return KernelStage(scheduled, dict(zip(step.func.buffers, step.args, strict=True)), _meaning(step))


def _outside(step: FunctionStep, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages of a part's variant in terms of the whole task's buffers and symbols."""
    meaning = _meaning(step)
    known = dict(zip(step.func.buffers, step.args, strict=True))

    def place(b: Buffer) -> Buffer:
        if b not in known:
            known[b] = replace(b, shape=tuple(substitute(d, meaning) for d in b.shape))
        return known[b]

    found: list[Stage] = []
    for stage in stages:
        if isinstance(stage, LibraryStage):
            scalars = tuple(substitute(e, meaning) for e in stage.scalars)
            found.append(replace(stage, buffers=tuple(map(place, stage.buffers)), scalars=scalars))
        else:
            arguments = {p: place(stage.arguments.get(p, p)) for p in stage.func.buffers}
            own = {v: substitute(e, meaning) for v, e in stage.meaning.items()} or meaning
            found.append(KernelStage(stage.func, arguments, own))
    return found


def _meaning(step: FunctionStep) -> dict[Var, Expr]:
    """Map a step's symbols to expressions over the fused function's."""
    infos = [TensorInfo(b.shape, b.dtype) for b in step.args]
    inputs = len(infos) - step.func.outputs
    return bind_symbols(step.func, infos[:inputs], infos[inputs:], step.scalars)


def points_array(points: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the anchors as an (S, D) array."""
    return np.asarray(points, dtype=np.int64).reshape(len(points), -1)


def _steps(record: VariantRecord) -> object:
    """Return a record's trace as data, since records of parts are written with blanks; None for what is no trace."""
    try:
        return json.loads(record.trace)
    except (ValueError, RecursionError):
        return None


def _same(a: VariantRecord, b: VariantRecord) -> bool:
    return (a.sketch, a.values) == (b.sketch, b.values) and _steps(a) == _steps(b)


def _first_legal(sketch: Sketch) -> Mapping[str, int] | None:
    """Return the first legal guess of a sketch, or its legal values nearest to the middle; None if none near it are."""
    domains, legal = {t.name: t.domain for t in sketch.tunables}, ConstraintFunction(sketch)
    for values in (*sketch.guesses, *_from_the_middle(domains)):
        there = all(x in domains[n] for n, x in values.items())
        if there and (not values or legal({n: np.asarray([x], np.int64) for n, x in values.items()})[0]):
            return values
    return None


def _widest(sketch: Sketch) -> Mapping[str, int]:
    """Return the first guess of a sketch, or else its widest vectors and the middle of every other domain."""
    widest = {t.name: t.domain[-1 if t.name == "VL" else len(t.domain) // 2] for t in sketch.tunables}
    return next(iter(sketch.guesses), widest)


def _from_the_middle(domains: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield the middles of all domains, then values near them by their distance in steps; at most GUESSES."""

    def distance(codes: tuple[int, ...]) -> int:
        return sum(abs(c - len(d) // 2) for c, d in zip(codes, domains.values(), strict=True))

    yield {n: d[len(d) // 2] for n, d in domains.items()}
    around = [range(max(len(d) // 2 - 2, 0), min(len(d) // 2 + 3, len(d))) for d in domains.values()]
    codes = sorted(itertools.islice(itertools.product(*around), GUESSES), key=distance)
    yield from ({n: domains[n][c] for n, c in zip(domains, row, strict=True)} for row in codes)
