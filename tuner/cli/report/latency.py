"""End-to-end latency: built programs against each other, interleaved in one process, medians.

Tests: `tests/tuner/cli/test_report_latency.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import is_floating
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.measure.device_process.inputs import buffer_shapes
from relax_tune.tuner.report.subject import Table, table
from relax_tune.tuner.report.texts import ratio_text, seconds_text

MIN_ROUNDS = 3

Run = Callable[[Sequence[NDArray[Any]]], object]


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Seconds of a whole call (inputs copied in, results copied out) of one function at one shape, by contender."""

    shape: dict[str, int]
    samples_secs: dict[str, tuple[float, ...]]
    function: str = "main"

    @property
    def median_secs(self) -> dict[str, float]:
        return {name: statistics.median(samples) for name, samples in self.samples_secs.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, medians included."""
        return {**asdict(self), "median_secs": self.median_secs}


def parse_shape(text: str) -> dict[str, int]:
    """Parse `b=1,n=8` into values by symbol. Raises UserError for any other text."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not (name and value.isascii() and value.isdigit() and len(value) <= 18) or name in sizes:
            raise UserError(f"--shape expects NAME=VALUE,NAME=VALUE, such as b=1,n=8; got {text!r:.80}")
        sizes[name] = int(value)
    return sizes


def sample_inputs(program: Program, shape: Mapping[str, int], seed: int = 0) -> tuple[NDArray[Any], ...]:
    """Return inputs at a shape, in call order.

    Floats are standard normal. Integers and booleans are 1, which admits every position of a mask, or the nearest valid
    index. Raises UserError for symbols that do not fit.
    """
    shapes = buffer_shapes(program, shape)
    generator = np.random.default_rng(seed)
    arrays: list[NDArray[Any]] = []
    for index in program.inputs:
        dtype, fill = np.dtype(program.buffers[index].dtype), program.buffers[index].fill
        if is_floating(dtype):
            arrays.append(generator.standard_normal(shapes[index]).astype(dtype))
        else:
            plain = 0 if any(r.buffer == index for r in program.ranges) else 1
            one = min(max(1, fill.low), fill.high - 1) if fill.kind == "integers" else plain
            arrays.append(np.full(shapes[index], one, dtype))
    return tuple(arrays)


def compare_latency(
    contenders: Mapping[str, tuple[Program, Run]],
    shapes: Sequence[Mapping[str, int]],
    repeats: int,
    budget_secs: float | None = None,
) -> tuple[LatencyRow, ...]:
    """Time every contender at every shape; all contenders are of one function.

    Each shape begins with one untimed call of each contender. In each of `repeats` rounds every contender runs once,
    alternately from the first and from the last. There are fewer rounds, but at least three, when a shape's rounds
    exceed `budget_secs`.
    """
    rows = []
    for shape in shapes:
        inputs = {name: sample_inputs(program, shape) for name, (program, _) in contenders.items()}
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for name, (_, run) in contenders.items():
            run(inputs[name])
        began = time.perf_counter()
        order = list(contenders)
        for turn in range(repeats):
            for name in order if turn % 2 == 0 else reversed(order):
                start = time.perf_counter()
                contenders[name][1](inputs[name])
                samples[name].append(time.perf_counter() - start)
            if budget_secs is not None and turn + 1 >= MIN_ROUNDS and time.perf_counter() - began > budget_secs:
                break
        (function,) = {program.name for program, _ in contenders.values()}
        rows.append(LatencyRow(dict(shape), {name: tuple(secs) for name, secs in samples.items()}, function))
    return tuple(rows)


def latency_table(rows: Sequence[LatencyRow], title: str) -> Table:
    """Return a table of medians by shape and contender, with the speedup of the first over each other contender."""
    several = len({row.function for row in rows}) > 1
    first, *others = rows[0].samples_secs if rows else [""]
    numbers = (first, *(part for name in others for part in (name, f"{first} is")), "rounds")
    cells = []
    for row in rows:
        medians = row.median_secs
        times = [seconds_text(medians[first])]
        for name in others:
            times += [seconds_text(medians[name]), f"{ratio_text(medians[name], medians[first])} as fast"]
        where = ",".join(f"{k}={v}" for k, v in row.shape.items())
        cells.append([*([row.function] if several else []), where, *times, str(len(row.samples_secs[first]))])
    return table((*(["function"] if several else []), "shape", *numbers), cells, numbers, title)
