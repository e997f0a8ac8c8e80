"""The OpenCL target: address spaces, group and item indices, barriers, clang's extended vectors.

Builtin functions of OpenCL are avoided in inner loops, since PoCL does not inline them. Meant for `-cl-mad-enable`.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_schedules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.c.prelude import AVX
from relax_tune.ir.codegen.print.c.printer import float_literal
from relax_tune.ir.codegen.print.c_values import CValues
from relax_tune.ir.codegen.print.grid import GridPrinter
from relax_tune.ir.codegen.print.prelude import Prelude, stored
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32, f64, i32
from relax_tune.ir.core.scalar_ops import SCALAR_OPS
from relax_tune.ir.core.stmt import Barrier

SCALARS = {
    "bool": "uchar", "i8": "char", "u8": "uchar", "i16": "short", "i32": "int", "i64": "long",
    "u16": "ushort", "u32": "uint", "u64": "ulong", "f32": "float", "f64": "double",
}  # fmt: skip


# Functions that are one instruction, for vectors too if every lane calls clang's builtin. PoCL does not inline OpenCL's names.
INSTRUCTIONS = frozenset({"sqrt", "floor", "rint", "abs"})
# On other devices OpenCL's names are instructions too, and simulators of them do not know clang's names.
ON_PROCESSORS = "defined(__clang__) && (defined(__x86_64__) || defined(__aarch64__))"


class OpenCLPrelude(Prelude):
    inline = "static inline __attribute__((always_inline))"
    language = "opencl"
    scalars = SCALARS

    def storage(self, dtype: DType) -> str:
        if dtype is f64:
            self.add("fp64", "#pragma OPENCL EXTENSION cl_khr_fp64 : enable")
        return super().storage(dtype)

    def vector_types(self, dtype: DType, width: int, name: str) -> str:
        element = self.scalar(dtype)
        return (
            f"typedef {element} {name} __attribute__((ext_vector_type({width})));\n"
            f"typedef {element} {name}u __attribute__((ext_vector_type({width}), aligned({dtype.bytes})));"
        )

    def literal(self, vector: str, parts: list[str]) -> str:
        return f"({vector})({', '.join(parts)})"

    def half(self, vector: str, width: int, start: int) -> str:
        return f"a.{'hi' if start else 'lo'}"

    def scalar_builtin(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        if name == "bits":
            return (), f"STATIC $I $N($V a) {{ return as_{'int' if dtype is f32 else 'long'}(a); }}"
        if name == "unbits":
            return (), f"STATIC $V $N($I a) {{ return as_{'float' if dtype is f32 else 'double'}(a); }}"
        c = SCALAR_OPS[name].c_name
        if SCALAR_OPS[name].arity == 2:
            return (), f"STATIC $V $N($V a, $V b) {{ return {c}(a, b); }}"
        # LLVM assumes that 1 / sqrt(a) is not negative, which is wrong for -0, and folds comparisons accordingly
        body = (
            "STATIC $V $N($V a) {{ return a == 0 ? a : {}(a); }}"
            if name == "sqrt"
            else "STATIC $V $N($V a) {{ return {}(a); }}"
        )
        if name not in INSTRUCTIONS:
            return (), body.format(c)
        builtin = f"__builtin_{c}{'f' if dtype is f32 else ''}"
        return (), f"#if {ON_PROCESSORS}\n{body.format(builtin)}\n#else\n{body.format(c)}\n#endif"

    def define(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        if width == 1:
            return super().define(name, dtype, width)
        fixed = {
            "bits": "STATIC $I $N($V a) { union { $V v; $I i; } u; u.v = a; return u.i; }",
            "unbits": "STATIC $V $N($I a) { union { $V v; $I i; } u; u.i = a; return u.v; }",
            "sel": "STATIC $V $N($I m, $V a, $V b) { return m ? a : b; }",
            "tofloat": "STATIC $V $N($I a) { return __builtin_convertvector(a, $V); }",
            "splat": "STATIC $V $N($E a) { return ($V)(a); }",
            "alternate": "STATIC $V $N($V a, $V b) { return ($V)(a.even, b.odd); }",
        }
        if name in fixed:
            return (), fixed[name]
        if name == "widen":
            target = self.vector(i32, width)
            return (), f"STATIC {target} $N($V a) {{ return __builtin_convertvector(a, {target}); }}"
        if name == "narrow":
            return (), f"STATIC $V $N({self.vector(i32, width)} a) {{ return __builtin_convertvector(a, $V); }}"
        if name == "stream":
            fast = f"if (((size_t)p & {dtype.bytes * width - 1}) == 0) {{ __builtin_nontemporal_store(v, (global $V *)p); return; }}"
            head = "STATIC void $N(global $E *p, $V v) {\n#if __has_builtin(__builtin_nontemporal_store)"
            return (), f"{head}\n  {fast}\n#endif\n  *(global ${{V}}u *)p = v; }}"
        if name.startswith(("loadm", "storem")):
            return (), self._masked(name, dtype, width)
        return super().define(name, dtype, width)

    def _masked(self, name: str, dtype: DType, width: int) -> str:
        """Return a masked load or store of the first n lanes. Other lanes load 0, and their memory is not accessed.

        With AVX, 32-bit elements are accessed by a masked instruction, which takes a sixth of the time of a loop.

        Args:
            name: `loadm` or `storem`, an underscore and the address space.
        """
        kind, space = name.split("_")
        if kind == "loadm":
            head = f"STATIC $V $N(const {space} $E *p, long n)"
            loop = (
                f"{{ $E t[{width}];\n  for (int k = 0; k < {width}; k++) {{ t[k] = 0; if (k < n) t[k] = p[k]; }}\n"
                f"  $V r; for (int k = 0; k < {width}; k++) r[k] = t[k]; return r; }}"
            )
        else:
            head = f"STATIC void $N({space} $E *p, $V v, long n)"
            loop = f"{{\n  for (int k = 0; k < {width}; k++) if (k < n) p[k] = v[k]; }}"
        if space != "global" or dtype not in (f32, i32) or width not in (4, 8, 16):
            return f"{head} {loop}"
        fast = self._avx_masked(kind == "loadm", dtype, width)
        return f"#if {ON_PROCESSORS} && defined(__AVX__)\n{head} {fast}\n#else\n{head} {loop}\n#endif"

    def _avx_masked(self, is_load: bool, dtype: DType, width: int) -> str:
        """Return the body of a masked access by the signs of a vector, eight lanes at a time."""
        lanes = min(width, 8)
        floats, ints, steps = self.vector(f32, lanes), self.vector(i32, lanes), []
        for at in range(0, width, lanes):
            mask = f"({ints})({', '.join(str(at + k) for k in range(lanes))}) < ({ints})((int)n)"
            part = "v" if width == lanes else f"v.{'hi' if at else 'lo'}"
            memory = f"({floats} *)(size_t)(p + {at})"  # clang's builtins know no address spaces
            if is_load:
                loaded = f"__builtin_ia32_maskloadps{AVX[lanes]}({memory}, {mask})"
                steps.append(f"{part} = __builtin_astype({loaded}, {self.vector(dtype, lanes)});")
            else:
                stored_part = f"__builtin_astype({part}, {floats})"
                steps.append(f"__builtin_ia32_maskstoreps{AVX[lanes]}({memory}, {mask}, {stored_part});")
        return f"{{ $V v; {' '.join(steps)} return v; }}" if is_load else f"{{ {' '.join(steps)} }}"


SPACES = {"global": "global", "local": "private", "shared": "local"}
FENCES = {"shared": "CLK_LOCAL_MEM_FENCE", "global": "CLK_GLOBAL_MEM_FENCE"}


class OpenCLPrinter(CValues, GridPrinter):
    """Printer of one OpenCL kernel; parallel loops are serial."""

    pairs = frozenset({4, 8, 16})

    def space(self, buffer: Buffer) -> str:
        return f"{SPACES[buffer.scope]} "

    def float_text(self, value: float, dtype: DType) -> str:
        return float_literal(value, dtype, "INFINITY", "NAN")

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        space, dtype = self.space(b), stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        if lane.count is not None:
            return f"{self.prelude.helper(f'loadm_{space.strip()}', dtype, lane.width)}({at.text}, {lane.count})"
        return f"(*(const {space}{name}u *)({at.text}))"

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        space, dtype = self.space(b), stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        if lane.count is not None:
            return f"{self.prelude.helper(f'storem_{space.strip()}', dtype, lane.width)}({at.text}, {value}, {lane.count});"
        return f"*({space}{name}u *)({at.text}) = {value};"

    def store_nontemporal(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        return f"{self.prelude.helper('stream', stored(b.dtype), lane.width)}({at.text}, {value});"

    def array(self, b: Buffer, name: str, size: int) -> str:
        return f"{self.prelude.storage(b.dtype)} {name}[{size}] __attribute__((aligned(64)));"

    def shared_arrays(self, arrays: Sequence[tuple[Buffer, str, int]]) -> list[str]:
        return [f"local {self.array(*x)}" for x in arrays]

    def index(self, kind: str, axis: int) -> str:
        return f"get_{'group' if kind == 'group' else 'local'}_id({axis})"

    def barrier(self, n: Barrier) -> None:
        self.line(f"barrier({' | '.join(FENCES[s] for s in sorted(n.scopes, reverse=True))});")

    def parameter(self, b: Buffer, written: bool) -> str:
        return f"{'' if written else 'const '}global {self.prelude.storage(b.dtype)} *restrict "

    def head(self, name: str, parameters: Sequence[str], items: Sequence[int]) -> str:
        return f"kernel void {name}({', '.join(parameters)})"
