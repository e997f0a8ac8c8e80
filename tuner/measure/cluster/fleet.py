"""The lent devices of a fleet, as its scheduler lists them, and the selection of a device."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_tune.database.reference import kernels_of
from relax_tune.errors import MeasureError
from relax_tune.json_shapes import has_shape
from relax_tune.tuner.measure.cluster.identity import PROTOCOL, protocol_misfit
from relax_tune.tuner.measure.reference import Reference, disagreement

METRIC = "relax_tune"
"""Name of the worker metric that lists the lent devices."""
SILENT_SECS = 20.0
"""Least seconds without a heartbeat after which a worker gets no batch, and its batch is sent to another; see `silence_of`."""
_SHAPE = {
    "worker": str,
    "host": str,
    "unit": str,
    "identity": str,
    "about": str,
    "reference": dict,
    "tolerance": float,
    "quarantine": str,
}


@dataclass(frozen=True, slots=True)
class LentDevice:
    """A device that a worker lends.

    Attributes:
        address: address of the worker's process.
        about: name and platform of the device.
        facts: its fingerprint and libraries as `NAME=VALUE`, separated by ` | `. A job's `CLASS:PART` is matched with `about` and `facts`.
        silent_secs: time since the last heartbeat of the worker.
        latest: reference times of the last check.
        measured, refused: numbers of batches since the worker's start.
    """

    address: str
    label: str
    worker: str
    host: str
    unit: str
    identity: str
    about: str
    reference: Reference
    tolerance: float
    quarantine: str
    silent_secs: float
    protocol: int = PROTOCOL
    latest: Reference = field(default_factory=dict)
    measured: int = 0
    refused: int = 0
    facts: str = ""

    def misfit(self, identity: str, reference: Reference) -> str:
        """Return why this device cannot measure for a target; empty if it can."""
        if self.quarantine:
            return f"quarantined: {self.quarantine}"
        if other := protocol_misfit(self.protocol):
            return other
        if self.identity != identity:
            return f"another device or other libraries ({self.about.strip(' |')})"
        return disagreement(reference, self.reference, self.tolerance)


def silence_of(workers: int) -> float:
    """Return the seconds without a heartbeat after which a worker counts as silent.

    Dask accepts 200 heartbeats a second from all workers together, so the interval grows with their number.

    Args:
        workers: number of all workers.
    """
    return max(SILENT_SECS, 3 * (workers / 200 + 1))


def lent_devices(workers: Mapping[str, Mapping[str, Any]]) -> list[LentDevice]:
    """Read the workers of Dask's `scheduler_info`, sorted by address and label. Other workers and malformed entries are skipped."""
    # Silence counts from the newest heartbeat: `last_seen` is by the scheduler's clock, from which ours may differ.
    newest = max((float(w.get("last_seen") or 0.0) for w in workers.values()), default=0.0)
    devices = []
    for address in sorted(workers):
        worker = workers[address]
        labels: Any = (worker.get("metrics") or {}).get(METRIC)
        for label, device in sorted(labels.items()) if has_shape(labels, {}) else ():
            if has_shape(device, _SHAPE) and _are_times(device["reference"]):
                values = {name: device[name] for name in _SHAPE}
                silent = newest - float(worker.get("last_seen") or 0.0)
                for name, default in (("protocol", 1), ("measured", 0), ("refused", 0)):
                    values[name] = number if type(number := device.get(name)) is int else default
                values["facts"] = facts if type(facts := device.get("facts")) is str else ""
                values["latest"] = latest if _are_times(latest := device.get("latest")) else {}
                devices.append(LentDevice(address=address, label=label, silent_secs=silent, **values))
    return devices


def _are_times(value: object) -> bool:
    return isinstance(value, dict) and all(type(name) is str and type(secs) is float for name, secs in value.items())


def asked_for(devices: Iterable[LentDevice], label: str, part: str) -> list[LentDevice]:
    """Return the devices of a class with the fact `part`; without any, those whose name, platform or a fact contains it, ignoring case."""
    of_class = [d for d in devices if d.label == label]
    exact = [d for d in of_class if part in d.facts.split(" | ")]  # so that threads=1 is not threads=16
    return exact or [d for d in of_class if part.lower() in f"{d.about} | {d.facts}".lower()]


def label_of(spec: str) -> str:
    """Return the class of a device: `cuda` for `cuda:3`."""
    return spec.partition(":")[0]


def default_name(specs: Sequence[str]) -> str:
    """Return the name of a worker that lends these devices: the host and the devices."""
    return f"{socket.gethostname()}/{'+'.join(specs)}"


def label_and_part(target: str) -> tuple[str, str]:
    """Split `CLASS:PART`. Raises MeasureError for the number of a GPU, which is meaningful only on its machine."""
    label, _, part = target.partition(":")
    if re.fullmatch(r"\d{1,3}", part, re.ASCII):
        raise MeasureError(
            f"expected a class of device such as {label}, or {label}:PART of a device's name, for the workers of a scheduler, "
            f"got {target!r}: a number means a device of one machine; leave it out"
        )
    return label, part


def listing(facts: Mapping[str, str]) -> str:
    """Join facts by worker into one line, at most ten of them."""
    shown = [f"{worker}: {what}" for worker, what in sorted(facts.items())]
    return "; ".join(shown[:10]) + (f"; and {len(shown) - 10} more" if len(shown) > 10 else "")


def is_usable(device: LentDevice) -> bool:
    """Return True for a device that a job may choose to measure on."""
    return not device.quarantine and not protocol_misfit(device.protocol)


def lent_text(devices: Iterable[LentDevice]) -> str:
    """List the lent devices by worker, for an error message."""
    descriptions = {
        d.worker: f"{d.label} ({d.about.strip(' |')}){' quarantined' * bool(d.quarantine)}"
        f"{' of another version' * bool(protocol_misfit(d.protocol))}"
        for d in devices
    }
    return listing(descriptions) if descriptions else "no workers"


def usual_identity(devices: Sequence[LentDevice]) -> str:
    """Return the most common identity; the smallest of several."""
    counts = Counter(device.identity for device in devices)
    return min(counts, key=lambda identity: (-counts[identity], identity))


def usual_reference(devices: Sequence[LentDevice]) -> Reference:
    """Return the reference times with which most devices agree; the fastest of several."""

    def rank(device: LentDevice) -> tuple[int, float, str]:
        agreeing = sum(not disagreement(device.reference, other.reference, other.tolerance) for other in devices)
        return -agreeing, sum(device.reference[name] for name in kernels_of(device.reference)), device.address

    return min(devices, key=rank).reference
