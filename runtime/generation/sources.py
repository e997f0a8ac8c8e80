"""Sources of an encoder-decoder, by the names of its encoder's inputs: rows and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError

Ids = NDArray[np.int64]
IDS, MASK, START = "input_ids", "attention_mask", "decoder_input_ids"


@dataclass(frozen=True)
class Source:
    """The source of one row.

    arrays: an array of each of the encoder's inputs, without a dim for rows. start: the first tokens of the row's text, if given
    """

    arrays: Mapping[str, NDArray[Any]]
    start: Ids | None = None


def read_sources(given: Mapping[str, Any], mask: object = None) -> tuple[Source, ...]:
    """Return the source of each row.

    given: by the names of the encoder's inputs an array whose first dim is rows, or a list of rows; `decoder_input_ids` too, perhaps
    mask: the `attention_mask`, where it does not stand among them

    Raises: UserError for anything else, tables of unequal numbers of rows, and a source without tokens.
    """
    tables = {str(name): value for name, value in given.items() if value is not None}
    if mask is not None:
        if MASK in tables:
            raise UserError(f"{MASK}: wanted it once, found it among the encoder's inputs too; leave one out")
        tables[MASK] = mask
    for name, value in tables.items():
        if not isinstance(value, (np.ndarray, Sequence)) or isinstance(value, (str, bytes)):
            raise UserError(
                f"{name}: wanted an array or a list of rows, found a {type(value).__name__}; tokenize text first"
            )
    counts = {name: len(value) for name, value in tables.items()}
    if not set(counts) - {START, MASK} or len(set(counts.values())) > 1:
        raise UserError(
            f"prompts: wanted the encoder's inputs by name, with equal numbers of rows, found {counts}; correct them"
        )
    return tuple(
        _row(number, {n: v[number] for n, v in tables.items()}) for number in range(next(iter(counts.values())))
    )


def _row(number: int, row: Mapping[str, Any]) -> Source:
    arrays = {n: read_ids(n, number, v) if n in (IDS, START) else _array(n, number, v) for n, v in row.items()}
    for name in (IDS, START):
        if name in arrays and not len(arrays[name]):
            raise UserError(f"{name}: wanted at least one token in every row, found none in row {number}; leave it out")
    if MASK in arrays:
        kept = arrays[MASK]
        if IDS not in arrays or kept.shape != arrays[IDS].shape or not np.isin(kept, (0, 1)).all():
            raise UserError(
                f"{MASK}: row {number}: wanted 0 and 1 for each of its {IDS}, found {kept.dtype} of shape {kept.shape}; correct it"
            )
        arrays[MASK] = kept.astype(np.int64)
    elif IDS in arrays:
        arrays[MASK] = np.ones(len(arrays[IDS]), np.int64)
    return Source({n: a for n, a in arrays.items() if n != START}, arrays.get(START))


def read_ids(name: str, number: int, row: object) -> Ids:
    """Return a row of token ids, perhaps none. Raises UserError for anything else."""
    found = _array(name, number, row)
    if found.ndim == 1 and not found.size:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(
            f"{name}: row {number}: wanted a list of token ids, whole numbers, found {found.dtype} of shape {found.shape}; "
            "tokenize text first"
        )
    return found.astype(np.int64)


def _array(name: str, number: int, row: object) -> NDArray[Any]:
    try:
        found = np.asarray(row)
    except ValueError:  # ragged
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise UserError(
            f"{name}: row {number}: wanted numbers, found {found.dtype} of shape {found.shape}; correct them"
        )
    return found


def stack_sources(sources: Sequence[Source], names: Sequence[str]) -> list[NDArray[Any]]:
    """Return a batch of each input. Shorter texts are padded behind their end with tokens that the mask hides.

    Raises: UserError for other inputs of unequal shapes.
    """
    found = []
    for name in names:
        rows = [source.arrays[name] for source in sources]
        if name in (IDS, MASK):
            longest = max(len(row) for row in rows)
            rows = [np.pad(row, (0, longest - len(row))) for row in rows]
        elif len({row.shape for row in rows}) > 1:
            shapes = sorted({row.shape for row in rows})
            raise UserError(f"{name}: wanted rows of one shape, found {shapes[0]} and {shapes[-1]}; pad them")
        else:
            rows = [row.astype(np.float32, copy=False) for row in rows]
        found.append(np.stack(rows))
    return found


def check_sources(sources: Sequence[Source], names: Sequence[str]) -> None:
    """Raise UserError for a source with other inputs than the model's encoder has."""
    for found in {tuple(sorted(source.arrays)) for source in sources}:
        if set(found) != set(names):
            raise UserError(
                f"prompts: wanted the encoder's inputs {', '.join(names)} by name, and perhaps {START}, found {', '.join(found)}; "
                "correct them"
            )
