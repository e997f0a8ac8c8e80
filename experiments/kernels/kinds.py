"""Kernels besides products, row functions and attention, at four sizes: convolutions, pools, resampling, scans, sorts, scatters.

    python -m experiments.kernels.kinds --work FOLDER --peer-python PYTHON [--targets c,opencl] [--trials 16] [--kernels NAME,...]

Ours are tuned on these static sizes and hold generated kernels only; they are timed in turns with torch and ONNX Runtime. Records stay
in the folder. Writes results/kernel_kinds.json and .md.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from experiments.harness.contenders import Contender, in_rounds, summary
from experiments.harness.pages import environment, write_page
from experiments.kernels.more import kinds
from experiments.kernels.static_kernels import tune_ours

PEERS = ("torch", "onnxruntime")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--targets", default="c,opencl")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kernels", default=",".join(k.name for k in kinds()))
    args = parser.parse_args()
    kernels = args.kernels.split(",")
    args.work.mkdir(parents=True, exist_ok=True)
    took = tune_ours(args.work, kernels, args.targets.split(","), args.trials, (False,))
    contenders = [Contender(p, [args.peer_python, "-m", "experiments.kernels.peer_kernels", "serve", p]) for p in PEERS]
    for name in took:
        command = [
            sys.executable,
            "-m",
            "experiments.kernels.tuned_kernels",
            "serve",
            name.split("-")[1],
            str(args.work / name),
        ]
        contenders.append(Contender(name, command))
    before = environment()
    found = summary(in_rounds(contenders, kernels, args.rounds, 3))
    for c in contenders:
        c.close()
    lines = [
        "# Other kinds of kernels",
        "",
        f"Written by `experiments/kernels/kinds.py`, tuned with {args.trials} trials; medians in microseconds, in turns.",
        "",
    ]
    lines += ["| kernel | " + " | ".join([*PEERS, *(f"{n} | best peer / it" for n in took)]) + " | sketches |"]
    lines += ["|---" * (2 * len(took) + len(PEERS) + 2) + "|"]
    for kernel, row in found.items():
        medians = {n: times["median_us"] for n, times in row.items()}
        best = min((medians[p] for p in PEERS if p in medians), default=math.nan)
        cells = [f"{medians[p]:.1f}" if p in medians else "-" for p in PEERS]
        for n in took:
            cells += [f"{medians[n]:.1f}", f"{best / medians[n]:.2f}"] if n in medians else ["-", "-"]
        sketches = "; ".join(s for n in took for group in took[n][kernel]["sketches"].values() for s in group)
        lines.append(f"| {kernel} | " + " | ".join([*cells, sketches]) + " |")
    record = {"environment": before, "trials": args.trials, "times": found, "tuning": took}
    write_page("kernel_kinds", lines, record, before)


if __name__ == "__main__":
    main()
