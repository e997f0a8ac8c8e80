"""The families of encoders of sound samples and of spectrograms.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.family import Family, Finish, Key, NormRule, layer_norm
from relax_tune.ir.frontend.hf.families.vision import IMAGES, VIT
from relax_tune.ir.frontend.hf.transformer.inputs import Adapter, Patches, Subsampling, Waves
from relax_tune.ir.frontend.hf.transformer.mixers import Conformer
from relax_tune.ir.frontend.hf.transformer.spec import Buckets, Names, Outputs, Pooler, Stack

MASKED = "return_attention_mask"  # of preprocessor_config.json
WAV2VEC2 = Names(
    "wav2vec2.", layers="encoder.layers", before_attention="layer_norm", query="attention.q_proj", key="attention.k_proj",
    value="attention.v_proj", out="attention.out_proj", before_mlp="final_layer_norm", gate=None,
    up="feed_forward.intermediate_dense", down="feed_forward.output_dense", last_norm=None,
)  # fmt: skip


def _waves(c: ConfigFields) -> Waves:
    """Read the convolutions over samples and positions."""
    norm = c.chosen("feat_extract_norm", "group", ("group", "layer"))
    widths = c.wholes("conv_dim", (512,) * 7)
    groups = c.whole("num_conv_pos_embedding_groups", 16)
    c.multiple("hidden_size", c.whole("hidden_size"), "num_conv_pos_embedding_groups", groups)
    return Waves(
        widths, c.wholes("conv_kernel", (10, 3, 3, 3, 3, 2, 2), len(widths)), c.wholes("conv_stride", (5, 2, 2, 2, 2, 2, 2), len(widths)),
        c.truth("conv_bias", False), "group" if norm == "group" else "layer", c.chosen("feat_extract_activation", "gelu", ACTIVATIONS),
        projected_norm=True,
        # preprocessors without the field give a mask to models whose convolutions all have a norm
        masked=c.truth(MASKED, norm == "layer"), reach=c.whole("num_conv_pos_embeddings", 128), groups=groups,
    )  # fmt: skip


def _adapted_waves(c: ConfigFields) -> Waves:
    """Read the convolutions behind the last layer, too."""
    w = _waves(c)
    if not c.truth("add_adapter", False):
        return w
    hidden = c.whole("hidden_size")
    width = c.whole("output_hidden_size", hidden)
    named = str(c.data.get("architectures") or "")
    if "ForSequence" in named or "ForAudioFrame" in named:
        raise c.wrong("add_adapter", "false with this head")
    kernel, stride = c.whole("adapter_kernel_size", 3), c.whole("adapter_stride", 2)
    return replace(w, adapter=Adapter(c.whole("num_adapter_layers", 3), kernel, stride, width, width != hidden))


def _hubert_waves(c: ConfigFields) -> Waves:
    norm, batch = c.truth("feat_proj_layer_norm", True), c.truth("conv_pos_batch_norm", False)
    return replace(_waves(c), projected_norm=norm, batch_norm=batch)


def _data2vec_waves(c: ConfigFields) -> Waves:
    rounds, reach = c.whole("num_conv_pos_embeddings", 5), c.whole("conv_pos_kernel_size", 19)
    return replace(_waves(c), norm="layer", masked=c.truth(MASKED, True), rounds=rounds, reach=reach)


def _wav2vec2(c: ConfigFields, stack: Stack) -> Stack:
    """Read the order of norms: `stable` models have one before each block, others one after the embeddings."""
    stable, norm = c.truth("do_stable_layer_norm", False), "encoder.layer_norm"
    if stable:
        return replace(stack, order="pre_norm", names=replace(stack.names, last_norm=norm))
    assert isinstance(stack.embedding, Waves)
    return replace(stack, embedding=replace(stack.embedding, last_norm=norm))


def _data2vec(c: ConfigFields, stack: Stack) -> Stack:
    return _wav2vec2(ConfigFields({}, c.where), stack)


def _wavlm(c: ConfigFields, stack: Stack) -> Stack:
    """Read the buckets of distances, scaled by gates."""
    buckets = Buckets(
        "encoder.layers.0.attention.rel_attn_embed", c.whole("num_buckets", 320), c.whole("max_bucket_distance", 800),
        gate="attention.gru_rel_pos",
    )  # fmt: skip
    return replace(_wav2vec2(c, stack), position_bias=buckets)


def _spectrogram(c: ConfigFields) -> Patches:
    patch, sides = c.pair("patch_size", 16), (c.whole("num_mel_bins", 128), c.whole("max_length", 1024))
    embedding = Patches(
        1, sides, patch, tokens=("embeddings.cls_token", "embeddings.distillation_token"),
        stride=(c.whole("frequency_stride", 10), c.whole("time_stride", 10)), spectrogram=True,
    )  # fmt: skip
    if embedding.positions == embedding.leading:
        raise c.wrong("patch_size", f"at most the sides of a spectrogram, {sides}")
    return embedding


def _subsampling(c: ConfigFields) -> Subsampling:
    factor, stride = c.whole("subsampling_factor", 8), c.whole("subsampling_conv_stride", 2)
    kernel, mels = c.whole("subsampling_conv_kernel_size", 3), c.whole("num_mel_bins", 80)
    if factor < 2 or factor & (factor - 1):
        raise c.wrong("subsampling_factor", "a power of 2 of at least 2")
    if kernel % 2 == 0:
        raise c.wrong("subsampling_conv_kernel_size", "an odd number")
    rounds = factor.bit_length() - 1
    scale = c.whole("hidden_size") ** 0.5 if c.truth("scale_input", True) else 1.0
    s = Subsampling(
        mels, c.whole("subsampling_conv_channels", 256), kernel, stride, rounds, mels // stride**rounds,
        c.whole("max_position_embeddings", 5000), scale,
    )  # fmt: skip
    if s.frames(mels) != s.columns:
        raise c.wrong("num_mel_bins", f"a multiple of {stride**rounds}")
    return s


def _parakeet(c: ConfigFields, stack: Stack) -> Stack:
    kernel = c.whole("conv_kernel_size", 9)
    if kernel % 2 == 0:
        raise c.wrong("conv_kernel_size", "an odd number")
    return replace(stack, conformer=Conformer(kernel, c.truth("convolution_bias", True)))


BIASED = Key("attention_bias", True)
PARAKEET = Family(
    names=Names("encoder.", gate=None, up="linear1", down="linear2", last_norm=None), causal=False, groups=None, size=None, rope=None,
    norm=NormRule("layer", 1e-5, bias=True), activation=("hidden_act", "silu"), qkv_bias=BIASED, out_bias=BIASED, mlp_bias=BIASED,
    embedding=_subsampling, finish=_parakeet,
    defaults={"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 4096},
)  # fmt: skip


def _sound(prefix: str, embedding: Callable[[ConfigFields], Waves] = _waves, finish: Finish = _wav2vec2) -> Family:
    return Family(
        names=replace(WAV2VEC2, prefix=prefix), causal=False, order="post_norm", groups=None, size=None,
        norm=layer_norm("layer_norm_eps"), activation=("hidden_act", "gelu"), qkv_bias=True, out_bias=True, mlp_bias=True, rope=None,
        embedding=embedding, finish=finish,
        defaults={
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 32
        },
        only={"add_adapter": (False, None), "adapter_attn_dim": (None,), "position_embedding_type": ("absolute", None)},
    )  # fmt: skip


SPEECH: Mapping[str, Family] = {
    "wav2vec2": replace(
        _sound("wav2vec2.", _adapted_waves), only={"adapter_attn_dim": (None,), "position_embedding_type": ("absolute", None)}
    ),
    "hubert": _sound("hubert.", _hubert_waves),
    "unispeech": _sound("unispeech."),
    "unispeech-sat": _sound("unispeech_sat."),
    "wavlm": _sound("wavlm.", finish=_wavlm),
    "data2vec-audio": _sound("data2vec_audio.", _data2vec_waves, _data2vec),
    "parakeet_encoder": PARAKEET,
    "parakeet_ctc": replace(PARAKEET, part="encoder_config"),
    "audio-spectrogram-transformer": replace(
        IMAGES, names=replace(VIT, prefix="audio_spectrogram_transformer."), embedding=_spectrogram, outputs=Outputs(pooler=Pooler("pair")),
        finish=None,
    ),
}  # fmt: skip
