"""`relax-tune report`: what tuning did, as one HTML file.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.database.engine import default_url
from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.errors import DatabaseError, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import SUFFIX, load_artifact
from relax_tune.tuner.cli.commands.options import Bounds, Json, SettingFlags, print_json, with_settings
from relax_tune.tuner.cli.commands.show import is_model
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.view import write_page
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.job.lowered_model import parse_bounds
from relax_tune.tuner.measure.cluster.address import check_needed, tls_files
from relax_tune.tuner.report.collect import of_artifact, of_database, of_job, of_run, of_submitted
from relax_tune.tuner.report.devices import fleet_section, lent_now
from relax_tune.tuner.report.page import environment
from relax_tune.tuner.report.sections import TASKS, Limits
from relax_tune.tuner.report.subject import Subject
from relax_tune.tuner.settings import Settings

_DATABASES = (".db", ".sqlite", ".sqlite3")
_NAME = "relax-tune-report.html"
_KINDS = "expected an .rta file, a model, a database, or the id of one job or run"

SubjectArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ARTIFACT|MODEL|JOB|DATABASE",
        help="An .rta file; a model, as `tune` takes it; the id of a job or a tuning run, or the start of it; a database. "
        "[default: the whole database of --db]",
    ),
]


@with_settings("report")
def report(
    subject: SubjectArgument = None,
    *,
    settings: SettingFlags,
    bound: Bounds = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help=f"Where to write it. [default: {_NAME}]")
    ] = None,
    tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", help="Tasks of each device with a picture, the costliest first.")
    ] = TASKS,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TEXT", help="Show only tasks whose names contain this. [default: all]"),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="RUN|DATABASE",
            help="Another run of this database, by the start of its id, or another database, to compare with. [default: none]",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write an HTML report of what tuning did.

    Times over shapes and what is dispatched, convergence, where the time of a model goes, failures, devices, and the regret against the
    best on record. The file loads nothing, so it can be sent. With a --scheduler it also shows the units that workers lend now.
    """
    of_model = subject is not None and not _is_database(subject) and is_model(subject) and not subject.endswith(SUFFIX)
    chosen = settings.load_any()
    if tasks < 0:
        raise UserError(f"--tasks expects a number of at least 0, got {tasks}")
    check_needed(chosen.scheduler, *(settings.given[name] for name in ("ca", "certificate", "key")))
    environment()  # says what to install before anything is read
    with contextlib.ExitStack() as stack:
        other = None if compare is None else _compared_store(stack, compare, subject, chosen)
        limits = Limits(tasks, None, task or "", other)
        if of_model and subject is not None:
            reported = _of_model(subject, settings, parse_bounds(bound or []), limits)
        else:
            reported = _collect(subject, chosen, bound or [], limits)
    tls = tls_files(chosen.ca, chosen.certificate, chosen.key)
    lent = None if chosen.scheduler is None else lent_now(chosen.scheduler, tls, chosen.wait_secs)
    if lent is not None:
        reported = replace(reported, sections=(*reported.sections, fleet_section(lent)))
    path = out or Path(_NAME)
    size = write_page(path, reported, "--out")
    if json:
        print_json({"report": str(path), **reported.to_json()})
    else:
        say(make_console(), f"wrote {path} ({size / 1e6:.1f} MB)")


def _compared_store(
    stack: contextlib.ExitStack, compare: str, subject: str | None, chosen: Settings
) -> tuple[JobQueue, str]:
    """Open the store to compare with. Raises UserError unless it is a database or one run."""
    own = subject if subject is not None and _is_database(subject) else chosen.db
    store = stack.enter_context(
        contextlib.closing(open_queue(compare if _is_database(compare) else own, read_only=True))
    )
    if _is_database(compare):
        return store, compare
    runs = [run.id for run in store.jobs() if run.id.startswith(compare)]
    if len(runs) != 1:
        known = ", ".join(runs[:20]) or "none; see `relax-tune jobs runs`"
        raise UserError(
            f"--compare expects a database or the start of the id of one run, got {compare!r:.80}; it fits {known}"
        )
    return store, runs[0]


def _of_model(model: str, flags: SettingFlags, bounds: Mapping[str, tuple[int, int]], limits: Limits) -> Subject:
    """Return a model with its records for one device."""
    module = load_model(model, bounds, **flags.load_any().import_options)
    chosen = flags.load()  # a device is chosen for a model that can be read
    with open_queue(chosen.db, read_only=True) as store:
        return of_job(device_job(module, device_info(chosen.target, store), store, chosen), model, limits)


def _collect(subject: str | None, chosen: Settings, bounds: Sequence[str], limits: Limits) -> Subject:
    """Return what an argument names, with its records. Raises UserError for what is nothing of these."""
    database = subject if subject is not None and _is_database(subject) else None
    if bounds:
        raise UserError(f"--bound expects a MODEL, got {subject or chosen.db or default_url()!r:.80}; leave it out")
    artifact = load_artifact(subject) if subject is not None and subject.endswith(SUFFIX) else None
    try:
        opened = open_queue(database or chosen.db, read_only=True)
    except DatabaseError as error:
        if subject is None or database is not None or artifact is not None:
            raise
        raise UserError(
            f"{_KINDS}, got {subject!r:.80}; there is no such file, and for an id the database is missing: {error}"
        ) from None
    with contextlib.closing(opened) as store:
        if subject is None or database is not None:
            return of_database(store, limits)
        if artifact is not None:
            return of_artifact(store, artifact, Path(subject).name, limits)
        return _of_id(store, subject, limits)


def _of_id(store: JobQueue, start: str, limits: Limits) -> Subject:
    """Return the submitted job or the tuning run whose id starts so. Raises UserError that lists the choice."""
    jobs = store.find(start)
    runs = [run for run in store.jobs() if run.id.startswith(start)]
    exact = [job for job in jobs if job.id == start] or jobs
    if len(exact) == 1 and (not runs or exact[0].id == start):
        return of_submitted(store, exact[0], limits)
    if len(runs) == 1 and not exact:
        return of_run(store, runs[0], limits)
    names = ", ".join([*(job.id for job in exact), *(run.id for run in runs)][:20])
    known = f"has: {names}; give more of it" if names else "has none; see `relax-tune jobs list` and `jobs runs`"
    raise UserError(f"{_KINDS}, got {start!r:.80}; {store.where} {known}")


def _is_database(subject: str) -> bool:
    return subject.startswith(("sqlite:", "postgresql:", "postgresql+")) or subject.endswith(_DATABASES)
