"""Tables of a report: how often tasks are called, their cost, and the dispatched variants."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from relax_tune.tuner.cli.report.console import make_table
from relax_tune.tuner.plan.task_rows import KINDS, ShapeTimes, TaskRow
from relax_tune.tuner.quantities import seconds_text


def task_table(rows: Sequence[TaskRow]) -> Table:
    """Make a table of calls, share, trials and times at three shapes; a star marks the dispatched variant."""
    numbers = ("calls", "share", "trials", "shape", *KINDS)
    table = make_table("task", *numbers, right=numbers, title="Tasks")
    table.caption, table.caption_justify = "* dispatched at this shape", "left"
    for row in rows:
        shapes = [",".join(f"{k}={v}" for k, v in s.shape.items()) or "-" for s in row.shapes]
        cells = ["\n".join(_time(s, kind) for s in row.shapes) for kind in KINDS]
        share = "-" if row.share is None else f"{100 * row.share:.1f} %"
        trials = f"{row.trials}, {row.failed} failed" if row.failed else str(row.trials)
        table.add_row(row.name, str(row.calls), share, trials, "\n".join(shapes), *cells)
    return table


def dispatch_table(rows: Sequence[TaskRow]) -> Table:
    """Make a table of the dispatched variants by range; the first range that fits counts. Validation follows below."""
    table = make_table("task", "where", "variant", title="Dispatched")
    shapes, worst = sum(r.validation.shapes for r in rows), max((r.validation.worst or 1.0 for r in rows), default=1.0)
    if shapes:
        table.caption_justify = "left"
        table.caption = (
            f"validated at {shapes} shapes that no candidate was tuned at: at most {100 * (worst - 1):.0f} % behind the best "
            f"timed there; {sum(len(r.validation.added) for r in rows)} of them changed a plan"
        )
    for row in rows:
        for number, (where, variant) in enumerate(row.dispatch):
            table.add_row("" if number else row.name, where, variant)
    return table


def _time(shape: ShapeTimes, kind: str) -> str:
    text = seconds_text(getattr(shape, kind))
    return f"{text} {'*' if shape.dispatched == kind else ' '}"
