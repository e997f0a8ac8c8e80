"""Measure how busy one job keeps a fleet: devices that sleep half a second a batch, on a scheduler of this machine.

`python experiments/fleet_throughput.py --workers 8 --batches 160`; the share is batch seconds over worker seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

import distributed
import psutil

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster.client import SchedulerConnection
from relax_tune.tuner.measure.cluster.fleet import METRIC
from relax_tune.tuner.measure.cluster.lending import LentUnit
from relax_tune.tuner.measure.cluster.processes import start_scheduler
from relax_tune.tuner.measure.cluster.reference import reference_program
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.cluster.task import DevicePlugin
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, ShapeTiming

# Workers that share a process of this simulation.
TOGETHER = 25


class Sleeper:
    """A device whose batches take a fixed time."""

    def __init__(self, unit: str, secs: float) -> None:
        self.unit, self.secs = unit, secs

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        if batch[0].id != "reference":
            time.sleep(self.secs)
        done: Future[list[MeasureResult]] = Future()
        done.set_result(
            [MeasureResult(r.id, "ok", timings=tuple(ShapeTiming(dict(s), (1e-3,)) for s in r.timings)) for r in batch]
        )
        return done

    def device_info(self) -> DeviceInfo:
        return DeviceInfo("c", "sleeper", (), (), (), self.unit)

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        return reference

    def slots(self) -> int:
        return 1

    def close(self) -> None:
        pass


def serve(address: str, names: Sequence[str], secs: float) -> None:
    """Run several workers in this process, until it is killed."""

    async def run() -> None:
        workers = []
        for name in names:
            unit = LentUnit(["c"], name, open_runner=lambda _, name: Sleeper(name, secs))
            metrics = {METRIC: lambda _, unit=unit: unit.state()}
            worker = distributed.Worker(
                address,
                nthreads=1,
                name=name,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",
                metrics=metrics,
                plugins=(DevicePlugin(unit),),
            )
            workers.append(await worker)
        await asyncio.gather(*(worker.finished() for worker in workers))

    asyncio.run(run())


def used(pids: Sequence[int | None]) -> float:
    """Return the CPU seconds of processes."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def batch(number: int) -> list[MeasureRequest]:
    """Eight requests, as a tuning job sends them."""
    program = reference_program("c").to_json()
    return [MeasureRequest(f"{number}-{i}", program, (), ({"n": 16, "k": 1},)) for i in range(8)]


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=160)
    parser.add_argument("--secs", type=float, default=0.5)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        scheduler, address = start_scheduler()
        stack.enter_context(scheduler)
        serving: list[int | None] = []
        names = [f"sleeper-{n}" for n in range(given.workers)]
        for first in range(0, len(names), TOGETHER):
            process = context.Process(target=serve, args=(address, names[first : first + TOGETHER], given.secs))
            process.start()
            stack.callback(process.kill)
            serving.append(process.pid)
        connection = SchedulerConnection(address, None, 60.0)
        while len(connection.devices()) < given.workers:
            time.sleep(0.2)
        connection.close()
        runner = stack.enter_context(DaskRunner(address, "c"))
        waiting: list[Future[list[MeasureResult]]] = []
        others = {"scheduler_cpu_secs": [scheduler.pid], "workers_cpu_secs": serving}
        before = {name: used(pids) for name, pids in others.items()}
        cpu, began = time.process_time(), time.monotonic()
        for number in range(given.batches):  # at most `slots` under way, as a tuning job keeps them
            while sum(not future.done() for future in waiting) >= runner.slots():
                time.sleep(0.002)
            waiting.append(runner.submit(batch(number)))
        for future in waiting:
            future.result()
        wall = time.monotonic() - began
        share = given.batches * given.secs / (wall * given.workers)
        cpus = {"job_cpu_secs": time.process_time() - cpu, **{n: used(p) - before[n] for n, p in others.items()}}
        print(json.dumps({**vars(given), "wall_secs": wall, **cpus, "share": share}))


if __name__ == "__main__":
    main()
