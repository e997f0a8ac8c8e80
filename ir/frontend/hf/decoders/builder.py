"""Builder of the functions of a decoder from its specification."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import DType, f32, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant, GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.decoders.alibi import biases
from relax_tune.ir.frontend.hf.decoders.blocks import Blocks
from relax_tune.ir.frontend.hf.decoders.experts import mixture
from relax_tune.ir.frontend.hf.decoders.parameters import DecoderWeights, Parameters, Projection, projections
from relax_tune.ir.frontend.hf.decoders.rope import Rope, for_lengths
from relax_tune.ir.frontend.hf.decoders.spec import DecoderLayer, DecoderSpec
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, Cast, MaximumScalar, Minimum, Mul, MulScalar
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import Rotary
from relax_tune.ir.op.reduction.linalg import Matmul

LONGEST = 1 << 20
Cache = tuple[GVar, GVar]
"""Keys and values of one layer: (b, groups, positions, size) each."""


class DecoderBuilder:
    """Builder of the functions of one decoder, which share weights.

    shortest, longest: least and largest number of positions of a text. Raises UserError when the largest exceeds the limit of tables,
    or both need different rotations."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, shortest: int, longest: int) -> None:
        if longest > LONGEST:
            raise UserError(
                f"bound of positions: wanted at most {LONGEST}, as tables of them are kept, found {longest}; give a lower bound"
            )
        fixed = (replace(x, rope=x.rope and for_lengths(x.rope, shortest, longest)) for x in spec.layers)
        self.spec = replace(spec, layers=tuple(fixed))
        self.parameters = Parameters(spec, weights)
        self.positions = longest

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
        g, c = GraphBuilder("decode"), self.spec
        g.include(replace(prefill, functions={}, constants={}, bounds=prefill.bounds[:1]))
        batch, past = prefill.bounds[0].var, g.symbol("m", *m)
        ids = g.input("input_ids", (batch, const(1)), i64)
        dims = (batch, const(c.groups), past, const(c.size))
        given = [
            (g.input(f"past_key_{i}", dims, stored), g.input(f"past_value_{i}", dims, stored))
            for i in range(len(c.layers))
        ]
        logits, caches = _Step(self, g, batch, const(1), past, stored).run(ids, given)
        g.include(replace(prefill, functions={}))
        decode = g.finish((logits, *(part for cache in caches for part in cache)))
        return replace(decode, functions={**prefill.functions, **decode.functions})


class _Step(Blocks):
    """Builder of one graph: `length` new positions after `past` cached ones, keys and values of type `stored`."""

    def __init__(
        self, model: DecoderBuilder, g: GraphBuilder, batch: Expr, length: Expr, past: Expr, stored: DType
    ) -> None:
        super().__init__(model.spec, model.parameters, g, batch, length)
        self.past, self.positions, self.stored = past, model.positions, stored
        self._turns: dict[Rope, tuple[Constant, Constant]] = {}
        self._bias: GVar | None = None

    def run(self, ids: GVar, given: list[Cache] | None, every_position: bool = False) -> tuple[GVar, list[Cache]]:
        """Return the logits of the last new position (or of all), and the keys and values of every layer.

        given: cached keys and values, by layer"""
        c, prefix = self.spec, self.parameters.prefix
        words = self.weight(f"{prefix}{c.names.words}.weight", c.vocabulary, c.words_width or c.hidden)
        x = self.embedding(ids, words)
        made: list[Cache] = []
        for number, layer in enumerate(c.layers):
            name = f"{prefix}{c.names.layers}.{number}"
            x, cache = self.layer(x, layer, name, given[number] if given else None, number)
            made.append(cache)
        if not every_position and self.length is not const(1):
            x = self.g.call(Slice(1, self.length - 1, self.length), x, hint="last")
        return self.logits(x, words), made

    def embedding(self, ids: GVar, words: Constant) -> GVar:
        """Return the embeddings of tokens and learned positions."""
        g, c, names, prefix = self.g, self.spec, self.spec.names, self.parameters.prefix
        x = g.call(Take(), words, ids, hint="embedding")
        if names.words_in is not None:
            x = self.linear(x, Projection(f"{prefix}{names.words_in}", c.hidden), c.words_width, False)
        if c.words_scale != 1:
            x = g.call(MulScalar(float(np.float32(c.words_scale))), x)
        if names.positions is not None:
            rows = c.positions + c.first_position
            table = self.weight(f"{prefix}{names.positions}.weight", rows, c.hidden)
            start = self.past + c.first_position
            x = g.call(Add(), x, g.call(Slice(0, start, start + self.length), table, hint="positions"))
        return x if names.words_norm is None else self.norm(x, f"{prefix}{names.words_norm}", c.hidden, c.norm)

    def logits(self, x: GVar, words: Constant) -> GVar:
        g, c, names, prefix = self.g, self.spec, self.spec.names, self.parameters.prefix
        if names.last_norm is not None:
            x = self.norm(x, f"{prefix}{names.last_norm}", c.hidden, c.norm)
        width = c.words_width or c.hidden
        if names.words_out is not None:
            x = self.linear(x, Projection(f"{prefix}{names.words_out}", width), c.hidden, False)
        if c.tied:
            y = g.call(Matmul(transpose_b=True), x, words, hint="logits")
        else:
            y = g.call(Matmul(), x, self.head(width), hint="logits")
        if c.biases.head:
            y = g.call(Add(), y, self.weight(f"{names.head}.bias", c.vocabulary), hint="logits")
        if c.logits_scale != 1:
            y = g.call(MulScalar(c.logits_scale), y, hint="logits")
        return y if c.logits_cap is None else self.capped(y, c.logits_cap, "logits")

    def head(self, width: int) -> Constant:
        """Return the weights (width, vocabulary) of the last product, which the file holds as (vocabulary, width)."""
        name, vocabulary = f"{self.spec.names.head}.weight", self.spec.vocabulary

        def make() -> NDArray[np.float32]:
            return np.ascontiguousarray(self.parameters.weights.get(name, (vocabulary, width)).T)

        return self.g.constant(name, self.parameters.array(name, make))

    def layer(self, x: GVar, layer: DecoderLayer, name: str, given: Cache | None, number: int) -> tuple[GVar, Cache]:
        """Return what a layer makes of the hidden state, and its new cache."""
        g, c, names = self.g, self.spec, self.spec.names

        def block(y: GVar, norm: str | None) -> GVar:
            return y if norm is None or c.norms_follow_sums else self.norm(y, f"{name}.{norm}", c.hidden, c.norm)

        def result(y: GVar, norm: str | None) -> GVar:
            y = y if norm is None else self.norm(y, f"{name}.{norm}", c.hidden, c.norm)
            return y if c.residual_scale == 1 else g.call(MulScalar(c.residual_scale), y)

        def added(y: GVar, to: GVar, norm: str | None) -> GVar:
            total = g.call(Add(), y, to)
            return self.norm(total, f"{name}.{norm}", c.hidden, c.norm) if norm and c.norms_follow_sums else total

        read = block(x, names.before_attention)
        y, cache = self.attention(read, layer, name, given, number)
        y = result(y, names.after_attention)
        if c.parallel:
            other = read if names.before_mlp is None else block(x, names.before_mlp)
            both = g.call(Add(), y, result(self.second(other, layer, name), names.after_mlp))
            return g.call(Add(), both, x), cache
        x = added(y, read if c.residual_is_normed else x, names.before_attention)
        read = block(x, names.before_mlp)
        y = result(self.second(read, layer, name), names.after_mlp)
        return added(y, read if c.residual_is_normed else x, names.before_mlp), cache

    def second(self, x: GVar, layer: DecoderLayer, name: str) -> GVar:
        """Return the feed-forward block or the mixture of experts of a layer."""
        if layer.experts is not None:
            return mixture(self, x, layer.experts, name)
        return self.feed_forward(x, name, self.spec.inner)

    def turns(self, rope: Rope) -> tuple[Constant, Constant]:
        """Return the cosine and sine tables (positions, size / 2) of rotary embeddings, rounded as in the original.

        They are made on first use, after the weights have confirmed the size of a head."""
        if rope not in self._turns:
            name = f"rotary_{len(self._turns)}" if self._turns else "rotary"

            def table(part: str, of: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Constant:
                make = lambda: rope.table(of, self.positions, self.spec.size)
                return self.g.constant(f"{name}.{part}", self.parameters.array(f"{name}.{part}", make))

            self._turns[rope] = table("cos", np.cos), table("sin", np.sin)
        return self._turns[rope]

    def attention(
        self, x: GVar, layer: DecoderLayer, name: str, given: Cache | None, number: int
    ) -> tuple[GVar, Cache]:
        """Return grouped-query attention and the new cache.

        Rows of a key head are positions, each with the query heads that share it: (b, groups, n * shared, size)."""
        g, c, size = self.g, self.spec, const(self.spec.size)
        shared, groups, batch, length = c.heads // c.groups, const(c.groups), self.batch, self.length
        query, key, value = projections(c, name, layer.rope)

        def heads(at: Projection, *dims: int, norm: str | None = None) -> GVar:
            y = self.linear(x, at, c.hidden, c.biases.qkv)
            if norm is not None and c.head_norm is not None and c.head_norm.over == "all":
                y = self.norm(y, f"{name}.{norm}", at.width, c.head_norm.norm, layer.rope)
            return g.call(Reshape((batch, length, *map(const, dims), size)), self.clipped(y))

        def turned(y: GVar, norm: str) -> GVar:
            before = c.head_norm is not None and not c.head_norm.after_rope
            y = self.head_norm(y, f"{name}.{norm}", layer.rope) if before else y
            y = y if layer.rope is None else g.call(Rotary(self.past, 1), y, *self.turns(layer.rope))
            return y if before or c.head_norm is None else self.head_norm(y, f"{name}.{norm}", layer.rope)

        def swapped(y: GVar, hint: str, *dims: Expr) -> GVar:
            """Permute positions and groups, giving `dims`; a view for a single position."""
            axes = (0, 2, 1, *range(3, len(dims)))
            return g.call(Reshape(dims) if length is const(1) else Permute(axes), y, hint=hint)

        def kept(y: GVar, which: int) -> GVar:
            hint = f"{('key', 'value')[which]}_{number}"
            dims = (batch, groups, length, size)
            y = y if self.stored is f32 else g.call(Cast(self.stored), y)
            y = swapped(y, hint if given is None else f"new_{hint}", *dims)
            return y if given is None else g.call(Concat(2), given[which], y, hint=hint)

        # biases differ by head: then heads that share a key are apart, and rows are positions
        apart = c.alibi is not None and shared > 1
        rows = (batch, const(c.heads), length, size) if apart else (batch, groups, length, const(shared), size)
        q = turned(
            heads(query, *((c.heads,) if apart else (c.groups, shared)), norm=c.names.query_norm), c.names.query_norm
        )
        q = swapped(q, "query", *rows)
        q = q if apart else g.call(Reshape((batch, groups, length * shared, size)), q)
        k = kept(turned(heads(key, c.groups, norm=c.names.key_norm), c.names.key_norm), 0)
        v = kept(heads(value, c.groups), 1)
        bias = [] if c.alibi is None else [self.bias(layer.scale)]
        group, visible = 1 if apart else shared, not bias
        seen = Attention(layer.scale, True, self.past, group, layer.window, c.scores_cap, visible)
        y = g.call(seen, q, *(t if self.stored is f32 else g.call(Cast(f32), t) for t in (k, v)), *bias)
        y = y if apart else g.call(Reshape(rows), y)
        y = swapped(y, "context", batch, length, *rows[1:2], *rows[3:])
        y = g.call(Reshape((batch, length, const(c.heads * c.size))), y)
        out = Projection(f"{name}.{c.names.out}", c.hidden)
        return self.linear(y, out, c.heads * c.size, c.biases.out), (k, v)

    def clipped(self, y: GVar) -> GVar:
        clip = self.spec.clip
        return (
            y
            if clip is None
            else self.g.call(MaximumScalar(-clip), self.g.call(Minimum(), y, self.scalar("clip", clip)))
        )

    def head_norm(self, y: GVar, name: str, rope: Rope | None) -> GVar:
        """Normalise each head of queries (b, n, groups, shared, size) or keys (b, n, groups, size)."""
        c, rule = self.spec, self.spec.head_norm
        if rule is None or rule.over == "all":
            return y
        if rule.over == "head":
            return self.norm(y, name, c.size, rule.norm, rope)
        dims = (c.groups, c.heads // c.groups) if name.endswith(c.names.query_norm) else (c.groups,)
        heads, get = math.prod(dims), self.parameters.weights.get

        def make() -> NDArray[np.float32]:
            if rule.numbered:
                found = np.stack([get(f"{name}.{i}.weight", (c.size,)) for i in range(heads)])
            else:
                found = get(f"{name}.weight", (heads, c.size))
            return self.turned(found, rope).reshape(*dims, c.size)

        y = self.norm(y, name, c.size, replace(rule.norm, weight=False, bias=False))
        return self.g.call(Mul(), y, self.once(f"{name}.weight", make))

    def bias(self, scale: float) -> GVar:
        """Return the linear biases of all columns (1, heads, 1, past + length), made once."""
        alibi, heads = self.spec.alibi, self.spec.heads
        assert alibi is not None
        if self._bias is None:
            table = self.parameters.array("alibi", lambda: biases(alibi, heads, self.positions, scale))
            total = self.past + self.length
            start = self.positions - total if alibi.from_end else const(0)
            part = self.g.call(Slice(1, start, start + total), self.g.constant("alibi", table), hint="alibi")
            self._bias = self.g.call(ExpandDims((0, 2)), part)
        return self._bias
