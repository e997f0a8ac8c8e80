"""A workaround for the PoCL 3.0 wheel on processors newer than its LLVM 14.

On a processor it does not know, that LLVM reports the name `generic`, which its own front end then refuses ("unknown
target CPU 'generic'", https://github.com/pocl/pocl/issues/1049): no kernel compiles. No option or environment variable of
3.0 changes the name. So the name is replaced in PoCL's device record of this process, by a generic name that LLVM 14
knows and whose instructions this processor has (`x86-64-v4`, `x86-64-v3` or `x86-64`).

The record's layout is private. So the name is replaced only for the wheel's exact build (3.0-rc2) on Linux on x86-64
whose device says `-generic`. The fields for driver version, target and processor name must point at the expected texts.
Otherwise compiling fails with PoCL's own message. Memory is read through /proc/self/mem, where a wrong address is an
error and not a crash.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from typing import Any, BinaryIO

from relax_tune.runtime.device import host

_VERSION = "3.0-rc2"
# Byte offsets of three neighbouring text fields in the device record of that build.
_DRIVER_FIELD, _TRIPLE_FIELD, _CPU_FIELD = 568, 632, 640
_TRIPLE = "x86_64-unknown-linux-gnu"
_UNKNOWN = "generic"
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The text PoCL's record points at from now on; it must live as long as the process.
_names: dict[str, ctypes.Array[ctypes.c_char]] = {}


def repair_target(device: Any) -> str:
    """Return the processor name that PoCL compiles for on this pyopencl device; empty when unknown.

    A wrong name in PoCL is repaired.
    """
    if "PoCL" not in str(device.platform.version):
        return ""
    reported = str(device.version).rpartition("gnu-")[2].strip()
    if reported != _UNKNOWN or str(device.driver_version) != _VERSION:
        return reported
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return reported
    wanted = _known_name()
    record = int(device.int_ptr)
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            if not _points_at(memory, record + _DRIVER_FIELD, _VERSION):
                return reported
            if not _points_at(memory, record + _TRIPLE_FIELD, _TRIPLE):
                return reported
            if _points_at(memory, record + _CPU_FIELD, wanted):
                return wanted  # repaired when the device was opened before
            if not _points_at(memory, record + _CPU_FIELD, _UNKNOWN):
                return reported
    except OSError:
        return reported
    text = _names.setdefault(wanted, ctypes.create_string_buffer(wanted.encode()))
    ctypes.c_void_p.from_address(record + _CPU_FIELD).value = ctypes.addressof(text)
    return wanted


def _points_at(memory: BinaryIO, field: int, text: str) -> bool:
    """Return True if the pointer stored at address `field` points at this NUL-terminated text. Raises OSError for an
    unmapped address.
    """
    memory.seek(field)
    (address,) = struct.unpack("<Q", memory.read(8))
    if not 4096 <= address < 2**47:
        return False
    wanted = text.encode() + b"\0"
    memory.seek(address)
    return memory.read(len(wanted)) == wanted


def _known_name() -> str:
    flags = host.cpu_flags()
    if flags >= _V4:
        return "x86-64-v4"
    return "x86-64-v3" if flags >= _V3 else "x86-64"
