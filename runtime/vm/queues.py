"""Work queues, one per device: work runs in order, in the thread of a waiting caller or in the queue's own thread.

Waking a thread takes longer than many kernels. So a caller that needs a result runs the work that precedes it, and a thread is
woken only for work of another device that can start immediately.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any


class Work:
    """A piece of work in a queue.

    Attributes:
        needs: The work whose results it reads; each was put into its queue earlier.
    """

    __slots__ = ("_do", "_future", "needs", "queue")

    def __init__(self, queue: WorkQueue, do: Callable[[], Any], needs: Sequence[Work]) -> None:
        self.queue, self._do, self.needs = queue, do, needs
        self._future: Future[Any] = Future()

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def ready(self) -> bool:
        """Whether it can start without waiting for other work."""
        return all(w.done for w in self.needs)

    def result(self) -> Any:
        """Wait for the result. Raises the error of the work."""
        self.wait()
        return self._future.result()

    def wait(self) -> None:
        """Wait until the work has succeeded or failed, running what precedes it unless another thread does."""
        if not self.done and not self.queue.run_until(self):
            self._future.exception()

    def run(self) -> None:
        """Run it in this thread. An interruption (`KeyboardInterrupt`) is raised here as well as in the waiting callers."""
        try:
            self._future.set_result(self._do())
        except BaseException as error:
            # Complete the future in every case, since other threads wait for it.
            self._future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._do, self.needs = _nothing, ()  # frees the arguments


class WorkQueue:
    """The work of a device, in order.

    Work reads only results of work that was put into a queue before it, so no two pieces wait for each other.

    Args:
        name: Name of the device, for the thread's name.
        queues: All queues that run at the same time, this one included.
    """

    def __init__(self, name: str, queues: Collection[WorkQueue]) -> None:
        self._name, self._queues = name, queues
        # `append` and `popleft` of a deque are atomic (Python's reference), so no lock guards it.
        self._waiting: deque[Work] = deque()
        self._turn = threading.Lock()  # the thread that runs work of this queue has it
        self._starting = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, do: Callable[[], Any], needs: Sequence[Work]) -> Work:
        """Append work."""
        work = Work(self, do, needs)
        self._waiting.append(work)
        return work

    def run_until(self, last: Work) -> bool:
        """Run the work up to and including `last` in this thread. Returns False if another thread runs it."""
        if not self._turn.acquire(blocking=False):
            self.wake()  # the thread that has the turn may stop before `last`
            return False
        try:
            # `last` stays in the queue until the thread that has the turn takes it, so the queue is not empty here.
            while not last.done:
                work = self._waiting.popleft()
                if work.ready:
                    self._wake_others()
                work.run()
        finally:
            self._turn.release()
            if self._waiting:
                # Work behind `last` has no caller that waits for it yet.
                self.wake()
        return True

    def _wake_others(self) -> None:
        """Wake the threads of other queues whose work can start."""
        for q in tuple(self._queues):
            if q is not self:
                q.wake_if_ready()

    def wake_if_ready(self) -> None:
        """Wake the thread if no thread runs the work and its first piece can start."""
        try:
            # Another thread may take the last piece at any time: a test of the length before would prove nothing.
            first = self._waiting[0]
        except IndexError:
            return
        if first.ready and not self._turn.locked():
            self.wake()

    def wake(self) -> None:
        """Have the queue's thread run the work."""
        with self._starting:
            # A thread that starts after `close` would wait for ever: nothing sets its event again.
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name=f"relax-tune-{self._name}", daemon=True)
                self._thread.start()
        self._wake.set()

    def _serve(self) -> None:
        while True:
            self._wake.wait()
            # Cleared before the queue is read, so that work that is put meanwhile wakes the thread again.
            self._wake.clear()
            with self._turn:
                while self._waiting:
                    with contextlib.suppress(BaseException):  # the caller that waits for the work raises it
                        self._waiting.popleft().run()
            if self._closed:
                return

    def close(self) -> None:
        """End the thread after the work that is queued."""
        with self._starting:
            self._closed = True
        self._wake.set()


def _nothing() -> None:
    """Replace the function of finished work, whose arguments can then be freed."""


class Pending:
    """A value that a queue computes.

    Attributes:
        work: The work that computes it.
        device: Kind of the device that will have it.
        versions: The same value on other devices, by kind; each is copied once.
    """

    __slots__ = ("_index", "device", "versions", "work")

    def __init__(self, work: Work, device: str, index: int | None = None) -> None:
        self.work, self._index, self.device = work, index, device
        self.versions: dict[str, Pending] = {}

    def value(self) -> Any:
        """Wait for the value. Raises the error of the work."""
        result = self.work.result()
        return result if self._index is None else result[self._index]
