"""Index polynomials whose terms may leave 64 bits."""

from __future__ import annotations

import pytest

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.overflow import Magnitudes
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, Var, load, maximum, minimum

N, M, K, A, B, F = (Var(name) for name in ("n", "m", "k", "a", "b", "f"))
DATA = load(Buffer("data", (N,), i64), [A])
CLAMPED = maximum(minimum(DATA, N - 1), 0)


def overflows(e: Expr) -> bool:
    algebra = Algebra()
    magnitudes = Magnitudes(algebra)
    for v, extent in ((A, N), (B, (M + 63) // 64), (F, N * M)):
        magnitudes.variable(v, algebra.poly(extent))
    return magnitudes.may_overflow(algebra.poly(e))


@pytest.mark.parametrize(
    "e",
    [
        N, A * 4096 + B, (A * M + B) * 768 + 5, N - A * 64 - 1, M - B * 64, N * M - F, A * N * M, CLAMPED * M + B, N * M * 30000,
        DATA, DATA * M, DATA + A,
        (N // 50) * M + A, A - N * 3, maximum(A - 3, 0) * M,
    ],
)  # fmt: skip
def test_usual_index_stays_signed(e: Expr) -> None:
    assert not overflows(e)


@pytest.mark.parametrize(
    "e",
    [
        A - N * N * N, A * N - M * M * 4, N * N * N * (M // 600), F * N * K, F * M - K * N * M, N * M * (A - K) * K,
        (N // 50) * (N * N * N * N + 2),
    ],
)  # fmt: skip
def test_index_with_terms_beyond_64_bits_is_unsigned(e: Expr) -> None:
    assert overflows(e)
