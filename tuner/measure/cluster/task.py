"""The part that runs inside a Dask worker. `runner.py` imports it lazily, since it needs `distributed`.

The worker process never touches a device: device processes do (`lending.LentUnit`), and a task hands them a batch as
JSON text. A candidate can so never hang or kill the worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import distributed

from relax_tune.errors import MeasureError, RelaxTuneError
from relax_tune.tuner.measure.cluster.lending import LentUnit

PLUGIN_NAME = "relax-tune-unit"


class DevicePlugin(distributed.WorkerPlugin):
    """The unit of a worker, where its tasks find it."""

    name = PLUGIN_NAME

    def __init__(self, unit: LentUnit) -> None:
        self.unit = unit


def _unit(worker: Any) -> LentUnit:
    plugin = worker.plugins.get(PLUGIN_NAME)
    if not isinstance(plugin, DevicePlugin):
        raise MeasureError(
            f"wanted a worker that lends a unit, found {worker.address} without one; start workers with `relax-tune worker`"
        )
    return plugin.unit


def _in_words(answer: Callable[[], str]) -> str:
    """Return an answer, or JSON text with the words of an error: a job reads no pickles of exceptions."""
    try:
        return answer()
    except RelaxTuneError as error:
        return json.dumps({"error": str(error)})
    except Exception as error:
        return json.dumps({"error": f"wanted an answer of a worker, found {type(error).__name__}: {error}"})


def describe_device(label: str, dask_worker: Any) -> str:
    """Return the description of a lent device, at once, whatever the unit is doing."""
    return _in_words(lambda: _unit(dask_worker).describe(label))


def measure_batch(label: str, wanted: str, batch: str) -> str:
    """Measure a batch on the worker's unit; see `LentUnit.measure`."""
    return _in_words(lambda: _unit(distributed.get_worker()).measure(label, wanted, batch))
