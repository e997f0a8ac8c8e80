"""Prompts of any lengths as rows of token ids, in groups of equal length; greedy generation and sampling of a group.

Tests: `tests/tuner/emit/test_generate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError, warn
from relax_tune.runtime.arrays import host_array
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.decoder import Decoder, DecodingState
from relax_tune.runtime.generation.logits import LogitsProcessor, draw, needs_processing, process_logits, take_likeliest
from relax_tune.runtime.generation.sources import START, Source, check_sources, read_ids, read_sources, stack_sources
from relax_tune.runtime.generation.stopping import Stopper, StopRules
from relax_tune.summary import bounds_advice

Ids = NDArray[np.int64]
Row = Ids | Source
"""A prompt of a decoder, or a source of an encoder-decoder."""


@dataclass(frozen=True)
class Request:
    """A checked call: its prompts without padding, in the caller's order, each as often as it has results.

    Raises: UserError for rows of another kind than the model takes.
    """

    decoder: Decoder
    rows: tuple[Row, ...]
    config: GenerationConfig
    rules: StopRules
    custom: LogitsProcessor | None

    def __post_init__(self) -> None:
        names, start = self.decoder.sources, self.config.decoder_start_token_id
        read = [row for row in self.rows if isinstance(row, Source)]
        if not names:
            if read:
                raise UserError(
                    "prompts: expected token ids, got inputs of an encoder, which this model lacks; give rows of token ids"
                )
            if start is not None:
                raise UserError(
                    f"decoder_start_token_id: expected a model with an encoder, got none, and {start}; leave it out"
                )
            return
        if len(read) < len(self.rows):
            raise UserError(
                f"prompts: expected the encoder's inputs by name, got token ids; give a dict of {', '.join(names)}"
            )
        check_sources(read, names)
        if start is None and any(row.start is None for row in read):
            raise UserError(
                f"decoder_start_token_id: expected the first token of a text, got None; give it, or {START} with the prompts"
            )

    def prompt(self, number: int) -> Ids:
        """Return the first tokens of a row's text."""
        row = self.rows[number]
        if not isinstance(row, Source):
            return row
        return np.array([self.config.decoder_start_token_id]) if row.start is None else row.start

    def prefill(self, numbers: Ids) -> DecodingState:
        """Compute the logits and caches of rows of equal length. Shorter sources are padded, and masked."""
        sources = [row for n in numbers if isinstance(row := self.rows[n], Source)]
        return self.decoder.prefill(
            np.stack([self.prompt(n) for n in numbers]), stack_sources(sources, self.decoder.sources)
        )

    def groups(self, beams: int = 1) -> list[NDArray[np.int64]]:
        """Return the numbers of rows of equal length, at most as many together as the model takes, with `beams` each.

        Raises: UserError when the model takes not even one row with its beams.
        """
        most = self.decoder.most_rows
        if most is not None and beams > most:
            raise UserError(
                f"num_beams: expected at most {most}, the rows that the model takes, got {beams}; build it with "
                f"{bounds_advice('b', 1, beams)}"
            )
        lengths: dict[int, list[int]] = {}
        # Rows of equal length need no padding: each row then has the positions and masks that it has without the
        # others.
        for number in range(len(self.rows)):
            lengths.setdefault(len(self.prompt(number)), []).append(number)
        step = len(self.rows) if most is None else most // beams
        return [np.array(rows[at : at + step]) for rows in lengths.values() for at in range(0, len(rows), step)]


def warn_of_end(config: GenerationConfig, number: int, added: int) -> None:
    """Warn of a row that ends because the model has no more positions."""
    if added < (requested := config.max_new_tokens):
        times = config.num_return_sequences if config.num_beams == 1 else 1
        warn(
            f"generate: prompt {number // times + 1} ends after {added} of {requested} new tokens: "
            "the model has no more positions; build it with larger bounds, or ask for fewer tokens"
        )


def on_host_rows(given: Any) -> Any:
    """Return prompts, sources or a mask with arrays of other libraries as NumPy arrays; lists and other values as they are."""
    if isinstance(given, Mapping):
        return {name: on_host_rows(value) for name, value in given.items()}
    if isinstance(given, (list, tuple)):
        # a row may be such an array
        return [on_host_rows(row) for row in given] if any(hasattr(row, "__array__") for row in given) else given
    if hasattr(given, "__array__") and not isinstance(given, np.generic):
        return host_array(given, "prompts", "token ids")
    return given


def read_prompts(prompts: object, mask: object = None) -> tuple[Row, ...]:
    """Return each prompt's tokens without padding, or each source.

    Args:
        prompts: (b, n) token ids, or a sequence of prompts of any lengths; for an encoder-decoder a mapping (`read_sources`).
        mask: (b, n), 1 for tokens and 0 for padding before or after them.

    Raises:
        UserError: The value is something else, a prompt has no tokens, or padding is between tokens.
    """
    if isinstance(prompts, Mapping):
        return read_sources(prompts, mask)
    if isinstance(prompts, np.ndarray) and prompts.ndim != 2:
        raise UserError(
            f"prompts: expected token ids (rows, length), got an array of shape {prompts.shape}; add a dim, or give a list of rows"
        )
    if not isinstance(prompts, (np.ndarray, Sequence)) or isinstance(prompts, (str, bytes)):
        raise UserError(
            f"prompts: expected token ids (rows, length) or a list of rows, got a {type(prompts).__name__}; tokenize text first"
        )
    rows = [read_ids("prompts", number, row) for number, row in enumerate(prompts)]
    if mask is not None:
        tokens = np.asarray(mask)
        if not isinstance(prompts, np.ndarray) or tokens.shape != prompts.shape or not np.isin(tokens, (0, 1)).all():
            raise UserError(
                f"attention_mask: expected 0 and 1 in the shape of the prompts' array, got {tokens.dtype} {tokens.shape}; a list of rows "
                "of different lengths needs none"
            )
        rows = [_unpadded(number, row, m) for number, (row, m) in enumerate(zip(rows, tokens.astype(np.bool_)))]
    empty = [number for number, row in enumerate(rows) if not len(row)]
    if empty:
        raise UserError(f"prompts: expected at least one token in every row, got none in row {empty[0]}; leave it out")
    return tuple(rows)


def _unpadded(number: int, row: Ids, mask: NDArray[np.bool_]) -> Ids:
    places = np.flatnonzero(mask)
    if len(places) and places[-1] - places[0] + 1 != len(places):
        raise UserError(
            f"attention_mask: row {number}: expected padding before or after the tokens, got some between them; take it out"
        )
    return row[places]


def group_steps(request: Request, numbers: NDArray[np.int64]) -> Iterator[tuple[Ids, NDArray[np.bool_]]]:
    """Yield the next token of every row of a group, and which rows are still going on: (b,), (b,).

    A row that has ended has the filler, and leaves the batch.
    """
    config, decoder, custom = request.config, request.decoder, request.custom
    prompt = np.stack([request.prompt(n) for n in numbers])
    b, n = prompt.shape
    limit = decoder.limit(n, config.max_new_tokens)
    stoppers = [Stopper(request.rules, row.tolist()) for row in prompt] if config.may_stop else []
    generators = _generators(config.seed, numbers) if config.do_sample else []
    plain = not config.do_sample and not needs_processing(config, custom)
    history = np.empty((b, n + limit), np.int64)
    history[:, :n] = prompt
    state = request.prefill(numbers) if limit else None
    present, live = np.arange(b), np.ones(b, np.bool_)
    for at in range(n, n + limit):
        assert state is not None
        scores = state.logits
        if not plain:
            scores = process_logits(config, history[present, :at], scores, at - n, custom, at + 1 == n + limit)
        tokens = draw(scores, [generators[i] for i in present]) if config.do_sample else take_likeliest(scores)
        history[present, at] = tokens
        yield (tokens if live.all() else np.where(live, history[:, at], config.filler)), live
        if stoppers:
            live = live.copy()  # the yielded array belongs to its receiver
            for i in np.flatnonzero(live):
                live[i] = not stoppers[i].put(int(history[i, at]))
            # Ended rows leave the batch, so that later steps compute only the others.
            keep = np.flatnonzero(live[present])
            if not len(keep):
                return
            state.select(keep)
            present, tokens = present[keep], tokens[keep]
        if at + 1 < n + limit:
            state.extend(tokens)
    for number in numbers[live]:
        warn_of_end(config, int(number), limit)


def _generators(seed: int | None, numbers: NDArray[np.int64]) -> list[np.random.Generator]:
    """Return a generator of each row, by its number in the call: what a row draws depends on no other row."""
    # Seeded by the number of the row too, so that its text does not depend on the rows that are generated with it.
    return [np.random.default_rng(None if seed is None else [seed, int(n)]) for n in numbers]


def as_result(prompts: Any, added: Sequence[Ids], filler: int, times: int) -> Any:
    """Return the prompts with their added tokens: an array with filler for an array, else a list of rows.

    The prompts of sources are their `decoder_input_ids`, if prompts_, in the form of the sources.
    """
    if isinstance(prompts, Mapping):
        rows, start = next(v for n, v in prompts.items() if n != START and v is not None), prompts.get(START)
        if start is None:
            start = np.empty((len(rows), 0), np.int64)
        return as_result(np.asarray(start) if isinstance(rows, np.ndarray) else list(start), added, filler, times)
    if not isinstance(prompts, np.ndarray):
        prompts_ = [np.asarray(p, np.int64) for p in prompts for _ in range(times)]
        return [np.concatenate(pair) for pair in zip(prompts_, added, strict=True)]
    longest = max((len(r) for r in added), default=0)
    filled = np.full((len(added), longest), filler, np.int64)
    for at, row in zip(filled, added):
        at[: len(row)] = row
    return np.concatenate([np.repeat(prompts.astype(np.int64), times, axis=0), filled], axis=1)
