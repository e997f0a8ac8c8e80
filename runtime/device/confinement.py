"""Limits of compilers and measured kernels: resources, privileges, and the environment variables they see.

Kernels are programs. One that is broken or hostile shall not take the machine's memory or disk, nor read secrets that other
programs of this user get by their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_tune.runtime.child_process import clean_environment

try:
    import resource
except ImportError:  # no such limits here, and no C device either
    resource = None  # type: ignore[assignment]

# linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38
FILE_BYTES = 4 << 30
"""Size of the largest file that a compiler or a measured kernel may write."""
MORE_THREADS = 4096
"""Threads that a user may start after the start of a device process."""
COMPILER_VARIABLES = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LC_\w+|LD_(?!PRELOAD)\w+|GCC_\w+|COMPILER_PATH|LIBRARY_PATH|CPATH|C_INCLUDE_PATH|CCACHE_\w+|SCCACHE_DIR"
    r"|NIX_\w+|CONDA_PREFIX|CONDA_BUILD_SYSROOT|SOURCE_DATE_EPOCH"
)
"""Names of the variables that gcc, its wrappers and the loader read. What is preloaded here is no part of a compiler."""
DEVICE_VARIABLES = re.compile(
    rf"{COMPILER_VARIABLES.pattern}|LD_PRELOAD|USER|LOGNAME|TZ|XDG_\w+|PYTHON\w*|VIRTUAL_ENV|CC|RELAX_TUNE_CACHE"
    r"|(OMP|GOMP|KMP|OPENBLAS|DNNL|ONEDNN|CLBLAST|CUDA|CUBLAS\w*|NVIDIA|NV|OCL|OPENCL|VK|WGPU|POCL|PYOPENCL|CL|INTEL|RUSTICL|MESA|ROCR|HSA|HIP"
    r"|GPU|MALLOC|ASAN|TSAN|UBSAN|COV|COVERAGE)_\w+|GLIBC_TUNABLES|NUMEXPR_\w+|MKL_\w+"
)
"""Names of the variables that a device process reads: variables of drivers, libraries, compilers and Python."""


def only(names: re.Pattern[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables whose names match, of this process by default, as `clean_environment` has them."""
    given = clean_environment(environment)
    return {name: value for name, value in given.items() if names.fullmatch(name)}


def no_new_privileges() -> None:
    """Let this thread and the programs it starts gain no privileges, as through setuid files (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def limited(command: Sequence[str], memory: int) -> list[str]:
    """Return the command with limits: `memory` bytes, files of `FILE_BYTES`, no core dumps."""
    # Set by a shell and not between fork and exec of this process, whose threads may hold locks there.
    limits = f"{{ ulimit -c 0; ulimit -f {FILE_BYTES // 512}; ulimit -v {memory // 1024}; }} 2>/dev/null"
    return ["/bin/sh", "-c", f'{limits}; exec "$@"', "sh", *command]


def limit_process() -> None:
    """Limit this process and those it starts: no core dumps, no new privileges, files of `FILE_BYTES`, processes."""
    no_new_privileges()
    # A core dump holds all weights of the model, and fills the disk when many candidates crash.
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    # It counts all threads of this user, so there must be room for threads of other programs. The administrator has no such limit.
    lower(resource.RLIMIT_NPROC, _threads_of_user() + MORE_THREADS)


def _threads_of_user() -> int:
    """Return the number of threads that this user has on the machine, as /proc shows them; 0 without it."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            status = entry.stat()
            # Two links of a folder are its name and its `.`; each subfolder, here one for each thread, has one more.
            count += status.st_nlink - 2 if status.st_uid == os.getuid() else 0
    return count


def lower(kind: int, most: int) -> None:
    """Set both limits of a resource to at most this."""
    soft, hard = resource.getrlimit(kind)
    least = [most if now == resource.RLIM_INFINITY else min(now, most) for now in (soft, hard)]
    resource.setrlimit(kind, (least[0], least[1]))


def limit_memory(more: int | None) -> None:
    """Let this process take `more` bytes of private memory than it has now (Linux). None: as many as it may."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            taken = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = hard if more is None else taken + more
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def marked_processes(mark: str) -> list[int]:
    """Return the processes of this user whose environment holds the text `mark`, as /proc shows them."""
    numbers = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(mark) in entry.read_bytes():
                numbers.append(int(entry.parent.name))
    return numbers
