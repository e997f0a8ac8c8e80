"""Emission of attention: heads, rotations, caches, biases.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`, `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import Constant, GVar, Value
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.transformer import biases
from relax_tune.ir.frontend.hf.transformer.blocks import START, Blocks
from relax_tune.ir.frontend.hf.transformer.parameters import (
    Parameters,
    Projection,
    attention_projection,
    gate_projection,
)
from relax_tune.ir.frontend.hf.transformer.rope import Rope
from relax_tune.ir.frontend.hf.transformer.spec import Alibi, Buckets, Disentangled, GridBias, Norm, Stack
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Permute, Reshape, Take
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, MaximumScalar, Minimum, Mul, MulScalar, Sigmoid
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import Rotary
from relax_tune.ir.op.neural.paged import PagedAttention, PagedWrite

Pair = tuple[GVar, GVar]
"""Keys and values of one layer: (b, groups, positions, size) each."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Pools of keys and values, and the places of the tokens of a step in them (`PagedAttention`).

    Attributes:
        pools: of each layer that has its own keys and values, (p, positions of a block, groups, size) each
        tables: blocks of each text, (r, w)
        requests: text of each token, (t,)
        positions: of each token in its text, (t,)
    """

    pools: Mapping[int, Pair]
    tables: GVar
    requests: GVar
    positions: GVar


class AttentionBlocks(Blocks):
    """Emitter of attention.

    Attributes:
        positions: largest number of positions, rows of computed tables
        stored: type of cached keys and values
        states: given states of state space layers, by layer
        cache, cross: given keys and values of earlier positions and of a source, by layer
        paged: pools in place of given keys and values
        results: keys and values of all positions, by layer
        pairs: what layers attend to, by the number of the layer that computes it
        mask: attention mask of the input, (b, n) integers; `visible` as booleans (b, 1, 1, n)
        hidden_bias: bias that hides padding, (b, 1, 1, n)
        place_bias: bias by the places of words and patches on a page
        frame_count: number of frames of each sound without padding, (b,)
        statistics: mean and standard deviation that each time series is scaled by, (b, 1, 1)
        present: 1 at the patches of time series that are not padding, else 0, (b, n, 1)
    """

    mask: GVar
    statistics: tuple[GVar, GVar]
    present: GVar

    def __init__(
        self,
        stack: Stack,
        parameters: Parameters,
        g: GraphBuilder,
        past: Expr = START,
        positions: int = 0,
        stored: DType = f32,
        cache: list[Pair | None] | None = None,
        cross: list[Pair] | None = None,
        states: list[tuple[GVar, ...] | None] | None = None,
        paged: Paged | None = None,
    ) -> None:
        super().__init__(stack, parameters, g, past)
        self.positions, self.stored, self.cache, self.cross = positions, stored, cache, cross
        self.states, self.paged = states, paged
        self.results: list[GVar] = []
        self.pairs: dict[int, Pair] = {}
        self.visible: GVar | None = None
        self.hidden_bias: GVar | None = None
        self.frame_count: GVar | None = None
        self.place_bias: GVar | None = None
        self.cross_bias: GVar | None = None
        self._biases: dict[object, Value | None] = {}
        self._rotations: dict[Rope, tuple[Value, Value]] = {}

    def attention(self, x: GVar, number: int, values_from: GVar | None = None) -> GVar:
        """Emit grouped-query attention of a layer. values_from: wide side of a narrow layer"""
        s, layer = self.stack, self.stack.layers[number]
        if self.paged is not None:
            return self.paged_attention(x, number, self.paged)
        q = self.heads(x, number, "query", s.width)
        if layer.shares is None:
            k = self.cached(self.heads(x, number, "key", s.width), number, "key")
            source, width = (x, s.width) if values_from is None else (values_from, s.hidden)
            self.pairs[number] = k, self.cached(self.heads(source, number, "value", width), number, "value")
        k, v = self.pairs[number if layer.shares is None else layer.shares]
        bias = self.bias(number)
        if isinstance(s.position_bias, Buckets) and s.position_bias.gate:
            assert bias is not None
            bias = biases.gated_bias(self, x, f"{layer.path}.{s.position_bias.gate}", bias)
            bias = bias if self.hidden_bias is None else self.g.call(Add(), bias, self.hidden_bias)
        if isinstance(s.position_bias, Disentangled):
            bias = biases.disentangled_bias(self, s.position_bias, q, k, bias, layer.path, self.positions)
        # only a mask of booleans may hide all columns of a row; added biases are finite
        hides = bias is self.visible if bias is not None else s.causal
        # The operator's window counts backwards only; the two-sided windows of encoders are biases.
        offset, window, group = (self.past, layer.window, self.packed) if s.causal else (const(0), None, 1)
        operator = Attention(layer.scale, s.causal, offset, group, window, s.scores_cap, hides)
        gate = self.linear(x, gate_projection(s, layer.path), s.width, s.biases.query) if s.gated else None
        return self.attended(operator, q, k, v, bias, f"{layer.path}.{s.names.out}", gate)

    def paged_attention(self, x: GVar, number: int, paged: Paged) -> GVar:
        """Emit attention of tokens (1, t, hidden) to pools of keys and values, which get the tokens' own ones first."""
        g, s, layer, (_, rows) = self.g, self.stack, self.stack.layers[number], self.dims
        places = paged.tables, paged.requests, paged.positions
        if layer.shares is None:
            new = (self.head_rows(x, number, part, s.width) for part in ("key", "value"))
            # as the pool stores them, also before the first later token reads them
            new = (g.call(Reshape((rows, const(s.groups), const(s.size))), self.cast(y, self.stored)) for y in new)
            written = [
                g.call(PagedWrite(), pool, y, *places, hint=f"{part}_{number}")
                for part, pool, y in zip(("key", "value"), paged.pools[number], new, strict=True)
            ]
            self.results += written
            self.pairs[number] = written[0], written[1]
        keys, values = self.pairs[number if layer.shares is None else layer.shares]
        split = rows, const(s.groups), const(s.heads // s.groups), const(s.size)
        q = g.call(Reshape(split), self.head_rows(x, number, "query", s.width), hint=f"query_{number}")
        y = g.call(PagedAttention(layer.scale, layer.window, s.scores_cap), q, keys, values, *places, hint="context")
        y = g.call(Reshape((*self.dims, const(s.heads * s.size))), y)
        if s.gated:
            gate = self.linear(x, gate_projection(s, layer.path), s.width, s.biases.query)
            y = g.call(Mul(), y, g.call(Sigmoid(), gate))
        return self.linear(y, Projection(f"{layer.path}.{s.names.out}", s.width), s.heads * s.size, s.biases.out)

    def cross_attention(self, x: GVar, number: int) -> GVar:
        """Emit attention to the positions of the source."""
        s, layer = self.stack, self.stack.layers[number]
        assert self.cross is not None and s.names.cross is not None
        q = self.heads(x, number, "query", s.width, cross=True)
        k, v = (self.cast(y, f32) for y in self.cross[number])
        operator = Attention(layer.scale, hides_rows=False)
        return self.attended(operator, q, k, v, self.cross_bias, f"{layer.path}.{s.names.cross.out}")

    @property
    def packed(self) -> int:
        """Number of query heads that share a key head, if they are packed as neighbouring rows.

        One product with a key head then serves all its queries. Biases that differ by head forbid it."""
        s = self.stack
        return s.heads // s.groups if s.causal and s.position_bias is None else 1

    def heads(self, x: GVar, number: int, part: str, width: int, cross: bool = False) -> GVar:
        """Emit the `query`, `key` or `value` heads of a layer: (b, heads, n, size), packed rows (b, groups, n * shared, size).

        Args:
            width: of x
            cross: heads of cross-attention
        """
        g, s, (batch, length), size = self.g, self.stack, self.dims, const(self.stack.size)
        y = self.head_rows(x, number, part, width, cross)
        shared = self.packed if part == "query" and not cross else 1
        count = self._head_count(part, shared)
        if part != "query":
            y = self.cast(y, self.stored)  # before the swap, which then moves half of the bytes
        hint = part if part == "query" else f"{'cross_' if cross else 'new_' if self.cache else ''}{part}_{number}"
        y = self.swapped(y, hint, batch, const(count[0]), length, *map(const, count[1:]), size)
        return g.call(Reshape((batch, const(s.groups), length * shared, size)), y) if shared > 1 else y

    def _head_count(self, part: str, shared: int) -> tuple[int, ...]:
        s = self.stack
        return (s.groups, shared) if shared > 1 else (s.heads if part == "query" else s.groups,)

    def head_rows(self, x: GVar, number: int, part: str, width: int, cross: bool = False) -> GVar:
        """Emit the heads of a layer position by position: (b, n, heads, size), packed ones (b, n, groups, shared, size)."""
        g, s, (batch, length), size = self.g, self.stack, self.dims, const(self.stack.size)
        path, names = s.layers[number].path, s.names.cross if cross and s.names.cross is not None else s.names
        # Cross-attention sees positions of another text, so only the scores of self-attention rotate.
        rope = None if cross or part == "value" else s.layers[number].rope
        rule = None if cross or part == "value" else s.head_norm
        norm = f"{path}.{names.query_norm if part == 'query' else names.key_norm}"
        at = attention_projection(s, names, path, part, rope)
        y = self.linear(x, at, width, getattr(s.biases, part))
        # A norm over all heads comes before they are split; the other norms see single heads.
        if rule is not None and rule.over == "all":
            y = self.norm(y, norm, at.width, rule.norm, rope)
        if s.clip is not None:
            y = g.call(MaximumScalar(-s.clip), g.call(Minimum(), y, self.scalar("clip", s.clip)))
        shared = self.packed if part == "query" and not cross else 1
        count = self._head_count(part, shared)
        y = g.call(Reshape((batch, length, *map(const, count), size)), y)
        if part == "value" and not cross and s.head_norm is not None and s.head_norm.values:
            y = self.norm(y, "", s.size, replace(s.head_norm.norm, weight=False))
        if rule is not None and not rule.after_rope:
            y = self.head_norm(y, norm, count, rope)
        if rope is not None:
            y = g.call(Rotary(self.past, 1), y, *self.rotation(rope))
        if rule is not None and rule.after_rope:
            y = self.head_norm(y, norm, count, rope)
        return y

    def cached(self, new: GVar, number: int, part: str) -> GVar:
        """Return the keys or values of all positions, which are results too."""
        if self.cache:
            pair = self.cache[number]
            assert pair is not None
            new = self.g.call(Concat(2), pair[part == "value"], new, hint=f"{part}_{number}")
        # Stored before the cast back to float32, as the cache holds them.
        self.results.append(new)
        return self.cast(new, f32)

    def cast(self, x: GVar, to: DType) -> GVar:
        """Cast keys or values, if cached ones have another type."""
        return x if self.stored is f32 else self.g.call(Cast(to), x)

    def swapped(self, x: GVar, hint: str, *dims: Expr) -> GVar:
        """Swap positions and heads, giving `dims`; a single position needs only a view."""
        one = self.dims[1] is const(1)
        return self.g.call(Reshape(dims) if one else Permute((0, 2, 1, *range(3, len(dims)))), x, hint=hint)

    def attended(
        self, operator: Attention, q: GVar, k: GVar, v: GVar, bias: Value | None, out: str, gate: GVar | None = None
    ) -> GVar:
        """Emit attention and the product `out` of its results. gate: multiplies them by its sigmoid"""
        g, s, (batch, length) = self.g, self.stack, self.dims
        size, shared = const(s.size), operator.group
        y = g.call(operator, q, k, v, *(() if bias is None else (bias,)))
        # Packed rows are (positions, heads of a group): they are split again before heads move behind positions.
        split = (const(s.heads), length) if shared == 1 else (const(s.groups), length, const(shared))
        if shared > 1:
            y = g.call(Reshape((batch, *split, size)), y)
        y = self.swapped(y, "context", batch, length, split[0], *split[2:], size)
        y = g.call(Reshape((batch, length, const(s.heads * s.size))), y)
        y = y if gate is None else g.call(Mul(), y, g.call(Sigmoid(), gate))
        return self.linear(y, Projection(out, s.width), s.heads * s.size, s.biases.out)

    def rotation(self, rope: Rope) -> tuple[Value, Value]:
        """Return the cosines and sines (positions, size / 2) of a rotation: read, sines first, or computed.

        With pools, a row for each token, by its position."""
        if rope not in self._rotations:
            name = f"rotary_{len(self._rotations)}" if self._rotations else "rotary"
            table, size = self.stack.names.rotary, self.stack.size

            def part(of: str) -> Constant:
                def make() -> NDArray[Any]:
                    # The file's own table counts: it may have been computed in 16 bits, which another computation
                    # would not repeat.
                    if table is not None and self.parameters.has(table):
                        stored = self.parameters.get(table, self.stack.positions, size)
                        return np.split(stored, 2, 1)[of == "cos"][: self.positions]
                    return rope.table(getattr(np, of), self.positions, size)

                return self.constant(f"{name}.{of}", make)

            tables: tuple[Value, Value] = part("cos"), part("sin")
            if self.paged is not None:
                positions = self.paged.positions
                tables = self.g.call(Take(), tables[0], positions), self.g.call(Take(), tables[1], positions)
            self._rotations[rope] = tables
        return self._rotations[rope]

    def head_norm(self, x: GVar, name: str, count: tuple[int, ...], rope: Rope | None) -> GVar:
        """Normalise each head of x (b, n, *count, size)."""
        s, rule = self.stack, self.stack.head_norm
        if rule is None or rule.over == "all":
            return x
        if rule.over == "head":
            return self.norm(x, name, s.size, rule.norm, rope)
        heads, get = math.prod(count), self.parameters.get

        def make() -> NDArray[Any]:
            if rule.numbered:
                stored = np.stack([get(f"{name}.{i}.weight", s.size) for i in range(heads)])
            else:
                stored = get(f"{name}.weight", heads, s.size)
            return self.turned(stored, rope).reshape(*count, s.size)

        # Each head has its own weights, which a norm with one vector cannot hold, so they are multiplied afterwards.
        y = self.norm(x, name, s.size, Norm(rule.norm.eps, rule.norm.kind, weight=False))
        return self.g.call(Mul(), y, self.constant(f"{self.parameters.full(name)}.weight", make))

    # biases

    def mask_bias(self, visible: GVar) -> GVar:
        """Emit the bias of columns (b, 1, 1, n): the most negative finite number where `visible` (b, n) is 0."""
        g = self.g
        hidden = g.call(AddScalar(biases.LOWEST), g.call(MulScalar(-biases.LOWEST), visible), hint="mask_bias")
        return g.call(ExpandDims((1, 2)), hidden)

    def bias(self, number: int) -> Value | None:
        """Return what is added to the scores of a layer: (b or 1, heads or 1, n or 1, columns)."""
        s, layer = self.stack, self.stack.layers[number]
        window = None if s.causal else layer.window
        each = isinstance(s.position_bias, GridBias) or (
            isinstance(s.position_bias, Buckets) and s.position_bias.each_layer
        )
        key = (window, layer.path if each else "")
        if key not in self._biases:
            self._biases[key] = self._bias(window, number)
        return self._biases[key]

    def _bias(self, window: int | None, number: int) -> Value | None:
        g, layer, by_position = self.g, self.stack.layers[number], self.stack.position_bias
        if self.visible is not None:
            # A mask of booleans is enough without another bias; sums need it as numbers.
            if window is None and by_position is None and self.place_bias is None:
                return self.visible
            self.hidden_bias = self.hidden_bias or self.mask_bias(g.call(Cast(f32), self.mask, hint="visible"))
        bias: Value | None = self.hidden_bias
        if window is not None:
            near = biases.window_bias(self, window)
            # The minimum, since the sum of two lowest numbers would be minus infinity.
            bias = near if bias is None else g.call(Minimum(), bias, near)
        if self.place_bias is not None and bias is not None:
            bias = g.call(Add(), self.place_bias, bias)
        if isinstance(by_position, Alibi):
            return biases.alibi_bias(self, by_position, layer.scale, self.positions)
        if isinstance(by_position, GridBias):
            return biases.grid_bias(self, by_position, layer.path)
        if isinstance(by_position, Buckets):
            near = biases.bucket_bias(self, by_position, layer.path)
            return near if bias is None or by_position.gate else g.call(Add(), bias, near)
        return bias
