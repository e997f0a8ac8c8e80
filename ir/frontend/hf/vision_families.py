"""The families of vision encoders, and the encoders of text that are trained beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder_spec import (
    UNTYPED,
    EncoderSpec,
    GridBias,
    LayerNames,
    Part,
    Patches,
    Pooler,
    read_spec,
)

VIT_NAMES = LayerNames(
    "attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense",
    "layernorm_before", "intermediate.dense", "output.dense", "layernorm_after",
)  # fmt: skip
_CLIP = LayerNames(
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "layer_norm1", "mlp.fc1", "mlp.fc2",
    "layer_norm2",
)  # fmt: skip
QKV: frozenset[Part] = frozenset({"query", "key", "value"})


def _patches(c: ConfigFields, size: int, patch: int, **parts: Any) -> Patches:
    found = Patches(c.whole("num_channels", 3), c.pair("image_size", size), c.pair("patch_size", patch), **parts)
    if found.positions == found.leading:
        raise c.wrong("image_size", f"at least the size of a patch, {found.patch}")
    return found


def _vit(c: ConfigFields, prefix: str = "vit.", eps: float = 1e-12, **parts: Any) -> EncoderSpec:
    """Read ViT (Dosovitskiy et al. 2021)."""
    inputs = parts.pop("inputs", None) or _patches(c, 224, 16)
    pooler = Pooler("first", dense="pooler.dense", activation=c.data.get("pooler_act") or "tanh", optional=True)
    c.only("pooler_output_size", c.data.get("hidden_size"), None)
    own = {"names": VIT_NAMES, "norm_first": True, "last_norm": "layernorm", "pooler": pooler, "inputs": inputs}
    unbiased = frozenset() if c.truth("qkv_bias", True) else QKV
    return read_spec(c, prefix, UNTYPED, eps=eps, **{**own, "unbiased": unbiased, **parts})


def _deit(c: ConfigFields) -> EncoderSpec:
    """Read DeiT (Touvron et al. 2021), with a token for distillation."""
    return _vit(
        c, "deit.", inputs=_patches(c, 224, 16, tokens=("embeddings.cls_token", "embeddings.distillation_token"))
    )  # fmt: skip


def _ijepa(c: ConfigFields) -> EncoderSpec:
    """Read I-JEPA (Assran et al. 2023), which has no token beside the patches."""
    return _vit(c, "ijepa.", inputs=_patches(c, 224, 14, tokens=()), image_classes=("mean",))


def _dinov2(c: ConfigFields, prefix: str = "dinov2.", registers: int = 0) -> EncoderSpec:
    """Read DINOv2 (Oquab et al. 2023), with registers (Darcet et al. 2024) or without."""
    gated = c.truth("use_swiglu_ffn", False)
    names = replace(
        VIT_NAMES, middle_norm="norm1", last_norm="norm2", middle_scale="layer_scale1.lambda1", last_scale="layer_scale2.lambda1",
        inner="mlp.weights_in#0/2" if gated else "mlp.fc1", gate="mlp.weights_in#1/2" if gated else "",
        outer="mlp.weights_out" if gated else "mlp.fc2",
    )  # fmt: skip
    inputs = _patches(
        c, 224, 14, registers="embeddings.register_tokens" if registers else "", registers_count=registers
    )
    inner = c.whole("hidden_size") * c.whole("mlp_ratio", 4)
    fields = ConfigFields({**c.data, "intermediate_size": (inner * 2 // 3 + 7) // 8 * 8 if gated else inner}, c.where)
    spec = _vit(fields, prefix, 1e-6, inputs=inputs, names=names, pooler=None, image_classes=("first", "mean"))
    return replace(spec, activation="silu") if gated else spec


def _dinov2_with_registers(c: ConfigFields) -> EncoderSpec:
    return _dinov2(c, "dinov2_with_registers.", c.whole("num_register_tokens", 4))


def _beit(c: ConfigFields, prefix: str = "beit.") -> EncoderSpec:
    """Read BEiT (Bao et al. 2022)."""
    inputs = _patches(
        c, 224, 16, table="embeddings.position_embeddings" if c.truth("use_absolute_position_embeddings", False) else ""
    )
    if len({*inputs.size}) + len({*inputs.patch}) > 2:
        raise c.wrong("image_size", "one number, and one of patch_size: those of a square image")
    scaled = c.number("layer_scale_init_value", 0.1, -math.inf, math.inf, "a number") > 0
    scales = {"middle_scale": "lambda_1", "last_scale": "lambda_2"} if scaled else {}
    shared, own = c.truth("use_shared_relative_position_bias", False), c.truth("use_relative_position_bias", False)
    name = "relative_position_bias"
    bias = GridBias(f"encoder.{name}" if shared else "", f"attention.attention.{name}" if own else "")
    mean = c.truth("use_mean_pooling", True)
    return read_spec(
        c, prefix, UNTYPED, eps=1e-12, inputs=inputs, names=replace(VIT_NAMES, **scales), norm_first=True,
        last_norm="" if mean else "layernorm", pooler=Pooler("patches", norm="pooler.layernorm") if mean else Pooler("first"),
        unbiased=frozenset({"key"}), image_classes=("pooled",), grid_bias=bias if shared or own else None,
    )  # fmt: skip


def _data2vec_vision(c: ConfigFields) -> EncoderSpec:
    """Read data2vec for images (Baevski et al. 2022)."""
    spec = _beit(c, "data2vec_vision.")
    assert spec.pooler is not None
    return replace(spec, pooler=replace(spec.pooler, optional=True))  # a bare model has none


def _clip_vision(c: ConfigFields) -> EncoderSpec:
    """Read the vision encoder of CLIP (Radford et al. 2021)."""
    inputs = _patches(
        c, 224, 32, projection="embeddings.patch_embedding", biased=False, table="embeddings.position_embedding.weight",
        tokens=("embeddings.class_embedding",), flat=True, norm="pre_layrnorm",
    )  # fmt: skip
    return read_spec(
        c, "vision_model.", UNTYPED, "encoder.layers.{}", "quick_gelu", 1e-5, inputs=inputs, names=_CLIP, norm_first=True,
        pooler=Pooler("first", norm="post_layernorm"), image_classes=("mean",),
        projection=("visual_projection", c.whole("projection_dim", 512)),
    )  # fmt: skip


def _clip_text(c: ConfigFields) -> EncoderSpec:
    """Read the text encoder of CLIP (Radford et al. 2021)."""
    eos = c.data.get("eos_token_id", 49407)
    if type(eos) is not int:
        raise c.wrong("eos_token_id", "a whole number")
    words = {"words": "embeddings.token_embedding", "table": "embeddings.position_embedding", "norm": ""}
    return read_spec(
        c, "text_model.", UNTYPED, "encoder.layers.{}", "quick_gelu", 1e-5, words, names=_CLIP, norm_first=True, causal=True,
        last_norm="final_layer_norm", pooler=Pooler("eos", eos=None if eos == 2 else eos),
        projection=("text_projection", c.whole("projection_dim", 512)),
    )  # fmt: skip


def _siglip_vision(c: ConfigFields) -> EncoderSpec:
    """Read the vision encoder of SigLIP (Zhai et al. 2023)."""
    inputs = _patches(
        c, 224, 16, projection="embeddings.patch_embedding", table="embeddings.position_embedding.weight", tokens=(), flat=True
    )  # fmt: skip
    return read_spec(
        c, "vision_model.", UNTYPED, "encoder.layers.{}", "gelu_pytorch_tanh", 1e-6, inputs=inputs, names=_CLIP,
        norm_first=True, last_norm="post_layernorm", image_classes=("mean",),
        pooler=Pooler("probe") if c.truth("vision_use_head", True) else None,
    )  # fmt: skip


def _siglip_text(c: ConfigFields) -> EncoderSpec:
    """Read the text encoder of SigLIP (Zhai et al. 2023)."""
    c.only("projection_size", c.data.get("hidden_size"), None)
    words = {"words": "embeddings.token_embedding", "table": "embeddings.position_embedding", "norm": ""}
    return read_spec(
        c, "text_model.", UNTYPED, "encoder.layers.{}", "gelu_pytorch_tanh", 1e-6, words, names=_CLIP, norm_first=True,
        last_norm="final_layer_norm", pooler=Pooler("last", dense="head"),
    )  # fmt: skip


VISION: Mapping[str, Callable[[ConfigFields], EncoderSpec]] = {
    "vit": _vit,
    "deit": _deit,
    "ijepa": _ijepa,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2_with_registers,
    "beit": _beit,
    "data2vec-vision": _data2vec_vision,
    "clip_vision_model": _clip_vision,
    "clip_text_model": _clip_text,
    "siglip_vision_model": _siglip_vision,
    "siglip_text_model": _siglip_text,
}
