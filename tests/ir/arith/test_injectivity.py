"""Injective index maps, by proof and by enumeration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.injectivity import injective, separates
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    Tunable,
    Var,
    as_int,
    ceildiv,
    const,
    expr,
    floordiv,
    floormod,
    lt,
    substitute,
)

n, m = Var("n"), Var("m")
i, j, k = Var("i"), Var("j"), Var("k")
T, U = Tunable("T", (1, 2, 3)), Tunable("U", (2, 4))


def are_distinct(indices: Sequence[Expr], ranges: Mapping[Var, ExprLike]) -> bool:
    """By enumeration, at every small value of the symbols."""
    for sizes in product(range(5), range(4), T.domain, U.domain):
        known: dict[Var, Expr] = {v: const(x) for v, x in zip((n, m, T, U), sizes)}
        extents = [as_int(substitute(expr(e), known)) or 0 for e in ranges.values()]
        visited: set[tuple[int | None, ...]] = set()
        for point in product(*map(range, extents)):
            at = known | {v: const(x) for v, x in zip(ranges, point)}
            place = tuple(as_int(substitute(e, at)) for e in indices)
            if place in visited:
                return False
            visited.add(place)
    return True


BOX = {i: n, j: m, k: T}


@pytest.mark.parametrize(
    ("indices", "ranges"),
    [
        ([(i * m + j) * T + k], BOX),
        ([k, i, j], BOX),
        ([k * (n * m) + j * n + i], BOX),
        ([(i * m + j) // U, (i * m + j) % U], {i: n, j: m}),
        ([(i * 4 + j) // 2, (i * 4 + j) % 2], {i: n, j: 4}),
        ([(i * 4 + j) // 2 * m + k, j % 2], {i: n, j: 4, k: m}),
        ([i // T, j, i % T], {i: n, j: m}),
        ([(i // T * m + j) * T + i % T], {i: n, j: m}),
        ([i // (T * U), i // U % T, i % U], {i: n}),
        ([(i // T * ceildiv(m, U) + j // U) * (T * U) + i % T * U + j % U], {i: n, j: m}),
        ([i + j, j], {i: n, j: m}),
        ([i * 2 + 1, j + n], {i: n, j: m}),
        ([(j * n + i) % (n * m), k], BOX),
    ],
    ids=repr,
)
def test_injective_known_layouts(indices: list[Expr], ranges: Mapping[Var, ExprLike]) -> None:
    assert are_distinct(indices, ranges) and injective(indices, ranges)


@pytest.mark.parametrize(
    "indices",
    [
        [i + j],
        [i // T, j],
        [i % T, j],
        [i * T + j],
        [i * m + j, i],
        [(i * m + j) // U, j % U],
        [const(0), j],
        [i * n + j],
    ],
    ids=repr,
)
def test_injective_rejects_overlaps(indices: list[Expr]) -> None:
    ranges = {i: n, j: m}
    assert not injective(indices, ranges) or are_distinct(indices, ranges)


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[Expr], Mapping[Var, ExprLike]]:
    """Variables flattened in some order and split into digits again, sometimes with a mistake."""
    ranges: dict[Var, ExprLike] = {}
    for v in (i, j, k)[: draw(st.integers(1, 3))]:
        ranges[v] = draw(st.sampled_from([n, m, T, U, const(3), ceildiv(n, T)]))
    flat: Expr = const(0)
    for v in draw(st.permutations(list(ranges))):
        flat = flat * draw(st.sampled_from([ranges[v], ranges[v], ranges[v], T])) + v
    indices: list[Expr] = []
    for _ in range(draw(st.integers(0, 2))):
        factor = draw(st.sampled_from([T, U, const(2)]))
        indices.append(floormod(flat, factor))
        flat = floordiv(flat, draw(st.sampled_from([factor, factor, factor, U])))
    indices.append(flat)
    if draw(st.booleans()):
        indices[0] = indices[0] + draw(st.sampled_from(list(ranges)))
    return draw(st.permutations(indices)), ranges


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(maps())
def test_injective_agrees_with_enumeration(case: tuple[list[Expr], Mapping[Var, ExprLike]]) -> None:
    indices, ranges = case
    assert not injective(indices, ranges) or are_distinct(indices, ranges)


def test_injective_digit_modulo_multiples() -> None:
    """Slots of a ring that the iterations of `k` fill one after the other, and the iterations of `i` and `j` together."""
    flat, wide = (k * U + i) * T + j, T * 3
    slot, column = (n * (U * 8) + flat // wide) % (U * 8), flat % wide
    env, inner = Env().with_loop(i, U), {k: m, j: T}
    for v, extent in inner.items():
        env = env.with_loop(v, extent)
    whole = lt(flat, wide * (U * 8))
    assert separates([slot, column], i, inner, env, whole)
    assert not separates([slot, column], i, inner, env, lt(flat, wide * (U * 8) + 1))
