"""Streams: items through stages that work side by side, with bounded queues between them.

Each stage has a thread and handles one item after the other, in order. A full queue stops the stage before it
(back-pressure), so a fast source runs no further ahead than the queues are deep.

Tests: `tests/runtime/test_stream.py`.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.after_fork import watch

T = TypeVar("T")
U = TypeVar("U")
Stage = Callable[[Any], Any]

_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a stream. error: why it ends early; None after the last item"""

    error: BaseException | None = None


class _Queue:
    """A queue of at most `depth` items between two threads, which either of them may cancel."""

    def __init__(self, depth: int) -> None:
        self._depth, self._items = depth, deque[Any]()
        self._changed = threading.Condition()
        self._cancelled = False

    def put(self, item: object) -> bool:
        """Add an item when there is room. Returns False once the queue is cancelled."""
        with self._changed:
            # the end takes no room, so it never waits for a reader that has gone
            while not self._cancelled and len(self._items) >= self._depth and not isinstance(item, _End):
                self._changed.wait()
            if not self._cancelled:
                self._items.append(item)
                self._changed.notify_all()
            return not self._cancelled

    def get(self) -> Any:
        """Take the next item. Returns an `_End` once the queue is cancelled."""
        with self._changed:
            while not self._cancelled and not self._items:
                self._changed.wait()
            if self._cancelled:
                return _End()
            self._changed.notify_all()
            return self._items.popleft()

    def cancel(self) -> None:
        """Drop all items, and wake both sides."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()


def _read(source: Iterator[Any], into: _Queue) -> None:
    """Put the items of a source into the first queue, until it ends, fails or is cancelled; then close it."""
    error: BaseException | None = None
    try:
        for item in source:
            if not into.put(item):
                break
    except BaseException as raised:
        error = raised
    if isinstance(source, Generator):
        try:
            source.close()
        except BaseException as raised:
            error = error or raised
    into.put(_End(error))


def _work(stage: Stage, taken: _Queue, into: _Queue) -> None:
    """Put the results of a stage into the next queue, in order, until the stream ends or an item fails."""
    while True:
        item = taken.get()
        if isinstance(item, _End):
            into.put(item)
            return
        try:
            result = stage(item)
        except BaseException as error:
            into.put(_End(error))
            break
        del item  # frees its memory before waiting for the next one
        if not into.put(result):
            break
        del result
    taken.cancel()


class Stream(Generic[T]):
    """An iterator over the results of a source's items, stage by stage. Also a context manager.

    Nothing is read before the first result is asked for. Results come in the order of the items, each once. When the source or a
    stage raises, all results before that item come first, then the error is raised, then the stream is at its end.

    `close` cancels: items on their way are dropped, running stages end their item, and a generator that is the source is closed.
    Leaving the `with` block closes, and so does dropping the last reference.

    One thread iterates. The items must not change before their results are there.
    """

    def __init__(self, source: Iterable[Any], stages: Sequence[Stage], depth: int = 4) -> None:
        if type(depth) is not int or depth < 1:
            raise UserError(f"depth: expected a whole number of items, at least 1, got {depth!r:.80}")
        self._source, self._stages, self._depth = source, tuple(stages), depth
        self._queues: tuple[_Queue, ...] = ()
        self._threads: tuple[threading.Thread, ...] = ()
        self._state = "new"
        self._cancel: Callable[[], object] = lambda: None
        watch(self)

    def then(self, stage: Callable[[T], U]) -> Stream[U]:
        """Return a stream with one more stage, which takes this one's place. A stage may run another model on another device.

        Raises: UserError once this stream has begun."""
        if self._state != "new":
            raise UserError(f"stream: expected one that has not begun, got one that is {self._state}; add stages first")
        # Two streams over one source would each get some of its items.
        self._state = "part of another stream"
        return Stream(self._source, (*self._stages, stage), self._depth)

    def _begin(self) -> None:
        self._state = "running"
        queues = self._queues = tuple(_Queue(self._depth) for _ in range(len(self._stages) + 1))
        try:
            source = iter(self._source)
        except TypeError:
            self._state = "closed"
            raise UserError(
                f"stream: expected items to iterate over, got a {type(self._source).__name__}; give a list or a generator"
            ) from None
        name, context = f"relax-tune-stream-{next(_NUMBERS)}", contextvars.copy_context
        calls: list[tuple[Any, ...]] = [(_read, source, queues[0])]
        calls += [(_work, stage, *queues[k : k + 2]) for k, stage in enumerate(self._stages)]
        self._threads = tuple(
            threading.Thread(target=context().run, args=call, name=f"{name}.{k}", daemon=True)
            for k, call in enumerate(calls)
        )
        # Given the queues and not the stream, which a reference from here would keep alive for ever.
        self._cancel = weakref.finalize(self, _cancel_all, queues)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system has no room for another thread
            self._state = "closed"
            self._cancel()
            raise

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        if self._state == "new":
            self._begin()
        if self._state == "forked":
            raise ModelStateError(
                "stream: expected one of this process, got one of the process that forked it, which lacks its threads; make another"
            )
        if self._state == "part of another stream":
            raise UserError(
                "stream: expected the stream that `then` returned, got the one before it; iterate over that one"
            )
        if self._state == "closed":
            raise StopIteration
        item = self._queues[-1].get()
        if not isinstance(item, _End):
            return item  # type: ignore[no-any-return]
        self.close()
        if isinstance(item.error, StopIteration):  # from a stage: it would pass for the end
            raise RuntimeError("a stage of the stream raised StopIteration") from item.error
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Cancel, and wait for stages that run. A source that waits for its next item ends when that comes. May be called twice."""
        if self._state in ("closed", "forked"):
            return
        self._state = "closed"
        self._cancel()
        # The thread of the source is not joined, because the source may block for as long as it likes.
        for thread in self._threads[1:]:
            # A stage may close the stream that it works for.
            if thread is not threading.current_thread():
                thread.join()

    def after_fork(self) -> None:
        """Refuse this stream in a forked process, which lacks its threads."""
        if self._state == "running":
            self._state = "forked"

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cancel_all(queues: Sequence[_Queue]) -> None:
    for queue in queues:
        queue.cancel()
