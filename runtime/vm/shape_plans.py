"""Calls of host programs that only the shapes of their arguments decide: their launches, over memory that calls reuse.

The machine takes tens of microseconds for an instruction that calls a subgraph, and some for each of the others. If no branch and no
size depends on the elements of an array, all calls with the same shapes run the same subgraphs and loops over arrays of the same sizes.
The second such call records them. From the third on, their launches run one after the other, bound once, and Python only places
arguments and results.

Tests: `tests/runtime/vm/test_shape_plans.py`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.arguments import check_values
from relax_tune.runtime.device.base import JoinsLaunches, RepeatsLaunches
from relax_tune.runtime.device.memory import aligned_array
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.host_program import (
    Apply,
    Branch,
    CallHostProgram,
    CallSubgraph,
    CheckValue,
    Compute,
    GetItem,
    HostProgram,
    Instruction,
    LoadWeight,
    Move,
    Number,
    Pack,
    Repeat,
    Require,
)
from relax_tune.runtime.vm.instructions import CallFrame, fresh
from relax_tune.runtime.vm.repeat import LoopPlan, StepLoop, in_place

Array = NDArray[Any]
Shapes = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
"""Dims and element type of each argument."""

MAX_PLANS = 8
"""Plans of a machine, the least recently used one first out."""
MOST_BYTES = 16 << 20
"""Bytes that the arrays of a plan occupy. The time that a plan saves does not count in calls with larger ones."""
_ANY = (CallSubgraph, Repeat, CheckValue, Compute, Require, Pack, GetItem, Move, LoadWeight, Number)


def only_shapes_decide(programs: Mapping[str, HostProgram], name: str) -> bool:
    """Return whether no element of an array decides what a host program does."""
    names, todo = {name}, [name]
    while todo:
        program = programs[todo.pop()]
        instructions = list(program.instructions())
        computed = {r for i in instructions if isinstance(i, Compute) for r in i.into}
        others = {r for i in instructions if not isinstance(i, Compute) for r in i.writes}
        for i in instructions:
            if isinstance(i, CallHostProgram) and i.function is not None:
                todo += {i.function} - names
                names.add(i.function)
            elif isinstance(i, Branch):
                if i.cond not in computed or i.cond in others:
                    return False
            elif isinstance(i, Apply):
                if i.operator not in ("shape_of", "reshape_to"):
                    return False
            elif not isinstance(i, _ANY):
                return False
    return True


@dataclass(slots=True)
class _Slot:
    """An array of a recorded call.

    Attributes:
        kind: Where it comes from; a `view` has the memory of the slot `of`.
        of: Number of the argument, or of the slot that is viewed.
        weight: The array itself, of a weight.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    of: int = 0
    weight: Array | None = None


@dataclass(slots=True)
class _Part:
    """A call of a subgraph: its executor, the values of its symbols, and the slots of its inputs and outputs."""

    executor: Executor
    key: tuple[int, ...]
    reads: Sequence[int]
    writes: Sequence[int]


@dataclass(slots=True)
class _Loop:
    """A counted loop: as `_Part`, with the slots of states, rows and other arrays, and of the last states and all rows."""

    loop: StepLoop
    i: Repeat
    span: range
    key: tuple[int, ...]
    known: Sequence[int]
    states: Sequence[int]
    stacks: Sequence[int]


@dataclass
class CallRecording:
    """What a call does to its arrays. Executions record while the machine runs it.

    Attributes:
        failed: A plan cannot repeat the call.
    """

    args: Sequence[Any]
    slots: list[_Slot] = field(default_factory=list)
    stages: list[_Part | _Loop] = field(default_factory=list)
    failed: bool = False
    _numbers: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for n, a in enumerate(self.args):
            self._add(a, "argument", n)

    def _add(self, array: Any, kind: str, of: int = 0, weight: Array | None = None) -> int:
        if not isinstance(array, np.ndarray):
            self.failed = True
            return 0
        self._numbers[id(array)] = len(self.slots)
        self._alive.append(array)  # so that no other array gets its identity
        self.slots.append(_Slot(kind, array.shape, array.dtype, of, weight))
        return len(self.slots) - 1

    def number(self, array: Any) -> int:
        """Return the slot of an array."""
        number = self._numbers.get(id(array))
        if number is None:
            self.failed = True
        return number or 0

    def executions(self, execute: Mapping[type[Instruction], Callable[..., Any]]) -> dict[type[Instruction], Any]:
        """Return executions that record what they do."""

        def part(vm: Any, i: CallSubgraph, frame: CallFrame) -> None:
            args, numbers, executor = frame.values(i.args), frame.numbers(i.symbols), vm.executors[i.part]
            execute[CallSubgraph](vm, i, frame)
            reads, key = [self.number(a) for a in args], executor.match(args, numbers)[1]
            self.stages.append(_Part(executor, key, reads, [self._add(a, "result") for a in frame.values(i.into)]))

        def loop(vm: Any, i: Repeat, frame: CallFrame) -> None:
            (begin, end), numbers = frame.numbers((i.begin, i.end)), frame.numbers(i.symbols)
            states, rows, args = map(frame.values, (i.states, i.rows, i.args))
            execute[Repeat](vm, i, frame)
            self.failed |= begin >= end or any(len(r) for r in rows)
            if self.failed:
                return
            if i.index is not None:
                numbers[i.index] = begin
            known, executor = [*states, *args], vm.executors[i.part]
            key = executor.match([known[n] for n in i.inputs], numbers)[1]
            last, stacks = i.into[: len(states)], i.into[len(states) :]
            slots = (
                [self._add(a, "state") for a in frame.values(last)],
                [self._add(a, "result") for a in frame.values(stacks)],
            )
            own = StepLoop(executor, i)
            self.stages.append(_Loop(own, i, range(begin, end), key, [self.number(a) for a in known], *slots))

        def apply(vm: Any, i: Apply, frame: CallFrame) -> None:
            source = frame.registers[i.args[0]]
            execute[Apply](vm, i, frame)
            if i.operator == "reshape_to":
                self._add(frame.registers[i.into], "view", self.number(source))

        def weight(vm: Any, i: LoadWeight, frame: CallFrame) -> None:
            execute[LoadWeight](vm, i, frame)
            array = frame.registers[i.into]
            self._add(array, "weight", weight=array)

        return {**execute, CallSubgraph: part, Repeat: loop, Apply: apply, LoadWeight: weight}


class _Stage(ABC):
    """The launches of a part or loop, over buffers that each call places at its arrays."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    @abstractmethod
    def run(self, arrays: list[Array]) -> None:
        """Run it on the arrays of a call, by slot."""


class _PartStage(_Stage):
    def __init__(self, part: _Part, base: Sequence[int], fixed: Sequence[Array | None]) -> None:
        super().__init__(part.executor)
        program, device = self.executor.program, self.executor.device
        self._reads = [base[n] for n in part.reads]
        self._bound = self.executor.bind(part.key, cached=False)
        pairs = list(zip((*program.inputs, *program.outputs), (*self._reads, *(base[n] for n in part.writes))))
        self._buffers = {index: device.alloc(1) for index, _ in pairs}
        self._placed = []
        for index, slot in pairs:
            array = fixed[slot]
            if array is None:
                self._placed.append((self._buffers[index], slot))
            elif array.nbytes:
                device.place(self._buffers[index], array)
        self._checks = bool(program.ranges) or any(program.buffers[n].fill.kind == "integers" for n in program.inputs)
        self._generation, self._launches = -1, list[Callable[[], None]]()

    def run(self, arrays: list[Array]) -> None:
        executor, device = self.executor, self.executor.device
        if executor.memory.generation != self._generation:
            executor.memory.grow(self._bound, self._buffers)
            launches = executor.launches_over(self._bound, self._buffers, self._bound.numbers)
            self._launches = device.joined(launches) if isinstance(device, JoinsLaunches) else launches
            self._generation = executor.memory.generation
        if self._checks:
            check_values(executor.program, [arrays[n] for n in self._reads], self._bound.values)
        try:
            for buffer, slot in self._placed:
                if arrays[slot].nbytes:
                    device.place(buffer, arrays[slot])
            for launch in self._launches:
                launch()
        finally:
            for buffer, _ in self._placed:  # later calls must not touch the caller's arrays
                device.place(buffer, None)


class _LoopStage(_Stage):
    def __init__(self, loop: _Loop, plan: LoopPlan, base: Sequence[int]) -> None:
        super().__init__(loop.loop.executor)
        self._plan, self._states, self._stacks = plan, loop.states, loop.stacks
        self._pairs = plan.pairs()
        self._inputs = [base[loop.known[n]] for n in loop.i.inputs]
        self._first = [base[n] for n in loop.known[: len(loop.states)]]

    def run(self, arrays: list[Array]) -> None:
        self._plan.renew()
        last = self._plan.run([arrays[n] for n in self._inputs], [arrays[n] for n in self._stacks], self._pairs)
        for slot, first, array in zip(self._states, self._first, last, strict=True):
            arrays[slot] = arrays[first] if array is None else array


class ShapePlan:
    """The launches of a call, over memory that calls reuse, but for arguments and results. One thread at a time uses it."""

    def __init__(self, recording: CallRecording, results: Sequence[int]) -> None:
        slots = recording.slots
        base = list(range(len(slots)))
        for n, slot in enumerate(slots):
            if slot.kind == "view":  # a view of a view comes later
                base[n] = base[slot.of]
        returned = {base[n] for n in results}
        self._fresh = [n for n in sorted(returned) if slots[n].kind == "result"]
        self._fixed: list[Array | None] = [slot.weight for slot in slots]
        for n, slot in enumerate(slots):
            if slot.kind == "result" and n not in self._fresh:
                self._fixed[n] = aligned_array(slot.dtype, slot.shape)
        self._slots, self._base, self._results = slots, base, list(results)
        self._arguments = [n for n, slot in enumerate(slots) if slot.kind == "argument"]
        self._stages = [_staged(stage, base, self._fixed) for stage in recording.stages]
        self.executors = list(dict.fromkeys(stage.executor for stage in self._stages))

    @classmethod
    def of(cls, recording: CallRecording, results: Sequence[Any]) -> ShapePlan | None:
        """Return the plan of a recorded call; None if it cannot be repeated, or would occupy too much memory."""
        numbers = [recording.number(r) for r in results]
        if recording.failed or not recording.stages or sum(_nbytes(s) for s in recording.slots) > MOST_BYTES:
            return None
        if not all(map(_repeats, recording.stages)):
            return None
        return cls(recording, numbers)

    def run(self, args: Sequence[Array]) -> list[Array] | None:
        """Run the call. Returns fresh arrays; None where calls of subgraphs are recorded."""
        first = self.executors[0]
        with first.call():
            if any(e.record is not None for e in self.executors):
                return None
            for executor in self.executors:
                executor.check_open()
            arrays: list[Any] = self._fixed.copy()
            for n, array in zip(self._arguments, args, strict=True):
                arrays[n] = in_place(array)
            for n in self._fresh:
                arrays[n] = np.empty(self._slots[n].shape, self._slots[n].dtype)
            for stage in self._stages:
                stage.run(arrays)
            results, given = [], set[int]()
            for n in self._results:
                base = self._base[n]
                array = arrays[base].reshape(self._slots[n].shape)
                results.append(array if base in self._fresh and base not in given else array.copy())
                given.add(base)
            return results


def _nbytes(slot: _Slot) -> int:
    return (
        0
        if slot.kind in ("view", "argument", "weight")
        else int(np.prod(slot.shape, dtype=np.int64)) * slot.dtype.itemsize
    )


def _repeats(stage: _Part | _Loop) -> bool:
    """Return whether launches of a stage can read and write any array of its sizes in place."""
    executor = stage.executor if isinstance(stage, _Part) else stage.loop.executor
    program = executor.program
    given = [*program.inputs, *program.outputs]
    placeable = executor.memory.placeable.issuperset(given) and not any(program.buffers[n].outer for n in given)
    if not placeable or program.checked or not isinstance(executor.device, RepeatsLaunches):
        return False
    return isinstance(stage, _Part) or stage.loop.plan(stage.span, stage.key) is not None


def _staged(stage: _Part | _Loop, base: Sequence[int], fixed: Sequence[Array | None]) -> _Stage:
    if isinstance(stage, _Part):
        return _PartStage(stage, base, fixed)
    plan = stage.loop.plan(stage.span, stage.key)
    assert plan is not None
    return _LoopStage(stage, plan, base)


class ShapePlans:
    """The plans of a machine, by function and shapes of the arguments. Threads may call it at once.

    Args:
        programs: The host programs by name.
    """

    def __init__(self, programs: Mapping[str, HostProgram]) -> None:
        self._programs = programs
        self._decided: dict[str, bool] = {}
        self._plans: OrderedDict[tuple[str, Shapes], ShapePlan | None] = OrderedDict()
        self._once: OrderedDict[tuple[str, Shapes], None] = OrderedDict()
        self._lock = threading.Lock()

    def call(
        self,
        name: str,
        values: Sequence[Any],
        convert: Callable[[], list[Any]],
        run: Callable[[list[Any], Mapping[type[Instruction], Any]], list[Any]],
        execute: Mapping[type[Instruction], Any],
    ) -> list[Any]:
        """Call a host program.

        Args:
            name: Its name.
            values: Values of its parameters, in order.
            convert: Checks them, and returns them as arguments.
            run: Runs the program with arguments and executions of instructions.
            execute: The executions.

        Returns:
            Results in order, as fresh arrays.
        """
        # Arrays of the shapes and types of a plan have passed the checks of arguments.
        plan = self.plan(name, values)
        results = None if plan is None else plan.run(values)
        if results is not None:
            return results
        args = convert()
        recording = self.recording(name, args)
        computed = run(args, execute if recording is None else recording.executions(execute))
        if recording is not None:
            self.keep(name, recording, computed)
        returned = set[int]()
        return [fresh(value, returned) for value in computed]

    def plan(self, name: str, args: Sequence[Any]) -> ShapePlan | None:
        """Return the plan for some arguments; None without one."""
        if not self._plans or not all(type(a) is np.ndarray for a in args):
            return None
        key = name, _shapes(args)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def recording(self, name: str, args: Sequence[Any]) -> CallRecording | None:
        """Return a recording for a call that has no plan; None where it shall just run."""
        if name not in self._decided:
            self._decided[name] = only_shapes_decide(self._programs, name)
        if not self._decided[name] or not all(isinstance(a, np.ndarray) for a in args):
            return None
        key = name, _shapes(args)
        with self._lock:
            if key in self._plans:  # no plan can repeat it
                self._plans.move_to_end(key)
            elif key in self._once:
                del self._once[key]
                return CallRecording(args)
            else:
                self._once[key] = None
                if len(self._once) > MAX_PLANS:
                    self._once.popitem(last=False)
            return None

    def keep(self, name: str, recording: CallRecording, results: Sequence[Any]) -> None:
        """Keep the plan of a recorded call."""
        plan = ShapePlan.of(recording, results)
        with self._lock:
            self._plans[name, _shapes(recording.args)] = plan
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, because weights have changed or the machine is closed."""
        with self._lock:
            self._plans.clear()
            self._once.clear()


def _shapes(args: Sequence[Array]) -> Shapes:
    return tuple((a.shape, a.dtype) for a in args)
