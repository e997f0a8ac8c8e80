"""How long each effort tunes, and how fast the model is then.

    python -m experiments.search.efforts --work FOLDER [--runs minilm:c,minilm:opencl,decoder:c] [--efforts auto,full] [--rounds 16]

Each model is tuned and built with each effort, from an empty database and with the shipped prior, in a process of its own. The artifacts
are then called in turns, in several processes, at each size. A ratio is the time of the last effort's artifact over that of another one.
Seconds are wall clock of the whole process: import, tuning and build. Tuned models stay in the folder and are not tuned again. Writes
results/efforts.json and .md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import relax_tune as rt
from experiments.end_to_end.noise import compared, module_of
from experiments.harness.e2e_cases import geomean
from experiments.harness.pages import environment, write_page

SELF = ["-m", "experiments.search.efforts"]
GOALS = {"minilm:c": 60, "minilm:opencl": 90, "decoder:c": 60}
"""Seconds in which the default effort is to reach `GOAL` of the speed of the full one."""
GOAL = 0.98


def artifact(run: str, effort: str, work: Path) -> Path:
    return work / f"{run.replace(':', '-')}-{effort}.rta"


def tune_here(run: str, effort: str, work: Path) -> None:
    """Tune and build, and write how it went."""
    model, target = run.split(":")
    path = artifact(run, effort, work)
    database = path.with_suffix(".db")
    database.unlink(missing_ok=True)
    with rt.open_database(str(database)) as store:
        module = module_of(model, work)
        result = rt.tune(module, target=target, db=store, effort=effort)
        summary = result.work
        rt.build(module, target=target, db=store, effort=effort).save(path)
    gain = summary.expected_gain
    facts = {"trials": summary.trials, "measurements": summary.measurements, "tuning": summary.wall_secs, "gain": gain}
    path.with_suffix(".json").write_text(json.dumps(facts))


def tuned(run: str, effort: str, work: Path) -> dict[str, Any]:
    """Return how a tuning in a process of its own went."""
    path = artifact(run, effort, work)
    facts = path.with_suffix(".facts")
    if not facts.exists():
        before, began = environment(), time.perf_counter()
        subprocess.run([sys.executable, *SELF, "--tune", run, effort, "--work", str(work)], check=True)
        secs = time.perf_counter() - began
        row = {"secs": secs, "environment": before, **json.loads(path.with_suffix(".json").read_text())}
        facts.write_text(json.dumps(row))
    row = json.loads(facts.read_text())
    assert isinstance(row, dict)
    return row


def page_of(run: str, efforts: list[str], tuning: dict[str, Any], times: dict[str, dict[str, float]]) -> list[str]:
    """Return the tables of one run."""
    lines = [
        f"## {run}",
        "",
        "| effort | seconds, all | seconds of tuning | candidates | a second | expected further gain |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for effort in efforts:
        row = tuning[effort]
        gain = "-" if row["gain"] is None else f"{100 * row['gain']:.1f} %"
        rate = row["trials"] / row["tuning"]
        lines.append(f"| {effort} | {row['secs']:.0f} | {row['tuning']:.0f} | {row['trials']} | {rate:.2f} | {gain} |")
    last, others = efforts[-1], efforts[:-1]
    lines += ["", f"| tokens | ms, {last} | " + " | ".join(others) + " |", "|---" * (2 + len(others)) + "|"]
    ratios = {e: {n: row[last] / row[e] for n, row in times.items()} for e in others}
    for n, row in times.items():
        lines.append(f"| {n} | {row[last] * 1e3:.2f} | " + " | ".join(f"{ratios[e][n]:.3f}" for e in others) + " |")
    for e in others:
        mean, least = geomean(list(ratios[e].values())), min(ratios[e].values())
        goal = f"; goal {GOAL} in {GOALS[run]} s" if run in GOALS and e == "auto" else ""
        lines += ["", f"{e}: {mean:.3f} in geometric mean, least {least:.3f}, in {tuning[e]['secs']:.0f} s{goal}."]
    return [*lines, ""]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", default=",".join(GOALS))
    parser.add_argument("--efforts", default="auto,full")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tune", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.tune:
        tune_here(*args.tune, args.work)
        return
    measured, efforts = environment(), args.efforts.split(",")
    results: dict[str, Any] = {"environment": measured, "runs": {}}
    lines = [
        "# Efforts",
        "",
        f"From empty databases, with the shipped prior; medians of {3 * args.rounds} calls, in turns.",
        "",
    ]
    for run in args.runs.split(","):
        model, target = run.split(":")
        tuning = {e: tuned(run, e, args.work) for e in efforts}
        times = compared(model, {e: artifact(run, e, args.work) for e in efforts}, args.rounds, device=target)
        results["runs"][run] = {"tuning": tuning, "times": times}
        lines += page_of(run, efforts, tuning, times)
        write_page("efforts", lines, results, measured)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
