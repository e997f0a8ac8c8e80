"""Spaces of named values with written constraints, and searching them by ask and tell."""

from __future__ import annotations

import itertools
import warnings
from types import CodeType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.ir.core.expr import Var, le
from relax_tune.tuner.search.expressions import TextConstraint
from relax_tune.tuner.search.named import Search, SearchSpace
from relax_tune.tuner.search.registry import strategy_names

VALUES: dict[str, list[Any]] = {"a": [0, 1, 2, 3, 8], "b": [-3, 0, 1, 4], "c": [0.5, 1.0, 2.0], "f": [False, True]}
NAMES = [*VALUES, "s"]
VALUES["s"] = ["row", "column", ""]

atoms = st.sampled_from(["a", "b", "c", "f", "0", "1", "7", "2.5", "True"])
numbers = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda x: f"(-{x})"),
        inner.map(lambda x: f"abs({x})"),
        st.tuples(inner, inner).map(lambda t: f"min({t[0]}, {t[1]})"),
    ),
    max_leaves=6,
)
comparisons = st.one_of(
    st.tuples(numbers, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), numbers).map(" ".join),
    st.tuples(numbers, numbers, numbers).map(lambda t: f"{t[0]} <= {t[1]} < {t[2]}"),
    st.tuples(numbers, numbers).map(lambda t: f"{t[0]} in [1, {t[1]}, 8]"),
    st.sampled_from(["s == 'row'", "s != 'row'", "s in ('column', '')", "s == 3", "not s"]),
    numbers,
)
conditions = st.recursive(
    comparisons.map(lambda c: f"({c})"),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})"),
        inner.map(lambda x: f"(not {x})"),
    ),
    max_leaves=4,
)


def by_python(code: CodeType, row: dict[str, Any]) -> bool:
    try:
        return bool(eval(code, {"__builtins__": {}, "abs": abs, "min": min}, row))
    except ZeroDivisionError:
        return False


@given(conditions)
@settings(max_examples=examples(150), deadline=None)
def test_constraint_mask_agrees_with_python(text: str) -> None:
    rows = [dict(zip(NAMES, values)) for values in itertools.product(*(VALUES[n] for n in NAMES))]
    columns = {n: np.array([row[n] for row in rows]) for n in NAMES}
    found = TextConstraint(text, NAMES)(columns)
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # such as `0 == 'row'`
        code = compile(text, "constraint", "eval")
    assert found.dtype == np.bool_ and found.tolist() == [by_python(code, row) for row in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a <=", "got 'a <='"),
        ("a + tile > 3", r"'tile' is no parameter; there are a, b.*\n  a \+ tile > 3\n      \^"),
        ("__import__('os').system('x')", r"may use parameters, numbers"),
        ("a.real == 1", "may use"),
        ("[x for x in (1, 2)] == a", "may use"),
        ("a == b.c", "may use"),
        ("max(a) > 1", "may use"),
        ("a in b", "may use"),
        ("9 ** 9 ** 9 << a", "may use"),
        ("-" * 4000 + "a", "constraint.*(recursion|deep)"),
        ("(" * 5000 + "a" + ")" * 5000 + " > 0", "constraint.*parentheses"),
        ("+".join("a" * 100) + " > 0", "nested at most"),
        ("99999999999999999999 > a", "may use"),
    ],
)
def test_wrong_constraint_is_refused_with_position(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextConstraint(text, ["a", "b"])


def test_values_of_every_kind_and_constraints_of_both() -> None:
    block, unroll = Var("block"), Var("unroll")
    space = SearchSpace(
        {
            "block": [64, 16, 32],
            "unroll": [1, 4, 2],
            "scale": [1.5, 0.5],
            "layout": ["row", "column"],
            "padded": [True, False],
        },
        ["layout == 'row' or not padded", "block * scale <= 64", le(block * unroll, 128)],
    )
    wanted = [
        {"block": b, "unroll": u, "scale": s, "layout": layout, "padded": p}
        for b, u, s, layout, p in itertools.product(
            (16, 32, 64), (1, 2, 4), (0.5, 1.5), ("row", "column"), (False, True)
        )
        if (layout == "row" or not p) and b * s <= 64 and b * u <= 128
    ]
    search = Search(space, "grid")
    assert search.ask(1000) == wanted and search.ask(1) == []
    assert all(space.configuration(space.candidate(c)) == c for c in wanted)
    assert {type(v) for c in wanted for v in c.values()} == {int, float, str, bool}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [s for s in strategy_names() if not s.startswith("optuna")])
def test_ask_and_tell_find_the_best(strategy: str) -> None:
    space = rt.SearchSpace({"x": list(range(1, 13)), "y": list(range(1, 13)), "mode": ["a", "b"]}, ["x + y < 20"])

    def cost(c: dict[str, Any]) -> float | None:
        return None if c["x"] == 4 else (c["x"] - 7) ** 2 + (c["y"] - 3) ** 2 + 1 + 5 * (c["mode"] == "a")

    search = rt.Search(space, strategy=strategy, seed=1)
    assert search.best is None
    asked: list[dict[str, Any]] = []
    while found := search.ask(16):
        asked += found
        search.tell([(c, cost(c)) for c in found])
        if len(asked) >= 80 and strategy != "grid":
            break
    assert search.best is not None
    assert search.best[1] == min(x for c in asked if (x := cost(c)) is not None) == cost(search.best[0])
    assert strategy == "random" or search.best == ({"x": 7, "y": 3, "mode": "b"}, 1.0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"x": []}, "list of numbers"),
        ({"x": "abc"}, "list of numbers"),
        ({"x": [1, "a"]}, "list of numbers"),
        ({"x": [None]}, "list of numbers"),
        ({"x": [1, 1.0]}, "distinct"),
        ({"x": [float("nan")]}, "distinct"),
        ({"x": [10**30]}, "distinct"),
    ],
)
def test_malformed_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchSpace(parameters)


def test_wrong_tells_and_constraints_are_refused() -> None:
    space = SearchSpace({"x": [1, 2], "t": ["u", "v"]}, ["x < 2 or t == 'u'"])
    search = Search(space)
    for told, message in [
        (({"x": 1}, 1.0), "a value for each of x, t"),
        (({"x": 3, "t": "u"}, 1.0), "expected x as one of"),
        (({"x": 2, "t": "v"}, 1.0), "breaks its constraints"),
        (({"x": 1, "t": "v"}, -1.0), "positive"),
    ]:
        with pytest.raises(UserError, match=message):
            search.tell([told])
    assert search.best is None
    with pytest.raises(UserError, match="over integer parameters, got 't'"):
        SearchSpace({"x": [1], "t": ["u", "v"]}, [le(Var("t"), 3)])
    with pytest.raises(UserError, match="text parameter; compare it with =="):
        Search(SearchSpace({"t": ["u", "v"]}, ["t + 1 > 2"])).ask(1)
