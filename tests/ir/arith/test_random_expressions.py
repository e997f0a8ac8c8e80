"""Simplification, proofs and intervals against enumeration of small environments."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ir.arith.arith_worlds import SLOW, T, conditions, evaluate, i, ints, m, n, worlds

from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Op, eq, le, postorder


@pytest.mark.slow
@SLOW
@given(st.data())
def test_simplify_keeps_value(data: st.DataObject) -> None:
    env, variables, points = data.draw(worlds())
    e = data.draw(st.one_of(ints(variables, 3), conditions(variables, 1)))
    actual = simplify(e, env)
    assert actual.dtype is e.dtype
    for p in points:
        expected = evaluate(e, p)
        if expected is not None:
            assert evaluate(actual, p) == expected, f"{e} -> {actual} under {env} at {p}"


@pytest.mark.slow
@SLOW
@given(st.data())
def test_prove_never_wrong(data: st.DataObject) -> None:
    env, variables, points = data.draw(worlds())
    cond = data.draw(conditions(variables, 2))
    answer = prove(cond, env)
    values = {v for p in points if (v := evaluate(cond, p)) is not None}
    if answer is Proof.YES:
        assert False not in values, f"{cond} under {env}"
    if answer is Proof.NO:
        assert True not in values, f"{cond} under {env}"


@pytest.mark.slow
@SLOW
@given(st.data())
def test_interval_holds_every_value(data: st.DataObject) -> None:
    env, variables, points = data.draw(worlds())
    e = data.draw(ints(variables, 3))
    low, high = interval(e, env)
    for p in points:
        value = evaluate(e, p)
        if value is not None:
            assert (low is None or low <= value) and (high is None or value <= high), f"{e} under {env} at {p}"


@pytest.mark.slow
@SLOW
@given(st.data())
def test_simplify_twice_adds_no_work(data: st.DataObject) -> None:
    env, variables, _ = data.draw(worlds())
    once = simplify(data.draw(ints(variables, 3)), env)
    twice = simplify(once, env)
    assert sum(isinstance(x, Op) for x in postorder((twice,))) <= 2 + sum(isinstance(x, Op) for x in postorder((once,)))


@pytest.mark.slow
@SLOW
@given(st.data())
def test_prove_equal_polynomials_yes(data: st.DataObject) -> None:
    """Ring identities: a * (b + c) == a * b + a * c and friends, for any subexpressions."""
    a, b, c = (data.draw(ints((n, m, i), 2)) for _ in range(3))
    assert prove(eq(a * (b + c), c * a + b * a)) is Proof.YES
    assert prove(eq((a + b) * (a - b), a * a - b * b)) is Proof.YES
    fact = le(a, c)
    if any(evaluate(fact, {n: x, m: y, i: z, T: 2}) for x, y, z in product(range(1, 4), repeat=3)):
        assert prove(le(a + b, c + b), Env().with_fact(fact)) is Proof.YES
    assert prove(eq(a % 8 + a // 8 * 8, a)) is Proof.YES
