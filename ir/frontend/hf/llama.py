"""Import of decoders of the Llama kind (Touvron et al. 2023).

RMSNorm, rotary embeddings (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), gated feed-forward (Shazeer 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import DType, f32, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant, GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.llama_config import LlamaConfig
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.op.indexing.movement import Concat, Permute, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Mul, MulScalar, Sigmoid
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import RmsNorm, Rotary
from relax_tune.ir.op.reduction.linalg import Matmul

LONGEST = 1 << 20
Cache = tuple[GVar, GVar]
"""Keys and values of one layer: (b, groups, positions, size) f32 each."""


class Llama:
    """Builder of the functions of one decoder, which share weights.

    positions: largest number of positions. Raises UserError when it exceeds the limit of rotary tables."""

    def __init__(self, config: LlamaConfig, weights: HfWeights, positions: int) -> None:
        if positions > LONGEST:
            raise UserError(
                f"bound of positions: wanted at most {LONGEST}, as tables of them are kept, found {positions}; give a lower bound"
            )
        self.config = config
        self.weights = weights
        self.positions = positions
        self._arrays: dict[str, NDArray[Any]] = {}

    def array(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return a constant by name, made on first use."""
        if name not in self._arrays:
            self._arrays[name] = make()
        return self._arrays[name]

    def module(
        self,
        b: tuple[int, int | None],
        n: tuple[int, int],
        m: tuple[int, int],
        every_position: bool = False,
        stored: DType = f32,
    ) -> IRModule:
        """Build the functions `prefill` and `decode`; see `load_hf`."""
        first = self._prefill(b, n, every_position, stored)
        return self._decode(first, m, stored)

    def _prefill(self, b: tuple[int, int | None], n: tuple[int, int], every_position: bool, stored: DType) -> IRModule:
        g = GraphBuilder("prefill")
        batch, length = g.symbol("b", *b), g.symbol("n", *n)
        ids = g.input("input_ids", (batch, length), i64)
        logits, made = _Step(self, g, batch, length, const(0), stored).run(ids, None, every_position)
        return g.finish((logits, *(part for cache in made for part in cache)))

    def _decode(self, prefill: IRModule, m: tuple[int, int], stored: DType) -> IRModule:
        """Add `decode` to the module of `prefill`, with the same weights and batch symbol."""
        g, c = GraphBuilder("decode"), self.config
        g.include(replace(prefill, functions={}, constants={}, bounds=prefill.bounds[:1]))
        batch, past = prefill.bounds[0].var, g.symbol("m", *m)
        ids = g.input("input_ids", (batch, const(1)), i64)
        dims = (batch, const(c.groups), past, const(c.size))
        given = [
            (g.input(f"past_key_{i}", dims, stored), g.input(f"past_value_{i}", dims, stored)) for i in range(c.layers)
        ]
        logits, caches = _Step(self, g, batch, const(1), past, stored).run(ids, given)
        g.include(replace(prefill, functions={}))
        decode = g.finish((logits, *(part for cache in caches for part in cache)))
        return replace(decode, functions={**prefill.functions, **decode.functions})


class _Step:
    """Builder of one graph: `length` new positions after `past` cached ones, keys and values of type `stored`."""

    def __init__(self, model: Llama, g: GraphBuilder, batch: Expr, length: Expr, past: Expr, stored: DType) -> None:
        self.model, self.config, self.g, self.stored = model, model.config, g, stored
        self.batch, self.length, self.past = batch, length, past
        self._turns: tuple[Constant, Constant] | None = None

    def run(self, ids: GVar, given: list[Cache] | None, every_position: bool = False) -> tuple[GVar, list[Cache]]:
        """Return the logits of the last new position (or of all), and the keys and values of every layer.

        given: cached keys and values, by layer"""
        g, c = self.g, self.config
        words = self.weight("model.embed_tokens.weight", c.vocabulary, c.hidden)
        x = g.call(Take(), words, ids, hint="embedding")
        if c.unit_norms:
            x = g.call(MulScalar(float(np.float32(c.hidden**0.5))), x)
        made: list[Cache] = []
        for number in range(c.layers):
            name = f"model.layers.{number}"
            y = self.norm(x, f"{name}.input_layernorm")
            y, cache = self.attention(y, f"{name}.self_attn", given[number] if given else None, number)
            made.append(cache)
            x = g.call(Add(), y, x)
            y = self.feed_forward(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
            x = g.call(Add(), y, x)
        if not every_position and self.length is not const(1):
            x = g.call(Slice(1, self.length - 1, self.length), x, hint="last")
        x = self.norm(x, "model.norm")
        head = words if c.tied else self.weight("lm_head.weight", c.vocabulary, c.hidden)
        return g.call(Matmul(transpose_b=True), x, head, hint="logits"), made

    def weight(self, name: str, *shape: int) -> Constant:
        return self.g.constant(name, self.model.array(name, lambda: self.model.weights.get(name, shape)))

    def turns(self) -> tuple[Constant, Constant]:
        """Return the cosine and sine tables (positions, size / 2) of rotary embeddings, rounded as in the original.

        They are made on first use, after the weights have confirmed the size of a head."""
        if self._turns is None:

            def table(of: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> NDArray[np.float32]:
                at = np.arange(self.model.positions, dtype=np.float32)
                return of(at[:, None] * self.config.rope.frequencies(self.config.size))

            cos = self.g.constant("rotary.cos", self.model.array("rotary.cos", lambda: table(np.cos)))
            sin = self.g.constant("rotary.sin", self.model.array("rotary.sin", lambda: table(np.sin)))
            self._turns = cos, sin
        return self._turns

    def norm(self, x: GVar, name: str, width: int | None = None) -> GVar:
        full, weights = f"{name}.weight", self.model.weights
        shape = (width or self.config.hidden,)
        more = np.float32(1 if self.config.unit_norms else 0)
        made = self.model.array(full, lambda: weights.get(full, shape) + more if more else weights.get(full, shape))
        return self.g.call(RmsNorm(self.config.eps), x, self.g.constant(full, made))

    def linear(self, x: GVar, name: str, width: int, out: int, biased: bool) -> GVar:
        """Return `x @ W.T + bias`; the file holds W as (out, in), the graph as (in, out)."""
        full, weights = f"{name}.weight", self.model.weights
        w = self.model.array(full, lambda: np.ascontiguousarray(weights.get(full, (out, width)).T))
        y = self.g.call(Matmul(), x, self.g.constant(full, w))
        return self.g.call(Add(), y, self.weight(f"{name}.bias", out)) if biased else y

    def attention(self, x: GVar, name: str, given: Cache | None, number: int) -> tuple[GVar, Cache]:
        """Return grouped-query attention and the new cache.

        Rows of a key head are positions, each with the query heads that share it: (b, groups, n * shared, size)."""
        g, c = self.g, self.config
        shared = c.heads // c.groups

        def heads(part: str, *dims: int) -> GVar:
            y = self.linear(x, f"{name}.{part}_proj", c.hidden, math.prod(dims), c.bias_in)
            return g.call(Reshape((self.batch, self.length, *map(const, dims))), y)

        def turned(y: GVar, part: str) -> GVar:
            y = self.norm(y, f"{name}.{part}_norm", c.size) if c.head_norms else y
            return g.call(Rotary(self.past, 1), y, *self.turns())

        def swapped(y: GVar, hint: str, *dims: Expr) -> GVar:
            """Permute positions and groups, giving `dims`; a view for a single position."""
            axes = (0, 2, 1, *range(3, len(dims)))
            return g.call(Reshape(dims) if self.length is const(1) else Permute(axes), y, hint=hint)

        def kept(y: GVar, which: int) -> GVar:
            hint = f"{('key', 'value')[which]}_{number}"
            dims = (self.batch, const(c.groups), self.length, const(c.size))
            y = y if self.stored is f32 else g.call(Cast(self.stored), y)
            y = swapped(y, hint if given is None else f"new_{hint}", *dims)
            return y if given is None else g.call(Concat(2), given[which], y, hint=hint)

        rows = (self.batch, const(c.groups), self.length, const(shared), const(c.size))
        q = swapped(turned(heads("q", c.groups, shared, c.size), "q"), "query", *rows)
        q = g.call(Reshape((self.batch, const(c.groups), self.length * shared, const(c.size))), q)
        k, v = kept(turned(heads("k", c.groups, c.size), "k"), 0), kept(heads("v", c.groups, c.size), 1)
        seen = Attention(float(1 / np.sqrt(c.size)), True, self.past, shared, c.windows[number])
        y = g.call(seen, q, *(t if self.stored is f32 else g.call(Cast(f32), t) for t in (k, v)))
        y = g.call(Reshape(rows), y)
        y = swapped(y, "context", self.batch, self.length, const(c.groups), const(shared), const(c.size))
        y = g.call(Reshape((self.batch, self.length, const(c.heads * c.size))), y)
        return self.linear(y, f"{name}.o_proj", c.heads * c.size, c.hidden, c.bias_out), (k, v)

    def feed_forward(self, x: GVar, name: str) -> GVar:
        g, c = self.g, self.config
        gate = self.linear(x, f"{name}.gate_proj", c.hidden, c.inner, c.bias_mlp)
        up = self.linear(x, f"{name}.up_proj", c.hidden, c.inner, c.bias_mlp)
        # each activation is x * sigmoid(p(x)): SiLU with p(x) = x, the tanh form of GELU with a cubic p
        inner = gate
        if not c.activation.startswith("s"):
            cubic = g.call(AddScalar(1.0), g.call(MulScalar(0.044715), g.call(Mul(), gate, gate)))
            inner = g.call(MulScalar(2 * math.sqrt(2 / math.pi)), g.call(Mul(), gate, cubic))
        active = g.call(Mul(), gate, g.call(Sigmoid(), inner))
        return self.linear(g.call(Mul(), active, up), f"{name}.down_proj", c.inner, c.hidden, c.bias_mlp)
