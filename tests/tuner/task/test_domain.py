"""Anchors: which shapes a task is timed at, and what each counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import UserError
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.domain import SERVED_SHARE, Domain, anchors

bounds = st.tuples(st.integers(0, 600), st.integers(0, 600)).map(lambda p: Range(min(p), max(p)))


def check(domain: Domain) -> None:
    assert domain.points and len(set(domain.points)) == len(domain.points) == len(domain.weights)
    assert list(domain.points) == sorted(domain.points)
    assert all(w > 0 for w in domain.weights)
    assert math.isclose(sum(domain.weights), 1.0, rel_tol=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(bounds, st.integers(2, 9))
def test_one_symbol_has_both_ends_and_log_spacing(span: Range, count: int) -> None:
    n = Var("n")
    domain = anchors([(n,)], {n: span}, count)
    check(domain)
    assert domain.points[0] == (max(span.lower, 1),) or max(span.upper, 1) == max(span.lower, 1)
    assert domain.points[-1] == (max(span.upper, 1),)
    assert len(domain.points) <= max(count, 2)
    assert domain == anchors([(n,)], {n: span}, count)


def test_six_anchors_of_a_wide_range_are_about_evenly_spaced() -> None:
    n = Var("n")
    domain = anchors([(n,)], {n: Range(1, 512)}, 6)
    logs = [math.log2(x) for (x,) in domain.points]
    gaps = [b - a for a, b in zip(logs, logs[1:])]
    assert (logs[0], logs[-1], len(logs)) == (0.0, 9.0, 6)
    assert max(gaps) <= 2.1 * min(gaps)


@settings(max_examples=examples(25), deadline=None)
@given(bounds, bounds, st.integers(2, 7))
def test_two_symbols_have_both_corners(b: Range, n: Range, count: int) -> None:
    vb, vn = Var("b"), Var("n")
    domain = anchors([(vb, vn)], {vb: b, vn: n}, count)
    check(domain)
    assert (max(b.upper, 1), max(n.upper, 1)) in domain.points
    assert len(domain.points) == 1 or (max(b.lower, 1), max(n.lower, 1)) in domain.points
    assert len(domain.points) <= max(count, 2)


def test_two_symbols_are_validated_first_where_both_are_large() -> None:
    b, n = Var("b"), Var("n")
    domain = anchors([(b, n)], {b: Range(1, 8), n: Range(1, 512)}, 6)
    assert domain.others[0] == (5, 107)


@settings(max_examples=examples(25), deadline=None)
@given(bounds, bounds)
def test_a_product_is_one_dimension_with_both_ends(b: Range, n: Range) -> None:
    vb, vn = Var("b"), Var("n")
    domain = anchors([(vb * vn,)], {vb: b, vn: n}, 6)
    check(domain)
    assert domain.points[0] == (max(b.lower, 1) * max(n.lower, 1),) or len(domain.points) == 1
    assert domain.points[-1] == (max(b.upper, 1) * max(n.upper, 1),)


def test_call_sites_with_other_meanings_add_up() -> None:
    n = Var("n")
    rows, twice = anchors([(n,)], {n: Range(1, 64)}, 6), anchors([(n,), (n * 2,)], {n: Range(1, 64)}, 6)
    assert rows.points[-1] == (64,) and twice.points[-1] == (128,) and twice.points[0] == (1,)
    assert anchors([(n,), (n,)], {n: Range(1, 64)}, 6) == rows


@pytest.mark.parametrize("site", [(), (const(7),), (const(3), const(5))])
def test_no_symbols_is_one_point(site: tuple[Expr, ...]) -> None:
    domain = anchors([site, site], {}, 6)
    assert domain.points == (tuple(int(e.value) for e in site),)  # type: ignore[attr-defined]
    assert domain.weights == (1.0,)


def test_symbol_without_bounds_error_names_the_declaration() -> None:
    n, m = Var("n"), Var("m")
    with pytest.raises(UserError, match="--bound"):
        anchors([(n * m,)], {n: Range(1, 4)}, 6)


COUNTS = st.dictionaries(st.integers(1, 700), st.integers(1, 1000), min_size=1, max_size=30)


@settings(max_examples=examples(60), deadline=None)
@given(bounds, COUNTS | st.just({0: 1}), st.integers(4, 9))
def test_anchors_of_recorded_values_include_modes_and_ends(span: Range, counts: dict[int, int], count: int) -> None:
    n = Var("n")
    plain = anchors([(n,)], {n: span}, count)
    domain = anchors([(n,)], {n: span}, count, served=[((n,), {n: counts})])
    check(domain)
    inside = {x: c for x, c in counts.items() if max(1, span.lower) <= x <= span.upper}
    if not inside:
        assert domain == plain
        return
    assert {plain.points[0], plain.points[-1], (min(inside),), (max(inside),)} <= set(domain.points)
    assert len(domain.points) <= count and math.isclose(sum(domain.served), 1.0, rel_tol=1e-9)
    for share, weight in zip(domain.served, domain.weights):
        assert weight >= SERVED_SHARE * share - 1e-12
    mode, times = max(inside.items(), key=lambda item: item[1])
    if times > 0.99 * sum(inside.values()):
        assert (mode,) in domain.points


@settings(max_examples=examples(40), deadline=None)
@given(COUNTS, st.floats(1e-6, 1e3))
def test_recorded_calls_are_weighted_by_time(counts: dict[int, int], unit: float) -> None:
    n = Var("n")
    domain = anchors([(n,)], {n: Range(1, 700)}, served=[((n,), {n: counts})])
    secs = [unit * x for (x,) in domain.points]
    timed = domain.timed(secs)
    check(timed)
    assert timed.points == domain.points
    even = domain.timed([unit] * len(secs))
    assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(even.weights, domain.weights))
    for a, b in zip(range(len(secs)), range(1, len(secs))):
        if domain.served[a] and domain.served[b]:
            rest = [w - SERVED_SHARE * s for w, s in zip(domain.weights, domain.served)]
            ratio = (timed.weights[b] - rest[b]) / (timed.weights[a] - rest[a])
            assert math.isclose(ratio, domain.served[b] * secs[b] / (domain.served[a] * secs[a]), rel_tol=1e-6)
    plain = anchors([(n,)], {n: Range(1, 700)})
    assert plain.timed([unit * x for (x,) in plain.points]) is plain


def test_two_recorded_symbols_are_taken_to_vary_independently() -> None:
    b, n = Var("b"), Var("n")
    ranges = {b: Range(1, 8), n: Range(1, 512)}
    domain = anchors([(b, n)], ranges, 6, served=[((b, n), {b: {1: 90, 8: 10}, n: {37: 80, 300: 20}})])
    check(domain)
    assert {(1, 1), (8, 512), (1, 37), (8, 300)} <= set(domain.points)
    share = dict(zip(domain.points, domain.served))
    assert share[(1, 37)] >= 0.7
    product = anchors([(b * n,)], ranges, 6, served=[((b * n,), {b: {1: 90, 8: 10}, n: {37: 80, 300: 20}})])
    assert {(1,), (37,), (2400,), (4096,)} <= set(product.points)
