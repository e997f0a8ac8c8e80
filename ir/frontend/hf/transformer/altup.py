"""Emission of layers with alternating updates (Baykal et al. 2023, AltUp) and inputs of each layer (Gemma 3n).

Several hidden states pass through the layers. A layer predicts all of them, computes one, and corrects the others by how
far that one was from its prediction. Each layer also reads its own embedding of every token.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

import math

import numpy as np

from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.mixers import AltUp
from relax_tune.ir.frontend.hf.transformer.spec import Norm
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Div,
    MaximumScalar,
    Mul,
    MulScalar,
    Sqrt,
    Sub,
    Tanh,
    division_by,
)
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean

LEAST_SQUARE = 1e-5
"""Smallest mean square that a projected state is divided by."""


def altup_layers(e: AttentionBlocks, x: GVar, ids: GVar, a: AltUp) -> GVar:
    """Emit all layers. x: embeddings (b, n, hidden) of `ids` (b, n)"""
    g = e.g
    own, streams = _layer_inputs(e, x, ids, a), _streams(e, x, a)
    for number in range(len(e.stack.layers)):
        streams = _layer(e, streams, g.call(Slice(2, const(number), const(number + 1)), own), number, a)
    first = _stream(e, streams, 0)
    size = _root_mean_square(e, first)
    total = first
    for k in range(1, a.streams):
        y = e.dense(_stream(e, streams, k), f"altup_unembed_projections.{k - 1}", e.stack.hidden, e.stack.hidden, False)
        total = g.call(Add(), total, _scaled_to(e, y, size))
    return g.call(MulScalar(1 / a.streams), total, hint="mean_stream")


def _layer_inputs(e: AttentionBlocks, x: GVar, ids: GVar, a: AltUp) -> GVar:
    """Emit what each layer reads in addition: (b, n, layers, width). Tokens beyond the table take its first row."""
    g, s, count = e.g, e.stack, len(e.stack.layers)
    rows = ids
    if a.rows < s.vocabulary:
        inside = g.call(Less(), ids, e.scalar("layer_rows", a.rows, np.int64))
        rows = g.call(Where(), inside, ids, e.scalar("first_row", 0, np.int64))
    table = e.weight("embed_tokens_per_layer.weight", a.rows, count * a.width)
    shape = (*e.dims, const(count), const(a.width))
    stored = g.call(Reshape(shape), g.call(Take(), table, rows))
    stored = g.call(MulScalar(float(np.float32(a.width**0.5))), stored)
    y = e.dense(x, "per_layer_model_projection", s.hidden, count * a.width, False)
    y = g.call(Reshape(shape), g.call(MulScalar(float(np.float32(s.hidden**-0.5))), y))
    y = e.norm(y, "per_layer_projection_norm", a.width)
    return g.call(MulScalar(float(np.float32(0.5**0.5))), g.call(Add(), y, stored), hint="layer_inputs")


def _streams(e: AttentionBlocks, x: GVar, a: AltUp) -> GVar:
    """Emit all hidden states (b, n, streams, hidden): the embeddings, and projections of the same magnitude."""
    g, width, size = e.g, e.stack.hidden, _root_mean_square(e, x)
    parts = [x]
    for k in range(1, a.streams):
        parts.append(_scaled_to(e, e.dense(x, f"altup_projections.{k - 1}", width, width, False), size))
    return g.call(Concat(2), *(g.call(ExpandDims((2,)), y) for y in parts), hint="streams")


def _root_mean_square(e: AttentionBlocks, x: GVar) -> GVar:
    g = e.g
    return g.call(Sqrt(), g.call(Mean((2,), True), g.call(Mul(), x, x)))


def _scaled_to(e: AttentionBlocks, x: GVar, size: GVar) -> GVar:
    """Scale rows to a root mean square."""
    g = e.g
    square = g.call(MaximumScalar(LEAST_SQUARE), g.call(Mean((2,), True), g.call(Mul(), x, x)))
    return g.call(Div(), g.call(Mul(), x, size), g.call(Sqrt(), square))


def _stream(e: AttentionBlocks, streams: GVar, number: int) -> GVar:
    """Take one hidden state (b, n, hidden)."""
    one = e.g.call(Slice(2, const(number), const(number + 1)), streams)
    return e.g.call(Reshape((*e.dims, const(e.stack.hidden))), one, hint=f"stream_{number}")


def _layer(e: AttentionBlocks, streams: GVar, own: GVar, number: int, a: AltUp) -> GVar:
    """Emit a layer of all hidden states. own: what only this layer reads, (b, n, 1, width)"""
    g, s, names = e.g, e.stack, e.stack.names
    layer, width = s.layers[number], s.hidden
    path = layer.path

    def coefficients(y: GVar, name: str, count: int) -> GVar:
        """Emit `count` factors (b, n, count) computed from a hidden state."""
        scaled = g.call(MulScalar(1 / width), e.norm(y, f"{path}.altup.router_norm"))
        routed = g.call(Tanh(), e.dense(scaled, f"{path}.altup.modality_router", width, a.streams, False))
        return e.dense(routed, f"{path}.altup.{name}", a.streams, count, False)

    mixing = coefficients(_stream(e, streams, a.active), "prediction_coefs", a.streams**2)
    mixing = g.call(Reshape((*e.dims, const(a.streams), const(a.streams))), mixing)
    predicted = g.call(Add(), g.call(Matmul(), mixing, streams), streams, hint="predicted")
    active = _stream(e, predicted, a.active)
    x = e.norm(active, f"{path}.{names.before_attention}")
    low = e.dense(x, f"{path}.laurel.linear_left", width, a.rank, False)
    low = e.dense(low, f"{path}.laurel.linear_right", a.rank, width, False)
    low = g.call(Add(), x, e.norm(low, f"{path}.laurel.post_laurel_norm"), hint="laurel")
    y = g.call(Add(), active, e.norm(e.attention(x, number), f"{path}.{names.after_attention}"))
    y = g.call(division_by(float(np.float32(math.sqrt(2)))), g.call(Add(), y, low))
    inner = e.feed_forward(e.norm(y, f"{path}.{names.before_mlp}"), path, layer.sparsity)
    y = g.call(Add(), y, e.norm(inner, f"{path}.{names.after_mlp}"))
    change = g.call(ExpandDims((2,)), g.call(Sub(), y, active))
    factors = g.call(AddScalar(1.0), coefficients(y, "correction_coefs", a.streams))
    corrected = g.call(Add(), g.call(Mul(), change, g.call(ExpandDims((3,)), factors)), predicted, hint="corrected")
    first = _stream(e, corrected, a.active)
    if a.scaled:
        first = g.call(Mul(), first, e.weight(f"{path}.altup.correct_output_scale", width))
    gate = e.activation(e.dense(first, f"{path}.per_layer_input_gate", width, a.width, False))
    added = g.call(Mul(), gate, g.call(Reshape((*e.dims, const(a.width))), own))
    added = e.dense(added, f"{path}.per_layer_projection", a.width, width, False)
    added = g.call(ExpandDims((2,)), e.norm(added, f"{path}.post_per_layer_input_norm", norm=Norm(s.norm.eps)))
    rest = g.call(Add(), g.call(Slice(2, const(1), const(a.streams)), corrected), added)
    return g.call(Concat(2), g.call(Slice(2, const(0), const(1)), corrected), rest, hint=f"streams_{number}")
