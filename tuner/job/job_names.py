"""Names of running jobs, from which other processes see whether the job's process is alive.

A name is `RANDOM@HOST:PID:START:MACHINE`. MACHINE identifies one boot of one kernel, and the namespaces of its process
ids and times. START is when the process began. On that machine the name decides whether its process is alive, even if
another process has the same id by now. On other machines only a time limit helps.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import uuid
from functools import cache
from pathlib import Path

_NAME = re.compile(r"[0-9a-f]+@[^@]*:(\d{1,18}):(\d{1,18}):([0-9a-f]{16})")


def new_holder() -> str:
    """Return a name for a job of this process, different at each call."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    pid = os.getpid()
    started = _started(pid)
    machine = _machine() if started else None
    return f"{uuid.uuid4().hex[:16]}@{host}:{pid}:{started or 0}:{machine or '0' * 16}"


def lives(holder: str) -> bool | None:
    """Return whether the named process is alive; None if that is unknown.

    It is unknown for names of other machines, boots or containers, and on systems without /proc.
    """
    match = _NAME.fullmatch(holder)
    machine = _machine()
    if match is None or machine is None or match[3] != machine:
        return None
    pid, began = int(match[1]), int(match[2])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process: it exists, and its start may be unreadable
        pass
    started = _started(pid)
    return None if started is None else started == began


def _started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a process; None if they cannot be read.

    A zombie, which has ended but was not waited for, gives 0.
    """
    try:
        # The second field, the program's name in parentheses, may itself contain parentheses and spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    # starttime, field 22 of proc(5); the list begins at field 3
    return 0 if fields[0] in "ZX" else int(fields[19])


@cache
def _machine() -> str | None:
    """Identify the boot of this kernel and the namespaces of process ids and times; None off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Process ids may be compared within one pid namespace only, and start times within one time namespace.
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time")]
    except OSError:
        return None
    return hashlib.blake2b(":".join((boot, *spaces)).encode(), digest_size=8).hexdigest()
