"""Databases of schemas 1 to 7, from before the first release, are converted without loss."""

from __future__ import annotations

import json
import lzma
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.database.records_made import MATMUL, ZEN, ZEN_OLD, timing
from tools.convert_database import VERSIONS, Conversion, convert, main
from tools.earlier_names import (
    PRIMITIVES,
    SKETCHES,
    SKIPS,
    name_of_set,
    rename_plans,
    rename_sketch,
    rename_trace,
    rename_variant,
)

from relax_tune.database.engine import make_engine, parse_url
from relax_tune.database.exchange.jsonl import export_lines
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.records import VariantRecord, canonical_json
from relax_tune.database.store import Store, open_store
from relax_tune.errors import DatabaseError
from relax_tune.schedules.schedule import PRIMITIVES as KNOWN_PRIMITIVES

FROZEN = Path(__file__).parent / "frozen"
EXPORT = Path(__file__).parents[1] / "formats" / "frozen" / "records.jsonl.xz"


def thaw(name: str, folder: Path) -> str:
    """Unpack a frozen database into a folder; return its path."""
    path = folder / name.removesuffix(".xz")
    path.write_bytes(lzma.decompress((FROZEN / name).read_bytes()))
    return str(path)


def without_origin(lines: list[str]) -> list[str]:
    """Return the lines of an export without the ids of databases, which a conversion draws at random."""
    return [re.sub(r'"origin":"\w*"', '"origin":""', line) for line in lines]


def export_of(store: Store) -> list[str]:
    return without_origin(list(export_lines(store)))


def test_every_unreleased_schema_has_a_frozen_file() -> None:
    assert sorted(p.name for p in FROZEN.glob("schema_*")) == [f"schema_{v}.db.xz" for v in VERSIONS]


@pytest.mark.parametrize("version", VERSIONS)
def test_frozen_database_is_converted(version: str, tmp_path: Path) -> None:
    old, new = thaw(f"schema_{version}.db.xz", tmp_path), str(tmp_path / "new.db")
    before = Path(old).read_bytes()
    conversion = convert(old, new)
    assert Path(old).read_bytes() == before
    assert conversion.counts["measurements"] == 6
    assert conversion.problems == (["measurements row 'lost': because"] if version == "0007" else [])
    with open_store(new) as store:
        assert store.check() == []
        assert store.targets() == sorted([ZEN, ZEN_OLD], key=lambda target: target.key)
        records = store.query(ZEN.key, MATMUL.key)
        assert [m.id for m in records] == ["bad", "library", "ok-16", "ok-8", "raw"]
        assert records[2] == timing("ok-16", 1e-5, tile=16)
        assert (records[0].stage, records[0].message, records[0].measured_at) == (
            "wrong-result",
            "off by 3 at [0, 1]",
            0.0,
        )
        best, plan, job = store.best(MATMUL.key, ZEN.key, {"n": 8}), store.plan(MATMUL.key, ZEN.key), store.job("job-1")
        assert best is not None and best.id == "ok-16"
        assert plan is not None and (plan.entries, plan.origin) == ('[["n<=8","ok-16"]]', "")
        assert job is not None and job.state == "done"
        assert store.histograms("minilm")[0].by_value == {128: 3}
        assert store.add_measurements([timing("new", 1e-7, measured_at=5.0)]) == 1


def test_schema_7_keeps_id_origins_and_submitted_jobs(tmp_path: Path) -> None:
    old, new = thaw("schema_0007.db.xz", tmp_path), str(tmp_path / "new.db")
    convert(old, new)
    with sqlite3.connect(old) as raw:
        (id,) = raw.execute("SELECT value FROM about WHERE name = 'id'").fetchone()
    raw.close()
    with open_queue(new) as queue:
        assert queue.id == id
        assert [(p.version, p.origin, p.turn) for p in queue.plans(ZEN.key)] == [(1, "", 1), (3, "f" * 32, 0)]
        (job,) = queue.submitted()
        assert (job.id, job.state, job.message, job.values("result")) == ("aa11", "done", "tuned", {"trials": 4})
        assert queue.log("aa11") == [(1, 0, "began\n"), (1, 1, "ended\n")]


@pytest.mark.parametrize(
    ("version", "change", "left_out"),
    [
        ("0006", "UPDATE measurements SET samples = x'ff' WHERE id = 'ok-8'", {"measurements": 1}),
        ("0006", "UPDATE variants SET parameters = '{}'", {"measurements": 6}),
        ("0006", "UPDATE measurements SET checked = 'yes' WHERE id = 'ok-8'", {"measurements": 1}),
        ("0007", "UPDATE measurements SET stage = 3, message = 99 WHERE id = x'016f6b2d38'", {"measurements": 2}),
        ("0007", "UPDATE plans SET entries = 'NaN' WHERE origin = ''", {"measurements": 1, "plans": 1}),
        ("0004", "DELETE FROM workloads WHERE key = 'w-matmul'", {"measurements": 6, "plans": 1}),
        ("0005", "DELETE FROM environments", {"measurements": 1}),
    ],
)  # fmt: skip
def test_invalid_rows_are_left_out_and_counted(
    version: str, change: str, left_out: dict[str, int], tmp_path: Path
) -> None:
    old, new = thaw(f"schema_{version}.db.xz", tmp_path), str(tmp_path / "new.db")
    with sqlite3.connect(old) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(change)
    raw.close()
    conversion = convert(old, new)
    assert dict(conversion.invalid) == left_out
    assert len(conversion.problems) == sum(left_out.values())


def test_conversion_refuses_other_databases_and_filled_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = thaw("schema_0005.db.xz", tmp_path), str(tmp_path / "new.db")
    with pytest.raises(DatabaseError, match="no file exists"):
        convert(str(tmp_path / "none.db"), new)
    assert main([old, new]) == 0
    assert json.loads(capsys.readouterr().out)["converted"]["measurements"] == 6
    with pytest.raises(DatabaseError, match="missing or empty"):
        convert(old, new)
    with pytest.raises(DatabaseError, match="needs no conversion"):
        convert(new, str(tmp_path / "newer.db"))
    assert main([old, new]) == 2 and "missing or empty" in capsys.readouterr().err


def test_failed_conversion_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    old, new = thaw("schema_0006.db.xz", tmp_path), str(tmp_path / "new.db")
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(Conversion, "_copy_plans", fail)
        convert(old, new)
    assert [p.name for p in tmp_path.iterdir()] == ["schema_0006.db"]
    assert convert(old, new).counts["measurements"] == 6


@pytest.mark.postgres
def test_server_database_is_converted(postgres_url: str, tmp_path: Path) -> None:
    """A PostgreSQL database of schema 6 is filled with the frozen rows and converted."""
    engine = make_engine(parse_url(postgres_url), read_only=False)
    with sqlite3.connect(thaw("schema_0006.db.xz", tmp_path)) as old, engine.begin() as new:
        old.row_factory = sqlite3.Row
        for name, statement in old.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall():
            new.execute(
                text(
                    statement.replace("FLOAT", "DOUBLE PRECISION")
                    .replace("DOUBLE,", "DOUBLE PRECISION,")
                    .replace("DOUBLE ", "DOUBLE PRECISION ")
                    .replace("PRECISION PRECISION", "PRECISION")
                )
            )
            for row in map(dict, old.execute(f"SELECT * FROM {name}").fetchall()):
                values = {k: bool(v) if k in ("checked", "cancel") else v for k, v in row.items()}
                columns = ", ".join(values)
                new.execute(
                    text(f"INSERT INTO {name} ({columns}) VALUES ({', '.join(f':{k}' for k in values)})"), values
                )
    engine.dispose()
    old.close()
    path = str(tmp_path / "new.db")
    assert convert(postgres_url, path).counts["measurements"] == 6
    with open_store(path) as store:
        assert store.check() == [] and len(store.query(ZEN.key)) == 5


# Renaming


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The converted database of a recorded tuning, whose records have every earlier name."""
    folder = tmp_path_factory.mktemp("recorded")
    convert(thaw("recorded_0002.db.xz", folder), str(folder / "new.db"))
    return str(folder / "new.db")


def test_recorded_tuning_is_converted_to_the_frozen_export(converted: str) -> None:
    with open_store(converted) as store:
        exported = map(json.loads, export_of(store))
    frozen = [json.loads(line) for line in without_origin(lzma.decompress(EXPORT.read_bytes()).decode().splitlines())]
    for new, old in zip(exported, frozen, strict=True):
        # Fields that later versions of the tool added are unknown.
        assert new == {**dict.fromkeys(new), **old}


def test_converted_traces_have_known_primitives(converted: str) -> None:
    with open_store(converted) as store:
        variants = {m.variant.key: m.variant for t in store.targets() for m in store.query(t.key)}
    assert len(variants) > 50
    for variant in variants.values():
        assert rename_variant(variant) is variant
        assert not any(f'["{name}",' in variant.trace for name in PRIMITIVES)


def test_renaming_is_injective_and_idempotent() -> None:
    for names in (PRIMITIVES, SKETCHES):
        assert not set(names) & set(names.values())
        assert len(set(names.values())) == len(names)
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


@pytest.mark.parametrize(("old", "new"), SKIPS.items())
def test_skip_of_rolling_update_is_renamed(old: str, new: str) -> None:
    trace = '{"tunables":{},"steps":[["rolling_update",{"block":"late","skip":"%s"}],["split",{"loop":"hidden"}]]}'
    assert rename_trace(trace % old) == trace % new
    assert rename_trace(trace % new) == trace % new


def test_equal_variants_after_renaming_share_a_key(tmp_path: Path) -> None:
    """Schema 2 has both names of one variant, and a plan set whose name hashes the variants."""
    old = VariantRecord("tuned", "rows.few", '{"tunables":{},"steps":[["join_iters",{"block":"b"}]]}')
    new = VariantRecord("tuned", "rowwise.warp_per_row", '{"tunables":{},"steps":[["fuse_block_iters",{"block":"b"}]]}')
    body: dict[str, Any] = {
        "entries": [{"tests": [], "variant": old.key}],
        "variants": {old.key: {n: getattr(old, n) for n in ("kind", "sketch", "trace", "parameters")}},
    }
    plan = {**body, "model": "m", "set": name_of_set("m", {MATMUL.key: body})}
    path = thaw("schema_0002.db.xz", tmp_path)
    with sqlite3.connect(path) as raw:
        for variant, id in ((old, "ok-8"), (new, "ok-16")):
            values = (variant.key, variant.kind, variant.sketch, variant.trace, variant.parameters)
            raw.execute("INSERT INTO variants (key, kind, sketch, trace, parameters) VALUES (?, ?, ?, ?, ?)", values)
            raw.execute("UPDATE measurements SET variant = ? WHERE id = ?", (variant.key, id))
        raw.execute("UPDATE plans SET entries = ?", (canonical_json(plan),))
    raw.close()
    convert(path, str(tmp_path / "new.db"))
    with open_store(str(tmp_path / "new.db")) as store:
        assert {m.id: m.variant for m in store.measurements(["ok-8", "ok-16"])} == {"ok-8": new, "ok-16": new}
        current = store.plan(MATMUL.key, ZEN.key)
        assert current is not None
        document = json.loads(current.entries)
        assert [e["variant"] for e in document["entries"]] == [new.key] == list(document["variants"])
        assert document["set"] == name_of_set("m", {MATMUL.key: document}) != plan["set"]


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
