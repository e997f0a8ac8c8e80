"""Export, import and merge as JSON Lines: one record a line, each with its kind and the version of the format.

A file is untrusted: the usual constructors check each line, a bad line is reported with its number and left out, and
importing twice changes nothing. Lines refer only to earlier lines, so all lines before a torn end are usable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from relax_tune.database import rows
from relax_tune.database.records import Measurement, PlanRecord, VariantRecord, canonical_json, parse_json
from relax_tune.database.rules import RefusedRecord
from relax_tune.database.store import Store
from relax_tune.database.stored_names import plan_set_of, rename_plans, rename_variant
from relax_tune.errors import DatabaseError, system_reason
from relax_tune.json_shapes import has_shape

FORM = 2
"""The version of the form, on every line as `v`. Form 1 has the old names of sketches and primitives, which are renamed."""
_OLD_FORM = 1

LINE_LIMIT = 256 * 2**20
"""Bytes of the longest line that is read."""

_BATCH = 1000
_JSON_FIELDS = {"fingerprint", "limits", "reference", "facts", "symbols", "samples"}
"""Columns of JSON text that are written into a line as JSON values. Texts that keys hash stay text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Line `line` (from 1) was left out, and why."""

    line: int
    why: str


@dataclass(slots=True)
class ImportReport:
    """Counts of an import. measurements, plans: the new ones; lines: all read; problems: the first ones of `left_out`."""

    lines: int = 0
    measurements: int = 0
    plans: int = 0
    left_out: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, line: int, why: str) -> None:
        """Count a problem, and keep the first hundred."""
        self.left_out += 1
        if len(self.problems) < 100:
            self.problems.append(Problem(line, why))


def _line(kind: str, values: dict[str, Any]) -> str:
    content = {name: parse_json(value, name) if name in _JSON_FIELDS else value for name, value in values.items()}
    return canonical_json({"v": FORM, "record": kind, **content})


def export_lines(store: Store, targets: Sequence[str] | None = None) -> Iterator[str]:
    """Yield the lines (without line ends) of all records of these target keys, or of all targets. The same records give
    the same lines. Leases and jobs belong to one database and are left out.

    Raises:
        DatabaseError: a target key is unknown.
    """
    chosen = []
    for key in sorted({target.key for target in store.targets()} if targets is None else set(targets)):
        target = store.target(key)
        if target is None:
            raise DatabaseError(
                f"{store.where}: wanted a target to export, found the unknown key {key!r}; see `db stats`"
            )
        chosen.append(target)
        yield _line("target", rows.target_values(target))
    for environment in store.environments():
        yield _line("environment", rows.environment_values(environment))
    plans = {target.key: store.plans(target.key) for target in chosen}
    needed = {w.key for target in chosen for w in store.workloads(target.key)}
    needed |= {plan.workload for found in plans.values() for plan in found}
    for workload in store.workloads(None):
        if targets is None or workload.key in needed:
            yield _line("workload", rows.workload_values(workload))
    written: set[str] = set()
    for target in chosen:
        for workload in store.workloads(target.key):
            for measurement in store.query(target.key, workload.key):
                if measurement.variant.key not in written:
                    written.add(measurement.variant.key)
                    yield _line("variant", rows.variant_values(measurement.variant))
                yield _line("measurement", rows.measurement_values(measurement))
        for plan in plans[target.key]:
            yield _line("plan", rows.plan_values(plan))
    for histogram in store.histograms(None):
        yield _line("histogram", rows.histogram_values(histogram))


def export_file(store: Store, path: Path, targets: Sequence[str] | None = None) -> int:
    """Write `export_lines` to a new file that appears only when complete; returns the number of lines.

    Raises:
        DatabaseError: the file cannot be written, or a target is unknown.
    """
    return write_whole(path, export_lines(store, targets))


def write_whole(path: Path, lines: Iterable[str]) -> int:
    """Write lines to a file that appears, or replaces another, only when complete; returns how many there were.

    Raises:
        DatabaseError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part") if path.name else path
    count = 0
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            partial = path  # a device or pipe, such as /dev/stdout, is written to and never replaced
        if partial.is_dir() or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            # a new file of its own: no link that waits there is followed
            with partial.open("w" if partial == path else "x", encoding="utf-8", newline="\n") as file:
                if partial != path and path.exists():
                    os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & path.stat().st_mode & 0o666)
                for line in lines:
                    file.write(line + "\n")
                    count += 1
                file.flush()
                if partial != path:
                    os.fsync(file.fileno())
            if partial != path:
                partial.replace(path)
        except BaseException:
            if partial != path:
                partial.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise DatabaseError(
            f"{path}: wanted to write the export, found: {system_reason(error)}; free some space or choose another place"
        ) from None
    return count


def import_file(store: Store, path: Path) -> ImportReport:
    """Import a file written by `export_file`, here or elsewhere.

    Raises:
        DatabaseError: it cannot be read, holds nothing of ours, or the store cannot be written.
    """
    try:
        with path.open("rb") as file:
            report = import_lines(store, _numbered(file))
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path}: wanted a file to import, found: {system_reason(error)}; check the path") from None
    if report.left_out and report.left_out == report.lines:
        first = report.problems[0]
        raise DatabaseError(
            f"{path}: wanted lines written by `relax-tune db export`, found none in {report.lines} lines (line {first.line}: "
            f"{first.why}); give another file"
        )
    return report


def _numbered(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            while line and not line.endswith(b"\n"):
                line = file.readline(2**20)
            line = b"a line of more than 256 MiB\n"
        yield line


def import_lines(store: Store, lines: Iterable[str | bytes]) -> ImportReport:
    """Import lines in the form of `export_lines`. Idempotent; existing records do not change.

    Raises:
        DatabaseError: the store cannot be written. What is wrong with a line is in the report instead.
    """
    reading = _Import(store)
    for number, line in enumerate(lines, 1):
        reading.read(number, line)
    reading.finish()
    return reading.report


def merge(source: Store, into: Store) -> ImportReport:
    """Copy all records of `source` into `into`, which keeps its own.

    Raises:
        DatabaseError: one of the stores cannot be read or written.
    """
    return import_lines(into, export_lines(source))


class _Import:
    """One pass over the lines: variants are remembered, measurements and plans are committed in batches."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.report = ImportReport()
        self._variants: dict[str, VariantRecord] = {}
        self._measurements: list[tuple[int, Measurement]] = []
        self._plans: list[tuple[int, PlanRecord]] = []
        self._sets: dict[tuple[str, str, str], list[tuple[int, PlanRecord]]] = {}
        self._readers: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "target": lambda _, values: self._add(store.add_target, rows.target_of(values)),
            "environment": lambda _, values: self._add(store.add_environment, rows.environment_of(values)),
            "workload": lambda _, values: self._add(store.add_workload, rows.workload_of(values)),
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
            raise DatabaseError("wanted UTF-8 text, found other bytes") from None
        if not text.strip():
            return
        values = parse_json(text, "line")
        if not has_shape(values, {"v": object, "record": object}):
            raise DatabaseError("wanted an object with `v` and `record`, found something else")
        form, kind = values.pop("v"), values.pop("record")
        if type(form) is not int or form not in (FORM, _OLD_FORM):
            raise DatabaseError(
                f"wanted form {FORM} or {_OLD_FORM}, found {form!r:.40}; import it with the relax-tune that wrote it, or newer"
            )
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise DatabaseError(f"wanted a record of {', '.join(sorted(self._readers))}, found {kind!r:.80}")
        for name in _JSON_FIELDS & values.keys():
            values[name] = canonical_json(values[name])
        try:
            reader(number, values)
        except KeyError as error:
            raise DatabaseError(f"wanted the field {error.args[0]!r} of a {kind}, found none") from None

    def _read_variant(self, _: int, values: dict[str, Any]) -> None:
        made = rows.variant_of(values)
        self._variants[made.key] = rename_variant(made)

    def _read_measurement(self, line: int, values: dict[str, Any]) -> None:
        key = values["variant"]
        variant = self._variants.get(key) if isinstance(key, str) else None
        if variant is None:
            raise DatabaseError(f"wanted a variant of an earlier line, found {key!r:.80}")
        self._measurements.append((line, rows.measurement_of(values, variant)))

    def _read_plan(self, line: int, values: dict[str, Any]) -> None:
        """Collect a plan until the end, since the name of a set hashes all its plans."""
        plan = rows.plan_of(values)
        self._sets.setdefault((plan.target, *plan_set_of(plan.entries)), []).append((line, plan))

    def finish(self) -> None:
        """Commit all records that were read."""
        for plans in self._sets.values():
            texts = rename_plans([(plan.workload, plan.entries) for _, plan in plans])
            self._plans += [
                (line, replace(plan, entries=text)) for (line, plan), text in zip(plans, texts, strict=True)
            ]
        self.flush()

    def flush(self) -> None:
        """Commit the records read so far. A refused batch is tried record by record, to name the line."""
        measurements, self._measurements = self._measurements, []
        plans, self._plans = self._plans, []
        self.report.measurements += self._commit(self.store.add_measurements, measurements)
        self.report.plans += self._commit(self.store.add_plans, plans)

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
    """The store, not the line, is at fault."""

    def __init__(self, error: DatabaseError) -> None:
        super().__init__(str(error))
        self.error = error
