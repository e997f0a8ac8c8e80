"""Dask tasks, which run inside a worker. `runner.py` imports this module lazily, since it needs `distributed`.

The worker process does not open devices. A task sends its batch as JSON text to a device process (`lending.LentUnit`), so that a
candidate cannot hang or kill the worker.

Tests: `tests/tuner/measure/cluster/test_cluster.py`.
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
    """A worker plugin that holds the unit of the worker for its tasks."""

    name = PLUGIN_NAME

    def __init__(self, unit: LentUnit) -> None:
        self.unit = unit


def _unit(worker: Any) -> LentUnit:
    plugin = worker.plugins.get(PLUGIN_NAME)
    if not isinstance(plugin, DevicePlugin):
        raise MeasureError(f"the worker {worker.address} lends no unit; start workers with `relax-tune worker`")
    return plugin.unit


def _answer_or_error(answer: Callable[[], str]) -> str:
    """Return an answer, or an error as JSON text, since jobs do not unpickle exceptions."""
    try:
        return answer()
    except RelaxTuneError as error:
        return json.dumps({"error": str(error)})
    except Exception as error:
        return json.dumps({"error": f"the worker failed with {type(error).__name__}: {error}"})


def describe_device(label: str, dask_worker: Any) -> str:
    """Return the description of a lent device, without waiting for a running batch."""
    return _answer_or_error(lambda: _unit(dask_worker).describe(label))


def measure_batch(label: str, requirement: str, batch: str) -> str:
    """Measure a batch on the worker's unit; see `LentUnit.measure`."""
    return _answer_or_error(lambda: _unit(distributed.get_worker()).measure(label, requirement, batch))
