"""How early strategies find fast configurations, by the score of the auto-tuning community's methodology.

    python -m experiments.search.replay_methodology --peer-python KT/bin/python [--seeds 5] [--peers NAMES] [--spaces NAMES]

Plays the default strategy and Kernel Tuner's best strategies of replay.json (by the mean over spaces of the median after 200
evaluations) on the recorded spaces. The score is that of F.-J. Willemsen, R. Schoonhoven, J. Filipovic, J. O. Torring, R. van
Nieuwpoort, B. van Werkhoven: A Methodology for Comparing Optimization Algorithms for Auto-Tuning (2024), as the package
autotuning_methodology 1.1.0 computes it over evaluations:

* the baseline is random search without replacement: of N timed configurations, worst first, the one at round(k (N + 1) / (k + 1))
  after k evaluations;
* a curve is the median over runs of the best time so far; its relative performance is (baseline - curve) / (baseline - optimum), so
  that 0 is random search and 1 the optimum;
* both are taken between the evaluations at which the baseline has covered 1 % and 95 % of the way from the median to the optimum;
* spaces count alike: their curves are averaged at equal fractions of that range, and the mean of this is the score.

One thing differs: no more than 200 evaluations count, where the second cutoff lies beyond. The records hold no compile time, so that
evaluations are the axis, not time. A failed configuration counts as an evaluation of a strategy; the baseline, as the package has
it, meets none, so that random search itself scores below 0 where configurations fail.

Writes experiments/results/replay_methodology.json (runs and scores), replay_methodology.md and replay_methodology.svg. Goes on from
the json when it is run again with the same code and versions. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import RESULTS, environment, write_page
from experiments.search.replay import DATA, code_digest, peer_digest, versions
from relax_tune.tuner.search.base import SearchProblem
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.search.replay import RecordedRunner, RecordedSpace, recorded_spaces

START, END = 0.01, 0.95
STEPS = 100
BATCH = 8
BEST_PEERS = 4
MOST = 200
"""The last evaluation that counts, where the cutoff lies beyond."""

Curve = np.ndarray[Any, np.dtype[np.float64]]
Times = list[float | None]
Runs = dict[str, dict[str, dict[str, Times]]]  # space, strategy, seed: seconds of every evaluation


def ours(recorded: RecordedSpace, seed: int, evaluations: int) -> Times:
    """Play the default strategy until the optimum or the last evaluation."""
    strategy = make_strategy("evolution", SearchProblem(recorded.space), np.random.default_rng(seed))
    runner = RecordedRunner(recorded)
    times: Times = []
    while len(times) < evaluations and recorded.optimum not in times:
        results = runner.run(strategy.ask(min(BATCH, evaluations - len(times))))
        strategy.tell(results)
        times += [o if isinstance(o := r.outcomes[0], float) else None for r in results]
    return times


def peers(python: str, name: str, recorded: RecordedSpace, seeds: int, budget: int) -> list[Times]:
    """Play one of Kernel Tuner's strategies, which knows its budget, once a seed."""
    command = [
        python,
        "-m",
        "experiments.search.replay_peer",
        str(DATA),
        recorded.name,
        name,
        "0",
        str(seeds),
        str(budget),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line)["times"][:budget] for line in answer.stdout.splitlines()]
    return [[None if t is None else t * 1e-3 for t in times] for times in found]


def worst_first(recorded: RecordedSpace) -> Curve:
    """Return the times of the configurations of a space that ran, descending."""
    return np.sort([o for o in recorded.outcomes.values() if isinstance(o, float)])[::-1]


def cutoff(times: Curve, share: float) -> int:
    """Return the evaluations after which random search covers a share of the way from the median to the optimum."""
    target = times[-1] + (float(np.median(times)) - times[-1]) * (1.0 - share)
    index = int(np.argmax(times <= target))
    index -= times[index] == times[-1]
    return math.ceil(index / (len(times) + 1 - index))


def cutoffs(times: Curve) -> tuple[int, int]:
    """Return the first and the last evaluation that count; they differ by two or more."""
    start, end = cutoff(times, START), cutoff(times, END)
    return (start, min(end, MOST)) if end - start >= 2 else (max(start - 1, 1), end + 1)


def baseline(times: Curve, at: Curve) -> Curve:
    """Return the expected best time of random search without replacement after each number of evaluations."""
    size = len(times)
    return times[np.minimum(size - 1, np.round(at * (size + 1) / (at + 1)).astype(np.int64))]


def best_so_far(times: Times, evaluations: int) -> Curve:
    """Return the best time after each evaluation: NaN before the first success, and the last value up to the end."""
    filled = np.full(evaluations, np.nan)
    given = times[:evaluations]
    filled[: len(given)] = [np.nan if t is None else t for t in given]
    return np.fmin.accumulate(filled)


def relative(recorded: RecordedSpace, runs: Sequence[Times]) -> Curve:
    """Return the relative performance (STEPS,) of some runs at equal fractions of the range that counts."""
    times = worst_first(recorded)
    start, end = cutoffs(times)
    at = np.arange(start, end + 1, dtype=np.float64)
    curve = np.nanmedian(np.stack([best_so_far(run, end) for run in runs]), axis=0)[start - 1 :]
    random = baseline(times, at)
    performance = (random - curve) / (random - times[-1])
    return np.interp(np.linspace(start, end, STEPS), at, performance)


def best_peers(count: int) -> list[str]:
    """Return Kernel Tuner's best strategies of replay.json."""
    entries = json.loads((RESULTS / "replay.json").read_text())["entries"].values()
    reached: dict[str, list[float]] = {}
    for entry in entries:
        if entry["strategy"].startswith("kt:"):
            reached.setdefault(entry["strategy"][3:], []).append(entry["reached"]["200"]["median"])
    return sorted(reached, key=lambda name: (-float(np.mean(reached[name])), name))[:count]


def table(spaces: Mapping[str, RecordedSpace], runs: Runs) -> tuple[str, dict[str, Curve]]:
    """Return the results as Markdown, and every strategy's curve over all spaces."""
    names = [n for n in spaces if n in runs]
    strategies = [s for s in runs[names[0]] if all(runs[n].get(s) for n in names)]
    curves = {s: np.stack([relative(spaces[n], list(runs[n][s].values())) for n in names]) for s in strategies}
    ranked = sorted(strategies, key=lambda s: -float(curves[s].mean()))
    lines = [
        "# Performance over evaluations, relative to random search",
        "",
        "Written by `experiments/search/replay_methodology.py`, which says how the score is computed and cites its source. 0 is",
        "random search, 1 the optimum from the first evaluation on; below 0 is worse than random search. `kt:` are Kernel",
        "Tuner's strategies with default options. At most 200 evaluations count.",
        "",
        "![Relative performance over the share of the evaluations that count](replay_methodology.svg)",
        "",
        "| strategy | runs | score | worst space | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    for strategy in ranked:
        each = curves[strategy].mean(axis=1)
        count = min(len(runs[n][strategy]) for n in names)
        cells = " | ".join(f"{value:.3f}" for value in each)
        shown = f"**{strategy}**" if strategy == "evolution" else strategy
        lines.append(f"| {shown} | {count} | {each.mean():.3f} | {each.min():.3f} | {cells} |")
    lines += ["", "| space | first evaluation | last evaluation |", "|---|---|---|"]
    lines += ["| {} | {} | {} |".format(n, *cutoffs(worst_first(spaces[n]))) for n in names]
    return "\n".join(lines) + "\n", {s: curves[s].mean(axis=0) for s in ranked}


def drawing(curves: Mapping[str, Curve]) -> str:
    """Return the curves (STEPS,) as an SVG picture, y from the lowest value to 1."""
    wide, high, left, top = 560, 320, 50, 20
    colours = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
    low = min(0.0, math.floor(10 * min(float(c.min()) for c in curves.values())) / 10)
    low = max(low, -1.0)

    def y(value: float) -> float:
        return top + high * (1.0 - (max(value, low) - low) / (1.0 - low))

    size = f'width="{left + wide + 190}" height="{top + high + 50}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    for tick in np.arange(low, 1.01, 0.2):
        out.append(f'<path d="M{left} {y(tick):.1f}h{wide}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        out.append(f'<text x="{left + wide * share:.0f}" y="{top + high + 18}" text-anchor="middle">{share:.0%}</text>')
    title = "share of the evaluations between the cutoffs"
    out.append(f'<text x="{left + wide // 2}" y="{top + high + 40}" text-anchor="middle">{title}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = colours[number % len(colours)]
        points = " ".join(f"{left + wide * i / (STEPS - 1):.1f},{y(v):.1f}" for i, v in enumerate(curve.tolist()))
        stroke = 2.5 if name == "evolution" else 1.3
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>')
        place = f'x="{left + wide + 10}" y="{top + 14 + 18 * number}"'
        out.append(f'<text {place} fill="{colour}">{name} {curve.mean():.3f}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def missing(
    chosen: argparse.Namespace, strategy: str, recorded: RecordedSpace, found: Mapping[str, Times]
) -> dict[str, Times]:
    """Play the seeds of a strategy that were not played."""
    if all(str(seed) in found for seed in range(chosen.seeds)):
        return {}
    end = cutoffs(worst_first(recorded))[1]
    if strategy.startswith("kt:"):
        played = peers(chosen.peer_python, strategy[3:], recorded, chosen.seeds, max(end, 20))
        return {str(seed): times for seed, times in enumerate(played)}
    left = [seed for seed in range(chosen.seeds) if str(seed) not in found]
    return {str(seed): ours(recorded, seed, end) for seed in left}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each strategy on each space")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with the package kernel_tuner")
    parser.add_argument("--peers", help="Kernel Tuner's strategies; its best of replay.json by default")
    parser.add_argument("--spaces", help="names of spaces; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    about = versions(chosen.peer_python)
    made_with = {"code": code_digest(), "peer": peer_digest(), "most": MOST, **about}
    file = chosen.out / "replay_methodology.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    runs: Runs = old.get("runs", {}) if old.get("made_with") == made_with else {}
    names = chosen.peers.split(",") if chosen.peers else best_peers(BEST_PEERS)
    spaces = recorded_spaces(DATA)
    for space in chosen.spaces.split(",") if chosen.spaces else spaces:
        for strategy in ["evolution", *(f"kt:{name}" for name in names), "kt:random_sample"]:
            found = runs.setdefault(space, {}).setdefault(strategy, {})
            played = missing(chosen, strategy, spaces[space], found)
            found |= {seed: [t and float(f"{t:.6g}") for t in times] for seed, times in played.items()}
            print(space, strategy, round(float(relative(spaces[space], list(found.values())).mean()), 3), flush=True)
            file.write_text(json.dumps({"made_with": made_with, "runs": runs}, sort_keys=True) + "\n")
    page, curves = table(spaces, runs)
    write_page("replay_methodology", page.splitlines(), None, environment() | about, chosen.out, quiet=True)
    (chosen.out / "replay_methodology.svg").write_text(drawing(curves))


if __name__ == "__main__":
    main()
