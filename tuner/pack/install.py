"""Installation of a pack on a device: lowered, verified, tuned on a small budget, built. Imports no frontend."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.store import Store, open_store
from relax_tune.ir.check.verify import verify
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.job import Job
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.learn.like_devices import like_targets
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.pack.pack import SHAPING, ModelPack, read_pack
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.settings import Settings, merge_settings

BUDGET = 200
"""Candidates of all tasks that an installation times."""


@dataclass(frozen=True, eq=False)
class Installation:
    """An installed pack.

    job, built: the model on this device, and its build
    work: measurements of this installation
    like: names of the devices in the pack that are of this kind, the likest first
    secs: seconds of each stage: read, lower, measure, build
    """

    job: Job
    built: BuildResult
    artifact: Artifact
    work: TuningSummary
    like: tuple[str, ...]
    secs: Mapping[str, float]

    @property
    def warm(self) -> bool:
        """True if nothing had to be measured."""
        return self.work.measurements == 0

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "warm": self.warm,
            "secs": {**self.secs, "total": sum(self.secs.values())},
            "candidates": self.work.trials,
            "measurements": self.work.measurements,
            "like": list(self.like),
            "notes": list(self.built.notes),
        }


@dataclass(eq=False)
class Installer:
    """A pack on its way onto a device, stage by stage; `job` comes from `open`, the rest from `run`.

    pack: what is installed
    settings: of the installing machine, with the pack's settings of `SHAPING`
    """

    pack: ModelPack
    settings: Settings
    secs: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str], settings: Settings, digest: str | None = None) -> Installer:
        """Read a pack. Raises ArtifactError as `read_pack`."""
        secs: dict[str, float] = {}
        with _timed(secs, "read"):
            pack = read_pack(path, digest)
        shaping = {name: getattr(pack.settings, name) for name in SHAPING}
        budget = BUDGET if settings.budget is None else settings.budget
        return cls(pack, replace(settings, **shaping, budget=budget), secs)

    def open(
        self,
        runner: Runner,
        store: Store,
        report: Callable[[TuningProgress], None] = lambda _: None,
        notice: Callable[[str], None] = lambda _: None,
        trust_records: bool = False,
    ) -> Job:
        """Lower the pack's model for the runner's device, and verify the lowered module.

        The pack's records only say what to try first. trust_records: those of this very device count as measured here, and are
        kept in the store.
        """
        with _timed(self.secs, "lower"):
            made = self.pack.module, runner.device_info(), store, self.settings, report, notice
            job = Job(*made, elsewhere=self.pack.records)
            if trust_records and self.pack.records.target(job.target.key) is not None:
                import_lines(store, export_lines(self.pack.records, [job.target.key]))
            verify(job.lowered.module)
        return job

    def run(self, job: Job, runner: Runner, measure: bool = True) -> Installation:
        """Time what the budget allows, and build. measure: False builds from what is on record, else by the pack's plans

        Raises: as `Job.tune` and `Job.tested_build`.
        """
        like = [t.name for t in like_targets(self.pack.records, job.target) if self._measured(t.key)]
        with _timed(self.secs, "measure"):
            work = job.tune(runner) if measure else TuningSummary()
        with _timed(self.secs, "build"):
            built = job.tested_build(runner)
            built = replace(built, notes=(*built.notes, *self._notes(job)))
            artifact = job.artifact(built)
        if measure:
            job.store_plans(built)
        return Installation(job, built, artifact, work, tuple(like), dict(self.secs))

    def _notes(self, job: Job) -> list[str]:
        """Return a sentence if records of the pack fit no task."""
        known = {t.key for t in job.tasks}
        lost = [w.hint or w.key for w in self.pack.records.workloads(None) if w.key not in known]
        if not lost:
            return []
        return [
            f"the pack has records of {len(lost)} functions that this version makes otherwise, which are of no use: "
            f"{', '.join(lost[:3])}; pack the model again with this version, after tuning it there"
        ]

    def _measured(self, target: str) -> bool:
        return self.pack.records.count(target) > 0


@contextlib.contextmanager
def _timed(secs: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    secs[stage] = time.perf_counter() - start


def install(
    path: str | os.PathLike[str],
    *,
    settings: Settings | None = None,
    db: Store | str | os.PathLike[str] | None = None,
    digest: str | None = None,
    measure: bool = True,
    trust_records: bool = False,
    on_progress: Callable[[TuningProgress], None] | None = None,
    **overrides: Any,
) -> Installation:
    """Install a pack on a device of this machine; `Installation.artifact` is what was built.

    settings: options; None takes the defaults. overrides: fields of `Settings` by name, such as `target="c"`
    db: an open store, a URL, a file, or None for the settings' database
    digest: the hash that the pack is to have, as `relax-tune pack` printed it
    measure: False times nothing, and builds from the pack's plans where the database has no times
    trust_records: times in the pack of this very device count as measured here

    Raises: ArtifactError for a pack that is refused; UserError, MeasureError, DatabaseError and BuildError as `tune` and `build`.
    """
    chosen = merge_settings("install", settings, overrides)
    check_strategy(chosen.strategy)
    installer = Installer.read(path, chosen, digest)
    with contextlib.closing(LocalRunner(chosen.target)) as runner, _opened(chosen.db if db is None else db) as store:
        report = on_progress or (lambda _: None)
        job = installer.open(runner, store, report, trust_records=trust_records)
        return installer.run(job, runner, measure)


@contextlib.contextmanager
def _opened(db: Store | str | os.PathLike[str] | None) -> Iterator[Store]:
    if db is None or isinstance(db, (str, os.PathLike)):
        with open_store(None if db is None else os.fspath(db)) as store:
            yield store
    else:
        yield db
