"""A connection to a Dask scheduler: checked, with our errors in place of Dask's long log messages."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from typing import Any

from relax_tune.errors import FleetAway, MeasureError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.fleet import LentDevice, lent_devices
from relax_tune.tuner.measure.cluster.tls import ANSWER_SECS, check_files, check_scheduler
from relax_tune.tuner.measure.cluster.trust.loopback import place_of
from relax_tune.tuner.measure.cluster.trust.unpickle import release, restrict
from relax_tune.tuner.measure.codec import decode_device


class SchedulerConnection:
    """A client of a scheduler.

    While it is open, this process reads only our own of Dask's messages (`trust.unpickle`).

    Raises MeasureError when the scheduler does not answer within `open_secs`, when certificates do not fit, or when Dask is not
    installed.
    """

    def __init__(self, address: str, tls: TlsFiles | None, open_secs: float) -> None:
        import_dask()
        address, tls = place_of(address, tls, "job", min(open_secs, ANSWER_SECS))
        check_files(tls, ("job", "scheduler"))
        check_scheduler(address, tls, min(open_secs, ANSWER_SECS))
        self._hushed, self._hush = logging.getLogger("distributed.client"), _new_hush()
        self._hushed.addFilter(self._hush)
        restrict()
        try:
            self.client = _connect(address, tls, open_secs)
        except BaseException:
            release()
            self._hushed.removeFilter(self._hush)
            raise

    def devices(self) -> list[LentDevice]:
        """Ask the scheduler for all lent devices."""
        return lent_devices(self.client.scheduler_info(n_workers=-1)["workers"])

    def close(self) -> None:
        """Leave the scheduler."""
        self.client.close()
        release()
        self._hushed.removeFilter(self._hush)


def _connect(address: str, tls: TlsFiles, open_secs: float) -> Any:
    distributed = importlib.import_module("distributed")
    security = importlib.import_module("relax_tune.tuner.measure.cluster.trust.security")
    own = security.FleetSecurity(tls)
    try:
        client = distributed.Client(address, timeout=open_secs, security=own, set_as_default=False)
        client.loop.add_callback(security.keep_fresh, own)
        return client
    except (OSError, TimeoutError) as error:
        raise FleetAway(
            f"wanted a Dask scheduler at {address} within {open_secs:g} s, found none ({error}); start one, or check "
            "address and certificates"
        ) from error


def _new_hush() -> Callable[[logging.LogRecord], bool]:
    """Return a log filter that drops everything. Each call returns a new one, so that each connection removes its own."""
    return lambda _: False


def raise_told(text: Any) -> None:
    """Raise the MeasureError that a worker tells, in its words, if the answer is one."""
    if isinstance(text, str) and text.startswith('{"error":') and has_shape(told := json.loads(text), {"error": str}):
        raise MeasureError(told["error"])


def device_info_of(text: Any) -> DeviceInfo:
    """Check the answer of `task.describe_device`. Raises MeasureError for anything else."""
    raise_told(text)
    try:
        return decode_device(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise MeasureError(
            f"wanted the description of a device from a worker, found {type(error).__name__}: {error} in {text!r:.120}; "
            "the two sides must run the same version of relax-tune"
        ) from None


def import_dask() -> tuple[Any, Any]:
    """Import Dask Distributed, and the module of what runs in its workers. Raises MeasureError that names the extra."""
    try:
        return (
            importlib.import_module("distributed"),
            importlib.import_module("relax_tune.tuner.measure.cluster.task"),
        )
    except ImportError as error:
        raise MeasureError(
            f"wanted Dask Distributed for a far runner, found {error}; pip install 'relax-tune[cluster]'"
        ) from error
