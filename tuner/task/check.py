"""The correctness check of a candidate before it is timed: shapes, inputs, expected outputs.

Tests: `tests/tuner/task/test_rounding_errors.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import VerifyError, left_out
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, free_vars, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.deduce.pattern_kinds import accumulated
from relax_tune.ir.interp.interp import run_prim
from relax_tune.runtime.program.program import Fill
from relax_tune.tuner.measure.device_process.inputs import random_array
from relax_tune.tuner.measure.messages import CheckCase
from relax_tune.tuner.program.program_builder import input_fill, is_constant
from relax_tune.tuner.task.domain import CHECK_SIZES, FEW, Point
from relax_tune.tuner.task.reference import evaluate, rounding_slack, tolerances
from relax_tune.tuner.task.task import Task

CHECK_SEED = 7
Draw = Callable[[str, str, tuple[int, ...], Fill, int], NDArray[Any]]
"""`random_array`, or the same with arrays that were drawn before."""


class DrawnArrays:
    """A cache of the random arrays of the latest two tasks, since all cases of a task have the same weights."""

    def __init__(self) -> None:
        self._task = ""
        self._latest: dict[Hashable, NDArray[Any]] = {}
        self._earlier: dict[Hashable, NDArray[Any]] = {}

    def of(self, task: str) -> Draw:
        """Return `random_array` for the cases of a task; it draws no array twice."""
        if task != self._task:
            self._task, self._earlier, self._latest = task, self._latest, {}
        return self._drawn

    def _drawn(self, name: str, dtype: str, shape: tuple[int, ...], fill: Fill, seed: int) -> NDArray[Any]:
        contents = (name, dtype, shape, fill, seed)
        array = self._latest.get(contents, self._earlier.get(contents))
        if array is None:
            array = random_array(*contents)
            array.flags.writeable = False
        self._latest[contents] = array
        return array


@dataclass(frozen=True, eq=False)
class CheckCases:
    """The check cases of a job's tasks, each computed once.

    Attributes:
        slack: Whether the cases allow for amplified rounding. Its analysis takes longer than the expected outputs, and only a
            kernel that differs beyond the plain tolerance needs it.
    """

    slack: bool = True

    _arrays: DrawnArrays = field(default_factory=DrawnArrays)
    _cases: dict[tuple[str, int], CheckCase] = field(default_factory=dict)
    _at: dict[tuple[str, Point], CheckCase] = field(default_factory=dict)

    def case(self, task: Task, number: int) -> CheckCase:
        """Return a case of `check_case`."""
        if (task.key, number) not in self._cases:
            point = check_point(task, number)
            self._cases[task.key, number] = check_at(task, point, number, self.slack, self._arrays.of(task.key))
        return self._cases[task.key, number]

    def standard(self, task: Task, most_elements: float = math.inf) -> tuple[CheckCase, ...]:
        """Return the distinct cases of numbers 0 and 1, without one that cannot be computed.

        If neither can, the error of the second is raised: without a check no candidate counts as right.

        Args:
            most_elements: Elements (`check_elements`) above which a case is left out. If the smaller one is, the largest of the task's
                points within the limit replaces both; if there is none, the smaller case stays.
        """
        cases: list[CheckCase] = []
        if check_elements(task, check_point(task, 0)) > most_elements:
            elements = {p: check_elements(task, p) for p in (*task.domain.points, *task.domain.others)}
            within = [p for p, count in elements.items() if count <= most_elements]
            cases += self.all_at(task, sorted(within, key=lambda p: (elements[p], p))[-1:])
            if cases:
                return tuple(cases)
        with left_out("check 0", task.name, VerifyError):
            cases.append(self.case(task, 0))
        if not cases:
            return (self.case(task, 1),)
        larger = check_point(task, 1)
        if larger == check_point(task, 0) or check_elements(task, larger) > most_elements:
            return tuple(cases)
        with left_out("check 1", task.name, VerifyError):
            cases.append(self.case(task, 1))
        return tuple(cases)

    def all_at(self, task: Task, points: Sequence[Point]) -> tuple[CheckCase, ...]:
        """Return the cases at shapes, as far as they can be computed."""
        cases: list[CheckCase] = []
        for point in points:
            with left_out(f"the check at {point}", task.name):
                cases.append(self.at(task, point))
        return tuple(cases)

    def at(self, task: Task, point: Point) -> CheckCase:
        """Return a case of `check_at`; at the shape of case 0 it is that case."""
        if point == check_point(task, 0):
            return self.case(task, 0)
        if (task.key, point) not in self._at:
            self._at[task.key, point] = check_at(task, point, 0, self.slack, self._arrays.of(task.key))
        return self._at[task.key, point]


def check_case(task: Task, number: int) -> CheckCase:
    """Return a shape, random inputs for it and the expected outputs.

    Args:
        number: 0 for a small shape, 1 for a larger one. Neither is a multiple of a tile size, as far as the bounds allow.

    Raises:
        VerifyError: Neither the reference nor the interpreter can run the function.
    """
    return check_at(task, check_point(task, number), number)


def check_point(task: Task, number: int) -> Point:
    """Return the shape of `check_case`."""
    if task.domain.checked:
        return task.domain.checked[number]
    sizes = CHECK_SIZES[number]
    highest = [max(p[a] for p in task.domain.points) for a in range(len(task.func.symbols))]
    return tuple(min(top, sizes[top > FEW]) for top in highest)


def check_at(task: Task, point: Point, number: int = 0, slack: bool = True, draw: Draw = random_array) -> CheckCase:
    """Return random inputs of a shape, seeded by `number`, and the expected outputs.

    Args:
        slack: Whether to allow for amplified rounding (`rounding_slack`).
        draw: Returns what `random_array` does.

    Raises:
        VerifyError: As `check_case`.
    """
    values = dict(zip(task.func.symbols, point, strict=True))
    symbols = {task.symbol_names[v]: x for v, x in values.items()}
    inputs = []
    for position, b in enumerate(task.func.input_buffers):
        shape = tuple(_size(d, values) for d in b.shape)
        seed = 0 if is_constant(task.func, b) else CHECK_SEED + number
        inputs.append(draw(f"p{position}", b.dtype.name, shape, input_fill(task.func, b), seed))
    expected = _expected(task.func, inputs, values)
    limits = tolerances(task.func, values, expected)
    amplified: Sequence[NDArray[np.float64] | None] = ()
    if slack:
        with left_out(f"the bound of rounding errors at {point}", task.name, VerifyError):
            amplified = rounding_slack(task.func, inputs, values, expected, limits)
    return CheckCase(
        symbols,
        CHECK_SEED + number,
        tuple(e.astype(b.dtype.numpy) for e, b in zip(expected, task.func.output_buffers, strict=True)),
        tuple(r for r, _ in limits),
        tuple(a for _, a in limits),
        tuple(amplified) or (None,) * len(expected),
    )


def check_work(task: Task, point: Point) -> int:
    """Return the number of loop iterations that the reference evaluates at a shape."""
    values = dict(zip(task.func.symbols, point, strict=True))
    return sum(math.prod(max(0, _size(i.extent, values)) for i in b.iters) for b in blocks(task.func.body))


def check_elements(task: Task, point: Point) -> int:
    """Return the number of elements that a check draws and its reference computes at a shape, without weights.

    A sum of products counts its factors and sums, since it is one matrix product.
    """
    values = dict(zip(task.func.symbols, point, strict=True))
    drawn = [b for b in task.func.input_buffers if not is_constant(task.func, b)]
    total = sum(math.prod(_size(d, values) for d in b.shape) for b in drawn)
    for block in blocks(task.func.body):
        sizes = {i.var: max(0, _size(i.extent, values)) for i in block.iters}
        spread = [set(sizes)]
        step = accumulated(block) if block.is_reduction else None
        if step is not None and (block.body.value.op, step.op) == ("add", "mul"):
            spread = [set(free_vars(factor)) & set(sizes) for factor in step.args]
            spread.append({i.var for i in block.iters if i.kind == "spatial"})
        total += sum(math.prod(sizes[v] for v in variables) for variables in spread)
    return total


def _expected(func: PrimFunc, inputs: Sequence[NDArray[Any]], values: Mapping[Var, int]) -> Sequence[NDArray[Any]]:
    """Compute the expected outputs by the vectorised reference, or by the interpreter if the function is no chain of blocks."""
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
