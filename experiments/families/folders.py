"""The models of `model_families.py` as folders: written as users have them, and each function compared with torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.families.models import Call, Sentence

Array = np.ndarray[Any, Any]
Run = Callable[..., list[Any]]
"""Calls a built model: its inputs in order, and the name of a function."""
Pair = tuple[Array, Array]
"""What a folder's model gives, and what torch gives."""


def write_folder(model: Any, root: Path) -> bool:
    """Write the folder of a model as transformers or sentence-transformers does; return False where a model has none."""
    inner = getattr(model, "inner", None)
    if not isinstance(model, (Call, Sentence)) or not hasattr(inner, "save_pretrained"):
        return False
    inner.save_pretrained(root)
    if isinstance(model, Sentence):
        _write_modules(model, root)
    return True


def _write_modules(model: Sentence, root: Path) -> None:
    """Write the modules after the transformer: mean pooling, perhaps a dense layer, and normalisation to length 1."""
    from safetensors.torch import save_file

    modules: dict[str, dict[str, Any]] = {"Transformer": {}, "Pooling": {"word_embedding_dimension": 32}}
    modules["Pooling"]["pooling_mode_mean_tokens"] = True
    if model.dense is not None:
        modules["Dense"] = {
            "in_features": 32, "out_features": 24, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"
        }  # fmt: skip
    modules["Normalize"] = {}
    listed = []
    for at, (kind, config) in enumerate(modules.items()):
        path = f"{at}_{kind}" if at else ""
        listed.append({"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (root / path).mkdir(exist_ok=True)
        if config:
            (root / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            assert model.dense is not None
            held = {f"linear.{name}": t.detach().clone() for name, t in model.dense.named_parameters()}
            save_file(held, root / path / "model.safetensors")
    (root / "modules.json").write_text(json.dumps(listed))


def gives_hidden_states(model: Any) -> bool:
    """Return whether a model is a bare encoder; its folder returns a sentence vector by default, so pooling has to be turned off."""
    if not isinstance(model, Call):
        return False
    plain = model.result == "last_hidden_state" and "input_ids" in model.names
    return plain or "BertModel" in type(model.inner).__name__


def folder_pairs(module: Any, model: Any, run: Run, given: Sequence[Tensor]) -> Iterator[Pair]:
    """Yield the results of the functions of a folder's model at an input, each with torch's result."""
    if "encode" in module.functions:
        yield from _translated(model, run, given)
    elif "decode" in module.functions:
        yield from _continued(model, run, given[0])
    else:
        yield from _encoded(module, model, run, given)


def _continued(model: Any, run: Run, tokens: Tensor) -> Iterator[Pair]:
    """Yield the logits of a prompt without its last token, and of a step with that token."""
    wanted = _one(model(tokens, torch.ones_like(tokens)) if len(model.names) > 1 else model(tokens))
    yield from _steps(run, tokens.numpy(), [], wanted)


def _translated(model: Any, run: Run, given: Sequence[Tensor]) -> Iterator[Pair]:
    """Yield the same logits of a decoder behind an encoder."""
    *source, tokens = (t.numpy() for t in given)
    mask = [a for name, a in zip(model.names, source, strict=False) if name == "attention_mask"]
    read = run(source, "encode")
    yield from _steps(run, tokens, [*mask, *read], _one(model(*given)))


def _steps(run: Run, tokens: Array, more: list[Array], wanted: Array) -> Iterator[Pair]:
    n = tokens.shape[1]
    prompt = max(n - 1, 1)
    logits, *cache = run([tokens[:, :prompt], *more], "prefill")
    yield logits, wanted[:, prompt - 1 : prompt]
    if n > 1:
        yield run([tokens[:, prompt:], *more, *cache], "decode")[0], wanted[:, prompt:]


def _encoded(module: Any, model: Any, run: Run, given: Sequence[Tensor]) -> Iterator[Pair]:
    """Yield the results of an encoder that a folder returns, without those at padding."""
    names = model.names if isinstance(model, Call) else ["input_ids", "attention_mask"]
    known = {name: t.numpy() for name, t in zip(names, given, strict=True)}
    for name in ("input_ids", "input_values"):
        if name in known:
            known.setdefault("attention_mask", np.ones(known[name].shape, np.int64))
    # token types are 0 where a model leaves them out
    inputs = [
        known[p.name] if p.name in known else np.zeros_like(known["input_ids"]) for p in module.graphs["main"].params
    ]
    found, wanted = run(inputs), model(*given)
    for f, w in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=False):
        seen = given[1].numpy() == 1 if len(given) > 1 and w.shape[:2] == given[1].shape else ...
        yield np.asarray(f)[seen], w.numpy()[seen]


def _one(found: Any) -> Array:
    return np.asarray(found.numpy())
