"""Embeddings of sound: convolutions over samples, then a projection and positions by convolution (Baevski et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.encoder_spec import Spectrogram, Waves
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import ExpandDims, Permute
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Mul, Sqrt, Sub
from relax_tune.ir.op.math.logic import Less
from relax_tune.ir.op.math.numeric import Quotient
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.reduce import LayerNorm, Mean, Sum

if TYPE_CHECKING:
    from relax_tune.ir.frontend.hf.encoder import Encoder

EPS = 1e-5  # of norms whose constant no field says


def embed_waves(e: Encoder, batch: Var, n: tuple[int, int | None], w: Waves) -> GVar:
    """Emit the inputs, and the embeddings of frames (b, frames, hidden)."""
    g = e.g
    samples = g.symbol("n", *n)
    x = g.call(ExpandDims((1,)), g.input("input_values", (batch, samples), f32))
    mask = g.input("attention_mask", (batch, samples), i64) if w.masked else None
    for k in range(len(w.widths)):
        x = _feature(e, x, w, k)
    x = g.call(Permute((0, 2, 1)), x, hint="features")
    e.dims = batch, _dims(x)[1]
    if w.projected_norm:
        x = e.norm(x, "feature_projection.layer_norm", w.widths[-1])
    x = e.linear(x, "feature_projection.projection", w.widths[-1], e.spec.hidden)
    if mask is not None:
        x = _hidden(e, x, mask, w)
    x = g.call(Add(), x, _positions(e, x, w))
    return e.norm(x, w.last_norm) if w.last_norm else x


def embed_spectrogram(e: Encoder, batch: Var, s: Spectrogram) -> GVar:
    """Emit the input and the embeddings of spectrograms (b, mels, 2 * positions): (b, positions, hidden)."""
    g, width = e.g, e.spec.hidden
    e.dims, e.longest = (batch, const(s.positions)), s.positions
    x, none, one = g.input("input_features", (batch, const(s.mels), const(2 * s.positions)), f32), const(0), const(1)
    for name, stride, channels in zip(s.convolutions, (1, 2), (s.mels, width), strict=True):
        padded = g.call(Pad((none, none, one), (none, none, one)), x)
        y = g.call(Conv((stride,), (1,)), padded, e.weight(f"{name}.weight", width, channels, 3))
        x = ACTIVATIONS["gelu"](
            g, g.call(Add(), y, _column(e, f"{name}.bias", e.weights.get(f"{name}.bias", (width,))))
        )
    x = g.call(Permute((0, 2, 1)), x)
    return g.call(Add(), x, e.weight(f"{s.table}.weight", s.positions, width), hint="embeddings")


def _dims(x: GVar) -> tuple[Expr, ...]:
    assert isinstance(x.info, TensorInfo) and x.info.shape is not None
    return x.info.shape


def _column(e: Encoder, name: str, array: NDArray[Any]) -> Any:
    """Return a weight (c,) that broadcasts along time, behind the channels."""
    return e.constant(name, lambda: np.ascontiguousarray(array.reshape(-1, 1), np.float32))


def _feature(e: Encoder, x: GVar, w: Waves, k: int) -> GVar:
    """Emit one convolution over samples, with its norm and activation."""
    g, path, out = e.g, f"feature_extractor.conv_layers.{k}", w.widths[k]
    kernel = e.weight(f"{path}.conv.weight", out, w.widths[k - 1] if k else 1, w.kernels[k])
    x = g.call(Conv((w.strides[k],), (1,)), x, kernel)
    if w.biased:
        x = g.call(Add(), x, _column(e, f"{path}.conv.bias", e.weights.get(f"{path}.conv.bias", (out,))))
    if w.norm == "layer":
        parts = (e.weight(f"{path}.layer_norm.{part}", out) for part in ("weight", "bias"))
        x = g.call(Permute((0, 2, 1)), g.call(LayerNorm(EPS), g.call(Permute((0, 2, 1)), x), *parts))
    elif k == 0:
        apart = g.call(Sub(), x, g.call(Mean((2,), True), x))
        var = g.call(Mean((2,), True), g.call(Mul(), apart, apart))
        x = g.call(Div(), apart, g.call(Sqrt(), g.call(AddScalar(EPS), var)))
        gamma, beta = (
            _column(e, f"{path}.layer_norm.{part}", e.weights.get(f"{path}.layer_norm.{part}", (out,)))
            for part in ("weight", "bias")
        )
        x = g.call(Add(), g.call(Mul(), x, gamma), beta)
    return ACTIVATIONS[w.activation](g, x)


def _hidden(e: Encoder, x: GVar, mask: GVar, w: Waves) -> GVar:
    """Zero the frames of padding, and hide them from attention."""
    g = e.g
    count = g.call(Sum((1,)), mask, hint="samples")
    for kernel, stride in zip(w.kernels, w.strides, strict=True):
        count = g.call(AddScalar(-kernel), count)
        if stride > 1:
            count = g.call(Quotient(), count, g.constant(g.fresh("stride"), np.asarray(stride, np.int64)))
        count = g.call(AddScalar(1), count)
    at = g.call(ExpandDims((0,)), g.call(Iota(e.dims[1]), hint="frame"))
    e.mask = g.call(Cast(i64), g.call(Less(), at, g.call(ExpandDims((1,)), count)), hint="frame_mask")
    visible = e.visible(e.mask)
    e.hidden_bias = e.mask_bias(visible)
    return g.call(Mul(), x, g.call(ExpandDims((2,)), visible))


def _positions(e: Encoder, x: GVar, w: Waves) -> GVar:
    """Emit the convolutions of positions: (b, frames, hidden)."""
    g, path, hidden = e.g, "encoder.pos_conv_embed", e.spec.hidden
    y = g.call(Permute((0, 2, 1)), x)
    if w.batch_norm:
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, var = (e.weights.get(f"{path}.batch_norm.{part}", (hidden,)) for part in parts)
        factor = gamma / np.sqrt(var + np.float32(EPS))
        y = g.call(Mul(), y, _column(e, f"{path}.factor", factor))
        y = g.call(Add(), y, _column(e, f"{path}.shift", beta - mean * factor))
    none = const(0)
    front, behind = const(w.reach // 2), const((w.reach - 1) // 2)
    for name in [f"{path}.conv"] if w.rounds is None else [f"{path}.layers.{k}.conv" for k in range(w.rounds)]:
        y = g.call(Pad((none, none, front), (none, none, behind)), y)
        kernel = e.constant(f"{name}.weight", lambda name=name: _kernel(e, name, w))  # type: ignore[misc]
        y = g.call(Conv((1,), (1,), w.groups), y, kernel)
        y = g.call(Add(), y, _column(e, f"{name}.bias", e.weights.get(f"{name}.bias", (hidden,))))
        if w.rounds is not None:
            ones, zeros = (e.constant(f"{path}.{n}", lambda n=n: np.full(hidden, n, np.float32)) for n in (1, 0))  # type: ignore[misc]
            y = g.call(Permute((0, 2, 1)), g.call(LayerNorm(EPS), g.call(Permute((0, 2, 1)), y), ones, zeros))
        y = ACTIVATIONS[w.activation](g, y)
    return g.call(Permute((0, 2, 1)), y, hint="positions")


def _kernel(e: Encoder, name: str, w: Waves) -> NDArray[Any]:
    """Read a kernel (hidden, hidden / groups, reach), in either form of weight norm (Salimans and Kingma 2016)."""
    hidden = e.spec.hidden
    shape = hidden, hidden // w.groups, w.reach
    if w.rounds is not None or w.batch_norm:
        return e.weights.get(f"{name}.weight", shape)
    old = e.weights.has(f"{name}.weight_g")
    forms = (
        ("weight_g", "weight_v") if old else ("parametrizations.weight.original0", "parametrizations.weight.original1")
    )
    size, direction = (
        e.weights.get(f"{name}.{form}", s) for form, s in zip(forms, ((1, 1, w.reach), shape), strict=True)
    )
    norm = np.sqrt(np.square(direction.astype(np.float64)).sum(axis=(0, 1), keepdims=True))
    return np.asarray(direction * size / norm, np.float32)
