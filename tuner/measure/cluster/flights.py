"""Groups of requests on their way to a worker and back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.measure.ledger import Group

# Seconds after which a missing worker counts as lost. A worker that reconnects is missing for a moment.
_GONE_SECS = 3.0


@dataclass(slots=True)
class SentFlight:
    """A group that one worker measures. Times are seconds of the monotonic clock.

    Attributes:
        future: Dask's future of the task.
        deadline: time at which the group is sent to another worker, too.
        superseded: the group was sent to another worker, or counted as lost; only an answer still matters.
        gone_since: time since which the worker is missing, 0 while it is connected.
    """

    group: Group
    future: Any
    device: LentDevice
    deadline: float
    superseded: bool = False
    gone_since: float = 0.0

    def is_late(self, silent: Collection[str], now: float) -> bool:
        """Return True if the group is to be sent to another worker: over its deadline, or its worker is silent.

        Args:
            silent: addresses of silent workers.
        """
        if self.superseded or self.group.batch.future.done():
            return False
        return now > self.deadline or self.device.address in silent

    def is_gone(self, connected: Collection[str], now: float) -> bool:
        """Note whether the worker is connected. Returns True if it has been missing for too long."""
        if self.device.address in connected:
            self.gone_since = 0.0
            return False
        self.gone_since = self.gone_since or now
        return now - self.gone_since > _GONE_SECS

    def release(self) -> None:
        """Release Dask's future. A closed client may raise here; the error has no consequences."""
        with contextlib.suppress(Exception):
            self.future.release()
