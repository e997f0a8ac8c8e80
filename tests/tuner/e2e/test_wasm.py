"""Kernels of WebAssembly, tuned in node and built from the records for a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.tuner_models import feed_forward, feed_forward_reference
from tests.tuner.web.pages import served
from tests.tuner.web.wasm_calls import arrays, in_node, listed, needs_clang

import relax_tune as rt
from relax_tune.database.store import open_store
from relax_tune.runtime.device.wasm.device import SPEC
from relax_tune.tuner.web.server import ServedModel
from relax_tune.tuner.web.wasm import is_wasm, wasm_files

pytestmark = [pytest.mark.cross, pytest.mark.process, pytest.mark.slow]


def test_tuning_webassembly_leaves_records_for_builds(tmp_path: Path) -> None:
    needs_clang()
    module, db = feed_forward(), f"sqlite:///{tmp_path / 'records.db'}"
    rt.tune(module, target=SPEC, db=db, trials=4, effort="quick")
    with open_store(db) as store:
        (target,) = store.targets()
        facts = dict(target.fingerprint)
        assert facts["cpu"] == "wasm32" and facts["engine"].startswith("V8 ") and facts["compiler"]
        assert not [m.message for m in store.query(target.key) if m.stage is not None], "no host library is tried"
        keys = {m.variant.key for m in store.query(target.key, kinds=["tuned"]) if m.stage is None}
    assert keys
    artifact = rt.build(module, target=SPEC, db=db)
    labels = {(v.label, v.key) for call in artifact.program.calls for v in call.variants}
    assert any(label == "tuned" and key in keys for label, key in labels), labels
    assert is_wasm(artifact)
    path = artifact.save(tmp_path / "model.rta")
    inputs = [np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32) for n in (1, 37, 128)]
    with served(ServedModel(path, "search", gpu=False, wasm=wasm_files(rt.load_artifact(path)))) as address:
        _, *found = in_node(address, *({"call": "main", "inputs": listed({"x": x})} for x in inputs))
    for x, answer in zip(inputs, found, strict=True):
        np.testing.assert_allclose(arrays(answer)[0], feed_forward_reference(module, x), atol=1e-4)
