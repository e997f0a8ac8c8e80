"""Tokens to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT = 6


class Tokenizer(Protocol):
    """The part of a tokenizer that generation needs, as the packages tokenizers and transformers have it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Text of tokens that come one by one, whole characters at a time.

    A token may be a part of a character's bytes, or need the tokens before it to be read. So text is given once it does not end
    within a character, as the difference that a token makes to the text of those before it. Text that may be the start of a stop
    string waits until it is none. A decoder with byte fallback may read bytes that are no text in another way once more of them come;
    text that was given stays.

    prompt: the tokens before the first one, whose text is not given. stop_strings: words at which the text ends; neither they nor
    what follows is given.

    stopped: whether a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._ids = [int(i) for i in prompt[-CONTEXT:]]
        self._read = len(self._ids)  # so many have been given
        self._held = ""
        self.stopped = False

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def put(self, token: int) -> str:
        """Take a token; return the text that is certain now and was not given before."""
        if self.stopped:
            return ""
        self._ids.append(int(token))
        whole = self._text(self._ids)
        fresh = whole[len(self._text(self._ids[: self._read])) :]
        held = self._held + fresh
        if self._stop_strings and self._ends(held):
            return self._held
        if not fresh or whole.endswith(REPLACEMENT):
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        waiting = next(
            (n for n in range(len(held), 0, -1) if any(s.startswith(held[-n:]) for s in self._stop_strings)), 0
        )
        given, self._held = held[: len(held) - waiting], held[len(held) - waiting :]
        return given

    def end(self) -> str:
        """Return the rest of the text: what waited, and a character that stayed incomplete."""
        if self.stopped:
            return ""
        given = self._held + self._text(self._ids)[len(self._text(self._ids[: self._read])) :]
        self._ids, self._read, self._held = [], 0, ""
        return given

    def _ends(self, held: str) -> bool:
        """Look for the first stop string in text that was not given; keep the text before it."""
        places = [at for s in self._stop_strings if (at := held.find(s)) >= 0]
        if places:
            self.stopped, self._held = True, held[: min(places)]
        return self.stopped
