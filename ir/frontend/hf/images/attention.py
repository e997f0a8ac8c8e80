"""Layers of attention between the positions of an image: with fewer keys, and in windows.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Expr, as_int, const, mul
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.images.layers import (
    ChannelNorm,
    Convolution,
    ImageEmitter,
    ImageLayer,
    ImageValue,
    PointwiseLinear,
    padded,
)
from relax_tune.ir.frontend.hf.transformer.biases import grid_distance
from relax_tune.ir.op.indexing.movement import Concat, Permute, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.ir.op.neural.attention import Attention

HIDDEN = -100.0  # bias between positions that only the roll of the image brings together, as in transformers


@dataclass(frozen=True, slots=True)
class ReducedAttention(ImageLayer):
    """Attention with the keys and values of a smaller image (Wang et al. 2021, PVT; Xie et al. 2021, SegFormer).

    Attributes:
        path: of the layer's weights
        ratio: of the sizes
    """

    path: str
    heads: int
    ratio: int

    def size(self, n: int) -> int:
        return n if n >= self.ratio else 0

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        width, near = x.channels, x
        path = f"{self.path}.self"
        if self.ratio > 1:
            near = Convolution(f"{path}.sr", width, self.ratio, self.ratio, biased=True).emit(e, x)
            near = ChannelNorm(f"{path}.layer_norm", 1e-5).emit(e, near)

        def rows(part: str, source: ImageValue) -> GVar:
            y = PointwiseLinear(f"{path}.{part}", width).emit(e, source)
            shape = y.batch, mul(y.height, y.width), const(self.heads), const(width // self.heads)
            return e.g.call(Permute((0, 2, 1, 3)), e.g.call(Reshape(shape), y.value), hint=part)

        scale = float((width // self.heads) ** -0.5)
        q, k, v = rows("query", x), rows("key", near), rows("value", near)
        y = e.g.call(Permute((0, 2, 1, 3)), e.g.call(Attention(scale, hides_rows=False), q, k, v), hint="context")
        y = e.g.call(Reshape((x.batch, x.height, x.width, const(width))), y)
        return PointwiseLinear(f"{self.path}.output.dense", width).emit(e, ImageValue(y, last=True))


@dataclass(frozen=True, slots=True)
class WindowAttention(ImageLayer):
    """Attention in shifted windows of a fixed-size image (Liu et al. 2021, Swin).

    Attributes:
        path: of the layer's weights
        window: its side
        shift: distance that the image is rolled towards its first element
        biased: queries, keys and values have a bias
    """

    path: str
    heads: int
    window: int
    shift: int
    biased: bool

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        g, x, side, width = e.g, e.laid_out(x, last=True), self.window, x.channels
        height, across = (as_int(n) or 0 for n in (x.height, x.width))
        rows, columns = -(-height // side), -(-across // side)
        none, size = const(0), width // self.heads
        y = padded(g, x, (none, const(rows * side - height)), (none, const(columns * side - across)))
        y = self._rolled(e, y, (rows * side, columns * side), self.shift)

        def shaped(value: GVar, *dims: int) -> GVar:
            return g.call(Reshape((x.batch, *map(const, dims))), value)

        y = shaped(y, rows, side, columns, side, width)
        y = shaped(g.call(Permute((0, 1, 3, 2, 4, 5)), y, hint="windows"), rows * columns, side * side, width)

        def heads(part: str) -> GVar:
            name = f"{self.path}.self.{part}"
            z = PointwiseLinear(name, width, biased=self.biased).emit(e, ImageValue(y, last=True)).value
            z = shaped(z, rows * columns, side * side, self.heads, size)
            return g.call(Permute((0, 1, 3, 2, 4)), z, hint=part)

        bias = e.constant(f"{self.path}.bias", self._bias(e, rows, columns))
        operator = Attention(float(size**-0.5), hides_rows=False)
        context = g.call(operator, heads("query"), heads("key"), heads("value"), bias)
        context = g.call(Permute((0, 1, 3, 2, 4)), context, hint="context")
        context = shaped(context, rows * columns, side * side, width)
        out = PointwiseLinear(f"{self.path}.output.dense", width).emit(e, ImageValue(context, last=True)).value
        out = g.call(Permute((0, 1, 3, 2, 4, 5)), shaped(out, rows, columns, side, side, width))
        out = shaped(out, rows * side, columns * side, width)
        out = self._rolled(e, out, (rows * side, columns * side), -self.shift)
        for axis, n, padded_n in ((1, height, rows * side), (2, across, columns * side)):
            out = out if n == padded_n else g.call(Slice(axis, none, const(n)), out)
        return ImageValue(out, last=True)

    def _rolled(self, e: ImageEmitter, y: GVar, sizes: tuple[int, int], shift: int) -> GVar:
        """Roll height and width towards the first element, or back."""
        for axis, n in ((1, sizes[0]), (2, sizes[1])):
            if at := shift % n:
                ends: tuple[tuple[Expr, Expr], ...] = (const(at), const(n)), (const(0), const(at))
                y = e.g.call(Concat(axis), *(e.g.call(Slice(axis, *end), y) for end in ends), hint="rolled")
        return y

    def _bias(self, e: ImageEmitter, rows: int, columns: int) -> NDArray[Any]:
        """Return the bias of scores by distance, and between parts of rolled windows: (windows or 1, heads, n, n)."""
        side, reach = self.window, 2 * self.window - 1
        table = e.get(f"{self.path}.self.relative_position_bias_table", reach * reach, self.heads)
        near = table[grid_distance(side, side)].transpose(2, 0, 1)[None]
        if not self.shift:
            return np.asarray(near)
        # After the roll, the last windows hold parts of opposite borders of the image, which are not neighbours:
        # positions of different regions are hidden from each other. Along an axis the regions are: before the last
        # window, the part of it that stayed, and the part that was rolled in.
        region = [
            (np.arange(n * side) >= (n - 1) * side).astype(int) + (np.arange(n * side) >= n * side - self.shift)
            for n in (rows, columns)
        ]
        regions = (region[0][:, None] * 3 + region[1]).reshape(rows, side, columns, side)
        regions = regions.transpose(0, 2, 1, 3).reshape(rows * columns, side * side)
        across = regions[:, None, :] != regions[:, :, None]
        return np.asarray(near + np.where(across, np.float32(HIDDEN), np.float32(0))[:, None])


@dataclass(frozen=True, slots=True)
class PatchMerge(ImageLayer):
    """Concatenation of the four positions of a square, normalised and projected (Liu et al. 2021, Swin)."""

    path: str

    def size(self, n: int) -> int:
        return (n + 1) // 2

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        g, x = e.g, e.laid_out(x, last=True)
        height, across = (as_int(n) or 0 for n in (x.height, x.width))
        y = padded(g, x, (const(0), const(height % 2)), (const(0), const(across % 2)))

        def part(row: int, column: int) -> GVar:
            z = g.call(Slice(1, const(row), const(height + height % 2), 2), y)
            return g.call(Slice(2, const(column), const(across + across % 2), 2), z)

        # Columns vary slowest, the order in which the weights of the reduction are stored.
        joined = ImageValue(g.call(Concat(3), *(part(row, column) for column in (0, 1) for row in (0, 1))), last=True)
        layers = (
            ChannelNorm(f"{self.path}.norm", 1e-5),
            PointwiseLinear(f"{self.path}.reduction", 2 * x.channels, biased=False),
        )
        return e.run(layers, joined)


@dataclass(frozen=True, slots=True)
class Positions(ImageLayer):
    """Learned vector of each position of an image of one size."""

    name: str

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        x = e.laid_out(x, last=True)
        height, across = (as_int(n) or 0 for n in (x.height, x.width))
        table = e.get(self.name, 1, height * across, x.channels).reshape(height, across, x.channels)
        return ImageValue(e.g.call(Add(), x.value, e.constant(self.name, table)), last=True)


@dataclass(frozen=True, slots=True)
class PadEnd(ImageLayer):
    """Zeros after the last row and column of an image."""

    rows: int
    columns: int

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        none = const(0)
        return ImageValue(padded(e.g, x, (none, const(self.rows)), (none, const(self.columns))), x.last)
