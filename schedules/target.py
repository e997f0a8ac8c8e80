"""What rules and constraints need to know of a device: numbers it tells, and those of the table `runtime/device/quirks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """A device as schedules see it.

    lanes: f32 elements of the widest vector that works; sizes in bytes; local_bytes: memory a work-group shares; launch_ns: what
    it costs to start work on several workers, from the call to the end of nothing.

    A device that runs the work-items of a group `warp` at a time is a GPU: its workers are multiprocessors, `registers` those a
    work-item may have. group_size: work-items a group may have; of one multiprocessor: core_threads, core_registers, core_bytes
    (shared by its groups) and core_groups say how many groups it holds at once. capability: NVIDIA's number of its generation, as 80 for
    8.0; 0 for others. has_wgmma: four warps multiply tiles together; no device is said to until kernels that do have run on one.
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
    warp: int = 1
    group_size: int = 1
    sm_max_threads: int = 1
    sm_registers: int = 1
    sm_shared_bytes: int = 1
    sm_max_groups: int = 1
    capability: int = 0
    has_wgmma: bool = False

    @property
    def has_grid(self) -> bool:
        """Parallel work is a grid of work-groups (OpenCL, CUDA) rather than a parallel loop (C)."""
        return self.language != "c"

    @property
    def has_shuffles(self) -> bool:
        """The items of a warp can exchange registers."""
        return self.language == "cuda" and self.is_gpu

    @property
    def reserved_bytes(self) -> int:
        """What a group takes of its multiprocessor's shared memory beside what its kernel asks for: on NVIDIA's, what no group can have
        of all."""
        return self.sm_shared_bytes - self.local_bytes if self.language == "cuda" and self.is_gpu else 0

    @property
    def has_cp_async(self) -> bool:
        """Copies into shared memory go past registers, and nobody waits for them before he looks (`cp.async`)."""
        return self.capability >= 80

    @property
    def is_gpu(self) -> bool:
        """Work-items run side by side, so that a group wants many."""
        return self.warp > 1

    @staticmethod
    def from_limits(kind: str, limits: Mapping[str, int]) -> HardwareInfo:
        """From `DeviceInfo.limits`. The vector width is capped by `max_vector_lanes`; what a device does not say is modest."""
        language = next((x for x in ("opencl", "cuda") if kind.startswith(x)), "c")
        warp = limits.get("warp", 1)
        is_gpu = language != "c" and warp > 1
        lanes = min(limits.get("vector_bits", 128 if is_gpu else 256) // 32, limits.get("max_vector_lanes", 16))
        local_bytes = limits.get("max_local_bytes", 32 << 10)
        threads = limits.get("threads_per_sm", 1024)
        return HardwareInfo(
            language=language,
            workers=limits.get("workers", 1),
            lanes=lanes,
            registers=limits.get("registers", 255 if is_gpu else 16),
            l1_bytes=limits.get("l1_bytes", 32 << 10),
            l2_bytes=limits.get("l2_bytes", 512 << 10),
            l3_bytes=limits.get("l3_bytes", 8 << 20),
            local_bytes=local_bytes,
            launch_ns=limits.get("launch_ns", 1_000),
            warp=warp if is_gpu else 1,
            group_size=limits.get("max_group_size", 256) if is_gpu else 1,
            sm_max_threads=threads if is_gpu else 1,
            sm_registers=limits.get("registers_per_sm", 64 << 10) if is_gpu else 1,
            sm_shared_bytes=limits.get("local_bytes_per_sm", local_bytes) if is_gpu else 1,
            sm_max_groups=limits.get("groups_per_sm", 16) if is_gpu else 1,
            capability=10 * limits.get("compute_major", 0) + limits.get("compute_minor", 0),
        )
