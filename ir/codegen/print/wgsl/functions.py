"""Functions of f32 in WGSL, with the special values of IEEE 754.

WGSL's builtin functions may be off by thousands of units in the last place. Compilers may assume that no number is NaN or infinite, and
WGSL has no constants for either. Therefore NaN is detected by its bits, NaN and infinity are created from bits in variables, and special
cases are selected by comparisons of bits. Of the builtins only `abs`, `floor`, `round` and `sqrt` are used. Denormal numbers may be
flushed to 0. Sources: the polynomials of `print/math`, Cephes (Moshier) for inverse and hyperbolic functions, and Payne and Hanek (1983)
for large arguments of sine and cosine.

Tests: `tests/ir/codegen/test_wgsl.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from relax_tune.ir.codegen.print import math
from relax_tune.ir.codegen.print.math import horner
from relax_tune.ir.codegen.print.wgsl.wide import Piece


def _of(name: str, body: str) -> str:
    return f"fn rt_{name}_f32(x: f32) -> f32 {{\n  if (rt_nan_f32(x)) {{ return x; }}\n{body}\n}}"


def _rational(limit: float, p: tuple[float, ...], q: tuple[float, ...]) -> str:
    return f"""  let z = min(x * x, {limit * limit!r}f);
  let p = {horner("z", p)};
  let q = {horner("z", q)};
  if (abs(x) >= {2 * limit!r}f) {{ return sign(x); }}
  return clamp(x * p / q, -1.0f, 1.0f);"""


def _logarithm(high: str, low: str, scale: str) -> str:
    return f"""  let source = bitcast<i32>(x);
  if ((source & 0x7fffffff) == 0) {{ return -rt_inf(); }}
  if (source < 0) {{ return rt_not_a_number(); }}
  if (source == 0x7f800000) {{ return x; }}
  let tiny = source < 0x800000;
  let b = select(source, bitcast<i32>(f32(source)), tiny);
  let k = (b - 0x3F3504F3) >> 23u;
  let f = bitcast<f32>(b - (k << 23u)) - 1.0f;
  let e = f32(select(k, k - 149, tiny));
  let p = {horner("f", math.LOG)};
  let z = f * f;
  return e * {low} + (f * z * p - 0.5f * z + f) * {scale} + e * {high};"""


_POWER = f"""fn rt_pow_f32(x: f32, y: f32) -> f32 {{
  if (y == 0.0f || x == 1.0f) {{ return 1.0f; }}
  if (rt_nan_f32(x)) {{ return x; }}
  if (rt_nan_f32(y)) {{ return y; }}
  let size = abs(y);
  let a = abs(x);
  let whole = floor(y) == y;
  let odd = whole && size < 16777216.0f && floor(size * 0.5f) * 2.0f != size;
  let sign = select(1.0f, -1.0f, odd && (bitcast<u32>(x) >> 31u) != 0u);
  let minus = bitcast<u32>(sign) & 0x80000000u;
  let infinite = (bitcast<u32>(a) == 0x7f800000u);
  if (a == 0.0f || infinite) {{ return bitcast<f32>(minus | bitcast<u32>(select(0.0f, rt_inf(), infinite == (y > 0.0f)))); }}
  if (bitcast<u32>(size) == 0x7f800000u) {{
    if (a == 1.0f) {{ return 1.0f; }}
    return select(0.0f, rt_inf(), (a > 1.0f) == (y > 0.0f));
  }}
  if (x < 0.0f && !whole) {{ return rt_not_a_number(); }}
  let source = bitcast<i32>(a);
  let tiny = source < 0x800000;
  let b = select(source, bitcast<i32>(f32(source)), tiny);
  let steps = (b - 0x3F3504F3) >> 23u;
  let m = bitcast<f32>(b - (steps << 23u));
  let n = select(steps, steps - 149, tiny);
  let f = m - 1.0f;
  let g = m + 1.0f;
  let s = f / g;
  let t = rt_product_f32(s, g);
  let rest = (((f - t.x) - t.y) - s * (m - (g - 1.0f))) / g;
  let z = s * s;
  let w = s * z * ({horner("z", (0.6666666666666666, 0.4, 0.2857142857142857, 0.2222222222222222, 0.1818181818181818))});
  let low = 2.0f * rest + w;
  let u = rt_product_f32(2.0f * s, 1.44269502162933349609375f);
  let l = u.y + low * 1.4426950408889634f + 2.0f * s * 1.92596299112661746887e-8f;
  let high = f32(n) + u.x;
  let less = (u.x - (high - f32(n))) + l;
  let v = rt_product_f32(y, high);
  let error = v.y + y * less;
  if (v.x > 130.0f) {{ return sign * rt_inf(); }}
  if (v.x < -155.0f) {{ return bitcast<f32>(minus); }}
  let k = round(v.x + error);
  let r = ((v.x - k) + error) * 0.6931471805599453f;
  let p = {horner("r", (1.0, 1.0, *math.EXP))};
  let h = i32(k) >> 1u;
  return sign * (p * bitcast<f32>((h + 127) << 23u) * bitcast<f32>((i32(k) - h + 127) << 23u));
}}"""

# (x, y) -> x * y rounded, and its rounding error (Dekker 1971); operands are split into halves by masking bits
_PRODUCT = """fn rt_product_f32(x: f32, y: f32) -> vec2<f32> {
  let p = x * y;
  let a = bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);
  let b = bitcast<f32>(bitcast<u32>(y) & 0xfffff000u);
  let c = x - a;
  let d = y - b;
  return vec2<f32>(p, ((a * b - p) + a * d + c * b) + c * d);
}"""

# The quadrant of x, and the bits of the reduced argument, which is at most pi / 4 in magnitude. Arguments below 8192 are reduced by
# Cody and Waite's three-part constant, larger ones by Payne and Hanek's method.
_QUADRANT = """const rt_two_over_pi = array<u32, 6>(0x28be60dbu, 0x9391054au, 0x7f09d5f4u, 0x7d4d3770u, 0x36d8a566u, 0x4f10e410u);
fn rt_quadrant_f32(x: f32) -> vec2<i32> {
  if (abs(x) < 8192.0f) {
    let n = round(x * 0.636619772367581343f);
    let r = ((x - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.54978995489188216e-8f;
    return vec2<i32>(i32(n), bitcast<i32>(r));
  }
  var bits = rt_two_over_pi;
  let e = i32((bitcast<u32>(x) >> 23u) & 0xffu) - 126;
  let m = (bitcast<u32>(x) << 8u) | 0x80000000u;
  let i = e >> 5u;
  let k = u32(e) & 31u;
  let w = vec4<u32>(select(bits[max(i - 1, 0)], 0u, i == 0), bits[i], bits[i + 1], bits[i + 2]);
  let c = (32u - k) & 31u;
  let next = select(w.yzw >> vec3<u32>(c), vec3<u32>(0u), k == 0u);
  let h = (w.xyz << vec3<u32>(k)) | next;
  let a = rt_words_wide(m, h.z);
  let b = rt_add_wide(rt_words_wide(m, h.y), vec2<u32>(a.y, 0u));
  let p = rt_add_wide(vec2<u32>(0u, m * h.x), b);
  var q = i32(p.y >> 30u);
  var left = vec2<u32>(p.x, p.y & 0x3fffffffu);
  if ((left.y & 0x20000000u) != 0u) {
    left = rt_sub_wide(left, vec2<u32>(0u, 0x40000000u));
    q = q + 1;
  }
  let r = rt_float_of_wide(left) * 3.4061215800304594e-19f;
  if (x < 0.0f) { return vec2<i32>(-q, bitcast<i32>(-r)); }
  return vec2<i32>(q, bitcast<i32>(r));
}
fn rt_wave_f32(q: i32, r: f32) -> f32 {
  let z = r * r;
  let s = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
  let c = 1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  let v = select(s, c, (q & 1) != 0);
  return select(v, -v, (q & 2) != 0);
}"""

_ENDLESS = "  if ((bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u) { return rt_not_a_number(); }\n"

_REMAINDER = """fn rt_fmod_f32(x: f32, y: f32) -> f32 {
  if (rt_nan_f32(x)) { return x; }
  if (rt_nan_f32(y)) { return y; }
  let sign = bitcast<u32>(x) & 0x80000000u;
  let top = bitcast<u32>(x) & 0x7fffffffu;
  let under = bitcast<u32>(y) & 0x7fffffffu;
  if (under == 0u || top == 0x7f800000u) { return rt_not_a_number(); }
  if (top < under) { return x; }
  let least = max(i32(under >> 23u), 1);
  var e = max(i32(top >> 23u), 1);
  let by = select((under & 0x7fffffu) | 0x800000u, under, under < 0x800000u);
  var m = select((top & 0x7fffffu) | 0x800000u, top, top < 0x800000u);
  while (e > least) {
    m = select(m, m - by, m >= by) << 1u;
    e = e - 1;
  }
  m = select(m, m - by, m >= by);
  if (m == 0u) { return bitcast<f32>(sign); }
  let shift = min(countLeadingZeros(m) - 8u, u32(e - 1));
  m = m << shift;
  e = e - i32(shift);
  return bitcast<f32>(sign | select((m & 0x7fffffu) | (u32(e) << 23u), m, m < 0x800000u));
}"""

_ARC = """fn rt_arc_f32(x: f32) -> f32 {
  let big = x > 0.5f;
  let z = select(x * x, 0.5f * (1.0f - x), big);
  let s = select(x, sqrt(max(z, 0.0f)), big);
  let p = s + s * z * (1.6666752422e-1f + z * (7.4953002686e-2f + z * (4.5470025998e-2f + z * (2.4181311049e-2f + z * 4.2163199048e-2f))));
  return select(p, 1.5707963267948966f - 2.0f * p, big);
}"""

_ATAN = """  let a = abs(x);
  let far = a > 2.414213562373095f;
  let mid = a > 0.4142135623730950f;
  let s = select(select(a, (a - 1.0f) / (a + 1.0f), mid), -1.0f / max(a, 1.0f), far);
  let z = s * s;
  let p = s + s * z * (-3.33329491539e-1f + z * (1.99777106478e-1f + z * (-1.38776856032e-1f + z * 8.05374449538e-2f)));
  let v = p + select(select(0.0f, 0.7853981633974483f, mid), 1.5707963267948966f, far);
  let angle = select(v, 1.5707963267948966f, bitcast<u32>(a) == 0x7f800000u);
  return select(angle, -angle, (bitcast<u32>(x) >> 31u) != 0u);"""

_ATAN2 = """fn rt_atan2_f32(y: f32, x: f32) -> f32 {
  if (rt_nan_f32(x)) { return x; }
  if (rt_nan_f32(y)) { return y; }
  let left = (bitcast<u32>(x) >> 31u) != 0u;
  let a = abs(y);
  let b = abs(x);
  let endless = bitcast<u32>(b) == 0x7f800000u;
  var v = 0.0f;
  if (bitcast<u32>(a) == 0x7f800000u) {
    v = select(1.5707963267948966f, 0.7853981633974483f, endless);
  } else if (a == 0.0f || endless) {
    v = 0.0f;
  } else if (b == 0.0f) {
    v = 1.5707963267948966f;
  } else {
    v = rt_atan_f32(a / b);
  }
  v = select(v, 3.141592653589793f - v, left);
  return bitcast<f32>(bitcast<u32>(v) | (bitcast<u32>(y) & 0x80000000u));
}"""


def _signed(body: str) -> str:
    """Return the body of an odd function, given text that computes `v` from `a`, the magnitude of the argument."""
    return f"  let a = abs(x);\n{body}\n  return bitcast<f32>((bitcast<u32>(v) & 0x7fffffffu) | (bitcast<u32>(x) & 0x80000000u));"


_SINH = """  let z = a * a;
  let near = a + a * z * (1.66667160211e-1f + z * (8.33028376239e-3f + z * 2.03721912945e-4f));
  let t = rt_exp_f32(0.5f * a);
  let v = select(0.5f * t * t - 0.5f / (t * t), near, a <= 1.0f);"""
_COSH = """  let t = rt_exp_f32(0.5f * abs(x));
  return 0.5f * t * t + 0.5f / (t * t);"""
_ASINH = """  let z = a * a;
  let near = a + a * z * (-1.6666288134e-1f + z * (7.4847586088e-2f + z * (-4.2699340972e-2f + z * 2.0122003309e-2f)));
  let far = rt_log_f32(a) + 0.6931471805599453f;
  let v = select(select(rt_log_f32(a + sqrt(min(z, 1e8f) + 1.0f)), near, a < 0.5f), far, a > 1500.0f);"""
_ACOSH = """  if (x < 1.0f) { return rt_not_a_number(); }
  if (x > 1500.0f) { return rt_log_f32(x) + 0.6931471805599453f; }
  let z = x - 1.0f;
  let p = 1.4142135263e0f + z * (-1.1784741703e-1f + z * (2.6454905019e-2f + z * (-7.5272886713e-3f + z * 1.7596881071e-3f)));
  if (z < 0.5f) { return p * sqrt(z); }
  return rt_log_f32(x + sqrt(z * (x + 1.0f)));"""
_ATANH = """  if (a > 1.0f) { return rt_not_a_number(); }
  let z = a * a;
  let p = 1.46691431730e-1f + z * (8.24370301058e-2f + z * 1.81740078349e-1f);
  let near = a + a * z * (3.33337300303e-1f + z * (1.99782164500e-1f + z * p));
  let far = select(0.5f * rt_log_f32((1.0f + a) / max(1.0f - a, 1e-9f)), rt_inf(), a == 1.0f);
  let v = select(far, near, a < 0.5f);"""

_EXP = f"""  let c = clamp(x, -105.0f, 89.0f);
  let n = round(c * 1.4426950408889634f);
  let r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  let p = {horner("r", (1.0, 1.0, *math.EXP))};
  let k = i32(n);
  let h = k >> 1u;
  return p * bitcast<f32>((h + 127) << 23u) * bitcast<f32>((k - h + 127) << 23u);"""

_SQRT = """  if (x == 0.0f || bitcast<u32>(x) == 0x7f800000u) { return x; }
  if (x < 0.0f) { return rt_not_a_number(); }
  return sqrt(x);"""

_RSQRT = """  let b = bitcast<u32>(x);
  if ((b & 0x7fffffffu) == 0u) { return select(rt_inf(), -rt_inf(), b != 0u); }
  if (b == 0x7f800000u) { return 0.0f; }
  if (x < 0.0f) { return rt_not_a_number(); }
  return 1.0f / sqrt(x);"""

_NAN = ("nan",)

FUNCTIONS: Mapping[str, Piece] = {
    "nan": ((), "fn rt_nan_f32(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }"),
    "inf": (
        (),
        "var<private> rt_inf_bits: u32 = 0x7f800000u;\nfn rt_inf() -> f32 { return bitcast<f32>(rt_inf_bits); }",
    ),
    "not_a_number": (
        (),
        "var<private> rt_nan_bits: u32 = 0x7fc00000u;\nfn rt_not_a_number() -> f32 { return bitcast<f32>(rt_nan_bits); }",
    ),
    "product": ((), _PRODUCT),
    "quadrant": (("words_wide", "add_wide", "sub_wide", "float_of_wide"), _QUADRANT),
    "abs": ((), "fn rt_abs_f32(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0x7fffffffu); }"),
    "floor": (_NAN, _of("floor", "  return floor(x);")),
    "rint": (_NAN, _of("rint", "  return round(x);")),
    "sqrt": ((*_NAN, "not_a_number"), _of("sqrt", _SQRT)),
    "rsqrt": ((*_NAN, "inf", "not_a_number"), _of("rsqrt", _RSQRT)),
    "exp": (_NAN, _of("exp", _EXP)),
    "log": ((*_NAN, "inf", "not_a_number"), _of("log", _logarithm("0.693359375f", "-2.12194440e-4f", "1.0f"))),
    "log2": ((*_NAN, "inf", "not_a_number"), _of("log2", _logarithm("1.0f", "0.0f", "1.4426950408889634f"))),
    "log10": (
        (*_NAN, "inf", "not_a_number"),
        _of("log10", _logarithm("0.301025390625f", "4.605038981195214e-6f", "0.4342944819032518f")),
    ),
    "erf": (_NAN, _of("erf", _rational(4.0, math.ERF_P, math.ERF_Q))),
    "tanh": (_NAN, _of("tanh", _rational(9.1, math.TANH_P, math.TANH_Q))),
    "pow": ((*_NAN, "inf", "not_a_number", "product"), _POWER),
    "fmod": ((*_NAN, "not_a_number"), _REMAINDER),
    "sin": (
        (*_NAN, "not_a_number", "quadrant"),
        _of("sin", f"{_ENDLESS}  let t = rt_quadrant_f32(x);\n  return rt_wave_f32(t.x, bitcast<f32>(t.y));"),
    ),
    "cos": (
        (*_NAN, "not_a_number", "quadrant"),
        _of("cos", f"{_ENDLESS}  let t = rt_quadrant_f32(x);\n  return rt_wave_f32(t.x + 1, bitcast<f32>(t.y));"),
    ),
    "tan": (
        (*_NAN, "not_a_number", "quadrant"),
        _of(
            "tan",
            f"{_ENDLESS}  let t = rt_quadrant_f32(x);\n  let r = bitcast<f32>(t.y);\n"
            "  return rt_wave_f32(t.x, r) / rt_wave_f32(t.x + 1, r);",
        ),
    ),
    "arc": ((), _ARC),
    "asin": (
        (*_NAN, "not_a_number", "arc"),
        _of("asin", _signed("  if (a > 1.0f) { return rt_not_a_number(); }\n  let v = rt_arc_f32(a);")),
    ),
    "acos": (
        (*_NAN, "not_a_number", "arc"),
        _of(
            "acos",
            "  if (abs(x) > 1.0f) { return rt_not_a_number(); }\n"
            "  let far = 2.0f * rt_arc_f32(sqrt(max(0.5f - 0.5f * abs(x), 0.0f)));\n"
            "  let v = select(1.5707963267948966f - rt_arc_f32(abs(x)), far, abs(x) > 0.5f);\n"
            "  return select(v, 3.141592653589793f - v, x < 0.0f);",
        ),
    ),
    "atan": (_NAN, _of("atan", _ATAN)),
    "atan2": ((*_NAN, "atan"), _ATAN2),
    "sinh": ((*_NAN, "exp"), _of("sinh", _signed(_SINH))),
    "cosh": ((*_NAN, "exp"), _of("cosh", _COSH)),
    "asinh": ((*_NAN, "log"), _of("asinh", _signed(_ASINH))),
    "acosh": ((*_NAN, "log", "not_a_number"), _of("acosh", _ACOSH)),
    "atanh": ((*_NAN, "log", "inf", "not_a_number"), _of("atanh", _signed(_ATANH))),
}


def conversion(name: str) -> str:
    """Return a conversion of `print/math` between the bits in memory, an i32, and a number, translated to WGSL."""
    _needs, body = math.CONVERSIONS[name]
    integer = name.split("_")[1].startswith(("int", "uint"))
    number = "i32" if integer else "f32"
    body = re.sub(r"\$I (\w+) = ([^;]*), a = ", r"var \1: i32 = \2;\n  var a: i32 = ", body)
    body = re.sub(r"\$I (\w+) = ", r"var \1: i32 = ", body)
    body = re.sub(r"\$V (\w+) = ", rf"var \1: {number} = ", body)
    body = body.replace("x != x", "rt_nan_f32(x)").replace("rt_tofloat_$S", "f32").replace("rt_splat_i", "i32")
    body = body.replace("rt_bits_$S", "bitcast<i32>").replace("rt_unbits_$S", "bitcast<f32>")
    body = body.replace("bitcast<f32>(i32(0x7FC00000))", "rt_not_a_number()")  # no constant may be NaN
    body = re.sub(r"rt_sel_\w+|rt_sel_\$S", lambda m: "rt_sel_i32" if m[0].endswith("_i") else f"rt_sel_{number}", body)
    if name.startswith("from"):
        return f"fn rt_{name}_{number}(b: i32) -> {number} {{{body}\n}}"
    return f"fn rt_{name}_{number}(x: {number}) -> i32 {{{body}\n  return r;\n}}"
