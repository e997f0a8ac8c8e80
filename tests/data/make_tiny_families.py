"""Makes tiny_families.npz: results of encoders of many families by the original framework.

Needs torch and transformers:

    python tests/data/make_tiny_families.py [NAME ...]

Given names, only these models are computed.

Of each model of MODELS: `NAME/config` (config.json as bytes), `NAME/tensors` (the names and shapes of its weights as JSON; `weight`
draws them), and for every shape its results, `NAME/RESULT_B_N`, of `inputs(b, n, config)`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SHAPES = ((1, 1), (2, 13))
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 23,
    "max_position_embeddings": 18, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "position_biased_input": False,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
}  # fmt: skip
T5 = {
    "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 23, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
MODERN = {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 4, "global_attn_every_n_layers": 2}
MOBILE = {"intra_bottleneck_size": 8, "num_feedforward_networks": 2}
ESM = {"mask_token_id": 7, "token_dropout": True, "position_embedding_type": "rotary"}
NARROW = {**SIZES, "embedding_size": 8}
VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
}  # fmt: skip
PAGE = {
    **SIZES, "input_size": 8, "patch_size": 4, "coordinate_size": 3, "shape_size": 2, "max_rel_pos": 12, "rel_pos_bins": 8,
    "max_rel_2d_pos": 20, "rel_2d_pos_bins": 12,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpnet": ("MPNetForMaskedLM", SIZES),
    "mpnet-untied": ("MPNetForMaskedLM", {**SIZES, "tie_word_embeddings": False}),
    "albert": ("AlbertForSequenceClassification", {**NARROW, "num_hidden_groups": 2, "inner_group_num": 2}),
    "electra": ("ElectraForMaskedLM", NARROW),
    "roberta-prelayernorm": ("RobertaPreLayerNormModel", SIZES),
    "xlm-roberta-xl": ("XLMRobertaXLModel", SIZES),
    "data2vec-text": ("Data2VecTextModel", SIZES),
    "ernie": ("ErnieForTokenClassification", SIZES),
    "megatron-bert": ("MegatronBertModel", SIZES),
    "rembert": ("RemBertForMaskedLM", {**SIZES, "input_embedding_size": 8, "output_embedding_size": 12}),
    "roformer": ("RoFormerForSequenceClassification", NARROW),
    "modernbert": ("ModernBertForSequenceClassification", {**SIZES, **MODERN, "classifier_pooling": "mean"}),
    "nomic_bert": ("NomicBertModel", SIZES),
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", SIZES),
    "eurobert": ("EuroBertForSequenceClassification", {**SIZES, "num_key_value_heads": 1}),
    "deberta-v2": ("DebertaV2ForQuestionAnswering", {**SIZES, **DEBERTA}),
    "deberta": (
        "DebertaForMaskedLM",
        {
            **SIZES,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "deberta-plain": (
        "DebertaForSequenceClassification",
        {**SIZES, "relative_attention": True, "pos_att_type": "p2c", "max_relative_positions": 6, "num_labels": 3},
    ),
    "mobilebert": ("MobileBertForMaskedLM", {**NARROW, **MOBILE}),
    "esm": ("EsmForMaskedLM", {**SIZES, **ESM}),
    "dpr": ("DPRContextEncoder", {**SIZES, "projection_dim": 6}),
    "bert-generation": ("BertGenerationEncoder", SIZES),
    "layoutlm": ("LayoutLMForTokenClassification", {**SIZES, "max_2d_position_embeddings": 40}),
    "layoutlmv3": ("LayoutLMv3ForTokenClassification", PAGE),
    "layoutlmv3-many": (
        "LayoutLMv3ForTokenClassification",
        {**PAGE, "num_labels": 11, "has_spatial_attention_bias": False},
    ),
    "layoutlmv3-answer": ("LayoutLMv3ForQuestionAnswering", {**PAGE, "has_relative_attention_bias": False}),
    "layoutlmv3-sequence": ("LayoutLMv3ForSequenceClassification", {**PAGE, "num_labels": 3}),
    "t5": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "t5-silu": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu", "dense_act_fn": "silu"}),
    "umt5": ("UMT5EncoderModel", T5),
    "vit": ("ViTModel", {**VIT, "image_size": [9, 14]}),
    "deit": ("DeiTForImageClassificationWithTeacher", VIT),
    "ijepa": ("IJepaForImageClassification", VIT),
    "dinov2": ("Dinov2ForImageClassification", {**VIT, "use_swiglu_ffn": True}),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", VIT),
    "dinov3": ("DINOv3ViTModel", {**VIT, "image_size": [8, 12], "num_register_tokens": 2}),
    "dinov3-gated": (
        "DINOv3ViTModel",
        {**VIT, "use_gated_mlp": True, "hidden_act": "silu", "key_bias": True, "value_bias": False, "rope_theta": 7.0},
    ),
    "clip_vision": ("CLIPVisionModelWithProjection", {**VIT, "projection_dim": 6}),
    "clip_text": ("CLIPTextModel", SIZES),
    "siglip_vision": ("SiglipVisionModel", VIT),
    "siglip_text": ("SiglipTextModel", SIZES),
}
POOLED = ("dpr", "vit", "dinov3", "dinov3-gated", "clip_text", "siglip_vision", "siglip_text")
RESULTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
EMBEDS = ("image_embeds", "text_embeds")


def weight(name: str, shape: tuple[int, ...]) -> Array:
    """A weight of a model by its name: norms near 1, matrices by fan in."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return noise / np.float32(np.sqrt(np.prod(shape[1:])))
    return noise * np.float32(0.1) + np.float32(0 if name.endswith(("bias", "beta")) else 1)


def inputs(b: int, n: int, config: dict[str, Any]) -> dict[str, Array]:
    """Every input a model may have, by its name: text whose rows but the first are padded at the end, or images."""
    if "image_size" in config:
        sizes = config["image_size"] if isinstance(config["image_size"], list) else [config["image_size"]] * 2
        return {"pixel_values": np.random.default_rng(b).standard_normal((b, 3, *sizes)).astype(np.float32)}
    rng, lengths = np.random.default_rng([b, n]), np.maximum(n - 2 * np.arange(b), 1)
    mask = (np.arange(n) < lengths[:, None]).astype(np.int64)
    ids = np.where(mask == 1, rng.integers(3, config.get("vocab_size", 23), (b, n), dtype=np.int64), 1)
    types = np.broadcast_to((np.arange(n) >= n // 2).astype(np.int64), (b, n)).copy()
    boxes = np.sort(rng.integers(0, 40, (b, n, 2, 2)), axis=2).reshape(b, n, 4)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "bbox": boxes}
    if "input_size" in config:
        given["pixel_values"] = rng.standard_normal((b, 3, *[config["input_size"]] * 2)).astype(np.float32)
    return given


def main(out: Path, names: list[str]) -> None:
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    results: dict[str, Array] = dict(np.load(out)) if names else {}
    for name in names or MODELS:
        kind, options = MODELS[name]
        cls = getattr(transformers, kind)
        model = cls(cls.config_class(**options))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            path = Path(folder, "model.safetensors")
            stored = load_file(path)
            shapes = {key: value.shape for key, value in stored.items() if not key.endswith("inv_freq")}
            save_file({**stored, **{k: weight(k, shape) for k, shape in shapes.items()}}, path, {"format": "pt"})
            model = cls.from_pretrained(folder, attn_implementation="eager").eval()
            text = Path(folder, "config.json").read_bytes()
        config = json.loads(text)
        results[f"{name}/config"] = np.frombuffer(text, np.uint8)
        results[f"{name}/tensors"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        # a bare model gets no token types from its folder
        typed = not kind.endswith("Model") and config.get("type_vocab_size", 0) > 1
        for b, n in SHAPES:
            used = {"token_type_ids": typed, "bbox": name.startswith("layoutlm")}
            given = {k: torch.from_numpy(v) for k, v in inputs(b, n, config).items() if used.get(k, True)}
            with torch.no_grad():
                output = model(**given)
            embeds = [key for key in EMBEDS if getattr(output, key, None) is not None]
            # a folder with only the text encoder gives no pooled vector
            known = RESULTS if name in POOLED else RESULTS[:-1]
            keys = embeds or [key for key in known if getattr(output, key, None) is not None]
            results |= {f"{name}/{key}_{b}_{n}": getattr(output, key).numpy() for key in keys}
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_families.npz"), sys.argv[1:])
