"""OpenCL drivers that tests and experiments choose one by one: where their libraries are, and how each is offered."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from relax_tune.runtime.device.registry import open_device
from relax_tune.schedules.target import HardwareInfo

TEST_DEVICE = "RELAX_TUNE_TEST_OPENCL"
"""The variable with the part of a device's text (`opencl:PART`) that tests of OpenCL open instead of the default device."""


@dataclass(frozen=True)
class Driver:
    """A driver beside that of PoCL's wheel, which the other tests run on.

    part: text of its device that no other driver has
    install: command that installs it
    linked: name of its library for the linker; empty for one of a wheel
    file: place of its library in a wheel, under the environment's folder
    variables: variables that it needs to offer a device
    """

    name: str
    part: str
    install: str
    linked: str = ""
    file: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def library(self, prefix: str = sys.prefix) -> str | None:
        """Return the library of the driver as a line of an .icd file; None where it is not installed.

        prefix: folder of the environment that has the wheels
        """
        if self.linked:
            return ctypes.util.find_library(self.linked)
        found = Path(prefix, self.file)
        return str(found) if found.exists() else None

    def environment(self, folder: Path, prefix: str = sys.prefix) -> dict[str, str] | None:
        """Return the variables with which a process is offered this driver; None where it is not installed.

        folder: folder in which an .icd file is written
        prefix: folder of the environment that has the wheels
        """
        library = self.library(prefix)
        if library is None:
            return None
        (folder / "one.icd").write_text(f"{library}\n")
        paths = [os.path.dirname(library), os.environ.get("LD_LIBRARY_PATH", "")]
        own = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))} if self.file else {}
        return {"OCL_ICD_VENDORS": f"{folder}/", TEST_DEVICE: self.part, **own, **self.variables}


def device_name(kind: str) -> str:
    """Return the name of the device that tests of a kind open: of class `opencl` the one that TEST_DEVICE names."""
    part = os.environ.get(TEST_DEVICE) if kind == "opencl" else None
    return f"{kind}:{part}" if part else kind


def as_driven(machine: HardwareInfo) -> HardwareInfo:
    """Return a machine of OpenCL without what the device that TEST_DEVICE names lacks; the same if it names none."""
    if not os.environ.get(TEST_DEVICE):
        return machine
    device = open_device(device_name("opencl"))
    found = HardwareInfo.from_limits("opencl", dict(device.info.limits))
    device.close()
    return replace(machine, lanes=min(machine.lanes, found.lanes), has_doubles=found.has_doubles)


DRIVERS = (
    Driver("Debian's PoCL", "PoCL 3.1+debian", "apt-get install pocl-opencl-icd", linked="pocl"),
    Driver(
        "Mesa's rusticl",
        "rusticl",
        "apt-get install mesa-opencl-icd",
        linked="RusticlOpenCL",
        variables={"RUSTICL_ENABLE": "llvmpipe"},
    ),
    Driver(
        "Intel's runtime",
        "Intel(R) OpenCL",
        "pip install intel-opencl-rt intel-cmplr-lib-rt",
        file="lib/libintelocl.so",
    ),
)
