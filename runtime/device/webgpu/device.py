"""The WebGPU device, through the package wgpu (extra `webgpu`), over Vulkan, Metal or Direct3D 12.

One queue, in order. Every binding has a uniform buffer for its scalars, and a bind group. A launch is a separate pass; passes
are encoded together and submitted when something waits for them, or at the latest after `MAX_PENDING` of them.

An adapter of type CPU runs shaders on the processor, for tests of their results: its times say nothing about a GPU.

Tests: `tests/runtime/device/test_webgpu.py`.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError, MemoryLack, RelaxTuneError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo, Launch
from relax_tune.runtime.device.device_class import DeviceClass, DeviceFailure
from relax_tune.runtime.device.memory import check_transfer
from relax_tune.runtime.device.opencl import all_devices
from relax_tune.runtime.device.quirks import with_quirks
from relax_tune.runtime.device.service_kernels import WGSL_KERNELS
from relax_tune.runtime.device.source import INT_MOST
from relax_tune.runtime.device.webgpu.listing import listed_adapters
from relax_tune.runtime.program.program import KernelSource

# passes that are encoded before they are submitted
MAX_PENDING = 32
# sizes of buffers and of transfers are multiples of this; arrays of pairs of words need 8
UNIT = 16
INT_LEAST = -INT_MOST - 1
CLOCK = "timestamp-query"

_BINDING = re.compile(r"@group\(0\) @binding\((\d+)\) var<(storage, read_write|storage, read|storage|uniform)>")
_FLAG = re.compile(r"-D(\w+)=(\S+)")
_USAGE = {"storage, read_write": "storage", "storage, read": "read-only-storage", "storage": "read-only-storage"}

# name of a limit: WebGPU's
LIMITS = {
    "max_group_size": "max-compute-invocations-per-workgroup",
    "max_local_bytes": "max-compute-workgroup-storage-size",
    "max_bindings": "max-storage-buffers-per-shader-stage",
    "max_groups": "max-compute-workgroups-per-dimension",
    "max_group_x": "max-compute-workgroup-size-x",
    "max_group_y": "max-compute-workgroup-size-y",
    "max_group_z": "max-compute-workgroup-size-z",
    "max_binding_bytes": "max-storage-buffer-binding-size",
}


_INSTALL = "install a Vulkan driver (Debian, Ubuntu: apt-get install mesa-vulkan-drivers gives one for the processor)"


def load_wgpu() -> Any:
    """Return the module wgpu. Raises BuildError naming the extra to install."""
    try:
        import wgpu
        from wgpu.backends import wgpu_native  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise BuildError(
            f"WebGPU device: expected the package wgpu, got {error}; pip install 'relax-tune[webgpu]'"
        ) from None
    return wgpu


def refusals(wgpu: Any) -> tuple[type[Exception], ...]:
    """Return the classes of what wgpu raises where a driver refuses something: its own, and Python's for its checks of arguments."""
    return (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError, ValueError)


def all_adapters() -> list[tuple[str, Any]]:
    """Return every (label, adapter), GPUs before software; the label is `backend | type | device | driver`.

    Equal adapters are numbered from the second on, `... | #2`.

    OpenGL is left out. PoCL is opened first where it is installed: loaded after lavapipe, its LLVM ends the process.
    """
    load_wgpu()
    with suppress(BuildError):
        all_devices()
    adapters = []
    for adapter in load_wgpu().gpu.enumerate_adapters_sync():
        info = adapter.info
        if info["backend_type"] != "OpenGL":
            adapters.append(
                (" | ".join(str(info[k]) for k in ("backend_type", "adapter_type", "device", "description")), adapter)
            )
    adapters.sort(key=lambda entry: ("CPU" in entry[0].split(" | ")[1], entry[0]))
    return numbered(adapters)


def numbered(adapters: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return (label, adapter) pairs whose labels differ: equal ones get a number from the second on."""
    counts: Counter[str] = Counter()
    labelled = []
    for label, adapter in adapters:
        counts[label] += 1
        labelled.append((label if counts[label] == 1 else f"{label} | #{counts[label]}", adapter))
    return labelled


def choose_adapter(substring: str | None) -> tuple[str, Any]:
    """Return the first adapter whose label contains `substring` (any case), GPUs before software.

    Raises: MeasureError that lists the adapters, when none matches.
    """
    everything = all_adapters()
    part = (substring or "").lower()
    for label, adapter in everything:
        if part in label.lower() or part in label.lower().replace(" | ", " "):
            return label, adapter
    names = "; ".join(label for label, _ in everything) or "none"
    expected = "an adapter" if substring is None else f"an adapter matching {substring!r}"
    hint = "choose with webgpu:PART, a part of that text" if everything else _INSTALL
    raise MeasureError(f"WebGPU: expected {expected}, got {names}; {hint}")


class DeviceTimestamps:
    """Two timestamps of a device's clock, written by passes without work."""

    def __init__(self, wgpu: Any, device: Any) -> None:
        usage = wgpu.BufferUsage
        self._queries = device.create_query_set(type="timestamp", count=2)
        self._memory = device.create_buffer(size=16, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        self._tick = float(wgpu.backends.wgpu_native.lib.wgpuQueueGetTimestampPeriod(device.queue._internal)) * 1e-9

    def begin(self, encoder: Any) -> None:
        encoder.begin_compute_pass(
            timestamp_writes={"query_set": self._queries, "beginning_of_pass_write_index": 0}
        ).end()

    def end(self, encoder: Any) -> None:
        encoder.begin_compute_pass(timestamp_writes={"query_set": self._queries, "end_of_pass_write_index": 1}).end()
        encoder.resolve_query_set(self._queries, 0, 2, self._memory, 0)

    def secs(self, queue: Any) -> float:
        """Return the seconds between them, once the passes are submitted."""
        first, last = np.frombuffer(queue.read_buffer(self._memory, 0, 16), np.uint64)
        # Timestamps may be equal, and a device may even reset its counter (WebGPU, "Timestamp Query").
        return max(int(last) - int(first), 1) * self._tick


class WebGPUBuffer:
    """Device memory of `nbytes`; `memory` is None once it is freed."""

    __slots__ = ("memory", "nbytes")

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes

    def live(self) -> Any:
        if self.memory is None:
            raise MeasureError("WebGPU device: expected a live buffer, got one that was freed")
        return self.memory


@dataclass(frozen=True, slots=True)
class _Handle:
    """A compiled kernel. access: how it uses each buffer, in order; scalars: it takes integers."""

    name: str
    pipeline: Any
    layout: Any
    access: tuple[str, ...]
    scalars: bool


class WebGPUDevice(DeviceClass):
    """The `Device` contract over one adapter and its queue."""

    kind = "webgpu"
    forms = ("webgpu", "webgpu:PART")
    service = WGSL_KERNELS
    probed_in_process = False

    @classmethod
    def open_part(cls, part: str | None) -> WebGPUDevice:
        return cls(part)

    @classmethod
    def available(cls) -> Iterator[tuple[str, DeviceInfo | DeviceFailure]]:
        try:
            load_wgpu()  # loads no driver
            adapters = listed_adapters(__name__)
        except BuildError as error:
            yield cls.kind, DeviceFailure(cls.kind, str(error))
            return
        if not adapters:
            reason = f"WebGPU: expected an adapter, got none; {_INSTALL}"
            yield cls.kind, DeviceFailure(cls.kind, reason)
        for label, entry in adapters:
            spec = f"{cls.kind}:{label}"
            yield spec, DeviceFailure(spec, entry) if isinstance(entry, str) else entry

    @classmethod
    def choices(cls) -> str:
        try:
            load_wgpu()
            return ", ".join(f"{cls.kind}:{label}" for label, _ in listed_adapters(__name__))
        except BuildError:
            return ""

    def __init__(self, substring: str | None = None) -> None:
        self._wgpu, self.turn = load_wgpu(), threading.RLock()
        self._refusals = refusals(self._wgpu)
        self.label, adapter = choose_adapter(substring)
        self.info = _describe(adapter)
        limits = dict(self.info.limits)
        self._limits = {name: limits[name] for name in LIMITS}
        required = {name: adapter.limits[name] for name in (*LIMITS.values(), "max-buffer-size")}
        clock = [CLOCK] if CLOCK in adapter.features else []
        try:
            self._device = adapter.request_device_sync(required_limits=required, required_features=clock)
        except self._refusals as error:
            raise MeasureError(f"WebGPU: {self.label} is there but cannot be opened: {error}") from None
        self._queue = self._device.queue
        self._encoder: Any = None
        self._pending = 0
        self._clock = self._guard("opening", lambda: DeviceTimestamps(self._wgpu, self._device)) if clock else None
        self._mark = self._guard("opening", lambda: self._memory(UNIT, self._wgpu.BufferUsage.COPY_SRC))
        self._compiling = threading.Lock()

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        with self._compiling:
            return {kernel.name: self._compiled(kernel) for kernel in kernels}

    def _compiled(self, kernel: KernelSource) -> _Handle:
        """Compile one kernel."""
        name = kernel.name
        text = module_text(kernel)
        kinds_at = {int(m[1]): m[2] for m in _BINDING.finditer(kernel.source)}
        try:
            module = self._device.create_shader_module(code=text)
            stage = self._wgpu.ShaderStage.COMPUTE
            entries = [
                {"binding": at, "visibility": stage, "buffer": {"type": _USAGE.get(kind, "uniform")}}
                for at, kind in sorted(kinds_at.items())
            ]
            layout = self._device.create_bind_group_layout(entries=entries)
            whole = self._device.create_pipeline_layout(bind_group_layouts=[layout])
            pipeline = self._device.create_compute_pipeline(
                layout=whole, compute={"module": module, "entry_point": name}
            )
        except self._refusals as error:
            raise BuildError(f"WebGPU refused kernel {name}:\n{str(error)[:8000]}") from None
        kinds = [kinds_at[at] for at in sorted(kinds_at)]
        return _Handle(name, pipeline, layout, tuple(k for k in kinds if k != "uniform"), "uniform" in kinds)

    def alloc(self, nbytes: int, lasting: bool = False) -> WebGPUBuffer:
        most = self._device.limits["max-buffer-size"]
        if nbytes < 0:
            raise MeasureError(f"memory: expected a size of 0 or more bytes, got {nbytes}")
        if nbytes > most:
            raise MemoryLack(f"WebGPU: expected {nbytes} bytes in one buffer, allowed {most}")
        usage = self._wgpu.BufferUsage
        flags = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
        return WebGPUBuffer(self._guard("alloc", lambda: self._memory(nbytes, flags)), nbytes)

    def _memory(self, nbytes: int, usage: int) -> Any:
        return self._device.create_buffer(size=max(_rounded(nbytes), UNIT), usage=usage)

    def upload(self, buffer: WebGPUBuffer, array: NDArray[Any]) -> None:
        check_transfer("WebGPU upload", array.nbytes, buffer.nbytes)
        memory = buffer.live()
        if not array.nbytes:
            return
        self._submit()
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = data.nbytes // 4 * 4

        def transfer() -> None:
            if whole:
                self._queue.write_buffer(memory, 0, data[:whole])
            if data.nbytes > whole:  # a transfer is of whole words: the rest of the last one stays as it is
                last = np.frombuffer(self._read(memory, whole, 4), np.uint8).copy()
                last[: data.nbytes - whole] = data[whole:]
                self._queue.write_buffer(memory, whole, last)

        self._guard("upload", transfer)

    def download(self, buffer: WebGPUBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        result = np.empty(shape, dtype)
        check_transfer("WebGPU download", result.nbytes, buffer.nbytes)
        memory = buffer.live()
        if result.nbytes:
            self._submit()
            data = self._guard("download", lambda: self._read(memory, 0, -(-result.nbytes // 4) * 4))
            result.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)[: result.nbytes]
        return result

    def _read(self, memory: Any, start: int, nbytes: int) -> Any:
        return self._queue.read_buffer(memory, start, nbytes)

    def copy(self, target: WebGPUBuffer, source: WebGPUBuffer, nbytes: int) -> None:
        check_transfer("WebGPU copy", nbytes, min(target.nbytes, source.nbytes))
        into, begin, whole = target.live(), source.live(), nbytes // 4 * 4
        if whole and into is not begin:
            self._guard("copy", lambda: self._commands().copy_buffer_to_buffer(begin, 0, into, 0, whole))
        if nbytes > whole and into is not begin:
            self._submit()
            self._guard("copy", lambda: self._copy_rest(into, begin, whole, nbytes - whole))

    def _copy_rest(self, into: Any, begin: Any, start: int, nbytes: int) -> None:
        """Copy fewer than four bytes from `start` on; the rest of the target's word stays as it is."""
        word, last = (np.frombuffer(self._read(m, start, 4), np.uint8).copy() for m in (begin, into))
        last[:nbytes] = word[:nbytes]
        self._queue.write_buffer(into, start, last)

    def free(self, buffer: WebGPUBuffer) -> None:
        memory, buffer.memory = buffer.memory, None
        if memory is not None:
            self._submit()
            self._guard("freeing memory", memory.destroy)

    def bind(
        self,
        kernel: _Handle,
        buffers: Sequence[WebGPUBuffer],
        scalars: Sequence[int],
        grid: Sequence[int],
        local: Sequence[int],
    ) -> Launch:
        memory = [buffer.live() for buffer in buffers]
        if len(memory) != len(kernel.access) or bool(scalars) != kernel.scalars:
            raise MeasureError(
                f"WebGPU kernel {kernel.name}: {len(memory)} buffers and {len(scalars)} scalars do not fit it, which takes "
                f"{len(kernel.access)} buffers and {'some' if kernel.scalars else 'no'} scalars"
            )
        check_launch(f"WebGPU kernel {kernel.name}", self._limits, scalars, grid, local)
        if 0 in grid:
            return _nothing
        what = f"kernel {kernel.name}"
        used, copies = self._guard(what, lambda: self._separated(kernel, memory))
        if scalars:
            used.append(self._guard(what, lambda: self._numbers(scalars)))
        group = self._guard(what, lambda: self._group(kernel, used))
        size = (*(int(g) for g in grid), 1, 1)[:3]

        def encode() -> None:
            for source, target in copies:
                self._commands().copy_buffer_to_buffer(source, 0, target, 0, source.size)
            step = self._commands().begin_compute_pass()
            step.set_pipeline(kernel.pipeline)
            step.set_bind_group(0, group)
            step.dispatch_workgroups(*size)
            step.end()

        def launch() -> None:
            self._guard(what, encode)
            if self._pending >= MAX_PENDING:
                self._submit()

        launch.__dict__["keep"] = (kernel, used)
        return launch

    def _numbers(self, scalars: Sequence[int]) -> Any:
        """Return the uniform buffer of a launch's integers."""
        usage = self._wgpu.BufferUsage
        uniform = self._memory(4 * len(scalars), usage.UNIFORM | usage.COPY_DST)
        self._queue.write_buffer(uniform, 0, np.asarray(scalars, np.int32))
        return uniform

    def _group(self, kernel: _Handle, memory: Sequence[Any]) -> Any:
        entries = [
            {"binding": at, "resource": {"buffer": m, "offset": 0, "size": m.size}} for at, m in enumerate(memory)
        ]
        return self._device.create_bind_group(layout=kernel.layout, entries=entries)

    def _separated(self, kernel: _Handle, memory: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Return memory to bind, and copies before each launch: WebGPU forbids to write what another binding reads."""
        written = {id(m) for m, how in zip(memory, kernel.access) if "write" in how}
        used, copies = list(memory), []
        usage = self._wgpu.BufferUsage
        for at, (m, how) in enumerate(zip(memory, kernel.access)):
            if "write" not in how and id(m) in written:
                used[at] = self._memory(m.size, usage.STORAGE | usage.COPY_DST)
                copies.append((m, used[at]))
        return used, copies

    def bind_host(
        self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[WebGPUBuffer]
    ) -> Launch | None:
        """Return None: the host reaches the device's memory only by copies."""
        return None

    def place(self, buffer: WebGPUBuffer, array: NDArray[Any] | None) -> bool:
        """Return False: shaders reach only the device's own memory."""
        return False

    def wrap(self, array: NDArray[Any]) -> None:
        """Return None: kernels reach only the adapter's buffers."""

    def native(self, buffers: Sequence[WebGPUBuffer]) -> None:
        """Return None: no library has kernels for this queue."""
        for buffer in buffers:
            buffer.live()

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return None: passes cannot be submitted again."""
        return None

    def synchronize(self) -> None:
        self._submit()
        # a read waits for what was submitted before it; wgpu 0.32 has a broken `on_submitted_work_done_sync`
        self._guard("waiting", lambda: self._read(self._mark, 0, 4))

    def elapsed(self, work: Callable[[], object]) -> float | None:
        """See `DeviceClock`: by timestamp queries, where the adapter has them."""
        clock = self._clock
        if clock is None:
            return None
        self._submit()
        self._guard("timing", lambda: clock.begin(self._commands()))
        work()
        self._guard("timing", lambda: clock.end(self._commands()))
        self._submit()
        return self._guard("timing", lambda: clock.secs(self._queue))  # type: ignore[no-any-return]

    def close(self) -> None:
        self.synchronize()
        self._guard("closing", self._device.destroy)

    def _commands(self) -> Any:
        """Return the encoder of the passes that are not submitted yet."""
        if self._encoder is None:
            self._encoder = self._device.create_command_encoder()
        self._pending += 1
        return self._encoder

    def _submit(self) -> None:
        if self._encoder is not None:
            encoder, self._encoder, self._pending = self._encoder, None, 0
            self._guard("launching", lambda: self._queue.submit([encoder.finish()]))

    def _guard(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except self._refusals as error:
            kind = MemoryLack if isinstance(error, self._wgpu.GPUOutOfMemoryError) else MeasureError
            raise kind(f"WebGPU device {self.info.name}: {what} failed: {str(error)[:2000]}") from None


def module_text(kernel: KernelSource) -> str:
    """Return the WGSL module of a kernel; flags `-DNAME=VALUE` are constants of it. Raises BuildError for a text without the kernel."""
    if kernel.language != "webgpu":
        raise BuildError(f"WebGPU device: expected kernels in webgpu, got {kernel.name} in {kernel.language}")
    if not re.search(rf"@compute[^;{{]*\bfn {re.escape(kernel.name)}\b", kernel.source):
        raise BuildError(
            f"WebGPU: the source of kernel {kernel.name} gives no such kernel; it needs `@compute fn {kernel.name}`"
        )
    defined = [_FLAG.fullmatch(flag) for flag in kernel.flags]
    return "".join(f"const {m[1]} = {m[2]};\n" for m in defined if m is not None) + kernel.source


def check_launch(
    what: str, limits: Mapping[str, int], scalars: Sequence[int], grid: Sequence[int], local: Sequence[int]
) -> None:
    """Raise MeasureError for a launch beyond 32 bits or beyond an adapter's limits (names of `LIMITS`)."""
    for value in scalars:
        if not INT_LEAST <= value <= INT_MOST:
            raise MeasureError(
                f"{what}: expected sizes and indices that 32 bits hold, got {value}; WGSL has no integers of 64 bits: use smaller "
                "arrays, or another target"
            )
    if not 1 <= len(grid) <= 3 or len(grid) != len(local):
        raise MeasureError(f"{what}: expected a grid of 1 to 3 axes and as many local sizes, got {grid}, {local}")
    for axis, extent, size in zip("xyz", grid, local):
        if not 0 <= extent <= limits["max_groups"]:
            allowed = f"extents of 0 or more, at most {limits['max_groups']}"
            raise MeasureError(f"{what}: expected grid {allowed}, got {tuple(grid)}")
        most = limits[f"max_group_{axis}"]
        if not 1 <= size <= most:
            raise MeasureError(f"{what}: local size {size} on axis {'xyz'.index(axis)}, allowed 1..{most}")
    threads = int(np.prod(local, dtype=np.int64))
    if threads > limits["max_group_size"]:
        raise MeasureError(f"{what}: {threads} invocations in a group, allowed {limits['max_group_size']}")


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def _nothing() -> None:
    """Launch an empty grid: do nothing."""


def _describe(adapter: Any) -> DeviceInfo:
    info, is_cpu = adapter.info, adapter.info["adapter_type"] == "CPU"
    limits = {name: int(min(adapter.limits[key], 1 << 62)) for name, key in LIMITS.items()}
    limits |= {"vector_bits": 128, "max_vector_lanes": 4, "registers": 255, "doubles": 0, "serial_launches": 0}
    limits |= {"l1_bytes": 0, "l2_bytes": 0, "l3_bytes": 0}
    if is_cpu:
        limits |= {"workers": host.usable_cpus(), **host.cache_bytes()}
    fingerprint = {
        "adapter": str(info["adapter_type"]),
        "cpu": host.cpu_model() if is_cpu else "",
        "device": str(info["device"]),
        "driver": str(info["description"]),
        "kind": "webgpu",
        "platform": f"{info['backend_type']} {info['adapter_type']}",
        "vendor": str(info["vendor"]),
        "wgpu": _version(),
    }
    limits = with_quirks("webgpu", fingerprint, limits)
    facts, numbers = tuple(sorted(fingerprint.items())), tuple(sorted(limits.items()))
    unit = host.processor_unit() if is_cpu else ""
    return DeviceInfo("webgpu", fingerprint["device"], facts, numbers, unit=unit)


def _version() -> str:
    wgpu = load_wgpu()
    native = ".".join(str(x) for x in wgpu.backends.wgpu_native.lib_version_info)
    return f"{wgpu.__version__}, wgpu-native {native}"


def main() -> None:
    """Print every adapter as JSON, as `listed_adapters` reads it."""
    adapters: list[tuple[str, dict[str, Any] | str]] = []
    for label, _ in all_adapters():
        try:
            device = WebGPUDevice(label)
            adapters.append((label, asdict(device.info)))
            device.close()
        except RelaxTuneError as error:
            adapters.append((label, str(error)))
    print(json.dumps(adapters))


if __name__ == "__main__":
    main()
