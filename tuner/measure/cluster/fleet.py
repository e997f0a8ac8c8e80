"""The lent devices of a fleet, as its scheduler lists them, and the choice among them."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_tune.errors import MeasureError
from relax_tune.json_shapes import has_shape
from relax_tune.tuner.measure.cluster.identity import PROTOCOL, protocol_misfit
from relax_tune.tuner.measure.cluster.reference import Reference, disagreement

METRIC = "relax_tune"
"""Name under which a worker tells the scheduler what it lends."""
SILENT_SECS = 20.0
"""A worker that has not been heard of for so long gets no batch, and its batch goes elsewhere; see `silence_of`."""
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

    address: of the worker's process. about: name and platform of the device, in which a job's part of a name is looked for.
    silent_secs: time since the worker was heard of.
    latest: reference times of the last check; measured, refused: numbers of batches since the worker's start
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

    def misfit(self, identity: str, reference: Reference) -> str:
        """Say why this device cannot measure for a target; empty if it can."""
        if self.quarantine:
            return f"quarantined: {self.quarantine}"
        if other := protocol_misfit(self.protocol):
            return other
        if self.identity != identity:
            return f"another device or other libraries ({self.about.strip(' |')})"
        return disagreement(reference, self.reference, self.tolerance)


def silence_of(workers: int) -> float:
    """Return the seconds after which a worker not heard of counts as silent, by the number of all workers.

    Dask takes 200 words a second from all workers together: the more there are, the less often each is heard of.
    """
    return max(SILENT_SECS, 3 * (workers / 200 + 1))


def lent_devices(workers: Mapping[str, Mapping[str, Any]]) -> list[LentDevice]:
    """Read the workers of Dask's `scheduler_info`, by address and label. What is not ours or malformed is left out."""
    newest = max((float(w.get("last_seen") or 0.0) for w in workers.values()), default=0.0)
    found = []
    for address in sorted(workers):
        worker = workers[address]
        told: Any = (worker.get("metrics") or {}).get(METRIC)
        for label, device in sorted(told.items()) if has_shape(told, {}) else ():
            if has_shape(device, _SHAPE) and _are_times(device["reference"]):
                values = {name: device[name] for name in _SHAPE}
                silent = newest - float(worker.get("last_seen") or 0.0)
                for name, unsaid in (("protocol", 1), ("measured", 0), ("refused", 0)):
                    values[name] = number if type(number := device.get(name)) is int else unsaid
                values["latest"] = latest if _are_times(latest := device.get("latest")) else {}
                found.append(LentDevice(address=address, label=label, silent_secs=silent, **values))
    return found


def _are_times(told: object) -> bool:
    return isinstance(told, dict) and all(type(name) is str and type(secs) is float for name, secs in told.items())


def asked_for(devices: Iterable[LentDevice], label: str, part: str) -> list[LentDevice]:
    """Return the devices of a class whose name or platform has `part` in it, in any case."""
    return [d for d in devices if d.label == label and part.lower() in d.about.lower()]


def label_of(spec: str) -> str:
    """Return the class of a device, by which jobs ask for it: `cuda` of `cuda:3`."""
    return spec.partition(":")[0]


def default_name(specs: Sequence[str]) -> str:
    """Return the name of a worker that lends these devices: the host and the devices."""
    return f"{socket.gethostname()}/{'+'.join(specs)}"


def label_and_part(target: str) -> tuple[str, str]:
    """Split `CLASS:PART`. Raises MeasureError for the number of a GPU, which only its own machine knows."""
    label, _, part = target.partition(":")
    if re.fullmatch(r"\d{1,3}", part, re.ASCII):
        raise MeasureError(
            f"wanted a class of device such as {label}, or {label}:PART of a device's name, for the workers of a scheduler, "
            f"found {target!r}: a number means a device of one machine; leave it out"
        )
    return label, part


def listing(found: Mapping[str, str]) -> str:
    """Join facts by worker into one line, at most ten of them."""
    shown = [f"{worker}: {what}" for worker, what in sorted(found.items())]
    return "; ".join(shown[:10]) + (f"; and {len(shown) - 10} more" if len(shown) > 10 else "")


def usual_identity(devices: Sequence[LentDevice]) -> str:
    """Return the identity of the most devices; of equally many, the smallest."""
    counts = Counter(device.identity for device in devices)
    return min(counts, key=lambda identity: (-counts[identity], identity))


def usual_reference(devices: Sequence[LentDevice]) -> Reference:
    """Return the reference times with which most devices agree; of equally many, the fastest."""

    def rank(device: LentDevice) -> tuple[int, float, str]:
        agreeing = sum(not disagreement(device.reference, other.reference, other.tolerance) for other in devices)
        return -agreeing, sum(device.reference.values()), device.address

    return min(devices, key=rank).reference
