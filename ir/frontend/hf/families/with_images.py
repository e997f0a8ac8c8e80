"""Text models of models that also read images, by `model_type`: families of DECODERS inside `text_config`.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.decoders import DECODERS, IN_IMAGES
from relax_tune.ir.frontend.hf.families.family import Family, read_decoder
from relax_tune.ir.frontend.hf.transformer.spec import Stack

HEADS = ("lm_head", "language_model.lm_head")
USUAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {**USUAL, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        **USUAL, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "qwen2": {**USUAL, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768},
}  # fmt: skip
"""Values that transformers does not write to `text_config`, by the type of the text model."""
# Positions in time, height and width are equal for text, where sections of a rotation make no difference.
SECTIONS = {"mrope": "default"}
QWEN2_VL, QWEN3_VL = (
    replace(family, rope=replace(family.rope, renamed=SECTIONS)) if family.rope else family
    for family in (DECODERS["qwen2"], replace(DECODERS["qwen3"], windows=None))
)
TEXTS: Mapping[str, Family] = {
    **{kind: DECODERS[kind] for kind in ("llama", "mistral", "qwen2", "qwen3")},
    **{kind: DECODERS[kind] for kind in ("qwen3_5_text", "qwen3_5_moe_text")},
    "qwen2_vl_text": QWEN2_VL, "qwen2_5_vl_text": QWEN2_VL, "qwen3_vl_text": QWEN3_VL,
}  # fmt: skip
"""Families of text models, by the `model_type` of `text_config`."""
WITH_IMAGES: Mapping[str, str] = {
    "deepseek_vl": "llama", "got_ocr2": "qwen2", "idefics2": "mistral", "idefics3": "llama", "internvl": "qwen2",
    "janus": "llama", "lighton_ocr": "qwen3", "llava": "llama", "llava_next": "llama", "llava_next_video": "llama",
    "llava_onevision": "qwen2", "mistral3": "mistral", "ovis2": "qwen2", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama", "video_llama_3": "qwen2", "video_llava": "llama",
    "vipllava": "llama",
}  # fmt: skip
"""Types of models whose text model is read, with its type where `text_config` states none."""


def read_text_model(data: Mapping[str, Any], where: str) -> Stack:
    """Read and check the text model of one of WITH_IMAGES. Raises ParseError naming the field."""
    c, inside = ConfigFields(data, where), data.get("text_config")
    usual = WITH_IMAGES[data["model_type"]]
    # the first files of Qwen2-VL have the text model's fields at the top
    fields = ConfigFields(inside, f"{c.where}: text_config") if isinstance(inside, dict) else c
    kind = fields.chosen("model_type", usual, TEXTS) if fields is not c else usual
    family = TEXTS[kind]
    family = replace(
        family, architecture="ForConditionalGeneration", part="" if fields is c else "text_config",
        names=replace(family.names, prefix=f"{IN_IMAGES}|model.text_model.|{family.names.prefix}", head="|".join(HEADS)),
        defaults={**family.defaults, **DEFAULTS.get(kind, {})},
    )  # fmt: skip
    stack = read_decoder(family, data, where)
    # Which of the two configurations states whether embeddings are tied has changed; a file holds the matrix unless they are.
    return replace(stack, logits=replace(stack.logits, tied=True))
