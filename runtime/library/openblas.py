"""OpenBLAS through the `scipy-openblas32` wheel (extra `openblas`): single-precision matrix products.

Tests: `tests/runtime/library/test_library.py`.
"""

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

# Products in pieces, which OpenBLAS computes on one thread each: pieces of the longer side of C, in blocks of its micro-kernel.
_PIECES = """#include <stdint.h>
enum { ROW_MAJOR = 101, TRANSPOSED = 112, ROWS = 8, COLUMNS = 16, OF_EACH_THREAD = 4 };
typedef void gemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
int relax_tune_team_size(void);
struct product {
  gemm *call;
  int64_t ta, tb, m, n, k, lda, ldb, ldc, sa, sb, sc, pieces;
  const float *a, *b;
  float *c;
};
static void compute_pieces(const void *data, int64_t from, int64_t to) {
  const struct product *p = (const struct product *)data;
  const int by_rows = p->m > p->n;
  const int64_t length = by_rows ? p->m : p->n, block = by_rows ? ROWS : COLUMNS, blocks = (length + block - 1) / block;
  for (int64_t at = from; at < to; ++at) {
    const int64_t matrix = at / p->pieces, piece = at % p->pieces;
    const int64_t low = blocks * piece / p->pieces * block, above = blocks * (piece + 1) / p->pieces * block;
    const int64_t high = above < length ? above : length;
    const float *a = p->a + matrix * p->sa, *b = p->b + matrix * p->sb;
    float *c = p->c + matrix * p->sc;
    int64_t m = p->m, n = p->n;
    if (low >= high) continue;
    if (by_rows) {
      m = high - low, a += p->ta == TRANSPOSED ? low : low * p->lda, c += low * p->ldc;
    } else {
      n = high - low, b += p->tb == TRANSPOSED ? low * p->ldb : low, c += low;
    }
    p->call(ROW_MAJOR, (int)p->ta, (int)p->tb, (int)m, (int)n, (int)p->k, 1.0f, a, (int)p->lda, b, (int)p->ldb, 0.0f, c, (int)p->ldc);
  }
}
void relax_tune_blas(const float *a, const float *b, float *c, gemm *call, const int64_t *s) {
  const int64_t batch = s[0], expected = OF_EACH_THREAD * (int64_t)relax_tune_team_size();
  const int64_t pieces = batch < expected ? (expected + batch - 1) / batch : 1;
  const struct product p = {call, s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], pieces, a, b, c};
  RT_PARALLEL_FOR(compute_pieces, &p, batch * pieces, 0, (double)batch * p.m * p.n * p.k >= 50000.0);
}
"""
_SCALARS = ("batch", "trans_a", "trans_b", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")


_TEAM = SleepingTeam()
_PROCESS = threading.RLock()  # taken while OpenBLAS computes or its threads are chosen: both are global to the process


def _load() -> Any:
    try:
        import scipy_openblas32
    except ImportError as error:
        raise BuildError(
            f"OpenBLAS: expected the package scipy-openblas32, got {error}; pip install 'relax-tune[openblas]'"
        ) from None
    folder = Path(scipy_openblas32.get_lib_dir())
    for path in sorted(folder.glob("*scipy_openblas*")):
        if path.suffix in (".so", ".dylib", ".dll"):
            return ctypes.CDLL(str(path))
    raise BuildError(f"OpenBLAS: expected a shared library in {folder}, got none; reinstall scipy-openblas32")


class OpenBlas:
    """`sgemm` and `sgemm_batched`: C = op(A) op(B), row-major f32, op is transposition where `trans_*` is non-zero.

    Buffers A, B, C. op(A) is (m, k), op(B) (k, n), C (m, n); `ld*` are the row lengths in memory, in floats; in the
    batched form `stride_*` is the distance between matrices, in floats.

    Threads: two pools that both spin while idle take the processors from each other. So on the C device the threads of the kernels
    compute products in pieces, and OpenBLAS has no threads; on a busy machine, late threads then lose pieces to other threads.
    On an OpenCL device its jobs run on threads that sleep while idle (`thread_pool.SleepingTeam`). The choice is the process's; each
    launch makes it its own device's. Products of several threads take turns.
    """

    name = "openblas"
    kernels = (KernelSource("relax_tune_blas", "c", _PIECES),)
    """The function that computes a product in pieces on the C device."""
    _shared_with: ClassVar[str] = (
        ""  # the kind of device whose threads compute products; one per process, like OpenBLAS's pool
    )
    _in_pieces: ClassVar[Any] = None  # the function of the C device that computes products in pieces
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        "openblas.sgemm": PLAIN,
        "openblas.sgemm_batched": BATCHED,
    }

    def __init__(self, threads: int | None = None) -> None:
        self._dll = _load()
        self.threads = threads or host.worker_threads()
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
        raise BuildError(f"OpenBLAS: expected the function {name}, got none in the wheel; update scipy-openblas32")

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
            raise MeasureError(f"{routine}: expected a device that shares memory with the host, got {device.info.name}")
        return launch

    def _share_threads(self, device: Device) -> None:
        """Let the threads that this device uses compute products. Its caller holds the process's lock."""
        kind = device.info.kind
        if OpenBlas._shared_with == kind:
            return
        if kind != "c":
            register = getattr(self._dll, _PREFIX + "openblas_set_threads_callback_function", None)
            if register is not None:
                register(ctypes.cast(_TEAM.callback, ctypes.c_void_p))
        self._symbol("openblas_set_num_threads")(ctypes.c_int(1 if kind == "c" else self.threads))
        OpenBlas._shared_with = kind

    def _multiply(
        self, routine: str, sizes: dict[str, int], needs: tuple[int, int, int], device: Device
    ) -> Callable[[Views], None]:
        kind = device.info.kind
        make = partial(self._pieces, device, sizes) if kind == "c" else partial(self._calls, sizes)
        known: list[int] = []
        calls: list[Callable[[], object]] = []

        def multiply(views: Views) -> None:
            nonlocal known, calls
            _check_views(routine, needs, views)
            addresses = [int(view.__array_interface__["data"][0]) for view in views]
            if addresses != known:
                calls, known = make(addresses), addresses
            with _PROCESS:
                # A launch of another device may have changed it since.
                if OpenBlas._shared_with != kind:
                    self._share_threads(device)
                for call in calls:
                    call()

        return multiply

    def _pieces(self, device: Device, sizes: dict[str, int], addresses: Sequence[int]) -> list[Callable[[], object]]:
        """Return the call that computes a product in pieces on the threads of the C device."""
        if OpenBlas._in_pieces is None:
            OpenBlas._in_pieces = device.compile(self.kernels)["relax_tune_blas"]
        flags = {name: _TRANSPOSED if sizes[name] else _PLAIN for name in ("trans_a", "trans_b")}
        values = (ctypes.c_int64 * len(_SCALARS))(*({**sizes, **flags}[name] for name in _SCALARS))
        pointers = [ctypes.c_void_p(address) for address in addresses]
        return [partial(OpenBlas._in_pieces, *pointers, ctypes.cast(self._gemm, ctypes.c_void_p), values)]

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
        # The batched function takes strides of 32 bits.
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
    for which, nbytes, view in zip("ABC", needs, views):
        if view.nbytes < nbytes:
            raise MeasureError(f"{routine}: buffer {which}: expected {nbytes} bytes, got {view.nbytes}")


def _clear(routine: str, sizes: dict[str, int], needs: Sequence[int], views: Views) -> None:
    """Zero every element of C, which is an empty sum for k = 0."""
    _check_views(routine, needs, views)
    floats = views[2][: needs[2]].view(np.float32)
    for index in range(sizes["batch"]):
        for row in range(sizes["m"]):
            start = index * sizes["stride_c"] + row * sizes["ldc"]
            floats[start : start + sizes["n"]] = 0.0
