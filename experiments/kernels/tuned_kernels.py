"""Kernels of `zoo.py`, tuned, built and served by ours: generated kernels only, without libraries.

python -m experiments.kernels.tuned_kernels serve opencl FOLDER      answers the lines of `contenders.serve` from FOLDER/CASE.rta
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import serve
from experiments.kernels.zoo import KERNELS
from relax_tune.database.store import Store
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.variants import TaskVariants

HEAD = 64


@dataclass(frozen=True)
class Tuned:
    """The cost of tuning one kernel, and the dispatched sketches. trials: candidates measured in this run."""

    wall_secs: float
    trials: int
    sketches: Mapping[str, tuple[str, ...]]


def tune_kernel(
    name: str, symbolic: bool, runner: Runner, store: Store, settings: Settings, path: Path, libraries: bool = False
) -> Tuned:
    """Tune what the store lacks and write the artifact."""
    job = device_job(KERNELS[name].module(symbolic), runner.device_info(), store, settings)
    if not libraries:
        job.__dict__["task_variants"] = {t.name: TaskVariants(t, job.hardware, job.code_target) for t in job.tasks}
    start = time.perf_counter()
    work = job.tune(runner)
    wall = time.perf_counter() - start
    for task, problem in work.problems:
        print(f"{name}, {task}: {problem}", file=sys.stderr)
    built = job.build()
    job.artifact(built).save(path)
    sketches = {
        n: tuple(dict.fromkeys(p.variants[e.variant].sketch for e in p.plan.entries)) for n, p in built.plans.items()
    }
    return Tuned(wall, work.trials, sketches)


def answers(target: str, folder: Path) -> Callable[[str], tuple[Callable[[], Any], Callable[[], Sequence[float]]]]:
    """Return the cases of a folder, opened at their first call.

    A case is a kernel's name, or `NAME n=SIZE` at another size: `CASE.rta`, built for that size only, if it exists, else `NAME.rta`.
    """
    device = open_device(target)

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        name, *given = case.split()
        kernel = KERNELS[name]
        sizes = dict(kernel.dims) | {n: int(v) for n, v in (s.split("=") for s in given)}
        arrays = kernel.arrays(sizes)
        exact = folder / f"{case}.rta"
        executor = load_artifact(exact if exact.exists() else folder / f"{name}.rta").open(device).executor
        program = executor.program
        first = executor.run(arrays)  # checks the arguments, and binds
        bound = executor.bind({s.name: sizes[s.name] for s in program.symbols})
        bound.prepare()

        def run() -> None:
            bound.launch()
            device.synchronize()

        return run, lambda: np.ravel(first[0])[:: max(1, first[0].size // HEAD)][:HEAD].tolist()

    return answer


if __name__ == "__main__":
    serve(answers(sys.argv[2], Path(sys.argv[3])))
