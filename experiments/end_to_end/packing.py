"""Installation of a pack: its seconds, and the speed of the resulting build compared with native tuning.

    python -m experiments.end_to_end.packing --work FOLDER [--model minilm] [--target c] [--trials 16] [--budget 200]

A model of `e2e.py` is tuned natively into an empty database, and packed from it. The pack is installed into an empty database (cold),
into the same one again (warm), without measuring, and without its records (`stranger` in the tables). All builds are timed in turns.

The machine that installs is the one that tuned, except for its database: `--trust-records` is off, so its measurements do not count as
local ones. The records come from the most similar device possible; the pack without records shows the other extreme. Writes
results/packing.md and .json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.end_to_end import e2e
from experiments.harness.contenders import Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import MODELS, SIZES, geomean
from experiments.harness.pages import environment, write_page
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.pack.install import install
from relax_tune.tuner.pack.pack import make_pack
from relax_tune.tuner.settings import Settings

NATIVE = "native"
BUILDS = (NATIVE, "cold", "warm", "unmeasured", "stranger", "generic")
WANTED = 0.95


def tuned(module: IRModule, work: Path, settings: Settings) -> dict[str, Any]:
    """Tune natively, and save the build, a generic one, and packs with and without records."""
    with open_store(f"sqlite:///{work / 'native.db'}") as store:
        runner = open_runner(settings)
        start = time.perf_counter()
        job = device_job(module, runner.device_info(), store, settings)
        found = job.tune(runner)
        job.artifact(job.tested_build(runner)).save(work / f"{NATIVE}.rta")
        secs = time.perf_counter() - start
        runner.close()
        job.artifact(job.build("generic")).save(work / "generic.rta")
        make_pack(module, store, settings).save(work / "model.rtp")
        make_pack(module, MemoryStore(), settings).save(work / "empty.rtp")
    return {"secs": secs, "candidates": found.trials}


def installed(work: Path, name: str, pack: str, db: str, settings: Settings, measure: bool = True) -> dict[str, Any]:
    """Install a pack and save the build; return the seconds of each stage."""
    start = time.perf_counter()
    done = install(work / pack, settings=settings, db=work / db, measure=measure)
    secs = time.perf_counter() - start
    done.artifact.save(work / f"{name}.rta")
    return {"secs": secs, "warm": done.warm, "stages": dict(done.secs)}


def page(record: Mapping[str, Any], model: str, target: str) -> list[str]:
    """Tables of seconds and of speeds."""
    done, times = record["done"], record["times"]
    native = done[NATIVE]
    lines = [
        f"# Packs of {model}, {target}",
        "",
        f"Written by `experiments/end_to_end/packing.py`. Native tuning: {native['candidates']} candidates, {native['secs']:.0f} s.",
        "",
        "| build | seconds | of them, by stage |",
        "|---|---|---|",
    ]
    for name in ("cold", "warm", "unmeasured", "stranger"):
        stages = ", ".join(f"{stage} {secs:.1f}" for stage, secs in done[name]["stages"].items())
        lines.append(f"| {name} | {done[name]['secs']:.1f} | {stages} |")
    lines += ["", "| size | " + " | ".join(f"{b}, ms" for b in BUILDS) + " |", "|---" * (len(BUILDS) + 1) + "|"]
    part: dict[str, list[float]] = {b: [] for b in BUILDS[1:]}
    for size, row in times.items():
        ms = {b: row[b]["median_us"] / 1e3 for b in BUILDS}
        lines.append(f"| {size} | " + " | ".join(f"{ms[b]:.3g}" for b in BUILDS) + " |")
        for b in part:
            part[b].append(ms[NATIVE] / ms[b])
    told = "; ".join(f"{b} {geomean(p):.2f}, least {min(p):.2f}" for b, p in part.items())
    return [*lines, "", f"Speed relative to the native build's (goal: {WANTED} of cold): {told}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--model", default="minilm", choices=MODELS)
    parser.add_argument(
        "--peer-python", default=sys.executable, help="an environment with torch, for models but minilm"
    )
    parser.add_argument("--target", default="c")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(e2e.answers(args.serve, args.model, False))
        return
    if args.work is None:
        parser.error("expected --work FOLDER")
    before, work = environment(), args.work
    (work / args.model).mkdir(parents=True, exist_ok=True)
    if args.model != "minilm":
        e2e.prepare(args.model, work, args.peer_python, False, False)
    module = e2e.imported(args.model, work / args.model)
    settings = Settings(target=args.target, trials=args.trials)
    done = {NATIVE: tuned(module, work, settings)}
    for old in ("cold.db", "none.db", "stranger.db"):
        (work / old).unlink(missing_ok=True)
    budget = Settings(target=args.target, budget=args.budget)
    done["cold"] = installed(work, "cold", "model.rtp", "cold.db", budget)
    done["warm"] = installed(work, "warm", "model.rtp", "cold.db", budget)
    done["unmeasured"] = installed(work, "unmeasured", "model.rtp", "none.db", budget, measure=False)
    done["stranger"] = installed(work, "stranger", "empty.rtp", "stranger.db", budget)
    command = [sys.executable, "-m", "experiments.end_to_end.packing", "--model", args.model, "--serve"]
    found = [Contender(b, [*command, str(work / f"{b}.rta")]) for b in BUILDS]
    times = summary(in_rounds(found, [str(n) for n in SIZES], args.rounds, 3))
    for c in found:
        c.close()
    record = {"environment": before, "done": done, "times": times, "trials": args.trials, "budget": args.budget}
    write_page("packing", page(record, args.model, args.target), record, before)


if __name__ == "__main__":
    main()
