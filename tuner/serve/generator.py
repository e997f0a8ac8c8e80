"""Texts that a decoder continues, token by token: the device is free for other requests between tokens.

Tests: `tests/tuner/serve/test_openai.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_tune.errors import UserError
from relax_tune.runtime.generate import generate_steps
from relax_tune.runtime.generation.config import GenerationConfig, read_token_ids
from relax_tune.runtime.generation.decoder import Decoder
from relax_tune.runtime.generation.detokenizer import IncrementalDetokenizer
from relax_tune.runtime.model import Model
from relax_tune.tuner.serve.batcher import DeviceTurn
from relax_tune.tuner.serve.metrics import Labels, Metrics
from relax_tune.tuner.serve.tensors import RequestError
from relax_tune.tuner.serve.texts import ChatTemplate
from relax_tune.tuner.text.tokens import open_tokenizer, read_tokens

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token adds to a text.

    Attributes:
        row: Number of the text.
        text: The characters that are certain now.
        tokens: Number of tokens behind it.
        finish: Why the text ends with it; None if it goes on.
    """

    row: int
    text: str
    tokens: int
    finish: Finish | None = None


class Generator:
    """A decoder with the tokenizer of its folder.

    Attributes:
        room: Most tokens of a prompt; None: any number.

    Raises:
        UserError: The folder has no tokenizer, or the model is no decoder.
    """

    def __init__(self, model: Model, folder: Path, turn: DeviceTurn, metrics: Metrics, labels: Labels) -> None:
        self.room, self._model = self._open(model, folder), model
        self._tokenizer = open_tokenizer(folder)
        self._ids = read_token_ids(folder)
        self.template = ChatTemplate(folder)
        self._turn, self._metrics, self._labels = turn, metrics, labels

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text. special: with the tokens that the tokenizer adds to a text"""
        return list(read_tokens(self._tokenizer, [text], special)[0].ids)

    def _open(self, model: Model, folder: Path) -> int | None:
        """Check the model; return the most tokens of a prompt."""
        decoder = Decoder(model)
        if decoder.sources:
            raise UserError(f"{folder}: expected a decoder, got an encoder-decoder; serve it without --model")
        return None if decoder.room is None else decoder.room + 1

    def config(self, **settings: Any) -> GenerationConfig:
        """Return settings of generation with the ids of the folder. Raises UserError for a wrong value."""
        return GenerationConfig(**{**self._ids, **settings})

    async def pieces(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> AsyncGenerator[Piece, None]:
        """Yield what each token adds to the texts, `config.num_return_sequences` for each prompt. Closing it ends the generation.

        Raises:
            UserError: A prompt does not fit the model.
        """
        if config.max_new_tokens == 0:
            for row in range(len(prompts) * config.num_return_sequences):
                yield Piece(row, "", 0, "length")
            return
        rows = [list(p) for p in prompts for _ in range(config.num_return_sequences)]
        texts = [IncrementalDetokenizer(self._tokenizer, ids, config.stop_strings) for ids in rows]
        counts, ended = [0] * len(rows), [False] * len(rows)
        async with aclosing(self._tokens(prompts, config)) as steps:
            async for step in steps:
                for row, token in ((row, token) for row, token in step if not ended[row]):
                    counts[row] += 1
                    at_end = token in config.eos_ids
                    text = "" if at_end else texts[row].put(token)
                    if at_end or texts[row].stopped:
                        ended[row] = True
                        yield Piece(row, text + ("" if texts[row].stopped else texts[row].end()), 1, "stop")
                    elif counts[row] == config.max_new_tokens:
                        ended[row] = True
                        yield Piece(row, text + texts[row].end(), 1, "length")
                    else:
                        yield Piece(row, text, 1)
            for row in (r for r in range(len(rows)) if not ended[r]):  # the model has no more positions
                yield Piece(row, texts[row].end(), 0, "length")

    async def _tokens(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> AsyncGenerator[list[tuple[int, int]], None]:
        """Yield rows and their next tokens, step by step, until all rows have ended."""
        steps = generate_steps(self._model, [list(p) for p in prompts], config=config, tokenizer=self._tokenizer)
        try:
            while True:
                start = time.perf_counter()
                step = await self._turn.call(partial(next, steps, None))
                if step is None:
                    return
                live = [(int(row), int(step.tokens[row])) for row in np.flatnonzero(step.live)]
                self._metrics.tokens(self._labels, len(live), time.perf_counter() - start)
                yield live
        finally:
            # The step that runs uses the generator; its memory is freed in the same thread.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.ensure_future(self._turn.call(steps.close)))  # type: ignore[attr-defined]

    async def close(self) -> None:
        """End all texts, before the turn of the device is closed."""

    def check(self, ids: Sequence[int], where: str) -> None:
        """Raise RequestError for a prompt that has no tokens, too many, or ids that the model does not have."""
        if not ids:
            raise RequestError(f"{where}: expected at least one token, got none")
        if self.room is not None and len(ids) > self.room:
            raise RequestError(
                f"{where}: expected at most {self.room} tokens, the positions of the model, got {len(ids)}"
            )
