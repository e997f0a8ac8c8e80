"""Import of encoders of the BERT kind (Devlin et al. 2019): post layer norm, absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant, GVar, Value
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Gelu, Mul, MulScalar, Relu
from relax_tune.ir.op.math.logic import NotEqual
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm
from relax_tune.ir.op.reduction.scan import CumSum

ACTIVATIONS: Mapping[str, type[OperatorSpec]] = {"gelu": Gelu, "relu": Relu}
ROBERTAS = ("roberta", "xlm-roberta", "camembert")
ENCODERS = ("bert", *ROBERTAS, "distilbert")
Stage = Callable[["Bert", GVar], "GVar | tuple[GVar, ...]"]
"""What follows an encoder: from its builder and the value so far to the next value, or to the results."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of the weights of a layer, in the spelling of one family."""

    layer: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    out: str = "attention.output.dense"
    middle_norm: str = "attention.output.LayerNorm"
    inner: str = "intermediate.dense"
    outer: str = "output.dense"
    last_norm: str = "output.LayerNorm"


DISTILBERT = LayerNames(
    "transformer.layer", "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm",
    "ffn.lin1", "ffn.lin2", "output_layer_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Fields of config.json that the computation depends on."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    rows: int
    """Rows of the table of positions."""
    token_types: int
    """Number of token types, possibly 0."""
    eps: float
    activation: str
    names: LayerNames
    padding: int | None
    """Token without a position, behind whose row the positions of others start; None: positions are those in the text.
    """

    @property
    def positions(self) -> int:
        return self.rows if self.padding is None else self.rows - self.padding - 1


def bert_config(data: Mapping[str, Any], where: str) -> BertConfig:
    """Read and check a configuration of one of ENCODERS. Raises ParseError naming the field."""
    c, kind = ConfigFields(data, where), data["model_type"]
    c.only("position_embedding_type", "absolute", None)
    c.only("is_decoder", False, None)
    c.only("add_cross_attention", False, None)
    short = kind == "distilbert"
    layers, hidden, heads, inner, activation = (
        ("n_layers", "dim", "n_heads", "hidden_dim", "activation") if short
        else ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "hidden_act")
    )  # fmt: skip
    padding = None
    if kind in ROBERTAS:
        padding = 0 if data.get("pad_token_id") == 0 else c.whole("pad_token_id", 1)
    config = BertConfig(
        layers=c.whole(layers),
        hidden=c.whole(hidden),
        heads=c.whole(heads),
        inner=c.whole(inner),
        vocabulary=c.whole("vocab_size"),
        rows=c.whole("max_position_embeddings"),
        token_types=0 if short else c.whole("type_vocab_size"),
        eps=1e-12 if short else c.number("layer_norm_eps", 1e-12, 0, 1, "a number in [0, 1)"),
        activation=c.chosen(activation, "gelu", ACTIVATIONS),
        names=DISTILBERT if short else LayerNames(),
        padding=padding,
    )
    c.multiple(hidden, config.hidden, heads, config.heads)
    if config.positions < 1:
        raise c.wrong("max_position_embeddings", f"more positions than the {padding} that pad_token_id skips and one")
    return config


class Bert:
    """Builder of the graph of one encoder.

    types: token types are an input, else all are 0"""

    mask: GVar
    dims: tuple[Var, Var]
    words: Constant

    def __init__(self, config: BertConfig, weights: HfWeights, types: bool = False) -> None:
        self.config = config
        self.weights = weights
        self.types = types and config.token_types > 1
        self.g = GraphBuilder()

    def weight(self, name: str, *shape: int) -> Constant:
        return self.g.constant(name, self.weights.get(name, shape))

    def build(self, b: tuple[int, int | None], n: tuple[int, int], stages: Sequence[Stage]) -> IRModule:
        """Build the encoder, followed by `stages`: from this builder and the value so far to the next value."""
        x: Any = self.encode(b, n)
        for stage in stages:
            x = stage(self, x)
        return self.g.finish(x)

    def encode(self, b: tuple[int, int | None], n: tuple[int, int]) -> GVar:
        """Emit the inputs and the last hidden state (b, n, hidden)."""
        g, c = self.g, self.config
        batch, length = self.dims = g.symbol("b", *b), g.symbol("n", *n)
        ids = g.input("input_ids", (batch, length), i64)
        mask = self.mask = g.input("attention_mask", (batch, length), i64)
        types = g.input("token_type_ids", (batch, length), i64) if self.types else None
        # masked positions get the most negative finite number, as in the original
        lowest = float(np.finfo(np.float32).min)
        visible = g.call(Cast(f32), mask, hint="visible")
        bias = g.call(AddScalar(lowest), g.call(MulScalar(-lowest), visible), hint="mask_bias")
        bias = g.call(ExpandDims((1, 2)), bias)
        x = self.embed(ids, types, length)
        for layer in range(c.layers):
            x = self.layer(x, bias, (batch, length), f"{c.names.layer}.{layer}")
        return x

    def embed(self, ids: GVar, types: GVar | None, length: Var) -> GVar:
        g, c = self.g, self.config
        self.words = self.weight("embeddings.word_embeddings.weight", c.vocabulary, c.hidden)
        table, name = self.weights.get("embeddings.position_embeddings.weight", (c.rows, c.hidden)), "position"
        kinds = "embeddings.token_type_embeddings.weight"
        if c.token_types and types is None:
            table, name = table + self.weights.get(kinds, (c.token_types, c.hidden))[0], "position_and_type_0"
        positions = g.constant(f"embeddings.{name}", table)
        x = g.call(Take(), self.words, ids)
        if types is not None:
            x = g.call(Add(), x, g.call(Take(), self.weight(kinds, c.token_types, c.hidden), types))
        x = g.call(Add(), x, self.placed(positions, ids, length))
        return self.norm(x, "embeddings.LayerNorm")

    def placed(self, table: Constant, ids: GVar, length: Var) -> Value:
        """Return the position embeddings.

        With a padding token, positions count the other tokens, starting behind the padding row of the table (RoBERTa)."""
        g, padding = self.g, self.config.padding
        if padding is None:
            return g.call(Slice(0, const(0), length), table)
        other = g.call(Cast(i64), g.call(NotEqual(), ids, g.constant("padding", np.asarray(padding, np.int64))))
        return g.call(
            Take(), table, g.call(AddScalar(padding), g.call(Mul(), g.call(CumSum(1), other), other), hint="positions")
        )

    def norm(self, x: GVar, name: str) -> GVar:
        width = self.config.hidden
        gamma, beta = self.weight(f"{name}.weight", width), self.weight(f"{name}.bias", width)
        return self.g.call(LayerNorm(self.config.eps), x, gamma, beta)

    def linear(self, x: GVar, name: str, width: int, out: int) -> GVar:
        """Emit `x @ W.T + bias` with weights of the encoder."""
        return self.dense(x, self.weights, name, width, out, inner=True)

    def dense(
        self,
        x: GVar,
        weights: HfWeights,
        name: str,
        width: int,
        out: int,
        biased: bool = True,
        folder: str = "",
        inner: bool = False,
        hint: str | None = None,
    ) -> GVar:
        """Emit `x @ W.T + bias`; the file holds W as (out, in), the graph as (in, out).

        folder: of the weights, for their names in the graph. inner: they are the encoder's, under its prefix"""
        kept = f"{folder}.{name}" if folder else name
        stored = weights.get(f"{name}.weight", (out, width), inner)
        w = self.g.constant(f"{kept}.weight", np.ascontiguousarray(stored.T))
        if not biased:
            return self.g.call(Matmul(), x, w, hint=hint)
        bias = self.g.constant(f"{kept}.bias", weights.get(f"{name}.bias", (out,), inner))
        return self.g.call(Add(), self.g.call(Matmul(), x, w), bias, hint=hint)

    def layer(self, x: GVar, bias: GVar, dims: tuple[Var, Var], name: str) -> GVar:
        g, c = self.g, self.config
        size = c.hidden // c.heads
        split = Reshape((*dims, const(c.heads), const(size)))

        def heads(part: str) -> GVar:
            y = self.linear(x, f"{name}.{getattr(c.names, part)}", c.hidden, c.hidden)
            return g.call(Permute((0, 2, 1, 3)), g.call(split, y), hint=part)

        q, k, v = heads("query"), heads("key"), heads("value")
        seen = g.call(Attention(float(1 / np.sqrt(size)), hides_rows=False), q, k, v, bias)
        context = g.call(Permute((0, 2, 1, 3)), seen, hint="context")
        context = g.call(Reshape((*dims, const(c.hidden))), context)
        out = self.linear(context, f"{name}.{c.names.out}", c.hidden, c.hidden)
        x = self.norm(g.call(Add(), out, x), f"{name}.{c.names.middle_norm}")
        inner = self.linear(x, f"{name}.{c.names.inner}", c.hidden, c.inner)
        out = self.linear(g.call(ACTIVATIONS[c.activation](), inner), f"{name}.{c.names.outer}", c.inner, c.hidden)
        return self.norm(g.call(Add(), out, x), f"{name}.{c.names.last_norm}")
