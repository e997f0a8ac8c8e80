"""The Python interface, as `import relax_tune as rt` gives it: `rt.tune`, `rt.build`. The commands are made of the same parts.

Settings come from arguments alone; no variable and no file is read (the command line reads them, see `tuner/settings`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Union

from relax_tune.database.records import Target
from relax_tune.database.store import Store, open_store
from relax_tune.errors import UserError
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import ModelSource, load_model
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.cli.report.table import TaskRow, task_rows
from relax_tune.tuner.emit.build import BuildResult, check_policy
from relax_tune.tuner.job.job import Bounds, Job, device_info, open_runner
from relax_tune.tuner.job.loop import TuningProgress, TuningSummary
from relax_tune.tuner.measure.cluster_address import check_needed
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.settings import AttentionForm, Caches, Effort, Memory, Policy, Precision, Qkv, Settings

Model = Union[IRModule, ModelSource]
Database = Store | str | Path | None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a tuning job did, and what is known of the model's tasks now.

    target: the identity of the device; `target.key` is what `Store.query` wants. tasks: a row per tensor function, the
    costliest first. work: what was measured this time. notes: a sentence for whatever a task lacks.
    """

    target: Target
    tasks: tuple[TaskRow, ...]
    work: TuningSummary
    notes: tuple[str, ...]

    @property
    def secs(self) -> float | None:
        """Seconds all calls of one run of the model take with what is dispatched, weighted over the tuned ranges; None
        when something dispatched has no time."""
        parts = [row.secs for row in self.tasks]
        return None if None in parts else sum(p for p in parts if p is not None)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "target": {"kind": self.target.kind, "name": self.target.name, "key": self.target.key},
            **{name: value for name, value in asdict(self.work).items() if name != "problems"},
            "problems": [{"task": name, "why": why} for name, why in self.work.problems],
            "tasks": [row.to_json() for row in self.tasks],
            "notes": list(self.notes),
        }


def tune(
    model: Model,
    *,
    target: str = "opencl",
    db: Database = None,
    bounds: Bounds | None = None,
    effort: Effort = "normal",
    trials: int | None = None,
    seed: int = 0,
    strategy: str = "evolution",
    scheduler: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    precision: Precision = "f32",
    qkv: Qkv = "separate",
    attention: AttentionForm = "fused",
    caches: Caches = "warm",
    profile: str | Path | None = None,
    rules: Sequence[Rule] = (),
    on_progress: Callable[[TuningProgress], None] | None = None,
) -> TuneResult:
    """Measure kernels for every task of a model. What the database holds already is not measured again, so a job that was
    interrupted goes on where it was.

    model: a path or exported program (as `load_model`), or a module. target: `c`, `opencl`, `opencl:PART` or
    `cuda:NUMBER`. db: an open store, a URL, a file, or None for this user's database. bounds: inclusive ranges by symbol, for a
    model that is loaded here.
    trials: candidates per task instead of the effort's number. scheduler: the address of a Dask scheduler whose
    workers measure; beyond loopback it is tls://HOST:PORT with ca, certificate, key: PEM files of the authority all
    sides trust, our certificate, its key.
    precision: `f16` or `bf16` stores weights and what products read in 16 bits and computes in float32; parameters and results
    keep their types. qkv: matmuls of one value with several weights, `separate` or `merged` into one. attention: one kernel each (`fused`),
    or two matmuls and a softmax (`unfused`), which libraries can take. Build with what was tuned.
    caches: what kernels find in them when they are timed: `warm`, all that their last launch left; `model`, nothing where a kernel reads
    many weights, since the rest of a model runs in between.
    profile: the file of a `ShapeProfile`; the shapes it counts then weigh most, each by the time it takes. Build with the same.
    rules: your own rewriting (`rewrite.Rule`), each applied at its level; build with the same.
    on_progress: called after every batch.

    Raises: UserError for what an argument gets wrong, ParseError for a path that is no model, VerifyError for a module that is
    not well-formed, MeasureError when the device cannot measure, DatabaseError when records cannot be kept. Candidates
    and tasks that fail are records and notes, not errors.
    """
    settings = Settings(
        target=target,
        effort=effort,
        trials=trials,
        seed=seed,
        strategy=check_strategy(strategy),
        scheduler=scheduler,
        ca=ca,
        certificate=certificate,
        key=key,
        qkv=qkv,
        precision=precision,
        attention=attention,
        caches=caches,
        profile=None if profile is None else str(profile),
    )
    check_needed(scheduler, ca, certificate, key)
    module = _module(model, bounds)
    with contextlib.closing(open_runner(settings)) as runner:
        device = runner.device_info()  # no database is made for a device that is not there
        with _store(db) as store:
            job = Job(module, device, store, settings, on_progress or (lambda _: None), rules=rules)
            work, built = job.tune(runner), job.build()
            job.store_plans(built)
            return tune_result(job, work, built)


def build(
    model: Model,
    *,
    target: str = "opencl",
    db: Database = None,
    bounds: Bounds | None = None,
    policy: Policy = "measured",
    effort: Effort = "normal",
    precision: Precision = "f32",
    qkv: Qkv = "separate",
    attention: AttentionForm = "fused",
    caches: Caches = "warm",
    memory: Memory = "symbolic",
    profile: str | Path | None = None,
    rules: Sequence[Rule] = (),
    pack: bool = False,
) -> Artifact:
    """The artifact of a model from what is on record; measures nothing. `Artifact.notes` says what tasks lack.

    Arguments as of `tune`. policy: `measured` dispatches the fastest on record, `stored` what `tune` chose last, `library` a library
    call wherever there is one, `generic` untuned kernels only. effort: sets the shapes plans are made from; give it and precision as
    they were tuned with.
    memory: of intermediate values: `symbolic` sizes it by the shapes of each call, `constant` takes it once for the largest that the
    declared bounds allow; `inplace` and `constant-inplace` write results over arguments that nobody reads later.
    pack: store weights as the chosen kernels want them, in place of those that nothing else reads; otherwise they are packed,
    and held twice, whenever the artifact is opened. Larger where kernels of several layouts take turns. Same results.

    Raises: UserError, ParseError, VerifyError and DatabaseError as `tune`; BuildError for a model that cannot be built.
    """
    settings = Settings(
        target=target,
        effort=effort,
        qkv=qkv,
        precision=precision,
        attention=attention,
        caches=caches,
        memory=memory,
        profile=None if profile is None else str(profile),
    )
    module = _module(model, bounds)
    with _store(db, read_only=True) as store:
        job = Job(module, device_info(settings.target), store, settings, rules=rules)
        return job.artifact(job.build(check_policy(policy)), pack)


def tune_result(job: Job, work: TuningSummary, built: BuildResult) -> TuneResult:
    """What a job found, from its store."""
    records = {name: job.records(c.task.key, c.task.regime) for name, c in job.choices.items()}
    return TuneResult(job.target, task_rows(job.choices, built.plans, records), work, built.notes)


def _module(model: Model, bounds: Bounds | None) -> IRModule:
    if not isinstance(model, IRModule):
        return load_model(model, bounds)
    if bounds is not None:
        raise UserError(
            "bounds belong to the loading of a model, found them beside a loaded module; give them to load_model, or to "
            "the builder that made the module"
        )
    verify(model)  # its tensor functions may be anybody's
    examine(model)
    return model


@contextlib.contextmanager
def _store(db: Database, read_only: bool = False) -> Iterator[Store]:
    """A store that was given stays open."""
    if db is None or isinstance(db, (str, Path)):
        with open_store(None if db is None else str(db), read_only=read_only) as store:
            yield store
    elif hasattr(db, "query"):
        yield db
    else:
        raise UserError(f"db: wanted an open store, a URL or the path of a file, found a {type(db).__name__}")
