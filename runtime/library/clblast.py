"""CLBlast, where it is installed: single-precision matrix products on an OpenCL device's own queue."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.device.base import Device, Launch
from relax_tune.runtime.library.product import BATCHED, INT32_MAX, PLAIN, product_bytes, product_sizes
from relax_tune.runtime.program.program import KernelSource

INSTALL = "install your distribution's CLBlast (Debian and Ubuntu: apt install libclblast1)"

_FILES = ("libclblast.so.1", "libclblast.so", "libclblast.dylib", "clblast.dll")
_FUNCTIONS = ("CLBlastSgemm", "CLBlastSgemv", "CLBlastSgemmStridedBatched")
_ROW_MAJOR, _AS_STORED, _TRANSPOSED = 101, 111, 112
_FLOAT = 4
_TILE = 128  # largest tile: operands are padded to multiples of at most this

# Zeroes C before gemv, which multiplies the old values by 0, so that a NaN would stay; also computes empty sums, which
# CLBlast refuses.
_CLEAR, _GROUP = "relax_tune_clear", 64
_CLEAR_SOURCE = f"""kernel void {_CLEAR}(global float* restrict c, long rows, long columns, long lead, long stride) {{
  long i = get_global_id(0);
  if (i < rows * columns) c[get_global_id(1) * stride + i / columns * lead + i % columns] = 0.0f;
}}
"""

Sizes = Mapping[str, int]


class _Place(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _load() -> Any:
    reasons = []
    for name in _FILES:
        try:
            dll = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        missing = [function for function in _FUNCTIONS if not hasattr(dll, function)]
        if missing:
            raise BuildError(f"CLBlast: expected {', '.join(missing)} in {name}, got no such function; update CLBlast")
        return dll
    raise BuildError(f"CLBlast: expected the library {_FILES[0]}, got {reasons[0]}; {INSTALL}")


def _file(dll: Any) -> Path | None:
    """Return the path of the loaded library; None if the loader does not tell."""
    try:
        locate = ctypes.CDLL(None).dladdr
    except (AttributeError, OSError, TypeError):
        return None
    place = _Place()
    if not locate(ctypes.cast(dll.CLBlastSgemm, ctypes.c_void_p), ctypes.byref(place)) or not place.file:
        return None
    return Path(place.file.decode(errors="replace")).resolve()


@dataclass(eq=False)
class _Known:
    """State of one device: the functions with compiled kernels, and the kernel that clears."""

    compiled: set[str] = field(default_factory=set)
    clear: Any = None


class ClBlast:
    """`sgemm` and `sgemm_batched` on OpenCL devices, with the scalars and buffers of `runtime/library/product`.

    Its launches go to the device's own in-order queue, over the same buffers, without copies or waiting. A plain
    product with one row or column uses its matrix-vector function.

    CLBlast compiles its kernels when a function is first called in a process, which takes seconds, and tens of them
    with PoCL. `bind` triggers that by a product of one element, so that the first launch is fast. The driver may still
    compile for a new form (PoCL: a second or two).

    Its kernels count elements in 32 bits, so matrices of 2**31 and more are refused. Its products of 16-bit floats are
    not used, since they sum in 16 bits.
    """

    name = "clblast"
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        "clblast.sgemm": PLAIN,
        "clblast.sgemm_batched": BATCHED,
    }

    def __init__(self, dll: Any = None) -> None:
        """Load the library. dll: the loaded library; None finds it where the system looks for libraries."""
        self._dll = _load() if dll is None else dll
        self._known: weakref.WeakKeyDictionary[Device, _Known] = weakref.WeakKeyDictionary()

    @cached_property
    def _facts(self) -> tuple[tuple[str, str], ...]:
        file = _file(self._dll)
        try:
            data = b"" if file is None else file.read_bytes()
        except OSError:  # replaced since it was loaded
            data = b""
        if file is None or not data:
            return (("file", "unknown"),)
        # many users build it with tuning results of their own, which no version number shows
        return (("build", hashlib.blake2b(data, digest_size=8).hexdigest()), ("file", file.name))

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        return self._facts

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        sizes = product_sizes("CLBlast", self.routines, routine, buffers, scalars)
        needs = product_bytes(routine, sizes)
        for which, nbytes, buffer in zip("ABC", needs, buffers):
            if buffer.nbytes < nbytes:
                raise MeasureError(f"{routine}: buffer {which}: expected {nbytes} bytes, got {buffer.nbytes}")
        if 0 in (sizes["batch"], sizes["m"], sizes["n"]):
            return _nothing
        if device.info.kind != "opencl" or device.native(()) is None:
            raise MeasureError(f"{routine}: expected an OpenCL device, got {device.info.name}")
        if sizes["k"] == 0:
            return self._clear(device, buffers[2], sizes)
        _check_counts(routine, sizes, needs)
        function, arguments = _call(sizes)
        self._compile(device, function)
        launch = self._launch(device, function, buffers, arguments)
        if function != "CLBlastSgemv":
            return launch
        clear = self._clear(device, buffers[2], sizes)

        def cleared() -> None:
            clear()
            launch()

        return cleared

    def _launch(self, device: Device, name: str, buffers: Sequence[Any], arguments: Sequence[Any]) -> Launch:
        """Make a closure that calls a function of the library. arguments: all but the queue, with numbers for the
        buffers
        """
        handles = device.native(buffers)
        assert handles is not None
        queue, memory = handles
        call, place = getattr(self._dll, name), ctypes.c_void_p(queue)
        given = [ctypes.c_void_p(memory[x.number]) if isinstance(x, _Buffer) else x for x in arguments]
        given += [ctypes.byref(place), None]

        def launch() -> None:
            status = call(*given)
            if status:
                raise MeasureError(f"CLBlast: expected {name} to succeed, got status {status} (clblast_c.h names it)")

        launch.__dict__["keep"] = tuple(buffers)
        return launch

    def _compile(self, device: Device, name: str) -> None:
        """Compile the kernels of a function, by a product of one element in separate memory."""
        known = self._known.setdefault(device, _Known())
        if name in known.compiled:
            return
        one = dict.fromkeys(BATCHED, 1) | {"trans_a": 0, "trans_b": 0}
        scratch = device.alloc(3 * _FLOAT)
        try:
            self._launch(device, name, [scratch] * 3, _arguments(name, one, (0, 1, 2)))()
            device.synchronize()
        finally:
            device.free(scratch)
        known.compiled.add(name)

    def _clear(self, device: Device, c: Any, sizes: Sizes) -> Launch:
        """Make a launch that zeroes the elements of C, but not the gaps between its rows."""
        known = self._known.setdefault(device, _Known())
        if known.clear is None:
            known.clear = device.compile([KernelSource(_CLEAR, "opencl", _CLEAR_SOURCE)])[_CLEAR]
        m, n = sizes["m"], sizes["n"]
        grid = (-(-m * n // _GROUP), sizes["batch"])
        return device.bind(known.clear, [c], [m, n, sizes["ldc"], sizes["stride_c"]], grid, (_GROUP, 1))


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The place of a buffer among arguments."""

    number: int


def _call(sizes: Sizes) -> tuple[str, list[Any]]:
    """Return the function for a product that is not empty, and its arguments."""
    if sizes["batch"] > 1:
        name = "CLBlastSgemmStridedBatched"
    else:
        name = "CLBlastSgemv" if 1 in (sizes["m"], sizes["n"]) else "CLBlastSgemm"
    return name, _arguments(name, sizes)


def _arguments(name: str, sizes: Sizes, offsets: tuple[int, int, int] = (0, 0, 0)) -> list[Any]:
    """Return the arguments of a function. offsets: starts of A, B and C in their buffers, in floats"""
    number, one, zero = ctypes.c_size_t, ctypes.c_float(1.0), ctypes.c_float(0.0)
    m, n, k, lda, ldb, ldc = (sizes[x] for x in ("m", "n", "k", "lda", "ldb", "ldc"))
    turned_a, turned_b = bool(sizes["trans_a"]), bool(sizes["trans_b"])

    def operand(which: int, *steps: int) -> list[Any]:
        return [_Buffer(which), *map(number, (offsets[which], *steps))]

    if name == "CLBlastSgemv":  # of a column: C = A b; of a row: C' = B' a'
        if n == 1:
            matrix, turned, rows, columns = operand(0, lda), turned_a, m, k
            vector, result = operand(1, 1 if turned_b else ldb), operand(2, ldc)
        else:
            matrix, turned, rows, columns = operand(1, ldb), not turned_b, n, k
            vector, result = operand(0, lda if turned_a else 1), operand(2, 1)
        stored = (columns, rows) if turned else (rows, columns)
        return [
            _ROW_MAJOR,
            _TRANSPOSED if turned else _AS_STORED,
            *map(number, stored),
            one,
            *matrix,
            *vector,
            zero,
            *result,
        ]
    turns = [_TRANSPOSED if turned else _AS_STORED for turned in (turned_a, turned_b)]
    head = [_ROW_MAJOR, *turns, *map(number, (m, n, k)), one]
    if name == "CLBlastSgemm":
        return [*head, *operand(0, lda), *operand(1, ldb), zero, *operand(2, ldc)]
    steps = [(sizes[f"ld{x}"], sizes[f"stride_{x}"]) for x in "abc"]
    a, b, c = (operand(which, *step) for which, step in enumerate(steps))
    return [*head, *a, *b, zero, *c, number(sizes["batch"])]


def _check_counts(routine: str, sizes: Sizes, needs: Sequence[int]) -> None:
    """Check that 32 bits count the elements of each operand and of its copy padded to whole tiles."""
    m, n, k = (-(-sizes[x] // _TILE) * _TILE for x in "mnk")
    copies = [sizes["batch"] * size for size in (m * k, k * n, m * n)] if 1 not in (sizes["m"], sizes["n"]) else []
    most = max(*(need // _FLOAT for need in needs), *copies)
    if most > INT32_MAX:
        raise MeasureError(f"{routine}: expected at most {INT32_MAX} elements in whole tiles of a matrix, got {most}")


def _nothing() -> None:
    """Compute a product without elements: do nothing."""
