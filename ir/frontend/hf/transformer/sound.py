"""Emission of embeddings of sound: convolutions over samples, a projection, convolutions of positions (Baevski et al. 2020).

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.embeddings import column
from relax_tune.ir.frontend.hf.transformer.inputs import Adapter, SoundSamples, Waves
from relax_tune.ir.frontend.hf.transformer.spec import Norm
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import ExpandDims, Permute, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Mul, MulScalar, Sigmoid, Sqrt, Sub, Tanh
from relax_tune.ir.op.math.logic import Less, NotEqual
from relax_tune.ir.op.math.numeric import Quotient
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.reduce import Mean, Sum

LAYER_NORM = Norm(1e-5, "layer", bias=True)  # of the convolutions; no field of a configuration changes it


def embed_samples(e: AttentionBlocks, batch: Expr, samples: Expr, s: SoundSamples) -> GVar:
    """Emit the inputs, and the embeddings of sound samples (b, frames, hidden)."""
    g, width = e.g, e.stack.hidden
    x = g.call(ExpandDims((1,)), g.input("input_values", (batch, samples), f32))
    mask = g.input("attention_mask", (batch, samples), i64)
    before = 1
    for k, (kernel, stride, out) in enumerate(zip(s.kernels, s.strides, (width, 2 * width, width), strict=True), 1):
        x = g.call(Conv((stride,), (1,)), x, e.weight(f"{s.path}conv{k}.weight", out, before, kernel))
        if k == 1:
            x = _normed_together(e, g.call(Tanh(), x), f"{s.path}groupnorm")
        else:
            x = ACTIVATIONS["gelu"](g, g.call(Add(), x, column(e, f"{s.path}conv{k}.bias", out)))
        before = out
    x = g.call(Permute((0, 2, 1)), x, hint="features")
    assert isinstance(x.info, TensorInfo) and x.info.shape is not None
    e.dims = batch, x.info.shape[1]
    first = g.call(MulScalar(math.prod(s.strides)), g.call(Iota(e.dims[1]), hint="first_sample"))
    e.mask = g.call(Permute((1, 0)), g.call(Take(), g.call(Permute((1, 0)), mask), first), hint="frame_mask")
    visible = g.call(NotEqual(), e.mask, e.scalar("hidden", 0, np.int64), hint="visible")
    e.visible = g.call(ExpandDims((1, 2)), visible)
    return x


def _normed_together(e: AttentionBlocks, x: GVar, name: str) -> GVar:
    """Normalise all elements of a row (b, width, frames) together, with a scale and a shift of each channel."""
    g, width = e.g, e.stack.hidden
    centred = g.call(Sub(), x, g.call(Mean((1, 2), True), x))
    variance = g.call(Mean((1, 2), True), g.call(Mul(), centred, centred))
    x = g.call(Div(), centred, g.call(Sqrt(), g.call(AddScalar(LAYER_NORM.eps), variance)))
    x = g.call(Mul(), x, column(e, f"{name}.weight", width))
    return g.call(Add(), x, column(e, f"{name}.bias", width))


def adapted(e: AttentionBlocks, x: GVar, a: Adapter) -> GVar:
    """Emit the convolutions behind the last layer: (b, shorter, width). The mask of frames is shortened too."""
    g, none, one = e.g, const(0), const(1)
    if a.projected:
        x = e.norm(e.dense(x, "adapter.proj", e.stack.hidden, a.width), "adapter.proj_layer_norm", a.width, LAYER_NORM)
    y = g.call(Permute((0, 2, 1)), x)
    for k in range(a.layers):
        name = f"adapter.layers.{k}.conv"
        y = g.call(Pad((none, none, one), (none, none, one)), y)
        y = g.call(Conv((a.stride,), (1,)), y, e.weight(f"{name}.weight", 2 * a.width, a.width, a.kernel))
        y = g.call(Add(), y, column(e, f"{name}.bias", 2 * a.width))
        value, gate = (g.call(Slice(1, const(j * a.width), const((j + 1) * a.width)), y) for j in (0, 1))
        y = g.call(Mul(), value, g.call(Sigmoid(), gate))
    y = g.call(Permute((0, 2, 1)), y, hint="adapted")
    assert isinstance(y.info, TensorInfo) and y.info.shape is not None
    e.dims = e.dims[0], y.info.shape[1]
    if e.frame_count is not None:
        e.mask = frame_mask(e, counted(e, e.frame_count, (1,) * a.layers, (a.stride,) * a.layers))
    return y


def embed_waves(e: AttentionBlocks, batch: Expr, samples: Expr, w: Waves) -> GVar:
    """Emit the inputs, and the embeddings of frames (b, frames, hidden)."""
    g = e.g
    x = g.call(ExpandDims((1,)), g.input("input_values", (batch, samples), f32))
    mask = g.input("attention_mask", (batch, samples), i64) if w.masked else None
    for k in range(len(w.widths)):
        x = _convolution(e, x, w, k)
    x = g.call(Permute((0, 2, 1)), x, hint="features")
    assert isinstance(x.info, TensorInfo) and x.info.shape is not None
    e.dims = batch, x.info.shape[1]
    if w.projected_norm:
        x = e.norm(x, "feature_projection.layer_norm", w.widths[-1])
    x = e.dense(x, "feature_projection.projection", w.widths[-1], e.stack.hidden)
    if mask is not None:
        x = _zero_padding(e, x, mask, w)
    x = g.call(Add(), x, _positions(e, x, w))
    return e.norm(x, w.last_norm) if w.last_norm else x


def _convolution(e: AttentionBlocks, x: GVar, w: Waves, k: int) -> GVar:
    """Emit one convolution over samples, with its norm and activation."""
    g, path, out = e.g, f"feature_extractor.conv_layers.{k}", w.widths[k]
    kernel = e.weight(f"{path}.conv.weight", out, w.widths[k - 1] if k else 1, w.kernels[k])
    x = g.call(Conv((w.strides[k],), (1,)), x, kernel)
    if w.biased:
        x = g.call(Add(), x, column(e, f"{path}.conv.bias", out))
    if w.norm == "layer":
        y = e.norm(g.call(Permute((0, 2, 1)), x), f"{path}.layer_norm", out, LAYER_NORM)
        x = g.call(Permute((0, 2, 1)), y)
    # Group normalisation with one channel for each group follows the first convolution only.
    elif k == 0:
        centred = g.call(Sub(), x, g.call(Mean((2,), True), x))
        variance = g.call(Mean((2,), True), g.call(Mul(), centred, centred))
        x = g.call(Div(), centred, g.call(Sqrt(), g.call(AddScalar(LAYER_NORM.eps), variance)))
        x = g.call(Mul(), x, column(e, f"{path}.layer_norm.weight", out))
        x = g.call(Add(), x, column(e, f"{path}.layer_norm.bias", out))
    return ACTIVATIONS[w.activation](g, x)


def _zero_padding(e: AttentionBlocks, x: GVar, mask: GVar, w: Waves) -> GVar:
    """Zero the frames of padding, and hide them from attention."""
    g = e.g
    e.frame_count = counted(e, g.call(Sum((1,)), mask, hint="samples"), w.kernels, w.strides)
    e.mask = frame_mask(e, e.frame_count)
    visible = g.call(Cast(f32), e.mask, hint="visible")
    e.hidden_bias = e.mask_bias(visible)
    return g.call(Mul(), x, g.call(ExpandDims((2,)), visible))


def counted(e: AttentionBlocks, count: GVar, kernels: tuple[int, ...], strides: tuple[int, ...]) -> GVar:
    """Emit how many elements convolutions leave of `count` (b,)."""
    g = e.g
    for kernel, stride in zip(kernels, strides, strict=True):
        # The lengths pass through the same convolutions as the samples: (n - kernel) // stride + 1.
        count = g.call(AddScalar(-kernel), count)
        if stride > 1:
            count = g.call(Quotient(), count, e.scalar(f"stride_{stride}", stride, np.int64))
        count = g.call(AddScalar(1), count)
    return count


def frame_mask(e: AttentionBlocks, count: GVar) -> GVar:
    """Emit a mask (b, frames) i64 of the first `count` (b,) frames."""
    g = e.g
    at = g.call(ExpandDims((0,)), g.call(Iota(e.dims[1]), hint="frame"))
    return g.call(Cast(i64), g.call(Less(), at, g.call(ExpandDims((1,)), count)), hint="frame_mask")


def _positions(e: AttentionBlocks, x: GVar, w: Waves) -> GVar:
    """Emit the convolutions of positions: (b, frames, hidden)."""
    g, path, hidden = e.g, "encoder.pos_conv_embed", e.stack.hidden
    y = g.call(Permute((0, 2, 1)), x)
    if w.batch_norm:
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, var = (e.parameters.get(f"{path}.batch_norm.{part}", hidden) for part in parts)
        # Stands before the padding, whose zeros the normalisation must not move, so it cannot be folded into the
        # kernel.
        factor = gamma / np.sqrt(var + np.float32(LAYER_NORM.eps))
        y = g.call(Mul(), y, e.constant(f"{path}.factor", lambda: factor.reshape(-1, 1)))
        y = g.call(Add(), y, e.constant(f"{path}.shift", lambda: (beta - mean * factor).reshape(-1, 1)))
    none = const(0)
    # As many frames as before, also for an even kernel, whose last result is dropped.
    front, end = const(w.reach // 2), const((w.reach - 1) // 2)
    for name in [f"{path}.conv"] if w.rounds is None else [f"{path}.layers.{k}.conv" for k in range(w.rounds)]:
        y = g.call(Pad((none, none, front), (none, none, end)), y)
        kernel = e.constant(f"{name}.weight", lambda name=name: _kernel(e, name, w))  # type: ignore[misc]
        y = g.call(Conv((1,), (1,), w.groups), y, kernel)
        y = g.call(Add(), y, column(e, f"{name}.bias", hidden))
        if w.rounds is not None:
            y = e.norm(g.call(Permute((0, 2, 1)), y), "", norm=Norm(LAYER_NORM.eps, "layer", weight=False))
            y = g.call(Permute((0, 2, 1)), y)
        y = ACTIVATIONS[w.activation](g, y)
    return g.call(Permute((0, 2, 1)), y, hint="positions")


def _kernel(e: AttentionBlocks, name: str, w: Waves) -> NDArray[Any]:
    """Read a kernel (hidden, hidden / groups, reach), in either stored form of weight normalisation (Salimans and Kingma 2016)."""
    hidden, p = e.stack.hidden, e.parameters
    shape = hidden, hidden // w.groups, w.reach
    if w.rounds is not None or w.batch_norm:
        return p.get(f"{name}.weight", *shape)
    newer = "parametrizations.weight.original0", "parametrizations.weight.original1"
    size_name, direction_name = ("weight_g", "weight_v") if p.has(f"{name}.weight_g") else newer
    size, direction = p.get(f"{name}.{size_name}", 1, 1, w.reach), p.get(f"{name}.{direction_name}", *shape)
    norm = np.sqrt(np.square(direction.astype(np.float64)).sum(axis=(0, 1), keepdims=True))
    return np.asarray(direction * size / norm, np.float32)
