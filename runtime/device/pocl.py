"""Making the PoCL 3.0 wheel work on processors newer than the LLVM 14 inside it.

On a processor it does not know, that LLVM reports the name `generic`, which its own front end then refuses ("unknown
target CPU 'generic'", https://github.com/pocl/pocl/issues/1049): no kernel compiles. No option or environment variable of
3.0 changes the name. So the name is replaced where PoCL keeps it, in the device record of this process, by a generic name
LLVM 14 does know and whose instructions this processor has (`x86-64-v4`, `x86-64-v3` or `x86-64`).

The record's layout is private, hence the care: only PoCL 3.0, only when its device says `-generic`, only on Linux on
x86-64, only when exactly one field of the record points at the text `generic`. Anything else is left alone, and
compiling then fails with PoCL's own message. Memory is read through /proc/self/mem, where a wrong address is an error
and not a crash.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from typing import Any

from relax_tune.runtime.device import host

_RECORD_BYTES = 2048
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The texts PoCL's records point at from now on; they must live as long as the process.
_names: dict[str, ctypes.Array[ctypes.c_char]] = {}


def repair_target(device: Any) -> str:
    """The processor name PoCL compiles for on this pyopencl device, repaired where it must be; empty when unknown."""
    version = str(device.platform.version)
    reported = str(device.version).rpartition("gnu-")[2]
    if "PoCL" not in version:
        return ""
    if not reported.startswith("generic") or "PoCL 3.0" not in version:
        return reported
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return reported
    wanted = _known_name()
    record = int(device.int_ptr)
    pointers = _pointers_to(record, {b"generic\0", *(name.encode() + b"\0" for name in _names)})
    if len(pointers) != 1:
        return reported
    text = _names.setdefault(wanted, ctypes.create_string_buffer(wanted.encode()))
    ctypes.c_void_p.from_address(pointers[0]).value = ctypes.addressof(text)
    return wanted


def _known_name() -> str:
    flags = host.cpu_flags()
    if flags >= _V4:
        return "x86-64-v4"
    return "x86-64-v3" if flags >= _V3 else "x86-64"


def _pointers_to(record: int, texts: set[bytes]) -> list[int]:
    """Addresses of the record's fields that point at one of these texts."""
    longest = max(len(text) for text in texts)
    found: list[int] = []
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(record)
            fields = memory.read(_RECORD_BYTES)
            for offset in range(0, len(fields) - 7, 8):
                (address,) = struct.unpack_from("<Q", fields, offset)
                if not 4096 <= address < 2**47:
                    continue
                try:
                    memory.seek(address)
                    text = memory.read(longest)
                except OSError:
                    continue
                if any(text.startswith(wanted) for wanted in texts):
                    found.append(record + offset)
    except OSError:
        return []
    return found
