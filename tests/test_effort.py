"""What tests leave out by default: combinations of parameters."""

from __future__ import annotations

import itertools

from tests.support.effort import pairwise


def test_pairwise_combinations_have_every_pair_of_values() -> None:
    sizes = {"a": 3, "b": 2, "c": 4, "d": 2}
    every = [dict(zip(sizes, values)) for values in itertools.product(*map(range, sizes.values()))]
    chosen = [every[at] for at in pairwise(every)]
    for one, other in itertools.combinations(sizes, 2):
        assert {(c[one], c[other]) for c in chosen} == set(itertools.product(range(sizes[one]), range(sizes[other])))
    assert len(chosen) <= 16 < len(every) == 48
    assert pairwise([{"a": n} for n in range(3)]) == {0, 1, 2} and pairwise([]) == set()
