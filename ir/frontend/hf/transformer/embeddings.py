"""Emission of the embeddings of text, of patches of images and of spectrograms.

Tests: `tests/ir/frontend/hf/families/test_encoders.py`, `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, add, const
from relax_tune.ir.core.graph import Constant, GVar, Value
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.inputs import Patches, PatchRows, Spectrogram
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Relu,
    Sub,
)
from relax_tune.ir.op.math.logic import Less, NotEqual
from relax_tune.ir.op.math.numeric import Abs, Quotient
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.op.reduction.scan import CumSum


def token_table(e: AttentionBlocks) -> Constant:
    """Return the table of token embeddings: the first of the alternative names that the file has."""
    w, known = e.stack.words, e.stack.names.words.split("|")
    name = next((n for n in known if e.parameters.has(f"{n}.weight")), known[0])
    return e.weight(f"{name}.weight", w.vocabulary, w.width)


def embed_words(e: AttentionBlocks, ids: GVar, types: GVar | None = None, boxes: GVar | None = None) -> GVar:
    """Emit the embeddings of tokens (b, n), of their types (None: all are 0), positions and boxes (b, n, 4): (b, n, hidden)."""
    g, w, names, length = e.g, e.stack.words, e.stack.names, e.dims[1]
    x = g.call(Take(), token_table(e), ids, hint="embedding")
    if w.dropped is not None:
        x = _drop(e, x, ids, w.dropped)
    if w.scale != 1:
        x = g.call(MulScalar(float(np.float32(w.scale))), x)
    width = w.width
    # Each token sees the embeddings of its two neighbours as well (MobileBERT), zeros beyond the ends.
    if w.trigram:
        none, one = const(0), const(1)
        wide = g.call(Pad((none, one, none), (none, one, none)), x)
        after, before = (g.call(Slice(1, k, add(k, length)), wide) for k in (const(2), none))
        x, width = g.call(Concat(2), after, x, before), 3 * width
    if names.words_norm and w.norm_first:
        x = e.norm(x, names.words_norm, width)
    if names.project and w.project_first:
        x, width = e.dense(x, names.project, width, e.stack.hidden, w.project_biased), e.stack.hidden
    if w.token_types:
        table = f"{names.types}.weight"
        if types is not None:
            x = g.call(Add(), x, g.call(Take(), e.weight(table, w.token_types, width), types))
        else:
            # Without the input every type is 0, so the table's first row is added as a constant.
            row = lambda: e.parameters.get(table, w.token_types, width)[0]
            x = g.call(Add(), x, e.constant(f"{e.parameters.full(names.types)}.type_0", row))
    if names.positions is not None:
        x = g.call(Add(), x, _positions(e, names.positions, width, ids))
    if boxes is not None:
        x = _boxed(e, x, boxes, width)
    if names.words_norm and not w.norm_first:
        x = e.norm(x, names.words_norm, width)
    if names.project and not w.project_first:
        x = e.dense(x, names.project, width, e.stack.hidden, w.project_biased)
    return x


def _boxed(e: AttentionBlocks, x: GVar, boxes: GVar, width: int) -> GVar:
    """Add the embeddings of boxes: of left, upper, right and lower side, height and width (Xu et al. 2020, LayoutLM)."""
    g, rows = e.g, e.stack.words.boxes
    left, upper, right, lower = (
        g.call(Reshape(e.dims), g.call(Slice(2, const(k), const(k + 1)), boxes), hint="side") for k in range(4)
    )
    sides = (("x", left), ("y", upper), ("x", right), ("y", lower))
    height, breadth = g.call(Sub(), lower, upper), g.call(Sub(), right, left)
    page = e.stack.words.page
    if page is not None:
        most = e.scalar("largest_side", 1023, np.int64)  # not a field of configurations
        height, breadth = (g.call(Minimum(), g.call(MaximumScalar(0), y), most) for y in (height, breadth))
    sizes = (("h", height), ("w", breadth))
    if page is not None:
        widths = (page.coordinate,) * 4 + (page.shape,) * 2
        parts = [
            g.call(Take(), e.weight(f"embeddings.{name}_position_embeddings.weight", rows, part), at)
            for (name, at), part in zip((*sides, *sizes), widths, strict=True)
        ]
        return g.call(Add(), x, g.call(Concat(2), *parts, hint="box"))
    for name, at in (*sides, *sizes):
        table = e.weight(f"embeddings.{name}_position_embeddings.weight", rows, width)
        x = g.call(Add(), x, g.call(Take(), table, at))
    return x


def _drop(e: AttentionBlocks, x: GVar, ids: GVar, dropped: int) -> GVar:
    """Zero the embeddings of one token, and scale the others to the share that remained in training (ESM's token dropout)."""
    g = e.g
    other = g.call(Cast(f32), g.call(NotEqual(), ids, e.scalar("dropped", dropped, np.int64)))
    length = g.call(Cast(f32), g.call(Sum((1,)), e.mask))
    gone = g.call(Sum((1,)), g.call(AddScalar(1.0), g.call(MulScalar(-1.0), other)))
    share = g.call(AddScalar(1.0), g.call(MulScalar(-1.0), g.call(Div(), gone, length)))
    # training masked 15 % of the tokens, and replaced 80 % of these by the mask token
    factor = g.call(Div(), e.scalar("share_of_training", 1 - 0.15 * 0.8), share)
    factors = g.call(Mul(), other, g.call(ExpandDims((1,)), factor))
    return g.call(Mul(), x, g.call(ExpandDims((2,)), factors), hint="scaled")


def _positions(e: AttentionBlocks, name: str, width: int, ids: GVar) -> Value:
    """Emit the position embeddings of `n` tokens after `past` ones."""
    g, past, w, length = e.g, e.past, e.stack.words, e.dims[1]
    full, computes = f"{name}.weight", w.sinusoids

    def table() -> NDArray[Any]:
        if computes is not None and not e.parameters.has(full):
            return computes(w.rows, width)
        return e.parameters.get(full, w.rows, width)

    rows, padding = e.constant(e.parameters.full(full), table), w.padding
    if e.paged is not None:
        at = e.paged.positions
        at = at if not w.first else g.call(AddScalar(w.first), at, hint="positions")
        return g.call(Take(), rows, at, hint="positions")
    if padding is None:
        start = add(past, const(w.first))
        return g.call(Slice(0, start, add(start, length)), rows, hint="positions")
    # positions count the tokens that are not padding; padding takes its own row
    other = g.call(Cast(i64), g.call(NotEqual(), ids, e.scalar("padding", padding, np.int64)))
    count = g.call(CumSum(1), other)
    # Cached tokens count, too; they are taken to be no padding.
    if past is not const(0):
        before = g.call(Slice(0, past, add(past, const(1))), g.call(Iota(add(past, const(1)))), hint="before")
        count = g.call(Add(), count, before)
    return g.call(Take(), rows, g.call(AddScalar(padding), g.call(Mul(), count, other), hint="positions"))


def embed_patches(e: AttentionBlocks, batch: Expr, p: Patches) -> GVar:
    """Emit the input and embeddings of images: tokens, registers, then patches row by row (Dosovitskiy et al. 2021)."""
    g, width, get = e.g, e.stack.hidden, e.parameters.get
    e.dims, e.positions = (batch, const(p.positions)), p.positions
    if p.spectrogram:
        sound = g.input("input_values", (batch, *map(const, reversed(p.size))), f32)
        pixels = g.call(ExpandDims((1,)), g.call(Permute((0, 2, 1)), sound))
    else:
        pixels = g.input("pixel_values", (batch, const(p.channels), *map(const, p.size)), f32)
    kernel = e.weight(f"{p.projection}.weight", width, p.channels, *p.patch)
    x = g.call(Conv(p.stride or p.patch, (1, 1)), pixels, kernel, hint="patches")
    if p.biased:
        bias = lambda: get(f"{p.projection}.bias", width).reshape(width, 1, 1)
        x = g.call(Add(), x, e.constant(f"{p.projection}.bias", bias))
    count, lead = p.positions - p.leading, len(p.tokens)
    x = g.call(Permute((0, 2, 1)), g.call(Reshape((batch, const(width), const(count))), x), hint="patches")
    table = np.zeros((1, lead + count, width), np.float32)
    if p.table:
        table = get(p.table, *(() if p.flat else (1,)), lead + count, width).reshape(1, -1, width)
        x = g.call(Add(), x, e.constant("patch_positions", lambda: table[:, lead:]))
    if p.leading:
        ones = () if p.flat else (1, 1)
        # The positions of tokens are added at import; registers have none.
        first = np.concatenate([get(name, *ones, width).reshape(1, 1, width) for name in p.tokens], 1) + table[:, :lead]
        if p.registers:
            first = np.concatenate([first, get(p.registers, 1, p.registers_count, width)], 1)
        shape = (batch, const(p.leading), const(width))
        tokens = g.call(BroadcastTo(shape), e.constant("tokens", lambda: first))
        x = g.call(Concat(1), tokens, x, hint="embeddings")
    return e.norm(x, p.norm) if p.norm else x


def embed_patch_rows(e: AttentionBlocks, batch: Expr, count: Expr, p: PatchRows) -> GVar:
    """Emit the inputs and embeddings of flattened patches: (b, patches, hidden).

    The position table is resized to each image's rows and columns with antialiasing: sums of rows of the table, weighted by
    triangles around the place of a patch. A patch of padding has the position of the first."""
    g, width = e.g, e.stack.hidden
    e.dims = batch, count
    pixels = g.input("pixel_values", (batch, count, const(p.values)), f32)
    e.mask = g.input("pixel_attention_mask", (batch, count), i64)
    shapes = g.input("spatial_shapes", (batch, const(2)), i64)
    visible = g.call(NotEqual(), e.mask, e.scalar("hidden", 0, np.int64), hint="visible")
    e.visible = g.call(ExpandDims((1, 2)), visible)
    rows, columns = (g.call(Slice(1, const(k), const(k + 1)), shapes) for k in (0, 1))
    at = g.call(ExpandDims((0,)), g.call(Iota(count)))
    inside = g.call(Cast(f32), g.call(Less(), at, g.call(Mul(), rows, columns)), hint="inside")
    row = g.call(Quotient(), at, columns)
    column_of = g.call(Sub(), at, g.call(Mul(), row, columns))
    source = e.constant("table_places", lambda: np.arange(p.side, dtype=np.float32))

    def weights(index: GVar, size: GVar) -> GVar:
        """Emit the weights (b, patches, side) of the rows, or the columns, of the table."""
        scale = g.call(Div(), e.scalar("side", p.side), g.call(Cast(f32), size))
        place = g.call(Mul(), g.call(Cast(f32), index), inside)
        center = g.call(AddScalar(-0.5), g.call(Mul(), g.call(AddScalar(0.5), place), scale))
        distance = g.call(Abs(), g.call(Sub(), g.call(ExpandDims((2,)), center), source))
        # When the grid is smaller than the table, the triangle of weights widens by the scale (antialiasing, as the
        # model's own resize does it); when it is larger, plain interpolation remains.
        reach = g.call(ExpandDims((2,)), g.call(MaximumScalar(1.0), scale))
        y = g.call(Relu(), g.call(AddScalar(1.0), g.call(MulScalar(-1.0), g.call(Div(), distance, reach))))
        # At the borders part of the triangle lies outside, so the weights are divided by their sum.
        return g.call(Div(), y, g.call(Sum((2,), True), y))

    by_row, by_column = (
        g.call(ExpandDims((3,)), weights(row, rows)),
        g.call(ExpandDims((2,)), weights(column_of, columns)),
    )
    both = g.call(Reshape((batch, count, const(p.positions))), g.call(Mul(), by_row, by_column))
    positions = g.call(Matmul(), both, e.weight(p.table, p.positions, width), hint="positions")
    return g.call(Add(), e.dense(pixels, p.projection, p.values, width), positions, hint="embeddings")


def embed_spectrogram(e: AttentionBlocks, batch: Expr, s: Spectrogram) -> GVar:
    """Emit the input and embeddings of spectrograms (b, mels, 2 * positions): (b, positions, hidden)."""
    g, width = e.g, e.stack.hidden
    e.dims, e.positions = (batch, const(s.positions)), s.positions
    x, none, one = g.input("input_features", (batch, const(s.mels), const(2 * s.positions)), f32), const(0), const(1)
    for name, stride, channels in zip(s.convolutions, (1, 2), (s.mels, width), strict=True):
        padded = g.call(Pad((none, none, one), (none, none, one)), x)
        y = g.call(Conv((stride,), (1,)), padded, e.weight(f"{name}.weight", width, channels, 3))
        x = ACTIVATIONS["gelu"](g, g.call(Add(), y, column(e, f"{name}.bias", width)))
    x = g.call(Permute((0, 2, 1)), x)
    return g.call(Add(), x, e.weight(f"{s.table}.weight", s.positions, width), hint="embeddings")


def column(e: AttentionBlocks, name: str, width: int) -> Constant:
    """Return a weight (width,) that broadcasts along time, after the channels."""
    return e.constant(f"{e.parameters.full(name)}.column", lambda: e.parameters.get(name, width).reshape(-1, 1))
