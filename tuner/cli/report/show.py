"""The documents of `relax-tune show` as text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from relax_tune.tuner.cli.report.console import make_table, say
from relax_tune.tuner.cli.report.model_view import point_text
from relax_tune.tuner.plan.task_rows import KINDS
from relax_tune.tuner.quantities import ratio_text, seconds_text


def show_task(console: Console, document: Mapping[str, Any]) -> None:
    """Print everything in the document, a heading over each section."""
    task = document["task"]
    say(console, f"task {task['name']}, key {task['key']}")
    if task["calls"]:
        meanings = ", ".join(f"{own} = {label}" for own, label in task["symbols"].items()) or "none"
        say(console, f"calls: {task['calls']}; symbols: {meanings}")
    labels = list(task["symbols"].values())
    points = [point_text(labels, list(shape.values())) for shape in task["shapes"]]
    say(console, f"shapes: {'  '.join(points)}")
    target = document["target"]
    say(console, f"target: {target['kind']}, {target['name']}; {document['candidates']} candidates on record")
    for note in document["notes"]:
        say(console, f"note: {note}")
    for name, write in _WRITERS.items():
        if name in document:
            write(console, document, points)


def _text(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    say(console, f"\nProgram\n\n{document['text']}")


def _sketches(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    numbers = ("legal", "tried", "failed", "best mean")
    table = make_table("sketch", "parameters", "constraints", *numbers, right=numbers, title="\nSketches")
    for row in document["sketches"]:
        parameters = "\n".join(f"{name}: {_domain(values)}" for name, values in row["parameters"].items())
        legal = f"{'' if row['exact'] else 'about '}{row['legal']:,} of {row['box']:,}"
        counts = legal, str(row["tried"]), str(row["failed"]), seconds_text(row["best_secs"])
        table.add_row(row["name"], parameters or "-", "\n".join(row["constraints"]) or "-", *counts)
    console.print(table)


def _domain(values: Sequence[int]) -> str:
    whole = len(values) > 3 and list(values) == list(range(values[0], values[-1] + 1))
    return f"{values[0]} to {values[-1]}" if whole else ", ".join(map(str, values))


def _times(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    table = make_table("shape", *KINDS, right=KINDS, title="\nBest times")
    table.caption, table.caption_justify = "* dispatched at this shape", "left"
    for text, row in zip(points, document["times"]):
        cells = [f"{seconds_text(row[kind])} {'*' if row['dispatched'] == kind else ' '}" for kind in KINDS]
        table.add_row(text, *cells)
    console.print(table)


def _dispatch(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    table = make_table("where", "variant", title="\nDispatched")
    for row in document["dispatch"]:
        table.add_row(row["where"], row["variant"])
    console.print(table)


def _variant(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    variant = document["variant"]
    say(console, f"\nVariant\n\n{variant['text']}: {variant['why']}; key {variant['key'][:12]}")
    timed = [f"{p} {seconds_text(secs)}" for p, secs in zip(points, variant["median_secs"]) if secs is not None]
    if timed:
        say(console, f"medians: {', '.join(timed)}")


def _trace(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    of = "the program after the library call" if document["variant"]["kind"] == "library" else "the program"
    python = document["trace"]["python"] or f"# no steps: {of} is left as it is"
    say(console, f"\nTrace (s is a Schedule of {of})\n\n{python}")


def _loops(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    for text in document["loops"]:
        say(console, f"\nLoops\n\n{text}")


def _source(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    for kernel in document["source"]:
        say(console, f"\nSource of {kernel['name']} ({kernel['language']})\n\n{kernel['source'].rstrip()}")


def _model(console: Console, document: Mapping[str, Any], points: Sequence[str]) -> None:
    model = document["model"]
    say(console, "\nCost model\n")
    if "lacks" in model:
        say(console, f"{model['lacks']}; `relax-tune tune` with a higher --trials measures more")
        return
    say(
        console,
        f"trained on {model['candidates']} candidates with times; each row by one that never saw that candidate",
    )
    numbers = ("measured", "predicted", "off by", "expected within")
    table = make_table("candidate", "shape", *numbers, right=numbers)
    off = []
    for row in model["rows"]:
        values = ",".join(f"{name}={value}" for name, value in row["parameters"].items())
        name = f"{row['sketch']} ({values})" if values else row["sketch"]
        for number, (text, measured, predicted, within) in enumerate(
            zip(points, row["measured_secs"], row["predicted_secs"], row["within"])
        ):
            off.append(max(measured, predicted) / min(measured, predicted))
            cells = seconds_text(measured), seconds_text(predicted), ratio_text(predicted, measured), f"{within:.2f}x"
            table.add_row("" if number else name, text, *cells)
    console.print(table)
    if off:
        say(console, f"half of these predictions are within {statistics.median(off):.2f}x of what was measured")
    some = sorted({0, len(points) // 2, len(points) - 1})
    names = [points[a] for a in some]
    table = make_table("feature", *names, right=names, title="\nFeatures of the fastest candidate")
    for name, values in model["features"].items():
        table.add_row(name, *(f"{values[a]:.4g}" for a in some))
    console.print(table)


_Writer = Callable[[Console, Mapping[str, Any], Sequence[str]], None]
_WRITERS: Mapping[str, _Writer] = {
    "text": _text,
    "sketches": _sketches,
    "times": _times,
    "dispatch": _dispatch,
    "variant": _variant,
    "trace": _trace,
    "loops": _loops,
    "source": _source,
    "model": _model,
}
