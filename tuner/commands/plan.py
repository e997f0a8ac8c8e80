"""`relax-tune plan`: what an artifact dispatches where, as text or as C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.plan import explain
from relax_tune.runtime.plan_c import plans_in_c
from relax_tune.runtime.writing import reason, write_whole
from relax_tune.tuner.commands.options import Json, print_json
from relax_tune.tuner.report.console import make_console, say


def plan(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .rta file.")],
    c: Annotated[
        Path | None,
        typer.Option(
            "--c",
            metavar="FILE.c",
            help="Write all plans there as C: for each of the artifact's programs one function without branches, from the values of "
            "its symbols to the variant of every call. [default: nowhere]",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what an artifact dispatches where, or write it as C.

    For each call its variants, each with the condition under which it is dispatched; the first that holds counts.
    """
    loaded = load_artifact(artifact)
    console = make_console(stderr=json)
    if c is None:
        for program in loaded.programs:
            say(console, f"{program.name}\n{explain(program)}" if len(loaded.programs) > 1 else explain(program))
    else:
        if c.exists() and not c.is_file():
            raise UserError(f"--c {c}: wanted the name of a file to write, found something else; give another")
        try:
            c.parent.mkdir(parents=True, exist_ok=True)
            write_whole(c, memoryview(plans_in_c(loaded.programs).encode()))
        except (OSError, ValueError) as error:
            raise UserError(f"--c {c}: wanted to write it, found: {reason(error)}") from None
        say(console, f"wrote {c}")
    if json:
        plans = {p.name: {"calls": len(p.calls), "plans": explain(p).splitlines()} for p in loaded.programs}
        print_json({"artifact": str(artifact), "programs": plans, "c": None if c is None else str(c)})
