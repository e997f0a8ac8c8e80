"""Compilation of several candidates in one translation unit; a kernel with an error does not fail the others."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import KernelSource, Program

# Candidates per translation unit: the fixed cost of a unit (PoCL: linking its builtins) equals about two candidates.
_UNIT_CANDIDATES = 4
# The contenders of a task come back after the trials of all other tasks.
_RECENT_KERNELS = 1024
# With less free disk space than this, a failed compiler may have run out of space.
_FREE_BYTES = 2**20

Handles = dict[str, Any]
Compiled = tuple[Handles, float] | BuildError


class CompiledKernels:
    """A device whose `compile` returns handles compiled before; all other methods are forwarded to the device."""

    def __init__(self, device: Device, handles: Handles) -> None:
        self._device, self._handles = device, handles

    def compile(self, kernels: Sequence[KernelSource]) -> Handles:
        """Compile kernels; see `Device.compile`."""
        missing = [kernel for kernel in kernels if kernel.name not in self._handles]
        if missing:  # a library's own helper, compiled when it is first bound
            self._handles = {**self._handles, **self._device.compile(missing)}
        return {kernel.name: self._handles[kernel.name] for kernel in kernels}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class RecentKernels:
    """Handles of the kernels that a device compiled last, by source.

    Contenders are measured again, in other units, and most candidates of a task pack its weights by the same few kernels.

    Args:
        most: number of kernels.
    """

    def __init__(self, most: int = _RECENT_KERNELS) -> None:
        self._most, self._lock = most, threading.Lock()  # units are compiled by several threads
        self._handles: OrderedDict[KernelSource, Any] = OrderedDict()

    def of(self, kernels: Sequence[KernelSource]) -> Handles:
        """Return the handles of the kernels that are known."""
        with self._lock:
            known = [kernel for kernel in kernels if kernel in self._handles]
            for kernel in known:
                self._handles.move_to_end(kernel)
            return {kernel.name: self._handles[kernel] for kernel in known}

    def add(self, kernels: Sequence[KernelSource], handles: Handles) -> None:
        """Keep the handles of these kernels."""
        with self._lock:
            for kernel in kernels:
                self._handles[kernel] = handles[kernel.name]
                self._handles.move_to_end(kernel)
            while len(self._handles) > self._most:
                self._handles.popitem(last=False)


def plan_units(programs: Sequence[Program], isolated: frozenset[int], width: int = 1) -> list[range]:
    """Split programs into runs to compile as one unit.

    A unit has one language and one source per kernel name. A program of `isolated` forms a unit by itself.

    Args:
        width: number of units compiled at a time, among which the programs are divided.
    """
    most = max(1, min(_UNIT_CANDIDATES, -(-len(programs) // width)))
    units: list[range] = []
    names: dict[str, KernelSource] = {}
    for index, program in enumerate(programs):
        clash = any(names.get(kernel.name, kernel) != kernel for kernel in program.kernels)
        languages = {kernel.language for kernel in (*names.values(), *program.kernels)}
        last = units[-1] if units else range(0)
        fits = not clash and len(languages) <= 1 and len(last) < most
        if units and fits and not isolated & {index, last.start}:
            units[-1] = range(last.start, index + 1)
        else:
            units.append(range(index, index + 1))
            names = {}
        names.update((kernel.name, kernel) for kernel in program.kernels)
    return units


def balance(programs: Sequence[Program], units: Sequence[range]) -> list[Sequence[int]]:
    """Redistribute the programs of units that are compiled at the same time, so that they take about the same time.

    Programs are assigned by decreasing length of their source to the unit with the least source so far (LPT: Graham, 1969). The units
    are unchanged if a program fits into none of them, because of its language or of kernels with equal names and other sources.
    """
    parts: list[list[int]] = [[] for _ in units]
    kernels: list[dict[str, KernelSource]] = [{} for _ in units]
    texts = [0] * len(units)

    def length(index: int) -> int:
        return 1 + sum(len(kernel.source) for kernel in programs[index].kernels)

    def fits(program: Program, unit: dict[str, KernelSource]) -> bool:
        same = all(unit.get(kernel.name, kernel) == kernel for kernel in program.kernels)
        return same and len({kernel.language for kernel in (*unit.values(), *program.kernels)}) <= 1

    for index in sorted((index for unit in units for index in unit), key=lambda i: (-length(i), i)):
        able = [at for at, unit in enumerate(kernels) if fits(programs[index], unit)]
        if not able:
            return [*units]
        chosen = min(able, key=lambda at: (texts[at], at))
        parts[chosen].append(index)
        texts[chosen] += length(index)
        kernels[chosen].update((kernel.name, kernel) for kernel in programs[index].kernels)
    return [sorted(part) for part in parts if part]


def compile_programs(
    device: Device,
    programs: Sequence[Program],
    isolated: frozenset[int],
    tell: Callable[[range], None],
    recent: RecentKernels | None = None,
) -> list[Compiled]:
    """Compile programs in units, in parallel if the device's compiler allows it.

    Args:
        isolated: indices of programs to compile one by one.
        tell: receives the indices of the programs that are about to be compiled.
        recent: kernels that were compiled before; receives the new ones.

    Returns:
        For each program its handles and its share of the seconds, or its BuildError.

    Raises:
        MeasureError: the disk is full, which is not the program's fault.
    """
    compiled: list[Compiled | None] = [None] * len(programs)
    recent = RecentKernels() if recent is None else recent

    def attempt(unit: Sequence[int]) -> Compiled:
        kernels = list({kernel.name: kernel for index in unit for kernel in programs[index].kernels}.values())
        began = time.perf_counter()
        known = recent.of(kernels)
        missing = [kernel for kernel in kernels if kernel.name not in known]
        try:
            new = device.compile(missing) if missing else {}
        except BuildError as error:
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if free < _FREE_BYTES:
                raise MeasureError(
                    f"expected space to compile in {tempfile.gettempdir()}, got {free} bytes free and an error of the compiler "
                    f"({str(error).splitlines()[0][:200]}); free some space, or point TMPDIR at a folder with more"
                ) from None
            return error
        recent.add(missing, new)
        return {**known, **new}, (time.perf_counter() - began) / len(unit)

    width = host.usable_cpus() if getattr(device, "compiles_in_threads", False) else 1
    units = plan_units(programs, isolated, width)
    with ThreadPoolExecutor(max_workers=width) as pool:
        while units:
            # an isolated unit is not compiled in parallel with others, so that a hang is attributed to one candidate
            first_isolated = next((at for at, unit in enumerate(units) if unit.start in isolated), width)
            together, units = units[: (count := min(max(first_isolated, 1), width))], units[count:]
            tell(range(together[0].start, together[-1].stop))
            parts = balance(programs, together)
            for unit, outcome in zip(parts, pool.map(attempt, parts), strict=True):
                for index in unit:
                    compiled[index] = outcome
                if isinstance(outcome, BuildError) and len(unit) > 1:
                    for index in unit:
                        tell(range(index, index + 1))
                        compiled[index] = attempt(range(index, index + 1))
    return [entry for entry in compiled if entry is not None]
