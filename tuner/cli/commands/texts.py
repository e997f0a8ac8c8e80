"""Text into an encoder: sentences to embeddings, or to the logits of a head."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.scalars import WIDTH, Opcode
from relax_tune.runtime.signature import TensorSpec
from relax_tune.tuner.cli.report.console import make_table

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


def upper(artifact: Artifact, dim: int) -> int | None:
    """Return the declared upper bound of a dim of the token ids. Raises UserError for an artifact that takes no token ids."""
    program = artifact.program
    inputs = {program.buffers[i].name: program.buffers[i] for i in program.inputs}
    if not {IDS, MASK} <= set(inputs) <= {IDS, MASK, TYPES} or len(inputs[IDS].shape) != 2:
        raise UserError(
            f"{artifact.path}: --text wants a model of {IDS}, {MASK} and perhaps {TYPES}, found the parameters "
            f"{', '.join(inputs)}; use --inputs"
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


def encode(model: Model, tokens: Sequence[Sequence[int]], largest: int | None) -> dict[str, list[NDArray[Any]]]:
    """Compute each result of every text, by name, in batches of at most `largest`, each padded to its longest text.

    A result per token has as many as the text. All tokens are of type 0.
    """
    names = [spec.name for spec in model.inputs]
    length = next(spec.shape[1] for spec in model.inputs if spec.name == IDS and isinstance(spec, TensorSpec))
    results: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in model.outputs}
    step = largest or len(tokens)
    for at in range(0, len(tokens), step):
        batch = tokens[at : at + step]
        width = max(1, *(len(t) for t in batch))
        arrays = {name: np.zeros((len(batch), width), np.int64) for name in names}
        for row, found in enumerate(batch):
            arrays[IDS][row, : len(found)] = found
            arrays[MASK][row, : len(found)] = 1
        for spec, array in zip(model.outputs, model.run(arrays), strict=True):
            each = isinstance(spec, TensorSpec) and len(spec.shape) > 1 and spec.shape[1] == length
            results[spec.name] += [row[: len(found)] if each else row for row, found in zip(array, batch)]
    return results


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
