"""Expressions compiled to NumPy against the same expressions worked out number by number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Op,
    Tunable,
    Var,
    add,
    and_,
    call,
    cast,
    ceildiv,
    const,
    eq,
    floordiv,
    floormod,
    le,
    load,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    not_,
    or_,
    postorder,
    select,
    sub,
)
from relax_tune.schedules.cost.vectorized import compile_numpy

N, M = Var("n"), Var("m")
T, U = Tunable("T", (1, 2, 3, 8)), Tunable("U", (1, 4))

_EVALUATE: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b, "floormod": lambda a, b: a % b, "min": min, "max": max,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": lambda a: not a,
    "select": lambda c, a, b: a if c else b, "cast": lambda a: a,
}  # fmt: skip


def by_hand(e: Expr, values: Mapping[Var, int]) -> Any:
    done: dict[Expr, Any] = {}
    for n in postorder((e,)):
        if isinstance(n, Const):
            done[n] = n.value
        elif isinstance(n, Var):
            done[n] = values[n]
        else:
            assert isinstance(n, Op)
            done[n] = _EVALUATE[n.op](*(done[a] for a in n.args))
    return done[e]


_LEAVES = st.one_of(st.sampled_from([N, M, T, U]), st.integers(-9, 9).map(const))
_DIVISORS = st.one_of(st.sampled_from([T, U]), st.integers(1, 9).map(const))


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    conditions = st.tuples(st.sampled_from([lt, le, eq, ne]), inner, inner).map(lambda x: x[0](x[1], x[2]))
    joined = st.one_of(
        conditions,
        st.tuples(conditions, conditions).map(lambda x: and_(*x)),
        st.tuples(conditions, conditions).map(lambda x: or_(*x)),
        conditions.map(not_),
    )
    return st.one_of(
        st.tuples(st.sampled_from([add, sub, mul, minimum, maximum]), inner, inner).map(lambda x: x[0](x[1], x[2])),
        st.tuples(st.sampled_from([floordiv, floormod, ceildiv]), inner, _DIVISORS).map(lambda x: x[0](x[1], x[2])),
        st.tuples(joined, inner, inner).map(lambda x: select(*x)),
    )


EXPRESSIONS = st.recursive(_LEAVES, _grow, max_leaves=12)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=4), st.data())
def test_compile_numpy_agrees_with_scalars(exprs: list[Expr], data: st.DataObject) -> None:
    run, variables = compile_numpy(exprs)
    rows = data.draw(st.lists(st.tuples(st.sampled_from(T.domain), st.sampled_from(U.domain)), min_size=1, max_size=3))
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3))
    columns = {
        "T": np.array([[t] for t, _ in rows], np.float64),
        "U": np.array([[u] for _, u in rows], np.float64),
        "n": np.array([[n for n, _ in shapes]], np.float64),
        "m": np.array([[m for _, m in shapes]], np.float64),
    }
    assert set(variables) <= {N, M, T, U}
    for e, actual in zip(exprs, run(columns), strict=True):
        wide = np.broadcast_to(actual, (len(rows), len(shapes)))
        for a, (t, u) in enumerate(rows):
            for b, (n, m) in enumerate(shapes):
                expected = by_hand(e, {T: t, U: u, N: n, M: m})
                # sums of products of at most twelve small numbers: exact in float64 up to 2**53
                if abs(expected) < 2**53:
                    assert wide[a, b] == expected or math.isclose(wide[a, b], expected, rel_tol=1e-12), e


def test_floordiv_rounds_towards_minus_infinity() -> None:
    run, _ = compile_numpy([floordiv(N - 7, 2), floormod(N - 7, 2), ceildiv(N, 4)])
    actual = run({"n": np.array([0.0, 4.0, 7.0, 8.0])})
    assert [x.tolist() for x in actual] == [[-4, -2, 0, 0], [1, 1, 0, 1], [0, 1, 2, 2]]


def test_compile_numpy_lists_mentioned_variables_in_order() -> None:
    _, variables = compile_numpy([T * N, N + U])
    assert variables == (T, N, U)


def test_constants_need_no_columns() -> None:
    run, variables = compile_numpy([const(3), lt(const(1), T)])
    assert variables == (T,)
    first, second = run({"T": np.array([1.0, 2.0])})
    assert first == 3 and second.tolist() == [0, 1]


def test_shared_subexpressions_are_computed_once() -> None:
    e: Expr = N + 1
    for _ in range(60):
        e = e * e if e is N + 1 else minimum(e + e, const(1 << 40))
    run, _ = compile_numpy([e])
    assert run({"n": np.array([1.0])})[0][0] == 1 << 40


def test_casts_keep_the_number() -> None:
    run, _ = compile_numpy([cast(N, f32), cast(lt(N, M), i64)])
    actual = run({"n": np.array([3.0]), "m": np.array([4.0])})
    assert [x.tolist() for x in actual] == [[3.0], [1.0]]


@pytest.mark.parametrize("what", ["load", "call"])
def test_compile_numpy_refuses_loads(what: str) -> None:
    e = load(Buffer("A", (N,), f32), (const(0),)) if what == "load" else call("exp", cast(N, f32))
    with pytest.raises(ValueError, match="over shapes and tunables"):
        compile_numpy([e])
