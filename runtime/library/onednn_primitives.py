"""The part of oneDNN's C interface that `onednn` uses: memory descriptors, and two primitives for fixed sizes.

Tests: `tests/runtime/library/test_onednn.py`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from relax_tune.errors import BuildError, MeasureError

PACKAGE = "onednn-cpu-gomp"
_SPINS = "500"
"""Looks of an idle libgomp thread for work before it sleeps: some 10 microseconds."""
TWO_SIDED: Mapping[str, int] = {"add": 0x1FFF0, "mul": 0x1FFF1}
ONE_SIDED: Mapping[str, tuple[int, float]] = {  # kind and alpha
    "relu": (32, 0.0),
    "tanh": (33, 0.0),
    "sigmoid": (41, 0.0),
    "gelu_tanh": (43, 0.0),
    "swish": (44, 1.0),
    "gelu": (49, 0.0),
}
FLOAT = 4

# Of oneDNN 3's dnnl_types.h.
_F32, _CPU, _IN_ORDER, _ANY_LAYOUT, _WEIGHTS_LAYOUT = 3, 1, 1, 1, 131
_SOURCE, _WEIGHTS, _RESULT, _BIAS, _SECOND, _FOLLOWING = 1, 33, 17, 41, 2, 32768
_LAYOUT_ROWS = 512  # rows that the layout of weights assumes; the layout was the same from 1 row to 512

Place = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Dims and strides of matrices, in floats."""


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
            f"oneDNN: expected the package {PACKAGE}, got none; pip install 'relax-tune[onednn]'"
        ) from None
    for file in files:
        if file.name == "libdnnl.so.3":
            try:
                with _short_spins():
                    return ctypes.CDLL(str(file.locate()))
            except OSError as error:
                raise BuildError(f"oneDNN: expected {file.name} to load, got {error}; reinstall {PACKAGE}") from None
    raise BuildError(f"oneDNN: expected libdnnl.so.3 in the package {PACKAGE}, got none; reinstall it")


@contextmanager
def _short_spins() -> Iterator[None]:
    """Limit how long idle threads of libgomp spin, which reads this when it is loaded.

    By default they spin for milliseconds after each product and keep the threads of kernels off their processors. Nothing changes where
    the user chose, or where somebody else has loaded libgomp.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.isdisjoint(os.environ):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


class Engine:
    """The library, loaded, with one engine and one stream. Raises BuildError if it is not installed, or of another
    version.
    """

    def __init__(self) -> None:
        self._dll = _load()
        self._dll.dnnl_version.restype = ctypes.POINTER(_Version)
        self._dll.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self._dll.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        version = self._dll.dnnl_version().contents
        if version.major != 3:
            raise BuildError(f"oneDNN: expected version 3, got {version.major}; pip install 'relax-tune[onednn]'")
        self.version = f"{version.major}.{version.minor}.{version.patch} {version.hash.decode(errors='replace')[:12]}"
        self.isa = int(self._dll.dnnl_get_effective_cpu_isa())
        self.handle, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("engine_create", ctypes.byref(self.handle), _CPU, ctypes.c_size_t(0))
        self.call("stream_create", ctypes.byref(self.stream), self.handle, _IN_ORDER)
        self._layouts: dict[tuple[int, int], WeightLayout] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library. Raises MeasureError with its status on failure."""
        status = self.status(name, *arguments)
        if status:
            raise MeasureError(f"oneDNN: expected dnnl_{name} to succeed, got status {status}")

    def status(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library and return its status."""
        return getattr(self._dll, f"dnnl_{name}")(*arguments)

    def execution(self, primitive: ctypes.c_void_p, arguments: ctypes.Array[_Argument]) -> partial[int]:
        """Make a closure that runs a primitive and returns its status."""
        return partial(self._dll.dnnl_primitive_execute, primitive, self.stream, len(arguments), arguments)

    def layout(self, k: int, n: int) -> WeightLayout:
        """Return the layout that products prefer for (k, n) weights."""
        if (k, n) not in self._layouts:
            self._layouts[k, n] = WeightLayout(self, k, n)
        return self._layouts[k, n]


class _Handles:
    """Objects of the library, destroyed with this one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _release, engine, self._free)

    def _create(self, what: str, *arguments: Any, create: str = "create") -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._engine.call(f"{what}_{create}", ctypes.byref(handle), *arguments)
        self._free.append((f"{what}_destroy", handle))
        return handle

    def _described(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """Create the description of a primitive."""
        handle = ctypes.c_void_p()
        self._engine.call(f"{kind}_primitive_desc_create", ctypes.byref(handle), *arguments)
        self._free.append(("primitive_desc_destroy", handle))
        return handle

    def _descriptor(self, dims: Sequence[int], strides: Sequence[int]) -> ctypes.c_void_p:
        numbers = [(ctypes.c_int64 * 12)(*x) for x in (dims, strides)]
        return self._create("memory_desc", len(dims), numbers[0], _F32, numbers[1], create="create_with_strides")


class WeightLayout(_Handles):
    """The layout that a product prefers for (k, n) weights; `nbytes`: their size."""

    def __init__(self, engine: Engine, k: int, n: int) -> None:
        super().__init__(engine)
        rows = _LAYOUT_ROWS
        dims = (ctypes.c_int64 * 12)(k, n)
        free = self._create("memory_desc", 2, dims, _F32, _ANY_LAYOUT, create="create_with_tag")
        a, c = self._descriptor((rows, k), (k, 1)), self._descriptor((rows, n), (n, 1))
        description = self._described("matmul", engine.handle, a, free, None, c, None)
        # lives as long as the description
        self.descriptor = ctypes.c_void_p(engine.status("primitive_desc_query_md", description, _WEIGHTS_LAYOUT, 0))
        self.nbytes = int(engine.status("memory_desc_get_size", self.descriptor))


class _Primitive(_Handles):
    """A primitive; `run` takes the address of each array."""

    def _bind(self, described: ctypes.c_void_p, kinds: Sequence[int], descriptors: Sequence[ctypes.c_void_p]) -> None:
        engine = self._engine
        primitive = self._create("primitive", described)
        self._memories = [self._create("memory", d, engine.handle, None) for d in descriptors]
        arguments = (_Argument * len(kinds))(*(_Argument(w, x.value) for w, x in zip(kinds, self._memories)))
        self._execute = engine.execution(primitive, arguments)
        self._at: tuple[int, ...] = ()

    def run(self, addresses: tuple[int, ...]) -> None:
        if addresses != self._at:
            for memory, address in zip(self._memories, addresses, strict=True):
                self._engine.call("memory_set_data_handle", memory, ctypes.c_void_p(address))
            self._at = addresses
        status = self._execute()
        if status:
            raise MeasureError(f"oneDNN: expected a primitive to run, got status {status}")


class MatmulPrimitive(_Primitive):
    """A matrix product of fixed sizes; `run` takes the addresses of A, B, the arrays of `follows`, and C.

    layout: layout of B, if its place does not define it
    """

    def __init__(
        self, engine: Engine, places: Sequence[Place], follows: Sequence[str], layout: WeightLayout | None = None
    ) -> None:
        super().__init__(engine)
        self._layout = layout
        # a batch of one is a plain product, for which there are more kernels
        plain = all(dims[0] == 1 for dims, _ in places)
        descriptors = [self._descriptor(dims[plain:], strides[plain:]) for dims, strides in places]
        if layout is not None:
            descriptors[1] = layout.descriptor
        a, b, *arrays, c = descriptors
        kinds = [_SOURCE, _WEIGHTS]
        bias: ctypes.c_void_p | None = None
        left = list(follows)
        if left[:1] == ["add"] and places[2][0][:2] == (1, 1) and places[2][1][2] == 1:
            left, bias = left[1:], arrays[0]
            kinds.append(_BIAS)
        attributes = self._attributes(left, arrays[1:] if bias else arrays, kinds)
        kinds.append(_RESULT)
        self._bind(self._described("matmul", engine.handle, a, b, bias, c, attributes), kinds, descriptors)

    def _attributes(
        self, follows: Sequence[str], arrays: Sequence[ctypes.c_void_p], kinds: list[int]
    ) -> ctypes.c_void_p | None:
        if not follows:
            return None
        operations, given = self._create("post_ops"), iter(arrays)
        for at, name in enumerate(follows):
            if name in TWO_SIDED:
                self._engine.call("post_ops_append_binary", operations, TWO_SIDED[name], next(given))
                kinds.append(_FOLLOWING * (at + 1) | _SECOND)
            else:
                kind, alpha = ONE_SIDED[name]
                numbers = ctypes.c_float(alpha), ctypes.c_float(0.0)
                self._engine.call("post_ops_append_eltwise", operations, kind, *numbers)
        attributes = self._create("primitive_attr")
        self._engine.call("primitive_attr_set_post_ops", attributes, operations)
        return attributes


class WeightPacking(_Primitive):
    """The packing of weights into a layout; `run` takes the addresses of both."""

    def __init__(self, engine: Engine, place: Place, layout: WeightLayout) -> None:
        super().__init__(engine)
        self._layout = layout
        source = self._descriptor(place[0][1:], place[1][1:])
        description = self._described("reorder", source, engine.handle, layout.descriptor, engine.handle, None)
        self._bind(description, (_SOURCE, _RESULT), (source, layout.descriptor))


def _release(engine: Engine, handles: list[tuple[str, ctypes.c_void_p]]) -> None:
    # In reverse, since later objects may refer to earlier ones.
    for name, handle in reversed(handles):
        engine.status(name, handle)
