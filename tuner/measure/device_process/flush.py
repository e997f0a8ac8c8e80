"""Take weights out of a device's caches, so that a timed launch reads them from memory as in a model.

Processors evict the lines of the weights alone, since what a kernel reads besides was just written. Other devices' caches are filled
with other data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.program.program import KernelSource

# At most this much of a cache that workers share is filled.
SHARED_BYTES = 256 << 20
LINE_BYTES, GROUP = 64, 64
# groups along one axis of a grid
AXIS = 65535
MARK = 0x5AFE5AFE

# Every line is evicted by the processor's own instruction; where there is none, these do not compile.
_EVICTING = {
    "c": """#include <stdint.h>
void {name}(char* restrict b, int64_t lines) {{
  for (int64_t i = 0; i < lines; ++i) {{
#if defined(__CLFLUSHOPT__)
    __builtin_ia32_clflushopt(b + i * {line});
#elif defined(__x86_64__)
    __builtin_ia32_clflush(b + i * {line});
#elif defined(__aarch64__)
    __asm__ volatile("dc civac, %0" : : "r"(b + i * {line}) : "memory");
#else
#error "this processor has no instruction that evicts a line"
#endif
  }}
#if defined(__x86_64__)
  __builtin_ia32_mfence();
#else
  __asm__ volatile("dsb ish" : : : "memory");
#endif
}}
""",
    "opencl": """#if !defined(__clang__) || !defined(__x86_64__)
#error "this device has no instruction that evicts a line"
#endif
kernel void {name}(global char* restrict b, long lines) {{
  for (long i = 0; i < lines; ++i) __builtin_ia32_clflush((const void*)(size_t)(b + i * {line}));
  __builtin_ia32_mfence();
}}
""",
}

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
    "webgpu": """@group(0) @binding(0) var<storage, read_write> b: array<i32>;
struct Scalars {{ lines: i32 }}
@group(0) @binding(1) var<uniform> s: Scalars;
@compute @workgroup_size({group})
fn {name}(@builtin(global_invocation_id) at: vec3<u32>) {{
  let i = i32(at.x) + i32(at.y) * 65535 * {group};
  if (i < s.lines && b[i * {words}] == {mark}) {{ b[i * {words}] = 0; }}
}}
""",
}


class Eviction:
    """The kernel that evicts arrays from a processor's caches.

    Raises MeasureError or BuildError for a device without such a kernel.
    """

    def __init__(self, device: Device) -> None:
        kind, name = device.info.kind, "relax_tune_evict"
        if kind not in _EVICTING:
            raise MeasureError(f"eviction: wanted a device of kind {', '.join(_EVICTING)}, found {kind}")
        source = _EVICTING[kind].format(name=name, line=LINE_BYTES)
        self._kernel, self._device = device.compile([KernelSource(name, kind, source)])[name], device
        self._grid: tuple[int, ...] = () if kind == "c" else (1,)

    def of(self, weights: Sequence[DeviceBuffer]) -> Callable[[], None]:
        """Return what evicts these arrays; they are in memory alone when it returns."""
        launches = [
            self._device.bind(self._kernel, [b], [-(-b.nbytes // LINE_BYTES)], self._grid, self._grid) for b in weights
        ]

        def run() -> None:
            for launch in launches:
                launch()
            self._device.synchronize()

        return run


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
        groups = -(-lines // GROUP)
        launches = {"c": ((), ()), "webgpu": ((min(groups, AXIS), -(-groups // AXIS)), (GROUP, 1))}
        grid, local = launches.get(kind, ((groups,), (GROUP,)))
        self._device, self._launch = device, device.bind(kernel, [self.buffer], [lines], grid, local)

    def of(self, weights: Sequence[DeviceBuffer]) -> Callable[[], None]:
        """Return what evicts everything, these arrays too."""
        return self.run

    def run(self) -> None:
        """Evict the caches; they are flushed when this returns."""
        self._launch()
        self._device.synchronize()


def flush_for(device: Device) -> Eviction | CacheFlush:
    """Return what takes weights out of a device's caches: by eviction where the device can.

    Raises MeasureError where nothing does.
    """
    try:
        return Eviction(device)
    except (BuildError, MeasureError):
        return CacheFlush(device)


def flushed_bytes(limits: dict[str, int]) -> int:
    """Return the bytes that evict the workers' private caches, and a shared cache if it is small."""
    own = limits.get("l2_bytes", 0) * (1 if limits.get("warp", 1) > 1 else limits.get("workers", 1))
    return max(2 * own, min(2 * limits.get("l3_bytes", 0), SHARED_BYTES), SHARED_BYTES // 8)
