"""Specification of a transformer: the facts of a configuration that the computation depends on.

A `Stack` is an embedding and layers of attention and feed-forward blocks. What a family does without is None, empty or 1.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`, `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from relax_tune.ir.frontend.hf.transformer.inputs import Embedding, SoundSamples, Subsampling, Waves, Words
from relax_tune.ir.frontend.hf.transformer.mixers import AltUp, Conformer, DeltaRule, Experts, StateSpace, TimeMix
from relax_tune.ir.frontend.hf.transformer.rope import Rope

NormKind = Literal["rms", "layer", "affine"]
"""RMSNorm, layer normalisation, or only the scale and shift of one (MobileBERT)."""
Fused = Literal["blocks", "groups", "shards"]
"""Row order of a joint projection: all queries, keys, values; or per key head its queries, key, value; or four shards, each with
queries, values, keys (CodeGen)."""
Order = Literal["pre_norm", "post_norm", "parallel"]
"""Norms precede the blocks; follow the residual sums; or attention and feed-forward block read the same input."""


# norms and linear layers


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of rows.

    Attributes:
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

    Attributes:
        over: one head with shared weights (`head`), one head with weights per head (`each`), or all heads together (`all`)
        after_rope: applied after the rotation
        numbered: weights of `each` are separate tensors, named by the number of the head
        values: values are normalised too, without weights
    """

    norm: Norm
    over: Literal["head", "each", "all"] = "head"
    after_rope: bool = False
    numbered: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linear layers have a bias."""

    query: bool = True
    key: bool = True
    value: bool = True
    out: bool = True
    mlp: bool = True
    head: bool = False


# positions in attention


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (Press et al. 2022): `slope * position` is added to the scores of a column.

    Attributes:
        largest: negative exponent of the last slope, in MPT's order; None: slopes of the paper
        from_end: positions count backwards from the last one, which is 0
        half: slopes and products are rounded to bfloat16
        scaled: the bias is multiplied by the scale of the scores
    """

    largest: float | None = None
    from_end: bool = False
    half: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """Attention bias by bucket of the distance between two positions (Raffel et al. 2020, section 2.1).

    Attributes:
        table: name of the biases, (count, heads)
        furthest: distance from which on all positions share a bucket
        each_layer: every layer has a table, below its path
        gate: path below a layer of the gate that scales the biases per row (Chen et al. 2022, WavLM)
    """

    table: str
    count: int
    furthest: int
    each_layer: bool = False
    gate: str = ""


@dataclass(frozen=True, slots=True)
class GridBias:
    """Attention bias by the offset between two patches (Bao et al. 2022, BEiT); three more rows serve the class token.

    Attributes:
        shared: name of the table (rows, heads) of all layers
        each: name of a table below each layer's path
    """

    shared: str
    each: str


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Attention bias between content and relative position (He et al. 2021, section 3.1).

    Attributes:
        table: name of the relative position embeddings, (2 * span, hidden)
        norm: name of their norm
        span: number of buckets in each direction, linear up to half of them and logarithmic up to `furthest`, if given
        terms: `c2p` (content to position), `p2c` (position to content)
        key, query: names below a layer of the projections of positions
        key_bias: the projection `key` has a bias
    """

    table: str
    norm: str
    span: int
    furthest: int | None
    terms: frozenset[str]
    key: str
    query: str
    key_bias: bool = True


PositionBias = Alibi | Buckets | GridBias | Disentangled


# layers


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """One layer.

    Attributes:
        path: of its weights; several layers may share one
        rope: rotation of queries and keys
        scale: factor of the scores
        window: causal: number of positions that a row attends to, including itself; else the largest distance in each direction
        experts: mixture in place of the feed-forward block
        attention_norm: attention has a norm (ModernBERT's first layer has none)
        state_space: added to attention, or in place of it
        attends: has attention
        shares: number of the layer whose keys and values it attends to; None: it computes them
        sparsity: number of standard deviations above the mean from which gates of the feed-forward block are used; None: all are
    """

    path: str
    scale: float
    rope: Rope | None = None
    window: int | None = None
    experts: Experts | None = None
    attention_norm: bool = True
    state_space: StateSpace | DeltaRule | TimeMix | None = None
    attends: bool = True
    shares: int | None = None
    sparsity: float | None = None


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Narrow layers between wide ones (Sun et al. 2020, MobileBERT); values are projected from the wide side.

    Attributes:
        width: of the narrow side
        blocks: number of feed-forward blocks in a layer
    """

    width: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Product that gives the logits of the next token.

    Attributes:
        tied: its matrix is the table of token embeddings, unless the file has another one
        hidden_scale: factor of the last hidden state
        scale, divisor, cap: of the logits; `cap * tanh(logits / cap)`
        by_words: the head of masked words (`TaskHeads`) gives them
    """

    tied: bool = True
    hidden_scale: float = 1.0
    scale: float = 1.0
    divisor: float = 1.0
    cap: float | None = None
    by_words: bool = False


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooled vector of an encoder, returned in addition to the last hidden state.

    Attributes:
        kind: the first position, the last, or the first with token `eos` (None: the largest token id); `pair`: mean of the
            first two; `patches`: mean of the patches; `probe`: attention of a learned query (Zhai et al. 2022)
        norm, dense, activation: applied to the vector, in this order
        optional: present only if its weights are in the file
    """

    kind: Literal["first", "last", "eos", "pair", "patches", "probe"]
    norm: str = ""
    dense: str = ""
    activation: str = ""
    eos: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class TaskHeads:
    """Names of the weights of task heads. Classes use dense, activation, norm and out; masked words the fields `word_...`.

    Attributes:
        word_activation: None: the activation of the layers
        inner: `dense` belongs to the encoder, below its prefix
        pooled: position that represents a sequence; `late`: the mean of all positions' logits
        everywhere: `dense` also precedes the logits of positions and answers
        biased, norm_biased: dense layers and norms have a bias
        word_rest: columns of the output table that the embedding table lacks
        word_width: width of the vectors before the output table; None: the width of the embeddings
    """

    dense: str
    activation: str
    out: str
    word_dense: str
    word_norm: str
    words: str
    word_bias: str
    word_activation: str | None = None
    inner: bool = False
    answer_out: str = "qa_outputs"
    pooled: Literal["cls", "mean", "late"] = "cls"
    norm: str = ""
    everywhere: bool = False
    biased: bool = True
    norm_biased: bool = True
    word_width: int | None = None
    word_rest: str = ""


BERT_HEADS = TaskHeads(
    "pooler.dense", "tanh", "classifier", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder", "cls.predictions.bias", inner=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outputs:
    """Results of an encoder.

    Attributes:
        pooler: of a bare model; None: text is pooled by the mean
        projection: name and size of the projection of the pooled vector
        image_classes: vectors that an image's classes are computed from, concatenated
        tasks: heads that models of the family may have; empty: all
    """

    heads: TaskHeads = BERT_HEADS
    pooler: Pooler | None = None
    projection: tuple[str, int] | None = None
    image_classes: tuple[Literal["first", "mean", "pooled"], ...] = ("first",)
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """Names of weights. Names of a layer's parts are below `layers` and its number. None: the family has no such part.

    Attributes:
        prefix: of all names except heads; files of a bare model lack it
        words: table of token embeddings; alternatives are separated by `|`
        types, positions: tables of token types and positions
        project, words_out: projections from the width of embeddings to the hidden size, and back
        rotary: table of rotary sines and cosines
        qkv, kv: joint projection in place of `query`, `key` and `value`, or of the last two
        qkv_biases: names of the biases of the parts of `qkv`, where they are separate tensors
        gate_up, up_gate: joint projection in place of `gate` and `up`, which has the gate first or last
        gate: projection whose result is activated and multiplied by `up`'s (Shazeer 2020)
        before_attention, before_mlp: norms of the blocks; after the residual sum if `Stack.order` is `post_norm`
        after_attention, after_mlp: norms of the blocks' results
        attention_scale, mlp_scale: factors of the blocks' results (LayerScale; Touvron et al. 2021)
        cross: attention to another stack's positions
        head: product that gives logits; alternatives are separated by `|`
        logits_bias: its bias where that has a name of another form (absent: 0)
    """

    prefix: str = "model."
    words: str = "embed_tokens"
    types: str = ""
    positions: str | None = None
    words_norm: str | None = None
    project: str | None = None
    words_out: str | None = None
    rotary: str | None = None
    layers: str = "layers"
    before_attention: str | None = "input_layernorm"
    qkv: str | None = None
    qkv_biases: tuple[str, str, str] | None = None
    kv: str | None = None
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    after_attention: str | None = None
    attention_scale: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    gate_up: str | None = None
    up_gate: str | None = None
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    after_mlp: str | None = None
    mlp_scale: str | None = None
    cross: Names | None = None
    last_norm: str | None = "norm"
    head: str = "lm_head"
    logits_bias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """An embedding, layers, and what follows them.

    Attributes:
        groups: number of key and value heads (Ainslie et al. 2023)
        size: of a head
        inner: width of the feed-forward block; 0: there is none
        causal: a position attends to no later one
        input_major: linear layers are stored as (in, out)
        residual_is_normed: residual sums add the normalised input of a block
        residual_scale: factor of the blocks' results
        attention_scales: factors of the input and the result of attention
        mlp_scales: factors of the gate before its activation, and of the result of the feed-forward block
        altup: several hidden states per position
        conformer: layers are a Conformer's
        gated: results of attention are multiplied by the sigmoid of gates, which the query projection gives too
        clip: largest magnitude of queries, keys and values
        scores_cap: scores become `cap * tanh(scores / cap)`
        logits: of models that generate
        outputs: of encoders
    """

    names: Names
    layers: tuple[TransformerLayer, ...]
    embedding: Embedding
    hidden: int
    heads: int
    groups: int
    size: int
    inner: int
    norm: Norm
    activation: str
    biases: Biases = field(default_factory=Biases)
    order: Order = "pre_norm"
    causal: bool = True
    head_norm: HeadNorm | None = None
    position_bias: PositionBias | None = None
    fused: Fused = "blocks"
    input_major: bool = False
    residual_is_normed: bool = False
    residual_scale: float = 1.0
    attention_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, ...] = (1.0, 1.0)
    gated: bool = False
    clip: float | None = None
    scores_cap: float | None = None
    bottleneck: Bottleneck | None = None
    altup: AltUp | None = None
    conformer: Conformer | None = None
    logits: Logits = field(default_factory=Logits)
    outputs: Outputs = field(default_factory=Outputs)

    @property
    def words(self) -> Words:
        assert isinstance(self.embedding, Words)
        return self.embedding

    @property
    def positions(self) -> int:
        """Largest number of positions."""
        assert not isinstance(self.embedding, Waves | SoundSamples | Subsampling)  # models of sound limit samples
        return self.embedding.positions

    @property
    def vocabulary(self) -> int:
        return self.words.vocabulary

    @property
    def width(self) -> int:
        """Width of what the blocks of a layer read."""
        return self.hidden if self.bottleneck is None else self.bottleneck.width

    @property
    def out(self) -> int:
        """Width of the results of an encoder."""
        adapter = self.embedding.adapter if isinstance(self.embedding, Waves) else None
        return self.hidden if adapter is None else adapter.width

    @property
    def attends(self) -> bool:
        """Whether any layer has attention."""
        return any(layer.attends for layer in self.layers)

    def with_layers(self, change: Callable[[int, TransformerLayer], TransformerLayer]) -> Stack:
        """Return the stack with every layer changed, by its number."""
        return replace(self, layers=tuple(change(i, layer) for i, layer in enumerate(self.layers)))

    def usual_positions(self, requested: Iterable[int]) -> int:
        """Return the default upper bound of positions: the least limit of a rotation, unless a requested bound exceeds it."""
        limits = [x.rope.limit for x in self.layers if x.rope is not None and x.rope.limit is not None]
        limit = min(limits, default=self.positions)
        return min(limit, self.positions) if all(n <= limit for n in requested) else self.positions


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """A stack that reads a source, and a causal stack with cross-attention that generates.

    Attributes:
        separate: the weights of both are below `encoder.` and `decoder.`
        projected: name of a projection of the encoder's results to the decoder's hidden size; empty: none
    """

    encoder: Stack
    decoder: Stack
    separate: bool = False
    projected: str = ""
