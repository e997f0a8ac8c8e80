"""Recorded spaces: a search played against stored measurements, so that its quality is a number without a device."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.base import Failure, Outcome, Result, SearchStrategy
from relax_tune.tuner.search.named import SearchSpace
from relax_tune.tuner.search.space import Candidate, FloatArray, ParameterSpace

_ANSWER_COLUMNS = ("time_ms", "failure")


@dataclass(frozen=True, eq=False)
class RecordedSpace:
    """A space with the answer to every one of its points. `optimum` is the fastest time in seconds."""

    name: str
    named: SearchSpace
    outcomes: Mapping[Candidate, Outcome]
    optimum: float

    @property
    def space(self) -> ParameterSpace:
        """The space as strategies see it."""
        return self.named.space


class RecordedRunner:
    """Plays recorded answers in place of a device, and counts them."""

    def __init__(self, recorded: RecordedSpace) -> None:
        self.recorded = recorded
        self.evaluations = 0

    def run(self, candidates: Sequence[Candidate]) -> list[Result]:
        """Return one result a candidate, at shape 0.

        Raises:
            UserError: A candidate that was not recorded.
        """
        out = []
        for candidate in candidates:
            if candidate not in self.recorded.outcomes:
                raise UserError(
                    f"expected a configuration recorded in {self.recorded.name!r}, got {candidate.key}; "
                    "the space's constraint must allow exactly the recorded rows"
                )
            out.append(Result(candidate, {0: self.recorded.outcomes[candidate]}))
        self.evaluations += len(out)
        return out


def load_recorded(path: Path, constraints: Sequence[str] = ()) -> RecordedSpace:
    """Read a recorded space from a gzipped CSV: a column a parameter (whole numbers), then `time_ms` (empty for failures)
    and `failure`. `constraints` are as for `tuner.search.named.SearchSpace` and must allow exactly the recorded rows.

    Raises:
        UserError: A file without those columns or without a successful row.
    """
    with gzip.open(path, "rt", newline="") as stream:
        reader = csv.DictReader(stream)
        names = [c for c in reader.fieldnames or () if c not in _ANSWER_COLUMNS]
        rows = list(reader)
    if not names or not set(_ANSWER_COLUMNS) <= set(reader.fieldnames or ()) or not any(r["time_ms"] for r in rows):
        raise UserError(
            f"expected parameter columns, {_ANSWER_COLUMNS} and at least one timed row in {path}, got the columns {reader.fieldnames} "
            f"and {len(rows)} rows; see tests/data/replay/README.md for the format"
        )
    columns = {name: [int(row[name]) for row in rows] for name in names}
    outcomes: dict[Candidate, Outcome] = {}
    for row, values in zip(rows, zip(*columns.values())):
        answer = float(row["time_ms"]) * 1e-3 if row["time_ms"] else Failure(row["failure"] or "runtime")
        outcomes[Candidate(0, values)] = answer
    name = path.name.removesuffix(".csv.gz")
    named = SearchSpace({n: sorted(set(v)) for n, v in columns.items()}, constraints, name)
    optimum = min(o for o in outcomes.values() if isinstance(o, float))
    return RecordedSpace(name, named, MappingProxyType(outcomes), optimum)


def recorded_spaces(folder: Path) -> dict[str, RecordedSpace]:
    """Return the recorded spaces of a folder by name: a CSV each, and `spaces.json` with the constraints of every one."""
    index = json.loads((folder / "spaces.json").read_text())
    return {n: load_recorded(folder / f"{n}.csv.gz", about["constraints"]) for n, about in sorted(index.items())}


def replay(strategy: SearchStrategy, recorded: RecordedSpace, evaluations: int, batch: int) -> FloatArray:
    """Run a search in synchronous batches. Returns the fraction (evaluations,) of the optimum reached after each
    evaluation.
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
