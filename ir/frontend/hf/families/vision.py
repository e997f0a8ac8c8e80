"""The families of vision transformers, and of the text encoders that are trained with them.

Tests: `tests/ir/frontend/hf/families/test_encoders.py`, `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.family import Family, Key, layer_norm
from relax_tune.ir.frontend.hf.transformer.inputs import Patches, PatchRows
from relax_tune.ir.frontend.hf.transformer.rope import GridRope
from relax_tune.ir.frontend.hf.transformer.spec import GridBias, Names, Outputs, Pooler, Stack

VIT = Names(
    "vit.", layers="encoder.layer", before_attention="layernorm_before", query="attention.attention.query",
    key="attention.attention.key", value="attention.attention.value", out="attention.output.dense", before_mlp="layernorm_after",
    gate=None, up="intermediate.dense", down="output.dense", last_norm="layernorm",
)  # fmt: skip
DINOV2 = replace(
    VIT, prefix="dinov2.", before_attention="norm1", before_mlp="norm2", attention_scale="layer_scale1.lambda1",
    mlp_scale="layer_scale2.lambda1", up="mlp.fc1", down="mlp.fc2",
)  # fmt: skip
DINOV3 = replace(
    DINOV2, prefix="", layers="layer", query="attention.q_proj", key="attention.k_proj", value="attention.v_proj",
    out="attention.o_proj", up="mlp.up_proj", down="mlp.down_proj", last_norm="norm",
)  # fmt: skip
CLIP = Names(
    "vision_model.", "embeddings.token_embedding", layers="encoder.layers", before_attention="layer_norm1", out="self_attn.out_proj",
    before_mlp="layer_norm2", gate=None, up="mlp.fc1", down="mlp.fc2", last_norm=None,
)  # fmt: skip
CLIP_TEXT = replace(CLIP, prefix="text_model.", positions="embeddings.position_embedding", last_norm="final_layer_norm")


def patches(size: int, patch: int, **parts: Any) -> Callable[[ConfigFields], Patches]:
    """Return the reader of patch embeddings. size, patch: defaults of the sides of an image and of a patch"""

    def read(c: ConfigFields) -> Patches:
        embedding = Patches(
            c.whole("num_channels", 3), c.pair("image_size", size), c.pair("patch_size", patch), **parts
        )
        if embedding.positions == embedding.leading:
            raise c.wrong("image_size", f"at least the size of a patch, {embedding.patch}")
        return embedding

    return read


def patch_rows(c: ConfigFields) -> PatchRows:
    count = c.whole("num_patches", 256)
    side = math.isqrt(count)
    if side * side != count:
        raise c.wrong("num_patches", "a square number")
    return PatchRows(c.whole("num_channels", 3) * c.whole("patch_size", 16) ** 2, side)


def _vit(c: ConfigFields, stack: Stack) -> Stack:
    c.only("pooler_output_size", stack.hidden, None)
    activation = c.data.get("pooler_act") or "tanh"
    pooler = Pooler("first", dense="pooler.dense", activation=activation, optional=True)
    return replace(stack, outputs=replace(stack.outputs, pooler=pooler))


def _dinov2(c: ConfigFields, stack: Stack) -> Stack:
    """Read the width of the feed-forward block, which may be gated, and the number of registers."""
    inner, gated = stack.hidden * c.whole("mlp_ratio", 4), c.truth("use_swiglu_ffn", False)
    if isinstance(stack.embedding, Patches) and stack.embedding.registers:
        stack = replace(stack, embedding=replace(stack.embedding, registers_count=c.whole("num_register_tokens", 4)))
    if not gated:
        return replace(stack, inner=inner)
    names = replace(stack.names, gate_up="mlp.weights_in", down="mlp.weights_out")
    # Two thirds of the width, as a gated block has three matrices instead of two, rounded up to a multiple of 8.
    return replace(stack, names=names, inner=(inner * 2 // 3 + 7) // 8 * 8, activation="silu")


def _dinov3(c: ConfigFields, stack: Stack) -> Stack:
    """Read registers, rotations by the place of a patch, and a gated feed-forward block."""
    p, names = stack.embedding, stack.names
    assert isinstance(p, Patches)
    if c.data.get("num_register_tokens"):
        p = replace(p, registers="embeddings.register_tokens", registers_count=c.whole("num_register_tokens"))
    c.multiple("head_dim", stack.size, "4", 4)
    theta = c.number("rope_theta", 100.0, 1, 1e30, "a number of at least 1")
    rope = GridRope(theta, stack.size, leading=p.leading, grid=p.grid)
    if c.truth("use_gated_mlp", False):
        names = replace(names, gate="mlp.gate_proj")
    biases = replace(stack.biases, value=c.truth("value_bias", True))
    stack = replace(stack, embedding=p, names=names, biases=biases)
    return stack.with_layers(lambda _, layer: replace(layer, rope=rope))


def _beit(c: ConfigFields, stack: Stack) -> Stack:
    """Read the biases by offset, the scales and the pooling."""
    p, names = stack.embedding, stack.names
    assert isinstance(p, Patches)
    if len({*p.size}) + len({*p.patch}) > 2:
        raise c.wrong("image_size", "one number, as patch_size, for square images")
    if not c.truth("use_absolute_position_embeddings", False):
        p = replace(p, table="")
    if c.number("layer_scale_init_value", 0.1, -math.inf, math.inf, "a number") > 0:
        names = replace(names, attention_scale="lambda_1", mlp_scale="lambda_2")
    shared, each = c.truth("use_shared_relative_position_bias", False), c.truth("use_relative_position_bias", False)
    name = "relative_position_bias"
    bias = GridBias(f"encoder.{name}" if shared else "", f"attention.attention.{name}" if each else "")
    pooler = Pooler("first")
    # With mean pooling the norm follows the mean, and the encoder has none.
    if c.truth("use_mean_pooling", True):
        pooler, names = Pooler("patches", norm="pooler.layernorm"), replace(names, last_norm=None)
    outputs = Outputs(pooler=pooler, image_classes=("pooled",))
    return replace(stack, embedding=p, names=names, outputs=outputs, position_bias=bias if shared or each else None)


def _data2vec(c: ConfigFields, stack: Stack) -> Stack:
    stack = _beit(c, stack)
    assert stack.outputs.pooler is not None
    pooler = replace(stack.outputs.pooler, optional=True)  # a bare model has none
    return replace(stack, outputs=replace(stack.outputs, pooler=pooler))


def _clip(c: ConfigFields, stack: Stack) -> Stack:
    name = "visual_projection" if stack.outputs.pooler is not None else "text_projection"
    return replace(stack, outputs=replace(stack.outputs, projection=(name, c.whole("projection_dim", 512))))


def _clip_text(c: ConfigFields, stack: Stack) -> Stack:
    eos = c.data.get("eos_token_id", 49407)
    if type(eos) is not int:
        raise c.wrong("eos_token_id", "a whole number")
    stack = _clip(c, stack)
    # the first configurations had a wrong id, 2, for the largest one
    return replace(stack, outputs=replace(stack.outputs, pooler=Pooler("eos", eos=None if eos == 2 else eos)))


def _siglip(c: ConfigFields, stack: Stack) -> Stack:
    pooler = Pooler("probe") if c.truth("vision_use_head", True) else None
    return replace(stack, outputs=replace(stack.outputs, pooler=pooler))


def _siglip_text(c: ConfigFields, stack: Stack) -> Stack:
    c.only("projection_size", stack.hidden, None)
    return stack


IMAGES = Family(
    names=VIT, causal=False, groups=None, size=None, norm=layer_norm("layer_norm_eps", 1e-12), activation=("hidden_act", "gelu"),
    qkv_bias=Key("qkv_bias", True), out_bias=True, mlp_bias=True, rope=None, embedding=patches(224, 16),
    only={"position_embedding_type": ("absolute", None)}, finish=_vit,
)  # fmt: skip
DINO = replace(
    IMAGES, names=DINOV2, inner_factor=4, norm=layer_norm("layer_norm_eps", 1e-6), embedding=patches(224, 14),
    outputs=Outputs(image_classes=("first", "mean")), finish=_dinov2,
)  # fmt: skip
BEIT = replace(IMAGES, names=replace(VIT, prefix="beit."), qkv_bias=True, key_bias=False, finish=_beit)
TOWER = replace(
    IMAGES, names=CLIP, norm=layer_norm("layer_norm_eps"), activation=("hidden_act", "quick_gelu"), qkv_bias=True
)
SIGLIP = replace(TOWER, norm=layer_norm("layer_norm_eps", 1e-6), activation=("hidden_act", "gelu_pytorch_tanh"))
_TWO_TOKENS = ("embeddings.cls_token", "embeddings.distillation_token")

VISION: Mapping[str, Family] = {
    "vit": IMAGES,
    "deit": replace(IMAGES, names=replace(VIT, prefix="deit."), embedding=patches(224, 16, tokens=_TWO_TOKENS)),
    "ijepa": replace(
        IMAGES, names=replace(VIT, prefix="ijepa."), embedding=patches(224, 14, tokens=()), outputs=Outputs(image_classes=("mean",))
    ),
    "dinov2": DINO,
    "dinov2_with_registers": replace(
        DINO, names=replace(DINOV2, prefix="dinov2_with_registers."), embedding=patches(224, 14, registers="embeddings.register_tokens"),
    ),
    "dinov3_vit": replace(
        IMAGES, names=DINOV3, norm=layer_norm("layer_norm_eps"), qkv_bias=Key("query_bias", True), key_bias=Key("key_bias", False),
        out_bias=Key("proj_bias", True), mlp_bias=Key("mlp_bias", True), finish=_dinov3,
        embedding=patches(224, 16, projection="embeddings.patch_embeddings", table=""),
        outputs=Outputs(pooler=Pooler("first")),
    ),
    "beit": BEIT,
    "data2vec-vision": replace(BEIT, names=replace(VIT, prefix="data2vec_vision."), finish=_data2vec),
    "clip_vision_model": replace(
        TOWER, embedding=patches(
            224, 32, projection="embeddings.patch_embedding", biased=False, table="embeddings.position_embedding.weight",
            tokens=("embeddings.class_embedding",), flat=True, norm="pre_layrnorm",
        ),
        outputs=Outputs(pooler=Pooler("first", norm="post_layernorm"), image_classes=("mean",)), finish=_clip,
    ),
    "clip_text_model": replace(TOWER, names=CLIP_TEXT, causal=True, embedding=None, finish=_clip_text),
    "siglip_vision_model": replace(
        SIGLIP, names=replace(CLIP, last_norm="post_layernorm"), outputs=Outputs(image_classes=("mean",)), finish=_siglip,
        embedding=patches(
            224, 16, projection="embeddings.patch_embedding", table="embeddings.position_embedding.weight", tokens=(), flat=True
        ),
    ),
    "siglip2_vision_model": replace(
        SIGLIP, names=replace(CLIP, last_norm="post_layernorm"), embedding=patch_rows, outputs=Outputs(image_classes=("mean",)),
        finish=_siglip,
    ),
    **dict.fromkeys(("siglip_text_model", "siglip2_text_model"), replace(
        SIGLIP, names=CLIP_TEXT, embedding=None, outputs=Outputs(pooler=Pooler("last", dense="head")), finish=_siglip_text
    )),
}  # fmt: skip
