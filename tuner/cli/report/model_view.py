"""The view of a model in `relax-tune show`: its program after any pass of the pipeline, and its tasks.

Tests: `tests/tuner/cli/test_show.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.pipeline import STANDARD, Pass, PassManager, lower, pass_names
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
        raise UserError(f"--after expects a stage of the pipeline, one of {', '.join(names)}; got {stage!r}")
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
