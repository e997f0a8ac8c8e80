"""cuBLAS and cuBLASLt for the emulation of CUDA: one library of the functions that the runtime calls (`cublas.cpp`)."""

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
    """The folder (one for LD_LIBRARY_PATH) with the libraries by the names under which a system would have them, compiled once."""
    text = SOURCE.read_bytes()
    into = folder / f"cublas-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    if not into.exists():
        made = folder / f".{into.name}"
        made.mkdir(exist_ok=True)
        first = made / NAMES[0]
        subprocess.run(["g++", "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(first)], check=True)
        (made / NAMES[1]).symlink_to(NAMES[0])
        made.rename(into)
    return into


class StandIn:
    """The library, whose products take their turn in a driver's queue. Attributes: `products` done, handles and descriptions
    `alive`, algorithms `chosen`."""

    def __init__(self, file: Path | str, driver: EmulatedDriver) -> None:
        self.dll = ctypes.CDLL(str(file))

        def queue(function: int, data: int) -> None:
            driver.check()
            driver.enqueue(lambda: _WORK(function)(data))

        self._queue = _QUEUE(queue)
        self.dll.rt_set_queue(self._queue)

    def __getattr__(self, name: str) -> Any:
        return ctypes.c_long.in_dll(self.dll, f"rt_{name}").value
