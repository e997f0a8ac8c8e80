"""Requests as rows of one call: whether a program lets them run together, how they are joined, how results are divided.

Joining needs independent rows: the first dim of every input and result is the batch symbol, no other dim contains it, and no row of a
result depends on another row of an input. The first two are read off the program. The last is a proof that the build stored
(`Artifact.independent_rows`), or the word of a user.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.program.program import SIZE_LIMIT, Program
from relax_tune.runtime.program.scalars import ARITY, WIDTH, Opcode

Arrays = list[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Joining:
    """How requests of a program become one call.

    Attributes:
        program: The program.
        batch: Number of the batch symbol.
        padded: Number of the symbol along which shorter requests are padded with zeros, which the model masks; None: requests of equal
            other dims run together.

    Raises:
        UserError: The dims of the program do not allow this.
    """

    program: Program
    batch: int
    padded: int | None = None

    def __post_init__(self) -> None:
        program, name = self.program, self.program.symbols[self.batch].name
        for index in (*program.inputs, *program.outputs):
            spec = program.buffers[index]
            others = [self._symbols(slot) for slot in spec.shape[1:]]
            plain = bool(spec.shape) and _symbol(program, spec.shape[0]) == self.batch
            if not plain or any(self.batch in symbols for symbols in others):
                raise UserError(
                    f"{program.name}: expected {name} as the first dim of every input and result, and in no other dim, for requests to run "
                    f"together along it; {spec.name} is different"
                )
            if self.padded is not None and any(
                self.padded in symbols and _symbol(program, slot) != self.padded
                for slot, symbols in zip(spec.shape[1:], others)
            ):
                raise UserError(f"{program.name}: expected plain dims to pad, got a computed dim of {spec.name}")
        if self.padded is not None and len(program.symbols) != 2:
            raise UserError(f"{program.name}: expected two symbols to pad along one, got {len(program.symbols)}")

    def _symbols(self, slot: int) -> set[int]:
        """Return the symbols that a slot depends on."""
        code, symbols, pending = self.program.scalars, set[int](), [slot]
        while pending:
            opcode, *operands = code[pending[-1] * WIDTH : pending.pop() * WIDTH + WIDTH]
            if opcode == Opcode.SYMBOL:
                symbols.add(operands[0])
            pending += operands[: ARITY[Opcode(opcode)]]
        return symbols

    @property
    def most_rows(self) -> int | None:
        """Most rows of a call; None: any number."""
        return self.program.symbols[self.batch].upper

    @property
    def least_rows(self) -> int:
        """Fewest rows of a call."""
        return max(self.program.symbols[self.batch].lower, 1)

    def others(self, key: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the symbols other than the batch."""
        return tuple(value for number, value in enumerate(key) if number != self.batch)

    def length(self, key: Sequence[int]) -> int:
        """Return the extent of the other dims that times are measured by: the product of their symbols."""
        return math.prod(max(value, 1) for value in self.others(key))

    def group(self, key: Sequence[int]) -> tuple[int, ...]:
        """Return the group of requests that may run together with these values of the symbols."""
        return () if self.padded is not None else self.others(key)

    def lengths(self) -> tuple[int, int | None]:
        """Return the bounds of `length`."""
        symbols = [s for number, s in enumerate(self.program.symbols) if number != self.batch]
        lower = math.prod(max(s.lower, 1) for s in symbols)
        if any(s.upper is None for s in symbols):
            return lower, None
        return lower, math.prod(min(s.upper or 0, SIZE_LIMIT) for s in symbols)

    def at(self, rows: int, length: int) -> tuple[int, ...]:
        """Return values of the symbols for a shape to time: the other symbols share the length, within their bounds."""
        key, left = [0] * len(self.program.symbols), length
        key[self.batch] = rows
        others = [number for number in range(len(key)) if number != self.batch]
        for at, number in enumerate(others):
            symbol = self.program.symbols[number]
            share = max(1, round(left ** (1 / (len(others) - at))))
            key[number] = max(symbol.lower, 1, min(share, symbol.upper or share))
            left = max(1, left // key[number])
        return tuple(key)

    def join(self, requests: Sequence[Arrays], rows: int, length: int | None) -> Arrays:
        """Return the arguments of one call; further rows repeat the last one.

        Args:
            requests: The arguments of each request, in the order of the parameters.
            rows: Rows of the call.
            length: Extent that the padded dim gets.
        """
        joined: Arrays = []
        for position, index in enumerate(self.program.inputs):
            parts = [arrays[position] for arrays in requests]
            if self.padded is not None and length is not None:
                parts = [self._widened(part, self.program.buffers[index].shape, length) for part in parts]
            missing = rows - sum(len(part) for part in parts)
            if missing > 0:
                parts.append(np.repeat(parts[-1][-1:], missing, axis=0))
            joined.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return joined

    def _widened(self, array: NDArray[Any], slots: Sequence[int], length: int) -> NDArray[Any]:
        dims = [d for d, slot in enumerate(slots) if _symbol(self.program, slot) == self.padded]
        widths = [(0, length - array.shape[d] if d in dims else 0) for d in range(array.ndim)]
        return np.pad(array, widths) if any(after for _, after in widths) else array

    def divide(self, results: Sequence[NDArray[Any]], requests: Sequence[tuple[int, int | None]]) -> list[Arrays]:
        """Return the results of each request, given its rows and its extent of the padded dim."""
        divided: list[Arrays] = []
        start = 0
        for rows, length in requests:
            own: Arrays = []
            for index, result in zip(self.program.outputs, results, strict=True):
                slots = self.program.buffers[index].shape
                cut: list[slice] = [slice(start, start + rows)]
                for slot in slots[1:]:
                    is_padded = self.padded is not None and _symbol(self.program, slot) == self.padded
                    cut.append(slice(length) if is_padded else slice(None))
                own.append(result[tuple(cut)])
            divided.append(own)
            start += rows
        return divided


def _symbol(program: Program, slot: int) -> int | None:
    """Return the number of the symbol that a slot is; None for other slots."""
    opcode, operand = program.scalars[slot * WIDTH : slot * WIDTH + 2]
    return operand if opcode == Opcode.SYMBOL else None


def symbol_number(program: Program, name: str) -> int:
    """Return the number of a symbol. Raises UserError for an unknown name."""
    names = [s.name for s in program.symbols]
    if name not in names:
        raise UserError(f"{program.name}: expected one of its symbols, {', '.join(names) or 'none'}, got {name!r:.80}")
    return names.index(name)


def sample(
    program: Program, key: Sequence[int], values: Sequence[int], generator: np.random.Generator | None = None
) -> Arrays:
    """Return valid arguments at values of the symbols: ones and zeros, or random elements.

    Args:
        program: The program.
        key: Values of the symbols.
        values: Values of all slots at them.
        generator: Draws the elements; without it integers are the least that are valid, and 1 where 1 is.
    """
    arrays: Arrays = []
    ranges = {r.buffer: (values[r.low], values[r.high]) for r in program.ranges}
    for index in program.inputs:
        spec = program.buffers[index]
        shape, dtype = tuple(values[slot] for slot in spec.shape), np.dtype(spec.dtype)
        if dtype.kind in "biu":
            low, high = (int(spec.fill.low), int(spec.fill.high)) if spec.fill.kind == "integers" else (0, 2)
            low, high = ranges.get(index, (low, high))
            few = np.full(shape, low if high <= 1 else max(low, 1), dtype)
            arrays.append(
                few if generator is None else generator.integers(low, max(high, low + 1), shape).astype(dtype)
            )
        elif generator is None:
            arrays.append(np.ones(shape, dtype))
        else:
            arrays.append(generator.standard_normal(shape).astype(dtype))
    return arrays
