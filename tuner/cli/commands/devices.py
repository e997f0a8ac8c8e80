"""`relax-tune devices` and `relax-tune doctor`."""

from __future__ import annotations

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.quirks import quirks_of
from relax_tune.runtime.device.registry import DeviceFailure, list_devices
from relax_tune.tuner.cli.commands.options import Database, Json, print_json
from relax_tune.tuner.cli.doctor import examine
from relax_tune.tuner.cli.report.console import make_console, make_table, say
from relax_tune.tuner.settings import load_settings

_LIMITS = ("workers", "max_vector_lanes", "l2_bytes", "max_local_bytes")


def devices(json: Json = False) -> None:
    """List the devices kernels can be tuned for and run on here."""
    found = list_devices()
    if json:
        document = []
        for entry in found:
            if isinstance(entry, DeviceFailure):
                document.append({"target": entry.spec, "usable": False, "reason": entry.reason})
                continue
            details = {"fingerprint": dict(entry.fingerprint), "limits": dict(entry.limits), "quirks": _quirks(entry)}
            document.append({"target": entry.kind, "usable": True, "name": entry.name, **details})
        print_json(document)
        return
    table = make_table("target", "name", "driver or compiler", *_LIMITS, right=_LIMITS)
    failures = [e for e in found if isinstance(e, DeviceFailure)]
    usable = [e for e in found if isinstance(e, DeviceInfo)]
    for entry in usable:
        facts, limits = dict(entry.fingerprint), dict(entry.limits)
        driver = facts.get("platform") or facts.get("compiler", "")
        table.add_row(entry.kind, entry.name, driver, *(str(limits.get(limit, "-")) for limit in _LIMITS))
    console = make_console()
    console.print(table)
    for line in dict.fromkeys(f"{e.kind}: {q}" for e in usable for q in _quirks(e)):
        say(console, line)
    for failure in failures:
        say(console, f"{failure.spec}: {failure.reason}")
    if sum(e.kind == "opencl" for e in usable) > 1:
        console.print("choose among OpenCL devices with --target opencl:PART of a platform's or device's name")


def _quirks(info: DeviceInfo) -> list[str]:
    return [f"{q.name}: {q.changes}" for q in quirks_of(info.kind, info.fingerprint) if not q.refused]


def doctor(db: Database = None, json: Json = False) -> None:
    """Say what is installed, what is missing, what would be faster.

    Looks at devices, compilers, libraries, the database, thread settings and packages, and runs a kernel on every
    device; changes nothing. What can be done about it stands below the table, or as `advice` in the document. Exit code
    0 whatever it finds.
    """
    settings = load_settings({"db": db})
    findings = examine(settings.db)
    if json:
        print_json([f.to_json() for f in findings])
        return
    table = make_table("", "name", "state", "found")
    area = ""
    for f in findings:
        table.add_row(f.area if f.area != area else "", f.name, f.state, f.found)
        area = f.area
    console = make_console()
    console.print(table)
    for f in findings:
        if f.advice:
            say(console, f"{f.area} {f.name}: {f.advice}")
