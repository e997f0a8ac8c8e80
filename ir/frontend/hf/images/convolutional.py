"""The families of convolutional models of images, which take any height and width.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.images.layers import (
    ChannelNorm,
    ChannelScale,
    Convolution,
    Excite,
    ImageEmitter,
    ImageLayer,
    ImageValue,
    MaxPool,
    Padding,
    PointwiseLinear,
    Residual,
    ResponseNorm,
    size_after,
)
from relax_tune.ir.frontend.hf.images.spec import ImageSpec
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat
from relax_tune.ir.op.reduction.reduce import Mean

Stage = tuple[ImageLayer, ...]


def _normed(name: str, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: str = "") -> Convolution:
    """Return a convolution of ResNet and RegNet, with batch norm."""
    parts = f"{name}.convolution", out, kernel, stride, groups, 1, kernel // 2, False, f"{name}.normalization"
    return Convolution(*parts, activation=act)


def _residual_stages(
    c: ConfigFields, first: bool, block: Callable[[str, int, int, int], tuple[Stage, str]]
) -> tuple[Stage, ...]:
    """Return the stages of residual blocks. block: maps path, input and output channels and stride to body and activation"""
    widths = c.wholes("hidden_sizes", ())
    before, stages = c.whole("embedding_size"), list[Stage]()
    for k, (out, depth) in enumerate(zip(widths, c.wholes("depths", (), len(widths)), strict=True)):
        layers = list[ImageLayer]()
        for i in range(depth):
            path, stride = f"encoder.stages.{k}.layers.{i}", 2 if i == 0 and (k or first) else 1
            body, act = block(path, before, out, stride)
            # A sum needs equal dims: only blocks that change them have a projection.
            shortcut = (_normed(f"{path}.shortcut", out, 1, stride),) if before != out or stride != 1 else ()
            layers.append(Residual(body, shortcut, act))
            before = out
        stages.append(tuple(layers))
    return tuple(stages)


def _resnet(c: ConfigFields) -> ImageSpec:
    """Read ResNet (He et al. 2016)."""
    act, kind = (
        c.chosen("hidden_act", "relu", ACTIVATIONS),
        c.chosen("layer_type", "bottleneck", ("basic", "bottleneck")),
    )
    early = c.truth("downsample_in_bottleneck", False)

    def block(path: str, before: int, out: int, stride: int) -> tuple[Stage, str]:
        # transformers uses ReLU inside a block, for any activation in the configuration
        if kind == "basic":
            return (_normed(f"{path}.layer.0", out, 3, stride, act="relu"), _normed(f"{path}.layer.1", out, 3)), act
        # The paper strides in the first convolution, later models in the 3 x 3 one, which sees all elements.
        narrow, strides = out // 4, (stride, 1) if early else (1, stride)
        body = (
            _normed(f"{path}.layer.0", narrow, 1, strides[0], act="relu"),
            _normed(f"{path}.layer.1", narrow, 3, strides[1], act="relu"), _normed(f"{path}.layer.2", out),
        )  # fmt: skip
        return body, act

    stem = (_normed("embedder.embedder", c.whole("embedding_size"), 7, 2, act=act), MaxPool(3, 2, 1))
    stages = (stem, *_residual_stages(c, c.truth("downsample_in_first_stage", False), block))
    return ImageSpec(
        c.whole("num_channels", 3), stages, "resnet.", keeps_dims=True, classifier="classifier.1", backbone=True
    )


def _regnet(c: ConfigFields) -> ImageSpec:
    """Read RegNet X and Y (Radosavovic et al. 2020)."""
    act, kind = c.chosen("hidden_act", "relu", ACTIVATIONS), c.chosen("layer_type", "y", ("x", "y"))
    group = c.whole("groups_width", 64)

    def block(path: str, before: int, out: int, stride: int) -> tuple[Stage, str]:
        groups, last = max(1, out // group), 3 if kind == "y" else 2
        c.multiple("hidden_sizes", out, "groups", groups)
        body: list[ImageLayer] = [
            _normed(f"{path}.layer.0", out, act=act),
            _normed(f"{path}.layer.1", out, 3, stride, groups, act),
        ]
        if kind == "y":
            # Squeeze-and-excitation; its width follows from the channels before the block, as in the paper.
            body.append(
                _excite(f"{path}.layer.2.attention.0", f"{path}.layer.2.attention.2", round(before / 4), out, "relu")
            )
        return (*body, _normed(f"{path}.layer.{last}", out)), act

    stem = (_normed("embedder.embedder", c.whole("embedding_size", 32), 3, 2, act=act),)
    stages = (stem, *_residual_stages(c, c.truth("downsample_in_first_stage", True), block))
    return ImageSpec(c.whole("num_channels", 3), stages, "regnet.", keeps_dims=True, classifier="classifier.1")


def _excite(reduce: str, expand: str, narrow: int, wide: int, act: str) -> Excite:
    return Excite(
        (Convolution(reduce, narrow, biased=True, activation=act), Convolution(expand, wide, biased=True, activation="sigmoid"))
    )  # fmt: skip


def _convnext(c: ConfigFields, prefix: str = "convnext.", second: bool = False) -> ImageSpec:
    """Read ConvNeXt (Liu et al. 2022) and ConvNeXt V2 (Woo et al. 2023)."""
    act, patch = c.chosen("hidden_act", "gelu", ACTIVATIONS), c.whole("patch_size", 4)
    widths = c.wholes("hidden_sizes", (96, 192, 384, 768), c.whole("num_stages", 4))
    scaled = not second and c.number("layer_scale_init_value", 1e-6, -math.inf, math.inf, "a number") > 0
    stages: list[Stage] = [
        (
            Convolution("embeddings.patch_embeddings", widths[0], patch, patch, biased=True),
            ChannelNorm("embeddings.layernorm", 1e-6),
        )
    ]
    for k, (width, depth) in enumerate(zip(widths, c.wholes("depths", (3, 3, 9, 3), len(widths)), strict=True)):
        down, layers = f"encoder.stages.{k}.downsampling_layer", list[ImageLayer]()
        if k > 0:
            layers += [ChannelNorm(f"{down}.0", 1e-6), Convolution(f"{down}.1", width, 2, 2, biased=True)]
        for i in range(depth):
            path = f"encoder.stages.{k}.layers.{i}"
            body: list[ImageLayer] = [
                Convolution(f"{path}.dwconv", width, 7, groups=width, padding=3, biased=True),
                ChannelNorm(f"{path}.layernorm", 1e-6), PointwiseLinear(f"{path}.pwconv1", 4 * width, act),
            ]  # fmt: skip
            body += [ResponseNorm(f"{path}.grn")] if second else []
            body += [PointwiseLinear(f"{path}.pwconv2", width)]
            body += [ChannelScale(f"{path}.layer_scale_parameter")] if scaled else []
            layers.append(Residual(tuple(body)))
        stages.append(tuple(layers))
    last = ChannelNorm("layernorm", c.number("layer_norm_eps", 1e-12, 0, 1, "a number in [0, 1)"))
    return ImageSpec(c.whole("num_channels", 3), tuple(stages), prefix, pooled=(last,), backbone=True, maps_eps=1e-6)


def _convnextv2(c: ConfigFields) -> ImageSpec:
    return _convnext(c, "convnextv2.", second=True)


def _mobile(c: ConfigFields) -> Callable[..., Convolution]:
    """Return the constructor of MobileNet's convolutions, with batch norm and TensorFlow's or symmetric padding."""
    act = c.chosen("hidden_act", "relu6", ACTIVATIONS)
    eps = c.number("layer_norm_eps", 0.001, 0, 1, "a number in [0, 1)")
    tensorflow = c.truth("tf_padding", True)

    def convolution(
        name: str, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, dilation: int = 1, activation: str = act,
        eps: float = eps,
    ) -> Convolution:  # fmt: skip
        padding: Padding = "tensorflow" if tensorflow else (kernel - 1) // 2 * dilation
        return Convolution(
            f"{name}.convolution", out, kernel, stride, groups, dilation, padding, norm=f"{name}.normalization", eps=eps,
            activation=activation,
        )  # fmt: skip

    return convolution


def _factor(c: ConfigFields, key: str, default: float) -> float:
    return c.number(key, default, 2**-20, 2**20, "a number above 0")


def _mobilenet_v1(c: ConfigFields) -> ImageSpec:
    """Read MobileNet (Howard et al. 2017)."""
    convolution, factor, least = _mobile(c), _factor(c, "depth_multiplier", 1.0), c.whole("min_depth", 8)
    out = max(int(32 * factor), least)
    depth, layers = 32, [convolution("conv_stem", out, 3, 2)]
    for i, stride in enumerate((1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)):
        layers.append(convolution(f"layer.{2 * i}", out, 3, stride, out))
        depth *= 2 if stride == 2 or i == 0 else 1
        out = max(int(depth * factor), least)
        layers.append(convolution(f"layer.{2 * i + 1}", out))
    return ImageSpec(c.whole("num_channels", 3), (tuple(layers),), "mobilenet_v1.")


def _rounded(value: float, unit: int, least: int) -> int:
    """Round to a multiple of `unit`, downwards by at most a tenth."""
    rounded = max(least, int(value + unit / 2) // unit * unit)
    return rounded + unit if rounded < 0.9 * value else rounded


def _mobilenet_v2(c: ConfigFields) -> ImageSpec:
    """Read MobileNet V2 (Sandler et al. 2018), with the head of DeepLab V3+ (Chen et al. 2018)."""
    convolution, factor, ratio = _mobile(c), _factor(c, "depth_multiplier", 1.0), _factor(c, "expand_ratio", 6.0)
    unit, least = c.whole("depth_divisible_by", 8), c.whole("min_depth", 8)

    def width(channels: float) -> int:
        return _rounded(round(channels * factor), unit, least)

    outs = [width(n) for n in (16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)]
    wide, stem = width(32), "conv_stem"
    layers: list[ImageLayer] = [convolution(f"{stem}.first_conv", wide, 3, 2)]
    if not c.truth("first_layer_is_expansion", True):
        layers.append(convolution(f"{stem}.expand_1x1", wide))
    layers += [
        convolution(f"{stem}.conv_3x3", wide, 3, groups=wide),
        convolution(f"{stem}.reduce_1x1", outs[0], activation=""),
    ]
    reached, dilation, limit = 2, 1, c.whole("output_stride", 32)
    for i, stride in enumerate((2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)):
        # beyond the output stride, convolutions are dilated in place of strides
        spacing, step = (dilation, 1) if reached == limit else (1, stride)
        dilation, reached = (dilation * stride, reached) if reached == limit else (dilation, reached * stride)
        path, before, out = f"layer.{i}", outs[i], outs[i + 1]
        wide = _rounded(round(before * ratio), unit, least)
        body = (
            convolution(f"{path}.expand_1x1", wide), convolution(f"{path}.conv_3x3", wide, 3, step, wide, spacing),
            convolution(f"{path}.reduce_1x1", out, activation=""),
        )  # fmt: skip
        layers += [Residual(body)] if step == 1 and before == out else body
    last = 1280 if c.truth("finegrained_output", True) and factor < 1 else width(1280)

    def segments(e: ImageEmitter, maps: Sequence[ImageValue], labels: int) -> ImageValue:
        x, g, head = maps[-1], e.g, "segmentation_head"
        pooled = ImageValue(g.call(Mean((2, 3), True), x.value))
        pooled = e.run((convolution(f"{head}.conv_pool", 256, activation="relu", eps=1e-5),), pooled)
        local = e.run((convolution(f"{head}.conv_aspp", 256, activation="relu", eps=1e-5),), x)
        wide: GVar = g.call(BroadcastTo((x.batch, const(256), x.height, x.width)), pooled.value)
        both = ImageValue(g.call(Concat(1), wide, local.value))
        last = convolution(f"{head}.conv_projection", 256, activation="relu", eps=1e-5)
        return e.run((last, Convolution(f"{head}.classifier.convolution", labels, biased=True)), both)

    return ImageSpec(
        c.whole("num_channels", 3), (tuple(layers),), "mobilenet_v2.", tail=(convolution("conv_1x1", last),), decoder=segments
    )  # fmt: skip


_EFFICIENT: Mapping[str, tuple[int, ...]] = {
    "out_channels": (16, 24, 40, 80, 112, 192, 320), "strides": (1, 2, 2, 2, 1, 2, 1), "kernel_sizes": (3, 3, 5, 3, 5, 5, 3),
    "expand_ratios": (1, 6, 6, 6, 6, 6, 6), "num_block_repeats": (1, 2, 2, 3, 3, 4, 1),
}  # fmt: skip


EFFICIENT_PARTS = "expansion.expand", "depthwise_conv.depthwise", "squeeze_excite", "projection.project"


def _square(c: ConfigFields) -> Sequence[int]:
    """Read the numbers of the blocks of EfficientNet with the same padding on all sides."""
    numbers = c.data.get("depthwise_padding") or []
    if not isinstance(numbers, list) or not all(type(k) is int for k in numbers):
        raise c.wrong("depthwise_padding", "a list of numbers of blocks")
    return numbers


def _efficientnet(c: ConfigFields) -> ImageSpec:
    """Read EfficientNet (Tan and Le 2019)."""
    act = c.chosen("hidden_act", "swish", ACTIVATIONS)
    eps = c.number("batch_norm_eps", 0.001, 0, 1, "a number in [0, 1)")
    unit, factor = c.whole("depth_divisor", 8), _factor(c, "width_coefficient", 2.0)
    deeper, share = _factor(c, "depth_coefficient", 3.1), _factor(c, "squeeze_expansion_ratio", 0.25)
    square = _square(c)

    def width(channels: int) -> int:
        return _rounded(channels * factor, unit, unit)

    def convolution(
        name: str, norm: str, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, padding: Padding = 0, activation: str = act
    ) -> Convolution:  # fmt: skip
        return Convolution(name, out, kernel, stride, groups, 1, padding, False, norm, eps, activation)

    def block(path: str, before: int, out: int, kernel: int, step: int, ratio: int, padding: Padding) -> Stage:
        wide, (a, b, d, e) = before * ratio, (f"{path}.{name}" for name in EFFICIENT_PARTS)
        return (
            *((convolution(f"{a}_conv", f"{a}_bn", wide),) if ratio != 1 else ()),
            convolution(f"{b}_conv", f"{b}_norm", wide, kernel, step, wide, padding=padding),
            _excite(f"{d}.reduce", f"{d}.expand", max(1, int(before * share)), wide, act),
            convolution(f"{e}_conv", f"{e}_bn", out, activation=""),
        )

    stem = convolution("embeddings.convolution", "embeddings.batchnorm", width(32), 3, 2, padding=(0, 1))
    layers: list[ImageLayer] = [stem]
    befores = c.wholes("in_channels", (32, 16, 24, 40, 80, 112, 192))
    number, reached, columns = 0, 2, [c.wholes(key, usual, len(befores)) for key, usual in _EFFICIENT.items()]
    for first, last, stride, kernel, ratio, repeats in zip(befores, *columns, strict=True):
        if stride > 2:
            raise c.wrong("strides", "strides of 1 or 2")
        before, out, half, reached = width(first), width(last), kernel // 2, reached * stride
        for j in range(math.ceil(deeper * repeats)):
            step = 1 if j else stride
            if step > 1 and half == 0 and number not in square:
                raise c.wrong("kernel_sizes", "kernels of at least 2 where the stride is 2, unless padding is square")
            # TensorFlow's padding of a stride of 2 has one element less in front; even kernels have one less in front
            # at any stride.
            side: Padding = half if number in square else (half - 1, half)
            side = side if step > 1 else ((kernel - 1) // 2, half)
            body = block(f"encoder.blocks.{number}", before, out, kernel, step, ratio, side)
            layers += [Residual(body)] if j else body
            before, number = out, number + 1
    hidden = c.whole("hidden_dim", 2560)
    if hidden != width(1280):
        raise c.wrong("hidden_dim", f"{width(1280)}, the channels after the last layer")
    layers.append(convolution("encoder.top_conv", "encoder.top_bn", hidden))
    # transformers pools in windows of `hidden_dim`; larger images would have several
    most = hidden * reached
    while size_after(layers, most) > hidden:
        most -= 1
    pool = c.chosen("pooling_type", "mean", ("mean", "max"))
    return ImageSpec(
        c.whole("num_channels", 3), (tuple(layers),), "efficientnet.", pool="max" if pool == "max" else "mean", most=most
    )  # fmt: skip


CONVOLUTIONAL: Mapping[str, Callable[[ConfigFields], ImageSpec]] = {
    "resnet": _resnet,
    "regnet": _regnet,
    "convnext": _convnext,
    "convnextv2": _convnextv2,
    "mobilenet_v1": _mobilenet_v1,
    "mobilenet_v2": _mobilenet_v2,
    "efficientnet": _efficientnet,
}
