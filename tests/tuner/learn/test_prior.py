"""The prior: what it learns from other functions, its file, and the plans it predicts for functions without records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import schedule_functions as make
from tests.support.tuner_models import PAPER_DEVICE, PAPER_MACHINE, QUICK, paper_job, row_scale, task_variants_of
from tests.tuner.learn.test_warm_start import HERE, OTHER, product, records, seconds
from typer.testing import CliRunner

from relax_tune.database.records import Measurement, Target, VariantRecord, Workload
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.errors import BuildError, UserError
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.program.program import Program
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.learn import prior as prior_module
from relax_tune.tuner.learn.prior import (
    Coverage,
    Prior,
    PriorRows,
    evaluate,
    feature_names,
    packaged_prior,
    recorded_rows,
)
from relax_tune.tuner.learn.similar_devices import SearchKnowledge
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.plan.plans import plan_task
from relax_tune.tuner.plan.predicted import Predictor
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.task import FORMAT_VERSION, points_array
from relax_tune.tuner.task.variants import TaskVariants

SIZES = ((96, 160), (128, 512), (64, 64), (48, 256))
POINTS = ((8,), (200,))


@pytest.fixture(scope="module")
def products() -> Sequence[TaskVariants]:
    return [
        next(iter(device_job(product(*s), PAPER_DEVICE, MemoryStore(), QUICK).task_variants.values())) for s in SIZES
    ]


def filled(store: Store, products: Sequence[TaskVariants], targets: Sequence[str] = (HERE,)) -> Store:
    store.add_target(Target(PAPER_DEVICE.kind, PAPER_DEVICE.name, PAPER_DEVICE.fingerprint))
    store.add_target(OTHER)
    for task_variants in products:
        store.add_workload(
            Workload(task_variants.task.key, task_variants.task.text, FORMAT_VERSION, task_variants.task.name)
        )
        for target in targets:
            made = records(task_variants, target, 60, POINTS)
            store.add_measurements([replace(m, id=f"{task_variants.task.key[:8]}-{m.id}") for m in made])
    return store


@pytest.fixture(scope="module")
def rows(products: Sequence[TaskVariants]) -> PriorRows:
    return recorded_rows(filled(MemoryStore(), products[:-1]), PAPER_DEVICE)


@pytest.fixture(scope="module")
def prior(rows: PriorRows) -> Prior:
    return trained(rows)


def trained(rows: PriorRows) -> Prior:
    return Prior.train(rows, PAPER_MACHINE)


def test_rows_have_a_group_for_each_workload_and_shape(rows: PriorRows, products: Sequence[TaskVariants]) -> None:
    assert {k[1] for k in rows.keys} == {c.task.key for c in products[:-1]} and len(rows.keys) == 6
    assert rows.features.shape == (len(rows.log_time), len(feature_names(PAPER_MACHINE)))
    assert np.isfinite(rows.features).all() and np.isfinite(rows.log_time).all()
    kept = rows.without([0, 1])
    assert set(kept.groups.tolist()) == {2, 3, 4, 5} and len(kept.log_time) == len(kept.features)


def test_rows_of_f32_cover_f32_alone(rows: PriorRows, prior: Prior, tmp_path: Path) -> None:
    assert rows.covered == Coverage(frozenset({"f32"}), frozenset(), PAPER_MACHINE.lanes) == prior.covers
    assert rows.without(range(len(rows.keys))).covered == Coverage()
    prior.save(tmp_path / "x.prior")
    assert Prior.read(tmp_path / "x.prior").covers == prior.covers


def test_rows_of_byte_products_cover_the_instruction() -> None:
    device = replace(PAPER_DEVICE, limits=(*PAPER_DEVICE.limits, ("byte_dots", 1)))
    machine = HardwareInfo.from_limits("c", dict(device.limits))
    func = parse_prim_func(print_text(make.quantised(48, 64, 8, activations="int8"), normalise=True))
    task_variants = task_variants_of(func, Domain(((8,), (200,)), (0.5, 0.5)), machine, ())
    store = MemoryStore()
    store.add_target(Target(device.kind, device.name, device.fingerprint, device.limits))
    store.add_workload(
        Workload(task_variants.task.key, task_variants.task.text, FORMAT_VERSION, task_variants.task.name)
    )
    store.add_measurements(records(task_variants, store.targets()[0].key, 200, POINTS))
    covered = recorded_rows(store, device).covered
    assert "dot4_u8i8_x8" in covered.intrinsics and {"i8", "u8", "f32"} & covered.dtypes >= {"i8", "f32"}
    f32 = Coverage(frozenset({"f32"}), frozenset(), 8)
    assert covered >= f32 and not f32 >= covered
    assert not covered >= replace(f32, lanes=16) and not covered >= replace(
        f32, intrinsics=frozenset({"dot2_bf16_x16"})
    )


def test_rows_have_the_limits_of_machines(products: Sequence[TaskVariants]) -> None:
    other = Target("opencl", "other", (), (("l2_bytes", 1 << 21), ("vector_bits", 512), ("workers", 8)))
    store = filled(MemoryStore(), products[:1])
    store.add_target(other)
    unknown = Target("opencl", "without limits")
    store.add_target(unknown)
    for target in (other, unknown):
        store.add_measurements(
            [replace(m, id=f"{target.name}-{m.id}") for m in records(products[0], target.key, 60, POINTS)]
        )
    rows = recorded_rows(store, PAPER_DEVICE)
    assert {k[0] for k in rows.keys} == {HERE, other.key}, "of a machine of unknown limits nothing can be learnt"
    at = feature_names(PAPER_MACHINE).index("machine l2_bytes")
    here = np.asarray([rows.keys[g][0] == HERE for g in rows.groups])
    assert set(rows.features[~here, at]) == {np.float32(np.log2(1 + (1 << 21)))}
    assert set(rows.features[here, at]) == {np.float32(np.log2(1 + PAPER_MACHINE.l2_bytes))}


def test_store_without_records_of_the_kind_is_refused(products: Sequence[TaskVariants]) -> None:
    gpu = replace(PAPER_DEVICE, kind="cuda", limits=(("warp", 32),))
    with pytest.raises(UserError, match="records of tuned kernels on a gpu"):
        recorded_rows(filled(MemoryStore(), products[:1]), gpu)


def test_prior_orders_candidates_of_functions_left_out(rows: PriorRows) -> None:
    found = evaluate(rows, trained, lambda key: key[1])
    assert found.groups == 6 and found.rank > 0.6
    assert 0 <= found.regret[16] <= found.regret[4] <= found.regret[1] <= found.worst


def test_evaluation_needs_two_to_leave_one_out(rows: PriorRows) -> None:
    with pytest.raises(UserError, match=r"at least two.*got 1"):
        evaluate(rows, trained, lambda key: key[0])


def test_file_of_a_prior_predicts_alike(prior: Prior, rows: PriorRows, tmp_path: Path) -> None:
    prior.save(tmp_path / "c.prior")
    found = Prior.read(tmp_path / "c.prior")
    assert (found.family, found.names, found.about) == (prior.family, prior.names, prior.about)
    np.testing.assert_array_equal(found.log_time(rows.features), prior.log_time(rows.features))


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b'{"form": 4, "family": "c", "names": [], "about": {}}\nabc', b"\x80\n"]
)
def test_other_files_are_no_priors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.prior").write_bytes(content)
    with pytest.raises(UserError, match="prior that `relax-tune model train` wrote"):
        Prior.read(tmp_path / "x.prior")


def test_prior_of_another_form_is_refused(prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prior.save(tmp_path / "c.prior")
    monkeypatch.setattr(prior_module, "FORM", 5)
    with pytest.raises(UserError, match="prior of form 5, got form 4"):
        Prior.read(tmp_path / "c.prior")


def test_predicted_plan_beats_the_guess_of_the_rules(prior: Prior, products: Sequence[TaskVariants]) -> None:
    task_variants = products[-1]
    points = points_array(task_variants.task.domain.points)

    def cost(prior: Prior | None) -> float:
        found = Predictor(prior).plan(task_variants)
        assert found is not None
        plan, variants = found
        total = 0.0
        for a, p in enumerate(task_variants.task.domain.points):
            candidate = task_variants.sketch_set.candidate_of(variants[plan.choose(p)])
            assert candidate is not None
            total += np.log(seconds(task_variants, task_variants.sketch_set.space.encode([candidate]), points)[0, a])
        return total

    assert cost(prior) < cost(None)


def test_variants_with_failures_on_record_are_not_predicted(prior: Prior, products: Sequence[TaskVariants]) -> None:
    task_variants = products[-1]
    first = plan_task(task_variants, (), predictor=Predictor(prior))
    assert first.predicted == set(first.plan.variants)
    failures = [
        Measurement(f"f{n}", task_variants.task.key, HERE, v, status="failed", stage="compile", message="no")
        for n, v in enumerate(first.variants.values())
    ]
    second = plan_task(task_variants, failures, predictor=Predictor(prior))
    assert second.predicted and not second.predicted & first.predicted
    guess = task_variants.sketch_set.best_guess()
    failed = replace(failures[0], variant=guess)
    assert plan_task(task_variants, ()).plan.variants == (guess.key,)
    assert plan_task(task_variants, [failed]).plan.variants == (task_variants.sketch_set.generic().key,)


def test_candidates_without_code_are_not_predicted(
    prior: Prior, products: Sequence[TaskVariants], monkeypatch: pytest.MonkeyPatch
) -> None:
    task_variants, made = products[-1], TaskVariants.program
    first = Predictor(prior).plan(task_variants)
    assert first is not None
    broken = {*first[1], task_variants.sketch_set.best_guess().key}

    def program(self: TaskVariants, record: VariantRecord) -> Program:
        if record.key in broken:
            raise BuildError("no code")
        return made(self, record)

    monkeypatch.setattr(TaskVariants, "program", program)
    second = Predictor(prior).plan(task_variants)
    assert second is not None and second[1] and not broken & set(second[1])
    assert Predictor(None).plan(task_variants) is None


def test_nothing_is_predicted_after_a_wrong_result_or_for_generic_builds(
    prior: Prior, products: Sequence[TaskVariants]
) -> None:
    task_variants, predictor = products[-1], Predictor(prior)
    generic = (task_variants.sketch_set.generic().key,)
    assert plan_task(task_variants, (), refused={"key": "wrong"}, predictor=predictor).plan.variants == generic
    assert plan_task(task_variants, (), "generic", predictor=predictor).plan.variants == generic


def test_first_batch_has_candidates_of_the_prior_beside_the_guess(
    prior: Prior, products: Sequence[TaskVariants]
) -> None:
    task_variants, points = products[-1], points_array(products[-1].task.domain.points)
    knowledge = SearchKnowledge(
        Target(PAPER_DEVICE.kind, PAPER_DEVICE.name, PAPER_DEVICE.fingerprint),
        RecordedHistory(MemoryStore(), HERE, ()),
        likely=Predictor(prior).likely,
    )
    seeds = knowledge.seeds(task_variants.sketch_set, 8)
    assert len(seeds) == len(set(seeds)) == 8 and task_variants.sketch_set.seeds(1)[0] in seeds
    ranked = Predictor(prior).likely(task_variants.sketch_set, 4)
    assert set(ranked) <= set(seeds) and ranked == Predictor(prior).likely(task_variants.sketch_set, 4)
    drawn = task_variants.sketch_set.space.draw(np.random.default_rng(5), 0, 50)
    best = seconds(task_variants, task_variants.sketch_set.space.encode(ranked), points).min(axis=0)
    assert (best <= np.median(seconds(task_variants, drawn, points), axis=0)).all()
    assert task_variants.sketch_set.seeds(1)[0] in knowledge.seeds(task_variants.sketch_set, 1)


def test_no_candidate_is_likely_to_another_prior(prior: Prior, products: Sequence[TaskVariants]) -> None:
    for other in (None, replace(prior, names=("x",))):
        assert Predictor(other).likely(products[-1].sketch_set, 4) == []


def test_prior_of_other_features_leaves_the_choice_to_the_rules(prior: Prior, products: Sequence[TaskVariants]) -> None:
    found = Predictor(replace(prior, names=("x",))).plan(products[-1])
    assert found is not None and found[0].variants == (products[-1].sketch_set.best_guess().key,)


def test_build_takes_the_prior_of_the_settings(prior: Prior, tmp_path: Path) -> None:
    prior.save(tmp_path / "c.prior")
    job = paper_job(row_scale, settings=replace(QUICK, prior=str(tmp_path / "c.prior")))
    built = job.build()
    assert {v.label for c in built.program.calls for v in c.variants} == {"predicted"}
    with pytest.raises(UserError, match="not a prior"):
        paper_job(row_scale, settings=replace(QUICK, prior=str(tmp_path / "none.prior"))).build()


def test_given_prior_of_other_devices_or_features_is_refused(prior: Prior, tmp_path: Path) -> None:
    path = tmp_path / "x.prior"
    for wrong, text in (
        (replace(prior, family="gpu"), "for a processor, got one for a gpu"),
        (replace(prior, names=("x",)), "features"),
    ):
        wrong.save(path)
        with pytest.raises(UserError, match=text):
            paper_job(row_scale, settings=replace(QUICK, prior=str(path))).build()


def test_prior_without_a_folder_to_write_to_is_refused(prior: Prior, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the prior could not be written"):
        prior.save(tmp_path / "none" / "c.prior")


def test_no_prior_is_packaged_for_unknown_families() -> None:
    assert packaged_prior("abacus") is None


@pytest.mark.parametrize("kind", ["c", "opencl"])
def test_packaged_prior_has_the_features_of_now(kind: str) -> None:
    """Train it anew when features change (experiments/search/predicted.py --prior)."""
    found, machine = packaged_prior("processor"), HardwareInfo.from_limits(kind, dict(PAPER_DEVICE.limits))
    assert found is not None and found.names == feature_names(machine)
    assert (prior_module.PACKAGED / "processor.prior").stat().st_size < 2 << 20


@pytest.mark.slow
def test_commands_train_and_judge(products: Sequence[TaskVariants], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'r.db'}"
    with open_store(url) as store:
        filled(store, products[:2], (HERE, OTHER.key))
    out = tmp_path / "c.prior"
    done = CliRunner().invoke(app, ["model", "train", "--target", "c", "--db", url, "--out", str(out), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["workloads"] == 2
    assert Prior.read(out).about["targets"] == 2
    done = CliRunner().invoke(app, ["model", "evaluate", "--target", "c", "--db", url, "--json"])
    assert done.exit_code == 0 and set(json.loads(done.stdout)) == {"workload", "target"}
    done = CliRunner().invoke(app, ["model", "evaluate", "--target", "c", "--db", url])
    assert done.exit_code == 0 and "regret@1" in done.stdout


def test_library_is_predicted_at_sizes_of_faster_library_records(products: Sequence[TaskVariants]) -> None:
    store, task = MemoryStore(), products[-1]
    filled(store, products[:-1])
    for task_variants in products[:-1]:
        routine = task_variants.library.variants[0]
        for spot, secs in (((200,), 1e-9), ((8,), 1.0)):
            id = f"{task_variants.task.key[:8]}-{spot[0]}"
            record = Measurement(
                id, task_variants.task.key, HERE, routine, {"s0": spot[0]}, samples_secs=(secs,), checked=True
            )
            store.add_measurements([record])
    found = Predictor(trained(recorded_rows(store, PAPER_DEVICE))).plan(task)
    assert found is not None
    plan, variants = found
    kinds = {p: variants[plan.choose(p)].kind for p in task.task.domain.points}
    assert kinds[max(kinds)] == "library" and kinds[min(kinds)] == "tuned"
