"""A type for each weight: measured times and losses, a walk along their front, validation on further samples."""

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
from relax_tune.tuner.job.device_job import DeviceJob, build_here
from relax_tune.tuner.job.devices import target_names
from relax_tune.tuner.job.job import Report
from relax_tune.tuner.job.lowered_model import WeightType
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
    """Return the bound on the quality of a model in the settings; None without one.

    Raises:
        UserError: The bound or the samples are wrong, or another setting excludes a bound.
    """
    if settings.quality is None and settings.samples is None:
        return None
    if settings.quality is None and (settings.activations, settings.weights) != ("f32", "stored"):
        if settings.samples is not None:  # refused now, not after hours of tuning
            SplitSamples.read(Path(settings.samples), module, settings.seed)
        return None
    if settings.quality is None:
        raise UserError(
            f"--samples expects --quality too, got no bound for {settings.samples!r:.80}; give both or neither, or "
            "--activations or --weights, whose loss samples measure"
        )
    if settings.samples is None:
        raise UserError(
            f"--quality expects --samples too, got no samples for {settings.quality!r:.80}; give both or neither"
        )
    bound = QualityBound.parse(settings.quality)
    if policy != "measured":
        raise UserError(f"--quality chooses by measured times, got --policy {policy}; leave one of them out")
    if len(target_names(settings.target)) > 1 or described_device(settings.target) is not None:
        raise UserError(
            f"--quality runs the model on one device of this machine, got --target {settings.target}; choose such a device"
        )
    for name in ("precision", "activations", "weights"):
        value = getattr(settings, name)
        if value not in ("f32", "stored"):
            raise UserError(
                f"--quality chooses a type for each weight, got --{name} {value} for all; leave one of them out"
            )
    for where in ("scheduler", "browser"):
        if getattr(settings, where) is not None:
            raise UserError(f"--quality runs the model on this machine, got --{where} too; leave one of them out")
    return Goal(bound, SplitSamples.read(Path(settings.samples), module, settings.seed))


class Choice(NamedTuple):
    """The chosen form of a model: its job, and its build, whose `quality` describes the choice."""

    job: DeviceJob
    built: BuildResult


@dataclass(slots=True)
class _Front:
    """The front of time and loss of a model.

    Attributes:
        exact_secs: Seconds of all groups with their declared types.
        notes: What the front lacks.
    """

    groups: WeightGroups
    exact_secs: float
    points: list[Point[Quality]]
    notes: tuple[str, ...]

    def stored(self, kinds: Mapping[int, str]) -> dict[str, WeightType]:
        """Return the type of each weight for the types of groups."""
        return {name: cast(WeightType, kind) for group, kind in kinds.items() for name in self.groups.weights[group]}


def choose_types(
    exact: DeviceJob,
    goal: Goal,
    measure: Callable[[DeviceJob], None],
    build: Callable[[DeviceJob], BuildResult],
    say: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Return the fastest form of a model, by the times on record, that satisfies the bound on the validation samples.

    Args:
        exact: The job of the model with its declared types.
        measure: Measures what a job lacks.
        build: Builds a job's model.
        say: Receives a sentence about each part of the work.

    Raises:
        UserError: The model's results cannot be compared.
    """
    measure(exact)
    built = build(exact)
    model = ExactModel(exact.module, exact.artifact(built, pack=False), exact.settings.target, goal.bound, goal.samples)
    front = _front(exact, model, measure, say)
    # From the fastest choice towards the exact one. A prediction by rounded weights is cheap and skips choices that
    # cannot hold.
    for number in reversed(range(1, len(front.points))):
        stored = front.stored(front.points[number].kinds)
        if not model.predict_validation(stored).holds:  # not worth a build
            continue
        say(f"validating {_counts(stored)} on {len(model.validation)} validation samples")
        job = exact.storing(stored)
        measure(job)
        lower = build(job)
        quality = model.validate(job.artifact(lower))
        if quality.holds:
            return Choice(job, _documented(lower, goal, front, number, quality))
    return Choice(exact, _documented(built, goal, front, 0, model.validate(model.artifact)))


def _front(
    exact: DeviceJob, model: ExactModel, measure: Callable[[DeviceJob], None], say: Callable[[str], None]
) -> _Front:
    """Measure the kernels and the loss of each type in each group, and walk along their front."""
    groups = WeightGroups(exact)
    for kind, job in groups.jobs.items():
        say(f"kernels that read weights stored as {kind}")
        measure(job)
    exact_times = [t.secs for t in groups.times(None)]
    times = {kind: groups.times(kind) for kind in TYPES}
    front = _Front(groups, sum(s or 0.0 for s in exact_times), [], ())
    # Each measurement runs the model on all samples, and the walk asks for some choices twice.
    known: dict[frozenset[tuple[int, str]], Quality] = {}

    def quality(kinds: Mapping[int, str]) -> Quality:
        key = frozenset(kinds.items())
        if key not in known:
            known[key] = model.predict_choosing(front.stored(kinds))
        return known[key]

    say(f"losses of {len(exact_times)} groups of weights on {len(model.choosing)} samples")
    options: list[list[TypeOption]] = [[] for _ in exact_times]
    lacking: Counter[str] = Counter()
    for number, before in enumerate(exact_times):
        for kind in TYPES:
            time = times[kind][number]
            if not time.stored:
                continue
            if before is None or time.secs is None:
                lacking[kind] += 1
            # A type that saves no time is never worth its loss.
            elif time.secs < before and all(model.can_store(name, kind) for name in groups.weights[number]):
                options[number].append(TypeOption(kind, time.secs, quality({number: kind}).used))
    front.points = walk([s or 0.0 for s in exact_times], options, quality, lambda q: q.holds, lambda q: q.used)
    front.notes = tuple(
        f"{kind}: no times on record for {count} of {len(exact_times)} groups of weights; run `relax-tune tune --quality` to measure some"
        for kind, count in lacking.items()
    )
    return front


def _documented(built: BuildResult, goal: Goal, chosen_front: _Front, chosen: int, quality: Quality) -> BuildResult:
    """Return the build with a description of how its types were chosen."""
    stored = chosen_front.stored(chosen_front.points[chosen].kinds)
    front = [
        {
            "secs": chosen_front.exact_secs - point.saved,
            "quality": dict(point.quality.values),
            "types": dict(sorted(Counter(chosen_front.stored(point.kinds).values()).items())),
        }
        for point in chosen_front.points
    ]
    document: dict[str, Any] = {
        "bound": goal.bound.text,
        "samples": {"choosing": len(goal.samples.choosing), "held_out": len(goal.samples.validation)},
        "weights": sum(map(len, chosen_front.groups.weights)),
        "types": dict(sorted(stored.items())),
        "front": front,
        "chosen": chosen,
        "held_out": dict(quality.values),
    }
    return replace(built, notes=(*built.notes, *chosen_front.notes), quality=document)


def _counts(stored: Mapping[str, WeightType]) -> str:
    return ", ".join(f"{count} weights as {kind}" for kind, count in sorted(Counter(stored.values()).items()))


@dataclass(slots=True)
class _Shares:
    """Limits of the settings, shared out among the jobs that are still to come.

    Attributes:
        jobs: Number of jobs to come.
        spent: Counts of the jobs so far.
    """

    jobs: int
    spent: TuningSummary = field(default_factory=TuningSummary)

    def limit(self, job: DeviceJob) -> DeviceJob:
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
    job: DeviceJob,
    goal: Goal,
    runner: Runner,
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[DeviceJob], AbstractContextManager[Report]] = lambda _: nullcontext(lambda _: None),
) -> tuple[Choice, TuningSummary]:
    """Measure the kernels of each type, and choose types for a job's model. Returns the counts of all measurements, too.

    The jobs of all types share `max_minutes` and `budget`.

    Args:
        watch: Entered while a job is tuned; gives what is called after every batch.
    """
    shares = _Shares(len(TYPES) + 2)

    def measure(own: DeviceJob) -> None:
        limited = shares.limit(own)
        with watch(limited) as report:
            shares.add(limited.tune(runner, report, say))

    return choose_types(job, goal, measure, lambda own: own.tested_build(runner), say), shares.spent


def built_choice(
    job: DeviceJob, goal: Goal, notes: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> Choice:
    """Choose types for a job's model by the times on record.

    Args:
        notes: Precede the notes of the build.
    """
    return choose_types(job, goal, lambda _: None, lambda own: build_here(own, "measured", tuple(notes)), say)
