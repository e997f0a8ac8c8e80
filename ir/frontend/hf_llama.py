"""Decoders of the Llama kind: RMS norms, rotary positions, grouped-query attention, a gated feed-forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.dtype import i64
from relax_tune.ir.expr import Var, const
from relax_tune.ir.frontend.bounds import LARGEST
from relax_tune.ir.frontend.hf_config import Fields
from relax_tune.ir.frontend.hf_weights import Weights
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph import Constant, GVar
from relax_tune.ir.graph_builder import GraphBuilder
from relax_tune.ir.op.decoder import CausalSoftmax, RmsNorm, Rotary
from relax_tune.ir.op.elementwise import Add, Mul, MulScalar, Sigmoid
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.op.movement import Permute, Reshape, Take

FAMILIES = ("llama", "mistral", "qwen2")
LONGEST = 1 << 20
ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = {"silu": Sigmoid, "swish": Sigmoid}
"""Activations of the form `x * f(x)`, by name, with their `f`."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: angles `position * theta ** (-2k / d)`, and how their frequencies are scaled."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 1

    def frequencies(self, size: int) -> NDArray[np.float32]:
        """Of each pair of a head of `size`, in radians a position: (size / 2,)."""
        powers = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        found = np.asarray(1 / np.float32(self.theta) ** powers, np.float32)
        if self.kind == "linear":
            return np.asarray(found / np.float32(self.factor), np.float32)
        if self.kind == "llama3":
            # long waves are slowed by the factor, short ones kept, those between blended by how often they turn
            turns = self.original * found / np.float32(2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            return np.asarray(found * (kept + (1 - kept) / self.factor), np.float32)
        return found


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What of config.json the computation depends on."""

    layers: int
    hidden: int
    heads: int
    groups: int
    """Key and value heads."""
    size: int
    """Of a head."""
    inner: int
    vocabulary: int
    positions: int
    eps: float
    activation: str
    rope: Rope
    tied: bool
    bias_in: bool
    """Of query, key and value."""
    bias_out: bool
    bias_mlp: bool


def llama_config(data: Mapping[str, Any], where: str) -> LlamaConfig:
    """Check a configuration of one of FAMILIES. Raises ParseError naming the field."""
    c = Fields(data, where)
    kind = data["model_type"]
    types = data.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(t != "full_attention" for t in types)):
        raise c.wrong("layer_types", "'full_attention' for every layer")
    c.only("pretraining_tp", 1, None)
    c.only("quantization_config", None)
    c.only("partial_rotary_factor", 1.0, None)
    if kind == "mistral":
        if "sliding_window" not in data:
            raise c.wrong("sliding_window", "null, as this family has windows by default")
        c.only("sliding_window", None)
    c.only("use_sliding_window", False, None)
    heads, hidden = c.whole("num_attention_heads"), c.whole("hidden_size")
    grouped = kind == "llama" or "num_key_value_heads" in data  # the other families have a default of their own
    groups = c.whole("num_key_value_heads", heads if grouped else None)
    c.multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    if data.get("head_dim") is None:
        c.multiple("hidden_size", hidden, "num_attention_heads", heads)
    size = c.whole("head_dim", max(1, hidden // heads))
    c.multiple("head_dim", size, "2", 2)
    biased = kind == "llama" and c.truth("attention_bias", False)
    return LlamaConfig(
        layers=c.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        size=size,
        inner=c.whole("intermediate_size"),
        vocabulary=c.whole("vocab_size"),
        positions=c.whole("max_position_embeddings"),
        eps=c.number("rms_norm_eps", 1e-6, 0, 1, "a number in [0, 1)"),
        activation=c.chosen("hidden_act", "silu", ACTIVATIONS),
        rope=_rope(c),
        tied=c.truth("tie_word_embeddings", False),
        bias_in=biased or kind == "qwen2",
        bias_out=biased,
        bias_mlp=kind == "llama" and c.truth("mlp_bias", False),
    )


def _rope(c: Fields) -> Rope:
    """`rope_parameters`, or what older files say in `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if c.data.get("rope_parameters") is not None else "rope_scaling"
    given = c.data.get(key)
    if given is not None and not isinstance(given, dict):
        raise c.wrong(key, "an object or null")
    if any(isinstance(v, dict) for v in (given or {}).values()):
        raise c.wrong(key, "one set of parameters for all layers")
    said: dict[str, Any] = {"rope_theta": c.data.get("rope_theta", 10000.0), **(given or {})}
    said.setdefault("rope_type", said.get("type", "default"))
    r = Fields(said, f"{c.where}: {key}" if given else c.where)
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


class Llama:
    """Writes graphs of one decoder."""

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.g = GraphBuilder()
        self.positions = 1
        self._turns: tuple[Constant, Constant] | None = None

    def weight(self, name: str, *shape: int) -> Constant:
        return self.g.constant(name, self.weights.get(name, shape))

    def prefill(self, b: tuple[int, int | None], n: tuple[int, int]) -> IRModule:
        """`main(input_ids (b, n) i64) -> logits (b, n, vocabulary) f32`, positions 0 .. n-1, each seeing those before it."""
        g, c = self.g, self.config
        if n[1] > LONGEST:
            raise UserError(
                f"bound of n: wanted at most {LONGEST}, as tables of positions are kept, found {n[1]}; give a lower bound"
            )
        self.positions = n[1]
        batch, length = g.symbol("b", *b), g.symbol("n", *n)
        ids = g.input("input_ids", (batch, length), i64)
        words = self.weight("model.embed_tokens.weight", c.vocabulary, c.hidden)
        x = g.call(Take(), words, ids, hint="embedding")
        for layer in range(c.layers):
            x = self.layer(x, (batch, length), f"model.layers.{layer}")
        x = self.norm(x, "model.norm")
        head = words if c.tied else self.weight("lm_head.weight", c.vocabulary, c.hidden)
        return g.finish(g.call(Matmul(transpose_b=True), x, head, hint="logits"))

    def turns(self) -> tuple[Constant, Constant]:
        """Tables (positions, size / 2) of the cosine and sine of every position's angles, rounded as the original rounds.

        Made when first asked for: by then weights have confirmed the size of a head."""
        if self._turns is None:
            at = np.arange(self.positions, dtype=np.float32)
            angles = at[:, None] * self.config.rope.frequencies(self.config.size)
            cos, sin = np.cos(angles), np.sin(angles)
            self._turns = self.g.constant("rotary.cos", cos), self.g.constant("rotary.sin", sin)
        return self._turns

    def norm(self, x: GVar, name: str) -> GVar:
        return self.g.call(RmsNorm(self.config.eps), x, self.weight(f"{name}.weight", self.config.hidden))

    def linear(self, x: GVar, name: str, width: int, out: int, biased: bool) -> GVar:
        """`x @ W.T + bias`; the file holds W as (out, in), kept here as (in, out)."""
        stored = self.weights.get(f"{name}.weight", (out, width))
        y = self.g.call(Matmul(), x, self.g.constant(f"{name}.weight", np.ascontiguousarray(stored.T)))
        return self.g.call(Add(), y, self.weight(f"{name}.bias", out)) if biased else y

    def layer(self, x: GVar, dims: tuple[Var, Var], name: str) -> GVar:
        g = self.g
        y = self.attention(self.norm(x, f"{name}.input_layernorm"), dims, f"{name}.self_attn")
        x = g.call(Add(), y, x)
        y = self.feed_forward(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return g.call(Add(), y, x)

    def attention(self, x: GVar, dims: tuple[Var, Var], name: str) -> GVar:
        """The rows of one key head are the positions, each with the query heads that share it: (b, groups, n * shared, size)."""
        g, c = self.g, self.config
        batch, length = dims
        shared = c.heads // c.groups

        def heads(part: str, *dims: int) -> GVar:
            y = self.linear(x, f"{name}.{part}_proj", c.hidden, math.prod(dims), c.bias_in)
            return g.call(Reshape((batch, length, *map(const, dims))), y)

        def turned(y: GVar) -> GVar:
            return g.call(Rotary(const(0), 1), y, *self.turns())

        q = g.call(Permute((0, 2, 1, 3, 4)), turned(heads("q", c.groups, shared, c.size)), hint="query")
        q = g.call(Reshape((batch, const(c.groups), length * shared, const(c.size))), q)
        k = g.call(Permute((0, 2, 1, 3)), turned(heads("k", c.groups, c.size)), hint="key")
        v = g.call(Permute((0, 2, 1, 3)), heads("v", c.groups, c.size), hint="value")
        scores = g.call(MulScalar(float(1 / np.sqrt(c.size))), g.call(Matmul(transpose_b=True), q, k), hint="scores")
        weights = g.call(CausalSoftmax(const(0), shared), scores)
        y = g.call(Matmul(), weights, v)
        y = g.call(Reshape((batch, const(c.groups), length, const(shared), const(c.size))), y)
        y = g.call(Permute((0, 2, 1, 3, 4)), y, hint="context")
        y = g.call(Reshape((batch, length, const(c.heads * c.size))), y)
        return self.linear(y, f"{name}.o_proj", c.heads * c.size, c.hidden, c.bias_out)

    def feed_forward(self, x: GVar, name: str) -> GVar:
        g, c = self.g, self.config
        gate = self.linear(x, f"{name}.gate_proj", c.hidden, c.inner, c.bias_mlp)
        up = self.linear(x, f"{name}.up_proj", c.hidden, c.inner, c.bias_mlp)
        active = g.call(Mul(), gate, g.call(ACTIVATIONS[c.activation](), gate))
        return self.linear(g.call(Mul(), active, up), f"{name}.down_proj", c.inner, c.hidden, c.bias_mlp)
