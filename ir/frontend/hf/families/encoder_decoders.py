"""The table of the families of encoder-decoders, by `model_type`: a family for each of the two stacks.

Tests: `tests/ir/frontend/hf/families/test_encoder_decoders.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.encoders import ENCODER_FIELDS, T5, T5_ENCODER, UMT5_ENCODER
from relax_tune.ir.frontend.hf.families.family import Family, Key, NormRule, read_stack
from relax_tune.ir.frontend.hf.transformer.inputs import SoundSamples, Spectrogram, Table, Words
from relax_tune.ir.frontend.hf.transformer.rope import RopeStyle
from relax_tune.ir.frontend.hf.transformer.spec import Buckets, EncoderDecoder, Names, Stack


@dataclass(frozen=True, slots=True)
class EncoderDecoderFamily:
    """The families of both stacks, and the one architecture that is read."""

    architecture: str
    encoder: Family
    decoder: Family


# T5

T5_DECODER_NAMES = replace(
    T5, words="shared|decoder.embed_tokens", layers="decoder.block", last_norm="decoder.final_layer_norm",
    before_mlp="layer.2.layer_norm", gate="layer.2.DenseReluDense.wi_0", up="layer.2.DenseReluDense.wi_1",
    down="layer.2.DenseReluDense.wo",
    cross=replace(
        T5, before_attention="layer.1.layer_norm", query="layer.1.EncDecAttention.q", key="layer.1.EncDecAttention.k",
        value="layer.1.EncDecAttention.v", out="layer.1.EncDecAttention.o",
    ),
)  # fmt: skip


def _t5_decoder(c: ConfigFields, stack: Stack, encoder: Family, scaled: bool | None) -> Stack:
    """Add a causal stack with cross-attention to what the encoder reads. scaled: None: unless the head is untied"""
    assert encoder.finish is not None
    stack = encoder.finish(c, stack)
    buckets = stack.position_bias
    assert isinstance(buckets, Buckets)
    # Newer files state the scale, and write true for tied embeddings in every case.
    key = "scale_decoder_outputs" if "scale_decoder_outputs" in c.data else "tie_word_embeddings"
    scaled = c.truth(key, True) if scaled is None else scaled
    return replace(
        stack,
        position_bias=replace(buckets, table=buckets.table.replace("encoder.", "decoder.")),
        logits=replace(stack.logits, tied=True, hidden_scale=stack.hidden**-0.5 if scaled else 1.0),
    )  # fmt: skip


def _t5(architecture: str, encoder: Family = T5_ENCODER, scaled: bool | None = None) -> EncoderDecoderFamily:
    decoder = replace(
        encoder, names=T5_DECODER_NAMES, causal=True, layers="num_decoder_layers|num_layers",
        finish=partial(_t5_decoder, encoder=encoder, scaled=scaled),
    )  # fmt: skip
    return EncoderDecoderFamily(architecture, encoder, decoder)


# BART (Lewis et al. 2020) and similar families


def interleaved_sinusoids(rows: int, width: int) -> NDArray[np.float32]:
    """Return sines, then cosines, of positions, with frequencies 10000 ** (-2 i / width) (Vaswani et al. 2017, section 3.5)."""
    angles = np.arange(rows)[:, None] / np.power(10000, 2 * (np.arange(width) // 2) / width)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)


def skipping_sinusoids(padding: int) -> Table:
    """Return the table of M2M-100 (Fan et al. 2021): the lowest frequency is 1 / 10000, and the padding row is 0."""

    def table(rows: int, width: int) -> NDArray[np.float32]:
        half = width // 2
        speed = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1)))
        angles = np.arange(rows, dtype=np.float32)[:, None] * speed
        sines = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((rows, width % 2), np.float32)], axis=1)
        sines[padding] = 0
        return sines

    return table


def bart_names(side: str, pre_norm: bool, words_norm: bool, logits_bias: bool) -> Names:
    names = Names(
        words=f"shared|{side}.embed_tokens", positions=f"{side}.embed_positions",
        words_norm=f"{side}.layernorm_embedding" if words_norm else None, layers=f"{side}.layers",
        before_attention="self_attn_layer_norm", out="self_attn.out_proj", before_mlp="final_layer_norm", gate=None, up="fc1", down="fc2",
        last_norm=f"{side}.layer_norm" if pre_norm else None,
    )  # fmt: skip
    if side == "encoder":
        return names
    cross = replace(
        names, before_attention="encoder_attn_layer_norm", query="encoder_attn.q_proj", key="encoder_attn.k_proj",
        value="encoder_attn.v_proj", out="encoder_attn.out_proj",
    )  # fmt: skip
    return replace(names, cross=cross, logits_bias="final_logits_bias" if logits_bias else None)


def _bart_words(
    c: ConfigFields,
    side: str,
    offset: int = 0,
    sinusoids: Table | None = None,
    scaled: bool = False,
    late_positions: bool = False,
    separate: bool = False,
) -> Words:
    """Read the embeddings of one side.

    Args:
        offset: row of the first position in the position table
        scaled: default of `scale_embedding`
        late_positions: the decoder adds positions after the norm of its embeddings
        separate: `share_encoder_decoder_embeddings` may be false
    """
    width, count = c.whole("d_model"), c.whole("vocab_size")
    if separate:
        other = c.whole("decoder_vocab_size", count)
        if c.truth("share_encoder_decoder_embeddings", True) and other != count:
            raise c.wrong("decoder_vocab_size", f"the vocab_size {count}, as both sides share embeddings")
        count = other if side == "decoder" else count
    else:
        c.only("share_encoder_decoder_embeddings", True, None)
        c.only("decoder_vocab_size", count, None)
    scale = math.sqrt(width) if c.truth("scale_embedding", scaled) else 1.0
    rows, late = c.whole("max_position_embeddings") + offset, late_positions and side == "decoder"
    return Words(width, count, rows, first=offset, scale=scale, norm_first=late, sinusoids=sinusoids)


def _m2m_words(c: ConfigFields, side: str) -> Words:
    """Read embeddings without positions of padding."""
    words = _bart_words(c, side, scaled=True)
    padding = c.data.get("pad_token_id", 1)
    if type(padding) is not int or not 0 <= padding < words.vocabulary:
        raise c.wrong("pad_token_id", "a token, as padding has no position")
    if words.width < 4:
        raise c.wrong("d_model", "at least 4")
    return replace(words, rows=words.rows + padding + 1, padding=padding, sinusoids=skipping_sinusoids(padding))


def _tied(c: ConfigFields, stack: Stack, side: str) -> Stack:
    """Read whether the head and both tables of tokens are one matrix; the file may have it under any of their names."""
    names, shared, tied = (
        stack.names,
        c.truth("share_encoder_decoder_embeddings", True),
        c.truth("tie_word_embeddings", True),
    )
    if not shared:
        names = replace(names, words=f"{side}.embed_tokens")
    elif not tied:
        names = replace(names, words=f"{side}.embed_tokens|shared")
    return replace(stack, names=names, logits=replace(stack.logits, tied=tied))


def _bart(
    architecture: str,
    words: Callable[..., Words] = _bart_words,
    pre_norm: bool = False,
    words_norm: bool = True,
    logits_bias: bool = True,
    activation: str = "gelu",
) -> EncoderDecoderFamily:
    """Return a family with the stacks of BART.

    Args:
        words: reads the embeddings of a side
        pre_norm: norms precede the blocks, and one follows the last layer
        words_norm: embeddings are normalised
        logits_bias: the file may have a bias of the logits
        activation: default of `activation_function`
    """

    def stack(side: str) -> Family:
        return Family(
            names=bart_names(side, pre_norm, words_norm, logits_bias), embedding=partial(words, side=side),
            hidden="d_model", layers=f"{side}_layers", heads=f"{side}_attention_heads", groups=None, size=None, inner=f"{side}_ffn_dim",
            norm=NormRule("layer", 1e-5, bias=True), activation=("activation_function", activation), qkv_bias=True, out_bias=True,
            mlp_bias=True, causal=side == "decoder", order="pre_norm" if pre_norm else "post_norm", rope=None,
            finish=partial(_tied, side=side),
        )  # fmt: skip

    return EncoderDecoderFamily(architecture, stack("encoder"), stack("decoder"))


# Whisper (Radford et al. 2023)


def _mels(c: ConfigFields) -> Spectrogram:
    convolutions = "encoder.conv1", "encoder.conv2"
    return Spectrogram(
        c.whole("num_mel_bins", 80), c.whole("max_source_positions", 1500), convolutions, "encoder.embed_positions"
    )


def _texts(c: ConfigFields) -> Words:
    c.only("scale_embedding", False, None)
    return Words(c.whole("d_model"), c.whole("vocab_size"), c.whole("max_target_positions", 448))


def _whisper_head(c: ConfigFields, stack: Stack) -> Stack:
    return replace(stack, logits=replace(stack.logits, tied=c.truth("tie_word_embeddings", True)))


# Moonshine (Jeffries et al. 2024)


def _moonshine_words(c: ConfigFields) -> Words:
    return Words(c.whole("hidden_size"), c.whole("vocab_size"), c.whole("max_position_embeddings", 512))


def _moonshine(side: str) -> Family:
    names = Names(
        layers=f"{side}.layers", gate=None, up="mlp.fc1", down="mlp.fc2", last_norm=f"{side}.layer_norm", words="decoder.embed_tokens",
    )  # fmt: skip
    if side == "decoder":
        cross = replace(
            names, before_attention="post_attention_layernorm", query="encoder_attn.q_proj", key="encoder_attn.k_proj",
            value="encoder_attn.v_proj", out="encoder_attn.o_proj",
        )  # fmt: skip
        names = replace(
            names, cross=cross, before_mlp="final_layernorm", up_gate="mlp.fc1", last_norm="decoder.norm", head="proj_out",
        )  # fmt: skip
    biased = Key("attention_bias", False)
    return Family(
        names=names, embedding=(lambda c: SoundSamples("encoder.")) if side == "encoder" else _moonshine_words,
        layers=f"{side}_num_hidden_layers|num_hidden_layers", heads=f"{side}_num_attention_heads|num_attention_heads",
        groups=f"{side}_num_key_value_heads", size=None, norm=NormRule("layer", 1e-5), qkv_bias=biased, mlp_bias=True,
        activation=(f"{side}_hidden_act", "gelu" if side == "encoder" else "silu"), causal=side == "decoder",
        rope=RopeStyle(part=0.9, part_key="partial_rotary_factor", interleaved=True), tied=True,
    )  # fmt: skip


LEARNED, SINUSOIDS = partial(_bart_words, offset=2), partial(_bart_words, sinusoids=interleaved_sinusoids)
WHISPER = _bart("WhisperForConditionalGeneration", pre_norm=True, words_norm=False, logits_bias=False)
WHISPER_NAMES = replace(WHISPER.decoder.names, words="decoder.embed_tokens", head="proj_out")

ENCODER_DECODERS: Mapping[str, EncoderDecoderFamily] = {
    "t5": _t5("T5ForConditionalGeneration"),
    "mt5": _t5("MT5ForConditionalGeneration", scaled=False),
    "umt5": _t5("UMT5ForConditionalGeneration", UMT5_ENCODER),
    "bart": _bart("BartForConditionalGeneration", LEARNED),
    "mbart": _bart("MBartForConditionalGeneration", LEARNED, pre_norm=True),
    "plbart": _bart("PLBartForConditionalGeneration", partial(_bart_words, offset=2, scaled=True)),
    "pegasus": _bart("PegasusForConditionalGeneration", SINUSOIDS, pre_norm=True, words_norm=False),
    "marian": _bart("MarianMTModel", partial(SINUSOIDS, separate=True), words_norm=False),
    "blenderbot": _bart("BlenderbotForConditionalGeneration", pre_norm=True, words_norm=False),
    "blenderbot-small": _bart("BlenderbotSmallForConditionalGeneration", partial(_bart_words, late_positions=True)),
    "m2m_100": _bart(
        "M2M100ForConditionalGeneration", _m2m_words, pre_norm=True, words_norm=False, logits_bias=False, activation="relu"
    ),
    "whisper": replace(
        WHISPER, encoder=replace(WHISPER.encoder, embedding=_mels, key_bias=False, finish=None),
        decoder=replace(WHISPER.decoder, names=WHISPER_NAMES, embedding=_texts, key_bias=False, finish=_whisper_head),
    ),
    "moonshine": EncoderDecoderFamily("MoonshineForConditionalGeneration", _moonshine("encoder"), _moonshine("decoder")),
}  # fmt: skip


def read_encoder_decoder(data: Mapping[str, Any], where: str) -> EncoderDecoder:
    """Read and check the configuration of one of ENCODER_DECODERS. Raises ParseError naming the field."""
    c, family = ConfigFields(data, where), ENCODER_DECODERS[data["model_type"]]
    if data.get("architectures") not in (None, [], [family.architecture]):
        raise c.wrong("architectures", f"[{family.architecture!r}], which gives the next token")
    for key, values in {**ENCODER_FIELDS, "is_encoder_decoder": (True,)}.items():
        c.only(key, *values)
    model = EncoderDecoder(read_stack(family.encoder, c), read_stack(family.decoder, c))
    if model.decoder.positions < 2:
        raise c.wrong(
            "max_target_positions" if "max_target_positions" in data else "max_position_embeddings", "at least 2"
        )
    return model
