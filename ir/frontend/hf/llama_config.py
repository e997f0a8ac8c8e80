"""Configuration of decoders of the Llama kind, from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.shared.bounds import LARGEST

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021): angles `position * theta ** (-2k / d)`, with scaled frequencies.

    kind: rule of scaling
    factor: factor of positions
    low, high, original: parameters of `llama3` scaling
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 1

    def frequencies(self, size: int) -> NDArray[np.float32]:
        """Return the frequency of each pair of a head of `size`, in radians a position: (size / 2,)."""
        powers = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        found = np.asarray(1 / np.float32(self.theta) ** powers, np.float32)
        if self.kind == "linear":
            return np.asarray(found / np.float32(self.factor), np.float32)
        if self.kind == "llama3":
            # llama3: low frequencies are divided by the factor, high ones kept, those between interpolated
            turns = self.original * found / np.float32(2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            return np.asarray(found * (kept + (1 - kept) / self.factor), np.float32)
        return found


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Fields of config.json that the computation depends on."""

    layers: int
    hidden: int
    heads: int
    groups: int
    """Key and value heads."""
    size: int
    """Size of a head."""
    inner: int
    vocabulary: int
    positions: int
    eps: float
    activation: str
    rope: Rope
    tied: bool
    bias_in: bool
    """Query, key and value have a bias."""
    bias_out: bool
    bias_mlp: bool
    windows: tuple[int | None, ...]
    """Attention window of each layer in positions, the own one included; None: all positions."""
    head_norms: bool
    """Queries and keys are normalised head by head before their rotation."""
    unit_norms: bool
    """Norms multiply by 1 + weight, and embeddings by the root of their width."""


def llama_config(data: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read and check a configuration of one of FAMILIES. Raises ParseError naming the field."""
    c = ConfigFields(data, where)
    kind = data["model_type"]
    named = data.get("architectures") or ["ForCausalLM"]
    if not isinstance(named, list) or not str(named[0]).endswith("ForCausalLM"):
        raise c.wrong("architectures", "a model with the head ForCausalLM")
    c.only("pretraining_tp", 1, None)
    c.only("quantization_config", None)
    c.only("partial_rotary_factor", 1.0, None)
    c.only("use_bidirectional_attention", None, False)
    if kind == "gemma":
        c.only("hidden_activation", "gelu_pytorch_tanh", None)
    heads, hidden = c.whole("num_attention_heads"), c.whole("hidden_size")
    grouped = kind == "llama" or "num_key_value_heads" in data  # the other families have a default of their own
    groups = c.whole("num_key_value_heads", heads if grouped else None)
    c.multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    if data.get("head_dim") is None:
        c.multiple("hidden_size", hidden, "num_attention_heads", heads)
    size = c.whole("head_dim", max(1, hidden // heads))
    c.multiple("head_dim", size, "2", 2)
    biased = kind in ("llama", "qwen3", "gemma") and c.truth("attention_bias", False)
    layers = c.whole("num_hidden_layers")
    return LlamaConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=groups,
        size=size,
        inner=c.whole("intermediate_size"),
        vocabulary=c.whole("vocab_size"),
        positions=c.whole("max_position_embeddings"),
        eps=c.number("rms_norm_eps", 1e-6, 0, 1, "a number in [0, 1)"),
        activation=c.chosen("hidden_act", "gelu_pytorch_tanh" if kind == "gemma" else "silu", ACTIVATIONS),
        rope=_rope(c),
        tied=c.truth("tie_word_embeddings", kind == "gemma"),
        bias_in=biased or kind == "qwen2",
        bias_out=biased,
        bias_mlp=kind == "llama" and c.truth("mlp_bias", False),
        windows=_windows(c, kind, layers),
        head_norms=kind == "qwen3",
        unit_norms=kind == "gemma",
    )


def _windows(c: ConfigFields, kind: str, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer, or None: from `sliding_window` and `layer_types` or `max_window_layers`."""
    data = c.data
    if kind == "mistral":
        if "sliding_window" not in data:
            raise c.wrong("sliding_window", "a number or null, as this family has windows by default")
        used = data["sliding_window"] is not None
    else:
        used = (
            kind.startswith("qwen") and c.truth("use_sliding_window", False) and data.get("sliding_window") is not None
        )
    types = data.get("layer_types")
    if types is None:
        full = 0 if kind == "mistral" or not used else c.whole("max_window_layers", 28)
        types = ["sliding_attention" if used and i >= full else "full_attention" for i in range(layers)]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(t not in ("full_attention", "sliding_attention") for t in types)
    ):
        raise c.wrong("layer_types", f"'full_attention' or 'sliding_attention' for each of {layers} layers")
    if "sliding_attention" not in types:
        return (None,) * layers
    if not used:
        raise c.wrong("layer_types", "'full_attention' for every layer where no sliding_window is used")
    size = c.whole("sliding_window")
    return tuple(size if t == "sliding_attention" else None for t in types)


def _rope(c: ConfigFields) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    key = "rope_parameters" if c.data.get("rope_parameters") is not None else "rope_scaling"
    given = c.data.get(key)
    if given is not None and not isinstance(given, dict):
        raise c.wrong(key, "an object or null")
    if any(isinstance(v, dict) for v in (given or {}).values()):
        raise c.wrong(key, "one set of parameters for all layers")
    said: dict[str, Any] = {"rope_theta": c.data.get("rope_theta", 10000.0), **(given or {})}
    said.setdefault("rope_type", said.get("type", "default"))
    r = ConfigFields(said, f"{c.where}: {key}" if given else c.where)
    r.only("partial_rotary_factor", 1.0, None)
    theta = r.number("rope_theta", None, 1, LARGEST, "a number of at least 1")
    kind = r.chosen("rope_type", "default", ROPE_TYPES)
    if kind == "default":
        return Rope(theta)
    factor = r.number("factor", None, 1, LARGEST, "a number of at least 1")
    if kind == "linear":
        return Rope(theta, kind, factor)
    low = r.number("low_freq_factor", None, 0, LARGEST, "a number of at least 0")
    high = r.number("high_freq_factor", None, 0, LARGEST, "a number above low_freq_factor")
    if high <= low:
        raise r.wrong("high_freq_factor", f"a number above low_freq_factor, {low}")
    return Rope(theta, kind, factor, low, high, r.whole("original_max_position_embeddings"))
