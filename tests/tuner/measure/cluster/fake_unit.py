"""A worker process with a made-up device: `python -m tests.tuner.measure.cluster.fake_unit OPTIONS FACTS`.

FACTS is JSON text: name, threads, unit, the factor by which its reference kernels are slow, seconds a batch takes, the
protocol that it claims to speak, and what it answers instead of results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster import task, worker
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.lending import LentUnit
from relax_tune.tuner.measure.cluster.processes import ClusterProcess
from relax_tune.tuner.measure.cluster.trust.loopback import place_of
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


def start_fake(
    scheduler: str, unit: str, *, tolerance: float = 1.25, tls: TlsFiles | None = None, **facts: Any
) -> ClusterProcess:
    """Start a worker process that lends a made-up device."""
    options = {"scheduler": scheduler, "specs": ["c"], "name": unit, "tolerance": tolerance, "folder": "{folder}"}
    scheduler, tls = place_of(scheduler, tls, "worker", 20.0)
    options |= {"scheduler": scheduler, "host": "127.0.0.1", "tls": asdict(tls)}
    arguments = ["tests.tuner.measure.cluster.fake_unit", json.dumps(options), json.dumps({"unit": unit, **facts})]
    settings = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"}
    return ClusterProcess(arguments, settings)


class FakeUnit(LentUnit):
    """A made-up unit, perhaps of another version."""

    protocol: int | None = None
    answers: Sequence[Any] = ()
    """What a hostile one answers, in turn, instead of results; and instead of its device, after the first time."""
    _asked = -1
    _measured = 0

    def describe(self, label: str) -> str:
        self._asked += 1
        return super().describe(label) if self._asked == 0 or not self.answers else self.answers[self._asked - 1]

    def measure(self, label: str, wanted: str, batch: str) -> str:
        self._measured += 1
        return self.answers[self._measured - 1] if self.answers else super().measure(label, wanted, batch)

    def state(self) -> dict[str, Any]:
        told = super().state()
        return told if self.protocol is None else {label: {**d, "protocol": self.protocol} for label, d in told.items()}


class Payload:
    """What makes a file wherever it is unpickled without restriction."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


class PayloadError(Exception):
    """An error that makes a file wherever it is unpickled without restriction."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.args[0], "w")


def hostile(path: str, way: str) -> Callable[[Callable[[], str]], Any]:
    """What a hostile worker puts in place of `task._answer_or_error`: a payload as result, or as error."""

    def answer(_: Callable[[], str]) -> Any:
        if way == "error":
            raise PayloadError(path)
        return Payload(path)

    return answer


if __name__ == "__main__":
    given: Mapping[str, Any] = json.loads(sys.argv[2])
    FakeUnit.protocol, FakeUnit.answers = given.get("protocol"), given.get("answers", ())
    if "payload" in given:
        task._answer_or_error = hostile(given["payload"], given["way"])
    opened: Callable[..., LentUnit] = partial(FakeUnit, open_runner=lambda _, name: FakeRunner(given, name))
    sys.exit(worker.main(sys.argv[1:], opened))
