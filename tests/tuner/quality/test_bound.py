"""Bounds on quality: the grammar, the words of refusals, and values against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import UserError
from relax_tune.tuner.quality.bound import METRICS, QualityBound

LIMITS = st.floats(0.001, 1)


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(METRICS)), LIMITS, min_size=1), st.sampled_from(["", " ", "  "]))
def test_bound_of_comparisons_keeps_each_limit(limits: dict[str, float], space: str) -> None:
    text = " and ".join(f"{space}{n}{space}{METRICS[n].operator}{space}{limit!r}" for n, limit in limits.items())
    assert QualityBound.parse(text).limits == limits


def test_bound_text_parses_to_the_same_bound() -> None:
    found = QualityBound.parse("  cosine >= .999 and max_abs<=1e-2")
    assert found.text == "cosine>=0.999 and max_abs<=0.01" and QualityBound.parse(found.text) == found


@pytest.mark.parametrize(
    "text, words",
    [
        ("cosin>=0.9", "expects a metric among cosine, rmse, max_abs, top1; got 'cosin'; did you mean cosine?"),
        ("quality>=0.9", "expects a metric among cosine, rmse, max_abs, top1; got 'quality'"),
        ("cosine<=0.9", "expects cosine>=NUMBER, since a larger cosine is better; got 'cosine<=0.9'"),
        ("rmse>=0.1", "expects rmse<=NUMBER, since a smaller rmse is better; got 'rmse>=0.1'"),
        ("top1>0.9", "expects top1>=NUMBER"),
        ("max_abs==0", "expects max_abs<=NUMBER"),
        ("cosine>=1.5", "a number above 0, at most 1; got '1.5'"),
        ("top1>=0", "a number above 0, at most 1; got '0'"),
        ("cosine>=nan", "a number above 0, at most 1; got 'nan'"),
        ("rmse<=-1", "a number of at least 0; got '-1'"),
        ("rmse<=inf", "a number of at least 0; got 'inf'"),
        ("rmse<=small", "a number of at least 0; got 'small'"),
        ("", "expects METRIC>=NUMBER or METRIC<=NUMBER, joined by `and`, such as cosine>=0.999; got ''"),
        ("cosine", "expects METRIC>=NUMBER"),
        ("cosine>=0.9, rmse<=1", "joined by `and`, such as cosine>=0.999; got 'cosine>=0.9, rmse<=1'"),
        ("cosine>=0.9 or rmse<=1", "expects METRIC>=NUMBER"),
        ("cosine>=0.9 and", "expects METRIC>=NUMBER"),
        ("0.9<=cosine", "expects METRIC>=NUMBER"),
        ("rmse<=1 and rmse<=2", "expects a metric once, got rmse twice"),
    ],
)
def test_bound_of_other_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--quality") as found:
        QualityBound.parse(text)
    assert words in str(found.value)


def test_values_equal_numpy_values() -> None:
    rng = np.random.default_rng(3)
    exact = [[rng.standard_normal((4, 5)).astype("f4"), rng.standard_normal((3, 7)).astype("f4")] for _ in range(3)]
    found = [[a + rng.standard_normal(a.shape).astype("f4") * 0.3 for a in sample] for sample in exact]
    pairs = [(a.astype("f8"), b.astype("f8")) for e, f in zip(exact, found) for a, b in zip(e, f)]
    cosines = [(a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()) for a, b in pairs]
    values = QualityBound.parse("cosine>=0.5 and rmse<=1 and max_abs<=2 and top1>=0.5").judge(exact, found).values
    assert values["cosine"] == pytest.approx(min(cosines), abs=1e-12)
    assert values["rmse"] == pytest.approx(max(np.sqrt(((a - b) ** 2).mean()) for a, b in pairs))
    assert values["max_abs"] == max(np.abs(a - b).max() for a, b in pairs)
    assert values["top1"] == np.mean(np.concatenate([a.argmax(1) == b.argmax(1) for a, b in pairs]))
    assert values["top1"] < 1


@pytest.mark.parametrize("text", ["cosine>=1", "rmse<=0", "max_abs<=0", "top1>=1"])
def test_equal_results_hold_under_the_strictest_bound(text: str) -> None:
    a = [[np.array([[1.0, 3.0], [1e-30, 0.0]], "f4")]]
    found = QualityBound.parse(text).judge(a, a)
    assert found.holds and found.used == 0
    other = QualityBound.parse(text).judge(a, [[np.array([[1.0, -3.0], [1e-30, 0.0]], "f4")]])
    assert not other.holds and other.used == math.inf


def test_used_share_is_one_at_the_limit() -> None:
    exact, found = [[np.zeros(4, "f4")]], [[np.full(4, 0.5, "f4")]]
    assert QualityBound.parse("rmse<=0.5").judge(exact, found) == QualityBound.parse("rmse<=0.5").judge(exact, found)
    assert (
        QualityBound.parse("rmse<=0.5").judge(exact, found).used == 1
        and QualityBound.parse("rmse<=0.5").judge(exact, found).holds
    )
    assert QualityBound.parse("rmse<=1").judge(exact, found).used == 0.25  # squares add
    assert not QualityBound.parse("max_abs<=0.49").judge(exact, found).holds


def test_infinite_and_undefined_results_never_hold() -> None:
    exact = [[np.ones(3, "f4")]]
    for bad in (np.nan, np.inf):
        found = QualityBound.parse("max_abs<=1e30").judge(exact, [[np.array([1, bad, 1], "f4")]])
        assert not found.holds and found.used == math.inf


def test_top1_of_single_numbers_is_refused() -> None:
    one = [[np.ones((3, 1), "f4")]]
    with pytest.raises(UserError, match=r"2 scores.*shape \(3, 1\)"):
        QualityBound.parse("top1>=0.9").judge(one, one)
