"""Tokens to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded together with the first new ones, whose text may depend on them.
CONTEXT = 6


class Tokenizer(Protocol):
    """The part of a tokenizer that generation needs, as the packages tokenizers and transformers have it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Text of tokens that come one by one, whole characters at a time.

    A token may be a part of a character's bytes, and its text may depend on earlier tokens. So text is returned once it does not end
    within a character, as the difference that a token makes to the text of earlier tokens. Text that may be the start of a stop
    string is pending until it cannot be. A decoder with byte fallback may decode invalid bytes differently once more of them come;
    text that was returned stays.

    Args:
        tokenizer: Decodes the tokens.
        prompt: The tokens before the first one, whose text is not returned.
        stop_strings: Words at which the text ends; neither they nor what follows is returned.

    Attributes:
        stopped: Whether a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._ids = [int(i) for i in prompt[-CONTEXT:]]
        self._returned = len(self._ids)  # number of tokens whose text was returned
        self._pending = ""
        self.stopped = False

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def put(self, token: int) -> str:
        """Add a token; return the text that is certain now and was not returned before."""
        if self.stopped:
            return ""
        self._ids.append(int(token))
        whole = self._text(self._ids)
        # The text of a token may depend on earlier tokens (spaces, joined characters), so it is the difference of two
        # texts.
        fresh = whole[len(self._text(self._ids[: self._returned])) :]
        pending = self._pending + fresh
        if self._stop_strings and self._ends(pending):
            return self._pending
        # The bytes of a character may be split over tokens; until the last one is there, it decodes to U+FFFD.
        if not fresh or whole.endswith(REPLACEMENT):
            return ""
        self._ids, self._returned = self._ids[self._returned :], len(self._ids) - self._returned
        waiting = next(
            (n for n in range(len(pending), 0, -1) if any(s.startswith(pending[-n:]) for s in self._stop_strings)), 0
        )
        text, self._pending = pending[: len(pending) - waiting], pending[len(pending) - waiting :]
        return text

    def end(self) -> str:
        """Return the rest of the text: what is pending, and an incomplete character."""
        if self.stopped:
            return ""
        text = self._pending + self._text(self._ids)[len(self._text(self._ids[: self._returned])) :]
        self._ids, self._returned, self._pending = [], 0, ""
        return text

    def _ends(self, pending: str) -> bool:
        """Look for the first stop string in text that was not returned; the text before it becomes pending."""
        places = [at for s in self._stop_strings if (at := pending.find(s)) >= 0]
        if places:
            self.stopped, self._pending = True, pending[: min(places)]
        return self.stopped
