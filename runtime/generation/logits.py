"""Logits to tokens: the processors of transformers in NumPy, and drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.generation.config import GenerationConfig

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
LogitsProcessor = Callable[[Ids, Floats], Floats]
"""From the tokens so far (b, length) and logits (b, vocabulary) to logits of that shape."""


def process_logits(
    config: GenerationConfig,
    history: Ids,
    scores: Floats,
    added: int,
    custom: LogitsProcessor | None = None,
    last: bool = False,
) -> Floats:
    """Apply the processors that the settings ask for, in the order of transformers.

    Args:
        config: The settings.
        history: (b, length) tokens so far, including the prompt.
        scores: (b, vocabulary) logits, or log-probabilities in beam search; not modified.
        added: How many tokens of the history are new.
        custom: A processor that is applied after the penalties and before the temperature.
        last: No token may follow the next one.

    Raises:
        UserError: `custom` returns no scores of this shape, or a token to force is not in the vocabulary.
    """
    if config.repetition_penalty != 1.0:
        scores = penalize_repetition(history, scores, config.repetition_penalty)
    if config.no_repeat_ngram_size:
        scores = ban_repeated_ngrams(history, scores, config.no_repeat_ngram_size)
    if added < config.min_new_tokens or history.shape[1] < config.min_length:
        scores = ban_tokens(scores, config.eos_ids)
    if config.forced_bos_token_id is not None and history.shape[1] == 1:
        scores = force_tokens(scores, (config.forced_bos_token_id,), "forced_bos_token_id")
    if config.forced_eos_ids and last:
        scores = force_tokens(scores, config.forced_eos_ids, "forced_eos_token_id")
    scores = ban_tokens(scores, config.suppress_tokens)
    # the first token to choose is the second one where the first is forced
    forced = config.forced_bos_token_id is not None and history.shape[1] - added == 1
    if added == int(forced):
        scores = ban_tokens(scores, config.begin_suppress_tokens)
    if custom is not None:
        scores = _checked(custom(history, scores), scores.shape)
    if config.do_sample:
        scores = warp_logits(config, scores)
    return log_softmax(scores) if config.renormalize_logits else scores


def warp_logits(config: GenerationConfig, scores: Floats) -> Floats:
    """Apply the temperature, and give -inf to tokens that are not drawn."""
    # Beam search needs one candidate for each end token and one to go on.
    least = 1 if config.num_beams == 1 else max(1, len(config.eos_ids)) + 1
    if config.temperature != 1.0:
        scores = scores / np.float32(config.temperature)
    if config.top_k:
        scores = keep_top_k(scores, max(config.top_k, least))
    if config.top_p < 1.0:
        scores = keep_top_p(scores, config.top_p, least)
    if config.min_p is not None:
        scores = keep_min_p(scores, config.min_p, least)
    return scores


def needs_processing(config: GenerationConfig, custom: LogitsProcessor | None) -> bool:
    """Return whether `process_logits` may change logits where nothing is drawn."""
    return (
        config.repetition_penalty != 1.0
        or bool(config.no_repeat_ngram_size or config.min_new_tokens or config.min_length)
        or config.forced_bos_token_id is not None
        or bool(config.forced_eos_ids or config.suppress_tokens or config.begin_suppress_tokens)
        or custom is not None
    )


def ban_tokens(scores: Floats, tokens: Sequence[int]) -> Floats:
    """Give -inf to tokens."""
    inside = [token for token in tokens if token < scores.shape[1]]
    if not inside:
        return scores
    banned = scores.copy()
    banned[:, inside] = -np.inf
    return banned


def force_tokens(scores: Floats, tokens: Sequence[int], setting: str) -> Floats:
    """Give 0 to tokens, and -inf to all others. Raises UserError for a token beyond the vocabulary, naming the setting."""
    if max(tokens) >= scores.shape[1]:
        raise UserError(f"{setting}: expected a token below {scores.shape[1]}, got {max(tokens)}; correct it")
    forced = np.full_like(scores, -np.inf)
    forced[:, list(tokens)] = 0
    return forced


def _checked(scores: object, shape: tuple[int, ...]) -> Floats:
    """Return the result of a custom processor as float32. Raises UserError unless it is scores of this shape."""
    if not isinstance(scores, np.ndarray) or scores.shape != shape or scores.dtype.kind != "f":
        got = f"{scores.dtype} {scores.shape}" if isinstance(scores, np.ndarray) else f"a {type(scores).__name__}"
        raise UserError(
            f"logits_processor: expected float32 scores of shape {shape}, got {got}; return the scores that it gets, changed"
        )
    return scores.astype(np.float32, copy=False)


def penalize_repetition(history: Ids, scores: Floats, penalty: float) -> Floats:
    """Divide the positive scores of tokens in the history by the penalty, and multiply the others (Keskar et al. 2019)."""
    size = scores.shape[1]
    wide = np.pad(scores, ((0, 0), (0, 1)))  # a column for tokens that the model cannot give
    tokens = np.minimum(history, size)
    penalized = np.take_along_axis(wide, tokens, 1)
    factor = np.float32(penalty)
    np.put_along_axis(wide, tokens, np.where(penalized < 0, penalized * factor, penalized / factor), 1)
    return wide[:, :size]


def ban_repeated_ngrams(history: Ids, scores: Floats, size: int) -> Floats:
    """Give -inf to every token that would repeat a sequence of `size` tokens of the history."""
    length = history.shape[1]
    if length < size:
        return scores
    windows = np.lib.stride_tricks.sliding_window_view(history, size, axis=1)  # (b, length - size + 1, size)
    alike = (windows[..., :-1] == history[:, None, length + 1 - size :]).all(-1)
    row, at = np.nonzero(alike)
    token = windows[row, at, -1]
    inside = token < scores.shape[1]
    banned = scores.copy()
    banned[row[inside], token[inside]] = -np.inf
    return banned


def keep_top_k(scores: Floats, k: int) -> Floats:
    """Give -inf to every token below the k-th likeliest."""
    size = scores.shape[1]
    if k >= size:
        return scores
    least = np.partition(scores, size - k, axis=1)[:, size - k, None]
    return np.where(scores < least, np.float32(-np.inf), scores)


def keep_top_p(scores: Floats, top_p: float, least: int = 1) -> Floats:
    """Give -inf to the unlikeliest tokens that have a probability of at most 1 - top_p together (Holtzman et al. 2020).

    Args:
        scores: (b, vocabulary) scores.
        top_p: Probability that the remaining tokens have together, at least.
        least: Number of tokens that always remain.
    """
    result = scores.copy()
    for row, output in zip(scores, result):
        values = np.sort(row[row > -np.inf])
        # Summed in float32 and in ascending order, as transformers does, so that the same tokens remain.
        below = int((np.cumsum(softmax(values), dtype=np.float32) <= np.float32(1 - top_p)).sum())
        below = min(below, max(0, len(values) - least))
        if below:
            limit = values[below]
            output[row < limit] = -np.inf
            equal = below - int(np.searchsorted(values, limit))  # of equal tokens, the first ones go
            output[np.flatnonzero(row == limit)[:equal]] = -np.inf
    return result


def keep_min_p(scores: Floats, min_p: float, least: int = 1) -> Floats:
    """Give -inf to tokens whose probability is below `min_p` times the largest probability (Nguyen et al. 2024)."""
    chances = softmax(scores)
    low = chances < np.float32(min_p) * chances.max(1, keepdims=True)
    np.put_along_axis(low, np.argpartition(-chances, min(least, scores.shape[1]) - 1, 1)[:, :least], False, 1)
    return np.where(low, np.float32(-np.inf), scores)


def softmax(scores: Floats) -> Floats:
    """Return the probabilities of scores along the last axis."""
    if not scores.shape[-1]:
        return scores
    with np.errstate(invalid="ignore"):  # a row of -inf gives NaN, as its user checks
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(exponentials / exponentials.sum(-1, keepdims=True))


def log_softmax(scores: Floats) -> Floats:
    """Return the logarithms of the probabilities of scores along the last axis."""
    with np.errstate(invalid="ignore"):
        moved = scores - scores.max(-1, keepdims=True)
        return np.asarray(moved - np.log(np.exp(moved).sum(-1, keepdims=True)))


def take_likeliest(scores: Floats) -> Ids:
    """Return the likeliest token of every row, the first of equal ones: (b,). Raises UserError for a row without one."""
    if len(scores) == 1:  # the usual step, in few calls of NumPy
        token = scores[0].argmax()
        if scores[0, token] > -np.inf:
            return np.array([token], np.int64)
    tokens = np.argmax(scores, axis=-1)
    top = scores[np.arange(len(scores)), tokens]
    if not (top > -np.inf).all():  # false for NaN too, which argmax prefers
        raise no_choice(scores, int(np.argmin(top > -np.inf)))
    return np.asarray(tokens, np.int64)


def draw(scores: Floats, generators: Sequence[np.random.Generator]) -> Ids:
    """Draw a token of every row by the probabilities of its scores, with a generator each: (b,).

    Raises: UserError for a row with NaN, with an infinite score, or without any token.
    """
    tokens = np.empty(len(scores), np.int64)
    for n, (row, generator) in enumerate(zip(scores, generators, strict=True)):
        # Sums over possible tokens only: with the whole vocabulary a rounded sum could select a token of probability
        # 0.
        possible = np.flatnonzero(row != -np.inf)
        with np.errstate(invalid="ignore"):  # NaN and infinities are refused
            chances = np.exp(row[possible] - row[possible].max(initial=-np.inf))
            sums = np.cumsum(chances, dtype=np.float64)
        if not len(sums) or not np.isfinite(sums[-1]):
            raise no_choice(scores, n)
        at = int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))
        # Rounding can make the product equal to the last sum.
        tokens[n] = possible[at if at < len(sums) else np.flatnonzero(chances)[-1]]
    return tokens


def no_choice(scores: NDArray[Any], row: int) -> UserError:
    """Return the error about a row of scores that no token can be chosen by."""
    nan, infinite = int(np.isnan(scores[row]).sum()), int(np.isposinf(scores[row]).sum())
    problem = f"{nan} NaN" if nan else f"{infinite} infinite ones" if infinite else "only -inf"
    return UserError(
        f"row {row}: expected finite scores to choose a token by, got {problem}; are the weights right, or do "
        "no_repeat_ngram_size, min_new_tokens or logits_processor leave no token?"
    )
