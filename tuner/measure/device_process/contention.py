"""Contention for processors: how long the threads of this process wait for one, by the statistics of Linux's scheduler.

A thread is running, waiting (ready to run, while others have all processors), or asleep. The system adds up the first two for each
thread, so a measurement can tell what a kernel takes from what other processes took meanwhile.

Tests: `tests/tuner/measure/device_process/test_contention.py`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_WAKE_SECS = 20e-6
"""Waiting of one thread in one launch that does not count: on an idle machine, too, a thread that is woken waits for microseconds."""


class ThreadTimes:
    """The running and waiting times of all threads of this process.

    Args:
        folder: One folder per thread, with the file `schedstat`.
    """

    def __init__(self, folder: Path = _THREADS) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def __enter__(self) -> ThreadTimes:
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    @property
    def known(self) -> bool:
        """True if the system tells the times of threads."""
        return bool(self._files)

    def refresh(self) -> None:
        """Look for threads that have started or ended."""
        try:
            there = set(os.listdir(self._folder))
        except OSError:
            there = set()
        for thread in self._files.keys() - there:
            os.close(self._files.pop(thread))
        for thread in there - self._files.keys():
            try:
                self._files[thread] = os.open(self._folder / thread / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # it has ended, or the system keeps no such statistics
                continue

    def read(self) -> tuple[float, float]:
        """Return the seconds that all threads have been running, and waiting."""
        waiting = 0
        for file in self._files.values():
            try:
                waiting += int(os.pread(file, 80, 0).split()[1])
            except (OSError, IndexError, ValueError):  # the thread has ended
                continue
        # `schedstat` counts the running time of the present time slice only later; this clock counts all of it.
        return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID), waiting * 1e-9

    def contention(self, before: tuple[float, float], after: tuple[float, float], launches: int) -> float:
        """Return the fraction of the ready time between two readings in which threads waited for a processor.

        Args:
            launches: Number of launches between the readings; each may wake every thread.
        """
        running, waiting = after[0] - before[0], after[1] - before[1]
        waiting -= _WAKE_SECS * launches * len(self._files)
        return 0.0 if waiting <= 0 else waiting / (max(running, 0.0) + waiting)
