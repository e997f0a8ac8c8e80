"""End-to-end latency: built programs against each other, interleaved in one process, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import is_floating
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.cli.report.console import make_table
from relax_tune.tuner.measure.device_process.inputs import buffer_shapes
from relax_tune.tuner.quantities import ratio_text, seconds_text

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
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not (name and value.isascii() and value.isdigit() and len(value) <= 18) or name in found:
            raise UserError(f"--shape wants NAME=VALUE,NAME=VALUE, such as b=1,n=8; found {text!r:.80}")
        found[name] = int(value)
    return found


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
        rows.append(LatencyRow(dict(shape), {name: tuple(found) for name, found in samples.items()}, function))
    return tuple(rows)


def latency_table(rows: Sequence[LatencyRow], title: str) -> Table:
    """Make a table of medians by shape and contender, with the speedup of the first over each other contender."""
    several = len({row.function for row in rows}) > 1
    table = make_table(*(["function"] if several else []), "shape", title=title)
    names = list(rows[0].samples_secs) if rows else []
    for position, name in enumerate(names):
        table.add_column(name, justify="right", overflow="fold")
        if position:
            table.add_column(f"{names[0]} is", justify="right", overflow="fold")
    table.add_column("rounds", justify="right")
    for row in rows:
        medians = row.median_secs
        cells = []
        for position, name in enumerate(names):
            cells.append(seconds_text(medians[name]))
            if position:
                cells.append(f"{ratio_text(medians[name], medians[names[0]])} as fast")
        rounds = str(len(row.samples_secs[names[0]]))
        where = ",".join(f"{k}={v}" for k, v in row.shape.items())
        table.add_row(*([row.function] if several else []), where, *cells, rounds)
    return table
