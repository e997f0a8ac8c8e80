"""Table 1: static kernels by ours, TVM's MetaSchedule, torch and NumPy, timed in turns; and ours tuned with symbolic sizes.

    python -m experiments.kernels.static_kernels --work FOLDER --peer-python PYTHON [--targets c,opencl] [--trials 64] [--kernels NAME,...]

`--peer-python` has torch, apache-tvm (with apache-tvm-ffi pinned as CONTRIBUTING says), cloudpickle and what ours needs. Records stay in
the folder, so that the run may be interrupted. MetaSchedule tunes twice (one batch of all trials; and batches of 16, from which its
cost model can learn) with different seeds: both are timed, the better one counts. `tvm-dynamic` is TVM's build of a product with a
symbolic dim, which it cannot tune. Our builds hold generated kernels only. Weights are constants of our models and may be packed once;
MetaSchedule has no such notion, torch and NumPy are called as users call them. Writes results/static_kernels.json and .md.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.harness.contenders import Contender, in_rounds, summary
from experiments.harness.pages import environment, write_page
from experiments.kernels.tuned_kernels import tune_kernel
from experiments.kernels.zoo import KERNELS
from relax_tune.database.store import open_store
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.settings import Settings

TABLE = (
    "matmul_512", "matmul_1024", "dense_gelu_128x768x3072", "softmax_1024x1024", "layer_norm", "rms_norm", "conv_64x56",
    "batch_matmul_nt",
)  # fmt: skip
PRODUCTS = ("matmul_512", "matmul_1024", "batch_matmul_nt")
# MetaSchedule's runs: (seed, whether all trials are one batch).
PEER_RUNS: Sequence[tuple[int, bool]] = ((1, True), (2, False))
DYNAMIC, DYNAMIC_KERNELS = "tvm-dynamic", ("matmul_512", "matmul_1024")


def tune_ours(
    work: Path, kernels: Sequence[str], targets: Sequence[str], trials: int, kinds: Sequence[bool] = (False, True)
) -> dict[str, Any]:
    """Write artifacts of each target with static and with symbolic dims; return the cost of tuning, by contender and kernel."""
    took: dict[str, Any] = {}
    with open_store(f"sqlite:///{work / 'ours.db'}") as store:
        for target in targets:
            settings = Settings(target=target, trials=trials)
            for symbolic in kinds:
                name = f"ours-{target}-{'symbolic' if symbolic else 'static'}"
                folder = work / name
                folder.mkdir(parents=True, exist_ok=True)
                took[name] = {}
                for kernel in kernels:
                    note = folder / f"{kernel}.json"
                    if not note.exists():
                        runner = open_runner(settings)
                        found = tune_kernel(kernel, symbolic, runner, store, settings, folder / f"{kernel}.rta")
                        runner.close()
                        note.write_text(json.dumps(asdict(found)))
                        print(
                            f"{name} {kernel}: {found.wall_secs:.0f} s, {found.sketches}", file=sys.stderr, flush=True
                        )
                    took[name][kernel] = json.loads(note.read_text())
    return took


def tune_peer(work: Path, kernels: Sequence[str], python: str, trials: int) -> dict[str, Any]:
    """TVM's libraries; seconds by contender and kernel, or why there is none."""
    took: dict[str, Any] = {}
    for seed, whole in PEER_RUNS:
        name = f"tvm-{seed}"
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        took[name] = {}
        for kernel in kernels:
            note = folder / f"{kernel}.json"
            if not note.exists():
                batch = trials if whole else 16
                command = [
                    python,
                    "-m",
                    "experiments.kernels.peer_kernels",
                    "tune",
                    kernel,
                    str(folder),
                    str(seed),
                    str(trials),
                    str(batch),
                ]
                done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
                if not note.exists():
                    took[name][kernel] = {"error": (done.stderr or done.stdout).strip().splitlines()[-1:]}
                    print(f"{name} {kernel}: {took[name][kernel]['error']}", file=sys.stderr, flush=True)
                    continue
                print(
                    f"{name} {kernel}: {json.loads(note.read_text())['wall_secs']:.0f} s", file=sys.stderr, flush=True
                )
            took[name][kernel] = json.loads(note.read_text())
    folder = work / DYNAMIC
    folder.mkdir(parents=True, exist_ok=True)
    took[DYNAMIC] = {k: {"error": ["not asked for"]} for k in kernels}
    for kernel in (k for k in kernels if k in DYNAMIC_KERNELS):
        command = [python, "-m", "experiments.kernels.peer_kernels", "untuned", kernel, str(folder)]
        subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        took[DYNAMIC][kernel] = json.loads((folder / f"{kernel}.json").read_text())
    return took


def rate(kernel: str, us: float) -> str:
    """GFLOP/s where operations bind, microseconds otherwise."""
    flops = KERNELS[kernel].flops
    return f"{flops / us / 1e3:.3g} GFLOP/s" if flops else f"{us:.0f} us"


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str]) -> list[str]:
    """A row a kernel, and the ratios that the goals speak of."""
    lines = [
        "| kernel | " + " | ".join(names) + " | best of ours / best peer | ours / TVM |",
        "|---" * (len(names) + 3) + "|",
    ]
    against_best, against_tvm = [], []
    for kernel, row in found.items():
        ours = min((v["median_us"] for n, v in row.items() if n.startswith("ours-c")), default=math.nan)
        peers = [v["median_us"] for n, v in row.items() if not n.startswith("ours") and n != DYNAMIC]
        tvm = min((v["median_us"] for n, v in row.items() if n.startswith("tvm") and n != DYNAMIC), default=math.nan)
        best, over = (min(peers) if peers else math.nan) / ours, tvm / ours
        against_best.append(best)
        against_tvm.append(over)
        cells = [rate(kernel, row[n]["median_us"]) if n in row else "-" for n in names]
        lines.append(f"| {kernel} | " + " | ".join(cells) + f" | {best:.2f} | {over:.2f} |")
    known = [x for x in against_tvm if not math.isnan(x)]
    mean = math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan
    lines += [
        "",
        f"Speed of our best C kernel over the best peer: at least {min(against_best):.2f}; over MetaSchedule, geometric mean: {mean:.2f}.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--targets", default="c,opencl")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels", default=",".join(TABLE))
    args = parser.parse_args()
    kernels, targets = args.kernels.split(","), args.targets.split(",")
    args.work.mkdir(parents=True, exist_ok=True)
    took = tune_ours(args.work, kernels, targets, args.trials)
    if args.peer_python:
        took |= tune_peer(args.work, kernels, args.peer_python, args.trials)
    contenders = [
        Contender("numpy", [sys.executable, "-m", "experiments.kernels.peer_kernels", "serve", "numpy"], PRODUCTS)
    ]
    for name in (n for n in took if n.startswith("ours")):
        command = [
            sys.executable,
            "-m",
            "experiments.kernels.tuned_kernels",
            "serve",
            name.split("-")[1],
            str(args.work / name),
        ]
        contenders.append(Contender(name, command))
    if args.peer_python:
        peer = [args.peer_python, "-m", "experiments.kernels.peer_kernels", "serve"]
        contenders.insert(0, Contender("torch", [*peer, "torch"]))
        for name in (n for n in took if n.startswith("tvm")):
            done = [k for k in kernels if "error" not in took[name][k]]
            contenders.append(Contender(name, [*peer, "tvm", str(args.work / name)], done))
    before = environment()
    found = summary(in_rounds(contenders, kernels, args.rounds, 5))
    names = [c.name for c in contenders]
    for c in contenders:
        c.close()
    record = {"environment": before, "trials": args.trials, "rounds": args.rounds, "times": found, "tuning": took}
    seconds = ["| kernel | " + " | ".join(took) + " |", "|---" * (len(took) + 1) + "|"]
    for kernel in kernels:
        cells = [f"{took[n][kernel]['wall_secs']:.0f}" if "wall_secs" in took[n][kernel] else "-" for n in took]
        seconds.append(f"| {kernel} | " + " | ".join(cells) + " |")
    lines = [
        "# Static kernels (table 1)",
        "",
        "Written by `experiments/kernels/static_kernels.py`; medians, in turns.",
        "",
    ]
    lines += [
        *table(found, names),
        "",
        f"Wall seconds of tuning, {args.trials} trials:",
        "",
        *seconds,
    ]
    write_page("static_kernels", lines, record, before)


if __name__ == "__main__":
    main()
