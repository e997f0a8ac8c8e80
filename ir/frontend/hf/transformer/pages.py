"""Emission of models of pages: the patches of a page's image behind its words, and biases of attention by their places.

Tests: `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.biases import distance_bucket
from relax_tune.ir.frontend.hf.transformer.embeddings import embed_patches
from relax_tune.ir.frontend.hf.transformer.inputs import PageImage
from relax_tune.ir.frontend.hf.transformer.spec import Norm
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, AddScalar, MaximumScalar, Minimum, Sub
from relax_tune.ir.op.math.logic import NotEqual

WIDEST = 1000  # coordinates of a box are thousandths of a page


def with_image(e: AttentionBlocks, x: GVar, boxes: GVar, page: PageImage) -> GVar:
    """Emit words (b, n, hidden) and the vectors of a page's image behind them, normalised together.

    The mask, and the biases by place, then cover both."""
    g, (batch, length), p = e.g, e.dims, page.patches
    count = const(p.positions)
    image = e.norm(embed_patches(e, batch, p), "norm", norm=Norm(1e-6, "layer", bias=True))
    shown = e.constant("shown", lambda: np.ones((1, p.positions), np.int64))
    e.mask = g.call(Concat(1), e.mask, g.call(BroadcastTo((batch, count)), shown), hint="mask")
    visible = g.call(NotEqual(), e.mask, e.scalar("hidden", 0, np.int64), hint="visible")
    e.visible = g.call(ExpandDims((1, 2)), visible)
    places = g.call(Iota(length), hint="places")
    places = g.call(Concat(0), places, e.constant("patch_places", lambda: np.arange(p.positions)))
    sides = e.constant("patch_boxes", lambda: patch_boxes(*p.grid)[None])
    boxes = g.call(Concat(1), boxes, g.call(BroadcastTo((batch, count, const(4))), sides), hint="boxes")
    e.dims = batch, length + p.positions
    e.place_bias = _place_bias(e, places, boxes, page)
    return e.norm(g.call(Concat(1), x, image, hint="page"), "LayerNorm")


def patch_boxes(rows: int, columns: int) -> NDArray[np.int64]:
    """Return the boxes (left, upper, right, lower) of an image's token and of its patches, (1 + patches, 4)."""
    x, y = (np.arange(0, WIDEST * (count + 1), WIDEST) // count for count in (columns, rows))
    left, upper = (grid.ravel() for grid in np.meshgrid(x[:-1], y[:-1]))
    right, lower = (grid.ravel() for grid in np.meshgrid(x[1:], y[1:]))
    whole = [[1, 1, WIDEST - 1, WIDEST - 1]]
    return np.concatenate([whole, np.stack([left, upper, right, lower], axis=1)]).astype(np.int64)


def _place_bias(e: AttentionBlocks, places: GVar, boxes: GVar, page: PageImage) -> GVar | None:
    """Emit the bias by distances of places, of left and of lower sides: (b or 1, heads, n, n)."""
    g, s, (batch, length) = e.g, e.stack, e.dims
    if page.order is None:
        return None

    def looked_up(at: GVar, name: str, buckets: tuple[int, int], rows: Expr) -> GVar:
        count, furthest = buckets
        reach = np.arange(-furthest, furthest + 1)

        def table() -> NDArray[np.float32]:
            stored = e.parameters.get(f"encoder.{name}.weight", s.heads, count)
            scaled = stored[:, distance_bucket(reach, count, furthest)].T / np.float32(np.sqrt(s.size))
            return np.ascontiguousarray(scaled)

        distance = g.call(Sub(), g.call(ExpandDims((1,)), at), g.call(ExpandDims((2,)), at), hint="distance")
        row = g.call(MaximumScalar(0), g.call(AddScalar(furthest), distance))
        row = g.call(Minimum(), row, e.scalar(f"last_{name}", 2 * furthest, np.int64))
        bias = g.call(Take(), e.constant(f"encoder.{name}.by_distance", table), row)
        return g.call(Permute((0, 3, 1, 2)), bias, hint=name)

    bias = looked_up(g.call(ExpandDims((0,)), places), "rel_pos_bias", page.order, const(1))
    if page.space is None:
        return bias
    for side, name in ((0, "rel_pos_x_bias"), (3, "rel_pos_y_bias")):
        at = g.call(Reshape((batch, length)), g.call(Slice(2, const(side), const(side + 1)), boxes))
        bias = g.call(Add(), bias, looked_up(at, name, page.space, batch))
    return bias
