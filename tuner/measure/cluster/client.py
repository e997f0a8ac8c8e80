"""A connection to a Dask scheduler, with errors of this package in place of Dask's log messages.

Tests: `tests/tuner/measure/cluster/test_lost_scheduler.py`, `tests/tuner/measure/cluster/test_cluster.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from relax_tune.errors import FleetUnavailable, MeasureError, RelaxTuneError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.fleet import LentDevice, lent_devices
from relax_tune.tuner.measure.cluster.tls import ANSWER_SECS, check_files, check_scheduler
from relax_tune.tuner.measure.cluster.trust.loopback import place_of
from relax_tune.tuner.measure.cluster.trust.unpickle import release, restrict
from relax_tune.tuner.measure.codec import decode_device

CALL_SECS = 30.0
"""Time limit of a request to the scheduler."""
_CLOSE_SECS, _RESTORE_SECS, _WAITING_SECS, _AGAIN_SECS, _PAUSE_SECS = 5.0, 5.0, 5.0, 60.0, 0.5
FETCH_LOST = (OSError, TimeoutError, asyncio.CancelledError, concurrent.futures.CancelledError)
"""What Dask raises when a connection breaks while an answer is fetched."""
# Without a connection Dask also returns incomplete answers (KeyError), has no scheduler (AttributeError) or a closed loop (RuntimeError).
_LOST = (*FETCH_LOST, KeyError, AttributeError, RuntimeError)
_CONNECTION_MODULES = ("client", "batched", "core", "comm.core", "comm.tcp", "comm.utils")
T = TypeVar("T")


class SchedulerLost(FleetUnavailable):
    """The connection to the scheduler is lost, or the scheduler does not answer. Tasks sent over the connection are lost, too."""


class SchedulerConnection:
    """A client of a scheduler. All calls of Dask go through `ask`.

    While the connection is open, this process reads only the messages that a measurement needs (`trust.unpickle`).

    While Dask's client reconnects it returns cached or empty answers, and it forgets the tasks that it has sent. So after a lost
    connection each call raises SchedulerLost until `restore` has created another client.

    Args:
        open_secs: time limit for the scheduler to answer.
        notice: receives a sentence when that takes long.

    Raises:
        MeasureError: the scheduler does not answer within `open_secs`, the certificates are not accepted, or Dask is not installed.
    """

    def __init__(
        self, address: str, tls: TlsFiles | None, open_secs: float, notice: Callable[[str], None] = lambda _: None
    ) -> None:
        import_dask()
        give_up = time.monotonic() + open_secs

        def left(most: float) -> float:
            return max(min(most, give_up - time.monotonic()), 0.1)

        waiting = threading.Timer(_WAITING_SECS, notice, [f"waiting for the scheduler at {address}"])
        waiting.daemon = True
        waiting.start()
        try:
            self.address, self._tls = place_of(address, tls, "job", min(open_secs, ANSWER_SECS))
            check_files(self._tls, ("job", "scheduler"))
            check_scheduler(self.address, self._tls, min(open_secs, ANSWER_SECS))
            with contextlib.ExitStack() as opened:
                opened.enter_context(_silenced())
                restrict()
                opened.callback(release)
                self.client = _connect(self.address, self._tls, left(open_secs))
                self._opened = opened.pop_all()
        finally:
            waiting.cancel()
        self._restoring = threading.Lock()

    def ask(self, call: Callable[[Any], T]) -> T:
        """Return `call(client)` for Dask's client.

        Raises:
            SchedulerLost: the connection is lost, or there is no answer.
            MeasureError: any other error.
        """
        client = self.client
        if client.status != "running":
            raise self._lost("the connection is lost")
        try:
            return call(client)
        except RelaxTuneError:
            raise
        except _LOST as error:
            raise self._lost(f"{type(error).__name__}: {error}") from error
        except Exception as error:  # of many types, which Dask does not document
            reason = f"{type(error).__name__}: {error!s:.300}"
            if client.status != "running":
                raise self._lost(reason) from error
            raise MeasureError(f"expected an answer of the scheduler at {self.address}, got {reason}") from error

    def _lost(self, why: str) -> SchedulerLost:
        return SchedulerLost(f"the scheduler at {self.address} does not answer ({why})")

    def devices(self) -> list[LentDevice]:
        """Return all lent devices. Raises the errors of `ask`."""
        workers = self.ask(lambda c: c.sync(c.scheduler.identity, n_workers=-1, callback_timeout=CALL_SECS)["workers"])
        return lent_devices(workers)

    def processing(self) -> dict[str, list[str]]:
        """Return the hashed keys of the tasks on each worker. Raises the errors of `ask`."""
        return self.ask(lambda c: dict(c.sync(c.scheduler.processing, workers=None, callback_timeout=CALL_SECS)))

    def restore(self) -> str:
        """Reconnect, unless the connection works. Tasks sent over the former connection are lost.

        Returns:
            Why it failed; empty if the connection works now.
        """
        with self._restoring:
            former = self.client
            if former.status == "running":
                try:
                    self.devices()
                    return ""
                except MeasureError:
                    pass
            try:
                check_scheduler(self.address, self._tls, _RESTORE_SECS / 10)
                self.client = _connect(self.address, self._tls, _RESTORE_SECS)
            except MeasureError as error:
                return str(error)
        # In a thread, because closing a client whose scheduler is lost may take its whole time limit.
        threading.Thread(target=_close, args=(former,), daemon=True).start()
        return ""

    def close(self) -> None:
        """Disconnect from the scheduler."""
        _close(self.client)
        self._opened.close()


def _close(client: Any) -> None:
    """Close a client. If its scheduler is lost, this may raise any error, without consequences."""
    with contextlib.suppress(Exception):
        client.close(timeout=_CLOSE_SECS)


def _connect(address: str, tls: TlsFiles, open_secs: float) -> Any:
    distributed = importlib.import_module("distributed")
    security = importlib.import_module("relax_tune.tuner.measure.cluster.trust.security")
    own = security.FleetSecurity(tls)
    try:
        client = distributed.Client(address, timeout=open_secs, security=own, set_as_default=False)
        client.loop.add_callback(security.keep_fresh, own)
        return client
    except _LOST as error:
        raise FleetUnavailable(
            f"expected a Dask scheduler at {address} within {open_secs:g} s, got none ({error}); start one, or check "
            "address and certificates"
        ) from error


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Drop the log messages of Dask's client and of its connections, which print a traceback for each lost connection."""

    def drop(_: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(f"distributed.{module}") for module in _CONNECTION_MODULES]
    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


def raise_worker_error(text: Any) -> None:
    """Raise a MeasureError if the answer of a worker is an error message."""
    if isinstance(text, str) and text.startswith('{"error":') and has_shape(answer := json.loads(text), {"error": str}):
        raise MeasureError(answer["error"])


def device_info_of(text: Any) -> DeviceInfo:
    """Decode the answer of `task.describe_device`. Raises MeasureError for any other text."""
    raise_worker_error(text)
    try:
        return decode_device(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise MeasureError(
            f"expected the description of a device from a worker, got {type(error).__name__}: {error} in {text!r:.120}; "
            "the two sides must run the same version of relax-tune"
        ) from None


def import_dask() -> tuple[Any, Any]:
    """Import Dask Distributed, and the module that runs in its workers. Raises MeasureError that names the extra."""
    try:
        return (
            importlib.import_module("distributed"),
            importlib.import_module("relax_tune.tuner.measure.cluster.task"),
        )
    except ImportError as error:
        raise MeasureError(
            f"measuring on workers needs Dask Distributed: {error}; pip install 'relax-tune[cluster]'"
        ) from error


@dataclass(frozen=True, slots=True)
class Outage:
    """Time limit and messages for a scheduler that does not answer. `since` is on the monotonic clock.

    Args:
        most_secs: time limit of one outage.
        tell: receives a sentence, and a key; sentences with the same key are shown once.
    """

    address: str
    most_secs: float
    tell: Callable[[str, str], None]

    def wait(self, since: float, why: str) -> None:
        """Tell that the job waits for the scheduler: at first, and every minute. Raises FleetUnavailable at the time limit."""
        secs = time.monotonic() - since
        moment = time.strftime("%H:%M:%S", time.localtime(time.time() - secs))
        self.tell(
            f"waiting for the scheduler at {self.address}, unavailable since {moment}, for at most {self.most_secs:g} s: {why}",
            f"outage {moment} {secs // _AGAIN_SECS}",
        )
        if secs > self.most_secs:
            raise FleetUnavailable(
                f"the scheduler at {self.address} does not answer since {moment} ({secs:.0f} s; waited for {self.most_secs:g} s); "
                "start it again, then run the same command again: measured results are stored"
            )

    def retry(self, connection: SchedulerConnection, call: Callable[[], T]) -> T:
        """Return `call()`; during an outage reconnect and repeat it. Raises FleetUnavailable at the time limit."""
        since = time.monotonic()
        while True:
            try:
                return call()
            except SchedulerLost as error:
                self.wait(since, str(error))
                if connection.restore():
                    time.sleep(_PAUSE_SECS)
