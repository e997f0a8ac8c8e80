"""Ends of a text: tokens, sequences of tokens, words.

Tests: `tests/runtime/generation/test_detokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_tune.errors import UserError
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.detokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True)
class StopRules:
    """The ends of a text that the settings declare. Only added tokens count, not the prompt.

    Raises: UserError for stop strings without a tokenizer.
    """

    config: GenerationConfig
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.config.stop_strings and self.tokenizer is None:
            raise UserError(
                "stop_strings: expected a tokenizer to read the tokens by, got none; give tokenizer=, or stop_sequences of ids"
            )

    def ends(self, prompt: Sequence[int], added: Sequence[int]) -> bool:
        """Return whether the last added token ends a text, provided that none before it did."""
        if added[-1] in self.config.eos_ids or self.ends_sequence(added):
            return True
        if not self.config.stop_strings:
            return False
        text = self.detokenizer(prompt)
        for token in added:
            text.put(token)
        return text.stopped

    def ends_sequence(self, added: Sequence[int]) -> bool:
        """Return whether the added tokens end with a stop sequence."""
        return any(tuple(added[-len(s) :]) == s for s in self.config.stop_sequences)

    def detokenizer(self, prompt: Sequence[int]) -> IncrementalDetokenizer:
        """Return a detokenizer that knows the stop strings."""
        assert self.tokenizer is not None
        return IncrementalDetokenizer(self.tokenizer, prompt, self.config.stop_strings)


class Stopper:
    """The end of one row: tokens come one by one."""

    def __init__(self, rules: StopRules, prompt: Sequence[int]) -> None:
        self._rules = rules
        self._added: list[int] = []
        self._longest = max((len(s) for s in rules.config.stop_sequences), default=0)
        self._text = rules.detokenizer(prompt) if rules.config.stop_strings else None

    def put(self, token: int) -> bool:
        """Take a token; return whether it ends the row."""
        if token in self._rules.config.eos_ids:
            return True
        if self._longest:
            self._added = [*self._added, token][-self._longest :]
            if self._rules.ends_sequence(self._added):
                return True
        if self._text is not None:
            self._text.put(token)
            return self._text.stopped
        return False
