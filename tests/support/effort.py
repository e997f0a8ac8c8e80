"""How much a property test tries: all of it, or little in the fast lane (`pytest --fast`)."""

from __future__ import annotations

import os

FAST = "RELAX_TUNE_FAST_TESTS" in os.environ
MOST = 15


def examples(count: int) -> int:
    """The number of Hypothesis examples: `count`, at most MOST in the fast lane."""
    return min(count, MOST) if FAST else count
