"""Greedy generation with a model that has the functions `prefill` and `decode` (see `Artifact.functions`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode

PREFILL, DECODE = "prefill", "decode"


def greedy(model: Model, prompt: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the likeliest next token of every row, (b,) i64, until the model's positions end.

    model: `prefill(input_ids (b, n)) -> (logits (b, _, vocabulary), *cache)` and `decode(input_ids (b, 1), *cache)` with results
    of the same kind. prompt: (b, n) token ids; the rows are of one length, as nothing tells padding from text.

    Raises: UserError for a model without these functions, or a prompt that `prefill` does not take.
    """
    missing = [name for name in (PREFILL, DECODE) if name not in model.functions]
    if missing:
        raise UserError(
            f"wanted a model with the functions {PREFILL} and {DECODE}, found {', '.join(model.functions)}; build a decoder"
        )
    room = positions(model.executors[DECODE].program)
    logits, *cache = model.run([prompt], PREFILL)
    past = np.asarray(prompt).shape[1]
    while True:
        token = np.argmax(logits[:, -1], axis=-1).astype(np.int64)
        yield token
        if room is not None and past > room:
            return
        logits, *cache = model.run([token[:, None], *cache], DECODE)
        past += 1


def generate(model: Model, prompt: NDArray[np.int64], tokens: int, stop: Collection[int] = ()) -> NDArray[np.int64]:
    """Extend `prompt` (b, n) by up to `tokens` likeliest tokens: (b, n + added) i64.

    Generation ends when every row has had a token of `stop`, or when the model has no more positions. Until then, rows
    continue after their stop tokens.

    Raises: as `greedy`, and UserError for negative `tokens`.
    """
    if tokens < 0:
        raise UserError(f"wanted how many tokens to add, 0 or more, found {tokens}; give such a number")
    found: list[NDArray[Any]] = [np.asarray(prompt)]
    ended = np.zeros(len(prompt), np.bool_)
    for token in islice(greedy(model, prompt), tokens):
        found.append(token[:, None])
        ended |= np.isin(token, list(stop))
        if ended.all():
            break
    return np.concatenate(found, axis=1)


def positions(decode: Program) -> int | None:
    """Return the most past positions that `decode` takes; None if they are unbounded.

    It is the bound of the symbol that its cache has and its token ids do not.
    """
    ids, *cache = (decode.buffers[i].shape for i in decode.inputs)
    for slot in (slot for shape in cache for slot in shape if slot not in ids):
        opcode, symbol = decode.scalars[slot * WIDTH : slot * WIDTH + 2]
        if opcode == Opcode.SYMBOL:
            return decode.symbols[symbol].upper
    return None
