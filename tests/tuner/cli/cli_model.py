"""A tiny BERT in a Hugging Face folder, with random weights and a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 32, 64, 2, 2, 32
SENTENCES = ("the cat sat on the mat", "a dog ran home", "rain falls slowly")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for s in SENTENCES for word in s.split()}))


def make_bert(folder: Path, seed: int = 0) -> Path:
    """Write config.json, model.safetensors and tokenizer.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}

    def put(name: str, *shape: int) -> None:
        tensors[name] = (generator.standard_normal(shape) * 0.2).astype(np.float32)

    def put_norm(name: str) -> None:
        tensors[f"{name}.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{name}.bias"] = np.zeros(HIDDEN, np.float32)

    def put_linear(name: str, width: int, out: int) -> None:
        put(f"{name}.weight", out, width)
        put(f"{name}.bias", out)

    put("embeddings.word_embeddings.weight", len(WORDS), HIDDEN)
    put("embeddings.position_embeddings.weight", POSITIONS, HIDDEN)
    put("embeddings.token_type_embeddings.weight", 2, HIDDEN)
    put_norm("embeddings.LayerNorm")
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            put_linear(f"{layer}.attention.{part}", HIDDEN, HIDDEN)
        put_norm(f"{layer}.attention.output.LayerNorm")
        put_linear(f"{layer}.intermediate.dense", HIDDEN, INNER)
        put_linear(f"{layer}.output.dense", INNER, HIDDEN)
        put_norm(f"{layer}.output.LayerNorm")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "bert",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "vocab_size": len(WORDS),
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return folder


def _tokenizer() -> dict[str, object]:
    def special(name: str) -> dict[str, object]:
        return {"id": name, "ids": [WORDS.index(name)], "tokens": [name]}

    return {
        "version": "1.0",
        "truncation": None,
        # As published tokenizers often do; `relax-tune run` pads by itself.
        "padding": {
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: special(name) for name in ("[CLS]", "[SEP]")},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
    }
