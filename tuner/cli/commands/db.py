"""`relax-tune db ...`: look at, move and mend the database of measurements.

Tests: `tests/tuner/cli/test_cli.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import typer

from relax_tune.database.engine import default_url
from relax_tune.database.records import Measurement, Selection, Target, Workload
from relax_tune.database.store import Store, open_store, upgrade_store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.tuner.cli.app import COMMANDS, USER_ERROR, examples
from relax_tune.tuner.cli.commands.options import Ca, Certificate, Database, Json, Key, print_json, setting_option
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.report.listings import (
    fastest_subject,
    reference_subject,
    rows_subject,
    targets_subject,
    units_subject,
)
from relax_tune.tuner.report.subject import Subject
from relax_tune.tuner.settings import load_settings
from relax_tune.tuner.task.record_text import verify_text

app = typer.Typer(
    help="Inspect, move and repair the database of measurements.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog=examples(*COMMANDS["db"].examples),
)

KeyPart = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="KEY",
        help="A target's key or the start of it, as `db stats` lists them. [default: the only target there is]",
    ),
]
DAY_SECS = 86_400.0


def open_for(db: str | None, *, write: bool = False, create: bool = False) -> Store:
    """Open the database that the settings name. It must exist, unless it may be created."""
    return open_store(load_settings({"db": db}).db, create=create, read_only=not write)


def one_target(store: Store, part: str | None) -> Target:
    """Return the target whose key starts with `part`; without one, the only target. Raises UserError that lists the
    targets.
    """
    targets = store.targets()
    if not targets:
        raise UserError(f"{store.where} has no target; `relax-tune tune` adds the one that it measures on")
    matching = [t for t in targets if t.key.startswith(part or "")]
    if len(matching) == 1:
        return matching[0]
    known = "; ".join(f"{t.key[:12]} ({t.kind}, {t.name})" for t in targets)
    condition = f"one target whose key starts with {part!r}" if part else "one target; choose it with --on KEY"
    raise UserError(f"expected {condition}, {store.where} has: {known}")


def one_workload(store: Store, part: str, target: str | None = None) -> Workload:
    """Return the workload whose key starts with `part` or whose name is `part`. Raises UserError."""
    known = store.workloads(target)
    matching = [w for w in known if w.key.startswith(part)] or [w for w in known if w.hint == part]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(f"{w.key[:12]} ({w.hint})" for w in (matching or known)[:20])
    names = names or "none; `relax-tune tune` adds the workloads of a model"
    raise UserError(
        f"expected one workload whose key starts with, or whose name is, {part!r}; {store.where} has: {names}"
    )


def one_job(store: Store, part: str) -> str:
    """Return the id of the job that starts with `part`; `part` itself for a job of another database. Raises UserError."""
    matching = [job.id for job in store.jobs() if job.id.startswith(part)]
    if len(matching) > 1:
        raise UserError(
            f"expected one job whose id starts with {part!r}, {store.where} has: {', '.join(matching[:20])}"
        )
    return matching[0] if matching else part


def done(json: bool, text: str, document: dict[str, Any]) -> None:
    """Report an action: a sentence for people, or a document for scripts."""
    if json:
        print_json(document)
    else:
        say(make_console(), text)


@app.command(epilog=examples("relax-tune db stats", "relax-tune db stats --json --db sqlite:///records.db"))
@view
def stats(db: Database = None) -> Subject:
    """Count workloads and measurements per target."""
    with open_for(db) as store:
        return targets_subject([s for t in store.targets() if (s := store.stats(t.key)) is not None], store.where)


@app.command(epilog=examples("relax-tune db units --on 3f9a", "relax-tune db units --json --db sqlite:///records.db"))
@view
def units(on: KeyPart = None, db: Database = None) -> Subject:
    """List the workers, hosts and units that measured for a target."""
    with open_for(db) as store:
        return units_subject(store.units(one_target(store, on).key))


@app.command(
    epilog=examples(
        "relax-tune db reference --on 3f9a",
        "relax-tune db reference --renew --target c",
        "relax-tune db reference --renew --target cuda --scheduler tls://10.0.0.1:8786",
    )
)
@view
def reference(
    on: KeyPart = None,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Time the reference kernels again on --target, and replace the stored times."),
    ] = False,
    target: Annotated[str | None, setting_option("target")] = None,
    scheduler: Annotated[str | None, setting_option("scheduler")] = None,
    browser: Annotated[str | None, setting_option("browser")] = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    db: Database = None,
) -> Subject:
    """Show the reference times of a target, or renew them.

    Two units of one name share records only if two reference kernels take about the same time on both. After a change of the unit, such as
    another power limit, prune the old records and renew the times. Workers of a --scheduler time the kernels when they start, so start
    them again first; of several speeds, the most frequent one counts.
    """
    if not renew:
        with open_for(db) as store:
            return reference_subject(one_target(store, on))
    given = {
        "target": target,
        "scheduler": scheduler,
        "browser": browser,
        "ca": ca,
        "certificate": certificate,
        "key": key,
    }
    settings = load_settings({"db": db, **given})
    with (
        contextlib.closing(open_runner(settings, partial(say, make_console(stderr=True)))) as runner,
        open_for(db, write=True) as store,
    ):
        device = runner.device_info()
        measured = Target(device.kind, device.name, device.fingerprint)
        if store.target(measured.key) is None:
            raise UserError(
                f"{store.where} has no records of {device.name}; `relax-tune tune` adds the device that it measures on"
            )
        store.set_reference(measured.key, runner.calibrate({}))
        return reference_subject(one_target(store, measured.key))


@app.command(epilog=examples("relax-tune db top", "relax-tune db top softmax --count 5 --on 3f9a"))
@view
def top(
    workload: Annotated[
        str | None, typer.Argument(metavar="WORKLOAD", help="Key (or its start) or name. [default: all]")
    ] = None,
    on: KeyPart = None,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="Variants per shape.")] = 3,
    db: Database = None,
) -> Subject:
    """Print the fastest variants of each workload and shape."""
    if count < 1:
        raise UserError(f"--count expects at least 1, got {count}")
    rows: list[tuple[Workload, Measurement]] = []
    with open_for(db) as store:
        target = one_target(store, on)
        selected = [one_workload(store, workload, target.key)] if workload else store.workloads(target.key)
        for one in selected:
            for symbols in measured_points(store.query(target.key, one.key, status="ok")):
                rows += [(one, m) for m in store.top(one.key, target.key, symbols, count)]
    return fastest_subject(rows)


def measured_points(measurements: Sequence[Measurement]) -> list[dict[str, int]]:
    """Return the distinct points of ok measurements, smallest first."""
    points = {tuple(m.symbols.items()): m.symbols for m in measurements}
    return sorted(points.values(), key=lambda p: (tuple(p.values()), tuple(p)))


@app.command(epilog=examples("relax-tune db show softmax", "relax-tune db show 3f9a --json"))
@view
def show(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="The start of the key of a workload, target or job, or a workload's name.",
        ),
    ],
    db: Database = None,
) -> Subject:
    """Show a workload's text, a target's facts or a job's settings.

    `relax-tune show` says more of a workload: sketches, times, traces, sources.
    """
    with open_for(db) as store:
        targets = [target for target in store.targets() if target.key.startswith(key)]
        runs = [run for run in store.jobs() if run.id.startswith(key)]
        workloads = [w for w in store.workloads(None) if w.key.startswith(key) or w.hint == key]
        where = store.where
    if not (targets or runs or workloads):
        raise UserError(
            f"expected a workload, target or job whose key starts with {key!r}, {where} has none; see `db top`"
        )
    return rows_subject(key, targets, runs, workloads)


@app.command(
    epilog=examples(
        "relax-tune db prune --failed --dry-run",
        "relax-tune db prune --older-than 90 --on 3f9a --db records.db",
        "relax-tune db prune --worker gpu1 --since 2026-11-26 --dry-run",
    )
)
def prune(
    on: KeyPart = None,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", help="Only what was measured more than DAYS days ago. [default: any age]"),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            metavar="MOMENT",
            formats=["%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S"],
            help="Only what was measured since MOMENT, by this machine's clock: 2026-11-26 or '2026-11-26 14:30'. [default: any time]",
        ),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failures.")] = False,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only what this worker, host or unit measured, as `relax-tune db units` lists them. [default: any]",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only what this job measured, by the start of its id. [default: any]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be removed.")] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Remove measurements of one target.

    A measurement goes when it meets every given condition. Nothing else ever removes one.
    """
    if not failed and all(given is None for given in (older_than, since, worker, job)):
        raise UserError(
            "expected --older-than, --since, --failed, --worker or --job, got none of them; nothing was removed"
        )
    if older_than is not None and not older_than >= 0:
        raise UserError(f"--older-than expects a number of days, at least 0; got {older_than:g}; nothing was removed")
    with open_for(db, write=True) as store:
        target = one_target(store, on)
        limit = None if older_than is None else max(0.0, time.time() - older_than * DAY_SECS)
        start = None if since is None else max(0.0, since.timestamp())
        selection = Selection(limit, start, failed, worker, None if job is None else one_job(store, job))
        count = store.prune(target.key, selection, dry_run=dry_run)
    text = f"{count} measurements {'would be removed' if dry_run else 'removed'}"
    done(json, text, {"target": target.key, "measurements": count, "removed": not dry_run})


@app.command(epilog=examples("relax-tune db upgrade --db sqlite:///records.db"))
def upgrade(db: Database = None, json: Json = False) -> None:
    """Bring an empty or older database to the schema of this version."""
    before, after = upgrade_store(load_settings({"db": db}).db or default_url())
    text = f"schema {after}, unchanged" if before == after else f"schema {before or 'none'} -> {after}"
    done(json, text, {"before": before, "after": after})


def _altered(store: Store, key: str) -> str | None:
    """Return why the text of a workload is not the one that its key names, or None; unreadable texts are reported by `Store.check`."""
    try:
        for workload in store.known_workloads([key]):
            verify_text(workload)
    except DatabaseError as error:
        return str(error)
    return None


@app.command(epilog=examples("relax-tune db check --db sqlite:///records.db"))
def check(db: Database = None, json: Json = False) -> None:
    """Look for damage; exit 2 when there is any."""
    with open_for(db) as store:
        problems = store.check()
        for target in store.targets():
            problems += [why for key in store.measured(target.key) if (why := _altered(store, key)) is not None]
        problems = sorted(set(problems))
        where = store.where
    done(json, "\n".join(problems) or f"{where}: nothing wrong", {"database": where, "problems": problems})
    if problems:
        raise typer.Exit(USER_ERROR)
