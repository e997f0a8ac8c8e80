"""The part that runs inside a Dask worker. `runner.py` imports it lazily, since it needs `distributed`.

The worker process never touches a device: it owns one `LocalRunner` per device spec, kept between tasks, and a task
hands a batch to it as JSON text. A candidate can so never hang or kill the worker.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from typing import Any

import distributed

from relax_tune.tuner.measure.codec import decode_batch, encode_results
from relax_tune.tuner.measure.local import LocalRunner

PLUGIN_NAME = "relax-tune-devices"


class DevicePlugin(distributed.WorkerPlugin):
    """The runners of a worker: opened on first use, closed with the worker."""

    name = PLUGIN_NAME
    # A second job that registers it too must not replace it: that would close the runners the first one measures on.
    idempotent = True

    def setup(self, worker: Any) -> None:
        """Prepare the plugin; Dask calls this on every worker, present and future."""
        self._lock = threading.Lock()
        self._runners: dict[str, LocalRunner] = {}

    def teardown(self, worker: Any) -> None:
        """Close the runners; Dask calls this when the worker closes."""
        with self._lock:
            runners, self._runners = list(self._runners.values()), {}
        for runner in runners:
            runner.close()

    def runner(self, device_spec: str, open_secs: float) -> LocalRunner:
        """Return the runner of this spec. Raises MeasureError when its device cannot be opened within `open_secs`."""
        with self._lock:
            if device_spec not in self._runners:
                self._runners[device_spec] = LocalRunner(device_spec, open_secs=open_secs)
            return self._runners[device_spec]


def _runner(device_spec: str, open_secs: float) -> LocalRunner:
    plugin = distributed.get_worker().plugins[PLUGIN_NAME]
    assert isinstance(plugin, DevicePlugin)
    return plugin.runner(device_spec, open_secs)


def describe_device(device_spec: str, open_secs: float) -> str:
    """Return the worker's `DeviceInfo` as JSON text."""
    return json.dumps(asdict(_runner(device_spec, open_secs).device_info()))


def measure_batch(device_spec: str, open_secs: float, batch: str) -> str:
    """Measure the text of `codec.encode_batch`; return the text of `codec.encode_results`."""
    requests = decode_batch(batch)
    return encode_results(_runner(device_spec, open_secs).submit(requests).result())
