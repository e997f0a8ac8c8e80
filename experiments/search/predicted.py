"""Speed of builds without records, compared with the tuned build, on models that the prior was not trained on.

    python -m experiments.search.predicted --work FOLDER --peer-python PYTHON [--only MODEL,MODEL,...] [--target c] [--trials 16]

Models of `end_to_end/e2e.py` and `end_to_end/whole_models.py`. First every model is tuned, all into one database. Then each is built
from it (`tuned`), without records by the guesses of the rules (`guessed`), without records by a prior trained on the records of the
other models (`predicted`), and generic. The packaged prior is trained on target c: on other targets it is timed as well (`packaged`).
The builds are timed in turns.

Writes results/predicted_TARGET.json and .md, and with --prior FILE a prior trained on all records.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.end_to_end import e2e, whole_models
from experiments.harness.contenders import Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import MODELS, SIZES, geomean
from experiments.harness.pages import environment, write_page
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import from_json
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.learn.prior import Prior, PriorRows, evaluate, family_of, packaged_prior, recorded_rows
from relax_tune.tuner.plan.predicted import Predictor
from relax_tune.tuner.settings import Settings

BUILDS = ("tuned", "predicted", "packaged", "guessed", "generic")
SPEED, LEAST, BUILD_SECS = 0.85, 0.6, 20.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepared(model: str, work: Path, python: str) -> IRModule:
    """Export a model, once, and import it."""
    folder = work / model
    folder.mkdir(parents=True, exist_ok=True)
    if model in MODELS:
        e2e.prepare(model, work, python, False, False)
        return e2e.imported(model, folder)
    whole_models.prepare(model, folder, python)
    with np.load(folder / "weights.npz") as weights:
        return import_program(from_json((folder / "program.json").read_text(), dict(weights)))


def cases(model: str) -> Sequence[str]:
    return [str(n) for n in SIZES] if model in MODELS else whole_models.CASES[model]


def tuned(module: IRModule, folder: Path, store: Store, settings: Settings) -> DeviceJob:
    """Tune a model, once, and save its builds but the predicted one."""
    runner = open_runner(settings)
    job = device_job(module, runner.device_info(), store, settings)
    found = job.tune(runner)
    if found.trials:
        (folder / "tuned.json").write_text(json.dumps({"candidates": found.trials, "secs": round(found.wall_secs)}))
    job.artifact(job.tested_build(runner)).save(folder / "tuned.rta")
    runner.close()
    job.artifact(job.build("generic")).save(folder / "generic.rta")
    return job


def built(job: DeviceJob, prior: Prior | None, folder: Path, name: str) -> dict[str, float]:
    """Save a build without records. Return its seconds, those of a second build with a self-test, and the number of wrong kernels."""
    fresh = device_job(job.module, job.device, MemoryStore(), job.settings)
    vars(fresh)["predictor"] = Predictor(prior)
    start = time.perf_counter()
    done = fresh.build("predicted")
    secs = time.perf_counter() - start
    runner = open_runner(job.settings)
    start = time.perf_counter()
    done = fresh.tested_build(runner, "predicted")
    checked = time.perf_counter() - start
    runner.close()
    fresh.artifact(done).save(folder / f"{name}.rta")
    failed = len((done.self_test or {}).get("failed", ()))
    return {"secs": secs, "secs_with_self_test": checked, "wrong": failed}


def ranking(rows: PriorRows, train: Any, own: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return the ranking quality of priors on left-out workloads and on left-out models; empty with too few records."""
    model = {key: name for name, keys in own.items() for key in keys}
    found = {}
    for what, apart in (("workload", lambda k: k[1]), ("model", lambda k: model.get(k[1], "others"))):
        try:
            r = evaluate(rows, train, apart, folds=len(own) + 1 if what == "model" else 5)
        except UserError as error:
            say(f"{what}s left out: {error}")
            continue
        found[what] = {
            "groups": r.groups,
            "rank": r.rank,
            "worst": r.worst,
            **{f"regret@{k}": v for k, v in r.regret.items()},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--only", default="minilm,prefill,decode,cnn,unet,speech,experts,recommender")
    parser.add_argument("--target", default="c")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prior", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        model = args.serve.parent.name
        serve(e2e.answers(args.serve, model, False) if model in MODELS else whole_models.answers(args.serve))
        return
    if args.work is None or args.peer_python is None:
        parser.error("expected --work FOLDER and --peer-python PYTHON, of an environment with torch and onnxscript")
    before, models = environment(), args.only.split(",")
    if len(models) < 2:
        parser.error("--only: expected two models or more, since the prior of each is trained on the others")
    args.work.mkdir(parents=True, exist_ok=True)
    settings = Settings(target=args.target, trials=args.trials)
    jobs: dict[str, DeviceJob] = {}
    with open_store(f"sqlite:///{args.work / f'{args.target}.db'}") as store:
        for model in models:
            jobs[model] = tuned(prepared(model, args.work, args.peer_python), args.work / model, store, settings)
            say(f"{model}: tuned")
        job = jobs[models[0]]
        rows = recorded_rows(store, job.device)
    own = {m: {t.key for t in j.tasks} for m, j in jobs.items()}

    def train(found: PriorRows) -> Prior:
        return Prior.train(found, job.hardware)

    if args.prior:
        about = {"rows": len(rows.log_time), "groups": len(rows.keys), "workloads": len({k[1] for k in rows.keys})}
        replace(train(rows), about=about).save(args.prior)
        say(f"{args.prior}: {args.prior.stat().st_size:,} bytes")
    order = ranking(rows, train, own)
    times, builds = {}, {}
    for model, job in jobs.items():
        folder = args.work / model
        out = [n for n, key in enumerate(rows.keys) if key[1] in own[model]]
        priors = {"predicted": train(rows.without(out)), "guessed": None}
        if args.target != "c" and (packaged := packaged_prior(family_of(job.hardware))) is not None:
            priors["packaged"] = packaged
        builds[model] = {n: built(job, prior, folder, n) for n, prior in priors.items()}
        served = [n for n in BUILDS if n in priors or n in ("tuned", "generic")]
        found = [
            Contender(n, [sys.executable, "-m", "experiments.search.predicted", "--serve", str(folder / f"{n}.rta")])
            for n in served
        ]
        times[model] = summary(in_rounds(found, cases(model), args.rounds, 3))
        for c in found:
            c.close()
        say(f"{model}: timed")
    record = {"environment": before, "times": times, "builds": builds, "ranking": order, "trials": args.trials}
    write_page(f"predicted_{args.target}", page(record, args.target), record, before)


def page(record: Mapping[str, Any], target: str) -> list[str]:
    lines = [
        f"# Builds without records, {target}",
        "",
        f"Written by `experiments/search/predicted.py`, {record['trials']} trials per task; medians in milliseconds, in turns. "
        "`predicted`: "
        "by a prior trained on the records of the other models on this target; `packaged`: by the prior of the package, trained on "
        "records of target c, also of these models; `guessed`: the rules' first guesses. Last columns: speed relative to "
        f"the tuned build's (goal: {SPEED} in geometric mean, {LEAST} at every size, builds within {BUILD_SECS:.0f} s).",
    ]
    timed = {n for by in record["times"].values() for row in by.values() for n in row}
    names = [n for n in BUILDS if n in timed]
    every: dict[str, list[float]] = {n: [] for n in names if n != "tuned"}
    for model, by in record["times"].items():
        lines += [
            "",
            f"## {model}",
            "",
            "| size | " + " | ".join([*names, *(f"{n}: part" for n in every)]) + " |",
        ]
        lines += ["|---" * (1 + len(names) + len(every)) + "|"]
        parts: dict[str, list[float]] = {n: [] for n in every}
        for case, row in by.items():
            ms = {n: row[n]["median_us"] / 1000 for n in names if n in row}
            cells = [f"{ms[n]:.3g}" if n in ms else "-" for n in names]
            for n in every:
                if n in ms and "tuned" in ms:
                    parts[n].append(ms["tuned"] / ms[n])
                cells.append(f"{parts[n][-1]:.2f}" if n in ms and "tuned" in ms else "-")
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
        for n in every:
            every[n] += parts[n]
        told = "; ".join(f"{n} {geomean(p):.2f}, least {min(p):.2f}" for n, p in parts.items() if p)
        secs = "; ".join(
            f"{n} {b['secs']:.1f} s, once more with its self-test {b['secs_with_self_test']:.1f} s, {b['wrong']} wrong"
            for n, b in record["builds"][model].items()
        )
        lines += ["", f"Speed: {told}. Build: {secs}."]
    total = "; ".join(f"{n} {geomean(p):.2f}, least {min(p):.2f}" for n, p in every.items() if p)
    lines += ["", f"All: {total}.", "", "## The prior on what it was not trained on", ""]
    lines += ["| left out | groups | rank correlation | regret@1 | regret@4 | regret@16 | worst@1 |", "|---" * 7 + "|"]
    for what, r in record["ranking"].items():
        cells = [f"{r[f'regret@{k}']:.1%}" for k in (1, 4, 16)]
        lines.append(f"| {what} | {r['groups']} | {r['rank']:.2f} | " + " | ".join(cells) + f" | {r['worst']:.0%} |")
    return lines


if __name__ == "__main__":
    main()
