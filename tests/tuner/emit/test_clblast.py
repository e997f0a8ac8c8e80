"""CLBlast as a variant on OpenCL devices: timed, dispatched, missed, and run from an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.library.clblast_stand_in import StandIn
from tests.support.tuner_models import PAPER_DEVICE, QUICK, RecordedRunner, job_dispatching, opened

import relax_tune as rt
from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Gelu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.library.clblast import ClBlast
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.batches import DEADLINE_SECS, LIBRARY_DEADLINE_SECS
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.task.unfused_variants import routines_of

LIBRARIES = (("clblast", "build 0123; file libclblast.so.1.5.3"),)
PAPER_OPENCL = replace(PAPER_DEVICE, kind="opencl", libraries=LIBRARIES)


def installed() -> ClBlast:
    """The library, or a skip that says why there is none."""
    try:
        return ClBlast()
    except BuildError as error:
        pytest.skip(str(error))


def product() -> IRModule:
    """gelu(x w) over n rows."""
    graph, rng = rt.GraphBuilder(), np.random.default_rng(1)
    x = graph.input("x", (graph.symbol("n", 1, 33), 24))
    w = graph.constant("w", rng.standard_normal((24, 40)).astype(np.float32))
    return graph.finish(graph.call(Gelu(), graph.call(Matmul(), x, w)))


def products() -> IRModule:
    """x y' for each of b pairs."""
    graph = rt.GraphBuilder()
    b, n = graph.symbol("b", 1, 3), graph.symbol("n", 1, 33)
    return graph.finish(graph.call(Matmul(True), *(graph.input(name, (b, n, 24)) for name in "xy")))


def routines(program: Program) -> set[str]:
    steps = (s for c in program.calls for v in c.variants for s in v.steps)
    return {s.target for s in steps if s.kind == "library"}


def by_library(program: Program, symbols: Mapping[str, int]) -> float:
    return 1e-6 if routines(program) else 1.0


def on(info: DeviceInfo) -> set[str]:
    task_variants = device_job(product(), info, MemoryStore(), QUICK).task_variants.values()
    return {r for c in task_variants for v in c.library.variants for r in routines_of(v)}


def test_clblast_is_offered_only_to_opencl_devices_with_clblast() -> None:
    assert on(PAPER_OPENCL) == {"clblast.sgemm"}
    assert not on(replace(PAPER_OPENCL, libraries=())) and not on(replace(PAPER_DEVICE, libraries=LIBRARIES))
    assert on(PAPER_DEVICE) == {"openblas.sgemm"}


@pytest.mark.slow
def test_clblast_is_dispatched_and_noted_when_missing_or_changed() -> None:
    runner, store = RecordedRunner(by_library, info=PAPER_OPENCL), MemoryStore()
    job = device_job(product(), PAPER_OPENCL, store, QUICK)
    job.tune(runner)
    built = job.build()
    assert routines(built.program) == {"clblast.sgemm"} and not [n for n in built.notes if "clblast" in n]
    patience = {(bool("clblast" in r.program_json), r.deadline_secs) for batch in runner.batches for r in batch}
    assert patience == {(True, LIBRARY_DEADLINE_SECS), (False, DEADLINE_SECS)}, "it compiles at first use"

    bare = device_job(product(), replace(PAPER_OPENCL, libraries=()), store, QUICK).build()
    assert not routines(bare.program)
    missing = [n for n in bare.notes if "clblast" in n]
    assert missing and all("is not installed" in n and "apt install libclblast1" in n for n in missing)

    other = replace(PAPER_OPENCL, libraries=(("clblast", "build 4567; file libclblast.so.1.6.3"),))
    after = device_job(product(), other, store, QUICK).build()
    stale = [n for n in after.notes if "clblast" in n]
    assert stale and all("1.5.3 (here build 4567; file libclblast.so.1.6.3)" in n for n in stale)
    assert not routines(after.program)


@pytest.mark.parametrize(
    "real", [pytest.param(True, marks=pytest.mark.clblast), pytest.param(False, marks=pytest.mark.opencl)]
)
@pytest.mark.parametrize(("batched", "asked"), [(False, {"gemm", "gemv"}), (True, {"batched", "gemm", "gemv"})])
def test_artifact_calls_clblast(batched: bool, asked: set[str], real: bool, tmp_path: Path) -> None:
    module = products() if batched else product()
    with opened("opencl") as device:
        info = replace(device.info, libraries=LIBRARIES)
        job = job_dispatching(info, module, lambda task_variants, _: task_variants.library.variants[:1])
        path = job.artifact(job.build()).save(tmp_path / "model.rta")
        with pytest.raises(BuildError, match=r"clblast.*install your distribution's CLBlast"):
            load_artifact(path).open(device, libraries={})
        found, rng = StandIn(device), np.random.default_rng(2)
        library = installed() if real else ClBlast(found)
        with load_artifact(path).open(device, libraries={"clblast": library}) as model:
            for b, n in ((1, 7), (2, 1), (3, 33), (1, 1), (2, 8)):
                shapes = ((b, n, 24), (b, n, 24)) if batched else ((n, 24),)
                arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
                wanted = run_function(module, "main", arrays)
                np.testing.assert_allclose(model.run(arrays)[0], wanted, rtol=1e-4, atol=1e-4)
        assert real or set(found.asked) == asked


@pytest.mark.clblast
@pytest.mark.slow
def test_installed_clblast_is_measured(tmp_path: Path) -> None:
    installed()
    with opened("opencl"):
        pass
    module = product()
    result = rt.tune(module, target="opencl", db=tmp_path / "records.db", trials=1, effort="quick")
    assert not result.work.problems
    with rt.open_database(str(tmp_path / "records.db"), create=False, read_only=True) as store:
        records = [r for r in store.query(result.target.key) if "clblast.sgemm" in routines_of(r.variant)]
        assert records and all(r.status == "ok" and r.checked for r in records)
