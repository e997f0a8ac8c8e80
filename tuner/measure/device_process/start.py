"""The start of a device process: `python -m relax_tune.tuner.measure.device_process.start SPEC READ_FD WRITE_FD PROGRESS_FILE MODE`.

MODE is `sandbox` or `bare`. Landlock holds threads that are there already by no means, and libraries of NumPy start some when they
are imported. So the sandbox is entered here, before the rest of the device process is imported.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from relax_tune.runtime.device.confinement import limit_process
from relax_tune.tuner.measure.device_process.sandbox import enter_sandbox

CONFINED = ("c", "opencl")
"""Kinds of devices whose kernels may run in the device process itself. Drivers of others reach many places."""


def main(arguments: list[str]) -> int:
    """Enter the sandbox where it is asked for and the kind of device allows it, and serve batches."""
    spec, progress, mode = arguments[0], Path(arguments[3]), arguments[4]
    limit_process()
    kind = spec.partition(":")[0]
    held = mode == "sandbox" and kind in CONFINED
    version = enter_sandbox(progress.parent, listing=kind == "opencl") if held else 0
    return int(importlib.import_module("relax_tune.tuner.measure.device_process.child").main(arguments, version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
