"""How much a test tries: little in the fast lane (`pytest --fast`), all under `pytest --heavy`, a part otherwise."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import pytest

T = TypeVar("T")
Effort = Literal["fast", "usual", "heavy"]

VARIABLE = "RELAX_TUNE_TEST_EFFORT"
EFFORT = os.environ.get(VARIABLE, "usual")
FEWEST = 10
GENERIC: Mapping[str, Any] = {} if EFFORT == "heavy" else {"policy": "generic", "libraries": False}
"""Options of builds whose results are tested, not their kernels: these compile in a fifth of the time of predicted ones."""


def examples(count: int) -> int:
    """Return the number of Hypothesis examples: `count` under --heavy, a tenth otherwise, FEWEST in the fast lane."""
    share = {"fast": 1, "usual": count // 10, "heavy": count}[EFFORT]
    return min(count, max(FEWEST, share))


def some(items: Iterable[T], every: int = 12) -> list[T]:
    """Return all items under --heavy, otherwise every `every`-th of them, from the first."""
    return list(items)[:: 1 if EFFORT == "heavy" else every]


def thinned(values: Iterable[Any], every: int = 12) -> list[Any]:
    """Return parameters of which all but every `every`-th, from the first, are marked `heavy`."""
    found = [v if hasattr(v, "marks") else pytest.param(*(v if isinstance(v, tuple) else (v,))) for v in values]
    return [
        p if at % every == 0 else pytest.param(*p.values, id=p.id, marks=(*p.marks, pytest.mark.heavy))
        for at, p in enumerate(found)
    ]


def pairwise(combinations: Sequence[Mapping[str, int]]) -> set[int]:
    """Return positions of combinations of parameters in which every pair of values occurs that occurs in all of them.

    Most faults need two values at the most to show (Kuhn, Wallace and Gallo, 2004). The choice is greedy.
    """
    pairs = [set(itertools.combinations(sorted(c.items()), min(2, len(c)))) for c in combinations]
    missing, chosen = set().union(*pairs), set[int]()
    while missing:
        best = max(range(len(pairs)), key=lambda at: len(pairs[at] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
