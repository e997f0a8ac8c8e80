"""Emission of Conformer layers (Gulati et al. 2020) on subsampled spectrograms (Rekesh et al. 2023, Fast Conformer).

A layer is half a feed-forward block, attention with relative positions (Dai et al. 2019, section 3.3), a convolution over time,
and another half.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.embeddings import column
from relax_tune.ir.frontend.hf.transformer.inputs import Subsampling
from relax_tune.ir.frontend.hf.transformer.mixers import Conformer
from relax_tune.ir.frontend.hf.transformer.sound import counted, frame_mask
from relax_tune.ir.op.indexing.movement import ExpandDims, Permute, Reshape, Slice
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, Cast, Mul, MulScalar, Relu, Sigmoid
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum

EPS = 1e-5  # of the batch normalisation; no field of a configuration changes it


def embed_mels(e: AttentionBlocks, batch: Expr, frames: Expr, s: Subsampling) -> GVar:
    """Emit the inputs, and the embeddings of spectrograms by strided convolutions (b, shorter, hidden)."""
    g, none, edge = e.g, const(0), const(s.kernel // 2)
    x = g.call(ExpandDims((1,)), g.input("input_features", (batch, frames, const(s.mels)), f32))
    mask = g.input("attention_mask", (batch, frames), i64)
    e.frame_count = g.call(Sum((1,)), mask, hint="frames")

    def masked(x: GVar, name: str) -> GVar:
        """Add the bias of a convolution, and zero the frames of padding."""
        make = lambda: e.parameters.get(f"{name}.bias", s.channels).reshape(-1, 1, 1)
        stored = e.constant(f"{e.parameters.full(name)}.bias", make)
        visible = g.call(ExpandDims((1, 3)), g.call(Cast(f32), e.mask))
        return g.call(Mul(), g.call(Add(), x, stored), visible)

    for k in range(s.rounds):
        place = 3 * k - 1 if k else 0  # activations count as layers
        name, groups = f"subsampling.layers.{place}", s.channels if k else 1
        padded = g.call(Pad((none, none, edge, edge), (none, none, edge, edge)), x)
        kernel = e.weight(f"{name}.weight", s.channels, 1, s.kernel, s.kernel)
        x = g.call(Conv((s.stride, s.stride), (1, 1), groups), padded, kernel)
        assert isinstance(x.info, TensorInfo) and x.info.shape is not None
        e.dims = batch, x.info.shape[2]
        e.frame_count = counted(e, e.frame_count, (s.kernel - 2 * (s.kernel // 2),), (s.stride,))
        e.mask = frame_mask(e, e.frame_count)
        x = masked(x, name)
        if k:
            name = f"subsampling.layers.{place + 1}"
            kernel = e.weight(f"{name}.weight", s.channels, s.channels, 1, 1)
            x = masked(g.call(Conv((1, 1), (1, 1)), x, kernel), name)
        x = g.call(Relu(), x)
    width = s.channels * s.columns
    x = g.call(Reshape((*e.dims, const(width))), g.call(Permute((0, 2, 1, 3)), x), hint="features")
    e.hidden_bias = e.mask_bias(g.call(Cast(f32), e.mask, hint="visible"))
    return e.scaled(e.dense(x, "subsampling.linear", width, e.stack.hidden), s.scale)


def conformer_layer(e: AttentionBlocks, x: GVar, number: int, c: Conformer) -> GVar:
    """Emit a layer."""
    g, path = e.g, e.stack.layers[number].path

    def half(x: GVar, which: int) -> GVar:
        y = e.norm(x, f"{path}.norm_feed_forward{which}")
        return g.call(Add(), x, g.call(MulScalar(0.5), e.feed_forward(y, f"{path}.feed_forward{which}")))

    x = half(x, 1)
    x = g.call(Add(), x, _attention(e, e.norm(x, f"{path}.norm_self_att"), number))
    x = g.call(Add(), x, _convolution(e, e.norm(x, f"{path}.norm_conv"), f"{path}.conv", c))
    return e.norm(half(x, 2), f"{path}.norm_out")


def relative_sinusoids(positions: int, width: int) -> NDArray[np.float32]:
    """Return sines and cosines in turn of the distances `positions - 1` to `1 - positions`."""
    speed = 1 / np.float32(10000) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angles = np.arange(positions - 1, -positions, -1, dtype=np.float32)[:, None] * speed
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(2 * positions - 1, width).astype(np.float32)


def _attention(e: AttentionBlocks, x: GVar, number: int) -> GVar:
    """Emit attention whose scores add the product of queries with projected distances."""
    g, s, (batch, length) = e.g, e.stack, e.dims
    layer, heads, size = s.layers[number], const(s.heads), const(s.size)
    q, k, v = (e.heads(x, number, part, s.hidden) for part in ("query", "key", "value"))

    def shifted(name: str) -> GVar:
        full = f"{layer.path}.self_attn.{name}"
        make = lambda: e.parameters.get(full, s.heads, s.size).reshape(s.heads, 1, s.size)
        return g.call(Add(), q, e.constant(e.parameters.full(full), make), hint=name)

    rows = e.constant("distances", lambda: relative_sinusoids(e.positions, s.hidden))
    near = g.call(Slice(0, e.positions - length, e.positions + length - 1), rows, hint="distances")
    near = e.dense(near, f"{layer.path}.self_attn.relative_k_proj", s.hidden, s.heads * s.size, False)
    near = g.call(Permute((1, 2, 0)), g.call(Reshape((2 * length - 1, heads, size)), near))
    scores = g.call(Matmul(), shifted("bias_v"), near, hint="by_distance")
    # a row of zeros in front of each row moves the columns of row i by i
    scores = g.call(Pad((const(0),) * 3 + (const(1),), (const(0),) * 4), scores)
    scores = g.call(Slice(2, const(1), 2 * length), g.call(Reshape((batch, heads, 2 * length, length)), scores))
    scores = g.call(Reshape((batch, heads, length, 2 * length - 1)), scores)
    scores = g.call(MulScalar(layer.scale), g.call(Slice(3, const(0), length), scores), hint="by_position")
    assert e.hidden_bias is not None
    bias = g.call(Add(), scores, e.hidden_bias)
    operator = Attention(layer.scale, hides_rows=False)
    return e.attended(operator, shifted("bias_u"), k, v, bias, f"{layer.path}.{s.names.out}")


def _convolution(e: AttentionBlocks, x: GVar, path: str, c: Conformer) -> GVar:
    """Emit a gated convolution over time, one for each channel, of frames that are no padding."""
    g, width, none, edge = e.g, e.stack.hidden, const(0), const((c.kernel - 1) // 2)

    def pointwise(x: GVar, name: str, out: int) -> GVar:
        full = e.parameters.full(f"{path}.{name}")
        make = lambda: np.ascontiguousarray(e.parameters.get(f"{path}.{name}.weight", out, width, 1)[:, :, 0].T)
        y = g.call(Matmul(), x, e.constant(f"{full}.weight", make))
        return g.call(Add(), y, e.weight(f"{path}.{name}.bias", out)) if c.biased else y

    both = pointwise(x, "pointwise_conv1", 2 * width)
    value, gate = (g.call(Slice(2, const(k * width), const((k + 1) * width)), both) for k in (0, 1))
    y = g.call(
        Mul(), g.call(Mul(), value, g.call(Sigmoid(), gate)), g.call(ExpandDims((2,)), g.call(Cast(f32), e.mask))
    )
    y = g.call(Pad((none, none, edge), (none, none, edge)), g.call(Permute((0, 2, 1)), y))
    y = g.call(Conv((1,), (1,), width), y, e.weight(f"{path}.depthwise_conv.weight", width, 1, c.kernel))
    if c.biased:
        y = g.call(Add(), y, column(e, f"{path}.depthwise_conv.bias", width))
    parts = ("weight", "bias", "running_mean", "running_var")
    gamma, beta, mean, var = (e.parameters.get(f"{path}.norm.{part}", width) for part in parts)
    factor = (gamma / np.sqrt(var + np.float32(EPS))).reshape(-1, 1)
    shift = beta.reshape(-1, 1) - mean.reshape(-1, 1) * factor
    full = e.parameters.full(f"{path}.norm")
    y = g.call(Mul(), y, e.constant(f"{full}.factor", lambda: factor))
    y = e.activation(g.call(Add(), y, e.constant(f"{full}.shift", lambda: shift)))
    return pointwise(g.call(Permute((0, 2, 1)), y), "pointwise_conv2", width)
