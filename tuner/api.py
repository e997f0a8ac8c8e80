"""The Python interface of `import relax_tune as rt`: `rt.tune`, `rt.build`, `rt.replace_weights`, `rt.submit`. Commands use its parts.

Settings come from arguments only; no variable and no file is read (the command line reads them, see `tuner/settings`).

Tests: `tests/tuner/e2e/test_api.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Union

from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.jobs.submitted import ATTEMPTS, SubmittedJob
from relax_tune.database.records import Target
from relax_tune.errors import UserError, warn
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import ModelSource, load_model
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.summary import Facts, Summarised, counted, listed
from relax_tune.tuner.emit.build import BuildResult, check_policy
from relax_tune.tuner.emit.unmeasured import MORE, check_required, other_notes, unmeasured_warning
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import (
    check_submitted,
    compiled_kinds,
    open_runner,
    target_names,
    with_concrete_target,
)
from relax_tune.tuner.job.job import Build, Job, device_infos, job_for
from relax_tune.tuner.job.lowered_model import Bounds
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.job.replaced_weights import stored_import, with_arrays, with_model
from relax_tune.tuner.job.stores import Database, opened_store
from relax_tune.tuner.measure.cluster.address import check_needed
from relax_tune.tuner.option import Command
from relax_tune.tuner.plan.task_rows import TaskRow, task_rows
from relax_tune.tuner.quality.activation_loss import with_activation_loss
from relax_tune.tuner.quality.choose import built_choice, read_goal, tuned_choice
from relax_tune.tuner.report.progress import ProgressBar
from relax_tune.tuner.report.texts import seconds_text
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.service.submission import SubmitOptions, submit_model
from relax_tune.tuner.settings import Policy, Settings, merge_settings, shows_settings

Model = Union[IRModule, ModelSource]
_SHOWN = 5
"""The most notes of one call that become warnings each."""


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult(Summarised):
    """The outcome of a tuning job, and the state of the model's tasks.

    Attributes:
        target: Identity of the device; `Store.query` takes `target.key`.
        tasks: A row per tensor function, the costliest first.
        work: Counts of this job's measurements.
        notes: What tasks lack, one sentence each.
        quality: Types chosen for weights under the requested bound, as in an artifact's manifest; None without a bound.
    """

    target: Target
    tasks: tuple[TaskRow, ...]
    work: TuningSummary
    notes: tuple[str, ...]
    quality: Mapping[str, Any] | None = None

    def _summary(self) -> tuple[str, Facts]:
        lacking = [row.name for row in self.tasks if row.secs is None]
        names = f"; not {listed(lacking)}" if lacking else ""
        work, secs = self.work, self.secs
        return f"TuneResult on {self.target.kind}, {self.target.name}", [
            ("tasks", f"{len(self.tasks) - len(lacking)} of {len(self.tasks)} measured{names}"),
            ("model", "unknown time" if secs is None else f"{seconds_text(secs)} for one run"),
            (
                "work",
                f"{counted(work.measurements, 'new measurement')} of {counted(work.trials, 'candidate')}, {work.failures} failed, "
                f"in {work.wall_secs:.0f} s",
            ),
            *[("note", note) for note in self.notes[:3]],
        ]

    @property
    def secs(self) -> float | None:
        """Seconds of all calls in one run of the model with the dispatched variants, weighted over the tuned ranges.

        None when a dispatched variant has no time.
        """
        parts = [row.secs for row in self.tasks]
        return None if None in parts else sum(p for p in parts if p is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "target": {"kind": self.target.kind, "name": self.target.name, "key": self.target.key},
            **{name: value for name, value in asdict(self.work).items() if name != "problems"},
            "problems": [{"task": name, "why": why} for name, why in self.work.problems],
            "tasks": [row.to_json() for row in self.tasks],
            "notes": list(self.notes),
            **({} if self.quality is None else {"quality": dict(self.quality)}),
        }


@shows_settings("tune")
def tune(
    model: Model,
    *,
    settings: Settings | None = None,
    db: Database = None,
    bounds: Bounds | None = None,
    rules: Sequence[Rule] = (),
    on_progress: Callable[[TuningProgress], None] | None = None,
    progress: bool = False,
    require_measured: bool = False,
    **overrides: Any,
) -> TuneResult:
    """Measure kernels for every task of a model. Recorded measurements are not repeated, so an interrupted job continues.

    Notes, such as tasks without a usable record or a busy machine, are `RelaxTuneWarning`s too, and go to the logger `relax_tune`.

    Args:
        model: A path or exported program (as for `load_model`), or a module.
        settings: Options of the job; None: the defaults.
        db: An open store, a URL or a file; None: the settings' database.
        bounds: Inclusive ranges by symbol, for a model that is loaded by this call.
        rules: Rewriting rules of the caller (`rewrite.Rule`), each applied at its level. Build with the same rules.
        on_progress: Called after every batch.
        progress: Show a bar of the tasks that are done, with the speed of the model and the time left, on stderr or in a notebook.
        require_measured: A task that has no usable record in the end is an error.
        overrides: Fields of `Settings` by name, such as `target="c"`; they override `settings`. Files may be a `Path`.

    Raises:
        UserError: An argument is wrong.
        ParseError: The path has no model.
        VerifyError: The module is not well-formed.
        MeasureError: The device cannot measure.
        BuildError: Required records are missing in the end.
        DatabaseError: Records cannot be stored. Failing candidates and tasks become records and notes, not errors.
    """
    chosen = _settings("tune", settings, overrides)
    check_strategy(chosen.strategy)
    check_needed(chosen.scheduler, chosen.ca, *(() if chosen.browser else (chosen.certificate, chosen.key)))
    if len(target_names(chosen.target)) > 1:
        raise UserError(f"rt.tune expects one target, got {chosen.target}; `relax-tune tune --target` takes several")
    module = _module(model, bounds, chosen)
    tell = partial(print, file=sys.stderr) if chosen.browser else lambda _: None  # somebody has to open the address
    goal = read_goal(chosen, module)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(contextlib.closing(open_runner(chosen, tell)))
        device = runner.device_info()  # no database is created for a missing device
        with opened_store(chosen.db if db is None else db, wait_secs=chosen.wait_secs) as (store, _):
            listeners = [] if on_progress is None else [on_progress]
            if progress:
                listeners.append(stack.enter_context(ProgressBar()).report)
            report = partial(_report, listeners)
            job = device_job(module, device, store, chosen, rules)
            if goal is None:
                work, built = job.tune(runner, report), job.build()
            else:
                (job, built), work = tuned_choice(job, goal, runner, watch=lambda _: nullcontext(report))
            job.store_plans(built)
            unmeasured_warning([built.plans], "measured", store, chosen.target, require_measured, MORE)
            _warn_of((*work.notes(), *built.notes))
            return tune_result(job, work, built)


@shows_settings("build")
def build(
    model: Model,
    *,
    settings: Settings | None = None,
    db: Database = None,
    bounds: Bounds | None = None,
    policy: Policy = "measured",
    rules: Sequence[Rule] = (),
    pack: bool | None = None,
    cpu: Sequence[str] = (),
    require_measured: bool = False,
    **overrides: Any,
) -> Artifact:
    """Build the artifact of a model from records, without timing anything. `Artifact.notes` names what tasks lack.

    A `RelaxTuneWarning` says how many tasks have no usable record, unless the database is `memory://`; other notes are warnings too,
    and all go to the logger `relax_tune`. Every kernel runs against the reference first, in a separate process, unless
    `self_test=False`.

    Args:
        model, settings, bounds, rules, overrides: As for `tune`. Effort, precision and profile should be as when the model was tuned.
        db: As for `tune`, but only read; a file that is named has to exist.
        policy: `measured` dispatches the fastest variants on record, `stored` the plans that `tune` chose last, `library` library
            calls where there are any, `generic` untuned kernels only.
        pack: Store weights in the layouts of the chosen kernels, in place of weights that no other kernel reads; None: only on
            target `c`. Otherwise they are packed whenever the artifact is opened. The file is larger if kernels with several layouts
            alternate.
        cpu: Kinds of processors that kernels of target `c` are also compiled for, so that a server needs no compiler: levels of
            x86-64 such as `x86-64-v3`, and `native`. See `Artifact.compiled_for`.
        require_measured: A task without a usable record is an error.

    Raises:
        UserError, ParseError, VerifyError, DatabaseError: As for `tune`.
        BuildError: The model cannot be built, or required records are missing.
    """
    chosen = _settings("build", settings, overrides)
    module = _module(model, bounds, chosen)
    checked_policy = check_policy(policy)
    check_required(require_measured, checked_policy, "require_measured")
    kinds = compiled_kinds(cpu, chosen.target)
    goal = read_goal(chosen, module, checked_policy)
    with opened_store(chosen.db if db is None else db, read_only=True) as (store, notes):
        job = job_for(module, device_infos(chosen.target, store), store, chosen, rules)
        if pack:
            job.only("pack")
        if goal is None:
            build = job.build(checked_policy, notes, with_activation_loss)
        else:
            part, built = built_choice(job.only("--quality"), goal, notes)
            job, build = Job.of(part), Build.of(part, built)
        warning = unmeasured_warning(build.plans, checked_policy, store, chosen.target, require_measured)
        _warn_of((*([] if warning is None else [warning]), *other_notes(build.notes, build.plans)))
        artifact = job.artifact(build, pack)
        return artifact.compiled_for(kinds) if kinds else artifact


def replace_weights(
    artifact: Artifact | str | Path,
    weights: Model | Mapping[str, Any],
    *,
    bounds: Bounds | None = None,
    rules: Sequence[Rule] = (),
    **options: Any,
) -> Artifact:
    """Return a built artifact with the weights of another checkpoint. Nothing is timed or compiled.

    Programs, kernels and plans stay as they are, and weights that the build packed or computed with are computed again.
    `Model.replace_weights` takes the result while the model is open.

    Args:
        artifact: An artifact, or its file.
        weights: A path or module of the same structure, as for `build`; or some arrays, by the names of `Artifact.constants` and of
            weights that are packed there.
        bounds: As for `load_model`; None: the bounds that the artifact was built for.
        rules: The rewriting rules that the artifact was built with.
        options: Further arguments of `load_model`, such as `adapter`, `pooling` and `trust`.

    Raises:
        UserError: A name, a shape or a type differs, or the model becomes another program.
        ParseError: The path has no model.
        ArtifactError: There is no artifact, or one from an earlier version.
    """
    built = artifact if isinstance(artifact, Artifact) else load_artifact(artifact)
    if isinstance(weights, Mapping):
        return with_arrays(built, weights)
    if not isinstance(weights, IRModule):
        stored = stored_import(built)
        given = {**stored, **options, **({} if bounds is None else {"bounds": bounds})}
        return with_model(built, load_model(weights, **given), rules)
    if bounds is not None or options:
        raise UserError("bounds and options apply to a model that is loaded, got a module; give them to load_model")
    return with_model(built, weights, rules)


def _report(listeners: Sequence[Callable[[TuningProgress], None]], news: TuningProgress) -> None:
    for listener in listeners:
        listener(news)


def _warn_of(notes: Sequence[str]) -> None:
    """Warn of the first notes; the result has all."""
    for note in notes[:_SHOWN]:
        warn(note)
    if len(notes) > _SHOWN:
        warn(f"{len(notes) - _SHOWN} more notes are in the field `notes` of the result")


@shows_settings("submit")
def submit(
    model: Model,
    *,
    settings: Settings | None = None,
    db: str | Path | None = None,
    bounds: Bounds | None = None,
    priority: int = 0,
    note: str = "",
    user: str | None = None,
    attempts: int = ATTEMPTS,
    **overrides: Any,
) -> SubmittedJob:
    """Queue a model to be tuned by a service (`relax-tune jobs work`). The job's `id` is what `relax-tune jobs` takes.

    Args:
        model, settings, bounds, overrides: As for `tune`; the setting `files` is where the model's files are stored for services.
        db: URL or file of the database; None: the settings' database.
        priority: Jobs with a higher number run first.
        note: Text for people.
        user: Owner of the job; None: the user of this process.
        attempts: Services that may fail while they run the job before it is given up.

    Raises:
        UserError: An argument is wrong, or there is no model.
        DatabaseError: The job cannot be queued.
        FilesAway: Its files cannot be stored.
    """
    chosen = _settings("submit", settings, {**overrides, **({} if db is None else {"db": str(db)})})
    check_strategy(chosen.strategy)
    if isinstance(model, IRModule):
        model = _module(model, bounds, chosen)
    with open_queue(chosen.db, create=True, wait_secs=chosen.wait_secs) as queue:
        return submit_model(queue, model, chosen, bounds, SubmitOptions(priority, note, user, attempts))


def _settings(command: Command, settings: Settings | None, overrides: Mapping[str, Any]) -> Settings:
    paths = {n: str(p) for n in ("profile", "samples", "adapter") if isinstance(p := overrides.get(n), Path)}
    merged = merge_settings(command, settings, {**overrides, **paths})
    if command == "submit":
        check_submitted(merged)
        return merged
    return with_concrete_target(merged)


def tune_result(job: DeviceJob, work: TuningSummary, built: BuildResult) -> TuneResult:
    """Summarise a job from its store."""
    records = {name: job.records(c.task.key, c.task.regime) for name, c in job.task_variants.items()}
    return TuneResult(job.target, task_rows(job.task_variants, built.plans, records), work, built.notes, built.quality)


def _module(model: Model, bounds: Bounds | None, settings: Settings) -> IRModule:
    if not isinstance(model, IRModule):
        return load_model(model, bounds, **settings.import_options)
    if bounds is not None:
        raise UserError(
            "bounds apply to a model that is loaded, got a module; give them to load_model, or to "
            "the builder of the module"
        )
    verify(model)  # its tensor functions may be anybody's
    examine(model)
    return model
