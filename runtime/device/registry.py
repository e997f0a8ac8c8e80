"""Opening and listing devices by name: built-in ones, and plug-ins of installed distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from relax_tune.errors import BuildError, MeasureError, UserError
from relax_tune.plugins import load_plugins
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.c_objects import CompiledObjects
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.device.device_class import DeviceClass, DeviceFailure
from relax_tune.runtime.device.opencl import OpenCLDevice
from relax_tune.runtime.device.service_kernels import ServiceKernels
from relax_tune.runtime.device.wasm.device import WasmDevice
from relax_tune.runtime.device.webgpu.device import WebGPUDevice

GROUP = "relax_tune.devices"
BUILT_IN: tuple[type[DeviceClass], ...] = (CDevice, WasmDevice, CUDADevice, WebGPUDevice, OpenCLDevice)


def device_classes() -> tuple[type[DeviceClass], ...]:
    """Return the classes of devices: the built-in ones, then plug-ins.

    Raises:
        BuildError: A plug-in is no subclass of `DeviceClass`, or its kind is in use.
    """
    classes = list(BUILT_IN)
    for plugin in load_plugins(GROUP):
        if not (isinstance(plugin.value, type) and issubclass(plugin.value, DeviceClass)):
            raise plugin.refusal("a subclass of relax_tune.runtime.device.device_class.DeviceClass", plugin.value)
        if plugin.value.kind in {c.kind for c in classes}:
            raise plugin.refusal("a kind of device that is not in use", repr(plugin.value.kind))
        classes.append(plugin.value)
    return tuple(classes)


def _of_kind(kind: str) -> list[type[DeviceClass]]:
    """Return the classes of a kind. Plug-ins are loaded only for a kind that is not built in."""
    return [c for c in BUILT_IN if c.kind == kind] or [c for c in device_classes() if c.kind == kind]


def open_device(spec: str, objects: Sequence[CompiledObjects] = ()) -> Device:
    """Open a device by name: `c`, `opencl`, `webgpu`, `cuda:NUMBER` (`cuda`: the first), a kind with a part of a name, or a plug-in's.

    `c:PART` has a part of the processor's name, `c:wasm32-node` is WebAssembly in node. `opencl:PART` has a part of a platform name,
    version or device name, `webgpu:PART` of an adapter's backend, type, name or driver.

    Args:
        spec: The name.
        objects: Compiled kernels of an artifact for target `c`, which may replace the compiler.

    Raises:
        UserError: It is no such name, or there is no such device (the message lists the devices of this machine); or the device
            cannot be opened, which is reported without waiting.
    """
    if not isinstance(spec, str):
        raise UserError(f"expected the name of a device, got a {type(spec).__name__}; there are: {_choices()}")
    kind, colon, part = spec.partition(":")
    try:
        for device_class in _of_kind(kind) if part or not colon else ():
            device = device_class.open_compiled(part if colon else None, objects)
            if device is not None:
                return device
    except (BuildError, MeasureError) as error:
        raise UserError(f"device {spec!r} cannot be opened: {error}") from error
    *forms, last = chain.from_iterable(c.forms or (c.kind,) for c in device_classes())
    raise UserError(f"expected a device {', '.join(forms)} or {last}, got {spec!r:.80}; there are: {_choices()}")


ALIASES = ("auto", "cpu", "gpu")
"""Names for the best device of this machine: of any kind, a processor, a GPU."""


def concrete_name(spec: str) -> str:
    """Return the name of the device that an alias stands for on this machine; any other name as it is.

    GPUs are tried as CUDA, OpenCL and, for `gpu`, WebGPU; processors as C and OpenCL. `auto` tries GPUs first.

    Raises:
        UserError: There is no such device; the message says why each could not be opened.
    """
    if spec not in ALIASES:
        return spec
    gpus = [("cuda", True), ("opencl", True), ("webgpu", True)]
    processors = [("c", False), ("opencl", False)]
    reasons = []
    for kind, is_gpu in {"auto": gpus[:2] + processors, "gpu": gpus, "cpu": processors}[spec]:
        try:
            device = open_device(kind)
        except UserError as error:
            reasons.append(str(error))
            continue
        unit = device.info.unit
        device.close()
        if unit.startswith("cpu:") != is_gpu:
            return kind
        reasons.append(f"device {kind!r} is {'a processor' if is_gpu else 'no processor'}")
    raise UserError(
        f"expected {'a GPU' if spec == 'gpu' else 'a device'} for the target {spec!r}, got none. {'; '.join(reasons)}"
    )


def _choices() -> str:
    """Return the names that `open_device` takes on this machine, in one line."""
    return ", ".join(filter(None, (c.choices() for c in device_classes())))


def service_kernels(kind: str) -> ServiceKernels:
    """Return the hand-written kernels for devices of a kind. Raises MeasureError for an unknown kind."""
    for device_class in _of_kind(kind):
        return device_class.service
    raise MeasureError(f"expected a device of kind {', '.join(dict.fromkeys(c.kind for c in BUILT_IN))}, got {kind}")


def is_probed_in_process(spec: str) -> bool:
    """Return whether a process may try a device without disturbing others that it opens later."""
    return all(device_class.probed_in_process for device_class in _of_kind(spec.partition(":")[0]))


def name_of_measured(kind: str, fingerprint: object) -> str:
    """Return the name of the device of this machine that a fingerprint describes, else the kind itself.

    Several drivers of OpenCL may offer one processor; the kind without a part opens the default one.
    """
    if isinstance(fingerprint, Mapping):
        for device_class in _of_kind(kind):
            return device_class.spec_of(fingerprint)
    return kind


def devices_of_class(spec: str) -> list[str]:
    """Return the names of all devices of a class on this machine: `cuda` is every GPU, any other name is one device."""
    for device_class in _of_kind(spec):
        return device_class.all_of()
    return [spec]


def find_devices() -> list[tuple[str, DeviceInfo | DeviceFailure]]:
    """Return the name of each device on this machine, with its description or why it cannot be opened. Each is opened and closed."""
    return [entry for device_class in device_classes() for entry in device_class.available()]


def list_devices() -> list[DeviceInfo | DeviceFailure]:
    """Return the entries of `find_devices` without the names."""
    return [entry for _, entry in find_devices()]
