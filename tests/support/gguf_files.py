"""Folders of decoders as GGUF files, stored as the conversion of llama.cpp stores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from relax_tune.ir.frontend.gguf.architectures import PARTS
from relax_tune.ir.frontend.hf.families.decoders import DECODERS
from relax_tune.ir.frontend.hf.transformer.parameters import fused_rows
from relax_tune.ir.frontend.hf.transformer.rope import Linear, Llama3, LongRope, Yarn
from relax_tune.ir.frontend.hf.transformer.spec import Stack

Array = NDArray[Any]
# Architecture by model_type.
NAMES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2", "falcon": "falcon", "starcoder2": "starcoder2",
}  # fmt: skip


def neighbours(w: Array, heads: int) -> Array:
    """Rows of queries or keys with the two halves of each head interleaved."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def tensors(spec: Stack, weights: Mapping[str, Array], arch: str) -> dict[str, Array]:
    """The tensors of a GGUF file, by name. weights: of the folder, with the full names"""
    stored: dict[str, Array] = {}
    named = {getattr(spec.names, k): v for k, v in PARTS.items() if getattr(spec.names, k) is not None}
    if arch == "falcon" and "ln_attn" in named:
        named |= {"ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"}
    experts: dict[str, dict[int, Array]] = {}
    for name, w in weights.items():
        stem, _, kind = name.removeprefix(spec.names.prefix).rpartition(".")
        inside = stem.removeprefix(f"{spec.names.layers}.")
        number, _, part = inside.partition(".") if inside != stem else ("", "", stem)
        e = spec.layers[0].experts
        if e is not None and part == e.names.router:
            stored[f"blk.{number}.ffn_gate_inp.weight"] = w
            continue
        if e is not None and "experts" in part:
            index = next(int(p) for p in part.split(".") if p.isdigit())
            which = next(k for k in ("gate", "up", "down") if getattr(e.names, k).format(index) == part)
            experts.setdefault(f"blk.{number}.ffn_{which}_exps.weight", {})[index] = w
            continue
        to = named[part]
        if spec.input_major and kind == "weight" and w.ndim == 2 and number:
            w = w.T
        if arch == "llama" and to in ("attn_q", "attn_k"):
            w = neighbours(w, spec.heads if to == "attn_q" else spec.groups)
        if arch.startswith("gemma") and to.endswith("norm"):
            w = w + np.float32(1)
        if to == "attn_qkv" and spec.fused == "groups":
            w = w[np.concatenate(fused_rows(spec))]
        stored[f"blk.{number}.{to}.{kind}" if number else f"{to}.{kind}"] = np.ascontiguousarray(w)
    stored |= {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}
    return stored


def convert(
    folder: Path,
    spec: Stack,
    out: Path,
    kind: Callable[[str, Array], Any] | None = None,
    replaced: Mapping[str, Array] | None = None,
    **changed: Any,
) -> dict[str, Array]:
    """Write the GGUF file of a folder. Gives its tensors as they are decoded.

    kind: the type of a tensor, by name; float32 where it is None. changed: keys of the metadata; `...` leaves one out"""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    arch, c = NAMES[config["model_type"]], config
    writer = gguf.GGUFWriter(out, arch)
    eps = (
        c.get("rms_norm_eps") or c.get("layer_norm_epsilon") or c.get("layer_norm_eps") or c.get("norm_epsilon") or 1e-5
    )
    rms = spec.norm.kind == "rms"
    keys: dict[str, Any] = {
        "context_length": spec.positions, "embedding_length": spec.hidden, "block_count": len(spec.layers),
        "feed_forward_length": spec.inner, "attention.head_count": spec.heads, "attention.head_count_kv": spec.groups,
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": float(eps),
    }  # fmt: skip
    rope = spec.layers[-1].rope
    if rope is not None:
        keys |= {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.dims}
    if arch in ("llama", "qwen3", "qwen3moe") or arch.startswith("gemma"):
        keys |= {"attention.key_length": spec.size, "attention.value_length": spec.size, "vocab_size": spec.vocabulary}
    factors: dict[str, Array] = {}
    if rope is not None and isinstance(rope.scaling, LongRope):
        factors = {
            f"rope_factors_{k}.weight": np.asarray(getattr(rope.scaling, k), np.float32) for k in ("short", "long")
        }
        keys |= {
            "rope.scaling.original_context_length": rope.scaling.original,
            "rope.scaling.attn_factor": float(rope.attention),
        }
    elif rope is not None and isinstance(rope.scaling, Llama3):
        plain = np.asarray(1 / rope.theta ** (np.arange(0, rope.dims, 2) / rope.dims), np.float32)
        factors = {"rope_freqs.weight": plain / rope.scaling(plain, rope.theta, rope.dims)}
    elif rope is not None and isinstance(rope.scaling, (Linear, Yarn)):
        keys |= {
            "rope.scaling.type": type(rope.scaling).__name__.lower(),
            "rope.scaling.factor": float(rope.scaling.factor),
        }
        keys |= (
            {"rope.scaling.original_context_length": rope.scaling.original} if isinstance(rope.scaling, Yarn) else {}
        )
    window = next((x.window for x in spec.layers if x.window is not None), None)
    if window is not None and arch in ("gemma2", "gemma3", "phi3", "starcoder2"):
        keys["attention.sliding_window"] = window
    if arch == "gemma3":
        keys["attention.sliding_window_pattern"] = [x.window is not None for x in spec.layers]
    if spec.scores_cap:
        keys |= {"attn_logit_softcapping": spec.scores_cap, "final_logit_softcapping": spec.logits.cap}
    e = spec.layers[0].experts
    if e is not None:
        keys |= {"expert_count": e.count, "expert_used_count": e.chosen}
        keys |= {"expert_feed_forward_length": e.inner} if arch == "qwen3moe" else {}
    for key, value in {**keys, **changed}.items():
        if value is ...:
            continue
        at = key if key.startswith("general.") else f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(at, value)
        elif isinstance(value, bool):
            writer.add_bool(at, value)
        elif isinstance(value, list):
            writer.add_array(at, value)
        elif isinstance(value, float):
            writer.add_float32(at, value)
        else:
            writer.add_uint32(at, value)
    writer.add_array("tokenizer.ggml.tokens", [f"<{i}>" for i in range(spec.vocabulary)])
    stored = factors | tensors(spec, load_file(folder / "model.safetensors"), arch)
    decoded = {}
    for name, w in (replaced or stored).items():
        w = np.ascontiguousarray(w, np.float32)
        as_type = kind(name, w) if kind else None
        if as_type is None:
            writer.add_tensor(name, w)
            decoded[name] = w
        else:
            packed = gguf.quants.quantize(w, as_type)
            writer.add_tensor(name, packed, raw_dtype=as_type)
            decoded[name] = gguf.quants.dequantize(packed, as_type).reshape(w.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def write_decoded(folder: Path, spec: Stack, out: Path, decoded: Mapping[str, Array]) -> Path:
    """Write float32 tensors as another GGUF file, with the metadata of the folder."""
    path = out / "decoded.gguf"
    convert(folder, spec, path, replaced=decoded)
    return path


def spec_of(folder: Path) -> Stack:
    from relax_tune.ir.frontend.hf.families.family import read_decoder

    config = json.loads((folder / "config.json").read_text())
    return read_decoder(DECODERS[config["model_type"]], config, "config.json")
