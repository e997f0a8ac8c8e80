"""Limits that not every OpenCL device reports: limits of GPUs, from their vendors' extensions, and float64."""

from __future__ import annotations

from typing import Any

# Work-items in lockstep: cl_nv_device_attribute_query, cl_amd_device_attribute_query.
WARPS = ("warp_size_nv", "wavefront_width_amd")
# What other drivers of GPUs tell, Intel's and Mesa's among them (OpenCL 3.0, section 4.2).
MULTIPLE = "preferred_work_group_size_multiple"
REGISTERS = "registers_per_block_nv"


def gpu_limits(device: Any, refusal: type[Exception]) -> dict[str, int]:
    """Return the limits that make rules treat a device as a GPU (`schedules/target.HardwareInfo`).

    They are empty if the device does not tell how many work-items run in lockstep.
    refusal: exception of a query that the device does not support
    """
    warp = max(_reported(device, name, refusal) for name in WARPS) or _reported(device, MULTIPLE, refusal)
    if warp <= 1:
        return {}
    registers = _reported(device, REGISTERS, refusal)
    return {
        "warp": warp,
        "vector_bits": 128,
        "max_vector_lanes": 4,
        "local_bytes_per_sm": int(device.local_mem_size),
        **({"registers_per_sm": registers} if registers else {}),
    }


def float64_limits(device: Any, refusal: type[Exception]) -> dict[str, int]:
    """Return the limit `doubles` = 0 of a device without float64; OpenCL 1.1 may refuse the question (cl_khr_fp64)."""
    return {} if _reported(device, "double_fp_config", refusal) else {"doubles": 0}


def pci_unit(device: Any, refusal: type[Exception]) -> str:
    """Return `pci:` and the bus id of a GPU as CUDA writes it; empty if its driver does not tell (cl_khr_pci_bus_info)."""
    try:
        if hasattr(device, "pci_bus_id_nv"):
            slot = int(device.pci_slot_id_nv)  # device number and function, as PCI packs them
            place = _reported(device, "pci_domain_id_nv", refusal), int(device.pci_bus_id_nv), slot >> 3, slot & 7
        else:
            bus = device.pci_bus_info_khr
            place = bus.pci_domain, bus.pci_bus, bus.pci_device, bus.pci_function
    except (AttributeError, refusal):
        return ""
    return "pci:{:04x}:{:02x}:{:02x}.{:x}".format(*place)


def _reported(device: Any, name: str, refusal: type[Exception]) -> int:
    """Return a numeric property, 0 if the device or the package has none of that name."""
    try:
        return int(getattr(device, name))
    except (AttributeError, refusal):
        return 0
