"""The scalar operations: one entry each, from which printers, parsers, evaluators and proofs derive their tables.

`expr` derives the constructors' names and the operators of its text, `ir/text` the parser's and `ir/check` the
verifier's. The interpreter, the f64 reference and the closed-form features take `evaluate` and `columns`, interval proofs
`interval`, the printers of kernels `c`, and the scalar list of built programs `on_host`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core import intervals
from relax_tune.ir.core.dtype import DType, i32, i64, is_floating, u32, u64
from relax_tune.ir.core.erf import erf
from relax_tune.ir.core.intervals import Interval

# arithmetic: on numbers of any type; integer, float: on these types only; function: on floats (abs: on any number);
# bits: on integers
# precedence of names, numbers and calls
ATOM = 9

Kind = Literal["arithmetic", "integer", "float", "comparison", "logic", "function", "choice", "cast", "bits"]


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """One operation on scalars.

    Attributes:
        name: key in expressions and in text.
        arity: number of operands.
        kind: operand types; comparisons and logic return bool, every other kind the type of its operands.
        evaluate: value for Python numbers, NumPy scalars or arrays (None: it needs the target type).
        infix, precedence: Python's operator and how tightly it binds; without one, `name(operands)`.
        exact: `evaluate` rounds in the operands' type; otherwise it computes in float64, rounded once.
        interval: interval of an integer result from the intervals of the operands.
        c: operator or `math.h` function in C, CUDA and OpenCL, where it is not `infix` or `name`.
        columns: NumPy text on float64 arrays of whole numbers, where it is not the infix operator; None: not in closed forms.
        on_host: the runtime's scalar list evaluates it; its opcode is the name in capitals.
    """

    name: str
    arity: int
    kind: Kind
    evaluate: Callable[..., Any] | None = None
    infix: str | None = None
    precedence: int = ATOM
    exact: bool = True
    interval: Callable[..., Interval] | None = None
    c: str | None = None
    columns: str | None = None
    on_host: bool = False

    @property
    def gives_bool(self) -> bool:
        """True if the result is a bool."""
        return self.kind in ("comparison", "logic")

    @property
    def c_name(self) -> str:
        """The operator or function in the C family."""
        return self.c or self.infix or self.name

    @property
    def column_text(self) -> str | None:
        """NumPy text over `{0}`, `{1}`, ...; None if closed forms lack the operation."""
        return self.columns or (f"{{0}} {self.infix} {{1}}" if self.infix else None)


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if type(a) is int and type(b) is int else np.minimum(a, b)


def _maximum(a: Any, b: Any) -> Any:
    return max(a, b) if type(a) is int and type(b) is int else np.maximum(a, b)


def _select(cond: Any, a: Any, b: Any) -> Any:
    if isinstance(cond, np.ndarray):
        return np.where(cond, a, b)
    return a if cond else b


def _rsqrt(x: Any) -> Any:
    return 1.0 / np.sqrt(x)


def _not(a: Any) -> Any:
    return a ^ True


def wrapped(value: int, dtype: DType) -> int:
    """Return an integer modulo two to the power of the type's bits (two's complement)."""
    half = 1 << (dtype.bits - 1)
    if dtype.is_unsigned:
        return value & (2 * half - 1)
    return value if -half <= value < half else ((value + half) & (2 * half - 1)) - half


def _shift_left(a: Any, b: Any) -> Any:
    """Shift, wrapping; counts outside the width give 0."""
    if type(a) is int and type(b) is int:
        return wrapped(a << b, i64) if 0 <= b < 64 else 0
    a, b = np.asarray(a), np.asarray(b)
    # C leaves such shifts undefined, and NumPy follows C, so the counts are replaced before they reach it.
    inside = (b >= 0) & (b < 8 * a.dtype.itemsize)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(a.dtype)), a.dtype.type(0))[()]


def _shift_right(a: Any, b: Any) -> Any:
    """Shift, keeping the sign; counts outside the width give the sign, -1 or 0."""
    if type(a) is int and type(b) is int:
        return a >> b if 0 <= b < 64 else -1 if a < 0 else 0
    a, b = np.asarray(a), np.asarray(b)
    inside = (b >= 0) & (b < 8 * a.dtype.itemsize)
    return np.where(inside, np.right_shift(a, np.where(inside, b, 0).astype(a.dtype)), -(a < 0).astype(a.dtype))[()]


def _integer_power(a: Any, b: Any) -> Any:
    """Multiply repeatedly, wrapping; a power below 0 is 1 / x ** -n, rounded towards zero, and 0 for 0."""
    if type(a) is int and type(b) is int:
        return wrapped(pow(a, b, 1 << 64), i64) if b >= 0 else (a if b % 2 else 1) if a in (1, -1) else 0
    a, b = np.asarray(a), np.asarray(b)
    below = b < 0
    rest = np.where(below, 0, b).astype(b.dtype)
    with np.errstate(over="ignore"):
        power, square = np.ones(np.broadcast_shapes(a.shape, b.shape), a.dtype), a
        # Square and multiply: as many rounds as the largest exponent has bits.
        while rest.any():
            power = np.where(rest & 1, power * square, power)
            square, rest = square * square, rest >> 1
    # rounded towards zero, 1 / x ** n is non-zero only for x = 1 and x = -1
    small = np.where(np.abs(a) == 1, np.where(b & 1, a, a * a), a.dtype.type(0)) if a.dtype.kind == "i" else power
    return np.where(below, small, power)[()]


def through(dtype: DType) -> DType:
    """Return the signed type through which a float becomes an integer of `dtype`."""
    return i64 if dtype is u32 or dtype.bytes == 8 else i32


def converted(value: Any, dtype: DType) -> Any:
    """Convert a number or an array to a type: the meaning of `cast`, in docs/design/meaning.md.

    Floats become integers through int32 or int64: numbers outside their range become their smallest number.
    Small floats are rounded from float32; float64 is first rounded to odd, so that the result is rounded once."""
    a, target = np.asarray(value), dtype.numpy
    if dtype.is_int and is_floating(a.dtype):
        # NumPy leaves casts of NaN and of numbers beyond the type undefined. This is what x86's cvttsd2si gives, in two steps for
        # uint64: numbers from 2^63 on are cast after subtracting 2^64.
        wide = through(dtype).numpy
        edge = 2.0 ** (8 * wide.itemsize - 1)
        # Values of the type, as nearly all are, need none of the steps below. A minimum is NaN if an element is.
        if a.size and a.dtype.kind == "f" and float(a.min()) >= -edge and float(a.max()) < edge:
            return a.astype(wide).astype(target)[()]
        with np.errstate(all="ignore"):
            whole = np.trunc(a.astype(np.float64))
            high = (whole >= edge) & (whole < 2 * edge) & (dtype is u64)  # only uint64 holds these
            a = np.where((whole >= -edge) & (whole < edge), whole, np.where(high, whole - 2 * edge, -edge)).astype(wide)
            a = np.where((whole >= 2 * edge) & (dtype is u64), wide.type(0), a)
    elif dtype.short == "bool":
        return (a != 0)[()]
    elif dtype.is_small and dtype.is_int:
        a = a.astype(np.int32)  # ml_dtypes has no casts between integers of few bits
    elif dtype.is_small and dtype.is_float:
        a = _odd(a) if a.dtype == np.float64 else a.astype(np.float32)
    with np.errstate(all="ignore"):
        return a.astype(target)[()]


def _odd(a: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 by rounding to odd (Boldo and Melquiond 2008): the last bit is set where the result is inexact."""
    with np.errstate(all="ignore"):
        near = a.astype(np.float32)
    bits, wide = near.view(np.int32), near.astype(np.float64)
    # An inexact result with an even last bit moves one step towards `a`. The odd bit then stands for "not exact", so that a second
    # rounding to fewer bits can never see a false tie.
    inexact = (wide != a) & (a == a) & (bits & 1 == 0)
    return np.asarray(bits + inexact * np.where(np.abs(wide) < np.abs(a), 1, -1), np.int32).view(np.float32)


def reinterpreted(value: Any, source: DType, target: DType) -> Any:
    """Read the bits of a number or an array as another type of as many bits: the meaning of `bitcast`."""
    return np.asarray(value).astype(source.numpy).view(target.numpy)[()]


def _function(name: str, evaluate: Callable[..., Any], arity: int = 1, **fields: Any) -> ScalarOp:
    return ScalarOp(name, arity, "function", evaluate, exact=fields.pop("exact", False), **fields)


_LISTED = (
    ScalarOp("add", 2, "arithmetic", operator.add, "+", 5, interval=intervals.add, on_host=True),
    ScalarOp("sub", 2, "arithmetic", operator.sub, "-", 5, interval=intervals.sub, on_host=True),
    ScalarOp("mul", 2, "arithmetic", operator.mul, "*", 6, interval=intervals.mul, on_host=True),
    ScalarOp("div", 2, "float", operator.truediv, "/", 6),
    ScalarOp(
        "floordiv", 2, "integer", operator.floordiv, "//", 6, interval=intervals.floordiv, c="/",
        columns="floor({0} / {1})", on_host=True,
    ),
    ScalarOp(
        "floormod", 2, "integer", operator.mod, "%", 6, interval=intervals.floormod,
        columns="{0} - floor({0} / {1}) * {1}", on_host=True,
    ),
    ScalarOp("min", 2, "arithmetic", _minimum, interval=intervals.minimum, columns="minimum({0}, {1})", on_host=True),
    ScalarOp("max", 2, "arithmetic", _maximum, interval=intervals.maximum, columns="maximum({0}, {1})", on_host=True),
    ScalarOp("lt", 2, "comparison", operator.lt, "<", 4, on_host=True),
    ScalarOp("le", 2, "comparison", operator.le, "<=", 4, on_host=True),
    ScalarOp("eq", 2, "comparison", operator.eq, "==", 4, on_host=True),
    ScalarOp("ne", 2, "comparison", operator.ne, "!=", 4, on_host=True),
    ScalarOp("and", 2, "logic", operator.and_, "and", 2, c="&&", columns="logical_and({0}, {1})", on_host=True),
    ScalarOp("or", 2, "logic", operator.or_, "or", 1, c="||", columns="logical_or({0}, {1})", on_host=True),
    ScalarOp("not", 1, "logic", _not, precedence=3, c="!", columns="logical_not({0})", on_host=True),
    ScalarOp("select", 3, "choice", _select, interval=intervals.select, columns="where({0}, {1}, {2})", on_host=True),
    ScalarOp("cast", 1, "cast", columns="{0}"),
    ScalarOp("bitcast", 1, "cast"),
    ScalarOp("bitwise_and", 2, "bits", operator.and_, interval=intervals.bitwise_and, c="&"),
    ScalarOp("bitwise_or", 2, "bits", operator.or_, c="|"),
    ScalarOp("bitwise_xor", 2, "bits", operator.xor, c="^"),
    ScalarOp("shift_left", 2, "bits", _shift_left, c="<<"),
    ScalarOp("shift_right", 2, "bits", _shift_right, c=">>"),
    ScalarOp("integer_power", 2, "bits", _integer_power),
    _function("abs", np.abs, exact=True, interval=intervals.absolute, c="fabs"),
    _function("floor", np.floor, exact=True),
    _function("rint", np.rint, exact=True),
    _function("fmod", np.fmod, 2, exact=True),
    _function("pow", np.power, 2),
    _function("exp", np.exp),
    _function("log", np.log),
    _function("log2", np.log2),
    _function("log10", np.log10),
    _function("erf", erf),
    _function("tanh", np.tanh),
    _function("sqrt", np.sqrt),
    _function("rsqrt", _rsqrt),
    _function("sin", np.sin),
    _function("cos", np.cos),
    _function("tan", np.tan),
    _function("asin", np.arcsin),
    _function("acos", np.arccos),
    _function("atan", np.arctan),
    _function("atan2", np.arctan2, 2),
    _function("sinh", np.sinh),
    _function("cosh", np.cosh),
    _function("asinh", np.arcsinh),
    _function("acosh", np.arccosh),
    _function("atanh", np.arctanh),
)  # fmt: skip

SCALAR_OPS: Mapping[str, ScalarOp] = {o.name: o for o in _LISTED}
assert len(SCALAR_OPS) == len(_LISTED), "a scalar operation is listed twice"

OPS = frozenset(SCALAR_OPS)
INFIX: Mapping[str, str] = {o.name: o.infix for o in _LISTED if o.infix is not None}
# mathematical functions, of floats but for abs
MATH = frozenset(o.name for o in _LISTED if o.kind == "function")
# operations on the bits of integers
BITS = frozenset(o.name for o in _LISTED if o.kind == "bits")
# divide by their second operand, which is never zero
DIVISIONS = frozenset(o.name for o in _LISTED if o.kind == "integer")
# integer operations of the normal form in `ir/arith` and of the arguments of a trace
ALGEBRA = tuple(o.name for o in _LISTED if o.kind in ("arithmetic", "integer"))


def _node(text: str) -> Any:
    return ast.parse(text, mode="eval").body


# Python's syntax nodes of the infix operations
PYTHON_ARITHMETIC: Mapping[type[ast.operator], str] = {
    type(_node(f"a {o.infix} b").op): o.name
    for o in _LISTED
    if o.infix and o.kind in ("arithmetic", "integer", "float")
}
PYTHON_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    type(_node(f"a {o.infix} b").ops[0]): o.name for o in _LISTED if o.kind == "comparison"
}
