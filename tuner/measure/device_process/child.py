"""The device process, started by `start` in its sandbox.

It opens one device and measures batches until its supervisor closes the pipe or kills it. It imports only the runtime, no compiler,
search or database: it starts fast, and loses no state when a candidate kills it.

Messages in: `batch` (text of `codec.encode_batch`, the folder of its arrays, and the indices to compile one by one).
Messages out: `ready`, `refused` or `unfit` (for the sandbox) once. Then per batch any number of `results`, then `done`, `lost`
if the device is unusable, or `unable` if this machine cannot measure (a full disk); after the last two the process exits.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.errors import MeasureError, RelaxTuneError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.opencl import OpenCLDevice
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.library.registry import library_facts, open_libraries
from relax_tune.tuner.measure.codec import decode_batch, encode_results
from relax_tune.tuner.measure.device_process.batch import BatchMeasurement, DeviceLostError
from relax_tune.tuner.measure.device_process.precompiling import Precompiler
from relax_tune.tuner.measure.messages import MeasureResult
from relax_tune.tuner.measure.protocol import FrameReader, ProgressMap, write_frame

_PR_SET_PDEATHSIG = 1


def _die_with_the_supervisor() -> None:
    """Ask the kernel for SIGKILL when the supervising thread ends (Linux).

    A candidate may hang holding the interpreter lock, and then `_listen` cannot notice.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _listen(descriptor: int, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Put messages into the inbox. When the supervisor has ended, kill the whole process group, compilers included."""
    reader = FrameReader(descriptor)
    while (text := reader.next(None)) is not None:
        inbox.put(json.loads(text))
    # Otherwise the group is the one of the process that started this one.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    # `sys.exit` would end only this thread.
    os._exit(0)


def probe(device: Device) -> None:
    """Copy data to device memory and back. Raises MeasureError when the copy differs."""
    sent = np.arange(64, dtype=np.int32)
    buffer = device.alloc(sent.nbytes)
    device.upload(buffer, sent)
    received = device.download(buffer, sent.dtype, sent.shape)
    device.free(buffer)
    if not np.array_equal(sent, received):
        raise MeasureError(
            f"expected device {device.info.name!r} to return the 64 integers that were written, got others; "
            "its memory or driver is broken"
        )


def runs_kernels(device: Device) -> bool:
    """Return True if the kernels of a device run in this process, with its rights."""
    return device.info.kind == "c" or (isinstance(device, OpenCLDevice) and device.in_process)


def main(arguments: list[str], sandbox: int, ahead: tuple[int, int] | None = None) -> int:
    """Serve batches.

    Args:
        sandbox: version of Landlock that confines this process, 0 without confinement.
        ahead: pipes from and to a process that compiles ahead.

    Returns:
        The exit status: 0 when the supervisor closed the pipe, 3 when the device was lost or could not be opened.
    """
    faulthandler.enable()
    _die_with_the_supervisor()
    spec, read_from, write_to = arguments[0], int(arguments[1]), int(arguments[2])
    progress = ProgressMap(int(arguments[3]))
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(read_from, inbox), daemon=True).start()

    def tell(**message: Any) -> None:
        write_frame(write_to, json.dumps(message, separators=(",", ":")))

    def answer(*results: MeasureResult) -> None:
        tell(kind="results", results=encode_results(results))

    try:
        device = open_device(spec)
        probe(device)
        libraries = open_libraries() if device.info.libraries is None else {}
    except (RelaxTuneError, ImportError, OSError) as error:
        tell(kind="unfit" if sandbox else "refused", message=str(error) or type(error).__name__)
        return 3
    limited = runs_kernels(device)
    if sandbox and not limited:
        tell(kind="unfit", message=f"the driver of {device.info.name} runs its kernels in another process")
        return 3
    precompiler = Precompiler(*ahead) if ahead is not None and limited else None
    measurement = BatchMeasurement(
        device, libraries, progress, answer, lambda: probe(device), limited, precompiler=precompiler
    )
    tell(kind="ready", sandbox=sandbox, info=asdict(replace(device.info, libraries=library_facts(libraries))))
    while True:
        message = inbox.get()
        requests = decode_batch(message["batch"], Path(message["arrays"]))
        try:
            measurement.run(requests, isolated=frozenset(message["isolated"]))
        except DeviceLostError:
            tell(kind="lost")
            os._exit(3)  # a driver's clean-up at exit fails, or hangs, on a lost device
        except (MeasureError, OSError) as error:  # an error of this machine (a full disk), not of a candidate
            tell(kind="unable", message=str(error))
            return 3
        progress.tell(0, 0, "idle")
        tell(kind="done")
