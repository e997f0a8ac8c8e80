"""Tuning is reproducible, shares a database between processes, and never mixes the records of two devices."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.database.conftest import POSTGRES
from tests.support.effort import thinned
from tests.support.tuner_models import (
    PAPER_DEVICE,
    QUICK,
    RecordedRunner,
    attention,
    feed_forward,
    paper_job,
    row_scale,
)

from relax_tune.database.records import Measurement
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import MeasureError
from relax_tune.ir.core.function import IRModule
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, distinct_requests

ROOT = Path(__file__).parent.parent.parent
EIGHT = replace(QUICK, trials=8)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")


def records_of(job: DeviceJob) -> list[Measurement]:
    return job.store.query(job.target.key)


# -- same seed, same recorded answers in any order, any number of workers: the same candidates ---------------------


class ManyWorkers(RecordedRunner):
    """Recorded answers from several workers at a time, with different delays, delivered in order of completion."""

    def __init__(self, workers: int, seed: int) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(workers)
        self.waits = random.Random(seed)
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        requests = distinct_requests(batch)
        self.batches.append(requests)
        done: Future[list[MeasureResult]] = Future()
        arrived: list[MeasureResult] = []
        if not requests:
            done.set_result([])

        def work(one: MeasureRequest, wait: float) -> None:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
            time.sleep(wait)
            result = self._result(one)
            with self._lock:
                self._now -= 1
                arrived.append(result)
                if len(arrived) == len(requests):
                    done.set_result(arrived)

        order = list(requests)
        self.waits.shuffle(order)
        for one in order:
            self.pool.submit(work, one, self.waits.uniform(0, 0.004))
        return done


def candidates(runner: RecordedRunner) -> list[list[str]]:
    """What was asked, batch by batch; within a batch there is no order."""
    return [sorted(r.program_json for r in batch) for batch in runner.batches]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "make"), thinned([("evolution", feed_forward), ("evolution", attention), ("random", feed_forward)])
)
def test_same_seed_and_answers_give_the_same_candidates_with_1_2_or_4_workers(
    strategy: str, make: Callable[[], IRModule]
) -> None:
    # Rules and the prior, which no seed changes, may fill the first batch of eight; the strategy draws the second.
    settings = replace(QUICK, trials=16, strategy=strategy)
    one_worker = RecordedRunner()
    paper_job(make, settings=settings).tune(one_worker)
    for workers in (1, 2, 4):
        runner = ManyWorkers(workers, seed=workers)
        job = paper_job(make, settings=settings)
        with runner.pool:
            job.tune(runner)
        assert candidates(runner) == candidates(one_worker), f"{workers} workers"
        assert workers == 1 or runner.most > 1, "the workers never worked at once: this says nothing"

    def with_seed(seed: int) -> list[list[str]]:
        runner = RecordedRunner()
        paper_job(make, settings=replace(settings, seed=seed)).tune(runner)
        return candidates(runner)

    assert any(with_seed(seed) != candidates(one_worker) for seed in (1, 2, 3)), (
        "the seed means nothing: this says nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", thinned(["evolution", "random"]))
def test_jobs_sharing_a_store_try_the_candidates_of_one_job(strategy: str) -> None:
    """1, 2 or 4 jobs at once, each with its device: together they request the candidates of a single job."""
    settings = replace(EIGHT, strategy=strategy)

    def tried(jobs: int) -> set[tuple[str, str]]:
        store, errors = MemoryStore(), []

        def work(number: int) -> None:
            try:
                job = paper_job(feed_forward, store, settings)
                job.tune(ManyWorkers(2, number))
            except BaseException as error:
                errors.append(error)

        paper_job(feed_forward)  # built once, then shared
        threads = [threading.Thread(target=work, args=(number,)) for number in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        (target,) = store.targets()
        return {(r.workload, r.variant.key) for r in store.query(target.key, kinds=("tuned",))}

    one_job = tried(1)
    assert len(one_job) == 8 * len(paper_job(feed_forward).tasks)
    assert tried(2) == one_job and tried(4) == one_job


@pytest.mark.slow
@pytest.mark.parametrize("strategy", thinned(["evolution", "random", "grid"]))
def test_interrupted_job_resumes_with_same_candidates(strategy: str) -> None:
    settings = replace(EIGHT, strategy=strategy)

    def tried(stops: Sequence[int]) -> set[tuple[str, str]]:
        store = MemoryStore()
        for stop in (*stops, 10**6):
            runner = RecordedRunner()

            def on_batch(_: Sequence[MeasureRequest], stop: int = stop, runner: RecordedRunner = runner) -> None:
                if len(runner.batches) > stop:
                    raise MeasureError("the device is gone")

            runner.on_batch = on_batch
            try:
                paper_job(feed_forward, store, settings).tune(runner)
            except MeasureError:
                assert stop < 10**6
        (target,) = store.targets()
        return {(r.workload, r.variant.key) for r in store.query(target.key, kinds=("tuned",))}

    whole = tried(())
    assert tried([0, 1, 2, 1, 1]) == whole
    assert tried([3, 4]) == whole


# -- two processes writing one database lose nothing and mix nothing ----------------------------------------------

WRITER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from relax_tune.database.store import open_store
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, feed_forward, paper_job

class Spoken(RecordedRunner):
    def submit(self, batch):
        sent.extend(r.id for r in batch)
        return super().submit(batch)

sent = []
device = replace(PAPER_DEVICE, name=sys.argv[3])
with open_store(sys.argv[2]) as store:
    sys.stdin.readline()
    job = paper_job(feed_forward, store, QUICK)
    job.device = device
    vars(job).pop("target", None)
    work = job.tune(Spoken())
print(json.dumps({"ids": sent, "measurements": work.measurements, "target": job.target.key}))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "devices", thinned([pytest.param(("one", "one"), id="one-device"), pytest.param(("one", "two"), id="two-devices")])
)
@pytest.mark.parametrize("sql_url", thinned(["sqlite", POSTGRES]), indirect=True)
def test_two_processes_tune_into_one_database(devices: tuple[str, str], sql_url: str) -> None:
    open_store(sql_url).close()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(ROOT), sql_url, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for device in devices
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    one_process = paper_job(feed_forward, settings=QUICK)
    one_process.tune(RecordedRunner())
    expected = {(r.workload, r.variant.key, str(r.symbols)) for r in records_of(one_process)}
    with open_store(sql_url) as store:
        assert store.check() == []
        for key in {s["target"] for s in outputs}:
            actual = store.query(key)
            mine = [s for s in outputs if s["target"] == key]
            # every measurement is stored once, under its target
            assert len(actual) == sum(s["measurements"] for s in mine)
            assert {r.id.split(".")[0] for r in actual} == {id for s in mine for id in s["ids"]}
            assert {(r.workload, r.variant.key, str(r.symbols)) for r in actual} == expected
        assert len(store.targets()) == len(set(devices))
        assert [job.state for job in store.jobs()] == ["done", "done"]


# -- a query for one device never returns another device's record -------------------------------------------------


@pytest.mark.slow
def test_a_job_and_a_build_use_no_other_device_s_records() -> None:
    """Only the compiler's version differs, and the other device's records say that a slow variant is fast."""
    store = MemoryStore()
    other = paper_job(row_scale, store, QUICK)
    other.device = replace(PAPER_DEVICE, fingerprint=(("compiler", "older"),))
    assert other.tune(RecordedRunner(lambda p, s: 1e-9)).measurements > 0
    job = paper_job(row_scale, store, QUICK)
    assert job.target.key != other.target.key
    built = job.build()
    assert built.notes and {v.label for c in built.program.calls for v in c.variants} == {"predicted"}
    runner = RecordedRunner()
    fresh = paper_job(row_scale, settings=QUICK)
    reference = RecordedRunner()
    fresh.tune(reference)
    job.tune(runner)
    assert candidates(runner) == candidates(reference), "another device's records steered the search"
    assert job.build().program.to_json() == fresh.build().program.to_json()
