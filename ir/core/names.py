"""Fresh names, and comparison by identity."""

from __future__ import annotations

from collections.abc import Container, Sequence


def fresh(wanted: str, taken: Container[str]) -> str:
    """Return `wanted`, or the first of `wanted_1`, `wanted_2`, ... that is not taken."""
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return whether both tuples hold the same objects, in order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
