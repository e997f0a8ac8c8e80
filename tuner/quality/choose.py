"""A type for each weight: measured times and losses, a walk along their front, validation on held-out samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.job import Job, WeightType, build_here
from relax_tune.tuner.job.progress import TuningSummary
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.processors import described_device
from relax_tune.tuner.quality.bound import Quality, QualityBound
from relax_tune.tuner.quality.exact_model import ExactModel
from relax_tune.tuner.quality.front import Point, TypeOption, walk
from relax_tune.tuner.quality.samples import SplitSamples
from relax_tune.tuner.quality.weight_groups import TYPES, WeightGroups
from relax_tune.tuner.settings import Policy, Settings


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound that the settings ask for, and the samples that measure it."""

    bound: QualityBound
    samples: SplitSamples


def read_goal(settings: Settings, module: IRModule, policy: Policy = "measured") -> Goal | None:
    """Return what the settings ask of the quality of a model; None if they ask nothing.

    Raises: UserError for a wrong bound, for wrong samples, and for settings that do not go with a bound.
    """
    if settings.quality is None and settings.samples is None:
        return None
    if settings.quality is None and (settings.activations, settings.weights) != ("f32", "stored"):
        if settings.samples is not None:  # refused now, not after hours of tuning
            SplitSamples.read(Path(settings.samples), module, settings.seed)
        return None
    if settings.quality is None:
        raise UserError(
            f"--samples wants --quality too, found {settings.samples!r:.80} alone; give both or neither, or --activations or --weights, "
            "whose loss samples measure"
        )
    if settings.samples is None:
        raise UserError(f"--quality wants --samples too, found {settings.quality!r:.80} alone; give both or neither")
    bound = QualityBound.parse(settings.quality)
    if policy != "measured":
        raise UserError(f"--quality chooses by measured times, found --policy {policy}; leave one of them out")
    if "," in settings.target or described_device(settings.target) is not None:
        raise UserError(
            f"--quality runs the model on one device of this machine, found --target {settings.target}; choose such a device"
        )
    for name in ("precision", "activations", "weights"):
        found = getattr(settings, name)
        if found not in ("f32", "stored"):
            raise UserError(
                f"--quality chooses a type for each weight, found --{name} {found} for all; leave one of them out"
            )
    for where in ("scheduler", "browser"):
        if getattr(settings, where) is not None:
            raise UserError(f"--quality runs the model on this machine, found --{where} too; leave one of them out")
    return Goal(bound, SplitSamples.read(Path(settings.samples), module, settings.seed))


class Choice(NamedTuple):
    """The chosen form of a model: its job, and its build, whose `quality` says how it was chosen."""

    job: Job
    built: BuildResult


@dataclass(slots=True)
class _Chosen:
    """A choice that is made. notes: what it lacked; exact_secs: seconds of all groups as they are"""

    groups: WeightGroups
    exact_secs: float
    points: list[Point[Quality]]
    notes: tuple[str, ...]

    def stored(self, kinds: Mapping[int, str]) -> dict[str, WeightType]:
        """Return the type of each weight for the types of groups."""
        return {name: cast(WeightType, kind) for group, kind in kinds.items() for name in self.groups.weights[group]}


def choose_types(
    exact: Job,
    goal: Goal,
    measure: Callable[[Job], None],
    build: Callable[[Job], BuildResult],
    say: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Return the fastest form of a model, by the times on record, that holds on the held-out samples.

    exact: the job of the model as it is. measure: measures what a job lacks. build: builds a job's model.
    say: receives a sentence about each part of the work.

    Raises: UserError for a model whose results cannot be compared.
    """
    measure(exact)
    built = build(exact)
    model = ExactModel(exact.module, exact.artifact(built), exact.settings.target, goal.bound, goal.samples)
    found = _front(exact, model, measure, say)
    for number in reversed(range(1, len(found.points))):
        stored = found.stored(found.points[number].kinds)
        if not model.predict_held_out(stored).holds:  # not worth a build
            continue
        say(f"validating {_counts(stored)} on {len(model.held_out)} held-out samples")
        job = replace(exact, stored=stored)
        measure(job)
        lower = build(job)
        quality = model.validate(job.artifact(lower))
        if quality.holds:
            return Choice(job, _documented(lower, goal, found, number, quality))
    return Choice(exact, _documented(built, goal, found, 0, model.validate(model.artifact)))


def _front(exact: Job, model: ExactModel, measure: Callable[[Job], None], say: Callable[[str], None]) -> _Chosen:
    """Measure the kernels and the loss of each type in each group, and walk along their front."""
    groups = WeightGroups(exact)
    for kind, job in groups.jobs.items():
        say(f"kernels that read weights stored as {kind}")
        measure(job)
    own = [t.secs for t in groups.times(None)]
    times = {kind: groups.times(kind) for kind in TYPES}
    found = _Chosen(groups, sum(s or 0.0 for s in own), [], ())
    known: dict[frozenset[tuple[int, str]], Quality] = {}

    def quality(kinds: Mapping[int, str]) -> Quality:
        key = frozenset(kinds.items())
        if key not in known:
            known[key] = model.predict_choosing(found.stored(kinds))
        return known[key]

    say(f"losses of {len(own)} groups of weights on {len(model.choosing)} samples")
    options: list[list[TypeOption]] = [[] for _ in own]
    lacking: Counter[str] = Counter()
    for number, before in enumerate(own):
        for kind in TYPES:
            time = times[kind][number]
            if not time.stored:
                continue
            if before is None or time.secs is None:
                lacking[kind] += 1
            elif time.secs < before and all(model.can_store(name, kind) for name in groups.weights[number]):
                options[number].append(TypeOption(kind, time.secs, quality({number: kind}).used))
    found.points = walk([s or 0.0 for s in own], options, quality, lambda q: q.holds, lambda q: q.used)
    found.notes = tuple(
        f"{kind}: no times on record for {count} of {len(own)} groups of weights; run `relax-tune tune --quality` to measure some"
        for kind, count in lacking.items()
    )
    return found


def _documented(built: BuildResult, goal: Goal, found: _Chosen, chosen: int, quality: Quality) -> BuildResult:
    """Return a build that says how its types were chosen."""
    stored = found.stored(found.points[chosen].kinds)
    front = [
        {
            "secs": found.exact_secs - point.saved,
            "quality": dict(point.quality.values),
            "types": dict(sorted(Counter(found.stored(point.kinds).values()).items())),
        }
        for point in found.points
    ]
    document: dict[str, Any] = {
        "bound": goal.bound.text,
        "samples": {"choosing": len(goal.samples.choosing), "held_out": len(goal.samples.held_out)},
        "weights": sum(map(len, found.groups.weights)),
        "types": dict(sorted(stored.items())),
        "front": front,
        "chosen": chosen,
        "held_out": dict(quality.values),
    }
    return replace(built, notes=(*built.notes, *found.notes), quality=document)


def _counts(stored: Mapping[str, WeightType]) -> str:
    return ", ".join(f"{count} weights as {kind}" for kind, count in sorted(Counter(stored.values()).items()))


@dataclass(slots=True)
class _Shares:
    """Limits of the settings, shared out among the jobs that are still to come.

    jobs: number of jobs to come; spent: counts of the jobs so far
    """

    jobs: int
    spent: TuningSummary = field(default_factory=TuningSummary)

    def limit(self, job: Job) -> Job:
        """Return the job within its share of `max_minutes` and `budget`."""
        settings, left = job.settings, max(self.jobs, 1)
        self.jobs -= 1
        if settings.max_minutes is not None:
            rest = settings.max_minutes - self.spent.wall_secs / 60
            settings = replace(settings, max_minutes=max(rest / left, 1e-3))
        if settings.budget is not None:
            settings = replace(settings, budget=max(settings.budget - self.spent.trials, 0) // left)
        return job if settings is job.settings else replace(job, settings=settings)

    def add(self, work: TuningSummary) -> None:
        for name in ("trials", "measurements", "failures", "wall_secs", "compiles", "problems"):
            setattr(self.spent, name, getattr(self.spent, name) + getattr(work, name))


def tuned_choice(
    job: Job,
    goal: Goal,
    runner: Runner,
    say: Callable[[str], None] = lambda _: None,
    watching: Callable[[Job], AbstractContextManager[object]] = nullcontext,
) -> tuple[Choice, TuningSummary]:
    """Choose types for a job's model, and measure the kernels of each type first. Return the counts of all measurements.

    watching: entered while a job is tuned. The jobs share `max_minutes` and `budget`.
    """
    shares = _Shares(len(TYPES) + 2)

    def measure(own: Job) -> None:
        limited = shares.limit(own)
        with watching(limited):
            shares.add(limited.tune(runner))

    return choose_types(job, goal, measure, lambda own: own.tested_build(runner), say), shares.spent


def built_choice(
    job: Job, goal: Goal, notes: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> Choice:
    """Choose types for a job's model by the times on record. notes: come before those of the build"""
    return choose_types(job, goal, lambda _: None, lambda own: build_here(own, "measured", tuple(notes)), say)
