"""Imports encoders from a Hugging Face folder: config.json and model.safetensors, without the framework that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.dtype import f32, i64
from relax_tune.ir.expr import Var, const
from relax_tune.ir.frontend.bounds import LARGEST, checked_bounds
from relax_tune.ir.frontend.hf_weights import Weights, read_json
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph import Constant, GVar
from relax_tune.ir.graph_builder import GraphBuilder
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.elementwise import Add, AddScalar, Cast, Gelu, MulScalar, Relu
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.op.movement import ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.reduce import L2Normalize, LayerNorm, MeanPool, Softmax

Pooling = Literal["mean", "cls"]
SUPPORTED = ("bert",)
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


def read_config(folder: Path) -> Mapping[str, Any]:
    """config.json as a mapping. Raises ParseError."""
    return read_json(folder / "config.json", "a Hugging Face model folder with config.json")


def bert_config(data: Mapping[str, Any], where: str) -> BertConfig:
    """Check a BERT configuration. Raises ParseError naming the field."""

    def wrong(key: str, wanted: str, value: object) -> ParseError:
        return ParseError(f"{where}: {key}: wanted {wanted}, found {value!r:.80}; this model cannot be imported")

    def whole(key: str) -> int:
        value = data.get(key)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise wrong(key, f"a whole number from 1 to {LARGEST}", value)
        return value

    eps = data.get("layer_norm_eps", 1e-12)
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise wrong("layer_norm_eps", "a number in [0, 1)", eps)
    activation = data.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise wrong("hidden_act", f"one of {', '.join(ACTIVATIONS)}", activation)
    kind = data.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise wrong("position_embedding_type", "'absolute'", kind)
    config = BertConfig(
        layers=whole("num_hidden_layers"),
        hidden=whole("hidden_size"),
        heads=whole("num_attention_heads"),
        inner=whole("intermediate_size"),
        vocabulary=whole("vocab_size"),
        positions=whole("max_position_embeddings"),
        token_types=whole("type_vocab_size"),
        eps=float(eps),
        activation=activation,
    )
    if config.hidden % config.heads:
        raise ParseError(
            f"{where}: wanted hidden_size to be a multiple of num_attention_heads, "
            f"found {config.hidden} and {config.heads}; this model cannot be imported"
        )
    return config


def load_hf(
    folder: str | Path,
    pooling: Pooling = "mean",
    normalize: bool = True,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> IRModule:
    """Import an encoder as `main(input_ids (b, n) i64, attention_mask (b, n) i64) -> sentence_embedding (b, hidden) f32`.

    folder: holds config.json and model.safetensors. pooling: `mean` over the positions the mask admits, or `cls`, the
    first one. normalize: to unit length. bounds: inclusive (lower, upper) of the symbols `b` and `n`; by default they are
    at least 1, and `n` at most the number of positions the model has. Token types are all 0, whose row is folded into the
    position table; positions count from 0.

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
    config = bert_config(data, str(root / "config.json"))
    b, n = _symbol_bounds(config, bounds)
    return _Bert(config, Weights(root)).build(b, n, pooling, normalize)


def _symbol_bounds(
    config: BertConfig, bounds: Mapping[str, tuple[int, int]] | None
) -> tuple[tuple[int, int | None], tuple[int, int]]:
    given = checked_bounds(bounds)
    unknown = sorted(set(given) - {"b", "n"})
    if unknown:
        raise UserError(
            f"wanted bounds of the model's symbols b (batch) and n (positions), found {', '.join(unknown)[:80]}; "
            "correct the name"
        )
    n = given.get("n", (1, config.positions))
    if n[1] > config.positions:
        raise UserError(
            f"bound of n: wanted at most {config.positions}, the positions this model has, found {n[1]}; lower the bound"
        )
    return given.get("b", (1, None)), n


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
        scores = g.call(MulScalar(float(1 / np.sqrt(size))), g.call(Matmul(transpose_b=True), q, k), hint="scores")
        weights = g.call(Softmax(), g.call(Add(), scores, bias))
        context = g.call(Permute((0, 2, 1, 3)), g.call(Matmul(), weights, v), hint="context")
        context = g.call(Reshape((*dims, const(c.hidden))), context)
        out = self.linear(context, f"{name}.attention.output.dense", c.hidden, c.hidden)
        x = self.norm(g.call(Add(), out, x), f"{name}.attention.output.LayerNorm")
        inner = self.linear(x, f"{name}.intermediate.dense", c.hidden, c.inner)
        out = self.linear(g.call(ACTIVATIONS[c.activation](), inner), f"{name}.output.dense", c.inner, c.hidden)
        return self.norm(g.call(Add(), out, x), f"{name}.output.LayerNorm")
