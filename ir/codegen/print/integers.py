"""Integer arithmetic that wraps, and casts of floats to integers, as text of the C family without undefined behaviour.

C leaves signed overflow and casts of too large floats undefined, and compilers make use of that. The meaning is in
docs/design/meaning.md: two's complement, and the smallest number for a float that int32 or int64 cannot hold.
"""

from __future__ import annotations

from relax_tune.ir.core.dtype import DType, f32, i32, i64
from relax_tune.ir.core.scalar_ops import SCALAR_OPS

SIGNS = {"add": "+", "sub": "-", "mul": "*"}

# The machine's conversion of f32 vectors, by lanes: what declares it, the end of its name, more arguments.
CONVERSIONS = {
    16: ("__AVX512F__", "512_mask", ", ({v}){{0}}, (unsigned short)-1, 4"),
    8: ("__AVX__", "256", ""),
    4: ("__SSE2__", "", ""),
}

# The numbers beside the ends of a type as text: the smallest, and the first too large one.
ENDS = {i32: ("-2147483647 - 1", "2147483648.0"), i64: ("-9223372036854775807 - 1", "9223372036854775808.0")}


def literal(value: int) -> str:
    """Return an integer; C reads the smallest of a type as the negation of a number that the type does not have."""
    ends = {-(1 << 31): ENDS[i32][0], -(1 << 63): ENDS[i64][0]}
    return f"{value}{'u' if value >> 31 else ''}" if value >= 0 else f"({ends.get(value, value)})"


def arithmetic(name: str, dtype: DType, unsigned: str) -> str:
    """Return a function of two scalars; narrow ones are computed in int, which holds their sum and product."""
    return f"STATIC $V $N($V a, $V b) {{ return ($V)({unsigned}a {SIGNS[name]} {unsigned}b); }}"


def of_bits(name: str, dtype: DType, unsigned: str) -> str:
    """Return a function of two integers and their bits. A shift by a count outside the width leaves the sign alone."""
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
    """Return the body of a truncation of the float `x`. NaN is in no range; the smallest number is what is beyond it, too."""
    least, edge = ENDS[target]
    edge += "f" if source is f32 else ""
    return f"return x > -{edge} && x < {edge} ? ({v})x : {least};"


def truncated_unsigned(source: DType, v: str, signed: str) -> str:
    """Return the body of a truncation of the float `x` to uint64.

    No other type holds numbers of 2 ** 63 and more."""
    f = "f" if source is f32 else ""
    edge = ENDS[i64][1] + f
    return f"return x < {edge} || x != x ? ({v}){signed}(x) : x < 2 * {edge} ? ({v})x : 0;"


def truncated_gcc(source: DType, target: DType, v: str, back: bool) -> str:
    """Return the same for gcc. back: the number may become a float again, and gcc takes `(float)(int)x` for the truncation of x.

    That has -0.0 for numbers above -1."""
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
    """Return gcc's text of the machine's truncation, which means the same, and `plain` where it has none."""
    if width not in CONVERSIONS:
        return plain
    macro, end, more = CONVERSIONS[width]
    fast = f"{head} {{ return ({v})__builtin_ia32_cvttps2dq{end}(x{more.format(v=v)}); }}"
    return f"#ifdef {macro}\n{fast}\n#else\n{plain}\n#endif"
