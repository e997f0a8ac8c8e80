"""Specifications of encoders: sizes, embeddings, layers and heads of one family, with the names of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields

Norm = Literal["layer_norm", "rms_norm", "affine"]
LOWEST = float(np.finfo(np.float32).min)
Part = Literal["query", "key", "value", "out", "inner", "gate", "outer", "norm"]


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of the weights of a layer. `name#1/3` is the second of three equal parts of the rows of one matrix.

    middle_norm, last_norm: norms of attention and of the feed-forward block, behind or before them
    middle_scale, last_scale: factors of the results of attention and of the feed-forward block; empty: there are none
    gate: second matrix of a gated feed-forward block (Shazeer 2020), whose values are not activated; empty: there is none
    """

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    out: str = "attention.output.dense"
    middle_norm: str = "attention.output.LayerNorm"
    inner: str = "intermediate.dense"
    outer: str = "output.dense"
    last_norm: str = "output.LayerNorm"
    gate: str = ""
    middle_scale: str = ""
    last_scale: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Embeddings of text. An empty name stands for a part that the family lacks.

    width: size of the vectors; where it is not the encoder's, `project` makes them so
    rows: rows of the table of positions
    token_types: number of token types, possibly 0
    dropped: token whose embeddings are 0, as if by dropout; the others are scaled as in training (Rives et al. 2021)
    trigram: words are joined with their neighbours, and `project` stands before the positions (Sun et al. 2020)
    padding: token without a position, behind whose row the positions of others start; None: positions are those in the text
    scale: factor of the words' embeddings
    first: row of the first position, where there is no `padding`
    sinusoids: function from rows and width to the table of positions, for a file without one (Vaswani et al. 2017)
    norm_before_positions: `norm` stands before the positions are added
    """

    width: int
    vocabulary: int
    rows: int
    token_types: int
    padding: int | None = None
    words: str = "embeddings.word_embeddings"
    table: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    project: str = ""
    trigram: bool = False
    dropped: int | None = None
    scale: float = 1.0
    first: int = 0
    sinusoids: Callable[[int, int], NDArray[np.float32]] | None = None
    norm_before_positions: bool = False

    @property
    def positions(self) -> int:
        return self.rows - (self.first if self.padding is None else self.padding + 1)


@dataclass(frozen=True, slots=True)
class Patches:
    """Embeddings of the patches of images of one size (Dosovitskiy et al. 2021).

    sizes: height and width of an image, and of a patch
    tokens: names of the vectors before those of the patches; registers: of those between, which have no positions
    registers_count: number of registers
    flat: tables and tokens are stored without a dim for the batch
    norm: before the first layer; empty: there is none
    stride: between patches; None: patches do not overlap
    spectrogram: the image is one of sound: (b, times, frequencies), without channels
    """

    channels: int
    size: tuple[int, int]
    patch: tuple[int, int]
    projection: str = "embeddings.patch_embeddings.projection"
    biased: bool = True
    table: str = "embeddings.position_embeddings"
    tokens: tuple[str, ...] = ("embeddings.cls_token",)
    registers: str = ""
    registers_count: int = 0
    flat: bool = False
    norm: str = ""
    stride: tuple[int, int] | None = None
    spectrogram: bool = False

    @property
    def leading(self) -> int:
        """Number of vectors before those of the patches."""
        return len(self.tokens) + self.registers_count

    @property
    def positions(self) -> int:
        """Number of vectors of an image."""
        rows, columns = self.grid
        return self.leading + rows * columns

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along height and width."""
        (h, w), (p, q), (down, right) = self.size, self.patch, self.stride or self.patch
        return max(0, (h - p) // down + 1), max(0, (w - q) // right + 1)


@dataclass(frozen=True, slots=True)
class Waves:
    """Embeddings of samples of sound.

    widths, kernels, strides: of the convolutions over samples; biased: they have a bias
    norm: `group` normalises each channel of the first convolution along time, `layer` the channels of every one
    activation: of convolutions
    projected_norm: a norm stands before the projection
    masked: an input says which samples are no padding
    reach: size of the kernel of positions; groups: of its channels
    rounds: convolutions of positions, each normalised without weights; None: one, whose kernel has its norm apart
    batch_norm: the one convolution has batch norm before it, and no norm of its kernel
    last_norm: behind the positions; empty: there is none
    """

    widths: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    biased: bool
    norm: Literal["group", "layer"]
    activation: str
    projected_norm: bool
    masked: bool
    reach: int
    groups: int
    rounds: int | None = None
    batch_norm: bool = False
    last_norm: str = ""

    @property
    def least(self) -> int:
        """Smallest number of samples that give a frame."""
        n = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            n = (n - 1) * stride + kernel
        return n


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """Embeddings of log-mel spectrograms of one length by two convolutions (Radford et al. 2023, section 2.2).

    mels: frequencies; positions: vectors, of two frames each; convolutions: names; table: of the positions
    """

    mels: int
    positions: int
    convolutions: tuple[str, str]
    table: str


@dataclass(frozen=True, slots=True)
class Pooler:
    """One vector of all, beside the last hidden state.

    kind: position it is taken from: the first, the last or the first that holds the token `eos` (None: the largest token); `pair`:
        the mean of the first two; `patches`: the mean of those of patches; `probe`: attention of a learned query (Zhai et al. 2022)
    norm, dense: names of what follows, if anything; activation: after `dense`
    optional: a folder has it where it has its weights, if any
    """

    kind: Literal["first", "last", "eos", "pair", "patches", "probe"]
    norm: str = ""
    dense: str = ""
    activation: str = ""
    eos: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """Attention bias by bucket of the distance between two positions (Raffel et al. 2020, section 2.1).

    table: name of the biases (count, heads), beneath each layer's path if `each_layer`
    furthest: distance from which on all share a bucket
    gate: path of the weights beneath a layer's that scale the biases of each row (Chi et al. 2022, WavLM); empty: there are none
    behind: all buckets are of columns behind a row
    """

    table: str
    count: int
    furthest: int
    each_layer: bool = False
    gate: str = ""
    behind: bool = False


@dataclass(frozen=True, slots=True)
class GridBias:
    """Attention bias by the way from one patch to another (Bao et al. 2022, BEiT), with three rows for the token before them.

    shared, own: names of the tables (rows, heads), of all layers and beneath each layer's path; empty: there is none"""

    shared: str
    own: str


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Attention bias by content and relative position, each way (He et al. 2021, section 3.1).

    table: name of the embeddings of relative positions (2 * span, hidden); norm: of them, if any
    span: buckets each way, linear up to half of them and logarithmic up to `furthest`, if given
    ways: `c2p`, from content to position, `p2c`, from position to content
    key, query: names of the products of positions in a layer
    """

    table: str
    norm: str
    span: int
    furthest: int | None
    ways: frozenset[str]
    key: str
    query: str


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Narrow layers between wide ones (Sun et al. 2020, MobileBERT); values of attention come from the wide side.

    width: of the narrow side. blocks: feed-forward blocks of a layer
    """

    width: int
    blocks: int


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of the weights of the heads of a family. Of a sequence: dense, its activation, and out; of words: all others.

    word_activation: None: that of the configuration
    inner: `dense` is one of the encoder's weights
    pooled: which position stands for a sequence; `late`: the mean of the logits of all
    norm: behind the activation of `dense`; empty: there is none
    everywhere: `dense` also stands before the classes of positions and the answer
    biased, norm_biased: dense parts and norms have a bias
    word_rest: name of the columns of the table of words beyond those of the embeddings; empty: there are none
    word_width: width of the vectors before the table of words; None: that of the embeddings
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


BERT_HEADS = HeadNames(
    "pooler.dense", "tanh", "classifier", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder", "cls.predictions.bias", inner=True,
)  # fmt: skip
ROBERTA_HEADS = HeadNames(
    "classifier.dense", "tanh", "classifier.out_proj", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias",
    "gelu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder, as an entry of `encoder_families.ENCODERS` reads it from a configuration.

    layers: path of each layer's weights, several alike where layers share weights
    size: elements of an attention head
    prefixes: what may stand before the names of the encoder's weights, where a head stands beside it
    norm_first: norms stand before attention and the feed-forward block, `last_norm` behind the last layer
    unbiased: parts of a layer without a bias
    scale: factor of attention scores; None: the root of 1 / size
    groups: heads of keys and values (Ainslie et al. 2023); None: as many as of queries
    thetas: base of the rotary embeddings (Su et al. 2021) of each layer
    rotary_table: name of the table (positions, head size) of their sines and cosines, for a file with one
    interleaved: rotary embeddings pair neighbouring elements, not the halves of a head
    disentangled: attention bias by content and position
    bare_first: the first layer has no norm before attention
    bottleneck: sizes of narrow layers
    causal: a position attends to none behind it
    pooler: of a bare model, whose results are the last hidden state and the pooled vector; None: text is pooled by the mean
    projection: name of the product of the pooled vector in models with a projection, and its size
    grid_bias: attention bias by the way between patches
    image_classes: vectors that an image's classes are read from, side by side: the first, the mean of the patches, the pooled one
    windows: distance up to which each layer attends; None: all
    tasks: heads that stand on the encoder in models of the family; empty: all
    cross: names of the attention to the positions of another stack; None: there is none
    """

    layers: tuple[str, ...]
    hidden: int
    heads: int
    size: int
    inner: int
    eps: float
    activation: str
    inputs: Words | Patches | Waves | Spectrogram
    prefixes: tuple[str, ...]
    names: LayerNames = field(default_factory=LayerNames)
    head: HeadNames = BERT_HEADS
    norm: Norm = "layer_norm"
    norm_first: bool = False
    last_norm: str = ""
    unbiased: frozenset[Part] = frozenset()
    scale: float | None = None
    buckets: Buckets | None = None
    disentangled: Disentangled | None = None
    grid_bias: GridBias | None = None
    groups: int | None = None
    thetas: tuple[float, ...] = ()
    interleaved: bool = False
    rotary_table: str = ""
    bare_first: bool = False
    windows: tuple[int | None, ...] = ()
    bottleneck: Bottleneck | None = None
    causal: bool = False
    pooler: Pooler | None = None
    projection: tuple[str, int] | None = None
    image_classes: tuple[Literal["first", "mean", "pooled"], ...] = ("first",)
    tasks: tuple[str, ...] = ()
    cross: LayerNames | None = None

    @property
    def words(self) -> Words:
        """Embeddings of text."""
        assert isinstance(self.inputs, Words)
        return self.inputs


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the fields of config.json; empty: the family has none, and the number is 0 or BERT's."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    rows: str = "max_position_embeddings"
    types: str = "type_vocab_size"
    eps: str = "layer_norm_eps"
    activation: str = "hidden_act"
    size: str = ""


UNTYPED = Fields(types="")
FURTHEST = 1 << 20  # positions of a family without a table of them


def read_spec(
    c: ConfigFields,
    prefix: str,
    fields: Fields = Fields(),
    path: str = "encoder.layer.{}",
    act: str = "gelu",
    eps: float = 1e-12,
    words: Mapping[str, Any] | None = None,
    **parts: Any,
) -> EncoderSpec:
    """Read the fields of BERT (Devlin et al. 2019). words, parts: what the family has otherwise."""
    c.only("position_embedding_type", "absolute", None)
    layers, hidden, heads = c.layers(fields.layers), c.whole(fields.hidden), c.whole(fields.heads)
    inner = c.whole(fields.inner)
    own: dict[str, Any] = {
        "layers": tuple(path.format(i) for i in range(layers)),
        "size": c.whole(fields.size, hidden // heads) if fields.size else hidden // heads,
        "eps": c.number(fields.eps, eps, 0, 1, "a number in [0, 1)") if fields.eps else eps,
        "activation": c.chosen(fields.activation, act, ACTIVATIONS) if fields.activation else act,
        "prefixes": (prefix,),
    }
    if not fields.size:
        c.multiple(fields.hidden, hidden, fields.heads, heads)
    if "inputs" not in parts:
        own["inputs"] = _words(c, fields, hidden, words or {})
    return EncoderSpec(hidden=hidden, heads=heads, inner=inner, **{**own, **parts})


def _words(c: ConfigFields, fields: Fields, hidden: int, words: Mapping[str, Any]) -> Words:
    text: dict[str, Any] = {
        "width": hidden,
        "vocabulary": c.whole("vocab_size"),
        "rows": c.whole(fields.rows) if fields.rows else FURTHEST,
        "token_types": c.whole(fields.types) if fields.types else 0,
    }
    return Words(**{**text, **words})
