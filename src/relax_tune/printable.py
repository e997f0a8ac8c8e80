"""Sanitising text for terminals: control characters of untrusted text, passwords."""

from __future__ import annotations

import re
from collections.abc import Callable

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys or that turn the direction of text, but for tabs and ends of lines."""


def printable(text: str) -> str:
    """Return the text with its control characters as Python writes them: printed, it moves no cursor and sets no title."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def of_printable(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes a text on with its control characters as Python writes them."""
    return lambda text: tell(printable(text))


_SECRET = re.compile(r"(password|passwd|pwd|token|secret)(\s*[=:]\s*)('[^']*'|[^\s&;,]+)", re.IGNORECASE)


def masked_words(text: str) -> str:
    """Return a text with everything masked that follows a word such as `password=`."""
    return _SECRET.sub(r"\1\2***", text)


def masked(text: str) -> str:
    """Return a text that may contain a database URL, with everything masked that looks like a password."""
    scheme, slashes, rest = text.partition("://")
    _, at, host = rest.rpartition("@")
    return masked_words(f"{scheme}{slashes}***@{host}" if at else text)
