"""The state of a physical device: persistent name, clock and temperature, as far as the driver reports them."""

from __future__ import annotations

import socket
import subprocess

from relax_tune.runtime.child_process import find_program
from relax_tune.tuner.measure.messages import UnitState

_ASKING_SECS = 5.0
_FIELDS = "uuid,clocks.sm,temperature.gpu"


def unit_state(worker: str, unit: str) -> UnitState:
    """Describe the present state of a unit.

    Args:
        unit: `DeviceInfo.unit`. The result names NVIDIA GPUs by UUID instead.
    """
    host = socket.gethostname()
    fields = _nvidia(unit.removeprefix("pci:")) if unit.startswith("pci:") else None
    if fields is None:
        return UnitState(worker, host, unit)
    name, clock, celsius = fields
    return UnitState(worker, host, name or unit, _number(clock), _number(celsius))


def _nvidia(bus: str) -> list[str] | None:
    """Query NVIDIA's driver; None without a driver, or if it does not know the unit."""
    tool = find_program("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--id={bus}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_SECS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    return fields if done.returncode == 0 and len(fields) == len(_FIELDS.split(",")) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # `[N/A]`
        return None
