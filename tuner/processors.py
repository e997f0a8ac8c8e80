"""Processors that artifacts can be built for without having one: minimum facts of an architecture, and compiler flags.

A device `c:NAME` of this table is a description. The schedule rules choose its kernels from these facts; nothing is timed for it.
Records for a real processor come from a worker (`tune --scheduler ... --target c:PART`), with the facts of that machine.

Tests: `tests/tuner/export/test_cross.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from relax_tune.runtime.device.base import DeviceInfo


def _limits(vector_bits: int, registers: int, workers: int, l1: int, l2: int, l3: int) -> Mapping[str, int]:
    """Return the limits of a device; caches in KiB."""
    return {
        "workers": workers, "vector_bits": vector_bits, "max_vector_lanes": vector_bits // 32, "registers": registers,
        "l1_bytes": l1 << 10, "l2_bytes": l2 << 10, "l3_bytes": l3 << 10, "max_local_bytes": 0, "max_group_size": 1,
    }  # fmt: skip


PROCESSORS: Mapping[str, tuple[str, Mapping[str, int]]] = MappingProxyType({
    "aarch64": ("-march=armv8-a", _limits(128, 32, 4, 64, 512, 4096)),
    "aarch64-sve256": ("-march=armv8.2-a+sve -msve-vector-bits=256", _limits(256, 32, 4, 64, 1024, 8192)),
    "aarch64-sve512": ("-march=armv8.2-a+sve -msve-vector-bits=512", _limits(512, 32, 4, 64, 1024, 8192)),
    "wasm32": ("-msimd128", _limits(128, 16, 1, 32, 512, 4096)),
    "x86-64-v3": ("-march=x86-64-v3", _limits(256, 16, 4, 32, 512, 8192)),
    "x86-64-v4": ("-march=x86-64-v4", _limits(512, 32, 4, 32, 1024, 16384)),
})  # fmt: skip
"""Compiler flags and limits, by name."""


def described_device(spec: str) -> DeviceInfo | None:
    """Return the device `c:NAME` of a processor in the table; None for other names."""
    kind, _, name = spec.partition(":")
    if kind != "c" or name not in PROCESSORS:
        return None
    flags, limits = PROCESSORS[name]
    fingerprint = {"compiler": "any", "cpu": name, "flags": flags, "kind": "c", "threads": str(limits["workers"])}
    return DeviceInfo("c", name, tuple(sorted(fingerprint.items())), tuple(sorted(limits.items())), libraries=())


def machine_flags(fingerprint: Mapping[str, str]) -> str:
    """Return the compiler flags for the processor of a fingerprint; `-march=native` unless it is in the table."""
    named = PROCESSORS.get(fingerprint.get("cpu", ""))
    return "-march=native" if named is None else named[0]
