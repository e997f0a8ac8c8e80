"""Limits of OpenCL GPUs, from their vendors' extensions."""

from __future__ import annotations

from typing import Any

# How many work-items run together: cl_nv_device_attribute_query, cl_amd_device_attribute_query.
WARPS = ("warp_size_nv", "wavefront_width_amd")
REGISTERS = "registers_per_block_nv"


def gpu_limits(device: Any, refusal: type[Exception]) -> dict[str, int]:
    """Return the limits by which rules take a device for a GPU (`schedules/target.Machine`); none where it does not tell how many work-items
    run together. refusal: what asking for something it does not have raises."""
    warp = max(_told(device, name, refusal) for name in WARPS)
    if warp <= 1:
        return {}
    registers = _told(device, REGISTERS, refusal)
    return {
        "warp": warp,
        "vector_bits": 128,
        "max_vector_lanes": 4,
        "local_bytes_per_sm": int(device.local_mem_size),
        **({"registers_per_sm": registers} if registers else {}),
    }


def _told(device: Any, name: str, refusal: type[Exception]) -> int:
    """Return a number, 0 where the device or the package has none of that name."""
    try:
        return int(getattr(device, name))
    except (AttributeError, refusal):
        return 0
