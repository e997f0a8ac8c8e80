"""64-bit integers as pairs of words, since WGSL has none wider than 32 bits.

A pair is a `vec2<u32>`, the low word first, as in memory. Sums and products wrap, and division rounds to minus infinity, as
docs/design/meaning.md defines for int64. Products of words are sums of products of 16 bits.

Tests: `tests/ir/codegen/test_wgsl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

# (names of the functions that it calls, text)
Piece = tuple[tuple[str, ...], str]

PAIR = "vec2<u32>"

# Functions of uint64; only operations that do not depend on the sign share the function of int64.
WORDS: Mapping[str, str] = {
    **{name: f"{name}_wide" for name in ("add", "sub", "mul", "eq", "ne", "shift_left")},
    **{name: f"{name}_wide" for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{name: f"{name}_words" for name in ("min", "max", "shift_right")},
    "lt": "below_wide",
}

_NEGATIVE = "(a.y >> 31u) != 0u"

WIDE: Mapping[str, Piece] = {
    "wide": ((), "fn rt_wide(a: i32) -> vec2<u32> { return vec2<u32>(u32(a), select(0u, 0xffffffffu, a < 0)); }"),
    "add_wide": (
        (),
        "fn rt_add_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {\n"
        "  let low = a.x + b.x;\n  return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x)); }",
    ),
    "negative_wide": (
        ("add_wide",),
        "fn rt_negative_wide(a: vec2<u32>) -> vec2<u32> { return rt_add_wide(~a, vec2<u32>(1u, 0u)); }",
    ),
    "sub_wide": (
        ("add_wide", "negative_wide"),
        "fn rt_sub_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return rt_add_wide(a, rt_negative_wide(b)); }",
    ),
    "words_wide": (
        (),
        "fn rt_words_wide(a: u32, b: u32) -> vec2<u32> {\n"
        "  let p = (a & 0xffffu) * (b & 0xffffu);\n"
        "  let q = (a >> 16u) * (b & 0xffffu) + (p >> 16u);\n"
        "  let r = (a & 0xffffu) * (b >> 16u) + (q & 0xffffu);\n"
        "  return vec2<u32>((r << 16u) | (p & 0xffffu), (a >> 16u) * (b >> 16u) + (q >> 16u) + (r >> 16u)); }",
    ),
    "mul_wide": (
        ("words_wide",),
        "fn rt_mul_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {\n"
        "  let p = rt_words_wide(a.x, b.x);\n  return vec2<u32>(p.x, p.y + a.x * b.y + a.y * b.x); }",
    ),
    "below_wide": (
        (),
        "fn rt_below_wide(a: vec2<u32>, b: vec2<u32>) -> bool { return a.y < b.y || (a.y == b.y && a.x < b.x); }",
    ),
    "lt_wide": (
        (),
        "fn rt_lt_wide(a: vec2<u32>, b: vec2<u32>) -> bool {\n"
        "  return bitcast<i32>(a.y) < bitcast<i32>(b.y) || (a.y == b.y && a.x < b.x); }",
    ),
    "le_wide": (
        ("lt_wide",),
        "fn rt_le_wide(a: vec2<u32>, b: vec2<u32>) -> bool { return !rt_lt_wide(b, a); }",
    ),
    "eq_wide": ((), "fn rt_eq_wide(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x == b.x && a.y == b.y; }"),
    "ne_wide": ((), "fn rt_ne_wide(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x != b.x || a.y != b.y; }"),
    "min_wide": (
        ("lt_wide",),
        "fn rt_min_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(b, a, rt_lt_wide(a, b)); }",
    ),
    "max_wide": (
        ("lt_wide",),
        "fn rt_max_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(b, a, rt_lt_wide(b, a)); }",
    ),
    "min_words": (
        ("below_wide",),
        "fn rt_min_words(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(b, a, rt_below_wide(a, b)); }",
    ),
    "max_words": (
        ("below_wide",),
        "fn rt_max_words(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(b, a, rt_below_wide(b, a)); }",
    ),
    "shift_right_words": (
        (),
        """fn rt_shift_right_words(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (b.y != 0u || b.x > 63u) { return vec2<u32>(0u, 0u); }
  let k = b.x & 31u;
  let moved = vec2<u32>((a.x >> k) | select(a.y << ((32u - k) & 31u), 0u, k == 0u), a.y >> k);
  return select(moved, vec2<u32>(a.y >> k, 0u), b.x > 31u); }""",
    ),
    "abs_wide": (
        ("negative_wide",),
        f"fn rt_abs_wide(a: vec2<u32>) -> vec2<u32> {{ return select(a, rt_negative_wide(a), {_NEGATIVE}); }}",
    ),
    # Long division, bit by bit (Knuth, The Art of Computer Programming 2, section 4.3.1). For negative a, q = -1 - (-1 - a) / b.
    "floordiv_wide": (
        ("below_wide", "negative_wide", "sub_wide"),
        """fn rt_floordiv_wide(top: vec2<u32>, under: vec2<u32>) -> vec2<u32> {
  let down = (under.y >> 31u) != 0u;
  let a = select(top, rt_negative_wide(top), down);
  let b = select(under, rt_negative_wide(under), down);
  let negative = (a.y >> 31u) != 0u && !(down && a.x == 0u && a.y == 0x80000000u);
  let n = select(a, ~a, negative);
  var q = vec2<u32>(0u, 0u);
  var r = vec2<u32>(0u, 0u);
  for (var k = 63; k >= 0; k--) {
    let word = select(n.x, n.y, k >= 32);
    r = vec2<u32>((r.x << 1u) | ((word >> (u32(k) & 31u)) & 1u), (r.y << 1u) | (r.x >> 31u));
    let fits = !rt_below_wide(r, b);
    r = select(r, rt_sub_wide(r, b), fits);
    let bit = select(0u, 1u << (u32(k) & 31u), fits);
    q = select(vec2<u32>(q.x | bit, q.y), vec2<u32>(q.x, q.y | bit), k >= 32);
  }
  return select(q, ~q, negative); }""",
    ),
    "floormod_wide": (
        ("floordiv_wide", "mul_wide", "sub_wide"),
        "fn rt_floormod_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {\n"
        "  return rt_sub_wide(a, rt_mul_wide(rt_floordiv_wide(a, b), b)); }",
    ),
    "bitwise_and_wide": ((), "fn rt_bitwise_and_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return a & b; }"),
    "bitwise_or_wide": ((), "fn rt_bitwise_or_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return a | b; }"),
    "bitwise_xor_wide": ((), "fn rt_bitwise_xor_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return a ^ b; }"),
    "shift_left_wide": (
        (),
        """fn rt_shift_left_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (b.y != 0u || b.x > 63u) { return vec2<u32>(0u, 0u); }
  let k = b.x & 31u;
  let moved = vec2<u32>(a.x << k, (a.y << k) | select(a.x >> ((32u - k) & 31u), 0u, k == 0u));
  return select(moved, vec2<u32>(0u, a.x << k), b.x > 31u); }""",
    ),
    "shift_right_wide": (
        (),
        """fn rt_shift_right_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let sign = bitcast<u32>(bitcast<i32>(a.y) >> 31u);
  if (b.y != 0u || b.x > 63u) { return vec2<u32>(sign, sign); }
  let k = b.x & 31u;
  let high = bitcast<u32>(bitcast<i32>(a.y) >> k);
  let moved = vec2<u32>((a.x >> k) | select(a.y << ((32u - k) & 31u), 0u, k == 0u), high);
  return select(moved, vec2<u32>(high, sign), b.x > 31u); }""",
    ),
    "integer_power_wide": (
        ("mul_wide", "shift_right_wide"),
        """fn rt_integer_power_wide(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let one = vec2<u32>(1u, 0u);
  if ((b.y >> 31u) != 0u) {
    if (all(a == one) || (all(a == ~vec2<u32>(0u, 0u)) && (b.x & 1u) == 0u)) { return one; }
    return select(vec2<u32>(0u, 0u), a, all(a == ~vec2<u32>(0u, 0u)));
  }
  var r = one;
  var x = a;
  var n = b;
  for (var k = 0; k < 64; k++) {
    r = select(r, rt_mul_wide(r, x), (n.x & 1u) != 0u);
    x = rt_mul_wide(x, x);
    n = rt_shift_right_wide(n, one);
  }
  return r; }""",
    ),
    # To nearest, ties to even: the 32 highest bits are rounded once, with the last one set if any lower bit is.
    "float_of_wide": (
        ("abs_wide", "shift_left_wide", "nearest"),
        """fn rt_float_of_wide(a: vec2<u32>) -> f32 {
  let size = rt_abs_wide(a);
  let zeros = select(countLeadingZeros(size.y), 32u + countLeadingZeros(size.x), size.y == 0u);
  let top = rt_shift_left_wide(size, vec2<u32>(zeros & 63u, 0u));
  let bits = top.y | select(0u, 1u, top.x != 0u);
  let value = rt_nearest(bits) * bitcast<f32>((127u + 32u - zeros) << 23u);
  if (zeros > 63u) { return 0.0f; }
  return select(value, -value, (a.y >> 31u) != 0u); }""",
    ),
    # A word as a float, to nearest, ties to even; WGSL's conversions may round in either direction.
    "nearest": (
        (),
        """fn rt_nearest(a: u32) -> f32 {
  let half = select(0x7fu, 0x80u, (a & 0x100u) == 0u);
  let up = (a & 0xffu) > half;
  return f32(a >> 8u) * 256.0f + select(0.0f, 256.0f, up); }""",
    ),
    "whole_wide": (
        ("negative_wide", "shift_left_wide"),
        """fn rt_whole_wide(x: f32) -> vec2<u32> {
  let b = bitcast<u32>(x);
  let e = i32((b >> 23u) & 0xffu) - 127;
  if (e >= 63) { return vec2<u32>(0u, 0x80000000u); }
  if (e < 0) { return vec2<u32>(0u, 0u); }
  let m = (b & 0x7fffffu) | 0x800000u;
  let near = vec2<u32>(m >> u32(clamp(23 - e, 0, 31)), 0u);
  let size = select(near, rt_shift_left_wide(vec2<u32>(m, 0u), vec2<u32>(u32(max(e - 23, 0)), 0u)), e > 23);
  return select(size, rt_negative_wide(size), (b >> 31u) != 0u); }""",
    ),
}
