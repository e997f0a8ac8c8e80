"""The real sentence encoder from its folder to embeddings, tuned on each device over part of its range."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.support.opencl_drivers import device_name
from tests.support.tuner_models import DEVICES, minilm_folder, narrowed, opened

from relax_tune.database.store import open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.job.progress import TuningSummary
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.extract import extract_tasks

pytestmark = [
    pytest.mark.minilm,
    pytest.mark.heavy,  # `tests/tuner/cli/test_cli_tune.py` does the same through the command
    pytest.mark.slow,
    # a thread pool that an earlier test has started keeps its size
    pytest.mark.filterwarnings("ignore:.*was tuned on another device"),
]
DATA = Path(__file__).parents[2] / "data"
# Tuned where the generic kernels are fast too, so that the test is; it runs over all of (1..8, 1..512).
TUNED_OVER = {"b": Range(1, 2), "n": Range(1, 24)}


def reference_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_minilm_reference", DATA / "make_minilm_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Tuned:
    """A tuned model: its database, the artifact made from it, and what the job said."""

    url: str
    module: IRModule
    info: DeviceInfo
    settings: Settings
    artifact: Path
    result: TuningSummary
    built: BuildResult

    def job(self, store: Any) -> DeviceJob:
        return narrowed(device_job(self.module, self.info, store, self.settings), TUNED_OVER)


@pytest.fixture(scope="module", params=DEVICES)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    folder = tmp_path_factory.mktemp("minilm")
    module = load_model(minilm_folder(), {"b": (1, 8), "n": (1, 512)})
    with opened(request.param):
        pass
    settings = Settings(target=device_name(request.param), trials=1, effort="quick")
    with pytest.MonkeyPatch.context() as patch, open_store(f"sqlite:///{folder / 't.db'}") as store:
        patch.setenv("OMP_NUM_THREADS", "1")  # the tests share the machine
        runner = open_runner(settings)
        try:
            job = narrowed(device_job(module, runner.device_info(), store, settings), TUNED_OVER)
            result = job.tune(runner)
            built = job.build()
            path = job.artifact(built).save(folder / "m.rta")
        finally:
            runner.close()
        yield Tuned(f"sqlite:///{folder / 't.db'}", module, job.device, settings, path, result, built)


@pytest.mark.process
def test_every_task_was_tuned(tuned: Tuned) -> None:
    assert not tuned.result.problems and tuned.result.trials == 10
    with open_store(tuned.url, read_only=True) as store:
        job = tuned.job(store)
        for task in extract_tasks(job.lowered, 2):
            kinds = {r.variant.kind for r in store.query(job.target.key, task.key, status="ok") if r.checked}
            assert {"generic", "tuned"} <= kinds, task.name
    assert not tuned.built.notes and len(tuned.built.plans) == 10
    for plan in tuned.built.plans.values():
        assert {v.kind for v in plan.variants.values()} >= {"generic", "tuned"}
        assert all(t is not None for a in plan.plan.variants for t in plan.times[a]) or len(plan.plan.entries) > 1


@pytest.mark.process
def test_embeddings_are_the_original_s(tuned: Tuned) -> None:
    made = reference_inputs()
    with np.load(DATA / "minilm_reference.npz") as wanted, load_artifact(tuned.artifact).open() as model:
        for b, n in made.SHAPES:
            (found,) = model.run(list(made.inputs(b, n)))
            error = np.abs(found - wanted[f"embeddings_{b}_{n}"]).max()
            assert error <= 1e-4, (b, n, error)


@pytest.mark.process
def test_the_same_again_measures_nothing_and_writes_the_same_bytes(tuned: Tuned, tmp_path: Path) -> None:
    class NoRunner:
        def submit(self, batch: Any) -> Any:
            raise AssertionError("nothing is left to measure")

        def device_info(self) -> DeviceInfo:
            return tuned.info

        def calibrate(self, reference: Any) -> Any:
            return reference

        def slots(self) -> int:
            return 1

        def close(self) -> None:
            pass

    with open_store(tuned.url) as store:
        job = tuned.job(store)
        before = store.count(job.target.key)
        result = job.tune(NoRunner())
        assert result.measurements == result.trials == 0
        again = job.artifact(job.build()).save(tmp_path / "again.rta")
        assert store.count(job.target.key) == before == tuned.result.measurements
    assert again.read_bytes() == tuned.artifact.read_bytes()
