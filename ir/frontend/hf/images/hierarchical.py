"""The families of models of images with stages of mixing and feed-forward blocks.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from relax_tune.ir.core.expr import Expr
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.images.attention import PadEnd, PatchMerge, Positions, ReducedAttention, WindowAttention
from relax_tune.ir.frontend.hf.images.layers import (
    ChannelNorm,
    ChannelScale,
    Convolution,
    ImageEmitter,
    ImageLayer,
    ImageNorm,
    ImageValue,
    PointwiseLinear,
    PoolMix,
    Residual,
)
from relax_tune.ir.frontend.hf.images.spec import ImageSpec
from relax_tune.ir.frontend.shared.handlers.resize import by_size, position
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.neural.resize import Resize

Stage = tuple[ImageLayer, ...]


def _stages(c: ConfigFields, usual: Mapping[str, Sequence[int]], least: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Read lists with a number per stage. least: smallest numbers of lists that allow less than 1"""
    count = c.whole("num_encoder_blocks", 4)
    return [c.wholes(key, default, count, least.get(key, 1)) for key, default in usual.items()]


def _poolformer(c: ConfigFields) -> ImageSpec:
    """Read PoolFormer (Yu et al. 2022)."""
    act, pool = c.chosen("hidden_act", "gelu", ACTIVATIONS), c.whole("pool_size", 3)
    if pool % 2 == 0:
        raise c.wrong("pool_size", "an odd number")
    ratio = c.number("mlp_ratio", 4.0, 2**-20, 2**20, "a number above 0")
    usual = {
        "hidden_sizes": (64, 128, 320, 512), "depths": (2, 2, 6, 2), "patch_sizes": (7, 3, 3, 3), "strides": (4, 2, 2, 2),
        "padding": (2, 1, 1, 1),
    }  # fmt: skip
    stages, scaled = list[Stage](), c.truth("use_layer_scale", True)
    for k, (width, depth, patch, stride, pad) in enumerate(zip(*_stages(c, usual, {"padding": 0}), strict=True)):
        path = f"encoder.patch_embeddings.{k}.projection"
        layers: list[ImageLayer] = [Convolution(path, width, patch, stride, padding=pad, biased=True)]
        for i in range(depth):
            path = f"encoder.block.{k}.{i}"
            scales = [(ChannelScale(f"{path}.layer_scale_{n}"),) if scaled else () for n in (1, 2)]
            wide = Convolution(f"{path}.output.conv1", int(width * ratio), biased=True, activation=act)
            layers += [
                Residual((ImageNorm(f"{path}.before_norm"), PoolMix(pool), *scales[0])),
                Residual(
                    (ImageNorm(f"{path}.after_norm"), wide, Convolution(f"{path}.output.conv2", width, biased=True), *scales[1])
                ),
            ]  # fmt: skip
        stages.append(tuple(layers))
    return ImageSpec(
        c.whole("num_channels", 3), tuple(stages), "poolformer.", pool="", before_classes=(ImageNorm("norm"),)
    )


def _segformer(c: ConfigFields) -> ImageSpec:
    """Read SegFormer (Xie et al. 2021)."""
    c.only("reshape_last_stage", True)
    act = c.chosen("hidden_act", "gelu", ACTIVATIONS)
    usual = {
        "hidden_sizes": (32, 64, 160, 256), "depths": (2, 2, 2, 2), "patch_sizes": (7, 3, 3, 3), "strides": (4, 2, 2, 2),
        "num_attention_heads": (1, 2, 5, 8), "sr_ratios": (8, 4, 2, 1), "mlp_ratios": (4, 4, 4, 4),
    }  # fmt: skip
    stages = list[Stage]()
    for k, (width, depth, patch, stride, heads, reduced, ratio) in enumerate(zip(*_stages(c, usual, {}), strict=True)):
        c.multiple("hidden_sizes", width, "num_attention_heads", heads)
        path = f"encoder.patch_embeddings.{k}"
        layers: list[ImageLayer] = [
            Convolution(f"{path}.proj", width, patch, stride, padding=patch // 2, biased=True),
            ChannelNorm(f"{path}.layer_norm", 1e-5),
        ]
        for i in range(depth):
            path, wide = f"encoder.block.{k}.{i}", width * ratio
            mix = Convolution(f"{path}.mlp.dwconv.dwconv", wide, 3, groups=wide, padding=1, biased=True, activation=act)
            layers += [
                Residual((ChannelNorm(f"{path}.layer_norm_1", 1e-5), ReducedAttention(f"{path}.attention", heads, reduced))),
                Residual(
                    (
                        ChannelNorm(f"{path}.layer_norm_2", 1e-5), PointwiseLinear(f"{path}.mlp.dense1", wide), mix,
                        PointwiseLinear(f"{path}.mlp.dense2", width),
                    )
                ),
            ]  # fmt: skip
        stages.append((*layers, ChannelNorm(f"encoder.layer_norm.{k}", 1e-5)))
    hidden = c.whole("decoder_hidden_size", 256)

    def segments(e: ImageEmitter, maps: Sequence[ImageValue], labels: int) -> ImageValue:
        first, parts = maps[0], list[ImageValue]()
        for k, x in enumerate(maps):
            y = e.laid_out(PointwiseLinear(f"decode_head.linear_c.{k}.proj", hidden).emit(e, x), last=False)
            # The first stage has the largest maps; the others are brought to its size.
            parts.append(y if k == 0 else resized(e, y, first.height, first.width))
        # From the last stage to the first, the order of the stored weights.
        joined = ImageValue(e.g.call(Concat(1), *(y.value for y in reversed(parts))))
        fuse = Convolution("decode_head.linear_fuse", hidden, norm="decode_head.batch_norm", activation="relu")
        return e.run((fuse, Convolution("decode_head.classifier", labels, biased=True)), joined)

    return ImageSpec(c.whole("num_channels", 3), tuple(stages), "segformer.", pool="", decoder=segments)


def resized(e: ImageEmitter, x: ImageValue, height: Expr, width: Expr) -> ImageValue:
    """Resample (b, c, h, w) linearly, aligning centres of elements (`align_corners=False` in torch)."""
    rows = list[tuple[Expr, Expr, Expr]]()
    for n, size in ((x.height, height), (x.width, width)):
        s = by_size(n, size)
        step, start, part = position("half_pixel", n, s, (Fraction(0), Fraction(1)))
        simple = e.g.deduction.simplify
        rows.append((simple(step), simple(start), simple(part)))
    steps, starts, parts = zip(*rows)
    return ImageValue(e.g.call(Resize((2, 3), (height, width), steps, starts, parts), x.value))


def _swin(c: ConfigFields) -> ImageSpec:
    """Read Swin (Liu et al. 2021)."""
    act, eps = c.chosen("hidden_act", "gelu", ACTIVATIONS), c.number("layer_norm_eps", 1e-5, 0, 1, "a number in [0, 1)")
    depths, window, patch = c.wholes("depths", (2, 2, 6, 2)), c.whole("window_size", 7), c.whole("patch_size", 4)
    sides, width = c.pair("image_size", 224), c.whole("embed_dim", 96)
    ratio, biased = c.number("mlp_ratio", 4.0, 2**-20, 2**20, "a number above 0"), c.truth("qkv_bias", True)
    # an image is padded to whole patches
    grid = [-(-n // patch) for n in sides]
    missing = tuple(g * patch - n for g, n in zip(grid, sides))
    layers: list[ImageLayer] = [
        PadEnd(*missing), Convolution("embeddings.patch_embeddings.projection", width, patch, patch, biased=True),
        ChannelNorm("embeddings.norm", 1e-5),
    ]  # fmt: skip
    if c.truth("use_absolute_embeddings", False):
        if any(missing):
            raise c.wrong("image_size", "a multiple of patch_size, as use_absolute_embeddings is true")
        layers.append(Positions("embeddings.position_embeddings"))
    stages = list[Stage]()
    for k, (depth, heads) in enumerate(zip(depths, c.wholes("num_heads", (3, 6, 12, 24), len(depths)), strict=True)):
        c.multiple("embed_dim", width, "num_heads", heads)
        if min(grid) < window:
            raise c.wrong("window_size", f"at most {min(grid)}, the least side of the image in stage {k + 1}")
        for i in range(depth):
            path = f"encoder.layers.{k}.blocks.{i}"
            # an image of one window is not shifted
            shift = window // 2 if i % 2 and min(grid) > window else 0
            inner = PointwiseLinear(f"{path}.intermediate.dense", int(ratio * width), act)
            layers += [
                Residual(
                    (
                        ChannelNorm(f"{path}.layernorm_before", eps),
                        WindowAttention(f"{path}.attention", heads, window, shift, biased),
                    )
                ),
                Residual((ChannelNorm(f"{path}.layernorm_after", eps), inner, PointwiseLinear(f"{path}.output.dense", width))),
            ]  # fmt: skip
        if k + 1 < len(depths):
            layers.append(PatchMerge(f"encoder.layers.{k}.downsample"))
            grid, width = [(n + 1) // 2 for n in grid], 2 * width
        stages.append(tuple(layers))
        layers = []
    return ImageSpec(
        c.whole("num_channels", 3), tuple(stages), "swin.", tail=(ChannelNorm("layernorm", eps),), sides=sides, positions=True
    )  # fmt: skip


HIERARCHICAL: Mapping[str, Callable[[ConfigFields], ImageSpec]] = {
    "poolformer": _poolformer,
    "segformer": _segformer,
    "swin": _swin,
}
