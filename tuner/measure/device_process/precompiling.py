"""A second process that compiles candidates into the driver's cache, while the device process compiles and checks others.

PoCL compiles a kernel when it is first launched, under a lock of its process, and caches it in a folder that processes share. So the
other process launches each kernel once, and its results are thrown away. It waits while the device process times. If it ends, which a
candidate can make it do, the device process compiles everything itself.

Tests: `tests/tuner/measure/device_process/test_precompiling.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from relax_tune.errors import BuildError, MeasureError, RelaxTuneError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.confinement import limit_memory
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Program, program_from_json
from relax_tune.tuner.measure.device_process.compiling import (
    CompiledKernels,
    Handles,
    RecentKernels,
    compile_programs,
)
from relax_tune.tuner.measure.device_process.pool import SharedBuffers
from relax_tune.tuner.measure.messages import MeasureRequest
from relax_tune.tuner.measure.protocol import FrameReader, write_frame

LIMIT_SECS = 20
"""Longest time of an order, after which the system ends the other process. Less than the deadline of a step of the device process."""
_MORE_BYTES = 4 << 30  # private memory for compilers, packed weights and temporaries
_TIMED_SHAPES = 1
"""Shapes to time that are launched too: at the smallest one a kernel may run on PoCL's serial driver, which compiles it again."""


class Precompiler:
    """The device process's side. It has one order under way at most.

    Args:
        read_from, write_to: pipes of the other process.
    """

    def __init__(self, read_from: int, write_to: int) -> None:
        self._reader, self._write_to = FrameReader(read_from), write_to
        self._ended = False

    @property
    def ended(self) -> bool:
        """True if it takes no more orders."""
        return self._ended

    def begin(self, requests: Sequence[MeasureRequest], known: Sequence[str]) -> None:
        """Start to compile.

        Args:
            known: names of kernels that the device process will have compiled before these.
        """
        order = {
            "programs": [request.program_json for request in requests],
            "bindings": [_launched(request) for request in requests],
            "seeds": [request.constant_seed for request in requests],
            "known": list(known),
        }
        try:
            write_frame(self._write_to, json.dumps(order))
        except OSError:
            self._ended = True

    def wait(self) -> None:
        """Wait for the end of the order."""
        give_up = time.monotonic() + LIMIT_SECS + 1
        while not self._ended and (left := give_up - time.monotonic()) > 0:
            try:
                if self._reader.next(left) is not None:
                    return
            except MeasureError:  # a kernel wrote into its pipe
                break
            self._ended = self._reader.ended
        self._ended = True


def _launched(request: MeasureRequest) -> list[Mapping[str, int]]:
    """Return the shapes at which a candidate is launched once."""
    return [*(case.symbols for case in request.checks), *request.timings[:_TIMED_SHAPES]]


class Compilation:
    """Compiles programs on a device and launches them, as orders demand."""

    def __init__(self, device: Device) -> None:
        self._device, self._shared, self._recent = device, SharedBuffers(device), RecentKernels()

    def run(self, order: Mapping[str, Any]) -> None:
        """Compile the programs of an order in the same units as the device process, and launch each."""
        programs = [program_from_json(text) for text in order["programs"]]
        limit_memory(None)
        self._shared.reserve(list(zip(programs, order["bindings"], order["seeds"], strict=True)))
        limit_memory(_MORE_BYTES)
        known = set(order["known"])
        new = [replace(p, kernels=tuple(k for k in p.kernels if k.name not in known)) for p in programs]
        compiled = compile_programs(self._device, new, frozenset(), lambda _: None)
        for program, outcome, bindings, seed in zip(programs, compiled, order["bindings"], order["seeds"], strict=True):
            if not isinstance(outcome, BuildError) and not _calls_library(program):
                with contextlib.suppress(RelaxTuneError):
                    self._launch(program, outcome[0], bindings, seed)

    def _launch(self, program: Program, handles: Handles, bindings: Sequence[Mapping[str, int]], seed: int) -> None:
        others = [kernel for kernel in program.kernels if kernel.name not in handles]
        missing = [kernel for kernel in others if not self._recent.of([kernel])]
        if missing:
            self._recent.add(missing, self._device.compile(missing))
        compiled = CompiledKernels(self._device, {**self._recent.of(others), **handles})
        executor = Executor(program, cast(Device, compiled), {}, libraries={}, shared=self._shared.of(program, seed))
        try:
            for symbols in bindings:
                bound = executor.bind(symbols)
                bound.prepare()
                self._shared.load_inputs(program, bound, seed)
                bound.launch()
                self._device.synchronize()
        finally:
            executor.close()


def _calls_library(program: Program) -> bool:
    steps = [*program.prepare, *(step for call in program.calls for v in call.variants for step in v.steps)]
    return any(step.kind == "library" for step in steps)


def main(spec: str, read_from: int, write_to: int) -> int:
    """Follow orders until the device process ends."""
    reader = FrameReader(read_from)
    compilation = None
    while (text := reader.next(None)) is not None:
        # the default action ends the process, also within a kernel
        signal.alarm(LIMIT_SECS)
        try:
            compilation = compilation or Compilation(open_device(spec))
            compilation.run(json.loads(text))
        except (RelaxTuneError, ImportError, OSError) as error:
            print(f"compiling ahead: {error}", file=sys.stderr)
            return 3
        signal.alarm(0)
        write_frame(write_to, "done")
    os._exit(0)  # the clean-up of drivers at exit may fail
