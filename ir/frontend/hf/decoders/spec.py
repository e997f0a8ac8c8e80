"""Specification of a decoder, which the configuration of a family is read into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_tune.ir.frontend.hf.decoders.rope import Rope

NormKind = Literal["rms", "layer"]
Fused = Literal["blocks", "groups", "shards"]
"""Order of the rows of a joint projection: all queries, keys, values; or of each key head its queries, key, value; or
four shards, each with queries, values, keys (CodeGen)."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of rows: RMSNorm or layer norm.

    offset: number added to the stored weight
    weight, bias: parameters that it has
    """

    eps: float
    kind: NormKind = "rms"
    offset: float = 0.0
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Normalisation of queries and keys.

    over: a head with weights that all heads share (`head`), a head with weights of its own (`each`), or all heads (`all`)
    after_rope: it follows the rotation
    numbered: names of the weights of `each` end with the number of the head
    """

    norm: Norm
    over: Literal["head", "each", "all"] = "head"
    after_rope: bool = False
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (Press et al. 2022): `slope * position` added to the scores of a column.

    largest: the negative exponent of the last slope, in the order of MPT; None: slopes of the paper
    from_end: positions count from the last one, which is 0
    half: slopes and products are rounded to bfloat16
    scaled: the sum is scaled, not the score alone
    """

    largest: float | None = None
    from_end: bool = False
    half: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the weights of a mixture, below a layer; `{}` is the number of an expert.

    joined: one tensor holds all experts, gate and up behind each other
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    joined: str | None = None
    shared: str = "mlp.shared_expert"
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts (Shazeer et al. 2017): each position keeps the largest weights of a router's softmax.

    chosen: experts of a position
    inner: width of one expert
    normalised: the kept weights are scaled to the sum 1
    shared: width of an expert that every position has; None: there is none
    """

    names: ExpertNames
    count: int
    chosen: int
    inner: int
    normalised: bool
    shared: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer.

    rope: rotation of queries and keys; None: no rotation
    scale: factor of the scores
    window: attention window in positions, the own one included; None: all positions
    experts: mixture in place of the feed-forward block
    """

    rope: Rope | None
    scale: float
    window: int | None = None
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Names of weights: of the model below `prefix`, of a layer below `layers` and its number. None: there is no such part.

    qkv: joint projection in place of `query`, `key` and `value`; gate_up: in place of `gate` and `up`
    before_*, after_*: norms of what a block reads, and of what it gives
    """

    prefix: str = "model."
    words: str = "embed_tokens"
    words_norm: str | None = None
    words_in: str | None = None
    words_out: str | None = None
    positions: str | None = None
    layers: str = "layers"
    before_attention: str | None = "input_layernorm"
    qkv: str | None = None
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    gate_up: str | None = None
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    after_mlp: str | None = None
    last_norm: str | None = "norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class Biases:
    """Linear layers that have a bias: of queries, keys and values; of attention's result; of the feed-forward block; of the head."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Facts that the computation of a decoder depends on."""

    names: Names
    layers: tuple[DecoderLayer, ...]
    hidden: int
    heads: int
    groups: int
    """Key and value heads."""
    size: int
    """Size of a head."""
    inner: int
    vocabulary: int
    positions: int
    norm: Norm
    activation: str
    tied: bool
    biases: Biases
    head_norm: HeadNorm | None = None
    alibi: Alibi | None = None
    fused: Fused = "blocks"
    input_major: bool = False
    """Linear layers are stored as (in, out)."""
    parallel: bool = False
    """Attention and the feed-forward block read the same input, and their results are added to it."""
    norms_follow_sums: bool = False
    """Norms are of the sums behind attention and the feed-forward block, not of what these read."""
    residual_is_normed: bool = False
    """The sums add to the normalised input of a block."""
    first_position: int = 0
    """Row of the first position in the table of learned positions."""
    words_width: int = 0
    """Width of embeddings with a projection of their own; 0: the hidden size."""
    words_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    clip: float | None = None
    """Largest magnitude of queries, keys and values."""
    scores_cap: float | None = None
    """Soft cap of the scores of attention."""
    logits_cap: float | None = None
    """Soft cap of the logits."""

    def usual_positions(self, wanted: list[int]) -> int:
        """Return the upper bound of positions where none is given; up to the shortest limit of a rotation unless `wanted` is beyond."""
        limits = [x.rope.limit for x in self.layers if x.rope is not None and x.rope.limit is not None]
        limit = min(limits, default=self.positions)
        return min(limit, self.positions) if all(w <= limit for w in wanted) else self.positions
