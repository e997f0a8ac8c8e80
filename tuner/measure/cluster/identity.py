"""The identity of a device: equal identities may share the records of one target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from relax_tune.runtime.device.base import DeviceInfo

PROTOCOL = 3
"""The version of batches and answers between jobs and workers. It grows with each change of these."""


def protocol_misfit(found: object) -> str:
    """Say how a worker's or a job's protocol differs from ours; empty if it does not."""
    if found == PROTOCOL:
        return ""
    return (
        f"another version of relax-tune: wanted protocol {PROTOCOL} found {found!s:.20}; install the "
        "same version on both sides"
    )


def _facts(info: DeviceInfo) -> dict[str, str]:
    libraries = {f"library {name}": text for name, text in info.libraries or ()}
    return {"kind": info.kind, "name": info.name, **dict(info.fingerprint), **libraries}


def identity_of(info: DeviceInfo) -> str:
    """Return 32 hex digits: a hash of kind, name, fingerprint and libraries."""
    text = json.dumps([info.kind, info.name, sorted(info.fingerprint), sorted(info.libraries or ())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(wanted: DeviceInfo, found: DeviceInfo) -> str:
    """Name the facts in which two devices differ, with both values; empty if they are of one identity."""
    if identity_of(wanted) == identity_of(found):
        return ""
    ours, theirs = _facts(wanted), _facts(found)
    names = [n for n in sorted(ours | theirs) if ours.get(n) != theirs.get(n)]
    return "; ".join(f"{n}: wanted {ours.get(n, 'none')!s:.80}, found {theirs.get(n, 'none')!s:.80}" for n in names)


def wanted_text(device: DeviceInfo, reference: Mapping[str, float]) -> str:
    """Return the device and the reference times that a batch is for, as JSON text."""
    return json.dumps({"protocol": PROTOCOL, "device": asdict(device), "reference": dict(reference)})
