"""JSON Lines: what goes out comes back, hostile or torn files do no harm."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, ZEN_OLD, failure, filled, timing
from tests.support.effort import examples

from relax_tune.database.exchange.jsonl import export_file, export_lines, import_file, import_lines, merge
from relax_tune.database.records import STAGES, Environment, Measurement, ShapeHistogram, Target, Workload
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.errors import DatabaseError


def rich(store: Store) -> Store:
    """A store with some of everything."""
    filled(store)
    environment = store.add_environment(Environment((("relax-tune", "0.1.0"),)))
    store.add_measurements(
        [
            timing("a", 1.0, environment=environment, measured_at=5.5, build_secs=0.125, job="j"),
            timing("b", 1e-7, tile=2, kind="library", workload=SOFTMAX, samples_secs=(0.1, 0.2, 0.30000000000000004)),
            timing("c", 1.0, target=ZEN_OLD, regime="flushed", checked=False),
            failure("d", "crash", "bad\nthing «1»"),
        ]
    )
    store.put_plans(ZEN.key, {MATMUL.key: '["one"]'})
    store.put_plans(ZEN.key, {MATMUL.key: '["two"]'})
    store.put_histogram(ShapeHistogram("minilm", "n", '{"128":3}'))
    return store


def as_kept(store: Store, lines: Iterable[str]) -> list[str]:
    """The lines as a store tells them: one before schema 7 knows no origin of plans."""
    return [line if store.id else re.sub(r'"origin":"\w*"', '"origin":""', line) for line in lines]


def test_a_round_trip_through_a_file_is_exact(store: Store, tmp_path: Path) -> None:
    source = rich(MemoryStore())
    path = tmp_path / "records.jsonl"
    lines = export_file(source, path)
    assert lines == len(path.read_text(encoding="utf-8").splitlines())
    assert [file.name for file in tmp_path.glob("records.jsonl*")] == ["records.jsonl"], "no half-written file stays"
    report = import_file(store, path)
    assert (report.measurements, report.plans, report.left_out, report.problems) == (4, 2, 0, [])
    assert as_kept(store, export_lines(store)) == as_kept(store, export_lines(source))
    again = import_file(store, path)
    assert (again.lines, again.measurements, again.plans, again.left_out) == (lines, 0, 0, 0)
    assert as_kept(store, export_lines(store)) == as_kept(store, export_lines(source))


@given(st.data())
@settings(max_examples=examples(12), deadline=None)
def test_any_records_survive(data: st.DataObject) -> None:
    text = st.text(max_size=15).filter(lambda value: "\0" not in value)
    text = text.filter(lambda value: value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
    source = filled(MemoryStore())
    for i in range(data.draw(st.integers(0, 6))):
        more = {"job": data.draw(text), "build_secs": data.draw(st.floats(0, 1e6))}
        samples = tuple(data.draw(st.lists(st.floats(0, 1e9), min_size=1, max_size=4)))
        made = timing(f"m{i}", 1.0, tile=data.draw(st.integers(-5, 5)), n=data.draw(st.integers(-(2**63), 2**63 - 1)))
        if data.draw(st.booleans()):
            values = {"status": "failed", "stage": data.draw(st.sampled_from(STAGES)), "message": "x" + data.draw(text)}
        else:
            values = {"samples_secs": samples, "checked": data.draw(st.booleans())}
        source.add_measurements(
            [Measurement(made.id, made.workload, made.target, made.variant, made.symbols, **values, **more)]  # type: ignore[arg-type]
        )
    lines = list(export_lines(source))
    other = MemoryStore()
    report = import_lines(other, lines)
    assert report.problems == [] and list(export_lines(other)) == lines
    assert other.query(ZEN.key, MATMUL.key) == source.query(ZEN.key, MATMUL.key)


def test_a_torn_last_line_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    export_file(rich(MemoryStore()), path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    wanted = 0
    for number, line in enumerate(lines, 1):
        is_measurement = json.loads(line)["record"] == "measurement"
        before = b"".join(lines[: number - 1])
        for cut in (1, len(line) // 2, len(line) - 2):
            torn.write_bytes(before + line[:cut])
            store = MemoryStore()
            if number == 1:
                with pytest.raises(DatabaseError, match="line 1"):
                    import_file(store, torn)
                continue
            report = import_file(store, torn)
            assert [problem.line for problem in report.problems] == [number] and report.left_out == 1
            assert "ends in the middle" in report.problems[0].why
            assert report.measurements == wanted
        wanted += is_measurement
    torn.write_bytes(whole.removesuffix(b"\n"))
    assert import_file(MemoryStore(), torn).problems == [], "only the last line end is missing"


BAD_LINES = [
    b"\xff\xfe garbage",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"v":1}',
    b'{"v":3,"record":"target","kind":"c","name":"x","fingerprint":[],"key":"?"}',
    b'{"v":true,"record":"target"}',
    b'{"v":1,"record":"spaceship"}',
    b'{"v":1,"record":["target"]}',
    b'{"v":1,"record":"target","kind":"c","name":"x","fingerprint":[],"key":"wrong"}',
    b'{"v":1,"record":"target","kind":"c","name":"x","fingerprint":{"a":1},"key":"wrong"}',
    b'{"v":1,"record":"target","kind":"c","name":"x"}',
    b'{"v":1,"record":"workload","key":7,"text":"t","format_version":1,"hint":""}',
    b'{"v":1,"record":"workload","key":"\\ud800","text":"t","format_version":1,"hint":""}',
    b'{"v":1,"record":"workload","key":"k","text":"t","format_version":1e999,"hint":""}',
    b'{"v":1,"record":"variant","kind":"tuned","sketch":"","trace":"[","parameters":"{}","key":""}',
    b'{"v":1,"record":"variant","kind":"tuned","sketch":"","trace":"[]","parameters":"{\\"a\\":\\"b\\"}","key":""}',
    b'{"v":1,"record":"measurement","variant":{"a":[]}}',
    b'{"v":1,"record":"plan","workload":"nobody","target":"nobody","version":1,"entries":"[]"}',
    b'{"v":1,"record":"plan","workload":"w-matmul","target":"nobody","version":99999999999,"entries":"[]"}',
    b'{"v":1,"record":"histogram","task":"t","symbol":"n","counts":"{\\"x\\":1}"}',
    b"[" * 100_000,
    b'{"v":1,"record":"target","fingerprint":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"v":' + b"9" * 10_000 + b"}",
]


def test_hostile_lines_are_left_out_one_by_one(store: Store) -> None:
    good = [line.encode() + b"\n" for line in export_lines(rich(MemoryStore()))]
    measurement = next(line for line in good if b'"record":"measurement"' in line and b'"id":"a"' in line)
    wrong = [
        measurement.replace(b'"samples":[1.0', b'"samples":[NaN'),
        measurement.replace(b'"samples":[1.0', b'"samples":[1e999'),
        measurement.replace(b'"samples":[1.0', b'"samples":[' + b"1" * 400),
        measurement.replace(b'"checked":true', b'"checked":"yes"'),
        measurement.replace(b'"status":"ok"', b'"status":"won"'),
        measurement.replace(b'"id":"a"', b'"id":null'),
        measurement.replace(b'"id":"a"', b'"id":"a2"').replace(b'"workload":"w-matmul"', b'"workload":"nobody"'),
        measurement.replace(b'"n":8', b'"n":9'),
    ]
    assert all(line != measurement for line in wrong)
    bad = [line + b"\n" for line in BAD_LINES]
    report = import_lines(store, [*bad[:10], *good, *bad[10:], *wrong, b"\n"])
    assert report.left_out == len(bad) + len(wrong), [problem.why for problem in report.problems]
    assert report.measurements == 4 and report.plans == 2
    assert as_kept(store, export_lines(store)) == as_kept(store, (line.decode().strip() for line in good))
    assert all(len(problem.why) < 600 for problem in report.problems)


def test_malformed_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    path.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(DatabaseError, match="db export"):
        import_file(MemoryStore(), path)
    with pytest.raises(DatabaseError, match="check the path"):
        import_file(MemoryStore(), tmp_path / "nothing")
    with pytest.raises(DatabaseError, match="another path"):
        export_file(MemoryStore(), tmp_path / "no" / "folder.jsonl")
    with pytest.raises(DatabaseError, match="does not exist"):
        list(export_lines(MemoryStore(), ["nobody"]))


def test_read_only_store_raises_on_import(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'r.db'}"
    open_store(url).close()
    with open_store(url, read_only=True) as store, pytest.raises(DatabaseError, match="read-only"):
        import_lines(store, export_lines(rich(MemoryStore())))


def test_one_target_can_be_exported(store: Store) -> None:
    merge(rich(MemoryStore()), store)
    other = MemoryStore()
    import_lines(other, export_lines(store, [ZEN_OLD.key]))
    assert other.targets() == [ZEN_OLD] and [w.key for w in other.workloads(None)] == [MATMUL.key]
    assert [m.id for m in other.query(ZEN_OLD.key, MATMUL.key)] == ["c"]


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_merging_is_a_union_in_any_order(left: set[int], right: set[int]) -> None:
    def holding(ids: set[int]) -> MemoryStore:
        store = MemoryStore()
        filled(store).add_measurements([timing(f"m{i}", 1.0 + i, tile=i) for i in ids])
        return store

    one, other = holding(left), holding(right)
    assert merge(holding(right), one).measurements == len(right - left)
    merge(holding(left), other)
    assert list(export_lines(one)) == list(export_lines(other)) == list(export_lines(holding(left | right)))


def test_values_named_like_fields_round_trip() -> None:
    source = MemoryStore()
    target = Target("target", "kind", (("record", "v"), ("v", "2")), (("key", 3),))
    source.add_target(target)
    source.add_workload(Workload("record", "v", 0))
    other = MemoryStore()
    merge(source, other)
    assert other.targets() == [target] and other.targets()[0].limits == target.limits
    assert other.workload("record") == Workload("record", "v", 0)


def test_export_follows_no_waiting_link_and_keeps_a_narrow_mode(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "r.jsonl"
    victim.write_text("mine")
    (tmp_path / f"r.jsonl.{os.getpid()}.part").symlink_to(victim)
    path.touch(mode=0o600)
    export_file(filled(MemoryStore()), path)
    assert victim.read_text() == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size > 0
