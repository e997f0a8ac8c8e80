"""A model of the functions `prefill` and `decode`: rows of equal length, their logits and caches.

Tests: `tests/tuner/emit/test_generate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.calls.session import Session
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import WIDTH, Opcode

PREFILL, DECODE, ENCODE = "prefill", "decode", "encode"


class Decoder:
    """A decoder, checked for its functions.

    The model: `prefill(input_ids (b, n)) -> (logits (b, _, vocabulary), *caches)` and `decode(input_ids (b, 1), *caches)` with results
    of the same kind. Rows come first in each cache. An encoder-decoder has `encode` too: `prefill` and `decode` take its results
    before the caches, and before these its inputs of the same name as theirs, such as `attention_mask`.

    Attributes:
        sources: Names of the inputs of `encode`; empty without an encoder.
        room: Maximum number of past positions that `decode` takes; None if it is unbounded.
        least_rows: Lower bound of b.
        most_rows: Upper bound of b; None if it is unbounded.

    Raises:
        UserError: The model lacks one of these functions.
    """

    def __init__(self, model: Model) -> None:
        missing = [name for name in (PREFILL, DECODE) if name not in model.functions]
        if missing:
            raise UserError(
                f"expected a model with the functions {PREFILL} and {DECODE}, got {', '.join(model.functions)}; build a decoder"
            )
        self.model = model
        program = model.executors[DECODE].program
        self.sources: tuple[str, ...] = ()
        if ENCODE in model.functions:
            encode, prefill = (model.executors[name].program for name in (ENCODE, PREFILL))
            self.sources = tuple(encode.buffers[i].name for i in encode.inputs)
            self._shared = [n for n in (prefill.buffers[i].name for i in prefill.inputs[1:]) if n in self.sources]
        self.room = positions(program)
        self.least_rows, self.most_rows = bounds(program, program.buffers[program.inputs[0]].shape[0])

    def limit(self, length: int, requested: int) -> int:
        """Return how many tokens can be added to a prompt of `length`: at most `requested`, at least one if any are requested."""
        return requested if self.room is None else min(requested, max(1, self.room - length + 2))

    def prefill(self, ids: NDArray[np.int64], sources: Sequence[NDArray[Any]] = ()) -> DecodingState:
        """Compute the logits and caches of rows (b, n). sources: inputs of `encode`, if there is one"""
        context: list[NDArray[Any]] = []
        if self.sources:
            given = dict(zip(self.sources, sources, strict=True))
            context = [*(given[n] for n in self._shared), *self.run(list(sources), ENCODE)]
        return DecodingState(self, self.run([ids, *context], PREFILL), context)

    def keep(self, context: Sequence[NDArray[Any]], caches: Sequence[NDArray[Any]]) -> Session | None:
        """Open a session of `decode` with these on the device; None for fewer rows than the model takes."""
        if not caches or len(caches[0]) < self.least_rows:
            return None
        program = self.model.executors[DECODE].program
        names = [program.buffers[i].name for i in program.inputs[1:]]
        start = dict(zip(names, (*context, *caches), strict=True))
        return self.model.session(start, DECODE, {n: 1 + at for at, n in enumerate(names[len(context) :])})

    def run(self, arrays: list[NDArray[Any]], function: str) -> list[NDArray[Any]]:
        """Call a function; rows up to the minimum of the model repeat the last one, and their results are dropped."""
        rows = len(arrays[0])
        if rows >= self.least_rows:
            return self.model.run(arrays, function)
        filled = [np.concatenate([a, np.repeat(a[-1:], self.least_rows - rows, axis=0)]) for a in arrays]
        return [result[:rows] for result in self.model.run(filled, function)]


class DecodingState:
    """The logits (b, vocabulary) f32 after the last token of each row, and the rows' caches.

    The caches stay on the device from the first token on that is added without a selection of rows before it.

    context: arrays of the rows' sources, which no token changes
    """

    def __init__(self, decoder: Decoder, results: list[NDArray[Any]], context: Sequence[NDArray[Any]] = ()) -> None:
        self._decoder, self.context = decoder, list(context)
        self._sources = np.arange(len(results[0]))  # number of each row's source
        self._session: Session | None = None
        self._selected = False
        self._set(results)

    def _set(self, results: list[NDArray[Any]]) -> None:
        logits, *self._caches = results
        self.logits = logits[:, -1].astype(np.float32, copy=False)

    @property
    def caches(self) -> list[NDArray[Any]]:
        """The caches in the host's memory; copies of those on the device."""
        return self._caches if self._session is None else list(self._session.arrays().values())

    def extend(self, tokens: NDArray[np.int64]) -> None:
        """Add a token to every row, (b,), and compute what follows."""
        if self._session is None and not self._selected:
            self._session = self._decoder.keep(self.context, self._caches)
        # Rows that are selected at every step, as by beam search, would move to the device and back each time, so a
        # session is opened only once a step has selected none.
        self._selected = False
        if self._session is None:
            self._set(self._decoder.run([tokens[:, None], *self.context, *self._caches], DECODE))
        else:
            self._set(self._session.run([tokens[:, None]]))

    def select(self, rows: NDArray[np.int64]) -> None:
        """Take these rows, in this order, some perhaps several times; the caches are copied unless nothing changes."""
        if not np.array_equal(rows, np.arange(len(self.logits))):
            self.logits = self.logits[rows]
            self._caches = [cache[rows] for cache in self.caches]
            self._session, self._selected = None, True
            sources = self._sources[rows]
            if not np.array_equal(sources, self._sources):  # beams of one source share it
                self.context = [array[rows] for array in self.context]
            self._sources = sources


def positions(decode: Program) -> int | None:
    """Return the most past positions that `decode` takes; None if they are unbounded.

    It is the bound of the symbol that its caches have and its token ids do not. Caches are the last inputs, a result each.
    """
    shapes = [decode.buffers[i].shape for i in decode.inputs]
    ids, cache = shapes[0], shapes[len(shapes) + 1 - len(decode.outputs) :]
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
