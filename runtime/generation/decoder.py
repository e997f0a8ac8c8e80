"""A model of the functions `prefill` and `decode`: rows of equal length, their logits and caches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode

PREFILL, DECODE = "prefill", "decode"


class Decoder:
    """A decoder, checked for its functions.

    The model: `prefill(input_ids (b, n)) -> (logits (b, _, vocabulary), *caches)` and `decode(input_ids (b, 1), *caches)` with results
    of the same kind. Rows come first in each cache.

    room: most past positions that `decode` takes; None if they are unbounded
    least_rows, most_rows: bounds of b; None if it is unbounded above

    Raises: UserError for a model without these functions.
    """

    def __init__(self, model: Model) -> None:
        missing = [name for name in (PREFILL, DECODE) if name not in model.functions]
        if missing:
            raise UserError(
                f"wanted a model with the functions {PREFILL} and {DECODE}, found {', '.join(model.functions)}; build a decoder"
            )
        self.model = model
        program = model.executors[DECODE].program
        self.room = positions(program)
        self.least_rows, self.most_rows = bounds(program, program.buffers[program.inputs[0]].shape[0])

    def limit(self, length: int, wanted: int) -> int:
        """Return how many tokens can be added to a prompt of `length`: at most `wanted`, at least one if wanted."""
        return wanted if self.room is None else min(wanted, max(1, self.room - length + 2))

    def prefill(self, ids: NDArray[np.int64]) -> DecodingState:
        """Compute the logits and caches of rows (b, n)."""
        return DecodingState(self, self.run([ids], PREFILL))

    def run(self, arrays: list[NDArray[Any]], function: str) -> list[NDArray[Any]]:
        """Call a function; rows that the model wants in addition repeat the last one, and their results are dropped."""
        rows = len(arrays[0])
        if rows >= self.least_rows:
            return self.model.run(arrays, function)
        filled = [np.concatenate([a, np.repeat(a[-1:], self.least_rows - rows, axis=0)]) for a in arrays]
        return [result[:rows] for result in self.model.run(filled, function)]


class DecodingState:
    """The logits (b, vocabulary) f32 after the last token of each row, and the rows' caches."""

    def __init__(self, decoder: Decoder, results: list[NDArray[Any]]) -> None:
        self._decoder = decoder
        self._set(results)

    def _set(self, results: list[NDArray[Any]]) -> None:
        logits, *self.caches = results
        self.logits = logits[:, -1].astype(np.float32, copy=False)

    def extend(self, tokens: NDArray[np.int64]) -> None:
        """Add a token to every row, (b,), and compute what follows."""
        self._set(self._decoder.run([tokens[:, None], *self.caches], DECODE))

    def select(self, rows: NDArray[np.int64]) -> None:
        """Take these rows, in this order, some perhaps several times; the caches are copied unless nothing changes."""
        if not np.array_equal(rows, np.arange(len(self.logits))):
            self.logits = self.logits[rows]
            self.caches = [cache[rows] for cache in self.caches]


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


def bounds(program: Program, slot: int) -> tuple[int, int | None]:
    """Return the least and the greatest value of a dim: its symbol's bounds, or the constant; 0 and None of other dims."""
    opcode, operand = program.scalars[slot * WIDTH : slot * WIDTH + 2]
    if opcode == Opcode.SYMBOL:
        return program.symbols[operand].lower, program.symbols[operand].upper
    return (operand, operand) if opcode == Opcode.CONST else (0, None)
