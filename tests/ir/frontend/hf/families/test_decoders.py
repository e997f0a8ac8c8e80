"""Importing decoders of the families of the table: against the original framework, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.support.decoder_families import ADDED, HYBRIDS, KEPT, MODELS, PROMPT, SHAPES, inputs, write_family
from tests.support.effort import GENERIC, thinned

import relax_tune as rt
from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.hf.families.decoders import DECODERS
from relax_tune.ir.frontend.hf.families.with_images import WITH_IMAGES, read_text_model
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.runtime.model import Model

# LongRoPE beyond its limit has other frequencies, so a program is of texts that are all longer.
LONGER: dict[str, Any] = {"n": (17, 64), "m": (16, 63)}


def last_positions(module: IRModule | Model, b: int, n: int) -> np.ndarray[Any, Any]:
    """The logits of the last KEPT positions of a text: of a prompt, then decoded one by one."""
    run: Any = module.run if isinstance(module, Model) else partial(evaluate_function, module)
    tokens, start = inputs(b, n), n - KEPT + 1
    logits, *cache = run([tokens[:, :start]], "prefill")
    parts = [logits]
    for at in range(start, n):
        logits, *cache = run([tokens[:, at : at + 1], *cache], "decode")
        parts.append(logits)
    return np.concatenate(parts, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(MODELS, 4))
def test_family_has_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    longer = name == "phi3_long"
    folder, expected = write_family(tmp_path, name)
    module = load_hf(folder, bounds=LONGER if longer else None)
    for b, n in SHAPES[1:] if longer else SHAPES:
        largest = max(1.0, float(np.abs(expected[f"logits_{b}_{n}"]).max()) / 10)
        np.testing.assert_allclose(
            last_positions(module, b, n), expected[f"logits_{b}_{n}"], atol=1e-4 * largest, rtol=0
        )


@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    "name",
    thinned(
        (
            "mpt",
            "bloom",
            "qwen2_moe",
            "gemma3",
            "gemma3n",
            "gptj",
            "falcon_alibi",
            "phi3_partial",
            *HYBRIDS,
        ),
        14,
    ),
)
def test_family_generates_the_tokens_of_torch(tmp_path: Path, name: str) -> None:
    folder, expected = write_family(tmp_path, name)
    with rt.build(rt.load_model(folder, {"b": (1, 2)}), target="c", db="memory://", **GENERIC).open() as model:
        tokens = rt.generate(model, inputs(*PROMPT), ADDED)
        for b, n in SHAPES:
            logits = expected[f"logits_{b}_{n}"]
            largest = max(1.0, float(np.abs(logits).max()) / 10)
            np.testing.assert_allclose(last_positions(model, b, n), logits, atol=1e-4 * largest, rtol=0)
    np.testing.assert_array_equal(tokens[:, PROMPT[1] :], expected["tokens"])


def test_longrope_has_one_rotation_a_program(tmp_path: Path) -> None:
    folder, _ = write_family(tmp_path, "phi3_long")
    assert {b.var.name: b.upper for b in load_hf(folder).bounds} == {"b": None, "n": 16, "m": 15}
    with pytest.raises(UserError, match=r"at most 16 positions .* 1 to 20"):
        load_hf(folder, bounds={"n": (1, 20), "m": (1, 10)})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"head_dim": ...}, "head_dim: expected a whole number"),
        ("gemma2", {"sliding_window": ...}, "sliding_window: expected a number or null"),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "chunked": {}}}, "rope_parameters: expected an object with sliding"),
        ("phi3_short", {"original_max_position_embeddings": ...}, "original_max_position_embeddings: expected a whole"),
        ("rwkv", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon: expected 1e-05, got 0.001"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias: expected False, got True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None, got 50.0"),
        ("gemma3n", {"num_kv_shared_layers": 3}, "num_kv_shared_layers: expected a layer of each type before"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern: expected a number in .0, 1. for each"),
        ("gemma3n", {"intermediate_size": [24, 24, 24, 12]}, "intermediate_size: expected the same width for every layer"),
        ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs: expected at least 2"),
        ("gemma3n", {"model_type": "gemma3n", "architectures": None}, "text_config: expected an object"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures: expected a model with the"),
        ("gpt2", {"scale_attn_weights": 2}, "scale_attn_weights: expected true or false, got 2"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected False, got True"),
        ("gpt_neox", {"head_dim": 64}, "head_dim: expected 8, got 64"),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}, "attention_types: expected lists of 'global' and 'local'"),
        ("falcon_new", {"parallel_attn": False}, "parallel_attn: expected True, got False"),
        ("codegen", {"n_head": 2}, "expected n_head to be a multiple of 4, got 2"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi: expected True, got False"),
        ("mpt", {"no_bias": False}, "no_bias: expected True, got False"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok: expected at most the 5"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers: expected a list of numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected 0 or 1 for"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit: expected 0 to infinity"),
        ("rwkv", {"rescale_every": -1}, "rescale_every: expected a whole number, got -1"),
        ("rwkv", {"attention_hidden_size": 16}, "attention_hidden_size: expected the hidden size 32"),
        ("bamba", {"mamba_n_heads": 7}, "mamba_expand to be a multiple of mamba_n_heads"),
        ("granitemoehybrid", {"layer_types": ["chunked"] * 2}, "layer_types: expected 'mamba' or 'attention'"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers: expected 5 numbers"),
        ("cwm", {"layer_types": ...}, "layer_types: expected the type of each layer"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: expected a number other than 0"),
        ("llama_yarn", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected at most 4096 layers"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor: expected an even number of"),
    ],
)  # fmt: skip
def test_wrong_fields_of_a_family(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    folder, _ = write_family(tmp_path, name, **changes)
    with pytest.raises(ParseError, match=message):
        load_hf(folder)


def test_families_without_fields(tmp_path: Path) -> None:
    """A configuration without fields is refused."""
    folder, _ = write_family(tmp_path, "gpt2")
    for kind in DECODERS:
        (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        with pytest.raises(RelaxTuneError):
            load_hf(folder)


def test_weights_without_a_prefix(tmp_path: Path) -> None:
    """Files of the bare decoder have shorter names."""

    folder, expected = write_family(tmp_path, "gpt2")
    path = folder / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(path).items()}, path)
    b, n = SHAPES[0]
    np.testing.assert_allclose(last_positions(load_hf(folder), b, n), expected[f"logits_{b}_{n}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "qwen3_5", "qwen3_5_moe"])
def test_text_model_of_a_model_of_images_gives_the_logits(tmp_path: Path, name: str, prefix: str) -> None:
    """Its fields are an object of config.json, and its weights have a longer prefix, in newer and in older files."""
    folder, expected = write_family(tmp_path, name)
    text = json.loads((folder / "config.json").read_text())
    fields = {"model_type": name, "architectures": [f"{name.title()}ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(fields))
    path = folder / "model.safetensors"
    stored = {k.replace("model.", prefix, 1): v for k, v in load_file(path).items()}
    save_file({**stored, "model.vision_tower.patch.weight": np.ones((2, 2), np.float32)}, path)
    b, n = SHAPES[0]
    np.testing.assert_allclose(last_positions(load_hf(folder), b, n), expected[f"logits_{b}_{n}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", sorted(WITH_IMAGES))
def test_every_model_of_images_has_a_text_model(tmp_path: Path, kind: str) -> None:
    """The fields of a text model that transformers leaves out are those of its type."""
    text = {"model_type": WITH_IMAGES[kind], "sliding_window": None, "head_dim": 8, "num_key_value_heads": 2}
    named = {"architectures": ["AnyForConditionalGeneration"], "model_type": kind}
    stack = read_text_model({**named, "text_config": {**SMALL, **text}}, "config.json")
    assert (stack.hidden, stack.groups, len(stack.layers)) == (32, 2, 1)
    with pytest.raises(ParseError, match="architectures: expected a model with the head ForConditionalGeneration"):
        read_text_model({**named, "architectures": ["AnyModel"], "text_config": {**SMALL, **text}}, "config.json")
    with pytest.raises(ParseError, match="text_config: model_type: expected one of llama"):
        read_text_model({**named, "text_config": {**SMALL, "model_type": "gpt2"}}, "config.json")


SMALL = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 37,
    "max_position_embeddings": 64, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip


def test_experts_stacked_in_one_tensor_give_the_logits(tmp_path: Path) -> None:
    folder, expected = write_family(tmp_path, "qwen3_5_moe")
    path = folder / "model.safetensors"
    stored = load_file(path)
    for layer in (f"model.layers.{i}.mlp.experts" for i in range(2)):
        parts = {
            part: [stored.pop(f"{layer}.{i}.{part}_proj.weight") for i in range(5)] for part in ("gate", "up", "down")
        }
        stored[f"{layer}.gate_up_proj"] = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        stored[f"{layer}.down_proj"] = np.stack(parts["down"])
    save_file(stored, path)
    b, n = SHAPES[0]
    np.testing.assert_allclose(last_positions(load_hf(folder), b, n), expected[f"logits_{b}_{n}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("stated", [True, ...])
def test_stored_head_replaces_a_tied_table(tmp_path: Path, stated: Any) -> None:
    """transformers 5 ties no matrices of a file that differ."""
    folder, expected = write_family(tmp_path, "gpt2_inverse", tie_word_embeddings=stated)
    b, n = SHAPES[0]
    np.testing.assert_allclose(last_positions(load_hf(folder), b, n), expected[f"logits_{b}_{n}"], atol=1e-4, rtol=0)


def test_text_model_without_stated_sizes_has_default_sizes() -> None:
    fields = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    data = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": fields}
    stack = read_text_model(data, "config.json")
    assert (stack.hidden, stack.inner, stack.groups, len(stack.layers)) == (4096, 11008, 32, 32)


def test_first_files_of_qwen2_vl_have_the_fields_of_text_at_the_top(tmp_path: Path) -> None:
    folder, expected = write_family(tmp_path, "qwen2_vl")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"rope_theta": 1000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    text = {k: v for k, v in text.items() if k not in ("rope_parameters", "model_type")}
    (folder / "config.json").write_text(json.dumps({**text, **config, **rope}))
    b, n = SHAPES[0]
    np.testing.assert_allclose(last_positions(load_hf(folder), b, n), expected[f"logits_{b}_{n}"], atol=1e-4, rtol=0)


def test_layer_of_shared_keys_has_no_cache(tmp_path: Path) -> None:
    folder, _ = write_family(tmp_path, "gemma3n")
    names = [p.name for p in load_hf(folder).graphs["decode"].params]
    assert names == ["input_ids", "past_key_0", "past_value_0", "past_key_1", "past_value_1"]


def test_state_space_decoder_is_no_encoder(tmp_path: Path) -> None:
    """Padding would change the states behind it."""
    folder, _ = write_family(tmp_path, "bamba")
    with pytest.raises(ParseError, match="model_type: expected a decoder without state space layers"):
        load_hf(folder, pooling="lasttoken")


def test_decoder_without_attention_has_no_bound_of_past_positions(tmp_path: Path) -> None:
    folder, _ = write_family(tmp_path, "mamba2")
    module = load_hf(folder, bounds={"n": (1, 8)})
    assert [b.var.name for b in module.bounds] == ["b", "n"]
    names = [p.name for p in module.graphs["decode"].params]
    assert names == ["input_ids", "past_inputs_0", "past_state_0", "past_inputs_1", "past_state_1"]
