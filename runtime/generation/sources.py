"""Sources of an encoder-decoder, by the names of its encoder's inputs: rows and batches of them.

Tests: `tests/tuner/emit/test_generate_encoder_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError

Ids = NDArray[np.int64]
IDS, SOUND, MASK, START = "input_ids", "input_values", "attention_mask", "decoder_input_ids"


@dataclass(frozen=True)
class Source:
    """The source of one row.

    Attributes:
        arrays: An array for each input of the encoder, without a dim for rows.
        start: The first tokens of the row's text, if the caller gives them.
    """

    arrays: Mapping[str, NDArray[Any]]
    start: Ids | None = None


def read_sources(given: Mapping[str, Any], mask: object = None) -> tuple[Source, ...]:
    """Return the source of each row.

    Args:
        given: By name of the encoder's input, an array whose first dim is rows, or a list of rows; may include `decoder_input_ids`.
        mask: The `attention_mask`, if it is not in `given`.

    Raises:
        UserError: The value is something else, the numbers of rows differ, or a source has no tokens.
    """
    tables = {str(name): value for name, value in given.items() if value is not None}
    if mask is not None:
        if MASK in tables:
            raise UserError(f"{MASK}: expected it once, got it among the encoder's inputs too; leave one out")
        tables[MASK] = mask
    for name, value in tables.items():
        if not isinstance(value, (np.ndarray, Sequence)) or isinstance(value, (str, bytes)):
            raise UserError(
                f"{name}: expected an array or a list of rows, got a {type(value).__name__}; tokenize text first"
            )
    counts = {name: len(value) for name, value in tables.items()}
    if not set(counts) - {START, MASK} or len(set(counts.values())) > 1:
        raise UserError(
            f"prompts: expected the encoder's inputs by name, with equal numbers of rows, got {counts}; correct them"
        )
    return tuple(
        _row(number, {n: v[number] for n, v in tables.items()}) for number in range(next(iter(counts.values())))
    )


def _row(number: int, row: Mapping[str, Any]) -> Source:
    arrays = {n: read_ids(n, number, v) if n in (IDS, START) else _array(n, number, v) for n, v in row.items()}
    for name in (IDS, START):
        if name in arrays and not len(arrays[name]):
            raise UserError(f"{name}: expected at least one token in every row, got none in row {number}; leave it out")
    if MASK in arrays:
        mask = arrays[MASK]
        masked = IDS if IDS in arrays else SOUND
        if masked not in arrays or mask.shape != arrays[masked].shape or not np.isin(mask, (0, 1)).all():
            raise UserError(
                f"{MASK}: row {number}: expected 0 and 1 for each of its {masked}, got {mask.dtype} of shape {mask.shape}; correct it"
            )
        arrays[MASK] = mask.astype(np.int64)
    elif IDS in arrays:
        arrays[MASK] = np.ones(len(arrays[IDS]), np.int64)
    return Source({n: a for n, a in arrays.items() if n != START}, arrays.get(START))


def read_ids(name: str, number: int, row: object) -> Ids:
    """Return a row of token ids, perhaps none. Raises UserError for anything else."""
    ids = _array(name, number, row)
    if ids.ndim == 1 and not ids.size:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"{name}: row {number}: expected a list of token ids, whole numbers, got {ids.dtype} of shape {ids.shape}; "
            "tokenize text first"
        )
    return ids.astype(np.int64)


def _array(name: str, number: int, row: object) -> NDArray[Any]:
    try:
        array = np.asarray(row)
    except ValueError:  # ragged
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"{name}: row {number}: expected numbers, got {array.dtype} of shape {array.shape}; correct them"
        )
    return array


def stack_sources(sources: Sequence[Source], names: Sequence[str]) -> list[NDArray[Any]]:
    """Return a batch of each input. Shorter texts and sounds are padded at their end with zeros, if a mask hides these.

    Raises:
        UserError: Rows of another input differ in shape.
    """
    batches = []
    for name in names:
        rows = [source.arrays[name] for source in sources]
        if name in (IDS, MASK) or (name == SOUND and MASK in names):
            longest = max(len(row) for row in rows)
            rows = [np.pad(row, (0, longest - len(row))) for row in rows]
            rows = [row.astype(np.float32, copy=False) for row in rows] if name == SOUND else rows
        elif len({row.shape for row in rows}) > 1:
            shapes = sorted({row.shape for row in rows})
            raise UserError(f"{name}: expected rows of one shape, got {shapes[0]} and {shapes[-1]}; pad them")
        else:
            rows = [row.astype(np.float32, copy=False) for row in rows]
        batches.append(np.stack(rows))
    return batches


def check_sources(sources: Sequence[Source], names: Sequence[str]) -> None:
    """Raise UserError for a source with other inputs than the model's encoder has."""
    for inputs in {tuple(sorted(source.arrays)) for source in sources}:
        if set(inputs) != set(names):
            raise UserError(
                f"prompts: expected the encoder's inputs {', '.join(names)} by name, and perhaps {START}, got {', '.join(inputs)}; "
                "correct them"
            )
