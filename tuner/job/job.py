"""A job from end to end: model, device and store; tuned, built, opened. The commands are thin wrappers of it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

import numpy as np

from relax_tune.database.records import Measurement, Regime, ShapeHistogram, Target, canonical_json
from relax_tune.database.store import Store
from relax_tune.errors import MeasureError, UserError
from relax_tune.ir.arith.solver import installed_solver
from relax_tune.ir.codegen.generate import CodeTarget, Language
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import WEIGHT_BITS, LoweredModule, PassManager, lower, passes_for
from relax_tune.ir.passes.placement.wishes import DropDevices
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.artifact import Artifact, new_artifact
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.library.registry import library_facts, open_libraries
from relax_tune.runtime.shapes import Histogram, ShapeProfile
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.emit.build import BuildResult, build_programs
from relax_tune.tuner.job.footprint import check_footprint
from relax_tune.tuner.job.job_log import RunningJob
from relax_tune.tuner.job.loop import Tuner
from relax_tune.tuner.job.page_target import page_device
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.job.self_test import Refused, tested
from relax_tune.tuner.learn.prior import Prior, family_of, packaged_prior
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.browser.runner import BrowserRunner
from relax_tune.tuner.measure.cluster.address import tls_files
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.plan.library_facts import LibraryFacts
from relax_tune.tuner.plan.like_plans import LikePlans
from relax_tune.tuner.plan.predicted import Predictor
from relax_tune.tuner.plan.stored_plans import PlanSet, plan_sets, plan_texts
from relax_tune.tuner.processors import described_device
from relax_tune.tuner.program.prepack import pack_weights
from relax_tune.tuner.settings import Memory, Policy, Settings
from relax_tune.tuner.task.alternatives import alternatives_here
from relax_tune.tuner.task.domain import Range
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.task import Choices, Task

Bounds = Mapping[str, tuple[int, int]]
WeightType = Literal["bf16", "f16", "int8", "int4"]
"""A type that a weight may be stored in instead of its own."""


def model_key(module: IRModule) -> str:
    """Return the identity of a model: BLAKE2 of the program without its declared bounds, and of every weight."""
    state = hashlib.blake2b(print_text(replace(module, constants={}, bounds=())).encode(), digest_size=16)
    for name, array in sorted(module.constants.items()):
        state.update(f"{name}:{array.dtype}:{array.shape}".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def lowered_module(
    module: IRModule,
    settings: Settings,
    rules: Sequence[Rule] = (),
    verify: bool = False,
    several: bool = False,
    stored: Mapping[str, WeightType] = MappingProxyType({}),
) -> LoweredModule:
    """Lower a module as the settings say. verify: check it around every pass; several: for several devices

    stored: type of each weight that is stored in fewer bits, by name; a weight that cannot be stored so stays
    """
    for kind, bits in WEIGHT_BITS.items():
        only = frozenset(name for name, chosen in stored.items() if chosen == kind)
        module = QuantizeWeights(bits, only=only)(module) if only else module
    rounded = {name: dtype(chosen) for name, chosen in stored.items() if chosen not in WEIGHT_BITS}
    passes = passes_for(
        settings.qkv, dtype(settings.precision), settings.attention, rounded, settings.activations, settings.weights
    )
    append = settings.attention == "fused" and not several
    return lower(module, passes, rules, PassManager(verify), settings.checks, append, several)


def open_runner(settings: Settings, notice: Callable[[str], None] = lambda _: None) -> Runner:
    """Open the local supervised device process, or a cluster's when a scheduler is given, or a browser's page.

    notice: receives a sentence when a worker is left out, or when something is waited for

    Raises MeasureError when it cannot be opened, UserError for some but not all of the certificate files.
    """
    if settings.browser is not None:
        if settings.scheduler is not None or settings.target != "webgpu":
            raise UserError(
                f"--browser wants --target webgpu and no --scheduler, found {settings.target!r:.80}"
                f"{' and a scheduler' if settings.scheduler else ''}"
            )
        files = {"certificate": settings.certificate, "key": settings.key}
        return BrowserRunner(settings.browser, **files, wait_secs=settings.wait_secs, notice=notice)
    if settings.scheduler is not None:
        tls = tls_files(settings.ca, settings.certificate, settings.key)
        return DaskRunner(settings.scheduler, settings.target, tls=tls, open_secs=settings.wait_secs, notice=notice)
    return LocalRunner(settings.target, notice=notice)


def parse_bounds(items: list[str]) -> dict[str, tuple[int, int]]:
    """Parse items `name=low:high`. Raises UserError for any other text."""
    found: dict[str, tuple[int, int]] = {}
    for item in items:
        name, _, span = item.partition("=")
        low, colon, high = span.partition(":")
        plain = all(end.isascii() and end.isdigit() and len(end) <= 18 for end in (low, high))
        if not (name and colon and plain and int(low) <= int(high)):
            raise UserError(
                f"--bound wants NAME=LOW:HIGH with whole numbers LOW <= HIGH of at most 18 digits, such as n=1:512; found {item!r:.80}"
            )
        if name in found:
            raise UserError(f"--bound wants each symbol once, found {name} twice; leave one of them out")
        found[name] = (int(low), int(high))
    return found


@dataclass(eq=False)
class Job:
    """A lowered model for one device, with the possible variants of each of its tasks.

    notice: receives a sentence when something is waited for
    overrides: narrower ranges, by symbol name, to tune over; the model still runs within its declared bounds. rules:
        rewriting rules of the user, each applied at its level. verify: check the module around every pass.
    elsewhere: records, such as a pack's, that only say which candidates to try first; submitted: id of the
        submitted job that this is
    several: keep what the module says about devices, for a program over several
    stored: type of each weight that is stored in fewer bits, by name
    """

    module: IRModule
    device: DeviceInfo
    store: Store
    settings: Settings
    report: Callable[[TuningProgress], None] = field(default=lambda _: None)
    notice: Callable[[str], None] = field(default=lambda _: None)
    overrides: Mapping[str, Range] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    verify: bool = False
    elsewhere: Store | None = None
    submitted: str = ""
    several: bool = False
    stored: Mapping[str, WeightType] = field(default_factory=dict)

    @cached_property
    def target(self) -> Target:
        """The identity under which this device's records are kept."""
        return Target(self.device.kind, self.device.name, self.device.fingerprint, self.device.limits)

    @cached_property
    def hardware(self) -> HardwareInfo:
        return HardwareInfo.from_limits(self.device.kind, dict(self.device.limits))

    @cached_property
    def code_target(self) -> CodeTarget:
        hardware = self.hardware
        return CodeTarget(
            cast(Language, hardware.language),
            hardware.lanes,
            hardware.local_bytes if hardware.has_grid else None,
            dict(self.device.limits).get("max_bindings"),
            dict(self.device.limits).get("loop_passes"),
        )

    @cached_property
    def lowered(self) -> LoweredModule:
        return lowered_module(self.module, self.settings, self.rules, self.verify, self.several, self.stored)

    @cached_property
    def key(self) -> str:
        """The model's key."""
        return model_key(self.module)

    @cached_property
    def profile(self) -> ShapeProfile | None:
        """Served shapes, if the settings name a profile: from its file or from the database.

        Raises UserError for a file of another model, another kind of file, and when there is no profile.
        """
        if self.settings.profile is not None:
            found = ShapeProfile.read(self.settings.profile)
            found.of_model(self.key)
            return found
        return stored_profile(self.store, self.key) if self.settings.shapes == "profile" else None

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        settings, last = self.settings, max(self.hardware.l2_bytes, self.hardware.l3_bytes)
        return extract_tasks(self.lowered, settings.anchors, self.overrides, self.profile, settings.caches, last)

    @cached_property
    def libraries(self) -> Mapping[str, str]:
        """Name and fingerprint of each library on the device, as given to the job or as found by this process.

        None where the settings leave libraries out.
        """
        if not self.settings.libraries:
            return {}
        told = self.device.libraries
        return dict(library_facts(open_libraries()) if told is None else told)

    @cached_property
    def facts(self) -> LibraryFacts:
        return LibraryFacts(self.store, self.libraries)

    @cached_property
    def predictor(self) -> Predictor:
        """The predictor for functions without records, by the prior of the settings, else by the packaged one."""
        given = self.settings.prior
        prior = packaged_prior(family_of(self.hardware)) if given is None else Prior.read(Path(given))
        if given is not None and prior is not None:
            prior.check_fit(self.hardware, given)
        there = None
        if self.elsewhere is not None:
            there = LikePlans(self.elsewhere, self.target, self.key, frozenset(t.key for t in self.tasks))
        return Predictor(prior, RecordedHistory(self.store, self.target.key, ()), there)

    def records(self, workload: str, regime: Regime) -> list[Measurement]:
        """Return the records that stand for a workload on this device, without times of libraries in another state."""
        return [r for r in self.facts.records(self.target.key, workload, regime) if self.facts.counts(r)]

    @cached_property
    def choices(self) -> dict[str, Choices]:
        """The choices of each task, by the name of its tensor function in the lowered module."""
        alternatives = alternatives_here(self.hardware.language, self.libraries)
        return {t.name: Choices(t, self.hardware, self.code_target, alternatives) for t in self.tasks}

    def tune(self, runner: Runner) -> TuningSummary:
        """Measure what the settings require and the store lacks. Raises UserError for bounds that cannot be measured on
        this machine.
        """
        if self.settings.scheduler is None:
            check_footprint(self.tasks, self.module.bounds, host.memory_bytes())
        self._add_target(runner)
        if self.settings.profile is not None and self.profile is not None:
            store_profile(self.store, self.profile)
        with RunningJob(self.store, self.settings, self.submitted) as running:
            tasks = list(self.choices.values())
            tuner = Tuner(
                tasks,
                self.target,
                runner,
                self.store,
                self.settings,
                running.name,
                self.libraries,
                self.report,
                running.beat,
                self.notice,
                self.elsewhere,
                self.predictor.likely,
            )
            return tuner.run()

    def _add_target(self, runner: Runner) -> None:
        """Add the target with the reference times of its units, and hold the runner to those on record.

        Raises MeasureError when no unit is as fast as the first that measured for the target.
        """
        known = self.store.target(self.target.key)
        times = runner.calibrate({} if known is None else dict(known.reference))
        self.store.add_target(replace(self.target, reference=tuple(times.items())))
        stored = self.store.target(self.target.key)
        if stored is not None and dict(stored.reference) != dict(times):  # another job was first
            runner.calibrate(dict(stored.reference))

    def build(
        self, policy: Policy = "measured", memory: Memory | None = None, refused: Refused = MappingProxyType({})
    ) -> BuildResult:
        """Build the programs that the store's records select. memory: overrides the settings; refused: variants left out"""
        how, key = memory or self.settings.memory, self.target.key
        stored = self.current_plans() if policy == "stored" else None
        # what is predicted does not look at what was measured
        predictor = replace(self.predictor, history=None, elsewhere=None) if policy == "predicted" else self.predictor
        lowered = self.lowered
        if self.several:  # the program for this device alone
            lowered = replace(lowered, module=DropDevices()(lowered.module))
        return build_programs(
            lowered, self.choices, self.facts, key, self.code_target, policy, how, stored, refused, predictor
        )

    def tested_build(self, runner: Runner, policy: Policy = "measured") -> BuildResult:
        """Build without variants that are wrong on the runner's device, unless the settings leave the self-test out.

        Raises BuildError when every form of a function is wrong, MeasureError when the device is lost."""
        if not self.settings.self_test:
            return self.build(policy)
        built, found = tested(lambda refused: self.build(policy, refused=refused), self.choices, runner)
        return replace(built, notes=(*built.notes, *found.notes()), self_test=found.to_json())

    def plan_sets(self) -> list[PlanSet]:
        """Return the plans of this model that were stored for this device, the current ones last."""
        workloads = frozenset(c.task.key for c in self.choices.values())
        return plan_sets(self.store, self.target.key, self.key, workloads)

    def current_plans(self) -> PlanSet:
        """Return the current plans. Raises UserError when none are stored."""
        found = self.plan_sets()
        if not found:
            raise UserError(
                f"wanted plans of this model for this device, found none in {self.store.where} that fit all its tasks; "
                "`relax-tune tune` stores some"
            )
        return found[-1]

    def store_plans(self, built: BuildResult) -> None:
        """Make a build's plans the current ones, all at once. Plans that are stored already are not added again."""
        texts = plan_texts(self.key, {self.choices[name].task.key: plan for name, plan in built.plans.items()})
        self.store.put_plans(self.target.key, texts)

    def artifact(self, built: BuildResult, pack: bool = False) -> Artifact:
        """Return a build of this model as an artifact, with its weights and its device; `Artifact.save` writes it.

        pack: store weights in the layouts of the chosen kernels, instead of packing them whenever the artifact is
            opened
        """
        programs, constants = tuple(built.programs.values()), self.lowered.module.constants
        if pack:
            programs, constants = pack_weights(programs, built.packings, constants)
        names = {b.name for p in programs for b in p.buffers if b.role == "const"}
        constants = {n: a for n, a in constants.items() if n in names}
        driven = {w.name for d in built.host_programs for w in d.weights}
        constants |= {n: self.lowered.module.constants[n] for n in driven}
        solver = installed_solver()  # with it more is decided: checks and reuse of memory differ
        extra = {
            "fingerprint": dict(self.target.fingerprint),
            "model": self.key,
            "notes": list(built.notes),
            "self_test": built.self_test,
            "solver": None if solver is None else solver.name,
            "target": self.target.key,
        }
        if built.quality is not None:
            extra["quality"] = built.quality
        return new_artifact(programs, constants, extra, built.host_programs, self.device.kind)


def store_profile(store: Store, profile: ShapeProfile) -> None:
    """Store a model's profile in the database, in place of earlier counts of its symbols."""
    for function, symbols in profile.histograms.items():
        for symbol, histogram in symbols.items():
            counts = canonical_json({str(value): count for value, count in histogram.values.items()})
            store.put_histogram(ShapeHistogram(profile.model, f"{function}.{symbol}", counts))


def stored_profile(store: Store, model: str) -> ShapeProfile:
    """Return the profile of a model in the database. Raises UserError when there is none."""
    found = ShapeProfile(model)
    for histogram in store.histograms(model):
        function, _, symbol = histogram.symbol.rpartition(".")
        found.add(function, symbol, Histogram.of({v: c for v, c in histogram.by_value.items() if v >= 0 and c > 0}))
    if not found.histograms:
        raise UserError(
            f"--shapes profile: wanted counts of the shapes this model was served, {store.where} has none; record some with "
            "`relax-tune run --record-shapes FILE` and give them with --profile FILE"
        )
    return found


def device_info(spec: str, store: Store | None = None) -> DeviceInfo:
    """Describe a device: one of this machine, which is opened and closed, or one that is not at hand (`_described`)."""
    described = _described(spec, store)
    if described is not None:
        return described
    device = open_device(spec)
    try:
        return device.info
    finally:
        device.close()


def _described(spec: str, store: Store | None) -> DeviceInfo | None:
    """Return a device that is not opened: a processor of `tuner/processors`, or a browser's with records in the store; else None."""
    found = described_device(spec)
    return page_device(spec, store) if found is None and store is not None else found


def build_here(job: Job, policy: Policy, notes: tuple[str, ...] = ()) -> BuildResult:
    """Build with a self-test on this machine's device, in a process of its own. Raises as `Job.tested_build`.

    notes: come before those of the build. Kernels for a device that is only described run on the one of its kind here, those of a
        browser only if there is one.
    """
    described = _described(job.settings.target, job.store)
    spec = job.settings.target if described is None else described.kind
    with contextlib.ExitStack() as stack:
        runner, why = None, ""
        if job.settings.self_test:
            try:
                runner = stack.enter_context(LocalRunner(spec))
            except MeasureError as error:
                if described is None or spec == "c":
                    raise
                why = f": {error}"
        built = job.build(policy) if runner is None else job.tested_build(runner, policy)
    if described is not None:
        here = "this machine's processor" if spec == "c" else "this machine's first adapter"
        tested_here = f"no kernel ran{why}" if runner is None else f"the self-test ran them on {here}"
        what = "processor" if spec == "c" else "browser"
        told = f"{job.settings.target}: a {what} that is described, not at hand: nothing is timed; {tested_here}"
        notes = (*notes, told)
    return replace(built, notes=(*notes, *built.notes))
