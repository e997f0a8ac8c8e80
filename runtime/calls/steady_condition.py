"""The condition under which a session's next step differs from the one before in numbers only, as scalars.

Tests: `tests/tuner/emit/test_sessions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.bound_program import BoundProgram
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import SIZE_LIMIT
from relax_tune.runtime.program.scalars import WIDTH, Opcode, symbolic_slots


class Replaced(NamedTuple):
    """An argument that a result replaces.

    Attributes:
        position: Position among the inputs.
        argument: Number of the argument's buffer.
        result: Number of the result's buffer.
        extends: The result is the argument with more elements at its end, or with some elements changed.
    """

    position: int
    argument: int
    result: int
    extends: bool


class SteadyCondition:
    """The scalars of a program, and behind them the condition: the last slot, 0 where a step must be bound as a whole.

    Args:
        executor: Executor of the program.
        grown: The arguments that results extend. Their dims, and symbols with these as values, change from step to step.

    Attributes:
        code: The list of scalars. Its symbols are the program's, and further ones with which values are compared.
        moves: A pair (symbol, slot) for each symbol that has the value of a slot in the step before.
    """

    def __init__(self, executor: Executor, grown: Sequence[Replaced]) -> None:
        program = executor.program
        self._executor, self._program, self._grown = executor, program, grown
        self._code, self._symbols = list(program.scalars), len(program.symbols)
        results = {r.position: program.buffers[r.result].shape for r in grown}
        moves = [(s, results[at][dim]) for s, (at, dim) in executor.binders.items() if at in results]
        each = [symbolic_slots(program.scalars, symbol) for symbol, _ in moves]
        self._varies = [any(column) for column in zip(*each)] if each else [False] * (len(self._code) // WIDTH)
        self._fixed: list[tuple[int, int]] = []  # further symbols and the slots that must keep their values
        self._rooms: list[
            tuple[int, list[Replaced]]
        ] = []  # further symbols and the arguments whose memory limits a size
        self._storages: list[tuple[int, int]] = []  # further symbols and the storages whose memory limits a size
        self._of_kind: dict[int, int] = {}
        conditions = [
            *self._within_bounds([symbol for symbol, _ in moves]),
            *self._stays(),
            *self._continues(moves),
            *self._fits(),
        ]
        self._add(
            Opcode.NE,
            reduce(lambda a, b: self._add(Opcode.AND, a, b), conditions, self._constant(1)),
            self._constant(0),
        )
        self.code, self.moves = np.array(self._code, np.int64), np.array(moves, np.int64).reshape(len(moves), 2)

    def symbols(self, bound: BoundProgram, rooms: Mapping[Replaced, int]) -> NDArray[np.int64]:
        """Return the values of all symbols for the steps after a bound one.

        Args:
            bound: The binding.
            rooms: Bytes of the memory of each argument that results extend.
        """
        values = np.zeros(self._symbols, np.int64)
        values[: len(bound.symbols)] = bound.symbols
        for symbol, slot in self._fixed:
            values[symbol] = bound.values[slot]
        for symbol, limited in self._rooms:
            values[symbol] = min(rooms[r] for r in limited)
        room = self._executor.memory.storage_bytes()
        for symbol, number in self._storages:
            values[symbol] = room[number]
        return values

    def _add(self, op: Opcode, a: int, b: int) -> int:
        self._code += (int(op), a, b, 0)
        return len(self._code) // WIDTH - 1

    def _varying(self, slots: Iterable[int]) -> list[int]:
        return sorted({slot for slot in slots if self._varies[slot]})

    def _constant(self, value: int) -> int:
        return self._add(Opcode.CONST, value, 0)

    def _further(self) -> tuple[int, int]:
        """Return a further symbol and its slot."""
        self._symbols += 1
        return self._symbols - 1, self._add(Opcode.SYMBOL, self._symbols - 1, 0)

    def _within_bounds(self, symbols: Iterable[int]) -> Iterator[int]:
        """Yield slots that are 1 if symbols are within their bounds."""
        for symbol in symbols:
            spec, value = self._program.symbols[symbol], self._add(Opcode.SYMBOL, symbol, 0)
            yield self._add(Opcode.LE, self._constant(spec.lower), value)
            yield self._add(Opcode.LE, value, self._constant(SIZE_LIMIT if spec.upper is None else spec.upper))

    def _stays(self) -> Iterator[int]:
        """Yield slots that are 1 if nothing changes but numbers that kernels read: no variant, no dim of another argument, no check."""
        program = self._program
        moving = {index for r in self._grown for index in (r.argument, r.result)}
        slots = [s for i in (*program.inputs, *program.outputs) if i not in moving for s in program.buffers[i].shape]
        steps = [step for call in program.calls for variant in call.variants for step in variant.steps]
        # Routines of libraries get their numbers when they are bound.
        slots += [s for step in steps if step.kind == "library" for s in step.scalars]
        slots += [s for r in program.ranges for s in (r.low, r.high)]
        slots += [call.choice for call in program.calls]
        for slot in self._varying(slots):
            symbol, value = self._further()
            self._fixed.append((symbol, slot))
            yield self._add(Opcode.EQ, slot, value)
        yield from self._varying(check.slot for check in program.checks)

    def _continues(self, moves: list[tuple[int, int]]) -> Iterator[int]:
        """Yield slots that are 1 if the dims of each argument are its result's of the step before, and add what they read to `moves`."""
        buffers = self._program.buffers
        pairs = {pair for r in self._grown for pair in zip(buffers[r.argument].shape, buffers[r.result].shape)}
        for argument, result in sorted(pairs):
            before = result
            if self._varies[argument] or self._varies[result]:
                symbol, before = self._further()
                moves.append((symbol, result))
            yield self._add(Opcode.EQ, argument, before)

    def _fits(self) -> Iterator[int]:
        """Yield slots that are 1 if the sizes that vary are within memory, as `BufferSizes.of` and `ProgramMemory.grow` require."""
        sizes, memory, slots = self._executor.sizes, self._executor.memory, self._program.storages
        yield from (
            self._add(Opcode.LE, self._constant(0), s) for s in self._varying(s for row, _ in sizes.rows for s in row)
        )
        varying = {kind for kind, (shape, _) in enumerate(sizes.rows) if self._varying(shape)}
        for kind, slot in sizes.kinds_stored:
            if kind in varying or self._varies[slot]:
                yield self._add(Opcode.LE, self._nbytes(kind), slot)
        for kind, base in sizes.kinds_viewed:
            if varying & {kind, base}:
                yield self._add(Opcode.LE, self._nbytes(kind), self._nbytes(base))
        for number, slot in enumerate(slots):
            if self._varies[slot]:
                symbol, value = self._further()
                self._storages.append((symbol, number))
                yield self._add(Opcode.LE, slot, value)
        limited: dict[int, list[Replaced]] = {}
        for r in self._grown:
            for kind in memory.kinds_at(r.argument):
                limited.setdefault(kind, []).append(r)
        for kind, arguments in limited.items():
            symbol, value = self._further()
            self._rooms.append((symbol, arguments))
            yield self._add(Opcode.LE, self._nbytes(kind), value)

    def _nbytes(self, kind: int) -> int:
        """Return the slot of the bytes of a kind of buffers."""
        if kind not in self._of_kind:
            shape, size = self._executor.sizes.rows[kind]
            self._of_kind[kind] = reduce(lambda a, b: self._add(Opcode.MUL, a, b), shape, self._constant(size))
        return self._of_kind[kind]
