"""What rules and constraints need to know of a device: numbers it tells, and those of the table `runtime/device/quirks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """A device as schedules see it.

    lanes: f32 elements of the widest vector that works; sizes in bytes; local_bytes: memory a work-group shares; launch_ns: what
    it costs to start work on several workers, from the call to the end of nothing.
    """

    language: str
    workers: int
    lanes: int
    registers: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    local_bytes: int = 32 << 10
    launch_ns: int = 1_000

    @property
    def groups(self) -> bool:
        """Parallel work is a grid of work-groups (OpenCL, CUDA) rather than a parallel loop (C)."""
        return self.language != "c"

    @staticmethod
    def from_limits(kind: str, limits: Mapping[str, int]) -> Machine:
        """From `DeviceInfo.limits`. The vector width is capped by `max_vector_lanes`; what a device does not say is modest."""
        lanes = min(limits.get("vector_bits", 256) // 32, limits.get("max_vector_lanes", 16))
        return Machine(
            language=next((x for x in ("opencl", "cuda") if kind.startswith(x)), "c"),
            workers=limits.get("workers", 1),
            lanes=lanes,
            registers=limits.get("registers", 16),
            l1_bytes=limits.get("l1_bytes", 32 << 10),
            l2_bytes=limits.get("l2_bytes", 512 << 10),
            l3_bytes=limits.get("l3_bytes", 8 << 20),
            local_bytes=limits.get("max_local_bytes", 32 << 10),
            launch_ns=limits.get("launch_ns", 1_000),
        )
