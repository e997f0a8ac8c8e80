"""`relax-tune warm`: artifacts opened once, so that later starts find their compiled kernels.

Tests: `tests/tuner/cli/test_warm.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.device.base import Device as OpenDevice
from relax_tune.runtime.device.binaries import cache_folder
from relax_tune.runtime.device.device_class import DeviceClass
from relax_tune.tuner.cli.commands.options import Device, Json, print_json
from relax_tune.tuner.cli.commands.run import RequireSignedOption, load_signed, open_model
from relax_tune.tuner.cli.report.console import make_console, say


def warm(
    artifacts: Annotated[list[Path], typer.Argument(metavar="ARTIFACT...", help="One or more .rta files.")],
    require_signed: RequireSignedOption = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Compile or verify everything that opening an artifact needs.

    Opens each artifact once. Compiled kernels go to the cache of compiled kernels (RELAX_TUNE_CACHE), where later starts of this user on
    such a processor find them, as when an image is built. A GPU's driver may still compile at the first launch.
    """
    console, entries = make_console(stderr=json), []
    for path in artifacts:
        start = time.perf_counter()
        loaded = load_signed(path, require_signed)
        with open_model(loaded, device) as model:
            devices = {id(e.device): e.device for e in model.executors.values()}
            opened = [_opened(one) for one in devices.values()]
        secs = time.perf_counter() - start
        entries.append({"artifact": str(path), "devices": opened, "stored": _stored(loaded), "secs": round(secs, 3)})
        for one in opened:
            say(console, f"{path}: {one['name']}: {_what(one)}")
        say(console, f"{path}: ready in {secs:.2f} s")
    folder = str(cache_folder())
    say(console, f"compiled kernels are in {folder}")
    if json:
        print_json({"artifacts": entries, "cache": folder})


def _stored(loaded: Artifact) -> list[str]:
    """Return the kinds of processors that an artifact has compiled kernels for."""
    return [objects.name for objects in loaded.objects]


def _opened(device: OpenDevice) -> dict[str, Any]:
    provenance = device.provenance() if isinstance(device, DeviceClass) else {}
    return {"kind": device.info.kind, "name": device.info.name, **provenance}


def _what(opened: dict[str, Any]) -> str:
    """Say where the kernels of a device came from."""
    if "libraries" not in opened:
        return "kernels compiled or cached by its driver"
    if opened["objects"] is not None:
        return f"{opened['libraries']} compiled objects of the artifact ({opened['objects']}) verified"
    cached = opened["libraries"] - opened["compiled"]
    return f"{opened['compiled']} libraries compiled, {cached} taken from the cache"
