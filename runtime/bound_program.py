"""A program with its symbols bound: shapes, the variant of every call, and closures that launch."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError
from relax_tune.runtime.device.base import Device, DeviceBuffer, JoinsLaunches, Launch
from relax_tune.runtime.program.buffer_sizes import BufferSizes
from relax_tune.runtime.program.program import LaunchStep, Program

Numbers = NDArray[np.int64]


class Memory(Protocol):
    """The executor of a bound program, which owns its memory; `generation` counts how often that moved."""

    program: Program
    device: Device
    generation: int
    sizes: BufferSizes
    variants: ChosenSteps

    def refresh(self, bound: BoundProgram) -> None:
        """Enlarge memory for a binding as needed, and remake its closures if memory has moved."""
        ...


class ChosenSteps:
    """The steps of a program by the variants that its calls choose; those of the last choice are kept."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._slots = np.array([call.choice for call in program.calls], np.intp)
        self._last: tuple[bytes | None, Sequence[LaunchStep]] = None, ()

    def of(self, numbers: Numbers) -> Sequence[LaunchStep]:
        """Return the steps for the values of all slots. Raises ArtifactError for a variant that a call lacks."""
        chosen = numbers[self._slots]
        key, (known, steps) = chosen.tobytes(), self._last
        if key == known:
            return steps
        found: list[LaunchStep] = []
        for call, choice in zip(self._program.calls, chosen.tolist()):
            if not 0 <= choice < len(call.variants):
                raise ArtifactError(
                    f"{self._program.name}: call {call.name}: wanted a variant 0..{len(call.variants) - 1}, found {choice}"
                )
            found += call.variants[choice].steps
        self._last = key, tuple(found)
        return self._last[1]


class BoundProgram:
    """A program with its symbols bound. `values`: every slot."""

    def __init__(self, executor: Memory, symbols: tuple[int, ...], values: list[int]) -> None:
        self._executor = executor
        self.symbols, self.values = symbols, values
        self.numbers = np.array([*values, 1], np.int64)  # the last stands for no slot
        self._sizes = executor.sizes.of(values)
        self.steps = executor.variants.of(self.numbers)
        self._launches: list[Launch] = []
        self._recorded: Launch | None = None
        self._series: dict[int, Launch | None] = {}
        self._runs = 0
        self._slots: tuple[list[int], NDArray[np.intp]] | None = None
        self.generation = -1

    def nbytes(self, index: int) -> int:
        """Return the bytes of a buffer."""
        return self._sizes[self._executor.sizes.kinds[index]]

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the dims of a buffer."""
        return self._executor.sizes.shape(index, self.values)

    def changed(self, other: BoundProgram, kinds: Container[str]) -> list[int]:
        """Return the numbers of steps whose scalars or grid differ from another binding's, which has the same steps.

        kinds: of the steps that count
        """
        if other._slots is None:
            of_kind = [n for n, step in enumerate(self.steps) if step.kind in kinds]
            rows = [[*self.steps[n].scalars, *self.steps[n].grid] for n in of_kind]
            most = max(map(len, rows), default=0)
            other._slots = (
                of_kind,
                np.array([[*r, *[-1] * (most - len(r))] for r in rows], np.intp).reshape(len(rows), most),
            )
        self._slots = of_kind, slots = other._slots
        if not of_kind:
            return []
        return [of_kind[n] for n in np.flatnonzero((self.numbers != other.numbers)[slots].any(axis=1))]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The dims of every buffer, by name."""
        return {spec.name: self.shape(index) for index, spec in enumerate(self._executor.program.buffers)}

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """(call name, variant label) in call order."""
        return tuple((c.name, c.variants[self.values[c.choice]].label) for c in self._executor.program.calls)

    def prepare(self) -> None:
        """Enlarge memory and refresh the closures as needed. `launch` calls this; an earlier call keeps its cost out of
        a timing.
        """
        self._executor.refresh(self)

    def renew(self, launches: list[Launch], generation: int) -> None:
        """Replace the closures by ones over memory of this generation, and drop the recording."""
        self._launches, self.generation = launches, generation
        self._recorded, self._series, self._runs = None, {}, 0

    def launch(self) -> None:
        """Enqueue every step, in order; the device's `synchronize` waits for them. The second launch is recorded if the
        device can.
        """
        if self.generation != self._executor.generation:
            self.prepare()
        if self._recorded is not None:
            self._recorded()
            return
        for launch in self._launches:
            launch()
        if self._runs < 2:
            self._runs += 1
            if self._runs == 2:
                self._recorded = self._executor.device.record(self._launches)

    @property
    def launches(self) -> Sequence[Launch]:
        """One closure a step, in order, not recorded; valid until the next `prepare`."""
        return self._launches

    def series(self, times: int) -> Launch | None:
        """Record `times` repetitions of all steps as one launch. None if the device cannot record.

        Its time is that of the kernels, without the overhead of single launches. The recording has been launched once;
        it is valid until the next `prepare`.
        """
        if times not in self._series:
            self._series[times] = self._executor.device.record(self._launches * times)
        return self._series[times]


@dataclass(slots=True)
class LastLaunches:
    """The launches of the last call of a session, for the next one.

    held: generation of the executor's memory, and the buffers in place of its own; numbers: what the launches of a device that
    joins them read; joined: what does the same at less cost
    """

    bound: BoundProgram | None = None
    held: tuple[int, dict[int, DeviceBuffer]] = field(default_factory=lambda: (-1, {}))
    launches: list[Launch] = field(default_factory=list)
    numbers: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    joined: list[Launch] = field(default_factory=list)

    def renew(
        self,
        bound: BoundProgram,
        held: tuple[int, dict[int, DeviceBuffer]],
        joins: JoinsLaunches | None,
        launch_of: Callable[[LaunchStep, Numbers], Launch],
    ) -> None:
        """Make the launches those of a binding; what has the same numbers stays, or reads them anew.

        joins: the device, if it joins launches; launch_of: the launch of a step, which may read the numbers when it runs
        """
        known, self.bound = self.bound, None  # none, should anything fail
        if known is not None and self.held == held and known.steps == bound.steps:
            changed = bound.changed(known, ("library",) if joins is not None else ("kernel", "library"))
            for n in changed:
                self.launches[n] = launch_of(bound.steps[n], self.numbers)
            np.copyto(self.numbers, bound.numbers)
        else:
            self.numbers, changed = bound.numbers.copy(), list(range(len(bound.steps)))
            self.launches = [launch_of(step, self.numbers) for step in bound.steps]
        if changed:
            self.joined = self.launches if joins is None else joins.joined(self.launches)
        self.bound, self.held = bound, held
