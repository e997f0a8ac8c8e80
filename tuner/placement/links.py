"""Links: how long an array takes between the host's memory and a device's, measured and stored as records.

Tests: `tests/tuner/placement/test_links.py`.
"""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relax_tune.database.records import Measurement, Target, VariantRecord, Workload
from relax_tune.database.store import Store
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.dtype import u8
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.memory.buffer_pool import pool_of
from relax_tune.tuner.task.task import FORMAT_VERSION

Way = Literal["up", "down"]
WAYS: tuple[Way, ...] = ("up", "down")
SIZES = (256, 16 << 10, 256 << 10, 4 << 20)
"""Bytes that a link is timed with."""
REPEATS = 15


@dataclass(frozen=True, slots=True)
class Link:
    """The way between the host's memory and a device's.

    Attributes:
        up_latency, up_bandwidth: Seconds before the first byte to the device, and bytes per second after it.
        down_latency, down_bandwidth: The same from the device.
    """

    up_latency: float
    up_bandwidth: float
    down_latency: float
    down_bandwidth: float

    def up(self, nbytes: int) -> float:
        """Return the seconds of an array to the device."""
        return self.up_latency + nbytes / self.up_bandwidth

    def down(self, nbytes: int) -> float:
        """Return the seconds of an array from the device."""
        return self.down_latency + nbytes / self.down_bandwidth


def time_link(
    device: Device, clock: Callable[[], float] = time.perf_counter
) -> dict[tuple[Way, int], tuple[float, ...]]:
    """Time arrays of several sizes to a device and back, through the memory pool that calls use, until each transfer is complete.

    A device that shares the host's memory gives no times.
    """
    pool = pool_of(device)
    times: dict[tuple[Way, int], tuple[float, ...]] = {}
    if pool is None:
        return times
    try:
        for nbytes in SIZES:
            array = np.zeros(nbytes, np.uint8)
            ups, downs = [], []
            for _ in range(REPEATS):
                start = clock()
                uploaded = pool.upload(array)
                # Uploads may return before the copy ends.
                with device.turn:
                    device.synchronize()
                middle = clock()
                pool.download(uploaded)
                ups.append(middle - start)
                downs.append(clock() - middle)
            times["up", nbytes], times["down", nbytes] = tuple(ups), tuple(downs)
    finally:
        pool.close()
    return times


def fit_link(times: Mapping[tuple[Way, int], Sequence[float]]) -> Link:
    """Fit latency and bandwidth to times by least squares of relative errors. Without times, transfers cost nothing."""
    fitted = [_fit({n: statistics.median(t) for (w, n), t in times.items() if w == way}) for way in WAYS]
    (up, up_rate), (down, down_rate) = fitted
    return Link(up, up_rate, down, down_rate)


def _fit(secs: Mapping[int, float]) -> tuple[float, float]:
    """Return latency and bandwidth of seconds by bytes."""
    if not secs:
        return 0.0, math.inf
    n, t = np.array(sorted(secs), float), np.array([secs[k] for k in sorted(secs)])
    # Each row is divided by its time, so that errors are relative: with absolute ones the largest array would decide
    # nearly everything, and the latency would be noise.
    weighted = np.stack([1 / t, n / t], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(weighted, np.ones(len(t)), rcond=None)
    # The time of the smallest array contains the whole latency, so the latency is at most that.
    latency = float(np.clip(latency, 0.0, t[0]))
    if per_byte <= 0:
        return float(t.min()), math.inf
    return latency, float(1 / per_byte)


def link_workload() -> Workload:
    """Return the workload that links are recorded under: a copy of bytes."""
    func = copy_of_bytes()
    return Workload(workload_key(func), print_text(func, normalise=True), FORMAT_VERSION, "link")


def copy_of_bytes() -> PrimFunc:
    """Return the tensor function that copies bytes."""
    b = TensorBuilder("copy")
    n = Var("n")
    x = b.input("x", (n,), u8)
    b.compute(b.output("y", (n,), u8), lambda i: x[i])
    return b.finish()


def _variant(way: Way) -> VariantRecord:
    return VariantRecord("library", f"link.{way}")


def record_link(store: Store, target: Target, device: Device, measured_at: float, host: str = "") -> Link:
    """Time the link of a device and record it. The latest times count."""
    store.add_target(target)
    workload = link_workload()
    store.add_workload(workload)
    times = time_link(device)
    symbols: Any
    batch = []
    for (way, nbytes), secs in times.items():
        symbols = {"s0": nbytes}
        batch.append(
            Measurement(
                uuid.uuid4().hex, workload.key, target.key, _variant(way), symbols, samples_secs=secs,
                measured_at=measured_at, host=host,
            )
        )  # fmt: skip
    store.add_measurements(batch)
    return fit_link(times)


def stored_link(store: Store, target: str) -> Link | None:
    """Return the link of a device by the latest records; None without any."""
    ways = {_variant(way).key: way for way in WAYS}
    latest: dict[tuple[Way, int], Measurement] = {}
    for r in store.query(target, link_workload().key):
        way = ways.get(r.variant.key)
        if way is None or r.status != "ok" or "s0" not in r.symbols:
            continue
        key = way, r.symbols["s0"]
        if key not in latest or r.measured_at >= latest[key].measured_at:
            latest[key] = r
    return fit_link({key: r.samples_secs for key, r in latest.items()}) if latest else None
