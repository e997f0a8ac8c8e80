"""Times of shapes: what was measured, what lies between, and what corrects it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tune.tuner.serve.costs import ShapeCosts, log_axis


@pytest.mark.parametrize(
    "lower, upper, axis", [(1, 8, (1, 2, 4, 8)), (3, 10, (3, 4, 8, 10)), (5, 5, (5,)), (0, 3, (1, 2, 3))]
)
def test_axis_has_bounds_and_powers(lower: int, upper: int, axis: tuple[int, ...]) -> None:
    assert log_axis(lower, upper) == axis


def timed(**options: bool) -> ShapeCosts:
    times = ShapeCosts((1, 2, 4), (8, 16, 32), **options)
    for rows, length in times.missing():
        times.add(rows, length, 1e-3 + 1e-5 * rows * length)
    return times


def test_measured_points_are_exact_and_others_lie_between() -> None:
    times = timed()
    assert times.missing() == []
    assert times.secs(2, 16) == pytest.approx(1e-3 + 32e-5)
    assert times.secs(2, 16) < times.secs(3, 16) < times.secs(3, 20) < times.secs(4, 32) < times.secs(8, 32)


@given(st.data())
def test_estimates_of_missing_points_lie_between_smaller_and_larger_ones(data: st.DataObject) -> None:
    axis = (1, 2, 4, 8)
    times, known = ShapeCosts(axis, axis), {}
    points = st.tuples(st.sampled_from(axis), st.sampled_from(axis))
    for point in data.draw(st.sets(points, min_size=1)):
        known[point] = 1e-3 * (1 + point[0] * point[1])
        times.add(*point, known[point])
    for rows in axis:
        for length in axis:
            secs = times.secs(rows, length)
            assert all(secs >= t * 0.999 for (r, n), t in known.items() if r <= rows and n <= length)
            assert all(secs <= t * 1.001 for (r, n), t in known.items() if r >= rows and n >= length)


def test_nothing_measured_gives_no_reason_to_batch() -> None:
    times = ShapeCosts((1, 2, 4), (8, 16))
    assert times.secs(2, 8) == pytest.approx(2 * times.secs(1, 8))


def test_faster_padded_shape_is_taken() -> None:
    times = timed(pad_length=True)
    assert times.cheapest(3, 20)[:2] == (3, 20)
    for _ in range(20):
        times.add(4, 32, 1e-4)  # such as a kernel for multiples of 4 and of 32
    assert times.cheapest(3, 20)[:2] == (4, 32)
    assert ShapeCosts.cheapest(timed(pad_rows=False), 3, 20)[:2] == (3, 20)


def test_batches_at_other_shapes_correct_the_points_around() -> None:
    times = timed()
    for _ in range(60):
        times.add(3, 24, 5e-3)
    assert times.secs(3, 24) == pytest.approx(5e-3, rel=0.05)


def test_times_are_taken_over_by_another_grid() -> None:
    old, new = ShapeCosts((1, 8), (4, 64)), ShapeCosts((1, 8), (4, 16, 64))
    new.take_over(old)
    assert not new.has_times  # nothing was timed
    for rows, length in old.missing():
        old.add(rows, length, 1e-3 * rows * length)
    new.take_over(old)
    assert not new.missing() and new.secs(8, 16) == pytest.approx(old.secs(8, 16)) == pytest.approx(0.128)
