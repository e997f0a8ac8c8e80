"""OpenBLAS through the `scipy-openblas32` wheel (extra `openblas`): single-precision matrix products."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device, Launch
from relax_tune.runtime.library.product import BATCHED, INT32_MAX, PLAIN, product_bytes, product_sizes
from relax_tune.runtime.library.thread_pool import SleepingTeam
from relax_tune.runtime.program.program import KernelSource

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112
_PREFIX = "scipy_"
_FLOAT = 4

Views = list[NDArray[Any]]

# Runs OpenBLAS's jobs on libgomp's team. Every job must have a thread of its own, because jobs wait for one another;
# `team` returns the number of threads that a region gets.
_TEAM_SOURCE = """#include <stddef.h>
#include <stdint.h>
#include <omp.h>
void relax_tune_blas_team(int32_t* restrict size, int64_t wanted) {
  #pragma omp parallel num_threads((int)wanted)
  {
    #pragma omp single
    *size = omp_get_num_threads();
  }
}
void relax_tune_blas_jobs(int sync, void (*job)(int, void*, int), int jobs, size_t bytes, void* data, int argument) {
  (void)sync;
  #pragma omp parallel for schedule(static, 1) num_threads(jobs)
  for (int i = 0; i < jobs; ++i) job(i, (char*)data + bytes * (size_t)i, argument);
}
"""


_TEAM = SleepingTeam()
_PROCESS = threading.RLock()  # held while OpenBLAS computes, or is told whose threads to use: both are the process's


def _load() -> Any:
    try:
        import scipy_openblas32
    except ImportError as error:
        raise BuildError(
            f"OpenBLAS: wanted the package scipy-openblas32, found {error}; pip install 'relax-tune[openblas]'"
        ) from None
    folder = Path(scipy_openblas32.get_lib_dir())
    for path in sorted(folder.glob("*scipy_openblas*")):
        if path.suffix in (".so", ".dylib", ".dll"):
            return ctypes.CDLL(str(path))
    raise BuildError(f"OpenBLAS: wanted a shared library in {folder}, found none; reinstall scipy-openblas32")


class OpenBlas:
    """`sgemm` and `sgemm_batched`: C = op(A) op(B), row-major f32, op is transposition where `trans_*` is non-zero.

    Buffers A, B, C. op(A) is (m, k), op(B) (k, n), C (m, n); `ld*` are the row lengths in memory, in floats; in the
    batched form `stride_*` is the distance between matrices, in floats.

    Threads: two pools that both spin while idle take the processors from each other (a product followed by an OpenMP
    kernel was seen 100 times slower on two busy cores). So on the C device OpenBLAS runs its jobs on libgomp's threads,
    through its threads callback, and its own pool stays asleep. On an OpenCL device its jobs run on threads that sleep
    while idle (`thread_pool.SleepingTeam`). The choice is the process's; each launch makes it its own device's. Products of several
    threads take turns.
    """

    name = "openblas"
    _shared_with: ClassVar[str] = ""  # the kind of device whose threads OpenBLAS uses; one per process, like its pool
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        "openblas.sgemm": PLAIN,
        "openblas.sgemm_batched": BATCHED,
    }

    def __init__(self, threads: int | None = None) -> None:
        self._dll = _load()
        self.threads = threads or host.worker_threads()
        with _PROCESS:
            self._symbol("openblas_set_num_threads")(ctypes.c_int(self.threads))
        self._gemm = self._symbol("cblas_sgemm")
        self._gemm.restype = None
        try:
            self._batched: Any = self._symbol("cblas_sgemm_batch_strided")
            self._batched.restype = None
        except BuildError:  # older wheels: a loop of single products
            self._batched = None

    def _symbol(self, name: str) -> Any:
        for prefix in (_PREFIX, ""):
            function = getattr(self._dll, prefix + name, None)
            if function is not None:
                return function
        raise BuildError(f"OpenBLAS: wanted the function {name}, found none in the wheel; update scipy-openblas32")

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        texts = {}
        for key in ("config", "corename"):
            function = self._symbol(f"openblas_get_{key}")
            function.restype = ctypes.c_char_p
            texts[key] = function().decode(errors="replace").strip()
        return (("config", texts["config"]), ("core", texts["corename"]), ("threads", str(self.threads)))

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        sizes = product_sizes("OpenBLAS", self.routines, routine, buffers, scalars)
        needs = product_bytes(routine, sizes)
        if sizes["batch"] == 0 or sizes["m"] == 0 or sizes["n"] == 0:
            return _nothing
        if sizes["k"] == 0:
            function: Callable[[Views], None] = partial(_clear, routine, sizes, needs)
        else:
            with _PROCESS:
                self._share_threads(device)
            function = self._multiply(routine, sizes, needs, device)
        launch = device.bind_host(function, buffers)
        if launch is None:
            raise MeasureError(f"{routine}: wanted a device that shares memory with the host, found {device.info.name}")
        return launch

    def _share_threads(self, device: Device) -> None:
        """Let OpenBLAS's jobs run on the threads this device uses. Its caller holds the process's lock."""
        if OpenBlas._shared_with == device.info.kind:
            return
        register = getattr(self._dll, _PREFIX + "openblas_set_threads_callback_function", None)
        threads = self.threads
        if register is not None and device.info.kind == "c":
            names = ("relax_tune_blas_team", "relax_tune_blas_jobs")
            sources = [KernelSource(names[0], "c", _TEAM_SOURCE), KernelSource(names[1], "c", "")]
            handles = device.compile(sources)
            size = device.alloc(4)
            device.bind(handles[names[0]], [size], [threads], (), ())()
            threads = int(device.download(size, np.dtype(np.int32), (1,))[0])
            device.free(size)
            register(ctypes.cast(handles[names[1]], ctypes.c_void_p))
        elif register is not None:
            register(ctypes.cast(_TEAM.callback, ctypes.c_void_p))
        self._symbol("openblas_set_num_threads")(ctypes.c_int(threads))
        OpenBlas._shared_with = device.info.kind

    def _multiply(
        self, routine: str, sizes: dict[str, int], needs: tuple[int, int, int], device: Device
    ) -> Callable[[Views], None]:
        make = partial(self._calls, sizes)
        kind = device.info.kind
        known: list[int] = []
        calls: list[Callable[[], object]] = []

        def multiply(views: Views) -> None:
            nonlocal known, calls
            _check_views(routine, needs, views)
            found = [int(view.__array_interface__["data"][0]) for view in views]
            if found != known:
                calls, known = make(found), found
            with _PROCESS:
                if OpenBlas._shared_with != kind:
                    self._share_threads(device)
                for call in calls:
                    call()

        return multiply

    def _calls(self, sizes: dict[str, int], addresses: Sequence[int]) -> list[Callable[[], object]]:
        c_int, pointer = ctypes.c_int, ctypes.c_void_p
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        a, b, c = addresses
        head = [
            *(c_int(_ROW_MAJOR), c_int(_TRANSPOSED if sizes["trans_a"] else _PLAIN)),
            c_int(_TRANSPOSED if sizes["trans_b"] else _PLAIN),
            *(c_int(sizes["m"]), c_int(sizes["n"]), c_int(sizes["k"]), one),
        ]
        lda, ldb, ldc = (c_int(sizes[key]) for key in ("lda", "ldb", "ldc"))
        strides = [sizes[key] for key in ("stride_a", "stride_b", "stride_c")]
        if sizes["batch"] > 1 and self._batched is not None and max(strides) <= INT32_MAX:
            sa, sb, sc = (c_int(stride) for stride in strides)
            tail = [pointer(a), lda, sa, pointer(b), ldb, sb, zero, pointer(c), ldc, sc, c_int(sizes["batch"])]
            return [partial(self._batched, *head, *tail)]
        calls: list[Callable[[], object]] = []
        for index in range(sizes["batch"]):
            at_a, at_b, at_c = (base + index * s * _FLOAT for base, s in zip(addresses, strides))
            calls.append(partial(self._gemm, *head, pointer(at_a), lda, pointer(at_b), ldb, zero, pointer(at_c), ldc))
        return calls


def _nothing() -> None:
    """Compute a product without elements: do nothing."""


def _check_views(routine: str, needs: Sequence[int], views: Views) -> None:
    for which, wanted, view in zip("ABC", needs, views):
        if view.nbytes < wanted:
            raise MeasureError(f"{routine}: buffer {which}: wanted {wanted} bytes, found {view.nbytes}")


def _clear(routine: str, sizes: dict[str, int], needs: Sequence[int], views: Views) -> None:
    """Zero every element of C, which is an empty sum for k = 0."""
    _check_views(routine, needs, views)
    floats = views[2][: needs[2]].view(np.float32)
    for index in range(sizes["batch"]):
        for row in range(sizes["m"]):
            start = index * sizes["stride_c"] + row * sizes["ldc"]
            floats[start : start + sizes["n"]] = 0.0
