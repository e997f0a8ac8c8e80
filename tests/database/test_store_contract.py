"""The promises of `Store`, on every implementation."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, ZEN_OLD, failure, filled, timing, variant
from tests.support.effort import examples

from relax_tune.database.counts import TaskStats
from relax_tune.database.records import (
    STAGES,
    Environment,
    JobRecord,
    Measurement,
    PlanRecord,
    Selection,
    ShapeHistogram,
    Target,
    VariantRecord,
    Workload,
)
from relax_tune.database.rules import Spent
from relax_tune.database.store import MemoryStore, SqlStore, Store, open_store
from relax_tune.errors import DatabaseError


def test_added_records_come_back_equal(store: Store) -> None:
    filled(store)
    environment = Environment((("relax-tune", "0.1.0"), ("numpy", "2")))
    store.add_environment(environment)
    full = Measurement(
        "m1",
        MATMUL.key,
        ZEN.key,
        variant(8),
        {"n": 2**40, "b": 3},
        samples_secs=(1.5e-5, 0.1 + 0.2, 1e-300),
        regime="flushed",
        checked=True,
        build_secs=0.25,
        job="job-1",
        environment=environment.key,
        measured_at=1.7e9,
    )
    broken = failure("m2", "compile", "строка «ü» 🙂\nline 2")
    assert store.add_measurements([full, broken]) == 2
    assert store.query(ZEN.key, MATMUL.key) == [full, broken]
    assert store.target(ZEN.key) == ZEN and store.workload(MATMUL.key) == MATMUL
    assert store.environment(environment.key) == environment and store.environments() == [environment]
    assert store.targets() == sorted([ZEN, ZEN_OLD], key=lambda target: target.key)
    assert store.target("none") is None and store.workload("none") is None and store.environment("none") is None
    assert store.check() == []


def test_adding_again_changes_nothing(store: Store) -> None:
    filled(filled(store))
    first, second = timing("a", 1.0), timing("b", 2.0)
    assert store.add_measurements([first]) == 1
    assert store.add_measurements([first, second, second]) == 1
    assert store.add_measurements([timing("a", 9.0)]) == 0, "a retried trial of the same subject is no news"
    assert store.add_measurements([]) == 0
    assert store.query(ZEN.key, MATMUL.key) == [first, second]
    assert len(store.targets()) == 2 and len(store.workloads(None)) == 2


def test_limits_of_a_target_stay_once_known(store: Store) -> None:
    def limits() -> dict[str, int]:
        found = store.target(ZEN.key)
        assert found is not None
        return dict(found.limits)

    filled(store)
    assert limits() == {}
    for workers in (2, 4):
        store.add_target(replace(ZEN, limits=(("workers", workers), ("l2_bytes", 1 << 20))))
        assert limits() == {"l2_bytes": 1 << 20, "workers": 2}
    store.add_target(ZEN)
    assert limits() == {"l2_bytes": 1 << 20, "workers": 2} and store.check() == []


@pytest.mark.parametrize(
    "other", [{"n": 9}, {"tile": 2}, {"target": ZEN_OLD}, {"workload": SOFTMAX}, {"regime": "flushed"}]
)
def test_one_id_never_stands_for_two_subjects(store: Store, other: dict[str, Any]) -> None:
    filled(store).add_measurements([timing("a", 1.0)])
    with pytest.raises(DatabaseError, match="its own id"):
        store.add_measurements([timing("b", 1.0), timing("a", 1.0, **other)])
    with pytest.raises(DatabaseError, match="its own id"):
        store.add_measurements([timing("c", 1.0), timing("c", 1.0, **other)])
    assert store.count(ZEN.key) + store.count(ZEN_OLD.key) == 1, "a refused batch leaves nothing behind"


def test_stored_point_ignores_later_mutation(store: Store) -> None:
    given = timing("a", 1.0)
    filled(store).add_measurements([given])
    given.symbols["n"] = 77
    store.query(ZEN.key, MATMUL.key)[0].symbols["n"] = 78
    store.top(MATMUL.key, ZEN.key, {"n": 8}, 1)[0].symbols["n"] = 79
    assert [m.symbols for m in store.query(ZEN.key, MATMUL.key)] == [{"n": 8}]


def test_a_batch_is_all_or_nothing(store: Store) -> None:
    filled(store)
    for stranger in (
        {"target": Target("c", "nobody")},
        {"workload": Workload("w-nobody", "?", 1)},
        {"environment": "nobody"},
    ):
        with pytest.raises(DatabaseError, match="add it first"):
            store.add_measurements([timing("a", 1.0), timing("b", 1.0, **stranger)])  # type: ignore[arg-type]
    assert store.count(ZEN.key) == 0


def test_a_target_never_sees_anothers_records(store: Store) -> None:
    filled(store)
    store.add_measurements(
        [timing("fast", 1e-6, target=ZEN_OLD), timing("slow", 1.0), failure("bad", "crash", target=ZEN_OLD)]
    )
    store.put_plans(ZEN_OLD.key, {MATMUL.key: '["old"]'})
    assert [m.id for m in store.query(ZEN.key, MATMUL.key)] == ["slow"]
    best = store.best(MATMUL.key, ZEN.key, {"n": 8})
    assert best is not None and best.id == "slow"
    assert store.count(ZEN.key) == 1 and store.count(ZEN_OLD.key) == 2
    assert store.plan(MATMUL.key, ZEN.key) is None and store.plans(ZEN.key) == []
    stats = store.stats(ZEN.key)
    assert stats is not None and stats.failures == () and stats.measurements == 1
    assert store.prune(ZEN.key, Selection(failed=True)) == 0 and store.count(ZEN_OLD.key) == 2
    assert store.workloads(ZEN.key) == [MATMUL] and store.workloads("none") == []


def test_only_checked_and_ok_may_win(store: Store) -> None:
    filled(store)
    store.add_measurements(
        [
            timing("unchecked", 1e-9, tile=1, checked=False),
            failure("failed", "wrong-result", tile=2),
            timing("flushed", 1e-9, tile=3, regime="flushed"),
            timing("elsewhere", 1e-9, tile=4, n=9),
        ]
    )
    assert store.best(MATMUL.key, ZEN.key, {"n": 8}) is None
    assert store.top(MATMUL.key, ZEN.key, {"n": 8}, 5) == []
    store.add_measurements([timing("winner", 1.0, tile=5)])
    best = store.best(MATMUL.key, ZEN.key, {"n": 8})
    assert best is not None and best.id == "winner" and best.median_secs == 1.0
    flushed = store.best(MATMUL.key, ZEN.key, {"n": 8}, "flushed")
    assert flushed is not None and flushed.id == "flushed"


def test_top_ranks_variants_by_the_median_of_raw_samples(store: Store) -> None:
    filled(store)
    outlier = timing("outlier", 5.0, tile=2, samples_secs=(3.0, 3.0, 900.0))
    store.add_measurements([timing("a", 4.0, tile=1), outlier, timing("a2", 2.0, tile=1), timing("c", 9.0, tile=3)])
    assert [m.id for m in store.top(MATMUL.key, ZEN.key, {"n": 8}, 2)] == ["a2", "outlier"]
    assert [m.id for m in store.top(MATMUL.key, ZEN.key, {"n": 8}, 9)] == ["a2", "outlier", "c"]
    assert store.top(MATMUL.key, ZEN.key, {"n": 8}, 0) == []
    with pytest.raises(DatabaseError, match=">= 0"):
        store.top(MATMUL.key, ZEN.key, {"n": 8}, -1)


def test_questions_narrow(store: Store) -> None:
    filled(store)
    records = [
        timing("a", 1.0, kind="library"),
        timing("b", 1.0, kind="generic", n=9),
        timing("c", 1.0, regime="flushed"),
        failure("d", "launch"),
    ]
    store.add_measurements(records)

    def ids(**narrow: Any) -> str:
        return "".join(m.id for m in store.query(ZEN.key, MATMUL.key, **narrow))

    assert ids() == "abcd"
    assert ids(status="ok") == "abc" and ids(status="failed") == "d"
    assert ids(kinds=["library", "generic"]) == "ab" and ids(kinds=[]) == ""
    assert ids(symbols={"n": 9}) == "b" and ids(symbols={}) == "d"
    assert ids(regime="flushed") == "c"
    assert (
        ids(limit=2) == "ab" and ids(limit=2, status="failed") == "d" and ids(limit=0) == "" and ids(limit=9) == "abcd"
    )
    assert [m.id for m in store.query(ZEN.key)] == ["a", "b", "c", "d"]
    assert [m.id for m in store.query(ZEN.key, status="failed")] == ["d"] and store.query("0" * 64) == []
    assert store.count(ZEN.key, MATMUL.key) == 4 and store.count(ZEN.key, SOFTMAX.key) == 0
    assert store.count(ZEN.key, MATMUL.key, "failed") == 1


@given(order=st.permutations(range(12)), cuts=st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_answers_do_not_depend_on_arrival(
    another: Callable[[], MemoryStore], order: list[int], cuts: list[int]
) -> None:
    _order_is_nothing(filled(another()), filled(another()), order, cuts)


def test_answers_do_not_depend_on_arrival_anywhere(store: Store, another: Callable[[], MemoryStore]) -> None:
    order = list(range(12))
    random.Random(1).shuffle(order)
    _order_is_nothing(filled(store), filled(another()), order, [3, 7])


def _order_is_nothing(shuffled: Store, sorted_store: Store, order: list[int], cuts: list[int]) -> None:
    records = [timing(f"m{i}-ä" if i % 2 else f"M{i}_", 1.0 + i // 3, tile=i % 4, kind="tuned") for i in range(11)]
    records.append(failure("z", "timeout"))
    sorted_store.add_measurements(records)
    bounds = [0, *sorted(cuts), 12]
    for start, stop in zip(bounds, bounds[1:]):
        shuffled.add_measurements([records[i] for i in order[start:stop]])
    question = (MATMUL.key, ZEN.key)
    assert shuffled.query(ZEN.key, MATMUL.key) == sorted_store.query(ZEN.key, MATMUL.key)
    assert shuffled.top(*question, {"n": 8}, 4) == sorted_store.top(*question, {"n": 8}, 4)
    assert shuffled.stats(ZEN.key) == sorted_store.stats(ZEN.key)


def test_statistics_count_failures_by_stage(store: Store) -> None:
    filled(store)
    records = [failure(f"f{i}{stage}", stage) for i, stage in enumerate(STAGES)]
    store.add_measurements([*records, failure("again", "crash"), timing("ok", 1.0), timing("raw", 1.0, checked=False)])
    stats = store.stats(ZEN.key)
    assert stats is not None
    assert dict(stats.failures) == {**dict.fromkeys(STAGES, 1), "crash": 2}
    assert (stats.target, stats.workloads, stats.measurements, stats.ok, stats.checked) == (ZEN, 1, 11, 2, 1)
    assert stats.kinds == (("tuned", 2),)
    assert store.stats("none") is None


def test_plans_have_versions(store: Store) -> None:
    filled(store)
    task = (MATMUL.key, ZEN.key)
    assert store.plan(*task) is None
    assert store.put_plans(ZEN.key, {MATMUL.key: '["a"]'}) == [PlanRecord(*task, 1, '["a"]')]
    (same,) = store.put_plans(ZEN.key, {MATMUL.key: '["a"]'})
    assert same.version == 1, "the same plan again is no new version"
    (second,) = store.put_plans(ZEN.key, {MATMUL.key: '["b"]'})
    assert second.version == 2
    assert store.plan(*task) == PlanRecord(*task, 2, '["b"]') and store.plan(*task, 1) == PlanRecord(*task, 1, '["a"]')
    assert store.plan(*task, 3) is None
    assert store.add_plans([PlanRecord(*task, 2, '["other"]'), PlanRecord(*task, 5, '["e"]')]) == 1
    assert [(plan.version, plan.entries) for plan in store.plans(ZEN.key)] == [(1, '["a"]'), (2, '["b"]'), (5, '["e"]')]
    with pytest.raises(DatabaseError, match="JSON"):
        store.put_plans(ZEN.key, {MATMUL.key: "{not json"})
    with pytest.raises(DatabaseError, match="add it first"):
        store.put_plans(ZEN.key, {"w-nobody": "[]"})
    before = store.plans(ZEN.key)
    with pytest.raises(DatabaseError, match="add it first"):
        store.put_plans(ZEN.key, {MATMUL.key: '["f"]', "w-nobody": "[]"})
    assert store.plans(ZEN.key) == before, "all of them or none"
    found = store.put_plans(ZEN.key, {SOFTMAX.key: '["s"]', MATMUL.key: '["e"]'})
    assert found == sorted(
        [PlanRecord(SOFTMAX.key, ZEN.key, 1, '["s"]'), PlanRecord(*task, 5, '["e"]')], key=lambda p: p.workload
    )


def test_a_lease_is_held_by_one(store: Store) -> None:
    filled(store)
    task = (MATMUL.key, ZEN.key)
    held = store.acquire_lease(*task, "job-a", secs=1000.0)
    assert held is not None and held.holder == "job-a" and held == store.lease(*task)
    assert store.acquire_lease(*task, "job-b", secs=10.0) is None
    assert store.acquire_lease(SOFTMAX.key, ZEN.key, "job-b", secs=10.0) is not None
    assert store.acquire_lease(MATMUL.key, ZEN_OLD.key, "job-b", secs=10.0) is not None
    renewed = store.renew_lease(held, secs=2000.0)
    assert renewed is not None and renewed.holder == "job-a" and renewed.expires_at > held.expires_at + 500
    assert store.acquire_lease(*task, "job-b", secs=10.0) is None
    ended = store.renew_lease(renewed, secs=0.0)
    assert ended is not None
    taken = store.acquire_lease(*task, "job-b", secs=1000.0)
    assert taken is not None and taken.holder == "job-b"
    assert store.renew_lease(renewed, secs=10.0) is None, "lost to another"
    assert store.release_lease(renewed) is False and store.lease(*task) == taken
    assert store.release_lease(taken) is True and store.lease(*task) is None
    assert store.release_lease(taken) is False and store.renew_lease(taken, secs=1.0) is None


def test_leases_go_by_the_clock_of_the_database(sql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose clock is two minutes behind keeps its lease, and one an hour ahead blocks nobody for longer."""
    real = time.time
    with open_store(sql_url) as store:
        filled(store)
        task = (MATMUL.key, ZEN.key)
        monkeypatch.setattr(time, "time", lambda: real() - 120.0)
        assert store.acquire_lease(*task, "behind", secs=60.0) is not None
        monkeypatch.setattr(time, "time", real)
        assert store.acquire_lease(*task, "other", secs=60.0) is None
        monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
        ahead = store.acquire_lease(SOFTMAX.key, ZEN.key, "ahead", secs=60.0)
        assert ahead is not None and ahead.expires_at < real() + 600.0


MOMENTS = ["1e18", "'Infinity'", "'NaN'"]
SQLITE_MOMENTS = ["9e999", "'for ever'", "x'ff'", "1e308"]


@pytest.mark.parametrize("moment", MOMENTS + SQLITE_MOMENTS)
def test_lease_row_of_any_expiry_ends_after_a_job_s_time(sql_url: str, moment: str) -> None:
    """Whatever a row says, its task is taken once the time has passed that jobs ask for; a living holder keeps it."""
    if moment in SQLITE_MOMENTS and not sql_url.startswith("sqlite"):
        pytest.skip("PostgreSQL keeps numbers alone in this column")
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        filled(store)
        task = (MATMUL.key, ZEN.key)
        row = f"INSERT INTO leases VALUES ('{MATMUL.key}', '{ZEN.key}', 'job-of-team-a', {moment}, 1000000)"
        with store._engine.begin() as connection:
            connection.execute(text(row))
        assert store.acquire_lease(*task, "job-b", secs=0.05) is None, "it counts for as long as any other"
        held = store.lease(*task)
        assert held is not None and store.renew_lease(held, secs=60.0) is not None, "a holder that lives goes on"
        assert store.acquire_lease(*task, "job-b", secs=0.05) is None
        time.sleep(0.1)
        taken = store.acquire_lease(*task, "job-b", secs=60.0)
        assert taken is not None and (taken.holder, taken.trials) == ("job-b", 0)
        with store._engine.begin() as connection:
            connection.execute(text(row.replace(MATMUL.key, SOFTMAX.key)))
        both = {MATMUL.key: Spent(0, "warm", 0, 2), SOFTMAX.key: Spent(0, "warm", 0, 2)}
        claimed = store.claim_trials(taken, 4, 10, both)
        other = store.lease(SOFTMAX.key, ZEN.key)
        assert claimed is not None and other is not None and other.expires_at < taken.expires_at + 60
        alone = {MATMUL.key: Spent(0, "warm", 0, 2)}
        assert store.claim_trials(claimed[0], 4, 4 + claimed[1], alone) == (replace(taken, trials=4 + claimed[1]), 4)


@pytest.mark.parametrize("moment", ["-1e18", "'-Infinity'"])
def test_lease_row_of_a_past_moment_holds_nothing(sql_url: str, moment: str) -> None:
    with open_store(sql_url) as store:
        assert isinstance(store, SqlStore)
        filled(store)
        moment = "-9e999" if "Inf" in moment and sql_url.startswith("sqlite") else moment
        row = f"INSERT INTO leases VALUES ('{MATMUL.key}', '{ZEN.key}', 'job-of-team-a', {moment}, 7)"
        with store._engine.begin() as connection:
            connection.execute(text(row))
        assert store.lease(MATMUL.key, ZEN.key) is None or moment == "-1e18"
        assert store.acquire_lease(MATMUL.key, ZEN.key, "job-b", secs=60.0) is not None


def test_lease_outlasting_a_clock_set_back_is_shortened(store: Store) -> None:
    """A holder from before the clock was set back has as long as any other; what it claims counts until then."""
    filled(store)
    ahead = store.acquire_lease(SOFTMAX.key, ZEN.key, "before", secs=3600.0)
    mine = store.acquire_lease(MATMUL.key, ZEN.key, "after", secs=60.0)
    assert ahead is not None and mine is not None
    assert store.acquire_lease(SOFTMAX.key, ZEN.key, "after", secs=60.0) is None
    found = store.lease(SOFTMAX.key, ZEN.key)
    assert found is not None and abs(found.expires_at - mine.expires_at) < 5.0
    assert store.renew_lease(ahead, secs=60.0) is not None


@pytest.mark.parametrize(
    "column, value", [("holder", "x'00'"), ("trials", "'many'"), ("trials", "-5"), ("holder", "''")]
)
def test_unreadable_lease_row_stops_no_job(tmp_path: Path, column: str, value: str) -> None:
    with open_store(f"sqlite:///{tmp_path / 'records.db'}", notice=lambda _: None) as store:
        assert isinstance(store, SqlStore)
        filled(store)
        assert store.acquire_lease(SOFTMAX.key, ZEN.key, "other", secs=60.0) is not None
        with store._engine.begin() as connection:
            connection.execute(text(f"UPDATE leases SET {column} = {value}"))
        assert store.lease(SOFTMAX.key, ZEN.key) is None
        assert store.acquire_lease(SOFTMAX.key, ZEN.key, "job-b", secs=0.05) is None
        mine = store.acquire_lease(MATMUL.key, ZEN.key, "job-b", secs=60.0)
        spent = {MATMUL.key: Spent(0, "warm", 0, 2), SOFTMAX.key: Spent(0, "warm", 0, 2)}
        assert mine is not None and store.claim_trials(mine, 9, 10, spent) == (replace(mine, trials=8), 8)


def test_budget_holds_exactly_over_leases_of_several_jobs(store: Store) -> None:
    filled(store)
    first = store.acquire_lease(MATMUL.key, ZEN.key, "job-a", secs=1000.0)
    second = store.acquire_lease(SOFTMAX.key, ZEN.key, "job-b", secs=1000.0)
    assert first is not None and second is not None
    fresh = {MATMUL.key: Spent(0, "warm", 0, 2), SOFTMAX.key: Spent(0, "warm", 0, 2)}
    assert store.claim_trials(first, 8, 10, fresh) == (replace(first, trials=8), 8), "2 are kept for the other task"
    assert store.claim_trials(second, 8, 10, fresh) == (replace(second, trials=2), 2)
    assert store.claim_trials(second, 8, 10, fresh) == (replace(second, trials=2), 0)
    store.add_measurements([timing("a", 1.0)])
    assert store.claim_trials(second, 8, 10, fresh) is None, "there are records that the caller has not read"
    read = {**fresh, MATMUL.key: Spent(1, "warm", 1, 2)}
    first = store.settle_trials(replace(first, trials=8), 7)
    assert first.trials == 1 == store.lease(MATMUL.key, ZEN.key).trials  # type: ignore[union-attr]
    assert store.claim_trials(second, 8, 10, read) == (replace(second, trials=8), 6)
    assert store.release_lease(first)
    assert store.claim_trials(second, 8, 10, read) == (replace(second, trials=8), 0)
    ended = store.renew_lease(second, secs=0.0)
    assert ended is not None
    third = store.acquire_lease(MATMUL.key, ZEN.key, "job-c", secs=1000.0)
    assert third is not None
    assert store.claim_trials(third, 20, 10, read) == (replace(third, trials=7), 7), "an expired lease claims nothing"


def test_lease_of_dead_holder_is_released(store: Store) -> None:
    """Whoever knows that a holder is dead may give its lease back; of several who know, one gets the task."""
    filled(store)
    task = (MATMUL.key, ZEN.key)
    store.acquire_lease(*task, "dead", secs=1000.0)
    seen = store.lease(*task)
    assert seen is not None and seen.holder == "dead"
    assert store.acquire_lease(*task, "job-a", secs=10.0) is None
    assert store.release_lease(seen) is True
    taken = store.acquire_lease(*task, "job-a", secs=10.0)
    assert taken is not None
    # another who saw the dead one's lease too comes too late, and takes nothing from its new holder
    assert store.release_lease(seen) is False and store.renew_lease(seen, secs=10.0) is None
    assert store.acquire_lease(*task, "job-b", secs=10.0) is None
    assert store.lease(*task) == taken


def test_racing_threads_take_dead_holders_task_once(store: Store) -> None:
    filled(store)
    task = (MATMUL.key, ZEN.key)
    store.acquire_lease(*task, "dead", secs=1000.0)
    start = threading.Barrier(6)
    won: list[str] = []

    def race(holder: str) -> None:
        seen = store.lease(*task)
        assert seen is not None
        start.wait()
        if seen.holder == "dead":
            store.release_lease(seen)
        if store.acquire_lease(*task, holder, secs=60.0) is not None:
            won.append(holder)

    threads = [threading.Thread(target=race, args=(f"job-{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lease = store.lease(*task)
    assert lease is not None and won == [lease.holder]


def test_racing_threads_get_lease_once(store: Store) -> None:
    filled(store)
    start = threading.Barrier(6)
    won: list[str] = []

    def race(holder: str) -> None:
        start.wait()
        if store.acquire_lease(MATMUL.key, ZEN.key, holder, secs=60.0) is not None:
            won.append(holder)

    threads = [threading.Thread(target=race, args=(f"job-{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lease = store.lease(MATMUL.key, ZEN.key)
    assert lease is not None and won == [lease.holder]


def test_threads_write_and_read_at_once(store: Store) -> None:
    filled(store)
    errors: list[Exception] = []

    def work(worker: int) -> None:
        try:
            for step in range(5):
                store.add_measurements([timing(f"{worker}-{step}-{i}", 1.0, tile=(worker + i) % 3) for i in range(10)])
                assert store.count(ZEN.key) >= 10
                store.put_plans(ZEN.key, {MATMUL.key: json.dumps([worker, step])})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.count(ZEN.key) == 200
    assert [plan.version for plan in store.plans(ZEN.key)] == list(range(1, 21))


def test_jobs_and_histograms_are_replaced(store: Store) -> None:
    store.put_job(JobRecord("j2", '{"trials":5}', "running"))
    store.put_job(JobRecord("j1"))
    store.put_job(JobRecord("j2", '{"trials":5}', "done"))
    assert store.jobs() == [JobRecord("j1"), JobRecord("j2", '{"trials":5}', "done")]
    assert store.jobs("done") == [JobRecord("j2", '{"trials":5}', "done")] and store.job("j3") is None
    store.put_histogram(ShapeHistogram("minilm", "n", '{"128":3}'))
    store.put_histogram(ShapeHistogram("minilm", "b", '{"1":3}'))
    store.put_histogram(ShapeHistogram("minilm", "n", '{"64":1,"128":4}'))
    store.put_histogram(ShapeHistogram("other", "n", "{}"))
    assert [(h.symbol, h.by_value) for h in store.histograms("minilm")] == [("b", {1: 3}), ("n", {64: 1, 128: 4})]
    assert len(store.histograms(None)) == 3


def test_prune_by_worker_job_and_moment_removes_no_others(store: Store) -> None:
    filled(store)
    first = {"worker": "gpu1/cuda:0", "host": "gpu1", "unit": "GPU-aa", "job": "job-a"}
    second = {"worker": "gpu1/cuda:1", "host": "gpu1", "unit": "GPU-bb", "job": "job-b"}
    store.add_measurements(
        [
            timing("a-early", 1.0, tile=1, measured_at=100.0, **first),
            timing("a-late", 1.0, tile=2, measured_at=300.0, **first),
            timing("b", 1.0, tile=3, measured_at=300.0, **second),
            timing("unnamed", 1.0, tile=4),
        ]
    )
    selected = {
        Selection(worker="gpu1/cuda:0"): 2,
        Selection(worker="GPU-aa"): 2,
        Selection(worker="gpu1"): 3,
        Selection(worker="gpu1", since=200.0): 2,
        Selection(worker="gpu"): 0,
        Selection(since=100.0): 3,
        Selection(job="job-b"): 1,
    }
    assert {s: store.prune(ZEN.key, s, dry_run=True) for s in selected} == selected
    assert [(u.unit, u.measurements, u.last) for u in store.units(ZEN.key)] == [
        ("", 1, 0.0),
        ("GPU-aa", 2, 300.0),
        ("GPU-bb", 1, 300.0),
    ]
    assert store.tasks(ZEN.key) == [TaskStats("w-matmul", "matmul", 4, 0, 300.0)]
    assert store.prune(ZEN.key, Selection(worker="GPU-aa", since=200.0)) == 1
    assert [m.id for m in store.query(ZEN.key)] == ["a-early", "b", "unnamed"]


def test_tasks_are_counted_by_job_the_latest_first(store: Store) -> None:
    filled(store)
    store.add_measurements(
        [
            timing("a", 1.0, measured_at=5.0, job="first"),
            timing("b", 1.0, n=16, measured_at=7.0, job="second"),
            failure("c", "compile", tile=2, measured_at=6.0),
            timing("d", 1.0, workload=SOFTMAX, measured_at=9.0, job="first"),
            timing("e", 1.0, target=ZEN_OLD, measured_at=99.0, job="first"),
        ]
    )
    matmul, softmax = TaskStats("w-matmul", "matmul", 3, 1, 7.0), TaskStats("w-softmax", "softmax", 1, 0, 9.0)
    assert store.tasks(ZEN.key) == [softmax, matmul]
    assert store.tasks(ZEN.key, {"first"}) == [softmax, TaskStats("w-matmul", "matmul", 1, 0, 5.0)]
    assert store.tasks(ZEN.key, {"none"}) == store.tasks(ZEN.key, set()) == store.tasks("unknown") == []


def test_prune_without_condition_is_refused() -> None:
    with pytest.raises(DatabaseError, match="prune: expected"):
        Selection()
    with pytest.raises(DatabaseError, match="Unix seconds"):
        Selection(since=-1.0)


def test_unit_of_measurement_is_kept(store: Store) -> None:
    filled(store)
    told = {"worker": "w", "host": "gpu1", "unit": "GPU-aa", "clock_mhz": 1980.0, "celsius": 41.0, "contention": 0.125}
    store.add_measurements([timing("here", 1.0, **told), timing("unknown", 1.0, tile=2)])
    here, unknown = store.query(ZEN.key)
    assert {name: getattr(here, name) for name in told} == told
    assert (unknown.worker, unknown.host, unknown.unit, unknown.clock_mhz, unknown.celsius) == ("", "", "", None, None)


def test_reference_of_target_stays_once_known(store: Store) -> None:
    store.add_target(ZEN)
    for secs in (1e-3, 2e-3):
        store.add_target(replace(ZEN, reference=(("compute", secs),)))
    found = store.target(ZEN.key)
    assert found is not None and found.reference == (("compute", 1e-3),) and store.check() == []


def test_reference_of_target_is_replaced_and_removed(store: Store) -> None:
    store.add_target(replace(ZEN, reference=(("compute", 1e-3),)))
    store.set_reference(ZEN.key, {"compute": 2e-3, "compute spread": 0.03})
    found = store.target(ZEN.key)
    assert found is not None and dict(found.reference) == {"compute": 2e-3, "compute spread": 0.03}
    store.set_reference(ZEN.key, {})
    found = store.target(ZEN.key)
    assert found is not None and found.reference == () and store.check() == []
    store.set_reference("unknown", {"compute": 1.0})
    assert store.target("unknown") is None


def test_last_pruned_measurement_takes_the_reference_along(store: Store) -> None:
    filled(store).set_reference(ZEN.key, {"compute": 1e-3})
    store.add_measurements([timing("old", 1.0, measured_at=100.0), timing("new", 1.0, measured_at=300.0)])
    for older_than, known in ((200.0, {"compute": 1e-3}), (400.0, {})):
        store.prune(ZEN.key, Selection(older_than))
        found = store.target(ZEN.key)
        assert found is not None and dict(found.reference) == known


def test_prune_removes_selected_only(store: Store) -> None:
    filled(store)
    records = [
        timing("old", 1.0, tile=1, measured_at=100.0),
        failure("old-failed", "crash", tile=2, measured_at=100.0),
        failure("new-failed", "crash", tile=3, measured_at=300.0),
        timing("undated", 1.0, tile=4),
    ]
    store.add_measurements(records)
    both = Selection(older_than=200.0, failed=True)
    assert store.prune(ZEN.key, both, dry_run=True) == 1 and store.count(ZEN.key) == 4
    assert store.prune(ZEN.key, both) == 1
    assert [m.id for m in store.query(ZEN.key, MATMUL.key)] == ["new-failed", "old", "undated"]
    assert store.prune(ZEN.key, Selection(older_than=200.0)) == 1 and store.prune(ZEN.key, Selection(failed=True)) == 1
    assert [m.id for m in store.query(ZEN.key, MATMUL.key)] == ["undated"]
    assert store.check() == []
    assert store.add_measurements(records) == 3, "what was pruned may come back"


_texts = st.text(max_size=20).filter(lambda text: "\0" not in text and text.isprintable())


@given(
    text=_texts,
    parameters=st.dictionaries(st.text("abc_", min_size=1, max_size=5), st.integers(-(2**63), 2**63 - 1), max_size=3),
    samples=st.lists(st.floats(0, 1e300, allow_nan=False), min_size=1, max_size=4),
)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_content_comes_back_equal(
    store: Store, text: str, parameters: dict[str, int], samples: list[float]
) -> None:
    filled(store)
    made = VariantRecord("tuned", text, json.dumps([text]), json.dumps(parameters))
    id = f"{made.key}{hash(tuple(samples))}"
    record = Measurement(id, MATMUL.key, ZEN.key, made, parameters, samples_secs=tuple(samples), job=text)
    store.add_measurements([record])
    assert record in store.query(ZEN.key, MATMUL.key, symbols=parameters)


def test_queries_of_one_target_return_no_records_of_others(store: Store) -> None:
    """Every method of the store that takes a target; the same workloads, variants, points and times on both."""
    filled(store)
    third = Target("opencl", ZEN.name, ZEN.fingerprint)  # the same name and facts under another kind
    store.add_target(third)
    for number, target in enumerate((ZEN, ZEN_OLD)):
        batch = [
            timing(f"{number}-{i}", 1.0 + i - number / 2, tile=i + 1, target=target, job=target.key) for i in range(3)
        ]
        batch += [
            timing(f"{number}-s", 1.0, target=target, workload=SOFTMAX if number else MATMUL, n=3, job=target.key)
        ]
        batch += [failure(f"{number}-f", "compile", target.key, tile=9, target=target)]
        store.add_measurements(batch)
        store.put_plans(target.key, {MATMUL.key: json.dumps([number])})
        store.acquire_lease(MATMUL.key, target.key, f"holder-{number}", secs=9.0)
    for number, target in enumerate((ZEN, ZEN_OLD)):
        everything = store.query(target.key)
        assert len(everything) == 5 and {m.target for m in everything} == {target.key}
        assert {m.id[0] for m in everything} == {str(number)}
        for workload in (MATMUL, SOFTMAX):
            for narrow in ({}, {"status": "ok"}, {"status": "failed"}, {"kinds": ("tuned",)}, {"symbols": {"n": 3}}):
                assert {m.target for m in store.query(target.key, workload.key, **narrow)} <= {target.key}  # type: ignore[arg-type]
            assert {m.target for m in store.query(target.key, workload.key, regime="warm")} <= {target.key}
            for n in (3, 8):
                assert {m.target for m in store.top(workload.key, target.key, {"n": n}, 100)} <= {target.key}
                best = store.best(workload.key, target.key, {"n": n})
                assert best is None or best.target == target.key
        best = store.best(MATMUL.key, target.key, {"n": 8})
        assert best is not None and best.id == f"{number}-0"
        assert store.count(target.key) == 5 and store.count(target.key, status="failed") == 1
        assert store.count(target.key, SOFTMAX.key) == number
        assert [w.key for w in store.workloads(target.key)] == [w.key for w in (MATMUL, SOFTMAX)[: 1 + number]]
        stats = store.stats(target.key)
        assert stats is not None and (stats.measurements, stats.ok, stats.workloads) == (5, 4, 1 + number)
        plan, lease = store.plan(MATMUL.key, target.key), store.lease(MATMUL.key, target.key)
        assert plan is not None and json.loads(plan.entries) == [number] and plan.version == 1
        assert [p.target for p in store.plans(target.key)] == [target.key]
        assert lease is not None and lease.holder == f"holder-{number}"
    assert store.query(third.key) == [] and store.count(third.key) == 0 and store.workloads(third.key) == []
    assert store.best(MATMUL.key, third.key, {"n": 8}) is None and store.top(MATMUL.key, third.key, {"n": 8}, 9) == []
    assert store.plan(MATMUL.key, third.key) is None and store.plans(third.key) == []
    assert store.lease(MATMUL.key, third.key) is None
    assert store.prune(ZEN.key, Selection(failed=True)) == 1 and store.count(ZEN_OLD.key) == 5


def test_top_ranks_only_checked_results(store: Store) -> None:
    filled(store)
    fast = [timing(f"unchecked-{i}", 1e-6, tile=i, checked=False) for i in range(3)]
    wrong = [failure(f"wrong-{i}", "wrong-result", tile=10 + i) for i in range(3)]
    store.add_measurements([*fast, *wrong])
    assert store.best(MATMUL.key, ZEN.key, {"n": 8}) is None
    assert store.top(MATMUL.key, ZEN.key, {"n": 8}, 100) == []
    store.add_measurements([timing("checked", 5.0, tile=1)])
    best = store.best(MATMUL.key, ZEN.key, {"n": 8})
    assert best is not None and best.id == "checked" and best.median_secs == 5.0
    assert [m.id for m in store.top(MATMUL.key, ZEN.key, {"n": 8}, 100)] == ["checked"]
