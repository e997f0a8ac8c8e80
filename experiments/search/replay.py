"""Search quality on spaces with known optima: the fraction of the optimum that is reached after a number of evaluations.

    python -m experiments.search.replay [--seeds 25] [--strategies evolution,random,optuna] [--peer-python KT/bin/python]

Plays strategies against the recorded GPU spaces of tests/data/replay, and against the formulas of `synthetic_spaces.py` (labels
without order, narrow constraints, several basins, noise), which have another structure. With `--peer-python`, an interpreter that
has the package kernel_tuner, Kernel Tuner's strategies play the recorded spaces in its simulation mode, once for every budget, since
some of them depend on it.

Writes experiments/results/replay.json (summaries, settings, environment) and replay.md (the table) after every strategy, and
continues from there when it is run again: results of the same code, versions and seeds are reused. Nothing is timed, so the machine
and its load do not change the numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import relax_tune.tuner.search
from experiments.harness.pages import RESULTS, ROOT, environment, write_page
from experiments.search import synthetic_spaces
from experiments.search.naive_ranker import NaiveRanker
from relax_tune.tuner.search.base import SearchProblem
from relax_tune.tuner.search.models.cost_model import BoosterSettings
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.search.replay import RecordedSpace, recorded_spaces, replay
from relax_tune.tuner.search.strategies.evolution import EvolutionSettings

DATA = ROOT / "tests" / "data" / "replay"
CHECKPOINTS = (50, 100, 200)
GOALS = {("worst", 200): 0.93, ("median", 200): 0.99, ("median", 50): 0.85}
# Kernel Tuner's names of its strategies, all with their default options.
PEERS = (
    "random_sample", "genetic_algorithm", "pso", "simulated_annealing", "dual_annealing", "basinhopping", "greedy_ils",
    "greedy_mls", "mls", "diff_evo", "firefly_algorithm", "hybrid_vndx", "adaptive_tabu_greywolf", "bayes_opt",
)  # fmt: skip

Curves = np.ndarray[Any, np.dtype[np.float64]]
Entry = dict[str, Any]


def summary(reached: Mapping[int, Curves]) -> dict[str, dict[str, float]]:
    """Median, tenth percentile and worst of the fractions (seeds,) reached at each checkpoint."""
    out = {}
    for at, of in reached.items():
        values = {"median": np.median(of), "p10": np.quantile(of, 0.1), "worst": of.min()}
        out[str(at)] = {name: round(float(value), 4) for name, value in values.items()}
    return out


def ours(name: str, recorded: RecordedSpace, seeds: Sequence[int], batch: int) -> dict[str, dict[str, float]]:
    """One of our strategies; a single run serves all budgets, of which it knows nothing."""
    curves = []
    for seed in seeds:
        problem, rng = SearchProblem(recorded.space), np.random.default_rng(seed)
        strategy = NaiveRanker(problem, rng) if name == "naive ranker" else make_strategy(name, problem, rng)
        curves.append(replay(strategy, recorded, CHECKPOINTS[-1], batch))
    stacked = np.stack(curves)
    return summary({at: stacked[:, at - 1] for at in CHECKPOINTS})


def peers(python: str, name: str, recorded: RecordedSpace, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """One of Kernel Tuner's strategies."""
    budgets = ",".join(map(str, CHECKPOINTS))
    command = [
        python,
        "-m",
        "experiments.search.replay_peer",
        str(DATA),
        recorded.name,
        name,
        str(seeds[0]),
        str(len(seeds)),
        budgets,
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    reached: dict[int, list[float]] = {at: [] for at in CHECKPOINTS}
    for line in answer.stdout.splitlines():
        run = json.loads(line)
        worked = [t for t in run["times"][: run["budget"]] if t is not None]
        reached[run["budget"]].append(recorded.optimum * 1e3 / min(worked) if worked else 0.0)
    return summary({at: np.asarray(values) for at, values in reached.items()})


def versions(peer_python: str | None) -> dict[str, str]:
    """Versions that can change the numbers."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in ("numpy", "xgboost", "optuna"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    if peer_python is not None:
        ask = "import importlib.metadata as m, json; print(json.dumps({p: m.version(p) for p in ('kernel_tuner', 'numpy', 'scipy')}))"
        answer = subprocess.run([peer_python, "-c", ask], capture_output=True, text=True, check=True)
        found |= {f"peer {package}": number for package, number in json.loads(answer.stdout).items()}
    return found


def code_digest() -> str:
    """Changes when anything of the search does."""
    folder = Path(relax_tune.tuner.search.__file__).parent
    files = sorted([*folder.rglob("*.py"), Path(synthetic_spaces.__file__)])
    state = hashlib.blake2b(digest_size=8)
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()


def peer_digest() -> str:
    """Changes when the way Kernel Tuner is run does."""
    return hashlib.blake2b((ROOT / "experiments/search/replay_peer.py").read_bytes(), digest_size=8).hexdigest()


def table(entries: Mapping[str, Entry]) -> str:
    """The results as Markdown; a goal that is missed is marked."""
    lines = [
        "# Fraction of the optimum by the number of evaluations",
        "",
        "Written by `experiments/search/replay.py`, which describes the method. Goals for the default strategy on recorded spaces:",
        "worst@200 >= .93, median@200 >= .99, median@50 >= .85. `naive ranker` is `experiments/search/naive_ranker.py`. `kt:` are Kernel",
        "Tuner's strategies with default options, in its simulation mode. A dash: not played.",
    ]
    for kind, title in (("recorded", "Recorded GPU spaces"), ("synthetic", "Formulas")):
        if not any(e["kind"] == kind for e in entries.values()):
            continue
        lines += ["", f"## {title}", ""]
        lines.append(
            "| space | strategy | seeds | "
            + " | ".join(f"{k}@{at}" for at in CHECKPOINTS for k in ("median", "worst"))
            + " | goals |"
        )
        lines.append("|---|---|---|" + "---|" * (2 * len(CHECKPOINTS) + 1))
        for entry in sorted((e for e in entries.values() if e["kind"] == kind), key=_place):
            at = entry["reached"]
            met = all(at[str(n)][of] >= goal for (of, n), goal in GOALS.items())
            cells = [
                f"{at[str(n)][of]:.3f}" if str(n) in at else "-" for n in CHECKPOINTS for of in ("median", "worst")
            ]
            name = f"**{entry['strategy']}**" if entry["strategy"] == "evolution" else entry["strategy"]
            lines.append(
                f"| {entry['space']} | {name} | {entry['seeds']} | "
                + " | ".join(cells)
                + f" | {'met' if met else 'missed'} |"
            )
    return "\n".join(lines) + "\n"


def _place(entry: Entry) -> tuple[Any, ...]:
    return (
        entry["space"],
        entry["strategy"] != "evolution",
        -entry["reached"][str(CHECKPOINTS[-1])]["median"],
        entry["strategy"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=25, help="runs of each strategy on each space")
    parser.add_argument(
        "--optuna-seeds", type=int, default=5, help="runs of the optuna strategies, which are much slower"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8, help="candidates in a synchronous batch")
    parser.add_argument("--strategies", default="evolution,random,optuna")
    parser.add_argument("--peer-python", help="interpreter of an environment with the package kernel_tuner")
    parser.add_argument("--peers", default=",".join(PEERS), help="Kernel Tuner's strategies")
    parser.add_argument("--spaces", help="names of spaces; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for replay.json and replay.md")
    chosen = parser.parse_args(arguments)
    file = chosen.out / "replay.json"
    old: Entry = json.loads(file.read_text()) if file.exists() else {}
    entries: dict[str, Entry] = old.get("entries", {})
    about, digest = versions(chosen.peer_python), code_digest()
    about = {name: number for name, number in old.get("environment", {}).items() if name.startswith("peer ")} | about
    makers = {n: ("recorded", lambda r=r: r) for n, r in recorded_spaces(DATA).items()}
    makers |= {n: ("synthetic", make) for n, make in synthetic_spaces.SPACES.items()}
    for space, (kind, make) in makers.items():
        if chosen.spaces and space not in chosen.spaces.split(","):
            continue
        recorded: RecordedSpace | None = None
        names = chosen.strategies.split(",") if chosen.strategies else []
        if chosen.peer_python is not None and kind == "recorded":
            names += [f"kt:{peer}" for peer in chosen.peers.split(",")]
        for name in names:
            count = chosen.optuna_seeds if name.startswith("optuna") else chosen.seeds
            seeds = range(chosen.first_seed, chosen.first_seed + count)
            peer = name.removeprefix("kt:") if name.startswith("kt:") else None
            made_with = {"first_seed": chosen.first_seed, "seeds": count, "python": about["python"]}
            made_with |= (
                {"kernel_tuner": about["peer kernel_tuner"]} if peer else {"batch": chosen.batch, "code": digest}
            )
            if entries.get(f"{space} {name}", {}).get("made_with") == made_with:
                continue
            recorded = recorded or make()
            reached = (
                peers(chosen.peer_python, peer, recorded, seeds) if peer else ours(name, recorded, seeds, chosen.batch)
            )
            entry = {
                "space": space,
                "kind": kind,
                "strategy": name,
                "seeds": count,
                "made_with": made_with,
                "reached": reached,
            }
            entries[f"{space} {name}"] = entry
            print(space, name, reached, flush=True)
            settings = {"evolution": asdict(EvolutionSettings()), "xgboost": asdict(BoosterSettings())}
            document = {"environment": about, "settings": settings, "entries": entries}
            lines = table(entries).splitlines()
            write_page("replay", lines, document, environment() | about, chosen.out, quiet=True)


if __name__ == "__main__":
    main()
