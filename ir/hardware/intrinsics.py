"""The table of intrinsics: dot products, tiles of matrix products, transposes.

Tests: `tests/schedules/primitives/blocks/test_tensorize.py`, `tests/schedules/rules/test_mma_intrinsics.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from relax_tune.ir.core.dtype import bf16, f32, i8, i32, u8
from relax_tune.ir.hardware import mma, wgmma
from relax_tune.ir.hardware.dots import amx, dot2, dot2_bf16, dot2_f32bf16, dot4, dot8_i4
from relax_tune.ir.hardware.intrinsic import Intrinsic

_OUTER = """
@prim_func(outputs=1)
def outer_f32_4x16(A: Buffer((4,), f32), B: Buffer((16,), f32), C: Buffer((4, 16), f32)):
    for i in serial(4):
        for j in serial(16):
            with block("outer"):
                vi = spatial(4, i); vj = spatial(16, j)
                C[vi, vj] = C[vi, vj] + A[vi] * B[vj]
"""


def _transpose(size: int) -> Intrinsic:
    """Return the transpose of a square tile of f32 in registers.

    In each of log2(size) stages, pairs of rows whose numbers differ in one bit exchange the lanes whose numbers differ in that bit.
    """
    text = f"""
@prim_func(outputs=1)
def transpose_f32_{size}x{size}(A: Buffer(({size}, {size}), f32), C: Buffer(({size}, {size}), f32)):
    for j in serial({size}):
        for i in serial({size}):
            with block("turn"):
                vj = spatial({size}, j); vi = spatial({size}, i)
                C[vi, vj] = A[vj, vi]
"""
    plain = f"  for (int j = 0; j < {size}; j++)\n    for (int i = 0; i < {size}; i++) c[i * c_i + j] = a[j * a_j + i];"
    lines = [f"  const row r0_{k} = *(const @A urow *)(a + {k} * a_j);" for k in range(size)]
    stage, distance = 0, 1
    while distance < size:
        for k in range(size):
            low, high = k & ~distance, k | distance
            shift = distance if k & distance else 0
            lanes = [n + shift if not n & distance else size + n + shift - distance for n in range(size)]
            chosen = ", ".join(map(str, lanes))
            lines.append(
                f"  const row r{stage + 1}_{k} = __builtin_shufflevector(r{stage}_{low}, r{stage}_{high}, {chosen});"
            )
        stage, distance = stage + 1, distance * 2
    lines += [f"  *(@C urow *)(c + {k} * c_i) = r{stage}_{k};" for k in range(size)]

    def body(kind: str, more: str) -> str:
        types = f"  typedef float row __attribute__(({kind}));\n  typedef float urow __attribute__(({kind}, aligned(4){more}));"
        return "\n".join([types, *lines])

    fast = {
        "c": ("defined(__clang__) || __GNUC__ >= 12", body(f"vector_size({4 * size})", ", may_alias")),
        "opencl": ("__has_builtin(__builtin_shufflevector)", body(f"ext_vector_type({size})", "")),
    }
    return Intrinsic(text, frozenset({"A", "C"}), plain, MappingProxyType(fast))


def _products() -> Iterator[tuple[str, Intrinsic]]:
    """Yield C += A B of 16-bit floats with f32 sums, by one warp or four.

    The suffix has a letter for each operand: `n` not transposed, `t` transposed, `o` in the registers of work-items.
    """
    for dtype in ("f16", "bf16"):
        for form in ("nn", "nt", "tn", "tt"):
            layout = (dtype, form[0] == "t", form[1] == "t")
            yield (
                f"mma_{dtype}_{form}",
                Intrinsic(
                    mma.semantics(f"mma_{dtype}_{form}", *layout),
                    frozenset("ABC"),
                    mma.scalar_body(*layout),
                    MappingProxyType({"cuda": (mma.CONDITION, mma.cuda_body(*layout))}),
                    language="cuda",
                    prelude_helpers=(f"from_{dtype}",),
                    helpers=mma.helpers,
                ),
            )
            yield (
                f"wgmma_{dtype}_{form}",
                Intrinsic(
                    wgmma.semantics(f"wgmma_{dtype}_{form}", *layout),
                    frozenset("ABC"),
                    wgmma.scalar_body(*layout),
                    MappingProxyType({"cuda": (wgmma.CONDITION, wgmma.cuda_body(*layout))}),
                    language="cuda",
                    prelude_helpers=(f"from_{dtype}",),
                    helpers=partial(wgmma.helpers, dtype),
                    max_extent=MappingProxyType({"n": wgmma.MAX_TILES}),
                    fixed_strides=wgmma.fixed_strides(*layout[1:]),
                    proxy_fence=(wgmma.PROXY_FENCE_CALL, wgmma.PROXY_FENCE),
                ),
            )
        yield (
            f"mma_{dtype}_on",
            Intrinsic(
                mma.warp_operand_semantics(f"mma_{dtype}_on", dtype),
                frozenset("BC"),
                mma.warp_operand_scalar_body(dtype),
                MappingProxyType({"cuda": (mma.CONDITION, mma.warp_operand_cuda_body(dtype))}),
                language="cuda",
                prelude_helpers=(f"from_{dtype}",),
                helpers=mma.helpers,
                warp_operands=MappingProxyType({"A": "u"}),
            ),
        )


# Every intrinsic by its name.
INTRINSICS: Mapping[str, Intrinsic] = MappingProxyType({
    # sums of four products of bytes for a vector of columns (VNNI: one instruction)
    **{f"dot4_u8i8_x{lanes}": dot4(lanes) for lanes in (8, 16)},
    # sums of two products of bf16 for a vector of columns (AVX512-BF16: one instruction)
    "dot2_bf16_x16": dot2_bf16(),
    **{f"dot2_f32bf16_x{lanes}": dot2_f32bf16(lanes) for lanes in (4, 8, 16)},
    # sums of two products of 16 bits for a vector of columns (AVX2: one instruction and an addition)
    **{f"dot2_i16i8_x{lanes}": dot2(lanes) for lanes in (4, 8, 16)},
    # sums of eight products of bytes and 4-bit numbers for a vector of columns
    **{f"dot8_i8i4_x{lanes}": dot8_i4(lanes) for lanes in (4, 8, 16)},
    # tiles of a product over its whole reduction (AMX)
    "amx_bf16_16x16": amx(bf16, bf16, f32, "tdpbf16ps", "__AMX_BF16__"),
    "amx_u8i8_16x16": amx(u8, i8, i32, "tdpbusd", "__AMX_INT8__"),
    # a tile transposed
    "transpose_f32_8x8": _transpose(8),
    "transpose_f32_16x16": _transpose(16),
    # one step of the reduction of a matrix product, added to a tile
    "outer_f32_4x16": Intrinsic(
        _OUTER,
        frozenset({"B", "C"}),
        "  for (int i = 0; i < 4; i++)\n"
        "    for (int j = 0; j < 16; j++) c[i * c_i + j] += a[i * a_i] * b[j];",
        MappingProxyType({
            "c": (
                "defined(__GNUC__)",
                "  typedef float row __attribute__((vector_size(64), aligned(4), may_alias));\n"
                "  const row right = *(const row *)b;\n"
                "  for (int i = 0; i < 4; i++) *(row *)(c + i * c_i) += a[i * a_i] * right;",
            ),
        }),
    ),
    **dict(_products()),
})  # fmt: skip
