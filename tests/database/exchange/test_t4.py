"""T4: our results as others read them, others' results as ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.database.exchange.t4_texts import t4_measurements, t4_text
from tests.database.records_made import MATMUL, SOFTMAX, ZEN, ZEN_OLD, failure, filled, timing

from relax_tune.database.exchange.t4_import import import_t4_file
from relax_tune.database.records import STAGES
from relax_tune.database.store import MemoryStore
from relax_tune.errors import DatabaseError


def kernel_tuner(**changes: Any) -> str:
    """A results file in the shape Kernel Tuner 1.x writes (schema 1.0.0, milliseconds, no metadata)."""
    result = {
        "timestamp": "2026-01-02T03:04:05",
        "configuration": {"block_size_x": 128, "layout": "NCHW", "scale": 0.5, "use_padding": True},
        "times": {"compilation": 120.0, "benchmark": 3.0, "framework": 1.0, "runtimes": [2.0, 1.0, 4.0]},
        "invalidity": "correct",
        "correctness": 1,
        "measurements": [{"name": "time", "value": 2.3, "unit": "ms"}],
        "objectives": ["time"],
    }
    return json.dumps({"schema_version": "1.0.0", "results": [{**result, **changes}]})


def test_our_results_come_back() -> None:
    records = [timing("a", 1.5e-5, tile=16, n=512), *(failure(f"f-{stage}", stage, tile=3) for stage in STAGES)]
    text = t4_text(ZEN, records)
    found = {m.id: m for m in t4_measurements(text, MATMUL.key, ZEN.key)}
    assert found == {m.id: replace(m, checked=False) for m in records}, "a file's word is no output check"
    trusted = {m.id: m for m in t4_measurements(text, MATMUL.key, ZEN.key, trust_checks=True)}
    assert trusted == {m.id: m for m in records}


def test_exported_t4_meets_schema() -> None:
    opencl = replace(ZEN, kind="opencl")
    records = [
        replace(timing("a", 2.0), target=opencl.key, measured_at=1e9),
        replace(failure("b", "crash"), target=opencl.key),
    ]
    document = json.loads(t4_text(opencl, records))
    assert document["schema_version"] == "1.1.0"
    assert document["metadata"]["timeunit"] == "seconds" and document["metadata"]["compute_api"] == "OpenCL"
    ok, failed = document["results"]
    assert ok["configuration"] == {"t": 1, "symbol.n": 8} and ok["times"]["runtimes"] == [2.0, 1.0, 4.0]
    assert (ok["invalidity"], ok["correctness"]) == ("correct", 1)
    assert ok["measurements"][0] == {"name": "time", "value": 2.0, "unit": "seconds"}
    assert ok["timestamp"] == "2001-09-09T01:46:40+00:00"
    assert (failed["invalidity"], failed["correctness"], failed["times"]["runtimes"]) == ("runtime", 0, [])
    assert "compute_api" not in json.loads(t4_text(ZEN, []))["metadata"], "the schema has no word for C"
    with pytest.raises(DatabaseError, match="each target"):
        t4_text(ZEN_OLD, [timing("a", 1.0)])


def test_t4_file_of_a_slower_unit_is_refused(tmp_path: Path) -> None:
    path, store = tmp_path / "t4.json", filled(MemoryStore())
    path.write_text(t4_text(replace(ZEN, reference=(("compute", 2e-3),)), [timing("a", 1.0)]))
    store.add_target(replace(ZEN, reference=(("compute", 1e-3),)))
    for target in (None, ZEN.key):
        with pytest.raises(DatabaseError, match="compute"):
            import_t4_file(store, path, None, target)
    assert not store.count(ZEN.key)


def test_import_t4_converts_units_and_leaves_results_unchecked() -> None:
    found = t4_measurements(kernel_tuner(), MATMUL.key, ZEN.key)
    assert found == t4_measurements(kernel_tuner(), MATMUL.key, ZEN.key)
    (result,) = found
    assert result.samples_secs == pytest.approx((2e-3, 1e-3, 4e-3)) and result.build_secs == pytest.approx(0.12)
    assert result.variant.values == {"block_size_x": 128}
    assert json.loads(result.variant.trace) == {
        "block_size_x": 128,
        "layout": "NCHW",
        "scale": 0.5,
        "use_padding": True,
    }
    store = filled(MemoryStore())
    assert store.add_measurements(found) == 1 and store.add_measurements(found) == 0
    assert store.best(MATMUL.key, ZEN.key, {}) is None


@pytest.mark.parametrize("word", ["timeout", "compile", "runtime", "correctness", "constraints"])
def test_import_t4_failures_keep_stage(word: str) -> None:
    (result,) = t4_measurements(kernel_tuner(invalidity=word, times={}), MATMUL.key, ZEN.key)
    assert result.status == "failed" and result.samples_secs == () and word in result.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"results":{}}',
        '{"results":[3]}',
        '{"results":[{}]}',
        '{"schema_version":"2.0.0","results":[]}',
        '{"schema_version":[1],"results":[]}',
        '{"metadata":{"timeunit":"fortnights"},"results":[]}',
        '{"metadata":3,"results":[]}',
        kernel_tuner(invalidity="sad"),
        kernel_tuner(invalidity=["compile"]),
        kernel_tuner(times={"runtimes": []}),
        kernel_tuner(times={"runtimes": ["fast"]}),
        kernel_tuner(times={"runtimes": [True]}),
        kernel_tuner(times={"runtimes": [10**400]}),
        kernel_tuner(times={"runtimes": [-1.0]}),
        kernel_tuner(times=[]),
        kernel_tuner(configuration=[]),
        kernel_tuner(configuration={"symbol.n": "many"}),
        kernel_tuner(measurements={}),
        kernel_tuner(measurements=[{"name": "relax_tune.kind", "value": {"a": 1}}]),
        kernel_tuner(measurements=[{"name": "relax_tune.id", "value": 7}]),
        kernel_tuner(measurements=[{"name": "relax_tune.trace", "value": "["}]),
        kernel_tuner().replace("2.0", "NaN"),
    ],
)
def test_malformed_t4_is_refused(text: str) -> None:
    with pytest.raises(DatabaseError):
        t4_measurements(text, MATMUL.key, ZEN.key)


def test_results_keep_named_workloads() -> None:
    text = t4_text(ZEN, [timing("a", 1e-3), timing("b", 2e-3, workload=SOFTMAX)])
    assert [m.workload for m in t4_measurements(text, SOFTMAX.key, ZEN.key)] == [MATMUL.key, SOFTMAX.key]
    with pytest.raises(DatabaseError, match="names no workload"):
        t4_measurements(kernel_tuner(), None, ZEN.key)
