"""The state of a physical device: its lasting name, clock and temperature, as far as its driver tells them."""

from __future__ import annotations

import shutil
import socket
import subprocess

from relax_tune.tuner.measure.messages import UnitState

_ASKING_SECS = 5.0
_FIELDS = "uuid,clocks.sm,temperature.gpu"


def unit_state(worker: str, unit: str) -> UnitState:
    """Describe a unit now. unit: `DeviceInfo.unit`; an NVIDIA GPU is named by its UUID instead"""
    host = socket.gethostname()
    told = _nvidia(unit.removeprefix("pci:")) if unit.startswith("pci:") else None
    if told is None:
        return UnitState(worker, host, unit)
    name, clock, celsius = told
    return UnitState(worker, host, name or unit, _number(clock), _number(celsius))


def _nvidia(bus: str) -> list[str] | None:
    """Ask NVIDIA's driver; None if there is none or it does not know the unit."""
    tool = shutil.which("nvidia-smi")
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
