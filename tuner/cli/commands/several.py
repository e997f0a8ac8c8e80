"""Building and tuning for several devices: a target that is a list, such as `c,opencl`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from relax_tune.database.store import open_records, open_store
from relax_tune.errors import UserError
from relax_tune.home import HOME
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.placement import explain_placement
from relax_tune.tuner.cli.commands.options import print_json
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.job.job import open_runner
from relax_tune.tuner.placement.links import record_link
from relax_tune.tuner.placement.placed_job import PlacedJob, devices_named, placed_job
from relax_tune.tuner.settings import Policy, Settings


def build_several(
    job: PlacedJob, path: Path, policy: Policy, notes: tuple[str, ...], console: Console
) -> dict[str, Any]:
    """Build a model for several devices, write the artifact, and return the document of `--json`."""
    built = job.build(policy, notes)
    artifact = job.artifact(built)
    saved = artifact.save(path)
    say(console, explain_placement(artifact.placement))
    for note in built.notes:
        say(console, f"note: {note}")
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    return {
        "artifact": str(saved),
        "targets": {k: {"name": j.device.name, "key": j.target.key} for k, j in job.jobs.items()},
        "policy": policy,
        **artifact.placement.fields(),
        "notes": list(built.notes),
    }


def tune_several(job: PlacedJob, console: Console) -> Mapping[str, int]:
    """Measure every task on every device, then the links between them. Returns the new measurements of each device."""
    found = {}
    for kind, own in job.jobs.items():
        say(console, f"device: {own.device.kind}, {own.device.name}")
        with (
            contextlib.closing(open_runner(own.settings, lambda text: say(console, text))) as runner,
            ProgressView([(t.name, len(t.sites)) for t in own.tasks], console) as view,
        ):
            own.report = view.report
            work = own.tune(runner)
        found[kind] = work.measurements
        for name, problem in work.problems:
            say(console, f"note: {kind}: {name} could not be tuned to the end: {problem}")
        if kind != HOME:
            device = open_device(own.settings.target)
            try:
                link = record_link(own.store, own.target, device, time.time())
            finally:
                device.close()
            say(console, f"link of {kind}: {link}")
    return found


def build_command(
    module: IRModule, path: Path, settings: Settings, policy: Policy, *, pack: bool, verify: bool, json: bool
) -> None:
    """Run `relax-tune build` for several devices."""
    if pack:
        raise UserError("--pack wants one --target, found several; leave it out")
    devices = devices_named(settings.target)
    store, notes = open_records(settings.db)
    with store:
        job = placed_job(module, devices, store, settings, verify=verify)
        document = build_several(job, path, policy, notes, make_console(stderr=json))
    if json:
        print_json(document)


def tune_command(module: IRModule, path: Path, settings: Settings, *, compare: bool, verify: bool, json: bool) -> None:
    """Run `relax-tune tune` for several devices."""
    if compare or settings.scheduler is not None:
        raise UserError("--compare and --scheduler want one --target, found several; leave them out")
    console, devices = make_console(stderr=json), devices_named(settings.target)
    with open_store(settings.db, wait_secs=settings.wait_secs) as store:
        job = placed_job(module, devices, store, settings, verify=verify)
        measured = tune_several(job, console)
        document = build_several(job, path, "measured", (), console)
    if json:
        print_json({**document, "measurements": dict(measured)})
