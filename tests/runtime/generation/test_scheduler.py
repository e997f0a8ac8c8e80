"""Blocks and continuous batching without a device: a pool that remembers what each element was written for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tune.runtime.generation.blocks import BlockPool, block_key
from relax_tune.runtime.generation.scheduler import Chunk, Scheduler, StepLimits, Text


class Simulation:
    """Texts that get random tokens of a few kinds, over elements that hold the tokens that they were computed from."""

    def __init__(self, blocks: int, limits: StepLimits, seed: int) -> None:
        self.scheduler: Scheduler[Text] = Scheduler(BlockPool(blocks), limits)
        self.elements: dict[tuple[int, int], tuple[int, ...]] = {}
        self.rng = random.Random(seed)
        self.ends: dict[Text, int] = {}
        self.steps = 0

    def add(self, prompt: list[int], added: int) -> None:
        text = Text(list(prompt))
        self.ends[text] = min(len(prompt) + added, self.scheduler.room + 1)
        self.scheduler.add(text)

    def step(self) -> None:
        s, size = self.scheduler, self.scheduler.limits.size
        chunks = s.plan()
        assert chunks and sum(c.length for c in chunks) <= s.limits.tokens and len(chunks) <= s.limits.texts
        assert len({id(c.text) for c in chunks}) == len(chunks)
        self.check()
        for text, count in chunks:
            for at in range(text.cached, text.cached + count):
                block = text.blocks[at // size]
                assert s.pool.references[block] == 1  # others would see the write
                self.elements[block, at % size] = tuple(text.tokens[: at + 1])
        for text, count in chunks:
            self.check_read(text, text.cached + count)
        s.finish(chunks)
        self.check()
        for text, _ in chunks:
            self.check_read(text, text.cached)
            if not text.pending:
                text.tokens.append(self.rng.randrange(2))
                if len(text.tokens) >= self.ends[text]:
                    self.end(text)
        self.steps += 1

    def end(self, text: Text) -> None:
        self.scheduler.remove(text)
        del self.ends[text]
        assert not text.blocks

    def check_read(self, text: Text, count: int) -> None:
        """The first positions of a text have the keys of the text's own tokens."""
        size = self.scheduler.limits.size
        for at in range(count):
            assert self.elements[text.blocks[at // size], at % size] == tuple(text.tokens[: at + 1])

    def check(self) -> None:
        s, pool = self.scheduler, self.scheduler.pool
        used = Counter(block for text in s.running for block in text.blocks)
        assert [used[block] for block in range(pool.count)] == pool.references
        assert pool.free == sum(not n for n in pool.references)
        assert not any(text.blocks or text.cached for text in s.waiting)
        assert {*s.running, *s.waiting} == set(self.ends) and len(s.running) + len(s.waiting) == len(self.ends)
        for text in s.running:
            assert len(text.blocks) >= -(-text.cached // s.limits.size)


TEXTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 9)), max_size=9)


@given(TEXTS, st.integers(3, 9), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_scheduler_random_arrivals_read_right_keys_and_end(
    texts: list[tuple[list[int], int]], blocks: int, tokens: int, most: int, size: int, seed: int
) -> None:
    s = Simulation(blocks, StepLimits(tokens, most, 24, size), seed)
    arrivals = [(p[: s.scheduler.room], n) for p, n in texts]
    while arrivals or s.ends:
        while arrivals and (not s.ends or s.rng.random() < 0.4):
            s.add(*arrivals.pop())
        s.step()
        if s.ends and s.rng.random() < 0.1:
            s.end(s.rng.choice(list(s.ends)))
            s.check()
        assert s.steps < 2000
    assert s.scheduler.pool.free == blocks and not s.scheduler.plan()


def stepped(s: Scheduler[Text]) -> list[Chunk[Text]]:
    chunks = s.plan()
    s.finish(chunks)
    for text, _ in chunks:
        if not text.pending:
            text.tokens.append(0)
    return chunks


def test_scheduler_long_prompt_is_computed_in_parts() -> None:
    s: Scheduler[Text] = Scheduler(BlockPool(40), StepLimits(8, 4, 64, 4))
    first, second = Text([1, 2, 3]), Text(list(range(30)))
    s.add(first)
    assert [c.length for c in stepped(s)] == [3]
    s.add(second)
    counts = [[c.length for c in stepped(s)] for _ in range(6)]
    assert counts == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 2], [1, 1]]


def test_scheduler_equal_beginnings_are_stored_once() -> None:
    s: Scheduler[Text] = Scheduler(BlockPool(20), StepLimits(32, 4, 64, 4))
    prompt = list(range(11))
    texts = [Text([*prompt, 50 + n]) for n in range(3)]
    for text in texts[:2]:  # computed in one step
        s.add(text)
    assert [c.length for c in stepped(s)] == [12, 12]
    s.add(texts[2])
    assert [c.length for c in stepped(s)] == [1, 1, 4]  # the first two blocks are there
    assert len({text.blocks[0] for text in texts}) == len({text.blocks[1] for text in texts}) == 1
    assert len({text.blocks[2] for text in texts}) == 3
    assert s.pool.references[texts[0].blocks[0]] == 3
    for text in texts:
        s.remove(text)
    again = Text([*prompt, 50])
    s.add(again)  # free blocks keep their keys; the last token is computed in any case
    assert [c.length for c in stepped(s)] == [4] and s.pool.references[again.blocks[0]] == 1


def test_scheduler_without_blocks_preempts_the_last_text() -> None:
    s: Scheduler[Text] = Scheduler(BlockPool(4), StepLimits(16, 4, 64, 4))
    first, second = Text([1, 2, 3, 4, 5, 6, 7]), Text([7, 6, 5, 4, 3, 2, 1])
    s.add(first)
    s.add(second)
    counts = [[c.length for c in stepped(s)] for _ in range(3)]
    assert counts == [[7, 7], [1, 1], [1]] and s.preempted == 1
    assert not second.blocks and list(s.waiting) == [second] and len(second.tokens) == 9
    s.remove(first)
    assert [c.length for c in stepped(s)] == [5]  # its first block was still there


def test_pool_free_block_is_shared_until_taken() -> None:
    pool = BlockPool(2)
    key = block_key(b"", [1, 2])
    block = pool.take()
    assert pool.name(block, key) == block and pool.references[block] == 1
    pool.release(block)
    assert pool.free == 2 and pool.share(key) == block and pool.free == 1
    pool.release(block)
    assert {pool.take(), pool.take()} == {0, 1} and pool.share(key) is None
    assert key != block_key(b"", [2, 1]) != block_key(key, [2, 1])


@pytest.mark.parametrize("count", [1, 2])
def test_scheduler_text_removed_twice_frees_blocks_once(count: int) -> None:
    s: Scheduler[Text] = Scheduler(BlockPool(4), StepLimits(16, 4, 64, 4))
    text = Text([1, 2, 3])
    s.add(text)
    s.plan()
    for _ in range(count):
        s.remove(text)
    assert s.pool.free == 4
