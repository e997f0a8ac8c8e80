"""Embedders of sentence-transformers: decoders that are pooled, against the original, and modules against NumPy."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.encoder_folders import write_encoder

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

DATA = Path(__file__).parents[3] / "data"
MAKER = runpy.run_path(str(DATA / "make_tiny_sentences.py"))
FAMILIES = MAKER["FAMILIES"]
Array = np.ndarray[Any, Any]
write = partial(write_encoder, DATA / "tiny_sentences.npz", FAMILIES)


def modules(root: Path, first: str = "Transformer", **configs: dict[str, Any] | None) -> None:
    """Write modules.json: a first module, then modules by type with their configuration."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.models.{first}"}]
    for at, (kind, config) in enumerate(configs.items(), 1):
        path = f"{at}_{kind}"
        listed.append({"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if config is not None:
            (root / path).mkdir(exist_ok=True)
            (root / path / "config.json").write_text(json.dumps(config))
    (root / "modules.json").write_text(json.dumps(listed))


def run(module: Any, inputs: dict[str, Array]) -> Any:
    return evaluate_function(module, [inputs[p.name] for p in module.graphs["main"].params])


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKER["MODELS"])
def test_decoder_read_as_encoder_gives_the_vectors_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    results = write(tmp_path, name)
    _, _, modes, with_prompt = MAKER["MODELS"][name]
    if modes:
        modules(tmp_path, Pooling={"pooling_mode": list(modes), "include_prompt": with_prompt})
    module = load_hf(tmp_path, bounds={"n": (1, 16)})
    assert ("prompt_length" in [p.name for p in module.graphs["main"].params]) == (not with_prompt)
    for form in (module, lower(module).module):
        for side in MAKER["SIDES"] if name != "gpt2_classes" else ("right",):
            for b, n in MAKER["SHAPES"]:
                found = run(form, MAKER["inputs"](b, n, side))
                np.testing.assert_allclose(found, results[f"{side}_{b}_{n}"], rtol=1e-4, atol=1e-4)


def test_pooling_of_a_decoder_by_option(tmp_path: Path) -> None:
    results = write(tmp_path, "qwen3")
    found = run(load_hf(tmp_path, "lasttoken", normalize=False), MAKER["inputs"](3, 13, "right"))
    np.testing.assert_allclose(found, results["right_3_13"], rtol=1e-4, atol=1e-4)


def test_bare_decoder_without_modules_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    with pytest.raises(ParseError, match=r"ForCausalLM .pooling= reads the model as an encoder"):
        load_hf(tmp_path)


def test_bidirectional_decoder_does_not_generate(tmp_path: Path) -> None:
    write(tmp_path, "qwen2", architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ParseError, match="is_causal: expected True, got False"):
        load_hf(tmp_path)


def test_layer_norm_and_dense_with_residual_follow_the_pooling(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    rng = np.random.default_rng(0)
    dense = {
        "in_features": 16,
        "out_features": 5,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": True,
    }
    modules(
        tmp_path, Pooling={"pooling_mode_lasttoken": True}, LayerNorm={"dimension": 16}, Dense=dense, Normalize=None
    )
    gamma, beta, w, bias, more = (
        rng.standard_normal(s).astype(np.float32) for s in ((16,), (16,), (5, 16), (5,), (5, 16))
    )
    save_file({"norm.weight": gamma, "norm.bias": beta}, tmp_path / "2_LayerNorm" / "model.safetensors")
    save_file(
        {"linear.weight": w, "linear.bias": bias, "residual.weight": more}, tmp_path / "3_Dense" / "model.safetensors"
    )
    inputs = MAKER["inputs"](3, 13, "right")
    x = run(load_hf(tmp_path, "lasttoken", normalize=False), inputs).astype(np.float64)
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * gamma + beta
    y = x @ w.T + bias + x @ more.T
    np.testing.assert_allclose(run(load_hf(tmp_path), inputs), y / np.linalg.norm(y, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")])
def test_splade_pools_the_logits_of_words(strategy: str, activation: str, tmp_path: Path) -> None:
    write_encoder(DATA / "tiny_families.npz", FAMILIES, tmp_path, "electra")
    inputs = FAMILIES["inputs"](2, 13, {"vocab_size": 23})
    inputs["token_type_ids"] = np.zeros_like(inputs["input_ids"])
    logits, mask = run(load_hf(tmp_path), inputs), inputs["attention_mask"]
    pooling = {"pooling_strategy": strategy, "activation_function": activation}
    modules(tmp_path, "MLMTransformer", SpladePooling=pooling)
    wanted = np.log1p(np.maximum(logits * mask[..., None], 0))
    wanted = np.log1p(wanted) if activation == "log1p_relu" else wanted
    wanted = wanted.max(1) if strategy == "max" else wanted.sum(1)
    np.testing.assert_allclose(run(load_hf(tmp_path), inputs), wanted, rtol=1e-5, atol=1e-6)
    modules(tmp_path, "Transformer", SpladePooling=pooling)
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "fill-mask"}')
    np.testing.assert_allclose(run(load_hf(tmp_path), inputs), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("newer", [True, False])
def test_cross_encoder_gives_activated_scores(newer: bool, tmp_path: Path) -> None:
    sigmoid = "torch.nn.modules.activation.Sigmoid"
    own = {} if newer else {"sentence_transformers": {"activation_fn": sigmoid}}
    write_encoder(DATA / "tiny_families.npz", FAMILIES, tmp_path, "albert")
    inputs = FAMILIES["inputs"](2, 13, {"vocab_size": 23})
    logits = run(load_hf(tmp_path), inputs)
    write_encoder(DATA / "tiny_families.npz", FAMILIES, tmp_path, "albert", **own)
    if newer:
        modules(tmp_path)
        (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "sequence-classification"}')
        (tmp_path / "config_sentence_transformers.json").write_text(
            json.dumps({"model_type": "CrossEncoder", "activation_fn": sigmoid})
        )
    np.testing.assert_allclose(run(load_hf(tmp_path), inputs), 1 / (1 + np.exp(-logits)), rtol=1e-5)


@pytest.mark.parametrize("quantised", [True, False])
def test_static_embeddings_are_averaged(quantised: bool, tmp_path: Path) -> None:
    """model2vec stores rows by class, the class of each token, and a weight for each token."""
    rng = np.random.default_rng(0)
    table, mapping, weights = rng.standard_normal((5, 6)), rng.integers(0, 5, 23), rng.random(23)
    rows = (table[mapping] * weights[:, None]).astype(np.float32)
    stored = {"embeddings": table, "mapping": mapping, "weights": weights} if quantised else {"embedding.weight": rows}
    save_file(stored, tmp_path / "model.safetensors")
    modules(tmp_path, "StaticEmbedding", Normalize=None)
    inputs = MAKER["inputs"](3, 13, "right")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    wanted = (rows[ids] * mask[..., None]).sum(1)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(run(load_hf(tmp_path), inputs), wanted, atol=1e-6)
    empty = {**inputs, "attention_mask": np.zeros_like(mask)}
    np.testing.assert_array_equal(run(load_hf(tmp_path), empty), np.zeros((3, 6)))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"sentence_bert_config.json": {"transformer_task": "any-to-any"}}, "transformer_task: expected one of feature-extraction"),
        ({"1_Pooling/config.json": {"pooling_mode": "median"}}, "pooling_mode: expected modes among"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": 1}}, "include_prompt: expected true or false"),
        ({"2_Dense/config.json": {"in_features": 16, "out_features": 2, "module_input_name": "token_embeddings"}}, "module_input_name"),
    ],
)  # fmt: skip
def test_unknown_settings_of_modules_are_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    modules(tmp_path, Pooling={"pooling_mode": "mean"}, Dense={"in_features": 16, "out_features": 2})
    for name, text in files.items():
        (tmp_path / name).write_text(json.dumps(text))
    with pytest.raises(ParseError, match=message):
        load_hf(tmp_path)
