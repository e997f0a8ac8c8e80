"""Variants in parts: the same results as one kernel, records that can be replayed, plans that mix both over a range."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.support.tuner_models import (
    DEVICES,
    PAPER_DEVICE,
    QUICK,
    RecordedRunner,
    job_dispatching,
    ok_record,
    opened,
    paper_job,
    row_scale,
)
from tests.tuner.program.test_program_builder import check

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import RmsNorm
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.plan.plans import plan_task
from relax_tune.tuner.task.unfused_variants import UnfusedVariant, choices_of_parts, in_parts, parts_of, routines_of
from relax_tune.tuner.task.variants import TaskVariants


@cache
def encoder() -> IRModule:
    """Attention of two heads as an encoder has it, q, k, v as (b, n, 2, 8), under a mask that is added."""
    g = GraphBuilder()
    b, n = g.symbol("b", 0, 3), g.symbol("n", 0, 40)
    q, k, v = (g.call(Permute((0, 2, 1, 3)), g.input(x, (b, n, const(2), const(8)))) for x in "qkv")
    mask = g.input("mask", (b, const(1), const(1), n))
    return g.finish(g.call(Permute((0, 2, 1, 3)), g.call(Attention(0.3), q, k, v, mask)))


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param) as found:
        yield found


def test_guess_outside_the_domain_is_refused() -> None:
    """As rules guess for many rows what a task of one row does not have."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 40), 64))
    module = g.finish(g.call(RmsNorm(), x, g.constant("scale", np.ones(64, np.float32))))
    (task_variants,) = device_job(module, PAPER_DEVICE, MemoryStore(), QUICK).task_variants.values()
    far = [replace(s, guesses=({t.name: 10**6 for t in s.tunables},)) for s in task_variants.sketch_set.sketches]
    vars(task_variants.sketch_set)["sketches"] = tuple(far)
    assert task_variants.program(task_variants.sketch_set.best_guess()).kernels


def choices_on(info: DeviceInfo) -> TaskVariants:
    """What the encoder may dispatch with one library, whichever others are installed."""
    (task_variants,) = device_job(encoder(), info, MemoryStore(), QUICK).task_variants.values()
    return replace(task_variants, alternatives=tuple(a for a in task_variants.alternatives if a.library == "openblas"))


@cache
def on_paper() -> TaskVariants:
    return choices_on(PAPER_DEVICE)


def test_every_part_by_a_library_or_by_a_kernel(device: Device) -> None:
    task_variants = choices_on(device.info)
    found = task_variants.unfused.variants
    kinds = [[v.kind for v in parts_of(r).variants] for r in found]
    assert [k[1] for k in kinds] == ["tuned"] * 4 and sorted(k[::2] for k in kinds) == sorted(
        [a, b] for a in ("library", "tuned") for b in ("library", "tuned")
    )
    for variant in found[:2]:
        check(task_variants, variant, device, [(0, 5), (2, 0), (1, 1), (3, 33)])


def test_single_query_attention_packs_no_keys(device: Device) -> None:
    """Decoding: two query heads for each head of the cache, whose rows are read once, as they lie."""
    g = GraphBuilder()
    m = g.symbol("m", 1, 40)
    q, k, v = (g.input(x, (1, const(4 if x == "q" else 2), const(1) if x == "q" else m, const(32))) for x in "qkv")
    (task_variants,) = device_job(
        g.finish(g.call(Attention(0.3), q, k, v)), device.info, MemoryStore(), QUICK
    ).task_variants.values()
    found = [r for r in task_variants.unfused.variants if r.kind == "tuned"]
    assert [parts_of(r).variants[0].sketch for r in found] == ["gemv.dots.parallel"]
    check(task_variants, found[0], device, [(1,), (2,), (7,), (40,)])


@pytest.mark.ccompiler
def test_a_plan_mixes_one_kernel_and_parts_over_the_range() -> None:
    """Each with the workspace it needs at that shape, in memory that is planned together."""

    def variants(task_variants: TaskVariants, _: int) -> list[VariantRecord]:
        return [
            task_variants.sketch_set.record_of(task_variants.sketch_set.seeds(1)[0]),
            *task_variants.unfused.variants[:2],
        ]

    with opened("c") as device:
        job = job_dispatching(device.info, encoder(), variants)
        built = job.build()
        (call,) = built.program.calls
        assert sorted(len(v.steps) for v in call.variants)[0] == 1 and len(call.variants) == 3
        rng = np.random.default_rng(0)
        with job.artifact(built).open(device) as model:
            for b, n in ((1, 1), (3, 40), (0, 7), (1, 37), (2, 3), (3, 0), (2, 31), (1, 16), (3, 17)):
                arrays = [rng.standard_normal((b, n, 2, 8)).astype(np.float32) for _ in "qkv"]
                arrays.append(np.where(rng.random((b, 1, 1, n)) < 0.3, -np.inf, 0).astype(np.float32))
                (found,) = model.run(arrays)
                np.testing.assert_allclose(found, run_function(encoder(), "main", arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_record_in_parts_is_read_again() -> None:
    task_variants = on_paper()
    for record in task_variants.unfused.variants:
        assert in_parts(record) and parts_of(record).record() == record
        assert record.kind == ("library" if "openblas" in record.sketch else "tuned")
        assert routines_of(record) == ({"openblas.sgemm_batched"} if record.kind == "library" else frozenset())
    assert not any(
        map(
            in_parts,
            (
                task_variants.sketch_set.generic(),
                task_variants.sketch_set.record_of(task_variants.sketch_set.seeds(1)[0]),
            ),
        )
    )
    (softmax,) = paper_job(row_scale).task_variants.values()
    assert softmax.unfused.variants == ()


def test_unfused_parts_without_cache_generate_separate_sketches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both matmuls of attention have the rule `matmul`, whose sketches of one part must not serve the other."""
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    record = next(r for r in on_paper().unfused.variants if r.kind == "tuned")
    another_user = replace(on_paper())
    assert len(another_user.stages(record)) == 3


@pytest.mark.slow
def test_inapplicable_unfused_record_is_a_build_error() -> None:
    task_variants = on_paper()
    record = task_variants.unfused.variants[1]
    trace = json.loads(record.trace)
    first, *others = trace["parts"]
    for spoiled in (
        {"parts": 3},
        {"parts": [first], "begins": []},
        trace | {"begins": ["gone", *trace["begins"][1:]]},
        trace | {"begins": trace["begins"][::-1]},
        trace | {"begins": [[], 1]},
        trace | {"parts": [["odd", *first[1:]], *others]},
        trace | {"parts": [[*first[:2], []], *others]},
        trace | {"parts": [*others, first]},
    ):
        odd = replace(record, trace=json.dumps(spoiled, separators=(",", ":")))
        with pytest.raises(BuildError, match="does not apply"):
            task_variants.stages(odd)
    with pytest.raises(BuildError, match="does not apply"):
        task_variants.stages(replace(record, parameters='{"7.MR": 4}'))


@pytest.mark.slow
def test_unfused_variant_of_missing_library_does_not_win() -> None:
    task_variants = on_paper()
    library, own, *_ = task_variants.unfused.variants
    records = [
        ok_record(task_variants.task, "t" * 32, v, p, secs)
        for v, secs in ((library, 1e-6), (own, 1e-4), (task_variants.sketch_set.generic(), 1e-3))
        for p in task_variants.task.domain.points
    ]
    assert plan_task(task_variants, records).plan.variants == (library.key,)
    assert plan_task(replace(task_variants, alternatives=()), records).plan.variants == (own.key,)


@pytest.mark.slow
def test_unfused_variants_are_baselines_not_trials() -> None:
    job = device_job(encoder(), PAPER_DEVICE, MemoryStore(), replace(QUICK, trials=2))
    vars(job)["task_variants"] = {on_paper().task.name: on_paper()}
    assert job.tune(RecordedRunner()).trials == 2
    timed = {r.variant.key for r in job.store.query(job.target.key, on_paper().task.key)}
    assert {v.key for v in on_paper().unfused.variants} < timed


def test_unfused_variants_of_one_library_come_first() -> None:
    def variant(name: str) -> VariantRecord:
        return VariantRecord("library" if "." in name else "tuned", name)

    one, two, own, softmax = map(variant, ("one.gemm+serial", "two.gemm", "matmul", "rows"))
    found = choices_of_parts([(one, two, own), (softmax,), (one, two, own)], limit=4)
    assert found[:3] == ((one, softmax, one), (two, softmax, two), (own, softmax, own))
    assert len(set(found)) == 4
    assert [UnfusedVariant(("a", "b"), chosen).record().kind for chosen in (found[0], found[2])] == ["library", "tuned"]
