"""Opening devices by name, and listing those there are."""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.errors import BuildError, MeasureError, RelaxTuneError, UserError
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.opencl import OpenCLDevice, all_devices


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """A device kind (`spec`) that cannot be opened here, and the sentence that says why."""

    spec: str
    reason: str


def open_device(spec: str) -> Device:
    """Open `c`, `opencl`, or `opencl:<part of platform name, version or device name>`.

    Raises: UserError for another text, or when there is no such device (naming those there are). A device that exists
    but cannot be opened is the same error: nothing waits.
    """
    kind, _, substring = spec.partition(":")
    try:
        if spec == "c":
            return CDevice()
        if kind == "opencl" and (substring or spec == "opencl"):
            return OpenCLDevice(substring or None)
    except (BuildError, MeasureError) as error:
        raise UserError(f"device {spec!r} cannot be opened: {error}") from error
    raise UserError(f"wanted a device c, opencl or opencl:<name>, found {spec!r}; there are: {', '.join(_names())}")


def _names() -> list[str]:
    names = []
    for entry in list_devices():
        names.append(entry.spec + " (cannot be opened)" if isinstance(entry, DeviceFailure) else _spec(entry))
    return names


def _spec(info: DeviceInfo) -> str:
    facts = dict(info.fingerprint)
    return "c" if info.kind == "c" else f"{info.kind}:{facts.get('platform', info.name)}"


def list_devices() -> list[DeviceInfo | DeviceFailure]:
    """What can be opened here, and for each kind that cannot, why. Opens and closes every device."""
    found: list[DeviceInfo | DeviceFailure] = []
    try:
        found.append(CDevice().info)
    except RelaxTuneError as error:
        found.append(DeviceFailure("c", str(error)))
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
