"""A model for several devices: a job for each device, one placement, one artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from relax_tune.runtime.program.placement import Placement
from relax_tune.tuner.emit.build import MEMORY, BuildResult
from relax_tune.tuner.emit.emit_placed import DeviceSide, PlacedPrograms, PlacementPlan, emit_placed
from relax_tune.tuner.job.job import Job, build_here, device_info
from relax_tune.tuner.placement.choose import FunctionPlacement, place_functions
from relax_tune.tuner.placement.links import Link, stored_link
from relax_tune.tuner.settings import Policy, Settings

UNMEASURED = Link(50e-6, 5e9, 50e-6, 5e9)
"""A link without records: 50 us, and 5 GB/s."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBuild:
    """A build for several devices.

    built: the build for each device by itself, whose plans the parts have
    placements: by function
    programs: of all placements
    notes: what tasks and links lack, one sentence each
    """

    built: Mapping[str, BuildResult]
    placements: Mapping[str, FunctionPlacement]
    programs: PlacedPrograms
    notes: tuple[str, ...]


@dataclass(eq=False)
class PlacedJob:
    """A model for several devices: a job for each, over one lowered module. jobs: by the kind of the device"""

    jobs: Mapping[str, Job]

    @property
    def first(self) -> Job:
        return next(iter(self.jobs.values()))

    @cached_property
    def lowered(self) -> LoweredModule:
        return self.first.lowered

    @cached_property
    def links(self) -> dict[str, Link | None]:
        """The link of every device but the host's, by the latest records; None without any."""
        return {k: stored_link(job.store, job.target.key) for k, job in self.jobs.items() if k != HOME}

    def sides(self, built: Mapping[str, BuildResult]) -> dict[str, DeviceSide]:
        """Return what the parts on each device are built from."""
        return {k: DeviceSide(job.choices, built[k].plans, job.code_target) for k, job in self.jobs.items()}

    def build(self, policy: Policy = "measured", notes: tuple[str, ...] = ()) -> PlacedBuild:
        """Build for each device with a self-test, choose placements, and emit their programs. Measures nothing.

        Raises: as `build_here`.
        """
        built = {k: build_here(job, policy) for k, job in self.jobs.items()}
        sides = self.sides(built)
        links = {k: UNMEASURED if link is None else link for k, link in self.links.items()}
        placements = place_functions(self.lowered, sides, links)
        programs = self.emit(built, {n: p.placements for n, p in placements.items()})
        found = [*notes]
        for k, link in self.links.items():
            if link is None:
                found.append(
                    f"{k}: no record of its link, so 50 us and 5 GB/s are assumed; `relax-tune tune` measures it"
                )
        for k, b in built.items():
            found += [f"{k}: {note}" for note in b.notes]
        return PlacedBuild(built, placements, programs, (*found, *programs.notes))

    def emit(self, built: Mapping[str, BuildResult], placements: Mapping[str, PlacementPlan]) -> PlacedPrograms:
        """Emit the programs of placements from the plans of the builds for each device."""
        return emit_placed(self.lowered, placements, self.sides(built), MEMORY[self.first.settings.memory])

    def artifact(self, build: PlacedBuild) -> Artifact:
        """Return a build as an artifact, with the weights; `Artifact.save` writes it."""
        found = build.programs
        functions = tuple(p.record(found.names[n]) for n, p in build.placements.items())
        extra: dict[str, Any] = {
            "fingerprints": {k: dict(job.target.fingerprint) for k, job in self.jobs.items()},
            "model": self.first.key,
            "notes": list(build.notes),
            "self_test": {k: b.self_test for k, b in build.built.items()},
            "targets": {k: job.target.key for k, job in self.jobs.items()},
        }
        return placed_artifact(self.lowered, found, Placement(found.parts, functions), extra)


def placed_artifact(
    lowered: LoweredModule, found: PlacedPrograms, placement: Placement, extra: Mapping[str, Any]
) -> Artifact:
    """Return placed programs as an artifact, with those of the weights that they read."""
    programs = tuple(found.programs.values())
    names = {b.name for p in programs for b in p.buffers if b.role == "const"}
    names |= {w.name for d in found.host_programs for w in d.weights}
    constants = {n: a for n, a in lowered.module.constants.items() if n in names}
    return new_artifact(programs, constants, extra, found.host_programs, placement=placement)


def names_several(target: str) -> bool:
    """Return whether a target is a list of devices."""
    return "," in target


def devices_named(target: str) -> dict[str, DeviceInfo]:
    """Return the devices of a list of names, by name. Raises UserError for a device that is not there, or named twice."""
    names = [name.strip() for name in target.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--target wants devices of distinct kinds, found {name} twice; leave one out")
    return {name: device_info(name) for name in names}


def placed_job(
    module: IRModule,
    devices: Mapping[str, DeviceInfo],
    store: Store,
    settings: Settings,
    rules: Sequence[Rule] = (),
    verify: bool = False,
) -> PlacedJob:
    """Return the job of a model for several devices, of distinct kinds. Arguments as of `Job`; devices: by name.

    Raises: UserError for devices of one kind, and for settings that need a single device.
    """
    if settings.checks:
        raise UserError("--checks wants a build for one device, found several; leave it out or name one --target")
    jobs: dict[str, Job] = {}
    for name, device in devices.items():
        if device.kind in jobs:
            raise UserError(f"--target wants devices of distinct kinds, found {device.kind} twice; leave one out")
        own = replace(settings, target=name)
        jobs[device.kind] = Job(module, device, store, own, rules=rules, verify=verify, several=True)
    lowered = next(iter(jobs.values())).lowered
    for job in jobs.values():
        job.lowered = lowered  # one module, whose variables are the same in all
    return PlacedJob(jobs)
