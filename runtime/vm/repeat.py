"""Counted loops: a program that runs once for each number of a range, over states and rows (`host_program.Repeat`).

On a device that repeats launches, the steps are bound once per range and sizes. A step reads the state where the step before wrote it, and
writes its rows where they stay. Between steps only addresses and the numbers that depend on the index change, so the loop needs no
Python. On other devices each step is a call.

Tests: `tests/runtime/vm/test_repeat.py`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.arguments import check_values
from relax_tune.runtime.bound_program import BoundProgram, Numbers
from relax_tune.runtime.device.base import DeviceBuffer, Launch, RepeatsLaunches
from relax_tune.runtime.device.memory import aligned_array
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray, on_host
from relax_tune.runtime.program.host_program import Repeat
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import compile_scalars, only_slots, symbolic_slots
from relax_tune.runtime.vm.instructions import describe

Array = NDArray[Any]

CHUNK = 1024
"""Steps that a device repeats at a time. Between them, an interruption is raised."""
MOST_STEPS = 1 << 20
"""Steps that are planned together, with a row of numbers in memory for each; the steps of a longer loop are calls."""
MAX_PLANS = 16
"""Plans that a loop keeps, the least recently used one first out."""


class StepLoop:
    """The loop of one `Repeat`. Threads may call `run` at once.

    Args:
        executor: Executor of the program.
        i: The instruction.
    """

    def __init__(self, executor: Executor, i: Repeat) -> None:
        self.executor, self._i = executor, i
        self._plans: OrderedDict[tuple[object, ...], LoopPlan | None] = OrderedDict()
        self._layout = layout_of(executor, i)

    def run(
        self,
        span: range,
        symbols: Sequence[int],
        states: Sequence[Any],
        rows: Sequence[Any],
        args: Sequence[Any],
        pool: BufferPool | None = None,
    ) -> list[Any]:
        """Run the program for each number.

        Args:
            span: The numbers.
            symbols: The value of each symbol; the value of the index counts for nothing.
            states: The first states.
            rows: The first rows.
            args: Arrays that stay the same.
            pool: Memory of states between the steps, on a device that does not reach the host's.

        Returns:
            The last states, then all rows.

        Raises:
            UserError: As `Executor.run`; or the first rows are no array.
            ArtifactError: A row has other dims than the rows before.
        """
        for first in rows:
            if not isinstance(first, (np.ndarray, DeviceArray)) or not first.ndim:
                raise UserError(f"{self.executor.program.name}: expected rows in an array, got {describe(first)}")
        if self._layout is not None and pool is None and 0 < span.stop - span.start <= MOST_STEPS:
            results = self._repeat(self._layout, span, symbols, states, rows, args)
            if results is not None:
                return results
        return self._call(span, symbols, states, rows, args, pool)

    def _call(
        self,
        span: range,
        symbols: Sequence[int],
        states: Sequence[Any],
        rows: Sequence[Any],
        args: Sequence[Any],
        pool: BufferPool | None,
    ) -> list[Any]:
        """Run each step as a call of the executor."""
        i, numbers, values = self._i, list(symbols), list(states)
        appended: list[list[Any]] = [[] for _ in rows]
        for number in span:
            if i.index is not None:
                numbers[i.index] = number
            known = [*values, *args]
            results = self.executor.run([known[n] for n in i.inputs], numbers, in_place=True, pool=pool)
            known = [*results, *known]
            values = [known[n] for n in i.after]
            for more, n in zip(appended, i.appended, strict=True):
                more.append(known[n])
        return [*values, *map(self._stacked, map(on_host, rows), appended)]

    def _stacked(self, first: Array, more: Sequence[Any]) -> Array:
        dims = first.shape[1:]
        for row in more:
            if (row.dtype, math.prod(row.shape)) != (first.dtype, math.prod(dims)):
                name = self.executor.program.name
                raise ArtifactError(
                    f"{name}: expected rows of {first.dtype} {dims}, got one of {row.dtype} {row.shape}"
                )
        return np.concatenate([first, *(on_host(row).reshape(1, *dims) for row in more)])

    def _repeat(
        self,
        layout: LoopLayout,
        span: range,
        symbols: Sequence[int],
        states: Sequence[Any],
        rows: Sequence[Any],
        args: Sequence[Any],
    ) -> list[Any] | None:
        """Run the steps in a loop of the device; None if it cannot."""
        i, executor, numbers = self._i, self.executor, list(symbols)
        if i.index is not None:
            numbers[i.index] = span[0]
        known = [*states, *args]
        arrays, key, values = executor.match([known[n] for n in i.inputs], numbers)
        check_values(executor.program, arrays, values)
        with executor.call():
            executor.check_open()
            plan = self._planned(layout, span, key)
            if plan is None or not plan.fits(rows):
                return None
            if executor.record is not None:
                for number in span:
                    executor.record(_with(key, i.index, number))
            executor.memory.results.begin()
            stacks = [self._room(on_host(first), len(span)) for first in rows]
            last = plan.run([on_host(a) for a in arrays], stacks)
        return [*(old if new is None else new for old, new in zip(states, last, strict=True)), *stacks]

    def _room(self, first: Array, count: int) -> Array:
        """Return rows with memory for further ones."""
        stack: Array = self.executor.memory.results.empty(first.dtype, (len(first) + count, *first.shape[1:]))
        stack[: len(first)] = first
        return stack

    def plan(self, span: range, key: tuple[int, ...]) -> LoopPlan | None:
        """Return a plan for the values of the symbols in the first step; None where the steps are calls."""
        if self._layout is None or not 0 < len(span) <= MOST_STEPS:
            return None
        return self._planned(self._layout, span, key)

    def _planned(self, layout: LoopLayout, span: range, key: tuple[int, ...]) -> LoopPlan | None:
        known = (span, key)
        if known not in self._plans:
            self._plans[known] = LoopPlan.of(self.executor, self._i, layout, span, key)
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(known)
        plan = self._plans[known]
        if plan is not None:
            plan.renew()
        return plan


@dataclass(frozen=True, slots=True)
class LoopLayout:
    """What a loop in the device needs to know of its program, for all sizes.

    Attributes:
        device: The device.
        varies: For each slot, whether it depends on the index.
        chosen: Slots that depend on the index and decide variants, sizes or checks.
        carried: For each state the output that is its next value; None for a state that stays the same.
        stacked: The rows in whose memory an output is written, by output.
    """

    device: RepeatsLaunches
    varies: Sequence[bool]
    chosen: Sequence[int]
    carried: Sequence[int | None]
    stacked: dict[int, int]


def layout_of(executor: Executor, i: Repeat) -> LoopLayout | None:
    """Return the layout of a loop; None where its steps are calls.

    Steps are calls on a device that cannot repeat launches, and where a step needs the host: indices that an iteration computes are
    checked, an output shares memory with another array, or a row or state is an older state.
    """
    program, device = executor.program, executor.device
    outputs, given = len(program.outputs), [*program.inputs, *program.outputs]
    after = [None if n == outputs + state else n for state, n in enumerate(i.after)]
    if not isinstance(device, RepeatsLaunches) or program.checked or not executor.memory.placeable.issuperset(given):
        return None
    if any(program.buffers[n].outer for n in given) or any(
        n is not None and n >= outputs for n in (*after, *i.appended)
    ):
        return None
    varies = symbolic_slots(program.scalars, i.index) if i.index is not None else [False] * len(program.scalars)
    states = {index for index, n in zip(program.inputs, i.inputs) if n < len(i.states)}
    if any(r.buffer in states or varies[r.low] or varies[r.high] for r in program.ranges):
        return None
    if any(program.buffers[n].fill.kind == "integers" for n in states):
        return None
    if any(varies[slot] for n in given for slot in program.buffers[n].shape):
        return None
    stacked = {n: number for number, n in reversed(list(enumerate(i.appended)))}
    return LoopLayout(device, varies, [s for s in _deciding(program) if varies[s]], after, stacked)


def _deciding(program: Program) -> Sequence[int]:
    """Return the slots that decide variants, sizes and checks."""
    sizes = (slot for b in program.buffers for slot in b.shape)
    return sorted({*program.storages, *sizes, *(c.choice for c in program.calls), *(c.slot for c in program.checks)})


def _values(program: Program, slots: Sequence[int], keys: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the values of some slots for the values of the symbols in each step."""
    code, at = only_slots(program.scalars, slots)
    evaluate = compile_scalars(code, len(program.symbols))
    return (tuple([values[n] for n in at]) for values in map(evaluate, keys))


class _Run:
    """Steps of a plan that choose alike.

    Attributes:
        bound: Their binding, of the first one.
        numbers: Values of all slots, which the device changes from step to step.
        slots: The slots that it changes.
        table: Their values, a row for each step.
        launches: The launches of a step.
        loop: Repeats the launches in the device; None if one of them needs the host's code.
    """

    def __init__(
        self, program: Program, layout: LoopLayout, bound: BoundProgram, keys: Sequence[tuple[int, ...]]
    ) -> None:
        self.bound, self.numbers = bound, bound.numbers.copy()
        self.slots = sorted({s for step in bound.steps for s in step.scalars if layout.varies[s]})
        rows = list(_values(program, self.slots, keys))
        self.table: Numbers = np.array(rows, np.int64).reshape(len(keys), len(self.slots))
        self.launches: Sequence[Launch] = ()
        self.loop: Callable[[Numbers], None] | None = None

    @property
    def cells(self) -> Numbers:
        """Addresses of the slots."""
        first: int = self.numbers.__array_interface__["data"][0]
        return np.array([first + slot * self.numbers.itemsize for slot in self.slots], np.int64)


class LoopPlan:
    """The steps of a loop for a span and sizes, bound to buffers whose memory each run gives. One thread at a time uses it."""

    def __init__(self, executor: Executor, i: Repeat, layout: LoopLayout, runs: Sequence[_Run]) -> None:
        self._executor, self._i, self._layout, self._runs = executor, i, layout, runs
        self._bound = runs[0].bound
        program, device = executor.program, executor.device
        # Buffers without memory of their own: each run places arrays.
        self._buffers: dict[int, DeviceBuffer] = {n: device.alloc(1) for n in (*program.inputs, *program.outputs)}
        self._spares: Numbers = np.zeros(len(program.outputs), np.int64)
        self._types = [self._type(index) for index in program.outputs]
        self._steps = sum(len(run.table) for run in runs)
        self._generation = -1

    @classmethod
    def of(
        cls, executor: Executor, i: Repeat, layout: LoopLayout, span: range, key: tuple[int, ...]
    ) -> LoopPlan | None:
        """Return the plan for sizes; None if an array changes its type or size from one step to the next.

        Args:
            executor: Executor of the program.
            i: The instruction.
            layout: Its layout.
            span: The numbers.
            key: Values of the symbols in the first step.

        Raises:
            UserError: A number is outside the bounds of its symbol, or a run-time check fails.
        """
        program = executor.program
        keys = [_with(key, i.index, number) for number in span]
        executor.bind(
            keys[-1], cached=False
        )  # the first and the last number are checked against the bounds of the index
        runs: list[_Run] = []
        bounds: dict[tuple[int, ...], BoundProgram] = {}
        for chosen, steps in groupby(
            zip(_values(program, layout.chosen, keys), keys, strict=True), lambda step: step[0]
        ):
            alike = [k for _, k in steps]
            if chosen not in bounds:
                bounds[chosen] = executor.bind(alike[0], cached=False)
            runs.append(_Run(program, layout, bounds[chosen], alike))
        # Routines of libraries take their numbers when they are bound.
        for step in (s for run in runs for s in run.bound.steps if s.kind == "library"):
            if any(layout.varies[slot] for slot in step.scalars):
                return None
        plan = cls(executor, i, layout, runs)
        return plan if all(map(plan._agrees, program.inputs, i.inputs)) else None

    def _agrees(self, index: int, value: int) -> bool:
        """Return whether an input has the type and dims of the output that is its next value."""
        output = self._layout.carried[value] if value < len(self._i.states) else None
        return output is None or self._type(index) == self._type(self._executor.program.outputs[output])

    def _type(self, index: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        return np.dtype(self._executor.program.buffers[index].dtype), self._bound.shape(index)

    def fits(self, rows: Sequence[Any]) -> bool:
        """Return whether outputs are rows of these arrays."""
        types = [self._type(self._executor.program.outputs[n]) for n in self._i.appended]
        return all(
            (r.dtype, math.prod(r.shape[1:])) == (dtype, math.prod(shape))
            for r, (dtype, shape) in zip(rows, types, strict=True)
        )

    def renew(self) -> None:
        """Bind the launches if the memory of the executor has moved."""
        memory = self._executor.memory
        if self._generation == memory.generation:
            return
        for run in self._runs:
            memory.grow(run.bound, self._buffers)
        for run in self._runs:
            run.launches = self._executor.launches_over(run.bound, self._buffers, run.numbers)
            run.loop = self._layout.device.repeated(run.launches, run.cells, self._moves())
        self._generation = memory.generation

    def _moves(self) -> Numbers:
        """Return the changes of addresses after a step (`RepeatsLaunches.repeated`)."""
        program, layout, cell = self._executor.program, self._layout, self._layout.device.cell
        outputs = [cell(self._buffers[index]) for index in program.outputs]
        spare: int = self._spares.__array_interface__["data"][0]
        moves = [
            (cell(self._buffers[index]), outputs[output], 0)
            for index, n in zip(program.inputs, self._i.inputs, strict=True)
            if n < len(layout.carried) and (output := layout.carried[n]) is not None
        ]
        for n, index in enumerate(program.outputs):
            if n in layout.stacked:
                moves.append((outputs[n], outputs[n], self._bound.nbytes(index)))
            else:  # the two memories of an output: one is read as a state while the other is written
                moves += [(outputs[n], spare, 0), (spare, outputs[n], 0)]
            spare += self._spares.itemsize
        return np.array(moves, np.int64).reshape(len(moves), 3)

    def pairs(self) -> list[tuple[Array, ...]]:
        """Return memory for the outputs that are states only: two arrays for each, which take turns."""
        return [() if n in self._layout.stacked else _pair(*own) for n, own in enumerate(self._types)]

    def run(
        self, arrays: Sequence[Array], stacks: Sequence[Array], pairs: Sequence[tuple[Array, ...]] | None = None
    ) -> list[Array | None]:
        """Run the steps in the turn of the device.

        Args:
            arrays: The inputs of the first step.
            stacks: Rows with memory for the rows of all steps at their end.
            pairs: Memory of states to reuse; by default new memory.

        Returns:
            The last states, in `pairs` or `stacks`; None for one that stays the same.
        """
        steps, types = self._steps, self._types
        program, layout = self._executor.program, self._layout
        pairs = self.pairs() if pairs is None else pairs

        def written(output: int, step: int) -> Array:
            """Return the array that an output is written to in a step."""
            if output not in layout.stacked:
                return pairs[output][step % 2]
            rows = stacks[layout.stacked[output]]
            at = len(rows) - steps + step
            return rows[at : at + 1]

        first = [in_place(a) for a in arrays]
        try:
            self._place(zip(program.inputs, first, strict=True))
            self._place((index, written(n, 0)) for n, index in enumerate(program.outputs))
            self._spares[:] = [p[1].__array_interface__["data"][0] if p else 0 for p in pairs]
            done = 0
            for run in self._runs:
                if run.loop is None:
                    self._step_by_step(run, done, written)
                else:
                    for start in range(0, len(run.table), CHUNK):
                        run.loop(run.table[start : start + CHUNK])
                done += len(run.table)
        finally:
            self._place((index, None) for index in self._buffers)
        for number, n in enumerate(self._i.appended):
            own = layout.stacked[n]
            if number != own:  # one output is the row of several
                stacks[number][-steps:] = stacks[own][-steps:].reshape(stacks[number][-steps:].shape)
        return [None if n is None else written(n, steps - 1).reshape(types[n][1]) for n in layout.carried]

    def _step_by_step(self, run: _Run, done: int, written: Callable[[int, int], Array]) -> None:
        """Run steps whose launches need the host's code, after `done` others."""
        program, carried = self._executor.program, self._layout.carried
        reads = [(index, carried[n]) for index, n in zip(program.inputs, self._i.inputs) if n < len(carried)]
        for step, numbers in enumerate(run.table, done):
            run.numbers[run.slots] = numbers
            if step:
                self._place((index, written(n, step - 1)) for index, n in reads if n is not None)
            self._place((index, written(n, step)) for n, index in enumerate(program.outputs))
            for launch in run.launches:
                launch()

    def _place(self, arrays: Iterable[tuple[int, Array | None]]) -> None:
        for index, array in arrays:
            self._executor.device.place(self._buffers[index], array)


def in_place(array: Array) -> Array:
    """Return an array that kernels can read: the same one if it is contiguous and aligned, else a copy."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=["C", "A"])


def _pair(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, Array]:
    return aligned_array(dtype, shape), aligned_array(dtype, shape)


def _with(key: tuple[int, ...], index: int | None, number: int) -> tuple[int, ...]:
    """Return values of symbols with another one for the index."""
    return key if index is None else (*key[:index], number, *key[index + 1 :])
