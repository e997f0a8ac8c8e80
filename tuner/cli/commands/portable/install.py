"""`relax-tune install`: a pack onto a device of this machine. Imports no frontend."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relax_tune.database.store import open_store
from relax_tune.tuner.cli.commands.options import Json, SettingFlags, print_json, with_settings
from relax_tune.tuner.cli.destination import Out, Overwrite, check_destination, default_path
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.cli.report.table import dispatch_table, task_table
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.pack.install import Installation, Installer
from relax_tune.tuner.plan.task_rows import TaskRow, task_rows
from relax_tune.tuner.search.registry import check_strategy


@with_settings("install")
def install(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pack (.rtp), as `relax-tune pack` writes it.")],
    *,
    settings: SettingFlags,
    digest: Annotated[
        str | None,
        typer.Option(
            "--digest", metavar="HASH", help="The hash that the pack is to have, as `pack` printed it. [default: any]"
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Time candidates here; or else build from what is on record, and from the pack's plans of like devices.",
        ),
    ] = True,
    trust_records: Annotated[
        bool,
        typer.Option(
            "--trust-records",
            help="Count the pack's times of this very device as measured here, and keep them in the database.",
        ),
    ] = False,
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Install a pack on a device: verify, time, build its artifact.

    Needs none of the packages that import models. What was fastest on like devices is tried first; their times never count here. What
    the database holds already is not measured again, so a second installation measures nothing.
    """
    chosen = settings.load()
    check_strategy(chosen.strategy)
    console = make_console(stderr=json)
    installer = Installer.read(file, chosen, digest)
    path = out or default_path(file.stem, chosen.target)
    check_destination(path, installer.pack.model, overwrite)
    tell = partial(say, console)
    with (
        contextlib.closing(LocalRunner(chosen.target)) as runner,  # no database is made for a device that is not there
        open_store(chosen.db, wait_secs=chosen.wait_secs, notice=tell) as store,
    ):
        job = installer.open(runner, store, notice=tell, trust_records=trust_records)
        tell(f"device: {job.device.kind}, {job.device.name}")
        tell(f"database: {store.where}")
        with ProgressView([(t.name, len(t.sites)) for t in job.tasks], console) as view:
            job.report = view.report
            made = installer.run(job, runner, measure)
        records = {name: job.records(c.task.key, c.task.regime) for name, c in job.choices.items()}
    rows = task_rows(job.choices, made.built.plans, records)
    saved = made.artifact.save(path)
    _tell_result(made, rows, measure, console)
    tell(f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    if json:
        tasks = [row.to_json() for row in rows]
        target = {"kind": job.device.kind, "name": job.device.name, "key": job.target.key}
        print_json({"artifact": str(saved), "target": target, **made.to_json(), "tasks": tasks})


def _tell_result(made: Installation, rows: Sequence[TaskRow], measure: bool, console: Console) -> None:
    console.print(task_table(rows))
    console.print(dispatch_table(rows))
    for name, problem in made.work.problems:
        say(console, f"note: {name} could not be tuned to the end: {problem}")
    for note in made.built.notes:
        say(console, f"note: {note}")
    say(console, _summary(made, measure))


def _summary(made: Installation, measure: bool) -> str:
    how = f"cold: {made.work.trials} candidates timed"
    if made.warm:
        how = "warm: nothing measured" if measure else "nothing timed, as asked"
    stages = ", ".join(f"{stage} {secs:.1f}" for stage, secs in made.secs.items())
    like = f"; tried first what was fastest on {', '.join(made.like)}" if made.like and not made.warm else ""
    return f"installed in {sum(made.secs.values()):.1f} s ({stages}; {how}){like}"
