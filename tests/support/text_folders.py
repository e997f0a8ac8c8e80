"""Folders of tiny models of texts: the heads of tests/data/tiny_heads.npz with a tokenizer, and a decoder with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "data"
WORDS = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "falls", "home", "mat", "on", "rain", "ran", "sat", "slowly", "the",
)  # fmt: skip
LABELS = {
    "SequenceClassification": ["bad", "fair", "good"],
    "TokenClassification": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
}
TEXTS = ("The cat sat on the mat", "rain", "a dog ran home slowly")


def tokenizer() -> dict[str, Any]:
    """A tokenizer of words, with tokens at the ends of a text."""
    ends = {name: {"id": name, "ids": [WORDS.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    around = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ends]
    special = [
        {"id": n, "content": WORDS[n], "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for n in range(5)
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "post_processor": {
            "type": "TemplateProcessing", "single": [around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": ends,
        },
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
    }  # fmt: skip


def write_head(folder: Path, head: str, **changes: Any) -> Path:
    """Write a BERT with a head and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"bert-{head}"
    with np.load(DATA / "tiny_heads.npz") as file:
        config = json.loads(bytes(file[f"{name}/config"]))
        start = f"{name}/weights/"
        # The first rows of the tables, since the tokenizer has fewer words.
        weights = {k.removeprefix(start): file[k].astype(np.float32) for k in file.files if k.startswith(start)}
    save_file(weights, folder / "model.safetensors")
    if head in LABELS:
        config["id2label"] = {str(n): label for n, label in enumerate(LABELS[head])}
        config["label2id"] = {label: n for n, label in enumerate(LABELS[head])}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 16, **names})
    )


def write_decoder(folder: Path) -> Path:
    """Write a llama whose tokens are w0, w1 ..."""
    from tests.support import tiny_decoders

    folder.mkdir(parents=True, exist_ok=True)
    tiny_decoders.write(folder, "llama")
    words = {f"w{i}": i for i in range(tiny_decoders.VOCABULARY)}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
