"""Integer arithmetic that wraps, and casts of floats to integers, as text of the C family without undefined behaviour.

C leaves signed overflow and casts of too large floats undefined, and compilers make use of that. docs/design/meaning.md defines both:
two's complement, and the smallest integer for a float that int32 or int64 cannot hold.

Tests: `tests/ir/codegen/test_integers.py`, `tests/ir/codegen/test_bits.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.dtype import DType, f32, i32, i64
from relax_tune.ir.core.scalar_ops import SCALAR_OPS

SIGNS = {"add": "+", "sub": "-", "mul": "*"}

# The instruction that truncates f32 vectors, by lanes: macro of its extension, end of the builtin's name, further arguments.
CONVERSIONS = {
    16: ("__AVX512F__", "512_mask", ", ({v}){{0}}, (unsigned short)-1, 4"),
    8: ("__AVX__", "256", ""),
    4: ("__SSE2__", "", ""),
}

# The smallest number of a type, and the first number that is too large for it, as text.
ENDS = {i32: ("-2147483647 - 1", "2147483648.0"), i64: ("-9223372036854775807 - 1", "9223372036854775808.0")}


def literal(value: int) -> str:
    """Return an integer literal. C parses -N as the negation of N, so the smallest number of a type is written as a difference."""
    ends = {-(1 << 31): ENDS[i32][0], -(1 << 63): ENDS[i64][0]}
    return f"{value}{'u' if value >> 31 else ''}" if value >= 0 else f"({ends.get(value, value)})"


def arithmetic(name: str, dtype: DType, unsigned: str) -> str:
    """Return a wrapping function of two scalars. C computes narrow types in int, which holds their sums and products."""
    return f"STATIC $V $N($V a, $V b) {{ return ($V)({unsigned}a {SIGNS[name]} {unsigned}b); }}"


def of_bits(name: str, dtype: DType, unsigned: str) -> str:
    """Return a bitwise function of two integers. A right shift by a count outside the width gives the sign: 0 or -1."""
    width = 8 * dtype.bytes
    outside = f"b >= {width}" if dtype.is_unsigned else f"b < 0 || b >= {width}"
    head, sign = "STATIC $V $N($V a, $V b)", SCALAR_OPS[name].c_name
    if name == "shift_left":
        return f"{head} {{ return {outside} ? 0 : ($V)(({unsigned or '(unsigned)'}a) << b); }}"
    if name == "shift_right":
        return f"{head} {{ return {outside} ? {'0' if dtype.is_unsigned else 'a < 0 ? -1 : 0'} : ($V)(a >> b); }}"
    if name == "integer_power":
        below = (
            "" if dtype.is_unsigned else "if (b < 0) return a == 1 || (a == -1 && b % 2 == 0) ? 1 : a == -1 ? -1 : 0; "
        )
        wide = unsigned.strip("()") or "unsigned"
        loop = f"{wide} r = 1, x = ({wide})a; for (; b; b >>= 1) {{ if (b & 1) r *= x; x *= x; }}"
        return f"{head} {{ {below}{loop} return ($V)r; }}"
    return f"{head} {{ return ($V)(a {sign} b); }}"


def arithmetic_vector(name: str, unsigned: str, language: str) -> str:
    """Return a function of two vectors of int32."""
    if language == "c":
        return f"STATIC $V $N($V a, $V b) {{ return ($V)(({unsigned})a {SIGNS[name]} ({unsigned})b); }}"
    union = f"union {{ $V v; {unsigned} u; }} x, y; x.v = a; y.v = b; x.u = x.u {SIGNS[name]} y.u; return x.v;"
    return f"STATIC $V $N($V a, $V b) {{ {union} }}"


def truncated(source: DType, target: DType, v: str) -> str:
    """Return the body of a truncation of the float `x`. NaN and numbers out of range give the smallest integer."""
    least, edge = ENDS[target]
    edge += "f" if source is f32 else ""
    return f"return x > -{edge} && x < {edge} ? ({v})x : {least};"


def truncated_unsigned(source: DType, v: str, signed: str) -> str:
    """Return the body of a truncation of the float `x` to uint64; numbers below 2^63 go through int64."""
    f = "f" if source is f32 else ""
    edge = ENDS[i64][1] + f
    return f"return x < {edge} || x != x ? ({v}){signed}(x) : x < 2 * {edge} ? ({v})x : 0;"


def truncated_gcc(source: DType, target: DType, v: str, back: bool) -> str:
    """Return the body of a truncation of the float `x` for gcc.

    Args:
        back: Whether the integer may be cast to a float again. gcc folds `(float)(int)x` to the truncation of x, which is -0.0
            instead of 0.0 for numbers between -1 and 0.
    """
    f = "f" if source is f32 else ""
    least, edge = ENDS[target]
    small = "a < 1 ? 0 : " if back else ""
    return (
        f"const {'float' if f else 'double'} a = __builtin_fabs{f}(x); return a < {edge}{f} ? {small}({v})x : {least};"
    )


def truncated_vector(source: DType) -> str:
    """Return the condition that int32 holds the truncation of the vector `x`."""
    edge = ENDS[i32][1] + ("f" if source is f32 else "")
    return f"(x > -{edge}) & (x < {edge})"


def truncated_fast(head: str, v: str, width: int, plain: str) -> str:
    """Return the truncation of an f32 vector by the instruction of x86, or `plain` on processors without it."""
    if width not in CONVERSIONS:
        return plain
    macro, end, more = CONVERSIONS[width]
    fast = f"{head} {{ return ({v})__builtin_ia32_cvttps2dq{end}(x{more.format(v=v)}); }}"
    return f"#ifdef {macro}\n{fast}\n#else\n{plain}\n#endif"
