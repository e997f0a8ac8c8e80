"""Beam search, with the rules of transformers about scores and ends.

Tests: `tests/tuner/emit/test_generate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.logits import log_softmax, no_choice, process_logits
from relax_tune.runtime.generation.rows import Request, warn_of_end

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
ZERO = np.float32(0.0)
NEVER = np.float32(-1e9)
"""Added to the score of a token that must not be chosen. float32 then loses all digits of the score, as in transformers."""


@dataclass(frozen=True)
class Hypothesis:
    """A result of beam search.

    Attributes:
        tokens: The added tokens, (added,) i64.
        score: Sum of their log-probabilities, divided by their number to the power `length_penalty`.
    """

    tokens: Ids
    score: float


class RowBeams:
    """The beams of one prompt: the running ones, and the best `num_beams` ended ones.

    Attributes:
        ids: (num_beams, length) tokens of the running beams, with the prompt.
        done: Whether the search has ended.
    """

    def __init__(self, request: Request, prompt: Ids, limit: int, generator: np.random.Generator | None) -> None:
        self._config, self._rules = request.config, request.rules
        self._prompt, self._limit, self._generator = prompt.tolist(), limit, generator
        k = self._config.num_beams
        self.ids = np.repeat(prompt[None], k, axis=0)
        self._scores = np.full(k, NEVER, np.float32)
        self._scores[0] = 0.0  # the beams are equal at first, and only one is counted
        self._ended = np.full(k, NEVER, np.float32)
        self._texts: list[Ids | None] = [None] * k
        self.done = False
        self._improvable = True

    @property
    def added(self) -> int:
        """The number of tokens added so far."""
        return int(self.ids.shape[1]) - len(self._prompt)

    def step(self, log_probs: Floats) -> tuple[Ids, Ids]:
        """Choose the beams that go on: the place of the beam that each continues, and its new token; (num_beams,) both.

        Args:
            log_probs: (num_beams, vocabulary) of the next token, processed.
        """
        config = self._config
        k, size = log_probs.shape
        total = (log_probs + self._scores[:, None]).reshape(-1)
        # Of the candidates of a beam, at most one for each end token ends, so that k others remain, as in
        # transformers.
        candidates = min(max(2, 1 + len(config.eos_ids)) * k, len(total))
        # The k best of all continuations of all beams: a good beam may go on several times, a bad one not at all.
        chosen = largest(total if self._generator is None else total + _gumbel(self._generator, len(total)), candidates)
        scores, beams, tokens = total[chosen], chosen // size, chosen % size
        added = self.added + 1
        # At the limit every text ends, with or without an end token.
        ended = np.full(candidates, added == self._limit)
        if added < self._limit and config.may_stop:
            texts = [[*self.ids[b, len(self._prompt) :].tolist(), int(t)] for b, t in zip(beams, tokens)]
            ended = np.array([self._rules.ends(self._prompt, text) for text in texts])
        running = scores + np.where(ended, NEVER, ZERO)
        continued = largest(running, k)
        self._end(scores, beams, tokens, ended)
        self._scores = running[continued]
        self.ids = np.concatenate([self.ids[beams[continued]], tokens[continued, None]], axis=1)
        self._judge(bool(ended.all()))
        return beams[continued], tokens[continued]

    def _end(self, scores: Floats, beams: Ids, tokens: Ids, ended: NDArray[np.bool_]) -> None:
        """Merge the texts that end in this step, among the first `num_beams`, with the best of the earlier ones."""
        config, k = self._config, len(self.ids)
        # Each token adds a negative logarithm: without the division short texts would always win.
        final = scores / np.float32((self.added + 1) ** config.length_penalty)
        # A text that ends counts only if it is among the k best candidates, as in transformers.
        counted = ended & (np.arange(len(ended)) < k)
        if (config.early_stopping is True and self._full) or not self._improvable:
            final = final + NEVER
        final = final + np.where(counted, ZERO, NEVER)
        merged = np.concatenate([self._ended, final])
        texts: list[Ids | None] = list(self._texts)
        start = len(self._prompt)
        for b, t, c in zip(beams, tokens, counted):
            texts.append(np.append(self.ids[b, start:], t) if c else None)
        best = largest(merged, k)
        self._ended, self._texts = merged[best], [texts[i] for i in best]

    @property
    def _full(self) -> bool:
        return all(text is not None for text in self._texts)

    def _judge(self, hopeless: bool) -> None:
        """Decide whether the search has ended. hopeless: all continuations ended."""
        config = self._config
        longest = config.early_stopping == "never" and config.length_penalty > 0.0
        # With a positive penalty a running text may still improve by getting longer, so "never" assumes the greatest
        # length.
        length = self._limit if longest else self.added
        hope = self._scores[0] / np.float32(length**config.length_penalty)
        worst = self._ended.min() if self._full else NEVER
        self._improvable = self._improvable and bool(hope > worst)
        self.done = not self._improvable or hopeless or (config.early_stopping is True and self._full)

    def results(self) -> list[Hypothesis]:
        """Return the best results, best first."""
        ended = zip(self._texts, self._ended)
        hypotheses = [Hypothesis(text, float(score)) for text, score in ended if text is not None]
        return hypotheses[: self._config.num_return_sequences]


def search_group(request: Request, numbers: Ids) -> list[list[Hypothesis]]:
    """Search the best continuations of prompts of equal length.

    Before each step the caches are copied in the order of the beams that go on, on the host: once their size, about as much
    memory traffic as reading them for the step's attention. Prompts whose search has ended leave the batch.
    """
    config, decoder = request.config, request.decoder
    prompts = np.stack([request.prompt(n) for n in numbers])
    k, limit = config.num_beams, decoder.limit(prompts.shape[1], config.max_new_tokens)
    if not limit:
        return [[Hypothesis(np.empty(0, np.int64), 0.0)] * config.num_return_sequences for _ in numbers]
    drawn = config.do_sample
    rows = [RowBeams(request, p, limit, _generator(config, n) if drawn else None) for p, n in zip(prompts, numbers)]
    state = request.prefill(numbers)
    # The prompt is computed once for each row, and its caches are then repeated for the beams.
    state.select(np.repeat(np.arange(len(rows)), k))
    live = list(range(len(rows)))
    while True:
        history = np.concatenate([rows[i].ids for i in live])
        scores = log_softmax(state.logits)
        if np.isnan(scores).any():
            raise no_choice(state.logits, int(np.argmax(np.isnan(scores).any(1))))
        added = rows[live[0]].added
        scores = process_logits(config, history, scores, added, request.custom, added + 1 == limit)
        chosen = [rows[i].step(part) for i, part in zip(live, np.split(scores, len(live)))]
        unfinished = [at for at, i in enumerate(live) if not rows[i].done]
        if not unfinished:
            results = [row.results() for row in rows]
            for number, hypotheses in zip(numbers, results):
                if any(len(h.tokens) == limit and int(h.tokens[-1]) not in config.eos_ids for h in hypotheses):
                    warn_of_end(request.config, int(number), limit)
            return results
        state.select(np.concatenate([at * k + chosen[at][0] for at in unfinished]))
        state.extend(np.concatenate([chosen[at][1] for at in unfinished]))
        live = [live[at] for at in unfinished]


def _generator(config: GenerationConfig, number: int) -> np.random.Generator:
    # Seeded by the number of the row too, so that its text does not depend on the rows that are generated with it.
    return np.random.default_rng(None if config.seed is None else [config.seed, int(number)])


def _gumbel(generator: np.random.Generator, size: int) -> Floats:
    """Return noise whose addition makes the largest scores a sample without replacement (Kool et al. 2019)."""
    return generator.gumbel(size=size).astype(np.float32)


def largest(scores: Floats, count: int) -> Ids:
    """Return the places of the largest scores, in descending order; the first of equal ones first."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        # A partition is linear in the vocabulary; only the few places that remain are sorted.
        places = np.flatnonzero(scores >= least)
    else:
        places = np.arange(len(scores))
    return places[np.argsort(-scores[places], kind="stable")][:count]
