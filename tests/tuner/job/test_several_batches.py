"""Several batches at a time, of one job and of several on one store: every worker busy, one budget for all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.tuner_models import QUICK, RecordedRunner, feed_forward, paper_job, row_scale

from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.tuner.job import loop
from relax_tune.tuner.measure.messages import MeasureRequest


def test_last_part_of_the_time_is_for_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    now, begun = [0.0], list[tuple[float, int]]()

    class Slow(RecordedRunner):
        def submit(self, batch: Sequence[MeasureRequest]) -> Any:
            begun.append((now[0], batch[0].policy.min_repeats))
            now[0] += 3.0
            return super().submit(batch)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    paper_job(feed_forward, settings=replace(QUICK, trials=64, max_minutes=0.5)).tune(Slow())
    late = [repeats for at, repeats in begun if at > 24]
    assert late and set(late) == {7}, "no candidate is tried for the first time"
    assert max(at for at, _ in begun) <= 30 and (0.0, 3) in begun


class Fleet(RecordedRunner):
    """Answers rounds from threads, after some time or when all workers are busy; counts the batches under way."""

    def __init__(self, slots: int, secs: float = 0.01) -> None:
        super().__init__()
        self.count, self.secs = slots, secs
        self.most, self.now = 0, 0
        self.lock, self.busy = threading.Lock(), threading.Event()

    def slots(self) -> int:
        return self.count

    def submit(self, batch: Sequence[MeasureRequest]) -> Any:
        with self.lock:
            self.now += 1
            if self.now == self.count:
                self.busy.set()
            self.most = max(self.most, self.now)
            answered: Any = super().submit(batch)
        later: Any = type(answered)()

        def answer() -> None:
            if len(batch) == QUICK.batch:  # a round; smaller batches come before the rounds
                self.busy.wait(self.secs)
            with self.lock:
                self.now -= 1
            later.set_result(answered.result())

        threading.Thread(target=answer, daemon=True).start()
        return later


def tried_once(store: Store, target: str) -> int:
    """Number of candidates, each of them tried once."""
    tried = Counter(
        (r.workload, r.variant.key, r.id.split(".")[0])
        for r in store.query(target)
        if r.variant.kind == "tuned" and '"parts"' not in r.variant.trace
    )
    candidates = {(workload, variant) for workload, variant, _ in tried}
    return len(candidates)


@pytest.mark.parametrize("tasks", [1, 3])
def test_one_job_keeps_several_workers_busy_within_the_budget(tasks: int) -> None:
    store, runner = MemoryStore(), Fleet(4, 30.0)
    job = paper_job(row_scale if tasks == 1 else feed_forward, store, replace(QUICK, trials=40))
    assert len(job.tasks) == tasks
    result = job.tune(runner)
    assert runner.most == 4 and not result.problems
    candidates = [r.id for batch in runner.batches for r in batch]
    assert len(candidates) == len(set(candidates)), "no candidate was measured twice for one reason"
    assert tried_once(store, job.target.key) == result.trials <= 40 * tasks
    assert all(store.lease(t.key, job.target.key) is None for t in job.tasks)
    again = RecordedRunner()
    assert (
        paper_job(row_scale if tasks == 1 else feed_forward, store, replace(QUICK, trials=40)).tune(again).trials == 0
    )


@pytest.mark.parametrize("jobs", [2, 3])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_jobs_sharing_a_database_keep_the_budget_of_one(jobs: int, kind: str, tmp_path: Path) -> None:
    """Each task gets more than one batch, so that a job sees others' tasks grow while it tunes its own."""
    store = open_store("memory://" if kind == "memory" else f"sqlite:///{tmp_path / 'shared.db'}")
    alone = MemoryStore()
    settings = replace(QUICK, trials=24)
    wanted = paper_job(feed_forward, alone, settings).tune(RecordedRunner()).trials
    found: list[int] = []
    running = [paper_job(feed_forward, store, settings) for _ in range(jobs)]
    threads = [threading.Thread(target=lambda j=j: found.append(j.tune(Fleet(2)).trials)) for j in running]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == jobs and sum(found) <= 24 * 3
    assert sum(found) == tried_once(store, running[0].target.key) == wanted == 24 * 3
    store.close()


def test_job_out_of_time_lands_batches_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store, settings = MemoryStore(), replace(QUICK, trials=24)
    late = paper_job(feed_forward, store, replace(settings, max_minutes=1e-9))
    assert late.tune(RecordedRunner()).trials == 0 and not any(store.lease(t.key, late.target.key) for t in late.tasks)
    runner = RecordedRunner()
    clock = iter([0.0, *[1.0] * 7])
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock, 99.0), sleep=time.sleep))
    part = paper_job(feed_forward, store, replace(settings, max_minutes=0.5))
    some = part.tune(runner)
    monkeypatch.undo()
    assert 0 <= some.trials < 24 * 3 and runner.batches, "the batch under way is stored"
    rest = paper_job(feed_forward, store, settings).tune(RecordedRunner())
    assert some.trials + rest.trials == tried_once(store, part.target.key) == 24 * 3
