"""A feed-forward block through every arrow, on real devices: tuned, built, saved, loaded, run; and candidates gone bad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import (
    DEVICES,
    PAPER_DEVICE,
    QUICK,
    feed_forward,
    feed_forward_reference,
    narrowed,
    opened,
    row_scale,
)
from tests.tuner.measure.cluster.lent import lend

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.errors import UserError
from relax_tune.ir.arith.solver import installed_solver
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, cast, const
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.op.math.elementwise import Exp
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.program.program import KernelSource, LaunchStep, Program
from relax_tune.tuner.job import batches
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import device_info, open_runner
from relax_tune.tuner.job.lowered_model import parse_bounds
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.cluster.processes import start_scheduler
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.variants import TaskVariants

# a thread pool that an earlier test has started keeps its size
pytestmark = pytest.mark.filterwarnings("ignore:.*was tuned on another device")
ROWS = (1, 2, 7, 64, 97)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests share the machine: with two spinning threads a busy core costs seconds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(
    params=[
        pytest.param("local-c", marks=[pytest.mark.ccompiler, pytest.mark.heavy]),
        pytest.param("local-opencl", marks=[pytest.mark.opencl, pytest.mark.heavy]),
        pytest.param("dask-c", marks=pytest.mark.ccompiler),
        pytest.param("dask-opencl", marks=[pytest.mark.opencl, pytest.mark.heavy]),
    ]
)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    where, _, kind = request.param.partition("-")
    with opened(kind):
        pass  # skips where there is no such device
    with ExitStack() as stack:
        settings = Settings(target=kind)
        if where == "dask":
            pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
            scheduler, address = start_scheduler()
            stack.enter_context(scheduler)
            stack.enter_context(lend(address, kind))
            settings = replace(settings, scheduler=address)
        found = open_runner(settings)
        stack.callback(found.close)
        yield found


@pytest.mark.process
def test_a_feed_forward_block_through_every_arrow(runner: Runner, tmp_path: Path) -> None:
    module = feed_forward(upper=128)
    with open_store(f"sqlite:///{tmp_path / 't.db'}") as store:
        job = device_job(module, runner.device_info(), store, QUICK)
        result = job.tune(runner)
        assert result.trials == 2 * len(job.tasks) and not result.problems
        assert result.measurements == store.count(job.target.key) and not store.check()
        (unit,) = store.units(job.target.key)
        assert unit.unit == f"cpu:{unit.host}" and unit.worker.startswith(unit.host)
        built = job.build()
        assert not built.notes
        path = job.artifact(built).save(tmp_path / "m.rta")
        again = device_job(module, runner.device_info(), store, QUICK)
        assert again.tune(runner).measurements == 0
        assert again.artifact(again.build()).save(tmp_path / "again.rta").read_bytes() == path.read_bytes()
    artifact = load_artifact(path)
    assert artifact.manifest["extra"]["target"] == job.target.key
    solver = installed_solver()
    assert artifact.manifest["extra"]["solver"] == (solver and solver.name)
    rng = np.random.default_rng(0)
    with artifact.open() as model:
        for rows in ROWS:
            x = rng.standard_normal((rows, 24)).astype(np.float32)
            (y,) = model.run([x])
            np.testing.assert_allclose(y, feed_forward_reference(module, x), rtol=1e-4, atol=1e-4)
        with pytest.raises(UserError, match="128"):
            model.run([np.zeros((129, 24), np.float32)])


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("policy", ["generic", "library"])
def test_builds_without_tuning_are_right(kind: str, policy: Any, tmp_path: Path) -> None:
    with opened(kind) as device:
        module = feed_forward(upper=128)
        job = device_job(module, device.info, MemoryStore(), QUICK)
        with load_artifact(job.artifact(job.build(policy)).save(tmp_path / "m.rta")).open(device) as model:
            for rows in (1, 97):
                x = np.random.default_rng(rows).standard_normal((rows, 24)).astype(np.float32)
                np.testing.assert_allclose(model.run([x])[0], feed_forward_reference(module, x), rtol=1e-4, atol=1e-4)


# -- candidates gone bad ----------------------------------------------------------------------------------------------

BAD = {
    "wrong-result": "b1[0] += 1.0f;",
    "timeout": "volatile int go = 1; while (go) { }",
    "crash": "*(volatile int *)(s0 - s0) = 1;",
    "compile": "this is no statement;",
}


def spoiled(program: Program, how: str) -> Program:
    """The program with one more step at its end: a kernel that does harm."""
    kernel = KernelSource(
        "harm", "c", f"#include <stdint.h>\nvoid harm(const float *b0, float *b1, int64_t s0) {{ {BAD[how]} }}\n"
    )
    (call,) = program.calls
    (variant,) = call.variants
    step = LaunchStep("kernel", "harm", (program.inputs[0], program.outputs[0]), (0,))
    harmed = replace(call, variants=(replace(variant, steps=(*variant.steps, step)),))
    return replace(program, kernels=(*program.kernels, kernel), calls=(harmed,))


@pytest.mark.process
@pytest.mark.ccompiler
def test_bad_candidates_are_recorded_and_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "DEADLINE_SECS", 3.0)
    real = TaskVariants.program
    spoil: dict[str, str] = {}

    def program(self: TaskVariants, record: VariantRecord) -> Program:
        found = real(self, record)
        if record.kind == "tuned" and record.key not in spoil and len(spoil) < len(BAD):
            spoil[record.key] = list(BAD)[len(spoil)]
        return spoiled(found, spoil[record.key]) if record.key in spoil else found

    monkeypatch.setattr(TaskVariants, "program", program)
    store: Store = MemoryStore()
    with opened("c"):
        pass
    runner = LocalRunner("c")
    try:
        settings = Settings(target="c", trials=6, effort="quick")
        job = device_job(row_scale(), runner.device_info(), store, settings)
        result = job.tune(runner)
    finally:
        runner.close()
    (task,) = job.tasks
    records = store.query(job.target.key, task.key)
    stages = {r.variant.key: r.stage for r in records if r.status == "failed"}
    assert stages == spoil and result.failures == len(BAD)
    assert all(r.message and not r.samples_secs for r in records if r.status == "failed")
    assert len({r.variant.key for r in records if r.status == "ok" and r.variant.kind == "tuned"}) == 2
    assert not set(spoil) & set(job.build().plans[task.name].plan.variants)
    # and nothing of it is tried again
    again = device_job(row_scale(), job.device, store, settings)
    assert again.tune(_Unused(job)).measurements == 0


class _Unused:
    """A runner nobody may ask."""

    def __init__(self, job: DeviceJob) -> None:
        self.info = job.device

    def submit(self, batch: Any) -> Any:
        raise AssertionError("nothing is left to measure")

    def device_info(self) -> Any:
        return self.info

    def calibrate(self, reference: Any) -> Any:
        return reference

    def slots(self) -> int:
        return 1

    def close(self) -> None:
        pass


# -- the edges --------------------------------------------------------------------------------------------------------


def test_tasks_are_unique_and_named_by_content() -> None:
    job = device_job(feed_forward(), PAPER_DEVICE, MemoryStore(), QUICK)
    other = device_job(feed_forward(upper=40), PAPER_DEVICE, MemoryStore(), QUICK)
    assert len({t.key for t in job.tasks}) == len(job.tasks) == 3
    assert [t.key for t in job.tasks] == [t.key for t in other.tasks]  # bounds are no part of a record's key
    assert [t.domain for t in job.tasks] != [t.domain for t in other.tasks]
    assert [t.key for t in device_job(feed_forward(width=32), PAPER_DEVICE, MemoryStore(), QUICK).tasks] != [
        t.key for t in job.tasks
    ]


def test_overrides_narrow_the_ranges_and_must_name_symbols() -> None:
    job = narrowed(device_job(feed_forward(), PAPER_DEVICE, MemoryStore(), QUICK), {"n": Range(4, 8)})
    assert all(p[0] in range(4, 9) for t in job.tasks for p in t.domain.points)
    assert job.build().program.symbols[0].upper == 128
    with pytest.raises(UserError, match=r"bound of m.*has n"):
        extract_tasks(job.lowered, 6, {"m": Range(1, 2)})


def test_bounds_are_read_or_refused() -> None:
    assert parse_bounds(["n=1:512", "b=2:2"]) == {"n": (1, 512), "b": (2, 2)}
    for wrong in ("n", "n=5", "n=9:3", "=1:2", "n=a:b", "n=-1:3"):
        with pytest.raises(UserError, match="NAME=LOW:HIGH"):
            parse_bounds([wrong])


def test_path_without_model_error_names_model_kinds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        load_model(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(tmp_path / "file")


@pytest.mark.ccompiler
def test_a_device_is_known_without_a_runner() -> None:
    with opened("c") as device:
        assert device_info("c") == device.info


@pytest.mark.process
@pytest.mark.ccompiler
def test_task_with_scalar_symbol_is_tuned() -> None:
    """`k` reaches the kernel as an explicit scalar; measuring gives it a value as it does to every symbol."""
    s, k = Var("s"), Var("k")
    b = TensorBuilder("scale")
    a, y = b.input("a", (s, 8)), b.output("y", (s, 8))
    b.scalar(k)
    b.compute(y, lambda i, j: a[i, j] * cast(k, f32))
    g = GraphBuilder()
    n, m = g.symbol("n", 1, 64), g.symbol("m", 1, 16)
    x, z = g.input("x", (n, 8)), g.input("z", (m,))
    scaled = g.call_tir(g.add(b.finish()), [x], TensorInfo((n, const(8)), f32), scalars=[m])
    module = g.finish([scaled, g.call(Exp(), z)])
    with MemoryStore() as store, closing(open_runner(QUICK)) as runner:
        job = device_job(module, runner.device_info(), store, QUICK)
        work = job.tune(runner)
        task = next(t for t in job.tasks if t.name == "scale")
        tuned = store.query(job.target.key, task.key, kinds=("tuned",))
        assert work.failures == 0 and len({tuple(r.symbols.values()) for r in tuned}) > 2
        with job.artifact(job.build()).open() as model:
            array = np.arange(24, dtype=np.float32).reshape(3, 8)
            scaled_by_5, _ = model.run([array, np.zeros(5, np.float32)])
            assert np.array_equal(scaled_by_5, 5 * array)
