"""The identity of a device: devices of equal identity share the records of one target.

Tests: `tests/tuner/measure/cluster/test_fleet.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from relax_tune.runtime.device.base import DeviceInfo

PROTOCOL = 3
"""Version of the messages between jobs and workers. Increment it with each change of their form."""


def protocol_misfit(protocol: object) -> str:
    """Return how the protocol of a worker or job differs from ours; empty if it does not."""
    if protocol == PROTOCOL:
        return ""
    return (
        f"another version of relax-tune: expected protocol {PROTOCOL}, got {protocol!s:.20}; install the "
        "same version on both sides"
    )


def _facts(info: DeviceInfo) -> dict[str, str]:
    libraries = {f"library {name}": text for name, text in info.libraries or ()}
    return {"kind": info.kind, "name": info.name, **dict(info.fingerprint), **libraries}


def identity_of(info: DeviceInfo) -> str:
    """Return 32 hex digits: a hash of kind, name, fingerprint and libraries."""
    text = json.dumps([info.kind, info.name, sorted(info.fingerprint), sorted(info.libraries or ())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(expected: DeviceInfo, actual: DeviceInfo) -> str:
    """List the facts in which two devices differ, with both values; empty if their identities are equal."""
    if identity_of(expected) == identity_of(actual):
        return ""
    left, right = _facts(expected), _facts(actual)
    names = [n for n in sorted(left | right) if left.get(n) != right.get(n)]
    return "; ".join(f"{n}: expected {left.get(n, 'none')!s:.80}, got {right.get(n, 'none')!s:.80}" for n in names)


def requirement_text(device: DeviceInfo, reference: Mapping[str, float]) -> str:
    """Return the device and the reference times that a batch is for, as JSON text."""
    return json.dumps({"protocol": PROTOCOL, "device": asdict(device), "reference": dict(reference)})
