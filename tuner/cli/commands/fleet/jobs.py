"""`relax-tune jobs ...`: submit models to tuning services and manage the jobs.

Tests: `tests/tuner/service/test_jobs_commands.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.jobs.submitted import ATTEMPTS, MOST_PRIORITY, SubmittedJob, SubmittedState
from relax_tune.database.store import open_store
from relax_tune.errors import ArtifactError, TryAgainLater, UserError
from relax_tune.printable import printable
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.atomic_write import name_new, reason, unused_name
from relax_tune.tuner.cli.app import COMMANDS, examples
from relax_tune.tuner.cli.commands.fleet.work import work
from relax_tune.tuner.cli.commands.options import (
    Bounds,
    Database,
    Json,
    SettingFlags,
    among,
    print_json,
    setting_option,
    with_settings,
)
from relax_tune.tuner.cli.destination import default_path
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.job.devices import check_submitted
from relax_tune.tuner.job.lowered_model import parse_bounds
from relax_tune.tuner.report.listings import job_document, job_subject, jobs_subject, progress_of, runs_subject
from relax_tune.tuner.report.subject import Subject
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.model_files import artifact_stem
from relax_tune.tuner.service.submission import SubmitOptions, files_of, submit_model
from relax_tune.tuner.settings import Settings, load_settings

app = typer.Typer(
    help="Submit models to tuning services and manage the jobs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog=examples(*COMMANDS["jobs"].examples),
)
STATES = get_args(SubmittedState)
POLL_SECS = 1.0

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Models, as `relax-tune tune` takes them. Each becomes a job, and its files are copied to --files.",
    ),
]
Ids = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs, or the starts of them.")]
Id = Annotated[str, typer.Argument(metavar="JOB", help="The id of a job, or the start of it.")]
Files = Annotated[str | None, setting_option("files")]


@contextmanager
def queue_of(settings: Settings, *, create: bool = False, read_only: bool = False) -> Iterator[JobQueue]:
    """Open the jobs of the database that the settings name."""
    with open_queue(settings.db, create=create, read_only=read_only, wait_secs=settings.wait_secs) as queue:
        yield queue


def one_job(queue: JobQueue, part: str) -> SubmittedJob:
    """Return the job whose id starts with `part`.

    Raises:
        UserError: no job or several jobs match; the message lists them.
    """
    jobs = [job for job in queue.find(part) if job.id == part] or queue.find(part)
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        names = ", ".join(job.id for job in jobs)
        raise UserError(
            f"{queue.where}: several jobs have ids that start with {part!r:.80}: {names}; give a longer prefix"
        )
    raise UserError(f"{queue.where} has no job whose id starts with {part!r:.80}; see `relax-tune jobs list`")


@app.command(
    epilog=examples("relax-tune jobs submit ./encoder --target cuda --bound n=1:512 --priority 5 --max-minutes 90")
)
@with_settings("submit")
def submit(
    model: Models,
    *,
    settings: SettingFlags,
    bound: Bounds = None,
    priority: Annotated[
        int,
        typer.Option(metavar="N", help=f"Jobs of a higher number go first; from -{MOST_PRIORITY} to {MOST_PRIORITY}."),
    ] = 0,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Owner of the job. [default: your user name]")
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Comment that lists of jobs show. [default: none]")] = "",
    attempts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Give up after N runs that ended because a service or process was lost.",
        ),
    ] = ATTEMPTS,
    json: Json = False,
) -> None:
    """Queue models for tuning services and print the ids of the jobs.

    The service chooses scheduler, certificates and database. A submitted job cannot choose them, nor any file on the service's
    machine.
    """
    chosen, bounds = settings.load_any(), parse_bounds(bound or [])
    check_submitted(chosen)
    files_of(chosen)
    check_strategy(chosen.strategy)
    if attempts < 1:
        raise UserError(f"--attempts expects a number of at least 1, got {attempts}")
    options = SubmitOptions(priority, note, user, attempts)
    with queue_of(chosen, create=True) as queue:
        jobs = [submit_model(queue, one, chosen, bounds, options) for one in model]
    if json:
        print_json([{"id": job.id, "model": job.name} for job in jobs])
        return
    for job in jobs:
        print(job.id)


@app.command(
    "list",
    epilog=examples("relax-tune jobs list --state running --state queued", "relax-tune jobs list --user ann --json"),
)
@view
def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(STATES),
            autocompletion=among(*STATES),
            help="Only this state. May be repeated. [default: all]",
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this user's jobs. [default: everybody's]")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="The most jobs to list.")] = 50,
    db: Database = None,
) -> Subject:
    """List submitted jobs, the newest first."""
    states: list[Any] | None = state
    if unknown := set(state or ()) - set(STATES):
        raise UserError(f"--state expects one of {', '.join(STATES)}; got {sorted(unknown)[0]!r:.80}")
    if limit < 1:
        raise UserError(f"--limit expects a number of at least 1, got {limit}")
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        return jobs_subject(queue.submitted(states, user, limit))


@app.command(epilog=examples("relax-tune jobs show 3f2a"))
@view
def show(job: Id, db: Database = None) -> Subject:
    """Show a job's settings, state, progress and result."""
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        return job_subject(one_job(queue, job))


@app.command(epilog=examples("relax-tune jobs logs 3f2a --follow"))
def logs(
    job: Id,
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing until the job has ended.")] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Print the output of a job's processes, run by run."""
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        id = one_job(queue, job).id
        if json:
            print_json([{"run": run, "number": number, "text": text} for run, number, text in queue.log(id)])
            return
        at, run = (0, -1), 0
        while True:
            ended = one_job(queue, id).ended  # asked before the log is read, so that no last line is missed
            for number, part, text in queue.log(id, at):
                if number != run:
                    print(printable(f"-- run {number}"))
                print(printable(text), end="" if text.endswith("\n") else "\n")
                at, run = (number, part), number
            if ended or not follow:
                return
            time.sleep(POLL_SECS)


@app.command(epilog=examples("relax-tune jobs cancel 3f2a 77b1"))
def cancel(job: Ids, db: Database = None, json: Json = False) -> None:
    """End jobs: queued ones at once, running ones by the service that runs them."""
    with queue_of(load_settings({"db": db})) as queue:
        ids = [one_job(queue, part).id for part in job]
        states = {id: queue.cancel(id) for id in ids}
    if json:
        print_json(states)
        return
    for id, state in states.items():
        say(make_console(), f"{id}: {'its service is asked to end it' if state == 'running' else state}")


@app.command(epilog=examples("relax-tune jobs retry 3f2a"))
def retry(job: Ids, db: Database = None, json: Json = False) -> None:
    """Queue ended jobs again. Existing measurements are reused."""
    with queue_of(load_settings({"db": db})) as queue:
        jobs = [one_job(queue, part) for part in job]
        if unfinished := [one for one in jobs if not one.ended]:
            raise UserError(f"job {unfinished[0].id} is {unfinished[0].state}, it has not ended; cancel it first")
        for one in jobs:
            queue.retry(one.id)
    if json:
        print_json({one.id: "queued" for one in jobs})
        return
    for one in jobs:
        say(make_console(), f"{one.id}: queued")


@app.command(epilog=examples("relax-tune jobs wait 3f2a 77b1"))
def wait(job: Ids, db: Database = None, json: Json = False) -> None:
    """Wait until jobs have ended.

    The exit code is 0 if all jobs are done, else the code of the first job that is not: 2 for a mistake, 3 when nothing usable was
    measured, 130 for a cancelled job, 1 for a defect of relax-tune or too many lost processes.
    """
    console, last_lines = make_console(stderr=True), dict[str, str]()
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        ids = [one_job(queue, part).id for part in job]
        while True:
            try:
                jobs = [one_job(queue, id) for id in ids]
            except TryAgainLater as error:
                say(console, f"waiting for the database: {error}")
                time.sleep(POLL_SECS)
                continue
            for one in jobs:
                line = f"{one.id} {one.name}: {one.state} {progress_of(one)} {one.message:.200}".rstrip(" -")
                if last_lines.get(one.id) != line:
                    last_lines[one.id] = line
                    say(console, line)
            if all(one.ended for one in jobs):
                break
            time.sleep(POLL_SECS)
    if json:
        print_json([job_document(one) for one in jobs])
    if failed := [one for one in jobs if one.state != "done"]:
        raise typer.Exit(failed[0].exit_code or (130 if failed[0].state == "cancelled" else 1))


app.command(
    epilog=examples(
        "relax-tune jobs work --device c --db records.db",
        "relax-tune jobs work --scheduler tls://head.lan:8786 --slots 4 --files s3://tuning/files",
    )
)(work)


@app.command(epilog=examples("relax-tune jobs fetch 3f2a --out encoder.rta"))
def fetch(
    job: Id,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.rta", help="Where to write it. [default: MODEL-TARGET.rta]")
    ] = None,
    files: Files = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Copy the artifact of a finished job. An existing file is not overwritten."""
    settings = load_settings({"db": db, "files": files})
    with queue_of(settings, read_only=True) as queue:
        finished = one_job(queue, job)
    key = finished.values("result").get("artifact")
    if finished.state != "done" or not isinstance(key, str):
        raise UserError(f"job {finished.id} has no artifact: it is {finished.state} {finished.message:.200}".rstrip())
    target = finished.values("settings").get("target")
    path = out or default_path(
        artifact_stem(finished.name), artifact_stem(target if isinstance(target, str) else finished.label)
    )
    _fetch_artifact(ContentStore(files_of(settings)), key, path)
    if json:
        print_json({"artifact": str(path), "bytes": path.stat().st_size})
        return
    say(make_console(), f"wrote {path}")


def _fetch_artifact(content: ContentStore, key: str, path: Path) -> None:
    """Copy an artifact to a new path. It is checked under a temporary name first. Raises UserError."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists; choose another name with --out")
    part = unused_name(path)
    try:
        content.fetch_file(key, part)
        load_artifact(part)
        name_new(part, path)
    except ArtifactError as error:
        where = f"{error}".replace(str(part), f"{key[:12]}...")
        raise UserError(f"the file in {content.url} is not an artifact: {where}") from None
    except FileExistsError:
        raise UserError(f"{path} exists; choose another name with --out") from None
    except OSError as error:
        raise UserError(f"{path}: the artifact cannot be written: {reason(error)}") from None
    finally:
        part.unlink(missing_ok=True)


@app.command(epilog=examples("relax-tune jobs runs --db sqlite:///records.db"))
@view
def runs(db: Database = None) -> Subject:
    """List the tuning runs of a database, started by `relax-tune tune` or by services."""
    with open_store(load_settings({"db": db}).db, create=False, read_only=True) as store:
        return runs_subject(store.jobs())
