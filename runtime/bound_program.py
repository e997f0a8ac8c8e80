"""A program with its symbols bound, and the launches of its steps that calls reuse.

Tests: `tests/runtime/test_executor.py`, `tests/tuner/emit/test_sessions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError
from relax_tune.runtime.device.base import Device, DeviceBuffer, JoinsLaunches, Launch
from relax_tune.runtime.program.buffer_sizes import BufferSizes
from relax_tune.runtime.program.program import LaunchStep, Program

Numbers: TypeAlias = NDArray[np.int64]
Buffers: TypeAlias = Mapping[int, DeviceBuffer]
"""Device buffers of a caller, by the number of the program's buffer they replace."""

NO_BUFFERS: Buffers = MappingProxyType({})


class Memory(Protocol):
    """The memory of an executor. `generation` counts how often it moved."""

    generation: int


class Preparer(Protocol):
    """The executor of a bound program."""

    program: Program
    device: Device
    sizes: BufferSizes
    variants: ChosenSteps

    @property
    def memory(self) -> Memory: ...

    def prepare(self, bound: BoundProgram) -> None:
        """Grow memory for a binding as needed, and renew its launches if memory has moved."""
        ...


class ChosenSteps:
    """The steps of a program for the variants that its calls choose. The steps of the last choice are cached."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._slots = np.array([call.choice for call in program.calls], np.intp)
        self._last: tuple[bytes | None, Sequence[LaunchStep]] = None, ()

    def of(self, numbers: Numbers) -> Sequence[LaunchStep]:
        """Return the steps for the values of all slots. Raises ArtifactError for a variant that a call lacks."""
        # As one array and one key: a model has hundreds of calls, and most shapes choose as the last one did.
        chosen = numbers[self._slots]
        key, (last_key, last_steps) = chosen.tobytes(), self._last
        if key == last_key:
            return last_steps
        steps: list[LaunchStep] = []
        for call, choice in zip(self._program.calls, chosen.tolist()):
            if not 0 <= choice < len(call.variants):
                raise ArtifactError(
                    f"{self._program.name}: call {call.name}: expected a variant 0..{len(call.variants) - 1}, got {choice}"
                )
            steps += call.variants[choice].steps
        self._last = key, tuple(steps)
        return self._last[1]


class BoundProgram:
    """A program with its symbols bound. One thread at a time uses it.

    Attributes:
        symbols: Values of the symbols, in order.
        values: Values of all slots.
        numbers: The same as an array, with a 1 at the end that stands for no slot.
        steps: The steps of the chosen variants.
    """

    def __init__(self, executor: Preparer, symbols: tuple[int, ...], values: list[int]) -> None:
        self._executor = executor
        self.symbols, self.values = symbols, values
        # The 1 at the end stands for the missing dims of a grid (`Launches._changed`).
        self.numbers: Numbers = np.array([*values, 1], np.int64)
        self._sizes = executor.sizes.of(values)
        self.steps = executor.variants.of(self.numbers)

    @cached_property
    def own(self) -> Launches:
        """Launches over the executor's own buffers."""
        return Launches(self._executor.device)

    def nbytes(self, index: int) -> int:
        """Return the bytes of a buffer."""
        return self._sizes[self._executor.sizes.kinds[index]]

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the dims of a buffer."""
        return self._executor.sizes.shape(index, self.values)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The dims of every buffer, by name."""
        return {spec.name: self.shape(index) for index, spec in enumerate(self._executor.program.buffers)}

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """(call name, variant label) in call order."""
        return tuple((c.name, c.variants[self.values[c.choice]].label) for c in self._executor.program.calls)

    def prepare(self) -> None:
        """Grow memory and renew launches as needed. `launch` does so too; an earlier call keeps the cost out of a timing."""
        self._executor.prepare(self)

    def launch(self) -> None:
        """Enqueue every step over the executor's own buffers, in order; the device's `synchronize` waits for them."""
        own = self.own
        if own.generation != self._executor.memory.generation:
            self._executor.prepare(self)
        own.enqueue()

    @property
    def launches(self) -> Sequence[Launch]:
        """One closure per step, in order, not recorded; valid until the next `prepare`."""
        return self.own.closures

    def series(self, times: int) -> Launch | None:
        """Record `times` repetitions of all steps as one launch; None if the device cannot record.

        Its time is the time of the kernels, without the overhead of single launches. It is valid until the next `prepare`.
        """
        return self.own.series(times)


class Launches:
    """The launches of a binding's steps over certain buffers. Later calls reuse what is still valid.

    Args:
        device: The device that runs them.
        live: The binding changes from call to call, by few numbers. Where the device can, kernels then read their scalars when they
            run; otherwise only the launches with changed numbers are renewed. Launches that are not live are recorded the second
            time they are enqueued, if the device can record.

    Attributes:
        closures: One per step, in order.
        generation: How often the executor's memory had moved when they were bound.
        numbers: Values of all slots, and a 1, which live kernels read.
    """

    def __init__(self, device: Device, live: bool = False) -> None:
        self._device, self._live = device, live
        self._joins = device if live and isinstance(device, JoinsLaunches) else None
        self.closures: list[Launch] = []
        self._joined: Sequence[Launch] = ()
        self._steps: Sequence[LaunchStep] = ()
        self.generation, self._buffers = -1, NO_BUFFERS
        self._source: Numbers | None = None  # the numbers of the binding, by which `current` recognises it
        self.numbers: Numbers = np.empty(0, np.int64)
        self._slots: tuple[list[int], NDArray[np.intp]] | None = None
        self._recorded: Launch | None = None
        self._series: dict[int, Launch | None] = {}
        self._enqueued = 0

    def current(self, bound: BoundProgram, buffers: Buffers, generation: int) -> bool:
        """Return whether these are the launches of a binding over these buffers (the same objects).

        Args:
            bound: The binding.
            buffers: Buffers of the caller.
            generation: How often the executor's memory has moved.
        """
        return self._source is bound.numbers and self.generation == generation and self._buffers is buffers

    def renew(
        self,
        bound: BoundProgram,
        buffers: Buffers,
        generation: int,
        launch_of: Callable[[LaunchStep, Numbers | None], Launch],
    ) -> None:
        """Make these the launches of a binding; launches of equal steps, numbers and buffers are reused.

        Args:
            bound: The binding.
            buffers: Buffers of the caller.
            generation: How often the executor's memory has moved.
            launch_of: Makes the launch of a step, which reads its scalars from the array of numbers if there is one.
        """
        reusable = self.generation == generation and self._buffers == buffers
        self.generation, self._source = -1, None  # not current if anything below fails
        if not reusable:
            self.closures, self._steps, self.numbers = [], (), bound.numbers.copy()
        if self._steps is not bound.steps:  # `ChosenSteps` has one object for each choice
            known = dict(zip(map(id, self._steps), self.closures))
            self.closures = [known.get(id(step), _unbound) for step in bound.steps]
            self._steps, self._slots = bound.steps, None
            changed = {n for n, closure in enumerate(self.closures) if closure is _unbound}
        else:
            changed = set()
        changed.update(self._changed(bound.numbers))
        np.copyto(self.numbers, bound.numbers)
        live = None if self._joins is None else self.numbers
        for n in sorted(changed):
            self.closures[n] = launch_of(bound.steps[n], live)
        if changed:
            self._joined = self.closures if self._joins is None else self._joins.joined(self.closures)
            # A recording holds the old launches.
            self._recorded, self._series, self._enqueued = None, {}, 0
        self.generation, self._buffers, self._source = generation, buffers, bound.numbers

    def _changed(self, numbers: Numbers) -> list[int]:
        """Return the steps whose launches must be renewed for other numbers: those whose scalars or grid differ."""
        if self._slots is None:
            kinds = ("kernel", "library") if self._joins is None else ("library",)  # joined kernels read their numbers
            renewed = [n for n, step in enumerate(self._steps) if step.kind in kinds]
            rows = [[*self._steps[n].scalars, *self._steps[n].grid] for n in renewed]
            width = max(map(len, rows), default=0)
            # -1 is the last of the numbers: the 1 that stands for no slot, and never changes.
            padded = [[*row, *[-1] * (width - len(row))] for row in rows]
            self._slots = renewed, np.array(padded, np.intp).reshape(len(rows), width)
        renewed, slots = self._slots
        if not renewed:
            return []
        return [renewed[n] for n in np.flatnonzero((self.numbers != numbers)[slots].any(axis=1))]

    def enqueue(self) -> None:
        """Enqueue every step, in order."""
        if self._recorded is not None:
            self._recorded()
            return
        for launch in self._joined:
            launch()
        # Recording costs more than a call, so only a shape that comes a second time is recorded. Live launches read
        # their numbers at each run, and a recording would fix them.
        if not self._live and self._enqueued < 2:
            self._enqueued += 1
            if self._enqueued == 2:
                self._recorded = self._device.record(self.closures)

    def series(self, times: int) -> Launch | None:
        """Record repetitions of all steps as one launch; see `BoundProgram.series`."""
        if times not in self._series:
            self._series[times] = self._device.record(self.closures * times)
        return self._series[times]


def _unbound() -> None:
    """Stand for a launch that `renew` has not bound yet."""
    raise AssertionError("a launch was enqueued before it was bound")
