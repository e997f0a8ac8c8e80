"""The families of encoders of sound: of samples, and of spectrograms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder_spec import (
    UNTYPED,
    Buckets,
    EncoderSpec,
    LayerNames,
    Patches,
    Pooler,
    Waves,
    read_spec,
)
from relax_tune.ir.frontend.hf.vision_families import QKV, VIT_NAMES

_LAYER = LayerNames(
    "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj", "layer_norm",
    "feed_forward.intermediate_dense", "feed_forward.output_dense", "final_layer_norm",
)  # fmt: skip
MASKED = "return_attention_mask"  # of preprocessor_config.json


def _wav2vec2(c: ConfigFields, prefix: str = "wav2vec2.", stable: bool | None = None, **parts: Any) -> EncoderSpec:
    """Read wav2vec 2.0 (Baevski et al. 2020). parts: of Waves, as the family has them otherwise"""
    c.only("add_adapter", False, None)
    c.only("adapter_attn_dim", None)
    stable = c.truth("do_stable_layer_norm", False) if stable is None else stable
    kind = parts.get("norm") or c.chosen("feat_extract_norm", "group", ("group", "layer"))
    widths = c.wholes("conv_dim", (512,) * 7)
    hidden, groups = c.whole("hidden_size", 768), c.whole("num_conv_pos_embedding_groups", 16)
    c.multiple("hidden_size", hidden, "num_conv_pos_embedding_groups", groups)
    own: dict[str, Any] = {
        "widths": widths, "kernels": c.wholes("conv_kernel", (10, 3, 3, 3, 3, 2, 2), len(widths)),
        "strides": c.wholes("conv_stride", (5, 2, 2, 2, 2, 2, 2), len(widths)), "biased": c.truth("conv_bias", False),
        "norm": kind, "activation": c.chosen("feat_extract_activation", "gelu", ACTIVATIONS), "projected_norm": True,
        # a preprocessor that says nothing gives a mask to models whose every convolution is normalised
        "masked": c.truth(MASKED, kind == "layer"), "reach": c.whole("num_conv_pos_embeddings", 128), "groups": groups,
        "last_norm": "" if stable else "encoder.layer_norm",
    }  # fmt: skip
    usual = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 32,
    }  # fmt: skip
    return read_spec(
        ConfigFields({**usual, **c.data}, c.where), prefix, UNTYPED, "encoder.layers.{}", eps=1e-5, names=_LAYER,
        inputs=Waves(**{**own, **parts}), norm_first=stable, last_norm="encoder.layer_norm" if stable else "",
    )  # fmt: skip


def _hubert(c: ConfigFields) -> EncoderSpec:
    """Read HuBERT (Hsu et al. 2021)."""
    projected, batch = c.truth("feat_proj_layer_norm", True), c.truth("conv_pos_batch_norm", False)
    return _wav2vec2(c, "hubert.", projected_norm=projected, batch_norm=batch)


def _unispeech(c: ConfigFields) -> EncoderSpec:
    """Read UniSpeech (Wang et al. 2021)."""
    return _wav2vec2(c, "unispeech.")


def _unispeech_sat(c: ConfigFields) -> EncoderSpec:
    """Read UniSpeech-SAT (Chen et al. 2022)."""
    return _wav2vec2(c, "unispeech_sat.")


def _data2vec_audio(c: ConfigFields) -> EncoderSpec:
    """Read data2vec for sound (Baevski et al. 2022)."""
    rounds, reach = c.whole("num_conv_pos_embeddings", 5), c.whole("conv_pos_kernel_size", 19)
    return _wav2vec2(c, "data2vec_audio.", stable=False, norm="layer", rounds=rounds, reach=reach)


def _wavlm(c: ConfigFields) -> EncoderSpec:
    """Read WavLM (Chen et al. 2022), whose positions are buckets of distances, scaled by gates."""
    near = Buckets(
        "encoder.layers.0.attention.rel_attn_embed", c.whole("num_buckets", 320), c.whole("max_bucket_distance", 800),
        gate="attention.gru_rel_pos",
    )  # fmt: skip
    return replace(_wav2vec2(c, "wavlm."), buckets=near)


def _spectrogram(c: ConfigFields) -> EncoderSpec:
    """Read the Audio Spectrogram Transformer (Gong et al. 2021)."""
    patch, sides = c.pair("patch_size", 16), (c.whole("num_mel_bins", 128), c.whole("max_length", 1024))
    inputs = Patches(
        1, sides, patch, tokens=("embeddings.cls_token", "embeddings.distillation_token"),
        stride=(c.whole("frequency_stride", 10), c.whole("time_stride", 10)), spectrogram=True,
    )  # fmt: skip
    if inputs.positions == inputs.leading:
        raise c.wrong("patch_size", f"at most the sides of a spectrogram, {sides}")
    unbiased = frozenset() if c.truth("qkv_bias", True) else QKV
    return read_spec(
        c, "audio_spectrogram_transformer.", UNTYPED, eps=1e-12, inputs=inputs, names=VIT_NAMES, norm_first=True,
        last_norm="layernorm", pooler=Pooler("pair"), unbiased=unbiased,
    )  # fmt: skip


SPEECH: Mapping[str, Callable[[ConfigFields], EncoderSpec]] = {
    "wav2vec2": _wav2vec2,
    "hubert": _hubert,
    "unispeech": _unispeech,
    "unispeech-sat": _unispeech_sat,
    "wavlm": _wavlm,
    "data2vec-audio": _data2vec_audio,
    "audio-spectrogram-transformer": _spectrogram,
}
