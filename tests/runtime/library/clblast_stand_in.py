"""What is asked of CLBlast, done in NumPy on the host memory behind a PoCL device's buffers, for where it is not installed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F32 = np.dtype(np.float32)
ROW_MAJOR, TRANSPOSED = 101, 112


class StandIn:
    """The functions of CLBlast that are used, with what it refuses, and its way with what it overwrites.

    asked: which were called, in order."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.asked: list[str] = []

    def _matrix(self, turned: int, rows: Any, columns: Any, buffer: Any, offset: Any, lead: Any) -> Array:
        """A view: rows and columns are op's."""
        height, width = (columns.value, rows.value) if turned == TRANSPOSED else (rows.value, columns.value)
        assert lead.value >= width and min(height, width) > 0
        floats = self._floats(buffer)[offset.value :]
        assert len(floats) >= (height - 1) * lead.value + width
        found = np.lib.stride_tricks.as_strided(floats, (height, width), (lead.value * 4, 4))
        return found.T if turned == TRANSPOSED else found

    def _floats(self, buffer: Any) -> Array:
        """Of PoCL's memory, which is the host's."""
        import pyopencl as cl

        memory = cl.Buffer.from_int_ptr(buffer.value)
        mapped, _ = cl.enqueue_map_buffer(
            self.device._queue, memory, cl.map_flags.READ | cl.map_flags.WRITE, 0, (memory.size // 4,), F32
        )
        return mapped

    def _begin(self, name: str, layout: int, queue: Any, event: Any, one: Any, zero: Any) -> None:
        self.asked.append(name)
        assert layout == ROW_MAJOR and event is None and (one.value, zero.value) == (1, 0)
        assert ctypes.cast(queue, ctypes.POINTER(ctypes.c_void_p))[0] == self.device._queue.int_ptr
        self.device.synchronize()

    def CLBlastSgemm(
        self, layout: int, ta: int, tb: int, m: Any, n: Any, k: Any, one: Any, a: Any, a0: Any, lda: Any,
        b: Any, b0: Any, ldb: Any, zero: Any, c: Any, c0: Any, ldc: Any, queue: Any, event: Any,
    ) -> int:  # fmt: skip
        self._begin("gemm", layout, queue, event, one, zero)
        self._matrix(0, m, n, c, c0, ldc)[...] = self._matrix(ta, m, k, a, a0, lda) @ self._matrix(tb, k, n, b, b0, ldb)
        return 0

    def CLBlastSgemmStridedBatched(
        self, layout: int, ta: int, tb: int, m: Any, n: Any, k: Any, one: Any, a: Any, a0: Any, lda: Any, sa: Any,
        b: Any, b0: Any, ldb: Any, sb: Any, zero: Any, c: Any, c0: Any, ldc: Any, sc: Any, batch: Any, queue: Any, event: Any,
    ) -> int:  # fmt: skip
        self._begin("batched", layout, queue, event, one, zero)
        for i in range(batch.value):
            at = [ctypes.c_size_t(x.value + i * s.value) for x, s in ((a0, sa), (b0, sb), (c0, sc))]
            y = self._matrix(ta, m, k, a, at[0], lda) @ self._matrix(tb, k, n, b, at[1], ldb)
            self._matrix(0, m, n, c, at[2], ldc)[...] = y
        return 0

    def CLBlastSgemv(
        self, layout: int, turned: int, rows: Any, columns: Any, one: Any, a: Any, a0: Any, lda: Any,
        x: Any, x0: Any, x_step: Any, zero: Any, y: Any, y0: Any, y_step: Any, queue: Any, event: Any,
    ) -> int:  # fmt: skip
        self._begin("gemv", layout, queue, event, one, zero)
        matrix = self._matrix(0, rows, columns, a, a0, lda)
        matrix = matrix.T if turned == TRANSPOSED else matrix
        given, result = self._floats(x)[x0.value :: x_step.value], self._floats(y)[y0.value :: y_step.value]
        result[: len(matrix)] = matrix @ given[: matrix.shape[1]] + zero.value * result[: len(matrix)]
        return 0
