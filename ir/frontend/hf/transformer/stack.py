"""Emission of whole stacks: embeddings, layers, logits.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`, `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Constant, GVar, Value
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.altup import altup_layers
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.conformer import conformer_layer, embed_mels
from relax_tune.ir.frontend.hf.transformer.delta_rule import delta_rule
from relax_tune.ir.frontend.hf.transformer.embeddings import (
    embed_patch_rows,
    embed_patches,
    embed_spectrogram,
    embed_words,
    token_table,
)
from relax_tune.ir.frontend.hf.transformer.experts import mixture
from relax_tune.ir.frontend.hf.transformer.inputs import (
    Patches,
    PatchRows,
    Series,
    SoundSamples,
    Spectrogram,
    Subsampling,
    Waves,
    Words,
)
from relax_tune.ir.frontend.hf.transformer.mixers import DeltaRule, TimeMix
from relax_tune.ir.frontend.hf.transformer.pages import with_image
from relax_tune.ir.frontend.hf.transformer.series import embed_series, series_layer
from relax_tune.ir.frontend.hf.transformer.sound import adapted, embed_samples, embed_waves
from relax_tune.ir.frontend.hf.transformer.spec import Bottleneck, Norm
from relax_tune.ir.frontend.hf.transformer.state_space import state_space
from relax_tune.ir.frontend.hf.transformer.time_mix import time_mix_layer
from relax_tune.ir.op.indexing.movement import ExpandDims, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, Mul, MulScalar, Tanh, division_by
from relax_tune.ir.op.math.logic import NotEqual
from relax_tune.ir.op.reduction.linalg import Matmul

Bounds = tuple[int, int | None]
Block = tuple[Callable[[GVar], GVar], str | None, str | None, str | None]
"""A block of a layer, the names of the norms of its input and result, and of the factor of its result."""


class StackEmitter(AttentionBlocks):
    """Emitter of a stack into one function.

    Attributes:
        ids: token ids, (b, n)
        hidden: inputs of the layers and the result of the last, once emitted
    """

    ids: GVar
    hidden: list[GVar]

    def encode(self, b: Bounds, n: Bounds | None, batch: str = "b", length: str = "n", typed: bool = False) -> GVar:
        """Emit the inputs of an encoder and its last hidden state (b, n, hidden).

        Args:
            b, n: bounds of the batch and of positions or samples
            batch, length: names of these symbols
            typed: token types are an input if there are several
        """
        g, rows, embedding = self.g, self.g.symbol(batch, *b), self.stack.embedding
        if isinstance(embedding, Words):
            n = n or (1, None)
            count, self.positions = g.symbol(length, *n), n[1] or embedding.positions
            self.dims = rows, count
            self.ids, self.mask = (g.input(name, (rows, count), i64) for name in ("input_ids", "attention_mask"))
            # With a single type the input could only be 0.
            types = g.input("token_type_ids", (rows, count), i64) if typed and embedding.token_types > 1 else None
            visible = g.call(NotEqual(), self.mask, self.scalar("hidden", 0, np.int64), hint="visible")
            self.visible = g.call(ExpandDims((1, 2)), visible)
            boxes = g.input("bbox", (rows, count, const(4)), i64) if embedding.boxes else None
            x = embed_words(self, self.ids, types, boxes)
            if boxes is not None and embedding.page is not None:
                x = with_image(self, x, boxes, embedding.page)
        elif isinstance(embedding, Patches):
            x = embed_patches(self, rows, embedding)
        elif isinstance(embedding, PatchRows):
            x = embed_patch_rows(self, rows, g.symbol(length, *(n or (1, None))), embedding)
        elif isinstance(embedding, Spectrogram):
            x = embed_spectrogram(self, rows, embedding)
        elif isinstance(embedding, Subsampling):
            n = n or (1, None)
            self.positions = embedding.frames(n[1]) if n[1] is not None else embedding.usual
            x = embed_mels(self, rows, self.g.symbol(length, *n), embedding)
        elif isinstance(embedding, Series):
            x = embed_series(self, rows, g.symbol(length, *(n or (1, embedding.steps))), embedding)
        else:
            n = n or (1, None)
            samples = self.g.symbol(length, *n)
            if isinstance(embedding, SoundSamples):
                assert n[1] is not None
                self.positions = embedding.frames(n[1])
                x = embed_samples(self, rows, samples, embedding)
            else:
                x = embed_waves(self, rows, samples, embedding)
        x = self.layers(x)
        x = self.norm(x, self.stack.names.last_norm) if self.stack.names.last_norm else x
        adapter = embedding.adapter if isinstance(embedding, Waves) else None
        return x if adapter is None else adapted(self, x, adapter)

    def generate(self, ids: GVar, every_position: bool, last: GVar | None = None) -> tuple[GVar, ...]:
        """Emit the logits of the last new position, or of all, and return them with the keys and values of every layer.

        Args:
            last: numbers of the tokens whose logits to give, for tokens (1, t) of several texts
        """
        self.ids, length = ids, self.dims[1]
        x = self.layers(embed_words(self, ids))
        if last is not None:
            x = self.g.call(Take(), self.g.call(Reshape((length, const(self.stack.hidden))), x), last, hint="last")
        elif not every_position and length is not const(1):
            x = self.g.call(Slice(1, length - 1, length), x, hint="last")
        return self.logits(x), *self.results

    def layers(self, x: GVar) -> GVar:
        """Emit all layers."""
        self.hidden = [x]
        if self.stack.altup is not None:
            self.hidden.append(altup_layers(self, x, self.ids, self.stack.altup))
            return self.hidden[-1]
        for number in range(len(self.stack.layers)):
            self.hidden.append(self.layer(self.hidden[-1], number))
        return self.hidden[-1]

    def layer(self, x: GVar, number: int) -> GVar:
        """Emit a layer, by the order of its norms."""
        g, s, path, names = self.g, self.stack, self.stack.layers[number].path, self.stack.names
        m = s.layers[number].state_space
        if isinstance(m, TimeMix):
            return time_mix_layer(self, x, number, m)
        if isinstance(s.embedding, Series):
            return series_layer(self, x, number)
        if s.conformer is not None:
            return conformer_layer(self, x, number, s.conformer)
        if s.bottleneck is not None:
            return self.narrow_layer(x, number, s.bottleneck)

        def normed(y: GVar, norm: str | None) -> GVar:
            return y if norm is None else self.norm(y, f"{path}.{norm}")

        def result(y: GVar, norm: str | None, factor: str | None) -> GVar:
            y = normed(y, norm)
            y = y if factor is None else g.call(Mul(), y, self.weight(f"{path}.{factor}", s.hidden))
            return y if s.residual_scale == 1 else g.call(MulScalar(s.residual_scale), y)

        blocks = self.blocks(number)
        if s.order == "parallel":
            # Both blocks read the same input; families with one norm share its result.
            first = normed(x, names.before_attention)
            second = first if names.before_mlp is None else normed(x, names.before_mlp)
            results = [result(block(y), *after) for (block, _, *after), y in zip(blocks, (first, second), strict=True)]
            return g.call(Add(), g.call(Add(), *results), x)
        post = s.order == "post_norm"
        for block, before, after, factor in blocks:
            y = x if post else normed(x, before)
            # BLOOM's option: the residual sum takes the normed input.
            total = g.call(Add(), result(block(y), after, factor), y if s.residual_is_normed else x)
            x = normed(total, before) if post else total
        return x

    def blocks(self, number: int) -> list[Block]:
        """Return the blocks of a layer in their order."""
        layer, names = self.stack.layers[number], self.stack.names
        before = names.before_attention if layer.attention_norm else None
        blocks: list[Block] = [(lambda x: self.mixed(x, number), before, names.after_attention, names.attention_scale)]
        if self.cross is not None and names.cross is not None:
            blocks.append((lambda x: self.cross_attention(x, number), names.cross.before_attention, None, None))
        if not self.stack.inner:
            return blocks
        return [*blocks, (lambda x: self.mlp(x, number), names.before_mlp, names.after_mlp, names.mlp_scale)]

    def mixed(self, x: GVar, number: int) -> GVar:
        """Emit the block of a layer that mixes positions: attention, a state space, or the sum of both."""
        layer, (before, after) = self.stack.layers[number], self.stack.attention_scales
        parts = list[GVar]()
        if layer.attends:
            parts.append(self.scaled(self.attention(self.scaled(x, before), number), after))
        m = layer.state_space
        if m is not None and not isinstance(m, TimeMix):
            earlier = self.states[number] if self.states else None
            if isinstance(m, DeltaRule):
                y, states = delta_rule(self, x, m, layer.path, earlier)
            else:
                y, states = state_space(self, x, m, layer.path, earlier)
            self.results += states
            parts.append(self.scaled(y, m.output_scale))
        return parts[0] if len(parts) == 1 else self.g.call(Add(), *parts)

    def mlp(self, x: GVar, number: int) -> GVar:
        """Emit the feed-forward block or the mixture of experts of a layer."""
        layer = self.stack.layers[number]
        return (
            self.feed_forward(x, layer.path) if layer.experts is None else mixture(self, x, layer.experts, layer.path)
        )

    def narrow_layer(self, x: GVar, number: int, b: Bottleneck) -> GVar:
        """Emit a layer between a projection that narrows and one that widens (Sun et al. 2020, figure 1)."""
        g, s, path = self.g, self.stack, self.stack.layers[number].path

        def narrowed(name: str) -> GVar:
            y = self.dense(x, f"{path}.bottleneck.{name}.dense", s.hidden, b.width)
            return self.norm(y, f"{path}.bottleneck.{name}.LayerNorm", b.width)

        def added(y: GVar, other: GVar, name: str, width: int) -> GVar:
            return self.norm(g.call(Add(), y, other), f"{path}.{name}.LayerNorm", width)

        y = added(self.attention(narrowed("attention"), number, x), narrowed("input"), "attention.output", b.width)
        for block in (*(f"ffn.{k}." for k in range(b.blocks - 1)), ""):
            y = added(self.feed_forward(y, f"{path}.{block}".rstrip(".")), y, f"{block}output", b.width)
        wide = self.dense(y, f"{path}.output.bottleneck.dense", b.width, s.hidden)
        return added(wide, x, "output.bottleneck", s.hidden)

    def logits(self, x: GVar) -> GVar:
        """Emit the logits of hidden states."""
        g, s, names, head = self.g, self.stack, self.stack.names, self.stack.logits
        if head.by_words:
            return self.word_logits(x, head.tied)
        if names.last_norm is not None:
            x = self.norm(x, names.last_norm)
        if names.words_out is not None:
            x = self.dense(x, names.words_out, s.hidden, s.words.width, False)
        if head.hidden_scale != 1:
            x = g.call(MulScalar(float(np.float32(head.hidden_scale))), x)
        table, transposed = self.output_table()
        y = g.call(Matmul(transpose_b=transposed), x, table, hint="logits")
        if s.biases.head:
            name = f"{names.head}.bias"
            y = g.call(Add(), y, self.constant(name, lambda: self.outside.get(name, s.vocabulary)), hint="logits")
        bias = names.logits_bias
        if bias is not None and self.outside.has(bias):
            y = g.call(Add(), y, self.constant(bias, lambda: self.outside.get(bias, 1, s.vocabulary)), hint="logits")
        if head.scale != 1:
            y = g.call(MulScalar(head.scale), y, hint="logits")
        if head.divisor != 1:
            # A division where the model divides, since a product with the reciprocal may round differently.
            y = g.call(division_by(head.divisor), y, hint="logits")
        if head.cap is None:
            return y
        return g.call(MulScalar(head.cap), g.call(Tanh(), g.call(division_by(head.cap), y)), hint="logits")

    def word_logits(self, x: GVar, tied: bool) -> GVar:
        """Emit the logits of the head of masked words. tied: its table holds the embeddings"""
        g, s, names, get = self.g, self.stack, self.stack.outputs.heads, self.outside.get
        width, vocabulary, y = names.word_width or s.words.width, s.vocabulary, x
        if names.word_dense:
            y = self.dense(x, names.word_dense, s.hidden, width, names.biased, parameters=self.outside)
            y = ACTIVATIONS[names.word_activation or s.activation](g, y)
            y = self.head_normed(y, names.word_norm, width)
        table: Value = token_table(self)
        full = self.outside.full
        if names.word_rest:
            rest = get(f"{names.word_rest}.weight", width - s.words.width, vocabulary)
            words = self.parameters.get(f"{s.names.words}.weight", vocabulary, s.words.width)
            table = self.constant(full(names.word_rest), lambda: np.concatenate([words, rest.T], axis=1))
        elif not tied or names.word_width or self.differs(f"{names.words}.weight", table, vocabulary, width):
            name = f"{names.words}.weight"
            table = self.constant(full(name), lambda: get(name, vocabulary, width))
        if not names.word_bias:
            return g.call(Matmul(transpose_b=True), y, table, hint="logits")
        # An untied head has another bias than a tied one.
        own = f"{names.words}.bias"
        name = own if self.outside.has(own) else names.word_bias
        bias = self.constant(full(name), lambda: get(name, vocabulary))
        return g.call(Add(), g.call(Matmul(transpose_b=True), y, table), bias, hint="logits")

    def differs(self, name: str, table: Value, *shape: int) -> bool:
        """Return whether the file has a matrix of a head that is not the table of tokens."""
        if not self.outside.has(name):
            return False
        assert isinstance(table, Constant)
        return not np.array_equal(self.outside.get(name, *shape), self.parameters.arrays[table.name])

    def head_normed(self, x: GVar, name: str, width: int) -> GVar:
        """Emit a norm of a head."""
        norm = Norm(self.stack.norm.eps, "layer", bias=self.stack.outputs.heads.norm_biased)
        return self.norm(x, name, width, norm, parameters=self.outside)

    def output_table(self) -> tuple[Value, bool]:
        """Return the matrix of the last product, and whether it is (vocabulary, width) as the table of tokens is."""
        s, words, heads = self.stack, token_table(self), [f"{head}.weight" for head in self.stack.names.head.split("|")]
        name = next((head for head in heads if self.outside.has(head)), heads[0])

        def stored() -> NDArray[Any]:
            return self.outside.get(name, s.vocabulary, s.words.width)

        if s.logits.tied and not self.outside.has(name):
            return words, True
        # Files often repeat the tied table as the head. transformers ties no head that differs from the table.
        if np.array_equal(stored(), self.parameters.arrays[words.name]):
            return words, True
        return self.constant(name, lambda: np.ascontiguousarray(stored().T)), False
