"""Texts of a decoder with paged caches, many at a time: each gets the tokens that single ones get.

Tests: `tests/tuner/emit/test_paged.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.generation.blocks import BlockPool
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.decoder import bounds
from relax_tune.runtime.generation.logits import LogitsProcessor, draw, needs_processing, process_logits, take_likeliest
from relax_tune.runtime.generation.scheduler import Chunk, Scheduler, StepLimits, Text
from relax_tune.runtime.generation.stopping import Stopper, StopRules
from relax_tune.runtime.model import Model

STEP = "step"
"""The function of a decoder with paged caches (`ir/frontend/hf/folder`)."""
PLACES = 5
"""Inputs of the function before the pools: token ids, texts and positions of tokens, last tokens, tables."""
UNBOUNDED = 1 << 20


@dataclass(eq=False)
class GeneratedText(Text):
    """A text with the settings of its tokens.

    Attributes:
        prompt: Number of tokens of the prompt.
        limit: Number of tokens that are added at most.
        ended: No more tokens are added.
        stopped: Its last token ends it.
        error: Why no token could be chosen.
    """

    prompt: int = 0
    limit: int = 0
    config: GenerationConfig = field(default_factory=GenerationConfig)
    custom: LogitsProcessor | None = None
    stopper: Stopper | None = None
    generator: np.random.Generator | None = None
    ended: bool = False
    stopped: bool = False
    error: UserError | None = None

    @property
    def added(self) -> int:
        """Number of tokens behind the prompt."""
        return len(self.tokens) - self.prompt

    @cached_property
    def plain(self) -> bool:
        """Whether the next token is the likeliest one by the model's own logits."""
        return self.generator is None and not needs_processing(self.config, self.custom)

    def choose(self, scores: NDArray[np.float32]) -> int:
        """Return the next token by its logits (1, vocabulary)."""
        if not self.plain:
            history = np.asarray(self.tokens, np.int64)[None]
            last = self.added + 1 == self.limit
            scores = process_logits(self.config, history, scores, self.added, self.custom, last)
        chosen = take_likeliest(scores) if self.generator is None else draw(scores, [self.generator])
        return int(chosen[0])

    def put(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)
        self.stopped = self.stopper is not None and self.stopper.put(token)
        self.ended = self.stopped or self.added >= self.limit


@dataclass(frozen=True)
class PagedStep:
    """What a step computed.

    Attributes:
        texts: The ones with a new token, or an error.
        requests: Number of texts that were computed together.
        rows: Number of tokens that were computed.
    """

    texts: list[GeneratedText]
    requests: int
    rows: int


class PagedDecoder:
    """The texts of a model with paged caches, which share its pools. One thread uses it at a time.

    Args:
        model: `step(input_ids (t,), requests (t,), positions (t,), last (r,), tables (r, w), *pools) -> (logits (r, vocabulary), *pools)`.
        tokens: Number of tokens of all texts that the pools have blocks for; by default as many as the model takes.

    Raises:
        UserError: The model lacks the function, or its number of blocks is not bounded.
    """

    def __init__(self, model: Model, tokens: int | None = None) -> None:
        if STEP not in model.functions:
            raise UserError(
                f"expected a model with the function {STEP}, got {', '.join(model.functions)}; build a decoder with paged caches"
            )
        program = model.executors[STEP].program
        specs = [program.buffers[i] for i in program.inputs]
        least, most = zip(*(bounds(program, slot) for slot in (specs[0].shape[0], *specs[4].shape, specs[5].shape[0])))
        size, *rest = (bounds(program, slot)[0] for slot in specs[PLACES].shape[1:])
        count = most[3]
        if tokens is not None:
            needed = max(tokens // size + 1, least[3])
            count = needed if count is None else min(needed, count)
        if count is None:
            raise UserError("p: expected an upper bound, the number of blocks of the pools; build the model with one")
        t, r, w = (UNBOUNDED if n is None else n for n in most[:3])
        limits = StepLimits(t, r, w * size, size)
        self.scheduler: Scheduler[GeneratedText] = Scheduler(BlockPool(count), limits)
        pools = {s.name: np.zeros((count, size, *rest), np.dtype(s.dtype)) for s in specs[PLACES:]}
        self._session = model.session(pools, STEP, {name: 1 + at for at, name in enumerate(pools)})

    @property
    def room(self) -> int:
        """Most tokens of a prompt."""
        return self.scheduler.room

    def text(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        rules: StopRules,
        custom: LogitsProcessor | None = None,
        number: int = 0,
    ) -> GeneratedText:
        """Return a text that is not computed yet.

        Args:
            prompt: Its first tokens.
            config, rules: Its settings.
            custom: Changes its logits.
            number: Of the text in its request, which decides what it draws.

        Raises:
            UserError: The prompt is empty or has more tokens than a text may have.
        """
        if not 0 < len(prompt) <= self.room:
            raise UserError(
                f"prompts: expected 1 to {self.room} tokens, got {len(prompt)}; build it with a larger bound of w"
            )
        seed = None if config.seed is None else [config.seed, number]
        # the last token is never an input
        limit = min(config.max_new_tokens, self.room - len(prompt) + 1)
        return GeneratedText(
            [int(t) for t in prompt],
            prompt=len(prompt),
            limit=limit,
            config=config,
            custom=custom,
            stopper=Stopper(rules, list(prompt)) if config.may_stop else None,
            generator=np.random.default_rng(seed) if config.do_sample else None,
            ended=not limit,
        )

    def add(self, text: GeneratedText) -> None:
        """Let a text wait for its turn."""
        if not text.ended:
            self.scheduler.add(text)

    def cancel(self, text: GeneratedText) -> None:
        """Let a text end now."""
        text.ended = True
        self.scheduler.remove(text)

    def step(self) -> PagedStep | None:
        """Compute one step; None if no text is left.

        Raises:
            RelaxTuneError: As `Model.run`. No text has changed.
        """
        chunks = self.scheduler.plan()
        if not chunks:
            return None
        logits = self._compute(chunks)
        self.scheduler.finish(chunks)
        # the others have parts of their prompts to be computed
        complete = [(text, row) for row, (text, _) in enumerate(chunks) if not text.pending]
        return PagedStep(self._extend(complete, logits), len(chunks), sum(count for _, count in chunks))

    def _compute(self, chunks: Sequence[Chunk[GeneratedText]]) -> NDArray[np.float32]:
        """Return the logits after the last token of each chunk, (r, vocabulary)."""
        counts = np.array([count for _, count in chunks])
        ids = [token for text, count in chunks for token in text.tokens[text.cached : text.cached + count]]
        positions = np.concatenate([np.arange(text.cached, text.cached + count) for text, count in chunks])
        tables = np.zeros((len(chunks), max(len(text.blocks) for text, _ in chunks)), np.int64)
        for row, (text, _) in zip(tables, chunks):
            row[: len(text.blocks)] = text.blocks
        requests = np.repeat(np.arange(len(chunks)), counts)
        (logits,) = self._session.run([np.array(ids, np.int64), requests, positions, np.cumsum(counts) - 1, tables])
        return np.asarray(logits, np.float32)

    def _extend(self, rows: Sequence[tuple[GeneratedText, int]], logits: NDArray[np.float32]) -> list[GeneratedText]:
        """Choose the next token of texts, each by a row of the logits."""
        # One call of NumPy for all texts: while the host chooses tokens, the device waits.
        likeliest = logits.argmax(-1)
        possible = logits[np.arange(len(logits)), likeliest] > -np.inf  # false for NaN too, which argmax prefers
        for text, row in rows:
            try:
                simple = text.plain and possible[row]
                text.put(int(likeliest[row]) if simple else text.choose(logits[row : row + 1]))
            except UserError as error:  # of this text only
                text.error, text.ended = error, True
            if text.ended:
                self.scheduler.remove(text)
        return [text for text, _ in rows]

    def close(self) -> None:
        """Free the pools. May be called twice."""
        self._session.close()


def paged_steps(
    decoder: PagedDecoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    rules: StopRules,
    custom: LogitsProcessor | None = None,
) -> Iterator[list[GeneratedText]]:
    """Yield the texts of prompts after each step in which some of them got a token; the first list has all of them, without one.

    Closing it cancels the texts.

    Raises:
        UserError: A prompt does not fit, or no token can be chosen.
    """
    texts = [decoder.text(prompt, config, rules, custom, number) for number, prompt in enumerate(prompts)]
    try:
        for text in texts:
            decoder.add(text)
        yield texts
        while any(not text.ended for text in texts):
            step = decoder.step()
            assert step is not None
            for text in step.texts:
                if text.error is not None:
                    raise text.error
            if step.texts:
                yield step.texts
    finally:
        for text in texts:
            decoder.cancel(text)
