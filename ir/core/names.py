"""Fresh names, printable names, and comparison by identity.

Tests: `tests/ir/text/test_text_graph.py`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

LONGEST_NAME = 1000
"""Most characters of the name of an input or result."""


def can_be_shown(name: str) -> bool:
    """Return whether an input or result may have a name: any text that a terminal shows as it is."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable()


def fresh(hint: str, used: Container[str]) -> str:
    """Return `hint`, or the first of `hint_1`, `hint_2`, ... that is not taken."""
    name, number = hint, 0
    while name in used:
        number += 1
        name = f"{hint}_{number}"
    return name


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return whether both tuples hold the same objects, in order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
