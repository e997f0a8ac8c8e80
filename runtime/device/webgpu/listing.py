"""Running Python in a separate process, where a driver that it loads disturbs no other, and listing adapters so.

Mesa's driver for the processor brings an LLVM with which PoCL's wheel cannot compile in the same process. So a process that only
lists or probes devices does not load it. Tests: `tests/runtime/device/test_webgpu.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from relax_tune.errors import BuildError
from relax_tune.runtime.child_process import clean_environment, python_command
from relax_tune.runtime.device.base import DeviceInfo

_LIMIT_SECS = 120.0


def listed_adapters(module: str) -> list[tuple[str, DeviceInfo | str]]:
    """Return every adapter by label: its description, or why it cannot be opened.

    Args:
        module: The module whose `main` prints them.

    Raises:
        BuildError: Listing ends in an error.
    """
    adapters: list[tuple[str, DeviceInfo | str]] = []
    for label, entry in json.loads(run_separately(["-m", module])):
        adapters.append((label, entry if isinstance(entry, str) else _info(entry)))
    return adapters


def run_separately(arguments: Sequence[str]) -> str:
    """Run Python with arguments in a separate process; return the last line that it prints. Raises BuildError where it fails."""
    try:
        done = subprocess.run(
            python_command(*arguments),
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECS,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"WebGPU: expected an answer of the driver within {_LIMIT_SECS:g} s, got none; update the Vulkan driver"
        ) from None
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BuildError(
            f"WebGPU: expected an answer of the driver, but the process ended with {done.returncode} with {last_line:.500}; "
            "update the Vulkan driver"
        )
    return (done.stdout.strip().splitlines() or [""])[-1]


def _info(fields: dict[str, Any]) -> DeviceInfo:
    pairs = {name: tuple(map(tuple, fields[name] or ())) for name in ("fingerprint", "limits")}
    libraries = None if fields["libraries"] is None else tuple(map(tuple, fields["libraries"]))
    return DeviceInfo(**{**fields, **pairs, "libraries": libraries})
