"""How a model's folder says that texts become tokens: prompts, case, the longest text, special tokens.

Tests: `tests/tuner/cli/test_run_sentences.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_tune.errors import UserError
from relax_tune.ir.frontend.hf.sentence import MODEL2VEC, MODULES, SENTENCE_CONFIG, TRANSFORMER_CONFIG, read_modules
from relax_tune.ir.frontend.hf.weights import read_json
from relax_tune.tuner.text.tokens import SizeLimit, limited, read_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """Settings of a folder of sentence-transformers; the defaults suit any other folder.

    Attributes:
        tokens: folder with tokenizer.json
        prompts: by name
        prompt: put before each text
        lower: texts are lowercased
        most: number of tokens that a text is cut to in training
        special: tokens that the tokenizer adds to a text are read
        unknown: tokens of unknown words are read
    """

    tokens: Path
    prompts: Mapping[str, str]
    prompt: str = ""
    lower: bool = False
    most: int | None = None
    special: bool = True
    unknown: bool = True

    def named(self, name: str | None) -> SentenceFolder:
        """Return the settings with a prompt by its name; None: the default. Raises UserError for an unknown name."""
        if name is None:
            return self
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise UserError(f"prompt: expected a name of {SENTENCE_CONFIG} ({known}), got {name!r:.80}; correct it")
        return replace(self, prompt=self.prompts[name])

    def tokenize(
        self, tokenizer: Tokenizer, texts: Sequence[str], limit: SizeLimit, cut: Callable[[str], None] | None = None
    ) -> list[list[int]]:
        """Return the token ids of every text, at most as many as the folder and the limit allow. Raises UserError."""
        if self.most is not None and (limit.most is None or self.most < limit.most):
            limit = SizeLimit(self.most)
        given = [self.prompt + text for text in texts]
        read = limited(tokenizer, [t.lower() for t in given] if self.lower else given, limit, cut, special=self.special)
        if self.unknown:
            return read
        unknown = unknown_token(tokenizer)
        return [[i for i in ids if i != unknown] for ids in read]

    def prompt_length(self, tokenizer: Tokenizer) -> int:
        """Return the number of tokens of the prompt, without a special token at its end."""
        if not self.prompt:
            return 0
        (read,) = read_tokens(tokenizer, [self.prompt.lower() if self.lower else self.prompt], self.special)
        return len(read.ids) - bool(read.ids and read.special_tokens_mask[-1])


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token for unknown words."""
    model = json.loads(tokenizer.to_str()).get("model", {})
    number, name = model.get("unk_id"), model.get("unk_token")
    return number if number is not None or name is None else tokenizer.token_to_id(name)


def sentence_folder(root: Path) -> SentenceFolder:
    """Read the settings of a folder. Raises ParseError for files that cannot be read, UserError for fields of wrong types."""
    saved = _fields(root / SENTENCE_CONFIG)
    prompts, default = saved.get("prompts") or {}, saved.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(v, str) for v in prompts.values()):
        raise UserError(f"{root / SENTENCE_CONFIG}: prompts: expected texts by name, got {prompts!r:.80}")
    if default is not None and default not in prompts:
        raise UserError(
            f"{root / SENTENCE_CONFIG}: default_prompt_name: expected one of {', '.join(prompts)}, got {default!r:.80}"
        )
    settings = SentenceFolder(root, prompts, prompts.get(default, ""))
    if not (root / MODULES).is_file():
        static = _fields(root / "config.json").get("model_type") == MODEL2VEC
        return replace(settings, special=not static, unknown=not static)
    modules = read_modules(root)
    inner = _fields(modules.inner / TRANSFORMER_CONFIG)
    most, lower = inner.get("max_seq_length"), inner.get("do_lower_case", False)
    if (most is not None and (type(most) is not int or most < 1)) or type(lower) is not bool:
        raise UserError(
            f"{modules.inner / TRANSFORMER_CONFIG}: expected a number max_seq_length and a truth value do_lower_case, got "
            f"{most!r:.40} and {lower!r:.40}"
        )
    tokens = modules.inner if (modules.inner / "tokenizer.json").is_file() else root
    return replace(settings, tokens=tokens, most=most, lower=lower, special=not modules.static)


def _fields(path: Path) -> Mapping[str, Any]:
    return read_json(path, "settings of a model") if path.is_file() else {}
