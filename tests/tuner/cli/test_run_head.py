"""`run --text` of a model with a head: token types are zero, and each text gets what is its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.tuner.cli.cli_model import WORDS, make_bert
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.tuner.cli.app import app

pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
DATA = Path(__file__).parents[2] / "data"


def test_run_of_a_head_gives_logits_of_single_texts(tmp_path: Path) -> None:
    name = "bert-TokenClassification"
    make_bert(tmp_path)  # for its tokenizer
    with np.load(DATA / "tiny_heads.npz") as found:
        (tmp_path / "config.json").write_bytes(found[f"{name}/config"].tobytes())
        start = f"{name}/weights/"
        save_file(
            {k.removeprefix(start): found[k] for k in found.files if k.startswith(start)},
            tmp_path / "model.safetensors",
        )
    artifact = rt.build(rt.load_model(tmp_path, {"b": (1, 2), "n": (1, 16)}), target="c", db="memory://")
    path = artifact.save(tmp_path / "m.rta")
    texts = ("the cat sat", "rain", "a dog ran home")
    given = [part for t in texts for part in ("--text", t)]
    out = tmp_path / "out.npz"
    done = CliRunner().invoke(app, ["run", str(path), "--model", str(tmp_path), *given, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["outputs"]["logits1"] == {"dtype": "float32", "shape": [3, 5]}
    with artifact.open() as model, np.load(out) as found:
        for number, text in enumerate(texts):
            ids = np.array([[WORDS.index(w) for w in ("[CLS]", *text.split(), "[SEP]")]])
            (wanted,) = model.run([ids, np.ones_like(ids), np.zeros_like(ids)])
            np.testing.assert_allclose(found[f"logits{number}"], wanted[0], atol=1e-5)
