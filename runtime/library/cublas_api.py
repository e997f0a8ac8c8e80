"""The parts of the C interfaces of cuBLAS and cuBLASLt that `cublas` and `cublaslt` use: search paths, prototypes,
constants.

Prototypes and numbers are from cublas_api.h, cublasLt.h and library_types.h of CUDA 12 and 13, which agree on them.

Tests: `tests/runtime/library/test_cublas.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.cuda import CUDADevice

INSTALL = "pip install 'relax-tune[cuda]' where NVIDIA's driver is installed"
MAJORS = (13, 12)

# library_types.h: cudaDataType_t
R_32F, R_16F, R_16BF = 0, 2, 14
# cublas_api.h: cublasOperation_t, cublasPointerMode_t, cublasMath_t, cublasComputeType_t, cublasGemmAlgo_t, cublasStatus_t
AS_STORED, TRANSPOSED = 0, 1
POINTERS_OF_HOST = 0
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: products of 16-bit floats are summed in float32.
DEFAULT_MATH, NO_SUMS_IN_RESULT_TYPE = 0, 16
COMPUTE_32F = 68
ANY_ALGORITHM = -1
STATUS_NOT_SUPPORTED = 15
# cublasLt.h: cublasLtMatrixLayoutAttribute_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t,
# cublasLtReductionScheme_t, cublasLtEpilogue_t
LAYOUT_BATCH_COUNT, LAYOUT_BATCH_OFFSET = 5, 6
MATMUL_TRANSA, MATMUL_TRANSB, MATMUL_EPILOGUE, MATMUL_BIAS = 3, 4, 7, 8
PREFER_WORKSPACE, PREFER_REDUCTIONS = 1, 3
PREFER_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D
REDUCE_IN_PLACE, REDUCE_IN_COMPUTE_TYPE = 1, 2
EPILOGUE_DEFAULT, EPILOGUE_RELU, EPILOGUE_BIAS, EPILOGUE_GELU = 1, 2, 4, 32

_INT, _INT64, _SIZE, _POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_size_t, ctypes.c_void_p
_UINT64 = ctypes.c_uint64
_TYPED = (_POINTER, _INT, _INT)  # a matrix, the type of its elements, its leading dim

CUBLAS: Mapping[str, Sequence[Any]] = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasGetProperty": (_INT, _POINTER),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, _SIZE),
    "cublasSetPointerMode_v2": (_POINTER, _INT),
    "cublasSetMathMode": (_POINTER, _INT),
    "cublasGemmEx": (
        *(_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER),
        *(*_TYPED, *_TYPED, _POINTER, *_TYPED, _INT, _INT),
    ),
    "cublasGemmStridedBatchedEx": (
        *(_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER),
        *(*_TYPED, _INT64, *_TYPED, _INT64, _POINTER, *_TYPED, _INT64, _INT, _INT, _INT),
    ),
}
CUBLASLT: Mapping[str, Sequence[Any]] = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtDestroy": (_POINTER,),
    "cublasLtGetProperty": (_INT, _POINTER),
    "cublasLtMatmulDescCreate": (_POINTER, _INT, _INT),
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatrixLayoutCreate": (_POINTER, _INT, _UINT64, _UINT64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatrixLayoutSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulAlgoGetHeuristic": (*(_POINTER,) * 7, _INT, _POINTER, _POINTER),
    "cublasLtMatmul": (*(_POINTER,) * 14, _SIZE, _POINTER),
}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Elements:
    """The types of a product's elements: of both operands, and of its result. Each with its bytes."""

    operands: int
    result: int

    @property
    def operand_bytes(self) -> int:
        return 4 if self.operands == R_32F else 2

    @property
    def result_bytes(self) -> int:
        return 4 if self.result == R_32F else 2


ELEMENTS: Mapping[str, Elements] = {
    "f32": Elements(R_32F, R_32F),
    "f16": Elements(R_16F, R_16F),
    "bf16": Elements(R_16BF, R_16BF),
    "f16_f32": Elements(R_16F, R_32F),
    "bf16_f32": Elements(R_16BF, R_32F),
}
"""By the ends of routines' names: operands, and the result where it is another type. All sum in f32."""


class Functions:
    """A library with declared prototypes. name: of NVIDIA's package, `cublas` or `cublasLt`.

    Raises BuildError where it is not installed, or lacks a function.
    """

    def __init__(self, name: str, prototypes: Mapping[str, Sequence[Any]], dll: Any = None) -> None:
        self._dll = _load(name) if dll is None else dll
        for function, arguments in prototypes.items():
            try:
                symbol = getattr(self._dll, function)
            except AttributeError:
                raise BuildError(f"{name}: expected the function {function}, got none; update it: {INSTALL}") from None
            symbol.restype, symbol.argtypes = ctypes.c_int, list(arguments)
        self.version = ".".join(str(self._property(f"{name}GetProperty", part)) for part in range(3))

    def _property(self, function: str, part: int) -> int:
        value = ctypes.c_int()
        self(function, part, ctypes.byref(value))
        return value.value

    def __call__(self, function: str, *arguments: Any) -> None:
        """Call a function. Raises MeasureError with its status on failure."""
        check(function, self.raw(function)(*arguments))

    def raw(self, function: str) -> Callable[..., int]:
        """Return a function that returns its status."""
        symbol: Callable[..., int] = getattr(self._dll, function)
        return symbol


def check(function: str, status: int) -> None:
    """Raise MeasureError for a status that is not success."""
    if status:
        raise MeasureError(
            f"cuBLAS: expected {function} to succeed, got status {status} (cublasStatus_t in cublas_api.h)"
        )


def _load(name: str) -> Any:
    """Load a library by NVIDIA's finder if installed (wheels, conda, CUDA_HOME), else by the system's search path."""
    reasons = []
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib(name).abs_path
        if path is not None:
            return ctypes.CDLL(path)
    except (ImportError, OSError, RuntimeError) as error:
        reasons.append(" ".join(str(error).split())[:200])
    for major in MAJORS:
        try:
            return ctypes.CDLL(f"lib{name}.so.{major}")
        except OSError as error:
            reasons.append(str(error))
    raise BuildError(f"{name}: expected the library lib{name}.so.{MAJORS[0]}, got {'; '.join(reasons)}; {INSTALL}")


def on_gpu(routine: str, device: Device) -> CUDADevice:
    """Return the device, which may wrap a CUDA device. Raises MeasureError for a device that the library cannot reach."""
    if device.info.kind != "cuda":
        raise MeasureError(f"{routine}: expected a CUDA device, got {device.info.name}")
    return cast(CUDADevice, device)
