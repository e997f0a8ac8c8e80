"""Dot product and tile product instructions of processors: VNNI, AVX512-BF16, `pmaddwd`, AMX.

Tests: `tests/schedules/rules/test_dots.py`, `tests/schedules/primitives/blocks/test_tensorize.py`.
"""

from __future__ import annotations

from types import MappingProxyType

from relax_tune.ir.core.dtype import DType, bf16, f32, i8, i16, i32, u8
from relax_tune.ir.hardware.intrinsic import Intrinsic


def _dot(name: str, left: DType, right: DType, lanes: int, steps: int, total: DType) -> str:
    """Return the semantics of a vector of sums to which `steps` products each are added."""
    return f"""
@prim_func(outputs=1)
def {name}(A: Buffer(({steps},), {left.short}), B: Buffer(({lanes}, {steps}), {right.short}), C: Buffer(({lanes},), {total.short})):
    for i in serial({lanes}):
        for k in serial({steps}):
            with block("dot"):
                vi = spatial({lanes}, i); vk = reduce({steps}, k)
                C[vi] = C[vi] + cast(A[vk], {total.short}) * cast(B[vi, vk], {total.short})
"""


def _whole_sums(lanes: int, steps: int) -> str:
    """Return the portable body of wrapping sums of integer products."""
    return (
        f"  for (int i = 0; i < {lanes}; i++) {{\n"
        "    unsigned sum = c[i];\n"
        f"    for (int k = 0; k < {steps}; k++) sum += (int)a[k] * (int)b[i * b_i + k];\n"
        "    c[i] = (int)sum;\n"
        "  }"
    )


def dot4(lanes: int) -> Intrinsic:
    """Return sums of four products of bytes for each of `lanes` columns: one instruction of VNNI."""
    name = f"dot4_u8i8_x{lanes}"
    macros = {
        8: "(defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__)))",
        16: "defined(__AVX512VNNI__)",
    }
    fast = (
        f"  typedef int row __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef int urow __attribute__((vector_size({4 * lanes}), aligned(1), may_alias));\n"
        "  int four;\n"
        "  row columns;\n"
        "  __builtin_memcpy(&four, a, 4);\n"
        "  if (b_i == 4) columns = *(const urow *)b;\n"
        f"  else for (int i = 0; i < {lanes}; i++) __builtin_memcpy((char *)&columns + 4 * i, b + i * b_i, 4);\n"
        f"  *(urow *)c = __builtin_ia32_vpdpbusd_v{lanes}si(*(const urow *)c, (row){{0}} + four, columns);"
    )
    return Intrinsic(
        _dot(name, u8, i8, lanes, 4, i32),
        frozenset("ABC"),
        _whole_sums(lanes, 4),
        MappingProxyType({"c": (f"{macros[lanes]} && !defined(__clang__)", fast)}),
    )


def dot2_bf16() -> Intrinsic:
    """Return sums of two products of bf16 for each of 16 columns: one instruction of AVX512-BF16.

    The instruction treats subnormal numbers as 0.
    """
    fast = (
        "  typedef int row __attribute__((vector_size(64)));\n"
        "  typedef int urow __attribute__((vector_size(64), aligned(2), may_alias));\n"
        "  typedef float sums __attribute__((vector_size(64)));\n"
        "  typedef float usums __attribute__((vector_size(64), aligned(4), may_alias));\n"
        "  row right;\n"
        "  int two;\n"
        "  __builtin_memcpy(&two, a, 4);\n"
        "  if (b_i == 2) right = *(const urow *)b;\n"
        "  else for (int i = 0; i < 16; i++) __builtin_memcpy((char *)&right + 4 * i, b + i * b_i, 4);\n"
        "  const row left = (row){0} + two;\n"
        "  sums total = *(const usums *)c;\n"
        '  __asm__("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(left), "v"(right));\n'
        "  *(usums *)c = total;"
    )
    return Intrinsic(
        _dot("dot2_bf16_x16", bf16, bf16, 16, 2, f32),
        frozenset("ABC"),
        "  for (int i = 0; i < 16; i++)\n"
        "    for (int k = 0; k < 2; k++) c[i] += rt_from_bf16_f32(a[k]) * rt_from_bf16_f32(b[i * b_i + k]);",
        MappingProxyType({"c": ("defined(__AVX512BF16__)", fast)}),
        prelude_helpers=("from_bf16",),
    )


def dot2_f32bf16(lanes: int) -> Intrinsic:
    """Return sums of two products of f32 and bf16 for a tile: rows by vectors of `lanes` columns.

    bf16 is the high half of f32. All products of the first step precede the loads of the second, so that each vector of columns takes one
    f32 register instead of two.
    """
    name = f"dot2_f32bf16_x{lanes}"
    text = f"""
@prim_func(outputs=1)
def {name}(A: Buffer((m, 2), f32), B: Buffer((n, {lanes}, 2), bf16), C: Buffer((m, n, {lanes}), f32)):
    for i in serial(m):
        for j in serial(n):
            for l in serial({lanes}):
                for k in serial(2):
                    with block("dot"):
                        vi = spatial(m, i); vj = spatial(n, j); vl = spatial({lanes}, l); vk = reduce(2, k)
                        C[vi, vj, vl] = C[vi, vj, vl] + A[vi, vk] * cast(B[vj, vl, vk], f32)
"""
    plain = (
        "  for (int i = 0; i < m; i++)\n    for (int j = 0; j < n; j++)\n"
        f"      for (int l = 0; l < {lanes}; l++)\n        for (int k = 0; k < 2; k++)\n"
        "          c[i * c_i + j * c_j + l] += a[i * a_i + k] * rt_from_bf16_f32(b[j * b_j + l * b_l + k]);"
    )

    def step(k: int, widened: str) -> str:
        return (
            "#pragma GCC unroll 4\n"
            f"  for (int j = 0; j < n; j++) right[j] = (sums)({widened});\n"
            "#pragma GCC unroll 16\n"
            "  for (int i = 0; i < m; i++)\n"
            "#pragma GCC unroll 4\n"
            f"    for (int j = 0; j < n; j++) *(usums *)(c + i * c_i + j * c_j) += a[i * a_i + {k}] * right[j];\n"
        )

    fast = (
        f"  typedef int row __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef int urow __attribute__((vector_size({4 * lanes}), aligned(2), may_alias));\n"
        f"  typedef float sums __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef float usums __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));\n"
        "  const int high = -65536;\n"
        "  sums right[n];\n"
        f"{step(0, '*(const urow *)(b + j * b_j) << 16')}{step(1, '*(const urow *)(b + j * b_j) & high')}"
    )
    condition = "defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__"
    return Intrinsic(
        text,
        frozenset("ABC"),
        plain,
        MappingProxyType({"c": (condition, fast)}),
        prelude_helpers=("from_bf16",),
        max_extent=MappingProxyType({"m": 16, "n": 4}),
        fixed_strides=(("B", "l", 2, ""),),
    )


def _dot2_vectors(lanes: int) -> str:
    """Return the body of `dot2` in vectors of GCC, for x86 and WebAssembly."""
    vectors = (
        f"  typedef int row __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef int urow __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));\n"
        f"  typedef short shorts __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef signed char numbers __attribute__((vector_size({2 * lanes}), unused));\n"
        f"  typedef char bytes __attribute__((vector_size({2 * lanes})));\n"
        f"  typedef char ubytes __attribute__((vector_size({2 * lanes}), aligned(1), may_alias));\n"
        "  int two;\n"
        "  bytes columns;\n"
        "  __builtin_memcpy(&two, a, 4);\n"
        "  if (b_i == 2) columns = *(const ubytes *)b;\n"
        f"  else for (int i = 0; i < {lanes}; i++) __builtin_memcpy((char *)&columns + 2 * i, b + i * b_i, 2);\n"
        "  const shorts left = (shorts)((row){0} + two);\n"
    )
    # gcc 12 converts a vector of bytes in four instructions instead of one; its builtins for 512 bits take a mask
    converted = "__builtin_convertvector((numbers)columns, shorts)"
    gcc = {8: "__builtin_ia32_pmovsxbw256(columns)", 16: "__builtin_ia32_pmovsxbw512_mask(columns, (shorts){0}, -1)"}
    widened = (
        "#if defined(__clang__)\n"
        f"  const shorts right = {converted};\n"
        "#else\n"
        f"  const shorts right = (shorts){gcc.get(lanes, converted)};\n"
        "#endif\n"
    )
    return vectors + widened + _add_pairs(lanes)


def dot2(lanes: int) -> Intrinsic:
    """Return sums of two integer products for each of `lanes` columns: one instruction on 16-bit integers."""
    name = f"dot2_i16i8_x{lanes}"
    plain = _whole_sums(lanes, 2)
    opencl = (
        "  if (b_i == 2) {\n"
        "    const short16 right = convert_short16(vload16(0, b)), left = as_short16((int8)as_int(vload2(0, a)));\n"
        "    const int8 low = convert_int8(left.even) * convert_int8(right.even);\n"
        "    vstore8(vload8(0, c) + low + convert_int8(left.odd) * convert_int8(right.odd), 0, c);\n"
        "  } else\n"
    )
    macro = {8: "defined(__AVX2__)", 16: "defined(__AVX512BW__)"}.get(
        lanes, "defined(__SSE2__) || defined(__wasm_simd128__)"
    )
    fast = {"c": (macro, _dot2_vectors(lanes))}
    if lanes == 8:
        fast["opencl"] = ("1", opencl + plain)
    return Intrinsic(_dot(name, i16, i8, lanes, 2, i32), frozenset("ABC"), plain, MappingProxyType(fast))


def _add_pairs(lanes: int) -> str:
    """Return statements that multiply `left` by `right`, vectors of 16-bit integers, and add pairs of products to the sums."""
    gcc = {4: "pmaddwd128(left, right)", 8: "pmaddwd256(left, right)", 16: "pmaddwd512_mask(left, right, (row){0}, -1)"}
    return (
        "#if defined(__wasm_simd128__)\n"
        "  *(urow *)c += (row)__builtin_wasm_dot_s_i32x4_i16x8(left, right);\n"
        "#elif defined(__clang__)\n"
        f"  *(urow *)c += (row)__builtin_ia32_pmaddwd{32 * lanes}(left, right);\n"
        "#else\n"
        f"  *(urow *)c += (row)__builtin_ia32_{gcc[lanes]};\n"
        "#endif"
    )


def _dot8_i4_vectors(lanes: int) -> str:
    """Return the body of `dot8_i4` in vectors of GCC, for x86: products of unsigned by signed bytes (`pmaddubsw`)."""
    bits = 32 * lanes

    def sums(mask: str, zeros: str) -> str:
        def of_bytes(name: str, a: str, b: str, kind: str) -> str:
            return f"({kind})__builtin_ia32_{name}{bits}{mask}((bytes){a}, {b}{zeros and f', ({kind}){zeros}'})"

        def products(a: str, b: str) -> str:
            return of_bytes("pmaddubsw", a, b, "shorts")

        return (
            f"  const bytes evens = {of_bytes('pshufb', 'all', 'pick', 'bytes')};\n"
            f"  const bytes odds = {of_bytes('pshufb', 'all', 'pick + 1', 'bytes')};\n"
            f"  const shorts less = {products('eight', 'evens')} + {products('eight', 'odds')};\n"
            f"  const shorts sums = {products('low', 'evens')} + {products('high', 'odds')} - less;\n"
            f"  *(urow *)c += (row)__builtin_ia32_pmaddwd{bits}{mask}(sums, (shorts){{0}} + 1{zeros and f', (row){zeros}'});"
        )

    # gcc 12's builtins for 512 bits take a mask
    plain, masked = sums("", ""), sums("_mask", "{0}, -1")
    chosen = plain if lanes < 16 else f"#if defined(__clang__)\n{plain}\n#else\n{masked}\n#endif"
    return (
        (
            f"  typedef int row __attribute__((vector_size({4 * lanes})));\n"
            f"  typedef int urow __attribute__((vector_size({4 * lanes}), aligned(1), may_alias));\n"
            f"  typedef long long wide __attribute__((vector_size({4 * lanes})));\n"
            f"  typedef short shorts __attribute__((vector_size({4 * lanes})));\n"
            f"  typedef char bytes __attribute__((vector_size({4 * lanes})));\n"
            "  long long eight_rows;\n"
            "  row columns;\n"
            "  __builtin_memcpy(&eight_rows, a, 8);\n"
            "  if (b_i == 4) columns = *(const urow *)b;\n"
            f"  else for (int i = 0; i < {lanes}; i++) __builtin_memcpy((char *)&columns + 4 * i, b + i * b_i, 4);\n"
            "  const row numbers = columns ^ (int)0x88888888;\n"  # two's complement -8 .. 7 to 0 .. 15: `less` subtracts the offset again
            "  const row low = numbers & 0x0f0f0f0f, high = (numbers >> 4) & 0x0f0f0f0f, eight = (row){0} + 0x08080808;\n"
            f"  const bytes all = (bytes)((wide){{0}} + eight_rows), pick = {{{', '.join(['0, 2, 4, 6'] * lanes)}}};\n"
        )
        + chosen
    )


def dot8_i4(lanes: int) -> Intrinsic:
    """Return sums of eight products of bytes and 4-bit numbers for each of `lanes` columns, four bytes each."""
    name = f"dot8_i8i4_x{lanes}"
    sixteen, eight = "const(16, i32)", "const(8, i32)"
    half = f"select(vh == 0, cast(B[vi, vq], i32) % {sixteen}, cast(B[vi, vq], i32) // {sixteen})"
    number = f"({half} + {eight}) % {sixteen} - {eight}"
    text = f"""
@prim_func(outputs=1)
def {name}(A: Buffer((8,), i8), B: Buffer(({lanes}, 4), u8), C: Buffer(({lanes},), i32)):
    for i in serial({lanes}):
        for q in serial(4):
            for h in serial(2):
                with block("dot"):
                    vi = spatial({lanes}, i); vq = reduce(4, q); vh = reduce(2, h)
                    C[vi] = C[vi] + cast(A[vq * 2 + vh], i32) * cast(cast({number}, i8), i32)
"""
    plain = (
        f"  for (int i = 0; i < {lanes}; i++)\n"
        "    for (int q = 0; q < 4; q++) {\n"
        "      const int both = b[i * b_i + q];\n"
        "      c[i] += (int)a[2 * q] * (((both & 15) ^ 8) - 8) + (int)a[2 * q + 1] * (((both >> 4) ^ 8) - 8);\n"
        "    }"
    )
    macro = {4: "defined(__SSSE3__)", 8: "defined(__AVX2__)", 16: "defined(__AVX512BW__)"}[lanes]
    fast = (macro, _dot8_i4_vectors(lanes))
    return Intrinsic(text, frozenset("ABC"), plain, MappingProxyType({"c": fast}))


def amx(left: DType, right: DType, total: DType, mnemonic: str, flag: str) -> Intrinsic:
    """Return a tile product of AMX: up to 16 rows by 16 columns, over all steps of the reduction.

    B has the layout of the tile registers: groups of steps of 4 bytes, for 16 columns in a row.
    """
    steps = 4 // left.bytes
    name = f"amx_{left.short}{right.short if right is not left else ''}_16x16"
    deep = 16 * steps
    left_at = f"A[vi, vt * {deep} + vr * {steps} + vh]"
    text = f"""
@prim_func(outputs=1)
def {name}(A: Buffer((m, n * {deep}), {left.short}), B: Buffer((n, 16, 16, {steps}), {right.short}), C: Buffer((m, 16), {total.short})):
    for i in serial(m):
        for j in serial(16):
            for t in serial(n):
                for r in serial(16):
                    for h in serial({steps}):
                        with block("dot"):
                            vi = spatial(m, i); vj = spatial(16, j)
                            vt = reduce(n, t); vr = reduce(16, r); vh = reduce({steps}, h)
                            C[vi, vj] = C[vi, vj] + cast({left_at}, {total.short}) * cast(B[vt, vr, vj, vh], {total.short})
"""
    read = ("rt_from_bf16_f32(", ")") if left is bf16 else ("(int)", "")
    a = f"{read[0]}a[i * a_i + t * {deep} + r * {steps} + h]{read[1]}"
    b = f"{read[0]}b[t * b_t + r * b_r + j * b_j + h]{read[1]}"
    plain = (
        "  for (int i = 0; i < m; i++)\n    for (int t = 0; t < n; t++)\n      for (int r = 0; r < 16; r++)\n"
        f"        for (int j = 0; j < 16; j++)\n          for (int h = 0; h < {steps}; h++)\n"
        f"            c[i * c_i + j] += {a} * {b};"
    )
    # Palette 1; tile 0: sums, 1: rows, 2: columns. A process must request the tile registers from Linux once, by arch_prctl
    # (ARCH_REQ_XCOMP_PERM; the kernel's documentation, x86/xstate).
    fast = (
        "  extern long syscall(long, ...);\n"
        "  static int requested;\n"
        "  if (!requested) {\n    syscall(158, 0x1023, 18);\n    requested = 1;\n  }\n"
        "  struct { unsigned char palette, start, zeros[14]; unsigned short bytes[16]; unsigned char rows[16]; } tiles = {0};\n"
        "  tiles.palette = 1;\n"
        "  for (int k = 0; k < 3; k++) tiles.bytes[k] = 64, tiles.rows[k] = k == 2 ? 16 : m;\n"
        '  __asm__ volatile("ldtilecfg %0" : : "m"(tiles));\n'
        '  __asm__ volatile("tileloadd (%0,%1,1), %%tmm0" : : "r"(c), "r"((long)c_i * 4) : "memory");\n'
        "  for (int t = 0; t < n; t++) {\n"
        f'    __asm__ volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(a + t * {deep}), "r"((long)a_i * {left.bytes}) : "memory");\n'
        f'    __asm__ volatile("tileloadd (%0,%1,1), %%tmm2" : : "r"(b + t * b_t), "r"((long)b_r * {left.bytes}) : "memory");\n'
        f'    __asm__ volatile("{mnemonic} %%tmm2, %%tmm1, %%tmm0" : :);\n'
        "  }\n"
        '  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(c), "r"((long)c_i * 4) : "memory");\n'
        '  __asm__ volatile("tilerelease" : :);'
    )
    return Intrinsic(
        text,
        frozenset("ABC"),
        plain,
        MappingProxyType({"c": (f"defined({flag}) && defined(__linux__)", fast)}),
        language="c",
        prelude_helpers=("from_bf16",) if left is bf16 else (),
        max_extent=MappingProxyType({"m": 16}),
        fixed_strides=(("B", "j", steps, ""),),
    )
