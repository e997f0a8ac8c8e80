"""Opening and listing devices by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from relax_tune.errors import BuildError, MeasureError, RelaxTuneError, UserError
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.cuda import CUDADevice, load_pycuda
from relax_tune.runtime.device.opencl import OpenCLDevice, all_devices


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """A device kind (`spec`) that cannot be opened here, and the sentence that says why."""

    spec: str
    reason: str


def open_device(spec: str) -> Device:
    """Open `c`, `opencl`, `opencl:PART` (part of a platform name, version or device name), or `cuda:NUMBER` (`cuda`:
    the first).

    Raises: UserError for another text, or when there is no such device (naming those there are). A device that exists
    but cannot be opened raises the same error, without waiting.
    """
    if not isinstance(spec, str):
        raise UserError(f"wanted the name of a device, found a {type(spec).__name__}; there are: {_known()}")
    kind, _, substring = spec.partition(":")
    try:
        if spec == "c":
            return CDevice()
        if kind == "opencl" and (substring or spec == "opencl"):
            return OpenCLDevice(substring or None)
        if kind == "cuda" and (spec == "cuda" or re.fullmatch(r"\d{1,3}", substring, re.ASCII)):
            return CUDADevice(int(substring or 0))
    except (BuildError, MeasureError) as error:
        raise UserError(f"device {spec!r} cannot be opened: {error}") from error
    raise UserError(
        f"wanted a device c, opencl, opencl:PART, cuda or cuda:NUMBER, found {spec!r:.80}; there are: {_known()}"
    )


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
        return f"c{_gpus()}, and no OpenCL device; pip install 'relax-tune[opencl]' gives one"
    return f"c{_gpus()}, and as opencl:PART, with PART any part of its text, {'; '.join(labels)}"


def _gpus() -> str:
    try:
        count = int(load_pycuda().Device.count())
    except BuildError:
        return ""
    return "".join(f", cuda:{number}" for number in range(count))


def list_devices() -> list[DeviceInfo | DeviceFailure]:
    """List the devices that can be opened, and the reason for each kind that cannot. Every device is opened and closed."""
    found: list[DeviceInfo | DeviceFailure] = [*_processors(), *_nvidia()]
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
