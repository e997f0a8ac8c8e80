"""The document of one task, as `relax-tune show` collects it, laid out in sections.

Tests: `tests/tuner/cli/test_show.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_tune.tuner.plan.task_rows import KINDS
from relax_tune.tuner.report.builds import STAR, starred
from relax_tune.tuner.report.subject import Section, Subject, Table, table
from relax_tune.tuner.report.texts import ratio_text, seconds_text

Document = Mapping[str, Any]


def task_subject(document: Document) -> Subject:
    """Return a task with a section for each part of its document."""
    task, target = document["task"], document["target"]
    labels = list(task["symbols"].values())
    points = [point_text(labels, list(shape.values())) for shape in task["shapes"]]
    meanings = ", ".join(f"{own} = {label}" for own, label in task["symbols"].items()) or "none"
    notes = [
        f"task {task['name']}, key {task['key']}",
        *([f"calls: {task['calls']}; symbols: {meanings}"] if task["calls"] else []),
        f"shapes: {'  '.join(points)}",
        f"target: {target['kind']}, {target['name']}; {document['candidates']} candidates on record",
        *(f"note: {note}" for note in document["notes"]),
    ]
    parts = [section for name, build in _BUILDERS.items() if name in document for section in build(document, points)]
    return Subject(f"Task {task['name']}", (Section("task", notes=tuple(notes)), *parts), document)


def point_text(labels: Sequence[str], point: Sequence[int]) -> str:
    """Return a shape: `b=1,n=8`."""
    return ",".join(f"{label}={value}" for label, value in zip(labels, point)) or "-"


def _text(document: Document, points: Sequence[str]) -> list[Section]:
    return [Section("program", "Program", texts=(document["text"],))]


def _sketches(document: Document, points: Sequence[str]) -> list[Section]:
    numbers = ("legal", "tried", "failed", "best mean")
    rows = []
    for row in document["sketches"]:
        parameters = "\n".join(f"{name}: {_domain(values)}" for name, values in row["parameters"].items())
        legal = f"{'' if row['exact'] else 'about '}{row['legal']:,} of {row['box']:,}"
        counts = legal, str(row["tried"]), str(row["failed"]), seconds_text(row["best_secs"])
        rows.append([row["name"], parameters or "-", "\n".join(row["constraints"]) or "-", *counts])
    return _tabular("sketches", "Sketches", table(("sketch", "parameters", "constraints", *numbers), rows, numbers))


def _domain(values: Sequence[int]) -> str:
    whole = len(values) > 3 and list(values) == list(range(values[0], values[-1] + 1))
    return f"{values[0]} to {values[-1]}" if whole else ", ".join(map(str, values))


def _times(document: Document, points: Sequence[str]) -> list[Section]:
    rows = [
        [text, *(starred(row[kind], row["dispatched"] == kind) for kind in KINDS)]
        for text, row in zip(points, document["times"])
    ]
    return _tabular("times", "Best times", table(("shape", *KINDS), rows, KINDS, caption=STAR))


def _dispatch(document: Document, points: Sequence[str]) -> list[Section]:
    rows = [[row["where"], row["variant"]] for row in document["dispatch"]]
    return _tabular("dispatch", "Dispatched", table(("where", "variant"), rows))


def _variant(document: Document, points: Sequence[str]) -> list[Section]:
    variant = document["variant"]
    timed = [f"{p} {seconds_text(secs)}" for p, secs in zip(points, variant["median_secs"]) if secs is not None]
    notes = (f"{variant['text']}: {variant['why']}; key {variant['key'][:12]}",)
    return [Section("variant", "Variant", (), (*notes, f"medians: {', '.join(timed)}") if timed else notes)]


def _trace(document: Document, points: Sequence[str]) -> list[Section]:
    of = "the program after the library call" if document["variant"]["kind"] == "library" else "the program"
    python = document["trace"]["python"] or f"# no steps: {of} is left as it is"
    return [Section("trace", f"Trace (s is a Schedule of {of})", texts=(python,))]


def _loops(document: Document, points: Sequence[str]) -> list[Section]:
    return [Section(f"loops{n}", "Loops", texts=(text,)) for n, text in enumerate(document["loops"], 1)]


def _source(document: Document, points: Sequence[str]) -> list[Section]:
    return [
        Section(f"source{n}", f"Source of {kernel['name']} ({kernel['language']})", texts=(kernel["source"].rstrip(),))
        for n, kernel in enumerate(document["source"], 1)
    ]


def _model(document: Document, points: Sequence[str]) -> list[Section]:
    model = document["model"]
    if "lacks" in model:
        note = f"{model['lacks']}; `relax-tune tune` with a higher --trials measures more"
        return [Section("model", "Cost model", notes=(note,))]
    note = f"trained on {model['candidates']} candidates with times; each row by one that never saw that candidate"
    numbers = ("measured", "predicted", "off by", "expected within")
    rows, off = [], []
    for row in model["rows"]:
        values = ",".join(f"{name}={value}" for name, value in row["parameters"].items())
        name = f"{row['sketch']} ({values})" if values else row["sketch"]
        for number, (text, measured, predicted, within) in enumerate(
            zip(points, row["measured_secs"], row["predicted_secs"], row["within"])
        ):
            off.append(max(measured, predicted) / min(measured, predicted))
            cells = seconds_text(measured), seconds_text(predicted), ratio_text(predicted, measured), f"{within:.2f}x"
            rows.append(["" if number else name, text, *cells])
    caption = f"half of these predictions are within {statistics.median(off):.2f}x of what was measured" if off else ""
    predictions = table(("candidate", "shape", *numbers), rows, numbers, caption=caption)
    some = sorted({0, len(points) // 2, len(points) - 1})
    names = [points[a] for a in some]
    features = [[name, *(f"{values[a]:.4g}" for a in some)] for name, values in model["features"].items()]
    return [
        Section("model", "Cost model", notes=(note,), tables=(predictions,)),
        *_tabular("features", "Features of the fastest candidate", table(("feature", *names), features, names)),
    ]


def _tabular(id: str, title: str, values: Table) -> list[Section]:
    return [Section(id, title, tables=(values,))]


_BUILDERS: Mapping[str, Callable[[Document, Sequence[str]], list[Section]]] = {
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
