"""Texts of strangers, safe to send to a terminal."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys or that turn the direction of text, but for tabs and ends of lines."""


def printable(text: str) -> str:
    """Return the text with its control characters as Python writes them.

    Printed, it then moves no cursor and sets no title."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
