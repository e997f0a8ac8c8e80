"""Programs and Python processes that run nothing of the current folder, which may be a downloaded model's.

`python -m` and `python -c` look for modules in the current folder first, and so do search paths with an empty or a relative entry.
Every child process is started by what is here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping

_SEARCH_PATHS = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
)
_PLACES_OF_PYTHON = ("PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONUSERBASE")


def interpreter() -> str:
    """Return the path of this Python."""
    return sys.executable


def python_command(*arguments: str) -> list[str]:
    """Return a command of this Python without the current folder among its modules (`-P`).

    Give it `clean_environment()`, whose PYTHONPATH does not name the current folder either.
    """
    return [interpreter(), "-P", *arguments]


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process, or these, without entries of search paths that depend on the current folder."""
    given = dict(os.environ if environment is None else environment)
    for name in _SEARCH_PATHS:
        if name in given:
            entries = [entry for entry in given.pop(name).split(os.pathsep) if os.path.isabs(entry)]
            if entries:
                given[name] = os.pathsep.join(entries)
    for name in _PLACES_OF_PYTHON:
        if name in given and not os.path.isabs(given[name]):
            del given[name]
    return given


def find_program(name: str) -> str | None:
    """Return the absolute path of a program, looked for in the absolute entries of PATH.

    None where it is missing, and for a relative path, whose meaning depends on the current folder.
    """
    if os.path.dirname(name):
        return shutil.which(name) if os.path.isabs(name) else None
    path = clean_environment().get("PATH")
    # without PATH the system's own folders count; an empty one would mean the current folder
    program = shutil.which(name, path=path or os.defpath.lstrip(os.pathsep))
    return program if program is not None and os.path.isabs(program) else None


def end_with_parent(descriptor: int = 0, grace_secs: float = 10.0) -> None:
    """End this process when its parent has ended, even if the parent was killed.

    The parent holds the other end of a pipe, which the system closes with the parent.

    Args:
        descriptor: The reading end of the pipe; everything that arrives there is discarded.
        grace_secs: Seconds from SIGTERM to the unconditional exit.
    """
    threading.Thread(target=_watch, args=(descriptor, grace_secs), name="parent", daemon=True).start()


def _watch(descriptor: int, grace_secs: float) -> None:
    # Unbuffered: at exit, the interpreter would wait for the lock of a buffered reader.
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_secs)
    os._exit(128 + signal.SIGTERM)
