"""Rules of arithmetic on single elements that are expressions over sizes, for `known_elements`.

Exporters round sizes by floats: cast, divide, floor, cast back. A float of sizes is followed as a quotient as long as it is exact; one
inexact division may be the last step before rounding.

Tests: `tests/ir/frontend/onnx/test_shape_values.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core import expr as ex
from relax_tune.ir.core.dtype import DType, bool_, f16, f32, f64, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, const, postorder
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.math.bits import BitwiseNot, IntegerPower, ShiftLeft, ShiftRight
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    DivScalar,
    Maximum,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Relu,
    ScalarUnary,
    Sub,
)
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, LogicalNot, LogicalOr, NotEqual, Where
from relax_tune.ir.op.math.numeric import Abs, Floor, Modulo, Quotient

DIGITS: Mapping[DType, int] = {f16: 11, f32: 24, f64: 53}
"""Bits of the significand, by dtype."""
LARGEST_DIVISOR = 1 << 10
LARGEST_EXPONENT = 8
LARGEST_SIZE = 2**31 - 1
LONGEST = 200
"""Most operations and operands of an expression that is followed."""


class Unknown(Exception):
    """An element that no rule computes."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Float `above / below`, rounded to its dtype unless `below` is a power of two."""

    above: Expr
    below: int

    @property
    def exact(self) -> bool:
        return self.below & (self.below - 1) == 0

    def number(self, dtype: DType) -> Any:
        """Return the float if it is a literal."""
        n = as_int(self.above)
        return None if n is None else dtype.numpy.type(n) / dtype.numpy.type(self.below)


Element = Expr | Ratio


def literal_of(value: Any, dtype: DType) -> Element:
    """Return a number as an element of a dtype. Raises Unknown for a float that is no short fraction."""
    if dtype is bool_:
        return const(bool(value))
    if dtype.is_int:
        return const(int(value))
    if dtype not in DIGITS or not np.isfinite(value):
        raise Unknown
    exact = Fraction(float(value))
    # A divisor of more bits belongs to a rounded decimal, such as 0.1, which no quotient of sizes equals.
    if exact.denominator > LARGEST_DIVISOR or abs(exact.numerator) > 1 << DIGITS[dtype]:
        raise Unknown
    return Ratio(const(exact.numerator), exact.denominator)


@dataclass(slots=True, eq=False)
class ElementArithmetic:
    """Arithmetic on the elements of one tensor.

    Attributes:
        dtype: Dtype of the elements.
        needs: Conditions under which the elements are right.
    """

    deduction: Deduction
    dtype: DType
    needs: list[Expr]

    def natural(self, e: Expr) -> bool:
        """Return whether an integer is proved to be 0 or more."""
        return self.deduction.proves(ex.le(0, e)) is Proof.YES

    def need(self, cond: Expr) -> None:
        """Note a condition, unless it is proved. Raises Unknown if it never holds, or is too long to prove."""
        proof = Proof.NO if bulky(cond) else self.deduction.proves(cond)
        if proof is Proof.NO:
            raise Unknown
        if proof is Proof.UNKNOWN:
            self.needs.append(cond)

    def fit(self, e: Expr) -> Expr:
        """Return an integer, which needs to be one of the dtype. Raises Unknown for small types without a proof."""
        conditions = fitting(self.deduction, e, self.dtype)
        if conditions is None:
            raise Unknown
        self.needs += conditions
        return e

    def ratio(self, above: Expr, below: int = 1) -> Ratio:
        """Return a float whose dividend needs to be exact in the dtype. Raises Unknown for large divisors."""
        above = self.deduction.simplify(above)
        n = as_int(above)
        if n is not None:
            exact = Fraction(n, below)
            above, below = const(exact.numerator), exact.denominator
        if below > LARGEST_DIVISOR or self.dtype not in DIGITS:
            raise Unknown
        limit = 1 << DIGITS[self.dtype]
        # A size is at most 2^31 - 1, which float64 holds exactly, so the condition would always be true.
        if not (isinstance(above, Var) and limit > LARGEST_SIZE):
            self.need(ex.le(above, limit))
        self.need(ex.le(-limit, above))
        return Ratio(above, below)


def bulky(e: Expr) -> bool:
    """Return whether an expression, written out, is so long that proofs about it take seconds."""
    sizes: dict[Expr, int] = {}
    for part in postorder((e,)):
        sizes[part] = 1 + sum(sizes[c] for c in part.children)
    return sizes[e] > LONGEST


def fitting(deduction: Deduction, e: Expr, dtype: DType) -> list[Expr] | None:
    """Return the conditions under which an integer is one of a dtype; None if it never is, or without a proof for small types."""
    if not dtype.is_int or dtype is i64:
        return []
    if dtype.is_small or bulky(e):
        return None
    limits, conditions = np.iinfo(dtype.numpy), []
    for cond, sure in (
        (ex.le(int(limits.min), e), False),
        (
            ex.le(e, min(int(limits.max), 2**63 - 1)),
            limits.bits == 64 or (isinstance(e, Var) and limits.max >= LARGEST_SIZE),
        ),
    ):
        proof = Proof.YES if sure else deduction.proves(cond)
        if proof is Proof.NO or (proof is Proof.UNKNOWN and limits.bits < 32):
            return None
        if proof is Proof.UNKNOWN:
            conditions.append(cond)
    return conditions


Rule = Callable[..., Element]


def _exact(*items: Element) -> bool:
    """Return whether items are floats; raise Unknown for inexact ones."""
    floats = [i for i in items if isinstance(i, Ratio)]
    if not all(i.exact for i in floats):
        raise Unknown
    return bool(floats)


def _scaled(a: Ratio, b: Ratio) -> tuple[Expr, Expr, int]:
    """Return both dividends over one divisor, a power of two."""
    below = max(a.below, b.below)
    return ex.mul(a.above, below // a.below), ex.mul(b.above, below // b.below), below


def _linear(fn: Callable[[Expr, Expr], Expr]) -> Rule:
    """Make a rule of a function that commutes with positive factors: a sum, a difference, a maximum."""

    def rule(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
        if _exact(a, b):
            x, y, below = _scaled(_float(a), _float(b))
            return work.ratio(fn(x, y), below)
        return work.fit(fn(_integer(a), _integer(b)))

    return rule


def _compare(fn: Callable[[Expr, Expr], Expr]) -> Rule:
    def rule(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
        if _exact(a, b):
            x, y, _ = _scaled(_float(a), _float(b))
            return fn(x, y)
        a, b = _integer(a), _integer(b)
        if a.dtype is bool_:  # equality of truth values
            a, b = ex.select(a, 1, 0), ex.select(b, 1, 0)
        return fn(a, b)

    return rule


def _product(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
    if isinstance(a, Ratio) and isinstance(b, Ratio):
        for x, y in ((a, b), (b, a)):
            if as_int(y.above) == -y.below:  # a change of sign is exact
                return Ratio(ex.mul(x.above, -1), x.below)
        _exact(a, b)
        return work.ratio(ex.mul(a.above, b.above), a.below * b.below)
    return work.fit(ex.mul(_integer(a), _integer(b)))


def _division(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
    """Divide floats by a literal."""
    _exact(a, b)
    x, y = _float(a), _float(b)
    n = as_int(y.above)
    if not n:
        raise Unknown
    sign = 1 if n > 0 else -1
    return work.ratio(ex.mul(x.above, sign * y.below), x.below * abs(n))


def _with_number(rule: Rule) -> Rule:
    """Make a rule of an operator with a number from the rule of two operands."""

    def with_number(work: ElementArithmetic, op: ScalarUnary, a: Element) -> Element:
        typed = op.for_dtype(work.dtype.numpy) if isinstance(a, Ratio) else op
        return rule(work, op, a, literal_of(typed.value, work.dtype))

    return with_number


def _cast(work: ElementArithmetic, op: OperatorSpec, a: Element) -> Element:
    to = work.dtype
    if to is bool_ or (to.is_float and to not in DIGITS):
        raise Unknown
    if isinstance(a, Ratio):
        if to.is_float:
            _exact(a)
            return work.ratio(a.above, a.below)
        return work.fit(_truncated(work, a.above, const(a.below)))
    if a.dtype is bool_:
        a = ex.select(a, 1, 0)
    return work.ratio(a) if to.is_float else work.fit(a)


def _truncated(work: ElementArithmetic, a: Expr, b: Expr) -> Expr:
    """Return the quotient towards zero, of a divisor above 0."""
    down = ex.floordiv(a, b)
    if work.natural(a):
        return down
    return ex.select(ex.lt(a, 0), ex.mul(ex.floordiv(ex.mul(a, -1), b), -1), down)


def _floor(work: ElementArithmetic, op: OperatorSpec, a: Element) -> Element:
    x = _float(a)
    return Ratio(ex.floordiv(x.above, x.below), 1)


def _quotient(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
    x, y = _integer(a), _integer(b)
    # Quotients of other divisors would need a case for each sign.
    if not work.natural(ex.sub(y, 1)):
        raise Unknown
    return work.fit(_truncated(work, x, y))


def _modulo(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
    x, y = _integer(a), _integer(b)
    if not work.natural(ex.sub(y, 1)):
        raise Unknown
    return ex.floormod(x, y)


def _abs(work: ElementArithmetic, op: OperatorSpec, a: Element) -> Element:
    above = a.above if isinstance(a, Ratio) else a
    size = above if work.natural(above) else ex.maximum(above, ex.mul(above, -1))
    return Ratio(size, a.below) if isinstance(a, Ratio) else work.fit(size)


def _power(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
    n, result = as_int(_integer(b)), const(1)
    if n is None or not 0 <= n <= LARGEST_EXPONENT:
        raise Unknown
    total: Expr = result
    for _ in range(n):
        total = ex.mul(total, _integer(a))
    return work.fit(total)


def _shift(work: ElementArithmetic, op: OperatorSpec, a: Element, b: Element) -> Element:
    n = as_int(_integer(b))
    if n is None or not 0 <= n < 32:
        raise Unknown
    by = 1 << n
    return work.fit(ex.mul(_integer(a), by) if isinstance(op, ShiftLeft) else ex.floordiv(_integer(a), by))


def _choice(work: ElementArithmetic, op: OperatorSpec, cond: Element, a: Element, b: Element) -> Element:
    test = _integer(cond)
    if test.value is not None:
        return a if test.value else b
    if isinstance(a, Ratio) or isinstance(b, Ratio):
        _exact(a, b)
        x, y, below = _scaled(_float(a), _float(b))
        return Ratio(ex.select(test, x, y), below)
    return ex.select(test, a, b)


def _complement(work: ElementArithmetic, op: OperatorSpec, a: Element) -> Element:
    if work.dtype.short[0] == "u":
        raise Unknown
    return work.fit(ex.sub(-1, _integer(a)))


def _truths(fn: Callable[..., Expr]) -> Rule:
    return lambda work, op, *items: fn(*map(_integer, items))


def _integer(e: Element) -> Expr:
    if isinstance(e, Ratio):
        raise Unknown
    return e


def _float(e: Element) -> Ratio:
    if isinstance(e, Ratio):
        return e
    raise Unknown


RULES: Mapping[type[OperatorSpec], Rule] = {
    Add: _linear(ex.add), Sub: _linear(ex.sub), Maximum: _linear(ex.maximum), Minimum: _linear(ex.minimum), Mul: _product, Div: _division,
    AddScalar: _with_number(_linear(ex.add)), MaximumScalar: _with_number(_linear(ex.maximum)), MulScalar: _with_number(_product),
    Relu: lambda work, op, a: _linear(ex.maximum)(work, op, a, literal_of(0, work.dtype)),
    DivScalar: _with_number(_division), Cast: _cast, Floor: _floor, Quotient: _quotient, Modulo: _modulo, Abs: _abs,
    IntegerPower: _power, ShiftLeft: _shift, ShiftRight: _shift, BitwiseNot: _complement, Where: _choice,
    Equal: _compare(ex.eq), NotEqual: _compare(ex.ne), Less: _compare(ex.lt), LessEqual: _compare(ex.le),
    LogicalAnd: _truths(ex.and_), LogicalOr: _truths(ex.or_), LogicalNot: _truths(ex.not_),
}  # fmt: skip
