"""Convert a database from before the first release (schemas 1 to 7) to a new database of relax-tune 0.2.

    python -m tools.convert_database OLD NEW

OLD and NEW are SQLite files or URLs as `--db` takes them. OLD is only read. NEW must be missing or empty.

The script is outside of the package so that no reader of unreleased schemas is installed with it. It reads with statements of its own
and writes through the package, so it works as long as a release can open a database of schema 8 or upgrade it.

Tests: `tests/tools/test_convert_database.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, inspect, text, update
from tools.earlier_names import rename_plans, rename_variant, set_of_plan

from relax_tune.database import rows, schema
from relax_tune.database.engine import explained, make_engine, parse_url, reader, shown, sqlite_path, writer
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.jobs.tables import JobLogRow, SubmittedJobRow
from relax_tune.database.models import AboutRow, PlanRow
from relax_tune.database.records import (
    REGIMES,
    STAGES,
    VARIANT_KINDS,
    Measurement,
    PlanRecord,
    VariantRecord,
    parse_json,
)
from relax_tune.database.rules import ROW_TYPE_ERRORS
from relax_tune.database.sql.codec import unpack_id, unpack_samples
from relax_tune.database.sql.statements import add_missing
from relax_tune.database.sqlite_file import verify_file
from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError

VERSIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
_RENAMED = "0003"
"""The first schema whose traces and sketches have today's names."""
_PACKED = "0007"
"""The first schema whose measurements are numbers that refer to shared rows."""
_BATCH = 1000
_INVALID_SHOWN = 20

_TEXT_ROWS = text(
    "SELECT m.*, v.kind, v.sketch, v.trace, v.parameters FROM measurements m LEFT JOIN variants v ON v.key = m.variant"
)
_PACKED_ROWS = text(
    "SELECT m.id, m.stage, m.regime, m.checked, m.samples, m.build_secs, m.measured_at, m.clock_mhz, m.celsius, m.message, "
    "t.target, t.workload, p.symbols, o.job, o.environment, o.worker, o.host, o.unit, x.text AS message_text, "
    "v.key AS variant, v.parameters, s.kind, s.sketch, s.trace "
    "FROM measurements m LEFT JOIN tasks t ON t.number = m.task LEFT JOIN points p ON p.number = m.point "
    "LEFT JOIN places o ON o.number = m.place LEFT JOIN messages x ON x.number = m.message "
    "LEFT JOIN variants v ON v.number = m.variant LEFT JOIN traces s ON s.number = v.trace"
)


class Conversion:
    """One pass over the tables of an earlier database.

    Attributes:
        counts: Number of converted rows by table.
        invalid: Number of rows that were left out, by table.
        problems: Sentences on the first invalid rows.
    """

    def __init__(self, connection: Connection, version: str, new_url: str) -> None:
        self._connection = connection
        self._version = version
        self._url = new_url
        self._tables = set(inspect(connection).get_table_names())
        self.counts = Counter[str]()
        self.invalid = Counter[str]()
        self.problems: list[str] = []

    def run(self) -> None:
        """Create the new database and fill it."""
        with open_store(self._url) as store:
            for table, build, add in (
                ("targets", rows.target_of, store.add_target),
                ("environments", rows.environment_of, store.add_environment),
                ("workloads", rows.workload_of, store.add_workload),
                ("histograms", rows.histogram_of, store.put_histogram),
                ("jobs", rows.job_of, store.put_job),
            ):
                for record in self._records(table, build, self._rows(f"SELECT * FROM {table}")):
                    add(record)
                    self.counts[table] += 1
            known = {t.key for t in store.targets()}, {w.key for w in store.workloads(None)}
            environments = {"", *(e.key for e in store.environments())}
            for batch in self._measurements():
                batch = [m for m in batch if self._is_known(m, known) and self._has_environment(m, environments)]
                store.add_measurements(batch)
                self.counts["measurements"] += len(batch)
        engine = make_engine(parse_url(self._url), read_only=False)
        try:
            with writer(engine).begin() as new:
                self._copy_plans(new, known)
                self._copy_submitted_jobs(new)
                self._keep_id(new)
        finally:
            engine.dispose()

    # Reading

    def _rows(self, statement: Any) -> Iterator[Mapping[str, Any]]:
        statement = text(statement) if isinstance(statement, str) else statement
        for partition in (
            self._connection.execute(statement, execution_options={"yield_per": _BATCH}).mappings().partitions()
        ):
            yield from partition  # type: ignore[misc]

    def _records(self, table: str, build: Callable[[Any], Any], source: Iterable[Any]) -> Iterator[Any]:
        """Build records of rows; invalid rows are counted and left out."""
        for row in source:
            try:
                yield build(row)
            except (DatabaseError, LookupError, *ROW_TYPE_ERRORS) as error:
                self._leave_out(table, str(error))

    def _leave_out(self, table: str, problem: str) -> None:
        self.invalid[table] += 1
        if len(self.problems) < _INVALID_SHOWN:
            self.problems.append(problem)

    def _is_known(self, record: Measurement | PlanRecord, known: tuple[set[str], set[str]]) -> bool:
        """Return True if target and workload of a record were converted."""
        if record.target in known[0] and record.workload in known[1]:
            return True
        table = "measurements" if isinstance(record, Measurement) else "plans"
        self._leave_out(table, f"{table} of workload {record.workload!r:.80}: its target or workload is missing")
        return False

    def _has_environment(self, record: Measurement, environments: set[str]) -> bool:
        if record.environment in environments:
            return True
        self._leave_out("measurements", f"measurement {record.id!r:.80}: its environment is missing")
        return False

    def _measurements(self) -> Iterator[list[Measurement]]:
        packed = self._version >= _PACKED
        build = _of_packed_row if packed else self._of_text_row
        batch: list[Measurement] = []
        for record in self._records("measurements", build, self._rows(_PACKED_ROWS if packed else _TEXT_ROWS)):
            batch.append(record)
            if len(batch) == _BATCH:
                yield batch
                batch = []
        yield batch
        if "unreadable" in self._tables:
            for row in self._rows("SELECT id, why FROM unreadable"):
                self._leave_out("measurements", f"measurements row {row['id']!r:.80}: {row['why']}")

    def _of_text_row(self, row: Mapping[str, Any]) -> Measurement:
        variant = _variant(row["kind"], row["sketch"], row["trace"], row["parameters"], row["variant"])
        if self._version < _RENAMED:
            variant = rename_variant(variant)
        return rows.measurement_of(
            {**row, "measured_at": row.get("measured_at", 0.0), "checked": _boolean(row["checked"])}, variant
        )

    # Writing what the store has no method for

    def _copy_plans(self, new: Connection, known: tuple[set[str], set[str]]) -> None:
        packed = self._version >= _PACKED
        plans = list(
            self._records("plans", rows.plan_of if packed else _plan_of_text_row, self._rows("SELECT * FROM plans"))
        )
        if self._version < _RENAMED:
            plans = _renamed_plans(plans)
        values = [rows.plan_values(plan) for plan in plans if self._is_known(plan, known)]
        self.counts["plans"] += add_missing(new, PlanRow.__table__, values)

    def _copy_submitted_jobs(self, new: Connection) -> None:
        if "submitted_jobs" not in self._tables:
            return
        names = SubmittedJobRow.__table__.c.keys()
        source = self._rows("SELECT * FROM submitted_jobs")
        jobs = list(
            self._records(
                "submitted_jobs", lambda row: SubmittedJob(**{**row, "cancel": _boolean(row["cancel"])}), source
            )
        )
        values = [{name: getattr(job, name) for name in names} for job in jobs]
        self.counts["submitted_jobs"] += add_missing(new, SubmittedJobRow.__table__, values)
        ids = {job.id for job in jobs}
        logs = [dict(row) for row in self._rows("SELECT * FROM job_logs") if row["job"] in ids]
        add_missing(new, JobLogRow.__table__, logs)

    def _keep_id(self, new: Connection) -> None:
        """Keep the id under which other databases know the plans."""
        if "about" in self._tables:
            for row in self._rows("SELECT value FROM about WHERE name = 'id'"):
                new.execute(update(AboutRow).where(AboutRow.name == "id").values(value=row["value"]))


def _of_packed_row(row: Mapping[str, Any]) -> Measurement:
    id = unpack_id(row["id"])
    where = f"measurements row {id!r:.80}"
    if row["target"] is None or row["symbols"] is None or row["job"] is None or row["kind"] is None:
        raise DatabaseError(f"{where}: refers to a row that does not exist")
    kind = VARIANT_KINDS[row["kind"]]
    stage = STAGES[row["stage"] - 1] if row["stage"] else None
    return Measurement(
        id=id,
        workload=row["workload"],
        target=row["target"],
        variant=_variant(kind, row["sketch"], row["trace"], row["parameters"], row["variant"].hex()),
        symbols=parse_json(row["symbols"], f"{where} symbols"),
        status="ok" if stage is None else "failed",
        stage=stage,
        message=row["message_text"] if row["message"] else "",
        samples_secs=unpack_samples(row["samples"]),
        regime=REGIMES[row["regime"]],
        checked=_boolean(row["checked"]),
        **{name: row[name] for name in ("build_secs", "job", "environment", "measured_at", "worker", "host", "unit")},
        clock_mhz=row["clock_mhz"],
        celsius=row["celsius"],
    )


def _boolean(value: object) -> bool:
    """Return a stored boolean: SQLite has integers. Raises `DatabaseError` for other values."""
    if value not in (0, 1):
        raise DatabaseError(f"expected 0 or 1, got {value!r:.80}")
    return bool(value)


@lru_cache(maxsize=4096)
def _variant(kind: Any, sketch: str, trace: str, parameters: str, key: str) -> VariantRecord:
    """Return a variant. Raises `DatabaseError` if the stored key is not the hash of its content."""
    variant = VariantRecord(kind, sketch, trace, parameters)
    if variant.key != key:
        raise DatabaseError(
            f"variants row {key!r:.80}: expected the hash of its content, {variant.key!r}; the row was altered"
        )
    return variant


def _plan_of_text_row(row: Mapping[str, Any]) -> PlanRecord:
    return PlanRecord(row["workload"], row["target"], row["version"], row["entries"], "", row["version"])


def _renamed_plans(plans: Sequence[PlanRecord]) -> list[PlanRecord]:
    """Rename the plans of each set together, since the name of a set hashes all its plans."""
    sets: dict[tuple[str, str, str], list[PlanRecord]] = {}
    for plan in plans:
        sets.setdefault((plan.target, *set_of_plan(plan.entries)), []).append(plan)
    renamed = []
    for members in sets.values():
        texts = rename_plans([(plan.workload, plan.entries) for plan in members])
        for plan, entries in zip(members, texts, strict=True):
            renamed.append(PlanRecord(plan.workload, plan.target, plan.version, entries, plan.origin, plan.turn))
    return renamed


def convert(old: str, new: str) -> Conversion:
    """Convert the database at the URL `old` to a new one at `new`.

    Raises:
        DatabaseError: `old` cannot be read or is not of schema 1 to 7, or `new` is not empty. An unfinished SQLite file is removed.
    """
    source, destination = parse_url(old), parse_url(new)
    path, where = sqlite_path(source), shown(source)
    if path is not None:
        verify_file(path, where, write=False, create=False)
    _verify_empty(new)
    engine = make_engine(source, read_only=True)
    version = None
    try:
        with explained(where, "convert it", path), reader(engine).begin() as connection:
            version = schema.current(connection, where)
            if version not in VERSIONS:
                raise DatabaseError(
                    f"{where}: expected a database of schema {VERSIONS[0]} to {VERSIONS[-1]}, got {version or 'an empty one'}; "
                    "a newer one needs no conversion"
                )
            conversion = Conversion(connection, version, new)
            conversion.run()
        with open_store(new, read_only=True) as store:
            problems = store.check()
        if problems:
            raise DatabaseError(f"{shown(destination)}: the converted database has problems: {'; '.join(problems[:3])}")
        return conversion
    except BaseException:
        if (unfinished := sqlite_path(destination)) is not None and version in VERSIONS:
            for suffix in ("", "-wal", "-shm"):
                unfinished.with_name(unfinished.name + suffix).unlink(missing_ok=True)
        raise
    finally:
        engine.dispose()


def _verify_empty(url: str) -> None:
    parsed = parse_url(url)
    path = sqlite_path(parsed)
    if path is not None and not path.exists():
        return
    engine = make_engine(parsed, read_only=False)
    try:
        with explained(shown(parsed), "open it", path), reader(engine).begin() as connection:
            if schema.current(connection, shown(parsed)) is not None:
                raise DatabaseError(f"{shown(parsed)}: expected a missing or empty database to fill; give another name")
    finally:
        engine.dispose()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description="Convert a database of schema 1 to 7 to a new database of relax-tune 0.2."
    )
    parser.add_argument("old", metavar="OLD", help="the database to read: a SQLite file or a URL")
    parser.add_argument(
        "new", metavar="NEW", help="the database to create: a SQLite file, or the URL of an empty database"
    )
    chosen = parser.parse_args(arguments)
    try:
        conversion = convert(chosen.old, chosen.new)
    except DatabaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"converted": dict(conversion.counts), "left_out": dict(conversion.invalid)}))
    for problem in conversion.problems:
        print(f"left out: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
