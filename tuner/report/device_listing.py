"""The devices of a machine as a subject: `relax-tune devices`, which needs nothing of the tuner.

Tests: `tests/tuner/report/test_listings.py`, `tests/test_packaging.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.device_class import DeviceFailure
from relax_tune.runtime.device.quirks import quirks_of
from relax_tune.tuner.report.subject import Section, Subject, table

_LIMITS = ("workers", "max_vector_lanes", "l2_bytes", "max_local_bytes")


def devices_subject(entries: Sequence[DeviceInfo | DeviceFailure]) -> Subject:
    """Return the devices of this machine, with their quirks and why others cannot be opened."""
    document: list[dict[str, Any]] = []
    rows, notes = [], []
    for e in entries:
        if isinstance(e, DeviceFailure):
            document.append({"target": e.spec, "usable": False, "reason": e.reason})
            continue
        facts, limits = dict(e.fingerprint), dict(e.limits)
        quirks = [f"{q.name}: {q.changes}" for q in quirks_of(e.kind, e.fingerprint) if not q.refused]
        details = {"fingerprint": facts, "limits": limits, "quirks": quirks}
        document.append({"target": e.kind, "usable": True, "name": e.name, **details})
        driver = facts.get("platform") or facts.get("compiler", "")
        rows.append([e.kind, e.name, driver, *(str(limits.get(limit, "-")) for limit in _LIMITS)])
        notes += [f"{e.kind}: {quirk}" for quirk in quirks]
    notes += [f"{e.spec}: {e.reason}" for e in entries if isinstance(e, DeviceFailure)]
    if sum(row[0] == "opencl" for row in rows) > 1:
        notes.append("choose among OpenCL devices with --target opencl:PART of a platform's or device's name")
    values = table(("target", "name", "driver or compiler", *_LIMITS), rows, _LIMITS)
    more = (Section("notes", "Notes", notes=tuple(dict.fromkeys(notes))),) if notes else ()
    return Subject("Devices of this machine", (Section("devices", tables=(values,)), *more), document)
