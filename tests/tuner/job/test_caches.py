"""Timing as in a model: tasks with many weights find none of them in the caches, and their records stay apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, feed_forward
from tests.tuner.job.flushed import every_line_is_read

from relax_tune.database.records import REGIMES as RECORDED
from relax_tune.database.store import MemoryStore
from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.device.service_kernels import LINE_BYTES
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.device_process.flush import CacheFlush, Eviction, flush_for, flushed_bytes
from relax_tune.tuner.measure.messages import REGIMES
from relax_tune.tuner.plan.plans import plan_task

# Weights of 96 x 200 float32 are many, and both do not fit in the caches; those of the normalisation are few.
MODEL = feed_forward(96, 200)
SMALL_CACHES = replace(
    PAPER_DEVICE, limits=tuple((dict(PAPER_DEVICE.limits) | {"l2_bytes": 64 << 10, "l3_bytes": 128 << 10}).items())
)


@pytest.mark.parametrize(
    "kind", [pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)]
)
def test_every_line_is_read(kind: str) -> None:
    device = open_device(kind)
    every_line_is_read(device, CacheFlush(device, 1000 * LINE_BYTES))
    device.close()


@pytest.mark.parametrize(
    "kind", [pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)]
)
def test_eviction_keeps_the_contents(kind: str) -> None:
    device = open_device(kind)
    flush = flush_for(device)
    assert isinstance(flush, Eviction), "this processor has an instruction"
    arrays = [np.arange(n, dtype=np.int32) for n in (1, 1000, 70_000)]
    buffers = [device.alloc(a.nbytes) for a in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        device.upload(buffer, array)
    flush.of(buffers)()
    for buffer, array in zip(buffers, arrays, strict=True):
        np.testing.assert_array_equal(device.download(buffer, array.dtype, array.shape), array)
    device.close()


def test_weights_smaller_than_the_last_cache_stay_warm() -> None:
    settings = replace(QUICK, caches="model")
    fits, none = (
        device_job(MODEL, PAPER_DEVICE, MemoryStore(), settings),
        device_job(MODEL, SMALL_CACHES, MemoryStore(), settings),
    )
    assert {t.regime for t in fits.tasks} == {"warm"} and {t.regime for t in none.tasks} == {"warm", "flushed"}


def test_more_is_read_than_the_caches_hold() -> None:
    assert flushed_bytes({"workers": 64, "l2_bytes": 2 << 20, "l3_bytes": 100 << 20}) == 256 << 20
    assert flushed_bytes({"workers": 2, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20}) == 64 << 20
    assert flushed_bytes({"workers": 2, "l2_bytes": 1 << 20, "l3_bytes": 480 << 20}) == 256 << 20
    assert flushed_bytes({"workers": 132, "warp": 32, "l2_bytes": 50 << 20}) == 100 << 20
    assert flushed_bytes({}) == 32 << 20


def test_cache_flush_of_unknown_device_raises() -> None:
    class Other:
        info = DeviceInfo("abacus", "abacus", (), ())

    with pytest.raises(MeasureError, match="abacus"):
        CacheFlush(Other())  # type: ignore[arg-type]


def by_regime(program: Program, symbols: dict[str, int]) -> float:
    return 1e-6 * (1 + sum(len(k.source) for k in program.kernels) % 97) * (1 + sum(symbols.values()))


@pytest.mark.slow
def test_records_of_the_two_regimes_never_mix() -> None:
    store = MemoryStore()
    cold = device_job(MODEL, SMALL_CACHES, store, replace(QUICK, caches="model"))
    warm = device_job(MODEL, SMALL_CACHES, store, replace(QUICK, caches="warm"))
    regimes = {t.name: t.regime for t in cold.tasks}
    assert set(regimes.values()) == {"warm", "flushed"} and {t.regime for t in warm.tasks} == {"warm"}
    assert {t.key for t in cold.tasks} == {t.key for t in warm.tasks}
    runner = RecordedRunner(by_regime)
    first = cold.tune(runner)
    assert first.measurements and cold.tune(runner).measurements == 0, "what is asked for is on record"
    flushed = {t.key for t in cold.tasks if t.regime == "flushed"}
    for t in cold.tasks:
        assert {m.regime for m in store.query(cold.target.key, t.key)} == {t.regime}
    assert len(warm.build().notes) == len(flushed), "times of the other regime count for nothing"
    assert not cold.build().notes
    second = warm.tune(RecordedRunner(by_regime))
    assert 0 < second.measurements < first.measurements
    assert {m.workload for m in store.query(cold.target.key, regime="flushed")} == flushed
    assert cold.tune(runner).measurements == 0 and warm.tune(runner).measurements == 0
    assert not warm.build().notes


@pytest.mark.slow
def test_warm_records_stand_in_until_tuned_ones_are_flushed() -> None:
    store = MemoryStore()
    cold = device_job(MODEL, SMALL_CACHES, store, QUICK)
    warm = device_job(MODEL, SMALL_CACHES, store, replace(QUICK, caches="warm"))
    warm.tune(RecordedRunner(by_regime))
    flushed = [t for t in cold.tasks if t.regime == "flushed"]
    built = cold.build()
    assert {n: p.plan for n, p in built.plans.items()} == {n: p.plan for n, p in warm.build().plans.items()}
    assert len(built.notes) == len(flushed) and all("weights in the caches" in n for n in built.notes)
    (task, *_) = flushed
    own = store.query(cold.target.key, task.key, kinds=("tuned",), status="ok")[0]
    generic = next(r for r in store.query(cold.target.key, task.key) if r.variant.kind == "generic")
    store.add_measurements([replace(generic, id="g", regime="flushed")])
    found = cold.records(task.key, "flushed")
    assert {r.regime for r in found} == {"warm"}, "a job was stopped after its first batch"
    failure = replace(
        own, id="f", regime="flushed", status="failed", stage="runtime", message="lost", samples_secs=(), checked=False
    )
    store.add_measurements([failure])
    found = cold.records(task.key, "flushed")
    assert failure in found and own.variant.key not in plan_task(cold.task_variants[task.name], found).times
    store.add_measurements([replace(own, id="t", variant=replace(own.variant, sketch="other"), regime="flushed")])
    assert {r.regime for r in cold.records(task.key, "flushed")} == {"flushed"}
    assert {r.regime for r in cold.records(task.key, "warm")} == {"warm"}


def test_regime_names_of_measuring_and_records_agree() -> None:
    assert REGIMES == RECORDED


def test_an_unknown_regime_is_refused() -> None:
    with pytest.raises(UserError, match="--caches expects one of warm, model"):
        replace(QUICK, caches="cold")  # type: ignore[arg-type]
