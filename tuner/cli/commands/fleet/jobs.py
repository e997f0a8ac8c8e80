"""`relax-tune jobs ...`: submit models to be tuned by services, and look after them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.jobs.submitted import ATTEMPTS, MOST_PRIORITY, SubmittedJob, SubmittedState
from relax_tune.database.records import JobRecord, parse_json
from relax_tune.database.store import open_store
from relax_tune.errors import TryAgainLater, UserError
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
from relax_tune.tuner.cli.report.console import make_console, make_table, say
from relax_tune.tuner.job.job import parse_bounds
from relax_tune.tuner.job.job_log import SEEN, state_of
from relax_tune.tuner.printable import printable
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.submission import Wishes, files_of, submit_model
from relax_tune.tuner.settings import Settings, load_settings

app = typer.Typer(
    help="Submit models to be tuned by services, and look after them.",
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
        help="Models, as `relax-tune tune` takes them. Each becomes a job, with a copy of its files in --files.",
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
    """Return the job whose id starts with `part`. Raises UserError that lists the choice."""
    found = [job for job in queue.find(part) if job.id == part] or queue.find(part)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(job.id for job in found)
        raise UserError(
            f"wanted one job whose id starts with {part!r:.80}, {queue.where} has: {names}; give more of it"
        )
    raise UserError(
        f"wanted a job whose id starts with {part!r:.80}, {queue.where} has none; see `relax-tune jobs list`"
    )


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
    user: Annotated[str | None, typer.Option(metavar="NAME", help="Whose job it is. [default: your user name]")] = None,
    note: Annotated[
        str, typer.Option(metavar="TEXT", help="Words for people, shown beside the job. [default: none]")
    ] = "",
    attempts: Annotated[
        int,
        typer.Option(
            metavar="N", help="Give up once so many services, or processes of it, were lost while they ran it."
        ),
    ] = ATTEMPTS,
    json: Json = False,
) -> None:
    """Queue models to be tuned by services, and print the ids of the jobs.

    The service chooses scheduler, certificates and database of the measurement; a submitted job chooses none of them, and no file
    of its machine.
    """
    chosen, bounds = settings.load(), parse_bounds(bound or [])
    files_of(chosen)
    check_strategy(chosen.strategy)
    if attempts < 1:
        raise UserError(f"--attempts wants a number of at least 1, found {attempts}")
    wishes = Wishes(priority, note, user, attempts)
    with queue_of(chosen, create=True) as queue:
        jobs = [submit_model(queue, one, chosen, bounds, wishes) for one in model]
    if json:
        print_json([{"id": job.id, "model": job.name} for job in jobs])
        return
    for job in jobs:
        print(job.id)


@app.command(
    "list",
    epilog=examples("relax-tune jobs list --state running --state queued", "relax-tune jobs list --user ann --json"),
)
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
    json: Json = False,
) -> None:
    """List submitted jobs, the newest first."""
    states: list[Any] | None = state
    if unknown := set(state or ()) - set(STATES):
        raise UserError(f"--state wants one of {', '.join(STATES)}; found {sorted(unknown)[0]!r:.80}")
    if limit < 1:
        raise UserError(f"--limit wants a number of at least 1, found {limit}")
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        found = queue.submitted(states, user, limit)
    if json:
        print_json([document(job) for job in found])
        return
    console = make_console()
    if not found:
        console.print("no such jobs; `relax-tune jobs submit` queues one")
        return
    table = make_table(
        "job", "state", "model", "target", "priority", "user", "progress", "submitted", "note", right=["priority"]
    )
    for job in found:
        target = str(job.values("settings").get("target", job.label))
        words = job.note or job.message
        submitted, priority = moment(job.submitted_at), str(job.priority)
        table.add_row(
            job.id, job.state, job.name, target, priority, job.owner, progress_text(job), submitted, words[:60]
        )
    console.print(table)


@app.command(epilog=examples("relax-tune jobs show 3f2a"))
def show(job: Id, db: Database = None, json: Json = False) -> None:
    """Show all about a job: settings, state, progress, result."""
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        found = document(one_job(queue, job))
    if json:
        print_json(found)
        return
    table = make_table("field", "value")
    for name, value in found.items():
        known = isinstance(value, float) and name.endswith(("_at", "not_before"))
        table.add_row(name, moment(value) if known else str(value if value not in (None, "") else "-"))
    make_console().print(table)


@app.command(epilog=examples("relax-tune jobs logs 3f2a --follow"))
def logs(
    job: Id,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Print what a job's processes said, run by run."""
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        found = one_job(queue, job)
        if json:
            print_json([{"run": run, "number": number, "text": text} for run, number, text in queue.log(found.id)])
            return
        at, run = (0, -1), 0
        while True:
            ended = one_job(queue, found.id).ended
            for number, part, text in queue.log(found.id, at):
                if number != run:
                    print(f"-- run {number}")
                print(printable(text), end="" if text.endswith("\n") else "\n")
                at, run = (number, part), number
            if ended or not follow:
                return
            time.sleep(POLL_SECS)


@app.command(epilog=examples("relax-tune jobs cancel 3f2a 77b1"))
def cancel(job: Ids, db: Database = None, json: Json = False) -> None:
    """End jobs: queued ones at once, running ones by the service that runs them."""
    with queue_of(load_settings({"db": db})) as queue:
        found = [one_job(queue, part) for part in job]
        states = {one.id: queue.cancel(one.id) for one in found}
    if json:
        print_json(states)
        return
    for id, state in states.items():
        print(f"{id}: {'its service is asked to end it' if state == 'running' else state}")


@app.command(epilog=examples("relax-tune jobs retry 3f2a"))
def retry(job: Ids, db: Database = None, json: Json = False) -> None:
    """Queue ended jobs again. What was measured is on record and is not measured again."""
    with queue_of(load_settings({"db": db})) as queue:
        found = [one_job(queue, part) for part in job]
        if waiting := [one for one in found if not one.ended]:
            raise UserError(f"wanted jobs that have ended, found {waiting[0].id} {waiting[0].state}; cancel it first")
        for one in found:
            queue.retry(one.id)
    if json:
        print_json({one.id: "queued" for one in found})
        return
    for one in found:
        print(f"{one.id}: queued")


@app.command(epilog=examples("relax-tune jobs wait 3f2a 77b1"))
def wait(job: Ids, db: Database = None, json: Json = False) -> None:
    """Wait until jobs have ended.

    The exit code is 0 if all are done, else that of the first that is not: 2 for a mistake, 3 when nothing usable was measured, 130
    for a cancelled job, 1 for a defect of this program or too many lost processes.
    """
    console, said = make_console(stderr=True), dict[str, str]()
    with queue_of(load_settings({"db": db}), read_only=True) as queue:
        ids = [one_job(queue, part).id for part in job]
        while True:
            try:
                found = [one_job(queue, id) for id in ids]
            except TryAgainLater as error:
                say(console, f"waiting for the database: {error}")
                time.sleep(POLL_SECS)
                continue
            for one in found:
                line = f"{one.id} {one.name}: {one.state} {progress_text(one)} {one.message:.200}".rstrip(" -")
                if said.get(one.id) != line:
                    said[one.id] = line
                    say(console, line)
            if all(one.ended for one in found):
                break
            time.sleep(POLL_SECS)
    if json:
        print_json([document(one) for one in found])
    if failed := [one for one in found if one.state != "done"]:
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
    """Copy the artifact of a job that is done. A file that is there already is not replaced."""
    settings = load_settings({"db": db, "files": files})
    with queue_of(settings, read_only=True) as queue:
        found = one_job(queue, job)
    result = found.values("result")
    if found.state != "done" or not isinstance(result.get("artifact"), str):
        raise UserError(f"wanted a job that is done, found {found.id} {found.state} {found.message:.200}")
    path = out or Path(Path(str(result.get("name", "model.rta"))).name)
    if path.exists():
        raise UserError(f"{path} is there already; give another name with --out")
    part = path.with_name(f".{path.name}.part")
    try:
        ContentStore(files_of(settings)).fetch_file(result["artifact"], part).replace(path)
    except OSError as error:
        raise UserError(f"{path}: wanted to write the artifact, found: {error.strerror}; give another place") from None
    finally:
        part.unlink(missing_ok=True)
    if json:
        print_json({"artifact": str(path), "bytes": path.stat().st_size})
        return
    print(f"wrote {path}")


@app.command(epilog=examples("relax-tune jobs runs --db sqlite:///records.db"))
def runs(db: Database = None, json: Json = False) -> None:
    """List the tuning runs a database knows: those of `relax-tune tune`, and those of services."""
    with open_store(load_settings({"db": db}).db, create=False, read_only=True) as store:
        found = [(run.id, state_of(run), _settings_of(run)) for run in store.jobs()]
    if json:
        print_json([{"id": id, "state": state, "settings": settings} for id, state, settings in found])
        return
    console = make_console()
    if not found:
        console.print("no runs on record; `relax-tune tune` makes one")
        return
    table = make_table("run", "state", "last seen", "settings")
    for id, state, settings in found:
        shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k != SEEN)
        table.add_row(id, state, moment(settings.get(SEEN)), shown)
    console.print(table)


def _settings_of(run: JobRecord) -> dict[str, Any]:
    settings = parse_json(run.settings, f"run {run.id}")
    return settings if isinstance(settings, dict) else {"settings": settings}


def document(job: SubmittedJob) -> dict[str, Any]:
    """Return a job as a JSON document."""
    parsed = {name: job.values(name) for name in ("settings", "progress", "result")}
    return {**asdict(job), **parsed}


def progress_text(job: SubmittedJob) -> str:
    """Return a job's progress in a few characters."""
    told = job.values("progress")
    return f"{told['trials']}/{told['of']}" if {"trials", "of"} <= told.keys() else "-"


def moment(seen: object) -> str:
    """Format Unix seconds as this machine's local time; `-` for an unknown time."""
    if not isinstance(seen, int | float) or not 0 < seen < 2**35:
        return "-"
    return datetime.fromtimestamp(seen).isoformat(" ", "seconds")
