"""Heads and sentence-transformers' modules behind an encoder, against torch and NumPy, and what is refused."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.effort import thinned

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.graph import TupleValue, name_of
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[3] / "data"
HEADS = runpy.run_path(str(DATA / "make_tiny_heads.py"))
Array = np.ndarray[Any, Any]


def write(root: Path, name: str, **changes: Any) -> dict[str, Array]:
    """A folder with an encoder and its head; the logits by torch."""
    with np.load(DATA / "tiny_heads.npz") as archive:
        config, start = {**json.loads(archive[f"{name}/config"].tobytes()), **changes}, f"{name}/weights/"
        weights = {k.removeprefix(start): archive[k] for k in archive.files if k.startswith(start)}
        logits = {k.removeprefix(f"{name}/"): archive[k] for k in archive.files if k.startswith(f"{name}/logits")}
    root.mkdir(exist_ok=True)
    save_file(weights, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(config))
    return logits


def modules(root: Path, **configs: dict[str, Any] | None) -> None:
    """Write modules.json: a transformer, then modules by type with their configuration."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for at, (kind, config) in enumerate(configs.items(), 1):
        listed.append(
            {"idx": at, "name": str(at), "path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        )
        if config is not None:
            (root / f"{at}_{kind}").mkdir(exist_ok=True)
            (root / f"{at}_{kind}" / "config.json").write_text(json.dumps(config))
    (root / "modules.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("name", thinned(HEADS["NAMES"], 4))
def test_head_of_architectures_gives_the_logits_of_torch(name: str, tmp_path: Path) -> None:
    logits = write(tmp_path, name)
    module = load_hf(tmp_path)
    for form in (module, lower(module).module):
        for b, n in HEADS["SHAPES"]:
            ids, mask = HEADS["ENCODERS"]["inputs"](b, n)
            more = [HEADS["types"](b, n)] if name.startswith("bert") else []
            results = evaluate_function(form, [ids, mask, *more])
            parts = results if isinstance(results, tuple) else (results,)
            assert len(parts) == (2 if name.endswith("Answering") else 1)
            visible = slice(None) if "Sequence" in name else mask == 1
            for k, part in enumerate(parts):
                np.testing.assert_allclose(part[visible], logits[f"logits_{b}_{n}_{k}"][visible], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("bert-MaskedLM", {}, ["logits"]), ("bert-SequenceClassification", {}, ["logits"]),
        ("bert-QuestionAnswering", {}, ["start_logits", "end_logits"]),
        ("bert-MaskedLM", {"pooling": "none"}, ["last_hidden_state"]),
        ("bert-MaskedLM", {"pooling": "cls", "normalize": False}, ["sentence_embedding"]),
    ],
)  # fmt: skip
def test_results_have_the_names_of_model_output(name: str, options: Any, names: list[str], tmp_path: Path) -> None:
    """The oracle is the fields of transformers' classes of ModelOutput; the pooled vector has its name in sentence-transformers."""
    write(tmp_path, name)
    result = load_hf(tmp_path, **options).graphs["main"].ret
    assert [name_of(r, "") for r in (result.fields if isinstance(result, TupleValue) else (result,))] == names


def test_pooling_given_leaves_the_head_out(tmp_path: Path) -> None:
    write(tmp_path, "bert-SequenceClassification")
    inputs = HEADS["ENCODERS"]["inputs"](2, 7)
    assert evaluate_function(load_hf(tmp_path, "none"), inputs).shape == (2, 7, 16)
    assert evaluate_function(load_hf(tmp_path, "cls"), inputs).shape == (2, 16)


def test_modules_of_sentence_transformers_are_obeyed(tmp_path: Path) -> None:
    write(tmp_path, "bert-MaskedLM")
    rng = np.random.default_rng(0)
    w, bias = (rng.standard_normal(s).astype(np.float32) for s in ((5, 32), (5,)))
    pooling = {
        "word_embedding_dimension": 16,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_sqrt_len_tokens": True,
    }
    dense = {"in_features": 32, "out_features": 5, "activation_function": "torch.nn.modules.activation.Tanh"}
    modules(tmp_path, Pooling=pooling, Dense=dense, Normalize=None)
    save_file({"linear.weight": w, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    ids, mask = HEADS["ENCODERS"]["inputs"](3, 16)
    hidden = evaluate_function(load_hf(tmp_path, "none"), [ids, mask])
    total = (hidden * mask[..., None]).sum(1) / np.sqrt(mask.sum(1, keepdims=True))
    expected = np.tanh(np.concatenate([hidden[:, 0], total], 1) @ w.T + bias)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(evaluate_function(load_hf(tmp_path), [ids, mask]), expected, rtol=1e-5, atol=1e-6)

    modules(tmp_path, Pooling={"pooling_mode_max_tokens": True})
    largest = np.where(mask[..., None] == 1, hidden, -np.inf).max(1)
    np.testing.assert_allclose(evaluate_function(load_hf(tmp_path), [ids, mask]), largest, rtol=1e-6)

    inner = tmp_path / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.move(tmp_path / name, inner / name)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[0]["path"] = inner.name
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    np.testing.assert_allclose(evaluate_function(load_hf(tmp_path), [ids, mask]), largest, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder: expected False, got True"),
        ({"architectures": ["BertLMHeadModel"]}, r"architectures: expected an encoder .* got \['BertLMHeadModel'\]"),
        ({"architectures": ["BertForMultipleChoice"]}, "ForTokenClassification"),
        ({"architectures": "BertModel"}, "architectures: expected"),
    ],
)
def test_unknown_head_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "bert-MaskedLM", **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)


def test_unknown_modules_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "bert-MaskedLM")
    modules(tmp_path, Pooling={"pooling_mode_median": True})
    with pytest.raises(ParseError, match=r"expected pooling modes among .* got pooling_mode_median"):
        load_hf(tmp_path)
    modules(tmp_path, Pooling={"pooling_mode_cls_token": True}, CNN={})
    with pytest.raises(ParseError, match=r"got 'CNN'"):
        load_hf(tmp_path)
    modules(tmp_path, Pooling={"pooling_mode_cls_token": True}, Dense={"in_features": 9, "out_features": 2})
    with pytest.raises(ParseError, match=r"in_features: expected .*got 9"):
        load_hf(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Transformer", "path": "../x"}])
    )
    with pytest.raises(ParseError, match="a path inside the folder"):
        load_hf(tmp_path)
    with pytest.raises(UserError, match="pooling: expected one of mean"):
        load_hf(tmp_path, "first")  # type: ignore[arg-type]
