"""A team of threads that sleep while idle, for host libraries on a device that has threads.

Two pools that spin between jobs compete for the processors. A sleeping pool instead costs a wake-up (about ten
microseconds) per job. Jobs are C function pointers, so they run without the interpreter's lock.

Tests: `tests/runtime/library/test_library.py`.
"""

from __future__ import annotations

import ctypes
import queue
import threading

Job = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
# OpenBLAS's threads callback: (synchronous, job, number of jobs, bytes of one job's data, data, argument)
RunJobs = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
)


class SleepingTeam:
    """A team that runs the jobs of one parallel section at a time. Jobs wait for one another, so each has its own
    thread.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[int, int, int, int]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._size = 0
        self.callback = RunJobs(self._run)
        """The callback for the library; the team must live as long as the library may call it."""

    def _run(self, _sync: int, job: int, count: int, step: int, data: int, argument: int) -> None:
        while self._size < count - 1:
            threading.Thread(target=self._work, name=f"library-{self._size}", daemon=True).start()
            self._size += 1
        for index in range(1, count):
            self._tasks.put((job, index, data + step * index, argument))
        if count > 0:
            Job(job)(0, data, argument)
        for _ in range(1, count):
            self._done.get()

    def _work(self) -> None:
        while True:
            job, index, data, argument = self._tasks.get()
            Job(job)(index, data, argument)
            self._done.put(index)
