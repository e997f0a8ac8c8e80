"""`relax-tune install`: a pack onto a device of this machine. Imports no frontend.

Tests: `tests/tuner/cli/test_cli_pack.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relax_tune.database.store import open_store
from relax_tune.tuner.cli.commands.options import Json, RequireMeasured, SettingFlags, print_json, with_settings
from relax_tune.tuner.cli.destination import Out, Overwrite, check_destination, default_path
from relax_tune.tuner.cli.report.console import make_console, print_sections, say
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.pack.install import Installation, Installer
from relax_tune.tuner.plan.task_rows import TaskRow, task_rows
from relax_tune.tuner.report.builds import build_section
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
    require_measured: RequireMeasured = False,
    out: Out = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Install a pack on a device: verify, time, build its artifact.

    Needs none of the packages that import models. What was fastest on like devices is tried first; their times never count here. What
    the database holds already is not measured again, so a second installation measures nothing.
    """
    check_strategy(settings.load_any().strategy)
    console = make_console(stderr=json)
    installer = Installer.read(file, settings.load_any(), digest)
    chosen = settings.load()  # a device is chosen for a pack that can be read
    installer = replace(installer, settings=replace(installer.settings, target=chosen.target))
    path = out or default_path(file.stem, chosen.target)
    check_destination(path, installer.pack.model, overwrite)
    tell = partial(say, console)
    with (
        contextlib.closing(LocalRunner(chosen.target)) as runner,  # first, so that a missing device creates no database
        open_store(chosen.db, wait_secs=chosen.wait_secs, notice=tell) as store,
    ):
        job = installer.open(runner, store, trust_records)
        tell(f"device: {job.device.kind}, {job.device.name}")
        tell(f"database: {store.where}")
        with ProgressView([(t.name, len(t.sites)) for t in job.tasks], console) as view:
            installation = installer.run(job, runner, measure, view.report, tell, require_measured)
        records = {name: job.records(c.task.key, c.task.regime) for name, c in job.task_variants.items()}
    rows = task_rows(job.task_variants, installation.built.plans, records)
    saved = installation.artifact.save(path)
    _print_result(installation, rows, measure, console)
    tell(f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    if json:
        tasks = [row.to_json() for row in rows]
        target = {"kind": job.device.kind, "name": job.device.name, "key": job.target.key}
        print_json({"artifact": str(saved), "target": target, **installation.to_json(), "tasks": tasks})


def _print_result(installation: Installation, rows: Sequence[TaskRow], measure: bool, console: Console) -> None:
    print_sections(console, build_section(rows))
    for name, problem in installation.work.problems:
        say(console, f"note: {name} could not be tuned to the end: {problem}")
    for note in installation.built.notes:
        say(console, f"note: {note}")
    say(console, _summary(installation, measure))


def _summary(installation: Installation, measure: bool) -> str:
    how = f"cold: {installation.work.trials} candidates timed"
    if installation.warm:
        how = "warm: nothing measured" if measure else "nothing timed, as asked"
    stages = ", ".join(f"{stage} {secs:.1f}" for stage, secs in installation.secs.items())
    like = (
        f"; tried first what was fastest on {', '.join(installation.like)}"
        if installation.like and not installation.warm
        else ""
    )
    return f"installed in {sum(installation.secs.values()):.1f} s ({stages}; {how}){like}"
