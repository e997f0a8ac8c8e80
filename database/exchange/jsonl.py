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
from relax_tune.database.records import (
    Measurement,
    PlanRecord,
    VariantRecord,
    Workload,
    canonical_json,
    parse_json,
)
from relax_tune.database.rules import RefusedRecord, chunks
from relax_tune.database.store import Store
from relax_tune.database.stored_names import plan_set_of, rename_plans, rename_variant
from relax_tune.errors import DatabaseError, system_reason
from relax_tune.json_shapes import has_shape

FORM = 2
"""The version of the form, on every line as `v`. Form 1 has the old names of sketches and primitives, which are renamed."""
_OLD_FORM = 1

LINE_LIMIT = 32 * 2**20
"""Bytes of the longest line that is read."""

UNKNOWN = "unknown"
"""Origin of plans from a database that has no id: one before schema 7, or an export of it."""
Judge = Callable[[Workload], None]

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
    """Counts of an import. measurements, plans: the new ones; lines: all read; problems: the first ones of `left_out`.

    conflicting: records that say other things than those on record under the same name, which stay; conflicts: the first names
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
    content = {name: parse_json(value, name) if name in _JSON_FIELDS else value for name, value in values.items()}
    return canonical_json({"v": FORM, "record": kind, **content})


def export_lines(store: Store, targets: Sequence[str] | None = None, since: float | None = None) -> Iterator[str]:
    """Yield the lines (without line ends) of all records of these target keys, or of all targets. The same records give
    the same lines. Leases and jobs belong to one database and are left out.

    since: Unix seconds; only measurements made from then on, with all plans

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
    measured = {target.key: store.measured(target.key, since) for target in chosen}
    needed = {key for found in measured.values() for key in found}
    needed |= {plan.workload for found in plans.values() for plan in found}
    if targets is None and since is None:
        for workload in store.workloads(None):
            yield _line("workload", rows.workload_values(workload))
    for chunk in chunks(sorted(needed) if targets is not None or since is not None else ()):
        for workload in store.known_workloads(chunk):
            yield _line("workload", rows.workload_values(workload))
    written: set[bytes] = set()  # keys are hashes: half of their bytes keep millions apart in little memory
    for target in chosen:
        for key in measured[target.key]:
            for measurement in store.query(target.key, key, since=since):
                if (mark := bytes.fromhex(measurement.variant.key)[:8]) not in written:
                    written.add(mark)
                    yield _line("variant", rows.variant_values(measurement.variant))
                yield _line("measurement", rows.measurement_values(measurement))
        current = {(p.workload, p.target): p for p in sorted(plans[target.key], key=lambda p: p.turn) if p.turn}
        for plan in sorted(plans[target.key], key=lambda p: (p.workload, p.origin or store.id, p.version)):
            yield _line("plan", _plan_values(plan, store.id, plan is current.get((plan.workload, plan.target))))
    for histogram in store.histograms(None):
        yield _line("histogram", rows.histogram_values(histogram))


def _plan_values(plan: PlanRecord, id: str, current: bool) -> dict[str, Any]:
    """Return the fields of a plan as another database should know it: by its origin, and whether it is current here."""
    values = rows.plan_values(plan)
    del values["turn"]
    return {**values, "origin": plan.origin or id, "current": current}


def export_file(store: Store, path: Path, targets: Sequence[str] | None = None, since: float | None = None) -> int:
    """Write `export_lines` to a new file that appears only when complete; returns the number of lines.

    Raises:
        DatabaseError: the file cannot be written, or a target is unknown.
    """
    return write_whole(path, export_lines(store, targets, since))


def write_whole(path: Path, lines: Iterable[str]) -> int:
    """Write lines to a file that appears, or replaces another, only when complete; returns how many there were.

    Raises:
        DatabaseError: the file cannot be written.
    """
    return write_parts(path, (line + "\n" for line in lines))


def write_parts(path: Path, parts: Iterable[str]) -> int:
    """Write the parts of a text to a file as `write_whole` does; returns how many there were."""
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
                for part in parts:
                    file.write(part)
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


def import_file(store: Store, path: Path, judge: Judge | None = None) -> ImportReport:
    """Import a file written by `export_file`, here or elsewhere. judge: as of `import_lines`

    Raises:
        DatabaseError: it cannot be read, holds nothing of ours, or the store cannot be written.
    """
    try:
        with path.open("rb") as file:
            report = import_lines(store, _numbered(file), judge)
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
            line = b"a line of more than 32 MiB\n"
        yield line


def import_lines(store: Store, lines: Iterable[str | bytes], judge: Judge | None = None) -> ImportReport:
    """Import lines in the form of `export_lines`. Idempotent; existing records and current plans do not change.

    judge: raises `DatabaseError` for a workload whose text is not what its key says

    Raises:
        DatabaseError: the store cannot be written. What is wrong with a line is in the report instead.
    """
    reading = _Import(store, judge)
    for number, line in enumerate(lines, 1):
        reading.read(number, line)
    reading.finish()
    return reading.report


def merge(source: Store, into: Store, since: float | None = None, judge: Judge | None = None) -> ImportReport:
    """Copy all records of `source` into `into`, which keeps its own. since, judge: as of `export_lines` and `import_lines`

    Raises:
        DatabaseError: one of the stores cannot be read or written.
    """
    return import_lines(into, export_lines(source, None, since), judge)


def says_other(stored: Measurement, given: Measurement) -> bool:
    """Return True for two measurements of one id with other results."""
    return stored.subject == given.subject and (stored.stage, stored.samples_secs) != (given.stage, given.samples_secs)


def _subject(plan: PlanRecord) -> tuple[str, str]:
    """Return the model of a plan, or its workload where the text names no model."""
    model, _ = plan_set_of(plan.entries)
    return (model, "") if model else ("", plan.workload)


class _Import:
    """One pass over the lines: variants are remembered, measurements and plans are committed in batches."""

    def __init__(self, store: Store, judge: Judge | None) -> None:
        self.store = store
        self._judge = judge
        self.report = ImportReport()
        self._variants: dict[str, VariantRecord] = {}
        self._measurements: list[tuple[int, Measurement]] = []
        self._plans: list[tuple[int, PlanRecord]] = []
        self._sets: dict[tuple[str, str, str], list[tuple[int, PlanRecord]]] = {}
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
            raise DatabaseError("wanted UTF-8 text, found other bytes") from None
        if not text.strip():
            return
        values = parse_json(text, "line", LINE_LIMIT)
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

    def _read_target(self, _: int, values: dict[str, Any]) -> None:
        made = rows.target_of(values)
        self._add(self.store.add_target, made)
        known = self.store.target(made.key)
        if known is not None and made.reference and known.reference != made.reference:
            self.report.add_conflict(f"reference times of target {made.key[:12]} ({made.name})")

    def _read_workload(self, _: int, values: dict[str, Any]) -> None:
        made = rows.workload_of(values)
        if self._judge is not None:
            self._judge(made)
        self._add(self.store.add_workload, made)
        known = self.store.workload(made.key)
        if known is not None and known.text != made.text:
            self.report.add_conflict(f"text of workload {made.key[:12]} ({made.hint})")

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
        current = values.get("current", False)
        origin = values.get("origin", "") or UNKNOWN
        plan = rows.plan_of(
            {**values, "origin": "" if origin == self.store.id else origin, "turn": int(current is True)}
        )
        if "origin" not in values:  # of a tool that knew no origins: the highest version is the current one
            plan = replace(plan, turn=plan.version)
        self._sets.setdefault((plan.target, *plan_set_of(plan.entries)), []).append((line, plan))

    def finish(self) -> None:
        """Commit all records that were read."""
        self.flush()
        found: list[tuple[int, str, PlanRecord]] = []
        for (_, model, _), plans in self._sets.items():
            texts = rename_plans([(plan.workload, plan.entries) for _, plan in plans])
            found += [
                (line, model, replace(plan, entries=text)) for (line, plan), text in zip(plans, texts, strict=True)
            ]
        self._plans = self._in_turn(found)
        self.flush()

    def _in_turn(self, found: Sequence[tuple[int, str, PlanRecord]]) -> list[tuple[int, PlanRecord]]:
        """Leave a turn to the newest plans of models that have no current plans here, which become current."""
        here = {plan.target: self.store.plans(plan.target) for _, _, plan in found}
        settled = {(t, *_subject(p)) for t, plans in here.items() for p in plans if p.turn}
        newest: dict[tuple[str, str, str], int] = {}
        for _, _, plan in found:
            task = (plan.target, plan.workload, _subject(plan)[0])
            newest[task] = max(newest.get(task, 0), plan.turn)
        known = {(p.target, p.workload, p.origin, p.version): p.entries for plans in here.values() for p in plans}
        made = []
        for line, _, plan in found:
            first = plan.turn and plan.turn == newest[plan.target, plan.workload, _subject(plan)[0]]
            made.append((line, replace(plan, turn=int(bool(first) and (plan.target, *_subject(plan)) not in settled))))
            if known.get((plan.target, plan.workload, plan.origin, plan.version), plan.entries) != plan.entries:
                self.report.add_conflict(
                    f"plan {plan.version} of workload {plan.workload[:12]} from {plan.origin or 'here'}"
                )
        return made

    def flush(self) -> None:
        """Commit the records read so far. A refused batch is tried record by record, to name the line."""
        measurements, self._measurements = self._measurements, []
        plans, self._plans = self._plans, []
        new = self._commit(self.store.add_measurements, measurements)
        self.report.measurements += new
        if new < len(measurements):
            given = {m.id: m for _, m in measurements}
            for stored in self.store.measurements(given):
                if says_other(stored, given[stored.id]):
                    self.report.add_conflict(f"measurement {stored.id}")
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
