"""The comparison of times before and after a swap."""

from __future__ import annotations

import numpy as np
import pytest

from relax_tune.tuner.serve.improve.watch import LEAST_CALLS, compare


def times(
    scale: float, sizes: int = 4, calls: int = 100, seed: int = 0
) -> dict[tuple[str, tuple[int, ...]], list[float]]:
    noise = np.random.default_rng(seed)
    return {
        ("main", (n,)): [float(scale * (n + 1) * (1 + 0.02 * abs(noise.standard_normal()))) for _ in range(calls)]
        for n in range(sizes)
    }


def test_equal_times_do_not_rise() -> None:
    comparison = compare(times(1.0), times(1.0, seed=1))
    assert comparison is not None and not comparison.rises and comparison.calls == 400
    assert comparison.median == pytest.approx(1, abs=0.01)


def test_faster_calls_do_not_rise_and_slower_ones_do() -> None:
    faster, slower = compare(times(1.0), times(0.7, seed=1)), compare(times(1.0), times(1.2, seed=1))
    assert faster is not None and not faster.rises and slower is not None and slower.rises
    assert "99th" in str(slower)


def test_slow_tail_of_faster_calls_rises() -> None:
    after = times(0.7, seed=1)
    for n in range(4):
        after["main", (n,)][:6] = [2.0 * (n + 1)] * 6
    comparison = compare(times(1.0), after)
    assert comparison is not None and comparison.median < 1 and comparison.rises


def test_other_sizes_are_not_compared() -> None:
    before, after = times(1.0, sizes=4), times(5.0, sizes=8, seed=1)
    for n in range(4):
        after["main", (n,)] = times(1.0, seed=2)["main", (n,)]
    comparison = compare(before, after)
    assert comparison is not None and comparison.calls == 400 and not comparison.rises


def test_few_calls_give_no_comparison() -> None:
    assert compare(times(1.0), times(9.0, calls=LEAST_CALLS // 4 - 1)) is None
    assert compare(times(1.0, calls=7), times(9.0)) is None


def test_calls_of_one_distribution_hardly_ever_rise() -> None:
    noise = np.random.default_rng(3)
    size, undone = ("main", (1,)), 0
    for _ in range(300):  # times with a long tail, as on a busy machine
        before, after = ({size: (1 + noise.pareto(2.0, 300)).tolist()} for _ in range(2))
        comparison = compare(before, after)
        assert comparison is not None
        undone += comparison.rises
    assert undone <= 6
