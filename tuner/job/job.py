"""A job from end to end: a model tuned and built for a list of devices, usually one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from relax_tune.database.store import Store
from relax_tune.errors import UserError
from relax_tune.home import HOME
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.runtime.artifact import Artifact, new_artifact
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.placement import Placement
from relax_tune.tuner.emit.build import MEMORY, BuildResult
from relax_tune.tuner.emit.emit_placed import DeviceSide, PlacedPrograms, PlacementPlan, emit_placed
from relax_tune.tuner.job.device_job import DeviceJob, build_here
from relax_tune.tuner.job.devices import device_info, open_runner, target_names
from relax_tune.tuner.job.lowered_model import LoweredModel
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.placement.choose import FunctionPlacement, place_functions
from relax_tune.tuner.placement.links import Link, record_link, stored_link
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.settings import Policy, Settings

UNMEASURED = Link(50e-6, 5e9, 50e-6, 5e9)
"""Link assumed without records: 50 us latency, 5 GB/s."""

Report = Callable[[TuningProgress], None]


@dataclass(frozen=True, slots=True, eq=False)
class Build:
    """A build of a model.

    Attributes:
        parts: Build for each device on its own, by kind. With one device it is the whole build.
        notes: What tasks and links lack, one sentence each.
        placements: Placement of each function; empty with one device.
        placed: Programs of all placements; None with one device.
    """

    parts: Mapping[str, BuildResult]
    notes: tuple[str, ...]
    placements: Mapping[str, FunctionPlacement] | None = None
    placed: PlacedPrograms | None = None

    @staticmethod
    def of(part: DeviceJob, built: BuildResult) -> Build:
        """Return the build for one device."""
        return Build({part.device.kind: built}, built.notes)

    @property
    def plans(self) -> list[Mapping[str, TaskPlan]]:
        """The plans for each device."""
        return [built.plans for built in self.parts.values()]


@dataclass(eq=False)
class Job:
    """A model on a list of devices, which share its lowered module.

    Attributes:
        parts: The job for each device, by kind.
    """

    parts: Mapping[str, DeviceJob]

    @staticmethod
    def of(part: DeviceJob) -> Job:
        """Return the job for one device."""
        return Job({part.device.kind: part})

    def only(self, option: str) -> DeviceJob:
        """Return the job for the only device.

        Args:
            option: What needs a single device, for the error.

        Raises:
            UserError: The job is for several devices.
        """
        if len(self.parts) > 1:
            raise UserError(f"{option} expects one target, got several; leave it out")
        return self.first

    @property
    def first(self) -> DeviceJob:
        return next(iter(self.parts.values()))

    @property
    def lowered(self) -> LoweredModule:
        return self.first.lowered

    @cached_property
    def links(self) -> dict[str, Link | None]:
        """Link of every device other than the host, by the latest records; None without records."""
        return {k: stored_link(part.store, part.target.key) for k, part in self.parts.items() if k != HOME}

    def tune(
        self,
        notice: Callable[[str], None] = lambda _: None,
        watch: Callable[[DeviceJob], AbstractContextManager[Report]] = lambda _: nullcontext(lambda _: None),
    ) -> dict[str, TuningSummary]:
        """Measure every task on each device in turn, and the links between the devices. Returns counts by kind of device.

        Args:
            notice: Receives a sentence when something is waited for, and about each link.
            watch: Entered while one device is tuned; gives what is called after every batch.
        """
        work = {}
        for kind, part in self.parts.items():
            with contextlib.closing(open_runner(part.settings, notice)) as runner, watch(part) as report:
                work[kind] = part.tune(runner, report, notice)
            if kind != HOME:
                device = open_device(part.settings.target)
                try:
                    notice(f"link of {kind}: {record_link(part.store, part.target, device, time.time())}")
                finally:
                    device.close()
        return work

    def build(
        self,
        policy: Policy = "measured",
        notes: tuple[str, ...] = (),
        finish: Callable[[DeviceJob, BuildResult], BuildResult] = lambda _, built: built,
    ) -> Build:
        """Build from records, with a self-test on this machine, and choose placements if there are several devices.

        Args:
            notes: Precede the notes of the build.
            finish: Completes a build for one device, such as by notes on its accuracy.

        Raises:
            BuildError: Every form of a function is wrong.
            MeasureError: A device is lost.
        """
        if len(self.parts) == 1:
            return Build.of(self.first, finish(self.first, build_here(self.first, policy, notes)))
        parts = {k: build_here(part, policy) for k, part in self.parts.items()}
        links = {k: UNMEASURED if link is None else link for k, link in self.links.items()}
        placements = place_functions(self.lowered, self.sides(parts), links)
        placed = self.emit(parts, {n: p.placements for n, p in placements.items()})
        missing = [
            f"{k}: no record of its link, so 50 us and 5 GB/s are assumed; `relax-tune tune` measures it"
            for k, link in self.links.items()
            if link is None
        ]
        of_parts = [f"{k}: {note}" for k, built in parts.items() for note in built.notes]
        return Build(parts, (*notes, *missing, *of_parts, *placed.notes), placements, placed)

    def sides(self, parts: Mapping[str, BuildResult]) -> dict[str, DeviceSide]:
        """Return the plans and variants of each device."""
        return {k: DeviceSide(p.task_variants, parts[k].plans, p.code_target) for k, p in self.parts.items()}

    def emit(self, parts: Mapping[str, BuildResult], placements: Mapping[str, PlacementPlan]) -> PlacedPrograms:
        """Emit the programs of placements from the builds for each device."""
        return emit_placed(self.lowered, placements, self.sides(parts), MEMORY[self.first.settings.memory])

    def artifact(self, build: Build, pack: bool | None = None) -> Artifact:
        """Return a build as an artifact with its weights; `Artifact.save` writes it.

        Args:
            pack: As of `DeviceJob.artifact`; ignored with several devices.
        """
        if build.placed is None:
            return self.first.artifact(build.parts[self.first.device.kind], pack)
        placed = build.placed
        functions = tuple(p.record(placed.names[n]) for n, p in (build.placements or {}).items())
        extra: dict[str, Any] = {
            "fingerprints": {k: dict(part.target.fingerprint) for k, part in self.parts.items()},
            "lowering": self.first.model.facts(),
            "model": self.first.key,
            "notes": list(build.notes),
            "self_test": {k: built.self_test for k, built in build.parts.items()},
            "targets": {k: part.target.key for k, part in self.parts.items()},
            "tasks": len({n for built in build.parts.values() for n in built.plans}),
            "unmeasured": list(
                dict.fromkeys(n for built in build.parts.values() for n, p in built.plans.items() if not p.times)
            ),
        }
        return placed_artifact(self.lowered, placed, Placement(placed.parts, functions), extra)


def placed_artifact(
    lowered: LoweredModule, placed: PlacedPrograms, placement: Placement, extra: Mapping[str, Any]
) -> Artifact:
    """Return placed programs as an artifact, with the weights that they read."""
    programs = tuple(placed.programs.values())
    names = {b.name for p in programs for b in p.buffers if b.role == "const"}
    names |= {w.name for d in placed.host_programs for w in d.weights}
    constants = {n: a for n, a in lowered.module.constants.items() if n in names}
    return new_artifact(programs, constants, extra, placed.host_programs, placement=placement)


def device_infos(target: str, store: Store | None = None) -> dict[str, DeviceInfo]:
    """Describe the devices that a target lists, by name.

    Args:
        store: Describes a browser's device by its records; only for a target of one device, since parts of a placed program
            are tested on this machine.

    Raises:
        UserError: A device does not exist, or is listed twice.
    """
    names = target_names(target)
    return {name: device_info(name, store if len(names) == 1 else None) for name in names}


def job_for(
    module: IRModule,
    devices: Mapping[str, DeviceInfo],
    store: Store,
    settings: Settings,
    rules: Sequence[Rule] = (),
    verify: bool = False,
) -> Job:
    """Return the job of a model for some devices.

    Args:
        devices: By name in `--target`.
        rules: Rewriting rules of the user, each applied at its level.
        verify: Check the module before and after every pass.

    Raises:
        UserError: Two devices have one kind, or a setting needs a single device.
    """
    several = len(devices) > 1
    if several and settings.checks:
        raise UserError("--checks expects a build for one device, got several; leave it out or name one --target")
    model = LoweredModel(module, settings, rules, verify, several_devices=several)
    parts: dict[str, DeviceJob] = {}
    for name, device in devices.items():
        if device.kind in parts:
            raise UserError(f"--target expects devices of distinct kinds, got {device.kind} twice; leave one out")
        parts[device.kind] = DeviceJob(model, device, store, replace(settings, target=name) if several else settings)
    return Job(parts)
