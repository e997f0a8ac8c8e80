"""Measure how busy one job keeps a fleet: devices that sleep half a second per batch, with a scheduler on this machine.

`python -m experiments.fleet.throughput --workers 8 --batches 160` prints the share: batch seconds over worker seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from queue import SimpleQueue

import psutil
from tests.tuner.measure.cluster.fake_unit import FakeRunner

from relax_tune.tuner.measure.cluster.client import SchedulerConnection
from relax_tune.tuner.measure.cluster.fleet import METRIC
from relax_tune.tuner.measure.cluster.lending import LentUnit
from relax_tune.tuner.measure.cluster.processes import start_scheduler
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.cluster.task import DevicePlugin
from relax_tune.tuner.measure.cluster.trust.loopback import place_of
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity
from relax_tune.tuner.measure.cluster.worker import FleetWorker
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult
from relax_tune.tuner.measure.reference import reference_program

# Workers that share a process of this simulation.
TOGETHER = 25


def serve(address: str, names: Sequence[str], secs: float) -> None:
    """Run several workers in this process, until it is killed."""
    place, tls = place_of(address, None, "worker", 60.0)

    async def run() -> None:
        workers = []
        for name in names:
            unit = LentUnit(["c"], name, open_runner=lambda _, name: FakeRunner({"unit": name, "secs": secs}, name))
            metrics = {METRIC: lambda _, unit=unit: unit.state()}
            worker = FleetWorker(
                place,
                protocol="tls",
                security=FleetSecurity(tls),
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


def batch(number: int, program: str) -> list[MeasureRequest]:
    """Eight requests, as a tuning job sends them."""
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
        others = {"scheduler_cpu_secs": [scheduler.pid], "workers_cpu_secs": serving}
        before = {name: used(pids) for name, pids in others.items()}
        done: SimpleQueue[Future[list[MeasureResult]]] = SimpleQueue()
        under_way, program = 0, reference_program("c").to_json()
        cpu, began = time.process_time(), time.monotonic()
        for number in range(given.batches):  # at most `slots` under way, as a tuning job keeps them
            while under_way >= runner.slots():
                done.get().result()
                under_way -= 1
            runner.submit(batch(number, program)).add_done_callback(done.put)
            under_way += 1
        for _ in range(under_way):
            done.get().result()
        wall = time.monotonic() - began
        share = given.batches * given.secs / (wall * given.workers)
        cpus = {"job_cpu_secs": time.process_time() - cpu, **{n: used(p) - before[n] for n, p in others.items()}}
        print(json.dumps({**vars(given), "wall_secs": wall, **cpus, "share": share}))


if __name__ == "__main__":
    main()
