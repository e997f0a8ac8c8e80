"""Embeddings of images of one size: patches, and the vectors before them (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.encoder_spec import Patches
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.ir.op.neural.window import Conv

if TYPE_CHECKING:
    from relax_tune.ir.frontend.hf.encoder import Encoder


def embed_patches(e: Encoder, batch: Var, p: Patches) -> GVar:
    """Emit the input and embeddings of images: tokens, registers, then patches row by row."""
    g, width = e.g, e.spec.hidden
    e.dims = batch, const(p.positions)
    e.longest = p.positions
    if p.spectrogram:
        sound = g.input("input_values", (batch, *map(const, reversed(p.size))), f32)
        pixels = g.call(ExpandDims((1,)), g.call(Permute((0, 2, 1)), sound))
    else:
        pixels = g.input("pixel_values", (batch, const(p.channels), *map(const, p.size)), f32)
    kernel = e.weight(f"{p.projection}.weight", width, p.channels, *p.patch)
    x = g.call(Conv(p.stride or p.patch, (1, 1)), pixels, kernel, hint="patches")
    count, lead, front = p.positions - p.leading, len(p.tokens), () if p.flat else (1,)
    if p.biased:
        bias = e.weights.get(f"{p.projection}.bias", (width,)).reshape(width, 1, 1)
        x = g.call(Add(), x, g.constant(f"{p.projection}.bias", bias))
    x = g.call(Permute((0, 2, 1)), g.call(Reshape((batch, const(width), const(count))), x), hint="patches")
    table = np.zeros((1, lead + count, width), np.float32)
    if p.table:
        table = e.weights.get(p.table, (*front, lead + count, width)).reshape(1, -1, width)
        x = g.call(Add(), x, g.constant("patch_positions", table[:, lead:]))
    if p.leading:
        ones = () if p.flat else (1, 1)
        rows = [e.weights.get(name, (*ones, width)).reshape(1, 1, width) for name in p.tokens]
        first = np.concatenate(rows, 1) + table[:, :lead]
        if p.registers:
            first = np.concatenate([first, e.weights.get(p.registers, (1, p.registers_count, width))], 1)
        shape = (batch, const(p.leading), const(width))
        x = g.call(Concat(1), g.call(BroadcastTo(shape), g.constant("tokens", first)), x, hint="embeddings")
    return e.norm(x, p.norm) if p.norm else x
