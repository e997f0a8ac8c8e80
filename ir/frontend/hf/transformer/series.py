"""Emission of forecasters of time series: patches of steps, layers that read them, the forecast (Das et al. 2024, TimesFM).

Tests: `tests/ir/frontend/hf/test_series.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, ceildiv, const, mul, sub
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.biases import LOWEST
from relax_tune.ir.frontend.hf.transformer.inputs import Series
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters
from relax_tune.ir.frontend.hf.transformer.spec import Norm
from relax_tune.ir.op.create import Iota, Scalars
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Reshape, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    MaximumScalar,
    Mul,
    MulScalar,
    Sqrt,
    Sub,
)
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalOr, Where
from relax_tune.ir.op.math.numeric import Abs, Modulo
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.reduce import Max, Min, Sum
from relax_tune.ir.op.reduction.scan import ArgMax

MLP_NORM = Norm(1e-6, "layer", bias=True)  # no field of a configuration changes it
ENOUGH = 3.0  # known steps of the patch that a series is scaled by
LOG2_E = 1.442695041  # of the scale of queries, in the digits of the model


def embed_series(e: AttentionBlocks, batch: Expr, steps: Expr, s: Series) -> GVar:
    """Emit the inputs, and the embeddings of the patches of series (b, patches, hidden).

    A number of steps that is no multiple of the patch is padded in front."""
    g, count, width = e.g, ceildiv(steps, s.patch), const(s.patch)
    e.dims = batch, count
    given = g.input("past_values", (batch, steps), f32)
    padding = g.call(Cast(f32), g.input("past_values_padding", (batch, steps), i64))
    frequency = g.input("freq", (batch, const(1)), i64)
    none, front = const(0), sub(mul(count, width), steps)

    def patches(x: GVar, filled: float, hint: str) -> GVar:
        padded = g.call(Pad((none, front), (none, none), value=filled), x)
        return g.call(Reshape((batch, count, width)), padded, hint=hint)

    zero, one = e.scalar("zero", 0.0), e.scalar("one", 1.0)
    x, padding = patches(given, 0.0, "steps"), patches(padding, 1.0, "padding")
    x = g.call(Where(), g.call(Equal(), padding, one), zero, x)
    # The usual mark has more digits than float32 holds.
    distance = g.call(Abs(), g.call(AddScalar(-float(np.float32(s.missing))), x))
    marked = g.call(Less(), distance, e.scalar("tolerance", s.tolerance), hint="missing")
    padding = g.call(Where(), marked, one, padding, hint="padding")
    known = _complement(e, padding)
    loc, scale = e.statistics = _statistics(e, x, known, s)
    x = g.call(Mul(), g.call(Div(), g.call(Sub(), x, loc), scale), known)
    x = residual_block(e, g.call(Concat(2), x, padding), "input_ff_layer", 2 * s.patch, e.stack.hidden)
    padded = g.call(Min((2,)), padding, hint="padded")
    e.present = g.call(ExpandDims((2,)), _complement(e, padded), hint="present")
    if s.timescales is not None:
        x = g.call(Add(), x, _positions(e, padded, s, s.timescales))
    x = g.call(Add(), x, g.call(Take(), e.weight("freq_emb.weight", s.frequencies, e.stack.hidden), frequency))
    e.hidden_bias = _bias(e, padded)
    return x


def _complement(e: AttentionBlocks, x: GVar) -> GVar:
    """Emit `1 - x`."""
    return e.g.call(AddScalar(1.0), e.g.call(MulScalar(-1.0), x))


def _statistics(e: AttentionBlocks, x: GVar, known: GVar, s: Series) -> tuple[GVar, GVar]:
    """Emit the mean and the standard deviation (b, 1, 1) of the first patch with enough known steps, or of the last patch."""
    g, count = e.g, e.dims[1]
    enough = g.call(LessEqual(), e.scalar("enough", ENOUGH), g.call(Sum((2,)), known))
    enough = g.call(Cast(i64), enough, hint="enough")
    any_enough = g.call(Equal(), g.call(Max((1,)), enough), e.scalar("yes", 1, np.int64))
    first = g.call(
        Where(), any_enough, g.call(ArgMax(1), enough), g.call(Scalars((sub(count, const(1)),))), hint="patch"
    )
    at = g.call(ExpandDims((0,)), g.call(Iota(count)))
    chosen = g.call(Cast(f32), g.call(Equal(), at, g.call(ExpandDims((1,)), first)), hint="chosen")
    known = g.call(Mul(), known, g.call(ExpandDims((2,)), chosen))

    def mean(y: GVar) -> GVar:
        return g.call(Div(), g.call(Sum((1, 2), True), y), number)

    number = g.call(MaximumScalar(1.0), g.call(Sum((1, 2), True), known))
    loc = mean(g.call(Mul(), x, known))
    centred = g.call(Mul(), g.call(Sub(), x, loc), known)
    deviation = g.call(Sqrt(), mean(g.call(Mul(), centred, centred)))
    return loc, g.call(MaximumScalar(s.tolerance), deviation, hint="scale")


def _positions(e: AttentionBlocks, padded: GVar, s: Series, timescales: tuple[float, float]) -> GVar:
    """Emit the sinusoids of patches (b, patches, hidden), counted from the first patch that is not `padded` (b, patches)."""
    g, count = e.g, e.dims[1]
    name, speeds = "position_emb.inv_timescales", e.stack.hidden // 2

    def table() -> NDArray[np.float32]:
        stored = e.parameters.has(name)
        speed = e.parameters.get(name, speeds) if stored else inverse_timescales(timescales, speeds)
        angles = np.arange(s.positions, dtype=np.float32)[:, None] * speed
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    whole = g.call(Cast(i64), g.call(Equal(), padded, e.scalar("zero", 0.0)))
    # The model counts from patch -1 if every patch is padded.
    first = g.call(AddScalar(-1), g.call(Add(), g.call(ArgMax(1), whole), g.call(Max((1,)), whole)), hint="first")
    at = g.call(Sub(), g.call(ExpandDims((0,)), g.call(Iota(count))), g.call(ExpandDims((1,)), first))
    place = g.call(Modulo(), at, g.call(Scalars((count,))), hint="place")
    return g.call(Take(), e.constant("patch_positions", table), place, hint="positions")


def inverse_timescales(timescales: tuple[float, float], count: int) -> NDArray[np.float32]:
    """Return `count` angles of a step: a geometric sequence by the shortest and the longest timescale."""
    shortest, longest = timescales
    increment = math.log(longest / shortest) / max(count - 1, 1)
    angles = np.exp(np.arange(count, dtype=np.float32) * np.float32(-increment))
    return np.asarray(np.float32(shortest) * angles, np.float32)


def _bias(e: AttentionBlocks, padded: GVar) -> GVar:
    """Emit the bias (b, 1, patches, patches) that hides later patches and padded ones.

    A row that sees no patch takes the mean of all, as the model does, which causal attention would not give."""
    g = e.g
    at = g.call(Iota(e.dims[1]))
    later = g.call(Less(), g.call(ExpandDims((1,)), at), g.call(ExpandDims((0,)), at), hint="later")
    hidden = g.call(ExpandDims((1, 2)), g.call(Equal(), padded, e.scalar("one", 1.0)))
    hidden = g.call(LogicalOr(), hidden, later, hint="hidden")
    return g.call(Where(), hidden, e.scalar("lowest", LOWEST), e.scalar("zero", 0.0), hint="bias")


def residual_block(
    e: AttentionBlocks, x: GVar, name: str, width: int, out: int, parameters: Parameters | None = None
) -> GVar:
    """Emit a feed-forward block with a linear layer in parallel. width: of x"""
    g, inner = e.g, e.stack.inner
    hidden = ACTIVATIONS["silu"](g, e.dense(x, f"{name}.input_layer", width, inner, parameters=parameters))
    y = e.dense(hidden, f"{name}.output_layer", inner, out, parameters=parameters)
    return g.call(Add(), y, e.dense(x, f"{name}.residual_layer", width, out, parameters=parameters))


def series_layer(e: AttentionBlocks, x: GVar, number: int) -> GVar:
    """Emit a layer: attention whose queries are scaled by dim, and a feed-forward block that leaves padding out."""
    g, s, path = e.g, e.stack, e.stack.layers[number].path
    normed = e.norm(x, f"{path}.{s.names.before_attention}")
    q, k, v = (e.heads(normed, number, part, s.width) for part in ("query", "key", "value"))
    q = g.call(Mul(), q, e.constant(e.parameters.full(f"{path}.self_attn.scaling"), lambda: _scaling(e, path)))
    operator = Attention(s.layers[number].scale, hides_rows=False)
    x = g.call(Add(), x, e.attended(operator, q, k, v, e.hidden_bias, f"{path}.{s.names.out}"))
    y = e.feed_forward(e.norm(x, f"{path}.{s.names.before_mlp}", norm=MLP_NORM), path)
    return g.call(Add(), g.call(Mul(), y, e.present), x)


def _scaling(e: AttentionBlocks, path: str) -> NDArray[np.float32]:
    """Read the factor of each dim of queries."""
    size = e.stack.size
    stored = e.parameters.get(f"{path}.self_attn.scaling", size)
    return np.logaddexp(np.float32(0), stored) * np.float32(LOG2_E / math.sqrt(size))


def forecast(e: AttentionBlocks, x: GVar) -> tuple[GVar, GVar]:
    """Emit the forecasts behind the last patch: the means (b, horizon), and (b, horizon, 1 + quantiles) with the quantiles."""
    s, (batch, count) = e.stack.embedding, e.dims
    assert isinstance(s, Series)
    g, horizon = e.g, const(s.horizon)
    last = g.call(Slice(1, sub(count, const(1)), count), x, hint="last")
    out = s.horizon * s.outputs
    y = residual_block(e, last, "horizon_ff_layer", e.stack.hidden, out, parameters=e.outside)
    y = g.call(Reshape((batch, horizon, const(s.outputs))), y)
    loc, scale = e.statistics
    full = g.call(Add(), g.call(Mul(), y, scale), loc, hint="full_predictions")
    mean = g.call(Slice(2, const(0), const(1)), full)
    return g.call(Reshape((batch, horizon)), mean, hint="mean_predictions"), full


def bare_series(e: AttentionBlocks, x: GVar) -> tuple[GVar, GVar, GVar]:
    """Return the last hidden state, and the mean and standard deviation (b,) that each series is scaled by."""
    loc, scale = (
        e.g.call(Reshape(e.dims[:1]), y, hint=name) for name, y in zip(("loc", "scale"), e.statistics, strict=True)
    )
    return x, loc, scale
