"""Output of `tune` and `build` for several devices: a target that is a list, such as `c,opencl`.

Tests: `tests/tuner/job/test_placed_job.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.program.placement import explain_placement
from relax_tune.tuner.cli.commands.options import print_json
from relax_tune.tuner.cli.report.console import make_console, say, warn
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.emit.unmeasured import unmeasured_warning
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.job.job import Job, Report, device_infos, job_for
from relax_tune.tuner.settings import Policy, Settings


def build_several(
    job: Job,
    path: Path,
    policy: Policy,
    notes: tuple[str, ...],
    console: Console,
    *,
    json: bool,
    pack: bool | None = None,
    cpu: Sequence[str] = (),
    required: bool = False,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Build a model for several devices, write the artifact, and describe it.

    Args:
        json: Print the description as JSON too.
        pack: Refused, since packed weights are for one device.
        cpu: Kinds of processors that kernels of target `c` are compiled for.
        required: A task without a usable record on one of the devices is an error.
        more: Further fields of the JSON document.
    """
    if pack:
        job.only("--pack")
    build = job.build(policy, notes)
    devices = ", ".join(part.device.name for part in job.parts.values())
    unmeasured = unmeasured_warning(build.plans, policy, job.first.store, devices, required)
    artifact = job.artifact(build)
    if cpu:
        artifact = artifact.compiled_for(cpu)
    saved = artifact.save(path)
    say(console, explain_placement(artifact.placement))
    for note in build.notes:
        say(console, f"note: {note}")
    warn(unmeasured)
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    if json:
        document = {
            "artifact": str(saved),
            "targets": {k: {"name": part.device.name, "key": part.target.key} for k, part in job.parts.items()},
            "policy": policy,
            **artifact.placement.fields(),
            "notes": list(build.notes),
        }
        print_json({**document, **(more or {})})


def tune_command(
    module: IRModule, path: Path, settings: Settings, *, compare: bool, required: bool, verify: bool, json: bool
) -> None:
    """Run `relax-tune tune` for several devices."""
    if compare or settings.scheduler is not None:
        raise UserError("--compare and --scheduler expect one --target, got several; leave them out")
    console, devices = make_console(stderr=json), device_infos(settings.target)

    @contextmanager
    def watch(part: DeviceJob) -> Iterator[Report]:
        say(console, f"device: {part.device.kind}, {part.device.name}")
        with ProgressView([(t.name, len(t.sites)) for t in part.tasks], console) as view:
            yield view.report

    with open_store(settings.db, wait_secs=settings.wait_secs) as store:
        job = job_for(module, devices, store, settings, verify=verify)
        work = job.tune(lambda text: say(console, text), watch)
        for kind, summary in work.items():
            for note in summary.notes():
                say(console, f"note: {kind}: {note}")
        measured = {kind: summary.measurements for kind, summary in work.items()}
        build_several(job, path, "measured", (), console, json=json, required=required, more={"measurements": measured})
