"""The table of the families of encoder-decoder models, by `model_type`: two stacks and a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder_families import t5_encoder, umt5_encoder
from relax_tune.ir.frontend.hf.encoder_spec import (
    EncoderSpec,
    LayerNames,
    Spectrogram,
    Words,
)


@dataclass(frozen=True, slots=True)
class EncoderDecoderSpec:
    """A stack of layers that reads a source, and one that attends to the source and writes.

    decoder: a causal stack with cross-attention, whose inputs are words
    head: name of the product that gives the logits; a file without it has the table of the decoder's words in its place
    untied: the file must have the head
    head_scale: factor of the last hidden state
    head_bias: name of the bias of the logits; empty: there is none. A file without it has zeros
    """

    encoder: EncoderSpec
    decoder: EncoderSpec
    head: str
    untied: bool = False
    head_scale: float = 1.0
    head_bias: str = ""

    @property
    def source(self) -> Words | Spectrogram:
        """Embeddings of the source."""
        assert isinstance(self.encoder.inputs, (Words, Spectrogram))
        return self.encoder.inputs

    @property
    def words(self) -> Words:
        """Embeddings of the decoder's words."""
        return self.decoder.words


# T5


def _t5(c: ConfigFields, encoder: EncoderSpec, scaled: bool) -> EncoderDecoderSpec:
    """Add the decoder of T5: one more block in each layer, and distances of columns behind alone."""
    layers = c.layers("num_decoder_layers") if c.data.get("num_decoder_layers") is not None else len(encoder.layers)
    near, names, cross = encoder.buckets, encoder.names, "layer.1.EncDecAttention."
    assert near is not None

    def behind(name: str) -> str:
        return name.replace("layer.1.", "layer.2.")

    decoder = replace(
        encoder, layers=tuple(f"decoder.block.{i}" for i in range(layers)), last_norm="decoder.final_layer_norm", causal=True,
        buckets=replace(near, table=near.table.replace("encoder.", "decoder."), behind=True),
        names=replace(
            names, inner=behind(names.inner), gate=behind(names.gate), outer=behind(names.outer), last_norm=behind(names.last_norm)
        ),
        cross=LayerNames(f"{cross}q", f"{cross}k", f"{cross}v", f"{cross}o", "layer.1.layer_norm"),
        inputs=replace(encoder.words, words="shared|decoder.embed_tokens"),
    )  # fmt: skip
    return EncoderDecoderSpec(encoder, decoder, "lm_head", head_scale=encoder.hidden**-0.5 if scaled else 1.0)


def _plain_t5(c: ConfigFields) -> EncoderDecoderSpec:
    return _t5(c, t5_encoder(c), c.truth("tie_word_embeddings", True))


def _mt5(c: ConfigFields) -> EncoderDecoderSpec:
    """Read mT5 (Xue et al. 2021), whose last hidden state is never scaled."""
    return _t5(c, t5_encoder(c), scaled=False)


def _umt5(c: ConfigFields) -> EncoderDecoderSpec:
    """Read UMT5 (Chung et al. 2023), where every layer has biases of its own."""
    return _t5(c, umt5_encoder(c), c.truth("tie_word_embeddings", True))


# BART and its kin


@dataclass(frozen=True, slots=True)
class Bart:
    """Differences between families like BART (Lewis et al. 2020).

    norm_first: norms stand before the blocks, and behind the last layer; words_norm: embeddings are normalised
    offset: row of the table of the first position; sinusoids: the table is computed
    skips_padding: padding tokens have no position
    scaled: default of `scale_embedding`; activation: default of `activation_function`
    optional_bias: the logits have a bias, perhaps in the file
    last_norm: None: as `norm_first`
    late_positions: the decoder's positions are added behind the norm of its words
    separate_words: `share_encoder_decoder_embeddings` may be false
    """

    norm_first: bool = False
    words_norm: bool = True
    offset: int = 0
    sinusoids: Callable[[int, int], NDArray[np.float32]] | None = None
    skips_padding: bool = False
    scaled: bool = False
    activation: str = "gelu"
    optional_bias: bool = True
    last_norm: bool | None = None
    late_positions: bool = False
    separate_words: bool = False


def interleaved_sinusoids(rows: int, width: int) -> NDArray[np.float32]:
    """Return sines, then cosines, of positions, with frequencies 10000 ** (-2 i / width) (Vaswani et al. 2017, section 3.5)."""
    angles = np.arange(rows)[:, None] / np.power(10000, 2 * (np.arange(width) // 2) / width)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)


def skipping_sinusoids(padding: int) -> Callable[[int, int], NDArray[np.float32]]:
    """Return the table of M2M-100 (Fan et al. 2021): the lowest frequency is 1 / 10000, and the padding row is 0."""

    def table(rows: int, width: int) -> NDArray[np.float32]:
        half = width // 2
        speed = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1)))
        angles = np.arange(rows, dtype=np.float32)[:, None] * speed
        found = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((rows, width % 2), np.float32)], axis=1)
        found[padding] = 0
        return found

    return table


def _layer_names(attention: str) -> LayerNames:
    q, k, v, out = (f"{attention}.{part}_proj" for part in ("q", "k", "v", "out"))
    return LayerNames(q, k, v, out, f"{attention}_layer_norm", "fc1", "fc2", "final_layer_norm")


def _stack(c: ConfigFields, side: str, rule: Bart, inputs: Words | Spectrogram) -> EncoderSpec:
    """Read the layers of one side, `encoder` or `decoder`."""
    hidden, heads = c.whole("d_model"), c.whole(f"{side}_attention_heads")
    c.multiple("d_model", hidden, f"{side}_attention_heads", heads)
    decodes = side == "decoder"
    last = rule.norm_first if rule.last_norm is None else rule.last_norm
    return EncoderSpec(
        tuple(f"{side}.layers.{i}" for i in range(c.layers(f"{side}_layers"))), hidden, heads, hidden // heads,
        c.whole(f"{side}_ffn_dim"), 1e-5, c.chosen("activation_function", rule.activation, ACTIVATIONS), inputs, ("model.",),
        _layer_names("self_attn"), norm_first=rule.norm_first, last_norm=f"{side}.layer_norm" if last else "",
        causal=decodes, cross=_layer_names("encoder_attn") if decodes else None,
    )  # fmt: skip


def _words(c: ConfigFields, side: str, rule: Bart, tied: bool) -> Words:
    """Read the embeddings of one side."""
    hidden, shared = (
        c.whole("d_model"),
        c.truth("share_encoder_decoder_embeddings", True) if rule.separate_words else True,
    )
    own = f"{side}.embed_tokens"
    others = f"shared|{own}" if tied else f"{own}|shared"
    count = c.whole("vocab_size")
    if rule.separate_words:
        other = c.whole("decoder_vocab_size", count)
        if shared and other != count:
            raise c.wrong("decoder_vocab_size", f"the vocab_size {count}, as both sides share embeddings")
        count = other if side == "decoder" else count
    more: dict[str, Any] = {"first": rule.offset, "sinusoids": rule.sinusoids}
    rows = c.whole("max_position_embeddings") + rule.offset
    if rule.skips_padding:
        padding = c.data.get("pad_token_id", 1)
        if type(padding) is not int or not 0 <= padding < count:
            raise c.wrong("pad_token_id", "a token, as padding has no position")
        if hidden < 4:
            raise c.wrong("d_model", "at least 4")
        more = {"padding": padding, "sinusoids": skipping_sinusoids(padding)}
        rows = c.whole("max_position_embeddings") + padding + 1
    return Words(
        hidden, count, rows, 0, words=others if shared else own, table=f"{side}.embed_positions",
        norm=f"{side}.layernorm_embedding" if rule.words_norm else "",
        scale=math.sqrt(hidden) if c.truth("scale_embedding", rule.scaled) else 1.0,
        norm_before_positions=rule.late_positions and side == "decoder", **more,
    )  # fmt: skip


def bart(rule: Bart) -> Callable[[ConfigFields], EncoderDecoderSpec]:
    """Return the reader of a family like BART."""

    def read(c: ConfigFields) -> EncoderDecoderSpec:
        if not rule.separate_words:
            c.only("share_encoder_decoder_embeddings", True, None)
            c.only("decoder_vocab_size", c.whole("vocab_size"), None)
        tied = c.truth("tie_word_embeddings", True)
        first, second = (_stack(c, side, rule, _words(c, side, rule, tied)) for side in ("encoder", "decoder"))
        bias = "final_logits_bias" if rule.optional_bias else ""
        return EncoderDecoderSpec(first, second, "lm_head", not tied, head_bias=bias)

    return read


def _whisper(c: ConfigFields) -> EncoderDecoderSpec:
    """Read Whisper (Radford et al. 2023). Its file has the encoder's table of sinusoids."""
    c.only("scale_embedding", False, None)
    rule = Bart(norm_first=True)
    sound = Spectrogram(
        c.whole("num_mel_bins", 80), c.whole("max_source_positions", 1500), ("encoder.conv1", "encoder.conv2"), "encoder.embed_positions"
    )  # fmt: skip
    hidden, tied = c.whole("d_model"), c.truth("tie_word_embeddings", True)
    words = Words(
        hidden, c.whole("vocab_size"), c.whole("max_target_positions", 448), 0, words="decoder.embed_tokens",
        table="decoder.embed_positions", norm="",
    )  # fmt: skip
    stacks = (_stack(c, side, rule, inputs) for side, inputs in (("encoder", sound), ("decoder", words)))
    encoder, decoder = (replace(stack, unbiased=frozenset({"key"})) for stack in stacks)
    return EncoderDecoderSpec(encoder, decoder, "proj_out", not tied)


@dataclass(frozen=True, slots=True)
class EncoderDecoderFamily:
    """A family of encoder-decoder models: how its configuration is read, and the architecture that gives the next token."""

    read: Callable[[ConfigFields], EncoderDecoderSpec]
    architecture: str


def _family(read: Callable[[ConfigFields], EncoderDecoderSpec], name: str) -> EncoderDecoderFamily:
    return EncoderDecoderFamily(read, f"{name}ForConditionalGeneration")


BART, MBART = Bart(offset=2), Bart(norm_first=True, offset=2)
MARIAN = Bart(words_norm=False, sinusoids=interleaved_sinusoids, separate_words=True)
PEGASUS = Bart(norm_first=True, words_norm=False, sinusoids=interleaved_sinusoids)
BLENDERBOT = Bart(norm_first=True, words_norm=False)
M2M_100 = Bart(
    norm_first=True, words_norm=False, skips_padding=True, scaled=True, activation="relu", optional_bias=False
)
PLBART = Bart(offset=2, scaled=True)

ENCODER_DECODERS: Mapping[str, EncoderDecoderFamily] = {
    "t5": _family(_plain_t5, "T5"),
    "mt5": _family(_mt5, "MT5"),
    "umt5": _family(_umt5, "UMT5"),
    "bart": _family(bart(BART), "Bart"),
    "mbart": _family(bart(MBART), "MBart"),
    "plbart": _family(bart(PLBART), "PLBart"),
    "pegasus": _family(bart(PEGASUS), "Pegasus"),
    "marian": EncoderDecoderFamily(bart(MARIAN), "MarianMTModel"),
    "blenderbot": _family(bart(BLENDERBOT), "Blenderbot"),
    "blenderbot-small": _family(bart(Bart(late_positions=True)), "BlenderbotSmall"),
    "m2m_100": _family(bart(M2M_100), "M2M100"),
    "whisper": _family(_whisper, "Whisper"),
}


def encoder_decoder_spec(data: Mapping[str, Any], where: str) -> EncoderDecoderSpec:
    """Read and check the configuration of one of ENCODER_DECODERS. Raises ParseError naming the field."""
    c = ConfigFields(data, where)
    family = ENCODER_DECODERS[data["model_type"]]
    if data.get("architectures") not in (None, [], [family.architecture]):
        raise c.wrong("architectures", f"[{family.architecture!r}], which gives the next token")
    c.only("is_encoder_decoder", True, None)
    c.only("is_decoder", False, None)
    c.only("add_cross_attention", False, None)
    c.only("pruned_heads", {}, None)
    spec = family.read(c)
    if spec.words.positions < 2:
        raise c.wrong(
            "max_target_positions" if "max_target_positions" in data else "max_position_embeddings", "at least 2"
        )
    return spec
