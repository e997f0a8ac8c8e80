"""A Llama-style decoder with weights from a seed, as a Hugging Face folder or as arrays. NumPy and safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.harness.e2e_cases import Array, Decoder

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def decoder_weights(d: Decoder) -> dict[str, Array]:
    """Draw the weights, by their names in a Hugging Face folder."""
    rng = np.random.default_rng(d.seed)
    shapes = {"model.embed_tokens.weight": (d.vocabulary, d.width), "lm_head.weight": (d.vocabulary, d.width)}
    for layer in range(d.layers):
        own = f"model.layers.{layer}."
        shapes |= {
            f"{own}self_attn.{n}_proj.weight": (rows, d.width)
            for n, rows in (("q", d.width), ("k", d.groups * d.head_size), ("v", d.groups * d.head_size))
        }
        shapes |= {
            f"{own}self_attn.o_proj.weight": (d.width, d.width),
            f"{own}mlp.gate_proj.weight": (d.inner, d.width),
        }
        shapes |= {f"{own}mlp.up_proj.weight": (d.inner, d.width), f"{own}mlp.down_proj.weight": (d.width, d.inner)}
    weights = {n: (rng.standard_normal(s) / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
    norms = ["model.norm.weight", *(f"model.layers.{i}.{n}.weight" for i in range(d.layers) for n in LAYER_NORMS)]
    return weights | {n: np.ones(d.width, np.float32) for n in norms}


def write_folder(place: Path, d: Decoder, positions: int) -> Path:
    """Write the decoder as a Hugging Face folder; return its path."""
    from safetensors.numpy import save_file

    place.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": d.width, "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads, "num_key_value_heads": d.groups, "intermediate_size": d.inner,
        "vocab_size": d.vocabulary, "max_position_embeddings": positions, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    save_file(decoder_weights(d), place / "model.safetensors")
    return place
