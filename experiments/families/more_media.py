"""Further models of `model_families.py` of transformers: images, speech and series, of families that `models.py` does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.families.models import (
    BERT,
    BN,
    HIDDEN,
    IMAGE,
    SPECIAL,
    STATIC_IMAGE,
    TEXT,
    VIT,
    WORDS,
    Call,
    Call2,
    Call3,
    Family,
    ids,
    lazily,
    text,
    vision,
)
from experiments.families.more_text import (
    SEQ2SEQ,
)

BATCH = ((2,), (1,), (3,), (5,))
SPEECH: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    vocab_size=WORDS,
    conv_dim=(16, 16, 16),
    conv_stride=(5, 2, 2),
    conv_kernel=(10, 3, 3),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
)
STAGES: dict[str, Any] = dict(hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1], num_labels=7)


def wave(name: str, result: str = HIDDEN, **config: Any) -> Family:
    inner = lazily(name, config)
    inputs = lambda g, s: (torch.randn(*s, generator=g),)
    make = lambda: Call(inner(), "input_values", result)
    shapes = ((2, 400), (1, 320), (3, 640), (1, 1020))
    return Family(make, inputs, ({0: "b", 1: "20*samples"},), shapes, {"samples": 4})


def fixed(
    name: str, argument: str, result: str, shape: Sequence[int], calling: Mapping[str, Any] | None = None, **config: Any
) -> Family:
    """Return a model of one float input whose only dynamic dim is the batch."""
    inner = lazily(name, config)
    inputs = lambda g, s: (torch.randn(*s, *shape, generator=g),)
    return Family(lambda: Call(inner(), argument, result, **(calling or {})), inputs, ({0: "b"},), BATCH)


def speech_text() -> Family:
    config = dict(
        SEQ2SEQ,
        max_source_positions=64,
        max_target_positions=64,
        input_feat_per_channel=8,
        input_channels=1,
        conv_channels=16,
    )
    inner = lazily("Speech2TextForConditionalGeneration", config)
    make = lambda: Call2(inner(), "input_features decoder_input_ids", "logits", use_cache=False)
    inputs = lambda g, s: (torch.randn(s[0], 48, 8, generator=g), ids(g, *s))
    return Family(make, inputs, ({0: "b"}, BN), TEXT)


def clip_whole() -> Family:
    words = dict(BERT, **SPECIAL)
    config = dict(text_config=words, vision_config=VIT, projection_dim=24)
    inner = lazily("CLIPModel", config)
    make = lambda: Call3(
        inner(), "input_ids attention_mask pixel_values", "logits_per_image logits_per_text text_embeds"
    )

    def inputs(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        return (*text(g, shape), torch.randn(3, 3, 64, 64, generator=g))

    return Family(make, inputs, (BN, BN, {}), TEXT)


MORE_MEDIA: dict[str, Family] = {
    # images
    "beit": vision("BeitModel", HIDDEN, STATIC_IMAGE, **VIT),
    "data2vec_vision": vision("Data2VecVisionModel", HIDDEN, STATIC_IMAGE, **VIT),
    "deit": vision("DeiTForImageClassification", "logits", STATIC_IMAGE, **VIT, num_labels=7),
    "swinv2": vision(
        "Swinv2Model",
        HIDDEN,
        STATIC_IMAGE,
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    "levit": vision(
        "LevitForImageClassification",
        "logits",
        STATIC_IMAGE,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=7,
    ),
    "mobilevit": vision(
        "MobileViTForImageClassification",
        "logits",
        STATIC_IMAGE,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
        num_labels=7,
    ),
    "mobilevitv2": vision(
        "MobileViTV2ForImageClassification", "logits", STATIC_IMAGE, image_size=64, width_multiplier=0.25, num_labels=7
    ),
    "mobilenet_v1": vision(
        "MobileNetV1ForImageClassification", "logits", STATIC_IMAGE, image_size=64, depth_multiplier=0.25, num_labels=7
    ),
    "mobilenet_v2": vision(
        "MobileNetV2ForImageClassification", "logits", STATIC_IMAGE, image_size=64, depth_multiplier=0.35, num_labels=7
    ),
    "regnet": vision(
        "RegNetForImageClassification",
        "logits",
        IMAGE,
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        groups_width=8,
        num_labels=7,
    ),
    "bit": vision(
        "BitForImageClassification",
        "logits",
        IMAGE,
        embedding_size=32,
        hidden_sizes=[128, 128, 256, 256],
        depths=[1, 1, 1, 1],
        num_labels=7,
    ),
    "poolformer": vision(
        "PoolFormerForImageClassification",
        "logits",
        IMAGE,
        hidden_sizes=[16, 24, 32, 40],
        depths=[1, 1, 1, 1],
        num_labels=7,
    ),
    "pvt": vision(
        "PvtForImageClassification",
        "logits",
        STATIC_IMAGE,
        image_size=64,
        hidden_sizes=[16, 24, 32, 40],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        sequence_reduction_ratios=[8, 4, 2, 1],
        num_labels=7,
    ),
    "pvt_v2": vision(
        "PvtV2ForImageClassification",
        "logits",
        IMAGE,
        hidden_sizes=[16, 24, 32, 40],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        num_labels=7,
    ),
    "cvt": vision(
        "CvtForImageClassification",
        "logits",
        STATIC_IMAGE,
        embed_dim=[16, 24, 32],
        num_heads=[1, 2, 4],
        depth=[1, 2, 3],
        num_labels=7,
    ),
    "convnextv2": vision("ConvNextV2ForImageClassification", "logits", IMAGE, **STAGES),
    "dinov2_registers": vision("Dinov2WithRegistersModel", HIDDEN, STATIC_IMAGE, **VIT),
    "dinov3": vision("DINOv3ViTModel", HIDDEN, IMAGE, **VIT),
    "focalnet": vision(
        "FocalNetForImageClassification",
        "logits",
        STATIC_IMAGE,
        image_size=64,
        embed_dim=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        num_labels=7,
    ),
    "hiera": vision(
        "HieraModel",
        HIDDEN,
        STATIC_IMAGE,
        embed_dim=16,
        image_size=[64, 64],
        depths=[1, 1, 1],
        num_heads=[1, 2, 4],
        query_stride=[2, 2],
        num_query_pool=2,
        masked_unit_size=[4, 4],
    ),
    "ijepa": vision("IJepaModel", HIDDEN, STATIC_IMAGE, **VIT),
    "vit_msn": vision("ViTMSNForImageClassification", "logits", STATIC_IMAGE, **VIT, num_labels=7),
    "yolos": vision(
        "YolosForObjectDetection",
        "logits pred_boxes",
        STATIC_IMAGE,
        **dict(VIT, image_size=[64, 64]),
        num_detection_tokens=10,
        num_labels=7,
    ),
    "depth_anything": vision(
        "DepthAnythingForDepthEstimation",
        "predicted_depth",
        STATIC_IMAGE,
        backbone_config=dict(
            VIT,
            model_type="dinov2",
            out_features=["stage1", "stage2"],
            reshape_hidden_states=False,
            apply_layernorm=True,
        ),
        reassemble_hidden_size=32,
        reassemble_factors=[4, 2],
        neck_hidden_sizes=[16, 24],
        fusion_hidden_size=16,
        head_hidden_size=8,
        patch_size=16,
    ),
    "glpn": vision(
        "GLPNForDepthEstimation",
        "predicted_depth",
        IMAGE,
        num_encoder_blocks=4,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 24, 32, 40],
        decoder_hidden_size=16,
        num_attention_heads=[1, 2, 4, 4],
    ),
    "swin2sr": vision(
        "Swin2SRForImageSuperResolution",
        "reconstruction",
        STATIC_IMAGE,
        image_size=64,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        upscale=2,
    ),
    "textnet": vision(
        "TextNetForImageClassification",
        "logits",
        IMAGE,
        hidden_sizes=[16, 16, 16, 16, 16],
        stem_out_channels=16,
        num_labels=7,
    ),
    "hgnet_v2": vision("HGNetV2ForImageClassification", "logits", IMAGE, num_labels=7),
    "swiftformer": vision(
        "SwiftFormerForImageClassification",
        "logits",
        STATIC_IMAGE,
        image_size=64,
        depths=[1, 1, 1, 1],
        embed_dims=[16, 24, 32, 40],
        num_labels=7,
    ),
    "clipseg_vision": vision("CLIPSegVisionModel", HIDDEN, STATIC_IMAGE, **VIT),
    "vitdet": vision("VitDetModel", HIDDEN, STATIC_IMAGE, **dict(VIT, num_channels=3, window_size=2)),
    "videomae": fixed(
        "VideoMAEModel", "pixel_values", HIDDEN, (4, 3, 32, 32), **dict(VIT, image_size=32), num_frames=4
    ),
    "vivit": fixed(
        "VivitModel",
        "pixel_values",
        HIDDEN,
        (4, 3, 32, 32),
        **dict(VIT, image_size=32),
        num_frames=4,
        tubelet_size=[2, 16, 16],
    ),
    "timesformer": fixed(
        "TimesformerModel", "pixel_values", HIDDEN, (4, 3, 32, 32), **dict(VIT, image_size=32), num_frames=4
    ),
    "audio_spectrogram": fixed(
        "ASTForAudioClassification",
        "input_values",
        "logits",
        (64, 16),
        **dict(VIT, patch_size=8),
        max_length=64,
        num_mel_bins=16,
        num_labels=7,
    ),
    "clip_both": clip_whole(),
    # speech
    "hubert": wave("HubertModel", **SPEECH),
    "wavlm": wave("WavLMModel", **SPEECH, num_buckets=16, max_bucket_distance=32),
    "unispeech": wave("UniSpeechModel", **SPEECH),
    "unispeech_sat": wave("UniSpeechSatModel", **SPEECH),
    "sew": wave("SEWModel", **SPEECH, squeeze_factor=2),
    "data2vec_audio": wave("Data2VecAudioModel", **SPEECH, conv_pos_kernel_size=7),
    "wav2vec2_ctc": wave(
        "Wav2Vec2ForCTC", "logits", **SPEECH, do_stable_layer_norm=True, feat_extract_norm="layer", **SPECIAL
    ),
    "wav2vec2_conformer": wave(
        "Wav2Vec2ConformerModel", **SPEECH, conv_depthwise_kernel_size=7, position_embeddings_type="rotary"
    ),
    "speech_to_text": speech_text(),
    # series
    "patchtst": fixed(
        "PatchTSTForPrediction",
        "past_values",
        "prediction_outputs",
        (32, 3),
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        prediction_length=8,
    ),
    "patchtsmixer": fixed(
        "PatchTSMixerForPrediction",
        "past_values",
        "prediction_outputs",
        (32, 3),
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_layers=2,
        prediction_length=8,
    ),
}
