"""What the class of a device says about its kind, so that nothing else must know the kind.

Tests: `tests/runtime/device/test_registry.py`, `tests/recipes/test_add_device.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_tune.errors import RelaxTuneError
from relax_tune.runtime.device.base import Device, DeviceInfo, Turn
from relax_tune.runtime.device.service_kernels import ServiceKernels


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """A device (`spec`) that cannot be opened on this machine, and the reason."""

    spec: str
    reason: str


class DeviceClass:
    """Base of the classes of devices, which implement the `Device` contract (`base`) too.

    A class whose constructor takes no arguments sets `kind` and `service`; the other members have defaults that suit it. An
    installed distribution adds such a class by an entry point of the group `relax_tune.devices`.

    Attributes:
        kind: The first part of its names, as `--target KIND` or `KIND:PART`.
        forms: The forms of its names, for messages.
        service: Kernels for `doctor` and the measuring, in its language.
        compiles_in_threads: Whether several threads may compile at once: the compiler is a process, or releases the interpreter lock.
        probed_in_process: Whether `doctor` may load the driver into its own process.
    """

    kind: ClassVar[str]
    forms: ClassVar[tuple[str, ...]] = ()
    service: ClassVar[ServiceKernels]
    compiles_in_threads: ClassVar[bool] = False
    probed_in_process: ClassVar[bool] = True

    @classmethod
    def open_part(cls, part: str | None) -> Device | None:
        """Open the device `KIND` (None) or `KIND:PART`; None if the class has no such name.

        Raises:
            BuildError: A package, driver or compiler is missing.
            MeasureError: There is no such device, or it cannot be opened.
        """
        device: Any = cls
        return device() if part is None else None

    @classmethod
    def open_compiled(cls, part: str | None, objects: Sequence[Any]) -> Device | None:
        """Open the device, as `open_part`, for an artifact with compiled objects, which target `c` may use in place of a compiler."""
        return cls.open_part(part)

    def provenance(self) -> dict[str, Any]:
        """Return where the libraries of its kernels came from, as JSON values; nothing if the class does not count them."""
        return {}

    def new_turn(self) -> Turn:
        """Return a turn that nobody has, for a new device and for the fork of a process; see `Device.turn`."""
        return threading.RLock()

    @classmethod
    def available(cls) -> Iterator[tuple[str, DeviceInfo | DeviceFailure]]:
        """Yield the name of each device on this machine, with its description or why it cannot be opened."""
        try:
            device = cls.open_part(None)
        except RelaxTuneError as error:
            yield cls.kind, DeviceFailure(cls.kind, str(error))
            return
        if device is not None:
            info = device.info
            device.close()
            yield cls.kind, info

    @classmethod
    def choices(cls) -> str:
        """Return the names on this machine for messages, without opening a device; empty if there are none."""
        return cls.kind

    @classmethod
    def all_of(cls) -> list[str]:
        """Return the names of all devices that the kind without a part stands for when workers lend devices."""
        return [cls.kind]

    @classmethod
    def spec_of(cls, fingerprint: Mapping[str, Any]) -> str:
        """Return the name of the device of this machine with a fingerprint; the kind if it is not on this machine."""
        return cls.kind
