"""Tile products of a warpgroup, `wgmma.mma_async` of sm_90a (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

A warpgroup is 4 items along the first axis by 8 along the second by 4 warps along the third. Further warpgroups are along the fourth axis
(`relax_tune.ir.core.stmt.AXES`). It multiplies tiles of 64 rows; warp z has rows 16 z and on, laid out as in `relax_tune.ir.hardware.mma`.
The async proxy reads both operands from shared memory, in core matrices of 8 rows of 8 contiguous elements, without swizzling.
A descriptor gives the first core matrix, the stride along the steps and the stride along rows or columns (PTX ISA, "Matrix Descriptor
Format" and "Strides"). Work-items fence their writes for the async proxy before the barrier (`PROXY_FENCE_CALL`).

Tests: `tests/schedules/rules/gpu/test_wgmma.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

WARPS = 4
ROWS, COLUMNS, STEPS = 64, 8, 16
# Rows and columns of a core matrix.
CORE = 8
# Most tiles of eight columns of one instruction.
MAX_TILES = 32
# Devices with the instruction.
CONDITION = "defined(RT_WARPS) || defined(__CUDA_ARCH_FEAT_SM90_ALL)"
PROXY_FENCE_CALL = "rt_proxy_fence();"


def semantics(name: str, dtype: str, a_transposed: bool, b_transposed: bool) -> str:
    """Return the text of C += A B for m by n tiles and 16 s steps.

    A is stored by rows, or by steps if transposed; B by steps, or by columns if transposed.
    """
    a = "vm, vz, vr, vt, vh, " + ("vk, vy" if a_transposed else "vy, vk")
    b = (
        ("(n, s, 2, 4, 2, 8)", "vn, vt, vh, vx, vc, vk")
        if b_transposed
        else ("(n, s, 2, 8, 8)", "vn, vt, vh, vk, vx * 2 + vc")
    )
    return f"""
@prim_func(outputs=1)
def {name}(A: Buffer((m, 4, 2, s, 2, 8, 8), {dtype}), B: Buffer({b[0]}, {dtype}), C: Buffer((m, 4, 2, 8, n, 4, 2), f32)):
  for z in item(4, axis=2):
    for y in item(8, axis=1):
      for x in item(4):
        for i in serial(m):
          for r in serial(2):
            for j in serial(n):
              for c in serial(2):
                for t in serial(s):
                  for h in serial(2):
                    for k in serial(8):
                      with block("grow"):
                        vz = spatial(4, z); vy = spatial(8, y); vx = spatial(4, x); vm = spatial(m, i); vr = spatial(2, r)
                        vn = spatial(n, j); vc = spatial(2, c); vt = reduce(s, t); vh = reduce(2, h); vk = reduce(8, k)
                        C[vm, vz, vr, vy, vn, vx, vc] = C[vm, vz, vr, vy, vn, vx, vc] + cast(A[{a}], f32) * cast(B[{b[1]}], f32)
"""


def fixed_strides(a_transposed: bool, b_transposed: bool) -> tuple[tuple[str, str, int, str], ...]:
    """Return the required strides in the form of `Intrinsic.fixed_strides`."""
    b = (("B", "x", 2 * CORE, ""), ("B", "c", CORE, "")) if b_transposed else (("B", "k", CORE, ""),)
    return ("A", "k" if a_transposed else "y", CORE, ""), ("A", "z", 2, "r"), *b


def cuda_body(dtype: str, a_transposed: bool, b_transposed: bool) -> str:
    """Return the CUDA body. The sums are pinned before and after: nothing may access them from the first product to the wait."""
    return f"""  const unsigned long long left = rt_described(a, a_h, a_r), right = rt_described(b, b_h, b_j);
  typedef rt_multiply_{dtype}<n, {int(a_transposed)}, {int(not b_transposed)}> product;
#pragma unroll
  for (int i = 0; i < m; i++) rt_pin<n>(c + i * c_i, c_r, c_j);
  rt_begin_products();
#pragma unroll
  for (int t = 0; t < s; t++)
#pragma unroll
    for (int i = 0; i < m; i++) product::add(c + i * c_i, c_r, c_j, left + (i * a_i + t * a_t) / {CORE}, right + t * b_t / {CORE});
  rt_end_products();
#pragma unroll
  for (int i = 0; i < m; i++) rt_pin<n>(c + i * c_i, c_r, c_j);"""


def scalar_body(dtype: str, a_transposed: bool, b_transposed: bool) -> str:
    """Return the CUDA body for other architectures: every work-item computes its elements by scalar products."""
    a = "k * a_k + y" if a_transposed else "y * a_y + k"
    b = "x * b_x + q * b_c + k" if b_transposed else "k * b_k + x * 2 + q"
    return f"""  const int z = threadIdx.z % {WARPS}, y = threadIdx.y, x = threadIdx.x;
#pragma unroll
  for (int i = 0; i < m; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int j = 0; j < n; j++)
#pragma unroll
        for (int q = 0; q < 2; q++)
          for (int t = 0; t < s; t++)
            for (int h = 0; h < 2; h++)
              for (int k = 0; k < {CORE}; k++)
                c[i * c_i + r * c_r + j * c_j + q] += rt_from_{dtype}_f32(a[i * a_i + z * a_z + r * a_r + t * a_t + h * a_h + {a}])
                  * rt_from_{dtype}_f32(b[j * b_j + t * b_t + h * b_h + {b}]);"""


# Matrix descriptors and the fences of `wgmma` (PTX ISA). tests/cuda_emulation/emulation.h replaces the products.
OPERATIONS = f"""#if {CONDITION}
static __device__ __forceinline__ unsigned long long rt_described(const unsigned short *p, i64 steps, i64 others) {{
  const unsigned long long at = (unsigned)__cvta_generic_to_shared(p);
  return (at >> 4 & 0x3fff) | (unsigned long long)(steps >> 3 & 0x3fff) << 16 | (unsigned long long)(others >> 3 & 0x3fff) << 32; }}
#endif
#if !defined(RT_WARPS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int n, int transposed, int flat> struct rt_multiply_f16;
template <int n, int transposed, int flat> struct rt_multiply_bf16;
template <int n> static __device__ __forceinline__ void rt_pin(float *c, i64 r, i64 j) {{
#pragma unroll
  for (int k = 0; k < n; k++)
    asm volatile("" : "+f"(c[k * j]), "+f"(c[k * j + 1]), "+f"(c[k * j + r]), "+f"(c[k * j + r + 1]) :: "memory"); }}
static __device__ __forceinline__ void rt_begin_products() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
static __device__ __forceinline__ void rt_end_products() {{
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }}
#endif"""

# Make ordinary writes to shared memory visible to the async proxy (PTX ISA, fence.proxy.async).
PROXY_FENCE = """#if !defined(RT_WARPS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
static __device__ __forceinline__ void rt_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#elif !defined(RT_WARPS)
static __device__ __forceinline__ void rt_proxy_fence() {}
#endif"""


def helpers(dtype: str, sizes: Mapping[str, int]) -> Mapping[str, str]:
    """Return the helpers of the body. The instruction has one operand per sum of its tile, so each size is a specialisation."""
    n = sizes["n"]
    sums = ", ".join(f"%{k}" for k in range(4 * n))
    operands = ",\n      ".join(
        f'"+f"(c[{k} * j]), "+f"(c[{k} * j + 1]), "+f"(c[{k} * j + r]), "+f"(c[{k} * j + r + 1])' for k in range(n)
    )
    product = f"""#if !defined(RT_WARPS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int transposed, int flat> struct rt_multiply_{dtype}<{n}, transposed, flat> {{
  static __device__ __forceinline__ void add(float *c, i64 r, i64 j, unsigned long long a, unsigned long long b) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\nwgmma.mma_async.sync.aligned.m64n{COLUMNS * n}k16.f32.{dtype}.{dtype} "
      "{{{sums}}}, "
      "%{4 * n}, %{4 * n + 1}, p, 1, 1, %{4 * n + 2}, %{4 * n + 3};\\n}}"
      : {operands}
      : "l"(a), "l"(b), "n"(transposed), "n"(flat)); }}
}};
#endif"""
    return {"warpgroup_operations": OPERATIONS, f"multiply_{dtype}_{n}": product}
