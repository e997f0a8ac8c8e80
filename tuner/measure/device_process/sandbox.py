"""A sandbox for processes that run measured kernels: Landlock (Linux 5.13), seccomp, and namespaces.

Kernels in C, and in OpenCL with PoCL, have the rights of their process. The process keeps its open files. After it entered the sandbox
it may read and run programs, libraries and its own code, and write into its own folder. It can open no other files, no sockets
(`seccomp` lists the system calls that fail), send no signals to other processes (Linux 6.12) and not inspect them. Its network and IPC
namespaces are empty, where the system allows this, and it has no capabilities but the ones that a process of the administrator needs to
read files. Child processes inherit the restrictions.

Python bindings of Landlock have no stable release, and three system calls suffice.

Tests: `tests/tuner/measure/device_process/test_sandbox.py`, `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from relax_tune.runtime.child_process import find_program
from relax_tune.runtime.device.confinement import no_new_privileges
from relax_tune.tuner.measure.device_process.seccomp import restrict_system_calls

# landlock_create_ruleset, landlock_add_rule, landlock_restrict_self: calls this new have one number on all machines.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_NEW_IPC, _NEW_USER, _NEW_NET = 0x08000000, 0x10000000, 0x40000000
_CAPABILITIES_3 = 0x20080522
_READ_ALL = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: the files of the environment may belong to another user than the administrator."""
_LIST = 1 << 3
_READ = 1 | 1 << 2 | _LIST
"""Rights to run and read files, and to list folders."""
_OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that a rule for a file, not a folder, may grant: run, write, read, truncate, ioctl."""
_KNOWN = ((1, 13), (2, 14), (3, 15), (5, 16))
"""(version, number of file rights that it knows)."""
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/OpenCL", "/dev/zero",
    "/dev/urandom", "/sys", "/proc/sys", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version",
)  # fmt: skip
"""Paths of programs and libraries, and of the facts about the machine that they read."""
WRITTEN = ("/dev/null", "/dev/tty")


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has, 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(_syscall(_CREATE, None, 0, _VERSION), 0)


def enter_sandbox(folder: Path, read: Sequence[Path] = (), listing: bool = False) -> int:
    """Restrict this thread permanently, with the threads and processes that it starts from now on. Other threads are not affected.

    Args:
        folder: the only writable folder. Processes outside must open no file of it: kernels may put links there.
        read: further folders that may be read.
        listing: allow listing all folders; PoCL reads the machine's topology from the root folder.

    Returns:
        The version of Landlock; 0 if the kernel has none, and nothing changed.
    """
    version = landlock_version()
    if not version:
        return 0
    # Both Landlock and seccomp require this of processes without CAP_SYS_ADMIN (landlock(7), seccomp(2)).
    no_new_privileges()
    _enter_namespaces()
    rights = (1 << max(count for since, count in _KNOWN if since <= version)) - 1
    # `struct landlock_ruleset_attr`: rights on files, on TCP ports (since version 4), and scopes (since version 6).
    attributes = struct.pack("=QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_CREATE, ctypes.create_string_buffer(attributes, len(attributes)), size, 0)
    if ruleset < 0:
        return 0
    try:
        _allow(ruleset, [folder], rights)
        _allow(ruleset, WRITTEN, rights)
        _allow(ruleset, (*SYSTEM, *_own_places(), *read), _READ)
        _allow(ruleset, ["/proc/self"], _READ, keep=True)
        _allow(ruleset, ["/"] if listing else [], _LIST)
        if _syscall(_RESTRICT, ruleset, 0) != 0:
            return 0
    finally:
        os.close(ruleset)
    restrict_system_calls()
    return version


def _enter_namespaces() -> None:
    """Enter empty network and IPC namespaces where the system allows it, and drop capabilities.

    Users other than the administrator need a user namespace for this, in which they are the same user. Some systems forbid it, also
    after it was created, so a child process tries it first.
    """
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.unshare(_NEW_NET | _NEW_IPC)
        _keep_capabilities(_READ_ALL)
        return
    tried = os.fork()
    if tried == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if _own_user_namespace(libc) else 1
        os._exit(status)
    if os.waitpid(tried, 0)[1] == 0:
        _own_user_namespace(libc)
    _keep_capabilities(0)


def _own_user_namespace(libc: ctypes.CDLL) -> bool:
    """Enter new user, network and IPC namespaces as the same user and group."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC):
        return False
    # Without privileges, gid_map may be written only after setgroups was denied (user_namespaces(7)).
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return True


def _keep_capabilities(most: int) -> None:
    """Drop all capabilities of this thread that a bit mask does not contain."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_3, 0), 8)
    data = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None)
    if libc.capget(header, data):
        return
    effective, permitted, inheritable = struct.unpack_from("=III", data)
    reduced = struct.pack("=IIIIII", effective & most, permitted & most, inheritable & most, 0, 0, 0)
    libc.capset(header, ctypes.create_string_buffer(reduced, 24))


def _own_places() -> Iterator[str | Path]:
    """Yield the folders of this interpreter, this package, the loaded modules, and the compilers and libraries in variables."""
    yield from (sys.prefix, sys.base_prefix, *sys.path)
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
    compiler = find_program(os.environ.get("CC", "").partition(" ")[0] or "gcc")
    if compiler is not None:
        yield Path(compiler).resolve().parent


def _allow(ruleset: int, places: Iterable[str | Path], rights: int, keep: bool = False) -> None:
    """Add a rule for each path that exists.

    Args:
        keep: keep the path open. Under memory pressure /proc recreates its inodes, and rules refer to an inode.
    """
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
