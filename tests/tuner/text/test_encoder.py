"""Embeddings of sentences: order, prompts, lengths, the file of the built model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import GENERIC
from tests.support.text_folders import TEXTS, WORDS, write_head
from tests.tuner.cli.cli_model import make_bert

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.ir.interp.interp_graph import run_function

pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra text)")
pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
BUILD: dict[str, Any] = {"target": "c", "db": "memory://", "self_test": False, **GENERIC}
OPTIONS: dict[str, Any] = {**BUILD, "bounds": {"b": (1, 2), "n": (1, 16)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with prompts, for at most 9 tokens."""
    folder = make_bert(tmp_path_factory.mktemp("bert"))
    listed = [
        {"idx": k, "name": str(k), "path": p, "type": f"sentence_transformers.models.{t}"}
        for k, (p, t) in enumerate((("", "Transformer"), ("1", "Pooling")))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1").mkdir()
    (folder / "1" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "the cat "}}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9, "do_lower_case": True}))
    rt.build(rt.load_model(folder, OPTIONS["bounds"]), **BUILD).save(folder / "m.rta")
    return folder


def test_artifact_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_bert(tmp_path / "other", seed=3)
    shutil.copy(folder / "m.rta", other / "m.rta")
    with pytest.raises(UserError, match="got one of another model"):
        rt.SentenceEncoder(other, other / "m.rta")
    (other / "model.safetensors").unlink()  # a server may have the artifact and the tokenizer only
    rt.SentenceEncoder(other, other / "m.rta").close()


@pytest.fixture(scope="module")
def hidden(folder: Path) -> Any:
    """The last hidden state of words in NumPy."""
    module = rt.load_model(folder, OPTIONS["bounds"], pooling="none")
    words = [w for w in WORDS if w != "[MASK]"]

    def state(text: str) -> Any:
        ids = np.array([[words.index(w) for w in ("[CLS]", *text.lower().split(), "[SEP]")]])
        result = run_function(module, "main", [ids, np.ones_like(ids)])
        return (result[0] if isinstance(result, tuple) else result)[0]

    return state


def test_encode_keeps_the_order_of_texts_of_any_length(folder: Path, hidden: Any) -> None:
    with rt.SentenceEncoder(folder, folder / "m.rta") as encoder:
        vectors = encoder.encode(list(TEXTS))
        for text, vector in zip(TEXTS, vectors, strict=True):
            np.testing.assert_allclose(vector, hidden(text).mean(0), atol=1e-5)
        single = encoder.encode(TEXTS[1])
        assert single.shape == (vectors.shape[1],)
        np.testing.assert_allclose(single, vectors[1], atol=1e-6)
        assert encoder.encode([]).shape == (0, vectors.shape[1])
        np.testing.assert_allclose(encoder.encode("rain", "query"), hidden("the cat rain").mean(0), atol=1e-5)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(encoder.similarity(vectors, vectors[0]), unit @ unit[:1].T, atol=1e-5)


def test_encode_of_a_long_text_is_cut_with_a_warning_or_refused(folder: Path, hidden: Any) -> None:
    long = "the cat sat on the mat rain falls slowly"
    with rt.SentenceEncoder(folder, folder / "m.rta") as encoder:
        with pytest.warns(UserWarning, match="is cut: the artifact takes at most 9"):
            vector = encoder.encode(long)
        np.testing.assert_allclose(vector, hidden("the cat sat on the mat rain").mean(0), atol=1e-5)
        with pytest.raises(UserError, match="expected at most 9 tokens, got 11"):
            encoder.encode(long, truncate=False)
        with pytest.raises(UserError, match="expected a name of config_sentence_transformers"):
            encoder.encode("rain", "title")
        for wrong, kind in (([1], "int"), ([None], "NoneType"), (["rain", 0], "int"), (7, "int")):
            with pytest.raises(UserError, match=f"expected a string or strings, got a {kind}"):
                encoder.encode(wrong)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="expected embeddings of one width"):
            encoder.similarity(vector, vector[:3])


def test_encoder_is_built_once_and_saved(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.rta"
    with rt.SentenceEncoder(folder, file, **OPTIONS) as first:
        vector = first.encode("rain")
    built = file.stat().st_mtime_ns
    with rt.SentenceEncoder(folder, file) as again:
        np.testing.assert_array_equal(again.encode("rain"), vector)
    assert file.stat().st_mtime_ns == built


def test_encoder_of_a_model_with_another_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a model with one vector per text"):
        rt.SentenceEncoder(write_head(tmp_path, "TokenClassification"), **OPTIONS)
