"""Rotary embeddings: order of dims, tables, and scaled frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.transformer.rope import (
    Linear,
    Llama3,
    LongRope,
    Rope,
    RopeStyle,
    Yarn,
    for_lengths,
    read_rope,
)


def rotated(x: np.ndarray[Any, Any], rope: Rope, position: int) -> np.ndarray[Any, Any]:
    """Rotate the pairs of one head as they are stored."""
    half, result = rope.dims // 2, x.copy()
    for k, angle in enumerate(position * rope.frequencies()):
        i, j = (2 * k, 2 * k + 1) if rope.interleaved else (k, k + half)
        result[i], result[j] = x[i] * np.cos(angle) - x[j] * np.sin(angle), x[j] * np.cos(angle) + x[i] * np.sin(angle)
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [4, 8])
def test_reordered_halves_rotate_as_stored_pairs(dims: int, interleaved: bool) -> None:
    rope, size = Rope(100.0, dims, interleaved=interleaved), 8
    x = np.random.default_rng(dims).standard_normal(size)
    order = rope.order(size)
    assert sorted(order) == list(range(size))
    first, second = np.split(x[order], 2)
    cos, sin = (rope.table(of, 6, size)[5] for of in (np.cos, np.sin))
    halves = np.concatenate([first * cos - second * sin, second * cos + first * sin])
    np.testing.assert_allclose(halves, rotated(x, rope, 5)[order], rtol=1e-5, atol=1e-6)
    assert rope.reorders(size) == (order != list(range(size)))


@pytest.mark.parametrize(
    ("scaling", "low", "high"),
    [(Linear(4.0), 4, 4), (Llama3(4.0, 1.0, 4.0, 64), 4, 1), (Yarn(4.0, 64, 32.0, 1.0, True), 4, 1)],
)
def test_scaling_divides_low_frequencies(scaling: Any, low: float, high: float) -> None:
    plain, scaled = Rope(10000.0, 32).frequencies(), Rope(10000.0, 32, scaling).frequencies()
    np.testing.assert_allclose(plain[[0, -1]] / scaled[[0, -1]], [high, low], rtol=1e-5)
    assert (np.diff(scaled) < 0).all()


def test_longrope_has_frequencies_by_length() -> None:
    rope = Rope(100.0, 4, LongRope((1.0, 1.0), (2.0, 4.0), 16))
    assert for_lengths(rope, 1, 16) is rope
    np.testing.assert_allclose(rope.frequencies() / for_lengths(rope, 17, 99).frequencies(), [2, 4])
    with pytest.raises(UserError, match=r"16 positions .*got 1 to 17"):
        for_lengths(rope, 1, 17)


def test_older_fields_give_the_same_rotation() -> None:
    newer = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "linear", "factor": 2.0}}
    older = {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    ropes = [read_rope(ConfigFields(fields, "config.json"), RopeStyle(), 8) for fields in (newer, older)]
    assert ropes[0] == ropes[1] == Rope(50.0, 8, Linear(2.0))
