"""`relax-tune build`: an artifact from records only.

Tests: `tests/tuner/cli/test_cli.py`, `tests/wrong_input/test_commands.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from relax_tune.database.records import Measurement
from relax_tune.database.store import open_records
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.device.c_objects import FAMILIES
from relax_tune.tuner.cli.commands.multi_device import build_several
from relax_tune.tuner.cli.commands.options import (
    Bounds,
    Json,
    Model,
    RequireMeasured,
    SettingFlags,
    Verify,
    among,
    print_json,
    with_settings,
)
from relax_tune.tuner.cli.destination import Out, Overwrite, artifact_path, check_destination
from relax_tune.tuner.cli.report.console import make_console, print_sections, say, warn
from relax_tune.tuner.emit.build import BuildResult, check_policy
from relax_tune.tuner.emit.unmeasured import check_required, unmeasured_warning
from relax_tune.tuner.job.device_job import DeviceJob, build_here
from relax_tune.tuner.job.devices import compiled_kinds
from relax_tune.tuner.job.job import device_infos, job_for
from relax_tune.tuner.job.lowered_model import model_key, parse_bounds
from relax_tune.tuner.plan.task_rows import TaskRow, task_rows
from relax_tune.tuner.quality.activation_loss import with_activation_loss
from relax_tune.tuner.quality.choose import Goal, built_choice, read_goal
from relax_tune.tuner.report.builds import build_section
from relax_tune.tuner.settings import Policy

PackOption = Annotated[
    bool | None,
    typer.Option(
        "--pack/--no-pack",
        help="Store weights as the chosen kernels want them, not as the model has them: packed once, here, not at every start. "
        "[default: on target c]",
    ),
]

CpuOption = Annotated[
    str | None,
    typer.Option(
        "--cpu",
        metavar="KIND,...",
        autocompletion=among(*FAMILIES, "native"),
        help="Also store the kernels of target c compiled for x86-64-v2, x86-64-v3, x86-64-v4 (levels of x86-64), or native: processors "
        "like this one. A server on such a processor needs no compiler. [default: none, then only their source]",
    ),
]


@with_settings("build")
def build(
    model: Model,
    *,
    settings: SettingFlags,
    bound: Bounds = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="|".join(get_args(Policy)),
            autocompletion=among(*get_args(Policy)),
            help="measured: the fastest by record, per range of shapes. stored: what `tune` chose last, or `plan --restore` since. "
            "library: library calls wherever there are any. generic: untuned kernels only.",
        ),
    ] = "measured",
    pack: PackOption = None,
    cpu: CpuOption = None,
    require_measured: RequireMeasured = False,
    out: Out = None,
    overwrite: Overwrite = False,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Build a model's artifact from what has been measured. Measures nothing.

    Every kernel runs once against the reference before it is written (`--no-self-test` leaves this out).

    The same model, records, policy, precision, effort and profile (which set the shapes that plans are computed for) give the same bytes.
    A task without a usable record gets an untuned kernel, which a warning says. A database file that is named has to exist.
    """
    policy, console = check_policy(policy), make_console(stderr=json)
    check_required(require_measured, policy, "--require-measured")
    module = load_model(model, parse_bounds(bound or []), **settings.load_any().import_options)
    chosen = settings.load()  # a device is chosen for a model that can be read
    kinds = compiled_kinds(cpu.split(",") if cpu is not None else (), chosen.target)
    goal = read_goal(chosen, module, policy)
    path = artifact_path(model, chosen.target, out)
    check_destination(path, model_key(module), overwrite)
    store, notes = open_records(chosen.db)
    with store:
        whole = job_for(module, device_infos(chosen.target, store), store, chosen, verify=verify)
        if len(whole.parts) > 1:
            return build_several(
                whole, path, policy, notes, console, pack=pack, cpu=kinds, json=json, required=require_measured
            )
        job, built = _built(whole.first, goal, policy, notes, console)
        unmeasured = unmeasured_warning([built.plans], policy, store, job.device.name, require_measured)
        artifact = job.artifact(built, pack)
        saved = (artifact.compiled_for(kinds) if kinds else artifact).save(path)
        rows = task_rows(job.task_variants, built.plans, _records(job))
    print_sections(console, build_section(rows, built.quality))
    for note in built.notes:
        say(console, f"note: {note}")
    warn(unmeasured)
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    if json:
        print_json({"artifact": str(saved), "policy": policy, **_document(job, built, rows)})


def _document(job: DeviceJob, built: BuildResult, rows: Sequence[TaskRow]) -> dict[str, Any]:
    return {
        "target": {"kind": job.device.kind, "name": job.device.name, "key": job.target.key},
        "tasks": [row.to_json() for row in rows],
        "notes": list(built.notes),
        **({} if built.quality is None else {"quality": built.quality}),
    }


def _built(
    job: DeviceJob, goal: Goal | None, policy: Policy, notes: tuple[str, ...], console: Console
) -> tuple[DeviceJob, BuildResult]:
    """Build a job's model, or the form of it that is chosen under a bound."""
    if goal is None:
        return job, with_activation_loss(job, build_here(job, policy, notes))
    return built_choice(job, goal, notes, partial(say, console))


def _records(job: DeviceJob) -> dict[str, list[Measurement]]:
    return {name: job.records(c.task.key, c.task.regime) for name, c in job.task_variants.items()}
