"""Export, import and merge as JSON Lines: one record per line, with its kind and the version of the form.

Files are untrusted: the constructors of records check each line, and an invalid line is reported with its number and left out.
Importing twice changes nothing. Lines refer only to earlier lines, so all lines before a truncation are usable.

Tests: `tests/database/exchange/test_jsonl.py`, `tests/database/exchange/test_plan_origins.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from relax_tune.database import rows
from relax_tune.database.records import (
    Measurement,
    PlanRecord,
    VariantRecord,
    Workload,
    canonical_json,
    parse_json,
)
from relax_tune.database.reference import admit
from relax_tune.database.rules import RefusedRecord, chunks
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError, system_reason
from relax_tune.json_shapes import has_shape

FORM = 2
"""Version of the form, on every line as `v`. Form 1 is from before the first release."""

LINE_LIMIT = 32 * 2**20
"""Bytes of the longest line that is read."""

_UNKNOWN_ORIGIN = "unknown"
"""Origin of plans whose lines name none."""
Judge = Callable[[Workload], None]

_BATCH = 1000
_JSON_FIELDS = {"fingerprint", "limits", "reference", "facts", "symbols", "samples"}
"""Columns of JSON text that are written into a line as JSON values. Texts that keys hash stay text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line (from 1) that was left out, and the reason."""

    line: int
    why: str


@dataclass(slots=True)
class ImportReport:
    """Counts of an import.

    Attributes:
        lines: Number of lines.
        measurements, plans: Numbers of new records.
        left_out: Number of lines that are invalid, or of a target whose reference times contradict the stored ones; `problems` has
            the first of them, and a contradicting target once.
        conflicting: Number of records that differ from the stored record of the same name, which stays; `conflicts` has the first
            names.
    """

    lines: int = 0
    measurements: int = 0
    plans: int = 0
    left_out: int = 0
    conflicting: int = 0
    problems: list[Problem] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    def add_problem(self, line: int, why: str) -> None:
        """Count a problem, and keep the first hundred."""
        self.left_out += 1
        if len(self.problems) < 100:
            self.problems.append(Problem(line, why))

    def add_conflict(self, name: str) -> None:
        """Count a conflict, and keep the first hundred names."""
        self.conflicting += 1
        if len(self.conflicts) < 100:
            self.conflicts.append(name)


def _line(kind: str, values: dict[str, Any]) -> str:
    return _content_line(kind, {n: parse_json(v, n) if n in _JSON_FIELDS else v for n, v in values.items()})


def _content_line(kind: str, content: dict[str, Any]) -> str:
    return canonical_json({"v": FORM, "record": kind, **content})


def export_lines(store: Store, targets: Sequence[str] | None = None, since: float | None = None) -> Iterator[str]:
    """Yield the lines (without line ends) of the records of these target keys, or of all targets.

    The same records give the same lines. Leases and jobs belong to one database and are left out.

    Args:
        since: Earliest `measured_at` in Unix seconds. All plans are exported.

    Raises:
        DatabaseError: A target key is unknown.
    """
    chosen = []
    for key in sorted({target.key for target in store.targets()} if targets is None else set(targets)):
        target = store.target(key)
        if target is None:
            raise DatabaseError(f"{store.where}: the target {key!r} does not exist; see `relax-tune db stats`")
        chosen.append(target)
        yield _line("target", rows.target_values(target))
    for environment in store.environments():
        yield _line("environment", rows.environment_values(environment))
    plans = {target.key: store.plans(target.key) for target in chosen}
    measured = {target.key: store.measured(target.key, since) for target in chosen}
    needed = {key for keys in measured.values() for key in keys}
    needed |= {plan.workload for versions in plans.values() for plan in versions}
    if targets is None and since is None:
        for workload in store.workloads(None):
            yield _line("workload", rows.workload_values(workload))
    for chunk in chunks(sorted(needed) if targets is not None or since is not None else ()):
        for workload in store.known_workloads(chunk):
            yield _line("workload", rows.workload_values(workload))
    written: set[bytes] = set()  # keys are hashes, so 8 bytes distinguish millions of variants
    for target in chosen:
        for key in measured[target.key]:
            for measurement in store.query(target.key, key, since=since):
                if (mark := bytes.fromhex(measurement.variant.key)[:8]) not in written:
                    written.add(mark)
                    yield _line("variant", rows.variant_values(measurement.variant))
                yield _content_line("measurement", rows.measurement_content(measurement))
        current = {(p.workload, p.target): p for p in sorted(plans[target.key], key=lambda p: p.turn) if p.turn}
        for plan in sorted(plans[target.key], key=lambda p: (p.workload, p.origin or store.id, p.version)):
            yield _line("plan", _plan_values(plan, store.id, plan is current.get((plan.workload, plan.target))))
    for histogram in store.histograms(None):
        yield _line("histogram", rows.histogram_values(histogram))


def _plan_values(plan: PlanRecord, id: str, current: bool) -> dict[str, Any]:
    """Return the fields of a plan for other databases: with its origin, and whether it is current in this database."""
    values = rows.plan_values(plan)
    del values["turn"]
    return {**values, "origin": plan.origin or id, "current": current}


def export_file(store: Store, path: Path, targets: Sequence[str] | None = None, since: float | None = None) -> int:
    """Write `export_lines` to a file as `write_whole`; return the number of lines.

    Raises:
        DatabaseError: The file cannot be written, or a target is unknown.
    """
    return write_whole(path, export_lines(store, targets, since))


def write_whole(path: Path, lines: Iterable[str]) -> int:
    """Write lines to a file, which appears or replaces another only when it is complete; return the number of lines.

    Raises:
        DatabaseError: The file cannot be written.
    """
    return write_parts(path, (line + "\n" for line in lines))


def write_parts(path: Path, parts: Iterable[str]) -> int:
    """Write the parts of a text to a file as `write_whole`; return the number of parts."""
    partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part") if path.name else path
    count = 0
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            partial = path  # a device or pipe, such as /dev/stdout, is written to and never replaced
        if partial.is_dir() or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            # Mode x: another user may have put a link at this path, which must not be followed.
            with partial.open("w" if partial == path else "x", encoding="utf-8", newline="\n") as file:
                if partial != path and path.exists():
                    # The new file allows nothing that the old one forbids.
                    os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & path.stat().st_mode & 0o666)
                for part in parts:
                    file.write(part)
                    count += 1
                file.flush()
                if partial != path:
                    # The rename may otherwise reach the disk before the data, and a crash would leave an empty file.
                    os.fsync(file.fileno())
            if partial != path:
                partial.replace(path)
        except BaseException:
            if partial != path:
                partial.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise DatabaseError(
            f"{path}: the export cannot be written: {system_reason(error)}; free some space or choose another path"
        ) from None
    return count


def import_file(store: Store, path: Path, judge: Judge | None = None) -> ImportReport:
    """Import a file that `export_file` of any database wrote.

    Args:
        judge: As of `import_lines`.

    Raises:
        DatabaseError: The file cannot be read or has no valid line, or the store cannot be written.
    """
    try:
        with path.open("rb") as file:
            report = import_lines(store, _numbered(file), judge)
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path}: the file cannot be read: {system_reason(error)}; check the path") from None
    if report.left_out and report.left_out == report.lines:
        first = report.problems[0]
        raise DatabaseError(
            f"{path}: none of the {report.lines} lines is from `relax-tune db export` (line {first.line}: {first.why}); give another file"
        )
    return report


def _numbered(file: BinaryIO) -> Iterator[bytes]:
    # The limit keeps a file without line ends out of memory.
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            while line and not line.endswith(b"\n"):
                line = file.readline(2**20)
            line = b"a line of more than 32 MiB\n"
        yield line


def import_lines(store: Store, lines: Iterable[str | bytes], judge: Judge | None = None) -> ImportReport:
    """Import lines in the form of `export_lines`. Stored records and current plans do not change.

    Args:
        judge: Raises `DatabaseError` for a workload whose key is not the hash of its text.

    Raises:
        DatabaseError: The store cannot be written. Invalid lines are in the report instead.
    """
    reading = _Import(store, judge)
    for number, line in enumerate(lines, 1):
        reading.read(number, line)
    reading.finish()
    return reading.report


def merge(source: Store, into: Store, since: float | None = None, judge: Judge | None = None) -> ImportReport:
    """Copy the records of `source` that `into` lacks; see `export_lines` for `since`, `import_lines` for `judge`.

    Raises:
        DatabaseError: One of the stores cannot be read or written.
    """
    return import_lines(into, export_lines(source, None, since), judge)


def differs(stored: Measurement, given: Measurement) -> bool:
    """Return True if two measurements of one id have different results."""
    return stored.subject == given.subject and (stored.stage, stored.samples_secs) != (given.stage, given.samples_secs)


def _subject(plan: PlanRecord) -> tuple[str, str]:
    """Return the model of a plan, or its workload if the text names no model."""
    try:
        document = parse_json(plan.entries, "plan")
    except DatabaseError:
        document = None
    model = document.get("model") if isinstance(document, dict) else None
    return (str(model), "") if model else ("", plan.workload)


class _Import:
    """One pass over the lines. Measurements are committed in batches, plans at the end."""

    def __init__(self, store: Store, judge: Judge | None) -> None:
        self.store = store
        self._judge = judge
        self.report = ImportReport()
        self._variants: dict[str, VariantRecord] = {}
        self._measurements: list[tuple[int, Measurement]] = []
        self._plans: list[tuple[int, PlanRecord]] = []
        self._targets: set[str] = set()
        self._contradicting: set[str] = set()
        self._readers: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "target": self._read_target,
            "environment": lambda _, values: self._add(store.add_environment, rows.environment_of(values)),
            "workload": self._read_workload,
            "histogram": lambda _, values: self._add(store.put_histogram, rows.histogram_of(values)),
            "variant": self._read_variant,
            "measurement": self._read_measurement,
            "plan": self._read_plan,
        }

    @staticmethod
    def _add(add: Callable[[Any], object], record: object) -> None:
        try:
            add(record)
        except DatabaseError as error:
            raise _StoreFailed(error) from error

    def read(self, number: int, line: str | bytes) -> None:
        """Read one line; a problem with it goes to the report."""
        self.report.lines += 1
        try:
            self._read(number, line)
        except _StoreFailed as failure:
            raise failure.error from None
        except DatabaseError as error:
            torn = isinstance(line, bytes) and not line.endswith(b"\n")
            self.report.add_problem(
                number, f"{error} (the file ends in the middle of this line)" if torn else str(error)
            )
        if len(self._measurements) >= _BATCH:
            self.flush()

    def _read(self, number: int, line: str | bytes) -> None:
        try:
            text = line if isinstance(line, str) else line.decode()
        except UnicodeDecodeError:
            raise DatabaseError("expected UTF-8 text, got other bytes") from None
        if not text.strip():
            return
        values = parse_json(text, "line", LINE_LIMIT)
        if not has_shape(values, {"v": object, "record": object}):
            raise DatabaseError("expected an object with `v` and `record`, got something else")
        form, kind = values.pop("v"), values.pop("record")
        if type(form) is not int or form != FORM:
            raise DatabaseError(
                f"expected form {FORM}, got {form!r:.40}; export the database with this version of relax-tune, or upgrade the tool"
            )
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise DatabaseError(f"expected a record of {', '.join(sorted(self._readers))}, got {kind!r:.80}")
        for name in _JSON_FIELDS & values.keys():
            values[name] = canonical_json(values[name])
        try:
            reader(number, values)
        except KeyError as error:
            raise DatabaseError(f"the field {error.args[0]!r} of a {kind} is missing") from None

    def _read_target(self, number: int, values: dict[str, Any]) -> None:
        target = rows.target_of(values)
        try:
            why = admit(self.store, target)
        except DatabaseError as error:
            raise _StoreFailed(error) from error
        self._targets.add(target.key)
        if why:
            self._contradicting.add(target.key)
            self.report.add_problem(number, why)

    def _read_workload(self, _: int, values: dict[str, Any]) -> None:
        workload = rows.workload_of(values)
        if self._judge is not None:
            self._judge(workload)
        self._add(self.store.add_workload, workload)
        stored = self.store.workload(workload.key)
        if stored is not None and stored.text != workload.text:
            self.report.add_conflict(f"text of workload {workload.key[:12]} ({workload.hint})")

    def _read_variant(self, _: int, values: dict[str, Any]) -> None:
        variant = rows.variant_of(values)
        self._variants[variant.key] = variant

    def _read_measurement(self, line: int, values: dict[str, Any]) -> None:
        key = values["variant"]
        variant = self._variants.get(key) if isinstance(key, str) else None
        if variant is None:
            raise DatabaseError(f"expected a variant of an earlier line, got {key!r:.80}")
        measurement = rows.measurement_of(values, variant)
        if self._admits(measurement.target):
            self._measurements.append((line, measurement))

    def _read_plan(self, line: int, values: dict[str, Any]) -> None:
        """Collect a plan. Which plans become current depends on all plans of the file."""
        origin = values.get("origin", "") or _UNKNOWN_ORIGIN
        plan = rows.plan_of(
            {
                **values,
                "origin": "" if origin == self.store.id else origin,
                "turn": int(values.get("current", False) is True),
            }
        )
        if self._admits(plan.target):
            self._plans.append((line, plan))

    def _admits(self, target: str) -> bool:
        """Return True for a target of an earlier line; count the line of a contradicting one."""
        if target not in self._targets:
            raise DatabaseError(f"expected a target of an earlier line, got {target!r:.80}")
        self.report.left_out += target in self._contradicting
        return target not in self._contradicting

    def finish(self) -> None:
        """Commit all records that were read."""
        self.flush()
        self.report.plans += self._commit(self.store.add_plans, self._with_turns())

    def _with_turns(self) -> list[tuple[int, PlanRecord]]:
        """Return the plans, with a turn only if the store has no current plan of their model; those become current."""
        stored = {plan.target: self.store.plans(plan.target) for _, plan in self._plans}
        settled = {(target, *_subject(p)) for target, plans in stored.items() for p in plans if p.turn}
        texts = {(p.target, p.workload, p.origin, p.version): p.entries for plans in stored.values() for p in plans}
        with_turns = []
        for line, plan in self._plans:
            # A plan in use stays in use: an import adds knowledge, but must not change what the next build gives.
            is_first = (plan.target, *_subject(plan)) not in settled
            with_turns.append((line, replace(plan, turn=int(plan.turn and is_first))))
            if texts.get((plan.target, plan.workload, plan.origin, plan.version), plan.entries) != plan.entries:
                origin = plan.origin or "this database"
                self.report.add_conflict(f"plan {plan.version} of workload {plan.workload[:12]} from {origin}")
        return with_turns

    def flush(self) -> None:
        """Commit the measurements read so far. A refused batch is tried record by record, to name the line."""
        measurements, self._measurements = self._measurements, []
        new = self._commit(self.store.add_measurements, measurements)
        self.report.measurements += new
        if new < len(measurements):
            given = {m.id: m for _, m in measurements}
            for stored in self.store.measurements(given):
                if differs(stored, given[stored.id]):
                    self.report.add_conflict(f"measurement {stored.id}")

    def _commit(self, add: Callable[[list[Any]], int], batch: Sequence[tuple[int, Any]]) -> int:
        if not batch:
            return 0
        try:
            return add([record for _, record in batch])
        except RefusedRecord:
            added = 0
            for line, record in batch:
                try:
                    added += add([record])
                except RefusedRecord as error:
                    self.report.add_problem(line, str(error))
            return added


class _StoreFailed(Exception):
    """The store refused a valid line."""

    def __init__(self, error: DatabaseError) -> None:
        super().__init__(str(error))
        self.error = error
