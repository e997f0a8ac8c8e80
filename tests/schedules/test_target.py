"""Hardware properties read from a device's limits."""

from __future__ import annotations

import pytest

from relax_tune.schedules.target import HardwareInfo


def test_lanes_are_capped_by_max_vector_lanes() -> None:
    limits = {"vector_bits": 512, "max_vector_lanes": 8, "workers": 4, "registers": 32, "l1_bytes": 1, "l2_bytes": 2}
    machine = HardwareInfo.from_limits("opencl", limits)
    assert (machine.lanes, machine.workers, machine.registers, machine.has_grid) == (8, 4, 32, True)
    assert (machine.l1_bytes, machine.l2_bytes) == (1, 2)
    assert HardwareInfo.from_limits("c", {**limits, "max_vector_lanes": 16}).lanes == 16


def test_hardware_info_without_limits_is_modest() -> None:
    machine = HardwareInfo.from_limits("c", {})
    assert (machine.language, machine.lanes, machine.workers, machine.has_grid) == ("c", 8, 1, False)


def test_named_opencl_devices_are_opencl() -> None:
    assert HardwareInfo.from_limits("opencl:oclgrind", {}).language == "opencl"


# From NVIDIA's data sheets and the CUDA C++ Programming Guide: A100 and H100 (SXM).
SM_80 = {
    "workers": 108, "warp": 32, "max_group_size": 1024, "max_local_bytes": 163 << 10, "local_bytes_per_sm": 164 << 10,
    "registers_per_sm": 64 << 10, "threads_per_sm": 2048, "groups_per_sm": 32, "l2_bytes": 40 << 20, "vector_bits": 128,
}  # fmt: skip
SM_90 = SM_80 | {
    "workers": 132, "max_local_bytes": 227 << 10, "local_bytes_per_sm": 228 << 10, "l2_bytes": 50 << 20,
}  # fmt: skip


@pytest.mark.parametrize(("limits", "local"), [(SM_80, 163 << 10), (SM_90, 227 << 10)])
def test_a_device_with_warps_is_a_gpu(limits: dict[str, int], local: int) -> None:
    machine = HardwareInfo.from_limits("cuda", limits)
    assert machine.is_gpu and machine.has_grid and machine.language == "cuda"
    assert (machine.lanes, machine.warp, machine.group_size, machine.local_bytes) == (4, 32, 1024, local)
    assert (machine.registers, machine.sm_registers, machine.sm_max_threads, machine.sm_max_groups) == (
        255,
        64 << 10,
        2048,
        32,
    )
    same = HardwareInfo.from_limits("opencl", limits)
    assert same.is_gpu and same.language == "opencl"


def test_hardware_info_of_processor_is_no_gpu() -> None:
    assert not HardwareInfo.from_limits("opencl", {"max_group_size": 4096}).is_gpu
    assert not HardwareInfo.from_limits("c", SM_80).is_gpu
