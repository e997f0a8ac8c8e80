"""`relax-tune build`: an artifact from records only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from relax_tune.database.records import Measurement
from relax_tune.database.store import open_records
from relax_tune.ir.frontend.load import load_model
from relax_tune.tuner.cli.commands.options import (
    Bounds,
    Json,
    Model,
    SettingFlags,
    Verify,
    among,
    print_json,
    with_settings,
)
from relax_tune.tuner.cli.commands.several import build_command
from relax_tune.tuner.cli.destination import Out, Overwrite, artifact_path, check_destination
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.quality import show_quality
from relax_tune.tuner.cli.report.table import dispatch_table, task_table
from relax_tune.tuner.emit.build import BuildResult, check_policy
from relax_tune.tuner.job.job import Job, build_here, device_info, model_key, parse_bounds
from relax_tune.tuner.placement.placed_job import names_several
from relax_tune.tuner.plan.task_rows import TaskRow, task_rows
from relax_tune.tuner.quality.activation_loss import with_activation_loss
from relax_tune.tuner.quality.choose import Goal, built_choice, read_goal
from relax_tune.tuner.settings import Policy


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
    pack: Annotated[
        bool,
        typer.Option(
            "--pack",
            help="Store weights as the chosen kernels want them, not as the model has them: packed once, here, not at every start.",
        ),
    ] = False,
    out: Out = None,
    overwrite: Overwrite = False,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Build a model's artifact from what has been measured. Measures nothing.

    Every kernel runs once against the reference before it is written (`--no-self-test` leaves this out).

    The same model, records, policy, precision, effort and profile (which set the shapes plans are made from) give the same bytes.
    A task without a usable record gets its generic kernel.
    """
    chosen, wanted, console = settings.load(), check_policy(policy), make_console(stderr=json)
    module = load_model(model, parse_bounds(bound or []), chosen.cache_dtype, trust=chosen.trust_model)
    goal = read_goal(chosen, module, wanted)
    path = artifact_path(model, chosen.target, out)
    check_destination(path, model_key(module), overwrite)
    if names_several(chosen.target):
        return build_command(module, path, chosen, wanted, pack=pack, verify=verify, json=json)
    store, notes = open_records(chosen.db)
    with store:
        job = Job(module, device_info(chosen.target, store), store, chosen, verify=verify)
        job, built = _built(job, goal, wanted, notes, console)
        saved = job.artifact(built, pack).save(path)
        rows = task_rows(job.choices, built.plans, _records(job))
    console.print(task_table(rows))
    console.print(dispatch_table(rows))
    show_quality(console, built.quality)
    for note in built.notes:
        say(console, f"note: {note}")
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    if json:
        print_json({"artifact": str(saved), "policy": wanted, **_document(job, built, rows)})


def _document(job: Job, built: BuildResult, rows: Sequence[TaskRow]) -> dict[str, Any]:
    return {
        "target": {"kind": job.device.kind, "name": job.device.name, "key": job.target.key},
        "tasks": [row.to_json() for row in rows],
        "notes": list(built.notes),
        **({} if built.quality is None else {"quality": built.quality}),
    }


def _built(
    job: Job, goal: Goal | None, policy: Policy, notes: tuple[str, ...], console: Console
) -> tuple[Job, BuildResult]:
    """Build a job's model, or the form of it that is chosen under a bound."""
    if goal is None:
        return job, with_activation_loss(job, build_here(job, policy, notes))
    return built_choice(job, goal, notes, partial(say, console))


def _records(job: Job) -> dict[str, list[Measurement]]:
    return {name: job.records(c.task.key, c.task.regime) for name, c in job.choices.items()}
