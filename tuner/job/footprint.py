"""A check, before anything is measured, that a tuning job's arrays fit in memory. Tests: `tests/wrong_input/test_commands.py`.

A kernel that runs out of memory looks like a broken kernel and is recorded as one, so the record would outlive the mistake.
Bounds beyond the memory of this machine are therefore refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_tune.errors import UserError
from relax_tune.ir.core.expr import as_int, const, substitute
from relax_tune.ir.core.function import Bound
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Task

# Copies in units of the array: itself, and its reference in double precision, which is twice as large.
COPIES = 3


def task_bytes(task: Task) -> int:
    """Return the bytes of a task's arguments and results at its largest anchor."""
    return max((point_bytes(task, point) for point in task.domain.points), default=0)


def point_bytes(task: Task, point: Point) -> int:
    """Return the bytes of a task's arguments and results at a shape."""
    values = {v: const(x) for v, x in zip(task.func.symbols, point, strict=True)}
    return sum(
        b.dtype.bytes * math.prod(as_int(substitute(d, values)) or 0 for d in b.shape) for b in task.func.buffers
    )


def check_footprint(tasks: Sequence[Task], bounds: Sequence[Bound], available: int) -> None:
    """Check that measuring the largest task takes at most `available` bytes.

    Raises:
        UserError: It takes more; the message names the task and the bounds.
    """
    largest = max(tasks, key=task_bytes, default=None)
    needed = COPIES * task_bytes(largest) if largest is not None else 0
    if largest is not None and needed > available:
        ends = (
            ", ".join(f"{b.var.name} <= {'any, without a bound' if b.upper is None else b.upper}" for b in bounds)
            or "no symbol"
        )
        raise UserError(
            f"bounds of the model: expected arrays that fit into the {available / 1e9:.1f} GB of memory here, but "
            f"measuring {largest.name} at their upper ends ({ends}) takes {needed / 1e9:,.1f} GB; lower a bound"
        )
