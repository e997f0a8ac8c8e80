"""The correctness check of a candidate before it is timed: shapes, inputs, expected outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.interp.interp import run_prim
from relax_tune.tuner.measure.device_process.inputs import random_array
from relax_tune.tuner.measure.messages import CheckCase
from relax_tune.tuner.program.program_builder import input_fill, is_constant
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.reference import evaluate, tolerances
from relax_tune.tuner.task.task import Task

CHECK_SEED = 7


@dataclass(frozen=True, eq=False)
class CheckCases:
    """The check cases of a job's tasks, each made once."""

    _cases: dict[tuple[str, int], CheckCase] = field(default_factory=dict)
    _at: dict[tuple[str, Point], CheckCase] = field(default_factory=dict)

    def case(self, task: Task, number: int) -> CheckCase:
        """Return a case of `check_case`."""
        if (task.key, number) not in self._cases:
            self._cases[task.key, number] = check_case(task, number)
        return self._cases[task.key, number]

    def at(self, task: Task, point: Point) -> CheckCase:
        """Return a case of `check_at`."""
        if (task.key, point) not in self._at:
            self._at[task.key, point] = check_at(task, point)
        return self._at[task.key, point]


def check_case(task: Task, number: int) -> CheckCase:
    """Return a shape, random inputs for it and the expected outputs. Number 0 is small, 1 is larger; neither is a
    multiple of any tile.

    Raises VerifyError for a function that neither the reference nor the interpreter can run.
    """
    sizes = (5, 19) if number == 0 else (2, 67)
    highest = [max(p[a] for p in task.domain.points) for a in range(len(task.func.symbols))]
    return check_at(task, tuple(min(top, sizes[0] if top <= 16 else sizes[1]) for top in highest), number)


def check_at(task: Task, point: Point, number: int = 0) -> CheckCase:
    """Return random inputs of a shape, seeded by `number`, and the expected outputs. Raises as `check_case` does."""
    values = dict(zip(task.func.symbols, point, strict=True))
    symbols = {task.symbol_names[v]: x for v, x in values.items()}
    inputs = []
    for position, b in enumerate(task.func.input_buffers):
        shape = tuple(_size(d, values) for d in b.shape)
        seed = 0 if is_constant(task.func, b) else CHECK_SEED + number
        inputs.append(random_array(f"p{position}", b.dtype.name, shape, input_fill(task.func, b), seed))
    expected = _expected(task.func, inputs, values)
    limits = tolerances(task.func, values, expected)
    return CheckCase(
        symbols,
        CHECK_SEED + number,
        tuple(e.astype(b.dtype.numpy) for e, b in zip(expected, task.func.output_buffers, strict=True)),
        tuple(r for r, _ in limits),
        tuple(a for _, a in limits),
    )


def check_work(task: Task, point: Point) -> int:
    """Return the number of loop iterations that the reference evaluates at a shape."""
    values = dict(zip(task.func.symbols, point, strict=True))
    return sum(math.prod(max(0, _size(i.extent, values)) for i in b.iters) for b in blocks(task.func.body))


def _expected(func: PrimFunc, inputs: Sequence[NDArray[Any]], values: Mapping[Var, int]) -> Sequence[NDArray[Any]]:
    """Compute the expected outputs by the vectorised reference.

    The interpreter runs a function that is no plain chain of blocks.
    """
    try:
        return evaluate(func, inputs, values)
    except VerifyError:
        outputs = [np.zeros([_size(d, values) for d in b.shape], b.dtype.numpy) for b in func.output_buffers]
        run_prim(func, [*inputs, *outputs], [values[p] for p in func.scalar_params])
        return outputs


def _size(e: Expr, values: Mapping[Var, int]) -> int:
    result = as_int(simplify(substitute(e, {v: const(x) for v, x in values.items()})))
    assert result is not None, f"{e!r} has symbols besides the task's"
    return result
