"""PoCL's processor devices: serial driver, places of threads, and a workaround for processors newer than the 3.0 wheel's LLVM 14.

The driver with threads takes 30 to 50 us from a launch to its end, since its threads and the caller's sleep and wake. The
serial driver of the same platform runs a kernel within the call, in about 1 us, on the same memory. PoCL offers it only
where `POCL_DEVICES` names it, when its devices are first asked for. With `POCL_AFFINITY` each of its threads is pinned to a
separate processor; without, systems wake two of them on one processor, and short kernels of many groups take up to twice as long.

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
import os
import platform
import struct
import sys
import threading
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, BinaryIO

from relax_tune.errors import BuildError
from relax_tune.runtime.device import host

PLATFORM = "Portable Computing Language"
_SERIAL, _THREADS = "basic-", "pthread-"
_THREAD_COUNTS = ("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT")
"""Variables of the number of threads, in older versions and newer ones."""
_LINKED = (
    "libgcc_s.so.1", "libgcc_s.so", "libgcc.a", "libgcc_eh.a", "libc.so.6", "libc_nonshared.a", "libm.so.6", "libmvec.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
)  # fmt: skip
"""Files that linker scripts of GNU systems name."""
# Functions of a driver by cl_khr_icd, and the place of the second one in a platform's table.
_GET_PLATFORMS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
_GET_DEVICES = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p
)
_GET_DEVICES_PLACE, _ALL_TYPES = 2, 0xFFFFFFFF
_VERSION = "3.0-rc2"
# Byte offsets of three neighbouring text fields in the device record of that build.
_DRIVER_FIELD, _TRIPLE_FIELD, _CPU_FIELD = 568, 632, 640
_TRIPLE = "x86_64-unknown-linux-gnu"
_UNKNOWN = "generic"
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The text PoCL's record points at from now on; it must live as long as the process.
_names: dict[str, ctypes.Array[ctypes.c_char]] = {}
# Whether the wheel's library was asked for its devices: it reads `POCL_DEVICES` once in a process.
_asked: list[bool] = []
_lock = threading.Lock()


def offer_serial_driver() -> None:
    """Let the wheel's PoCL offer its serial driver too; called before any platform is asked for.

    The wheel's library is asked for its devices first, with `POCL_DEVICES` set only for that call: another PoCL in the process, whose
    drivers may have other names, does not see it. Nothing changes where the user chose `POCL_DEVICES`.
    """
    with _lock:
        if _asked or "POCL_DEVICES" in os.environ:
            return
        library = _wheel_library()
        if library is None:
            return
        os.environ["POCL_DEVICES"] = "pthread basic"
        try:
            _asked.append(_ask_for_devices(library))
        finally:
            del os.environ["POCL_DEVICES"]


def _wheel_library() -> Path | None:
    """Return the library of PoCL's wheel; None where it is not installed."""
    try:
        listed = files("pocl-binary-distribution") or ()
    except PackageNotFoundError:
        return None
    return next((Path(f.locate()) for f in listed if f.match("libpocl*.so")), None)


def _ask_for_devices(library: Path) -> bool:
    """Call `clGetDeviceIDs` of one driver, by the dispatch table that cl_khr_icd defines. Return False if that fails."""
    try:
        driver = ctypes.CDLL(str(library))
        address = driver.clGetExtensionFunctionAddress
    except (OSError, AttributeError):
        return False
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    function = address(b"clIcdGetPlatformIDsKHR")
    platform, count = ctypes.c_void_p(), ctypes.c_uint()
    if not function or _GET_PLATFORMS(function)(1, ctypes.byref(platform), None) or not platform:
        return False
    table = ctypes.cast(platform, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    return not _GET_DEVICES(table[_GET_DEVICES_PLACE])(platform, _ALL_TYPES, 0, None, ctypes.byref(count))


def check_current_folder() -> None:
    """Raise BuildError if PoCL's linker would link a file of the current folder into kernels.

    PoCL starts the system's linker in the current folder. Scripts of that linker, such as libgcc_s.so, name other files without a
    folder, and it looks for these in the current folder first.
    """
    for name in _LINKED:
        if os.path.lexists(name):
            raise BuildError(
                f"OpenCL: expected a current folder without {name}, which PoCL's linker would take for the system's, got one in "
                f"{os.getcwd()}; start the program in another folder"
            )


def choose_threads() -> None:
    """Choose how many threads PoCL has, and let it pin each to a processor; called before any platform is asked for.

    It has as many as kernels of target `c` (`host.worker_threads`) unless the user chose otherwise. It pins them only where it has one
    for every processor. It would end a process whose threads it cannot place, and the threads of several containers on one machine would
    all be pinned to the first processors.
    """
    threads, processors = host.worker_threads(), os.cpu_count() or 1
    if threads < processors and not any(name in os.environ for name in _THREAD_COUNTS):
        os.environ |= dict.fromkeys(_THREAD_COUNTS, str(threads))
    if "POCL_AFFINITY" not in os.environ and threads == processors:
        os.environ["POCL_AFFINITY"] = "1"


def is_serial(device: Any) -> bool:
    """Return True for a device of PoCL's serial driver."""
    return bool(device.platform.name == PLATFORM and device.name.startswith(_SERIAL))


def serial_twin(device: Any) -> Any | None:
    """Return the device of PoCL's serial driver for this device with threads; None if there is none."""
    if device.platform.name != PLATFORM or not device.name.startswith(_THREADS):
        return None
    twin = next((d for d in device.platform.get_devices() if is_serial(d)), None)
    if twin is not None:
        repair_target(twin)
    return twin


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
    name = _known_name()
    record = int(device.int_ptr)
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            if not _points_at(memory, record + _DRIVER_FIELD, _VERSION):
                return reported
            if not _points_at(memory, record + _TRIPLE_FIELD, _TRIPLE):
                return reported
            if _points_at(memory, record + _CPU_FIELD, name):
                return name  # repaired when the device was opened before
            if not _points_at(memory, record + _CPU_FIELD, _UNKNOWN):
                return reported
    except OSError:
        return reported
    text = _names.setdefault(name, ctypes.create_string_buffer(name.encode()))
    ctypes.c_void_p.from_address(record + _CPU_FIELD).value = ctypes.addressof(text)
    return name


def _points_at(memory: BinaryIO, field: int, text: str) -> bool:
    """Return True if the pointer stored at address `field` points at this NUL-terminated text. Raises OSError for an
    unmapped address.
    """
    memory.seek(field)
    (address,) = struct.unpack("<Q", memory.read(8))
    # The first page is never mapped, and user space on x86-64 ends at 2^47: any other value is no pointer.
    if not 4096 <= address < 2**47:
        return False
    expected = text.encode() + b"\0"
    memory.seek(address)
    return memory.read(len(expected)) == expected


def _known_name() -> str:
    flags = host.cpu_flags()
    if flags >= _V4:
        return "x86-64-v4"
    return "x86-64-v3" if flags >= _V3 else "x86-64"
