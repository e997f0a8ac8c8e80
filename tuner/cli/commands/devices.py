"""`relax-tune devices`, `relax-tune doctor` and `relax-tune allow`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.database.engine import masked
from relax_tune.errors import UserError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.quirks import quirks_of
from relax_tune.runtime.device.registry import DeviceFailure, list_devices
from relax_tune.tuner.allowed_files import allow as allow_file
from relax_tune.tuner.allowed_files import revoke as revoke_file
from relax_tune.tuner.cli.commands.options import Database, Json, print_json
from relax_tune.tuner.cli.doctor import examine, settings_findings
from relax_tune.tuner.cli.report.console import make_console, make_table, say
from relax_tune.tuner.settings import (
    FILE,
    OPTIONS,
    find_sources,
    parse_settings_file,
    read_settings_file,
    settings_of,
)

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

    Looks at settings and where they came from, devices, compilers, libraries, the database, thread settings and packages,
    and runs a kernel on every device; changes nothing. What can be done about it stands below the table, or as `advice`
    in the document. Exit code 0 whatever it finds.
    """
    sources = find_sources({"db": db})
    settings = settings_of({name: source for name, source in sources.items() if not source.refused})
    findings = [*settings_findings(sources), *examine(settings.db)]
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


def allow(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of the settings file. [default: the current one]")
    ] = Path(),
    revoke: Annotated[bool, typer.Option("--revoke", help="Forget that the file was allowed.")] = False,
    json: Json = False,
) -> None:
    """Let a folder's relax-tune.toml choose files and databases.

    Prints these settings of the file, and remembers its path and content. Once the file changes it must be allowed
    again. Other settings of the file count without this.
    """
    path, console = folder / FILE, make_console(stderr=json)
    if revoke:
        count = revoke_file(path)
        say(console, f"{path}: {count} allowed contents forgotten")
        if json:
            print_json({"file": str(path), "forgotten": count})
        return
    content = read_settings_file(path)
    if not content:
        raise UserError(f"{path}: wanted a settings file, found none or an empty one; give its folder")
    data = parse_settings_file(path, content)
    chosen = {name: masked(str(value)) for name, value in data.items() if OPTIONS[name].reaches_out}
    allow_file(path, content)
    for name, value in chosen.items():
        say(console, f"allowed: {name} = {value}")
    say(console, f"{path}: allowed until it changes; `relax-tune allow --revoke` takes it back")
    if json:
        print_json({"file": str(path), "allowed": chosen})
