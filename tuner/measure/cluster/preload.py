"""Units on workers that Dask's own command starts: `dask worker ADDRESS --preload relax_tune.tuner.measure.cluster.preload --device c`.

Launchers that support only this command, such as dask-jobqueue, use it. `relax-tune worker` does not.

Tests: `tests/tuner/measure/cluster/test_cluster.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from relax_tune.runtime.device.registry import devices_of_class
from relax_tune.tuner.measure.cluster.fleet import METRIC
from relax_tune.tuner.measure.cluster.lending import CHECK_SECS, LOCK_SECS, LentUnit
from relax_tune.tuner.measure.cluster.task import PLUGIN_NAME, DevicePlugin
from relax_tune.tuner.measure.cluster.worker import check_regularly
from relax_tune.tuner.measure.reference import TOLERANCE

_ENDED = threading.Event()


@click.command()
@click.option(
    "--device", "devices", multiple=True, required=True, help="A device to lend, such as c or cuda; all of one unit."
)
@click.option("--tolerance", default=TOLERANCE, help="How far reference times may differ.")
async def dask_setup(worker: Any, devices: Sequence[str], tolerance: float) -> None:
    """Open and time the unit before this worker registers at the scheduler.

    So no batch is sent to a device that cannot be used.
    """
    specs = [spec for given in devices for spec in devices_of_class(given)]
    unit = LentUnit(
        specs, f"{worker.name}/{'+'.join(specs)}", tolerance, report=partial(print, flush=True), lock_secs=LOCK_SECS
    )
    worker.metrics[METRIC] = lambda _: unit.state()
    await worker.plugin_add(DevicePlugin(unit), name=PLUGIN_NAME)
    threading.Thread(target=check_regularly, args=(unit, CHECK_SECS, _ENDED), daemon=True).start()


def dask_teardown(worker: Any) -> None:
    """Release the unit."""
    _ENDED.set()
    plugin = worker.plugins.get(PLUGIN_NAME)
    if isinstance(plugin, DevicePlugin):
        plugin.unit.close()
