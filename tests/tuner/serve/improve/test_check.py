"""The comparison of an artifact with the one that is served: results within a tolerance, times over the served mix."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.tuner.serve.served import Files

from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.serve.improve.check import ArtifactComparison, compare, difference

SIZES = [(("main", (8,)), 0.75), (("main", (64,)), 0.25)]


@pytest.mark.ccompiler
def test_faster_artifact_of_equal_results_is_accepted(files: Files) -> None:
    slow, fast = (load_artifact(files.artifact(name)) for name in ("slow", "fast"))
    with slow.open() as old, fast.open() as new:
        comparison = compare(old, new, SIZES, 0.5)
        reverse = compare(new, old, SIZES, 0.5)
    assert comparison.sizes == 2 and comparison.difference < 1e-5 and not comparison.refusal(1e-3)
    assert "%" in reverse.refusal(1e-3) and reverse.gain < 0 < comparison.gain


@pytest.mark.ccompiler
def test_other_weights_are_refused_with_the_size(files: Files) -> None:
    slow = load_artifact(files.artifact("slow"))
    name = next(iter(slow.constants))
    other = slow.with_weights({name: slow.constants[name] * np.float32(1.01)})
    with slow.open() as old, other.open() as new:
        comparison = compare(old, new, SIZES, 0.1)
    assert 1e-3 < comparison.difference < 1 and "main at" in comparison.refusal(1e-3)


def test_difference_is_relative_to_the_largest_element() -> None:
    old = np.array([1.0, -100.0, np.nan, np.inf], np.float32)
    new = old + np.array([0.0, 1.0, 0.0, 0.0], np.float32)
    assert difference(old, new) == pytest.approx(0.01) and difference(old, old) == 0
    assert math.isinf(difference(old, np.nan_to_num(old))) and math.isinf(difference(old, old[:3]))
    assert math.isinf(difference(old, old.astype(np.float64)))
    assert (
        difference(np.array([3]), np.array([4])) == pytest.approx(1 / 3) and difference(np.zeros(2), np.zeros(2)) == 0
    )
    assert difference(np.zeros(0), np.zeros(0)) == 0 and difference(np.full(1, np.nan), np.full(1, np.nan)) == 0


@pytest.mark.parametrize(
    "comparison, subject",
    [
        (ArtifactComparison(1e-2, "main at 3: y", 0.5, 0.5, 4), "main at 3"),
        (ArtifactComparison(math.nan, "main at 3: y", 0.5, 0.5, 4), "main at 3"),
        (ArtifactComparison(1e-5, "", 0.01, 0.9, 4), "1.0%"),
        (ArtifactComparison(1e-5, "", 0.5, 1.2, 4), "99th"),
        (ArtifactComparison(1e-5, "", 0.5, 1.0, 4), ""),
    ],
)
def test_refusal_names_the_reason(comparison: ArtifactComparison, subject: str) -> None:
    reason = comparison.refusal(1e-3)
    assert subject in reason and bool(reason) == bool(subject)
