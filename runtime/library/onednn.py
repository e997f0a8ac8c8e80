"""oneDNN through the `onednn-cpu-gomp` wheel (extra `onednn`): single-precision matrix products with epilogues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, MeasureError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device, Launch
from relax_tune.runtime.library.onednn_primitives import FLOAT, TWO_SIDED, Engine, MatmulPrimitive, Place, WeightPacking

FOLLOWS = ("add", "mul", "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "swish")
"""Epilogue operations; the scalar `follows` is the sum of (index here, from 1) * 16**position."""
OPERANDS = 2

Views = list[NDArray[Any]]

_LIMIT = 2**40  # limit of every size and stride: products stay below 2**63 for memory that exists

_PLAIN = ("m", "n", "k", "trans_a", "trans_b", "lda", "ldb", "ldc")
_PACKED = tuple(name for name in _PLAIN if name not in ("trans_b", "ldb"))
_AFTER = ("follows", *(f"{what}_d{i}" for i in range(OPERANDS) for what in ("stride", "row", "column")))


class OneDnn:
    """`matmul` and `matmul_batched`: C = follow(op(A) op(B)), row-major f32, op is transposition where `trans_*` is non-zero,
    `follow` a chain of operations on every element before it is stored.

    Buffers A, B, an array for each two-sided operation, C. op(A) is (m, k), op(B) (k, n), C (m, n); `ld*` are the row
    lengths in memory, in floats; in the batched form `stride_*` is the distance between matrices, in floats, 0 for one
    shared matrix. `follows` names the operations (see FOLLOWS); `stride_d0`, `row_d0`, `column_d0` are the strides of
    the first array they read, in floats, 0 along missing dims, `*_d1` of the second.

    Any alignment will do; sizes and strides are at most 2**40, and overlapping rows are refused. Scratch memory is the library's
    own. These routines read plain weights, which the library packs in each call. `matmul_packed` reads weights that `pack`
    wrote (buffers B, packed B) in the library's layout for (k, n) on this machine. Both refuse too small a packed buffer.

    Threads: the wheel runs on libgomp's, which soon sleep when idle and leave the processors to the threads of kernels. The first
    call of a size compiles a kernel; the library caches some of them.
    """

    name = "onednn"
    routines: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - the Protocol declares an instance attribute
        "onednn.matmul": (*_PLAIN, *_AFTER),
        "onednn.matmul_packed": (*_PACKED, *_AFTER),
        "onednn.pack": ("n", "k", "trans_b", "ldb"),
        "onednn.matmul_batched": ("batch", *_PLAIN, "stride_a", "stride_b", "stride_c", *_AFTER),
    }

    def __init__(self) -> None:
        self._engine = Engine()
        self.threads = host.worker_threads()

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        return (("isa", hex(self._engine.isa)), ("threads", str(self.threads)), ("version", self._engine.version))

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        names = self.routines.get(routine)
        if names is None:
            raise ArtifactError(f"oneDNN: expected one of {', '.join(self.routines)}, got {routine}")
        if len(scalars) != len(names):
            raise ArtifactError(f"{routine}: expected the scalars {', '.join(names)}, got {len(scalars)} scalars")
        sizes = {"batch": 1, "trans_b": 0, "stride_a": 0, "stride_b": 0, "stride_c": 0}
        sizes |= dict(zip(names, (int(value) for value in scalars)))
        for name, value in sizes.items():
            if not 0 <= value <= _LIMIT:
                raise MeasureError(f"{routine}: scalar {name}: expected 0..{_LIMIT}, got {value}")
        function = (
            self._packing(routine, sizes, buffers)
            if routine == "onednn.pack"
            else self._product(routine, sizes, buffers)
        )
        if function is None:
            return _nothing
        launch = device.bind_host(function, buffers)
        if launch is None:
            raise MeasureError(f"{routine}: expected a device that shares memory with the host, got {device.info.name}")
        return launch

    def _product(self, routine: str, sizes: dict[str, int], buffers: Sequence[Any]) -> Callable[[Views], None] | None:
        follows = _decoded(routine, sizes["follows"])
        arrays = sum(name in TWO_SIDED for name in follows)
        _check_count(routine, buffers, 3 + arrays, f"for {', '.join(follows) or 'a plain product'}")
        if 0 in (sizes["batch"], sizes["m"], sizes["n"]):
            return None
        packed = "ldb" not in sizes
        places = _places(routine, sizes | {"ldb": sizes["n"]} if packed else sizes, arrays)
        needs = [_bytes(dims, strides) for dims, strides in places]
        layout = None
        zeros: NDArray[np.float32] | None = None
        if sizes["k"] == 0:  # an empty sum is computed over one row of zeros, which replace A and B
            zeros = np.zeros(max(sizes["m"], sizes["n"]), np.float32)
            places[0], places[1] = (
                ((1, sizes["m"], 1), (sizes["m"], 1, 1)),
                ((1, 1, sizes["n"]), (sizes["n"], sizes["n"], 1)),
            )
        elif packed:
            layout = self._engine.layout(sizes["k"], sizes["n"])
            needs[1] = layout.nbytes
        # In batches, version 3.2 reads wrong elements of arrays that several matrices or rows share, so these products
        # run one matrix at a time.
        whole = (sizes["batch"], sizes["m"], sizes["n"])
        shared = places[0][0][0] == 1 or places[1][0][0] == 1 or any(dims != whole for dims, _ in places[2:])
        separate = sizes["batch"] > 1 and shared
        steps = [0 if dims[0] == 1 else strides[0] * FLOAT for dims, strides in places]
        if separate:
            places = [((1, *dims[1:]), strides) for dims, strides in places]
        product = MatmulPrimitive(self._engine, places, follows, layout)
        return partial(_run, product, routine, needs, zeros, steps if separate else None, sizes["batch"])

    def _packing(self, routine: str, sizes: dict[str, int], buffers: Sequence[Any]) -> Callable[[Views], None] | None:
        _check_count(routine, buffers, 2, "for weights")
        if 0 in (sizes["n"], sizes["k"]):
            return None
        place = _matrix(routine, sizes, "b", sizes["k"], sizes["n"], sizes["trans_b"])
        layout = self._engine.layout(sizes["k"], sizes["n"])
        return partial(
            _run, WeightPacking(self._engine, place, layout), routine, (_bytes(*place), layout.nbytes), None, None, 1
        )


def _check_count(routine: str, buffers: Sequence[Any], expected: int, what: str) -> None:
    if len(buffers) != expected:
        raise ArtifactError(f"{routine}: expected {expected} buffers {what}, got {len(buffers)}")


def _decoded(routine: str, code: int) -> tuple[str, ...]:
    names = []
    while code:
        place, code = code % 16, code // 16
        if not 1 <= place <= len(FOLLOWS):
            raise ArtifactError(f"{routine}: scalar follows: expected places 1..{len(FOLLOWS)}, got {place}")
        names.append(FOLLOWS[place - 1])
    if sum(name in TWO_SIDED for name in names) > OPERANDS:
        raise ArtifactError(f"{routine}: scalar follows: expected at most {OPERANDS} arrays, got {', '.join(names)}")
    return tuple(names)


def _places(routine: str, sizes: Mapping[str, int], arrays: int) -> list[Place]:
    """Return the places of A, B, the arrays and C."""
    batch, m, n, k = (sizes[x] for x in ("batch", "m", "n", "k"))

    matrix = partial(_matrix, routine, sizes)
    matrices = [matrix("a", m, k, sizes["trans_a"]), matrix("b", k, n, sizes["trans_b"])]
    for i in range(arrays):
        strides = (sizes[f"stride_d{i}"], sizes[f"row_d{i}"], sizes[f"column_d{i}"])
        dims = tuple(d if s else 1 for d, s in zip((batch, m, n), strides))
        matrices.append(_tidy((dims[0], dims[1], dims[2]), strides))
    return [*matrices, matrix("c", m, n, 0)]


def _matrix(routine: str, sizes: Mapping[str, int], which: str, rows: int, columns: int, transposed: int) -> Place:
    lead, width = sizes[f"ld{which}"], rows if transposed else columns
    if lead < width and (columns if transposed else rows) > 1:
        raise MeasureError(f"{routine}: scalar ld{which}: expected at least {width}, got {lead}")
    stride = sizes[f"stride_{which}"]
    dims = 1 if stride == 0 and which != "c" else sizes["batch"], rows, columns
    return _tidy(dims, (stride, 1, lead) if transposed else (stride, lead, 1))


def _tidy(dims: tuple[int, int, int], strides: tuple[int, int, int]) -> Place:
    """Return dims and strides with strides for dims of 1 under which the library recognises contiguous rows."""
    widest = max((d * s for d, s in zip(dims, strides) if d != 1), default=1)
    batch, row, column = (s if d != 1 else None for d, s in zip(dims, strides))
    return dims, (
        widest if batch is None else batch,
        (dims[2] if column in (None, 1) else 1) if row is None else row,
        (1 if row is None or row != 1 else dims[1]) if column is None else column,
    )


def _bytes(dims: Sequence[int], strides: Sequence[int]) -> int:
    return 0 if 0 in dims else FLOAT * (1 + sum((d - 1) * s for d, s in zip(dims, strides)))


def _run(
    primitive: MatmulPrimitive | WeightPacking,
    routine: str,
    needs: Sequence[int],
    zeros: NDArray[np.float32] | None,
    steps: Sequence[int] | None,
    batch: int,
    views: Views,
) -> None:
    """Run a primitive. steps: bytes between matrices, if the product is of one matrix at a time"""
    for at, (nbytes, view) in enumerate(zip(needs, views, strict=True)):
        if view.nbytes < nbytes:
            raise MeasureError(f"{routine}: buffer {at}: expected {nbytes} bytes, got {view.nbytes}")
    addresses = [int(view.__array_interface__["data"][0]) for view in views]
    if zeros is not None:
        addresses[:2] = [int(zeros.__array_interface__["data"][0])] * 2
    if steps is None:
        primitive.run(tuple(addresses))
        return
    for i in range(batch):
        primitive.run(tuple(at + i * step for at, step in zip(addresses, steps)))


def _nothing() -> None:
    """Compute a product without elements: do nothing."""
