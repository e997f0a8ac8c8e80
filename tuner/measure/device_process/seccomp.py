"""A seccomp filter for device processes: system calls that neither kernels nor compilers need fail (Linux, x86-64 and aarch64).

Landlock restricts paths, TCP and signals. It does not restrict other sockets, modes, owners and times of files, watching folders,
truncation before Linux 6.2, shared memory of System V, the kernel's key rings, tracing, priorities of other processes, and most system
administration. The filter is a program of the classic BPF machine (`linux/filter.h`), about two instructions per system call. It is
inherited by all child processes and can never be removed.

The bindings of libseccomp need a library of the system that is not always installed, and the program is short.

Tests: `tests/tuner/measure/device_process/test_sandbox.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator, Mapping

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Instructions: load a word of the call's data; keep bits; return; jump where equal, where greater or equal, where a bit is set.
_LOAD, _AND, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT = 0x20, 0x54, 0x06, 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32
"""Offsets in `struct seccomp_data`: the number, the architecture, the lower words of the first three arguments (little-endian)."""

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines with a filter, and the constants of their architecture (`linux/audit.h`)."""
FIRST_UNKNOWN = 470
"""System calls from this number on are newer than this list, and fail as on a kernel that lacks them."""
NAMESPACES = 0x7E020000
"""Flags of `clone` that create namespaces."""
TRUNCATE = 0o1000
"""Flag of `open`. Landlock before Linux 6.2 restricts it only together with the flags of writing."""
_MODE = 3
"""Flags of `open` for reading (0), writing (1), both (2) and no access (3)."""
_PUSH_INPUT = (0x5412, 0x541C)
"""Requests of `ioctl` that write into the input of a terminal: TIOCSTI, TIOCLINUX."""

DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # sockets of all families; a pair of datagram sockets can send to any address
    "socket": (41, 198), "socketpair": (53, 199),
    # modes, owners, times and attributes of files, which Landlock does not restrict
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469), "mknod": (133, None), "mknodat": (259, 33), "truncate": (76, 45),
    # names of files, as they are opened or written
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    # memory, semaphores and queues that other processes share by number or name
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # interfaces of the kernel with a large attack surface
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None),
    # mounts, namespaces, and files by handle
    "mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "open_tree": (428, 428), "open_tree_attr": (467, 467), "mount_setattr": (442, 442),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # administration of the machine
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "syslog": (103, 116), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
}  # fmt: skip
"""System calls that fail with EPERM: numbers on x86-64 and on aarch64, None where a machine has no such call."""
CHECKED: Mapping[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
}
"""System calls that fail for some arguments: truncation of files that are not opened for writing, new namespaces, terminals, limits of
other processes. `clone3` and `openat2` pass their flags in memory, which a filter cannot read, so they fail as on an older kernel, and
the C library calls `clone`."""


def filter_program(machine: str) -> bytes:
    """Return the filter of a machine as an array of `struct sock_filter`.

    Raises:
        KeyError: there is no filter for this machine.
    """
    column = list(MACHINES).index(machine)
    numbers = {name: row[column] for name, row in (*DENIED.items(), *CHECKED.items())}
    return b"".join(struct.pack("=HBBI", *step) for step in _steps(MACHINES[machine], numbers))


def _steps(architecture: int, numbers: Mapping[str, int | None]) -> Iterator[tuple[int, int, int, int]]:
    """Yield instructions: code, instructions to skip if the condition holds and if it does not, operand."""
    refuse, missing, allow = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ALLOW
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture  # a process can also call the kernel as a 32-bit program
    yield _RETURN, 0, 0, refuse
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, FIRST_UNKNOWN  # also the numbers of the x32 ABI
    yield _RETURN, 0, 0, missing
    for name in DENIED:
        number = numbers[name]
        if number is not None:
            yield _EQUAL, 0, 1, number
            yield _RETURN, 0, 0, refuse
    for name in ("clone3", "openat2"):
        yield _EQUAL, 0, 1, numbers[name] or 0
        yield _RETURN, 0, 0, missing
    for number, flags in ((numbers["open"], _SECOND), (numbers["openat"], _THIRD)):
        if number is not None:
            yield _EQUAL, 0, 6, number
            yield _LOAD, 0, 0, flags
            yield _AND, 0, 0, TRUNCATE | _MODE
            yield _EQUAL, 1, 0, TRUNCATE
            yield _EQUAL, 0, 1, TRUNCATE | _MODE
            yield _RETURN, 0, 0, refuse
            yield _RETURN, 0, 0, allow
    yield _EQUAL, 0, 4, numbers["clone"] or 0
    yield _LOAD, 0, 0, _FIRST
    yield _ANY_BIT, 0, 1, NAMESPACES
    yield _RETURN, 0, 0, refuse
    yield _RETURN, 0, 0, allow
    yield _EQUAL, 0, 4, numbers["prlimit64"] or 0
    yield _LOAD, 0, 0, _FIRST
    yield _EQUAL, 1, 0, 0  # this process
    yield _RETURN, 0, 0, refuse
    yield _RETURN, 0, 0, allow
    yield _EQUAL, 0, 4, numbers["ioctl"] or 0
    yield _LOAD, 0, 0, _SECOND
    yield _EQUAL, 1, 0, _PUSH_INPUT[0]
    yield _EQUAL, 0, 1, _PUSH_INPUT[1]
    yield _RETURN, 0, 0, refuse
    yield _RETURN, 0, 0, allow


def restrict_system_calls() -> bool:
    """Install the filter for this thread and those it starts later, after `no_new_privileges`.

    Returns:
        False where the system or the machine has no filter.
    """
    machine = os.uname().machine if sys.platform == "linux" else ""
    if machine not in MACHINES or struct.calcsize("P") != 8:
        return False
    program = filter_program(machine)
    steps = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(steps)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    installed = prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.c_void_p(ctypes.addressof(header)), zero, zero
    )
    return bool(installed == 0)
