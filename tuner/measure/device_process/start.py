"""The start of a device process: `python -m relax_tune.tuner.measure.device_process.start SPEC READ_FD WRITE_FD PROGRESS_FD MODE`.

MODE is `sandbox` or `bare`. Landlock does not restrict threads that exist already, and NumPy's libraries start threads when they are
imported. So the sandbox is entered here, before the rest of the device process is imported.

With `precompile` for PROGRESS_FD this is the start of a process that compiles ahead for a device process, which starts it. It
enters another sandbox over the same folder, and imports nothing before its first order.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import importlib
import os
import select
import subprocess
import sys
from pathlib import Path

from relax_tune.runtime.child_process import clean_environment, python_command
from relax_tune.runtime.device import host
from relax_tune.runtime.device.confinement import limit_process
from relax_tune.tuner.measure.device_process.sandbox import enter_sandbox

CONFINED = ("c", "opencl")
"""Kinds of devices that work in the sandbox: their kernels may run in the device process. Drivers of other kinds need more files."""
AHEAD = ("opencl",)
"""Kinds of devices that may compile within their process, and share compiled kernels with other processes (`precompiling`)."""
_MODULES = "relax_tune.tuner.measure.device_process"


def main(arguments: list[str]) -> int:
    """Enter the sandbox if MODE asks for it and the kind of device allows it, and serve batches or orders."""
    spec, progress, mode, folder = arguments[0], arguments[3], arguments[4], Path.cwd()
    limit_process()
    kind, ahead = spec.partition(":")[0], progress == "precompile"
    others = _start_precompiling(spec, mode) if not ahead and kind in AHEAD and host.usable_cpus() > 1 else None
    confined = mode == "sandbox" and kind in CONFINED
    version = enter_sandbox(folder, [folder.parent / "arrays"], listing=kind == "opencl") if confined else 0
    if ahead:
        read_from, write_to = map(int, arguments[1:3])
        select.select([read_from], [], [])  # an order, or the end of the device process
        return int(importlib.import_module(f"{_MODULES}.precompiling").main(spec, read_from, write_to))
    return int(importlib.import_module(f"{_MODULES}.child").main(arguments, version, others))


def _start_precompiling(spec: str, mode: str) -> tuple[int, int]:
    """Start the process that compiles ahead. Returns the ends of pipes from it and to it."""
    read_from, its_write = os.pipe()
    its_read, write_to = os.pipe()
    command = python_command("-m", f"{_MODULES}.start", spec, str(its_read), str(its_write), "precompile", mode)
    ends = its_read, its_write
    subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, env=clean_environment())
    os.close(its_read)
    os.close(its_write)
    return read_from, write_to


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
