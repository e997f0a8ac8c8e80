"""Recordings of launches: what is asked of the driver, and a binding that replays what came a second time."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.cuda_graphs import GraphError, Graphs
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import BufferSpec, CallSite, CallVariant, KernelSource, LaunchStep, Program
from relax_tune.runtime.program.scalars import ScalarBuilder

ADD = 'extern "C" __global__ void add(float *a) { a[threadIdx.x] += 1.0f; }\n'


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR = 1


class Driver:
    """Names of cuda.bindings.driver. failing: the call that does not succeed."""

    CUresult = Result
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            status = Result.CUDA_ERROR if name == self.failing else Result.CUDA_SUCCESS
            values = {"cuStreamEndCapture": "graph", "cuGraphInstantiate": "exec", "cuGetErrorString": b"it broke"}
            return (status, values[name]) if name in values else (status,)

        return call


def test_a_recording_is_made_once_and_given_back() -> None:
    driver = Driver()
    launch = Graphs(driver).record(5, lambda: driver.calls.append("enqueue"))
    assert launch is not None
    launch()
    launch()
    del launch
    begun = ["cuStreamBeginCapture", "enqueue", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]
    assert driver.calls == [*begun, "cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy"]


@pytest.mark.parametrize("failing", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate"])
def test_unrecordable_by_driver_is_launched_singly(failing: str) -> None:
    driver = Driver(failing)
    assert Graphs(driver).record(5, lambda: None) is None
    assert driver.calls.count("cuStreamBeginCapture") == 1
    assert driver.calls.count("cuStreamEndCapture") == (failing != "cuStreamBeginCapture")


def test_failed_capture_ends_with_error() -> None:
    launch = Graphs(Driver("cuGraphLaunch")).record(5, lambda: None)
    assert launch is not None
    with pytest.raises(GraphError, match="it broke"):
        launch()
    driver = Driver()
    with pytest.raises(ZeroDivisionError):
        Graphs(driver).record(5, lambda: print(1 // 0))
    assert driver.calls[-1] == "cuStreamEndCapture"


def copied_and_added_to() -> Program:
    """y = x + 2, in three kernels."""
    b = ScalarBuilder()
    four, one, zero = b.const(4), b.const(1), b.const(0)
    step = LaunchStep("kernel", "add", (1,), (), (one,), (4,))
    copy = LaunchStep("kernel", "copy", (0, 1), (), (one,), (4,))
    source = 'extern "C" __global__ void copy(const float *a, float *b) { b[threadIdx.x] = a[threadIdx.x]; }\n'
    return Program(
        symbols=(), scalars=b.code, checks=(), storages=(), prepare=(), inputs=(0,), outputs=(1,),
        buffers=(BufferSpec("x", "float32", (four,), "input"), BufferSpec("y", "float32", (four,), "output")),
        kernels=(KernelSource("add", "cuda", ADD), KernelSource("copy", "cuda", source)),
        calls=(CallSite("f", "task", zero, (CallVariant("generic", (copy, step, step)),)),),
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.ccompiler
def test_unrecordable_steps_are_launched_singly(tmp_path: Path) -> None:
    """As a library's call may refuse while its stream is recorded; a device that is lost says so."""
    device = emulated(tmp_path)
    kernel = device.compile([KernelSource("add", "cuda", ADD)])["add"]
    buffer = device.alloc(16)
    device.upload(buffer, np.zeros(4, np.float32))
    add = device.bind(kernel, [buffer], [], (1,), (4,))

    def refuse() -> None:
        raise MeasureError("expected a call to succeed, got status 14")

    assert device.record([add, refuse, add]) is None
    add()
    assert device.download(buffer, np.dtype(np.float32), (4,)).tolist() == [1] * 4, "nothing of it has run"
    device._lost = "the device is lost"
    with pytest.raises(MeasureError, match="the device is lost"):
        device.record([add, add, add])


@pytest.mark.process
@pytest.mark.ccompiler
def test_repeated_binding_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulated(tmp_path)
    recorded: list[int] = []
    record = device.record
    monkeypatch.setattr(device, "record", lambda launches: (recorded.append(len(launches)), record(launches))[1])
    executor = Executor(copied_and_added_to(), device, {})
    for k in range(5):
        data = np.full(4, k, np.float32)
        assert executor.run([data])[0].tolist() == [k + 2] * 4
    assert recorded == [3]
    bound = executor.bind({})
    series = bound.series(5)
    assert series is not None and bound.series(5) is series and recorded == [3, 15]
    device.upload(executor.buffer("x"), np.full(4, 40, np.float32))
    series()
    assert device.download(executor.buffer("y"), np.dtype(np.float32), (4,)).tolist() == [42] * 4
    executor.close()
    device.close()
