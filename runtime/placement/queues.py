"""Queues of work, one a device: in order, done by whoever waits for it, or by a thread beside.

Waking a thread takes longer than many a kernel. So the caller that needs a result does the work before it, and a thread is woken
only for work of another device that can begin at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any


class Work:
    """A piece of work in a queue. `needs`: the work whose results it reads, which was put into its queue before."""

    __slots__ = ("_do", "_future", "needs", "queue")

    def __init__(self, queue: WorkQueue, do: Callable[[], Any], needs: Sequence[Work]) -> None:
        self.queue, self._do, self.needs = queue, do, needs
        self._future: Future[Any] = Future()

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def ready(self) -> bool:
        """True if it can begin without waiting for other work."""
        return all(w.done for w in self.needs)

    def result(self) -> Any:
        """Return the result, and do what is before it unless others do. Raises the error of the work."""
        self.end()
        return self._future.result()

    def end(self) -> None:
        """Wait until it is done, well or not."""
        if not self.done and not self.queue.help(self):
            self._future.exception()

    def run(self) -> None:
        """Do it. An interruption is raised here too."""
        try:
            self._future.set_result(self._do())
        except BaseException as error:
            self._future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._do, self.needs = _nothing, ()


class WorkQueue:
    """The work of a device, in order. Work reads only what was put into a queue before it, so no two wait for each other.

    all_: the queues beside which it works, itself among them
    """

    def __init__(self, name: str, all_: Collection[WorkQueue]) -> None:
        self._name, self._all = name, all_
        self._waiting: deque[Work] = deque()
        self._turn = threading.Lock()  # held by who does the work
        self._starting = threading.Lock()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False

    def put(self, do: Callable[[], Any], needs: Sequence[Work]) -> Work:
        """Add work behind all other."""
        work = Work(self, do, needs)
        self._waiting.append(work)
        return work

    def help(self, until: Work) -> bool:
        """Do the work up to a piece of it. Returns False where somebody else does it."""
        if not self._turn.acquire(blocking=False):
            self.wake()  # whoever has the turn may stop before that piece
            return False
        try:
            while not until.done:
                work = self._waiting.popleft()
                if work.ready:
                    self._share()
                work.run()
        finally:
            self._turn.release()
            if self._waiting:
                self.wake()
        return True

    def _share(self) -> None:
        """Wake the threads of other queues whose work can begin."""
        for q in tuple(self._all):
            if q is not self:
                q.wake_if_ready()

    def wake_if_ready(self) -> None:
        """Wake the thread if nobody does the work and it can begin."""
        try:
            first = self._waiting[0]
        except IndexError:
            return
        if first.ready and not self._turn.locked():
            self.wake()

    def wake(self) -> None:
        """Have the thread do the work."""
        with self._starting:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._serve, name=f"relax-tune-{self._name}", daemon=True)
                self._thread.start()
        self._wanted.set()

    def _serve(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            with self._turn:
                while self._waiting:
                    with contextlib.suppress(BaseException):  # who waits for the work raises it
                        self._waiting.popleft().run()
            if self._ended:
                return

    def close(self) -> None:
        """End the thread once the work is done."""
        with self._starting:
            self._ended = True
        self._wanted.set()


def _nothing() -> None:
    """Stand for work that is done, whose arguments are free to go."""
