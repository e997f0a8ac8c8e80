"""Spaces of named values with written constraints, and searching them by ask and tell."""

from __future__ import annotations

import itertools
import re
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
from relax_tune.tuner.search.base import Result, SearchHistory, SearchProblem
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
        ({"x": 5}, "list of numbers"),
        ({"x": lambda: 5}, "parameter 'x' failed for {}: TypeError"),
        ({"x": lambda y: [y], "y": [1]}, "none comes before it; got y"),
        ({"y": [1, 2], "x": lambda y: [1 // (y - 1)]}, "failed for {'y': 1}: ZeroDivisionError"),
        ({"y": list(range(1 << 17)), "x": lambda y: [y]}, "at most 65536 combinations"),
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
        (({"x": 1, "t": "v"}, "fast"), "as a real number"),
        (({"x": 1, "t": "v"}, 1j), "as a real number"),
        (({"x": 1, "t": "v"}, [1.0]), "as a real number"),
        (("x", 1.0), "tell takes a list of pairs"),
        ({"x": 1, "t": "v"}, "tell takes a list of pairs"),
    ]:
        with pytest.raises(UserError, match=message):
            search.tell([told])
    assert search.best is None
    with pytest.raises(UserError, match="over integer parameters, got 't'"):
        SearchSpace({"x": [1], "t": ["u", "v"]}, [le(Var("t"), 3)])
    with pytest.raises(UserError, match="text parameter; compare it with =="):
        Search(SearchSpace({"t": ["u", "v"]}, ["t + 1 > 2"])).ask(1)


@pytest.mark.parametrize("results", ["text", b"text", {"x": 1}, 3, None])
def test_tell_of_no_pairs_is_refused(results: Any) -> None:
    search = Search(SearchSpace({"x": [1, 2]}))
    with pytest.raises(UserError, match="tell takes a list of pairs"):
        search.tell(results)


def test_function_constraints_agree_with_python() -> None:
    tiles, unrolls, layouts = (8, 16, 32), (1, 2, 4, 8), ("row", "column")
    space = SearchSpace(
        {"tile": list(tiles), "unroll": lambda tile: [u for u in unrolls if 4 * u <= tile], "layout": list(layouts)},
        [
            lambda tile, unroll: tile * unroll != 64,
            lambda row: row["layout"] == "row" or row["tile"] % 3 == 2,
            "tile / (unroll - 2) < 9",
        ],
    )
    wanted = [
        {"tile": t, "unroll": u, "layout": x}
        for t, u, x in itertools.product(tiles, unrolls, layouts)
        if 4 * u <= t and t * u != 64 and (x == "row" or t % 3 == 2) and u != 2 and t / (u - 2) < 9
    ]
    assert Search(space, "grid").ask(1000) == wanted
    assert space.parameters["unroll"] == unrolls


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (lambda x, z: True, "take parameters of the space by name, x, y; got z"),
        (lambda *row: True, "got arguments without names"),
        (lambda: True, None),
        (3, "as text, a function or a scalar expression"),
        (lambda x: x.missing, "failed for {'x': 1}: AttributeError"),
    ],
)
def test_constraint_of_another_kind_is_refused(constraint: Any, message: str | None) -> None:
    if message is None:
        assert len(Search(SearchSpace({"x": [1], "y": [1, 2]}, [constraint]), "grid").ask(9)) == 2
        return
    with pytest.raises(UserError, match=re.escape(message)):
        Search(SearchSpace({"x": [1], "y": [1, 2]}, [constraint])).ask(1)


def test_single_function_as_constraints_is_refused() -> None:
    with pytest.raises(UserError, match="constraints as a list"):
        SearchSpace({"x": [1]}, lambda x: True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="minimize or maximize"):
        Search(SearchSpace({"x": [1]}), direction="up")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a SearchSpace to search"):
        Search({"x": [1]})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "offset"), [("minimize", -1000.0), ("maximize", 0.0), ("minimize", -40.0), ("maximize", 1e6)]
)
def test_search_finds_the_best_of_numbers_of_any_sign(direction: Any, offset: float) -> None:
    space = SearchSpace({"x": list(range(1, 25)), "y": list(range(1, 25))})
    sign = 1 if direction == "minimize" else -1

    def cost(c: dict[str, Any]) -> float:
        return sign * ((c["x"] - 7) ** 2 + (c["y"] - 3) ** 2) + offset

    search, asked = Search(space, direction=direction, seed=1), list[dict[str, Any]]()
    while len(asked) < 64:
        asked += (found := search.ask(8))
        search.tell([(c, cost(c)) for c in found])
    assert search.best is not None and search.best[1] == sign * min(sign * cost(c) for c in asked)
    # 64 of 576 points: 64 random ones come within a distance of 1 of the optimum with a probability of 0.45
    assert sign * (search.best[1] - offset) <= 1


def test_numbers_beyond_finite_count_as_failures() -> None:
    space = SearchSpace({"x": [1, 2, 3, 4]})
    for direction in ("minimize", "maximize"):
        search = Search(space, "grid", direction=direction)  # type: ignore[arg-type]
        values = [float("nan"), float("inf"), float("-inf"), 10**400]
        search.tell(list(zip(search.ask(4), values)))
        assert search.best is None
        search.tell([({"x": 2}, 0)])
        assert search.best == ({"x": 2}, 0.0) and str(search.best[1]) == "0.0"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8, unique=True))
@settings(max_examples=examples(100), deadline=None)
def test_observations_keep_the_order_of_any_numbers(numbers: list[float]) -> None:
    space = SearchSpace({"x": list(range(len(numbers)))})
    history = SearchHistory(SearchProblem(space.space, any_number=True))
    history.add([Result(space.candidate({"x": n}), {0: number}) for n, number in enumerate(numbers)])
    scaled = history.observations().log_time[:, 0]
    assert np.isfinite(scaled).all()
    assert all(
        scaled[i] <= scaled[j] for i in range(len(numbers)) for j in range(len(numbers)) if numbers[i] < numbers[j]
    )
