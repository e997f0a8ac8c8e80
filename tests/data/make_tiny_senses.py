"""Makes tiny_senses.npz: results of models of images, of speech, and of images with text by the original framework.

Needs torch and transformers:

    python tests/data/make_tiny_senses.py [NAME ...]

Of each model of MODELS: `NAME/config` (config.json as bytes), `NAME/tensors` (the names and shapes of its weights as JSON; the weights
are those of `weight`), and of case `K` its results `NAME/K/0`, `NAME/K/1` ..., by `inputs(case, config)`. Given
names, only these models are computed.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FAMILIES = runpy.run_path(str(Path(__file__).with_name("make_tiny_families.py")))
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3}
RESIDUAL = {**STAGES, "embedding_size": 6}
NEXT = {**STAGES, "num_stages": 2}
MOBILE = {"depth_multiplier": 0.1, "min_depth": 4, "num_labels": 3}
EFFICIENT = {
    "width_coefficient": 0.25, "depth_coefficient": 1.0, "in_channels": [32, 16], "out_channels": [16, 24], "strides": [1, 2],
    "kernel_sizes": [3, 5], "num_block_repeats": [1, 2], "expand_ratios": [1, 6], "hidden_dim": 320, "num_labels": 3,
}  # fmt: skip
POOLED = {**STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}
REDUCED = {
    **STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1], "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2], "decoder_hidden_size": 12,
}  # fmt: skip
WINDOWS = {
    "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 3, "image_size": [25, 17], "patch_size": 2, "num_labels": 3,
}  # fmt: skip
ANY, FEW = ((1, 37, 41), (3, 48, 33)), ((1, 16, 11), (2, 13, 17))
LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SOUND = {
    **LAYERS, "conv_dim": [6, 8], "conv_stride": [3, 2], "conv_kernel": [5, 3], "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 9, "classifier_proj_size": 6, "num_labels": 3,
}  # fmt: skip
STABLE = {**SOUND, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
CONFORMER = {
    **LAYERS, "num_mel_bins": 8, "subsampling_factor": 4, "subsampling_conv_channels": 6, "conv_kernel_size": 5, "hidden_act": "silu",
}  # fmt: skip
SPOKEN = ((1, 11), (3, 101))
BEIT = {**LAYERS, "image_size": 12, "patch_size": 4, "num_labels": 3, "use_relative_position_bias": True}
SQUARE = ((2, 12, 12),)
TEXT = {**LAYERS, "hidden_size": 12, "vocab_size": 23, "max_position_embeddings": 18, "eos_token_id": 2}
BESIDE = {
    "text_config": TEXT, "vision_config": {**LAYERS, "image_size": 12, "patch_size": 4}, "projection_dim": 6, "num_labels": 3,
}  # fmt: skip
EVEN = {**BESIDE, "text_config": {**TEXT, "hidden_size": 16, "projection_size": 16, "hidden_act": "relu"}}
PAIRS = ((1, 1, 5), (2, 3, 13))
MODELS: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "resnet": ("ResNetForImageClassification", {**RESIDUAL, "hidden_act": "gelu"}, ANY),
    "resnet-basic": ("ResNetModel", {**RESIDUAL, "layer_type": "basic", "downsample_in_first_stage": True}, ((1, 1, 2), (2, 29, 31))),
    "resnet-early": ("ResNetBackbone", {**RESIDUAL, "downsample_in_bottleneck": True, "out_features": ["stem", "stage2"]}, FEW),
    "regnet": ("RegNetForImageClassification", {**RESIDUAL, "groups_width": 4, "hidden_act": "silu"}, ANY),
    "regnet-x": ("RegNetModel", {**RESIDUAL, "groups_width": 8, "layer_type": "x", "downsample_in_first_stage": False}, FEW),
    "convnext": ("ConvNextForImageClassification", {**NEXT, "layer_norm_eps": 0.25}, ANY),
    "convnext-bare": ("ConvNextModel", {**NEXT, "layer_scale_init_value": 0.0, "hidden_act": "relu"}, ((2, 8, 11),)),
    "convnextv2": ("ConvNextV2Backbone", {**NEXT, "out_features": ["stage1", "stage2"], "patch_size": 3}, FEW),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", MOBILE, ((1, 1, 3), (2, 67, 48))),
    "mobilenet_v1-bare": ("MobileNetV1Model", {**MOBILE, "tf_padding": False, "hidden_act": "gelu"}, FEW),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {**MOBILE, "num_labels": 1}, ((1, 1, 3), (2, 67, 48))),
    "mobilenet_v2-segments": ("MobileNetV2ForSemanticSegmentation", {**MOBILE, "output_stride": 8}, ((2, 37, 41),)),
    "mobilenet_v2-later": (
        "MobileNetV2Model", {**MOBILE, "tf_padding": False, "first_layer_is_expansion": False, "finegrained_output": False,
        "output_stride": 16}, ((2, 37, 41),),
    ),
    "efficientnet": ("EfficientNetForImageClassification", EFFICIENT, ((1, 5, 6), (3, 64, 41))),
    "efficientnet-max": (
        "EfficientNetModel", {**EFFICIENT, "pooling_type": "max", "depthwise_padding": [1], "kernel_sizes": [3, 4]}, ((1, 7, 9),),
    ),
    "poolformer": ("PoolFormerForImageClassification", POOLED, ANY),
    "poolformer-bare": ("PoolFormerModel", {**POOLED, "use_layer_scale": False, "pool_size": 5}, ((1, 3, 5), (2, 37, 41))),
    "segformer": ("SegformerForSemanticSegmentation", REDUCED, ANY),
    "segformer-classes": ("SegformerForImageClassification", {**REDUCED, "num_labels": 1}, ((2, 31, 37),)),
    "swin": ("SwinForImageClassification", WINDOWS, ((1, 25, 17), (3, 25, 17))),
    "beit": ("BeitForImageClassification", {**BEIT, "use_shared_relative_position_bias": True, "use_mask_token": True}, SQUARE),
    "beit-first": ("BeitModel", {**BEIT, "use_mean_pooling": False, "use_absolute_position_embeddings": True}, SQUARE),
    "data2vec-vision-bare": ("Data2VecVisionModel", {**BEIT, "use_mean_pooling": False}, SQUARE),
    "data2vec-vision": ("Data2VecVisionForImageClassification", {**BEIT, "layer_scale_init_value": 0.0}, SQUARE),
    "wav2vec2": ("Wav2Vec2ForCTC", SOUND, SPOKEN),
    "wav2vec2-stable": ("Wav2Vec2ForSequenceClassification", {**STABLE, "conv_bias": True, "use_weighted_layer_sum": True}, SPOKEN),
    "wav2vec2-bare": ("Wav2Vec2Model", {**STABLE, "do_stable_layer_norm": False, "num_conv_pos_embeddings": 5}, SPOKEN),
    "wav2vec2-frames": ("Wav2Vec2ForAudioFrameClassification", {**SOUND, "use_weighted_layer_sum": True}, SPOKEN),
    "hubert": ("HubertForSequenceClassification", {**SOUND, "conv_pos_batch_norm": True, "feat_proj_layer_norm": False}, SPOKEN),
    "hubert-stable": ("HubertForCTC", {**STABLE, "hidden_act": "relu", "feat_extract_activation": "silu"}, SPOKEN),
    "unispeech": ("UniSpeechForCTC", {**STABLE, "num_ctc_classes": 9, "layer_norm_eps": 0.25}, SPOKEN),
    "unispeech-sat": ("UniSpeechSatForSequenceClassification", SOUND, SPOKEN),
    "wavlm": ("WavLMForCTC", {**SOUND, "num_buckets": 8, "max_bucket_distance": 10}, SPOKEN),
    "wavlm-stable": ("WavLMModel", {**STABLE, "num_buckets": 12, "max_bucket_distance": 9}, SPOKEN),
    "data2vec-audio": ("Data2VecAudioForCTC", {**SOUND, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 4}, SPOKEN),
    "spectrogram": (
        "ASTForAudioClassification", {**LAYERS, "patch_size": 4, "frequency_stride": 3, "time_stride": 2, "max_length": 20,
        "num_mel_bins": 13, "num_labels": 3}, ((1, 20, 13), (3, 20, 13)),
    ),
    "spectrogram-bare": (
        "ASTModel", {**LAYERS, "patch_size": 4, "frequency_stride": 4, "time_stride": 5, "max_length": 16, "num_mel_bins": 8,
        "qkv_bias": False}, ((2, 16, 8),),
    ),
    "parakeet": ("ParakeetForCTC", {"encoder_config": CONFORMER, "vocab_size": 9, "pad_token_id": 8}, ((1, 9), (3, 61))),
    "parakeet-bare": (
        "ParakeetEncoder", {**CONFORMER, "attention_bias": False, "convolution_bias": False, "subsampling_factor": 2, "scale_input": False},
        ((2, 23),),
    ),
    "clip": ("CLIPModel", BESIDE, PAIRS),
    "clip-classes": ("CLIPForImageClassification", BESIDE, PAIRS),
    "siglip": ("SiglipModel", EVEN, PAIRS),
    "siglip-classes": ("SiglipForImageClassification", EVEN, PAIRS),
    "siglip2": ("Siglip2Model", {**EVEN, "vision_config": {**EVEN["vision_config"], "num_patches": 9, "patch_size": 2}}, PAIRS),
    "siglip2-classes": (
        "Siglip2ForImageClassification", {**EVEN, "vision_config": {**EVEN["vision_config"], "num_patches": 9, "patch_size": 2}}, PAIRS
    ),
    "swin-bare": ("SwinModel", {**WINDOWS, "image_size": 16, "use_absolute_embeddings": True, "qkv_bias": False}, ((2, 16, 16),)),
}  # fmt: skip
RESULTS = (
    "logits", "feature_maps", "logits_per_image", "logits_per_text", "text_embeds", "image_embeds", "last_hidden_state", "pooler_output",
)  # fmt: skip


def weight(name: str, shape: tuple[int, ...]) -> Array:
    """A weight of a model by its name: as in make_tiny_families, but means near 0 and small variances."""
    drawn = np.asarray(FAMILIES["weight"](name, shape), np.float32)
    if name.endswith("running_var"):
        deep = any(part in name for part in ("1x1", "3x3", "first_conv"))  # MobileNet V2, which would amplify rounding
        return drawn * np.float32(0.5 if deep else 0.2)
    return drawn - np.float32(1) if name.endswith("running_mean") else drawn


def inputs(case: tuple[int, ...], config: dict[str, Any]) -> dict[str, Array]:
    """Every input of a model by its name."""
    rng = np.random.default_rng(case)
    mels = config.get("encoder_config", config)
    if "subsampling_factor" in mels:
        known = np.arange(case[1]) < np.maximum(case[1] - 17 * np.arange(case[0]), 9)[:, None]
        features = rng.standard_normal((*case, mels["num_mel_bins"])).astype(np.float32)
        return {"input_features": features, "attention_mask": known.astype(np.int64)}
    if "num_mel_bins" in config:
        return {"input_values": rng.standard_normal(case).astype(np.float32)}
    if "vision_config" in config:
        images, texts, n = case
        text = FAMILIES["inputs"](texts, n, {"vocab_size": 23})
        ids = np.where(np.arange(n) == text["attention_mask"].sum(1, keepdims=True) - 1, 2, text["input_ids"])
        if "num_patches" in config["vision_config"]:
            shapes = np.array([[2, 5], [4, 3], [1, 1]], np.int64)[:images]
            known = np.arange(12) < shapes.prod(1, keepdims=True)
            rows = rng.standard_normal((images, 12, 12)).astype(np.float32)
            mask = {"pixel_attention_mask": known.astype(np.int64), "spatial_shapes": shapes}
            return {"input_ids": ids, "attention_mask": text["attention_mask"], "pixel_values": rows, **mask}
        pixels = rng.standard_normal((images, 3, 12, 12)).astype(np.float32)
        return {"input_ids": ids, "attention_mask": text["attention_mask"], "pixel_values": pixels}
    if "conv_dim" not in config:
        return {"pixel_values": rng.standard_normal((case[0], 3, *case[1:])).astype(np.float32)}
    b, n = case
    # rows but the first are padded, if the model has a mask
    known = np.arange(n) < np.maximum(n - 17 * np.arange(b), 11)[:, None]
    sound = rng.standard_normal(case).astype(np.float32) + np.float32(0.5)
    if config.get("feat_extract_norm", "layer") == "group":
        return {"input_values": sound}
    return {"input_values": np.where(known, sound, np.float32(0)), "attention_mask": known.astype(np.int64)}


def results(output: Any, known: Any = None) -> list[Any]:
    """Results of a model in the order of the importer. known: frames that are no padding; results of others are replaced by NaN"""
    values = [getattr(output, name) for name in RESULTS if getattr(output, name, None) is not None]
    if known is not None:
        values = [each.masked_fill(~known[..., None], float("nan")) for each in values]
    return [part for each in values for part in (each if isinstance(each, tuple) else (each,))]


def main(out: Path, names: list[str]) -> None:
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    stored: dict[str, Array] = dict(np.load(out)) if out.exists() else {}
    stored = {k: v for k, v in stored.items() if k.partition("/")[0] in MODELS}
    for name in names or MODELS:
        kind, options, cases = MODELS[name]
        cls = getattr(transformers, kind)
        model = cls(cls.config_class(**options))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            path = Path(folder, "model.safetensors")
            drawn = load_file(path)
            shapes = {k: v.shape for k, v in drawn.items() if v.dtype == np.float32}
            save_file({**drawn, **{k: weight(k, shape) for k, shape in shapes.items()}}, path, {"format": "pt"})
            model = cls.from_pretrained(folder, attn_implementation="eager").eval()
            text = Path(folder, "config.json").read_bytes()
        stored = {k: v for k, v in stored.items() if k.partition("/")[0] != name}
        stored[f"{name}/config"] = np.frombuffer(text, np.uint8)
        stored[f"{name}/tensors"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        for number, case in enumerate(cases):
            given = inputs(case, json.loads(text))
            with torch.no_grad():
                known = {k: torch.from_numpy(v) for k, v in given.items()}
                if name.endswith("-classes") and "input_ids" in known:
                    known = {k: v for k, v in known.items() if k not in ("input_ids", "attention_mask")}
                output = model(**known)
                frames = None
                if name.startswith("parakeet"):
                    length = results(output)[0].shape[1]
                    frames = model._get_output_attention_mask(known["attention_mask"], length)
            stored |= {f"{name}/{number}/{k}": part.numpy() for k, part in enumerate(results(output, frames))}
    np.savez_compressed(out, **stored)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_senses.npz"), sys.argv[1:])
