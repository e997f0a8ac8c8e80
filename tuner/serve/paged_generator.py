"""Texts of all requests over one pool of keys and values: they join and leave between the steps of one decoder.

Tests: `tests/tuner/serve/test_paged.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path

from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.paged import GeneratedText, PagedDecoder, PagedStep
from relax_tune.runtime.generation.stopping import StopRules
from relax_tune.runtime.model import Model
from relax_tune.tuner.serve.generator import Generator

Events = asyncio.Queue["tuple[int, int] | BaseException"]
"""Rows of a request with their next tokens, or why there are none."""


class PagedGenerator(Generator):
    """A decoder with paged caches, with the tokenizer of its folder.

    The scheduler belongs to the thread of the device. Arrivals and cancellations of the event loop wait in `_changes` for the next step.
    """

    def _open(self, model: Model, folder: Path) -> int | None:
        self.decoder = PagedDecoder(model)
        self._changes: deque[Callable[[], None]] = deque()
        self._events: dict[GeneratedText, tuple[int, Events]] = {}
        self._task: asyncio.Task[None] | None = None
        return self.decoder.room

    async def _tokens(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> AsyncGenerator[list[tuple[int, int]], None]:
        rules, events = StopRules(config, self._tokenizer), Events()
        rows = [prompt for prompt in prompts for _ in range(config.num_return_sequences)]
        texts = [self.decoder.text(prompt, config, rules, number=row) for row, prompt in enumerate(rows)]
        try:
            for row, text in enumerate(texts):
                self._events[text] = row, events
                self._changes.append(partial(self.decoder.add, text))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._work())
            while any(text in self._events for text in texts) or not events.empty():
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield [event]
        finally:
            for text in texts:
                if self._events.pop(text, None) is not None:
                    self._changes.append(partial(self.decoder.cancel, text))

    async def _work(self) -> None:
        """Compute steps while there are texts."""
        while self._events or self._changes:
            start = time.perf_counter()
            try:
                step = await self._turn.call(self._step)
            except Exception as error:  # of the device: every text ends
                for text in list(self._events):
                    self._tell(text, error)
                    self._changes.append(partial(self.decoder.cancel, text))
                continue
            if step is None:
                continue
            self._metrics.batch(self._labels, step.requests, step.rows, time.perf_counter() - start)
            self._metrics.tokens(self._labels, sum(text.error is None for text in step.texts), 0.0)
            for text in step.texts:
                self._tell(text, text.error)

    def _step(self) -> PagedStep | None:
        """Apply what has changed and compute a step, in the thread of the device."""
        while self._changes:
            self._changes.popleft()()
        return self.decoder.step()

    def _tell(self, text: GeneratedText, error: Exception | None) -> None:
        """Tell the request of a text its new token, or an error. The request may have gone."""
        if text not in self._events:
            return
        row, events = self._events[text]
        events.put_nowait((row, text.tokens[-1]) if error is None else error)
        if text.ended or error is not None:
            del self._events[text]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._turn.call(self.decoder.close)
