"""cuBLAS and cuBLASLt for the emulation of CUDA: a library with the functions that the runtime calls (`cublas.cpp`)."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path
from typing import Any

from tests.cuda_emulation.driver import EmulatedDriver

SOURCE = Path(__file__).with_name("cublas.cpp")
NAMES = ("libcublas.so.13", "libcublasLt.so.13")
"""Of the same library: either will do for `StandIn`."""
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_QUEUE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def library_folder(folder: Path) -> Path:
    """Return a folder for LD_LIBRARY_PATH with the libraries under their usual file names, compiled once."""
    text = SOURCE.read_bytes()
    into = folder / f"cublas-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    if not into.exists():
        staging = folder / f".{into.name}"
        staging.mkdir(exist_ok=True)
        first = staging / NAMES[0]
        subprocess.run(["g++", "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(first)], check=True)
        (staging / NAMES[1]).symlink_to(NAMES[0])
        staging.rename(into)
    return into


class StandIn:
    """The library; a driver's queue orders its products.

    Attributes: `products` done, handles and descriptions `alive`, algorithms `chosen`.
    """

    def __init__(self, file: Path | str, driver: EmulatedDriver) -> None:
        self.dll = ctypes.CDLL(str(file))

        def queue(function: int, data: int) -> None:
            driver.check()
            driver.enqueue(lambda: _WORK(function)(data))

        self._queue = _QUEUE(queue)
        self.dll.rt_set_queue(self._queue)

    def __getattr__(self, name: str) -> Any:
        return ctypes.c_long.in_dll(self.dll, f"rt_{name}").value
