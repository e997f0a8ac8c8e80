"""OpenCL devices that tell how many work-items run together are GPUs to the rules; others are not."""

from __future__ import annotations

from typing import Any

import pytest

from relax_tune.runtime.device.opencl_gpus import MULTIPLE, float64_limits, gpu_limits
from relax_tune.schedules.target import HardwareInfo


class Refused(Exception):
    """What pyopencl raises for a question that a device does not know."""


class Told:
    """A device that answers what it is given, knows no other of the names, and has no attribute beside them."""

    local_mem_size = 48 << 10

    def __init__(self, **answers: int) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        if name in self.answers:
            return self.answers[name]
        raise AttributeError(name) if name == "wavefront_width_amd" else Refused(name)


@pytest.mark.parametrize(
    ("answers", "registers"),
    [
        ({"warp_size_nv": 32, "registers_per_block_nv": 1 << 16, MULTIPLE: 64}, 1 << 16),
        ({"wavefront_width_amd": 64, MULTIPLE: 32}, None),
        ({MULTIPLE: 16}, None),
    ],
)
def test_vendors_tell_of_warps(answers: dict[str, int], registers: int | None) -> None:
    found = gpu_limits(Told(**answers), Refused)
    assert found["warp"] == next(iter(answers.values()))
    assert found.get("registers_per_sm") == registers and found["local_bytes_per_sm"] == 48 << 10
    machine = HardwareInfo.from_limits(
        "opencl", {"workers": 4, "max_group_size": 1024, "max_local_bytes": 48 << 10, **found}
    )
    assert machine.is_gpu and machine.lanes == 4 and machine.registers == 255


@pytest.mark.parametrize(
    ("answers", "has_doubles"), [({"double_fp_config": 63}, True), ({"double_fp_config": 0}, False), ({}, False)]
)
def test_float64_limits_tell_rules_of_doubles(answers: dict[str, int], has_doubles: bool) -> None:
    assert HardwareInfo.from_limits("opencl", float64_limits(Told(**answers), Refused)).has_doubles is has_doubles


def test_gpu_limits_of_device_without_properties_are_empty() -> None:
    assert gpu_limits(Told(), Refused) == {}
