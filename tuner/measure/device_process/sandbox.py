"""A sandbox for processes that run measured kernels: Landlock, the kernel's own (Linux 5.13), and no network.

Kernels of C, and of OpenCL by PoCL, can call whatever their process can. The process keeps what it has open. From then on it may read
and run programs, libraries and its own code, write into its own folder, and nothing else: no other files, no TCP (Linux 6.7), no
signals to others (6.12), nothing of other processes. What it starts is held alike.

Bindings of Python to Landlock have no stable release, and three system calls suffice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_CLONE_NEWNET = 0x40000000
_LIST = 1 << 3
_READ = 1 | 1 << 2 | _LIST
"""Rights to run and read files, and to list folders."""
_OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that a rule for a file, not a folder, may give: run, write, read, truncate, ioctl."""
_KNOWN = ((1, 13), (2, 14), (3, 15), (5, 16))
"""(version, number of the rights to files that it knows)."""
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/OpenCL", "/dev/zero",
    "/dev/urandom", "/sys", "/proc/sys", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version",
)  # fmt: skip
"""Places of programs and libraries, and of what they read of the machine."""
WRITTEN = ("/dev/null", "/dev/tty")


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has, 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(_syscall(_CREATE, None, 0, _VERSION), 0)


def enter_sandbox(folder: Path, listing: bool = False) -> int:
    """Restrict this thread, and those and the processes that it starts from now on, for ever. Other threads stay as they are.

    folder: the one folder to write into
    listing: let all folders be listed, as PoCL wants: it looks at the machine from its root

    Returns the version of Landlock, 0 where the kernel has none and nothing changed."""
    version = landlock_version()
    if not version:
        return 0
    with contextlib.suppress(OSError, AttributeError):  # a user who may not, keeps what Landlock leaves of the network
        ctypes.CDLL(None).unshare(_CLONE_NEWNET)
    rights = (1 << max(count for since, count in _KNOWN if since <= version)) - 1
    attributes = struct.pack("=QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_CREATE, ctypes.create_string_buffer(attributes, len(attributes)), size, 0)
    if ruleset < 0:
        return 0
    try:
        _allow(ruleset, [folder], rights)
        _allow(ruleset, WRITTEN, rights)
        _allow(ruleset, (*SYSTEM, *_own_places()), _READ)
        _allow(ruleset, ["/proc/self"], _READ, keep=True)
        _allow(ruleset, ["/"] if listing else [], _LIST)
        return version if _syscall(_RESTRICT, ruleset, 0) == 0 else 0
    finally:
        os.close(ruleset)


def _own_places() -> Iterator[str | Path]:
    """Yield the folders of this interpreter, of this package and modules loaded, and of compilers and libraries by variables."""
    yield from (sys.prefix, sys.base_prefix, *sys.path[1:])  # the first is the current folder
    yield from {Path(f).resolve().parent for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    package = sys.modules[__name__.partition(".")[0]].__file__
    yield from Path(package or "").parent.iterdir()  # some are links to other folders
    for variable in (
        "PATH",
        "LD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "CPATH",
        "C_INCLUDE_PATH",
        "COMPILER_PATH",
        "OCL_ICD_VENDORS",
    ):
        yield from filter(None, os.environ.get(variable, "").split(os.pathsep))
    compiler = shutil.which(os.environ.get("CC", "").partition(" ")[0] or "gcc")
    if compiler is not None:
        yield Path(compiler).resolve().parent


def _allow(ruleset: int, places: Iterable[str | Path], rights: int, keep: bool = False) -> None:
    """Add a rule for each place that exists. keep: hold the place open, since /proc makes its own anew when it is short of memory"""
    for place in places:
        try:
            opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            given = rights if Path(place).is_dir() else rights & _OF_FILES
            rule = ctypes.create_string_buffer(struct.pack("=Qi", given, opened), 12)
            _syscall(_ADD, ruleset, _PATH_BENEATH, rule, 0)
        finally:
            if not keep:
                os.close(opened)


def _syscall(number: int, *arguments: object) -> int:
    try:
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))
    except (OSError, AttributeError):
        return -1
