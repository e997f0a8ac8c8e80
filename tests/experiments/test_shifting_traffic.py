"""The experiment on shifting traffic: lengths over the time, relative times, the table and the picture."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def shifting() -> Any:
    for package in ("starlette", "prometheus_client", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra serve)")
    return importlib.import_module("experiments.serving.shifting_traffic")


def answers(shifting: Any) -> list[Any]:
    """A run of 400 s: the times of a length are 1 ms a token, 10 % more while it tunes, half after the swap."""
    generator, result = np.random.default_rng(0), []
    for number in range(8000):
        at = number / 20
        part = at % 100
        length = shifting.length_at(at / 400, generator, 256)
        kind = 1 << length.bit_length()
        phase, swaps = ("recording", 0) if part < 30 else ("tuning", 0) if part < 60 else ("recording", 1)
        secs = kind / 1e3 * (1.1 if phase == "tuning" else 0.5 if swaps else 1.0)
        result.append(shifting.Answered(at, length, secs, phase, swaps))
    return result


def test_lengths_follow_the_means(shifting: Any) -> None:
    generator = np.random.default_rng(1)
    for part, mean in enumerate(shifting.MEANS):
        lengths = [shifting.length_at((part + 0.5) / 4, generator, 256) for _ in range(400)]
        assert np.median(lengths) == pytest.approx(mean, rel=0.15) and 2 <= min(lengths) <= max(lengths) <= 256


def test_summary_shows_the_cost_of_tuning_and_the_gain(shifting: Any) -> None:
    rows = [line.split("|")[1:-1] for line in shifting.summary(answers(shifting), 400.0)[2:]]
    by_label = {(row[0].strip(), row[3].strip()): float(row[4]) for row in rows}
    for part in "1234":
        assert by_label[part, "artifact 0, not tuning"] == 1.0
        assert by_label[part, "artifact 0, tuning"] == pytest.approx(1.1)
        assert by_label[part, "artifact 0, after the swap"] == pytest.approx(0.5)


def test_picture_is_an_svg_with_both_lines(shifting: Any) -> None:
    svg = shifting.picture(answers(shifting), 400.0)
    assert svg.startswith("<svg ") and "99th percentile" in svg and "median" in svg
