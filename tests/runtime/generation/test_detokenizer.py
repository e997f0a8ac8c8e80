"""Tokens to text, one at a time: whole characters, and no stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.detokenizer import IncrementalDetokenizer
from relax_tune.runtime.generation.stopping import Stopper, StopRules

TEXT = "naïve 😀 日本 stop here"


class Bytes:
    """A tokenizer of bytes; 256 is a special token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class Words:
    """A tokenizer of words, which are read with a space before each but the first, as SentencePiece's are."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[i] for i in ids).replace("_", " ").removeprefix(" ")


def pieces(text: IncrementalDetokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(text.put(t) for t in tokens), text.end()]


def test_text_comes_in_whole_characters() -> None:
    found = pieces(IncrementalDetokenizer(Bytes()), TEXT.encode())
    assert "".join(found) == TEXT and set("".join(found)) == set("".join(p for p in found if p))
    assert all("\ufffd" not in p for p in found) and found[:4] == ["n", "a", "", "ï"]
    assert found[-2:] == ["e", ""]


def test_text_of_byte_pairs_equals_the_text_of_all_tokens() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level, tokenizers.decoders.ByteLevel()
    options = {
        "vocab_size": 300,
        "special_tokens": ["<s>"],
        "initial_alphabet": level.alphabet(),
        "show_progress": False,
    }
    tokenizer.train_from_iterator([TEXT] * 9, tokenizers.trainers.BpeTrainer(**options))
    random = np.random.default_rng(0)
    for ids in [tokenizer.encode(TEXT).ids, *random.integers(0, tokenizer.get_vocab_size(), (50, 20)).tolist()]:
        assert "".join(pieces(IncrementalDetokenizer(tokenizer, ids[:0]), ids)) == tokenizer.decode(ids)


def test_incomplete_characters_come_at_the_end() -> None:
    assert pieces(IncrementalDetokenizer(Bytes()), [65, 0xE6, 0x97]) == ["A", "", "", "\ufffd"]
    assert pieces(IncrementalDetokenizer(Bytes()), [0xFF, 66, 256, 67]) == ["", "\ufffdB", "", "C", ""]
    assert pieces(IncrementalDetokenizer(Bytes()), []) == [""]


def test_first_word_after_a_prompt_keeps_the_space() -> None:
    words = Words("_we", "_go", "ing", "_on")
    assert pieces(IncrementalDetokenizer(words, [0]), [1, 2, 3]) == [" go", "ing", " on", ""]
    assert pieces(IncrementalDetokenizer(words), [1, 2, 3]) == ["go", "ing", " on", ""]


def test_stop_strings_and_starts_of_one_are_held_back() -> None:
    words = Words("a s", "to", "p", "ps", "ne", "st", "opera")
    text = IncrementalDetokenizer(words, (), ["stop"])
    assert [text.put(t) for t in (0, 1, 4)] == ["a ", "", "stone"]
    assert [text.put(t) for t in (0, 1, 3)] == ["a ", "", ""] and text.stopped
    assert text.put(0) == text.end() == ""
    assert pieces(IncrementalDetokenizer(words, (), ["stop"]), [4, 5, 6, 0]) == ["ne", "", "", "", ""]
    assert pieces(IncrementalDetokenizer(words, (), ["stop"]), [0, 1]) == ["a ", "", "sto"]
    assert "".join(pieces(IncrementalDetokenizer(Bytes(), (), ["本 s", "here"]), TEXT.encode())) == "naïve 😀 日"


def test_a_stop_string_before_an_incomplete_character_is_seen() -> None:
    class Pieces(Words):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return b"".join([b"go ", b"end\xe6", b"\x97\xa5"][i] for i in ids).decode("utf-8", "replace")

    text = IncrementalDetokenizer(Pieces(), (), ["end"])
    assert [text.put(0), text.put(1)] == ["go ", ""] and text.stopped


def test_stoppers_agree_with_the_rule_of_whole_texts() -> None:
    rules = StopRules(
        GenerationConfig(eos_token_id=9, stop_sequences=((1, 2), (2, 2, 3)), stop_strings="ba"), Words(*"abcdefghij")
    )
    random = np.random.default_rng(0)
    ends = set()
    for _ in range(200):
        tokens = random.integers(0, 10, 30).tolist()
        stopper = Stopper(rules, [0, 1])
        first = next(n for n in range(31) if n == 30 or stopper.put(tokens[n]))
        assert first == next(n for n in range(31) if n == 30 or rules.ends([0, 1], tokens[: n + 1]))
        ends.add(tokens[first] if first < 30 else None)
    assert {9, 2, 3, 0} <= ends
    with pytest.raises(UserError, match="stop_strings: expected a tokenizer"):
        StopRules(GenerationConfig(stop_strings="x"))
