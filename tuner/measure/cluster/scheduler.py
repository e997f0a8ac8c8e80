"""The scheduler process: `python -m relax_tune.tuner.measure.cluster.scheduler OPTIONS`, with OPTIONS as JSON text.

It runs Dask's scheduler, accepts from each role only the operations of the role, and writes its address into a file when it listens.

Tests: `tests/tuner/measure/cluster/test_cluster.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import dask
import distributed

from relax_tune.errors import RelaxTuneError
from relax_tune.runtime.child_process import end_with_parent
from relax_tune.tuner.measure.cluster import task as _task  # noqa: F401  imported at the start, not during the first batch
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.fleet_metrics import FleetCollector
from relax_tune.tuner.measure.cluster.fleet_view import hidden_key
from relax_tune.tuner.measure.cluster.scraping import served
from relax_tune.tuner.measure.cluster.trust.roles import OF_SCHEDULER, PAGES, Gate
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity, keep_fresh
from relax_tune.tuner.measure.cluster.trust.unpickle import restrict


class FleetScheduler(distributed.Scheduler):
    """Dask's scheduler with checked operations (`trust.roles`).

    Args:
        security: TLS settings of this process.
    """

    def __init__(self, *given: Any, security: FleetSecurity, **named: Any) -> None:
        restrict()
        self.gate = Gate(OF_SCHEDULER, "scheduler")
        dask.config.set(PAGES)
        named |= {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
        super().__init__(*given, security=security, extensions={}, **named)

    async def start_unsafe(self) -> Any:
        """Start, and follow changes of the certificate files."""
        started = await super().start_unsafe()
        security: Any = self.security
        self._fresh = asyncio.ensure_future(keep_fresh(security, lambda: self.gate.cut(security.revoked())))
        return started

    def handle_comm(self, comm: Any) -> Any:
        """Restrict a connection to the operations of its role, and serve it."""
        self.gate.guard(comm)
        return super().handle_comm(comm)

    def get_processing(self, workers: Any = None) -> Any:
        """Return the tasks of each worker as hashes of their keys, since a key gives access to the task's result."""
        processing = super().get_processing(workers)
        return {worker: [hidden_key(str(key)) for key in keys] for worker, keys in processing.items()}


async def _serve(options: dict[str, Any]) -> None:
    scheduler = FleetScheduler(
        security=FleetSecurity(TlsFiles(**options["tls"])),
        host=options["host"],
        port=options["port"],
        protocol="tls",
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: asyncio.ensure_future(scheduler.close(reason="received a signal")))
    with _scraped(scheduler, options.get("metrics")) as metrics:
        await _until_ended(scheduler, Path(options["file"]), metrics)


def _scraped(scheduler: FleetScheduler, address: str | None) -> contextlib.AbstractContextManager[str]:
    """Serve the metrics for Prometheus at an address in the context; None serves none."""
    if address is None:
        return contextlib.nullcontext("")
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(scheduler))  # type: ignore[arg-type,unused-ignore]
    return served(registry, address)


async def _until_ended(scheduler: FleetScheduler, file: Path, metrics: str) -> None:
    """Write the addresses into a file, and serve until the scheduler is closed."""
    async with scheduler:
        part = file.with_name(f"{file.name}.part")
        part.write_text(json.dumps({"address": scheduler.address, "metrics": metrics}))
        part.replace(file)
        await scheduler.finished()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    end_with_parent()
    try:
        asyncio.run(_serve(json.loads(sys.argv[1])))
    except RelaxTuneError as error:
        sys.exit(f"error: {error}")
