"""`relax-tune pack`: a model and what is on record for it, in one portable file.

Tests: `tests/tuner/cli/test_cli_pack.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.database.store import open_records
from relax_tune.ir.frontend.load import load_model
from relax_tune.tuner.cli.commands.options import Bounds, Json, Model, SettingFlags, print_json, with_settings
from relax_tune.tuner.cli.destination import check_destination, model_name
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.job.lowered_model import parse_bounds
from relax_tune.tuner.pack.pack import PACK, make_pack, read_pack


@with_settings("pack")
def pack(
    model: Model,
    *,
    settings: SettingFlags,
    bound: Bounds = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.rtp", help="Where to write the pack. [default: MODEL.rtp]")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write the pack even where another model's, or another file, is.")
    ] = False,
    json: Json = False,
) -> None:
    """Pack a model and its records into one portable file.

    The file holds the program as text, the weights, and what the database has on record for any device: no machine code. It is written
    the same from the same model and records. Its hash, which is printed, is what `install --digest` checks.
    """
    chosen = settings.load()
    console = make_console(stderr=json)
    module = load_model(model, parse_bounds(bound or []), **chosen.import_options)
    store, notes = open_records(chosen.db)
    with store:
        contents = make_pack(module, store, chosen)
    path = Path(f"{model_name(model)}{PACK.suffix}") if out is None else out
    check_destination(path, contents.model, overwrite, PACK)
    saved = contents.save(path)
    digest = read_pack(saved).digest
    counts = {t.name: contents.records.count(t.key) for t in contents.records.targets()}
    for note in notes:
        say(console, f"note: {note}")
    for name, count in counts.items():
        say(console, f"{count} measurements on {name}")
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB), hash {digest}")
    if json:
        print_json({"pack": str(saved), "digest": digest, "measurements": counts, "notes": list(notes)})
