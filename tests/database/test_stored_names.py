"""Records made before schema 3 have older names of primitives and sketches: what migrations and imports make of them."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import insert, inspect, select
from tests.database.exchange.t4_texts import t4_measurements
from tests.database.recorded_model import model
from tests.database.records_made import MATMUL, ZEN, timing
from tests.support.effort import some

from relax_tune.database import rows, schema
from relax_tune.database.engine import make_engine, parse_url
from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.models import Base
from relax_tune.database.records import Measurement, PlanRecord, VariantRecord, canonical_json
from relax_tune.database.sql import plain
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.database.stored_names import (
    PRIMITIVES,
    SKETCHES,
    SKIPS,
    plan_set_name,
    rename_plans,
    rename_sketch,
    rename_trace,
    rename_variant,
)
from relax_tune.database.upgrade import upgrade
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.schedules.schedule import PRIMITIVES as KNOWN_PRIMITIVES
from relax_tune.schedules.schedule import replay
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.job.job import Job
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.unfused_variants import in_parts, parts_of

FROZEN = Path(__file__).parent / "frozen"
RECORDED = FROZEN / "recorded_0002.db.xz"
"""A tuning of `recorded_model` with two trials a task, and one unmeasured record of every other old name."""
DEVICE = json.loads((FROZEN / "recorded_0002.device.json").read_text())

# Columns that schema 2 lacks.
LATER = ("limits", "reference", "worker", "host", "unit", "clock_mhz", "celsius")


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    path.write_bytes(lzma.decompress(RECORDED.read_bytes()))
    return path


@pytest.fixture(scope="session")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("upgraded") / "old.db"
    path.write_bytes(lzma.decompress(RECORDED.read_bytes()))
    upgrade(str(path))
    with open_store(str(path), read_only=True) as store:
        yield store


def measurements(store: Store) -> dict[str, Measurement]:
    return {m.id: m for target in store.targets() for m in store.query(target.key)}


def primitives_of(record: VariantRecord) -> set[str]:
    parts = parts_of(record).variants if in_parts(record) else (record,)
    return {step.primitive for part in parts if part.trace != "[]" for step in Trace.from_json(part.trace).steps}


def copy_to(url: str, source: Path) -> None:
    """Make a database of schema 2 with the rows of a SQLite file."""
    read, write = (make_engine(parse_url(u), read_only=False) for u in (f"sqlite:///{source}", url))
    with read.connect() as old, write.begin() as new:
        config = schema._config()
        config.attributes["connection"] = new
        command.upgrade(config, "0002")
        looking = inspect(old)
        known = set(looking.get_table_names())
        before = plain.TABLES.tables
        shared = [t for t in Base.metadata.sorted_tables if t.name in known and t.name not in before]
        for table in [*shared, *before.values()]:
            there = {c["name"] for c in looking.get_columns(table.name)}
            columns = [c for c in table.columns if c.name in there]
            if found := [dict(row) for row in old.execute(select(*columns)).mappings()]:
                new.execute(insert(table), found)
    read.dispose()
    write.dispose()


def lines_of(store: Store) -> list[str]:
    """The export of a store, without the ids of the databases that plans are from."""
    return [re.sub(r'"origin":"\w*"', '"origin":""', line) for line in export_lines(store)]


def test_renaming_twice_changes_nothing() -> None:
    for words in (PRIMITIVES, SKETCHES):
        assert not set(words) & set(words.values())


def test_renaming_is_injective() -> None:
    assert len(set(PRIMITIVES.values())) == len(PRIMITIVES)
    assert len(set(SKETCHES.values())) == len(SKETCHES)


def test_new_names_of_primitives_are_known() -> None:
    assert set(PRIMITIVES.values()) <= set(KNOWN_PRIMITIVES)
    assert not set(PRIMITIVES) & set(KNOWN_PRIMITIVES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("matmul.stream", "matmul.stream_k"),
        ("matmul.panels.packed", "matmul.panels.packed"),
        ("reductions.split", "reductions.two_pass"),
        ("split.serial", "reductions.two_pass.serial"),
        ("reductions.columns", "reductions.columns"),
        ("columns.parallel", "reductions.columns.parallel"),
        ("rows.few.kept", "rowwise.warp_per_row.in_registers"),
        ("rows.serial.keep_all", "rowwise.serial.keep_all"),
        ("matvec.columns.grouped.ahead.parallel", "gemv.columns.grouped.prefetch.parallel"),
        ("injective.turned.stream.row", "injective.transposed.nontemporal.row"),
        ("openblas.sgemm+injective.stream", "openblas.sgemm+injective.nontemporal"),
        ("a.b+injective.stream | rows.parallel.registers", "a.b+injective.nontemporal | rowwise.parallel.registers"),
        ("rows", "rows"),
        ("t4", "t4"),
    ],
)
def test_sketch_name_is_matched_as_a_whole(old: str, new: str) -> None:
    assert rename_sketch(old) == new


@pytest.mark.parametrize("trace", ["[]", '{"steps":4}', '{"steps":["join_iters"]}', '{"parts":["rows.few"]}'])
def test_foreign_trace_stays(trace: str) -> None:
    variant = VariantRecord("tuned", "t4", trace)
    assert rename_variant(variant) is variant


def test_upgrade_renames_every_old_word(old_file: Path, upgraded: Store) -> None:
    engine = make_engine(parse_url(str(old_file)), read_only=True)
    with engine.connect() as connection:
        found = [rows.variant_of(row) for row in connection.execute(select(plain.VARIANTS)).mappings()]
    engine.dispose()
    words = {word for v in found for part in v.sketch.split(" | ") for word in part.split("+")}
    # names that no function of the recording has: rarely applicable, or the second of two orders
    rare = ("matvec.dots.grouped", ".ahead.serial", "grouped.ahead", "dots.ahead", "injective.turned.")
    missing = {old for old in SKETCHES if old not in words and not any(part in old for part in rare)}
    assert missing <= {"columns.serial", "rows.serial.registers"}
    assert set(PRIMITIVES) <= {name for v in found for name in primitives_of(v)}
    assert upgraded.check() == []
    renamed = {m.variant.key: m.variant for m in measurements(upgraded).values()}
    assert renamed == {v.key: v for v in map(rename_variant, found)}
    for variant in renamed.values():
        assert rename_variant(variant) is variant
        assert primitives_of(variant) <= set(KNOWN_PRIMITIVES)


@pytest.mark.slow
def test_upgrade_works_on_both_engines(sql_url: str, old_file: Path, upgraded: Store, tmp_path: Path) -> None:
    if sql_url.startswith("sqlite"):
        sql_url = f"sqlite:///{tmp_path / 'copy.db'}"
        Path(tmp_path / "copy.db").touch()
    copy_to(sql_url, old_file)
    assert upgrade(sql_url) == ("0002", schema.versions()[-1])
    with open_store(sql_url) as store:
        assert store.check() == []
        assert measurements(store) == measurements(upgraded)
        assert lines_of(store) == lines_of(upgraded)


def test_failed_upgrade_changes_nothing(old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(Exception, match="o space left"):
        broken.setattr("relax_tune.database.stored_names._plan", fail)
        upgrade(str(old_file))
    assert upgrade(str(old_file))[0] == "0002"


@pytest.mark.slow
def test_traces_replay_after_the_upgrade(upgraded: Store) -> None:
    functions = {w.key: parse_prim_func(w.text) for w in upgraded.workloads(None)}
    found = [(m.workload, m.variant) for m in measurements(upgraded).values()]
    traces = sorted({(workload, v.trace) for workload, v in found if v.kind == "tuned" and not in_parts(v)})
    assert len(traces) > 50
    for workload, trace in some(traces):
        replay(Trace.from_json(trace), functions[workload])


def test_upgrade_merges_equal_variants(tmp_path: Path, sql_url: str) -> None:
    old = VariantRecord("tuned", "rows.few", '{"tunables":{},"steps":[["join_iters",{"block":"b"}]]}')
    new = VariantRecord("tuned", "rowwise.warp_per_row", '{"tunables":{},"steps":[["fuse_block_iters",{"block":"b"}]]}')
    body: dict[str, Any] = {
        "entries": [{"tests": [], "variant": old.key}],
        "variants": {old.key: {n: getattr(old, n) for n in ("kind", "sketch", "trace", "parameters")}},
    }
    plan = {**body, "model": "m", "set": plan_set_name("m", {MATMUL.key: body})}
    engine = make_engine(parse_url(sql_url), read_only=False) if not sql_url.startswith("sqlite") else None
    if engine is None:
        Path(sql_url.removeprefix("sqlite:///")).touch()
        engine = make_engine(parse_url(sql_url), read_only=False)
    with engine.begin() as connection:
        config = schema._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        tables = Base.metadata.tables
        target = {name: value for name, value in rows.target_values(ZEN).items() if name not in LATER}
        connection.execute(insert(tables["targets"]), target)
        connection.execute(insert(tables["workloads"]), rows.workload_values(MATMUL))
        connection.execute(insert(plain.VARIANTS), [rows.variant_values(v) for v in (old, new)])
        made = [replace(timing(id, 1e-5), variant=v) for id, v in (("a", old), ("b", new))]
        connection.execute(
            insert(plain.MEASUREMENTS),
            [{name: value for name, value in rows.measurement_values(m).items() if name not in LATER} for m in made],
        )
        stored = rows.plan_values(PlanRecord(MATMUL.key, ZEN.key, 1, canonical_json(plan)))
        connection.execute(insert(plain.PLANS), {column.name: stored[column.name] for column in plain.PLANS.columns})
    engine.dispose()
    upgrade(sql_url)
    with open_store(sql_url) as store:
        assert store.check() == []
        assert {id: m.variant for id, m in measurements(store).items()} == {"a": new, "b": new}
        found = store.plan(MATMUL.key, ZEN.key)
        assert found is not None
        document = json.loads(found.entries)
        assert [e["variant"] for e in document["entries"]] == [new.key] == list(document["variants"])
        assert document["set"] == plan_set_name("m", {MATMUL.key: document}) != plan["set"]


def test_partial_plan_set_keeps_name() -> None:
    variant = VariantRecord("tuned", "rows.few")
    fields = {n: getattr(variant, n) for n in ("kind", "sketch", "trace", "parameters")}
    plan = canonical_json(
        {"entries": [{"variant": variant.key}], "variants": {variant.key: fields}, "model": "m", "set": "of more"}
    )
    (renamed,) = rename_plans([("w", plan)])
    assert json.loads(renamed)["set"] == "of more"
    assert rename_variant(variant).key in renamed
    assert rename_plans([("w", renamed), ("v", "[1]")]) == [renamed, "[1]"]


@pytest.mark.slow
def test_old_json_lines_import_as_the_upgrade_renames(upgraded: Store) -> None:
    lines = lzma.decompress((FROZEN / "recorded_0002.jsonl.xz").read_bytes()).splitlines()
    with MemoryStore() as store:
        report = import_lines(store, lines)
        assert report.problems == []
        assert measurements(store) == measurements(upgraded)
        assert lines_of(store) == lines_of(upgraded)
        assert import_lines(store, lines).measurements == 0


def test_old_t4_imports_as_the_upgrade_renames(upgraded: Store) -> None:
    document = lzma.decompress((FROZEN / "recorded_0002.t4.json.xz").read_bytes()).decode()
    (target,) = (t for t in upgraded.targets() if t.name == DEVICE["name"])
    known = {m.id: m for m in upgraded.query(target.key)}
    found = t4_measurements(document, None, target.key, trust_checks=True)
    assert {m.id: m.subject for m in found} == {id: m.subject for id, m in known.items()} and len(found) == len(known)


@pytest.mark.parametrize(("old", "new"), SKIPS.items())
def test_rename_trace_skip_of_rolling_update_is_renamed(old: str, new: str) -> None:
    text = '{"tunables":{},"steps":[["rolling_update",{"block":"late","skip":"%s"}],["split",{"loop":"hidden"}]]}'
    assert rename_trace(text % old) == text % new
    assert rename_trace(text % new) == text % new


def device() -> DeviceInfo:
    """The device of the recording, described: the records are its, wherever the test runs."""
    pairs = {name: tuple(map(tuple, DEVICE[name])) for name in ("fingerprint", "limits", "libraries")}
    return DeviceInfo(DEVICE["kind"], DEVICE["name"], **pairs)


class NoRunner:
    """Fails the test that measures."""

    def calibrate(self, reference: Any) -> Any:
        return reference

    def slots(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"wanted nothing measured, found {name!r} asked of the runner")


@pytest.mark.slow
def test_upgraded_records_answer_a_whole_tuning(old_file: Path) -> None:
    upgrade(str(old_file))
    with open_store(str(old_file)) as store:
        job = Job(model(), device(), store, Settings(target="c", trials=2, effort="quick"))
        work = job.tune(NoRunner())  # type: ignore[arg-type]
        assert (work.measurements, work.problems) == (0, ())
        built = job.build()
        before = store.plans(job.target.key)
        job.store_plans(built)
        assert store.plans(job.target.key) == before, "the same plans, under the same name"
