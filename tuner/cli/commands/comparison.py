"""Timing of several builds of one model, in a new process: idle threads left by tuning would slow some builds more than others.

Tests: `tests/tuner/cli/test_cli_tune.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_tune.errors import MeasureError, RelaxTuneError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.child_process import clean_environment, python_command
from relax_tune.tuner.cli.commands.bench import time_artifacts
from relax_tune.tuner.cli.report.latency import LatencyRow

ROUNDS, SECS = 20, 4.0
"""Rounds per shape, and the seconds after which a shape gets no more."""


def compare_builds(
    tuned: Path, others: Mapping[str, Artifact], target: str, shapes: Mapping[str, Sequence[Mapping[str, int]]]
) -> tuple[LatencyRow, ...]:
    """Time the tuned build against others of the same model from the same records.

    shapes: where to time, by function

    Raises MeasureError where a build cannot be opened or run.
    """
    with tempfile.TemporaryDirectory(prefix="relax-tune-compare-") as folder:
        paths = {"tuned": tuned} | {name: a.save(Path(folder, f"{name}.rta")) for name, a in others.items()}
        order = {"paths": {n: str(p.absolute()) for n, p in paths.items()}, "shapes": shapes, "target": target}
        done = subprocess.run(
            python_command("-m", __name__),
            input=json.dumps(order, default=dict),
            env=clean_environment(),
            capture_output=True,
            text=True,
        )
        answer = (done.stdout.splitlines() or [""])[-1]
        if done.returncode != 0 or not answer:
            reason = answer or (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise MeasureError(f"the process that compares builds ended with code {done.returncode}: {reason:.2000}")
        return tuple(
            LatencyRow(row["shape"], {n: tuple(s) for n, s in row["samples_secs"].items()}, row["function"])
            for row in json.loads(answer)
        )


def _rows(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    paths = {name: Path(path) for name, path in order["paths"].items()}
    timed = (time_artifacts(paths, at, ROUNDS, order["target"], SECS, name) for name, at in order["shapes"].items())
    return [row.to_json() for rows in timed for row in rows]


def main() -> int:
    """Read an order from standard input and print its rows as JSON, or one sentence with exit code 1."""
    try:
        print(json.dumps(_rows(json.load(sys.stdin))))
    except RelaxTuneError as error:
        print(" ".join(str(error).split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
