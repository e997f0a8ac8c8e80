"""`relax-tune db export | import | merge | roles`: records of other databases and tools, and who may use this one.

Tests: `tests/tuner/cli/test_cli.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_tune.database.engine import default_url
from relax_tune.database.exchange.jsonl import ImportReport, export_file, import_file, write_parts
from relax_tune.database.exchange.jsonl import merge as merge_stores
from relax_tune.database.exchange.t4 import t4_parts
from relax_tune.database.exchange.t4_import import import_t4_file
from relax_tune.database.records import Measurement
from relax_tune.database.roles import role_script
from relax_tune.database.sql_store import SqlStore
from relax_tune.database.store import Store, open_store
from relax_tune.errors import UserError
from relax_tune.runtime.hashed_zip import tool_version
from relax_tune.tuner.cli.app import USER_ERROR, examples
from relax_tune.tuner.cli.commands.db import KeyPart, app, done, one_target, one_workload, open_for
from relax_tune.tuner.cli.commands.options import Database, Json, among, print_json
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.option import has_password
from relax_tune.tuner.settings import load_settings
from relax_tune.tuner.task.record_text import verify_text

__all__ = ["app"]

FORMS = ("jsonl", "t4")
Form = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="|".join(FORMS),
        autocompletion=among(*FORMS),
        help="jsonl has everything; t4 has the measurements of one target, for other autotuners.",
    ),
]
Since = Annotated[
    datetime | None,
    typer.Option(
        metavar="MOMENT",
        formats=["%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S"],
        help="Only what was measured from then on, and all plans: 2026-11-26 or '2026-11-26 14:30'. [default: any time]",
    ),
]


def _checked_form(form: str) -> str:
    if form not in FORMS:
        raise UserError(f"--format expects jsonl or t4, got {form!r}")
    return form


def _seconds(since: datetime | None) -> float | None:
    return None if since is None else max(0.0, since.timestamp())


@app.command(
    "export",
    epilog=examples(
        "relax-tune db export records.jsonl",
        "relax-tune db export --since 2026-11-26 new.jsonl",
        "relax-tune db export --format t4 --on 3f9a measured.json",
    ),
)
def export_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    form: Form = "jsonl",
    on: KeyPart = None,
    since: Since = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Write records to a file.

    Without --on, records of all targets.
    """
    with open_for(db) as store:
        if _checked_form(form) == "jsonl":
            chosen = None if on is None else [one_target(store, on).key]
            lines = export_file(store, file, chosen, _seconds(since))
            _exported(json, store, f"wrote {lines} records to {file}", {"file": str(file), "records": lines})
            return
        target = one_target(store, on)
        counted = _Counted()
        measurements = counted.over(_measurements(store, target.key, _seconds(since)))
        write_parts(file, t4_parts(target, measurements, tool_version(), store.workload, store.environment))
        document = {"file": str(file), "measurements": counted.count}
        _exported(json, store, f"wrote {counted.count} measurements to {file}", document)


def _exported(json: bool, store: Store, text: str, document: dict[str, Any]) -> None:
    """Print what was exported. Invalid rows, which were left out, make the exit code an error."""
    left_out = store.invalid_rows.total()
    done(json, f"{text}; {left_out} invalid rows left out" if left_out else text, {**document, "left_out": left_out})
    if left_out:
        raise typer.Exit(USER_ERROR)


class _Counted:
    """A count of what went by."""

    count = 0

    def over(self, measurements: Iterator[Measurement]) -> Iterator[Measurement]:
        """Yield the measurements, and count them."""
        for measurement in measurements:
            self.count += 1
            yield measurement


def _measurements(store: Store, target: str, since: float | None) -> Iterator[Measurement]:
    """Yield the measurements of a target, one workload after the other."""
    for workload in store.measured(target, since):
        yield from store.query(target, workload, since=since)


@app.command(
    "import",
    epilog=examples(
        "relax-tune db import records.jsonl",
        "relax-tune db import measured.json --format t4 --trust-checks",
        "relax-tune db import t4.json --format t4 --workload softmax --on 3f9a",
    ),
)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to read.")],
    form: Form = "jsonl",
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="t4: the workload of results that name none, by key or name. [default: none, for files of relax-tune]",
        ),
    ] = None,
    on: KeyPart = None,
    trust_checks: Annotated[
        bool,
        typer.Option("--trust-checks", help="t4: believe the file that outputs were right, so that builds use them."),
    ] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Add the records of a file. What is already there stays; importing twice changes nothing."""
    form = _checked_form(form)
    if not file.exists():  # a missing file creates no database
        raise UserError(f"{file}: expected a file written by `relax-tune db export`, got no such file; check the path")
    if form == "jsonl":
        if trust_checks:
            raise UserError("--trust-checks is for --format t4; JSON Lines say what was checked")
        with open_for(db, write=True, create=True) as store:
            _tell(json, import_file(store, file, verify_text), str(file))
        return
    with open_for(db, write=True, create=workload is None and on is None) as store:
        target = None if on is None else one_target(store, on).key
        own = None if workload is None else one_workload(store, workload).key
        report = import_t4_file(store, file, own, target, trust_checks=trust_checks, judge=verify_text)
        _tell(json, report, str(file))


def _tell(json: bool, report: ImportReport, source: str) -> None:
    """Print a report. Lines that were left out make the exit code an error, although the others are stored."""
    _print_report(json, report, source)
    if report.left_out:
        raise typer.Exit(USER_ERROR)


def _print_report(json: bool, report: ImportReport, source: str) -> None:
    if json:
        problems = [{"line": p.line, "why": p.why} for p in report.problems]
        counts = {"measurements": report.measurements, "plans": report.plans, "left_out": report.left_out}
        conflicts = {"conflicting": report.conflicting, "conflicts": report.conflicts}
        print_json({"source": source, **counts, **conflicts, "problems": problems})
        return
    console = make_console()
    say(console, f"{report.measurements} new measurements and {report.plans} new plans from {source}")
    for problem in report.problems[:10]:
        say(console, f"line {problem.line} left out: {problem.why}")
    if report.left_out > 10:
        say(console, f"{report.left_out} lines left out in all")
    for name in report.conflicts[:10]:
        say(console, f"{name}: {source} says otherwise; what was here stays")
    if report.conflicting > 10:
        say(console, f"{report.conflicting} records differ in all")


@app.command(
    epilog=examples(
        "relax-tune db merge sqlite:///other.db", "relax-tune db merge other.db --since 2026-11-26 --db records.db"
    )
)
def merge(
    source: Annotated[str, typer.Argument(metavar="URL", help="The database to copy from, as --db takes it.")],
    since: Since = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Copy what another database knows into this one.

    Its plans are stored under its name. They become current only for models that have no plan in this database.
    """
    if has_password(source):
        raise UserError(
            "expected the URL of a database without a password, got one with it, which every user of this machine can read among the "
            "arguments of programs; put the password into ~/.pgpass or PGPASSWORD"
        )
    with open_store(source, create=False, read_only=True) as other, open_for(db, write=True, create=True) as store:
        report = merge_stores(other, store, _seconds(since), verify_text)
        report.left_out += other.invalid_rows.total()
        _tell(json, report, other.where)


@app.command(
    epilog=examples("relax-tune db roles", "relax-tune db roles --apply --db postgresql://owner@records.lan/tuning")
)
def roles(
    apply: Annotated[
        bool, typer.Option("--apply", help="Run it on --db, as the owner of the tables, instead of printing it.")
    ] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Print SQL that creates roles on a PostgreSQL server.

    They are reader, tuner and admin, with their rights. The owner of the tables runs it, again after each upgrade. It grants nothing to
    a login: GRANT relax_tuner TO tina.
    """
    script = role_script()
    if apply:
        with SqlStore(load_settings({"db": db}).db or default_url()) as store:
            store.create_roles()
            done(json, f"{store.where}: created the roles and their rights", {"database": store.where})
    elif json:
        print_json({"sql": script})
    else:
        print(script, end="")
