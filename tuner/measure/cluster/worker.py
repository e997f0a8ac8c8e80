"""The worker process: `python -m relax_tune.tuner.measure.cluster.worker OPTIONS` lends one unit to a Dask scheduler.

OPTIONS is the JSON form of `WorkerOptions`. The unit is opened, locked and timed before the scheduler hears of it, so no
batch meets a device that cannot be used.
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

import distributed

from relax_tune.errors import RelaxTuneError
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.fleet import METRIC
from relax_tune.tuner.measure.cluster.lending import CHECK_SECS, LentUnit
from relax_tune.tuner.measure.cluster.task import DevicePlugin


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker process: the lent devices and the scheduler. check_secs: seconds between two checks of the unit"""

    scheduler: str
    specs: tuple[str, ...]
    name: str
    tolerance: float
    folder: str
    host: str | None = None
    tls: TlsFiles | None = None
    check_secs: float = CHECK_SECS

    def to_json(self) -> str:
        """Return the JSON text for `main`."""
        return json.dumps(asdict(self))


def _options(text: str) -> WorkerOptions:
    document = json.loads(text)
    tls = document["tls"]
    return WorkerOptions(
        **document | {"specs": tuple(document["specs"]), "tls": None if tls is None else TlsFiles(**tls)}
    )


async def _serve(options: WorkerOptions, unit: LentUnit) -> None:
    security, protocol = None, "tcp"
    if options.tls is not None:
        protocol = "tls"
        security = distributed.Security(  # type: ignore[no-untyped-call]
            tls_ca_file=options.tls.ca,
            tls_worker_cert=options.tls.certificate,
            tls_worker_key=options.tls.key,
            require_encryption=True,
        )
    worker = distributed.Worker(
        options.scheduler,
        nthreads=1,
        name=f"{options.name}#{os.getpid()}",
        local_directory=options.folder,
        death_timeout=60,
        memory_limit=0,
        host=options.host,
        protocol=protocol,
        security=security,
        dashboard_address="127.0.0.1:0",
        metrics={METRIC: lambda _: unit.state()},
        plugins=(DevicePlugin(unit),),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: asyncio.ensure_future(worker.close(reason="told to end")))
    async with worker:
        await worker.finished()  # type: ignore[no-untyped-call]


def _check_regularly(unit: LentUnit, every_secs: float, ended: threading.Event) -> None:
    while not ended.wait(every_secs):
        try:
            unit.check()
        except RelaxTuneError as error:
            unit.quarantine = str(error)
            print(f"worker {unit.worker}: unit {unit.unit} is quarantined: {error}", flush=True)


def main(arguments: list[str], open_unit: Callable[..., LentUnit] = LentUnit) -> int:
    """Lend the unit until told to end. The exit status is 3 when it cannot be lent."""
    options = _options(arguments[0])
    try:
        unit = open_unit(options.specs, options.name, options.tolerance, report=partial(print, flush=True))
    except RelaxTuneError as error:
        print(f"error: {error}", flush=True)
        return 3
    ended = threading.Event()
    threading.Thread(target=_check_regularly, args=(unit, options.check_secs, ended), daemon=True).start()
    try:
        asyncio.run(_serve(options, unit))
    finally:
        ended.set()
        unit.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
