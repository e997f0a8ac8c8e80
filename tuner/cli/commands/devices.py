"""`relax-tune devices`, `relax-tune doctor` and `relax-tune allow`.

Tests: `tests/tuner/cli/test_cli.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.printable import masked
from relax_tune.runtime.device.registry import list_devices
from relax_tune.tuner.allowed_files import allow as allow_file
from relax_tune.tuner.allowed_files import revoke as revoke_file
from relax_tune.tuner.cli.commands.options import Database, Json, print_json
from relax_tune.tuner.cli.doctor import QUIRK, examine, settings_findings
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.report.device_listing import devices_subject
from relax_tune.tuner.report.subject import Section, Subject, table
from relax_tune.tuner.settings import (
    FILE,
    OPTIONS,
    find_sources,
    parse_settings_file,
    read_settings_file,
    settings_of,
)


@view
def devices() -> Subject:
    """List the devices kernels can be tuned for and run on here."""
    return devices_subject(list_devices())


@view
def doctor(db: Database = None) -> Subject:
    """Report what is installed, missing, or would be faster.

    Looks at settings and where they came from, devices, compilers, libraries, the database, thread settings and packages,
    and runs a kernel on every device; changes nothing. What can be done stands above the table of findings, or as `advice`
    in the document. Exit code 0 in any case.
    """
    sources = find_sources({"db": db})
    settings = settings_of({name: source for name, source in sources.items() if not source.refused})
    findings = [*settings_findings(sources), *examine(settings.db)]
    listed = [f for f in findings if f.area != QUIRK]
    areas = ["", *(f.area for f in listed)]
    rows = [
        ["" if f.area == before else f.area, f.name, f.state, f.result]
        for before, f in zip(areas, listed, strict=False)
    ]
    advice = tuple(f"{f.area} {f.name}: {f.advice}" for f in findings if f.advice)
    findings_section = Section("findings", tables=(table(("", "name", "state", "result"), rows),))
    more = (Section("advice", "Advice", notes=advice),) if advice else ()
    quirks = tuple(f"{f.name}: {f.result}" for f in findings if f.area == QUIRK)
    last = (Section("quirks", "Known faults of devices, and what is done about them", notes=quirks),) if quirks else ()
    return Subject("Installation", (*more, findings_section, *last), [f.to_json() for f in findings])


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
        raise UserError(f"{path}: expected a settings file, got none or an empty one; give its folder")
    data = parse_settings_file(path, content)
    chosen = {name: masked(str(value)) for name, value in data.items() if OPTIONS[name].reaches_out}
    allow_file(path, content)
    for name, value in chosen.items():
        say(console, f"allowed: {name} = {value}")
    say(console, f"{path}: allowed until it changes; `relax-tune allow --revoke` takes it back")
    if json:
        print_json({"file": str(path), "allowed": chosen})
