"""The start of a device process: `python -m relax_tune.tuner.measure.device_process.start SPEC READ_FD WRITE_FD PROGRESS_FD MODE`.

MODE is `sandbox` or `bare`. Landlock does not restrict threads that exist already, and NumPy's libraries start threads when they are
imported. So the sandbox is entered here, before the rest of the device process is imported.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from relax_tune.runtime.device.confinement import limit_process
from relax_tune.tuner.measure.device_process.sandbox import enter_sandbox

CONFINED = ("c", "opencl")
"""Kinds of devices that work in the sandbox: their kernels may run in the device process. Drivers of other kinds need more files."""


def main(arguments: list[str]) -> int:
    """Enter the sandbox if MODE asks for it and the kind of device allows it, and serve batches."""
    spec, mode, folder = arguments[0], arguments[4], Path.cwd()
    limit_process()
    kind = spec.partition(":")[0]
    confined = mode == "sandbox" and kind in CONFINED
    version = enter_sandbox(folder, [folder.parent / "arrays"], listing=kind == "opencl") if confined else 0
    return int(importlib.import_module("relax_tune.tuner.measure.device_process.child").main(arguments, version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
