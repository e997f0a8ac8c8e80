"""The Python interface of `import relax_tune as rt`: `rt.tune`, `rt.build`, `rt.submit`. The commands use the same parts.

Settings come from arguments only; no variable and no file is read (the command line reads them, see `tuner/settings`).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Union

from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.jobs.submitted import ATTEMPTS, SubmittedJob
from relax_tune.database.records import Target
from relax_tune.database.store import Store, open_records, open_store
from relax_tune.errors import UserError
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import ModelSource, load_model
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.emit.build import BuildResult, check_policy
from relax_tune.tuner.job.job import Bounds, Job, build_here, device_info, open_runner
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.measure.cluster.address import check_needed
from relax_tune.tuner.option import Command
from relax_tune.tuner.placement.placed_job import devices_named, names_several, placed_job
from relax_tune.tuner.plan.task_rows import TaskRow, task_rows
from relax_tune.tuner.quality.activation_loss import with_activation_loss
from relax_tune.tuner.quality.choose import built_choice, read_goal, tuned_choice
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.service.submission import Wishes, submit_model
from relax_tune.tuner.settings import Policy, Settings, merge_settings, settings_taken_by

Model = Union[IRModule, ModelSource]
Database = Store | str | Path | None
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The outcome of a tuning job, and the state of the model's tasks.

    target: identity of the device; `Store.query` takes `target.key`
    tasks: a row per tensor function, the costliest first
    work: measurements of this job
    notes: a sentence for each thing that a task lacks
    quality: types chosen for weights under the bound that was asked for, as an artifact's manifest has them; else None
    """

    target: Target
    tasks: tuple[TaskRow, ...]
    work: TuningSummary
    notes: tuple[str, ...]
    quality: Mapping[str, Any] | None = None

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


def _shows_settings(command: Command) -> Callable[[F], F]:
    """Make a decorator that adds a function's settings to its signature, for `help` and editors."""

    def decorate(function: F) -> F:
        defaults = {f.name: f.default for f in fields(Settings)}
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        names = [n for n in settings_taken_by(command) if n not in signature.parameters]
        more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=defaults[n]) for n in names]
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *more])
        return function

    return decorate


@_shows_settings("tune")
def tune(
    model: Model,
    *,
    settings: Settings | None = None,
    db: Database = None,
    bounds: Bounds | None = None,
    rules: Sequence[Rule] = (),
    on_progress: Callable[[TuningProgress], None] | None = None,
    **overrides: Any,
) -> TuneResult:
    """Measure kernels for every task of a model. Recorded measurements are not repeated, so an interrupted job goes on.

    model: a path or exported program (as `load_model`), or a module.
    settings: options of the job; None takes the defaults.
    db: an open store, a URL, a file, or None for the settings' database.
    bounds: inclusive ranges by symbol, for a model that is loaded here.
    rules: rewriting rules of the caller (`rewrite.Rule`), each applied at its level; build with the same.
    on_progress: called after every batch.
    overrides: fields of `Settings` by name, over `settings`, such as `target="c"`. profile and samples may be a `Path`.

    Raises: UserError for a wrong argument, ParseError for a path without a model, VerifyError for a module that is not
    well-formed. MeasureError when the device cannot measure, DatabaseError when records cannot be kept. Failing candidates
    and tasks are records and notes, not errors.
    """
    chosen = _settings("tune", settings, overrides)
    check_strategy(chosen.strategy)
    check_needed(chosen.scheduler, chosen.ca, *(() if chosen.browser else (chosen.certificate, chosen.key)))
    if names_several(chosen.target):
        raise UserError(f"rt.tune wants one target, found {chosen.target}; `relax-tune tune --target` takes several")
    module = _module(model, bounds, chosen)
    tell = partial(print, file=sys.stderr) if chosen.browser else lambda _: None  # somebody has to open the address
    goal = read_goal(chosen, module)
    with contextlib.closing(open_runner(chosen, tell)) as runner:
        device = runner.device_info()  # no database is made for a missing device
        with _store(chosen.db if db is None else db, wait_secs=chosen.wait_secs) as (store, _):
            job = Job(module, device, store, chosen, on_progress or (lambda _: None), rules=rules)
            if goal is None:
                work, built = job.tune(runner), job.build()
            else:
                (job, built), work = tuned_choice(job, goal, runner)
            job.store_plans(built)
            return tune_result(job, work, built)


@_shows_settings("build")
def build(
    model: Model,
    *,
    settings: Settings | None = None,
    db: Database = None,
    bounds: Bounds | None = None,
    policy: Policy = "measured",
    rules: Sequence[Rule] = (),
    pack: bool = False,
    **overrides: Any,
) -> Artifact:
    """Build the artifact of a model from records, without timing anything. `Artifact.notes` names what tasks lack.

    Every kernel runs against the reference first, in a process of its own, unless `self_test=False`.

    Arguments as of `tune`. Effort, precision and profile are to be as they were when the model was tuned.
    db: as of `tune`; it is only read. A file that is not yet in its folder is an empty database, which a note says.
    policy: `measured` dispatches the fastest on record, `stored` what `tune` chose last, `library` a library call where a
    library has one, `generic` untuned kernels only.
    pack: store weights in the layouts of the chosen kernels, in place of weights that nothing else reads. Otherwise
        they are packed whenever the artifact is opened, and then take memory twice. The file is larger where kernels of
        several layouts take turns.

    Raises: UserError, ParseError, VerifyError and DatabaseError as `tune`; BuildError for a model that cannot be built.
    """
    chosen = _settings("build", settings, overrides)
    module = _module(model, bounds, chosen)
    goal = read_goal(chosen, module, check_policy(policy))
    with _store(chosen.db if db is None else db, read_only=True) as (store, notes):
        if names_several(chosen.target):
            if pack:
                raise UserError("pack wants one target, found several; leave it out")
            placed = placed_job(module, devices_named(chosen.target), store, chosen, rules)
            return placed.artifact(placed.build(check_policy(policy), notes))
        job = Job(module, device_info(chosen.target, store), store, chosen, rules=rules)
        if goal is not None:
            job, built = built_choice(job, goal, notes)
            return job.artifact(built, pack)
        return job.artifact(with_activation_loss(job, build_here(job, check_policy(policy), notes)), pack)


@_shows_settings("submit")
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

    model, settings, bounds, overrides: as of `tune`; `files` says where the model's files are kept for the services
    db: the URL or the file of the database; None for the settings' one
    priority: jobs of a higher number go first. note, user: words for people, and whose job it is
    attempts: services that the job may lose before it is given up

    Raises: UserError for a wrong argument or no model, DatabaseError when the job cannot be queued, FilesAway when its files
    cannot be stored.
    """
    chosen = _settings("submit", settings, {**overrides, **({} if db is None else {"db": str(db)})})
    check_strategy(chosen.strategy)
    if isinstance(model, IRModule):
        model = _module(model, bounds, chosen)
    with open_queue(chosen.db, create=True, wait_secs=chosen.wait_secs) as queue:
        return submit_model(queue, model, chosen, bounds, Wishes(priority, note, user, attempts))


def _settings(command: Command, settings: Settings | None, overrides: Mapping[str, Any]) -> Settings:
    paths = {n: str(p) for n in ("profile", "samples") if isinstance(p := overrides.get(n), Path)}
    return merge_settings(command, settings, {**overrides, **paths})


def tune_result(job: Job, work: TuningSummary, built: BuildResult) -> TuneResult:
    """Summarise a job from its store."""
    records = {name: job.records(c.task.key, c.task.regime) for name, c in job.choices.items()}
    return TuneResult(job.target, task_rows(job.choices, built.plans, records), work, built.notes, built.quality)


def _module(model: Model, bounds: Bounds | None, settings: Settings) -> IRModule:
    if not isinstance(model, IRModule):
        return load_model(model, bounds, settings.cache_dtype, trust=settings.trust_model)
    if bounds is not None:
        raise UserError(
            "bounds belong to the loading of a model, found them beside a loaded module; give them to load_model, or to "
            "the builder that made the module"
        )
    verify(model)  # its tensor functions may be anybody's
    examine(model)
    return model


@contextlib.contextmanager
def _store(
    db: Database, read_only: bool = False, wait_secs: float | None = None
) -> Iterator[tuple[Store, tuple[str, ...]]]:
    """Open the store of a database, with notes about it; a store that the caller opened stays open."""
    if db is None or isinstance(db, (str, Path)):
        url = None if db is None else str(db)
        store, notes = open_records(url) if read_only else (open_store(url, wait_secs=wait_secs), ())
        with store:
            yield store, notes
    elif hasattr(db, "query"):
        yield db, ()
    else:
        raise UserError(f"db: wanted an open store, a URL or the path of a file, found a {type(db).__name__}")
