"""Axes beside one a parameter: what the powers of two in a value tell, and what constraints tie."""

from __future__ import annotations

import numpy as np

from relax_tune.tuner.search.embedding import Embedding
from relax_tune.tuner.search.space import Parameter, ParameterSpace, SketchSpace, has_alignment, trailing_zeros

THREADS = Parameter("threads", (32, 64, 96, 128, 160, 256))
POWERS = Parameter("tile", (1, 2, 4, 8))


def test_trailing_zeros_of_integers_are_exponents_of_two() -> None:
    assert trailing_zeros([[0, 1, 2], [96, -8, 1 << 40]]).tolist() == [[0, 0, 1], [5, 3, 40]]


def test_has_alignment_of_powers_of_two_is_false() -> None:
    assert has_alignment(THREADS)
    assert not has_alignment(POWERS)
    assert not has_alignment(Parameter("threads", THREADS.domain, ordered=False))


def test_embedding_of_a_name_in_two_sketches_shares_the_axis_of_alignment() -> None:
    space = ParameterSpace(
        [SketchSpace("a", (POWERS, THREADS)), SketchSpace("b", (THREADS,)), SketchSpace("c", (POWERS,))]
    )
    codes = np.concatenate([space.draw(np.random.default_rng(0), sketch, 40) for sketch in range(3)])
    points = Embedding(space)(codes)
    assert points.shape[1] == space.coordinates(codes).shape[1] + 1
    for candidate, place in zip(space.candidates(codes), points[:, -1]):
        wanted = 0.5 if candidate.sketch == 2 else (trailing_zeros(candidate.values[-1]) - 5) / 3
        assert place == wanted


def test_embedding_with_a_limited_product_has_an_axis_more() -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    free = SketchSpace("free", (Parameter("x", sizes), Parameter("y", sizes)))
    tied = SketchSpace("tied", free.parameters, lambda rows: rows[:, 0] * rows[:, 1] <= 64)
    for sketch, axes in ((free, 2), (tied, 3)):
        space = ParameterSpace([sketch])
        listed = space.listed()
        assert listed is not None and Embedding(space)(listed).shape[1] == axes
