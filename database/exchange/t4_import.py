"""Import of T4 files into a store, a few results at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from relax_tune.database.exchange.jsonl import ImportReport, Judge, says_other
from relax_tune.database.exchange.t4 import T4Result, read_t4, t4_target
from relax_tune.database.records import Measurement
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError, system_reason

_BATCH = 1000


def import_t4_file(
    store: Store,
    path: Path,
    workload: str | None,
    target: str | None,
    *,
    trust_checks: bool = False,
    judge: Judge | None = None,
) -> ImportReport:
    """Import a T4 file. Workloads, libraries and the target are added where the file describes them. Importing again changes nothing.

    workload: key of the workload of results that name none; target: key of the target; None: that of the file, else the store's only one;
    trust_checks: believe that outputs were right; judge: as of `import_lines`

    Raises:
        DatabaseError: it cannot be read, is not T4, or has a malformed result or an unknown workload. What comes before stays.
    """

    def opened() -> TextIO:
        return path.open(encoding="utf-8")

    report = ImportReport()
    try:
        if target is None:
            found, known = t4_target(opened), store.targets()
            if found is None and len(known) != 1:
                raise DatabaseError("T4: wanted a target, found none named in the file; choose one with --on KEY")
            target = known[0].key if found is None else store.add_target(found)
        batch: list[Measurement] = []
        for result in read_t4(opened, workload, target, trust_checks=trust_checks):
            report.lines += 1
            batch.append(_described(store, result, judge))
            if len(batch) >= _BATCH:
                _commit(store, report, batch)
        _commit(store, report, batch)
    except DatabaseError as error:
        raise type(error)(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DatabaseError(f"{path}: wanted a T4 file, found: {system_reason(error)}; check the path") from None
    return report


def _described(store: Store, result: T4Result, judge: Judge | None) -> Measurement:
    """Add what a result describes beside."""
    if result.workload is not None:
        if judge is not None:
            judge(result.workload)
        store.add_workload(result.workload)
    if result.environment is not None:
        store.add_environment(result.environment)
    return result.measurement


def _commit(store: Store, report: ImportReport, batch: list[Measurement]) -> None:
    given = {m.id: m for m in batch}
    new = store.add_measurements(batch)
    report.measurements += new
    if new < len(given):
        for stored in store.measurements(given):
            if says_other(stored, given[stored.id]):
                report.add_conflict(f"measurement {stored.id}")
    batch.clear()
