"""Exports tiny random transformers with torch.export and records them as plain data, with what torch says of a few inputs.

    PYTHONPATH=src python tests/data/make_torch_programs.py tests/data [NAME ...]     (torch, transformers)

Of every name of MODELS: torch_NAME.json is the program as the importer reads it, torch_NAME.npz its weights (w_...), and for
every case k the inputs (in_k_...) and results (out_k_...).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, POSITIONS = 61, 48
# (batch, seq) and, with a cache, how much of it is filled.
SHAPES = ((1, 1), (2, 7), (3, 13), (8, 1), (1, 48))
CACHED = ((1, 1, 0), (2, 5, 7), (3, 1, 13), (1, 16, 32), (8, 1, 1))
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}
# name -> (family, configuration, attention, with a cache)
MODELS: Mapping[str, tuple[str, Mapping[str, Any], str, bool]] = {
    "bert": ("Bert", BERT, "sdpa", False),
    "bert_eager": ("Bert", BERT, "eager", False),
    "gpt2": ("GPT2", GPT2, "sdpa", False),
    "gpt2_eager": ("GPT2", GPT2, "eager", False),
    "llama": ("Llama", LLAMA, "sdpa", False),
    "llama_cache": ("Llama", LLAMA, "sdpa", True),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, "sdpa", False),
    "qwen2_eager": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, "eager", False),
}


def module(name: str) -> Any:
    """A tiny random model that takes plain tensors: ids and a mask, or ids and the keys and values of every layer."""
    import torch
    import transformers

    family, settings, attention, cached = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation=attention)
    head = {"Bert": "Model", "GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    inner = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for p in inner.parameters():
            p.copy_((torch.randn_like(p) * 20).round() / 64)  # few digits: a small file

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            if family == "Bert":
                return self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return {"logits": self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits}

    class Cached(Plain):
        def forward(self, input_ids: Any, key_0: Any, value_0: Any, key_1: Any, value_1: Any) -> Any:
            cache = transformers.DynamicCache([(key_0, value_0), (key_1, value_1)])
            found = self.inner(input_ids=input_ids, past_key_values=cache, use_cache=True)
            layers = enumerate(found.past_key_values.layers)
            grown = {f"{k}_{p}": t for p, layer in layers for k, t in (("keys", layer.keys), ("values", layer.values))}
            return {"logits": found.logits, **grown}

    return (Cached if cached else Plain)().eval()


def example(name: str, shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    """Inputs of this shape: ids and a mask that hides the end of every row but the first, or ids and a filled cache."""
    random = np.random.default_rng([*shape, len(name)])
    b, n = shape[:2]
    ids = random.integers(0, VOCABULARY, (b, n))
    if MODELS[name][3]:
        return [ids, *(random.standard_normal((b, 2, shape[2], 4)).astype(np.float32) for _ in range(4))]
    return [ids, (np.arange(n) < np.maximum(n - np.arange(b), 1)[:, None]).astype(np.int64)]


def exported(name: str) -> tuple[Any, Any]:
    """(the ExportedProgram, the torch module), dynamic in batch, sequence and the cache's length."""
    import torch

    whole = module(name)
    cached = MODELS[name][3]
    batch, seq = (
        torch.export.Dim("batch", min=1, max=8),
        torch.export.Dim("seq", min=1, max=16 if cached else POSITIONS),
    )
    dims: tuple[Any, ...] = ({0: batch, 1: seq},) * 2
    if cached:
        past = torch.export.Dim("past", min=0, max=POSITIONS - 16)
        dims = ({0: batch, 1: seq}, *({0: batch, 2: past},) * 4)
    inputs = tuple(torch.from_numpy(a) for a in example(name, (2, 5, 7) if cached else (2, 7)))
    with torch.no_grad():
        return torch.export.export(whole, inputs, dynamic_shapes=dims, strict=False), whole


def answers(name: str, whole: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs and torch's results of every shape, by their names in the file."""
    import torch

    found = {}
    for k, shape in enumerate(CACHED if MODELS[name][3] else SHAPES):
        inputs = example(name, shape)
        with torch.no_grad():
            results = whole(*(torch.from_numpy(a) for a in inputs))
        listed = list(results.values()) if isinstance(results, dict) else [results]
        found |= {f"in_{k}_{p}": a for p, a in enumerate(inputs)}
        found |= {f"out_{k}_{p}": t.numpy() for p, t in enumerate(listed)}
    return found


def main(folder: str, *names: str) -> None:
    from relax_tune.ir.frontend.torch_export import plain_program
    from relax_tune.ir.frontend.torch_program import to_json

    for name in names or MODELS:
        program, whole = exported(name)
        plain = plain_program(program)
        Path(folder, f"torch_{name}.json").write_text(to_json(plain))
        weights = {f"w_{key}": array for key, array in plain.weights.items()}
        np.savez_compressed(Path(folder, f"torch_{name}.npz"), **weights, **answers(name, whole))


if __name__ == "__main__":
    main(*sys.argv[1:])
