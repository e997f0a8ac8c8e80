"""Fresh names, and comparison by identity."""

from __future__ import annotations

from collections.abc import Container, Sequence


def unused(hint: str, taken: Container[str]) -> str:
    """`hint`, or where that is taken `hint_1`, `hint_2` ...: the first that is not."""
    name, number = hint, 0
    while name in taken:
        number += 1
        name = f"{hint}_{number}"
    return name


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """The very same objects, in order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
