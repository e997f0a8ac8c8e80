"""Plans of several databases: merged under their origins, never switched to; conflicts and new records by date."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, filled, timing

from relax_tune.database.exchange.jsonl import export_lines, import_lines, merge
from relax_tune.database.records import PlanRecord, Workload
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.errors import DatabaseError


def plan(model: str, name: str) -> str:
    return json.dumps({"model": model, "set": name, "entries": [], "variants": {}})


def put(store: Store, *names: str, model: str = "m", workload: str = MATMUL.key) -> Store:
    for name in names:
        store.put_plans(ZEN.key, {workload: plan(model, name)})
    return store


def current(store: Store, workload: str = MATMUL.key) -> str:
    found = store.plan(workload, ZEN.key)
    return "" if found is None else str(json.loads(found.entries)["set"])


@pytest.fixture
def url(sql_url: str) -> str:
    open_store(sql_url).close()
    return sql_url


def test_merge_switches_no_plan_and_keeps_the_sets_of_both(url: str, another: Callable[[], MemoryStore]) -> None:
    other = put(filled(another()), "b1", "b2", "b3")
    with open_store(url) as store:
        put(filled(store), "a1")
        report = merge(other, store)
        assert (report.plans, report.conflicting, current(store)) == (3, 0, "a1")
        assert [(p.origin, p.version) for p in store.plans(ZEN.key)] == [("", 1), *((other.id, v) for v in (1, 2, 3))]
        put(other, "b4")
        assert merge(other, store).plans == 1 and current(store) == "a1"
        text = next(p.entries for p in store.plans(ZEN.key) if p.version == 3)
        store.put_plans(ZEN.key, {MATMUL.key: text})  # as `plan --restore` does
        assert current(store) == "b3" and merge(other, store).plans == 0 and current(store) == "b3"


def test_first_merge_brings_the_current_set_of_a_model_without_any(
    url: str, another: Callable[[], MemoryStore]
) -> None:
    first, second = put(filled(another()), "b1", "b2"), put(filled(another()), "c1", "c2", "c3")
    put(first, "other-1", model="another model", workload=SOFTMAX.key)
    with open_store(url) as store:
        merge(first, store)
        assert current(store) == "b2" and current(store, SOFTMAX.key) == "other-1"
        merge(second, store)
        put(first, "b9")
        merge(first, store)
        assert current(store) == "b2", "later merges switch nothing"


def test_plans_come_home_as_own_ones(url: str, another: Callable[[], MemoryStore]) -> None:
    away = another()
    with open_store(url) as store:
        put(filled(store), "a1", "a2")
        merge(store, away)
        assert [p.origin for p in away.plans(ZEN.key)] == [store.id] * 2
        before = store.plans(ZEN.key)
        assert merge(away, store).plans == 0 and store.plans(ZEN.key) == before


def test_plans_without_origin_switch_nothing(another: Callable[[], MemoryStore]) -> None:
    lines = []
    for line in export_lines(put(filled(another()), "b1", "b2")):
        values = json.loads(line)
        values.pop("origin", None)
        values.pop("current", None)
        lines.append(json.dumps(values))
    store = put(filled(another()), "a1")
    assert import_lines(store, lines).plans == 2 and current(store) == "a1"


def test_conflicts_are_named_and_the_first_stays(url: str, another: Callable[[], MemoryStore]) -> None:
    other = filled(another())
    other.add_measurements([timing("same", 1.0), timing("other", 2.0)])
    with open_store(url) as store:
        filled(store).add_measurements([timing("same", 1.0), timing("other", 1.0)])
        report = merge(other, store)
        assert report.measurements == 0 and report.conflicting == 1 and report.conflicts == ["measurement other"]
        assert [m.median_secs for m in store.measurements(["other"])] == [1.0]
    copied = filled(another())
    for name in ("x", "y"):
        plans = [PlanRecord(MATMUL.key, ZEN.key, 1, plan("m", name), "elsewhere")]
        source = filled(another())
        source.add_plans(plans)
        report = merge(source, copied)
    assert report.conflicts == [f"plan 1 of workload {MATMUL.key[:12]} from elsewhere"]


def test_reference_times_of_units_go_along(url: str, another: Callable[[], MemoryStore]) -> None:
    source = filled(another())
    source.add_target(replace(ZEN, reference=(("compute", 1.5e-3), ("memory", 2.5e-3)), limits=(("workers", 4),)))
    with open_store(url) as store:
        merge(source, store)
        found = store.target(ZEN.key)
        assert found is not None and dict(found.reference) == {"compute": 1.5e-3, "memory": 2.5e-3}
        third = another()
        merge(store, third)
        assert third.target(ZEN.key) == found and third.targets()[0].reference == found.reference


def test_export_since_a_moment_has_new_records_only(url: str, another: Callable[[], MemoryStore]) -> None:
    with open_store(url) as store:
        old = [timing(f"old{i}", 1.0, tile=i, measured_at=100.0) for i in range(5)]
        new = [timing("new", 1.0, tile=1, measured_at=300.0), timing("newer", 1.0, workload=SOFTMAX, measured_at=301.0)]
        filled(store).add_measurements([*old, *new, timing("undated", 1.0)])
        put(store, "a1")
        kinds = [json.loads(line)["record"] for line in export_lines(store, since=200.0)]
        assert (kinds.count("measurement"), kinds.count("variant"), kinds.count("plan")) == (2, 1, 1)
        assert store.measured(ZEN.key, since=200.0) == [MATMUL.key, SOFTMAX.key]
        assert store.measured(ZEN.key, since=301.0) == [SOFTMAX.key]
        mirror = filled(another())
        mirror.add_measurements([*old, timing("undated", 1.0)])
        assert merge(store, mirror, since=200.0).measurements == 2
        assert mirror.query(ZEN.key) == store.query(ZEN.key)


def test_workload_refused_by_the_judge_is_named(another: Callable[[], MemoryStore]) -> None:
    def judge(workload: Workload) -> None:
        if workload.key == SOFTMAX.key:
            raise DatabaseError("another text")

    store = another()
    report = import_lines(store, export_lines(filled(another())), judge)
    assert [p.why for p in report.problems] == ["another text"] and store.workload(SOFTMAX.key) is None


def test_lines_of_a_target_that_is_not_described_are_left_out(another: Callable[[], MemoryStore]) -> None:
    source = put(filled(another()), "b1")
    source.add_measurements([timing("theirs", 2.0)])
    lines = [line for line in export_lines(source) if json.loads(line)["record"] != "target"]
    report = import_lines(filled(another()), lines)
    assert (report.measurements, report.plans, report.left_out) == (0, 0, 2)
    assert all("a target of an earlier line" in p.why for p in report.problems)


@pytest.mark.parametrize(("secs", "accepted"), [(1.2e-3, True), (1.3e-3, False), (0.7e-3, False), (1e-2, False)])
def test_records_of_units_with_contradicting_reference_times_are_left_out(
    url: str, another: Callable[[], MemoryStore], secs: float, accepted: bool
) -> None:
    source = put(filled(another()), "b1")
    source.add_measurements([timing("theirs", 2.0)])
    source.add_target(replace(ZEN, reference=(("compute", secs),)))
    with open_store(url) as store:
        filled(store).add_target(replace(ZEN, reference=(("compute", 1e-3),)))
        report = merge(source, store)
        known = store.target(ZEN.key)
        assert known is not None and dict(known.reference) == {"compute": 1e-3}
        assert (report.measurements, report.plans) == ((1, 1) if accepted else (0, 0))
        assert report.left_out == (0 if accepted else 3), "the target, its measurement and its plan"
        assert [ZEN.name in p.why and "compute" in p.why for p in report.problems] == ([] if accepted else [True])
