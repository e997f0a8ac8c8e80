"""oneDNN through the `onednn-cpu-gomp` wheel (extra `onednn`): single-precision matrix products with what follows them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, BuildError, MeasureError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device, Launch

PACKAGE = "onednn-cpu-gomp"
FOLLOWS = ("add", "mul", "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "swish")
"""What can follow a product; the scalar `follows` is the sum of (place here, from 1) * 16**position."""
OPERANDS = 2

Views = list[NDArray[Any]]

# Of oneDNN 3's dnnl_types.h.
_F32, _CPU, _IN_ORDER = 3, 1, 1
_SOURCE, _WEIGHTS, _RESULT, _BIAS, _SECOND, _FOLLOWING = 1, 33, 17, 41, 2, 32768
_TWO_SIDED: Mapping[str, int] = {"add": 0x1FFF0, "mul": 0x1FFF1}
_ONE_SIDED: Mapping[str, tuple[int, float]] = {  # kind and alpha
    "relu": (32, 0.0),
    "tanh": (33, 0.0),
    "sigmoid": (41, 0.0),
    "gelu_tanh": (43, 0.0),
    "swish": (44, 1.0),
    "gelu": (49, 0.0),
}
_FLOAT = 4
_LIMIT = 2**40  # of every size and stride: their products are far below 2**63 for memory that exists

_PLAIN = ("m", "n", "k", "trans_a", "trans_b", "lda", "ldb", "ldc")
_AFTER = ("follows", *(f"{what}_d{i}" for i in range(OPERANDS) for what in ("stride", "row", "column")))


class _Argument(ctypes.Structure):
    _fields_ = (("which", ctypes.c_int), ("memory", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (
        *((part, ctypes.c_int) for part in ("major", "minor", "patch")),
        ("hash", ctypes.c_char_p),
        *((part, ctypes.c_uint) for part in ("cpu_runtime", "gpu_runtime")),
    )


def _load() -> Any:
    try:
        files = distribution(PACKAGE).files or ()
    except PackageNotFoundError:
        raise BuildError(
            f"oneDNN: wanted the package {PACKAGE}, found none; pip install 'relax-tune[onednn]'"
        ) from None
    for file in files:
        if file.name == "libdnnl.so.3":
            try:
                return ctypes.CDLL(str(file.locate()))
            except OSError as error:
                raise BuildError(f"oneDNN: wanted {file.name} to load, found {error}; reinstall {PACKAGE}") from None
    raise BuildError(f"oneDNN: wanted libdnnl.so.3 in the package {PACKAGE}, found none; reinstall it")


class OneDnn:
    """`matmul` and `matmul_batched`: C = follow(op(A) op(B)), row-major f32, op is transposition where `trans_*` is non-zero,
    `follow` a chain of operations on every element before it is stored.

    Buffers A, B, an array for each two-sided operation, C. op(A) is (m, k), op(B) (k, n), C (m, n); `ld*` are the row lengths in
    memory, in floats; in the batched form `stride_*` is the distance between matrices, in floats, 0 for one matrix that all
    share. `follows` names the operations (see FOLLOWS); `stride_d0`, `row_d0`, `column_d0` are the strides of the first array they
    read, in floats, 0 along what it does not have, `*_d1` of the second.

    Any alignment will do; sizes and strides are at most 2**40, and overlapping rows are refused. Scratch memory is the library's
    own. Weights are read as they lie: the library packs them in each call.

    Threads: the wheel runs on libgomp, which is what the C device's kernels run on, so there is one team. Whatever sizes are bound
    for the first time cost the making of a kernel (some of which the library remembers).
    """

    name = "onednn"
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        "onednn.matmul": (*_PLAIN, *_AFTER),
        "onednn.matmul_batched": ("batch", *_PLAIN, "stride_a", "stride_b", "stride_c", *_AFTER),
    }

    def __init__(self) -> None:
        self._dll = _load()
        self.threads = host.worker_threads()
        self._dll.dnnl_version.restype = ctypes.POINTER(_Version)
        version = self._dll.dnnl_version().contents
        if version.major != 3:
            raise BuildError(f"oneDNN: wanted version 3, found {version.major}; pip install 'relax-tune[onednn]'")
        self._version = f"{version.major}.{version.minor}.{version.patch} {version.hash.decode(errors='replace')[:12]}"
        self._engine, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("engine_create", ctypes.byref(self._engine), _CPU, ctypes.c_size_t(0))
        self.call("stream_create", ctypes.byref(self._stream), self._engine, _IN_ORDER)

    def call(self, name: str, *arguments: Any) -> None:
        """A function of the library. Raises MeasureError with its status where that is not success."""
        status = getattr(self._dll, f"dnnl_{name}")(*arguments)
        if status:
            raise MeasureError(f"oneDNN: wanted dnnl_{name} to succeed, found status {status}")

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        isa = self._dll.dnnl_get_effective_cpu_isa()
        return (("isa", hex(isa)), ("threads", str(self.threads)), ("version", self._version))

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        names = self.routines.get(routine)
        if names is None:
            raise ArtifactError(f"oneDNN: wanted one of {', '.join(self.routines)}, found {routine}")
        if len(scalars) != len(names):
            raise ArtifactError(f"{routine}: wanted the scalars {', '.join(names)}, found {len(scalars)} scalars")
        sizes = {"batch": 1, "stride_a": 0, "stride_b": 0, "stride_c": 0}
        sizes |= dict(zip(names, (int(value) for value in scalars)))
        for name, value in sizes.items():
            if not 0 <= value <= _LIMIT:
                raise MeasureError(f"{routine}: scalar {name}: wanted 0..{_LIMIT}, found {value}")
        follows = _decoded(routine, sizes["follows"])
        arrays = sum(name in _TWO_SIDED for name in follows)
        if len(buffers) != 3 + arrays:
            raise ArtifactError(
                f"{routine}: wanted {3 + arrays} buffers for {', '.join(follows) or 'a product alone'}, found {len(buffers)}"
            )
        if 0 in (sizes["batch"], sizes["m"], sizes["n"]):
            return _nothing
        places = _places(routine, sizes, arrays)
        needs = [_bytes(dims, strides) for dims, strides in places]
        zeros: NDArray[np.float32] | None = None
        if sizes["k"] == 0:  # the empty sum is that over one row of zeros, which stand in for A and B
            zeros = np.zeros(max(sizes["m"], sizes["n"]), np.float32)
            places[0], places[1] = (
                ((1, sizes["m"], 1), (sizes["m"], 1, 1)),
                ((1, 1, sizes["n"]), (sizes["n"], sizes["n"], 1)),
            )
        # In batches, version 3.2 was seen to read wrong elements of what is shared by several matrices or rows: one matrix at a
        # time then.
        whole = (sizes["batch"], sizes["m"], sizes["n"])
        shared = places[0][0][0] == 1 or places[1][0][0] == 1 or any(dims != whole for dims, _ in places[2:])
        apart = sizes["batch"] > 1 and shared
        steps = [0 if dims[0] == 1 else strides[0] * _FLOAT for dims, strides in places]
        if apart:
            places = [((1, *dims[1:]), strides) for dims, strides in places]
        product = _Product(self, places, follows)
        function = partial(_run, product, routine, needs, zeros, steps if apart else None, sizes["batch"])
        launch = device.bind_host(function, buffers)
        if launch is None:
            raise MeasureError(f"{routine}: wanted a device that shares memory with the host, found {device.info.name}")
        return launch


Place = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Dims and strides of matrices, in floats."""


def _decoded(routine: str, code: int) -> tuple[str, ...]:
    found = []
    while code:
        place, code = code % 16, code // 16
        if not 1 <= place <= len(FOLLOWS):
            raise ArtifactError(f"{routine}: scalar follows: wanted places 1..{len(FOLLOWS)}, found {place}")
        found.append(FOLLOWS[place - 1])
    if sum(name in _TWO_SIDED for name in found) > OPERANDS:
        raise ArtifactError(f"{routine}: scalar follows: wanted at most {OPERANDS} arrays, found {', '.join(found)}")
    return tuple(found)


def _places(routine: str, sizes: Mapping[str, int], arrays: int) -> list[Place]:
    """Of A, B, the arrays and C."""
    batch, m, n, k = (sizes[x] for x in ("batch", "m", "n", "k"))

    def matrix(which: str, rows: int, columns: int, transposed: int) -> Place:
        lead, width = sizes[f"ld{which}"], rows if transposed else columns
        if lead < width and (columns if transposed else rows) > 1:
            raise MeasureError(f"{routine}: scalar ld{which}: wanted at least {width}, found {lead}")
        stride = sizes[f"stride_{which}"]
        shared = stride == 0 and which != "c"
        return _tidy((1 if shared else batch, rows, columns), (stride, 1, lead) if transposed else (stride, lead, 1))

    found = [matrix("a", m, k, sizes["trans_a"]), matrix("b", k, n, sizes["trans_b"])]
    for i in range(arrays):
        strides = (sizes[f"stride_d{i}"], sizes[f"row_d{i}"], sizes[f"column_d{i}"])
        dims = tuple(d if s else 1 for d, s in zip((batch, m, n), strides))
        found.append(_tidy((dims[0], dims[1], dims[2]), strides))
    return [*found, matrix("c", m, n, 0)]


def _tidy(dims: tuple[int, int, int], strides: tuple[int, int, int]) -> Place:
    """With strides for dims of 1, which mean nothing, that the library takes for rows behind one another."""
    widest = max((d * s for d, s in zip(dims, strides) if d != 1), default=1)
    batch, row, column = (s if d != 1 else None for d, s in zip(dims, strides))
    return dims, (
        widest if batch is None else batch,
        (dims[2] if column in (None, 1) else 1) if row is None else row,
        (1 if row is None or row != 1 else dims[1]) if column is None else column,
    )


def _bytes(dims: Sequence[int], strides: Sequence[int]) -> int:
    return 0 if 0 in dims else _FLOAT * (1 + sum((d - 1) * s for d, s in zip(dims, strides)))


class _Product:
    """One product made for its sizes; `run` takes the addresses of A, B, the arrays and C."""

    def __init__(self, library: OneDnn, places: Sequence[Place], follows: Sequence[str]) -> None:
        self._library = library
        self._free: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _release, library, self._free)
        # a batch of one is a plain product, for which there are more kernels
        plain = all(dims[0] == 1 for dims, _ in places)
        descriptors = [self._descriptor(dims[plain:], strides[plain:]) for dims, strides in places]
        a, b, *arrays, c = descriptors
        kinds = [_SOURCE, _WEIGHTS]
        bias: ctypes.c_void_p | None = None
        left = list(follows)
        if left[:1] == ["add"] and places[2][0][:2] == (1, 1) and places[2][1][2] == 1:
            left, bias = left[1:], arrays[0]
            kinds.append(_BIAS)
        attributes = self._attributes(left, arrays[1:] if bias else arrays, kinds)
        kinds.append(_RESULT)
        made, primitive = ctypes.c_void_p(), ctypes.c_void_p()
        engine = library._engine
        library.call("matmul_primitive_desc_create", ctypes.byref(made), engine, a, b, bias, c, attributes)
        self._free.append(("primitive_desc_destroy", made))
        library.call("primitive_create", ctypes.byref(primitive), made)
        self._free.append(("primitive_destroy", primitive))
        self._memories = [self._made("memory", d, engine, None) for d in descriptors]
        self._arguments = (_Argument * len(kinds))(*(_Argument(w, x.value) for w, x in zip(kinds, self._memories)))
        execute = library._dll.dnnl_primitive_execute
        self._execute = partial(execute, primitive, library._stream, len(kinds), self._arguments)
        self._at: tuple[int, ...] = ()

    def _made(self, what: str, *arguments: Any, create: str = "create") -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._library.call(f"{what}_{create}", ctypes.byref(handle), *arguments)
        self._free.append((f"{what}_destroy", handle))
        return handle

    def _descriptor(self, dims: Sequence[int], strides: Sequence[int]) -> ctypes.c_void_p:
        numbers = [(ctypes.c_int64 * 12)(*x) for x in (dims, strides)]
        return self._made("memory_desc", len(dims), numbers[0], _F32, numbers[1], create="create_with_strides")

    def _attributes(
        self, follows: Sequence[str], arrays: Sequence[ctypes.c_void_p], kinds: list[int]
    ) -> ctypes.c_void_p | None:
        if not follows:
            return None
        operations, given = self._made("post_ops"), iter(arrays)
        for at, name in enumerate(follows):
            if name in _TWO_SIDED:
                self._library.call("post_ops_append_binary", operations, _TWO_SIDED[name], next(given))
                kinds.append(_FOLLOWING * (at + 1) | _SECOND)
            else:
                kind, alpha = _ONE_SIDED[name]
                numbers = ctypes.c_float(alpha), ctypes.c_float(0.0)
                self._library.call("post_ops_append_eltwise", operations, kind, *numbers)
        attributes = self._made("primitive_attr")
        self._library.call("primitive_attr_set_post_ops", attributes, operations)
        return attributes

    def run(self, addresses: tuple[int, ...]) -> None:
        if addresses != self._at:
            for memory, address in zip(self._memories, addresses, strict=True):
                self._library.call("memory_set_data_handle", memory, ctypes.c_void_p(address))
            self._at = addresses
        status = self._execute()
        if status:
            raise MeasureError(f"oneDNN: wanted a matrix product to run, found status {status}")


def _release(library: OneDnn, handles: list[tuple[str, ctypes.c_void_p]]) -> None:
    for name, handle in reversed(handles):
        getattr(library._dll, f"dnnl_{name}")(handle)


def _run(
    product: _Product,
    routine: str,
    needs: Sequence[int],
    zeros: NDArray[np.float32] | None,
    steps: Sequence[int] | None,
    batch: int,
    views: Views,
) -> None:
    """steps: bytes between matrices where the product is of one of them at a time."""
    for at, (wanted, view) in enumerate(zip(needs, views, strict=True)):
        if view.nbytes < wanted:
            raise MeasureError(f"{routine}: buffer {at}: wanted {wanted} bytes, found {view.nbytes}")
    found = [int(view.__array_interface__["data"][0]) for view in views]
    if zeros is not None:
        found[:2] = [int(zeros.__array_interface__["data"][0])] * 2
    if steps is None:
        product.run(tuple(found))
        return
    for i in range(batch):
        product.run(tuple(at + i * step for at, step in zip(found, steps)))


def _nothing() -> None:
    """The product with no elements."""
