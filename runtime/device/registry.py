"""Opening and listing devices by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relax_tune.errors import BuildError, MeasureError, RelaxTuneError, UserError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.cuda import CUDADevice, load_pycuda
from relax_tune.runtime.device.opencl import OpenCLDevice, all_devices
from relax_tune.runtime.device.wasm.device import SPEC as WASM
from relax_tune.runtime.device.wasm.device import WasmDevice
from relax_tune.runtime.device.webgpu.device import WebGPUDevice
from relax_tune.runtime.device.webgpu.listing import adapters_apart


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """A device kind (`spec`) that cannot be opened here, and the sentence that says why."""

    spec: str
    reason: str


def open_device(spec: str) -> Device:
    """Open a device by name: `c`, `opencl`, `webgpu`, `cuda:NUMBER` (`cuda`: the first) or a kind with a part of a name.

    `c:PART` has a part of the processor's name, `c:wasm32-node` is WebAssembly in node. `opencl:PART` has a part of a platform name,
    version or device name, `webgpu:PART` of an adapter's backend, type, name or driver.

    Raises: UserError for another text, or when there is no such device (naming those there are). A device that exists
    but cannot be opened raises the same error, without waiting.
    """
    if not isinstance(spec, str):
        raise UserError(f"wanted the name of a device, found a {type(spec).__name__}; there are: {_known()}")
    kind, _, substring = spec.partition(":")
    try:
        if spec == "c":
            return CDevice()
        if spec == WASM:
            return WasmDevice()
        if kind == "c" and substring and substring.lower() in host.cpu_model().lower():
            return CDevice()
        if kind == "opencl" and (substring or spec == "opencl"):
            return OpenCLDevice(substring or None)
        if kind == "webgpu" and (substring or spec == "webgpu"):
            return WebGPUDevice(substring or None)
        if kind == "cuda" and (spec == "cuda" or re.fullmatch(r"\d{1,3}", substring, re.ASCII)):
            return CUDADevice(int(substring or 0))
    except (BuildError, MeasureError) as error:
        raise UserError(f"device {spec!r} cannot be opened: {error}") from error
    raise UserError(
        f"wanted a device c, c:PART, opencl, opencl:PART, cuda, cuda:NUMBER, webgpu or webgpu:PART, found {spec!r:.80}; "
        f"there are: {_known()}"
    )


def name_of_measured(kind: str, fingerprint: object) -> str:
    """Return the name of the device of this machine that a fingerprint describes, else the kind itself.

    Several drivers of OpenCL may offer one processor; the kind alone opens the default one.
    """
    if kind != "opencl" or not isinstance(fingerprint, Mapping):
        return kind
    wanted = f"{fingerprint.get('platform')} {fingerprint.get('device')}"
    try:
        found = [label for label, _ in all_devices() if label.replace(" | ", " ") == wanted]
    except BuildError:
        return kind
    return f"{kind}:{found[0]}" if len(found) == 1 else kind


def devices_of_class(spec: str) -> list[str]:
    """Return the names of all devices of a class on this machine: `cuda` is every GPU, any other name is one device."""
    if spec != "cuda":
        return [spec]
    try:
        count = int(load_pycuda().Device.count())
    except BuildError:
        return [spec]
    return [f"cuda:{number}" for number in range(count)] or [spec]


def _known() -> str:
    """Return the names that `open_device` takes on this machine, in one line."""
    try:
        labels = [label for label, _ in all_devices()]
    except BuildError:
        labels = []
    if not labels:
        return f"c ({host.cpu_model()}){_gpus()}{_adapters()}, and no OpenCL device; pip install 'relax-tune[opencl]' gives one"
    return f"c ({host.cpu_model()}){_gpus()}{_adapters()}, and as opencl:PART, with PART any part of its text, {'; '.join(labels)}"


def _gpus() -> str:
    try:
        count = int(load_pycuda().Device.count())
    except BuildError:
        return ""
    return "".join(f", cuda:{number}" for number in range(count))


def _adapters() -> str:
    try:
        return "".join(f", webgpu:{label}" for label, _ in adapters_apart())
    except BuildError:
        return ""


def list_devices() -> list[DeviceInfo | DeviceFailure]:
    """List the devices that can be opened, and the reason for each kind that cannot. Every device is opened and closed."""
    found: list[DeviceInfo | DeviceFailure] = [*_processors(), *_nvidia(), *_webgpu()]
    try:
        labels = [label for label, _ in all_devices()]
    except BuildError as error:
        return [*found, DeviceFailure("opencl", str(error))]
    if not labels:
        found.append(DeviceFailure("opencl", "OpenCL: wanted a platform, found none; pip install 'relax-tune[opencl]'"))
    for label in labels:
        try:
            device = OpenCLDevice(label)
            found.append(device.info)
            device.close()
        except RelaxTuneError as error:
            found.append(DeviceFailure(f"opencl:{label}", str(error)))
    return found


def _processors() -> Iterator[DeviceInfo | DeviceFailure]:
    try:
        yield CDevice().info
    except RelaxTuneError as error:
        yield DeviceFailure("c", str(error))


def _nvidia() -> Iterator[DeviceInfo | DeviceFailure]:
    try:
        count = int(load_pycuda().Device.count())
    except BuildError as error:
        yield DeviceFailure("cuda", str(error))
        return
    for number in range(count):
        try:
            device = CUDADevice(number)
            yield device.info
            device.close()
        except RelaxTuneError as error:
            yield DeviceFailure(f"cuda:{number}", str(error))


def _webgpu() -> Iterator[DeviceInfo | DeviceFailure]:
    try:
        listed = adapters_apart()
    except BuildError as error:
        yield DeviceFailure("webgpu", str(error))
        return
    if not listed:
        install = (
            "install a Vulkan driver (Debian, Ubuntu: apt-get install mesa-vulkan-drivers gives one for the processor)"
        )
        yield DeviceFailure("webgpu", f"WebGPU: wanted an adapter, found none; {install}")
    for label, found in listed:
        yield DeviceFailure(f"webgpu:{label}", found) if isinstance(found, str) else found
