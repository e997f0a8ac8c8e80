"""The devices of programs in an artifact for several devices: a field of the manifest.

Tests: `tests/runtime/vm/test_machine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program.program import LANGUAGES
from relax_tune.runtime.validation import check_shown, read_value, wrong


@dataclass(frozen=True, slots=True)
class PartDevice:
    """The kind of the device that runs a program."""

    program: str
    device: str


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One placement of a function: another host program with the same meaning.

    function: the host program
    devices: kinds of the devices that run its calls; runs: the one of each call of the function
    where: the shapes that it is chosen for, as text; empty for a spare one
    secs: for each of the devices, predicted seconds of its calls at each point of the function
    moved: predicted seconds of the transfers at each point
    """

    function: str
    devices: tuple[str, ...]
    runs: tuple[str, ...]
    where: str
    secs: tuple[tuple[float, ...], ...]
    moved: tuple[float, ...]

    def total(self, point: int) -> float:
        """Return the predicted seconds at a point."""
        return sum(row[point] for row in self.secs) + self.moved[point]


@dataclass(frozen=True, slots=True)
class PlacedFunction:
    """The placements of a function.

    symbols: names of its symbols; points: their values at which times are predicted
    calls: its calls by the names of their tensor functions
    alternatives: its placements. The function itself chooses among them by the values of its symbols
    """

    function: str
    symbols: tuple[str, ...]
    points: tuple[tuple[int, ...], ...]
    calls: tuple[str, ...]
    alternatives: tuple[PlacementOption, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each program. Empty for an artifact for one device."""

    parts: tuple[PartDevice, ...] = ()
    functions: tuple[PlacedFunction, ...] = ()

    @property
    def devices(self) -> dict[str, str]:
        """The kind of the device of each program, by name."""
        return {p.program: p.device for p in self.parts}

    def fields(self) -> dict[str, Any]:
        """Return the field of the manifest; none for an artifact for one device."""
        return {"placement": json.loads(json.dumps(asdict(self)))} if self.parts else {}


NOWHERE = Placement()


def placement_from_json(manifest: Mapping[str, Any]) -> Placement:
    """Read the placement of a manifest. Raises ArtifactError for anything else than `Placement.fields` makes."""
    if "placement" not in manifest:
        return NOWHERE
    data = manifest["placement"]
    placement: Placement = read_value(Placement, data if isinstance(data, dict) else {"parts": data}, "placement")
    for at, part in enumerate(placement.parts):
        if part.device not in LANGUAGES:
            raise wrong(f"placement.parts[{at}].device", f"one of {', '.join(LANGUAGES)}", part.device)
        check_shown(f"placement.parts[{at}].program", part.program)
    for at, f in enumerate(placement.functions):
        where = f"placement.functions[{at}]"
        if any(len(p) != len(f.symbols) for p in f.points):
            raise wrong(f"{where}.points", f"{len(f.symbols)} values at each point", f.points)
        for a in f.alternatives:
            rows = (*a.secs, a.moved)
            if len(a.secs) != len(a.devices) or any(len(row) != len(f.points) for row in rows):
                raise wrong(f"{where}.alternatives", "a time for each device at each point", a.function)
            check_shown(f"{where}.alternatives.where", a.where)
            if len(a.runs) != len(f.calls) or not set(a.runs) <= set(a.devices):
                raise wrong(f"{where}.alternatives", "a device for each call", a.runs)
            if not set(a.devices) <= set(LANGUAGES):
                raise wrong(f"{where}.alternatives", f"devices among {', '.join(LANGUAGES)}", a.devices)
    if len(placement.devices) != len(placement.parts):
        raise ArtifactError("placement.parts: expected each program once, got one twice")
    return placement


def explain_placement(placement: Placement) -> str:
    """Return a table as text: for each function, where its calls run for which shapes, and the predicted times that say why."""
    lines: list[str] = []
    for f in placement.functions:
        lines.append(f"{f.function}: {len(f.calls)} calls on {', '.join(sorted(set(placement.devices.values())))}")
        for a in f.alternatives:
            lines.append(f"  {a.function}, {a.where or 'spare: for a device that is slow or lost'}")
            for device in a.devices:
                calls = [c for c, d in zip(f.calls, a.runs, strict=True) if d == device]
                lines.append(f"    on {device}: {', '.join(calls)}")
        for number, point in enumerate(f.points):
            shape = ", ".join(f"{s} = {x}" for s, x in zip(f.symbols, point, strict=True)) or "always"
            lines.append(f"  predicted at {shape}")
            for a in f.alternatives:
                parts = [f"{row[number] * 1e6:.1f} us on {d}" for d, row in zip(a.devices, a.secs, strict=True)]
                parts.append(f"{a.moved[number] * 1e6:.1f} us of transfers")
                lines.append(f"    {a.function}: {a.total(number) * 1e6:.1f} us: {', '.join(parts)}")
    return "\n".join(lines)
