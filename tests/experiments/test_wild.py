"""The corpus of model files: its table, its judgement, and children that fail or take too long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.families.wild import bounded, deviation, drawn, page, tried, unmet
from experiments.families.wild_files import WHEELS

A = np.float32([1.0, -4.0, np.inf])


def test_files_are_named_once_and_have_four_sizes() -> None:
    files = [f for w in WHEELS for f in w.files]
    assert max(Counter(f.path for f in files).values()) == 1
    assert all(len(sizes) == 4 and min(sizes) >= 1 for f in files for sizes in f.dims.values())
    assert all(w.name.count("==") == 1 for w in WHEELS)
    assert sum(len(w.files) for w in WHEELS if not w.first) >= 15


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (A, 0.0),
        (np.float32([1.0, -4.4, np.inf]), 0.1),
        (np.float32([1.0, -4.0, 3.0]), np.inf),
        (np.float32([np.nan, -4.0, np.inf]), np.inf),
        (A.astype(np.float64), np.inf),
        (A[:2], np.inf),
    ],
)
def test_deviation_is_relative_to_the_largest_value(found: Any, expected: float) -> None:
    assert deviation(found, A) == pytest.approx(expected)


def test_deviation_of_integers_is_all_or_nothing() -> None:
    assert deviation(np.int64([1, 2]), np.int64([1, 2])) == 0
    assert deviation(np.int64([1, 3]), np.int64([1, 2])) == np.inf


def test_inputs_are_drawn_within_domain() -> None:
    rng = np.random.default_rng(0)
    ids = drawn(rng, [500], np.dtype(np.int64), ("uniform", 3, 7), 1)
    assert {*ids.tolist()} == {3, 4, 5, 6, 7}
    assert drawn(rng, [500], np.dtype(np.int64), ("below", 0, 0), 4).max() == 3
    whole = drawn(rng, [50], np.dtype(np.float32), ("uniform", 0, 11), 1)
    assert np.array_equal(whole, np.rint(whole)) and whole.max() <= 11
    assert drawn(rng, [], np.dtype(np.int64), ("constant", 16000, 0), 1) == 16000


def result(status: str, first: bool, why: str = "") -> dict[str, Any]:
    return {
        "file": "f.onnx", "wheel": WHEELS[0].name, "first": first, "status": status, "why": why, "commit": "0123abcd"
    }  # fmt: skip


def test_unmet_names_first_wrong_files_and_counts_the_others() -> None:
    named = result("refused", True, "expected n <= 32; rebuild with a larger bound (--bound n=1:64)")
    assert bounded(named) and not bounded(result("refused", True, "an operator"))
    nine, one = [result("right", False)] * 9, [result("wrong", False)]
    assert unmet([named, *nine, *one]) == []
    assert len(unmet([result("wrong", True), *nine, *one])) == 1
    assert unmet([*nine, *one, *one]) == ["9 of 11 other files are right, expected nine in ten"]


def test_page_counts_results_and_shows_reasons() -> None:
    lines = page([result("right", True), result("refused", False, "a | b")])
    assert "* files named by the project: 1; 1 right" in lines
    assert any("refused: a \\| b" in line for line in lines)


@pytest.mark.process
@pytest.mark.slow
def test_child_failure_or_timeout_is_a_result(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    assert tried(path, "broken.onnx", 100)["status"] == "crashed"  # onnx itself cannot read it
    late = tried(path, "broken.onnx", 0.05)
    assert late["status"] == "crashed" and "more than" in late["why"]
