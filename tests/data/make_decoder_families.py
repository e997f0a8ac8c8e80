"""Makes decoder_families.npz: what the original framework gives for a small decoder of each family.

Needs torch and transformers:

    python tests/data/make_decoder_families.py [NAME ...]

Given names, only these models are computed.

`models` is JSON as bytes: of each model of MODELS its config.json, and the shape of each weight of its file; `weight` draws the values,
also in the tests. `NAME/logits_B_N` holds for every shape of SHAPES the logits of the last KEPT positions of `inputs(b, n)`, and
`NAME/tokens` what greedy generation adds to `inputs(*PROMPT)`: (b, ADDED).
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((2, 3), (1, 21))
PROMPT, ADDED = (2, 7), 12
KEPT = 2
VOCABULARY = 37
SPECIAL: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
WIDE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, **SPECIAL,
}  # fmt: skip
SIZES: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 24, **SPECIAL}
BLOOM: dict[str, Any] = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "pad_token_id": 0, **SPECIAL}
OPT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24, "max_position_embeddings": 64, "pad_token_id": 0,
    "word_embed_proj_dim": 32, **SPECIAL,
}  # fmt: skip
EXPERTS: dict[str, Any] = {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN: dict[str, Any] = {
    **SIZES, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "head_dim": 8,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
WINDOW: dict[str, Any] = {"sliding_window": 5}
TYPED: dict[str, Any] = {**WINDOW, "layer_types": TYPES}
GEMMA: dict[str, Any] = {**SIZES, **TYPED, "head_dim": 8, "query_pre_attn_scalar": 12}

GEMMA3N: dict[str, Any] = {
    **{k: v for k, v in GEMMA.items() if k != "query_pre_attn_scalar"}, "num_hidden_layers": 4, "layer_types": TYPES * 2,
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.7, 0.0, 0.5, 0.0], "altup_num_inputs": 3, "laurel_rank": 4,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 31,
}  # fmt: skip

HYBRID = ["linear_attention", "full_attention"]
MAMBA: dict[str, Any] = {
    **SIZES, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 4,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "head_dim": 8,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4,
    "pad_token_id": 0, **SPECIAL,
}  # fmt: skip


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **more}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, mscale=0.7, mscale_all_dim=1.1)
LONG = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 3.5])

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_yarn": ("Llama", {**SIZES, **YARN}),
    "llama_yarn_exact": ("Llama", {**SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)}),
    "llama_dynamic": ("Llama", {**SIZES, **rope("dynamic", factor=2.0)}),
    "phi3": ("Phi3", {**SIZES, **WINDOW}),
    "phi3_short": ("Phi3", {**SIZES, "original_max_position_embeddings": 32, **LONG}),
    "phi3_long": ("Phi3", {**SIZES, "original_max_position_embeddings": 16, **LONG}),
    "phi3_partial": ("Phi3", {**SIZES, **rope("default", partial_rotary_factor=0.5)}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3n": ("Gemma3n", GEMMA3N),
    "gemma3n_own": ("Gemma3n", {**GEMMA3N, "num_kv_shared_layers": 0, "altup_active_idx": 1, "altup_correct_scale": False}),
    "gpt2": ("GPT2", GPT),
    "gpt2_inverse": ("GPT2", {**GPT, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoX", {**WIDE, "rotary_pct": 0.25}),
    "gpt_neox_sequential": ("GPTNeoX", {**WIDE, "use_parallel_residual": False, "attention_bias": False}),
    "opt": ("OPT", OPT),
    "opt_post": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "falcon": ("Falcon", {**WIDE, "ffn_hidden_size": 24}),
    "falcon_new": ("Falcon", {**WIDE, "ffn_hidden_size": 24, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("Falcon", {**WIDE, "ffn_hidden_size": 24, "alibi": True, "parallel_attn": False, "bias": True}),
    "bloom": ("Bloom", {**BLOOM, "hidden_size": 48, "n_head": 6}),
    "bloom_after": ("Bloom", {**BLOOM, "apply_residual_connection_post_layernorm": True}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2_moe": ("Qwen2Moe", {**QWEN, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**QWEN, "clip_qkv": 0.5}),
    "flex_olmo": ("FlexOlmo", QWEN),
    "granitemoe": ("GraniteMoe", {**EXPERTS, "attention_multiplier": 0.3}),
    "phi": ("Phi", {**SIZES, "qk_layernorm": True}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**GPT, "n_head": 8, "rotary_dim": 4}),
    "stablelm": ("StableLm", SIZES),
    "stablelm_parallel": ("StableLm", {**SIZES, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {**SIZES, **WINDOW}),
    "olmo": ("Olmo", {**SIZES, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2", SIZES),
    "olmo3": ("Olmo3", {**SIZES, **TYPED}),
    "granite": (
        "Granite",
        {**SIZES, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "cohere": ("Cohere", {**SIZES, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**SIZES, **TYPED, "logit_scale": 0.5}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 0]}),
    "glm": ("Glm", {**SIZES, "head_dim": 8}),
    "glm4": ("Glm4", {**SIZES, "head_dim": 8}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gpt_bigcode_heads": ("GPTBigCode", {**GPT, "multi_query": False}),
    "gpt_neo": (
        "GPTNeo",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5,
         "intermediate_size": 24, "max_position_embeddings": 64, **SPECIAL},
    ),
    "mpt": ("Mpt", {"d_model": 48, "n_heads": 6, "n_layers": 1, "max_seq_len": 64, "pad_token_id": 0, **SPECIAL}),
    "helium": ("Helium", {**SIZES, "head_dim": 8}),
    "nemotron": ("Nemotron", SIZES),
    "exaone4": ("Exaone4", {**SIZES, **TYPED}),
    "arcee": ("Arcee", SIZES),
    "seed_oss": ("SeedOss", {**SIZES, "head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {**SIZES, "head_dim": 8}),
    "persimmon": ("Persimmon", WIDE),
    "biogpt": ("BioGpt", WIDE),
    "biogpt_eps": ("BioGpt", {**WIDE, "layer_norm_eps": 0.1}),
    "hunyuan": ("HunYuanDenseV1", {**SIZES, "head_dim": 8}),
    "jais2": ("Jais2", SIZES),
    "ministral": ("Ministral", {**SIZES, **WINDOW, "head_dim": 8}),
    "vaultgemma": ("VaultGemma", GEMMA),
    "cwm": ("Cwm", {**SIZES, **TYPED, "head_dim": 8}),
    "mamba2": ("Mamba2", MAMBA2),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**MAMBA, "layer_types": HYBRID, "shared_intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 2,
         "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybrid",
        {**MAMBA, "layer_types": HYBRID, "shared_intermediate_size": 20, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "rwkv": (
        "Rwkv",
        {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "context_length": 64, "rescale_every": 2, **SPECIAL},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**QWEN, **DELTA, "norm_topk_prob": True, **rope("default", partial_rotary_factor=0.5)},
    ),
    "qwen3_5": ("Qwen3_5", {**SIZES, **DELTA, **rope("default", partial_rotary_factor=0.5)}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**{k: v for k, v in QWEN.items() if k != "intermediate_size"}, **DELTA, **rope("default", partial_rotary_factor=0.5)},
    ),
    "falcon_h1": (
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_rms_norm": True, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
         "key_multiplier": 0.5, "mlp_multipliers": [0.7, 1.4], "attention_in_multiplier": 0.7, "ssm_out_multiplier": 0.8},
    ),
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "spatial_merge_size": 1,
}


def sections(theta: float) -> dict[str, Any]:
    """Sections of a rotation by time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": [2, 1, 1]}}


def with_images(kind: str, tower: dict[str, Any], **text: Any) -> dict[str, Any]:
    """The description of a model that also reads images, whose text model has a type."""
    fields = {**SIZES, "head_dim": 8, "model_type": kind, **text}
    return {
        "text_config": fields,
        "vision_config": tower,
        "image_token_id": 3,
        "video_token_id": 3,
        "vision_start_token_id": 3,
    }


MODELS |= {
    "llava": ("Llava", with_images("llama", {**TOWER, "model_type": "clip_vision_model"})),
    "llava_tied": ("Llava", {**with_images("qwen2", TOWER, tie_word_embeddings=True), "tie_word_embeddings": True}),
    "mistral3": ("Mistral3", with_images("mistral", TOWER, sliding_window=None)),
    "idefics3": ("Idefics3", {**with_images("llama", TOWER), "scale_factor": 1}),
    "qwen2_vl": ("Qwen2VL", with_images("qwen2_vl_text", {**QWEN_TOWER, "embed_dim": 8, "hidden_size": 32}, **sections(1000.0))),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        with_images(
            "qwen2_5_vl_text", {**QWEN_TOWER, "hidden_size": 8, "out_hidden_size": 32, "intermediate_size": 8}, **sections(500.0)
        ),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        with_images(
            "qwen3_vl_text",
            {**QWEN_TOWER, "hidden_size": 8, "out_hidden_size": 32, "intermediate_size": 8, "deepstack_visual_indexes": [0]},
            **sections(2000.0),
        ),
    ),
}  # fmt: skip
CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Gemma3n", "Qwen3_5", "Qwen3_5Moe")}
HEADS = {"GPT2": "GPT2LMHeadModel"} | {
    name: f"{name}ForConditionalGeneration"
    for name in ("Llava", "Mistral3", "Idefics3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
}


def inputs(b: int, n: int) -> np.ndarray[Any, Any]:
    """Token ids (b, n) i64."""
    return np.random.RandomState(100 * b + n).randint(3, VOCABULARY, (b, n)).astype(np.int64)


def weight(model: str, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The values of one weight."""
    drawn = np.random.RandomState(zlib.crc32(f"{model}/{name}".encode())).uniform(-1, 1, shape)
    if len(shape) == 1:
        return (1 + drawn / 2 if name.endswith("weight") else drawn / 3).astype(np.float32)
    return (drawn * np.sqrt(3 / shape[-1])).astype(np.float32)


def computed(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """The description of one model, and its arrays."""
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    family, options = MODELS[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**options)
    kind = getattr(transformers, HEADS.get(family, f"{family}ForCausalLM"))
    # eager Falcon adds its biases twice
    attention = {"attn_implementation": "sdpa" if family == "Falcon" else "eager"}
    results: dict[str, np.ndarray[Any, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        kind(config).save_pretrained(folder)
        path = Path(folder, "model.safetensors")
        shapes = {key: list(value.shape) for key, value in load_file(path).items()}
        save_file(
            {key: weight(name, key, tuple(shape)) for key, shape in shapes.items()}, path, metadata={"format": "pt"}
        )
        model = kind.from_pretrained(folder, dtype=torch.float32, **attention).eval()
        config = json.loads(Path(folder, "config.json").read_text())
        for b, n in SHAPES:
            logits = model(input_ids=torch.from_numpy(inputs(b, n)), use_cache=False).logits
            results[f"{name}/logits_{b}_{n}"] = logits[:, -KEPT:].numpy()
        text = torch.from_numpy(inputs(*PROMPT))
        for _ in range(ADDED):  # no token ends a text, and none is padding; not every family calls its cache alike
            logits = model(input_ids=text, use_cache=False).logits
            text = torch.cat([text, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        results[f"{name}/tokens"] = text[:, PROMPT[1] :].numpy().astype(np.int8)
    return {"config": config, "shapes": shapes}, results


def main(out: Path, names: list[str]) -> None:
    results: dict[str, np.ndarray[Any, Any]] = dict(np.load(out)) if names else {}
    texts: dict[str, Any] = json.loads(results.pop("models").tobytes()) if names else {}
    for name in names or MODELS:
        texts[name], arrays = computed(name)
        results |= arrays
    np.savez_compressed(out, models=np.frombuffer(json.dumps(texts).encode(), np.uint8), **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("decoder_families.npz"), sys.argv[1:])
