"""An artifact served with fewer threads than it was tuned with, beside one that was tuned with that number.

    python -m experiments.end_to_end.fewer_threads --work FOLDER [--models minilm,decoder] [--rounds 16]

Each model is tuned for target `c` with all threads and with one, from empty databases. Both artifacts are then called with one thread, in
turns, in several processes. A ratio is the time of the one that was tuned with one thread over that of the other. Writes
results/fewer_threads.json and .md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import relax_tune as rt
from experiments.end_to_end.noise import compared, module_of
from experiments.harness.e2e_cases import geomean
from experiments.harness.pages import environment, write_page
from relax_tune.runtime.device import host

GOAL = 0.9


def tuned(model: str, threads: int, work: Path, effort: str) -> Path:
    """Tune a model with a number of threads, from an empty database."""
    path = work / f"{model}-{threads}.rta"
    database = path.with_suffix(".db")
    database.unlink(missing_ok=True)
    with rt.open_database(str(database)) as store:
        module = module_of(model, work)
        rt.tune(module, target="c", threads=threads, db=store, effort=effort)
        return Path(rt.build(module, target="c", threads=threads, db=store, effort=effort).save(path))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="minilm,decoder")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--effort", default="quick")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    measured, most = environment(), host.worker_threads()
    results: dict[str, Any] = {"effort": args.effort, "environment": measured, "models": {}}
    lines = [
        "# Fewer threads than an artifact was tuned with",
        "",
        f"One thread; tuned with {most} and with 1; effort `{args.effort}`.",
    ]
    for model in args.models.split(","):
        paths = {str(n): tuned(model, n, args.work, args.effort) for n in (most, 1)}
        times = compared(model, paths, args.rounds, threads=1)
        results["models"][model] = times
        ratios = {size: row["1"] / row[str(most)] for size, row in times.items()}
        lines += [
            "",
            f"## {model}",
            "",
            f"| tokens | ms, tuned with 1 | tuned with {most} | ratio |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {size} | {1e3 * row['1']:.2f} | {1e3 * row[str(most)]:.2f} | {ratios[size]:.2f} |"
            for size, row in times.items()
        ]
        lines += [
            "",
            f"{geomean(list(ratios.values())):.2f} in geometric mean, least {min(ratios.values()):.2f}, goal {GOAL}.",
        ]
    write_page("fewer_threads", lines, results, measured)


if __name__ == "__main__":
    main()
