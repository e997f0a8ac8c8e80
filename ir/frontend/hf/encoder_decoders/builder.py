"""Builder of the three functions of an encoder-decoder model from its specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f32, i64
from relax_tune.ir.core.expr import Expr, const, sub
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.encoder import Block, Encoder
from relax_tune.ir.frontend.hf.encoder_decoders.families import EncoderDecoderSpec
from relax_tune.ir.frontend.hf.encoder_spec import LayerNames, Words
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.op.indexing.movement import Concat, Slice
from relax_tune.ir.op.math.elementwise import Add, Cast, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul

Pair = tuple[GVar, GVar]
"""Keys and values of one layer: (b, heads, positions, size) each."""
Range = tuple[int, int]


class EncoderDecoderBuilder:
    """Builder of `encode`, `prefill` and `decode`, which share weights; see `load_hf`.

    stored: type of all keys and values that one function gives another"""

    def __init__(self, spec: EncoderDecoderSpec, weights: HfWeights, stored: DType = f32) -> None:
        self.spec, self.weights, self.stored = spec, weights, stored
        self.arrays: dict[str, NDArray[Any]] = {}

    def module(self, b: tuple[int, int | None], s: Range, n: Range, m: Range, every_position: bool = False) -> IRModule:
        """Build all functions. b, s, n, m: bounds of the batch, of positions of a source, of a prompt and of past ones"""
        first = self._encode(b, s)
        second = self._extend(first, "prefill", n, None, every_position)
        return self._extend(second, "decode", (1, 1), m)

    def _encode(self, b: tuple[int, int | None], s: Range) -> IRModule:
        """Build `encode`: the keys and values of every layer's cross-attention."""
        g = GraphBuilder("encode")
        encoder = Encoder(self.spec.encoder, self.weights, g=g, arrays=self.arrays, positions="s")
        hidden = encoder.encode(b, s)
        decoder = _Stack(self, g, encoder.dims, const(0))
        width, found = self.spec.encoder.hidden, list[GVar]()
        for number in range(len(decoder.spec.layers)):
            for part in ("key", "value"):
                y = decoder.heads(hidden, number, part, decoder.spec.heads, width, decoder.cross_names)
                found.append(decoder.cast(y, self.stored, f"cross_{part}_{number}"))
        return g.finish(found)

    def _extend(self, module: IRModule, name: str, n: Range, m: Range | None, every_position: bool = False) -> IRModule:
        """Add a function of new positions. n: bounds of their number; m: bounds of past ones, if any"""
        g, d = GraphBuilder(name), self.spec.decoder
        text = isinstance(self.spec.source, Words)
        g.include(replace(module, functions={}, constants={}, bounds=module.bounds[: 1 + text]))
        batch = module.bounds[0].var
        source: Expr = module.bounds[1].var if text else const(self.spec.source.positions)
        past: Expr = const(0) if m is None else g.symbol("m", *m)
        length: Expr = const(1) if m is not None else g.symbol("n", *n)
        ids = g.input("input_ids", (batch, length), i64)
        mask = g.input("attention_mask", (batch, source), i64) if text else None
        numbers, size = range(len(d.layers)), (const(d.heads), const(d.size))

        def given(kind: str, positions: Expr) -> list[Pair]:
            dims = (batch, size[0], positions, size[1])
            names = [(f"{kind}_key_{i}", f"{kind}_value_{i}") for i in numbers]
            return [(g.input(k, dims, self.stored), g.input(v, dims, self.stored)) for k, v in names]

        stack = _Stack(self, g, (batch, length), past, given("cross", source), [] if m is None else given("past", past))
        results = stack.run(ids, mask, every_position or m is not None)
        g.include(replace(module, functions={}))
        built = g.finish(results)
        return replace(built, functions={**module.functions, **built.functions})


class _Stack(Encoder):
    """Builder of the decoder's layers in one function.

    dims: batch and number of new positions, after `past` ones
    cross, cache: given keys and values, by layer; made: keys and values with the new positions"""

    def __init__(
        self,
        model: EncoderDecoderBuilder,
        g: GraphBuilder,
        dims: tuple[Any, Expr],
        past: Expr,
        cross: list[Pair] | None = None,
        cache: list[Pair] | None = None,
    ) -> None:
        super().__init__(model.spec.decoder, model.weights, g=g, arrays=model.arrays)
        self.model, self.dims, self.past, self.cross, self.cache = model, dims, past, cross or [], cache or []
        self.made: list[GVar] = []
        assert self.spec.cross is not None
        self.cross_names: LayerNames = self.spec.cross
        self.cross_bias: GVar | None = None

    def run(self, ids: GVar, mask: GVar | None, every_position: bool) -> tuple[GVar, ...]:
        """Return the logits of the last position, or of every one, and the keys and values of every layer."""
        length = self.dims[1]
        self.cross_bias = None if mask is None else self.mask_bias(self.visible(mask))
        x = self.embed(self.model.spec.words, ids, None, length)
        for number in range(len(self.spec.layers)):
            x = self.layer(x, number)
        if not every_position:
            x = self.g.call(Slice(1, sub(length, const(1)), length), x, hint="last")
        x = self.norm(x, self.spec.last_norm) if self.spec.last_norm else x
        return self.logits(x), *self.made

    def logits(self, x: GVar) -> GVar:
        """Return the logits of hidden states."""
        g, spec, w, get = self.g, self.model.spec, self.model.spec.words, self.weights.get
        if spec.head_scale != 1:
            x = g.call(MulScalar(float(np.float32(spec.head_scale))), x)
        head, name = self.words, f"{spec.head}.weight"
        if spec.untied or name in self.weights.names:
            stored = self.model.arrays.get(name)
            stored = get(name, (w.vocabulary, w.width), inner=False) if stored is None else stored
            if not np.array_equal(stored, self.model.arrays[self.words.name]):
                head = self.constant(name, lambda: stored)
        y = g.call(Matmul(transpose_b=True), x, head, hint="logits")
        if spec.head_bias and spec.head_bias in self.weights.names:
            y = g.call(
                Add(), y, self.constant(spec.head_bias, lambda: get(spec.head_bias, (1, w.vocabulary), inner=False))
            )
        return y

    def blocks(self, number: int) -> list[Block]:
        """Return the blocks of a layer, with cross-attention in the middle."""
        first, last = super().blocks(number)
        return [first, (lambda x: self.cross_attention(x, number), self.cross_names.middle_norm, ""), last]

    def cross_attention(self, x: GVar, number: int) -> GVar:
        """Emit attention to the positions of the source."""
        s = self.spec
        q = self.heads(x, number, "query", s.heads, s.hidden, self.cross_names)
        k, v = (self.cast(y, f32) for y in self.cross[number])
        return self.attended(q, k, v, self.cross_bias, f"{s.layers[number]}.{self.cross_names.out}", s.hidden, False)

    def remembered(self, number: int, key: GVar, value: GVar) -> Pair:
        """Return the keys and values of all positions, which the function gives too."""
        found = []
        for which, (part, new) in enumerate((("key", key), ("value", value))):
            y = self.cast(new, self.model.stored, f"{part}_{number}")
            if self.cache:
                y = self.g.call(Concat(2), self.cache[number][which], y, hint=f"{part}_{number}")
            self.made.append(y)
            found.append(self.cast(y, f32))
        return found[0], found[1]

    def cast(self, x: GVar, to: DType, hint: str | None = None) -> GVar:
        """Cast keys or values, if their type is another one."""
        return x if self.model.stored is f32 else self.g.call(Cast(to), x, hint=hint)
