"""Weights packed when building: the same results to the bit, nothing left to pack on the device, nothing held twice; weights that
are parameters, prepared by a function of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, feed_forward, job_dispatching, opened

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, u8
from relax_tune.ir.core.expr import Expr, cast, const, load, lt, select
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Add, Exp, Mul
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.graph.lift import LiftParameters
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.library.registry import open_libraries
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.program.prepack import PackingStep, pack_weights, packed
from relax_tune.tuner.task.variants import TaskVariants


def packing_variants(task_variants: TaskVariants, _: int) -> list[VariantRecord]:
    """Two tuned variants that pack a weight, of different panels where there are such."""
    sketches = [k for k, s in enumerate(task_variants.sketch_set.sketches) if s.name.endswith(".packed")]
    found = task_variants.sketch_set.space.candidates(
        task_variants.sketch_set.space.sample(np.random.default_rng(5), 400)
    )
    first = {(c.sketch, str(c)): c for c in found if c.sketch in sketches}
    return [task_variants.sketch_set.record_of(c) for _, c in sorted(first.items())[:2]]


@pytest.mark.ccompiler
def test_packed_artifacts_give_the_same_bits(tmp_path: Path) -> None:
    with opened("c") as device:
        module = feed_forward()
        job = job_dispatching(device.info, module, packing_variants)
        built = job.build()
        plain, dense = job.artifact(built, pack=False), job.artifact(built)
        assert sum(len(p.prepare) for p in plain.programs) >= 2
        assert not any(p.prepare for p in dense.programs)
        assert not any(b.role == "packed" for p in dense.programs for b in p.buffers)
        # both products read packed weights alone: neither is there as the model has it
        assert {"w1", "w2"} & set(plain.constants) and not {"w1", "w2"} & set(dense.constants)
        assert len(dense.programs[0].kernels) < len(plain.programs[0].kernels)
        files = [
            a.save(tmp_path / f"{n}.rta").read_bytes() for n, a in (("a", dense), ("b", job.artifact(built, pack=True)))
        ]
        assert files[0] == files[1]
        with plain.open(device) as one, load_artifact(tmp_path / "a.rta").open(device) as other:
            for n in (1, 2, 13, 128):
                x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
                for a, b in zip(one.run([x]), other.run([x]), strict=True):
                    np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


@pytest.mark.ccompiler
@pytest.mark.onednn
@pytest.mark.skipif("onednn" not in open_libraries(), reason="needs the package onednn-cpu-gomp")
@pytest.mark.parametrize("pack", [False, True])
def test_weights_packed_by_a_library_are_packed_once_when_a_model_is_opened(pack: bool) -> None:
    def by_library(task_variants: TaskVariants, _: int) -> list[VariantRecord]:
        return [v for v in task_variants.library.variants if v.sketch.startswith("onednn.matmul_packed")]

    module = feed_forward()
    with opened("c") as device:
        job = job_dispatching(device.info, module, by_library)
        artifact = job.artifact(job.build(), pack=pack)
        (program,) = artifact.programs
        assert [s.target for s in program.prepare] == ["onednn.pack"] * 2
        assert sum(s.target == "onednn.matmul_packed" for c in program.calls for v in c.variants for s in v.steps) == 2
        with artifact.open(device) as model:
            for n in (1, 13, 128):
                x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
                for found, wanted in zip(model.run([x]), [run_function(module, "main", [x])], strict=True):
                    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.ccompiler
def test_lifted_parameters_are_prepared_by_a_function_of_the_same_artifact() -> None:
    """Weights that are parameters, laid out and scaled once by `main_prepare`, whose results `main` takes."""
    g = GraphBuilder()
    x, w = g.input("x", (g.symbol("n", 1, 64), 4)), g.input("w", (3, 4))
    scale, bias = g.input("scale", (3, 1)), g.input("bias", (3,))
    scaled = g.call(Permute((1, 0)), g.call(Mul(), w, g.call(Exp(), scale)))
    module = g.finish(g.call(Add(), g.call(Matmul(), x, scaled), bias))
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((5, 4), (3, 4), (3, 1), (3,))]
    with opened("c") as device:
        job = device_job(LiftParameters(("w", "scale", "bias"))(module), device.info, MemoryStore(), QUICK)
        with job.artifact(job.build("generic")).open(device) as model:
            prepared = model.run(arrays[1:3], "main_prepare")
            (found,) = model.run([arrays[0], arrays[3], *prepared], "main")
    np.testing.assert_allclose(found, run_function(module, "main", arrays), rtol=1e-5, atol=1e-5)


def copying(value: Any, dtype: Any = f32) -> PackingStep:
    """A packing of (3, 5) weights into 2 panels of 4 columns."""
    b = TensorBuilder("pack")
    source, target = b.input("source", (3, 5), dtype, True), b.output("target", (2, 3, 4))
    b.compute(target, lambda p, k, j: value(source.buffer, k, p * 4 + j))
    func = b.finish()
    return PackingStep(func, func.output_buffers[0], (0,), 1)


def test_panels_with_a_padded_tail() -> None:
    def padded(source: Buffer, k: Expr, j: Expr) -> Expr:
        return select(lt(j, 5), load(source, (k, j)), const(0.0, f32))

    w = np.arange(15, dtype=np.float32).reshape(3, 5)
    w[0, 0], w[1, 1] = -0.0, np.inf
    found = packed(copying(padded), [w])
    wanted = np.zeros((3, 8), np.float32)
    wanted[:, :5] = w
    assert found is not None and found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.int32), wanted.reshape(3, 2, 4).transpose(1, 0, 2).view(np.int32))


def test_packed_of_computing_step_is_none() -> None:
    """It rounds in its own way."""
    half = copying(lambda source, k, j: load(source, (k, j % 5)) * 0.5)
    wide = copying(lambda source, k, j: cast(load(source, (k, j % 5)), f32), u8)
    assert packed(half, [np.ones((3, 5), np.float32)]) is None
    assert packed(wide, [np.ones((3, 5), np.uint8)]) is None


@pytest.mark.slow
def test_weights_read_unpacked_as_well_stay() -> None:
    """A generic kernel beside a packing one reads the weight as the model has it."""
    job = job_dispatching(PAPER_DEVICE, feed_forward(), packing_variants)
    built = job.build()
    program = built.program
    w1 = next(i for i, b in enumerate(program.buffers) if b.name == "w1")
    call = program.calls[0]
    variant = call.variants[0]
    step = replace(variant.steps[0], buffers=(*variant.steps[0].buffers, w1))
    calls = (replace(call, variants=(replace(variant, steps=(step,)),)), *program.calls[1:])
    done = pack_weights([replace(program, calls=calls)], built.packings, job.lowered.module.constants)
    programs, constants = done.programs, done.constants
    assert "w1" in constants and "w2" not in constants
    assert [b.name for b in programs[0].buffers if b.name == "w1"] == ["w1"]
