"""Runs the generated code of scheduled functions on a device, with guard bytes behind every buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.opencl_drivers import as_driven, device_name

from relax_tune.errors import UserError
from relax_tune.ir.codegen.generate import CodeTarget, GeneratedKernel, generate, split_kernels
from relax_tune.ir.core.expr import Expr, Var, as_int, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.interp.interp import bind_symbols
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.target import HardwareInfo

Array = NDArray[Any]
TARGETS = {
    "c": CodeTarget("c", 16),
    "opencl": CodeTarget("opencl", as_driven(HardwareInfo.from_limits("opencl", {})).lanes),
    "cuda": CodeTarget("cuda", 4),
    "webgpu": CodeTarget("webgpu", 4),
}
CANARY = 0xA5


def opened(language: str) -> Device:
    """The device for a language, or a skip that says why there is none."""
    try:
        return open_device(device_name(language))
    except UserError as error:
        pytest.skip(str(error))


def number(e: Expr, env: Mapping[Var, int]) -> int:
    value = as_int(substitute(e, {v: const(int(x)) for v, x in env.items()}))
    assert value is not None, e
    return value


def kernels_of(func: PrimFunc, language: str, lanes: int | None = None) -> list[GeneratedKernel]:
    target = TARGETS[language] if lanes is None else CodeTarget(TARGETS[language].language, lanes)
    return [generate(part, target) for part in split_kernels(func)]


class Compiled:
    """A function's kernels on a device; compile once, run at many sizes. `guard` bytes of canaries follow each buffer."""

    guard = 512

    def __init__(self, device: Device, language: str, func: PrimFunc, lanes: int | None = None) -> None:
        self.device, self.func = device, func
        self.kernels = kernels_of(func, language, lanes)
        self.handles = device.compile(self.sources(language))

    def sources(self, language: str) -> list[KernelSource]:
        return [KernelSource(k.name, language, k.source) for k in self.kernels]

    @classmethod
    def together(cls, device: Device, language: str, funcs: Sequence[PrimFunc]) -> list[Compiled]:
        """Several functions compiled in one call, each under its own name."""
        compiled = []
        for i, func in enumerate(funcs):
            kernel = cls.__new__(cls)
            kernel.device, kernel.func = device, replace(func, name=f"{func.name}_{i}")
            kernel.kernels = kernels_of(kernel.func, language)
            compiled.append(kernel)
        handles = device.compile([s for kernel in compiled for s in kernel.sources(language)])
        for kernel in compiled:
            kernel.handles = handles
        return compiled

    def __call__(self, arguments: Sequence[Array], scalars: Sequence[int] = ()) -> list[Array]:
        """The outputs for these arguments (outputs included, only their shapes matter)."""
        func, device = self.func, self.device
        env = bind_symbols(func, arguments, scalars)
        buffers: dict[Any, Any] = {}
        sizes: dict[Any, int] = {}
        arrays = dict(zip(func.buffers, arguments, strict=True))
        for k in self.kernels:
            for b in k.buffers:
                if b in buffers:
                    continue
                shape = tuple(number(d, env) for d in b.shape)
                size = int(np.prod(shape, dtype=np.int64)) * b.dtype.bytes
                data = np.full(size + self.guard, CANARY, np.uint8)
                if b in func.input_buffers:
                    data[:size] = np.ascontiguousarray(arrays[b]).reshape(-1).view(np.uint8)
                buffers[b], sizes[b] = device.alloc(size + self.guard), size
                if self.guard or b in func.input_buffers:
                    device.upload(buffers[b], data)
        for k in self.kernels:
            grid = tuple(number(e, env) for e in k.grid)
            values = [number(s, env) for s in k.scalars]
            device.bind(self.handles[k.name], [buffers[b] for b in k.buffers], values, grid, k.local)()
        device.synchronize()
        memory_of: dict[Any, Array] = {}
        for b, memory in buffers.items():
            if not self.guard and b not in func.buffers:
                device.free(memory)  # scratch memory is not compared; its elements may be uninitialised
                continue
            data = device.download(memory, np.dtype(np.uint8), (sizes[b] + self.guard,))
            assert (data[sizes[b] :] == CANARY).all(), f"{func.name} wrote behind {b}"
            memory_of[b] = data[: sizes[b]]
            device.free(memory)
        for b in func.input_buffers:
            if b in memory_of:
                same = np.ascontiguousarray(arrays[b]).reshape(-1).view(np.uint8)
                assert (memory_of[b] == same).all(), f"{func.name} changed its input {b}"
        return [memory_of[b].view(b.dtype.numpy).reshape(arrays[b].shape) for b in func.output_buffers]
