"""Metrics of a scheduler and of the units that workers lend to it, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from relax_tune.database.reference import kernels_of
from relax_tune.printable import printable
from relax_tune.tuner.measure.cluster.fleet import LentDevice, lent_devices, silence_of

STATES = ("lent", "quarantined", "silent")
_UNIT = ("worker", "host", "unit", "device")


class FleetCollector:
    """A Prometheus collector over the Dask scheduler of this process. It is called from another thread while the scheduler runs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        from prometheus_client.core import GaugeMetricFamily

        # Copied, because the scheduler's thread adds and removes workers meanwhile.
        workers = list(self._scheduler.workers.values())
        devices = lent_devices({w.address: {"metrics": w.metrics, "last_seen": w.last_seen} for w in workers})
        under_way = sum(len(w.processing) for w in workers)
        yield GaugeMetricFamily(
            "relax_tune_fleet_jobs", "Jobs and other clients that are connected.", len(self._scheduler.clients)
        )
        yield GaugeMetricFamily("relax_tune_fleet_batches", "Batches that workers measure or hold.", under_way)
        states = Counter((d.label, state_of(d, len(workers))) for d in devices)
        count = GaugeMetricFamily(
            "relax_tune_fleet_units", "Lent devices by class and state.", labels=["device", "state"]
        )
        for label in sorted({d.label for d in devices}):
            for state in STATES:
                count.add_metric([printable(label), state], states[label, state])
        yield count
        yield from _units(devices)


def _units(devices: list[LentDevice]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    measured = CounterMetricFamily("relax_tune_unit_batches", "Batches by result.", labels=[*_UNIT, "result"])
    quarantined = GaugeMetricFamily("relax_tune_unit_quarantined", "1 while a unit is quarantined.", labels=_UNIT)
    silent = GaugeMetricFamily(
        "relax_tune_unit_silent_seconds", "Time since the last heartbeat of the worker.", labels=_UNIT
    )
    times = GaugeMetricFamily(
        "relax_tune_unit_reference_seconds",
        "Time of a reference kernel at the start and at the last check.",
        labels=[*_UNIT, "kernel", "at"],
    )
    for device in devices:
        where = [printable(text) for text in (device.worker, device.host, device.unit, device.label)]
        measured.add_metric([*where, "measured"], device.measured)
        measured.add_metric([*where, "refused"], device.refused)
        quarantined.add_metric(where, float(bool(device.quarantine)))
        silent.add_metric(where, device.silent_secs)
        for at, secs_by_kernel in (("start", device.reference), ("check", device.latest)):
            for kernel in kernels_of(secs_by_kernel):
                times.add_metric([*where, printable(kernel), at], secs_by_kernel[kernel])
    yield from (measured, quarantined, silent, times)


def state_of(device: LentDevice, workers: int) -> str:
    """Return one of `STATES`. workers: number of all workers"""
    if device.silent_secs >= silence_of(workers):
        return "silent"
    return "quarantined" if device.quarantine else "lent"
