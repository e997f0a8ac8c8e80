"""Builds and models as tables: tasks, dispatched variants, the front of weight types.

Tests: `tests/tuner/cli/test_report_table.py`, `tests/tuner/cli/test_quality.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.plan.task_rows import KINDS, ShapeTimes, TaskRow, symbol_labels
from relax_tune.tuner.quality.bound import METRICS
from relax_tune.tuner.report.subject import Section, Table, table
from relax_tune.tuner.report.texts import seconds_text
from relax_tune.tuner.task.task import Task

STAR = "* dispatched at this shape"


def build_section(rows: Sequence[TaskRow], quality: Mapping[str, Any] | None = None) -> Section:
    """Return the section of a build: its tasks, what is dispatched, and how the types of weights were chosen."""
    section = quality_section(quality)
    return Section("build", "", (), section.notes, tables=(task_table(rows), dispatch_table(rows), *section.tables))


def task_table(rows: Sequence[TaskRow]) -> Table:
    """Return a table of calls, share, trials and times at three shapes; a star marks the dispatched variant."""
    numbers = ("calls", "share", "trials", "shape", *KINDS)
    cells = []
    for row in rows:
        shapes = [",".join(f"{k}={v}" for k, v in s.shape.items()) or "-" for s in row.shapes]
        times = ["\n".join(_time(s, kind) for s in row.shapes) for kind in KINDS]
        share = "-" if row.share is None else f"{100 * row.share:.1f} %"
        trials = f"{row.trials}, {row.failed} failed" if row.failed else str(row.trials)
        cells.append([row.name, str(row.calls), share, trials, "\n".join(shapes), *times])
    return table(("task", *numbers), cells, numbers, "Tasks", STAR)


def _time(shape: ShapeTimes, kind: str) -> str:
    return starred(getattr(shape, kind), shape.dispatched == kind)


def starred(secs: float | None, dispatched: bool) -> str:
    """Return a time, with a star for a dispatched variant."""
    return f"{seconds_text(secs)} {'*' if dispatched else ' '}"


def dispatch_table(rows: Sequence[TaskRow]) -> Table:
    """Return a table of the dispatched variants by range; the first range that fits counts. Validation follows below."""
    shapes, worst = sum(r.validation.shapes for r in rows), max((r.validation.worst or 1.0 for r in rows), default=1.0)
    caption = (
        f"validated at {shapes} shapes that no candidate was tuned at: at most {100 * (worst - 1):.0f} % behind the best "
        f"timed there; {sum(len(r.validation.added) for r in rows)} of them changed a plan"
    )
    cells = [
        ["" if number else row.name, where, variant]
        for row in rows
        for number, (where, variant) in enumerate(row.dispatch)
    ]
    return table(("task", "where", "variant"), cells, (), "Dispatched", caption if shapes else "")


def domain_text(task: Task) -> str:
    """Return the range of every symbol: `b*n=1:4096`."""
    columns = zip(*task.domain.points)
    ranges = [f"{label}={min(column)}:{max(column)}" for label, column in zip(symbol_labels(task), columns)]
    return ", ".join(ranges) or "one shape"


def tasks_table(tasks: Sequence[Task]) -> Table:
    """Return a table of tasks: name, start of the key, calls, domain and number of anchors."""
    rows = [
        [task.name, task.key[:12], str(len(task.sites)), domain_text(task), str(len(task.domain.points))]
        for task in tasks
    ]
    return table(("task", "key", "calls", "domain", "shapes"), rows, ("calls", "shapes"), "Tasks")


def read_quality(artifact: Artifact) -> dict[str, Any] | None:
    """Return how the weight types of an artifact were chosen, or None if it was built without --quality."""
    choice = artifact.manifest["extra"].get("quality")
    return choice if isinstance(choice, dict) else None


def quality_section(choice: Mapping[str, Any] | None, whole: bool = False) -> Section:
    """Return the ends of the front and the chosen point, and the quality on held-out samples.

    Args:
        choice: The `quality` entry of an artifact's manifest; None gives an empty section.
        whole: Show all points of the front and the type of each weight.
    """
    if choice is None:
        return Section("quality")
    rows = [
        ["*" if n == choice["chosen"] else "", seconds_text(p["secs"]), _values(p["quality"]), _counts(p["types"])]
        for n, p in enumerate(choice["front"])
        if whole or n in (0, choice["chosen"], len(choice["front"]) - 1)
    ]
    columns = ("", "predicted", "quality", "types of weights")
    unchanged, samples = choice["weights"] - len(choice["types"]), choice["samples"]
    result = (
        f"{choice['bound']}: {_values(choice['held_out'])} on {samples['held_out']} held-out samples, chosen on "
        f"{samples['choosing']}; {len(choice['types'])} weights are stored in fewer bits, {unchanged} as they are"
    )
    types = tuple(f"{name}: {kind}" for name, kind in choice["types"].items()) if whole else ()
    front = table(columns, rows, ("predicted",), "Front of time and quality")
    return Section("quality", "", (), (*types, result), tables=(front,))


def _values(values: Mapping[str, float]) -> str:
    """Format values; a similarity just below 1 is written as a difference: `cosine 1 - 2.3e-08`."""
    shown = []
    for name, value in values.items():
        near = name in METRICS and METRICS[name].best == 1 and 0 < 1 - value < 1e-3
        shown.append(f"{name} 1 - {1 - value:.2g}" if near else f"{name} {value:.6g}")
    return ", ".join(shown)


def _counts(types: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in types.items()) or "as they are"
