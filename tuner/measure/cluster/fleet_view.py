"""A job's view of a fleet: the listings of the scheduler, asked for at most once a second, and the choice of workers by them.

Tests: `tests/tuner/measure/cluster/test_flights.py`, `tests/tuner/measure/cluster/test_fleet.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from relax_tune.tuner.measure.cluster.fleet import LentDevice, asked_for, silence_of
from relax_tune.tuner.measure.reference import Reference

POLL_SECS = 1.0
# Seconds for which a worker gets no batch after it rejected one; meanwhile the scheduler learns of its new state.
_REFUSED_SECS = 30.0


def hidden_key(key: str) -> str:
    """Return a hash of a task's key. Other jobs can count the task by it, but not request its result, which needs the key."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


class Listings(Protocol):
    """The part of `client.SchedulerConnection` that lists a fleet."""

    def devices(self) -> list[LentDevice]: ...

    def processing(self) -> dict[str, list[str]]: ...


class FleetView:
    """The workers of a fleet that lend a device of one class, as a job sees them.

    Args:
        label, part: class of the device, and a part of its name; see `fleet.asked_for`.
        tell: receives a sentence when a worker is excluded; equal sentences are shown once.
    """

    def __init__(self, connection: Listings, label: str, part: str, tell: Callable[[str], None]) -> None:
        self._connection, self._tell = connection, tell
        self._label, self._part = label, part
        self._listed: tuple[float, list[LentDevice]] = (0.0, [])
        self._judged: tuple[list[LentDevice] | None, Reference, list[LentDevice]] = (None, {}, [])
        self._foreign: tuple[float, dict[str, int]] = (0.0, {})
        self._landed: set[str] = set()
        self._refused: dict[str, float] = {}

    def devices(self) -> list[LentDevice]:
        """Return all lent devices."""
        asked, devices = self._listed
        if not devices or time.monotonic() - asked >= POLL_SECS:
            devices = self._connection.devices()
            self._listed = time.monotonic(), devices
        return devices

    def forget(self) -> None:
        """Discard the listed devices: the scheduler was lost."""
        self._listed = (0.0, [])

    def asked(self) -> list[LentDevice]:
        """Return the devices of the class."""
        return asked_for(self.devices(), self._label, self._part)

    def fitting(self, identity: str, reference: Reference) -> list[LentDevice]:
        """Return the units that can measure for a target. Each reason to exclude a unit is reported once."""
        devices = self.devices()
        if self._judged[0] is devices and self._judged[1] is reference:
            return self._judged[2]
        fitting = []
        for device in asked_for(devices, self._label, self._part):
            if why := device.misfit(identity, reference):
                self._tell(f"worker {device.worker} is excluded: {why}")
            else:
                fitting.append(device)
        self._judged = devices, reference, fitting
        return fitting

    def split_silent(self, fitting: Sequence[LentDevice]) -> tuple[list[LentDevice], dict[str, float]]:
        """Split units by their heartbeats: those heard of in time, and the seconds of silence of the others by address."""
        limit = silence_of(len({device.address for device in self.devices()}))
        heard = [device for device in fitting if device.silent_secs < limit]
        return heard, {device.address: device.silent_secs for device in fitting if device.silent_secs >= limit}

    def free(self, heard: Iterable[LentDevice], busy: Collection[str]) -> list[LentDevice]:
        """Return the units that may get a batch: not busy with one of this job, and without a recent refusal."""
        now = time.monotonic()
        return [d for d in heard if d.address not in busy and self._refused.get(d.address, 0.0) < now]

    def refuse(self, address: str) -> None:
        """Send no batch to a worker for a while, since it refused one."""
        self._refused[address] = time.monotonic() + _REFUSED_SECS

    def land(self, key: str) -> None:
        """Note that a task of this job has ended. Listings of the scheduler may still contain it."""
        self._landed.add(key)

    def foreign(self, flying: Iterable[str]) -> Mapping[str, int]:
        """Count the batches of other jobs by worker.

        Args:
            flying: keys of the tasks of this job that run.
        """
        asked, counts = self._foreign
        if time.monotonic() - asked >= POLL_SECS:
            processing = self._connection.processing()
            ours = {hidden_key(key) for key in (*flying, *self._landed)}
            counts = {address: sum(key not in ours for key in keys) for address, keys in processing.items()}
            self._landed.clear()
            self._foreign = time.monotonic(), counts
        return counts
