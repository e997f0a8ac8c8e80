"""The adapters of this machine, looked at in a process of their own.

Mesa's driver for the processor brings an LLVM with which PoCL's wheel compiles nothing more in the same process. So what only lists or
tries devices does not load it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.webgpu.device import WebGPUDevice, all_adapters, load_wgpu

_LIMIT_SECS = 120.0


def adapters_apart() -> list[tuple[str, DeviceInfo | str]]:
    """Return every adapter by label: what it is, or why it cannot be opened.

    Raises: BuildError without the package, and where listing ends in an error.
    """
    load_wgpu()  # the package alone loads no driver
    found = run_apart(["-m", __name__])
    listed: list[tuple[str, DeviceInfo | str]] = []
    for label, told in json.loads(found):
        listed.append((label, told if isinstance(told, str) else _info(told)))
    return listed


def run_apart(arguments: Sequence[str]) -> str:
    """Run Python with arguments in a process of its own, and return the last line that it prints. Raises BuildError where it fails."""
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=_LIMIT_SECS)
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"WebGPU: wanted an answer of the driver within {_LIMIT_SECS:g} s, found none; update the Vulkan driver"
        ) from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BuildError(
            f"WebGPU: wanted an answer of the driver, found that the process ended with {done.returncode} and said {said:.500}; "
            "update the Vulkan driver"
        )
    return (done.stdout.strip().splitlines() or [""])[-1]


def _info(told: dict[str, Any]) -> DeviceInfo:
    pairs = {name: tuple(map(tuple, told[name] or ())) for name in ("fingerprint", "limits")}
    libraries = None if told["libraries"] is None else tuple(map(tuple, told["libraries"]))
    return DeviceInfo(**{**told, **pairs, "libraries": libraries})


def main() -> None:
    """Print every adapter as JSON, as `adapters_apart` reads it."""
    listed: list[tuple[str, dict[str, Any] | str]] = []
    for label, _ in all_adapters():
        try:
            device = WebGPUDevice(label)
            listed.append((label, asdict(device.info)))
            device.close()
        except RelaxTuneError as error:
            listed.append((label, str(error)))
    print(json.dumps(listed))


if __name__ == "__main__":
    main()
