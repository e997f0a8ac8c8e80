"""Hardware properties for rules, constraints and cost features.

They come from the device's limits and the table `runtime/device/quirks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """A device as schedules see it; sizes in bytes.

    A device that runs the work-items of a group `warp` at a time is a GPU, whose workers are its multiprocessors (SM).

    Attributes:
        lanes: f32 elements of the widest vector that works.
        registers: Vector registers of a core; on a GPU, registers that a work-item may have.
        local_bytes: Shared memory that a work-group may have.
        element_bytes: Bytes of the smallest element in shared memory.
        launch_ns: Cost of starting work on several workers, from the call to the end of an empty kernel.
        group_size: Work-items that a work-group may have.
        group_axes: The same along each axis; empty if one axis may have them all.
        sm_max_threads, sm_registers, sm_shared_bytes, sm_max_groups: Capacity of one multiprocessor.
        capability: Compute capability of an NVIDIA GPU, 80 for 8.0; 0 for others.
        has_doubles: Kernels may compute in float64.
        has_serial_launches: Work of one worker starts without waking others.
        has_byte_dots: One instruction sums four products of bytes in every lane (VNNI).
        has_bf16_dots: One instruction sums two products of bf16 in every lane (AVX512-BF16).
        has_tile_products: a unit multiplies tiles of bf16 and of bytes (AMX).
        has_wgmma: The device has the tensor-core product of four warps, `wgmma` (compute capability 9.0 only).
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
    has_doubles: bool = True
    has_serial_launches: bool = True
    has_byte_dots: bool = False
    has_bf16_dots: bool = False
    has_tile_products: bool = False
    has_wgmma: bool = False
    element_bytes: int = 1
    group_axes: tuple[int, ...] = ()

    @property
    def has_grid(self) -> bool:
        """Parallel work is a grid of work-groups (OpenCL, CUDA, WebGPU) rather than a parallel loop (C)."""
        return self.language != "c"

    @property
    def orders(self) -> tuple[Literal["parallel", "serial"], ...]:
        """Return how work may be ordered: spread over the workers, and all of it by one."""
        return ("parallel", "serial") if self.has_serial_launches else ("parallel",)

    @property
    def has_shuffles(self) -> bool:
        """The work-items of a warp can exchange registers (warp shuffles)."""
        return self.language == "cuda" and self.is_gpu

    @property
    def reserved_bytes(self) -> int:
        """Shared memory that the driver reserves for each work-group (1 KiB on NVIDIA)."""
        return self.sm_shared_bytes - self.local_bytes if self.language == "cuda" and self.is_gpu else 0

    @property
    def has_cp_async(self) -> bool:
        """Copies from global to shared memory can be asynchronous (`cp.async`, PTX ISA, sm_80 and later)."""
        return self.capability >= 80

    @property
    def is_gpu(self) -> bool:
        """Work-items run in lockstep warps, so that a work-group needs many."""
        return self.warp > 1

    @staticmethod
    def from_limits(kind: str, limits: Mapping[str, int]) -> HardwareInfo:
        """Build it from `DeviceInfo.limits`, with modest defaults; `max_vector_lanes` caps the vector width."""
        language = next((x for x in ("opencl", "cuda", "webgpu") if kind.startswith(x)), "c")
        warp = limits.get("warp", 1)
        is_gpu = language != "c" and warp > 1
        # Lanes of 32 bits, the usual element; other types scale from there.
        lanes = min(limits.get("vector_bits", 128 if is_gpu else 256) // 32, limits.get("max_vector_lanes", 16))
        local_bytes = limits.get("max_local_bytes", 32 << 10)
        threads = limits.get("threads_per_sm", 1024)
        axes = tuple(limits[f"max_group_{axis}"] for axis in "xyz" if f"max_group_{axis}" in limits)
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
            has_doubles=bool(limits.get("doubles", 1)),
            has_serial_launches=bool(limits.get("serial_launches", language == "c")),
            has_byte_dots=bool(limits.get("byte_dots", 0)),
            has_bf16_dots=bool(limits.get("bf16_dots", 0)),
            has_tile_products=bool(limits.get("tile_products", 0)),
            has_wgmma=bool(limits.get("wgmma", 0)),
            # The WGSL that is generated stores every element in 32 bits.
            element_bytes=4 if language == "webgpu" else 1,
            group_axes=axes if is_gpu else (),
        )
