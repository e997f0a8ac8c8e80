"""Texts to tokens, and tokens to the results of an encoder: embeddings, or the logits of a head.

Tests: `tests/tuner/cli/test_run_texts.py`, `tests/tuner/text/test_encoder.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode
from relax_tune.runtime.signature import TensorSpec
from relax_tune.summary import bounds_advice

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

IDS, MASK, TYPES, PROMPT = "input_ids", "attention_mask", "token_type_ids", "prompt_length"


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The upper bound of a dim of the token ids.

    Attributes:
        most: the bound; None if unbounded.
        symbol: name of the dim; None for a constant.
    """

    most: int | None
    symbol: str | None = None

    @staticmethod
    def of(program: Program, dim: int, name: str = IDS) -> SizeLimit:
        """Return the limit of a dim of the input `name`; unbounded without such an input."""
        shapes = [program.buffers[i].shape for i in program.inputs if program.buffers[i].name == name]
        if not shapes or len(shapes[0]) <= dim:
            return SizeLimit(None)
        opcode, operand = program.scalars[shapes[0][dim] * WIDTH : shapes[0][dim] * WIDTH + 2]
        if opcode == Opcode.SYMBOL:
            return SizeLimit(program.symbols[operand].upper, program.symbols[operand].name)
        return SizeLimit(operand if opcode == Opcode.CONST else None)

    def advice(self, count: int) -> str:
        """Return a remedy for a size of `count` above the limit."""
        if self.symbol is None:
            return "give a shorter text"
        return f"build it with a larger bound ({bounds_advice(self.symbol, 1, count)})"


def limit_of(artifact: Artifact, dim: int) -> SizeLimit:
    """Return the limit of a dim of an encoder's token ids. Raises UserError for an artifact that takes no token ids."""
    program = artifact.program
    inputs = {program.buffers[i].name: program.buffers[i] for i in program.inputs}
    if not {IDS, MASK} <= set(inputs) <= {IDS, MASK, TYPES, PROMPT} or len(inputs[IDS].shape) != 2:
        raise UserError(
            f"{artifact.path}: texts need a model of {IDS}, {MASK} and perhaps {TYPES} or {PROMPT}, got the parameters "
            f"{', '.join(inputs)}; run it on arrays"
        )
    return SizeLimit.of(program, dim)


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder. Raises UserError naming the extra, or the file that is missing."""
    path = folder / "tokenizer.json"
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"texts need the package tokenizers, got {error}; pip install 'relax-tune[text]'") from None
    if not os.path.isfile(path):  # returns False for over-long names, where Path.is_file raises OSError
        raise UserError(f"{path!s:.200}: no such file; texts need the folder with the model's tokenizer.json")
    with _defects(lambda error: UserError(f"{path}: expected a tokenizer, got: {error!s:.200}; download it again")):
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _defects(describe: Callable[[BaseException], UserError]) -> Iterator[None]:
    """Turn errors of the package tokenizers into ours: it raises plain Exception for a defect of a file, or a panic of Rust.

    A panic is no Exception, so that programs end at it; here it is a defect of the file.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise describe(error) from None
        raise


def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], limit: SizeLimit, cut: Callable[[str], None] | None = None
) -> list[list[int]]:
    """Return the token ids of every text, at most as many as the limit allows.

    Args:
        cut: receives a sentence for each text that is truncated to the limit; None rejects such texts.

    Raises:
        UserError: a text is too long, or the tokenizer cannot read it.
    """
    return limited(tokenizer, texts, limit, cut)


def limited(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limit: SizeLimit,
    cut: Callable[[str], None] | None = None,
    special: bool = True,
) -> list[list[int]]:
    """Return token ids as `tokenize` does. special: with the tokens that the tokenizer adds to a text"""
    return [list(e.ids) for e in limited_tokens(tokenizer, texts, limit, cut, special)]


def limited_tokens(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limit: SizeLimit,
    cut: Callable[[str], None] | None = None,
    special: bool = True,
) -> list[Encoding]:
    """Return the tokens of every text with their places in it, as `limited` does."""
    tokenizer.no_truncation()
    read = read_tokens(tokenizer, texts, special)
    for text, ids in zip(texts, (e.ids for e in read)):
        if limit.most is not None and len(ids) > limit.most:
            most = f"at most {limit.most} tokens" + f" ({limit.symbol} <= {limit.most})" * bool(limit.symbol)
            if cut is None:
                raise UserError(
                    f"text {shown(text)}: expected {most}, got {len(ids)}; {limit.advice(len(ids))}, or cut it "
                    "(--truncate, in Python truncate=True)"
                )
            cut(
                f"text {shown(text)} is cut: the artifact takes {most}, and {len(ids) - limit.most} of {len(ids)} are left out"
            )
    if limit.most is None or all(len(e.ids) <= limit.most for e in read):
        return read
    # special tokens of the tokenizer may exceed the limit
    why = f"truncation: expected a limit that leaves room for words, got {limit.most}"
    with _defects(lambda error: UserError(f"{why}: {error!s:.200}")):
        tokenizer.enable_truncation(limit.most)
    return read_tokens(tokenizer, texts, special)


def shown(text: str) -> str:
    """Return the start of a text, quoted."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def read_tokens(tokenizer: Tokenizer, texts: Sequence[str], special: bool = True) -> list[Encoding]:
    """Return the tokens of texts. Raises UserError for a text that the tokenizer cannot read."""
    # bytes that are no text, words without an entry for unknown ones
    what = "expected a tokenizer that can read the texts"
    with _defects(lambda error: UserError(f"{what}, got: {error!s:.200}; is every text valid UTF-8?")):
        return list(tokenizer.encode_batch(list(texts), add_special_tokens=special))


def encode(
    model: Model, tokens: Sequence[Sequence[int]], largest: int | None, prompt_length: int = 0
) -> dict[str, list[NDArray[Any]]]:
    """Compute each result of every text, by name, in batches of at most `largest`, each padded to its longest text.

    Results per token have one row per token of the text. All token types are 0.

    Args:
        prompt_length: number of leading tokens that a model with such an input does not pool
    """
    names = [spec.name for spec in model.inputs]
    length = next(spec.shape[1] for spec in model.inputs if spec.name == IDS and isinstance(spec, TensorSpec))
    results: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in model.outputs}
    step = largest or len(tokens)
    for at in range(0, len(tokens), step):
        batch = tokens[at : at + step]
        width = max(1, *(len(t) for t in batch))
        arrays: dict[str, NDArray[Any]] = {
            name: np.zeros((len(batch), width), np.int64) for name in names if name != PROMPT
        }
        if PROMPT in names:
            arrays[PROMPT] = np.full(len(batch), prompt_length, np.int64)
        for row, ids in enumerate(batch):
            arrays[IDS][row, : len(ids)] = ids
            arrays[MASK][row, : len(ids)] = 1
        for spec, array in zip(model.outputs, model.run(arrays), strict=True):
            each = isinstance(spec, TensorSpec) and len(spec.shape) > 1 and spec.shape[1] == length
            results[spec.name] += [row[: len(ids)] if each else row for row, ids in zip(array, batch)]
    return results


def cosine(embeddings: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine of the angle between every two rows: (texts, texts)."""
    wide = embeddings.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
    return np.asarray(unit @ unit.T)
