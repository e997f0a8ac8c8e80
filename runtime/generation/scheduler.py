"""Continuous batching of texts over a pool of blocks: who computes how many tokens in the next step (Yu et al. 2022, Orca).

A text has tokens; the keys and values of its first `cached` tokens are in its blocks. A step computes a chunk of the others for each
of several texts: the one new token of a text that is generated, and parts of prompts (Agrawal et al. 2023, chunked prefill). Texts join
and leave between steps. Plain Python without a device.

Tests: `tests/runtime/generation/test_scheduler.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from relax_tune.runtime.generation.blocks import BlockPool, block_key

START = b""
"""Key of what is before the first block."""


@dataclass(eq=False)
class Text:
    """A text that is computed.

    Attributes:
        tokens: Of the prompt, then the ones that were added.
        blocks: Numbers of its blocks, in order.
        cached: Number of tokens whose keys and values are in the blocks.
        keys: Of its first full blocks that have one.
    """

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    keys: list[bytes] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Number of tokens that are to be computed."""
        return len(self.tokens) - self.cached


T = TypeVar("T", bound=Text)


class Chunk(NamedTuple, Generic[T]):
    """The next `length` pending tokens of a text."""

    text: T
    length: int


@dataclass(frozen=True)
class StepLimits:
    """What a step takes: tokens, texts, and positions of one text; `size` positions are a block."""

    tokens: int
    texts: int
    positions: int
    size: int


class Scheduler(Generic[T]):
    """The texts of a pool: the ones with blocks, in the order of their arrival, and the others, which wait.

    Where blocks run out, the text that came last loses its blocks and waits, to be computed again (Kwon et al. 2023, section 4.5). The
    first text always goes on, so that every text ends.

    Args:
        pool: The blocks; no other scheduler uses them.
        limits: What a step takes.
    """

    def __init__(self, pool: BlockPool, limits: StepLimits) -> None:
        self.pool, self.limits = pool, limits
        self.running: list[T] = []
        self.waiting: deque[T] = deque()
        self.preempted = 0

    @property
    def room(self) -> int:
        """Most tokens of a text that are computed: tables and the pool must have room for it without others."""
        return min(self.limits.positions, self.pool.count * self.limits.size)

    def add(self, text: T) -> None:
        """Let a text wait, behind the others."""
        self.waiting.append(text)

    def remove(self, text: T) -> None:
        """Forget a text and free its blocks. Does nothing for a text that is not there."""
        if text in self.waiting:
            self.waiting.remove(text)
        elif text in self.running:
            self.running.remove(text)
            self._clear(text)

    def plan(self) -> list[Chunk[T]]:
        """Choose the chunks of the next step, each with the blocks it needs; empty if no text has pending tokens."""
        chunks: list[Chunk[T]] = []
        # Texts that are generated need a token each in every step; prompts share what is left.
        prompts = self.limits.tokens - sum(t.pending == 1 for t in self.running)
        before = self.preempted
        for text in list(self.running):
            if text not in self.running:  # preempted by an earlier one
                continue
            count = min(text.pending, 1 if text.pending == 1 else prompts)
            if count and self._grow(text, count):
                prompts -= count if text.pending > 1 else 0
                chunks.append(Chunk(text, count))
        while self.waiting and prompts and len(self.running) < self._most and self.preempted == before:
            admitted = self._admit(min(prompts, self.limits.tokens))
            if admitted is None:
                break
            prompts -= admitted.length
            chunks.append(admitted)
        return chunks

    @property
    def _most(self) -> int:
        return min(self.limits.texts, self.limits.tokens)

    def finish(self, chunks: list[Chunk[T]]) -> None:
        """Note that the chunks of a plan were computed. Full blocks get their keys, and equal ones become one."""
        for text, count in chunks:
            text.cached += count
            size = self.limits.size
            for at in range(len(text.keys), text.cached // size):
                key = block_key(text.keys[-1] if at else START, text.tokens[at * size : (at + 1) * size])
                text.blocks[at] = self.pool.name(text.blocks[at], key)
                text.keys.append(key)

    def _grow(self, text: T, count: int) -> bool:
        """Give a running text the blocks for its next tokens, from later texts if need be. Returns False if it lost its own ones."""
        needed = self._blocks(text.cached + count) - len(text.blocks)
        while self.pool.free < needed:
            last = self.running.pop()
            self._clear(last)
            self.waiting.appendleft(last)
            self.preempted += 1
            if last is text:
                return False
        text.blocks += [self.pool.take() for _ in range(needed)]
        return True

    def _admit(self, most: int) -> Chunk[T] | None:
        """Let the first waiting text begin, behind the blocks of its beginning that exist; None if blocks are missing."""
        text, size = self.waiting[0], self.limits.size
        # The last token is computed in any case, for its logits.
        for at in range((len(text.tokens) - 1) // size):
            key = block_key(text.keys[-1] if at else START, text.tokens[at * size : (at + 1) * size])
            block = self.pool.share(key)
            if block is None:
                break
            text.blocks.append(block)
            text.keys.append(key)
        # With blocks for all its tokens and the next one, a prompt is not preempted soon after it was begun.
        needed = self._blocks(min(len(text.tokens) + 1, self.room)) - len(text.blocks)
        if self.pool.free < needed:
            self._clear(text)
            return None
        self.waiting.popleft()
        self.running.append(text)
        text.cached = len(text.keys) * size
        count = min(text.pending, most)
        self._grow(text, count)
        return Chunk(text, count)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.size)

    def _clear(self, text: T) -> None:
        # The last block first: it is taken again first, and the beginning of a text is what others share.
        for block in reversed(text.blocks):
            self.pool.release(block)
        text.blocks, text.keys, text.cached = [], [], 0
