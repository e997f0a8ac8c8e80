"""Models in a forked process, where the threads that compute are missing: a call there would wait for them for ever.

Tests: `tests/runtime/test_threads.py`.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """The part of a `Model` that a fork concerns."""

    def after_fork(self) -> None: ...


_OPEN: weakref.WeakSet[Forkable] = weakref.WeakSet()
"""The open models of this process."""


def watch(model: Forkable) -> None:
    """Have `after_fork` called in every process that is forked from this one."""
    _OPEN.add(model)


def _in_child() -> None:
    for model in tuple(_OPEN):
        model.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
