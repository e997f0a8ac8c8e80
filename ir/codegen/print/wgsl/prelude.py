"""Types and helper functions of WGSL kernels.

Tests: `tests/ir/codegen/test_wgsl.py`, `tests/ir/codegen/test_tint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.print import math
from relax_tune.ir.codegen.print.prelude import INDEX, Prelude, computed
from relax_tune.ir.codegen.print.wgsl.functions import FUNCTIONS, conversion
from relax_tune.ir.codegen.print.wgsl.wide import PAIR, WIDE, WORDS
from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i32, i64, u32, u64
from relax_tune.ir.hardware.intrinsic import Intrinsic

# Type of a number in registers and in workgroup and private memory; narrow integers take 32 bits.
SCALARS: Mapping[str, str] = MappingProxyType(
    {
        "bool": "bool", "i8": "i32", "u8": "i32", "i16": "i32", "u16": "i32", "i32": "i32", "u32": "u32",
        "i64": PAIR, "u64": PAIR, "f32": "f32",
    }
)  # fmt: skip
WIDE_TYPES = (i64, u64)
# Bytes of the smallest element of an array in workgroup memory.
SHARED_BYTES = 4

# Helpers that call the scalar helper for every lane, as "operands:result": V is the vector, I a vector of int32.
_LANES: Mapping[str, str] = MappingProxyType({"max": "VV:V", "min": "VV:V", "whole_i32": "V:I"})
_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}


class WGSLPrelude(Prelude):
    """Prelude of a WGSL kernel. In the texts, `$V` is the vector type and `$N` the function's name."""

    language = "webgpu"
    scalars = SCALARS

    def add(self, key: str, text: str) -> None:
        """Add a piece once. WGSL has no preprocessor, and each kernel is a separate module."""
        self._pieces.setdefault(key, text)

    def intrinsic(
        self, intrinsic: Intrinsic, operands: Sequence[tuple[str, DType]], sizes: Sequence[tuple[str, int]] = ()
    ) -> str:
        raise BuildError(f"WGSL does not have the instruction {intrinsic.name}; print its loops")

    def storage(self, dtype: DType) -> str:
        if dtype is INDEX:
            return "i32"
        if dtype is f64:
            raise BuildError("WGSL has no float64; cast to float32, or build for another target")
        return self.scalars[computed(dtype).short]

    def vector(self, dtype: DType, width: int) -> str:
        element = self.storage(dtype)
        if width == 1:
            return element
        return f"array<{element}, {width}>" if element == PAIR else f"vec{width}<{element}>"

    def mask(self, dtype: DType, width: int) -> str:
        return self.vector(bool_, width)

    def literal(self, vector: str, parts: list[str]) -> str:
        return f"{vector}({', '.join(parts)})"

    def converted(self, text: str, vector: str) -> str:
        return f"{vector}({text})"

    def wide(self, name: str) -> str:
        """Return the name of a function of 64-bit integers."""
        needs, text = WIDE[name]
        for need in needs:
            self.wide(need)
        self.add(f"rt_{name}", text)
        return f"rt_{name}"

    def function(self, name: str) -> str:
        """Return the name of a function of f32."""
        needs, text = FUNCTIONS[name]
        for need in needs:
            if need in WIDE:
                self.wide(need)
            else:
                self.function(need)
        full = f"rt_{name}" if name in ("inf", "not_a_number") else f"rt_{name}_f32"
        self.add(full, text)
        return full

    def helper(self, name: str, dtype: DType, width: int) -> str:
        """Return the name of a helper for this type. There is no arithmetic on vectors of 64-bit integers."""
        dtype = i32 if dtype is INDEX else computed(dtype)
        if dtype in WIDE_TYPES and width == 1 and name != "splat":
            if dtype is u64 and name not in WORDS:
                raise _no_u64(name)
            return self.wide(WORDS[name] if dtype is u64 else f"{name}_wide")
        if dtype is f32 and width == 1 and name in FUNCTIONS:
            return self.function(name)
        return super().helper(name, dtype, width)

    def define(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        if width > 1:
            return (), self._vector_text(name, dtype, width)
        if name in math.CONVERSIONS:
            return self._conversion(name), conversion(name)
        return self._scalar_text(name, dtype)

    def _conversion(self, name: str) -> tuple[str, ...]:
        self.helper("sel", i32, 1)
        self.helper("sel", f32, 1)
        self.function("nan")
        self.function("not_a_number")
        return ()

    def _scalar_text(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        head = "fn $N(a: $V, b: $V) -> $V {"
        if name == "sel":
            return (), "fn $N(m: bool, a: $V, b: $V) -> $V { return select(b, a, m); }"
        if name == "splat":
            return (), "fn $N(a: $V) -> $V { return a; }"
        if name in ("max", "min"):
            sign, nan = ">" if name == "max" else "<", ""
            if dtype is f32:
                nan = f" || {self.function('nan')}(a)"
            return (), f"{head} return select(b, a, (a {sign} b){nan}); }}"
        if name in _INFIX or name in _BITS:
            value = f"a {_INFIX.get(name) or _BITS[name]} b"
            return (), f"{head} return {self.wrapped(value, dtype)}; }}"
        if name == "whole_i32":
            inside = "x > -2147483648.0f && x < 2147483648.0f"
            return (), f"fn $N(x: f32) -> i32 {{ return select(i32(-2147483648), i32(x), {inside}); }}"
        if name == "whole_i64":
            self.wide("whole_wide")
            return (), f"fn $N(x: f32) -> {PAIR} {{ return rt_whole_wide(x); }}"
        if name == "abs":
            return (), f"fn $N(a: $V) -> $V {{ return {self.wrapped('abs(a)', dtype)}; }}"
        if name == "floordiv":
            value = "a / b" if dtype is u32 else "a / b - select(0, 1, a % b != 0 && (a < 0) != (b < 0))"
            return (), f"{head} return {self.wrapped(value, dtype)}; }}"
        if name == "floormod":
            value = "a % b" if dtype is u32 else "a % b + select(0, b, a % b != 0 && (a < 0) != (b < 0))"
            return (), f"{head} return {value}; }}"
        if name in ("shift_left", "shift_right"):
            return (), f"{head} {self._shift(name, dtype)} }}"
        if name == "integer_power":
            return (), f"{head} {self._power(dtype)} }}"
        raise BuildError(f"WGSL kernels have no {name} of {dtype}; build for another target")

    def _shift(self, name: str, dtype: DType) -> str:
        width = dtype.bits
        outside = f"b >= {width}u" if dtype is u32 else f"b < 0 || b >= {width}"
        shift = "(u32(b) & 31u)"
        if name == "shift_left":
            return f"if ({outside}) {{ return $V(0); }} return {self.wrapped(f'a << {shift}', dtype)};"
        rest = "$V(0)" if dtype.is_unsigned else "select(0, -1, a < 0)"
        return f"if ({outside}) {{ return {rest}; }} return a >> {shift};"

    def _power(self, dtype: DType) -> str:
        below = ""
        if not dtype.is_unsigned:
            below = "if (b < 0) { return select(select(0, select(1, -1, (b & 1) != 0), a == -1), 1, a == 1); } "
        loop = "var r = $V(1); var x = a; var n = u32(b); while (n != 0u) { if ((n & 1u) != 0u) { r = r * x; } x = x * x; n = n >> 1u; }"
        return f"{below}{loop} return {self.wrapped('r', dtype)};"

    def wrapped(self, text: str, dtype: DType) -> str:
        """Return a number of 32 bits reduced to the bits of its type."""
        if dtype.bits >= 32:
            return text
        if dtype.is_unsigned:
            return f"(({text}) & {(1 << dtype.bits) - 1})"
        return f"((({text}) << {32 - dtype.bits}u) >> {32 - dtype.bits}u)"

    def _vector_text(self, name: str, dtype: DType, width: int) -> str:
        lanes = range(width)
        v, e, m, i = "$V", self.storage(dtype), self.vector(bool_, width), self.vector(i32, width)
        if name == "splat":
            return f"fn $N(a: {e}) -> $V {{ return {self.literal('$V', ['a'] if e != PAIR else ['a'] * width)}; }}"
        if name == "iota":
            return f"fn $N() -> $V {{ return $V({', '.join(map(str, lanes))}); }}"
        if name == "sel":
            return f"fn $N(m: {m}, a: $V, b: $V) -> $V {{ return select(b, a, m); }}"
        if name in _INFIX:
            return f"fn $N(a: $V, b: $V) -> $V {{ return a {_INFIX[name]} b; }}"
        if name.startswith(("fold_", "half_")):
            return self._folded(name, dtype, width)
        if name == "exchange":
            rows = [f"  let x{k} = *a{k};" for k in lanes]
            rows += [f"  *a{k} = $V({', '.join(f'x{j}[{k}]' for j in lanes)});" for k in lanes]
            head = ", ".join(f"a{k}: ptr<function, $V>" for k in lanes)
            return f"fn $N({head}) {{\n" + "\n".join(rows) + "\n}"
        types = {"V": v, "M": m, "I": i, "E": e}
        form = _LANES.get(name, "V:V")
        if name in math.CONVERSIONS:
            form = "I:V" if name.startswith("from") else "V:I"
        operands, result = form.split(":")
        scalar_helper = self.helper(name, dtype, 1)
        head = ", ".join(f"a{k}: {types[t]}" for k, t in enumerate(operands))
        parts = [f"{scalar_helper}({', '.join(f'a{k}[{lane}]' for k in range(len(operands)))})" for lane in lanes]
        return f"fn $N({head}) -> {types[result]} {{ return {types[result]}({', '.join(parts)}); }}"

    def _folded(self, name: str, dtype: DType, width: int) -> str:
        """Return a helper that combines the two halves of a vector, once (`half_`) or down to one element (`fold_`)."""
        kind, op = name.split("_")
        half, narrow = width // 2, self.vector(dtype, width // 2)
        parts = [
            "a[0]" if half == 1 and not at else f"a[{at}]" if half == 1
            else self.literal(narrow, [f"a[{at + k}]" for k in range(half)])
            for at in (0, half)
        ]  # fmt: skip
        joined = f"{parts[0]} {_INFIX[op]} {parts[1]}" if op in _INFIX and dtype is f32 else ""
        joined = joined or f"{self.helper(op, dtype, half)}({parts[0]}, {parts[1]})"
        if kind == "half":
            return f"fn $N(a: $V) -> {narrow} {{ return {joined}; }}"
        if half > 1:
            joined = f"{self.helper(name, dtype, half)}({joined})"
        return f"fn $N(a: $V) -> {self.storage(dtype)} {{ return {joined}; }}"


def _no_u64(name: str) -> BuildError:
    return BuildError(f"WGSL kernels have no {name} of uint64; use int64, or build for another target")
