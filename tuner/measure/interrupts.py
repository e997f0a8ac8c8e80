"""Blocks that defer interruptions, because they must not end half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Signals that stop a program; the second and third are missing on some systems.
STOPPING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def shielded() -> Iterator[None]:
    """Defer Ctrl-C (and other signals whose Python handler stops the program) until the block ends.

    It serves short blocks that must not be interrupted, such as a commit. Blocks may nest. Signals that are ignored, or
    kill at once, keep their effect. Only the main thread receives signals, so other threads are unaffected.
    """
    # Python runs signal handlers in the main thread only, and refuses to set them in another.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Callable[..., Any], int, Any]] = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    python = {number: handler for number, handler in handlers.items() if callable(handler)}

    def later(number: int, frame: Any) -> None:
        came.append((python[signal.Signals(number)], number, frame))

    try:
        for kind in python:
            signal.signal(kind, later)
        yield
    finally:
        for kind, handler in python.items():
            signal.signal(kind, handler)
        # One is enough: the handler raises, so a second call would never be reached.
        for late, number, frame in came[:1]:
            late(number, frame)
