"""Whole models on a WebGPU adapter: built, tuned, and built again from the records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import tiny_decoders
from tests.support.tuner_models import feed_forward, feed_forward_reference, minilm_folder, opened

import relax_tune as rt
from relax_tune.database.store import open_store
from relax_tune.ir.frontend.hf.folder import load_hf

pytestmark = [pytest.mark.webgpu, pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def adapter() -> Iterator[None]:
    with opened("webgpu"):
        yield


def test_tuning_webgpu_leaves_records_for_builds(tmp_path: Path) -> None:
    module, db = feed_forward(), f"sqlite:///{tmp_path / 'records.db'}"
    rt.tune(module, target="webgpu", db=db, trials=6, effort="quick")
    with open_store(db) as store:
        (target,) = store.targets()
        assert target.kind == "webgpu" and dict(target.fingerprint)["kind"] == "webgpu"
        keys = {m.variant.key for m in store.query(target.key, kinds=["tuned"]) if m.stage is None}
    assert keys
    built = rt.build(module, target="webgpu", db=db)
    labels = {(v.label, v.key) for call in built.program.calls for v in call.variants}
    assert any(label == "tuned" and key in keys for label, key in labels), labels
    assert {k.language for k in built.program.kernels} == {"webgpu"}
    with rt.load(built.save(tmp_path / "m.rta")) as model:
        for n in (1, 37, 128):
            x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
            np.testing.assert_allclose(model.run([x])[0], feed_forward_reference(module, x), atol=1e-4)


def test_decoder_webgpu_gives_logits_of_torch(tmp_path: Path) -> None:
    folder, logits = tiny_decoders.write(tmp_path, "llama3")
    module = load_hf(folder, bounds={"b": (1, 4)}, every_position=True)
    artifact = rt.build(module, target="webgpu", db="memory://")
    with rt.load(artifact.save(tmp_path / "decoder.rta")) as model:
        for b, n in tiny_decoders.SHAPES:
            wanted = logits[f"logits_{b}_{n}"]
            found = model.run([tiny_decoders.ids(b, n)], "prefill")[0]
            np.testing.assert_allclose(found[:, -wanted.shape[1] :], wanted, atol=1e-4, rtol=0)


@pytest.mark.heavy
@pytest.mark.minilm
@pytest.mark.ccompiler
def test_minilm_webgpu_equals_c_at_several_lengths(tmp_path: Path) -> None:
    module = rt.load_model(minilm_folder(), bounds={"b": (1, 8), "n": (1, 512)})
    models = {}
    for target in ("c", "webgpu"):
        models[target] = rt.load(
            rt.build(module, target=target, db="memory://").save(tmp_path / f"{target}.rta"), target
        )
    rng = np.random.default_rng(7)
    for b, n in ((1, 1), (2, 7), (1, 37), (3, 65)):
        ids, mask = rng.integers(1000, 2000, (b, n)), np.ones((b, n), np.int64)
        mask[0, n // 2 + 1 :] = 0
        c, webgpu = (models[t].run([ids, mask])[0] for t in ("c", "webgpu"))
        np.testing.assert_allclose(webgpu, c, atol=1e-4)
