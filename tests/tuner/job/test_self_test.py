"""The self-test of a build: wrong variants are not dispatched and are named, right ones are counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.tuner_models import QUICK, job_dispatching

from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Slice
from relax_tune.ir.op.math.elementwise import Exp, Gelu
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.program.program import program_from_json
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.device_job import DeviceJob, build_here, device_job
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult

pytestmark = [pytest.mark.self_test, pytest.mark.process, pytest.mark.ccompiler, pytest.mark.slow]


@dataclass
class AlteringRunner:
    """A device on which the kernels of some kinds of variants compute something else, and that keeps what it is asked."""

    runner: LocalRunner
    kinds: tuple[str, ...]
    asked: list[MeasureRequest] = field(default_factory=list)

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        self.asked.extend(batch)
        return self.runner.submit([replace(r, program_json=self._altered(r.program_json)) for r in batch])

    def _altered(self, text: str) -> str:
        program = program_from_json(text)
        if not {v.label for c in program.calls for v in c.variants} & set(self.kinds):
            return text
        kernels = tuple(replace(k, source=k.source.replace("0.5f", "0.75f")) for k in program.kernels)
        assert kernels != program.kernels
        return replace(program, kernels=kernels).to_json()

    def device_info(self) -> DeviceInfo:
        return self.runner.device_info()

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        return reference

    def slots(self) -> int:
        return 1

    def close(self) -> None:
        self.runner.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with contextlib.closing(LocalRunner("c")) as found:
        yield found


def gelu() -> IRModule:
    g = GraphBuilder()
    return g.finish(g.call(Gelu(), g.input("x", (g.symbol("n", 1, 64), 16))))


def tuned_job(runner: LocalRunner) -> DeviceJob:
    """A job whose records make a tuned kernel win everywhere."""
    return job_dispatching(
        runner.device_info(), gelu(), lambda c, _: [c.sketch_set.record_of(c.sketch_set.seeds(1)[0])]
    )


def labels(built: BuildResult) -> set[str]:
    return {v.label for c in built.program.calls for v in c.variants}


def test_tested_build_with_right_kernels_counts_passes(runner: LocalRunner, tmp_path: Path) -> None:
    job = tuned_job(runner)
    built = job.tested_build(runner)
    assert labels(built) == {"tuned"}
    assert built.self_test == {"passed": 1, "failed": []}
    saved = job.artifact(built).save(tmp_path / "gelu.rta")
    assert load_artifact(saved).manifest["extra"]["self_test"] == {"passed": 1, "failed": []}


def test_tested_build_with_wrong_tuned_kernel_dispatches_generic_form(runner: LocalRunner) -> None:
    job = tuned_job(runner)
    built = job.tested_build(AlteringRunner(runner, ("tuned",)))
    assert labels(built) == {"generic"}
    assert built.self_test is not None and built.self_test["passed"] == 1
    (failure,) = built.self_test["failed"]
    assert failure["variant"].startswith("tuned ") and failure["why"].startswith("wrong-result: at ")
    (note,) = [n for n in built.notes if "self-test" in n]
    assert failure["variant"] in note and "not dispatched" in note


def test_tested_build_with_wrong_stored_plan_plans_anew(runner: LocalRunner) -> None:
    job = tuned_job(runner)
    job.store_plans(job.build())
    assert labels(job.build("stored")) == {"tuned"}
    assert labels(job.tested_build(AlteringRunner(runner, ("tuned",)), "stored")) == {"generic"}


def test_tested_build_without_right_form_names_the_function(runner: LocalRunner) -> None:
    job = tuned_job(runner)
    (name,) = job.task_variants
    with pytest.raises(BuildError, match=f"{name}: no form.*failed the self-test"):
        job.tested_build(AlteringRunner(runner, ("tuned", "generic")))


def test_tested_build_with_cheap_work_on_large_arrays_takes_small_sizes(runner: LocalRunner) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 1 << 20), 1024))
    job = device_job(
        g.finish(g.call(Exp(), g.call(Slice(0, const(0), const(1)), x))), runner.device_info(), MemoryStore(), QUICK
    )
    spy = AlteringRunner(runner, ())
    assert job.tested_build(spy).self_test == {"passed": 1, "failed": []}
    sizes = [size for request in spy.asked for case in request.checks for size in case.symbols.values()]
    assert 1 << 10 < max(sizes) <= 1 << 16


def test_build_here_without_self_test_starts_no_device(runner: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tuned_job(runner)
    job.settings = replace(job.settings, target="c", self_test=False)
    monkeypatch.setattr("relax_tune.tuner.job.device_job.LocalRunner", None)
    assert build_here(job, "measured").self_test is None
