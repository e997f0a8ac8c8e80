"""cuBLAS, where it is installed (extra `cuda`): matrix products on a CUDA device's own stream.

Written against NVIDIA's headers and tested with a library of the same functions that computes on the processor; it was never run
on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import Device, Launch
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.library import cublas_api as api
from relax_tune.runtime.library.product import BATCHED, PLAIN, product_bytes, product_sizes

WORKSPACE_BYTES = 32 << 20
"""NVIDIA's recommendation for Hopper, the largest of all GPUs; for one stream."""


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """State of one device. workspace: of the handle."""

    handle: ctypes.c_void_p
    workspace: Any


class CuBlas:
    """`gemm_T` and `gemm_T_batched` with the scalars and buffers of `runtime/library/product`, strides and row lengths in elements.

    T: f32; f16 or bf16, operands and result; f16_f32 or bf16_f32, with a result of f32. All sum in f32: f32 is not rounded to TF32,
    and partial sums are not rounded to 16 bits.

    A device has one handle, on its stream, with a workspace that is allocated with it, so that a call allocates
    nothing and can be recorded. Any alignment will do.
    """

    name = "cublas"
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        **{f"cublas.gemm_{kind}": PLAIN for kind in api.ELEMENTS},
        **{f"cublas.gemm_{kind}_batched": BATCHED for kind in api.ELEMENTS},
    }

    def __init__(self, dll: Any = None) -> None:
        """Load the library. dll: the loaded library; None finds it."""
        self._cublas = api.Functions("cublas", api.CUBLAS, dll)

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        return (("version", self._cublas.version), ("workspace", str(WORKSPACE_BYTES)))

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        sizes = product_sizes("cuBLAS", self.routines, routine, buffers, scalars)
        elements = elements_of(routine)
        check_buffers(routine, sizes, buffers, elements)
        if 0 in (sizes["batch"], sizes["m"], sizes["n"]):
            return _nothing
        gpu = api.on_gpu(routine, device)
        if sizes["k"] == 0:
            sizes, buffers = over_zeros(gpu, sizes, buffers, elements)
        opened = gpu.state_of(self, lambda: self._open(gpu), self._close)
        a, b, c = gpu.native(buffers)[1]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        # What is C by rows is C' by columns, and C' = op(B)' op(A)'.
        first, second, result = (
            (address, kind, sizes[f"ld{x}"], sizes[f"stride_{x}"])
            for address, kind, x in (
                (b, elements.operands, "b"),
                (a, elements.operands, "a"),
                (c, elements.result, "c"),
            )
        )
        turned = [api.TRANSPOSED if sizes[f"trans_{x}"] else api.AS_STORED for x in "ba"]
        head = [opened.handle, *turned, sizes["n"], sizes["m"], sizes["k"], ctypes.addressof(one)]
        tail = [api.COMPUTE_32F, api.ANY_ALGORITHM]
        given: list[Any]
        if sizes["batch"] == 1:
            name = "cublasGemmEx"
            given = [*head, *first[:3], *second[:3], ctypes.addressof(zero), *result[:3], *tail]
        else:
            name = "cublasGemmStridedBatchedEx"
            given = [*head, *first, *second, ctypes.addressof(zero), *result, sizes["batch"], *tail]
        call = self._cublas.raw(name)

        def launch() -> None:
            gpu.within(routine, lambda: api.check(name, call(*given)))

        launch.__dict__["keep"] = (tuple(buffers), one, zero)
        return launch

    def _open(self, device: CUDADevice) -> _Opened:
        handle = ctypes.c_void_p()
        self._cublas("cublasCreate_v2", ctypes.byref(handle))
        workspace = device.alloc(WORKSPACE_BYTES)
        stream, (memory,) = device.native([workspace])
        # in this order: a stream comes with the library's own workspace
        self._cublas("cublasSetStream_v2", handle, stream)
        self._cublas("cublasSetWorkspace_v2", handle, memory, WORKSPACE_BYTES)
        self._cublas("cublasSetPointerMode_v2", handle, api.POINTERS_OF_HOST)
        self._cublas("cublasSetMathMode", handle, api.DEFAULT_MATH | api.NO_SUMS_IN_RESULT_TYPE)
        return _Opened(handle, workspace)

    def _close(self, opened: _Opened) -> None:
        self._cublas("cublasDestroy_v2", opened.handle)


def elements_of(routine: str) -> api.Elements:
    """Return the element types that the end of a routine's name states."""
    return api.ELEMENTS[routine.split("_", 1)[1].removesuffix("_batched")]


def check_buffers(routine: str, sizes: Mapping[str, int], buffers: Sequence[Any], elements: api.Elements) -> None:
    """Raise MeasureError if A, B or C is smaller than the sizes require."""
    widths = (elements.operand_bytes, elements.operand_bytes, elements.result_bytes)
    needs = product_bytes(routine, sizes, widths)
    for which, nbytes, buffer in zip("ABC", needs, (*buffers[:2], buffers[-1]), strict=True):
        if buffer.nbytes < nbytes:
            raise MeasureError(f"{routine}: buffer {which}: expected {nbytes} bytes, got {buffer.nbytes}")


def over_zeros(
    device: CUDADevice, sizes: Mapping[str, int], buffers: Sequence[Any], elements: api.Elements
) -> tuple[dict[str, int], list[Any]]:
    """Return sizes and buffers that compute an empty sum over one row of zeros, which replace A and B."""
    m, n = sizes["m"], sizes["n"]
    zeros = np.zeros(max(m, n) * elements.operand_bytes, np.uint8)
    row = device.alloc(zeros.nbytes)
    device.upload(row, zeros)
    shape = {"k": 1, "trans_a": 0, "lda": 1, "stride_a": 0, "trans_b": 0, "ldb": n, "stride_b": 0}
    return {**sizes, **shape}, [row, row, *buffers[2:]]


def _nothing() -> None:
    """Compute a product without elements: do nothing."""
