"""Policies that choose among the placements of a function: by the plan, always the same, or by the load of the devices."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.program.placement import PlacedFunction, PlacementOption

WhenLost = Literal["fail", "move"]
RECENT = 0.5
"""Weight of the last call in the estimate of a device's load."""
FORGET = 0.98
"""Part of a device's extra load that is still believed after each call without it."""
LEAST_SECS = 1e-9
"""Seconds that the shortest work is taken to last, so that ratios are finite."""
BETTER = 0.8
"""Most of the present placement's time at which another is taken: noise does not move a model to and fro."""


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The choice of placements.

    policy: `plan`, by shapes as predicted when it was built; `load`, by predicted times and the measured load of the devices; or
        the kind of a device, or the name of a placement, for always that one
    when_lost: `fail`, a call on a lost device fails; `move`, it goes on with a placement without that device, if there is one
    """

    policy: str = "plan"
    when_lost: WhenLost | str = "fail"


def nearest_point(f: PlacedFunction, values: Mapping[str, int]) -> int:
    """Return the number of the point nearest to values of the symbols, on a log scale."""

    def distance(point: Sequence[int]) -> float:
        pairs = zip(f.symbols, point, strict=True)
        return sum(abs(math.log(max(values.get(s, x), 1) / max(x, 1))) for s, x in pairs)

    return min(range(len(f.points)), key=lambda i: distance(f.points[i]))


def predicted_secs(f: PlacedFunction, row: Sequence[float], values: Mapping[str, int]) -> float:
    """Return seconds at values of the symbols from those at the points: a straight line between two on log-log paper.

    row: seconds at each point
    """
    nearest = f.points[nearest_point(f, values)]
    size = math.prod(max(1, values.get(s, x)) for s, x in zip(f.symbols, nearest, strict=True))
    known = sorted(
        (math.log(max(1, math.prod(p))), math.log(max(t, LEAST_SECS))) for p, t in zip(f.points, row, strict=True)
    )
    # Times grow about as a power of the size, which is a straight line between logarithms.
    sizes, logs = zip(*known, strict=True)
    return math.exp(float(np.interp(math.log(size), sizes, logs)))


@dataclass(slots=True)
class DeviceLoad:
    """The load of devices: how many times longer the same work takes than at best. Pure bookkeeping, without a clock.

    best: by work and device the least of what it took; recent: by device a moving average of how many times longer it took
    """

    best: dict[tuple[object, str], float] = field(default_factory=dict)
    recent: dict[str, float] = field(default_factory=dict)

    def observe(self, work: object, measured: Mapping[str, float]) -> None:
        """Add what some work took on each device that it used. The load of others is slowly forgotten, so they are tried again.

        measured: seconds, or their ratio to the predicted seconds
        """
        for device, taken in measured.items():
            least = self.best[work, device] = min(taken, self.best.get((work, device), taken))
            self.recent[device] = RECENT * taken / max(least, LEAST_SECS) + (1 - RECENT) * self.slowdown(device)
        for device in set(self.recent) - set(measured):
            # Otherwise a device that was busy once would never be measured again.
            self.recent[device] = 1 + FORGET * (self.recent[device] - 1)

    def slowdown(self, device: str) -> float:
        """Return how many times longer work takes on a device than at best; 1 for a device that was not used yet."""
        return self.recent.get(device, 1.0)

    def secs(self, option: PlacementOption, point: int) -> float:
        """Return the seconds of a placement at a point under the present load."""
        calls = zip(option.devices, option.secs, strict=True)
        return sum(row[point] * self.slowdown(d) for d, row in calls) + option.moved[point]


@dataclass(slots=True)
class PlacementChooser:
    """A chooser of placements for the calls of one model. Threads may use it at once.

    lost: devices that failed
    """

    options: PlacementOptions
    functions: Mapping[str, PlacedFunction]
    load: DeviceLoad = field(default_factory=DeviceLoad)
    lost: dict[str, str] = field(default_factory=dict)
    _present: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        policy, known = self.options.policy, {"plan", "load"}
        for f in self.functions.values():
            known |= {a.function for a in f.alternatives} | {d for a in f.alternatives for d in a.devices}
        if policy not in known:
            raise UserError(f"policy of placement: expected one of {', '.join(sorted(known))}, got {policy!r:.80}")
        if self.options.when_lost not in ("fail", "move"):
            raise UserError(f"when_lost: expected fail or move, got {self.options.when_lost!r:.80}")

    def choose(self, function: str, values: Mapping[str, int]) -> int | None:
        """Return the number of the placement for a call; None lets the function choose by its plan.

        Raises: MeasureError when every placement needs a lost device.
        """
        f = self.functions[function]
        policy = self.options.policy
        with self._lock:
            left = [i for i, a in enumerate(f.alternatives) if not set(a.devices) & set(self.lost)]
            if not left:
                raise MeasureError(
                    f"{function}: expected a placement without {', '.join(self.lost)}, which was lost "
                    f"({next(iter(self.lost.values())):.200}), got none; open the model again where its devices are"
                )
            point = nearest_point(f, values)
            if policy == "load":
                return self._by_load(f, left, point)
            if policy == "plan" and not self.lost:
                return None
            matching = [i for i in left if policy in (f.alternatives[i].function, *f.alternatives[i].devices)]
            # A device's name prefers placements on that device only to placements that also use it; without either,
            # any that is left.
            exclusive = [i for i in matching if f.alternatives[i].devices == (policy,)]
            among = exclusive or matching or left
            return min(among, key=lambda i: f.alternatives[i].total(point))

    def _by_load(self, f: PlacedFunction, left: Collection[int], point: int) -> int:
        secs = {i: self.load.secs(f.alternatives[i], point) for i in left}
        best = min(secs, key=lambda i: (secs[i], i))
        present = self._present.get(f.function)
        if present in secs and secs[best] > BETTER * secs[present]:
            best = present
        self._present[f.function] = best
        return best

    def observe(self, function: str, option: int, values: Mapping[str, int], measured: Mapping[str, float]) -> None:
        """Tell what a call took on each device. It is compared with other calls near the same point, by what was predicted of both."""
        f = self.functions[function]
        a = f.alternatives[option]
        predicted = {d: predicted_secs(f, row, values) for d, row in zip(a.devices, a.secs, strict=True)}
        taken = {d: secs / predicted[d] for d, secs in measured.items() if d in predicted}
        with self._lock:
            self.load.observe((function, option, nearest_point(f, values)), taken)

    def lose(self, device: str, why: str) -> None:
        """Tell that a device failed."""
        with self._lock:
            self.lost[device] = why
