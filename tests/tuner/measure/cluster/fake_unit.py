"""A worker process with a made-up device: `python -m tests.tuner.measure.cluster.fake_unit OPTIONS FACTS`.

FACTS is JSON text: name, threads, unit, the factor by which its reference kernels are slow, and seconds a batch takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster import worker
from relax_tune.tuner.measure.cluster.lending import LentUnit
from relax_tune.tuner.measure.cluster.processes import ClusterProcess
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, ShapeTiming, UnitState

BASE_SECS = 1e-3


class FakeRunner:
    """A device that sleeps instead of measuring; each result is its reference time."""

    def __init__(self, facts: Mapping[str, Any], name: str) -> None:
        self.facts, self.name = dict(facts), name
        self.slow = float(facts.get("slow", 1.0))

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        done: Future[list[MeasureResult]] = Future()
        if all(request.id != "reference" for request in batch):
            time.sleep(float(self.facts.get("secs", 0.0)))
        state = UnitState(self.name, "made-up", str(self.facts["unit"]))
        done.set_result(
            [
                MeasureResult(
                    request.id,
                    "ok",
                    timings=tuple(ShapeTiming(dict(s), (BASE_SECS * self.slow,)) for s in request.timings),
                    checked=True,
                    unit=state,
                )
                for request in batch
            ]
        )
        return done

    def device_info(self) -> DeviceInfo:
        fingerprint = (("threads", str(self.facts.get("threads", 1))),)
        return DeviceInfo("c", str(self.facts.get("name", "fake")), fingerprint, (), (), str(self.facts["unit"]))

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        return reference

    def slots(self) -> int:
        return 1

    def close(self) -> None:
        pass


def fake_unit(facts: Mapping[str, Any], specs: Sequence[str] = ("c",), **more: Any) -> LentUnit:
    """Lend a made-up device in this process."""
    return LentUnit(specs, str(facts["unit"]), open_runner=lambda _, name: FakeRunner(facts, name), **more)


def start_fake(scheduler: str, unit: str, *, tolerance: float = 1.25, **facts: Any) -> ClusterProcess:
    """Start a worker process that lends a made-up device."""
    options = {"scheduler": scheduler, "specs": ["c"], "name": unit, "tolerance": tolerance, "folder": "{folder}"}
    options |= {"host": "127.0.0.1", "tls": None}
    arguments = ["tests.tuner.measure.cluster.fake_unit", json.dumps(options), json.dumps({"unit": unit, **facts})]
    settings = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"}
    return ClusterProcess(arguments, settings)


if __name__ == "__main__":
    given: Mapping[str, Any] = json.loads(sys.argv[2])
    opened: Callable[..., LentUnit] = partial(LentUnit, open_runner=lambda _, name: FakeRunner(given, name))
    sys.exit(worker.main(sys.argv[1:], opened))
