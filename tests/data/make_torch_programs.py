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
# One new token after a cache that is filled.
DECODED = ((1, 1, 1), (2, 1, 7), (3, 1, 13), (1, 1, 32), (8, 1, 2))
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}
# name -> (family, configuration, attention, what of a cache: none; prefill, which makes one; cache, which grows a given one by any
# number of tokens; decode, which grows it by one)
MODELS: Mapping[str, tuple[str, Mapping[str, Any], str, str]] = {
    "bert": ("Bert", BERT, "sdpa", ""),
    "bert_eager": ("Bert", BERT, "eager", ""),
    "gpt2": ("GPT2", GPT2, "sdpa", ""),
    "gpt2_eager": ("GPT2", GPT2, "eager", ""),
    "gpt2_cache": ("GPT2", GPT2, "sdpa", "cache"),
    "llama": ("Llama", LLAMA, "sdpa", ""),
    "llama_prefill": ("Llama", LLAMA, "sdpa", "prefill"),
    "llama_cache": ("Llama", LLAMA, "sdpa", "cache"),
    "llama_decode": ("Llama", LLAMA, "sdpa", "decode"),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, "sdpa", ""),
    "qwen2_eager": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, "eager", ""),
    "qwen2_decode": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, "sdpa", "decode"),
}


def module(name: str) -> Any:
    """A tiny random model that takes plain tensors: ids and a mask, or ids and the keys and values of every layer."""
    import torch
    import transformers

    family, settings, attention, kind = MODELS[name]
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

    def grown(found: Any) -> dict[str, Any]:
        layers = enumerate(found.past_key_values.layers)
        caches = {f"{k}_{p}": t for p, layer in layers for k, t in (("keys", layer.keys), ("values", layer.values))}
        return {"logits": found.logits, **caches}

    class Prefill(Plain):
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return grown(self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=True))

    class Cached(Plain):
        def forward(self, input_ids: Any, key_0: Any, value_0: Any, key_1: Any, value_1: Any) -> Any:
            cache = transformers.DynamicCache([(key_0, value_0), (key_1, value_1)])
            return grown(self.inner(input_ids=input_ids, past_key_values=cache, use_cache=True))

    return {"": Plain, "prefill": Prefill}.get(kind, Cached)().eval()


def shapes(name: str) -> tuple[tuple[int, ...], ...]:
    return {"cache": CACHED, "decode": DECODED}.get(MODELS[name][3], SHAPES)


def example(name: str, shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    """Inputs of this shape: ids and a mask that hides the end of every row but the first, or ids and a filled cache."""
    random = np.random.default_rng([*shape, len(name)])
    b, n = shape[:2]
    ids = random.integers(0, VOCABULARY, (b, n))
    if len(shape) == 3:
        size = 8 if MODELS[name][0] == "GPT2" else 4
        return [ids, *(random.standard_normal((b, 2, shape[2], size)).astype(np.float32) for _ in range(4))]
    return [ids, (np.arange(n) < np.maximum(n - np.arange(b), 1)[:, None]).astype(np.int64)]


def exported(name: str) -> tuple[Any, Any]:
    """(the ExportedProgram, the torch module), dynamic in batch, sequence and the cache's length."""
    import torch

    whole = module(name)
    kind = MODELS[name][3]
    batch, seq = (
        torch.export.Dim("batch", min=1, max=8),
        torch.export.Dim("seq", min=1, max=16 if kind == "cache" else POSITIONS),
    )
    dims: tuple[Any, ...] = ({0: batch, 1: seq},) * 2
    if kind in ("cache", "decode"):
        past = torch.export.Dim("past", min=0 if kind == "cache" else 1, max=POSITIONS - 16)
        dims = ({0: batch, 1: seq} if kind == "cache" else {0: batch}, *({0: batch, 2: past},) * 4)
    inputs = tuple(torch.from_numpy(a) for a in example(name, shapes(name)[1]))
    with torch.no_grad():
        # of one token torch asks what holds for every cache; it is to say so in the program
        deferred = kind == "decode"
        program = torch.export.export(
            whole, inputs, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=deferred
        )
        return program, whole


def answers(name: str, whole: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs and torch's results of every shape, by their names in the file."""
    import torch

    found = {}
    for k, shape in enumerate(shapes(name)):
        inputs = example(name, shape)
        with torch.no_grad():
            results = whole(*(torch.from_numpy(a) for a in inputs))
        listed = list(results.values()) if isinstance(results, dict) else [results]
        found |= {f"in_{k}_{p}": a for p, a in enumerate(inputs)}
        found |= {f"out_{k}_{p}": t.numpy() for p, t in enumerate(listed)}
    return found


def main(folder: str, *names: str) -> None:
    from relax_tune.ir.frontend.torch.export import plain_program
    from relax_tune.ir.frontend.torch.program import to_json

    for name in names or MODELS:
        program, whole = exported(name)
        plain = plain_program(program)
        Path(folder, f"torch_{name}.json").write_text(to_json(plain))
        weights = {f"w_{key}": array for key, array in plain.weights.items()}
        np.savez_compressed(Path(folder, f"torch_{name}.npz"), **weights, **answers(name, whole))


if __name__ == "__main__":
    main(*sys.argv[1:])
