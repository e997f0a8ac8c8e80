"""Targets of single kernels: a device of this machine, or a typical one where source text is enough.

Tests: `tests/tuner/kernels/test_kernel.py`.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

from relax_tune.errors import UserError
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.registry import concrete_name
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.job.devices import code_target, device_info
from relax_tune.tuner.measure.local import LocalRunner

TYPICAL: Mapping[str, Mapping[str, int]] = MappingProxyType({
    "opencl": {"vector_bits": 256, "max_vector_lanes": 8, "max_local_bytes": 32 << 10},
    "cuda": {"warp": 32, "vector_bits": 128, "max_local_bytes": 48 << 10, "max_group_size": 1024, "compute_major": 8},
    "webgpu": {"warp": 32, "vector_bits": 128, "max_local_bytes": 16 << 10, "max_group_size": 256},
})  # fmt: skip
"""Limits that text is generated for where this machine has no such device: the ones that every device of the kind has."""


@dataclass(frozen=True, eq=False)
class KernelTarget:
    """A device that kernels are generated for.

    Attributes:
        name: Name of the device, as `open_device` takes it.
    """

    name: str
    info: DeviceInfo

    @cached_property
    def hardware(self) -> HardwareInfo:
        return HardwareInfo.from_limits(self.info.kind, dict(self.info.limits))

    @cached_property
    def code(self) -> CodeTarget:
        return code_target(self.info)

    @cached_property
    def runner(self) -> LocalRunner:
        """The process that measures on this device, started on first use and shared by all kernels of the device.

        Raises:
            MeasureError: The device cannot be opened.
        """
        runner = LocalRunner(self.name)
        atexit.register(runner.close)
        return runner


@cache
def device_target(name: str) -> KernelTarget:
    """Return a device of this machine, opened once to describe it.

    Raises:
        UserError: There is no such device.
    """
    if not isinstance(name, str):
        raise UserError(f"expected the name of a target, such as c or opencl, got a {type(name).__name__}")
    concrete = concrete_name(name)
    return KernelTarget(concrete, device_info(concrete))


def text_target(name: str) -> KernelTarget:
    """Return a device of this machine, or a typical one of its kind.

    Raises:
        UserError: There is no such device and no such kind, or the device is named by a part of its name.
    """
    try:
        return device_target(name)
    except UserError:
        if name not in TYPICAL:
            raise
        return KernelTarget(name, DeviceInfo(name, f"typical {name}", (), tuple(sorted(TYPICAL[name].items()))))
