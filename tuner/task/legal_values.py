"""Values of a sketch's tunables without a search: legal ones near the middle of the domains, and wide ones.

Tests: `tests/ir/codegen/test_repeated_operands.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from relax_tune.schedules.cost.vectorized import ConstraintFunction
from relax_tune.schedules.sketch import Sketch

# Combinations of values near the middle that are tried.
GUESSES = 4096


def first_legal(sketch: Sketch) -> Mapping[str, int] | None:
    """Return the first legal guess of a sketch, or its legal values nearest to the middle; None if none of those are legal."""
    domains, legal = {t.name: t.domain for t in sketch.tunables}, ConstraintFunction(sketch)
    for values in (*sketch.guesses, *_from_the_middle(domains)):
        there = all(x in domains[n] for n, x in values.items())
        if there and (not values or legal({n: np.asarray([x], np.int64) for n, x in values.items()})[0]):
            return values
    return None


def widest(sketch: Sketch) -> Mapping[str, int]:
    """Return the first guess of a sketch, or else its widest vectors and the middle of every other domain."""
    values = {t.name: t.domain[-1 if t.name == "VL" else len(t.domain) // 2] for t in sketch.tunables}
    return next(iter(sketch.guesses), values)


def _from_the_middle(domains: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield the middles of all domains, then values near them by their distance in steps; at most GUESSES."""

    def distance(codes: tuple[int, ...]) -> int:
        return sum(abs(c - len(d) // 2) for c, d in zip(codes, domains.values(), strict=True))

    yield {n: d[len(d) // 2] for n, d in domains.items()}
    around = [range(max(len(d) // 2 - 2, 0), min(len(d) // 2 + 3, len(d))) for d in domains.values()]
    codes = sorted(itertools.islice(itertools.product(*around), GUESSES), key=distance)
    yield from ({n: domains[n][c] for n, c in zip(domains, row, strict=True)} for row in codes)
