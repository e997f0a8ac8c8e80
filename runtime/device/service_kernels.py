"""Hand-written kernels in each language that `doctor` and the measuring need; the class of a device names its own.

Tests: `tests/tuner/cli/test_doctor.py`, `tests/tuner/job/test_caches.py`, `tests/runtime/device/test_registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE_BYTES = 64
"""Bytes of a cache line."""
GROUP = 64
"""Work-items of a group of `flush`."""
REFERENCE_GROUP = 256
"""Work-items of a group of `reference`."""
AXIS = 65535
"""Maximum number of groups along one axis of a grid."""
MARK = 0x5AFE5AFE
"""A word that no flushed buffer contains."""


@dataclass(frozen=True, slots=True)
class ServiceKernels:
    """Kernels in one language. An empty text is a kernel that the language cannot express.

    Attributes:
        axes: Axes of a grid: 0 where a kernel loops over everything itself, 1, or 2 where one axis may be too short.
        probe: `probe(float *a)` adds 1 to 8 elements, one in each group of a grid. `doctor` runs it.
        flush: `relax_tune_flush(int32 *b, int64 lines)` reads a word of each line, and writes it if it equals `MARK`: the compiler
            must not drop the read. It fills caches with other data.
        evict: `relax_tune_evict(char *b, int64 lines)` evicts each line with the processor's own instruction. It must not compile
            where there is none.
        reference: `relax_tune_reference(const float *x, float *y, int64 n, int64 k)` does `k` times `a = a * 0.999f + 0.001f`
            from `a = x[i]`, and stores `a` to `y[i]`. Its times tell whether two devices of one name are equally fast.
    """

    axes: int
    probe: str
    flush: str = ""
    evict: str = ""
    reference: str = ""

    def launch_shape(self, groups: int, items: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return grid and local size for a number of groups and of work-items in each."""
        if not self.axes:
            return (), ()
        if self.axes == 1:
            return (groups,), (items,)
        return (min(groups, AXIS), -(-groups // AXIS)), (items, 1)


_STEP = "a = a * 0.999f + 0.001f;"
_WORDS = LINE_BYTES // 4

C_KERNELS = ServiceKernels(
    axes=0,
    probe="void probe(float *a) {\n  for (int i = 0; i < 8; i++) a[i] += 1.0f;\n}\n",
    flush=f"""#include <stdint.h>
static void relax_tune_flush_part(const void* data, int64_t first, int64_t end) {{
  int32_t* restrict b = *(int32_t* const*)data;
  for (int64_t i = first; i < end; ++i) if (b[i * {_WORDS}] == {MARK}) b[i * {_WORDS}] = 0;
}}
void relax_tune_flush(int32_t* restrict b, int64_t lines) {{ RT_PARALLEL_FOR(relax_tune_flush_part, &b, lines, 0, 1); }}
""",
    evict=f"""#include <stdint.h>
void relax_tune_evict(char* restrict b, int64_t lines) {{
  for (int64_t i = 0; i < lines; ++i) {{
#if defined(__CLFLUSHOPT__)
    __builtin_ia32_clflushopt(b + i * {LINE_BYTES});
#elif defined(__x86_64__)
    __builtin_ia32_clflush(b + i * {LINE_BYTES});
#elif defined(__aarch64__)
    __asm__ volatile("dc civac, %0" : : "r"(b + i * {LINE_BYTES}) : "memory");
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
    reference=f"""#include <stdint.h>
struct rt_reference {{ const float *x; float *y; int64_t k; }};
static void rt_reference_part(const void *data, int64_t first, int64_t end) {{
  const struct rt_reference *given = (const struct rt_reference *)data;
  const float *restrict x = given->x;
  float *restrict y = given->y;
  const int64_t k = given->k;
  for (int64_t i = first; i < end; ++i) {{ float a = x[i]; for (long long j = 0; j < k; ++j) {_STEP} y[i] = a; }}
}}
void relax_tune_reference(const float *restrict x, float *restrict y, int64_t n, int64_t k) {{
  const struct rt_reference data = {{x, y, k}};
  RT_PARALLEL_FOR(rt_reference_part, &data, n, 0, 1);
}}
""",
)

OPENCL_KERNELS = ServiceKernels(
    axes=1,
    probe="__kernel void probe(__global float *a) { a[get_global_id(0)] += 1.0f; }\n",
    flush=f"""kernel void relax_tune_flush(global int* restrict b, long lines) {{
  const long i = get_global_id(0);
  if (i < lines && b[i * {_WORDS}] == {MARK}) b[i * {_WORDS}] = 0;
}}
""",
    evict=f"""#if !defined(__clang__) || !defined(__x86_64__)
#error "this device has no instruction that evicts a line"
#endif
kernel void relax_tune_evict(global char* restrict b, long lines) {{
  for (long i = 0; i < lines; ++i) __builtin_ia32_clflush((const void*)(size_t)(b + i * {LINE_BYTES}));
  __builtin_ia32_mfence();
}}
""",
    reference=f"""kernel void relax_tune_reference(global const float *restrict x, global float *restrict y, long n, long k) {{
  long i = get_global_id(0);
  if (i < n) {{ float a = x[i]; for (long j = 0; j < k; ++j) {_STEP} y[i] = a; }}
}}
""",
)

CUDA_KERNELS = ServiceKernels(
    axes=1,
    probe='extern "C" __global__ void probe(float *a) { a[blockIdx.x] += 1.0f; }\n',
    flush=f"""extern "C" __global__ void relax_tune_flush(int* __restrict__ b, long long lines) {{
  const long long i = (long long)blockIdx.x * {GROUP} + threadIdx.x;
  if (i < lines && b[i * {_WORDS}] == {MARK}) b[i * {_WORDS}] = 0;
}}
""",
    reference=f"""extern "C" __global__ void relax_tune_reference(
    const float* __restrict__ x, float* __restrict__ y, long long n, long long k) {{
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) {{ float a = x[i]; for (long long j = 0; j < k; ++j) {_STEP} y[i] = a; }}
}}
""",
)

WGSL_KERNELS = ServiceKernels(
    axes=2,
    probe="@group(0) @binding(0) var<storage, read_write> a: array<f32>;\n@compute @workgroup_size(1)\n"
    "fn probe(@builtin(workgroup_id) at: vec3<u32>) { a[at.x] += 1.0f; }\n",
    flush=f"""@group(0) @binding(0) var<storage, read_write> b: array<i32>;
struct Scalars {{ lines: i32 }}
@group(0) @binding(1) var<uniform> s: Scalars;
@compute @workgroup_size({GROUP})
fn relax_tune_flush(@builtin(global_invocation_id) at: vec3<u32>) {{
  let i = i32(at.x) + i32(at.y) * {AXIS} * {GROUP};
  if (i < s.lines && b[i * {_WORDS}] == {MARK}) {{ b[i * {_WORDS}] = 0; }}
}}
""",
    reference=f"""@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
struct Scalars {{ n: i32, k: i32 }}
@group(0) @binding(2) var<uniform> s: Scalars;
@compute @workgroup_size({REFERENCE_GROUP})
fn relax_tune_reference(@builtin(global_invocation_id) at: vec3<u32>) {{
  let i = i32(at.x) + i32(at.y) * {AXIS} * {REFERENCE_GROUP};
  if (i < s.n) {{ var a = x[i]; for (var j = 0; j < s.k; j++) {{ {_STEP} }} y[i] = a; }}
}}
""",
)
