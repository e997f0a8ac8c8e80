"""Compilation of several candidates in one translation unit, such that a bad kernel does not fail the others."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import KernelSource, Program

# Candidates per translation unit: the fixed cost of a unit (PoCL: linking its builtins) equals about two candidates.
_UNIT_CANDIDATES = 4
# Devices on which several threads may compile at once: the compiler is a process, or releases the interpreter lock.
_TOGETHER = ("c", "cuda")
# With less free disk space than this, a failed compiler may have run out of space.
_ROOM_BYTES = 2**20

Handles = dict[str, Any]
Compiled = tuple[Handles, float] | BuildError


class CompiledKernels:
    """A device whose `compile` returns handles made earlier; other methods are the device's own."""

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


def plan_units(programs: Sequence[Program], alone: frozenset[int], width: int = 1) -> list[range]:
    """Split programs into runs to compile as one unit.

    A unit is of one language, has no kernel name with two texts, and holds a program of `alone` only by itself.
    width: how many units are compiled at a time, among which the programs are divided
    """
    most = max(1, min(_UNIT_CANDIDATES, -(-len(programs) // width)))
    units: list[range] = []
    names: dict[str, KernelSource] = {}
    for index, program in enumerate(programs):
        clash = any(names.get(kernel.name, kernel) != kernel for kernel in program.kernels)
        languages = {kernel.language for kernel in (*names.values(), *program.kernels)}
        last = units[-1] if units else range(0)
        fits = not clash and len(languages) <= 1 and len(last) < most
        if units and fits and not alone & {index, last.start}:
            units[-1] = range(last.start, index + 1)
        else:
            units.append(range(index, index + 1))
            names = {}
        names.update((kernel.name, kernel) for kernel in program.kernels)
    return units


def balance(programs: Sequence[Program], units: Sequence[range]) -> list[Sequence[int]]:
    """Divide the programs of units that are compiled at a time anew, so that these take about as long.

    The longest text comes first, each to the unit with the least text so far (LPT: Graham, 1969). The units stay as they are where
    a program fits into none of them, since another language or another text of its kernels' names is there.
    """
    parts: list[list[int]] = [[] for _ in units]
    kernels: list[dict[str, KernelSource]] = [{} for _ in units]
    texts = [0] * len(units)

    def length(index: int) -> int:
        return 1 + sum(len(kernel.source) for kernel in programs[index].kernels)

    def fits(program: Program, there: dict[str, KernelSource]) -> bool:
        same = all(there.get(kernel.name, kernel) == kernel for kernel in program.kernels)
        return same and len({kernel.language for kernel in (*there.values(), *program.kernels)}) <= 1

    for index in sorted((index for unit in units for index in unit), key=lambda i: (-length(i), i)):
        able = [at for at, there in enumerate(kernels) if fits(programs[index], there)]
        if not able:
            return [*units]
        chosen = min(able, key=lambda at: (texts[at], at))
        parts[chosen].append(index)
        texts[chosen] += length(index)
        kernels[chosen].update((kernel.name, kernel) for kernel in programs[index].kernels)
    return [sorted(part) for part in parts if part]


def compile_programs(
    device: Device, programs: Sequence[Program], alone: frozenset[int], tell: Callable[[range], None]
) -> list[Compiled]:
    """Compile programs in units. Returns for each program its handles and its share of the seconds, or its own
    BuildError.

    tell: receives the programs that are about to be compiled. There are as many units at a time as processors if units
        compile in parallel, else one.

    Raises MeasureError without space to compile in, which is no program's failure.
    """
    compiled: list[Compiled | None] = [None] * len(programs)

    def attempt(unit: Sequence[int]) -> Compiled:
        kernels = {kernel.name: kernel for index in unit for kernel in programs[index].kernels}
        began = time.perf_counter()
        try:
            handles = device.compile(list(kernels.values())) if kernels else {}
        except BuildError as error:
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if free < _ROOM_BYTES:
                raise MeasureError(
                    f"wanted room to compile in {tempfile.gettempdir()}, found {free} bytes free and the compiler failing "
                    f"({str(error).splitlines()[0][:200]}); free some space, or point TMPDIR at a folder with more"
                ) from None
            return error
        return handles, (time.perf_counter() - began) / len(unit)

    width = host.usable_cpus() if device.info.kind in _TOGETHER else 1
    units = plan_units(programs, alone, width)
    with ThreadPoolExecutor(max_workers=width) as pool:
        while units:
            # a unit of `alone` is not compiled in parallel with others, so that a hang names one candidate
            apart = next((at for at, unit in enumerate(units) if unit.start in alone), width)
            together, units = units[: (count := min(max(apart, 1), width))], units[count:]
            tell(range(together[0].start, together[-1].stop))
            parts = balance(programs, together)
            for unit, found in zip(parts, pool.map(attempt, parts), strict=True):
                for index in unit:
                    compiled[index] = found
                if isinstance(found, BuildError) and len(unit) > 1:
                    for index in unit:
                        tell(range(index, index + 1))
                        compiled[index] = attempt(range(index, index + 1))
    return [entry for entry in compiled if entry is not None]
