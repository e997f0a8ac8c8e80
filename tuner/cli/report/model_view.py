"""The view of a model in `relax-tune show`: its program after any pass of the pipeline, and its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.pipeline import STANDARD, Pass, PassManager, lower, pass_names
from relax_tune.tuner.cli.report.console import make_table
from relax_tune.tuner.plan.task_rows import symbol_labels
from relax_tune.tuner.task.task import Task

IMPORTED, LOWERED = "imported", "lowered"


def stage_names(passes: Sequence[Pass] = STANDARD) -> tuple[str, ...]:
    """List the stages of `program_after`: `imported`, every pass, and `lowered` for all of them."""
    return (IMPORTED, *pass_names(passes), LOWERED)


def program_after(
    module: IRModule, stage: str, passes: Sequence[Pass] = STANDARD, verify: bool = False, checks: bool = False
) -> IRModule:
    """Return the module after the passes up to and including `stage` (any case).

    Its calls are inlined or outlined as `lower` does it. checks: as of `lower`. Raises UserError that names the stages.
    """
    names = stage_names(passes)
    known = [name.lower() for name in names]
    if stage.lower() not in known:
        raise UserError(f"--after wants a stage of the pipeline, one of {', '.join(names)}; found {stage!r}")
    name = names[known.index(stage.lower())]
    if name == IMPORTED:
        return module
    return lower(module, passes, manager=PassManager(verify, None if name == LOWERED else name), checks=checks).module


def task_document(task: Task) -> dict[str, Any]:
    """Return a task as plain values. symbols: own name -> meaning in the model; sites: the same for each call."""
    own = list(task.symbol_names.values())
    return {
        "name": task.name,
        "key": task.key,
        "calls": len(task.sites),
        "symbols": dict(zip(own, symbol_labels(task))),
        "sites": [dict(zip(own, map(str, site))) for site in task.sites],
        "shapes": [dict(zip(own, point)) for point in task.domain.points],
        "weights": list(task.domain.weights),
    }


def domain_text(task: Task) -> str:
    """Return the range of every symbol: `b*n=1:4096`."""
    columns = zip(*task.domain.points)
    ranges = [f"{label}={min(found)}:{max(found)}" for label, found in zip(symbol_labels(task), columns)]
    return ", ".join(ranges) or "one shape"


def point_text(labels: Sequence[str], point: Sequence[int]) -> str:
    """Return a shape: `b=1,n=8`."""
    return ",".join(f"{label}={value}" for label, value in zip(labels, point)) or "-"


def tasks_table(tasks: Sequence[Task]) -> Table:
    """Make a table of tasks: name, start of the key, calls, domain and number of anchors."""
    table = make_table("task", "key", "calls", "domain", "shapes", right=("calls", "shapes"), title="Tasks")
    for task in tasks:
        numbers = str(len(task.sites)), domain_text(task), str(len(task.domain.points))
        table.add_row(task.name, task.key[:12], *numbers)
    return table
