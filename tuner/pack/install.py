"""Installation of a pack on a device: the model is lowered, verified, tuned with a small budget, and built.

This module imports no frontend.

Tests: `tests/tuner/pack/test_pack.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.store import Store, open_store
from relax_tune.errors import UserError
from relax_tune.ir.check.verify import verify
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.emit.unmeasured import MORE, unmeasured_warning
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.job.devices import with_concrete_target
from relax_tune.tuner.job.lowered_model import LoweredModel
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.learn.device_records import similar_targets
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.pack.pack import SHAPING, ModelPack, read_pack
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.settings import Settings, merge_settings, shows_settings

BUDGET = 200
"""Default number of candidates, of all tasks together."""


@dataclass(frozen=True, eq=False)
class Installation:
    """An installed pack.

    Attributes:
        job, built: The model on this device, and its build.
        work: Counts of the measurements of this installation.
        like: Names of devices of this kind in the pack, the most similar first.
        secs: Seconds of each stage: read, lower, measure, build.
    """

    job: DeviceJob
    built: BuildResult
    artifact: Artifact
    work: TuningSummary
    like: tuple[str, ...]
    secs: Mapping[str, float]

    @property
    def warm(self) -> bool:
        """True if nothing was measured."""
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
    """The stages of an installation: `read`, then `open`, which returns the job, then `run`.

    Attributes:
        settings: Settings of the installing machine, with the values of the pack for `SHAPING`.
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
        trust_records: bool = False,
        notice: Callable[[str], None] = lambda _: None,
    ) -> DeviceJob:
        """Lower the pack's model for the runner's device, and verify the lowered module.

        The records of the pack are only hints on which candidates to try first.

        Args:
            trust_records: Add records of a device with the same key to the store, where they count as measurements of this machine.

        Raises:
            UserError: The pack's records contradict the stored ones.
        """
        with _timed(self.secs, "lower"):
            model = LoweredModel(self.pack.module, self.settings)
            job = DeviceJob(model, runner.device_info(), store, self.settings, similar_records=self.pack.records)
            if trust_records and self.pack.records.target(job.target.key) is not None:
                job.enter_target(runner, notice)  # the times of the pack must not contradict the times of this unit
                report = import_lines(store, export_lines(self.pack.records, [job.target.key]))
                if report.problems:
                    raise UserError(f"the records of the pack contradict the stored ones: {report.problems[0].why}")
            verify(job.lowered.module)
        return job

    def run(
        self,
        job: DeviceJob,
        runner: Runner,
        measure: bool = True,
        report: Callable[[TuningProgress], None] = lambda _: None,
        notice: Callable[[str], None] = lambda _: None,
        required: bool = False,
    ) -> Installation:
        """Tune within the budget, and build. Raises as `DeviceJob.tune` and `DeviceJob.tested_build`.

        Args:
            measure: False builds from the records of the store, or else by the plans of the pack.
            required: A task without a usable record in the end is an error.

        Raises:
            BuildError: Required records are missing.
        """
        like = [t.name for t in similar_targets(self.pack.records, job.target) if self._measured(t.key)]
        with _timed(self.secs, "measure"):
            work = job.tune(runner, report, notice) if measure else TuningSummary()
        with _timed(self.secs, "build"):
            built = job.tested_build(runner)
            unmeasured_warning([built.plans], "measured", job.store, job.device.name, required, MORE)
            built = replace(built, notes=(*built.notes, *self._notes(job)))
            artifact = job.artifact(built)
        if measure:
            job.store_plans(built)
        return Installation(job, built, artifact, work, tuple(like), dict(self.secs))

    def _notes(self, job: DeviceJob) -> list[str]:
        """Return a sentence if records of the pack fit no task."""
        known = {t.key for t in job.tasks}
        lost = [w.hint or w.key for w in self.pack.records.workloads(None) if w.key not in known]
        if not lost:
            return []
        return [
            f"records of {len(lost)} functions in the pack fit no task, since this version lowers the model differently: "
            f"{', '.join(lost[:3])}; tune and pack the model with this version"
        ]

    def _measured(self, target: str) -> bool:
        return self.pack.records.count(target) > 0


@contextlib.contextmanager
def _timed(secs: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    secs[stage] = time.perf_counter() - start


@shows_settings("install")
def install(
    path: str | os.PathLike[str],
    *,
    settings: Settings | None = None,
    db: Store | str | os.PathLike[str] | None = None,
    digest: str | None = None,
    measure: bool = True,
    trust_records: bool = False,
    on_progress: Callable[[TuningProgress], None] | None = None,
    require_measured: bool = False,
    **overrides: Any,
) -> Installation:
    """Install a pack on a device of this machine; `Installation.artifact` is the built artifact.

    Args:
        settings: Options; None for the defaults.
        db: An open store, a URL, a file, or None for the database of the settings.
        digest: Hash that the pack must have, as `relax-tune pack` printed it.
        measure: False measures nothing, and builds by the plans of the pack for tasks without records.
        trust_records: Records of a device with the same key in the pack count as measurements of this machine.
        on_progress: Called after every batch.
        require_measured: A task that has no usable record in the end is an error.
        overrides: Fields of `Settings` by name, such as `target="c"`.

    Raises:
        ArtifactError: The pack is refused.
        UserError, MeasureError, DatabaseError, BuildError: As `tune` and `build`.
    """
    chosen = with_concrete_target(merge_settings("install", settings, overrides))
    check_strategy(chosen.strategy)
    installer = Installer.read(path, chosen, digest)
    with contextlib.closing(LocalRunner(chosen.target)) as runner, _opened(chosen.db if db is None else db) as store:
        job = installer.open(runner, store, trust_records)
        report = on_progress or (lambda _: None)
        return installer.run(job, runner, measure, report, required=require_measured)


@contextlib.contextmanager
def _opened(db: Store | str | os.PathLike[str] | None) -> Iterator[Store]:
    if db is None or isinstance(db, (str, os.PathLike)):
        with open_store(None if db is None else os.fspath(db)) as store:
            yield store
    else:
        yield db
