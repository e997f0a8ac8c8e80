"""Polynomials of the lowering: what is put together, taken apart, and kept for other values of the variables."""

from __future__ import annotations

from itertools import product

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.codegen.lower.affine import Algebra, as_constant, constant
from relax_tune.ir.core.expr import Expr, Var, and_, const, eq, le, lt, not_, or_

A, B, W, K = Var("a"), Var("b"), Var("w"), Var("k")


def algebra() -> Algebra:
    found = Algebra()
    found.ranges |= {A: (0, 9), B: (0, 7), K: (0, 2)}
    return found


def test_algebra_quotient_and_remainder_merge_to_fused_index() -> None:
    at = A * 8 + B
    for width in (const(7), W, W + 2):
        made = algebra()
        assert made.static((at // width + K) * width + at % width) == made.static(at + K * width)
        assert made.static(at // width * width * 3 + at % width * 3) == made.static(at * 3)
        other = at // width * width + at % width * 2
        assert made.static(other) != made.static(at)


def test_algebra_offset_within_tile_divides_as_the_tile() -> None:
    made = algebra()
    assert made.static((A * 8 + B) // 24) == made.static(A // 3)
    assert made.static((A * 8 + B) % 24) == made.static(A % 3 * 8 + B)
    assert made.static((A * 4 + B) // 24) != made.static(A // 6)
    # an offset above the factor counts in the quotient too
    assert made.static((W * 4 + 6) // 96) == made.static((W + 1) // 24)
    assert made.static((W * 4 + 6) % 96) == made.static((W + 1) % 24 * 4 + 2)


def test_algebra_decides_conditions() -> None:
    made = algebra()
    assert made.decide(and_(lt(A, 10), not_(eq(B, 8)))) is Proof.YES
    assert made.decide(or_(lt(9, A), le(W + 1, W))) is Proof.NO
    assert made.decide(eq(A * 2, 2 * B + 1)) is Proof.NO  # even numbers are not odd
    assert made.decide(and_(lt(A, 10), lt(A, B))) is Proof.UNKNOWN


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
        made = algebra()
        for a, b, k in product(range(10), range(8), range(3)):
            # the first one asked for decides nothing about the others
            made.env = {A: constant(a), B: constant(b), K: constant(k)}
            value = eval(repr(e), {"a": a, "b": b, "k": k})
            assert as_constant(made.poly(e)) == value, (e, a, b, k)


def test_algebra_remainder_drops_cancelled_variables() -> None:
    """The slot of a slice in a circular buffer is the same for all steps of the slice."""
    made = algebra()
    made.ranges[W] = (0, 31)
    (slot,) = made.static((A * 128 + (B * 32 + W)) // 32 % 3)
    assert made.free(slot[0]) == {A, B}
