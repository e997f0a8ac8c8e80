"""Tuning beside busy processes: how much speed their noise costs the tuned model.

    python -m experiments.end_to_end.noise --work FOLDER [--models minilm,decoder] [--rounds 16]

Each model is tuned for target `c` three times from an empty database: on the quiet machine, beside two busy processes, and beside eight,
two of which copy arrays of 64 MB. The artifacts are then timed on the quiet machine, in turns, in several processes. A ratio is the
time of the artifact that was tuned on the quiet machine over that of the other one. A second tuning on the quiet machine shows how much
of a ratio is the luck of a search. Tuned models stay in the folder and are not tuned again. A model that is measured again replaces its
part of results/noise.json and .md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import relax_tune as rt
from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import LARGEST, SIZES, SMALL, geomean, inputs, minilm_folder
from experiments.harness.pages import RESULTS, environment, write_page

CONDITIONS = {"quiet": (0, 0), "again": (0, 0), "two": (2, 0), "eight": (6, 2)}
"""Busy processes that compute, and that copy memory."""
TITLES = {"quiet": "quiet", "again": "quiet, again", "two": "2 busy", "eight": "8 busy"}
PROCESSES = 4
GOALS = {"two": 0.97, "eight": 0.92}
SPIN = "while True: pass"
COPY = "import numpy as np\na = np.ones(1 << 24, np.float32); b = a.copy()\nwhile True: b[:] = a"


@contextmanager
def busy(spinning: int, copying: int) -> Iterator[None]:
    """Run busy processes."""
    codes = [SPIN] * spinning + [COPY] * copying
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def module_of(model: str, work: Path) -> Any:
    if model == "minilm":
        return rt.load_model(minilm_folder(), bounds={"b": (1, 1), "n": (1, LARGEST)})
    folder = work / "decoder"
    if not folder.exists():
        write_folder(folder, SMALL, 2 * LARGEST)
    return rt.load_model(folder, bounds={"b": (1, 1), "n": (1, LARGEST), "m": (0, LARGEST)})


def tuned(model: str, condition: str, work: Path, effort: str) -> dict[str, Any]:
    """Tune a model from an empty database, in a process of its own; returns seconds and the contention of the records."""
    out, database, facts = (work / f"{model}-{condition}.{kind}" for kind in ("rta", "db", "json"))
    if facts.exists():
        known: dict[str, Any] = json.loads(facts.read_text())
        return known
    database.unlink(missing_ok=True)
    code = [sys.executable, "-m", "experiments.end_to_end.noise", "--tune", model, condition, "--work", str(work)]
    with busy(*CONDITIONS[condition]):
        began = time.perf_counter()
        subprocess.run([*code, "--effort", effort], check=True)
        secs = time.perf_counter() - began
    with rt.open_database(str(database)) as store:
        (target,) = store.targets()
        records = [r for r in store.query(target.key) if r.status == "ok"]
    waits = [r.contention for r in records if r.contention is not None]
    assert out.exists()
    row = {"secs": secs, "records": len(records), "contention": median(waits) if waits else None,
           "disturbed": float(np.mean([c > 0.02 for c in waits])) if waits else None}  # fmt: skip
    facts.write_text(json.dumps(row))
    return row


def tune_here(model: str, condition: str, work: Path, effort: str) -> None:
    """Tune and build, as `relax-tune tune` does."""
    name = f"{work}/{model}-{condition}"
    with rt.open_database(f"{name}.db") as store:
        module = module_of(model, work)
        rt.tune(module, target="c", db=store, effort=effort)
        rt.build(module, target="c", db=store, effort=effort).save(f"{name}.rta")


def compared(
    model: str, paths: Mapping[str, Path], rounds: int, threads: int | None = None, device: str | None = None
) -> dict[str, dict[str, float]]:
    """Return the median seconds of each artifact by size, called in turns in each of `PROCESSES` processes.

    Where the weights of an artifact lie in memory changes its time by up to a fifth for as long as a process lives. So each process opens
    the artifacts in another order, and the median over the processes counts.

    Args:
        paths: Artifacts by name.
        rounds: Rounds of three calls, over all processes.
        threads: Threads of all of them; None for the usual number.
        device: Device that all are opened on; None for the one that each was built for.
    """
    names = list(paths)
    parts: list[dict[str, dict[str, float]]] = []
    for number in range(PROCESSES):
        shift = number * len(names) // PROCESSES
        turned = {name: str(paths[name]) for name in names[shift:] + names[:shift]}
        asked = {
            "model": model,
            "paths": turned,
            "rounds": -(-rounds // PROCESSES),
            "threads": threads,
            "device": device,
        }
        code = [sys.executable, "-m", "experiments.end_to_end.noise", "--work", ".", "--compare", json.dumps(asked)]
        answer = subprocess.run(code, check=True, stdout=subprocess.PIPE, text=True).stdout
        parts.append(json.loads(answer.splitlines()[-1]))
    return {size: {name: median(part[size][name] for part in parts) for name in names} for size in parts[0]}


def compared_here(
    model: str, paths: Mapping[str, str], rounds: int, threads: int | None, device: str | None
) -> dict[str, dict[str, float]]:
    """Return the median seconds of each artifact by size, called in turns in this process."""
    function = None if model == "minilm" else "prefill"
    medians: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)  # of another number of threads
        models = {name: stack.enter_context(rt.load(path, device, threads=threads)) for name, path in paths.items()}
        for size in SIZES:
            given = list(inputs(function or model, size, SMALL))
            times: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(rounds):
                for name, opened in models.items():
                    opened.run(given, function)
                    for _ in range(3):
                        began = time.perf_counter()
                        opened.run(given, function)
                        times[name].append(time.perf_counter() - began)
            medians[str(size)] = {name: median(t) for name, t in times.items()}
    return medians


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="minilm,decoder")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--tune", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compare:
        print(json.dumps(compared_here(**args.compare)))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    if args.tune:
        tune_here(*args.tune, args.work, args.effort)
        return
    stored = RESULTS / "noise.json"
    models: dict[str, Any] = json.loads(stored.read_text())["models"] if stored.exists() else {}
    for model in args.models.split(","):
        tuning = {c: tuned(model, c, args.work, args.effort) for c in CONDITIONS}
        measured = environment()
        times = compared(model, {c: args.work / f"{model}-{c}.rta" for c in CONDITIONS}, args.rounds)
        row = {
            "effort": args.effort,
            "calls": 3 * args.rounds,
            "environment": measured,
            "tuning": tuning,
            "times": times,
        }
        models[model] = row
        lines = ["# Tuning beside busy processes", ""]
        for name, known in models.items():
            lines += page_of(name, known)
        write_page("noise", lines, {"environment": measured, "models": models}, measured, quiet=True)
    print("\n".join(lines))


def page_of(model: str, row: dict[str, Any]) -> list[str]:
    """Return the tables of one model."""
    times, facts = row["times"], row["environment"]
    lines = [
        f"## {model}",
        "",
        f"Timed on {facts['cpu']}; {facts['date']}; commit {facts['commit']}; load {facts['load']}. Effort `{row['effort']}`; medians of "
        f"{row['calls']} calls, in turns.",
        "",
        "| tuned | seconds | records | disturbed records | median contention |",
        "|---|---|---|---|---|",
    ]
    for c, facts in row["tuning"].items():
        cells = [
            f"{facts['secs']:.0f}",
            str(facts["records"]),
            f"{facts['disturbed']:.2f}",
            f"{facts['contention']:.2f}",
        ]
        lines.append(f"| {TITLES[c]} | {' | '.join(cells)} |")
    others = [c for c in CONDITIONS if c != "quiet"]
    lines += [
        "",
        "| tokens | ms, tuned quiet | " + " | ".join(TITLES[c] for c in others) + " |",
        "|---" * (2 + len(others)) + "|",
    ]
    ratios = {c: {n: by["quiet"] / by[c] for n, by in times.items()} for c in others}
    for n, by in times.items():
        lines.append(f"| {n} | {by['quiet'] * 1e3:.2f} | " + " | ".join(f"{ratios[c][n]:.2f}" for c in others) + " |")
    for c in others:
        least, goal = min(ratios[c].values()), f", goal {GOALS[c]}" if c in GOALS else ""
        lines += [
            "",
            f"{TITLES[c]}: {geomean(list(ratios[c].values())):.2f} in geometric mean, least {least:.2f}{goal}.",
        ]
    return [*lines, ""]


if __name__ == "__main__":
    main()
