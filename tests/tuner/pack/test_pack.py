"""Packs: the same bytes for the same model and records, nothing altered gets in, and nothing of strangers is dispatched."""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.runtime.test_artifact import forged
from tests.support.effort import some
from tests.support.tuner_models import (
    PAPER_DEVICE,
    RecordedRunner,
    attention,
    feed_forward,
    paper_job,
    row_scale,
)

from relax_tune.database.exchange.jsonl import export_lines, merge
from relax_tune.database.records import Target, VariantRecord, Workload
from relax_tune.database.store import MemoryStore
from relax_tune.errors import ArtifactError, BuildError, UserError
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.job.lowered_model import model_key
from relax_tune.tuner.learn.device_records import similar_targets
from relax_tune.tuner.learn.similar_devices import winners
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.pack.install import Installation, Installer, install
from relax_tune.tuner.pack.pack import ModelPack, make_pack, read_pack
from relax_tune.tuner.settings import Settings

SETTINGS = Settings(target="c", trials=6, effort="quick", self_test=False)
NEWER = DeviceInfo("c", "newer", (("compiler", "none"), ("cpu", "b")), PAPER_DEVICE.limits, PAPER_DEVICE.libraries)


def tuned_store(make: Any = row_scale) -> MemoryStore:
    """A store in which the paper device has tuned a model."""
    store = MemoryStore()
    job = paper_job(make, store, SETTINGS)
    job.tune(RecordedRunner())
    job.store_plans(job.build())
    return store


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return tuned_store()


@pytest.fixture(scope="module")
def packed(store: MemoryStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(row_scale(), store, SETTINGS).save(tmp_path_factory.mktemp("pack") / "model.rtp")


def installed(
    pack: ModelPack, info: DeviceInfo = NEWER, store: MemoryStore | None = None, measure: bool = True, **more: Any
) -> tuple[Installation, RecordedRunner]:
    runner = RecordedRunner(info=info)
    settings = Settings(target="c", self_test=False, **{k: v for k, v in more.items() if k != "trust_records"})
    budget = settings.budget if settings.budget is not None else 12
    installer = Installer(pack, replace(settings, effort=pack.settings.effort, budget=budget))
    job = installer.open(runner, store or MemoryStore(), trust_records=more.get("trust_records", False))
    return installer.run(job, runner, measure), runner


def first_batches(runner: RecordedRunner) -> list[str]:
    return [r.program_json for batch in runner.batches for r in batch if '"label":"tuned"' in r.program_json]


def test_pack_same_records_gives_same_bytes_and_reads_back(packed: Path, store: MemoryStore, tmp_path: Path) -> None:
    wider = MemoryStore()
    merge(store, wider)
    paper_job(attention, wider, replace(SETTINGS, trials=0)).tune(RecordedRunner())
    again = make_pack(row_scale(), wider, SETTINGS)
    assert again.save(tmp_path / "again.rtp").read_bytes() == packed.read_bytes(), "other models' records are left out"
    read = read_pack(packed)
    assert read.model == again.model == model_key(row_scale()) and read.settings.effort == "quick"
    assert print_text(read.module) == print_text(again.module)
    assert list(export_lines(read.records)) == list(export_lines(again.records))
    assert read.save(tmp_path / "third.rtp").read_bytes() == packed.read_bytes()
    (target,) = read.records.targets()
    assert target.kind == "c" and read.records.plans(target.key)
    assert {(m.host, m.worker, m.unit, m.job) for m in read.records.query(target.key)} == {("", "", "", "")}


def test_pack_keeps_weights_of_every_type_to_the_bit(tmp_path: Path) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 8), 4))
    w = np.asarray([1.5, -0.0, np.inf, 3e-39], np.float32)
    module = g.finish(g.call(Add(), x, g.constant("w", w)))
    weights = {"w": w, "half": w.astype(np.float16), "b": w.astype(ml_dtypes.bfloat16)}
    weights["f8"] = w.astype(ml_dtypes.float8_e4m3fn)
    module = replace(module, constants=weights)
    read = read_pack(make_pack(module, MemoryStore(), SETTINGS).save(tmp_path / "w.rtp"))
    for name, array in weights.items():
        found = read.module.constants[name]
        assert found.dtype == array.dtype and found.tobytes() == array.tobytes(), name


@pytest.mark.slow
def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    paper_job(row_scale, store, replace(SETTINGS, trials=0)).tune(RecordedRunner())
    copy = make_pack(row_scale(), store, SETTINGS).save(tmp_path / "copy.rtp")
    data = copy.read_bytes()
    generator, descriptor = random.Random(2), os.open(copy, os.O_WRONLY)
    try:
        for place in some(range(len(data)), 5):
            os.pwrite(descriptor, bytes([data[place] ^ (1 << generator.randrange(8))]), place)
            try:
                read_pack(copy)
            except ArtifactError as error:
                assert "copy.rtp" in str(error)
            else:
                pytest.fail(f"byte {place} may be flipped")
            os.pwrite(descriptor, data[place : place + 1], place)
    finally:
        os.close(descriptor)
    assert read_pack(copy).model


def test_every_truncation_is_refused(packed: Path, tmp_path: Path) -> None:
    data, copy = packed.read_bytes(), tmp_path / "copy.rtp"
    for size in {0, 1, 4, len(data) - 73, len(data) - 1, *random.Random(0).sample(range(len(data)), 40)}:
        copy.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match=r"copy\.rtp"):
            read_pack(copy)


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def changed(path: Path, **extra: Any) -> bytes:
    manifest = json.loads(members(path)["manifest.json"])
    return json.dumps(manifest | {"extra": manifest["extra"] | extra}).encode()


def test_forged_parts_with_fitting_hashes_are_refused(packed: Path, tmp_path: Path) -> None:
    parts, copy = members(packed), tmp_path / "copy.rtp"
    program, records = parts["program.relax"].decode(), parts["records.jsonl"].decode()
    lines = records.splitlines()
    settings = json.loads(parts["manifest.json"])["extra"]["settings"]
    copy.write_bytes(packed.read_bytes())
    assert read_pack(forged(copy, {})).model, "the forger of this test makes files that would be read"
    attempts: list[tuple[Mapping[str, bytes], str]] = [
        ({"program.relax": program.replace("16", "17").encode()}, "key in the manifest"),
        ({"program.relax": b"main("}, "line 1, column 5"),
        ({"program.relax": b"\xff\xfe"}, "UTF-8"),
        ({"program.relax": b""}, "empty text"),
        ({"weights.safetensors": b"\0" * 16}, "safetensors"),
        ({"records.jsonl": (records + "{}\n").encode()}, rf"records.jsonl: line {len(lines) + 1}"),
        ({"records.jsonl": "\n".join(lines[1:]).encode()}, "records.jsonl: line"),
        ({"records.jsonl": records.replace('"entries":"{', '"entries":"[').encode()}, "plan entries"),
        ({"manifest.json": changed(packed, settings=settings | {"qkv": "both"})}, "--qkv expects one of"),
        ({"manifest.json": changed(packed, settings=settings | {"db": "x.db"})}, "expected settings among"),
        ({"manifest.json": changed(packed, small={"w": "complex64"})}, "unknown types of weights"),
        ({"manifest.json": changed(packed, model="0" * 32)}, "key in the manifest"),
        ({"x.py": b"boom"}, "expected the members"),
    ]
    for change, says in attempts:
        copy.write_bytes(packed.read_bytes())
        forged(copy, dict(change))
        with pytest.raises(ArtifactError, match=says) as error:
            read_pack(copy)
        assert "copy.rtp" in str(error.value) and len(str(error.value)) < 900


@pytest.mark.slow
def test_forged_bytes_with_fitting_hashes_end_in_one_kind_of_error(packed: Path, tmp_path: Path) -> None:
    parts, copy, generator = members(packed), tmp_path / "copy.rtp", random.Random(3)
    for name in ("program.relax", "records.jsonl", "weights.safetensors", "manifest.json"):
        for _ in range(40):
            data = bytearray(parts[name])
            for _ in range(generator.randrange(1, 4)):
                data[generator.randrange(len(data))] = generator.randrange(32, 127)
            copy.write_bytes(packed.read_bytes())
            forged(copy, {name: bytes(data)})
            try:
                read_pack(copy)
            except ArtifactError as error:
                assert "copy.rtp" in str(error)


def test_pack_of_another_hash_or_format_is_refused(packed: Path, tmp_path: Path) -> None:
    digest = read_pack(packed).digest
    assert read_pack(packed, digest.upper()).digest == digest
    with pytest.raises(ArtifactError, match="expected the hash 00"):
        read_pack(packed, "00" * 32)
    manifest = json.loads(members(packed)["manifest.json"])
    for field, value, says in (
        ("schema", 2, "expected schema 1 "),
        ("format", "relax-tune artifact", "expected format"),
    ):
        copy = tmp_path / "copy.rtp"
        copy.write_bytes(packed.read_bytes())
        forged(copy, {"manifest.json": json.dumps(manifest | {field: value}).encode()})
        with pytest.raises(ArtifactError, match=says):
            read_pack(copy)


def test_module_with_lossy_text_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = paper_job(attention).module
    monkeypatch.setattr("relax_tune.tuner.pack.pack.parse_module", lambda *_: other)
    with pytest.raises(BuildError, match="does not parse to the same"):
        make_pack(row_scale(), MemoryStore(), SETTINGS)


def test_install_tries_winners_of_like_devices_first(packed: Path) -> None:
    pack = read_pack(packed)
    before = list(export_lines(pack.records))
    made, runner = installed(pack)
    assert list(export_lines(pack.records)) == before
    (task_variants,) = made.job.task_variants.values()
    best = winners(pack.records, made.job.target, task_variants.sketch_set, 4)
    assert len(best) == 4 and made.like == ("paper",)
    wanted = [task_variants.program(task_variants.sketch_set.record_of(c)).to_json() for c in best]
    assert first_batches(runner)[:4] == wanted
    there = RecordedHistory(pack.records, made.job.target.key, (), made.job.target.kind).rows(task_variants.sketch_set)
    assert there is not None and len(there.log_time) > 0
    cold, _ = installed(ModelPack(pack.module, pack.settings, MemoryStore(), pack.model))
    assert cold.like == () and cold.work.trials > 0


def test_install_counts_no_time_of_the_pack(packed: Path) -> None:
    """Even those of the very same device: its own measurements decide."""
    pack, store = read_pack(packed), MemoryStore()
    made, _ = installed(pack, PAPER_DEVICE, store)
    assert made.work.measurements == store.count(made.job.target.key) > 0
    ids = {m.id for m in store.query(made.job.target.key)}
    assert not ids & {m.id for m in pack.records.query(made.job.target.key)}


def test_install_trusting_records_measures_less(packed: Path) -> None:
    pack, store = read_pack(packed), MemoryStore()
    made, _ = installed(pack, PAPER_DEVICE, store, trials=6, trust_records=True)
    assert made.warm and made.work.trials == 0
    assert {m.id for m in store.query(made.job.target.key)} == {m.id for m in pack.records.query(made.job.target.key)}
    elsewhere, _ = installed(pack, NEWER, trials=6, trust_records=True)
    assert not elsewhere.warm


def test_install_refuses_trusted_records_of_a_slower_unit(packed: Path) -> None:
    pack, store = read_pack(packed), MemoryStore()
    made, _ = installed(pack, PAPER_DEVICE)
    for known, secs in ((pack.records, 1e-2), (store, 1e-3)):
        known.add_target(replace(made.job.target, reference=(("compute", secs),)))
    with pytest.raises(UserError, match="compute"):
        installed(pack, PAPER_DEVICE, store, trust_records=True)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_install_times_no_more_than_the_budget(budget: int) -> None:
    pack = make_pack(feed_forward(), MemoryStore(), SETTINGS)
    store = MemoryStore()
    made, _ = installed(pack, store=store, budget=budget)
    tried = {m.variant.key for m in store.query(made.job.target.key) if m.variant.kind == "tuned"}
    own = {key for c in made.job.task_variants.values() for key in tried if _is_candidate(c, key, store, made)}
    assert made.work.trials == len(own) <= budget and (made.work.trials > 0) == (budget > 0)
    assert {m.variant.kind for m in store.query(made.job.target.key)} >= {"generic"}
    again, _ = installed(pack, store=store, budget=budget)
    assert again.warm and again.artifact.programs == made.artifact.programs


def _is_candidate(task_variants: Any, key: str, store: MemoryStore, made: Installation) -> bool:
    found = [m.variant for m in store.query(made.job.target.key, task_variants.task.key) if m.variant.key == key]
    return bool(found) and task_variants.sketch_set.candidate_of(found[0]) is not None


def test_install_without_measuring_dispatches_the_plan_of_the_likest_device(packed: Path, store: MemoryStore) -> None:
    pack = read_pack(packed)
    made, runner = installed(pack, measure=False)
    assert runner.batches == [] and made.work.measurements == 0
    (name,) = made.job.task_variants
    (target,) = similar_targets(pack.records, made.job.target)
    home = paper_job(row_scale, store, SETTINGS)
    assert target.name == "paper"
    assert made.built.plans[name].plan == home.build().plans[name].plan
    bare, _ = installed(ModelPack(pack.module, pack.settings, MemoryStore(), pack.model), measure=False)
    assert bare.built.plans[name].plan != made.built.plans[name].plan


def test_record_of_another_hand_in_a_pack_is_not_dispatched(packed: Path) -> None:
    """A trace that the own rules do not make is neither tried nor dispatched, however fast it is said to be."""
    pack = read_pack(packed)
    (target,) = pack.records.targets()
    record = next(m for m in pack.records.query(target.key, kinds=("tuned",), status="ok") if m.symbols)
    trace = json.loads(record.variant.trace)
    foreign = VariantRecord(
        "tuned", record.variant.sketch, json.dumps(trace).replace("parallel", "vectorize"), record.variant.parameters
    )
    assert foreign.key != record.variant.key
    for point in ({"s0": 1}, {"s0": 8}, {"s0": 64}):
        fake = replace(record, id=f"fake{point}", variant=foreign, symbols=point, samples_secs=(1e-12,) * 3)
        pack.records.add_measurements([fake])
    for measure in (True, False):
        made, _ = installed(pack, measure=measure)
        assert all(foreign.key not in p.plan.variants for p in made.built.plans.values())


def test_install_requiring_records_refuses_plans_of_other_devices(packed: Path) -> None:
    with pytest.raises(BuildError, match="expected a measured record of every task"):
        install(packed, target="c", db="memory://", measure=False, require_measured=True)


def test_install_takes_the_best_device_and_names_arguments(packed: Path) -> None:
    made = install(packed, db="memory://", measure=False, self_test=False, target="cpu")
    assert made.job.device.kind in ("c", "opencl")
    with pytest.raises(UserError, match=r"^wait_secs= expects"):
        install(packed, db="memory://", wait_secs=0)


def test_install_notes_records_of_functions_made_otherwise(packed: Path) -> None:
    pack = read_pack(packed)
    made, _ = installed(pack, measure=False)
    assert not [n for n in made.built.notes if "fit no task" in n]
    pack.records.add_workload(Workload("0" * 32, "old text", 1, "old_softmax"))
    made, _ = installed(pack, measure=False)
    (note,) = [n for n in made.artifact.notes if "fit no task" in n]
    assert "1 functions" in note and "old_softmax" in note


def test_similar_targets_order_by_shared_facts() -> None:
    store = MemoryStore()
    here = Target("c", "b", (("compiler", "1"), ("cpu", "x")), (("workers", 2),))
    near = Target("c", "a", (("compiler", "1"), ("cpu", "y")), (("workers", 2),))
    far = Target("c", "z", (("compiler", "0"), ("cpu", "y")), (("workers", 9),))
    for target in (far, near, Target("opencl", "b", (("compiler", "1"),)), here):
        store.add_target(target)
    assert [t.name for t in similar_targets(store, here)] == ["b", "a", "z"]


@pytest.mark.parametrize(("budget", "wanted"), [(4, 4), (10_000, 6)])
def test_tune_budget_bounds_all_tasks_together(budget: int, wanted: int) -> None:
    job = paper_job(feed_forward, MemoryStore(), replace(SETTINGS, trials=2, budget=budget))
    assert len(job.tasks) == 3
    assert job.tune(RecordedRunner()).trials == wanted
