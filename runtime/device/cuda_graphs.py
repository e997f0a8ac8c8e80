"""Launches recorded once and replayed as one: CUDA graphs by stream capture, through cuda-bindings (pycuda has none)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from relax_tune.runtime.device.base import Launch


class Recorder(Protocol):
    """A recorder of the operations enqueued on a stream, given by the driver's handle."""

    def record(self, stream: int, enqueue: Callable[[], None]) -> Launch | None:
        """Capture the stream operations of `enqueue` as one launch, without running them. None if the driver refuses."""
        ...


def load_recorder() -> Recorder | None:
    """Return the recorder of cuda-bindings; None where it is not installed."""
    try:
        from cuda.bindings import driver
    except (ImportError, OSError, RuntimeError):
        return None
    return Graphs(driver)


class Graphs:
    """Stream capture. driver: a module with the names of cuda.bindings.driver."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def record(self, stream: int, enqueue: Callable[[], None]) -> Launch | None:
        driver, done = self._driver, self._driver.CUresult.CUDA_SUCCESS
        # others of the process may allocate meanwhile
        (status,) = driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        if status != done:
            return None
        try:
            enqueue()
        finally:
            status, graph = driver.cuStreamEndCapture(stream)
        if status != done:
            return None
        # The runnable graph is a copy, so the captured one is not needed any more.
        status, runnable = driver.cuGraphInstantiate(graph, 0)
        driver.cuGraphDestroy(graph)
        if status != done:
            return None
        start = driver.cuGraphLaunch

        def launch() -> None:
            (status,) = start(runnable, stream)
            if status != done:
                raise GraphError(driver.cuGetErrorString(status)[1].decode())

        # not when the process ends, when its context may be gone already
        weakref.finalize(launch, driver.cuGraphExecDestroy, runnable).atexit = False
        return launch


class GraphError(Exception):
    """A recording could not be launched; the message is the driver's."""
