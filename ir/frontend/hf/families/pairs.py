"""Encoder-decoders of two models: an encoder of ENCODERS, and a decoder with cross-attention, by `model_type`.

Tests: `tests/ir/frontend/hf/families/test_encoder_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.decoders import DECODERS, GPT2
from relax_tune.ir.frontend.hf.families.encoder_decoders import ENCODER_DECODERS, bart_names
from relax_tune.ir.frontend.hf.families.encoders import BERT, ENCODER, ENCODERS, ROBERTA, ROBERTA_HEADS, read_encoder
from relax_tune.ir.frontend.hf.families.family import Family, Key, NormRule, read_stack
from relax_tune.ir.frontend.hf.transformer.inputs import Patches, Waves, Words
from relax_tune.ir.frontend.hf.transformer.spec import BERT_HEADS, EncoderDecoder, Outputs, Stack, TaskHeads

BERT_CROSS = replace(
    BERT, before_attention="crossattention.output.LayerNorm", query="crossattention.self.query", key="crossattention.self.key",
    value="crossattention.self.value", out="crossattention.output.dense",
)  # fmt: skip
GENERATION_HEADS = replace(BERT_HEADS, word_dense="", words="lm_head.decoder", word_bias="lm_head.bias")
GPT2_CROSS = replace(
    GPT2, before_attention="ln_cross_attn", qkv=None, kv="crossattention.c_attn", query="crossattention.q_attn",
    out="crossattention.c_proj",
)  # fmt: skip
LINK = "enc_to_dec_proj"


def _by_words(c: ConfigFields, stack: Stack) -> Stack:
    return replace(stack, logits=replace(stack.logits, by_words=True))


def _trocr(c: ConfigFields, stack: Stack) -> Stack:
    """Read whether embeddings have a norm and a scale."""
    names = stack.names if c.truth("layernorm_embedding", True) else replace(stack.names, words_norm=None)
    scale = stack.hidden**0.5 if c.truth("scale_embedding", False) else 1.0
    return replace(stack, names=names, embedding=replace(stack.words, scale=scale))


def _generating(family: Family, prefix: str, heads: TaskHeads) -> Family:
    """Return BERT's layers as a decoder."""
    names = replace(BERT, prefix=prefix, cross=BERT_CROSS)
    return replace(family, names=names, causal=True, tied=True, outputs=Outputs(heads), finish=_by_words)


def _bart(pre_norm: bool) -> Family:
    """Return the layers of BART's decoder without its encoder."""
    names = bart_names("decoder", pre_norm, words_norm=True, logits_bias=False)
    family = ENCODER_DECODERS["mbart" if pre_norm else "bart"].decoder
    return replace(family, names=replace(names, words="decoder.embed_tokens"), finish=_stored_head)


def _stored_head(c: ConfigFields, stack: Stack) -> Stack:
    tied = c.truth("tie_word_embeddings", True)
    return replace(stack, logits=replace(stack.logits, tied=tied))


TROCR = replace(
    bart_names("decoder", pre_norm=False, words_norm=True, logits_bias=False), words="decoder.embed_tokens", head="output_projection"
)  # fmt: skip
CROSS_DECODERS: Mapping[str, Family] = {
    "bert": _generating(ENCODER, "bert.", BERT_HEADS),
    "roberta": _generating(ROBERTA, "roberta.", ROBERTA_HEADS),
    "xlm-roberta": _generating(ROBERTA, "roberta.", ROBERTA_HEADS),
    "camembert": _generating(ROBERTA, "roberta.", ROBERTA_HEADS),
    "bert-generation": _generating(replace(ENCODER, types=None), "bert.", GENERATION_HEADS),
    "gpt2": replace(DECODERS["gpt2"], names=replace(GPT2, cross=GPT2_CROSS)),
    "bart": _bart(pre_norm=False),
    "mbart": _bart(pre_norm=True),
    "trocr": Family(
        names=TROCR, hidden="d_model", layers="decoder_layers", heads="decoder_attention_heads", groups=None, size=None,
        inner="decoder_ffn_dim", norm=NormRule("layer", 1e-5, bias=True), activation=("activation_function", "gelu"), qkv_bias=True,
        out_bias=True, mlp_bias=True, tied=True, order="post_norm", rope=None, first_position=2, finish=_trocr,
        positions=Key("max_position_embeddings", 512), only={"use_learned_position_embeddings": (True,)},
    ),
}  # fmt: skip
READ: Mapping[type, str] = {Words: "texts", Patches: "images", Waves: "sound"}
PAIRS: Mapping[str, tuple[str, type]] = {
    "encoder-decoder": ("EncoderDecoderModel", Words),
    "vision-encoder-decoder": ("VisionEncoderDecoderModel", Patches),
    "speech-encoder-decoder": ("SpeechEncoderDecoderModel", Waves),
}  # fmt: skip


def read_pair(data: Mapping[str, Any], where: str) -> EncoderDecoder:
    """Read and check the configurations of both models. Raises ParseError naming the field."""
    c = ConfigFields(data, where)
    architecture, embedding = PAIRS[data["model_type"]]
    if data.get("architectures") not in (None, [], [architecture]):
        raise c.wrong("architectures", f"[{architecture!r}]")
    parts: dict[str, ConfigFields] = {}
    for side, known in (("encoder", ENCODERS), ("decoder", CROSS_DECODERS)):
        fields = data.get(side)
        if not isinstance(fields, dict):
            raise c.wrong(side, "an object")
        parts[side] = ConfigFields(fields, f"{where}: {side}")
        parts[side].chosen("model_type", "", known)
    encoder = read_encoder({**parts["encoder"].data, "architectures": None}, parts["encoder"].where)
    if not isinstance(encoder.embedding, embedding):
        raise parts["encoder"].wrong("model_type", f"an encoder of {READ[embedding]}")
    d = parts["decoder"]
    d.only("add_cross_attention", True)
    decoder = read_stack(CROSS_DECODERS[d.data["model_type"]], d)
    if d.data.get("cross_attention_hidden_size") is not None:
        d.only("cross_attention_hidden_size", encoder.out)
    # With a cross-attention of the encoder's width no projection is needed between the two.
    same = encoder.out == decoder.hidden or d.data.get("cross_attention_hidden_size") is not None
    return EncoderDecoder(encoder, decoder, separate=True, projected="" if same else LINK)
