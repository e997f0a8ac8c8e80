"""A streaming reader of JSON documents that are one object with one long list.

Tests: `tests/database/exchange/test_t4.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TextIO

from relax_tune.errors import DatabaseError

VALUE_LIMIT = 32 * 2**20
"""Characters of the longest value that is read into memory."""
_READ = 2**16
_SPACE = " \t\n\r"


class _End:
    """Marks the end of the list."""


END: Final = _End()


def iter_document(file: TextIO, what: str, long: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the members of an object; for the list named `long`, each item and then `END`.

    Args:
        what: Name of the document in errors.

    Raises:
        DatabaseError: The text is not JSON or not an object, or `long` is not a list.
    """
    text = _Text(file, what)
    text.expect("{", "an object")
    if text.takes("}"):
        return text.end()
    while True:
        name = text.value()
        if not isinstance(name, str):
            raise text.error("a name")
        text.expect(":", "a colon")
        if name == long:
            yield from ((name, item) for item in _items(text, long))
        else:
            yield name, text.value()
        if not text.takes(","):
            break
    text.expect("}", "the end of the object")
    return text.end()


def _items(text: _Text, name: str) -> Iterator[Any]:
    text.expect("[", f"an object with a list `{name}`")
    if not text.takes("]"):
        yield text.value()
        while text.takes(","):
            yield text.value()
        text.expect("]", "the end of the list")
    yield END


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


class _Text:
    """The part of a file that is in memory, and the place in it."""

    def __init__(self, file: TextIO, what: str) -> None:
        self._file, self._what = file, what
        self._text, self._at, self._over = "", 0, False
        self._decoder = json.JSONDecoder(parse_constant=_refuse)

    def error(self, expected: str) -> DatabaseError:
        rest = repr(self._text[self._at : self._at + 40]) if self._at < len(self._text) else "the end"
        return DatabaseError(f"{self._what}: expected {expected} in JSON text, got {rest}")

    def _more(self, count: int) -> bool:
        """Read more; False at the end of the file."""
        try:
            part = self._file.read(count)
        except UnicodeDecodeError:
            raise DatabaseError(f"{self._what}: expected UTF-8 text, got other bytes") from None
        self._text, self._at = self._text[self._at :] + part, 0
        self._over = not part
        return bool(part)

    def _next(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._more(_READ):
                return self._text[self._at : self._at + 1]

    def takes(self, character: str) -> bool:
        """Take a character if it is the next one."""
        matches = self._next() == character
        self._at += matches
        return matches

    def expect(self, character: str, expected: str) -> None:
        """Take a character. Raises `DatabaseError` if another is next."""
        if not self.takes(character):
            raise self.error(expected)

    def value(self) -> Any:
        """Take a value."""
        self._next()
        size = _READ
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # Only a value that ends before the end of the text in memory is certain to be whole.
                if end < len(self._text) or self._over:
                    self._at = end
                    return value
                self._more(_READ)  # a number at the end may go on
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or "not a JSON number" in str(error):
                    raise DatabaseError(f"{self._what}: expected JSON text, got {error}") from None
                if len(self._text) - self._at > VALUE_LIMIT:
                    raise DatabaseError(
                        f"{self._what}: expected JSON values of at most {VALUE_LIMIT} characters, got more"
                    ) from None
                if not self._more(size):
                    raise self.error("a value") from None
                # Each attempt parses the value from its start: doubling keeps the sum of all attempts linear in its
                # length.
                size = min(2 * size, VALUE_LIMIT)

    def end(self) -> None:
        """Check that nothing follows."""
        if self._next():
            raise self.error("nothing more")
