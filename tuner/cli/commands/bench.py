"""`relax-tune bench`: artifacts against each other.

Tests: `tests/tuner/cli/test_cli_tune.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.tuner.cli.commands.options import Device, Function
from relax_tune.tuner.cli.commands.run import open_model
from relax_tune.tuner.cli.report.latency import LatencyRow, compare_latency, latency_table, parse_shape
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.report.subject import Subject, listing


@view
def bench(
    artifacts: Annotated[list[Path], typer.Argument(metavar="ARTIFACT...", help="One or more .rta files.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="A value for every symbol, such as b=1,n=8. May be repeated. [default: none, for artifacts without symbols]",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Rounds per shape; each round runs every artifact once.")
    ] = 20,
    function: Function = None,
    device: Device = None,
) -> Subject:
    """Time artifacts against each other, interleaved.

    A time covers a whole call on generated inputs: inputs copied to the device, every kernel, results copied back.
    """
    if repeats < 1:
        raise UserError(f"--repeats expects at least 1, got {repeats}")
    shapes = [parse_shape(text) for text in shape or []]
    loaded = [load_artifact(path) for path in artifacts]
    names = [path.stem if [p.stem for p in artifacts].count(path.stem) == 1 else str(path) for path in artifacts]
    if len(set(names)) != len(names):
        raise UserError(f"expected each artifact once, got {', '.join(names)}")
    symbolic = [s for a in loaded for s in a.function(function).symbols]
    if not shapes and symbolic:
        symbols = ", ".join(f"{s.name}=..." for s in loaded[0].function(function).symbols)
        raise UserError(f"expected at least one --shape {symbols.replace(', ', ',')}, got none")
    rows = time_artifacts(dict(zip(names, loaded, strict=True)), shapes or [{}], repeats, device, function=function)
    document = {"artifacts": [str(p) for p in artifacts], "latency": [row.to_json() for row in rows]}
    return listing("Latency", latency_table(rows, "Latency of a whole call, medians"), "", document)


def time_artifacts(
    artifacts: Mapping[str, Artifact | Path],
    shapes: Sequence[Mapping[str, int]],
    repeats: int,
    device: str | None,
    budget_secs: float | None = None,
    function: str | None = None,
) -> tuple[LatencyRow, ...]:
    """Open all of them on one device and time a function of each interleaved; see `compare_latency`."""
    with contextlib.ExitStack() as stack:
        contenders = {}
        for name, source in artifacts.items():
            artifact = load_artifact(source) if isinstance(source, Path) else source
            model = stack.enter_context(open_model(artifact, device))
            contenders[name] = (artifact.function(function), partial(model.run, function=function))
        return compare_latency(contenders, shapes, repeats, budget_secs)
