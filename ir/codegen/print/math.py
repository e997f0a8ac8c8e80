"""f32 exponential, logarithm, error function, hyperbolic tangent and conversions, as text for scalars and vectors.

The texts use a handful of helper names and are instantiated for each width: `$V` is the float type, `$I` the int32 type of the same
width, `$S` the suffix of the helpers (`f32` or `f32x16`). Coefficients come from `experiments/code/codegen_polynomials.py`
(weighted minimax fits). Largest errors in the dense sweep of `tests/ir/codegen/test_math.py`, in units in the last place: exp 2, log 2,
erf 6, tanh 6.
Infinities, overflow, underflow, signed zeros and NaN behave as in NumPy; the magnitude of erf and tanh never exceeds 1.

Tests: `tests/ir/codegen/test_math.py`, `tests/ir/codegen/test_halves.py`, `tests/ir/codegen/test_small_types.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.ir.core.dtype import SMALL, DType, f4e2m1, f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f8e8m0

# (1, r, r^2 * P(r)) = exp(r) for |r| <= ln(2)/2
EXP = (0.4999999403953552, 0.16666515171527863, 0.04166845604777336, 0.008369418792426586, 0.0013813144760206342)
# f - f^2/2 + f^3 * P(f) = log(1 + f) for sqrt(1/2) <= 1 + f <= sqrt(2)
LOG = (
    0.3333331346511841, -0.25000008940696716, 0.2000211924314499, -0.1666799634695053, 0.14219552278518677,
    -0.124055877327919, 0.11888165771961212, -0.11675659567117691, 0.06746643036603928,
)  # fmt: skip
# x * P(x^2) / Q(x^2) = erf(x) for |x| <= 4; larger x are clamped to 4 in P / Q, and the product to 1
ERF_P = (
    1.1283791065216064, 0.19353218376636505, 0.05309974029660225, 0.0038827068638056517, 0.000284537993138656,
    1.9867079572577495e-06,
)  # fmt: skip
ERF_Q = (
    1.0,
    0.5048459768295288,
    0.11534440517425537,
    0.0152059867978096,
    0.0011853910982608795,
    3.7417928979266435e-05,
)
# x * P(x^2) / Q(x^2) = tanh(x) for |x| <= 9.1; larger x are clamped to 9.1 in P / Q, and the product to 1
TANH_P = (1.0, 0.13374418020248413, 0.0034877429716289043, 2.0480045350268483e-05, 1.3175936786069542e-08)
TANH_Q = (1.0, 0.4670773148536682, 0.02584713138639927, 0.00032728075166232884, 7.703396249780781e-07)


def horner(variable: str, coefficients: Sequence[float]) -> str:
    """Return a polynomial in Horner form; `coefficients` begin with the constant term."""
    text = f"{coefficients[-1]!r}f"
    for i, c in enumerate(reversed(coefficients[:-1])):
        inner = f"{variable} * {text}" if i == 0 else f"({text}) * {variable}"
        text = f"{inner} {'-' if c < 0 else '+'} {abs(c)!r}f"
    return text


def _odd_rational(limit: float, p: Sequence[float], q: Sequence[float]) -> str:
    """Return the body of an odd function that tends to -1 and 1.

    x^2 is clamped in P / Q beyond the limit, so the product grows linearly there and is then clamped to exactly -1 or 1.
    """
    return f"""
  $V z = rt_least_$S(x * x, {limit * limit!r}f);
  $V p = {horner("z", p)};
  $V q = {horner("z", q)};
  return rt_least_$S(rt_most_$S(x * p / q, -1.0f), 1.0f);"""


# ln 2 in two parts: 0.693359375 has 9 significant bits, so its product with an integer of up to 8 bits is exact, and the
# difference x - n * 0.693359375 is exact too. The second part, -2.12194440e-4, corrects it.
_EXP_TAIL = f"""
  r = r - n * -2.12194440e-4f;
  $V p = {horner("r", (1.0, 1.0, *EXP))};"""

# n = round(x / ln 2), r = x - n ln 2 in two steps, exp(r) by a polynomial. It is scaled by 2^n in two steps, so that results near
# overflow and in the denormal range are rounded at most once more.
# Adding 12582912 = 1.5 * 2^23 leaves no bits for a fraction, so it rounds to an integer, which the low bits then hold
# (0x4B400000 are the bits of 12582912). Beyond -105 and 89 the result is 0 or infinity, and the clamp keeps 2^n in range.
EXP_PORTABLE = f"""
  $V c = rt_least_$S(rt_most_$S(x, -105.0f), 89.0f);
  $V t = c * 1.4426950408889634f + 12582912.0f;
  $V n = t - 12582912.0f;
  $V r = c - n * 0.693359375f;{_EXP_TAIL}
  $I k = rt_bits_$S(t) - 0x4B400000;
  $I h = k >> 1;
  p = p * rt_unbits_$S((h + 127) << 23);
  return p * rt_unbits_$S((k - h + 127) << 23);"""

# The exponential with the scaling instruction of AVX-512.
EXP_SCALED = f"""
  $V c = rt_least_$S(rt_most_$S(x, -105.0f), 89.0f);
  $V n = c * 1.4426950408889634f + 12582912.0f - 12582912.0f;
  $V r = c - n * 0.693359375f;{_EXP_TAIL}
  return __builtin_ia32_scalefps%s_mask(p, n, p, (unsigned %s)-1%s);"""
# The scaling instruction by lanes: macro of its extension, and the parts of the builtin's call.
SCALES = {
    16: ("__AVX512F__", ("512", "short", ", 4")),
    8: ("__AVX512VL__", ("256", "char", "")),
    4: ("__AVX512VL__", ("128", "char", "")),
}


def exp_of(width: int) -> str:
    """Return the body of the exponential of a vector."""
    if width not in SCALES:
        return EXP_PORTABLE
    macro, parts = SCALES[width]
    return f"\n#ifdef {macro}{EXP_SCALED % parts}\n#else{EXP_PORTABLE}\n#endif"


# Denormals are scaled by 2^23 first. 0x3F3504F3 are the bits of sqrt(1/2): subtracted, they make the exponent field count
# the powers of two between sqrt(1/2) and sqrt(2). The terms are added smallest first, e * ln 2 in two parts as in exp.
LOG_BODY = f"""
  $I tiny = x < 1.17549435e-38f;
  $V s = rt_sel_$S(tiny, x * 8388608.0f, x);
  $I b = rt_bits_$S(s);
  $I k = (b - 0x3F3504F3) >> 23;
  $V f = rt_unbits_$S(b - (k << 23)) - 1.0f;
  $V e = rt_tofloat_$S(k) - rt_sel_$S(tiny, rt_splat_$S(23.0f), rt_splat_$S(0.0f));
  $V p = {horner("f", LOG)};
  $V z = f * f;
  $V y = f * z * p + e * -2.12194440e-4f - 0.5f * z + f + e * 0.693359375f;
  y = rt_sel_$S(x > 3.4028234e38f, x, y);
  y = rt_sel_$S(x == 0.0f, rt_splat_$S(-__builtin_inff()), y);
  return rt_sel_$S(x >= 0.0f, y, rt_splat_$S(__builtin_nanf("")));"""

ERF_BODY = _odd_rational(4.0, ERF_P, ERF_Q)
TANH_BODY = _odd_rational(9.1, TANH_P, TANH_Q)

# (names of the helpers that the body calls, body)
Conversion = tuple[tuple[str, ...], str]

BODIES: dict[str, Conversion] = {
    "exp": (("least", "most", "bits", "unbits"), EXP_PORTABLE),
    "log": (("sel", "splat", "bits", "unbits", "tofloat"), LOG_BODY),
    "erf": (("least", "most"), ERF_BODY),
    "tanh": (("least", "most"), TANH_BODY),
}

# Conversions between 16-bit floats and f32 by integer arithmetic: to nearest, ties to even, the same with every compiler. Flushing
# denormals to zero does not change them. No shift moves a bit into the sign, which C leaves undefined. `from_` reads the bits as
# $I `b`, `to_` returns them in $I `r`.
FROM_BF16 = """
  return rt_unbits_$S(((b ^ 0x8000) - 0x8000) * 65536);"""

# The low half is rounded by adding 0x7FFF and the last bit of the result; half of the last place goes to even. A quiet bit (0x40)
# keeps a NaN whose upper half has an empty fraction from becoming infinity.
TO_BF16 = """
  $I b = rt_bits_$S(x);
  $I r = (b >> 16) + (((b & 0xFFFF) + 0x7FFF + ((b >> 16) & 1)) >> 16);
  r = rt_sel_i(x != x, (b >> 16) | 0x40, r);"""

# 0x38000000 adds the difference of the exponents' biases, 112. Codes below 0x400 are denormal: their value is the code
# times 2^-24.
FROM_F16 = """
  $I m = b & 0x7FFF;
  $V n = rt_unbits_$S((m << 13) + 0x38000000);
  n = rt_sel_$S(m < 0x400, rt_tofloat_$S(m) * 5.9604644775390625e-08f, n);
  n = rt_sel_$S(m >= 0x7C00, rt_unbits_$S((m << 13) | 0x7F800000), n);
  return rt_unbits_$S(rt_bits_$S(n) | (-(b & 0x8000) * 65536));"""

# Below 2^-14, adding 0.5 rounds to a multiple of the smallest half, since that is the last bit of 0.5.
TO_F16 = """
  $I b = rt_bits_$S(x), a = b & 0x7FFFFFFF;
  $I r = (a - 0x38000000 + 0xFFF + ((a >> 13) & 1)) >> 13;
  r = rt_sel_i(a < 0x38800000, rt_bits_$S(rt_unbits_$S(a) + 0.5f) - 0x3F000000, r);
  r = rt_sel_i(a >= 0x477FF000, rt_splat_i(0x7C00), r);
  r = rt_sel_i(a > 0x7F800000, rt_splat_i(0x7E00), r);
  r = r | ((b >> 16) & 0x8000);"""

HALVES: Mapping[str, Conversion] = {
    "from_bf16": (("unbits",), FROM_BF16),
    "to_bf16": (("bits",), TO_BF16),
    "from_f16": (("bits", "unbits", "sel", "tofloat"), FROM_F16),
    "to_f16": (("bits", "unbits"), TO_F16),
}

# Conversions between the codes of small types and the type of their arithmetic. Only the low bits of the byte in memory are used.


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A format of floats with a sign, denormals, and codes in order of magnitude (OCP FP8 and MX specifications, 2023).

    Attributes:
        mantissa: Stored bits of the fraction.
        bias: Bias of the exponent.
        sign: The sign bit, as a mask.
        most: Code of the largest finite number.
        over: Code that larger numbers are converted to.
        nan: Code of NaN.
        unsigned_zero: Whether -0 is converted to 0, because the code of -0 means NaN.
    """

    mantissa: int
    bias: int
    sign: int
    most: int
    over: int
    nan: int
    unsigned_zero: bool = False

    def convert_from(self) -> Conversion:
        """Return the conversion to f32, which is exact."""
        up, least = 23 - self.mantissa, 2.0 ** (1 - self.bias - self.mantissa)
        body = f"""
  $I m = b & {self.sign - 1};
  $V n = rt_unbits_$S((m << {up}) + {(127 - self.bias) << 23});
  n = rt_sel_$S(m < {1 << self.mantissa}, rt_tofloat_$S(m) * {least!r}f, n);"""
        infinite = self.over < self.nan
        if infinite:
            body += f"""
  n = rt_sel_$S(m >= {self.over}, rt_unbits_$S((m << {up}) | 0x7F800000), n);"""
        elif self.nan > self.most:
            code = "b" if self.unsigned_zero else "m"
            body += f"""
  n = rt_sel_$S({code} == {self.nan}, rt_unbits_$S(rt_splat_i(0x7FC00000)), n);"""
        body += f"""
  return rt_unbits_$S(rt_bits_$S(n) | (-(b & {self.sign}) * {(1 << 31) // self.sign}));"""
        return ("bits", "unbits", "sel", "tofloat"), body

    def convert_to(self) -> Conversion:
        """Return the conversion from f32, to nearest even.

        Denormals are rounded by adding a power of two whose last bit is the smallest denormal.
        """
        up, sign = 23 - self.mantissa, self.sign.bit_length() - 1
        step = 2.0 ** (24 - self.bias - self.mantissa)
        bits = (127 + 24 - self.bias - self.mantissa) << 23
        body = f"""
  $I b = rt_bits_$S(x), a = b & 0x7FFFFFFF;
  $I r = (a - {(127 - self.bias) << 23} + {(1 << (up - 1)) - 1} + ((a >> {up}) & 1)) >> {up};
  r = rt_sel_i(r > {self.most}, rt_splat_i({self.over}), r);
  r = rt_sel_i(a < {(128 - self.bias) << 23}, rt_bits_$S(rt_unbits_$S(a) + {step!r}f) - {bits}, r);"""
        if self.nan != self.over:
            body += f"""
  r = rt_sel_i(a > 0x7F800000, rt_splat_i({self.nan}), r);"""
        signed = f"r | ((b >> {31 - sign}) & {self.sign})"
        body += f"""
  r = {f"rt_sel_i(r == 0, r, {signed})" if self.unsigned_zero else signed};"""
        return ("bits", "unbits"), body


FLOATS: Mapping[DType, SmallFloat] = {
    f8e4m3fn: SmallFloat(3, 7, 0x80, most=0x7E, over=0x7F, nan=0x7F),
    f8e4m3fnuz: SmallFloat(3, 8, 0x80, most=0x7F, over=0x80, nan=0x80, unsigned_zero=True),
    f8e5m2: SmallFloat(2, 15, 0x80, most=0x7B, over=0x7C, nan=0x7E),
    f8e5m2fnuz: SmallFloat(2, 16, 0x80, most=0x7F, over=0x80, nan=0x80, unsigned_zero=True),
    f4e2m1: SmallFloat(1, 1, 8, most=7, over=7, nan=0),
}

# Powers of two and NaN. The exponent is rounded to nearest, ties to the larger; numbers that are not positive become NaN.
FROM_E8M0 = """
  $I r = rt_sel_i(b == 0, rt_splat_i(0x400000), b << 23);
  return rt_unbits_$S(rt_sel_i(b == 255, rt_splat_i(0x7FC00000), r));"""

TO_E8M0 = """
  $I b = rt_bits_$S(x);
  $I r = rt_sel_i(b <= 0x400000, rt_splat_i(0), ((b >> 22) + 1) >> 1);
  r = rt_sel_i((b <= 0) | (b >= 0x7F400000), rt_splat_i(255), r);"""


def integer(dtype: DType) -> tuple[Conversion, Conversion]:
    """Return the conversions of an integer of at most 8 bits to and from int32, which keep the low bits."""
    low = (1 << dtype.bits) - 1
    sign = 0 if dtype.short[0] == "u" else 1 << (dtype.bits - 1)
    extended = f"(((b & {low}) ^ {sign}) - {sign})" if sign else f"(b & {low})"
    return ((), f"\n  return {extended};"), ((), f"\n  $I r = x & {low};")


def _conversions(dtype: DType) -> tuple[Conversion, Conversion]:
    if dtype in FLOATS:
        return FLOATS[dtype].convert_from(), FLOATS[dtype].convert_to()
    if dtype is f8e8m0:
        return (("unbits",), FROM_E8M0), (("bits",), TO_E8M0)
    return integer(dtype)


CONVERSIONS: Mapping[str, Conversion] = {
    **HALVES,
    **{f"{prefix}_{d}": text for d in SMALL for prefix, text in zip(("from", "to"), _conversions(d), strict=True)},
}
