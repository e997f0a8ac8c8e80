"""Imports models from a Hugging Face folder: config.json and model.safetensors, without the framework that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.dtype import f32, i64
from relax_tune.ir.expr import Var, const
from relax_tune.ir.frontend.bounds import checked_bounds
from relax_tune.ir.frontend.hf_config import Fields, read_config, symbol_bounds
from relax_tune.ir.frontend.hf_llama import Llama
from relax_tune.ir.frontend.hf_llama_config import FAMILIES, llama_config
from relax_tune.ir.frontend.hf_weights import Weights
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph import Constant, GVar
from relax_tune.ir.graph_builder import GraphBuilder
from relax_tune.ir.op.attention import Attention
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.elementwise import Add, AddScalar, Cast, Gelu, MulScalar, Relu
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.op.movement import ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.reduce import L2Normalize, LayerNorm, MeanPool

Pooling = Literal["mean", "cls"]
SUPPORTED = ("bert", *FAMILIES)
ACTIVATIONS: Mapping[str, type[OperatorSpec]] = {"gelu": Gelu, "relu": Relu}


@dataclass(frozen=True, slots=True)
class BertConfig:
    """What of config.json the computation depends on."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    token_types: int
    eps: float
    activation: str


def bert_config(data: Mapping[str, Any], where: str) -> BertConfig:
    """Check a BERT configuration. Raises ParseError naming the field."""

    c = Fields(data, where)
    eps = c.number("layer_norm_eps", 1e-12, 0, 1, "a number in [0, 1)")
    activation = c.chosen("hidden_act", "gelu", ACTIVATIONS)
    c.only("position_embedding_type", "absolute")
    config = BertConfig(
        layers=c.whole("num_hidden_layers"),
        hidden=c.whole("hidden_size"),
        heads=c.whole("num_attention_heads"),
        inner=c.whole("intermediate_size"),
        vocabulary=c.whole("vocab_size"),
        positions=c.whole("max_position_embeddings"),
        token_types=c.whole("type_vocab_size"),
        eps=eps,
        activation=activation,
    )
    c.multiple("hidden_size", config.hidden, "num_attention_heads", config.heads)
    return config


def load_hf(
    folder: str | Path,
    pooling: Pooling = "mean",
    normalize: bool = True,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    every_position: bool = False,
) -> IRModule:
    """Import a model by what its config.json says it is.

    An encoder is `main(input_ids (b, n) i64, attention_mask (b, n) i64) -> sentence_embedding (b, hidden) f32`: token types
    are all 0, whose row is folded into the position table.

    A decoder is two functions that share its weights: `prefill(input_ids (b, n) i64) -> (logits (b, 1, vocabulary) f32, key_0,
    value_0, key_1 ...)` for a prompt, and `decode(input_ids (b, 1) i64, past_key_0, past_value_0, past_key_1 ...)` with results
    of the same kind for each token after it. Every position sees itself and those before it. Keys and values are (b, key heads,
    positions, size of a head) f32: `n` positions after a prompt; `m` past ones go into `decode`, and one more comes out.

    Positions count from 0. folder: holds config.json and model.safetensors. bounds: inclusive (lower, upper) of the symbols `b`,
    `n` and, of decoders, `m`; by default at least 1, and together at most the positions the model has. Of encoders alone:
    pooling: `mean` over the positions the mask admits, or `cls`, the first one; normalize: to unit length. Of decoders alone:
    every_position: logits of `prefill` are (b, n, vocabulary), those of every position instead of the last.

    Raises: ParseError for files that cannot be read or do not fit together, UserError for bounds the model cannot have.
    """
    root = Path(folder)
    data = read_config(root)
    kind = data.get("model_type")
    if kind not in SUPPORTED:
        raise ParseError(
            f"{root / 'config.json'}: wanted a model_type among {', '.join(SUPPORTED)}, found {kind!r:.80}; "
            "this architecture cannot be imported yet, but an .onnx file of the model may"
        )
    if pooling not in ("mean", "cls"):
        raise UserError(f"pooling: wanted 'mean' or 'cls', found {pooling!r:.80}; give one of the two")
    where = str(root / "config.json")
    if kind in FAMILIES:
        if (pooling, normalize) != ("mean", True):
            raise UserError(
                f"pooling and normalize: wanted an encoder, found {kind}, whose results are logits; leave them out"
            )
        decoder = llama_config(data, where)
        given = checked_bounds(bounds)
        m = given.pop("m", (1, max(1, decoder.positions - 1)))
        if m[1] >= decoder.positions:
            raise UserError(
                f"bound of m: wanted less than {decoder.positions}, the positions this model has, found {m[1]}; lower the bound"
            )
        b, n = symbol_bounds(decoder.positions, given)
        if n[0] < 1 and not every_position:
            raise UserError(
                f"bound of n: wanted at least 1, as the logits are those of the last position, found {n[0]}; raise it"
            )
        return Llama(decoder, Weights(root), max(n[1], m[1] + 1)).module(b, n, m, every_position)
    if every_position:
        raise UserError(f"every_position: wanted a decoder, found {kind}, whose result is an embedding; leave it out")
    config = bert_config(data, where)
    b, n = symbol_bounds(config.positions, bounds)
    return _Bert(config, Weights(root)).build(b, n, pooling, normalize)


class _Bert:
    """Writes the graph of one BERT encoder (post layer norm)."""

    def __init__(self, config: BertConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.g = GraphBuilder()

    def weight(self, name: str, *shape: int) -> Constant:
        return self.g.constant(name, self.weights.get(name, shape))

    def build(self, b: tuple[int, int | None], n: tuple[int, int], pooling: Pooling, normalize: bool) -> IRModule:
        g, c = self.g, self.config
        batch, length = g.symbol("b", *b), g.symbol("n", *n)
        ids = g.input("input_ids", (batch, length), i64)
        mask = g.input("attention_mask", (batch, length), i64)
        # hidden positions get the most negative finite number, as the original does
        lowest = float(np.finfo(np.float32).min)
        visible = g.call(Cast(f32), mask, hint="visible")
        bias = g.call(AddScalar(lowest), g.call(MulScalar(-lowest), visible), hint="mask_bias")
        bias = g.call(ExpandDims((1, 2)), bias)
        x = self.embed(ids, length)
        for layer in range(c.layers):
            x = self.layer(x, bias, (batch, length), f"encoder.layer.{layer}")
        if pooling == "mean":
            y = g.call(MeanPool(1e-9), x, g.call(Cast(f32), mask), hint="pooled")
        else:
            first = g.call(Slice(1, const(0), const(1)), x)
            y = g.call(Reshape((batch, const(c.hidden))), first, hint="pooled")
        if normalize:
            y = g.call(L2Normalize(1e-12), y, hint="sentence_embedding")
        return g.finish(y)

    def embed(self, ids: GVar, length: Var) -> GVar:
        g, c = self.g, self.config
        words = self.weight("embeddings.word_embeddings.weight", c.vocabulary, c.hidden)
        types = self.weights.get("embeddings.token_type_embeddings.weight", (c.token_types, c.hidden))
        table = self.weights.get("embeddings.position_embeddings.weight", (c.positions, c.hidden))
        positions = g.constant("embeddings.position_and_type_0", table + types[0])
        x = g.call(Add(), g.call(Take(), words, ids), g.call(Slice(0, const(0), length), positions))
        return self.norm(x, "embeddings.LayerNorm")

    def norm(self, x: GVar, name: str) -> GVar:
        width = self.config.hidden
        gamma, beta = self.weight(f"{name}.weight", width), self.weight(f"{name}.bias", width)
        return self.g.call(LayerNorm(self.config.eps), x, gamma, beta)

    def linear(self, x: GVar, name: str, width: int, out: int) -> GVar:
        """`x @ W.T + bias`; the file holds W as (out, in), kept here as (in, out)."""
        stored = self.weights.get(f"{name}.weight", (out, width))
        w = self.g.constant(f"{name}.weight", np.ascontiguousarray(stored.T))
        return self.g.call(Add(), self.g.call(Matmul(), x, w), self.weight(f"{name}.bias", out))

    def layer(self, x: GVar, bias: GVar, dims: tuple[Var, Var], name: str) -> GVar:
        g, c = self.g, self.config
        size = c.hidden // c.heads
        split = Reshape((*dims, const(c.heads), const(size)))

        def heads(part: str) -> GVar:
            y = self.linear(x, f"{name}.attention.self.{part}", c.hidden, c.hidden)
            return g.call(Permute((0, 2, 1, 3)), g.call(split, y), hint=part)

        q, k, v = heads("query"), heads("key"), heads("value")
        seen = g.call(Attention(float(1 / np.sqrt(size)), hides_rows=False), q, k, v, bias)
        context = g.call(Permute((0, 2, 1, 3)), seen, hint="context")
        context = g.call(Reshape((*dims, const(c.hidden))), context)
        out = self.linear(context, f"{name}.attention.output.dense", c.hidden, c.hidden)
        x = self.norm(g.call(Add(), out, x), f"{name}.attention.output.LayerNorm")
        inner = self.linear(x, f"{name}.intermediate.dense", c.hidden, c.inner)
        out = self.linear(g.call(ACTIVATIONS[c.activation](), inner), f"{name}.output.dense", c.inner, c.hidden)
        return self.norm(g.call(Add(), out, x), f"{name}.output.LayerNorm")
