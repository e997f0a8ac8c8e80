"""The models of `suite.py`: memory-bound kernels, products, and decoders as Hugging Face folders with weights from a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import relax_tune as rt
from experiments.harness.e2e_cases import Decoder
from relax_tune.ir.core.dtype import DType, bf16, f16, f32
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.neural.decoder import RmsNorm
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Softmax

TYPES: Mapping[str, DType] = {"f32": f32, "f16": f16, "bf16": bf16}


def memory_bound(kind: str, rows: int, columns: int) -> dict[str, IRModule]:
    """Each over x (n, columns), n up to `rows`, of a type."""
    dtype, rng = TYPES[kind], np.random.default_rng(0)
    found = {}
    for name in ("softmax", "layer norm", "rms norm", "gelu", "add"):
        g = rt.GraphBuilder()
        n = g.symbol("n", 1, rows)
        x = g.input("x", (n, columns), dtype)

        def weight(name: str, g: rt.GraphBuilder = g) -> object:
            return g.constant(name, rng.standard_normal(columns).astype(dtype.numpy))

        if name == "softmax":
            y = g.call(Softmax(), x)
        elif name == "layer norm":
            y = g.call(LayerNorm(), x, weight("scale"), weight("shift"))
        elif name == "rms norm":
            y = g.call(RmsNorm(), x, weight("scale"))
        elif name == "gelu":
            y = g.call(Gelu(), x)
        else:
            y = g.call(Add(), x, g.input("y", (n, columns), dtype))
        found[name] = g.finish(y)
    return found


def product(dtype: DType, rows: int, k: int, n: int, weights: bool = True) -> IRModule:
    """Return x (m, k) times weights (k, n), m up to `rows`, with 16-bit inputs and results.

    weights: constant weights; as an argument they keep their type, while small constants are widened when a model is lowered.
    """
    g = rt.GraphBuilder()
    x = g.input("x", (g.symbol("m", 1, rows), k), dtype)
    if not weights:
        return g.finish(g.call(Matmul(), x, g.input("w", (k, n), dtype)))
    w = np.random.default_rng(0).standard_normal((k, n), np.float32) / np.float32(k**0.5)
    return g.finish(g.call(Matmul(), x, g.constant("w", w.astype(dtype.numpy))))


def decoder_folder(d: Decoder, folder: Path) -> Path:
    """A folder with config.json and model.safetensors, written once."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng, narrow = np.random.default_rng(d.seed), d.groups * d.head_size
    shapes = {"model.embed_tokens.weight": (d.vocabulary, d.width), "lm_head.weight": (d.vocabulary, d.width)}
    for i in range(d.layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (d.width, d.width) for x in "qo"}
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (narrow, d.width) for x in "kv"}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (d.inner, d.width) for x in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (d.width, d.inner)
    weights = {
        name: (rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{i}.{x}_layernorm.weight" for i in range(d.layers) for x in ("input", "post_attention")]
    weights |= {name: np.ones(d.width, ml_dtypes.bfloat16) for name in (*norms, "model.norm.weight")}
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": d.layers, "hidden_size": d.width,
        "num_attention_heads": d.heads, "num_key_value_heads": d.groups, "intermediate_size": d.inner,
        "vocab_size": d.vocabulary, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
