"""The worker process: `python -m relax_tune.tuner.measure.cluster.worker OPTIONS` lends one unit to a Dask scheduler.

OPTIONS is the JSON form of `WorkerOptions`. The unit is opened, locked and timed before the worker registers at the scheduler, so that
no batch is sent to a device that cannot be used.

Tests: `tests/tuner/measure/cluster/test_fleet.py`, `tests/tuner/measure/cluster/test_cluster.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import dask
import distributed

from relax_tune.errors import MeasureError, RelaxTuneError
from relax_tune.runtime.child_process import end_with_parent
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.fleet import METRIC
from relax_tune.tuner.measure.cluster.lending import CHECK_SECS, LOCK_SECS, LentUnit
from relax_tune.tuner.measure.cluster.task import DevicePlugin
from relax_tune.tuner.measure.cluster.trust.roles import OF_WORKER, PAGES, Gate
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity, keep_fresh
from relax_tune.tuner.measure.cluster.trust.unpickle import restrict


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker process: the lent devices and the scheduler.

    Attributes:
        check_secs: seconds between two checks of the unit.
    """

    scheduler: str
    specs: tuple[str, ...]
    name: str
    tolerance: float
    folder: str
    tls: TlsFiles
    host: str | None = None
    check_secs: float = CHECK_SECS

    def to_json(self) -> str:
        """Return the JSON text for `main`."""
        return json.dumps(asdict(self))


def _options(text: str) -> WorkerOptions:
    document = json.loads(text)
    return WorkerOptions(**document | {"specs": tuple(document["specs"]), "tls": TlsFiles(**document["tls"])})


class FleetWorker(distributed.Worker):
    """Dask's worker, which accepts work only from a scheduler.

    Args:
        security: TLS settings of this process: a `FleetSecurity`, or the file settings that Dask's own command passes.
    """

    def __init__(self, *given: Any, security: Any, **named: Any) -> None:
        restrict()
        if not isinstance(security, FleetSecurity):
            make: Any = distributed.Security
            own = make(**security) if isinstance(security, dict) else security
            if not (own.tls_ca_file and own.tls_worker_cert and own.tls_worker_key):
                raise MeasureError("a worker needs --tls-ca-file, --tls-cert and --tls-key; give all three")
            security = FleetSecurity(TlsFiles(own.tls_ca_file, own.tls_worker_cert, own.tls_worker_key))
        self.gate = Gate(OF_WORKER)
        dask.config.set(PAGES)
        named |= {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
        super().__init__(*given, security=security, extensions={}, **named)

    async def start_unsafe(self) -> Any:
        """Start, and follow changes of the certificate files."""
        started = await super().start_unsafe()  # type: ignore[no-untyped-call]
        security: Any = self.security
        self._fresh = asyncio.ensure_future(keep_fresh(security, lambda: self.gate.cut(security.revoked())))
        return started

    def handle_comm(self, comm: Any) -> Any:
        """Restrict a connection to the operations of its role, and serve it."""
        self.gate.guard(comm)
        return super().handle_comm(comm)


async def _serve(options: WorkerOptions, unit: LentUnit) -> None:
    worker = FleetWorker(
        options.scheduler,
        nthreads=1,
        # Dask refuses a name that is taken, as by the predecessor of a restarted worker until it is given up.
        name=f"{options.name}#{os.getpid()}",
        local_directory=options.folder,
        death_timeout=60,
        memory_limit=0,
        host=options.host,
        protocol="tls",
        security=FleetSecurity(options.tls),
        metrics={METRIC: lambda _: unit.state()},
        plugins=(DevicePlugin(unit),),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: asyncio.ensure_future(worker.close(reason="received a signal")))
    async with worker:
        await worker.finished()  # type: ignore[no-untyped-call]


def check_regularly(unit: LentUnit, every_secs: float, ended: threading.Event) -> None:
    """Check a unit at an interval until `ended` is set. If the check fails, the unit is quarantined."""
    while not ended.wait(every_secs):
        try:
            unit.check()
        except RelaxTuneError as error:
            unit.quarantine = str(error)
            print(f"worker {unit.worker}: unit {unit.unit} is quarantined: {error}", flush=True)


def main(arguments: list[str], open_unit: Callable[..., LentUnit] = LentUnit) -> int:
    """Lend the unit until the process gets a signal. The exit status is 3 if the unit cannot be opened."""
    options = _options(arguments[0])
    end_with_parent()
    try:
        report = partial(print, flush=True)
        unit = open_unit(options.specs, options.name, options.tolerance, report=report, lock_secs=LOCK_SECS)
    except RelaxTuneError as error:
        print(f"error: {error}", flush=True)
        return 3
    ended = threading.Event()
    threading.Thread(target=check_regularly, args=(unit, options.check_secs, ended), daemon=True).start()
    try:
        asyncio.run(_serve(options, unit))
    finally:
        ended.set()
        unit.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
