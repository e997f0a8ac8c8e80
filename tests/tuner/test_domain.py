"""Anchors: which shapes a task is timed at, and what each counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tune.errors import UserError
from relax_tune.ir.expr import Expr, Var, const
from relax_tune.tuner.domain import Domain, Range, anchors

bounds = st.tuples(st.integers(0, 600), st.integers(0, 600)).map(lambda p: Range(min(p), max(p)))


def check(domain: Domain) -> None:
    assert domain.points and len(set(domain.points)) == len(domain.points) == len(domain.weights)
    assert list(domain.points) == sorted(domain.points)
    assert all(w > 0 for w in domain.weights)
    assert math.isclose(sum(domain.weights), 1.0, rel_tol=1e-9)


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=25, deadline=None)
@given(bounds, bounds, st.integers(2, 7))
def test_two_symbols_have_both_corners(b: Range, n: Range, count: int) -> None:
    vb, vn = Var("b"), Var("n")
    domain = anchors([(vb, vn)], {vb: b, vn: n}, count)
    check(domain)
    assert (max(b.upper, 1), max(n.upper, 1)) in domain.points
    assert len(domain.points) == 1 or (max(b.lower, 1), max(n.lower, 1)) in domain.points
    assert len(domain.points) <= max(count, 2)


@settings(max_examples=25, deadline=None)
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


def test_a_symbol_without_bounds_is_an_error_that_says_what_to_declare() -> None:
    n, m = Var("n"), Var("m")
    with pytest.raises(UserError, match="--bound"):
        anchors([(n * m,)], {n: Range(1, 4)}, 6)
