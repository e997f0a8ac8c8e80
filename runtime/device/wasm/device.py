"""WebAssembly with SIMD as a device: kernels compiled by clang, run in node with V8's optimising compiler, one thread.

A module of kernels has a region of the one memory for its data and its stack. node is a separate process: it has the memory, and
launches are messages, in order. A kernel that never ends is ended with the processes around it.

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import BuildError, MeasureError
from relax_tune.runtime.child_process import find_program
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import DeviceInfo, Launch
from relax_tune.runtime.device.binaries import (
    cache_folder,
    hashed,
    private_folder,
    seal,
    sealed_content,
    warn_of_damage,
)
from relax_tune.runtime.device.confinement import COMPILER_VARIABLES, only
from relax_tune.runtime.device.device_class import DeviceClass
from relax_tune.runtime.device.memory import check_transfer
from relax_tune.runtime.device.service_kernels import C_KERNELS
from relax_tune.runtime.device.source import group_by_flags, join_sources
from relax_tune.runtime.device.wasm.compiler import COMPILE_FLAGS, PROCESSOR, Clang
from relax_tune.runtime.program.program import KernelSource

SPEC = "c:wasm32-node"
LIMITS = {
    "workers": 1, "vector_bits": 128, "max_vector_lanes": 4, "registers": 16, "l1_bytes": 32 << 10, "l2_bytes": 512 << 10,
    "l3_bytes": 4096 << 10, "max_local_bytes": 0, "max_group_size": 1, "launch_ns": 1_000,
}  # fmt: skip
"""Facts of a processor under WebAssembly, which does not tell its own."""
_NODE_FLAGS = ("--no-warnings", "--no-liftoff", "--no-wasm-lazy-compilation")
_ALIGNMENT, _PAGE = 64, 1 << 16
_REGION, _STACK = 4 << 20, 1 << 18
_ALLOCATOR = "void relax_tune_none(void) {}\n"


class WasmBuffer:
    """Memory in node. address: its first byte, -1 after it was freed"""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def live(self) -> int:
        if self.address < 0:
            raise MeasureError("WebAssembly: expected a live buffer, got one that was freed")
        return self.address


class WasmLaunch:
    """A launch of one kernel. text: what node makes it of"""

    __slots__ = ("_device", "_list", "text")

    def __init__(self, device: WasmDevice, text: Sequence[Any]) -> None:
        self._device, self.text = device, text
        self._list: int | None = None

    def __call__(self) -> None:
        if self._list is None:
            self._list = self._device.listed([self.text])
        self._device.post(call="run", list=self._list)

    def __del__(self) -> None:
        if self._list is not None:
            self._device.drop(self._list)


class WasmDevice(DeviceClass):
    """The `Device` contract on WebAssembly in node."""

    kind = "c"
    forms = (SPEC,)
    service = C_KERNELS
    compiles_in_threads = True

    @classmethod
    def open_part(cls, part: str | None) -> WasmDevice | None:
        return cls() if f"{cls.kind}:{part}" == SPEC else None

    @classmethod
    def choices(cls) -> str:
        return ""

    def __init__(self) -> None:
        self._clang = Clang()
        node = find_program("node")
        if node is None:
            raise BuildError("WebAssembly: expected node, got none; install Node.js 18 or later")
        self.turn = threading.RLock()
        self._wire = threading.RLock()
        self._dropped: list[int] = []
        self._queued: list[bytes] | None = None
        self._process = subprocess.Popen(
            [node, *_NODE_FLAGS, str(files(__package__).joinpath("node.cjs"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=only(COMPILER_VARIABLES) | {"OPENSSL_CONF": "/dev/null"},  # which a sandbox may not read
        )
        link = ("-mexec-model=reactor", "-Wl,--export=aligned_alloc", "-Wl,--export=free")
        engine = self._ask(self._built(_ALLOCATOR, (), link), call="start")
        fingerprint = {
            "compiler": self._clang.version,
            "cpu": PROCESSOR,
            "engine": f"V8 {engine}",
            "host": host.cpu_model(),
            "kind": "c",
            "threads": "1",
        }
        self.info = DeviceInfo(
            "c", f"WebAssembly on {host.cpu_model()}", tuple(sorted(fingerprint.items())), tuple(sorted(LIMITS.items())), ()
        )  # fmt: skip
        # () for libraries: libraries of the host do not reach node's memory

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, int]:
        """Compile kernels; kernels of equal flags become one module. Raises BuildError with clang's messages."""
        for kernel in kernels:
            if kernel.language != "c":
                raise BuildError(f"WebAssembly: expected kernels in c, got {kernel.name} in {kernel.language}")
        handles: dict[str, int] = {}
        for flags, group in group_by_flags(kernels).items():
            region = self._take(_REGION, "a module", _PAGE)
            names = [kernel.name for kernel in group]
            link = (
                "-nostartfiles", "-Wl,--no-entry", "-Wl,--import-memory", f"-Wl,--global-base={region}", f"-Wl,-z,stack-size={_STACK}",
                "-Wl,--export=__heap_base", *(f"-Wl,--export={name}" for name in names),
            )  # fmt: skip
            code = self._built(join_sources(group), flags, link)
            loaded = self._ask(code, call="load", names=names)
            if loaded["end"] > region + _REGION:
                raise BuildError(
                    f"WebAssembly: expected {_REGION} bytes of constants and stack, got {loaded['end'] - region}"
                )
            handles |= {name: loaded["first"] + k for k, name in enumerate(names)}
        return handles

    def _built(self, source: str, flags: Sequence[str], link: Sequence[str]) -> bytes:
        """Return a module, from the cache where it is there and ours."""
        compile_ = [*COMPILE_FLAGS, "-std=gnu11", *flags]
        unlinked = [x for x in link if not x.startswith("-Wl,--global-base")]
        try:
            with private_folder(cache_folder() / "wasm") as folder:
                target = folder / f"{hashed(('sealed', self._clang.version, *compile_, *unlinked, source))}.o"
                with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as opened:
                    work = Path(opened)
                    code = sealed_content(target)
                    if code is None:
                        warn_of_damage(target)
                        (work / "unit.c").write_text(source)
                        self._clang.run([*compile_, "-c", "unit.c", "-o", "unit.o"], work)
                        code = (work / "unit.o").read_bytes()
                        seal(work / "unit.o")
                        os.replace(work / "unit.o", target)
                    (work / "linked.o").write_bytes(code)
                    self._clang.run(["--target=wasm32-wasi", *link, "linked.o", "-lm", "-o", "unit.wasm"], work)
                    return (work / "unit.wasm").read_bytes()
        except OSError as error:
            raise MeasureError(
                f"WebAssembly: expected to write compiled kernels to {cache_folder() / 'wasm'}, got: {error.strerror or error}"
            ) from None

    def _take(self, nbytes: int, what: str, alignment: int = _ALIGNMENT) -> int:
        whole = max(-(-nbytes // alignment), 1) * alignment
        address = 0
        if nbytes >= 0 and whole < 1 << 32:
            address = int(self._ask(call="alloc", alignment=alignment, bytes=whole))
        if not address:
            raise MeasureError(f"WebAssembly: expected {nbytes} bytes for {what}, got too little of its 4 GiB")
        return address

    def alloc(self, nbytes: int, lasting: bool = False) -> WasmBuffer:
        return WasmBuffer(self._take(nbytes, "a buffer"), nbytes)

    def upload(self, buffer: WasmBuffer, array: NDArray[Any]) -> None:
        check_transfer("WebAssembly upload", array.nbytes, buffer.nbytes)
        self._ask(np.ascontiguousarray(array).tobytes(), call="write", address=buffer.live())

    def download(self, buffer: WasmBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        result = np.empty(shape, dtype)
        check_transfer("WebAssembly download", result.nbytes, buffer.nbytes)
        with self._wire:
            self.synchronize()
            self._ask(call="read", address=buffer.live(), bytes=result.nbytes)
            data = self._read(result.nbytes)
        # A copy, because `frombuffer` returns a read-only view of the message.
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def copy(self, target: WasmBuffer, source: WasmBuffer, nbytes: int) -> None:
        check_transfer("WebAssembly copy", nbytes, min(target.nbytes, source.nbytes))
        self._ask(call="copy", target=target.live(), source=source.live(), bytes=nbytes)

    def free(self, buffer: WasmBuffer) -> None:
        if buffer.address >= 0:
            self._ask(call="free", address=buffer.address)
            buffer.address = -1

    def bind(
        self,
        kernel: int,
        buffers: Sequence[WasmBuffer],
        scalars: Sequence[int],
        grid: Sequence[int],
        local: Sequence[int],
    ) -> Launch:
        if grid or local:
            raise MeasureError(f"WebAssembly: expected no grid (kernels loop inside), got grid {grid} local {local}")
        return WasmLaunch(self, [kernel, [b.live() for b in buffers], [int(s) for s in scalars]])

    def bind_host(self, function: Callable[[list[NDArray[Any]]], None], buffers: Sequence[WasmBuffer]) -> Launch | None:
        """Return None: host code does not reach node's memory."""
        return None

    def place(self, buffer: WasmBuffer, array: NDArray[Any] | None) -> bool:
        return False

    def wrap(self, array: NDArray[Any]) -> None:
        """Return None: kernels reach only the memory of their module."""

    def native(self, buffers: Sequence[WasmBuffer]) -> None:
        """Return None: there is no queue."""

    def record(self, launches: Sequence[Launch]) -> Launch | None:
        """Return all launches as one message; None for an empty list, and where one is no kernel."""
        texts = [launch.text for launch in launches if isinstance(launch, WasmLaunch)]
        return _Recorded(self, texts) if texts and len(texts) == len(launches) else None

    def listed(self, texts: Sequence[Sequence[Any]]) -> int:
        """Return the number of a list of launches in node."""
        while self._dropped:
            self._ask(call="drop", list=self._dropped.pop())
        return int(self._ask(call="bind", launches=texts, times=1))

    def drop(self, number: int) -> None:
        """Let node forget a list when it gets the next one."""
        self._dropped.append(number)

    def synchronize(self) -> None:
        """Wait for all launches. Raises MeasureError for one that failed."""
        self._ask(call="sync")

    def elapsed(self, work: Callable[[], object]) -> float | None:
        """Return the seconds that the launches of `work` take, by node's clock: messages reach it together."""
        with self._wire:
            self._queued = []
            try:
                work()
            finally:
                queued, self._queued = self._queued, None
            self._send(_frame({"call": "mark"}), *queued)
            return float(self._ask(call="since")) * 1e-9

    def post(self, data: bytes = b"", **message: Any) -> None:
        """Send a message that has no answer."""
        with self._wire:
            if self._queued is None or message["call"] != "run":
                self._send(_frame(message, data))
            else:
                self._queued.append(_frame(message))

    def _send(self, *frames: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"".join(frames))
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._lost() from None

    def _ask(self, data: bytes = b"", **message: Any) -> Any:
        with self._wire:
            self.post(data, **message)
            answer = json.loads(self._read(int.from_bytes(self._read(4), "little")))
        if "error" in answer:
            raise MeasureError(f"WebAssembly in node: {message['call']}: {answer['error']}")
        return answer.get("value")

    def _read(self, nbytes: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(nbytes)
        if len(data) < nbytes:
            raise self._lost()
        return data

    def _lost(self) -> MeasureError:
        return MeasureError(f"WebAssembly: expected an answer of node, but it ended with status {self._process.poll()}")

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def _frame(message: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + len(data).to_bytes(4, "little") + text + data


class _Recorded:
    """Launches that are one message."""

    def __init__(self, device: WasmDevice, texts: Sequence[Sequence[Any]]) -> None:
        self._device, self._list = device, -1
        self._list = device.listed(texts)

    def __call__(self) -> None:
        self._device.post(call="run", list=self._list)

    def __del__(self) -> None:
        if self._list >= 0:
            self._device.drop(self._list)
