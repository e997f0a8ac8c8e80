"""Recorded spaces: a search played against measurements made once, so that its quality is a number without a device."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.base import Failure, Outcome, Result, SearchStrategy
from relax_tune.tuner.search.space import (
    BoolArray,
    Candidate,
    Constraint,
    FloatArray,
    IntArray,
    Parameter,
    ParameterSpace,
    Sketch,
)

_ANSWER_COLUMNS = ("time_ms", "failure")


@dataclass(frozen=True, eq=False)
class RecordedSpace:
    """A space with the answer to every one of its points. `optimum` is the fastest time in seconds."""

    name: str
    space: ParameterSpace
    outcomes: Mapping[Candidate, Outcome]
    optimum: float


class RecordedRunner:
    """Plays recorded answers in place of a device, and counts them."""

    def __init__(self, recorded: RecordedSpace) -> None:
        self.recorded = recorded
        self.evaluations = 0

    def run(self, candidates: Sequence[Candidate]) -> list[Result]:
        """One result a candidate, at shape 0.

        Raises:
            UserError: a candidate that was not recorded.
        """
        out = []
        for candidate in candidates:
            if candidate not in self.recorded.outcomes:
                raise UserError(
                    f"wanted a configuration recorded in {self.recorded.name!r}, found {candidate.key}; "
                    "the space's constraint must allow exactly the recorded rows"
                )
            out.append(Result(candidate, {0: self.recorded.outcomes[candidate]}))
        self.evaluations += len(out)
        return out


def load_recorded(path: Path, constraint: Callable[[Mapping[str, IntArray]], BoolArray] | None = None) -> RecordedSpace:
    """Read a recorded space from a gzipped CSV: a column a parameter, then `time_ms` (empty for failures) and
    `failure`.

    `constraint(columns)` tells from the values of each column, (R,) int64, which rows are legal.

    Raises:
        UserError: a file without those columns or without a successful row.
    """
    with gzip.open(path, "rt", newline="") as stream:
        reader = csv.DictReader(stream)
        names = [c for c in reader.fieldnames or () if c not in _ANSWER_COLUMNS]
        rows = list(reader)
    if not names or not set(_ANSWER_COLUMNS) <= set(reader.fieldnames or ()) or not any(r["time_ms"] for r in rows):
        raise UserError(
            f"wanted parameter columns, {_ANSWER_COLUMNS} and at least one timed row in {path}, found the columns {reader.fieldnames} "
            f"and {len(rows)} rows; see tests/data/replay/README.md for the format"
        )
    columns = {name: [int(row[name]) for row in rows] for name in names}
    parameters = tuple(Parameter(name, tuple(sorted(set(values)))) for name, values in columns.items())
    valid: Constraint | None = None
    if constraint is not None:
        check = constraint

        def valid(values: IntArray) -> BoolArray:
            return check({name: values[:, j] for j, name in enumerate(names)})

    outcomes: dict[Candidate, Outcome] = {}
    for row, values in zip(rows, zip(*columns.values())):
        answer = float(row["time_ms"]) * 1e-3 if row["time_ms"] else Failure(row["failure"] or "runtime")
        outcomes[Candidate(0, values)] = answer
    name = path.name.removesuffix(".csv.gz")
    optimum = min(o for o in outcomes.values() if isinstance(o, float))
    return RecordedSpace(name, ParameterSpace([Sketch(name, parameters, valid)]), MappingProxyType(outcomes), optimum)


def replay(strategy: SearchStrategy, recorded: RecordedSpace, evaluations: int, batch: int) -> FloatArray:
    """Let a strategy search in synchronous batches; the fraction (evaluations,) of the optimum reached after each one.

    Failures count as evaluations. A strategy that ends early keeps its last value.
    """
    runner = RecordedRunner(recorded)
    reached = np.zeros(evaluations)
    best, done = np.inf, 0
    while done < evaluations:
        asked = strategy.ask(min(batch, evaluations - done))
        if not asked:
            reached[done:] = recorded.optimum / best
            break
        results = runner.run(asked)
        strategy.tell(results)
        for result in results:
            outcome = result.outcomes[0]
            best = min(best, outcome) if isinstance(outcome, float) else best
            reached[done] = recorded.optimum / best
            done += 1
    return reached


def gemm_constraint(c: Mapping[str, IntArray]) -> BoolArray:
    """The recorded GEMM's rules: tiles divide into threads and vectors on every side."""
    rules = (
        c["KWG"] % c["KWI"],
        c["MWG"] % (c["MDIMC"] * c["VWM"]),
        c["NWG"] % (c["NDIMC"] * c["VWN"]),
        c["MWG"] % (c["MDIMA"] * c["VWM"]),
        c["NWG"] % (c["NDIMB"] * c["VWN"]),
        c["KWG"] % np.maximum(c["MDIMC"] * c["NDIMC"] // c["MDIMA"], 1),
        c["KWG"] % np.maximum(c["MDIMC"] * c["NDIMC"] // c["NDIMB"], 1),
    )
    return np.asarray(np.logical_and.reduce([rule == 0 for rule in rules]))


def convolution_constraint(c: Mapping[str, IntArray]) -> BoolArray:
    """The recorded convolution's rules: a work-group of 64 to 1024 items, a tile below 30 points."""
    items = c["block_size_x"] * c["block_size_y"]
    return np.asarray((items >= 64) & (items <= 1024) & (c["tile_size_x"] * c["tile_size_y"] < 30))


RECORDED: Mapping[str, Callable[[Mapping[str, IntArray]], BoolArray]] = MappingProxyType(
    {
        "gemm-rtx_2080_ti": gemm_constraint,
        "convolution-rtx_2080_ti": convolution_constraint,
        "convolution-rtx_3090": convolution_constraint,
    }
)
"""The recorded spaces that come with the tests, and the constraint of each."""
