"""The worker's side: one physical unit with its device processes and reference times, which measures or rejects batches.

Tests: `tests/tuner/measure/cluster/test_fleet.py`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.cluster.fleet import label_of
from relax_tune.tuner.measure.cluster.identity import PROTOCOL, differences, identity_of, protocol_misfit
from relax_tune.tuner.measure.codec import decode_batch, decode_device, encode_results
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.reference import TOLERANCE, Reference, disagreement, measure_reference
from relax_tune.tuner.measure.unit_lock import UnitLock

LOCK_SECS = 60.0
"""Seconds that a worker waits for the unit's lock at its start."""
CHECK_SECS = 3600.0
"""Seconds between two checks of a unit with the reference kernels."""
QUIET_SECS = 15.0
"""Seconds that a worker waits for quiet moments when it times the reference kernels."""
ANY_TIMES = 10.0
"""Tolerance from which no load of the machine matters, so that no quiet moment is waited for."""

OpenRunner = Callable[[str, str], Runner]


class LentUnit:
    """One unit of this host with the devices that it lends. One batch or check runs on it at a time.

    A batch names its device and reference times. If this unit has others, or has drifted since its start, the batch is rejected with
    a reason.

    Args:
        open_runner: opens the runner of (spec, worker name).
        report: receives a sentence when the unit's state changes.
        lock_secs: how long to wait for local jobs, which lock the unit for each batch.

    Raises:
        MeasureError: a device cannot be opened, the specs belong to several units, or another worker of the host holds the unit.
    """

    def __init__(
        self,
        specs: Sequence[str],
        worker: str,
        tolerance: float = TOLERANCE,
        open_runner: OpenRunner = lambda spec, worker: LocalRunner(spec, worker=worker, lock=False),
        report: Callable[[str], None] = lambda _: None,
        lock_secs: float = 0.0,
    ) -> None:
        self.worker = worker
        self.tolerance = tolerance
        self.quarantine = ""
        self.measured, self.refused = 0, 0
        self._report = report
        self._turn = threading.Lock()
        self._runners: dict[str, Runner] = {}
        self._lock: UnitLock | None = None
        try:
            for spec in specs:
                self._runners[label_of(spec)] = open_runner(spec, worker)
            units = {runner.device_info().unit for runner in self._runners.values()}
            if len(units) != 1:
                raise MeasureError(
                    f"expected devices of one physical unit for the worker {worker}, got {', '.join(sorted(units))}; start "
                    "a worker for each"
                )
            self.unit = units.pop() or f"{socket.gethostname()}:{'+'.join(specs)}"
            self._lock = UnitLock(self.unit, worker, lock_secs, lends=True)
            self._first = self._times()
            self._latest = self._first
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Time the reference kernels again, and quarantine a unit that has drifted, or end its quarantine."""
        with self._turn:
            latest = self._times()
        self._latest = latest
        lines = [disagreement(self._first[label], times, self.tolerance) for label, times in latest.items()]
        before, self.quarantine = self.quarantine, "; ".join(filter(None, lines))
        if self.quarantine:
            self._report(
                f"worker {self.worker}: unit {self.unit} is quarantined, since it has drifted or is shared: "
                f"{self.quarantine}; `relax-tune db prune --worker {self.worker} --since MOMENT` removes its records"
            )
        elif before:
            self._report(f"worker {self.worker}: unit {self.unit} is as fast as at the start and is lent again")

    def describe(self, label: str) -> str:
        """Return a device's `DeviceInfo` as JSON text. Raises MeasureError for a label that is not lent."""
        return json.dumps(asdict(self._runner(label).device_info()))

    def state(self) -> dict[str, Any]:
        """Return the description of this unit for the scheduler, by label."""
        return {
            label: {
                "protocol": PROTOCOL,
                "worker": self.worker,
                "host": socket.gethostname(),
                "unit": self.unit,
                "identity": identity_of(info),
                "facts": " | ".join(f"{name}={text}" for name, text in (*info.fingerprint, *(info.libraries or ()))),
                "about": " | ".join([info.name, dict(info.fingerprint).get("platform", "")]),
                "reference": dict(self._first[label]),
                "tolerance": self.tolerance,
                "quarantine": self.quarantine,
                "latest": dict(self._latest[label]),
                "measured": self.measured,
                "refused": self.refused,
            }
            for label, info in ((label, runner.device_info()) for label, runner in self._runners.items())
        }

    def measure(self, label: str, requirement: str, batch: str) -> str:
        """Measure a batch.

        Args:
            requirement: text of `identity.requirement_text`.
            batch: text of `codec.encode_batch`.

        Returns:
            Text of `codec.encode_results`, or a JSON object whose `refused` is the reason of a rejection.
        """
        refusal = self._refusal(label, requirement)
        if refusal:
            self.refused += 1
            return json.dumps({"refused": f"worker {self.worker}: {refusal}"})
        with self._turn:
            results = self._runner(label).submit(decode_batch(batch)).result()
            self.measured += 1
            return encode_results(results)

    def _refusal(self, label: str, requirement: str) -> str:
        if self.quarantine:
            return f"unit {self.unit} is quarantined: {self.quarantine}"
        document = json.loads(requirement)
        if other := protocol_misfit(document.get("protocol", 1)):
            return other
        device, reference = decode_device(document.get("device")), dict(document.get("reference") or {})
        different = differences(device, self._runner(label).device_info())
        return different or disagreement(reference, self._first[label], self.tolerance)

    def _times(self) -> dict[str, Reference]:
        patience = QUIET_SECS if self.tolerance < ANY_TIMES else 0.0
        return {label: measure_reference(runner, patience) for label, runner in self._runners.items()}

    def _runner(self, label: str) -> Runner:
        if label not in self._runners:
            raise MeasureError(
                f"expected a device {label!r} of the worker {self.worker}, got {', '.join(self._runners)}; ask for one of them"
            )
        return self._runners[label]

    def close(self) -> None:
        """Close the devices and release the unit."""
        for runner in self._runners.values():
            runner.close()
        if self._lock is not None:
            self._lock.release()
