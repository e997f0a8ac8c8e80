"""`run --text` with folders of sentence-transformers: prompts by name, case, the longest text, static embeddings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.effort import GENERIC
from tests.tuner.cli.cli_model import WORDS, make_bert
from typer.testing import CliRunner, Result

import relax_tune as rt
from relax_tune.tuner.cli.app import app

pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra text)")
pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
CLASSES = "sentence_transformers.models"


def write_modules(folder: Path, pooling: dict[str, Any]) -> None:
    listed = [
        {"idx": k, "name": str(k), "path": p, "type": f"{CLASSES}.{t}"}
        for k, (p, t) in enumerate((("", "Transformer"), ("1", "Pooling")))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1").mkdir()
    (folder / "1" / "config.json").write_text(json.dumps(pooling))
    settings = {"prompts": {"query": "the cat ", "passage": "rain "}, "default_prompt_name": "passage"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose pooling leaves the prompt out, and its artifact."""
    folder = make_bert(tmp_path_factory.mktemp("bert"))
    write_modules(folder, {"pooling_mode_mean_tokens": True, "include_prompt": False})
    module = rt.load_model(folder, {"b": (1, 2), "n": (1, 16)})
    rt.build(module, target="c", db="memory://", self_test=False, **GENERIC).save(folder / "m.rta")
    return folder


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", str(folder / "m.rta"), "--model", str(folder), *arguments])


@pytest.mark.parametrize(("prompt", "words"), [("query", ("the", "cat")), (None, ("rain",))])
def test_run_with_a_prompt_pools_only_the_text(
    folder: Path, prompt: str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    named = [] if prompt is None else ["--prompt", prompt]
    done = run(folder, "--text", "A dog RAN home", *named, "--out", str(out))
    assert done.exit_code == 0, done.output
    ids = np.array([[WORDS.index(w) for w in ("[CLS]", *words, "a", "dog", "ran", "home", "[SEP]")]])
    with rt.load(folder / "m.rta") as model, np.load(out) as found:
        assert [p.name for p in model.inputs] == ["input_ids", "attention_mask", "prompt_length"]
        (wanted,) = model.run([ids, np.ones_like(ids), np.array([1 + len(words)])])
        np.testing.assert_allclose(found["embeddings"], wanted, atol=1e-5)
    encoder = rt.load_model(folder, {"b": (1, 1), "n": (1, 16)}, pooling="none")
    with rt.build(encoder, target="c", db="memory://", self_test=False, **GENERIC).open() as model:
        (hidden,) = model.run([ids, np.ones_like(ids)])
    np.testing.assert_allclose(wanted[0], hidden[0, 1 + len(words) :].mean(0), atol=1e-5)


def test_run_with_an_unknown_prompt_names_the_known_ones(folder: Path) -> None:
    done = run(folder, "--text", "rain", "--prompt", "title")
    assert done.exit_code == 2 and "query, passage" in " ".join(done.stderr.split())


def test_run_of_text_beyond_the_length_of_training_is_refused_or_cut(folder: Path) -> None:
    long = "the cat sat on the mat"  # 9 tokens with the prompt
    done = run(folder, "--text", long)
    assert done.exit_code == 2 and "at most 8 tokens, got 9" in " ".join(done.stderr.split())
    assert run(folder, "--text", long, "--truncate").exit_code == 0


@pytest.mark.parametrize("listed", [True, False])
def test_run_of_static_embeddings_adds_no_special_tokens(tmp_path: Path, listed: bool) -> None:
    """Without the tokens at the ends; model2vec leaves unknown words out too."""
    make_bert(tmp_path)
    table = np.random.default_rng(0).standard_normal((len(WORDS), 6)).astype(np.float32)
    save_file({"embeddings": table}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    if listed:
        types = ("StaticEmbedding", "Normalize")
        modules = [{"idx": k, "name": str(k), "path": ".", "type": f"{CLASSES}.{t}"} for k, t in enumerate(types)]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    rt.build(rt.load_model(tmp_path, {"b": (1, 2), "n": (1, 16)}), target="c", db="memory://", **GENERIC).save(
        tmp_path / "m.rta"
    )
    out = tmp_path / "out.npz"
    done = run(tmp_path, "--text", "a dog xylophone", "--text", "rain", "--out", str(out))
    assert done.exit_code == 0, done.output
    words = ("a", "dog", "[UNK]") if listed else ("a", "dog")
    wanted = np.stack([table[[WORDS.index(w) for w in ws]].mean(0) for ws in (words, ("rain",))])
    with np.load(out) as found:
        np.testing.assert_allclose(
            found["embeddings"], wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5
        )
