"""cuBLASLt, where it is installed (extra `cuda`): matrix products with epilogues, on a CUDA device's own stream.

Written against NVIDIA's headers and tested with a library of the same functions that computes on the processor; it was never run
on a GPU.

Tests: `tests/runtime/library/test_cublas.py`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_tune.errors import ArtifactError, MeasureError
from relax_tune.runtime.device.base import Device, Launch
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.library import cublas_api as api
from relax_tune.runtime.library.cublas import WORKSPACE_BYTES, check_buffers, elements_of, over_zeros
from relax_tune.runtime.library.product import BATCHED, PLAIN, named_sizes

FOLLOWS = ("bias", "residual", "relu", "gelu_tanh")
"""Epilogue operations; the scalar `follows` is the sum of (index here, from 1) * 16**position."""
WITH_ARRAY = ("bias", "residual")
_AFTER = ("follows", *(f"{what}_d{i}" for i in range(len(WITH_ARRAY)) for what in ("stride", "row", "column")))
_EPILOGUES = {"relu": api.EPILOGUE_RELU, "gelu_tanh": api.EPILOGUE_GELU, "": 0}
_ALIGNMENT = 256  # largest alignment that is distinguished

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _After:
    """The epilogue of a product. residual, bias: buffers; row, stride: of the residual, in elements."""

    activation: str = ""
    bias: Any = None
    residual: Any = None
    row: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """State of one device.

    Attributes:
        workspace: Workspace of all its products.
        algorithms: Chosen algorithm by shape, layout and alignments.
    """

    handle: ctypes.c_void_p
    workspace: Any
    algorithms: dict[tuple[object, ...], api.Algorithm] = field(default_factory=dict)


class CuBlasLt:
    """`matmul_T` and `matmul_T_batched`: C = act(op(A) op(B) + residual + bias), row-major, with the types T of `CuBlas`.

    Buffers A, B, an array for the bias and one for the residual in the order of `follows`, C. Scalars: the scalars of
    `runtime/library/product`, strides and row lengths in elements; `follows` names the epilogue operations (see
    FOLLOWS), each at most once and an activation last; `stride_d0`, `row_d0`, `column_d0` are the strides of the first
    array, 0 along missing dims, `*_d1` of the second. A bias has only columns, a residual all dims of C; both have
    elements of C's type. The activations are ReLU and GELU by tanh.

    The library's heuristics choose an algorithm once for each shape, layout and alignment. An algorithm may use
    WORKSPACE_BYTES, which are allocated once, and adds partial sums in f32; f32 is not rounded to TF32. A product without an
    algorithm is refused when it is bound. A launch allocates nothing and can be recorded.
    """

    name = "cublaslt"
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        **{f"cublaslt.matmul_{kind}": (*PLAIN, *_AFTER) for kind in api.ELEMENTS},
        **{f"cublaslt.matmul_{kind}_batched": (*BATCHED, *_AFTER) for kind in api.ELEMENTS},
    }

    def __init__(self, dll: Any = None) -> None:
        """Load the library. dll: the loaded library; None finds it."""
        self._lt = api.Functions("cublasLt", api.CUBLASLT, dll)

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        return (("version", self._lt.version), ("workspace", str(WORKSPACE_BYTES)))

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        sizes = named_sizes("cuBLASLt", self.routines, routine, scalars)
        elements = elements_of(routine)
        after = _after(routine, sizes, buffers, elements)
        check_buffers(routine, sizes, buffers, elements)
        if 0 in (sizes["batch"], sizes["m"], sizes["n"]):
            return _nothing
        gpu = api.on_gpu(routine, device)
        given = [*buffers[:2], buffers[-1]]
        if sizes["k"] == 0:
            sizes, given = over_zeros(gpu, sizes, given, elements)
        opened = gpu.state_of(self, lambda: self._open(gpu), self._close)
        product = gpu.within(routine, lambda: _Product(self._lt, gpu, opened, sizes, given, elements, after))
        stream, (workspace,) = gpu.native([opened.workspace])
        call = self._lt.raw("cublasLtMatmul")
        arguments = (opened.handle, *product.arguments, workspace, WORKSPACE_BYTES, stream)

        def launch() -> None:
            gpu.within(routine, lambda: api.check("cublasLtMatmul", call(*arguments)))

        launch.__dict__["keep"] = (product, tuple(buffers), tuple(given))
        return launch

    def _open(self, device: CUDADevice) -> _Opened:
        handle = ctypes.c_void_p()
        self._lt("cublasLtCreate", ctypes.byref(handle))
        return _Opened(handle, device.alloc(WORKSPACE_BYTES))

    def _close(self, opened: _Opened) -> None:
        self._lt("cublasLtDestroy", opened.handle)


class _Product:
    """The library's descriptors of one product, freed with it.

    arguments: of cublasLtMatmul, from after the handle to before the workspace.
    """

    def __init__(
        self,
        lt: api.Functions,
        device: CUDADevice,
        opened: _Opened,
        sizes: Sizes,
        buffers: Sequence[Any],
        elements: api.Elements,
        after: _After,
    ) -> None:
        self._lt = lt
        handles: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, lt, handles).atexit = False
        self._handles = handles
        a, b, c = device.native(buffers)[1]
        (residual,) = device.native([after.residual])[1] if after.residual is not None else (c,)
        (bias,) = device.native([after.bias])[1] if after.bias is not None else (0,)
        # What is C by rows is C' by columns, and C' = op(B)' op(A)'.
        operation = self._make("cublasLtMatmulDesc", api.COMPUTE_32F, api.R_32F)
        for which, attribute in (("b", api.MATMUL_TRANSA), ("a", api.MATMUL_TRANSB)):
            turned = api.TRANSPOSED if sizes[f"trans_{which}"] else api.AS_STORED
            self._set("cublasLtMatmulDesc", operation, attribute, ctypes.c_int32(turned))
        epilogue = _EPILOGUES[after.activation] | (api.EPILOGUE_BIAS if after.bias is not None else 0)
        self._set(
            "cublasLtMatmulDesc", operation, api.MATMUL_EPILOGUE, ctypes.c_uint32(epilogue or api.EPILOGUE_DEFAULT)
        )
        if after.bias is not None:
            self._set("cublasLtMatmulDesc", operation, api.MATMUL_BIAS, ctypes.c_void_p(bias))
        m, n, k, batch = (sizes[x] for x in ("m", "n", "k", "batch"))
        of_b = (k, n) if sizes["trans_b"] else (n, k)
        of_a = (m, k) if sizes["trans_a"] else (k, m)
        layouts = [
            self._layout(elements.operands, *of_b, sizes["ldb"], batch, sizes["stride_b"]),
            self._layout(elements.operands, *of_a, sizes["lda"], batch, sizes["stride_a"]),
            self._layout(elements.result, n, m, sizes["ldc"], batch, sizes["stride_c"]),
        ]
        if after.residual is not None:
            layouts.insert(2, self._layout(elements.result, n, m, after.row, batch, after.stride))
        else:
            layouts.insert(2, layouts[2])
        self._one, self._factor = ctypes.c_float(1), ctypes.c_float(0 if after.residual is None else 1)
        aligned = [_alignment(x) for x in (b, a, residual, c)]
        key = (*sizes.items(), elements, epilogue, after.row, after.stride, *aligned, _alignment(bias))
        if key not in opened.algorithms:
            opened.algorithms[key] = self._choose(opened.handle, operation, layouts, aligned)
        self._algorithm = opened.algorithms[key]
        self.arguments = (
            *(operation, ctypes.addressof(self._one), b, layouts[0], a, layouts[1]),
            *(ctypes.addressof(self._factor), residual, layouts[2], c, layouts[3], ctypes.addressof(self._algorithm)),
        )

    def _make(self, what: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._lt(f"{what}Create", ctypes.byref(handle), *arguments)
        self._handles.append((f"{what}Destroy", handle))
        return handle

    def _set(self, what: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._lt(f"{what}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _layout(self, kind: int, rows: int, columns: int, lead: int, batch: int, stride: int) -> ctypes.c_void_p:
        layout = self._make("cublasLtMatrixLayout", kind, rows, columns, lead)
        if batch > 1:
            self._set("cublasLtMatrixLayout", layout, api.LAYOUT_BATCH_COUNT, ctypes.c_int32(batch))
            self._set("cublasLtMatrixLayout", layout, api.LAYOUT_BATCH_OFFSET, ctypes.c_int64(stride))
        return layout

    def _choose(
        self,
        handle: ctypes.c_void_p,
        operation: ctypes.c_void_p,
        layouts: Sequence[ctypes.c_void_p],
        aligned: Sequence[int],
    ) -> api.Algorithm:
        wish = self._make("cublasLtMatmulPreference")
        reductions = api.REDUCE_IN_PLACE | api.REDUCE_IN_COMPUTE_TYPE
        attributes = [
            (api.PREFER_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES)),
            (api.PREFER_REDUCTIONS, ctypes.c_uint32(reductions)),
            *((x, ctypes.c_uint32(bytes_)) for x, bytes_ in zip(api.PREFER_ALIGNMENTS, aligned, strict=True)),
        ]
        for attribute, value in attributes:
            self._set("cublasLtMatmulPreference", wish, attribute, value)
        best, count = api.Heuristic(), ctypes.c_int()
        status = self._lt.raw("cublasLtMatmulAlgoGetHeuristic")(
            handle, operation, *layouts, wish, 1, ctypes.byref(best), ctypes.byref(count)
        )
        if status == api.STATUS_NOT_SUPPORTED or (status == 0 and (count.value < 1 or best.state)):
            raise MeasureError(
                "cuBLASLt: expected an algorithm for a product, got none for its layout and what follows"
            )
        api.check("cublasLtMatmulAlgoGetHeuristic", status)
        return api.Algorithm.from_buffer_copy(best.algorithm)


def _destroy(lt: api.Functions, handles: Sequence[tuple[str, ctypes.c_void_p]]) -> None:
    # In reverse, since later objects may refer to earlier ones.
    for function, handle in reversed(handles):
        lt.raw(function)(handle)


def _alignment(address: int) -> int:
    return min(address & -address, _ALIGNMENT) if address else _ALIGNMENT


def _after(routine: str, sizes: Sizes, buffers: Sequence[Any], elements: api.Elements) -> _After:
    """Read the epilogue that a call's sizes and arrays describe.

    Raises: ArtifactError for an impossible order, or a wrong number of buffers; MeasureError for arrays of another
        layout, or too small.
    """
    names, code = [], sizes["follows"]
    while code:
        code, place = divmod(code, 16)
        if not 1 <= place <= len(FOLLOWS):
            raise ArtifactError(f"{routine}: scalar follows: expected places 1..{len(FOLLOWS)}, got {place}")
        names.append(FOLLOWS[place - 1])
    arrays = [x for x in names if x in WITH_ARRAY]
    if len(set(arrays)) < len(arrays) or names[: len(arrays)] != arrays or len(names) > len(arrays) + 1:
        raise ArtifactError(
            f"{routine}: scalar follows: expected a bias and a residual once each, then at most one activation, got "
            f"{', '.join(names)}"
        )
    if len(buffers) != 3 + len(arrays):
        raise ArtifactError(
            f"{routine}: expected {3 + len(arrays)} buffers for {', '.join(names) or 'a plain product'}, got {len(buffers)}"
        )
    arguments: dict[str, Any] = {"activation": (*names, "")[len(arrays)]}
    batch, m, n = (sizes[x] for x in ("batch", "m", "n"))
    for i, name in enumerate(arrays):
        stride, row, column = (sizes[f"{what}_d{i}"] for what in ("stride", "row", "column"))
        whole = name == "residual"
        if (
            (n > 1 and column != 1)
            or (m > 1 and (row < n if whole else row != 0))
            or (batch > 1 and not whole and stride != 0)
        ):
            raise MeasureError(
                f"{routine}: {name}: expected rows of {n} elements in order{'' if whole else ', one for all'}, got strides "
                f"{(stride, row, column)}"
            )
        nbytes = elements.result_bytes * (1 + (n - 1) + whole * ((m - 1) * row + (batch - 1) * stride))
        if 0 not in (batch, m, n) and buffers[2 + i].nbytes < nbytes:
            raise MeasureError(f"{routine}: {name}: expected {nbytes} bytes, got {buffers[2 + i].nbytes}")
        arguments[name] = buffers[2 + i]
        if whole:
            arguments |= {"row": max(row, n), "stride": stride}
    return _After(**arguments)


def _nothing() -> None:
    """Compute a product without elements: do nothing."""
