"""Polynomials of the lowering: normal forms, division, and substitution of different values for the variables."""

from __future__ import annotations

from itertools import product

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.codegen.lower.affine import Algebra, as_constant, constant
from relax_tune.ir.core.expr import Expr, Var, and_, const, eq, le, lt, not_, or_

A, B, W, K = Var("a"), Var("b"), Var("w"), Var("k")


def algebra() -> Algebra:
    new = Algebra()
    new.ranges |= {A: (0, 9), B: (0, 7), K: (0, 2)}
    return new


def test_algebra_quotient_and_remainder_merge_to_fused_index() -> None:
    at = A * 8 + B
    for width in (const(7), W, W + 2):
        numbers = algebra()
        assert numbers.static((at // width + K) * width + at % width) == numbers.static(at + K * width)
        assert numbers.static(at // width * width * 3 + at % width * 3) == numbers.static(at * 3)
        other = at // width * width + at % width * 2
        assert numbers.static(other) != numbers.static(at)


def test_algebra_offset_within_tile_divides_as_the_tile() -> None:
    numbers = algebra()
    assert numbers.static((A * 8 + B) // 24) == numbers.static(A // 3)
    assert numbers.static((A * 8 + B) % 24) == numbers.static(A % 3 * 8 + B)
    assert numbers.static((A * 4 + B) // 24) != numbers.static(A // 6)
    # an offset above the factor adds to the quotient too
    assert numbers.static((W * 4 + 6) // 96) == numbers.static((W + 1) // 24)
    assert numbers.static((W * 4 + 6) % 96) == numbers.static((W + 1) % 24 * 4 + 2)


def test_algebra_decides_conditions() -> None:
    numbers = algebra()
    assert numbers.decide(and_(lt(A, 10), not_(eq(B, 8)))) is Proof.YES
    assert numbers.decide(or_(lt(9, A), le(W + 1, W))) is Proof.NO
    assert numbers.decide(eq(A * 2, 2 * B + 1)) is Proof.NO  # even numbers are not odd
    assert numbers.decide(and_(lt(A, 10), lt(A, B))) is Proof.UNKNOWN


def test_algebra_polynomial_equals_expression_at_all_values() -> None:
    cases: list[Expr] = [
        (A * 8 + B) // 24,
        (A * 8 + B) % 24,
        (A * 4 + B) % 24,
        (A * 2 + K) // 2,
        (A * 4 + 6) // 24 + (A * 4 + 6) % 24,
        (B - A * 4 + 9) // 12,
        (A * 2 + K) % 2,
        (A * 6 + K) // 4 + B % 3,
    ]
    for e in cases:
        numbers = algebra()
        for a, b, k in product(range(10), range(8), range(3)):
            # substituting one variable must not fix the values of others
            numbers.env = {A: constant(a), B: constant(b), K: constant(k)}
            value = eval(repr(e), {"a": a, "b": b, "k": k})
            assert as_constant(numbers.poly(e)) == value, (e, a, b, k)


def test_algebra_remainder_drops_cancelled_variables() -> None:
    """The slot of a slice in a circular buffer is the same for all steps of the slice."""
    numbers = algebra()
    numbers.ranges[W] = (0, 31)
    (slot,) = numbers.static((A * 128 + (B * 32 + W)) // 32 % 3)
    assert numbers.free(slot[0]) == {A, B}
