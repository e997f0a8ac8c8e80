"""Random expressions, conditions and envs for the arithmetic, and their values by enumeration."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Op,
    Tunable,
    Var,
    add,
    and_,
    ceildiv,
    compare,
    const,
    eq,
    floordiv,
    floormod,
    le,
    lt,
    maximum,
    minimum,
    mul,
    not_,
    or_,
    postorder,
    select,
    sub,
)

n, m = Var("n"), Var("m")
T = Tunable("T", (1, 2, 4))
i, j = Var("i"), Var("j")
SYMBOLS = {n: range(7), m: range(5), T: T.domain}
Point = Mapping[Var, int]

_ARITHMETIC = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b,
    "min": min,
    "max": max,
    "select": lambda c, a, b: a if c else b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
}


def evaluate(e: Expr, point: Point) -> int | bool | None:
    """The value at a point; None where a divisor is zero."""
    values: dict[Expr, int | bool] = {}
    for node in postorder((e,)):
        if isinstance(node, Const):
            assert not isinstance(node.value, float)
            values[node] = node.value
        elif isinstance(node, Var):
            values[node] = point[node]
        else:
            assert isinstance(node, Op)
            try:
                values[node] = _ARITHMETIC[node.op](*(values[a] for a in node.args))
            except ZeroDivisionError:
                return None
    return values[e]


def ints(variables: tuple[Var, ...], depth: int) -> st.SearchStrategy[Expr]:
    leaf = st.one_of(st.sampled_from(variables), st.sampled_from(variables), st.integers(-3, 8).map(const))
    if depth == 0:
        return leaf
    below = ints(variables, depth - 1)
    divisor = st.one_of(
        st.sampled_from([1, 2, 3, 4, 6, 8, -2]).map(const),
        st.sampled_from(variables),
        st.builds(mul, st.sampled_from(variables), st.sampled_from([const(2), const(4), T, n])),
        below.filter(lambda e: not (isinstance(e, Const) and e.value == 0)),
    )
    return st.one_of(
        leaf,
        st.builds(add, below, below),
        st.builds(sub, below, below),
        st.builds(mul, below, below),
        st.builds(floordiv, below, divisor),
        st.builds(floormod, below, divisor),
        st.builds(minimum, below, below),
        st.builds(maximum, below, below),
        st.builds(select, conditions(variables, 0), below, below),
    )


def conditions(variables: tuple[Var, ...], depth: int) -> st.SearchStrategy[Expr]:
    side = ints(variables, min(depth, 2))
    comparison = st.builds(compare, st.sampled_from(["lt", "le", "eq", "ne"]), side, side)
    if depth == 0:
        return comparison
    below = conditions(variables, depth - 1)
    return st.one_of(
        comparison, comparison, st.builds(and_, below, below), st.builds(or_, below, below), st.builds(not_, below)
    )


_FACTS = [
    eq(n % T, 0),
    eq(n % 4, 0),
    eq((n + m) % T, 0),
    eq(n, m),
    eq(n, m * T),
    eq(m + 1, n),
    le(n, m),
    lt(m, n),
    le(T, n),
    le(n * m, 6),
    lt(n * T + m, 12),
    le(1, n // T),
]
_EXTENTS = [const(1), const(4), n, T, ceildiv(n, T), n * m, minimum(n, m), m + 1]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Env, tuple[Var, ...], list[Point]]:
    """An env, its variables, and every small assignment it allows."""
    env, variables = Env(), (n, m, T)
    facts = draw(st.lists(st.one_of(st.sampled_from(_FACTS), conditions((n, m, T), 1)), max_size=2))
    for f in facts:
        env = env.with_fact(f)
    if draw(st.booleans()):
        env = env.with_bound(n, draw(st.integers(0, 2)), draw(st.sampled_from([const(3), m * 2 + 3, m + T])))
    points: list[Point] = []
    for values in product(*SYMBOLS.values()):
        point = dict(zip(SYMBOLS, values, strict=True))
        low, high = env.bounds.get(n, (const(0), None))
        fits = high is None or evaluate(low, point) <= point[n] <= evaluate(high, point)
        if fits and all(evaluate(f, point) for f in facts):
            points.append(point)
    for v in (i, j)[: draw(st.integers(0, 2))]:
        extent = draw(st.sampled_from(_EXTENTS + ([n - i, i + 1] if v is j else [])))
        env, variables = env.with_loop(v, extent), (*variables, v)
        points = [{**p, v: x} for p in points for x in range(evaluate(extent, p) or 0)]
    step = 1 + len(points) // 120
    return env, variables, points[::step]


SLOW = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
