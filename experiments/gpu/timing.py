"""Timing on a GPU: many launches are recorded as one, so that the time of the host language does not count."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from numpy.typing import NDArray

from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import Device, Launch
from relax_tune.runtime.executor import Executor

SERIES_SECS, SERIES_MOST = 2e-3, 200
SAMPLES, BUDGET_SECS = 7, 0.15
AWAKE_SECS = 0.03  # a GPU that had nothing to do raises its clocks over some milliseconds of work
LEAST_COPIES, MOST_COPIES = 1, 4


def seconds(device: Device, runs: Sequence[Sequence[Launch]]) -> list[float]:
    """Samples of the seconds of one run, each of launches that follow one another; the runs are taken in turns."""
    turn = [launch for run in runs for launch in run]

    def all_of(launches: Sequence[Launch]) -> Launch:
        def enqueue() -> None:
            for launch in launches:
                launch()

        return device.record(launches) or enqueue

    def timed(run: Launch, count: int) -> float:
        began = time.perf_counter()
        run()
        device.synchronize()
        return (time.perf_counter() - began) / count

    once = all_of(turn)
    for _ in range(3):
        one = timed(once, len(runs))
    turns = max(1, min(SERIES_MOST, math.ceil(SERIES_SECS / one / len(runs))))
    many, count = all_of(turn * turns), turns * len(runs)
    awake = time.perf_counter() + AWAKE_SECS
    timed(many, count)
    while time.perf_counter() < awake:
        timed(many, count)
    found, until = [timed(many, count)], time.perf_counter() + BUDGET_SECS
    while len(found) < SAMPLES and time.perf_counter() < until:
        found.append(timed(many, count))
    return found


class Copies:
    """A build opened so many times that the last cache does not hold the weights of all, which are of `nbytes` each."""

    def __init__(self, device: Device, artifact: Path, nbytes: int) -> None:
        self.device, cache = device, dict(device.info.limits)["l2_bytes"]
        count = max(LEAST_COPIES, min(MOST_COPIES, math.ceil(2 * cache / max(nbytes, 1))))
        self._models = [load_artifact(artifact).open(device) for _ in range(count)]
        self.executors: list[Executor] = [m.executor for m in self._models]

    def secs(self, symbols: Mapping[str, int], arrays: Sequence[NDArray[Any]]) -> float:
        """Median seconds of a launch on these inputs."""
        for executor in self.executors:
            executor.run(arrays)
        return median(seconds(self.device, [e.bind(symbols).launches for e in self.executors]))

    def close(self) -> None:
        """Give memory back."""
        for model in self._models:
            model.close()
