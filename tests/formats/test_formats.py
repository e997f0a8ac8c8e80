"""Files that relax-tune 0.2 wrote are read by every later version of it (docs/design/formats.md).

A test that fails here shows a change of a released format: make the change additive, or add a new version with a new frozen file.
"""

from __future__ import annotations

import io
import json
import lzma
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.formats.freeze import FROZEN, ORIGIN, model
from tests.formats.recorded_model import model as recorded_model
from tests.support.effort import some

from relax_tune.database import schema
from relax_tune.database.exchange.jsonl import export_lines, import_lines
from relax_tune.database.exchange.t4 import read_t4, t4_parts
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.records import STAGES
from relax_tune.database.sql.codec import pack_id, pack_samples, text_key, unpack_id, unpack_samples
from relax_tune.database.store import MemoryStore, Store, upgrade_store
from relax_tune.errors import DatabaseError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module, parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.schedules.schedule import replay
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.lowered_model import model_key
from relax_tune.tuner.pack.pack import read_pack
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.unfused_variants import in_parts

DEVICE = json.loads((FROZEN / "records.device.json").read_text())
T4_VERSION = "0.2.0"
"""The version of the tool in the frozen T4 file."""


def thaw(name: str) -> str:
    return lzma.decompress((FROZEN / name).read_bytes()).decode()


@pytest.fixture(scope="module")
def records() -> Iterator[Store]:
    """The recorded tuning, imported."""
    with MemoryStore() as store:
        report = import_lines(store, thaw("records.jsonl.xz").splitlines())
        assert report.problems == [] and report.measurements > 300
        yield store


# Databases


def test_every_released_schema_has_a_frozen_database() -> None:
    frozen = sorted(path.name for path in FROZEN.glob("database_*.db.xz"))
    assert frozen == [f"database_{version}.db.xz" for version in schema.versions()]


@pytest.mark.parametrize("version", schema.versions())
def test_frozen_database_has_frozen_content(version: str, tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    path.write_bytes(lzma.decompress((FROZEN / f"database_{version}.db.xz").read_bytes()))
    assert upgrade_store(str(path)) == (version, schema.versions()[-1])
    with open_queue(str(path)) as queue:
        assert queue.check() == []
        exported = [json.loads(line) for line in export_lines(queue)]
        frozen = [json.loads(line) for line in (FROZEN / f"database_{version}.jsonl").read_text().splitlines()]
        assert [{name: new[name] for name in old} for new, old in zip(exported, frozen, strict=True)] == frozen
        stats = queue.stats(next(target.key for target in queue.targets() if target.limits))
        assert stats is not None and dict(stats.failures) == dict.fromkeys(STAGES, 1)
        plans = queue.plans(stats.target.key)
        assert [(p.version, p.origin, p.turn) for p in plans] == [(1, "", 1), (2, "", 2), (3, ORIGIN, 0)]
        (job,) = queue.submitted()
        assert (job.id, job.state, job.spent_secs, job.values("result")) == ("aa11", "done", 12.5, {"trials": 4})
        assert queue.log("aa11") == [(1, 0, "began\n"), (1, 1, "ended\n")]
        (run,) = queue.jobs()
        assert (run.id, run.state) == ("job-1", "done")


@pytest.mark.parametrize(
    ("id", "stored"),
    [("0123456789abcdef0123456789abcdef.1", "000123456789abcdef0123456789abcdef2e31"), ("ok-8", "016f6b2d38")],
)
def test_stored_ids(id: str, stored: str) -> None:
    assert pack_id(id).hex() == stored and unpack_id(bytes.fromhex(stored)) == id


@pytest.mark.parametrize(
    ("samples", "stored"),
    [((), ""), ((0.5, 1.0), "660000003f0000803f"), ((0.1,), "649a9999999999b93f"), ((1e300,), "649c7500883ce4377e")],
)
def test_stored_samples(samples: tuple[float, ...], stored: str) -> None:
    assert pack_samples(samples).hex() == stored and unpack_samples(bytes.fromhex(stored)) == samples


def test_stored_key_of_shared_texts() -> None:
    assert text_key("job", "", "worker").hex() == "05094915d02cb6ffcb13d0b52c63680d"


# Exchange


def test_frozen_json_lines_export_with_all_fields(records: Store) -> None:
    exported = [json.loads(line) for line in export_lines(records)]
    frozen = [json.loads(line) for line in thaw("records.jsonl.xz").splitlines()]
    assert [{name: new[name] for name in old} for new, old in zip(exported, frozen, strict=True)] == frozen


def test_json_lines_of_another_form_are_refused() -> None:
    line = thaw("records.jsonl.xz").splitlines()[0]
    for form in (1, 3):
        report = import_lines(MemoryStore(), [line.replace('"v":2', f'"v":{form}')])
        assert [problem.line for problem in report.problems] == [1] and "form 2" in report.problems[0].why


def test_frozen_t4_has_the_measurements_of_the_json_lines(records: Store) -> None:
    document = thaw("records.t4.json.xz")
    (target,) = (t for t in records.targets() if t.name == DEVICE["name"])
    results = list(read_t4(lambda: io.StringIO(document), None, target.key, trust_checks=True))
    expected = {m.id: m.subject for m in records.query(target.key)}
    assert {r.measurement.id: r.measurement.subject for r in results} == expected
    again = "".join(t4_parts(target, records.query(target.key), T4_VERSION, records.workload, records.environment))
    assert json.loads(again) == json.loads(document)


def test_t4_of_another_major_version_is_refused() -> None:
    document = thaw("records.t4.json.xz").replace('"schema_version":"1.', '"schema_version":"2.')
    with pytest.raises(DatabaseError, match="schema version 1"):
        list(read_t4(lambda: io.StringIO(document), None, "t"))


# Programs and traces


def test_frozen_program_text_is_read_and_printed_alike() -> None:
    text = (FROZEN / "model.relax").read_text()
    module = model()
    read = parse_module(text, OPERATORS, module.constants)
    assert print_text(read) + "\n" == text
    assert model_key(read) == model_key(module)


@pytest.mark.slow
def test_frozen_traces_replay_on_frozen_functions(records: Store) -> None:
    functions = {w.key: parse_prim_func(w.text) for w in records.workloads(None)}
    for workload in records.workloads(None):
        again = parse_prim_func(print_text(functions[workload.key]))
        assert structural_equal(again, functions[workload.key])
    variants = [(m.workload, m.variant) for t in records.targets() for m in records.query(t.key)]
    traces = sorted({(key, v.trace) for key, v in variants if v.kind == "tuned" and not in_parts(v)})
    assert len(traces) > 50
    for key, trace in some(traces):
        replay(Trace.from_json(trace), functions[key])
        assert Trace.from_json(trace).to_json() == trace


class RefusingRunner:
    """A runner that fails the test when something is measured."""

    def calibrate(self, reference: Any) -> Any:
        return reference

    def slots(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the tuning asked the runner for {name!r}, but all of it is on record")


@pytest.mark.slow
def test_frozen_records_answer_a_whole_tuning() -> None:
    """Workload keys, variant keys and candidate order are part of the format: otherwise records would count for nothing."""
    pairs = {name: tuple(map(tuple, DEVICE[name])) for name in ("fingerprint", "limits", "libraries")}
    device = DeviceInfo(DEVICE["kind"], DEVICE["name"], **pairs)
    with MemoryStore() as store:
        import_lines(store, thaw("records.jsonl.xz").splitlines())
        job = device_job(recorded_model(), device, store, Settings(target="c", trials=2, effort="quick"))
        work = job.tune(RefusingRunner())  # type: ignore[arg-type]
        assert (work.measurements, work.problems) == (0, ())


# Artifacts and packs


@pytest.mark.ccompiler
def test_frozen_artifact_runs() -> None:
    arrays = np.load(FROZEN / "model.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was built for another device
        opened = load_artifact(FROZEN / "model.rta").open()
    with opened as built:
        for n in (1, 7, 64):
            (result,) = built.run([arrays[f"x{n}"], arrays[f"flag{n}"]])
            np.testing.assert_allclose(result, arrays[f"y{n}"], rtol=1e-4, atol=1e-4)


def test_frozen_pack_is_read() -> None:
    pack = read_pack(FROZEN / "model.rtp")
    assert pack.model == model_key(model()) == model_key(pack.module)
    assert pack.settings.effort == "quick"
    (target,) = pack.records.targets()
    assert pack.records.count(target.key) > 20 and pack.records.plans(target.key)
