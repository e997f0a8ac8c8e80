"""The OpenCL device, through pyopencl (extra `opencl`, whose PoCL wheel gives every Linux machine a device).

On a CPU device buffers live in aligned host memory that the driver uses in place, so host libraries reach them without
copies. The queue is in order. A kernel object per binding holds that binding's arguments.

Where PoCL has a serial driver in addition to the one with threads, a launch of one group runs there, in the calling thread, unless
launches before it are still under way.

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError, MemoryLack, RelaxTuneError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo, Launch
from relax_tune.runtime.device.device_class import DeviceClass, DeviceFailure
from relax_tune.runtime.device.memory import aligned_bytes, check_transfer
from relax_tune.runtime.device.opencl_gpus import float64_limits, gpu_limits, pci_unit
from relax_tune.runtime.device.pocl import (
    PLATFORM,
    check_current_folder,
    choose_threads,
    is_serial,
    offer_serial_driver,
    repair_target,
    serial_twin,
)
from relax_tune.runtime.device.quirks import quirks_of, with_quirks
from relax_tune.runtime.device.service_kernels import OPENCL_KERNELS
from relax_tune.runtime.device.source import INT_MOST, group_by_flags, join_sources, wide_form
from relax_tune.runtime.program.program import KernelSource

BASE_FLAGS = ("-cl-mad-enable", "-cl-std=CL1.2")
_SIMULATORS = ("oclgrind",)


def load_pyopencl() -> Any:
    """Return the pyopencl module. Raises BuildError naming the extra to install."""
    choose_threads()
    offer_serial_driver()
    try:
        import pyopencl
    except ImportError as error:
        raise BuildError(
            f"OpenCL device: expected the package pyopencl, got {error}; pip install 'relax-tune[opencl]'"
        ) from None
    return pyopencl


def all_devices() -> list[tuple[str, Any]]:
    """Return every (label, pyopencl device), sorted; the label is `platform name | platform version | device name`."""
    cl = load_pyopencl()
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # the loader reports "no platform" as an error
        return []
    labelled: list[tuple[str, Any]] = []
    for platform in platforms:
        try:
            devices = platform.get_devices()
        except cl.Error:
            continue
        shown = [d for d in devices if not is_serial(d)] or devices  # the serial driver is a part of the other device
        labelled += [(f"{platform.name} | {platform.version} | {d.name}", d) for d in shown]
    return sorted(labelled, key=lambda entry: entry[0])


def choose_device(substring: str | None) -> tuple[str, Any]:
    """Return the one device whose label contains `substring` (any case).

    Without one, it is PoCL in its oldest version (the wheel ships 3.0, and a system may add a newer one). Without PoCL,
    it is the only device that is not a simulator.

    Raises: MeasureError that lists the devices, when none or several match.
    """
    everything = all_devices()
    if substring is None:
        real = [entry for entry in everything if not entry[0].lower().startswith(_SIMULATORS)]
        pocl = [entry for entry in real if entry[0].startswith(PLATFORM)]
        # Without a name, PoCL: wherever the extra is installed it is there, so the default does not depend on other
        # drivers.
        matching = pocl[:1] or real
        expected = "the default device"
    else:
        # with or without the bars: `devices` and error messages show the parts joined by blanks
        part = substring.lower()
        matching = [e for e in everything if part in e[0].lower() or part in e[0].lower().replace(" | ", " ")]
        expected = f"one device matching {substring!r}"
    if len(matching) == 1:
        return matching[0]
    names = "; ".join(label for label, _ in (matching or everything)) or "none"
    hint = "; choose with opencl:PART, a part of that text"
    if not everything:
        hint = "; install a driver, or PoCL for the processor: pip install 'relax-tune[opencl]'"
    if not matching and _hides_pocl(everything):
        hint += f"; {PLATFORM} is installed but offers no device: it must be able to write to its cache, "
        hint += "point POCL_CACHE_DIR at a writable folder"
    got = "several match" if matching else "got"
    raise MeasureError(f"OpenCL: expected {expected}, {got}: {names}{hint}")


def _hides_pocl(devices: Sequence[tuple[str, Any]]) -> bool:
    """Return True if PoCL is installed but shows no device, as when it cannot cache compiled kernels."""
    cl = load_pyopencl()
    try:
        installed = any(platform.name == PLATFORM for platform in cl.get_platforms())
    except cl.Error:
        return False
    return installed and not any(label.startswith(PLATFORM) for label, _ in devices)


class OpenCLBuffer:
    """Device memory; `array` is the host memory behind it on a CPU device, else None."""

    __slots__ = ("array", "memory", "nbytes")

    def __init__(self, memory: Any, array: NDArray[np.uint8] | None, nbytes: int) -> None:
        self.memory, self.array, self.nbytes = memory, array, nbytes

    def live(self) -> Any:
        if self.memory is None:
            raise MeasureError("OpenCL device: expected a live buffer, got one that was freed")
        return self.memory


class _Module:
    """The kernels compiled together: a program of the device, and one of its serial driver once a launch needs it."""

    def __init__(self, program: Any, compile_for: Callable[[Any], Any]) -> None:
        self.program, self._compile_for, self._serial = program, compile_for, None

    def serial(self, device: Any) -> Any:
        """Return the program for the serial driver."""
        if self._serial is None:
            self._serial = self._compile_for(device)
        return self._serial


class _Handle:
    """A compiled kernel: its module (for one kernel object per binding), and the resources that the compiler reports.

    wide: source for 64-bit integers
    compiled_wide: the compiled form of `wide`
    """

    __slots__ = ("compiled_wide", "group_size", "module", "name", "wide")

    def __init__(self, module: _Module, name: str, group_size: int, wide: KernelSource | None) -> None:
        self.module, self.name, self.group_size, self.wide = module, name, group_size, wide
        self.compiled_wide: _Handle | None = None


class OpenCLDevice(DeviceClass):
    """The `Device` contract over one OpenCL device and one in-order queue."""

    kind = "opencl"
    forms = ("opencl", "opencl:PART")
    service = OPENCL_KERNELS

    @classmethod
    def open_part(cls, part: str | None) -> OpenCLDevice:
        return cls(part)

    @classmethod
    def available(cls) -> Iterator[tuple[str, DeviceInfo | DeviceFailure]]:
        try:
            labels = [label for label, _ in all_devices()]
        except BuildError as error:
            yield cls.kind, DeviceFailure(cls.kind, str(error))
            return
        if not labels:
            reason = "OpenCL: expected a platform, got none; pip install 'relax-tune[opencl]'"
            yield cls.kind, DeviceFailure(cls.kind, reason)
        for label in labels:
            spec = f"{cls.kind}:{label}"
            try:
                device = cls(label)
            except RelaxTuneError as error:
                yield spec, DeviceFailure(spec, str(error))
                continue
            device.close()
            yield spec, device.info

    @classmethod
    def choices(cls) -> str:
        try:
            labels = [label for label, _ in all_devices()]
        except BuildError:
            labels = []
        if not labels:
            return "and no OpenCL device; pip install 'relax-tune[opencl]' gives one"
        return f"and as opencl:PART, with PART any part of its text, {'; '.join(labels)}"

    @classmethod
    def spec_of(cls, fingerprint: Mapping[str, Any]) -> str:
        name = f"{fingerprint.get('platform')} {fingerprint.get('device')}"
        try:
            labels = [label for label, _ in all_devices() if label.replace(" | ", " ") == name]
        except BuildError:
            return cls.kind
        return f"{cls.kind}:{labels[0]}" if len(labels) == 1 else cls.kind

    def __init__(self, substring: str | None = None) -> None:
        self._cl, self.turn = load_pyopencl(), threading.RLock()
        label, self._device = choose_device(substring)
        self._serial = serial_twin(self._device)
        try:
            self._context = self._cl.Context([d for d in (self._device, self._serial) if d is not None])
            self._queue = self._cl.CommandQueue(self._context, self._device)
            self._serial_queue = self._serial and self._cl.CommandQueue(self._context, self._serial)
        except self._cl.Error as error:
            raise MeasureError(f"OpenCL: {label} is there but cannot be opened: {error}") from None
        self._is_cpu = bool(self._device.type & self._cl.device_type.CPU)
        # PoCL's processor driver runs kernels on the host memory itself, and mapping a buffer only returns the pointer,
        # in 20 us. There, host code only needs to wait for the queue.
        self._in_place = self._is_cpu and self._device.platform.name == PLATFORM
        # Whether work may be under way, and whether a library may have enqueued some.
        self._busy = self._foreign = False
        self.info = _describe(self._device, self._is_cpu, repair_target(self._device), self._serial, self._cl.Error)
        limits = dict(self.info.limits)
        self._max_local, self._max_group = limits["max_local_bytes"], limits["max_group_size"]
        quirks = quirks_of(self.info.kind, self.info.fingerprint)
        self._misreported = {what for quirk in quirks for what in quirk.misreported}
        self._max_items = tuple(self._device.max_work_item_sizes)

    @property
    def in_process(self) -> bool:
        """True if the driver runs kernels in this process: PoCL's for processors."""
        return self._in_place

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        handles: dict[str, Any] = {}
        for kernel in kernels:
            if kernel.language != "opencl":
                raise BuildError(f"OpenCL device: expected kernels in opencl, got {kernel.name} in {kernel.language}")
        for flags, group in group_by_flags(kernels).items():
            module = self._module(group, [*BASE_FLAGS, *flags])
            for kernel in group:
                handles[kernel.name] = self._inspect(module, kernel)
        return handles

    def _module(self, group: Sequence[KernelSource], options: list[str]) -> _Module:
        cl, text, names = self._cl, join_sources(group), ", ".join(kernel.name for kernel in group)

        def compile_for(device: Any) -> Any:
            if self._in_place:
                check_current_folder()
            try:
                return cl.Program(self._context, text).build(options=options, devices=[device], cache_dir=False)
            except cl.Error as error:
                raise BuildError(
                    f"OpenCL refused kernels {names} ({' '.join(options)}):\n{str(error)[:8000]}"
                ) from None

        return _Module(compile_for(self._device), compile_for)

    def _inspect(self, module: _Module, source: KernelSource) -> _Handle:
        cl, name = self._cl, source.name
        try:
            kernel = cl.Kernel(module.program, name)
            local = kernel.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, self._device)
            group = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, self._device)
        except cl.Error as error:
            raise BuildError(f"OpenCL: the source of kernel {name} gives no such kernel: {error}") from None
        if "group" in self._misreported:
            group = self._max_group
        if local > self._max_local and "local" not in self._misreported:
            raise BuildError(f"OpenCL kernel {name}: expected {local} bytes of local memory, allowed {self._max_local}")
        return _Handle(module, name, min(group, self._max_group), wide_form(source))

    def alloc(self, nbytes: int, lasting: bool = False) -> OpenCLBuffer:
        flags = self._cl.mem_flags
        try:
            if self._is_cpu:
                array = aligned_bytes(nbytes)
                # The driver uses the host's memory as the buffer's, so libraries on the host reach it without a copy.
                memory = self._cl.Buffer(self._context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=array)
                return OpenCLBuffer(memory, array, nbytes)
            if nbytes < 0:
                raise MeasureError(f"memory: expected a size of 0 or more bytes, got {nbytes}")
            # clCreateBuffer refuses a size of 0.
            return OpenCLBuffer(self._cl.Buffer(self._context, flags.READ_WRITE, size=max(nbytes, 64)), None, nbytes)
        except self._cl.Error as error:
            limit = self._device.max_mem_alloc_size
            raise self._kind(error)(
                f"OpenCL: expected {nbytes} bytes in one buffer, allowed {limit}: {error}"
            ) from None

    def upload(self, buffer: OpenCLBuffer, array: NDArray[Any]) -> None:
        check_transfer("OpenCL upload", array.nbytes, buffer.nbytes)
        if array.nbytes and self._in_place:
            self.synchronize()
            np.copyto(_elements(buffer, array.dtype, array.shape), array)
        elif array.nbytes:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._guard(lambda: self._cl.enqueue_copy(self._queue, buffer.live(), data, is_blocking=True))

    def download(self, buffer: OpenCLBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        result = np.empty(shape, dtype)
        check_transfer("OpenCL download", result.nbytes, buffer.nbytes)
        if result.nbytes and self._in_place:
            self.synchronize()
            np.copyto(result, _elements(buffer, dtype, shape))
        elif result.nbytes:
            data = result.reshape(-1).view(np.uint8)
            self._guard(lambda: self._cl.enqueue_copy(self._queue, data, buffer.live(), is_blocking=True))
        return result

    def copy(self, target: OpenCLBuffer, source: OpenCLBuffer, nbytes: int) -> None:
        check_transfer("OpenCL copy", nbytes, min(target.nbytes, source.nbytes))
        if nbytes and self._in_place:
            self.synchronize()
            shape, bytes_of = (nbytes,), np.dtype(np.uint8)
            np.copyto(_elements(target, bytes_of, shape), _elements(source, bytes_of, shape))
        elif nbytes:
            self._guard(lambda: self._cl.enqueue_copy(self._queue, target.live(), source.live(), byte_count=nbytes))

    def free(self, buffer: OpenCLBuffer) -> None:
        if buffer.memory is not None:
            buffer.memory.release()
            buffer.memory = None
            buffer.array = None

    def bind(
        self,
        kernel: _Handle,
        buffers: Sequence[OpenCLBuffer],
        scalars: Sequence[int],
        grid: Sequence[int],
        local: Sequence[int],
    ) -> Launch:
        memory = [buffer.live() for buffer in buffers]
        if kernel.wide is not None and scalars and scalars[-1] > INT_MOST:
            if kernel.compiled_wide is None:
                kernel.compiled_wide = self.compile([kernel.wide])[kernel.name]
            kernel = kernel.compiled_wide
        self._check_group(kernel, grid, local)
        if 0 in grid:
            return _nothing
        arguments = [*memory, *(np.int64(value) for value in scalars)]
        bound = self._with_arguments(kernel, kernel.module.program, arguments)
        enqueue, queue, error_kind = self._cl.enqueue_nd_range_kernel, self._queue, self._cl.Error
        work, group = tuple(g * size for g, size in zip(grid, local)), tuple(local)
        serial_queue, serial_kernel = self._serial_queue, None
        if self._serial is not None and math.prod(grid) == 1:
            serial_kernel = self._with_arguments(kernel, kernel.module.serial(self._serial), arguments)

        def launch() -> None:
            try:
                # One work-group gains nothing from PoCL's threads, whose waking takes longer than a small kernel.
                # Only with no work under way, since the two queues have no order.
                if serial_kernel is not None and serial_queue is not None and not self._busy:
                    enqueue(serial_queue, serial_kernel, work, group)
                    serial_queue.finish()
                else:
                    self._busy = True
                    enqueue(queue, bound, work, group)
            except error_kind as error:
                raise self._kind(error)(
                    f"OpenCL kernel {kernel.name}: launch of {work} by {group} failed: {error}"
                ) from None

        launch.__dict__["keep"] = [buffer.array for buffer in buffers]  # the driver uses this host memory in place
        return launch

    def _with_arguments(self, kernel: _Handle, program: Any, arguments: Sequence[Any]) -> Any:
        """Return a kernel object of a program that holds these arguments."""
        try:
            bound = self._cl.Kernel(program, kernel.name)
            bound.set_args(*arguments)
        except (self._cl.Error, TypeError) as error:
            raise MeasureError(
                f"OpenCL kernel {kernel.name}: {len(arguments)} buffers and scalars do not fit it: {error}"
            ) from None
        return bound

    def _check_group(self, kernel: _Handle, grid: Sequence[int], local: Sequence[int]) -> None:
        what = f"OpenCL kernel {kernel.name}"
        if not 1 <= len(grid) <= 3 or len(grid) != len(local):
            raise MeasureError(f"{what}: expected a grid of 1 to 3 axes and as many local sizes, got {grid}, {local}")
        # The product is the global size, which has to fit a 64-bit size_t.
        if any(extent < 0 or extent * size > 2**62 for extent, size in zip(grid, local)):
            raise MeasureError(f"{what}: expected grid extents of 0 or more, got {tuple(grid)}")
        threads = 1
        for axis, size in enumerate(local):
            if not 1 <= size <= self._max_items[axis]:
                raise MeasureError(f"{what}: local size {size} on axis {axis}, allowed 1..{self._max_items[axis]}")
            threads *= size
        if threads > kernel.group_size:
            raise MeasureError(f"{what}: {threads} work-items in a group, allowed {kernel.group_size}")

    def bind_host(
        self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[OpenCLBuffer]
    ) -> Launch | None:
        if not self._is_cpu:
            return None
        cl, queue = self._cl, self._queue
        flags = cl.map_flags.READ | cl.map_flags.WRITE
        memory = [(buffer.live(), buffer.nbytes) for buffer in buffers]
        keep = [buffer.array for buffer in buffers]
        if self._in_place:
            views: list[NDArray[Any]] = [b.array[: b.nbytes] for b in buffers if b.array is not None]

            def launch_in_place() -> None:
                self.synchronize()
                function(views)

            return launch_in_place

        def launch() -> None:
            try:
                mapped: list[Any] = [
                    cl.enqueue_map_buffer(queue, m, flags, 0, (size,), np.uint8, is_blocking=False)[0]
                    if size
                    else np.empty(0, np.uint8)
                    for m, size in memory
                ]
                queue.finish()
                try:
                    function(mapped)
                finally:
                    for array, (_, size) in zip(mapped, memory):
                        if size:
                            array.base.release(queue)
            except cl.Error as error:
                raise MeasureError(f"OpenCL: mapping buffers for host code failed: {error}") from None

        launch.__dict__["keep"] = keep
        return launch

    def place(self, buffer: OpenCLBuffer, array: NDArray[Any] | None) -> bool:
        """Return False: kernels reach only the driver's memory objects."""
        return False

    def wrap(self, array: NDArray[Any]) -> OpenCLBuffer | None:
        if not self._in_place or not array.nbytes:
            return None
        flags = self._cl.mem_flags
        view = array.reshape(-1).view(np.uint8)
        access = flags.READ_WRITE if view.flags.writeable else flags.READ_ONLY
        memory = self._cl.Buffer(self._context, access | flags.USE_HOST_PTR, hostbuf=view)
        return OpenCLBuffer(memory, view, array.nbytes)

    def native(self, buffers: Sequence[OpenCLBuffer]) -> tuple[int, tuple[int, ...]]:
        # This object does not see work that is enqueued there.
        self._busy = self._foreign = self._foreign or bool(buffers)
        return int(self._queue.int_ptr), tuple(int(buffer.live().int_ptr) for buffer in buffers)

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return None: OpenCL 1.2 has no recordings."""
        return None

    def synchronize(self) -> None:
        if self._busy or not self._in_place:
            self._guard(self._queue.finish)
            self._busy = self._foreign

    def close(self) -> None:
        self._guard(self._queue.finish)

    def _kind(self, error: Any) -> type[MeasureError]:
        """Return the error that a status of OpenCL means."""
        codes = self._cl.status_code
        lacks = (codes.MEM_OBJECT_ALLOCATION_FAILURE, codes.OUT_OF_HOST_MEMORY, codes.INVALID_BUFFER_SIZE)
        return MemoryLack if error.code in lacks else MeasureError

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except self._cl.Error as error:
            raise self._kind(error)(f"OpenCL device {self.info.name}: {error}") from None


def _elements(buffer: OpenCLBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the first elements of a buffer that lies in the host's memory."""
    buffer.live()
    assert buffer.array is not None
    return buffer.array[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _nothing() -> None:
    """Launch an empty grid: do nothing."""


def _describe(device: Any, is_cpu: bool, target: str, serial: Any, refusal: type[Exception]) -> DeviceInfo:
    platform = device.platform
    lanes, units = max(1, int(device.native_vector_width_float)), int(device.max_compute_units)
    limits = {
        "workers": min(units, host.usable_cpus()) if is_cpu else units,
        "vector_bits": host.vector_bits() if is_cpu else lanes * 32,
        "max_vector_lanes": lanes,
        "max_local_bytes": int(device.local_mem_size),
        "max_group_size": int(device.max_work_group_size),
        **(
            host.cache_bytes()
            if is_cpu
            else {"l1_bytes": 0, "l2_bytes": int(device.global_mem_cache_size), "l3_bytes": 0}
        ),
        **({} if is_cpu else gpu_limits(device, refusal)),
        **float64_limits(device, refusal),
        "serial_launches": int(serial is not None),
    }
    fingerprint = {
        "cpu": host.cpu_model(),
        "device": device.name,
        "device_version": device.version,
        "driver": device.driver_version,
        "kind": "opencl",
        "platform": f"{platform.name} {platform.version}",
        "target": target,
        "units": str(units),
        **({} if serial is None else {"serial": serial.name}),
    }
    limits = with_quirks("opencl", fingerprint, limits)
    limits.setdefault("registers", host.vector_registers() if is_cpu else 255)
    facts, numbers = tuple(sorted(fingerprint.items())), tuple(sorted(limits.items()))
    unit = host.processor_unit() if is_cpu else pci_unit(device, refusal)
    return DeviceInfo("opencl", device.name, facts, numbers, unit=unit)
