"""The context of a part of `suite.py`, and the rows that it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class OutOfTimeError(BaseException):
    """The part's share is used up. No Exception: a tuning job takes those for failures of one task."""


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments of a part. until: a time of time.monotonic; done: keys of the rows that exist already."""

    work: Path
    target: str
    peer_python: str
    tiny: bool
    until: float
    done: frozenset[str]

    def left(self) -> float:
        """Seconds until the part should end."""
        return self.until - time.monotonic()

    def new(self, keys: Sequence[str]) -> list[str]:
        """Those for which there is no row yet."""
        return [k for k in keys if k not in self.done]


def absent(key: str, why: object) -> Row:
    return {"key": key, "absent": " ".join(str(why).split())[:200]}
