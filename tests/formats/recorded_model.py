"""The model of the frozen database of schema 2: its tasks have sketches and primitives whose stored names changed."""

from __future__ import annotations

import numpy as np

import relax_tune as rt
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Exp, Gelu
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean, Softmax


def model() -> rt.IRModule:
    """A product, an attention, a softmax, a mean over rows, a transposition and a convolution; `n` rows, 1 <= n <= 96."""
    rng = np.random.default_rng(2)
    g = rt.GraphBuilder()
    n = g.symbol("n", 1, 96)
    x, heads = g.input("x", (n, 64)), g.input("heads", (2, n, 16))
    image = g.input("image", (1, 4, 12, 12))
    weights = g.constant("weights", rng.standard_normal((64, 128), np.float32) / 8)
    taps = g.constant("taps", rng.standard_normal((8, 4, 3, 3), np.float32) / 6)
    found = (
        g.call(Gelu(), g.call(Matmul(), x, weights)),
        g.call(Attention(0.25), heads, heads, heads),
        g.call(Softmax(), x),
        g.call(Mean((0,)), x),
        g.call(Exp(), g.call(Permute((1, 0)), x)),
        g.call(Conv((1, 1), (1, 1)), image, taps),
    )
    return g.finish(found)
