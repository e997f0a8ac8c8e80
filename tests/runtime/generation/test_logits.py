"""Logits to tokens: the processors of transformers, and drawing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.tiny_decoders import DATA, GENERATED

from relax_tune.errors import UserError
from relax_tune.runtime.generation.beams import largest
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.logits import draw, keep_top_p, process_logits, take_likeliest

PROCESSED: dict[str, dict[str, Any]] = GENERATED["PROCESSED"]
INF = np.inf


@pytest.mark.parametrize("name", PROCESSED)
def test_processors_equal_transformers(name: str) -> None:
    config = GenerationConfig(**{"top_k": 0, **PROCESSED[name]})
    history, scores = GENERATED["history"](), GENERATED["scores"]()
    with np.load(DATA / "generation.npz") as wanted:
        found = process_logits(config, history, scores, 2)
        np.testing.assert_allclose(found, wanted[f"process/{name}"], rtol=1e-6)
    np.testing.assert_array_equal(scores, GENERATED["scores"](), "the logits were written")


def test_processors_of_few_tokens_and_equal_scores_keep_a_token() -> None:
    flat = np.zeros((1, 4), np.float32)
    np.testing.assert_array_equal(np.isfinite(keep_top_p(flat, 0.5)), [[False, False, True, True]])
    np.testing.assert_array_equal(np.isfinite(keep_top_p(flat, 0.0)), [[False, False, False, True]])
    one = np.array([[-INF, 2.0, -INF]], np.float32)
    config = GenerationConfig(do_sample=True, top_k=2, top_p=0.1, min_p=1.0, temperature=1e-3)
    np.testing.assert_array_equal(process_logits(config, np.zeros((1, 1), np.int64), one, 0) > -INF, one > -INF)
    outside = np.array([[0, 9, 9]])  # a token that the model's head lacks
    config = GenerationConfig(repetition_penalty=2.0, no_repeat_ngram_size=1)
    np.testing.assert_array_equal(process_logits(config, outside, flat + 1, 0), [[-INF, 1, 1, 1]])


def test_draw_has_the_distribution_of_the_scores() -> None:
    chances = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        scores = np.tile(np.log(chances).astype(np.float32), (4000, 1)) + 3
    tokens = draw(scores, [np.random.default_rng([7, row]) for row in range(4000)])
    counts = np.bincount(tokens, minlength=5)
    assert counts[1] == 0
    squares = (counts - 4000 * chances) ** 2 / np.maximum(4000 * chances, 1)
    assert squares.sum() < 16.3, "chi-square of 3 degrees of freedom, 0.1 %"


def test_draw_at_the_ends_of_the_unit_interval_gives_possible_tokens() -> None:
    class Fixed(np.random.Generator):
        def __init__(self, value: float) -> None:
            super().__init__(np.random.PCG64())
            self.value = value

        def random(self, *_: Any, **__: Any) -> Any:
            return self.value

    scores = np.array([[-INF, 1.0, -INF, 1.0, -INF]] * 2, np.float32)
    assert draw(scores, [Fixed(0.0), Fixed(np.nextafter(1.0, 0.0))]).tolist() == [1, 3]


@pytest.mark.parametrize("row", [[np.nan, 1.0], [-INF, -INF]])
def test_scores_without_a_choice_are_refused(row: list[float]) -> None:
    scores = np.array([[0.0, 1.0], row], np.float32)
    with pytest.raises(UserError, match="row 1: expected finite scores"):
        take_likeliest(scores)
    with pytest.raises(UserError, match="row 1: expected finite scores"):
        draw(scores, [np.random.default_rng(0)] * 2)


def test_largest_takes_the_first_of_equal_scores() -> None:
    assert largest(np.array([1, 3, 3, 0, 3], np.float32), 2).tolist() == [1, 2]
    assert largest(np.array([1, -INF], np.float32), 2).tolist() == [0, 1]
