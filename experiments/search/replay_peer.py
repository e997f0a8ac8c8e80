"""Kernel Tuner's strategies on the recorded spaces, in its simulation mode. `experiments/search/replay.py` runs it in an environment that
has the package `kernel_tuner`; it imports nothing of relax-tune.

    python -m experiments.search.replay_peer DATA SPACE STRATEGY FIRST_SEED SEEDS BUDGETS

Prints one JSON line per run: {"seed": 3, "budget": 50, "times": [...]} with the milliseconds (null: failed) of the distinct
configurations in the order of their evaluation.

Two workarounds for version 1.5.0 of Kernel Tuner. Its `seed` reaches few of its strategies, so the global generators are seeded before
each run. And it reports a failure as the largest float, which its `bayes_opt` takes for a time (it looks for 1e20) and fits its model
to. All strategies therefore get 1e20; otherwise bayes_opt would learn nothing where configurations fail.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

# Kernel Tuner's own words for what went wrong with a configuration.
FAILED = "RuntimeFailedConfig"
# What its Bayesian optimisation takes for a failure.
FAILED_COST = 1e20


def read_space(folder: Path, name: str) -> tuple[dict[str, list[int]], list[str], dict[str, dict[str, Any]]]:
    """Parameters, restrictions, and the answers by Kernel Tuner's key of a configuration."""
    restrictions = json.loads((folder / "spaces.json").read_text())[name]["constraints"]
    with gzip.open(folder / f"{name}.csv.gz", "rt", newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = [n for n in rows[0] if n not in ("time_ms", "failure")]
    parameters = {n: sorted({int(r[n]) for r in rows}) for n in names}
    cache: dict[str, dict[str, Any]] = {}
    for row in rows:
        values = {n: int(row[n]) for n in names}
        time: float | str = float(row["time_ms"]) if row["time_ms"] else FAILED
        cost = {"compile_time": 0.0, "verification_time": 0.0, "benchmark_time": 0.0}
        cache[",".join(row[n] for n in names)] = {**values, "time": time, "times": [time], **cost}
    return parameters, restrictions, cache


def write_cache(path: Path, name: str, parameters: dict[str, list[int]], cache: dict[str, dict[str, Any]]) -> None:
    """The file that Kernel Tuner's simulation mode reads in place of a device."""
    document = {
        "device_name": "recorded",
        "kernel_name": name,
        "problem_size": [1],
        "tune_params_keys": list(parameters),
        "tune_params": parameters,
        "objective": "time",
        "cache": cache,
    }
    path.write_text(json.dumps(document))


def main() -> None:
    import kernel_tuner
    import numpy as np
    from kernel_tuner import util

    cost_of = util.get_result_cost

    def cost(result: Any, objectives: Any, *rest: Any) -> list[float]:
        return [FAILED_COST] * len(objectives) if "__error__" in result else list(cost_of(result, objectives, *rest))

    util.get_result_cost = cost
    folder, name, strategy, first, count, budgets = sys.argv[1:]
    parameters, restrictions, cache = read_space(Path(folder), name)
    kernel = "".join(c if c.isalnum() else "_" for c in name)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "recorded.json"
        write_cache(file, kernel, parameters, cache)
        for seed in range(int(first), int(first) + int(count)):
            for budget in map(int, budgets.split(",")):
                random.seed(seed)
                np.random.seed(seed)
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    results, _ = kernel_tuner.tune_kernel(
                        kernel,
                        f"__global__ void {kernel}() {{}}",
                        (1,),
                        [],
                        parameters,
                        restrictions=restrictions,
                        strategy=strategy,
                        strategy_options={"max_fevals": budget},
                        cache=str(file),
                        simulation_mode=True,
                        lang="CUDA",
                        seed=seed,
                        quiet=True,
                    )
                seen: dict[tuple[int, ...], float | None] = {}
                for result in results:
                    time = result["time"]
                    values = tuple(result[n] for n in parameters)
                    seen.setdefault(values, time if isinstance(time, float) else None)
                print(json.dumps({"seed": seed, "budget": budget, "times": list(seen.values())}), flush=True)


if __name__ == "__main__":
    main()
