"""Time of every step of an artifact's main program, at the sizes of given arguments.

    python -m experiments.end_to_end.profile_steps ARTIFACT CASES.npz CASE [--rounds 40] [--top 30]

Each launch is timed separately, in the order of the program, in many rounds; the median counts. The sum is compared with the time of
the whole call, which has no pause between steps. `whole_models.py` writes CASES.npz next to an artifact.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from relax_tune.runtime.artifact import load_artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("case")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--top", type=int, default=30)
    args = parser.parse_args()
    with np.load(args.cases) as held:
        given = [held[name] for name in sorted(held) if name.startswith(f"{args.case}/")]
    opened = load_artifact(args.artifact).open()
    executor = opened.executor
    symbols: list[dict[str, int]] = []
    names = [s.name for s in executor.program.symbols]
    executor.record = lambda key: symbols.append(dict(zip(names, key)))
    whole = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        opened.run(given)
        whole.append(time.perf_counter() - began)
    executor.run(given)  # arguments are in the executor's own memory
    bound = executor.bind(symbols[0])
    bound.prepare()
    steps, launches = bound.steps, bound.launches
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(args.rounds):
        for launch, found in zip(launches, times, strict=True):
            began = time.perf_counter()
            launch()
            executor.device.synchronize()
            found.append(time.perf_counter() - began)
    medians = [statistics.median(found) * 1e6 for found in times]
    print(f"{args.case}: {symbols[0]}, call {statistics.median(whole) * 1e6:.0f} us, steps {sum(medians):.0f} us")
    for number in sorted(range(len(steps)), key=lambda n: -medians[n])[: args.top]:
        step = steps[number]
        shapes = [bound.shapes[executor.program.buffers[b].name] for b in step.buffers]
        print(
            f"{medians[number]:9.1f} us {100 * medians[number] / sum(medians):5.1f} %  {number:3} {step.target}  {shapes}"
        )


if __name__ == "__main__":
    main()
