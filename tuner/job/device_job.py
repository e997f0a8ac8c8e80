"""A model on one device: its tasks, tuned with a runner and built from records.

Tests: `tests/tuner/job/test_job.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_tune.database.records import Measurement, Regime, ShapeHistogram, Target, canonical_json
from relax_tune.database.reference import admit
from relax_tune.database.store import Store
from relax_tune.errors import FleetUnavailable, MeasureError, UserError
from relax_tune.ir.arith.solver import installed_solver
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.independent_rows import independent_rows
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.ir.passes.placement.device_requests import DropDevices
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.runtime.artifact import INDEPENDENT_ROWS, Artifact, new_artifact
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.library.registry import library_facts, open_libraries
from relax_tune.runtime.shapes import Histogram, ShapeProfile
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.emit.build import BuildResult, Refused, build_programs
from relax_tune.tuner.job.devices import code_target, described
from relax_tune.tuner.job.footprint import check_footprint
from relax_tune.tuner.job.job_log import RunningJob
from relax_tune.tuner.job.loop import JobContext, Tuner
from relax_tune.tuner.job.lowered_model import LoweredModel, WeightType
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.job.self_test import tested
from relax_tune.tuner.learn.device_records import DeviceRecords
from relax_tune.tuner.learn.prior import Prior, family_of, packaged_prior
from relax_tune.tuner.learn.similar_devices import SearchKnowledge
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.base import EnteringRunner, OtherUnit, Runner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.plan.predicted import Predictor
from relax_tune.tuner.plan.similar_plans import SimilarPlans
from relax_tune.tuner.plan.stored_plans import PlanSet, plan_sets, plan_texts
from relax_tune.tuner.program.prepack import pack_weights
from relax_tune.tuner.settings import Memory, Policy, Settings
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.alternatives import alternatives_here
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.variants import TaskVariants


def device_job(
    module: IRModule,
    device: DeviceInfo,
    store: Store,
    settings: Settings,
    rules: Sequence[Rule] = (),
    verify: bool = False,
) -> DeviceJob:
    """Return the job of a model for one device. For `rules` and `verify` see `LoweredModel`."""
    return DeviceJob(LoweredModel(module, settings, rules, verify), device, store, settings)


@dataclass(eq=False)
class DeviceJob:
    """A model that is tuned and built for one device, with the variants of each of its tasks.

    Attributes:
        similar_records: Records of similar devices, such as those in a pack. They only decide which candidates are tried first
            and which plans stand in for missing times; they never count as times of this device.
    """

    model: LoweredModel
    device: DeviceInfo
    store: Store
    settings: Settings
    similar_records: Store | None = None

    @property
    def module(self) -> IRModule:
        return self.model.module

    @property
    def lowered(self) -> LoweredModule:
        return self.model.lowered

    @property
    def key(self) -> str:
        """The model's key."""
        return self.model.key

    def storing(self, weight_types: Mapping[str, WeightType]) -> DeviceJob:
        """Return the job of the model with these weights stored in fewer bits."""
        return replace(self, model=replace(self.model, weight_types=weight_types))

    def with_settings(self, settings: Settings) -> DeviceJob:
        """Return the job of the model as other settings lower and tune it."""
        return replace(self, model=replace(self.model, settings=settings), settings=settings)

    @cached_property
    def target(self) -> Target:
        """The identity of this device in the store."""
        return Target(self.device.kind, self.device.name, self.device.fingerprint, self.device.limits)

    @cached_property
    def hardware(self) -> HardwareInfo:
        return HardwareInfo.from_limits(self.device.kind, dict(self.device.limits))

    @cached_property
    def code_target(self) -> CodeTarget:
        return code_target(self.device)

    @cached_property
    def profile(self) -> ShapeProfile | None:
        """Served shapes, if the settings name a profile, from its file or from the database.

        Raises:
            UserError: The file is not a profile of this model, or the database has none.
        """
        if self.settings.profile is not None:
            profile = ShapeProfile.read(self.settings.profile)
            profile.of_model(self.key)
            return profile
        return stored_profile(self.store, self.key) if self.settings.shapes == "profile" else None

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return self.extract()

    def extract(self, ranges: Mapping[str, Range] = MappingProxyType({})) -> tuple[Task, ...]:
        """Return the tasks tuned over narrower ranges of some symbols; the model still runs within its declared bounds."""
        settings, last_cache = self.settings, max(self.hardware.l2_bytes, self.hardware.l3_bytes)
        return extract_tasks(self.lowered, settings.anchors, ranges, self.profile, settings.caches, last_cache)

    @cached_property
    def libraries(self) -> Mapping[str, str]:
        """Name and fingerprint of each library, as the device reports them or as this process opens them.

        Empty if the settings exclude libraries.
        """
        if not self.settings.libraries:
            return {}
        reported = self.device.libraries
        return dict(library_facts(open_libraries()) if reported is None else reported)

    @cached_property
    def device_records(self) -> DeviceRecords:
        """The records that count for this device and its libraries."""
        return DeviceRecords(self.store, self.target, self.libraries)

    @cached_property
    def predictor(self) -> Predictor:
        """The predictor for functions without records, with the prior of the settings or else the packaged one."""
        given = self.settings.prior
        prior = packaged_prior(family_of(self.hardware)) if given is None else Prior.read(Path(given))
        if given is not None and prior is not None:
            prior.check_fit(self.hardware, given)
        similar = None
        if self.similar_records is not None:
            similar = SimilarPlans(self.similar_records, self.target, self.key, frozenset(t.key for t in self.tasks))
        return Predictor(prior, RecordedHistory(self.store, self.target.key, ()), similar)

    def records(self, workload: str, regime: Regime) -> list[Measurement]:
        """Return the valid records of a workload on this device (`DeviceRecords.valid`)."""
        return self.device_records.valid(workload, regime)

    @cached_property
    def task_variants(self) -> dict[str, TaskVariants]:
        """The variants of each task, by the name of its tensor function in the lowered module."""
        alternatives = alternatives_here(self.hardware.language, self.libraries)
        return {t.name: TaskVariants(t, self.hardware, self.code_target, alternatives) for t in self.tasks}

    def tune(
        self,
        runner: Runner,
        report: Callable[[TuningProgress], None] = lambda _: None,
        notice: Callable[[str], None] = lambda _: None,
        submitted: str = "",
    ) -> TuningSummary:
        """Measure what the settings require and the store lacks.

        Args:
            report: Called after every batch.
            notice: Receives a sentence when something is waited for.
            submitted: Id of the submitted job that this is.

        Raises:
            UserError: The bounds cannot be measured on this machine.
        """
        if self.settings.scheduler is None:
            check_footprint(self.tasks, self.module.bounds, host.memory_bytes())
        if self.settings.scheduler is None:  # timed only if something is measured
            self.store.add_target(self.target)
            measuring: Runner = EnteringRunner(runner, lambda: self.enter_target(runner, notice))
        else:
            self.enter_target(runner, notice)
            measuring = runner
        if self.settings.profile is not None and self.profile is not None:
            store_profile(self.store, self.profile)
        with RunningJob(self.store, self.settings, submitted) as running:
            tasks = list(self.task_variants.values())
            context = JobContext(running.name, report, running.beat, notice)
            tuner = Tuner(tasks, self.device_records, measuring, self.settings, self._knowledge(), context)
            return tuner.run()

    def _knowledge(self) -> SearchKnowledge:
        workloads, kind, similar = {t.key for t in self.tasks}, self.target.kind, self.similar_records
        return SearchKnowledge(
            self.target,
            RecordedHistory(self.store, self.target.key, workloads),
            None if similar is None else RecordedHistory(similar, self.target.key, workloads, kind),
            self.predictor.likely,
        )

    def enter_target(self, runner: Runner, notice: Callable[[str], None]) -> None:
        """Add the target with the reference times of its units, and compare the runner's units with the recorded times.

        A single unit that measured all records of the target may have changed since; a notice says so.

        Raises:
            OtherUnit: No unit is as fast as the units that measured for the target.
        """
        known = self.store.target(self.target.key)
        try:
            times = runner.calibrate({} if known is None else dict(known.reference))
            if not admit(self.store, replace(self.target, reference=tuple(times.items()))):
                return
            stored = self.store.target(self.target.key)  # another job added the target first
            runner.calibrate({} if stored is None else dict(stored.reference))
        except OtherUnit as error:
            units = {u.unit for u in self.store.units(self.target.key)}
            if self.settings.scheduler is not None or units != {self.device.unit}:
                raise
            notice(f"this unit measured all records of the database, but its speed has changed: {error}")
        except FleetUnavailable:
            raise
        except MeasureError as error:
            self.store.add_target(self.target)
            notice(f"the speed of this unit is not compared with the speed of other units: {error}")

    def build(
        self, policy: Policy = "measured", memory: Memory | None = None, refused: Refused = MappingProxyType({})
    ) -> BuildResult:
        """Build the programs that the store's records select.

        Args:
            memory: Overrides the setting.
            refused: Variants that are not dispatched.
        """
        stored = self.current_plans() if policy == "stored" else None
        # the policy `predicted` ignores measurements
        predictor = replace(self.predictor, history=None, similar=None) if policy == "predicted" else self.predictor
        lowered = self.lowered
        if self.model.several_devices:  # the program for one device has no hints
            lowered = replace(lowered, module=DropDevices()(lowered.module))
        return build_programs(
            lowered,
            self.task_variants,
            self.device_records,
            self.code_target,
            policy,
            memory or self.settings.memory,
            stored,
            refused,
            predictor,
        )

    def tested_build(self, runner: Runner, policy: Policy = "measured") -> BuildResult:
        """Build without variants that fail on the runner's device, if the settings ask for a self-test.

        Raises:
            BuildError: Every form of a function is wrong.
            MeasureError: The device is lost.
        """
        if not self.settings.self_test:
            return self.build(policy)
        built, results = tested(lambda refused: self.build(policy, refused=refused), self.task_variants, runner)
        return replace(built, notes=(*built.notes, *results.notes()), self_test=results.to_json())

    def plan_sets(self) -> list[PlanSet]:
        """Return the stored plans of this model for this device, the current ones last."""
        workloads = frozenset(c.task.key for c in self.task_variants.values())
        return plan_sets(self.store, self.target.key, self.key, workloads)

    def current_plans(self) -> PlanSet:
        """Return the current plans.

        Raises:
            UserError: None are stored.
        """
        sets = self.plan_sets()
        if not sets:
            raise UserError(
                f"expected plans of this model for this device, got none in {self.store.where} that fit all its tasks; "
                "`relax-tune tune` stores some"
            )
        return sets[-1]

    def store_plans(self, built: BuildResult) -> None:
        """Make a build's plans the current ones, all at once. Plans that are stored already are not added again."""
        texts = plan_texts(self.key, {self.task_variants[name].task.key: plan for name, plan in built.plans.items()})
        self.store.put_plans(self.target.key, texts)

    def artifact(self, built: BuildResult, pack: bool | None = None) -> Artifact:
        """Return a build of this model as an artifact with its weights; `Artifact.save` writes it.

        Args:
            pack: Store weights in the layouts of the chosen kernels, instead of packing them whenever the artifact is opened; None: on
                target `c`, where kernels read them in the mapped file.
        """
        programs, constants = tuple(built.programs.values()), self.lowered.module.constants
        recipe: Mapping[str, Any] = {}
        if self.device.kind == "c" if pack is None else pack:
            packed = pack_weights(programs, built.packings, constants)
            programs, constants, recipe = packed.programs, packed.constants, packed.recipe
        names = {b.name for p in programs for b in p.buffers if b.role == "const"}
        constants = {n: a for n, a in constants.items() if n in names}
        host_weights = {w.name for d in built.host_programs for w in d.weights}
        constants |= {n: self.lowered.module.constants[n] for n in host_weights}
        # With a solver more checks are proved and more memory is reused, so the artifact differs.
        solver = installed_solver()
        extra = {
            "fingerprint": dict(self.target.fingerprint),
            INDEPENDENT_ROWS: independent_rows(self.lowered),
            "lowering": self.model.facts(),
            "model": self.key,
            "notes": list(built.notes),
            "self_test": built.self_test,
            "solver": None if solver is None else solver.name,
            "target": self.target.key,
            "tasks": len(built.plans),
            "unmeasured": [name for name, plan in built.plans.items() if not plan.times],
        }
        if recipe:
            extra["packed"] = recipe
        if built.quality is not None:
            extra["quality"] = built.quality
        return new_artifact(programs, constants, extra, built.host_programs, self.device.kind)


def store_profile(store: Store, profile: ShapeProfile) -> None:
    """Store a model's profile in the database; it replaces earlier counts of the model's symbols."""
    for function, symbols in profile.histograms.items():
        for symbol, histogram in symbols.items():
            counts = canonical_json({str(value): count for value, count in histogram.values.items()})
            store.put_histogram(ShapeHistogram(profile.model, f"{function}.{symbol}", counts))


def stored_profile(store: Store, model: str) -> ShapeProfile:
    """Return the profile of a model in the database.

    Raises:
        UserError: The database has none.
    """
    profile = ShapeProfile(model)
    for histogram in store.histograms(model):
        function, _, symbol = histogram.symbol.rpartition(".")
        profile.add(function, symbol, Histogram.of({v: c for v, c in histogram.by_value.items() if v >= 0 and c > 0}))
    if not profile.histograms:
        raise UserError(
            f"--shapes profile: expected counts of the shapes this model was served, {store.where} has none; record some with "
            "`relax-tune run --record-shapes FILE` and give them with --profile FILE"
        )
    return profile


def build_here(job: DeviceJob, policy: Policy, notes: tuple[str, ...] = ()) -> BuildResult:
    """Build with a self-test on a device of this machine, in a separate process.

    Kernels for a device that is only described run on the device of its kind here; those for a browser only if there is one.

    Args:
        notes: Precede the notes of the build.

    Raises:
        BuildError: Every form of a function is wrong.
        MeasureError: The device is lost.
    """
    info = described(job.settings.target, job.store)
    spec = job.settings.target if info is None else info.kind
    with contextlib.ExitStack() as stack:
        runner, obstacle = None, ""
        if job.settings.self_test:
            try:
                runner = stack.enter_context(LocalRunner(spec))
            except MeasureError as error:
                if info is None or spec == "c":
                    raise
                obstacle = f": {error}"
        built = job.build(policy) if runner is None else job.tested_build(runner, policy)
    if info is not None:
        tester = "this machine's processor" if spec == "c" else "this machine's first adapter"
        tested_on = f"no kernel ran{obstacle}" if runner is None else f"the self-test ran them on {tester}"
        what = "processor" if spec == "c" else "browser"
        note = f"{job.settings.target}: a {what} that is described, not at hand: nothing is timed; {tested_on}"
        notes = (*notes, note)
    return replace(built, notes=(*notes, *built.notes))
