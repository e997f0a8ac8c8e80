"""Names that nothing else has."""

from __future__ import annotations

from collections.abc import Container


def unused(hint: str, taken: Container[str]) -> str:
    """`hint`, or where that is taken `hint_1`, `hint_2` ...: the first that is not."""
    name, number = hint, 0
    while name in taken:
        number += 1
        name = f"{hint}_{number}"
    return name
