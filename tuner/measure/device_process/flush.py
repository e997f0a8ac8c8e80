"""Filling a device's caches with other data, so that the next timed launch reads everything from memory."""

from __future__ import annotations

import numpy as np

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import KernelSource

# At most this much of a cache that workers share is filled.
SHARED_BYTES = 256 << 20
LINE_BYTES, GROUP = 64, 64
MARK = 0x5AFE5AFE

# Each worker reads every line of its part. A line is written only if it holds the mark, which none does.
_TEXTS = {
    "c": """#include <stdint.h>
void {name}(int32_t* restrict b, int64_t lines) {{
  #pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < lines; ++i) if (b[i * {words}] == {mark}) b[i * {words}] = 0;
}}
""",
    "opencl": """kernel void {name}(global int* restrict b, long lines) {{
  const long i = get_global_id(0);
  if (i < lines && b[i * {words}] == {mark}) b[i * {words}] = 0;
}}
""",
    "cuda": """extern "C" __global__ void {name}(int* __restrict__ b, long long lines) {{
  const long long i = (long long)blockIdx.x * {group} + threadIdx.x;
  if (i < lines && b[i * {words}] == {mark}) b[i * {words}] = 0;
}}
""",
}


class CacheFlush:
    """A buffer larger than a device's caches, and a kernel that reads all of it. Raises MeasureError for a device
    without such a kernel.
    """

    def __init__(self, device: Device, nbytes: int | None = None) -> None:
        kind, name = device.info.kind, "relax_tune_flush"
        if kind not in _TEXTS:
            raise MeasureError(
                f"regime flushed: wanted a device of kind {', '.join(_TEXTS)}, found {kind}; time it warm, or add a kernel here"
            )
        lines = (nbytes or flushed_bytes(dict(device.info.limits))) // LINE_BYTES
        source = _TEXTS[kind].format(name=name, words=LINE_BYTES // 4, group=GROUP, mark=MARK)
        kernel = device.compile([KernelSource(name, kind, source)])[name]
        self.buffer = device.alloc(lines * LINE_BYTES)
        device.upload(
            self.buffer, np.zeros(lines * LINE_BYTES, np.uint8)
        )  # memory that was never written may be one shared page
        grid, local = ((), ()) if kind == "c" else ((-(-lines // GROUP),), (GROUP,))
        self._device, self._launch = device, device.bind(kernel, [self.buffer], [lines], grid, local)

    def run(self) -> None:
        """Evict the caches; they are flushed when this returns."""
        self._launch()
        self._device.synchronize()


def flushed_bytes(limits: dict[str, int]) -> int:
    """Return the bytes that evict the workers' private caches, and a shared cache if it is small."""
    own = limits.get("l2_bytes", 0) * (1 if limits.get("warp", 1) > 1 else limits.get("workers", 1))
    return max(2 * own, min(2 * limits.get("l3_bytes", 0), SHARED_BYTES), SHARED_BYTES // 8)
