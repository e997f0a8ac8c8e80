"""Compiling candidates together: several share a translation unit, and one bad kernel does not fail its neighbours."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program import KernelSource, Program

_UNIT_CANDIDATES = 8
# A compiler that fails with less than this left on the disk may have failed for that.
_ROOM_BYTES = 2**20

Handles = dict[str, Any]
Compiled = tuple[Handles, float] | BuildError


class CompiledKernels:
    """A device whose `compile` gives handles that were made before; everything else is the device's own."""

    def __init__(self, device: Device, handles: Handles) -> None:
        self._device, self._handles = device, handles

    def compile(self, kernels: Sequence[KernelSource]) -> Handles:
        """See `Device.compile`."""
        missing = [kernel for kernel in kernels if kernel.name not in self._handles]
        if missing:  # a library's own helper, compiled when it is first bound
            self._handles = {**self._handles, **self._device.compile(missing)}
        return {kernel.name: self._handles[kernel.name] for kernel in kernels}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def plan_units(programs: Sequence[Program], alone: frozenset[int]) -> list[range]:
    """Runs of consecutive programs to compile together: C only, none of `alone`, and no kernel name with two texts."""
    units: list[range] = []
    names: dict[str, KernelSource] = {}
    for index, program in enumerate(programs):
        single = index in alone or any(kernel.language != "c" for kernel in program.kernels)
        clash = any(names.get(kernel.name, kernel) != kernel for kernel in program.kernels)
        last = units[-1] if units else range(0)
        joins = units and not single and not clash and last.start not in alone and len(last) < _UNIT_CANDIDATES
        if joins and all(kernel.language == "c" for kernel in programs[last.start].kernels):
            units[-1] = range(last.start, index + 1)
        else:
            units.append(range(index, index + 1))
            names = {}
        names.update((kernel.name, kernel) for kernel in program.kernels)
    return units


def compile_programs(
    device: Device, programs: Sequence[Program], alone: frozenset[int], tell: Callable[[range], None]
) -> list[Compiled]:
    """For each program its handles and its share of the seconds spent, or the BuildError it earned by itself. `tell` is
    called with the programs each compiler run is for.

    Raises MeasureError when there is no room to compile in: that is no program's failure.
    """
    compiled: list[Compiled | None] = [None] * len(programs)

    def attempt(unit: range) -> Compiled:
        tell(unit)
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

    for unit in plan_units(programs, alone):
        found = attempt(unit)
        for index in unit:
            failed_together = isinstance(found, BuildError) and len(unit) > 1
            compiled[index] = attempt(range(index, index + 1)) if failed_together else found
    return [entry for entry in compiled if entry is not None]
