"""Contribution of each part of the default search: the recorded spaces played without it, or with another size of it.

    python -m experiments.search.replay_ablation [--seeds 5] [--evaluations 200] [--variants "default,no trees"] [--spaces NAMES]

A variant's score on a space is the mean, over seeds, of the fraction of the optimum reached after 50, 100 and 200 evaluations (those
that were played). Leave one out: the variant that gains most on the other spaces is reported on the one that is left out, so that
no choice is scored on the space that it was made on. `naive ranker` is the baseline (`naive_ranker.py`).

Appends to experiments/results/replay_ablation.json, and plays nothing twice as long as the search's code does not change.
replay_ablation.md is the table, in which every variant is compared with the default on the seeds that both have played (± the standard
error). Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from experiments.harness.pages import RESULTS, environment, write_page
from experiments.search.naive_ranker import NaiveRanker
from experiments.search.replay import DATA, code_digest, versions
from relax_tune.tuner.search import embedding, space
from relax_tune.tuner.search.base import SearchProblem, SearchStrategy, isin
from relax_tune.tuner.search.models import surrogate
from relax_tune.tuner.search.replay import RecordedSpace, recorded_spaces, replay
from relax_tune.tuner.search.space import CodeArray, FloatArray
from relax_tune.tuner.search.strategies import evolution
from relax_tune.tuner.search.strategies.baselines import fresh_sample
from relax_tune.tuner.search.strategies.evolution import EvolutionarySearch, EvolutionSettings

CHECKPOINTS = (50, 100, 200)
BATCH = 8


def balanced(search: EvolutionarySearch, count: int, taken: CodeArray) -> CodeArray:
    """Return a design in which each value, and then each pair of values, comes as often as the others."""
    space, history = search.problem.space, search._history
    if count <= 0:
        return np.zeros((0, 1 + space.width), dtype=np.int32)
    pool = fresh_sample(history, search._rng, max(512, 4 * count))
    pool = pool[~isin(space.keys(pool), space.keys(taken))] if len(taken) and len(pool) else pool
    sizes = np.array([len(np.unique(column)) for column in pool.T])
    pairs = 0.25 * np.sqrt(sizes[:, None] * sizes[None, :])

    def shared(code: CodeArray) -> FloatArray:
        same = pool == code
        return np.asarray((same * sizes).sum(axis=1) + ((same[:, :, None] & same[:, None, :]) * pairs).sum(axis=(1, 2)))

    cost = np.sum([shared(code) for code in np.concatenate([history.visited(), taken])], axis=0) + np.zeros(len(pool))
    chosen: list[int] = []
    for _ in range(min(count, len(pool))):
        chosen.append(int(np.argmin(cost)))
        cost += shared(pool[chosen[-1]])
        cost[chosen[-1]] = np.inf
    return np.asarray(pool[chosen])


def two_scales(squares: FloatArray) -> FloatArray:
    """Evaluate the mean of two Matern kernels, one with lengths four times as long."""
    return np.asarray(0.5 * matern(squares) + 0.5 * matern(squares / 16.0))


def rough(squares: FloatArray) -> FloatArray:
    """Evaluate the Matern kernel of smoothness 1/2."""
    return np.asarray(np.exp(-np.sqrt(np.maximum(squares, 0.0))))


matern, ask = surrogate._matern, EvolutionarySearch.ask
# Changed settings, and parts of modules that are replaced.
VARIANTS: dict[str, tuple[dict[str, Any], list[tuple[Any, str, Callable[..., Any]]]]] = {
    "default": ({}, []),
    "no trees": ({"trees": 0.0}, []),
    "trees .25": ({"trees": 0.25}, []),
    "trees .75": ({"trees": 0.75}, []),
    "trees' mean alone": ({"trees": 1.0}, []),
    "no alignment": ({}, [(m, "has_alignment", lambda parameter: False) for m in (space, embedding)]),
    "no tied pairs": ({}, [(embedding, "_axes", lambda of: ())]),
    "no compression": ({}, [(evolution, "compressed", lambda log_time, middle: log_time)]),
    "no optimistic bound": ({"explore": 0.0}, []),
    "optimistic bound .15": ({"explore": 0.15}, []),
    "no random points": ({"epsilon": 0.0}, []),
    "random design": ({}, [(evolution, "_farthest", lambda points, count, *_: list(range(min(count, len(points)))))]),
    "design of 8": ({"design": 8}, []),
    "design of 24": ({"design": 24}, []),
    "balanced design": ({}, [(EvolutionarySearch, "_spread", balanced)]),
    "balanced design of 8": ({"design": 8}, [(EvolutionarySearch, "_spread", balanced)]),
    "batches of 4": ({}, [(EvolutionarySearch, "ask", lambda search, n: ask(search, min(n, 4)))]),
    "two length scales": ({}, [(surrogate, "_matern", two_scales)]),
    "rough process": ({}, [(surrogate, "_matern", rough)]),
}


@contextmanager
def strategy(variant: str, problem: SearchProblem, seed: int) -> Iterator[SearchStrategy]:
    """A variant of the search, while its parts are replaced."""
    rng = np.random.default_rng(seed)
    if variant == "naive ranker":
        yield NaiveRanker(problem, rng)
        return
    settings, parts = VARIANTS[variant]
    with ExitStack() as stack:
        for module, name, part in parts:
            stack.enter_context(patch.object(module, name, part))
        yield EvolutionarySearch(problem, rng, replace(EvolutionSettings(), **settings))


def play(variant: str, recorded: RecordedSpace, seed: int, evaluations: int) -> dict[str, float]:
    """The fractions of the optimum reached at the checkpoints that are played."""
    with strategy(variant, SearchProblem(recorded.space), seed) as search:
        curve = replay(search, recorded, evaluations, BATCH)
    return {str(at): round(float(curve[at - 1]), 4) for at in CHECKPOINTS if at <= evaluations}


Runs = dict[str, dict[str, dict[str, dict[str, float]]]]  # variant, space, seed, checkpoint


def scores(runs: Runs, at: Sequence[str]) -> dict[str, dict[str, float]]:
    """The mean fraction of every variant on every space that all seeds have played."""
    out: dict[str, dict[str, float]] = defaultdict(dict)
    for variant, spaces in runs.items():
        for name, seeds in spaces.items():
            played = [[run[c] for c in at] for run in seeds.values() if all(c in run for c in at)]
            if played:
                out[variant][name] = float(np.mean(played))
    return out


def against_default(runs: Runs, at: Sequence[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return each variant's mean fraction less the default's on the same seeds, and its variance, on every space."""
    out: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for variant, spaces in runs.items():
        for name, seeds in spaces.items():
            default = runs.get("default", {}).get(name, {})
            both = [(seeds[k], default[k]) for k in seeds if k in default]
            more = [float(np.mean([v[c] - d[c] for c in at])) for v, d in both if all(c in v and c in d for c in at)]
            if more:
                spread = float(np.var(more, ddof=1) / len(more)) if len(more) > 1 else float("nan")
                out[variant][name] = float(np.mean(more)), spread
    return out


def table(runs: Runs, at: Sequence[str]) -> list[str]:
    """Return the scores of the variants that played all spaces, and the choices with one space left out."""
    found = scores(runs, at)
    names = sorted({name for of in found.values() for name in of})
    whole = {v: of for v, of in found.items() if len(of) == len(names)}
    more = {v: of for v, of in against_default(runs, at).items() if len(of) == len(names)}
    seeds = {v: min(sum(all(c in run for c in at) for run in s.values()) for s in runs[v].values()) for v in whole}
    lines = ["", f"## Mean fraction at {', '.join(at)} evaluations", ""]
    lines += ["| variant | seeds | against the default | its worst space | worst space | " + " | ".join(names) + " |"]
    lines += ["|---" * (5 + len(names)) + "|"]
    for variant in sorted(more, key=lambda v: -np.mean([m for m, _ in more[v].values()])):
        means, spreads = zip(*more[variant].values())
        error = np.sqrt(np.sum(spreads)) / len(spreads)
        cells = " | ".join(f"{whole[variant][n]:.3f}" for n in names)
        lines.append(
            f"| {variant} | {seeds[variant]} | {np.mean(means):+.4f} ± {error:.4f} | {min(means):+.3f} | "
            f"{min(whole[variant].values()):.3f} | {cells} |"
        )
    lines += ["", "| left out | chosen on the others | there, against the default |", "|---|---|---|"]
    for name in names:
        rest = [n for n in names if n != name]
        chosen = max(more, key=lambda v: (np.mean([more[v][n][0] for n in rest]), v == "default", v))
        lines.append(f"| {name} | {chosen} | {more[chosen][name][0]:+.3f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--variants", help="names; all by default")
    parser.add_argument("--spaces", help="names; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    about = environment() | versions(None)
    file = chosen.out / "replay_ablation.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    runs: Runs = old.get("runs", {}) if old.get("code") == code_digest() else {}
    found = recorded_spaces(DATA)
    variants = chosen.variants.split(",") if chosen.variants else [*VARIANTS, "naive ranker"]
    names = chosen.spaces.split(",") if chosen.spaces else list(found)
    last = str(max(c for c in CHECKPOINTS if c <= chosen.evaluations))
    for seed in map(str, range(chosen.seeds)):
        for variant in variants:
            for name in names:
                done = runs.setdefault(variant, {}).setdefault(name, {})
                if last in done.get(seed, {}):
                    continue
                done[seed] = play(variant, found[name], int(seed), chosen.evaluations)
                print(seed, variant, name, done[seed], flush=True)
                document = {"environment": about, "code": code_digest(), "batch": BATCH, "runs": runs}
                chosen.out.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    lines = [
        "# Contribution of each part of the default search",
        "",
        "Written by `experiments/search/replay_ablation.py`.",
    ]
    for at in (("50",), tuple(map(str, CHECKPOINTS))):
        lines += table(runs, at) if any(len(of) == len(found) for of in scores(runs, at).values()) else []
    write_page("replay_ablation", lines, None, about, chosen.out, quiet=True)


if __name__ == "__main__":
    main()
