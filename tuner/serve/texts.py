"""Texts of an encoder as requests of its program, and the template of chats, from a model's folder.

Tests: `tests/tuner/serve/test_openai.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.signature import TensorSpec
from relax_tune.tuner.serve.rows import Joining, symbol_number
from relax_tune.tuner.serve.tensors import RequestError
from relax_tune.tuner.text.folder import sentence_folder
from relax_tune.tuner.text.tokens import IDS, MASK, PROMPT, SizeLimit, limit_of, open_tokenizer

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


class TextEncoder:
    """An encoder with the tokenizer of its folder.

    Raises:
        UserError: The folder has no tokenizer, or the artifact takes no token ids.
    """

    def __init__(self, artifact: Artifact, folder: Path) -> None:
        self._limit = limit_of(artifact, 1)
        self._settings = sentence_folder(folder)
        self._tokenizer = open_tokenizer(self._settings.tokens)
        self._prompt = self._settings.prompt_length(self._tokenizer)
        self._names = [spec.name for spec in artifact.inputs]
        self._lock = threading.Lock()  # truncation is a state of the tokenizer
        results = artifact.outputs
        vectors = [r for r in results if isinstance(r, TensorSpec) and len(r.shape) == 2]
        self.embeds = len(results) == len(vectors) == 1 and not results[0].name.endswith(("logits", "scores"))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts. Raises UserError for one that is too long."""
        with self._lock:
            return self._settings.tokenize(self._tokenizer, texts, self._limit)

    def arrays(self, ids: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return the inputs of a text of these tokens. Raises RequestError for too many."""
        most = self._limit.most
        if most is not None and len(ids) > most:
            raise RequestError(f"input: expected at most {most} tokens, got {len(ids)}")
        row = np.zeros((1, max(len(ids), 1)), np.int64)
        row[0, : len(ids)] = ids
        arrays: dict[str, NDArray[Any]] = {name: np.zeros_like(row) for name in self._names if name != PROMPT}
        arrays[IDS] = row
        arrays[MASK][0, : len(ids)] = 1
        if PROMPT in self._names:
            arrays[PROMPT] = np.full(1, self._prompt, np.int64)
        return arrays


def encoder_joining(program: Program) -> Joining | None:
    """Return how texts of an encoder run together: padded along their length, which the attention mask hides.

    Texts of an encoder folder are independent rows (`tuner.text.tokens.encode`). None for a program whose dims do not allow it.
    """
    batch, length = SizeLimit.of(program, 0).symbol, SizeLimit.of(program, 1).symbol
    if batch is None:
        return None
    for padded in (length, None):
        try:
            number = None if padded is None else symbol_number(program, padded)
            return Joining(program, symbol_number(program, batch), number)
        except UserError:
            continue
    return None


class ChatTemplate:
    """The template of a folder that makes a text of the messages of a chat, as transformers renders it.

    Raises:
        UserError: The folder's template cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        config = _json(folder / _CONFIG)
        file = folder / _TEMPLATE
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        self.exists = isinstance(source, str)
        # tokens as texts, or as objects with the text as `content`
        self._tokens = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        # The source comes with the model: the sandbox keeps it from Python.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source if isinstance(source, str) else "")
        except TemplateError as error:
            raise UserError(f"{folder}: expected a template of chats, got: {error!s:.200}; correct it") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that a model continues with its answer. Raises RequestError for messages that the template refuses."""
        if not self.exists:
            raise RequestError("messages: this model's folder has no template of chats; use /v1/completions")
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise RequestError(
                f"messages: expected a chat that the model's template takes, got: {error!s:.200}"
            ) from None
        return text


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a JSON file, got: {error!s:.200}; download it again") from None
    return content if isinstance(content, dict) else {}
