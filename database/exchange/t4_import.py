"""Import of T4 files into a store, in batches.

Tests: `tests/database/exchange/test_t4.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TextIO

from relax_tune.database.exchange.jsonl import ImportReport, Judge, differs
from relax_tune.database.exchange.t4 import T4Result, read_t4, t4_target
from relax_tune.database.records import Measurement, Target
from relax_tune.database.reference import admit
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
    """Import a T4 file, with the workloads, environments and target that it describes. Importing again changes nothing.

    Args:
        workload: Key of the workload of results that name none.
        target: Key of the target; None for the target that the file describes, else for the only one in the store.
        trust_checks: Believe that outputs were compared with a reference.
        judge: As of `import_lines`.

    Raises:
        DatabaseError: The file cannot be read, is not T4, or has a malformed result or an unknown workload. Results before it stay.
    """

    def opened() -> TextIO:
        return path.open(encoding="utf-8")

    report = ImportReport()
    try:
        described, stored = t4_target(opened), store.targets()
        if target is not None:
            chosen = store.target(target)
            if described is not None and chosen is not None:
                _add_target(store, replace(chosen, reference=described.reference))
        elif described is None and len(stored) != 1:
            raise DatabaseError("T4: the file describes no target; choose one with --on KEY")
        else:
            target = stored[0].key if described is None else _add_target(store, described)
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
        raise DatabaseError(f"{path}: the file cannot be read: {system_reason(error)}; check the path") from None
    return report


def _add_target(store: Store, described: Target) -> str:
    """Add a target. Raises DatabaseError if its reference times contradict the stored ones."""
    if why := admit(store, described):
        raise DatabaseError(why)
    return described.key


def _described(store: Store, result: T4Result, judge: Judge | None) -> Measurement:
    """Add the workload and the environment that a result describes; return its measurement."""
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
            if differs(stored, given[stored.id]):
                report.add_conflict(f"measurement {stored.id}")
    batch.clear()
