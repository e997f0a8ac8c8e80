"""The real sentence encoder with weights of bfloat16, untuned, on both devices: close to what float32 gives, at half the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.effort import thinned
from tests.support.tuner_models import DEVICES, minilm_folder, opened
from tests.tuner.e2e.test_minilm import DATA, reference_inputs

from relax_tune.database.memory_store import MemoryStore
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

pytestmark = [pytest.mark.minilm, pytest.mark.filterwarnings("ignore:.*was tuned on another device")]

# About eight roundings a layer, each of up to 2^-9 of a value: 48 independent ones turn a vector by sqrt(48) * 2^-9, which
# takes half its square, 9.2e-5, off the cosine; twice that is allowed.
COSINE = 1 - 2 * 9.2e-5


@pytest.mark.parametrize("kind", thinned(DEVICES))
def test_bf16_embeddings_agree_with_f32(kind: str, tmp_path: Path) -> None:
    made = reference_inputs()
    module = load_model(minilm_folder(), {"b": (1, 8), "n": (1, 512)})
    with opened(kind) as device, np.load(DATA / "minilm_reference.npz") as reference:
        job = device_job(module, device.info, MemoryStore(), Settings(target=kind, effort="quick", precision="bf16"))
        path = job.artifact(job.build("generic")).save(tmp_path / "m.rta")
        whole = sum(a.nbytes for a in module.constants.values())
        assert whole / 2 < path.stat().st_size < whole * 0.52
        with load_artifact(path).open(device) as model:
            assert [str(o.dtype) for o in model.outputs] == ["float32"]
            for b, n in ((1, 7), (2, 16)):
                (found,) = model.run(list(made.inputs(b, n)))
                wanted = reference[f"embeddings_{b}_{n}"]
                cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
                assert cosines.min() >= COSINE, (b, n, cosines)
                assert np.abs(found - wanted).max() > 1e-4, "nothing was rounded"
