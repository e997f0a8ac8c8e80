"""Coefficients, strides, extents and density of index expressions."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import extent_of, is_dense, linear
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, ceildiv, const, minimum, substitute

n, m, k = Var("n"), Var("m"), Var("k")
i, j, h = Var("i"), Var("j"), Var("h")
T, U = Tunable("T", (1, 2, 4)), Tunable("U", (2, 4))


def test_linear_symbolic_coefficients() -> None:
    result = linear((i * T + j) * U + h + n * 3, (i, j, h))
    assert result is not None
    coefficients, rest = result
    assert list(coefficients) == [i, j, h]
    assert prove_equal(coefficients[i], T * U) is Proof.YES
    assert coefficients[j] is U and coefficients[h] is const(1)
    assert rest is n * 3


def test_linear_coefficients_add_and_cancel() -> None:
    assert linear(i * 3 + i * T - i * 3, (i,)) == ({i: T}, const(0))
    assert linear(i * n - n * i + k, (i,)) == ({}, k)
    assert linear(const(7), (i,)) == ({}, const(7))


@pytest.mark.parametrize("e", [i * j, i * i, i // 2, i % n, minimum(i, 3), (i + 1) // T], ids=repr)
def test_linear_rejects_nonlinear(e: Expr) -> None:
    assert linear(e, (i, j)) is None


def test_linear_quotients_as_coefficients() -> None:
    assert linear(i * (n // 4) + j // 2, (i,)) == ({i: n // 4}, j // 2)


def test_extent_of() -> None:
    assert extent_of(i * 8 + j, {i: 4, j: 8}) is const(32)
    assert extent_of(i * T + j, {j: T}) is T
    assert extent_of(i + j, {i: n, j: 3}) is n + 2
    assert extent_of(n - i, {i: 5}) is const(5)
    assert extent_of(k, {i: 5}) is const(1)
    assert prove_equal(extent_of((i * T + j) * U + h, {i: n, j: T, h: U}), n * T * U) is Proof.YES


def test_extent_of_unknown_sign_raises() -> None:
    with pytest.raises(ScheduleError, match="linear"):
        extent_of(i // 2, {i: 5})
    with pytest.raises(ScheduleError, match="sign"):
        extent_of(i * (n - m), {i: 5})


def test_is_dense() -> None:
    assert is_dense((i * T + j) * U + h, {i: n, j: T, h: U})
    assert is_dense(h + j * U + k, {j: n, h: U})
    assert is_dense(i * T + j, {i: ceildiv(n, T), j: T})
    assert not is_dense(i * T + j, {i: n, j: U})
    assert not is_dense(i * 2, {i: n})
    assert not is_dense(i, {i: n, j: 4})
    assert is_dense(i, {i: n, j: 1})
    assert not is_dense(i // 2, {i: n})


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(-6, 12), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(-5, 5),
)
def test_extent_and_density_by_enumeration(parts: list[tuple[int, int]], base: int) -> None:
    variables = [Var(f"v{x}") for x in range(len(parts))]
    e: Expr = const(base)
    for v, (stride, _) in zip(variables, parts, strict=True):
        e = e + v * stride
    ranges = {v: extent for v, (_, extent) in zip(variables, parts, strict=True)}
    values = [
        as_int(substitute(e, {v: const(x) for v, x in zip(variables, point, strict=True)}))
        for point in product(*(range(x) for x in ranges.values()))
    ]
    known = [v for v in values if v is not None]
    assert len(known) == len(values)
    span = max(known) - min(known) + 1
    assert as_int(extent_of(e, ranges)) == span
    exact = len(set(known)) == len(known) == span
    if all(stride > 0 for stride, _ in parts):
        assert is_dense(e, ranges) == exact
    elif is_dense(e, ranges):
        assert exact


def test_linear_variable_with_one_value_is_constant() -> None:
    env = Env().with_bound(i, 3, 3)
    assert linear(i * 4 + j, (i, j), env) == ({j: const(1)}, const(12))
