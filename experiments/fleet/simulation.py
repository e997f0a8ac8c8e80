"""Simulate a fleet in which workers fail: the dispatcher of `DaskRunner` with simulated workers and a simulated clock.

`python -m experiments.fleet.simulation --workers 1000 --hours 1 --failing 0.01` prints one JSON line. Dask, its scheduler and TLS are
not simulated (`throughput.py` measures them), only what is sent to which worker, when it is sent again, and the cost of that.

A failing worker is killed and started again, or falls silent, or never finishes a batch, or is quarantined: a quarter each, for ten
minutes. The job has as many batches under way as `DaskRunner.slots` says, as a tuning job does.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import queue
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import distributed
import msgpack
from distributed.scheduler import heartbeat_interval

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure import supervised
from relax_tune.tuner.measure.cluster import fleet_view
from relax_tune.tuner.measure.cluster import runner as runner_module
from relax_tune.tuner.measure.cluster.fleet import METRIC, LentDevice, lent_devices
from relax_tune.tuner.measure.cluster.identity import PROTOCOL, identity_of
from relax_tune.tuner.measure.codec import decode_batch, encode_results
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, ShapeTiming, UnitState

INFO = DeviceInfo("c", "simulated", (("threads", "1"),), (), (), "")
KINDS = ("killed", "silent", "stuck", "quarantined")
OUT_SECS = 600.0
BACK_SECS = 60.0
"""Time of a killed worker to start again: process, device, reference kernels."""


class Clock:
    """Events in the order of their times."""

    def __init__(self, end: float) -> None:
        self.now, self.end = 0.0, end
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (moment, next(self._numbers), act))

    def step(self, limit: float) -> bool:
        """Let the next thing happen, if it does until `limit`."""
        if not self._coming or self._coming[0][0] > limit:
            return False
        moment, _, act = heapq.heappop(self._coming)
        self.now = max(self.now, moment)
        act()
        return True

    def monotonic(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        until = self.now + secs
        while self.step(until):
            pass
        self.now = until


class Events:
    """A queue of a runner: who waits at it lets the time go on. At the end of the simulation it gives None, which closes the runner."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._items = clock, deque[Any]()
        self.cpu = 0.0

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float = math.inf) -> Any:
        began = time.thread_time()
        limit = self._clock.now + (timeout if block else 0.0)
        try:
            while not self._items:
                if self._clock.now >= self._clock.end:
                    return None
                if not self._clock.step(limit):
                    self._clock.now = limit
                    raise queue.Empty
            return self._items.popleft()
        finally:
            self.cpu += time.thread_time() - began

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Inline:
    """An executor that runs each call immediately."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, act: Callable[..., object], *given: object) -> None:
        act(*given)

    def shutdown(self, **_: object) -> None:
        pass


@dataclass
class Answer:
    """The future that Dask's client returns for a task."""

    key: str
    status: str = "pending"
    value: Any = None
    told: list[Callable[[Answer], object]] = field(default_factory=list)

    def add_done_callback(self, act: Callable[[Answer], object]) -> None:
        self.told.append(act)

    def end(self, status: str, value: Any) -> None:
        if self.status == "pending":
            self.status, self.value = status, value
            for act in self.told:
                act(self)

    def result(self) -> Any:
        return self.value

    exception = result

    def release(self) -> None:
        self.told.clear()


@dataclass
class Worker:
    """A worker. failing: the kind of its failure, while it lasts; silent_since: when it was last heard of"""

    address: str
    phase: float
    failing: str = ""
    silent_since: float = 0.0
    free_at: float = 0.0
    held: list[Answer] = field(default_factory=list)


class Fleet:
    """The workers and the scheduler of a simulation, as the client and the connection of a runner see them."""

    def __init__(self, clock: Clock, count: int, secs: float, failing: float, seed: int) -> None:
        self.clock, self.secs, self.random = clock, secs, random.Random(seed)
        self.workers = {f"w{n:05}": Worker(f"w{n:05}", self.random.random()) for n in range(count)}
        self.interval = heartbeat_interval(count)
        self.failures, self.sent, self.measured, self.refused = Counter[str](), 0, 0.0, 0
        self.client = self
        self._told = {a: self._state(a, "") for a in self.workers}
        if failing:
            self._next_failure(3600.0 / (failing * count))

    @staticmethod
    def _state(address: str, quarantine: str) -> dict[str, Any]:
        return {
            "c": {
                "protocol": PROTOCOL, "worker": address, "host": f"host-{address}", "unit": f"GPU-{address}",
                "identity": identity_of(INFO), "about": "simulated | ", "reference": {"add": 1e-3, "matmul": 2e-3},
                "tolerance": 1.25, "quarantine": quarantine,
            }
        }  # fmt: skip

    def _next_failure(self, mean_secs: float) -> None:
        def act() -> None:
            self._fail(self.random.choice([w for w in self.workers.values() if not w.failing]))
            self._next_failure(mean_secs)

        self.clock.at(self.clock.now + self.random.expovariate(1 / mean_secs), act)

    def _fail(self, worker: Worker) -> None:
        kind = KINDS[self.failures.total() % len(KINDS)]
        self.failures[kind] += 1
        worker.failing, worker.silent_since = kind, self.clock.now
        if kind == "killed":
            held, worker.held = worker.held, []
            for answer in held:  # the scheduler gives a lost worker's task up, since its own retries are off
                answer.end("error", distributed.KilledWorker(answer.key, None, 0))
        if kind == "quarantined":
            self._told[worker.address] = self._state(worker.address, "add took 1.5 times as long")

        def back() -> None:
            worker.failing, worker.free_at = "", self.clock.now
            self._told[worker.address] = self._state(worker.address, "")
            held, worker.held = worker.held, []
            for answer in held:
                answer.end("error", distributed.KilledWorker(answer.key, None, 0))

        self.clock.at(self.clock.now + (BACK_SECS if kind == "killed" else OUT_SECS), back)

    # What a runner asks.

    def ask(self, call: Callable[[Any], Any]) -> Any:
        return call(self)

    def devices(self) -> list[LentDevice]:
        return lent_devices(self.scheduler_info()["workers"])

    def scheduler_info(self) -> dict[str, Any]:
        now, every = self.clock.now, self.interval
        found = {}
        for address, worker in self.workers.items():
            if worker.failing == "killed" or (worker.failing == "silent" and now - worker.silent_since > 60):
                continue
            heard = worker.silent_since if worker.failing == "silent" else now - (now + worker.phase * every) % every
            found[address] = {"metrics": {METRIC: self._told[address]}, "last_seen": heard}
        return {"workers": found}

    def run(self, _: object, label: str, workers: Sequence[str], **__: object) -> dict[str, str]:
        return dict.fromkeys(workers, json.dumps(asdict(INFO)))

    def processing(self) -> dict[str, list[str]]:
        return {}

    def submit(
        self, _: object, label: str, wanted: str, batch: str, key: str, workers: list[str], **__: object
    ) -> Answer:
        self.sent += 1
        worker, answer = self.workers[workers[0]], Answer(key)
        if worker.failing == "killed":  # the scheduler keeps a task for a worker that has left, and says nothing
            return answer
        worker.held.append(answer)
        secs = self.secs * self.random.uniform(0.5, 1.5)
        worker.free_at = max(worker.free_at, self.clock.now) + secs

        def end() -> None:
            if worker.failing in ("silent", "stuck") or answer not in worker.held:
                return
            worker.held.remove(answer)
            if worker.failing == "quarantined":
                self.refused += 1
                answer.end("finished", json.dumps({"refused": f"worker {worker.address}: quarantined"}))
                return
            self.measured += secs
            state = UnitState(worker.address, "simulated", worker.address)
            timing = (ShapeTiming({"n": 16}, (1e-3,)),)
            results = [MeasureResult(r.id, "ok", timings=timing, checked=True, unit=state) for r in decode_batch(batch)]
            answer.end("finished", encode_results(results))

        self.clock.at(worker.free_at, end)
        return answer

    def close(self) -> None:
        pass


@dataclass
class Caller:
    """A job that keeps batches under way. ages: seconds from the first sending of a batch to its answer"""

    clock: Clock
    size: int
    deadline_secs: float
    runner: Any = None
    number: int = 0
    under_way: int = 0
    failed: int = 0
    ages: list[float] = field(default_factory=list)

    def fill(self) -> None:
        while self.under_way < self.runner.slots():
            self.under_way += 1
            self.number += 1
            began = self.clock.now
            requests = [
                MeasureRequest(f"{self.number}-{i}", "{}", (), ({"n": 16},), deadline_secs=self.deadline_secs)
                for i in range(self.size)
            ]
            self.runner.submit(requests).add_done_callback(lambda done, began=began: self._done(done, began))

    def _done(self, done: Future[list[MeasureResult]], began: float) -> None:
        self.under_way -= 1
        if isinstance(done.exception(), MeasureError):  # the end of the simulation
            return
        self.failed += sum(not result.ok for result in done.result())
        self.ages.append(self.clock.now - began)
        self.fill()


def simulate(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a simulation."""
    clock = Clock(given.hours * 3600.0)
    fleet = Fleet(clock, given.workers, given.secs, given.failing, given.seed)
    inbox, answers, caller = Events(clock), Events(clock), Caller(clock, given.size, given.deadline_secs)
    notices = Counter[str]()
    stand_ins = {
        "time": SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep),
        "queue": SimpleNamespace(SimpleQueue=lambda: answers, Empty=queue.Empty),
        "ThreadPoolExecutor": Inline,
        "SchedulerConnection": lambda *_: fleet,
    }
    cpu = time.process_time()
    with (
        patch.multiple(runner_module, **stand_ins),
        patch.object(fleet_view, "time", stand_ins["time"]),
        patch.object(supervised, "queue", SimpleNamespace(SimpleQueue=lambda: inbox, Empty=queue.Empty)),
    ):
        clock.at(0.0, lambda: caller.fill())
        real = runner_module.DaskRunner.__init__

        def begin(self: Any, *given: Any, **named: Any) -> None:
            caller.runner = self
            real(self, *given, **named)

        with patch.object(runner_module.DaskRunner, "__init__", begin):
            runner = runner_module.DaskRunner("simulated", "c", notice=lambda line: notices.update([kind_of(line)]))
        runner._thread.join()
        runner.close()
    ages = sorted(caller.ages)
    cpu = time.process_time() - cpu
    return {
        **vars(given),
        "batches": len(ages),
        "share": len(ages) * given.secs / (given.workers * given.hours * 3600.0),
        "failures": dict(fleet.failures),
        "sent": fleet.sent,
        "refused": fleet.refused,
        "requests_failed": caller.failed,
        "secs_median": ages[len(ages) // 2],
        "secs_longest": ages[-1],
        "notices": dict(notices),
        "dispatcher_cpu_secs_a_batch": (cpu - inbox.cpu - answers.cpu) / max(len(ages), 1),
        "listing_bytes": len(msgpack.packb(fleet.scheduler_info())),
    }


def kind_of(line: str) -> str:
    """Return the kind of a notice."""
    parts = ("silent for", "over the deadline", "is also sent to", "is sent to another worker", "is excluded")
    return next((part for part in parts if part in line), line[:60])


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--failing", type=float, default=0.01, help="share of the workers that fail in an hour")
    parser.add_argument(
        "--secs", type=float, default=20.0, help="mean of a batch, which takes half to one and a half of it"
    )
    parser.add_argument("--size", type=int, default=8, help="requests of a batch")
    parser.add_argument("--deadline-secs", type=float, default=10.0, help="of each request")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(simulate(parser.parse_args())))


if __name__ == "__main__":
    main()
