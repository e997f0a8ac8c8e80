"""Makes tiny_sentences.npz: vectors and scores of small models by transformers and sentence-transformers.

Needs torch, transformers and sentence-transformers:

    python tests/data/make_tiny_sentences.py

Of each model of MODELS: `NAME/config` (config.json as bytes), `NAME/tensors` (the names and shapes of its weights as JSON;
`make_tiny_families.weight` draws them), and for every shape and side of padding its result, `NAME/SIDE_B_N`, of `inputs`.
"""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FAMILIES = runpy.run_path(str(Path(__file__).with_name("make_tiny_families.py")))
SHAPES, SIDES = ((1, 1), (3, 13)), ("right", "left")
SIZES: dict[str, Any] = {**FAMILIES["SIZES"], "pad_token_id": 1}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 32}
TYPES = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {
    **LLAMA, "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 6, "layer_types": TYPES, "use_bidirectional_attention": True,
}  # fmt: skip
# class, options, poolings (none: the logits of a head), the pooling includes the prompt
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], bool]] = {
    "gemma3_text": ("Gemma3TextModel", GEMMA, ("mean",), True),
    "qwen3": ("Qwen3Model", {**LLAMA, "head_dim": 8}, ("lasttoken",), True),
    "qwen2": ("Qwen2Model", {**LLAMA, "is_causal": False}, ("lasttoken",), True),
    "mistral": ("MistralModel", {**LLAMA, "sliding_window": 5}, ("weightedmean",), True),
    "llama": ("LlamaForCausalLM", LLAMA, ("lasttoken", "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"), False),
    "qwen3_classes": ("Qwen3ForSequenceClassification", {**LLAMA, "head_dim": 8, "num_labels": 3}, (), True),
    "gpt2_classes": (
        "GPT2ForSequenceClassification",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 23, "pad_token_id": 1, "num_labels": 3}, (), True,
    ),
}  # fmt: skip
PROMPT = 2  # tokens


def inputs(b: int, n: int, side: str) -> dict[str, Array]:
    """Token ids and mask (b, n) of rows of several lengths, padded on a side; the tokens of the prompt."""
    text = FAMILIES["inputs"](b, n, {"vocab_size": 23})
    ids, mask = text["input_ids"], text["attention_mask"]
    if side == "left":
        ids, mask = ids[:, ::-1].copy(), mask[:, ::-1].copy()
    return {"input_ids": ids, "attention_mask": mask, "prompt_length": np.full(b, min(PROMPT, n - 1), np.int64)}


def main(out: Path) -> None:
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file
    from sentence_transformers.sentence_transformer.modules import Pooling

    results: dict[str, Array] = {}
    for name, (kind, options, modes, with_prompt) in MODELS.items():
        cls = getattr(transformers, kind)
        with tempfile.TemporaryDirectory() as folder:
            cls(cls.config_class(**options)).save_pretrained(folder)
            path = Path(folder, "model.safetensors")
            shapes = {key: value.shape for key, value in load_file(path).items()}
            save_file({k: FAMILIES["weight"](k, shape) for k, shape in shapes.items()}, path, {"format": "pt"})
            reader = transformers.AutoModel if modes else cls
            model = reader.from_pretrained(folder, attn_implementation="eager").eval()
            results[f"{name}/config"] = np.frombuffer(Path(folder, "config.json").read_bytes(), np.uint8)
        results[f"{name}/tensors"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        for side in SIDES:
            for b, n in SHAPES:
                given = {k: torch.from_numpy(v) for k, v in inputs(b, n, side).items()}
                with torch.no_grad():
                    found = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
                    if modes:
                        features = {"token_embeddings": found.last_hidden_state, **given}
                        pooling = Pooling(model.config.hidden_size, modes, include_prompt=with_prompt)
                        found = pooling(features)["sentence_embedding"]
                results[f"{name}/{side}_{b}_{n}"] = (found if modes else found.logits).numpy()
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_sentences.npz"))
