"""Text in and out of a model: sentences to embeddings, and text that a decoder continues."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.generate import generate
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.scalars import WIDTH, Opcode
from relax_tune.tuner.cli.report.console import make_table

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IDS, MASK = "input_ids", "attention_mask"


def upper(artifact: Artifact, dim: int) -> int | None:
    """Return the declared upper bound of a dim of the token ids. Raises UserError for an artifact that takes no token ids."""
    program = artifact.program
    inputs = {program.buffers[i].name: program.buffers[i] for i in program.inputs}
    if set(inputs) != {IDS, MASK} or len(inputs[IDS].shape) != 2:
        raise UserError(
            f"{artifact.path}: --text wants a model of {IDS} and {MASK}, found the parameters {', '.join(inputs)}; use --inputs"
        )
    slot = inputs[IDS].shape[dim] * WIDTH
    opcode, operand = program.scalars[slot : slot + 2]
    if opcode == Opcode.SYMBOL:
        return program.symbols[operand].upper
    return operand if opcode == Opcode.CONST else None


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder. Raises UserError naming the extra, or the file that is missing."""
    path = folder / "tokenizer.json"
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"--text wants the package tokenizers, found {error}; pip install 'relax-tune[text]'") from None
    if not os.path.isfile(path):  # which a name too long does not disturb
        raise UserError(f"{path!s:.200}: no such file; --model wants a folder with a tokenizer.json")
    try:
        found: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every defect of the file
        raise UserError(f"{path}: wanted a tokenizer, found: {error!s:.200}; download it again") from None
    found.no_padding()
    return found


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], longest: int | None) -> list[list[int]]:
    """Return the token ids of every text, at most `longest`. Raises UserError for a text that the tokenizer refuses."""
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest)
    try:
        return [list(e.ids) for e in tokenizer.encode_batch(list(texts))]
    except Exception as error:  # as above: bytes that are no text, words without an entry for unknown ones
        raise UserError(
            f"wanted a tokenizer that can read --text, found: {error!s:.200}; is every text valid UTF-8?"
        ) from None


def embed(model: Model, tokens: Sequence[Sequence[int]], largest: int | None) -> NDArray[np.float32]:
    """Compute the embeddings (texts, width) f32, in batches of at most `largest`, each padded to its longest text."""
    parts = []
    step = largest or len(tokens)
    for at in range(0, len(tokens), step):
        batch = tokens[at : at + step]
        width = max(1, *(len(t) for t in batch))
        ids = np.zeros((len(batch), width), np.int64)
        mask = np.zeros((len(batch), width), np.int64)
        for row, found in enumerate(batch):
            ids[row, : len(found)] = found
            mask[row, : len(found)] = 1
        parts.append(model.run({IDS: ids, MASK: mask})[0])
    return np.concatenate(parts)


def cosine(embeddings: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine of the angle between every two rows: (texts, texts)."""
    wide = embeddings.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
    return np.asarray(unit @ unit.T)


def similarity_table(texts: Sequence[str], similarity: NDArray[np.float64]) -> Table:
    """Return the similarities of every two texts."""
    numbers = [str(number + 1) for number in range(len(texts))]
    table = make_table("", "text", *numbers, right=numbers, title="Cosine similarity")
    for number, text in enumerate(texts):
        shown = text if len(text) <= 60 else text[:57] + "..."
        table.add_row(str(number + 1), shown, *(f"{value:.4f}" for value in similarity[number]))
    return table


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text, as the model's folder declares; none when it declares none."""
    for name in ("generation_config.json", "config.json"):
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        ids = said if isinstance(said, list) else [said]
        if ids and all(type(i) is int for i in ids):
            return tuple(ids)
    return ()


def complete(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], tokens: int, stop: Sequence[int]
) -> list[tuple[NDArray[np.int64], str]]:
    """Complete each text. Returns its token ids with the added ones, (1, length) i64, and the added text."""
    found = []
    for text, ids in zip(texts, tokenize(tokenizer, texts, None), strict=True):
        if not ids:
            raise UserError(f"--text wants at least one token, found none in {text!r:.80}; give some text")
        whole = generate(model, np.array([ids], np.int64), tokens, eos_token_id=tuple(stop))
        added = [int(i) for i in whole[0, len(ids) :] if i not in stop]
        found.append((whole, str(tokenizer.decode(added))))
    return found
