"""The real sentence encoder as ONNX: the graph beside the weights of its folder, and the folder itself, side by side."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.effort import EFFORT
from tests.support.tuner_models import DEVICES, PAPER_DEVICE, QUICK, RecordedRunner, minilm_folder, narrowed, opened
from tests.tuner.e2e.test_minilm import DATA, reference_inputs

from relax_tune.database.store import MemoryStore
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.allowed_sizes import Range

pytest.importorskip("onnx", reason="needs the onnx package: pip install 'relax-tune[onnx]'")
pytestmark = pytest.mark.minilm
FOLDER_BOUNDS = {"b": (1, 8), "n": (1, 512)}
ONNX_BOUNDS = {"batch": (1, 8), "seq": (1, 512)}
# Functions of the ONNX model that compute something else than the folder's: token ids below zero count from the table's
# end, and hidden positions get the lowest finite number, in the mask and where it is added to the scores.
OWN = {
    "fused_add_scalar_less_where_take_slice_add_layer_norm",
    "fused_not_equal_where",
    "fused_permute_permute_matmul_mul_scalar_add",
    "fused_equal_maximum_scalar_softmax_where",
}


@pytest.fixture(scope="module")
def onnx_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph and the weights it points into, in one folder, as somebody would download them."""
    folder = tmp_path_factory.mktemp("onnx")
    shutil.copy(DATA / "minilm.onnx", folder)
    shutil.copy(minilm_folder() / "model.safetensors", folder)
    return folder / "minilm.onnx"


def job_of(path: Path, info: DeviceInfo, settings: Settings, store: MemoryStore) -> DeviceJob:
    bounds = ONNX_BOUNDS if path.suffix == ".onnx" else FOLDER_BOUNDS
    # nothing is tuned: one shape per symbol keeps the shapes to tune over few
    spots = {name: Range(2, 2) for name in bounds}
    return narrowed(device_job(load_model(path, bounds), info, store, settings), spots)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("kind", DEVICES)
def test_embeddings_are_the_folder_s_and_the_original_s(kind: str, onnx_path: Path, tmp_path: Path) -> None:
    made, found = reference_inputs(), {}
    shapes = [(b, n) for b, n in made.SHAPES if EFFORT == "heavy" or b * n <= 128]
    with opened(kind) as device:
        for path in (minilm_folder(), onnx_path):
            job = job_of(path, device.info, Settings(target=kind, effort="quick"), MemoryStore())
            saved = job.artifact(job.build("generic")).save(tmp_path / f"{path.name}.rta")
            with load_artifact(saved).open(device) as model:
                found[path] = [model.run(list(made.inputs(b, n)))[0] for b, n in shapes]
    with np.load(DATA / "minilm_reference.npz") as wanted:
        for (b, n), folder, onnx in zip(shapes, *found.values(), strict=True):
            assert np.abs(onnx - folder).max() <= 1e-5, (b, n)
            assert np.abs(onnx - wanted[f"embeddings_{b}_{n}"]).max() <= 1e-4, (b, n)


def test_onnx_equal_functions_are_equal_tasks(onnx_path: Path) -> None:
    store = MemoryStore()
    settings = replace(QUICK, attention="unfused")  # as the exported graph has it
    folder, onnx = (job_of(p, PAPER_DEVICE, settings, store) for p in (minilm_folder(), onnx_path))
    keys = {t.key for t in folder.tasks}
    assert len(keys) == len(onnx.tasks) == 12
    assert {t.name for t in onnx.tasks if t.key not in keys} == OWN


@pytest.mark.ccompiler
def test_a_row_of_hidden_positions_gives_zeros_as_in_the_exported_model(onnx_path: Path) -> None:
    """No position of it counts, and nothing is divided by 0."""
    with opened("c") as device:
        job = job_of(onnx_path, device.info, Settings(target="c"), MemoryStore())
        with job.artifact(job.build("generic")).open(device) as model:
            ids, mask = np.full((2, 3), 7, np.int64), np.array([[1, 1, 0], [0, 0, 0]], np.int64)
            (found,) = model.run([ids, mask])
    assert np.isfinite(found).all() and not found[1].any() and abs(np.linalg.norm(found[0]) - 1) < 1e-5


@pytest.mark.slow
def test_records_of_the_folder_serve_the_onnx_model(onnx_path: Path) -> None:
    """What was measured for the folder is what a build of the ONNX model chooses from."""
    store = MemoryStore()
    settings = Settings(target="c", effort="quick", trials=1, attention="unfused")
    folder, onnx = (job_of(p, PAPER_DEVICE, settings, store) for p in (minilm_folder(), onnx_path))
    folder.tune(RecordedRunner())

    def tuned(job: DeviceJob) -> set[str]:
        plans = job.build().plans
        found = {t.key: plans[t.name] for t in job.tasks if not plans[t.name].predicted}
        return {key for key, plan in found.items() if any(v.kind == "tuned" for v in plan.variants.values())}

    assert tuned(onnx) == tuned(folder) & {t.key for t in onnx.tasks}
    assert len(tuned(onnx)) >= 6
