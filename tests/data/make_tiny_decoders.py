"""Makes tiny_decoders.npz: decoders with random weights, and their logits by the original framework.

Needs torch and transformers:

    python tests/data/make_tiny_decoders.py

Of each model of MODELS and MORE: `NAME/config` (config.json as bytes), `NAME/weights/TENSOR` in float16 (which the model computed with,
widened), for every shape of SHAPES the logits of the last KEPT positions of `inputs(b, n)`, which the tests
repeat: (b, min(n, KEPT), vocabulary) f32; and for every shape of PROMPTS the tokens that greedy generation adds to `inputs(b, n)`:
(b, ADDED) i64.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((1, 1), (2, 7), (1, 33), (3, 64))
VOCABULARY = 37
KEPT = 8
PROMPTS = ((1, 1), (2, 7), (1, 33))
ADDED = 24
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "llama3": (
        "Llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "mistral": (
        "Mistral",
        {
            "sliding_window": None,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
}

# Other families and forms, whose attention and norms differ.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "gemma": ("Gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    "mistral_window": ("Mistral", {"sliding_window": 9}),
}  # fmt: skip


def inputs(b: int, n: int) -> np.ndarray[Any, Any]:
    """Token ids (b, n) i64."""
    return np.random.default_rng([b, n]).integers(0, VOCABULARY, (b, n), dtype=np.int64)


def main(out: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    results: dict[str, np.ndarray[Any, Any]] = {}
    for name, (family, options) in {**MODELS, **MORE}.items():
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.endswith("bias"):
                    value.normal_(std=0.4)
                elif value.ndim == 1:
                    value.uniform_(0.5, 1.5)
                value.copy_(value.half().float())
                results[f"{name}/weights/{key}"] = value.half().numpy()
            for b, n in SHAPES:
                logits = model(input_ids=torch.from_numpy(inputs(b, n)), use_cache=False).logits
                results[f"{name}/logits_{b}_{n}"] = logits[:, -KEPT:].numpy()
            for b, n in PROMPTS:
                given, past, tokens = torch.from_numpy(inputs(b, n)), None, []
                for _ in range(ADDED):  # no token ends a text, and none is padding
                    step = model(input_ids=given, past_key_values=past, use_cache=True)
                    given, past = step.logits[:, -1].argmax(-1, keepdim=True), step.past_key_values
                    tokens.append(given.numpy())
                results[f"{name}/tokens_{b}_{n}"] = np.concatenate(tokens, axis=1)
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = [f"{family}ForCausalLM"]
            config.save_pretrained(folder)
            text = Path(folder, "config.json").read_bytes()
        results[f"{name}/config"] = np.frombuffer(text, np.uint8)
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_decoders.npz"))
