"""The state of a unit, with a driver's tool that the tests write."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from relax_tune.tuner.measure.messages import UnitState
from relax_tune.tuner.measure.sensors import unit_state

HOST = socket.gethostname()


def tool(folder: Path, script: str) -> None:
    """Write an `nvidia-smi` of its own."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.process
def test_gpu_is_named_by_uuid_with_clock_and_temperature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool(tmp_path, 'for last; do :; done; test "$last" = --id=0000:0a:00.0 && echo "GPU-1234, 1980, 41"')
    assert unit_state("w", "pci:0000:0a:00.0") == UnitState("w", HOST, "GPU-1234", 1980.0, 41.0)
    assert unit_state("w", "pci:0000:0b:00.0") == UnitState("w", HOST, "pci:0000:0b:00.0")


@pytest.mark.process
def test_driver_without_sensors_leaves_clock_and_temperature_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool(tmp_path, 'echo "MIG-5, [N/A], [N/A]"')
    assert unit_state("w", "pci:0000:0a:00.0") == UnitState("w", HOST, "MIG-5")


def test_processor_is_named_by_host() -> None:
    assert unit_state("w", f"cpu:{HOST}") == UnitState("w", HOST, f"cpu:{HOST}")
