"""The types of weights that were chosen under a bound on quality, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.cli.report.console import make_table, say
from relax_tune.tuner.quality.bound import METRICS
from relax_tune.tuner.quantities import seconds_text


def read_quality(artifact: Artifact) -> dict[str, Any] | None:
    """Return how an artifact's types were chosen; None where no bound was asked for."""
    found = artifact.manifest["extra"].get("quality")
    return found if isinstance(found, dict) else None


def show_quality(console: Console, found: Mapping[str, Any] | None, whole: bool = False) -> None:
    """Print the ends of the front and the chosen point, and the quality on held-out samples.

    found: as an artifact's manifest has it; None prints nothing. whole: print all points, and the type of each weight
    """
    if found is None:
        return
    table = make_table(
        "", "predicted", "quality", "types of weights", right=("predicted",), title="Front of time and quality"
    )
    for number, point in enumerate(found["front"]):
        if whole or number in (0, found["chosen"], len(found["front"]) - 1):
            star = "*" if number == found["chosen"] else ""
            table.add_row(star, seconds_text(point["secs"]), _values(point["quality"]), _counts(point["types"]))
    console.print(table)
    for name, kind in found["types"].items() if whole else ():
        say(console, f"{name}: {kind}")
    kept, samples = found["weights"] - len(found["types"]), found["samples"]
    say(
        console,
        f"{found['bound']}: {_values(found['held_out'])} on {samples['held_out']} held-out samples, chosen on "
        f"{samples['choosing']}; {len(found['types'])} weights are stored in fewer bits, {kept} as they are",
    )


def _values(values: Mapping[str, float]) -> str:
    """Write values; a similarity just below 1 by what it lacks: `cosine 1 - 2.3e-08`."""
    shown = []
    for name, value in values.items():
        near = name in METRICS and METRICS[name].best == 1 and 0 < 1 - value < 1e-3
        shown.append(f"{name} 1 - {1 - value:.2g}" if near else f"{name} {value:.6g}")
    return ", ".join(shown)


def _counts(types: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in types.items()) or "as they are"
