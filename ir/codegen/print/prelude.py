"""The prelude of a kernel: the types and helper functions that its text uses, and no others.

Every piece has an include guard, so that kernels with different preludes can share a translation unit.

Tests: `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_math.py`, `tests/ir/codegen/test_small_types.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Template
from types import MappingProxyType

from relax_tune.ir.codegen.print import integers, math
from relax_tune.ir.codegen.print.transpose_registers import transpose_text
from relax_tune.ir.core.dtype import DType, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from relax_tune.ir.core.scalar_ops import BITS, MATH, SCALAR_OPS
from relax_tune.ir.hardware.intrinsic import Intrinsic

# Element type of the mask that a comparison of vectors gives, by bytes of the compared elements.
MASKS = {1: i8, 2: i16, 4: i32, 8: i64}

# Storage of a 16-bit float. Small types are stored in u8. Conversions are integer arithmetic, so that all targets agree.
HALF = u16

# Index type: 32 bits unless the text is compiled for 64.
INDEX = DType("int64", "idx")

# Functions of one number, each a helper.
FUNCTIONS = frozenset(name for name in MATH if SCALAR_OPS[name].arity == 1)


def suffix(dtype: DType, width: int) -> str:
    """Return the end of type and helper names, `f32` or `f32x16`."""
    return dtype.short if width == 1 else f"{dtype.short}x{width}"


def computed(dtype: DType) -> DType:
    """Return the type that values of `dtype` are computed in: float for 16-bit and small floats."""
    return dtype if not dtype.is_packed else f32 if dtype.is_float else i32


def stored(dtype: DType) -> DType:
    """Return the type of values of `dtype` in memory."""
    return dtype if not dtype.is_packed else u8 if dtype.is_small else HALF


def packed_bits(name: str) -> DType:
    """Return the type in memory that a conversion such as `from_bf16` reads or `to_bf16` writes."""
    return HALF if name in math.HALVES else u8


class Prelude:
    """Pieces of text in dependency order. Subclasses define vector types and the basic helpers of a language.

    Attributes:
        inline: Qualifiers of helper functions.
        scalars: C type of each type in memory, by its short name.
    """

    inline = ""
    language = ""
    scalars: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self._pieces: dict[str, str] = {}

    def text(self) -> str:
        body = "\n".join(self._pieces.values())
        return f"/*prelude*/\n{body}\n/*end prelude*/\n"

    def add(self, key: str, text: str) -> None:
        """Add a piece with an include guard, unless the key has one already."""
        if key not in self._pieces:
            guard = f"RT_{key.upper()}"
            self._pieces[key] = f"#ifndef {guard}\n#define {guard}\n{text}\n#endif"

    def intrinsic(
        self, intrinsic: Intrinsic, operands: Sequence[tuple[str, DType]], sizes: Sequence[tuple[str, int]] = ()
    ) -> str:
        """Return the name of an intrinsic's function.

        Args:
            operands: Address space and type of each operand, the written one last.
            sizes: Extents that the intrinsic's semantics leave open.
        """
        for helper in intrinsic.prelude_helpers:
            self.helper(helper, f32, 1)
        suffixes = [f"_{space.strip()}" for space, _ in operands if space] + [f"_{v}{size}" for v, size in sizes]
        name, meaning = f"rt_{intrinsic.name}{''.join(suffixes)}", intrinsic.semantics
        sizes_enum = f"  enum {{ {', '.join(f'{v} = {size}' for v, size in sizes)} }};\n" if sizes else ""
        parameters = [
            f"{'' if b in meaning.output_buffers else 'const '}{space}{self.storage(dtype)} *{b.name.lower()}"
            for b, (space, dtype) in zip(meaning.buffers, operands, strict=True)
        ]
        parameters += [f"{self.storage(i64)} {b.lower()}_{v}" for b, v in intrinsic.strides()]
        shared_operands = [
            b
            for b in meaning.buffers
            if intrinsic.of_warp and b not in meaning.output_buffers and b.name not in intrinsic.warp_operands
        ]
        parameters += [f"{self.storage(i64)} {b.name.lower()}_at" for b in shared_operands]
        head = f"{self.inline} void {name}({', '.join(parameters)})"

        def with_spaces(body: str) -> str:
            for b, (space, _) in zip(meaning.buffers, operands, strict=True):
                body = body.replace(f"@{b.name} ", space)
            return body

        text = f"{head} {{\n{sizes_enum}{intrinsic.body}\n}}"
        if self.language in intrinsic.fast:
            condition, fast = intrinsic.fast[self.language]
            text = f"#if {condition}\n{head} {{\n{sizes_enum}{fast}\n}}\n#else\n{text}\n#endif"
        self.add(name, with_spaces(text))
        return name

    def storage(self, dtype: DType) -> str:
        """Return the C-family type of one element in memory."""
        if dtype is INDEX:
            self.add("type_idx", f"#ifdef RT_WIDE\ntypedef {self.storage(i64)} idx;\n#else\ntypedef int idx;\n#endif")
            return "idx"
        return self.scalars[stored(dtype).short]

    def scalar(self, dtype: DType) -> str:
        """Return the type in which one element is computed."""
        return self.storage(computed(dtype))

    def vector(self, dtype: DType, width: int) -> str:
        """Return the type in which `width` elements are computed (declared on demand)."""
        dtype = computed(dtype)
        if width == 1:
            return self.scalar(dtype)
        name = suffix(u8 if dtype.short == "bool" else dtype, width)
        if f"type_{name}" not in self._pieces:
            self.add(f"type_{name}", self.vector_types(dtype, width, name))
        return name

    def vector_types(self, dtype: DType, width: int, name: str) -> str:
        """Return typedefs of a vector and of its unaligned form `NAMEu`."""
        raise NotImplementedError

    def mask(self, dtype: DType, width: int) -> str:
        """Return the type of a comparison of two vectors of `dtype`."""
        return self.vector(MASKS[dtype.bytes], width)

    def helper(self, name: str, dtype: DType, width: int) -> str:
        """Return the name of a helper function for this type, declared with everything it needs."""
        dtype = computed(dtype)
        s = suffix(dtype, width)
        full = f"rt_{name}_{s}"
        if full in self._pieces:
            return full
        # pieces are printed in the order in which they were added: types and called helpers before this one
        needs, text = self.define(name, dtype, width)
        v, i = self.vector(dtype, width), self.mask(dtype, width) if dtype.bytes in MASKS else ""
        for n in needs:
            self.helper(n, dtype, width)
        filled = Template(text).substitute(V=v, I=i, E=self.scalar(dtype), S=s, W=str(width), N=full)
        self.add(full, filled.replace("STATIC", self.inline))
        return full

    def define(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        """Return (helpers needed, text) of a helper.

        In the text: `$V` vector, `$I` mask, `$E` element, `$S` suffix, `$N` function name.
        """
        if name in math.CONVERSIONS:
            return self._packed(name, width)
        if name == "exchange":
            return (), transpose_text(width)
        if dtype is f32 and name in math.BODIES:
            needs, body = math.BODIES[name]
            body = math.exp_of(width) if name == "exp" else body
            return needs, f"STATIC $V $N($V x) {{{body}\n}}"
        if name.startswith("whole_"):
            return self._whole(name, dtype, width)
        if name in ("least", "most"):  # clamp x to a limit; NaN stays NaN
            sign = ">" if name == "least" else "<"
            return ("sel", "splat"), f"STATIC $V $N($V x, $E l) {{ return rt_sel_$S(x {sign} l, rt_splat_$S(l), x); }}"
        if width == 1:
            return self._scalar_helper(name, dtype)
        if name in integers.SIGNS:
            return (), integers.arithmetic_vector(name, self.vector(u32, width), self.language)
        return self._vector_helper(name, dtype, width)

    def sixteen(self, values: Sequence[int], width: int) -> str:
        """Return the name of a lookup function: the lowest four bits of each int32 lane choose one of sixteen floats."""
        v, i = self.vector(f32, width), self.vector(i32, width)
        signed, first = [k - 16 * (k > 7) for k in range(16)], values[0]
        if list(values) == signed:
            name, plain = "signed", f"return {self.converted('(n << 28) >> 28', v)};"
        elif list(values) == [first + k for k in range(16)]:
            name = f"from_{first}" if first >= 0 else f"from_minus_{-first}"
            plain = f"return {self.converted(f'(n & 15) + ({first})', v)};"
        else:
            name = "_".join(["of", *(f"{x}" if x >= 0 else f"m{-x}" for x in values)])
            picks = ", ".join(str(x) for x in values)
            lanes = self.literal(v, [f"t[n[{k}] & 15]" for k in range(width)])
            plain = f"const float t[16] = {{{picks}}};\n  return {lanes};"
        full = f"rt_four_bits_{name}_{suffix(f32, width)}"
        self.add(full, f"{self.inline} {v} {full}({i} n) {{{self.lookup(values, width, plain)}}}")
        return full

    def lookup(self, values: Sequence[int], width: int, plain: str) -> str:
        """Return the body of a lookup function, `plain` unless the target has an instruction for it."""
        return f" {plain} "

    def _packed(self, name: str, width: int) -> tuple[tuple[str, ...], str]:
        """Return a conversion between the bits in memory and the type of arithmetic."""
        needs, body = math.CONVERSIONS[name]
        memory = packed_bits(name)
        for n in ("sel", "splat"):
            self.helper(n, i32, width)
        bits, body = self.vector(memory, width), body.replace("_i(", f"_{suffix(i32, width)}(")
        if name.startswith("from"):
            return needs, f"STATIC $V $N({bits} h) {{\n  $I b = {self.helper('widen', memory, width)}(h);{body}\n}}"
        return needs, f"STATIC {bits} $N($V x) {{{body}\n  return {self.helper('narrow', memory, width)}(r);\n}}"

    def unsigned(self, dtype: DType) -> str:
        """Return the cast to the unsigned type of the same width, or "" for bytes, whose products int holds."""
        return {2: "(unsigned)", 4: "(unsigned)", 8: f"({self.scalars['u64']})"}.get(dtype.bytes, "")

    def _whole(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        """Return the truncation of floats to int32, int64 or uint64 (`scalar_ops.converted`)."""
        target = {"i64": i64, "u64": u64}.get(name[-3:], i32)
        v = self.vector(target, width)
        if width == 1:
            return (), f"STATIC {v} $N($V x) {{ {self.truncated(name, dtype, target, v)} }}"
        inside = integers.truncated_vector(dtype)
        if dtype is f64:
            inside = self.converted(f"({inside})", v)
        least = f"{self.helper('splat', i32, width)}({integers.ENDS[i32][0]})"
        chosen = f"{self.helper('sel', i32, width)}({inside}, {self.converted('x', v)}, {least})"
        return (), f"STATIC {v} $N($V x) {{ return {chosen}; }}"

    def truncated(self, name: str, source: DType, target: DType, v: str) -> str:
        """Return the body of the truncation of one float `x`."""
        if target is u64:
            return integers.truncated_unsigned(source, v, self.helper("whole_i64", source, 1))
        return integers.truncated(source, target, v)

    def _scalar_helper(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        fixed = {
            "sel": "STATIC $V $N(int m, $V a, $V b) { return m ? a : b; }",
            "splat": "STATIC $V $N($V a) { return a; }",
            "tofloat": "STATIC float $N(int a) { return (float)a; }",
            "widen": "STATIC int $N($V a) { return a; }",
            "narrow": "STATIC $V $N(int a) { return ($V)a; }",
            **{name: integers.arithmetic(name, dtype, self.unsigned(dtype)) for name in integers.SIGNS if dtype.is_int},
            "floordiv": "STATIC $V $N($V a, $V b) { $V q = a / b; return q - ((a % b != 0) && ((a < 0) != (b < 0))); }",
            "floormod": "STATIC $V $N($V a, $V b) { $V r = a % b; return r + ((r != 0 && ((r < 0) != (b < 0))) ? b : ($V)0); }",
        }
        if name in BITS:
            return (), integers.of_bits(name, dtype, self.unsigned(dtype))
        if dtype in (i32, i64) and name in ("floordiv", "floormod"):  # x86 traps on the smallest number divided by -1
            least = f"($V)(0 - {self.unsigned(dtype)}a)" if name == "floordiv" else "0"
            return (), fixed[name].replace("{ ", f"{{ if (b == -1) return {least}; ", 1)
        if name in fixed:
            return (), fixed[name]
        if name in ("max", "min"):
            sign = ">" if name == "max" else "<"
            nan = " || a != a" if dtype.is_float else ""
            return (), f"STATIC $V $N($V a, $V b) {{ return a {sign} b{nan} ? a : b; }}"
        if name == "odd":  # f64 to f32, rounded to odd: the last bit is set if the result is inexact
            bits, unbits = self.helper("bits", f32, 1), self.helper("unbits", f32, 1)
            return (), (
                f"STATIC float $N($V a) {{ float f = (float)a; int b = {bits}(f);\n"
                "  if (f != f || ($V)f == a || (b & 1)) return f;\n"
                f"  return {unbits}(b + ((($V)f < a) == (b >= 0) ? 1 : -1)); }}"
            )
        if name == "rsqrt":
            return ("sqrt",), "STATIC $V $N($V a) { return 1 / rt_sqrt_$S(a); }"
        if name == "abs" and dtype.is_int:
            minus = f"($V)(0 - {self.unsigned(dtype)}a)" if dtype is not INDEX else "-a"
            return (), f"STATIC $V $N($V a) {{ return a < 0 ? {minus} : a; }}"
        return self.scalar_builtin(name, dtype)

    def scalar_builtin(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        raise NotImplementedError

    def _vector_helper(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        lanes = range(width)
        if name == "iota":
            return (), "STATIC $V $N(void) { return " + self.literal("$V", [str(k) for k in lanes]) + "; }"
        if name == "abs" and dtype in (f32, f64):
            bits = "0x7FFFFFFF" if dtype is f32 else "0x7FFFFFFFFFFFFFFF"
            return ("bits", "unbits"), f"STATIC $V $N($V a) {{ return rt_unbits_$S(rt_bits_$S(a) & {bits}); }}"
        if name in ("max", "min"):
            sign = ">" if name == "max" else "<"
            nan = " | (a != a)" if dtype.is_float else ""
            return ("sel",), f"STATIC $V $N($V a, $V b) {{ return rt_sel_$S((a {sign} b){nan}, a, b); }}"
        if name in ("above", "below"):
            return (
                "sel",
            ), f"STATIC $V $N($V a, $V b) {{ return rt_sel_$S(a {'>' if name == 'above' else '<'} b, a, b); }}"
        if name == "unordered":
            return (), "STATIC $I $N($V a, $V b) { return (a != a) | (b != b); }"
        if name == "rsqrt":
            return ("sqrt",), "STATIC $V $N($V a) { return 1 / rt_sqrt_$S(a); }"
        if name in FUNCTIONS:
            scalar_helper = self.helper(name, dtype, 1)
            parts = self.literal("$V", [f"{scalar_helper}(x[{k}])" for k in lanes])
            return (), f"STATIC $V $N($V x) {{ return {parts}; }}"
        if name.startswith("fold_"):
            return self._fold(name, dtype, width)
        if name.startswith("half_"):
            return self._halved(name, dtype, width)
        raise KeyError(f"no helper {name} for {dtype}x{width}")

    def _fold(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        """Return a helper that combines all lanes, halving the width step by step."""
        op = name.removeprefix("fold_")
        halved = f"{self.helper(f'half_{op}', dtype, width)}(a)"
        if width > 2:
            halved = f"{self.helper(name, dtype, width // 2)}({halved})"
        return (), f"STATIC $E $N($V a) {{ return {halved}; }}"

    def _halved(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        """Return a helper that combines the lower half of the lanes with the upper half."""
        op, half = name.removeprefix("half_"), width // 2
        v = self.vector(dtype, half)
        joined = {} if dtype.is_int else {"add": "lo + hi", "mul": "lo * hi"}
        together = joined.get(op) or f"{self.helper(op, dtype, half)}(lo, hi)"
        low, high = self.half(v, half, 0), self.half(v, half, half)
        return (), f"STATIC {v} $N($V a) {{ {v} lo = {low}, hi = {high}; return {together}; }}"

    def converted(self, text: str, vector: str) -> str:
        """Return a vector converted lane by lane to the element type of another vector."""
        return f"__builtin_convertvector({text}, {vector})"

    def half(self, vector: str, width: int, start: int) -> str:
        """Return `width` lanes of the vector `a` from `start`."""
        return f"a[{start}]" if width == 1 else self.literal(vector, [f"a[{start + k}]" for k in range(width)])

    def literal(self, vector: str, parts: list[str]) -> str:
        """Return a vector with these lanes."""
        raise NotImplementedError
