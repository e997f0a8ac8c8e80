"""Matrix products of the 32 work-items of a warp: semantics, and text for CUDA (`mma.sync`, `ldmatrix`).

A warp is four items along the first axis by eight along the second. In every tile of 16 rows and 8 columns, item (x, y) has rows y and
y + 8 and columns 2 x and 2 x + 1. This is the layout of accumulators in a warp (PTX ISA, "Matrix Fragments for mma.m16n8k16"). In the
semantics, each item multiplies its rows and columns. On the device, the warp loads the 16-bit operands from shared memory together.

Tests: `tests/schedules/rules/test_mma_intrinsics.py`, `tests/schedules/rules/gpu/test_mma.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

ROWS, COLUMNS, STEPS = 16, 8, 16
# Devices with the instruction.
CONDITION = "defined(RT_WARPS) || __CUDA_ARCH__ >= 800"
# Rows and columns of a matrix that `ldmatrix` loads.
ROW = 8


def semantics(name: str, dtype: str, a_transposed: bool, b_transposed: bool) -> str:
    """Return the text of C += A B for m by n tiles of sums.

    A is stored by rows, or by steps if transposed; B by steps, or by columns if transposed.
    """
    a = ("(16, m, 2, 8)", "vk, vm, vr, vy") if a_transposed else ("(m, 2, 8, 16)", "vm, vr, vy, vk")
    b = ("(n, 4, 2, 16)", "vn, vx, vc, vk") if b_transposed else ("(16, n, 8)", "vk, vn, vx * 2 + vc")
    return f"""
@prim_func(outputs=1)
def {name}(A: Buffer({a[0]}, {dtype}), B: Buffer({b[0]}, {dtype}), C: Buffer((m, 2, 8, n, 4, 2), f32)):
    for y in item(8, axis=1):
        for x in item(4):
            for i in serial(m):
                for r in serial(2):
                    for j in serial(n):
                        for c in serial(2):
                            for k in serial(16):
                                with block("grow"):
                                    vy = spatial(8, y); vx = spatial(4, x); vm = spatial(m, i); vr = spatial(2, r)
                                    vn = spatial(n, j); vc = spatial(2, c); vk = reduce(16, k)
                                    C[vm, vr, vy, vn, vx, vc] = C[vm, vr, vy, vn, vx, vc] + cast(A[{a[1]}], f32) * cast(B[{b[1]}], f32)
"""


def warp_operand_semantics(name: str, dtype: str) -> str:
    """Return the semantics of C += A B with A in the work-items' registers, in the layout of accumulators.

    Work-item `u` of the four of a row has two elements of each tile of eight steps. B is stored by steps.
    """
    sums, rows, columns = (
        "C[vm, vr, vy, vn, vx, vc]",
        "A[vm, vr, vy, vh, ve, vu]",
        "B[vh * 8 + vu * 2 + ve, vn, vx * 2 + vc]",
    )
    return f"""
@prim_func(outputs=1)
def {name}(A: Buffer((m, 2, 8, 2, 2, 4), {dtype}), B: Buffer((16, n, 8), {dtype}), C: Buffer((m, 2, 8, n, 4, 2), f32)):
    for y in item(8, axis=1):
        for x in item(4):
            for i in serial(m):
                for r in serial(2):
                    for j in serial(n):
                        for c in serial(2):
                            for h in serial(2):
                                for u in serial(4):
                                    for e in serial(2):
                                        with block("grow"):
                                            vy = spatial(8, y); vx = spatial(4, x); vm = spatial(m, i); vr = spatial(2, r)
                                            vn = spatial(n, j); vc = spatial(2, c)
                                            vh = reduce(2, h); vu = reduce(4, u); ve = reduce(2, e)
                                            {sums} = {sums} + cast({rows}, f32) * cast({columns}, f32)
"""


def cuda_body(dtype: str, a_transposed: bool, b_transposed: bool) -> str:
    """Return the CUDA body, in which lane l provides the address of row l % 8 of matrix l / 8, eight elements."""
    if a_transposed:  # matrices in the order of the fragment: rows 0-7, 8-15 of steps 0-7, then of steps 8-15
        a = "((l & 7) + (l >> 4) * 8) * a_k + (l >> 3 & 1) * a_r"
    else:
        a = "(l & 7) * a_y + (l >> 3 & 1) * a_r + (l >> 4) * 8"
    return f"""  const int l = threadIdx.y * 4 + threadIdx.x;
  a_at += {a};
  unsigned rows[m][4];
#pragma unroll
  for (int i = 0; i < m; i++) rt_matrices<4, {str(a_transposed).lower()}>(rows[i], a + rt_place<a_row>(a_at, i * a_i));
{_columns(dtype, b_transposed, "b_k")}"""


def warp_operand_cuda_body(dtype: str) -> str:
    """Return the CUDA body for rows in the work-items' registers.

    `mma` takes pairs of steps: rows 0-7 and 8-15 of steps 0-7, then of steps 8-15.
    """
    return f"""  const int l = threadIdx.y * 4 + threadIdx.x;
  unsigned rows[m][4];
#pragma unroll
  for (int i = 0; i < m; i++)
#pragma unroll
    for (int q = 0; q < 4; q++) {{
      const unsigned short *const pair = a + i * a_i + (q & 1) * a_r + (q >> 1) * a_h;
      rows[i][q] = pair[0] | (unsigned)pair[a_e] << 16;
    }}
{_columns(dtype, False, "b_e")}"""


def _columns(dtype: str, b_transposed: bool, step: str) -> str:
    """Return the text that loads the matrices of operand B and multiplies them by the rows.

    Args:
        step: Stride of the operand along the reduction.
    """
    if b_transposed:  # steps 0-7, 8-15 of a tile's columns, then of the next tile's
        b = "(l >> 1 & 3) * b_x + (l & 1) * b_c + (l >> 3 & 1) * 8"
    else:
        b = f"(l & 15) * {step}"
    return f"""  b_at += {b} + (l >> 4) * b_j;
#pragma unroll
  for (int j = 0; j < n; j += 2) {{
    unsigned columns[4];
    const unsigned short *const p = b + rt_place<b_row>(b_at, j * b_j);
    if (j + 1 < n) rt_matrices<4, {str(not b_transposed).lower()}>(columns, p);
    else rt_matrices<2, {str(not b_transposed).lower()}>(columns, p);
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
      for (int q = 0; q < 2 && j + q < n; q++)
        rt_grow_{dtype}(c + i * c_i + (j + q) * c_j, c_r, rows[i], columns + 2 * q);
  }}"""


def scalar_body(dtype: str, a_transposed: bool, b_transposed: bool) -> str:
    """Return the CUDA body for devices without the instruction: every work-item computes its elements by scalar products."""
    a = "k * a_k + i * a_i + r * a_r + y" if a_transposed else "i * a_i + r * a_r + y * a_y + k"
    b = "j * b_j + x * b_x + q * b_c + k" if b_transposed else "k * b_k + j * b_j + x * 2 + q"
    return f"""  const int y = threadIdx.y, x = threadIdx.x;
#pragma unroll
  for (int i = 0; i < m; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int j = 0; j < n; j++)
#pragma unroll
        for (int q = 0; q < 2; q++)
          for (int k = 0; k < {STEPS}; k++)
            c[i * c_i + r * c_r + j * c_j + q] +=
              rt_from_{dtype}_f32(a[rt_place<a_row>(a_at, {a})]) * rt_from_{dtype}_f32(b[rt_place<b_row>(b_at, {b})]);"""


def warp_operand_scalar_body(dtype: str) -> str:
    """Return the CUDA body for devices without the instruction: work-items exchange their registers."""
    return f"""  const int y = threadIdx.y, x = threadIdx.x;
#pragma unroll
  for (int i = 0; i < m; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int k = 0; k < {STEPS}; k++) {{
        const int element = a[i * a_i + r * a_r + k / 8 * a_h + k % 2 * a_e];
        const float left = rt_from_{dtype}_f32((unsigned short)__shfl_sync(0xffffffffu, element, y * 4 + k % 8 / 2));
#pragma unroll
        for (int j = 0; j < n; j++)
#pragma unroll
          for (int q = 0; q < 2; q++)
            c[i * c_i + r * c_r + j * c_j + q] += left * rt_from_{dtype}_f32(b[rt_place<b_row>(b_at, k * b_e + j * b_j + x * 2 + q)]);
      }}"""


def _mma_function(dtype: str) -> str:
    return f"""static __device__ __forceinline__ void rt_grow_{dtype}(float *c, i64 r, const unsigned *a, const unsigned *b) {{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
    "{{%0, %1, %2, %3}};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[r]), "+f"(c[r + 1]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); }}"""


# Address of the element `step` elements after `at`, in rows of `row` elements swizzled by eight (`ir/hardware/swizzle`); `row` is 0
# without swizzle. Steps of whole periods are added after the swizzle, so that an unrolled loop computes the swizzle once.
PLACES = """template <int row> static __device__ __forceinline__ unsigned rt_place(unsigned at, unsigned step) {
  const unsigned vectors = row / 8, per_line = vectors && vectors < 8 ? 8 / vectors : 1, most = vectors < 8 ? vectors : 8;
  if (row == 0) return at + step;
  if (step % (row * per_line * most) != 0) at += step, step = 0;
  const unsigned r = at / 8 / (row ? vectors : 1), v = at / 8 % (row ? vectors : 1);
  return (r * vectors + (v + r / per_line % (row ? most : 1)) % (row ? vectors : 1)) * 8 + at % 8 + step; }"""

# Functions that the bodies call: `ldmatrix` of 8 x 8 elements from shared memory, transposed or not, and one `mma`.
OPERATIONS = """#if !defined(RT_WARPS) && __CUDA_ARCH__ >= 800
template <int count, bool transposed> static __device__ __forceinline__ void rt_matrices(unsigned *r, const unsigned short *p) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(p);
  if (count == 4 && transposed) asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else if (count == 4) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else if (transposed) asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
    : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
  else asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory"); }
""" + "\n".join([*map(_mma_function, ("f16", "bf16")), "#endif"])


def helpers(sizes: Mapping[str, int]) -> Mapping[str, str]:
    """Return the helper functions that the bodies call."""
    return {"swizzled_places": PLACES, "warp_operations": OPERATIONS}
