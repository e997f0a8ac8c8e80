"""The CUDA target: C++ with vectors as structs, indices of blocks and threads, shared arrays, barriers.

No header is included, so that NVRTC needs no include path. Meant for sm_70 and later. Features of later architectures are guarded by
`__CUDA_ARCH__`, with a plain C++ fallback.

Tests: `tests/ir/codegen/test_text.py`, `tests/cuda_emulation/test_emulation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from relax_tune.ir.codegen.lower.affine import Poly, as_constant
from relax_tune.ir.codegen.print import integers, math
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.c.prelude import SCALARS
from relax_tune.ir.codegen.print.c.printer import float_literal
from relax_tune.ir.codegen.print.c_values import CValues
from relax_tune.ir.codegen.print.cfamily import Grid
from relax_tune.ir.codegen.print.cp_async import AsyncCopyPrinter
from relax_tune.ir.codegen.print.grid import product
from relax_tune.ir.codegen.print.prelude import FUNCTIONS, HALF, Prelude, packed_bits, stored
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32, i32
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.scalar_ops import SCALAR_OPS
from relax_tune.ir.core.stmt import Barrier, For, Stmt, loops, stores, walk
from relax_tune.ir.hardware.intrinsic import Intrinsic
from relax_tune.ir.hardware.intrinsics import INTRINSICS

# Widest memory access of a thread.
ACCESS_BYTES = 16
# Largest static shared memory of a kernel; larger arrays are dynamic, requested at launch.
STATIC_BYTES = 48 << 10
# Most blocks along the second and third axis of a launch.
AXIS_LIMIT = 65535

# A loop of more than LONG_LOOP iterations is unrolled UNROLL_FACTOR times. Unrolled completely, it takes more registers and longer to
# compile.
LONG_LOOP, UNROLL_FACTOR = 32, 8

VECTOR = f"""template <int B> struct rt_mask;
template <> struct rt_mask<1> {{ typedef signed char type; }};
template <> struct rt_mask<2> {{ typedef short type; }};
template <> struct rt_mask<4> {{ typedef int type; }};
template <> struct rt_mask<8> {{ typedef i64 type; }};
#define RT_INLINE __device__ __forceinline__
#define RT_LANES _Pragma("unroll") for (int k = 0; k < W; k++)
#define RT_BETWEEN(op) \\
  friend RT_INLINE rt_vec operator op(const rt_vec &a, const rt_vec &b) {{ rt_vec r; RT_LANES r.v[k] = a.v[k] op b.v[k]; return r; }} \\
  friend RT_INLINE rt_vec operator op(const rt_vec &a, T b) {{ rt_vec r; RT_LANES r.v[k] = a.v[k] op b; return r; }} \\
  friend RT_INLINE rt_vec operator op(T a, const rt_vec &b) {{ rt_vec r; RT_LANES r.v[k] = a op b.v[k]; return r; }}
#define RT_COMPARED(op) \\
  friend RT_INLINE mask operator op(const rt_vec &a, const rt_vec &b) {{ mask r; RT_LANES r.v[k] = -(a.v[k] op b.v[k]); return r; }} \\
  friend RT_INLINE mask operator op(const rt_vec &a, T b) {{ mask r; RT_LANES r.v[k] = -(a.v[k] op b); return r; }}
template <class T, int W> struct alignas(sizeof(T) * W < {ACCESS_BYTES} ? sizeof(T) * W : {ACCESS_BYTES}) rt_vec {{
  typedef T type;
  typedef rt_vec<typename rt_mask<sizeof(T)>::type, W> mask;
  enum {{ width = W }};
  T v[W];
  RT_INLINE T &operator[](int k) {{ return v[k]; }}
  RT_INLINE const T &operator[](int k) const {{ return v[k]; }}
  template <class... A> static RT_INLINE rt_vec of(A... a) {{ return rt_vec{{{{(T)a...}}}}; }}
  RT_BETWEEN(+) RT_BETWEEN(-) RT_BETWEEN(*) RT_BETWEEN(/)
  RT_BETWEEN(&) RT_BETWEEN(|) RT_BETWEEN(^) RT_BETWEEN(<<) RT_BETWEEN(>>)
  RT_COMPARED(<) RT_COMPARED(<=) RT_COMPARED(>) RT_COMPARED(>=) RT_COMPARED(==) RT_COMPARED(!=)
  friend RT_INLINE rt_vec operator~(const rt_vec &a) {{ rt_vec r; RT_LANES r.v[k] = ~a.v[k]; return r; }}
}};
template <class R, class T, int W> static RT_INLINE R rt_convert(const rt_vec<T, W> &a) {{
  R r; RT_LANES r.v[k] = (typename R::type)a.v[k]; return r; }}"""

# Load or store a vector in pieces of N elements, aligned to N elements.
MEMORY = """template <class V, int N> static RT_INLINE V rt_load(const typename V::type *p) {
  typedef rt_vec<typename V::type, N> piece; V r;
  _Pragma("unroll") for (int k = 0; k < V::width; k += N) {
    const piece x = *(const piece *)(p + k);
    _Pragma("unroll") for (int j = 0; j < N; j++) r.v[k + j] = x.v[j]; }
  return r; }
template <int N, class T, int W> static RT_INLINE void rt_store(T *p, const rt_vec<T, W> &v) {
  typedef rt_vec<T, N> piece;
  _Pragma("unroll") for (int k = 0; k < W; k += N) {
    piece x;
    _Pragma("unroll") for (int j = 0; j < N; j++) x.v[j] = v.v[k + j];
    *(piece *)(p + k) = x; } }
template <class V> static RT_INLINE V rt_load_first(const typename V::type *p, i64 n) {
  V r; _Pragma("unroll") for (int k = 0; k < V::width; k++) { r.v[k] = 0; if (k < n) r.v[k] = p[k]; } return r; }
template <class T, int W> static RT_INLINE void rt_store_first(T *p, const rt_vec<T, W> &v, i64 n) {
  RT_LANES if (k < n) p[k] = v.v[k]; }"""

# Conversions that are one instruction: (minimum architecture, body).
CONVERSIONS = {
    "from_f16": (530, 'float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h)); return r;'),
    "to_f16": (530, '$U r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r;'),
    "to_bf16": (800, '$U r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r;'),
}


class CUDAPrelude(Prelude):
    inline = "static __device__ __forceinline__"
    language = "cuda"
    scalars = SCALARS

    def __init__(self) -> None:
        super().__init__()
        self.add("type_i64", "typedef long long i64;")

    def vector_types(self, dtype: DType, width: int, name: str) -> str:
        self.add("vectors", VECTOR)
        return f"typedef rt_vec<{self.scalar(dtype)}, {width}> {name};"

    def literal(self, vector: str, parts: list[str]) -> str:
        return f"{vector}::of({', '.join(parts)})"

    def converted(self, text: str, vector: str) -> str:
        return f"rt_convert<{vector}>({text})"

    def scalar_builtin(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        f = "f" if dtype is f32 else ""
        cast = {
            "bits": "__float_as_int" if f else "__double_as_longlong",
            "unbits": "__int_as_float" if f else "__longlong_as_double",
        }
        if name == "bits":
            return (), f"STATIC $I $N($V a) {{ return {cast[name]}(a); }}"
        if name == "unbits":
            return (), f"STATIC $V $N($I a) {{ return {cast[name]}(a); }}"
        c = SCALAR_OPS[name].c_name
        if SCALAR_OPS[name].arity == 2:
            return (), f"STATIC $V $N($V a, $V b) {{ return {c}{f}(a, b); }}"
        return (), f"STATIC $V $N($V a) {{ return {c}{f}(a); }}"

    def intrinsic(
        self, intrinsic: Intrinsic, operands: Sequence[tuple[str, DType]], sizes: Sequence[tuple[str, int]] = ()
    ) -> str:
        for key, piece in intrinsic.helpers(dict(sizes)).items():
            self.add(key, piece)
        return super().intrinsic(intrinsic, operands, sizes)

    def define(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        if width > 1:
            return self._lanes(name, dtype, width)
        if name.startswith("across_"):
            return (), self._across(name, dtype)
        if name in math.HALVES:
            needs, text = super().define(name, dtype, width)
            return needs, self._conversion(name, text)
        if name in math.BODIES or (name == "rsqrt" and dtype.is_float):
            return self.scalar_builtin(name, dtype)
        needs, text = super().define(name, dtype, width)
        # `fmaxf` returns the operand that is a number. The modifier .NaN, since sm_80, returns NaN as NumPy does.
        if name in ("max", "min") and dtype is f32:
            fast = f'$V r; asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;'
            text = _since(800, f"STATIC $V $N($V a, $V b) {{ {fast} }}", text)
        return needs, text

    def _across(self, name: str, dtype: DType) -> str:
        """Return a function that all-reduces values of neighbouring work-items by butterfly shuffles (PTX ISA, "shfl.sync")."""
        _, op, width = name.split("_")
        steps = ""
        for k in reversed(range(int(width).bit_length() - 1)):
            other = f"__shfl_xor_sync(0xffffffffu, a, {1 << k})"
            sign = None if dtype.is_int else {"add": "+", "mul": "*"}.get(op)
            steps += f" a = a {sign} {other};" if sign else f" a = {self.helper(op, dtype, 1)}(a, {other});"
        return f"STATIC $V $N($V a) {{{steps} return a; }}"

    def _conversion(self, name: str, portable: str) -> str:
        """Return a conversion between the bits of 16-bit floats and f32 as one instruction."""
        bits = self.scalar(HALF)
        if name == "from_bf16":
            return f"STATIC $V $N({bits} h) {{ return __int_as_float((int)h << 16); }}"
        since, body = CONVERSIONS[name]
        head = f"STATIC $V $N({bits} h)" if name.startswith("from") else f"STATIC {bits} $N($V x)"
        return _since(since, f"{head} {{ {body.replace('$U', bits)} }}", portable)

    def _lanes(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        """Return a helper of vectors that applies the scalar helper lane by lane."""
        if name == "splat":
            return (
                (),
                'STATIC $V $N($E a) { $V r; _Pragma("unroll") for (int k = 0; k < $W; k++) r.v[k] = a; return r; }',
            )
        if name == "exchange":
            return (), self._exchange(width)
        if name == "iota" or name.startswith(("fold_", "half_")):
            return self._vector_helper(name, dtype, width)
        signature = dict.fromkeys(integers.SIGNS, "VV:V") | {
            "whole_i32": "V:N",
            "bits": "V:I",
            "unbits": "I:V",
            "sel": "IVV:V",
            "tofloat": "I:V",
            "max": "VV:V",
            "min": "VV:V",
        }
        types = {"V": self.vector(dtype, width), "I": self.mask(dtype, width)}
        types |= {"H": self.vector(packed_bits(name), width), "N": self.vector(i32, width)}
        if name in math.CONVERSIONS:
            form = "H:V" if name.startswith("from") else "V:H"
        else:
            form = signature.get(name, {"widen": "V:N", "narrow": "N:V"}.get(name, "V:V"))
        assert name in FUNCTIONS or form != "V:V", name
        operands, result = form.split(":")
        scalar_helper = self.helper(name, dtype, 1)
        head = ", ".join(f"const {types[t]} &a{k}" for k, t in enumerate(operands))
        lane = ", ".join(f"a{k}.v[k]" for k in range(len(operands)))
        body = f'{types[result]} r; _Pragma("unroll") for (int k = 0; k < {width}; k++) r.v[k] = {scalar_helper}({lane}); return r;'
        return (), f"STATIC {types[result]} $N({head}) {{ {body} }}"

    def _exchange(self, width: int) -> str:
        """Return a function that transposes a square of vectors, passed as pointers."""
        rows = range(width)
        lines = [f"  const $V {', '.join(f'x{k} = *a{k}' for k in rows)};"]
        lines += [f"  *a{k} = $V::of({', '.join(f'x{j}.v[{k}]' for j in rows)});" for k in rows]
        return f"STATIC void $N({', '.join(f'$V *a{k}' for k in rows)}) {{\n" + "\n".join(lines) + "\n}"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ACCESS_BYTES) * ACCESS_BYTES


def _since(architecture: int, fast: str, portable: str) -> str:
    return f"#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= {architecture}\n{fast}\n#else\n{portable}\n#endif"


class CUDAPrinter(CValues, AsyncCopyPrinter):
    """Printer of one CUDA kernel. Blocks are numbered along one axis of the launch if the other axes might have too many."""

    has_nontemporal = False

    def space(self, buffer: Buffer) -> str:
        return ""

    def float_text(self, value: float, dtype: DType) -> str:
        # 0x7fffffff is the NaN that the hardware's own instructions return.
        return float_literal(value, dtype, "__int_as_float(0x7f800000)", "__int_as_float(0x7fffffff)")

    def _piece(self, dtype: DType, at: Address, width: int) -> int:
        """Return the number of elements of one access, which its alignment limits."""
        most = min(width, ACCESS_BYTES // dtype.bytes)
        return gcd(most, at.multiple)

    def serial_loop(self, f: For, extent: Poly, head: str = "") -> None:
        size = as_constant(extent)
        if any(isinstance(m, Barrier) for m in walk(f.body)):
            # Unrolled code cannot be reordered across a barrier, and needs more registers.
            head = head or "#pragma unroll 1"
        elif size is not None and size > LONG_LOOP:
            head = head or f"#pragma unroll {UNROLL_FACTOR}"
        super().serial_loop(f, extent, head)

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        dtype = stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        self.prelude.add("memory", MEMORY)
        if lane.count is not None:
            return f"rt_load_first<{name}>({at.text}, {lane.count})"
        return f"rt_load<{name}, {self._piece(dtype, at, lane.width)}>({at.text})"

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        dtype = stored(b.dtype)
        self.prelude.vector(dtype, lane.width)
        self.prelude.add("memory", MEMORY)
        if lane.count is not None:
            return f"rt_store_first({at.text}, {value}, {lane.count});"
        return f"rt_store<{self._piece(dtype, at, lane.width)}>({at.text}, {value});"

    def array(self, b: Buffer, name: str, size: int) -> str:
        return f"__align__({ACCESS_BYTES}) {self.prelude.storage(b.dtype)} {name}[{size}];"

    def shared_arrays(self, arrays: Sequence[tuple[Buffer, str, int]]) -> list[str]:
        if sum(_aligned(b.dtype.bytes * size) for b, _, size in arrays) <= STATIC_BYTES:
            return [f"__shared__ {self.array(*x)}" for x in arrays]
        places: list[str] = []
        end = 0
        for b, name, size in arrays:
            kind = self.prelude.storage(b.dtype)
            places.append(f"{kind} *const {name} = ({kind} *)(rt_shared + {end});")
            end += _aligned(b.dtype.bytes * size)
        return [f"extern __shared__ __align__({ACCESS_BYTES}) unsigned char rt_shared[]; /*shared {end}*/", *places]

    def index(self, kind: str, axis: int) -> str:
        if kind == "item":
            return f"threadIdx.{'xyz'[axis]}"
        if not self._is_linear():
            return f"blockIdx.{'xyz'[axis]}"
        return self.delinearized("blockIdx.x", axis)

    def groups_text(self, e: Expr) -> str:
        return f"(unsigned){super().groups_text(e)}"

    def _is_linear(self) -> bool:
        """Return whether blocks are numbered along the first axis, whose limit is 2^31 - 1 blocks."""
        return self.exceeds(AXIS_LIMIT, self.groups[1:])

    def launched(self, groups: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if not self._is_linear():
            return groups
        return (product(groups), *(const(1) for _ in groups[1:]))

    def offers(self, intrinsic: Intrinsic) -> bool:
        items = {f.axis: as_int(f.extent) for f in intrinsic.loops if f.kind == "item"}
        return super().offers(intrinsic) and all(self.items[a : a + 1] == (size,) for a, size in items.items())

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        marked = {f.marks.intrinsic for f in loops(body)} & INTRINSICS.keys()
        self.proxy_fences = sorted({fence for x in marked if (fence := INTRINSICS[x].proxy_fence) is not None})
        return super().kernel(name, buffers, written, body)

    def barrier(self, n: Barrier) -> None:
        for call, piece in self.proxy_fences:
            self.prelude.add("proxy_fence", piece)
            self.line(call)
        self.line("__syncthreads();")

    def warp_reduce(self, f: For) -> None:
        (s,) = stores(f.body)
        helper = self.prelude.helper(f"across_{f.marks.warp_reduce}_{as_int(f.extent)}", s.buffer.dtype, 1)
        self.assign(s.buffer, {}, f"{helper}({self.uniform(s.value)})")

    def parameter(self, b: Buffer, written: bool) -> str:
        return f"{'' if written else 'const '}{self.prelude.storage(b.dtype)} *__restrict__ "

    def head(self, name: str, parameters: Sequence[str], items: Sequence[int]) -> str:
        # Without bounds the compiler limits registers to what a block of 1,024 threads may have.
        return f'extern "C" __global__ void __launch_bounds__({prod(items)}) {name}({", ".join(parameters)})'
