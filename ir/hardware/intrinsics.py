"""Operations of machines that replace loop nests: their semantics and their text.

An intrinsic is a tensor function over tiles of constant size (its semantics), with the body of an equivalent C function
on tiles inside larger buffers. The primitive `tensorize` marks a matching nest with the intrinsic
(`LoopMarks.intrinsic`). The nest keeps its meaning; code generation puts a call in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations
from types import MappingProxyType

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, bool_, f32, i8, i16, i32, u8
from relax_tune.ir.core.expr import TRUE, Const, Expr, Load, Op, Var, as_int, const, free_vars, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, Stmt, lower_block
from relax_tune.ir.hardware import mma, wgmma
from relax_tune.ir.text.parser import parse_prim_func

# An access to a tile: the buffer and the indices, in which the loops of the nest move.
Access = tuple[Buffer, tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """An operation of a machine that replaces a loop nest on tiles of constant size.

    source: text of the tensor function that says what the operation computes (`semantics`). Its parameters are the operands, the
        written one last. A loop whose extent is a symbol may have any constant extent.
    dense: operands whose elements are contiguous along their last index.
    body: C twin of the semantics, in the subset that OpenCL shares. It sees a pointer `a` to the first element of operand A, the
        stride `a_i` of loop variable i in A (except in the last index of a dense operand), and each symbol as a constant. `@A` is
        the address space of A.
    fast: language -> (preprocessor condition, body to use where it holds).
    language: the only language that has the operation; empty for all. Other languages keep the loops.
    prelude_helpers: names of prelude functions that the bodies call.
    helpers: extents of the open loops -> other text that the bodies call, by name.
    max_extent: symbol -> largest extent.
    warp_operands: operand in registers of the warp (scope `warp`) -> loop over the work-items that hold a part each.
    fixed_strides: (operand, loop variable, factor, other variable). The variable's stride must be `factor` times the other's, or
        `factor` elements if the other is empty. Rows are not swizzled.
    proxy_fence: (call, helper) before the barrier that follows writes to shared memory which the async proxy reads (PTX ISA,
        "Proxies" and `fence.proxy.async`).

    Loops over work-items in the semantics make it an operation of a warp, or of several warps. Such an operation reads operands in
    shared memory, where rows of eight elements are aligned; the written operand belongs to the work-item. For each operand A in
    shared memory its body also sees `a_row`, the row length if rows are swizzled, else 0. `a_at` is the offset to add before the
    swizzle (`relax_tune.ir.hardware.mma.PLACES`).
    """

    source: str
    dense: frozenset[str]
    body: str
    fast: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    language: str = ""
    prelude_helpers: tuple[str, ...] = ()
    helpers: Callable[[Mapping[str, int]], Mapping[str, str]] = lambda sizes: {}
    max_extent: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    warp_operands: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fixed_strides: tuple[tuple[str, str, int, str], ...] = ()
    proxy_fence: tuple[str, str] | None = None

    @property
    def of_warp(self) -> bool:
        return any(f.kind == "item" for f in self.loops)

    @property
    def semantics(self) -> PrimFunc:
        return _read(self.source)

    @property
    def name(self) -> str:
        return self.semantics.name

    @property
    def loops(self) -> tuple[For, ...]:
        """Loops of the semantics, outermost first."""
        meant = nest_of(self.semantics.body)
        assert meant is not None
        return meant[0]

    def strides(self) -> Iterator[tuple[str, str]]:
        """Yield (operand, loop variable) of every stride that the body takes, in order."""
        meant = nest_of(self.semantics.body)
        assert meant is not None
        found = {b.name: where for b, where in accesses_of(meant[1])}
        for b in self.semantics.buffers:
            where = found[b.name]
            yield from ((b.name, v.name) for v in free_vars(*(where[:-1] if b.name in self.dense else where)))


@cache
def _read(text: str) -> PrimFunc:
    return parse_prim_func(text)


def nest_of(s: Stmt) -> tuple[tuple[For, ...], BufferStore] | None:
    """Return the loops of a perfect nest and its store over their variables; None for other statements."""
    found: list[For] = []
    while isinstance(s, For):
        found.append(s)
        s = s.body
    if isinstance(s, Block) and s.init is None and s.predicate is TRUE:
        lowered = lower_block(s)
        return (tuple(found), lowered) if isinstance(lowered, BufferStore) else None
    return None


def accesses_of(store: BufferStore) -> list[Access]:
    """Return the reads of a store in order of appearance, then its write."""
    found: list[Access] = []

    def visit(e: Expr) -> None:
        if isinstance(e, Load):
            found.append((e.buffer, e.indices))
        elif isinstance(e, Op):
            for a in e.args:
                visit(a)

    visit(store.value)
    return [*dict.fromkeys(found), (store.buffer, store.indices)]


@dataclass(frozen=True, slots=True)
class Matched:
    """A loop nest as an intrinsic's.

    accesses: operand -> access.
    loops: loop variable of the semantics -> of the nest. Loops of one iteration may be missing.
    sizes: symbol of the semantics -> extent.
    """

    accesses: Mapping[str, Access]
    loops: Mapping[Var, Var]
    sizes: Mapping[str, Expr]


def match(intrinsic: Intrinsic, loops: Sequence[For], store: BufferStore) -> Matched | None:
    """Match a loop nest to an intrinsic; None if it computes something else.

    Of `loops` only variables, extents, kinds and axes count. They are the loops of the semantics in order.
    The values agree up to the order of sums and products. Each operand moves with the loops that its indices in the semantics name.
    A dense operand moves along adjacent elements with the loops of its last index.
    """
    env = Env()
    for f in loops:
        env = env.with_loop(f.var, f.extent)
    # a condition on a step may be written with the loops around, which do not matter to it
    value = transform(store.value, lambda e: simplify(e, env) if e.dtype is bool_ else None)
    store = BufferStore(store.buffer, store.indices, value)
    own = intrinsic.loops
    open_ = [f for f in own if as_int(f.extent) is None]
    for left in range(len(open_) + 1):
        for missing in combinations(open_, left):
            found = _match([f for f in own if f not in missing], missing, intrinsic, loops, store)
            if found is not None:
                return found
    return None


def _match(
    meant: Sequence[For], missing: Sequence[For], intrinsic: Intrinsic, loops: Sequence[For], store: BufferStore
) -> Matched | None:
    if len(meant) != len(loops):
        return None
    sizes: dict[str, Expr] = {f.extent.name: const(1) for f in missing if isinstance(f.extent, Var)}
    for f, g in zip(meant, loops):
        if isinstance(f.extent, Var):
            sizes[f.extent.name] = g.extent
        if (f.kind, f.axis) != (g.kind, g.axis) or as_int(f.extent) not in (None, as_int(g.extent)):
            return None
    grown = nest_of(intrinsic.semantics.body)
    assert grown is not None
    variables = {f.var: g.var for f, g in zip(meant, loops)}
    found: dict[str, Access] = {}
    if not (
        _bind(found, grown[1], (store.buffer, store.indices)) and _same(grown[1].value, store.value, variables, found)
    ):
        return None
    items = {g.var for g in loops if g.kind == "item"}
    for b, where in accesses_of(grown[1]):
        parts = {g.var for f, g in zip(meant, loops) if intrinsic.warp_operands.get(b.name) == f.var.name}
        if not _moves(found[b.name], where, variables, loops, items | parts, b.name in intrinsic.dense):
            return None
    others = [buffer for name, (buffer, _) in found.items() if name != grown[1].buffer.name]
    return None if store.buffer in others else Matched(found, variables, sizes)


def _bind(found: dict[str, Access], meant: BufferStore | Load, access: Access) -> bool:
    if meant.buffer.dtype is not access[0].dtype:
        return False
    return found.setdefault(meant.buffer.name, access) == access


def _same(meant: Expr, e: Expr, variables: Mapping[Var, Var], found: dict[str, Access]) -> bool:
    if isinstance(meant, Load):
        return isinstance(e, Load) and _bind(found, meant, (e.buffer, e.indices))
    if isinstance(meant, Var):
        return variables.get(meant) is e
    if isinstance(meant, Const) or not isinstance(meant, Op):
        return meant is e
    if not isinstance(e, Op) or (e.op, e.dtype, len(e.args)) != (meant.op, meant.dtype, len(meant.args)):
        return False
    orders = [e.args, e.args[::-1]] if meant.op in ("add", "mul") else [e.args]
    for args in orders:
        tried = dict(found)
        if all(_same(a, b, variables, tried) for a, b in zip(meant.args, args)):
            found.update(tried)
            return True
    return False


def _moves(
    access: Access,
    meant: Sequence[Expr],
    variables: Mapping[Var, Var],
    loops: Sequence[For],
    items: set[Var],
    dense: bool,
) -> bool:
    """Return whether an access moves linearly with the loops of its indices in the semantics, and with no others.

    A dense operand has the same strides along its last dimension. A work-item's own operand need not move with the items.
    """
    env = Env()
    for f in loops:
        env = env.with_loop(f.var, f.extent)
    still = {f.var for f in loops if as_int(f.extent) == 1}
    wanted = {variables[v] for v in free_vars(*meant) if v in variables} - still
    beside = linear(meant[-1], tuple(variables)) if dense else None
    steps = {} if beside is None else {variables[v]: as_int(k) for v, k in beside[0].items()}
    moved = set[Var]()
    for d, e in enumerate(access[1]):
        parts = linear(e, tuple(f.var for f in loops), env)
        if parts is None:
            return False
        moved |= parts[0].keys() - still
        last = d == len(access[1]) - 1
        if any((as_int(k) if last else None) != steps[v] for v, k in parts[0].items() if v in steps):
            return False
    return moved == wanted or (access[0].scope == "local" and moved | items == wanted | items and moved <= wanted)


def _dot(name: str, left: DType, right: DType, lanes: int, steps: int, total: DType) -> str:
    """Return the semantics of a vector of sums that grow by `steps` products each."""
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
    """Return the plain body of sums of products of whole numbers, which wrap."""
    return (
        f"  for (int i = 0; i < {lanes}; i++) {{\n"
        "    unsigned sum = c[i];\n"
        f"    for (int k = 0; k < {steps}; k++) sum += (int)a[k] * (int)b[i * b_i + k];\n"
        "    c[i] = (int)sum;\n"
        "  }"
    )


def _dot4(lanes: int) -> Intrinsic:
    """Return sums of four products of bytes for each of `lanes` columns: one instruction of VNNI."""
    name = f"dot4_u8i8_x{lanes}"
    has = {
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
        MappingProxyType({"c": (f"{has[lanes]} && !defined(__clang__)", fast)}),
    )


def _dot2_bf16(lanes: int) -> Intrinsic:
    """Return sums of two products of bf16 for each of `lanes` columns: one instruction of AVX512-BF16.

    The instruction takes subnormal numbers as 0. Elsewhere its lanes are emulated in f32.
    """
    name = f"dot2_bf16_x{lanes}"
    plain = (
        f"  for (int i = 0; i < {lanes}; i++)\n"
        "    for (int k = 0; k < 2; k++) c[i] += rt_from_bf16_f32(a[k]) * rt_from_bf16_f32(b[i * b_i + k]);"
    )
    loaded = (
        f"  typedef int row __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef int urow __attribute__((vector_size({4 * lanes}), aligned(2), may_alias));\n"
        f"  typedef float sums __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef float usums __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));\n"
        "  int two;\n"
        "  row right;\n"
        "  __builtin_memcpy(&two, a, 4);\n"
        "  if (b_i == 2) right = *(const urow *)b;\n"
        f"  else for (int i = 0; i < {lanes}; i++) __builtin_memcpy((char *)&right + 4 * i, b + i * b_i, 4);\n"
        "  const row left = (row){0} + two;\n"
    )
    emulated = (
        "  const int high = -65536;\n"
        "  *(usums *)c += (sums)(left << 16) * (sums)(right << 16) + (sums)(left & high) * (sums)(right & high);"
    )
    if lanes == 16:
        emulated = (
            "#if defined(__AVX512BF16__)\n"
            "  sums total = *(const usums *)c;\n"
            '  __asm__("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(left), "v"(right));\n'
            "  *(usums *)c = total;\n"
            "#else\n"
            f"{emulated}\n"
            "#endif"
        )
    return Intrinsic(
        _dot(name, bf16, bf16, lanes, 2, f32),
        frozenset("ABC"),
        plain,
        MappingProxyType({"c": ("defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__", loaded + emulated)}),
        prelude_helpers=("from_bf16",),
    )


def _dot2_vectors(lanes: int) -> str:
    """Return the body of `_dot2` in vectors of GCC, for x86 and WebAssembly."""
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
    # gcc 12 converts a vector of bytes in four instructions, where the machine has one; its names for 512 bits have a mask
    converted = "__builtin_convertvector((numbers)columns, shorts)"
    gcc = {
        8: ("__builtin_ia32_pmovsxbw256(columns)", "pmaddwd256(left, right)"),
        16: ("__builtin_ia32_pmovsxbw512_mask(columns, (shorts){0}, -1)", "pmaddwd512_mask(left, right, (row){0}, -1)"),
    }
    widen, multiply = gcc.get(lanes, (converted, "pmaddwd128(left, right)"))
    return vectors + (
        "#if defined(__wasm_simd128__)\n"
        f"  const shorts right = {converted};\n"
        "  *(urow *)c += (row)__builtin_wasm_dot_s_i32x4_i16x8(left, right);\n"
        "#elif defined(__clang__)\n"
        f"  const shorts right = {converted};\n"
        f"  *(urow *)c += (row)__builtin_ia32_pmaddwd{32 * lanes}(left, right);\n"
        "#else\n"
        f"  const shorts right = (shorts){widen};\n"
        f"  *(urow *)c += (row)__builtin_ia32_{multiply};\n"
        "#endif"
    )


def _dot2(lanes: int) -> Intrinsic:
    """Return sums of two products of whole numbers for each of `lanes` columns: one instruction on numbers of 16 bits."""
    name = f"dot2_i16i8_x{lanes}"
    plain = _whole_sums(lanes, 2)
    opencl = (
        "  if (b_i == 2) {\n"
        "    const short16 right = convert_short16(vload16(0, b)), left = as_short16((int8)as_int(vload2(0, a)));\n"
        "    const int8 low = convert_int8(left.even) * convert_int8(right.even);\n"
        "    vstore8(vload8(0, c) + low + convert_int8(left.odd) * convert_int8(right.odd), 0, c);\n"
        "  } else\n"
    )
    has = {8: "defined(__AVX2__)", 16: "defined(__AVX512BW__)"}.get(
        lanes, "defined(__SSE2__) || defined(__wasm_simd128__)"
    )
    fast = {"c": (has, _dot2_vectors(lanes))}
    if lanes == 8:
        fast["opencl"] = ("1", opencl + plain)
    return Intrinsic(_dot(name, i16, i8, lanes, 2, i32), frozenset("ABC"), plain, MappingProxyType(fast))


def _dot2_i4(lanes: int) -> Intrinsic:
    """Return `_dot2` for columns of 4-bit numbers, of which a byte has two steps."""
    name = f"dot2_i16i4_x{lanes}"
    text = f"""
@prim_func(outputs=1)
def {name}(A: Buffer((2,), i16), B: Buffer(({lanes},), u8), C: Buffer(({lanes},), i32)):
    for i in serial({lanes}):
        for k in serial(2):
            with block("dot"):
                vi = spatial({lanes}, i); vk = reduce(2, k)
                C[vi] = C[vi] + cast(A[vk], i32) * cast(cast((select(vk == 0, cast(B[vi], i32) % const(16, i32), cast(B[vi], i32) // const(16, i32)) + const(8, i32)) % const(16, i32) - const(8, i32), i8), i32)
"""
    plain = (
        f"  for (int i = 0; i < {lanes}; i++)\n"
        "    c[i] += (int)a[0] * (((b[i] & 15) ^ 8) - 8) + (int)a[1] * (((b[i] >> 4) ^ 8) - 8);"
    )
    numbers = "__builtin_convertvector(bytes, row)"
    widen = {
        4: ("__builtin_ia32_pmovzxbd128", ""), 8: ("__builtin_ia32_pmovzxbd256", ""),
        16: ("__builtin_ia32_pmovzxbd512_mask", ", (row){0}, -1"),
    }  # fmt: skip
    # a copy of fewer bytes than a vector has would pass through memory
    part, parts, whole = {
        4: ("int", "", "(int __attribute__((vector_size(16)))){part}"),
        8: ("long long", "", "(long long __attribute__((vector_size(16)))){part}"),
        16: ("char", " __attribute__((vector_size(16)))", "part"),
    }[lanes]
    multiply = {4: "pmaddwd128(left, right)", 8: "pmaddwd256(left, right)"}
    gcc = multiply.get(lanes, "pmaddwd512_mask(left, right, (row){0}, -1)")
    fast = (
        f"  typedef int row __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef int urow __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));\n"
        f"  typedef short shorts __attribute__((vector_size({4 * lanes})));\n"
        f"  typedef unsigned char ubytes __attribute__((vector_size({lanes}), aligned(1), may_alias, unused));\n"
        "  typedef char sixteen __attribute__((vector_size(16), unused));\n"
        "  int two;\n"
        "  __builtin_memcpy(&two, a, 4);\n"
        "  const shorts left = (shorts)((row){0} + two);\n"
        "#if defined(__clang__)\n"
        "  const ubytes bytes = *(const ubytes *)b;\n"
        f"  const row wide = {numbers};\n"
        "#else\n"
        f"  {part} part{parts};\n"
        "  __builtin_memcpy(&part, b, sizeof part);\n"
        f"  const sixteen bytes = (sixteen){whole};\n"
        f"  const row wide = {widen[lanes][0]}(bytes{widen[lanes][1]});\n"
        "#endif\n"
        "  const row halves = ((wide | wide << 12) & 0x000f000f) ^ 0x00080008;\n"  # of 16 bits
        "  const shorts right = (shorts)halves - 8;\n"
        "#if defined(__wasm_simd128__)\n"
        "  *(urow *)c += (row)__builtin_wasm_dot_s_i32x4_i16x8(left, right);\n"
        "#elif defined(__clang__)\n"
        f"  *(urow *)c += (row)__builtin_ia32_pmaddwd{32 * lanes}(left, right);\n"
        "#else\n"
        f"  *(urow *)c += (row)__builtin_ia32_{gcc};\n"
        "#endif"
    )
    has = {4: "defined(__SSE4_1__) || defined(__wasm_simd128__)", 8: "defined(__AVX2__)", 16: "defined(__AVX512BW__)"}
    return Intrinsic(text, frozenset("ABC"), plain, MappingProxyType({"c": (has[lanes], fast)}))


def _amx(left: DType, right: DType, total: DType, mnemonic: str, flag: str) -> Intrinsic:
    """Return a tile product of AMX: up to 16 rows by 16 columns, over all steps of the reduction.

    Columns lie as the unit wants them: the steps of 4 bytes next to each other, 16 columns of them in a row.
    """
    steps = 4 // left.bytes
    name = f"amx_{left.short}{right.short if right is not left else ''}_16x16"
    deep = 16 * steps
    text = f"""
@prim_func(outputs=1)
def {name}(A: Buffer((m, n * {deep}), {left.short}), B: Buffer((n, 16, 16, {steps}), {right.short}), C: Buffer((m, 16), {total.short})):
    for i in serial(m):
        for j in serial(16):
            for t in serial(n):
                for r in serial(16):
                    for h in serial({steps}):
                        with block("dot"):
                            vi = spatial(m, i); vj = spatial(16, j); vt = reduce(n, t); vr = reduce(16, r); vh = reduce({steps}, h)
                            C[vi, vj] = C[vi, vj] + cast(A[vi, vt * {deep} + vr * {steps} + vh], {total.short}) * cast(B[vt, vr, vj, vh], {total.short})
"""
    read = ("rt_from_bf16_f32(", ")") if left is bf16 else ("(int)", "")
    a = f"{read[0]}a[i * a_i + t * {deep} + r * {steps} + h]{read[1]}"
    b = f"{read[0]}b[t * b_t + r * b_r + j * b_j + h]{read[1]}"
    plain = (
        "  for (int i = 0; i < m; i++)\n    for (int t = 0; t < n; t++)\n      for (int r = 0; r < 16; r++)\n"
        f"        for (int j = 0; j < 16; j++)\n          for (int h = 0; h < {steps}; h++)\n"
        f"            c[i * c_i + j] += {a} * {b};"
    )
    # palette 1; tile 0: sums, 1: rows, 2: columns. Linux wants a process to ask for the registers once (its x86/xstate page).
    fast = (
        "  extern long syscall(long, ...);\n"
        "  static int asked;\n"
        "  if (!asked) {\n    syscall(158, 0x1023, 18);\n    asked = 1;\n  }\n"
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
    """Return the transpose of a square tile of f32 in registers: rows exchange halves, then quarters, and so on."""
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
    stage, apart = 0, 1
    while apart < size:
        for k in range(size):
            low, high = k & ~apart, k | apart
            shift = apart if k & apart else 0
            lanes = [n + shift if not n & apart else size + n + shift - apart for n in range(size)]
            chosen = ", ".join(map(str, lanes))
            lines.append(
                f"  const row r{stage + 1}_{k} = __builtin_shufflevector(r{stage}_{low}, r{stage}_{high}, {chosen});"
            )
        stage, apart = stage + 1, apart * 2
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
    """Yield C += A B in f32 of 16-bit floats, by one warp or four.

    The suffix has a letter for each operand. `n`: not transposed. `t`: transposed. `o`: in the registers of work-items.
    """
    for dtype in ("f16", "bf16"):
        for form in ("nn", "nt", "tn", "tt"):
            lies = (dtype, form[0] == "t", form[1] == "t")
            yield (
                f"mma_{dtype}_{form}",
                Intrinsic(
                    mma.semantics(f"mma_{dtype}_{form}", *lies),
                    frozenset("ABC"),
                    mma.scalar_body(*lies),
                    MappingProxyType({"cuda": (mma.CONDITION, mma.cuda_body(*lies))}),
                    language="cuda",
                    prelude_helpers=(f"from_{dtype}",),
                    helpers=mma.helpers,
                ),
            )
            yield (
                f"wgmma_{dtype}_{form}",
                Intrinsic(
                    wgmma.semantics(f"wgmma_{dtype}_{form}", *lies),
                    frozenset("ABC"),
                    wgmma.scalar_body(*lies),
                    MappingProxyType({"cuda": (wgmma.CONDITION, wgmma.cuda_body(*lies))}),
                    language="cuda",
                    prelude_helpers=(f"from_{dtype}",),
                    helpers=partial(wgmma.helpers, dtype),
                    max_extent=MappingProxyType({"n": wgmma.MAX_TILES}),
                    fixed_strides=wgmma.fixed_strides(*lies[1:]),
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


# Every intrinsic by its name. A new one is added here, and nowhere else.
INTRINSICS: Mapping[str, Intrinsic] = MappingProxyType({
    # sums of four products of bytes for a vector of columns (VNNI: one instruction)
    **{f"dot4_u8i8_x{lanes}": _dot4(lanes) for lanes in (8, 16)},
    # sums of two products of bf16 for a vector of columns (AVX512-BF16: one instruction)
    **{f"dot2_bf16_x{lanes}": _dot2_bf16(lanes) for lanes in (4, 8, 16)},
    # sums of two products of 16 bits for a vector of columns (AVX2: one instruction and an addition)
    **{f"dot2_i16i8_x{lanes}": _dot2(lanes) for lanes in (4, 8, 16)},
    **{f"dot2_i16i4_x{lanes}": _dot2_i4(lanes) for lanes in (4, 8, 16)},
    # tiles of a product over its whole reduction (AMX)
    "amx_bf16_16x16": _amx(bf16, bf16, f32, "tdpbf16ps", "__AMX_BF16__"),
    "amx_u8i8_16x16": _amx(u8, i8, i32, "tdpbusd", "__AMX_INT8__"),
    # a tile transposed
    "transpose_f32_8x8": _transpose(8),
    "transpose_f32_16x16": _transpose(16),
    # a tile of a product grows by one step of its reduction
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
