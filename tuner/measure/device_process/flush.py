"""Eviction of weights from a device's caches, so that a timed launch reads them from memory as in a model.

Processors evict only the cache lines of the weights, since in a model the other inputs of a kernel were just written. The caches of
other devices are filled with other data.

Tests: `tests/tuner/job/test_caches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.device.registry import service_kernels
from relax_tune.runtime.device.service_kernels import GROUP, LINE_BYTES
from relax_tune.runtime.program.program import KernelSource

# At most this much of a cache that workers share is filled.
SHARED_BYTES = 256 << 20


class Eviction:
    """The kernel that evicts arrays from a processor's caches.

    Raises MeasureError or BuildError for a device without such a kernel.
    """

    def __init__(self, device: Device) -> None:
        kind, name, service = device.info.kind, "relax_tune_evict", service_kernels(device.info.kind)
        if not service.evict:
            raise MeasureError(f"eviction: the language of {kind} has no instruction that evicts a line")
        self._kernel, self._device = device.compile([KernelSource(name, kind, service.evict)])[name], device
        self._grid, self._local = service.launch_shape(1, 1)

    def of(self, weights: Sequence[DeviceBuffer]) -> Callable[[], None]:
        """Return a function that evicts these arrays: they are in no cache when it returns."""
        launches = [
            self._device.bind(self._kernel, [b], [-(-b.nbytes // LINE_BYTES)], self._grid, self._local) for b in weights
        ]

        def run() -> None:
            for launch in launches:
                launch()
            self._device.synchronize()

        return run


class CacheFlush:
    """A buffer larger than a device's caches, and a kernel that reads all of it.

    Raises:
        MeasureError: there is no such kernel for this kind of device.
    """

    def __init__(self, device: Device, nbytes: int | None = None) -> None:
        kind, name, service = device.info.kind, "relax_tune_flush", service_kernels(device.info.kind)
        if not service.flush:
            raise MeasureError(
                f"regime flushed: devices of kind {kind} have no flush kernel; time it warm, or add the kernel to its class"
            )
        lines = (nbytes or flushed_bytes(dict(device.info.limits))) // LINE_BYTES
        kernel = device.compile([KernelSource(name, kind, service.flush)])[name]
        self.buffer = device.alloc(lines * LINE_BYTES)
        # Memory that was never written may be one shared page.
        device.upload(self.buffer, np.zeros(lines * LINE_BYTES, np.uint8))
        grid, local = service.launch_shape(-(-lines // GROUP), GROUP)
        self._device, self._launch = device, device.bind(kernel, [self.buffer], [lines], grid, local)

    def of(self, weights: Sequence[DeviceBuffer]) -> Callable[[], None]:
        """Return a function that evicts everything, including these arrays."""
        return self.run

    def run(self) -> None:
        """Evict the caches; they are flushed when this returns."""
        self._launch()
        self._device.synchronize()


def flush_for(device: Device) -> Eviction | CacheFlush:
    """Return the eviction of single arrays if the device supports it, else the flush of all caches.

    Raises:
        MeasureError: the device supports neither.
    """
    try:
        return Eviction(device)
    except (BuildError, MeasureError):
        return CacheFlush(device)


def flushed_bytes(limits: dict[str, int]) -> int:
    """Return the size of a buffer that evicts the workers' private caches, and a shared cache if it is small."""
    own = limits.get("l2_bytes", 0) * (1 if limits.get("warp", 1) > 1 else limits.get("workers", 1))
    return max(2 * own, min(2 * limits.get("l3_bytes", 0), SHARED_BYTES), SHARED_BYTES // 8)
