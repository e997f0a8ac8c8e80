"""The `Device` contract of machines that run kernels. One contract suite tests every implementation.

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.program.program import KernelSource

Launch = Callable[[], None]

OwnBuffer: TypeAlias = Any
"""A buffer of the device's own class."""
OwnKernel: TypeAlias = Any
"""A compiled kernel of the device's own class."""


class DeviceBuffer(Protocol):
    """Device memory outside the device object: opaque but for `nbytes`, its allocated size."""

    @property
    def nbytes(self) -> int: ...


class Turn(Protocol):
    """The right to use a device, which one thread has at a time, several times if it likes: an RLock, or as one."""

    def acquire(self) -> object: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The identity and the limits of a device.

    fingerprint: sorted (name, value) texts of device, driver and compiler; a timing may be reused where they are equal.
    limits: numbers that rules and constraints read: `workers`, `vector_bits`, `max_vector_lanes`, `registers`, `l1_bytes`,
    `l2_bytes`, `l3_bytes`, `max_local_bytes`, `max_group_size`, `launch_ns`, `serial_launches`, and of a GPU `warp`, `registers_per_sm`,
    `threads_per_sm`, `local_bytes_per_sm`, `groups_per_sm`; `doubles` is 0 where kernels cannot compute in float64,
    `serial_launches` where a launch of one group wakes other threads; `byte_dots` and `bf16_dots` are 1 where vectors have
    dot products of bytes and of bf16, `tile_products` where there is AMX.
    `runtime/device/quirks` adds what a device does not report.
    libraries: name and fingerprint of each installed library (`library.registry.library_facts`); None: not looked for.
    unit: the physical device on its host: `pci:` and its bus id, `cpu:` and the host's name for a processor; empty if unknown.
    """

    kind: str
    name: str
    fingerprint: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, int], ...]
    libraries: tuple[tuple[str, str], ...] | None = None
    unit: str = ""


class Device(Protocol):
    """Owns its memory and compiled kernels until `close`. One thread at a time uses a device: the one that holds `turn`.

    Executors take the turn for a whole call, from the first upload to the last download. Only `compile` needs no turn.

    Errors: `compile` raises `BuildError` with the compiler's log; every other method raises `MeasureError` when the
    device is lost or a request exceeds its limits (the message has request and limit).

    Buffers are opaque but for `nbytes`, the size they were allocated with.
    """

    info: DeviceInfo
    turn: Turn

    def new_turn(self) -> Turn:
        """Return a turn that nobody has. The fork of a process gets one, since another thread may hold the former in it forever."""
        ...

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, OwnKernel]:
        """Compile all kernels (one translation unit where that is cheaper); name -> handle."""
        ...

    def alloc(self, nbytes: int, lasting: bool = False) -> DeviceBuffer:
        """Allocate device memory, 64-byte aligned, with undefined contents. Zero bytes are allowed.

        lasting: it lives about as long as other lasting memory, such as weights, and may share pages with it
        """
        ...

    def upload(self, buffer: OwnBuffer, array: NDArray[Any]) -> None:
        """Copy a host array in C order to the start of the memory that launches use as `buffer`; done when this returns."""
        ...

    def download(self, buffer: OwnBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a fresh host array with the buffer's first elements; waits for earlier launches."""
        ...

    def copy(self, target: OwnBuffer, source: OwnBuffer, nbytes: int) -> None:
        """Copy the first bytes of `source` to the start of `target`, in order with launches; may return before it is done."""
        ...

    def free(self, buffer: OwnBuffer) -> None:
        """Free memory; the caller promises that no running launch uses it."""
        ...

    def bind(
        self,
        kernel: OwnKernel,
        buffers: Sequence[OwnBuffer],
        scalars: Sequence[int],
        grid: Sequence[int],
        local: Sequence[int],
    ) -> Launch:
        """Return a closure that enqueues this launch. In-order: a later launch sees the effects of earlier ones.
        A grid with a zero in it launches nothing. Valid as long as the buffers live."""
        ...

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[OwnBuffer]) -> Launch | None:
        """Return a closure that runs `function` on byte views of the buffers, in launch order.

        None if host code cannot reach device memory without copies. Host libraries join a CPU device in this way."""
        ...

    def place(self, buffer: OwnBuffer, array: NDArray[Any] | None) -> bool:
        """Let launches bound to `buffer`, host code included, use the memory of `array` until the next call. The buffer
        keeps its own contents.

        Returns False without effect if the device cannot do this.
        array: C-contiguous and aligned for its type, of as many bytes as launches use; it lives until the next call.
            None: the buffer's own memory
        """
        ...

    def wrap(self, array: NDArray[Any]) -> OwnBuffer | None:
        """Return a buffer over the memory of a host array, for launches to read and write; None if the device cannot do this.

        array: C-contiguous and aligned for its type; it lives as long as the buffer. `free` does not free its memory.
        """
        ...

    def native(self, buffers: Sequence[OwnBuffer]) -> tuple[int, tuple[int, ...]] | None:
        """Return the driver's handles of the queue and of the buffers' memory, or None without a queue.

        Through them, libraries with kernels of their own join a device. Work enqueued there runs in order with
        launches. The handles are valid as long as the buffers live.
        """
        ...

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return one closure that enqueues all launches in order at less cost, or None if nothing is saved.

        Nothing is enqueued now. The launches have run before; the closure is valid as long as they are."""
        ...

    def synchronize(self) -> None:
        """Wait for all enqueued work."""
        ...

    def close(self) -> None:
        """Release everything; the device cannot be used afterwards."""
        ...


@runtime_checkable
class JoinsLaunches(Protocol):
    """A device whose launches are joined at little cost, and read numbers and addresses when they run."""

    def joined(self, launches: Sequence[Launch]) -> list[Launch]:
        """Return fewer launches that do the same in the same order, valid as long as the given ones are."""
        ...

    def bind_numbers(
        self, kernel: OwnKernel, buffers: Sequence[OwnBuffer], slots: Sequence[int], numbers: NDArray[np.int64]
    ) -> Launch:
        """Return a launch without a grid, which reads its scalars from slots of an array whenever it runs."""
        ...

    def point(self, buffer: OwnBuffer, other: OwnBuffer) -> None:
        """Let a buffer have the memory of another one from now on, in bound launches too."""
        ...

    def view(self, buffer: OwnBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return an array over a buffer's own memory, valid until the buffer has other memory."""
        ...

    def advances(
        self,
        code: NDArray[np.int64],
        symbols: NDArray[np.int64],
        moves: NDArray[np.int64],
        numbers: NDArray[np.int64],
    ) -> Callable[[], bool]:
        """Return a function that evaluates verified scalars (`runtime/program/scalars`) for the next step.

        It returns False, with the numbers as they were, if the last scalar is 0 or the evaluation has an error.

        Args:
            code: The list of scalars.
            symbols: Values of the symbols.
            moves: Rows (symbol, place) of the symbols that get the value of the number at a place before the scalars are evaluated.
            numbers: Gets the values of the first scalars.
        """
        ...


@runtime_checkable
class RepeatsLaunches(Protocol):
    """A device that repeats launches in a loop without the host's code. Arguments change from step to step."""

    def cell(self, buffer: OwnBuffer) -> int:
        """Return the address at which launches read the address of a buffer's memory whenever they run."""
        ...

    def repeated(
        self, launches: Sequence[Launch], cells: NDArray[np.int64], moves: NDArray[np.int64]
    ) -> Callable[[NDArray[np.int64]], None] | None:
        """Return a function that runs the launches once for each row of a table; None if one of them needs the host's code.

        cells: addresses of 64-bit numbers, to which each step first writes its row of the table
        moves: a row (to, from, by) for each number that changes after a step: the number at address `from`, plus `by`, goes to
            address `to`. All are read before any is written.
        """
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """A device in whose memory other libraries of the process have arrays, by addresses (DLPack). Its `native` is never None.

    dlpack: type and number of the device in DLPack
    """

    dlpack: tuple[int, int]

    def adopt(self, address: int, nbytes: int, owner: object) -> OwnBuffer:
        """Return a buffer over memory of another library. It keeps `owner` alive; `free` frees nothing."""
        ...

    def finish(self) -> None:
        """Wait for all work on the device, of other libraries too."""
        ...


@runtime_checkable
class DeviceClock(Protocol):
    """A device that may have an event timer, by which launches are timed on the device."""

    def elapsed(self, work: Callable[[], object]) -> float | None:
        """Do the launches of `work` and wait for them. Return seconds from the first to the end of the last.

        Without a clock nothing is done, and the result is None."""
        ...
