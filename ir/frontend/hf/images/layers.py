"""Layers of models of images, as data: each emits itself, and knows the size of its result.

A model is tuples of layers. Their names are the names of weights in the folder.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Expr, as_int, const, floordiv, floormod, sub
from relax_tune.ir.core.graph import GVar, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters
from relax_tune.ir.op.indexing.movement import BroadcastTo, Permute
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, Mul, Sqrt, Sub
from relax_tune.ir.op.neural.window import Conv, Pool
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Mean, Sum

Padding = int | tuple[int, int] | Literal["tensorflow"]
"""Elements before and after each dim, one number for both. `tensorflow`: as many as `size / stride` windows need, rounded up."""


@dataclass(frozen=True, slots=True)
class ImageValue:
    """Values of an image: (b, c, h, w), or (b, h, w, c) with channels `last`."""

    value: GVar
    last: bool = False

    @property
    def dims(self) -> tuple[Expr, ...]:
        info = self.value.info
        assert isinstance(info, TensorInfo) and info.shape is not None
        return info.shape

    @property
    def batch(self) -> Expr:
        return self.dims[0]

    @property
    def channels(self) -> int:
        count = as_int(self.dims[3 if self.last else 1])
        assert count is not None
        return count

    @property
    def height(self) -> Expr:
        return self.dims[1 if self.last else 2]

    @property
    def width(self) -> Expr:
        return self.dims[2 if self.last else 3]


class ImageEmitter:
    """Emitter of layers into a graph."""

    def __init__(self, g: GraphBuilder, parameters: Parameters) -> None:
        self.g, self.parameters = g, parameters
        self._one: Value | None = None

    @property
    def one(self) -> Value:
        """The number 1, with four dims."""
        self._one = self._one or self.g.constant("one", np.ones((1, 1, 1, 1), np.float32))
        return self._one

    def outside(self) -> ImageEmitter:
        """Return an emitter of a head, whose weights do not have the model's prefix."""
        return ImageEmitter(self.g, self.parameters.outside())

    def get(self, name: str, *shape: int) -> NDArray[Any]:
        return self.parameters.get(name, *shape)

    def constant(self, name: str, array: NDArray[Any]) -> Value:
        return self.g.constant(name, np.ascontiguousarray(array, np.float32))

    def run(self, layers: Sequence[ImageLayer], x: ImageValue) -> ImageValue:
        """Emit layers one after the other."""
        for layer in layers:
            x = layer.emit(self, x)
        return x

    def laid_out(self, x: ImageValue, last: bool) -> ImageValue:
        """Return the values with channels last or first."""
        if x.last == last:
            return x
        return ImageValue(self.g.call(Permute((0, 2, 3, 1) if last else (0, 3, 1, 2)), x.value), last)

    def along(self, x: ImageValue, name: str, array: NDArray[Any]) -> Value:
        """Return a weight (c,) that broadcasts along the channels."""
        return self.constant(name, array if x.last else array.reshape(-1, 1, 1))

    def activated(self, x: GVar, name: str) -> GVar:
        return ACTIVATIONS[name](self.g, x) if name else x

    def batch_norm(self, name: str, width: int, eps: float) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return factor and shift of batch normalisation (Ioffe and Szegedy 2015) by running statistics."""
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, var = (self.get(f"{name}.{part}", width).astype(np.float64) for part in parts)
        factor = gamma / np.sqrt(var + eps)
        return factor, beta - mean * factor

    def centred(self, x: ImageValue, axes: tuple[int, ...], eps: float) -> GVar:
        """Scale values to mean 0 and variance 1 along axes."""
        g = self.g
        centred = g.call(Sub(), x.value, g.call(Mean(axes, True), x.value))
        var = g.call(Mean(axes, True), g.call(Mul(), centred, centred))
        return g.call(Div(), centred, g.call(Sqrt(), g.call(AddScalar(eps), var)))


class ImageLayer:
    """A layer of a model of images."""

    __slots__ = ()

    def size(self, n: int) -> int:
        """Return the height or width of the result for one of size `n`; below 1 if the layer cannot take it."""
        return n

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        """Emit the layer."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Convolution(ImageLayer):
    """Convolution, batch normalisation folded into its weights, and activation. norm: name of the batch normalisation"""

    name: str
    out: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    dilation: int = 1
    padding: Padding = 0
    biased: bool = False
    norm: str = ""
    eps: float = 1e-5
    activation: str = ""

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    def size(self, n: int) -> int:
        if self.padding == "tensorflow":
            return -(-n // self.stride)
        before, after = self._sides()
        return (n + before + after - self.reach) // self.stride + 1

    def _sides(self) -> tuple[int, int]:
        assert self.padding != "tensorflow"
        return (self.padding, self.padding) if isinstance(self.padding, int) else self.padding

    def pads(self, n: Expr) -> tuple[Expr, Expr]:
        """Return the elements before and after a dim of size `n`."""
        if self.padding != "tensorflow":
            before, after = self._sides()
            return const(before), const(after)
        if self.stride == 1 or self.reach == 1:
            room = self.reach - 1
            return const(room // 2), const(room - room // 2)
        # TensorFlow pads so that the last window ends with the dim: (n - 1) mod stride of its room needs no padding
        total = sub(self.reach - 1, floormod(sub(n, 1), const(self.stride)))
        front = floordiv(total, const(2))
        return front, sub(total, front)

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        x = e.laid_out(x, last=False)
        k = (self.kernel, self.kernel)
        w = e.get(f"{self.name}.weight", self.out, x.channels // self.groups, *k)
        shift = e.get(f"{self.name}.bias", self.out) if self.biased else None
        if self.norm:
            factor, offset = e.batch_norm(self.norm, self.out, self.eps)
            w = (w * factor[:, None, None, None]).astype(np.float32)
            shift = offset if shift is None else offset + factor * shift
        y = padded(e.g, x, self.pads(x.height), self.pads(x.width))
        op = Conv((self.stride,) * 2, (self.dilation,) * 2, self.groups)
        y = e.g.call(op, y, e.constant(f"{self.name}.weight", w))
        if shift is not None:
            y = e.g.call(Add(), y, e.along(ImageValue(y), f"{self.name}.bias", shift))
        return ImageValue(e.activated(y, self.activation))


def padded(
    g: GraphBuilder, x: ImageValue, rows: tuple[Expr, Expr], columns: tuple[Expr, Expr], value: float = 0.0
) -> GVar:
    """Pad height and width of an image."""
    if all(as_int(n) == 0 for n in (*rows, *columns)):
        return x.value
    none = const(0)
    sides = [(none, none), rows, columns] if x.last else [(none, none), (none, none), rows, columns]
    sides += [(none, none)] if x.last else []
    before, after = zip(*sides)
    return g.call(Pad(before, after, value=value), x.value)


@dataclass(frozen=True, slots=True)
class MaxPool(ImageLayer):
    """Largest elements of windows."""

    kernel: int
    stride: int
    padding: int

    def size(self, n: int) -> int:
        return (n + 2 * self.padding - self.kernel) // self.stride + 1

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        x, side = e.laid_out(x, last=False), (const(self.padding),) * 2
        y = padded(e.g, x, side, side, -np.inf)
        return ImageValue(e.g.call(Pool((self.kernel,) * 2, (self.stride,) * 2, (1, 1)), y))


@dataclass(frozen=True, slots=True)
class PoolMix(ImageLayer):
    """Mean of the window around each element, minus the element (Yu et al. 2022, PoolFormer)."""

    kernel: int

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        g, x, side = e.g, e.laid_out(x, last=False), (const(self.kernel // 2),) * 2
        op = Pool((self.kernel,) * 2, (1, 1), (1, 1), largest=False)
        total = g.call(op, padded(g, x, side, side))
        # padding is not counted: windows at the edge hold fewer elements
        ones = g.call(BroadcastTo((const(1), const(1), x.height, x.width)), e.one)
        count = g.call(op, padded(g, ImageValue(ones), side, side))
        return ImageValue(g.call(Sub(), g.call(Div(), total, count), x.value))


@dataclass(frozen=True, slots=True)
class ChannelNorm(ImageLayer):
    """Layer normalisation of the channels of each position (Ba et al. 2016)."""

    name: str
    eps: float

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        x = e.laid_out(x, last=True)
        parts = (
            e.constant(f"{self.name}.{part}", e.get(f"{self.name}.{part}", x.channels)) for part in ("weight", "bias")
        )
        return ImageValue(e.g.call(LayerNorm(self.eps), x.value, *parts), last=True)


@dataclass(frozen=True, slots=True)
class ImageNorm(ImageLayer):
    """Group normalisation with one group, over all elements of an image (Wu and He 2018)."""

    name: str
    eps: float = 1e-5

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        gamma, beta = (
            e.along(x, f"{self.name}.{part}", e.get(f"{self.name}.{part}", x.channels)) for part in ("weight", "bias")
        )
        y = e.g.call(Mul(), e.centred(x, (1, 2, 3), self.eps), gamma)
        return ImageValue(e.g.call(Add(), y, beta), x.last)


@dataclass(frozen=True, slots=True)
class PointwiseLinear(ImageLayer):
    """Product with a matrix (out, in) at each position, and activation."""

    name: str
    out: int
    activation: str = ""
    biased: bool = True

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        x = e.laid_out(x, last=True)
        y = e.g.call(
            Matmul(), x.value, e.constant(f"{self.name}.weight", e.get(f"{self.name}.weight", self.out, x.channels).T)
        )
        if self.biased:
            y = e.g.call(Add(), y, e.constant(f"{self.name}.bias", e.get(f"{self.name}.bias", self.out)))
        return ImageValue(e.activated(y, self.activation), last=True)


@dataclass(frozen=True, slots=True)
class ResponseNorm(ImageLayer):
    """Global response normalisation (Woo et al. 2023, ConvNeXt V2): each channel by its share of the channels' norms."""

    name: str
    eps: float = 1e-6

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        g, x = e.g, e.laid_out(x, last=True)
        gamma, beta = (
            e.constant(f"{self.name}.{part}", e.get(f"{self.name}.{part}", 1, 1, 1, x.channels))
            for part in ("weight", "bias")
        )
        norms = g.call(Sqrt(), g.call(Sum((1, 2), True), g.call(Mul(), x.value, x.value)))
        share = g.call(Div(), norms, g.call(AddScalar(self.eps), g.call(Mean((3,), True), norms)))
        y = g.call(Add(), g.call(Mul(), g.call(Mul(), x.value, share), gamma), beta)
        return ImageValue(g.call(Add(), y, x.value), last=True)


@dataclass(frozen=True, slots=True)
class ChannelScale(ImageLayer):
    """Factor of each channel (LayerScale; Touvron et al. 2021)."""

    name: str

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        factor = e.along(x, self.name, e.get(self.name, x.channels))
        return ImageValue(e.g.call(Mul(), x.value, factor), x.last)


@dataclass(frozen=True, slots=True)
class Residual(ImageLayer):
    """Sum of two branches, then an activation. An empty shortcut is the identity."""

    body: tuple[ImageLayer, ...]
    shortcut: tuple[ImageLayer, ...] = ()
    activation: str = ""

    def size(self, n: int) -> int:
        return size_after(self.body, n)

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        y, shortcut = e.run(self.body, x), e.run(self.shortcut, x)
        shortcut = e.laid_out(shortcut, y.last) if self.shortcut else shortcut
        y = e.laid_out(y, shortcut.last)
        return ImageValue(e.activated(e.g.call(Add(), y.value, shortcut.value), self.activation), shortcut.last)


@dataclass(frozen=True, slots=True)
class Excite(ImageLayer):
    """Squeeze and excitation (Hu et al. 2018): `body` computes a factor per channel from the channels' means."""

    body: tuple[ImageLayer, ...]

    def emit(self, e: ImageEmitter, x: ImageValue) -> ImageValue:
        x = e.laid_out(x, last=False)
        factors = e.run(self.body, ImageValue(e.g.call(Mean((2, 3), True), x.value)))
        return ImageValue(e.g.call(Mul(), x.value, e.laid_out(factors, last=False).value))


def size_after(layers: Sequence[ImageLayer], n: int) -> int:
    """Return the size after layers of a dim of size `n`; below 1 if one cannot take it."""
    for layer in layers:
        n = layer.size(n) if n >= 1 else n
    return n
