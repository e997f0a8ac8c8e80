"""The families of encoders: what each reads from its configuration, and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder_spec import (
    BERT_HEADS,
    ROBERTA_HEADS,
    UNTYPED,
    Bottleneck,
    Buckets,
    Disentangled,
    EncoderSpec,
    Fields,
    HeadNames,
    LayerNames,
    Words,
    read_spec,
)
from relax_tune.ir.frontend.hf.speech_families import SPEECH
from relax_tune.ir.frontend.hf.vision_families import VISION


def encoder_spec(data: Mapping[str, Any], where: str) -> EncoderSpec:
    """Read and check the configuration of one of ENCODERS. Raises ParseError naming the field."""
    c = ConfigFields(data, where)
    c.only("is_decoder", False, None)
    c.only("add_cross_attention", False, None)
    c.only("pruned_heads", {}, None)
    spec = ENCODERS[data["model_type"]](c)
    words = spec.inputs
    if isinstance(words, Words) and words.positions < 1:
        raise c.wrong(
            "max_position_embeddings", f"more positions than the {words.padding} that pad_token_id skips and one"
        )
    return spec


def _factorised(
    c: ConfigFields, project: str, field: str = "embedding_size", default: int | None = None
) -> dict[str, Any]:
    """Read the width of factorised embeddings (Lan et al. 2020, section 3.1)."""
    width = c.whole(field, default)
    return {"width": width, "project": project}


def _theta(c: ConfigFields, default: float | None, kind: str = "") -> float:
    """Read the base of rotary embeddings. kind: of layers, where each kind has its own."""
    c.only("rope_scaling", None)
    given = c.data.get("rope_parameters")
    if kind and isinstance(given, dict):
        given = given.get(kind)
    if given is None:
        return c.number("rope_theta", default, 0, 2**53, "a number above 0")
    if not isinstance(given, dict):
        raise c.wrong("rope_parameters", "an object")
    r = ConfigFields(given, f"{c.where}: rope_parameters")
    r.only("rope_type", "default", None)
    r.only("partial_rotary_factor", 1.0, None)
    return r.number("rope_theta", default, 0, 2**53, "a number above 0")


def _padding(c: ConfigFields) -> int:
    """Read the token without a position."""
    return 0 if c.data.get("pad_token_id") == 0 else c.whole("pad_token_id", 1)


def _bert(c: ConfigFields) -> EncoderSpec:
    return read_spec(c, "bert.")


def _roberta(c: ConfigFields) -> EncoderSpec:
    """Read RoBERTa (Liu et al. 2019), whose positions leave out padding."""
    return read_spec(c, "roberta.", words={"padding": _padding(c)}, head=ROBERTA_HEADS)


_DISTILBERT = LayerNames(
    "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2",
    "output_layer_norm",
)  # fmt: skip
_DISTILBERT_HEADS = HeadNames(
    "pre_classifier",
    "relu",
    "classifier",
    "vocab_transform",
    "vocab_layer_norm",
    "vocab_projector",
    "vocab_projector.bias",
)


def _distilbert(c: ConfigFields) -> EncoderSpec:
    fields = Fields("n_layers", "dim", "n_heads", "hidden_dim", types="", eps="", activation="activation")
    return read_spec(
        c, "distilbert.", fields, "transformer.layer.{}", names=_DISTILBERT, head=_DISTILBERT_HEADS
    )  # fmt: skip


def _mpnet(c: ConfigFields) -> EncoderSpec:
    """Read MPNet (Song et al. 2020)."""
    a = "attention.attn."
    names = LayerNames(f"{a}q", f"{a}k", f"{a}v", f"{a}o", "attention.LayerNorm")
    near = Buckets("encoder.relative_attention_bias", c.whole("relative_attention_num_buckets", 32), 128)
    return read_spec(c, "mpnet.", UNTYPED, words={"padding": 1}, names=names, buckets=near, head=ROBERTA_HEADS)


def _albert(c: ConfigFields) -> EncoderSpec:
    """Read ALBERT (Lan et al. 2020), whose layers share weights."""
    a = "attention."
    names = LayerNames(
        f"{a}query", f"{a}key", f"{a}value", f"{a}dense", f"{a}LayerNorm", "ffn", "ffn_output", "full_layer_layer_norm"
    )
    head = replace(
        BERT_HEADS, dense="pooler", word_dense="predictions.dense", word_norm="predictions.LayerNorm",
        words="predictions.decoder", word_bias="predictions.bias",
    )  # fmt: skip
    words = _factorised(c, "encoder.embedding_hidden_mapping_in", default=128)
    spec = read_spec(c, "albert.", act="gelu_new", words=words, names=names, head=head)
    groups, inside, count = c.whole("num_hidden_groups", 1), c.whole("inner_group_num", 1), len(spec.layers)
    each = count / groups
    paths = (
        f"encoder.albert_layer_groups.{int(i / each)}.albert_layers.{j}" for i in range(count) for j in range(inside)
    )
    return replace(spec, layers=tuple(paths))


def _electra(c: ConfigFields) -> EncoderSpec:
    """Read ELECTRA (Clark et al. 2020)."""
    p = "generator_predictions"
    head = replace(
        ROBERTA_HEADS, activation="gelu", word_dense=f"{p}.dense", word_norm=f"{p}.LayerNorm", words="generator_lm_head",
        word_bias="generator_lm_head.bias",
    )  # fmt: skip
    return read_spec(c, "electra.", words=_projected(c, 128), head=head)


def _projected(c: ConfigFields, default: int | None) -> dict[str, Any]:
    words = _factorised(c, "embeddings_project", default=default)
    return {**words, "project": words["project"] if words["width"] != c.data["hidden_size"] else ""}


_PRE_NORM = LayerNames(middle_norm="attention.LayerNorm", last_norm="intermediate.LayerNorm")


def _roberta_prelayernorm(c: ConfigFields) -> EncoderSpec:
    """Read RoBERTa with norms before each block (Ott et al. 2019)."""
    return replace(
        _roberta(c), prefixes=("roberta_prelayernorm.",), names=_PRE_NORM, norm_first=True, last_norm="LayerNorm"
    )


def _xlm_roberta_xl(c: ConfigFields) -> EncoderSpec:
    """Read XLM-R XL (Goyal et al. 2021)."""
    spec = _roberta(c)
    names = LayerNames(middle_norm="attention.self_attn_layer_norm", last_norm="LayerNorm")
    return replace(
        spec, inputs=replace(spec.words, norm=""), names=names, norm_first=True, last_norm="encoder.LayerNorm"
    )


def _data2vec_text(c: ConfigFields) -> EncoderSpec:
    return replace(_roberta(c), prefixes=("data2vec_text.",))


def _ernie(c: ConfigFields) -> EncoderSpec:
    """Read ERNIE (Sun et al. 2019)."""
    c.only("use_task_id", False, None)
    return read_spec(c, "ernie.")


def _megatron_bert(c: ConfigFields) -> EncoderSpec:
    """Read Megatron's BERT (Shoeybi et al. 2019)."""
    names = LayerNames(middle_norm="attention.ln", last_norm="ln")
    return read_spec(c, "bert.", words={"norm": ""}, names=names, norm_first=True, last_norm="encoder.ln")


def _rembert(c: ConfigFields) -> EncoderSpec:
    """Read RemBERT (Chung et al. 2021), whose embeddings of words in and out differ."""
    head = replace(
        BERT_HEADS, word_dense="cls.predictions.dense", word_norm="cls.predictions.LayerNorm",
        word_bias="cls.predictions.decoder.bias", word_width=c.whole("output_embedding_size", 1664),
    )  # fmt: skip
    words = _factorised(c, "encoder.embedding_hidden_mapping_in", "input_embedding_size", 256)
    return read_spec(c, "rembert.", words=words, head=head)


def _roformer(c: ConfigFields) -> EncoderSpec:
    """Read RoFormer (Su et al. 2021)."""
    c.only("rotary_value", False)
    words = {**_projected(c, c.whole("hidden_size")), "table": ""}
    act = c.chosen("hidden_act", "gelu", ACTIVATIONS)
    head = replace(BERT_HEADS, dense="classifier.dense", activation=act, out="classifier.out_proj", inner=False)
    spec = read_spec(c, "roformer.", words=words, head=head, interleaved=True)
    return replace(spec, thetas=(10000.0,) * len(spec.layers), rotary_table="encoder.embed_positions.weight")


def _modernbert(c: ConfigFields) -> EncoderSpec:
    """Read ModernBERT (Warner et al. 2024): rotary embeddings, windows in most layers, gated feed-forward blocks."""
    biased = {p: c.truth(f"{p}_bias", False) for p in ("attention", "mlp", "norm", "classifier")}
    parts = {"attention": ("query", "key", "value", "out"), "mlp": ("inner", "gate", "outer"), "norm": ("norm",)}
    pooled = c.chosen("classifier_pooling", "cls", ("cls", "mean"))
    head = HeadNames(
        "head.dense", c.chosen("classifier_activation", "gelu", ACTIVATIONS), "classifier", "head.dense", "head.norm", "decoder",
        "decoder.bias" if c.truth("decoder_bias", True) else "", inner=False, answer_out="classifier",
        pooled="mean" if pooled == "mean" else "cls", norm="head.norm", everywhere=True, biased=biased["classifier"],
        norm_biased=biased["norm"],
    )  # fmt: skip
    head = replace(head, word_activation=head.activation)
    names = LayerNames(
        "attn.Wqkv#0/3", "attn.Wqkv#1/3", "attn.Wqkv#2/3", "attn.Wo", "attn_norm", "mlp.Wi#0/2", "mlp.Wo", "mlp_norm",
        "mlp.Wi#1/2",
    )  # fmt: skip
    words = {"words": "embeddings.tok_embeddings", "norm": "embeddings.norm", "table": ""}
    fields = Fields(types="", eps="norm_eps", activation="hidden_activation")
    spec = read_spec(
        c, "model.", fields, "layers.{}", eps=1e-5, words=words, names=names, head=head, norm_first=True,
        last_norm="final_norm", bare_first=True, unbiased=frozenset(p for k, ps in parts.items() if not biased[k] for p in ps),
    )  # fmt: skip
    every = c.whole("global_attn_every_n_layers", 3)
    kinds = c.data.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(len(spec.layers))
    ]
    theta = {
        "full_attention": _theta(
            c, c.number("global_rope_theta", 160000.0, 0, 2**53, "a number above 0"), "full_attention"
        ),
        "sliding_attention": _theta(
            c, c.number("local_rope_theta", 10000.0, 0, 2**53, "a number above 0"), "sliding_attention"
        ),
    }
    if not isinstance(kinds, list) or len(kinds) != len(spec.layers) or not all(k in theta for k in kinds):
        raise c.wrong("layer_types", f"{len(spec.layers)} kinds among {', '.join(theta)}")
    reach = c.whole("local_attention", 128) // 2
    windows = tuple(reach if k == "sliding_attention" else None for k in kinds)
    return replace(spec, thetas=tuple(theta[k] for k in kinds), windows=windows)


def _nomic_bert(c: ConfigFields) -> EncoderSpec:
    """Read Nomic BERT (Nussbaum et al. 2024)."""
    names = LayerNames(
        "attn.Wqkv#0/3", "attn.Wqkv#1/3", "attn.Wqkv#2/3", "attn.out_proj", "norm1", "mlp.fc12", "mlp.fc2", "norm2", "mlp.fc11"
    )  # fmt: skip
    head = replace(BERT_HEADS, word_norm="cls.predictions.transform.layer_norm")
    spec = read_spec(
        c, "nomic_bert.", Fields(size="head_dim"), "encoder.layers.{}", "silu", words={"table": "", "norm": "emb_ln"},
        names=names, head=head, unbiased=frozenset({"query", "key", "value", "out", "inner", "gate", "outer"}),
    )  # fmt: skip
    return replace(spec, thetas=(_theta(c, 1000.0),) * len(spec.layers))


def _jina_embeddings_v3(c: ConfigFields) -> EncoderSpec:
    """Read Jina embeddings v3 (Sturua et al. 2024) without adapters."""
    names = LayerNames(
        "mixer.Wqkv#0/3", "mixer.Wqkv#1/3", "mixer.Wqkv#2/3", "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2", "norm2"
    )
    words = {"table": "", "norm": "emb_ln"}
    spec = read_spec(
        c, "roberta.", Fields(size="head_dim"), "encoder.layers.{}", eps=1e-5, words=words, names=names, head=ROBERTA_HEADS
    )  # fmt: skip
    return replace(spec, thetas=(_theta(c, 20000.0),) * len(spec.layers))


def _eurobert(c: ConfigFields) -> EncoderSpec:
    """Read EuroBERT (Boizard et al. 2025): Llama's layers, looking both ways."""
    a, m = "self_attn.", "mlp."
    names = LayerNames(
        f"{a}q_proj", f"{a}k_proj", f"{a}v_proj", f"{a}o_proj", "input_layernorm", f"{m}gate_proj", f"{m}down_proj",
        "post_attention_layernorm", f"{m}up_proj",
    )  # fmt: skip
    kind = c.chosen("classifier_pooling", "late", ("late", "bos", "mean"))
    head = HeadNames(
        "dense", "gelu", "classifier", "", "", "lm_head", "", pooled="cls" if kind == "bos" else "late" if kind == "late" else "mean"
    )  # fmt: skip
    biased = {
        "attention_bias": ("query", "key", "value", "out"), "mlp_bias": ("inner", "gate", "outer")
    }  # fmt: skip
    spec = read_spec(
        c, "model.", Fields(types="", eps="rms_norm_eps", size="head_dim"), "layers.{}", "silu", 1e-5,
        words={"words": "embed_tokens", "norm": "", "table": ""}, names=names, head=head, norm="rms_norm", norm_first=True,
        last_norm="norm", unbiased=frozenset(p for k, ps in biased.items() if not c.truth(k, False) for p in ps),
    )  # fmt: skip
    groups = c.whole("num_key_value_heads", spec.heads)
    c.multiple("num_attention_heads", spec.heads, "num_key_value_heads", groups)
    return replace(spec, groups=groups, thetas=(_theta(c, 250000.0),) * len(spec.layers))


def _deberta_v2(c: ConfigFields) -> EncoderSpec:
    """Read DeBERTa V2 and V3 (He et al. 2021, 2023)."""
    c.only("conv_kernel_size", 0, None)
    c.only("legacy", True)
    c.only("embedding_size", c.data.get("hidden_size"), None)
    c.only("attention_head_size", None)
    given = c.data.get("pos_att_type") or []
    ways = [x.strip() for x in given.lower().split("|")] if isinstance(given, str) else given
    if not isinstance(ways, list) or not set(map(str, ways)) <= {"c2p", "p2c"}:
        raise c.wrong("pos_att_type", "a list of c2p and p2c")
    a, near = "attention.self.", None
    names = LayerNames(f"{a}query_proj", f"{a}key_proj", f"{a}value_proj")
    if c.truth("relative_attention", False):
        limits = (c.data.get(k) for k in ("position_buckets", "max_relative_positions"))
        span, reach = (v if type(v) is int and v > 0 else None for v in limits)
        reach = reach or c.whole("max_position_embeddings")
        normed = "layer_norm" in str(c.data.get("norm_rel_ebd", "none")).lower()
        own = ("key_proj", "query_proj") if c.truth("share_att_key", False) else ("pos_key_proj", "pos_query_proj")
        near = Disentangled(
            "encoder.rel_embeddings.weight", "encoder.LayerNorm" if normed else "", span or reach, reach if span else None,
            frozenset(ways), *(f"{a}{name}" for name in own),
        )  # fmt: skip
    act = c.chosen("pooler_hidden_act", "gelu", ACTIVATIONS)
    c.only("pooler_hidden_size", c.data.get("hidden_size"), None)
    types = c.data.get("type_vocab_size")
    words = {"token_types": c.whole("type_vocab_size") if types else 0}
    if not c.truth("position_biased_input", True):
        words["table"] = ""  # type: ignore[assignment]
    spec = read_spec(
        c, "deberta.", UNTYPED, eps=1e-7, words=words, names=names, disentangled=near,
        head=replace(BERT_HEADS, activation=act, inner=False),
    )  # fmt: skip
    return replace(spec, scale=float((spec.size * (1 + len(ways))) ** -0.5))


def t5_encoder(c: ConfigFields, each_layer: bool = False) -> EncoderSpec:
    """Read the encoder of T5 (Raffel et al. 2020) or of its version 1.1, whose feed-forward blocks are gated."""
    activations = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu", "gelu": "gelu", "silu": "silu"}
    kind = c.chosen("feed_forward_proj", "relu", activations)
    a, m = "layer.0.SelfAttention.", "layer.1.DenseReluDense."
    gated = kind.startswith("gated-")
    names = LayerNames(
        f"{a}q", f"{a}k", f"{a}v", f"{a}o", "layer.0.layer_norm", f"{m}wi_0" if gated else f"{m}wi", f"{m}wo",
        "layer.1.layer_norm", f"{m}wi_1" if gated else "",
    )  # fmt: skip
    table = "SelfAttention.relative_attention_bias"
    count = c.whole("relative_attention_num_buckets", 32)
    furthest = c.whole("relative_attention_max_distance", 128)
    if count < 4:
        raise c.wrong("relative_attention_num_buckets", "at least 4 buckets")
    if furthest <= count // 2:
        raise c.wrong("relative_attention_max_distance", f"more than half of the {count} buckets")
    near = Buckets(
        f"layer.0.{table}" if each_layer else f"encoder.block.0.layer.0.{table}", count, furthest, each_layer
    )
    fields = Fields("num_layers", "d_model", "num_heads", "d_ff", "", "", "layer_norm_epsilon", "", "d_kv")
    words = {"words": "shared|encoder.embed_tokens", "table": "", "norm": ""}
    return read_spec(
        c, "transformer.", fields, "encoder.block.{}", activations[kind], 1e-6, words,
        names=names, norm="rms_norm", norm_first=True, last_norm="encoder.final_layer_norm", scale=1.0, buckets=near,
        tasks=("ForTokenClassification",),
        unbiased=frozenset({"query", "key", "value", "out", "inner", "gate", "outer"}),
    )  # fmt: skip


def umt5_encoder(c: ConfigFields) -> EncoderSpec:
    return t5_encoder(c, each_layer=True)


def _mobilebert(c: ConfigFields) -> EncoderSpec:
    """Read MobileBERT (Sun et al. 2020)."""
    for key, value in (
        ("use_bottleneck", True), ("key_query_shared_bottleneck", True), ("use_bottleneck_attention", False), ("trigram_input", True),
        ("classifier_activation", True), ("tie_word_embeddings", True),
    ):  # fmt: skip
        c.only(key, value)
    kind = c.chosen("normalization_type", "no_norm", ("no_norm", "layer_norm"))
    width, heads = c.whole("intra_bottleneck_size", 128), c.whole("num_attention_heads")
    c.only("true_hidden_size", width)
    c.multiple("intra_bottleneck_size", width, "num_attention_heads", heads)
    words = {
        "width": c.whole("embedding_size", 128), "trigram": True, "project": "embeddings.embedding_transformation"
    }  # fmt: skip
    head = replace(BERT_HEADS, word_width=c.whole("hidden_size"), word_rest="cls.predictions.dense")
    return read_spec(
        c, "mobilebert.", act="relu", words=words, head=head, norm="affine" if kind == "no_norm" else "layer_norm",
        size=width // heads, bottleneck=Bottleneck(width, c.whole("num_feedforward_networks", 4)),
    )  # fmt: skip


def _esm(c: ConfigFields) -> EncoderSpec:
    """Read ESM-1b and ESM-2 (Rives et al. 2021, Lin et al. 2023), encoders of proteins."""
    c.only("is_folding_model", False, None)
    rotary = c.chosen("position_embedding_type", "absolute", ("absolute", "rotary")) == "rotary"
    words = {
        "norm": "embeddings.layer_norm" if c.data.get("emb_layer_norm_before") else "",
        "dropped": c.whole("mask_token_id") if c.data.get("token_dropout") else None,
        **({"table": ""} if rotary else {"padding": _padding(c)}),
    }
    names = LayerNames(middle_norm="attention.LayerNorm", last_norm="LayerNorm")
    plain = ConfigFields({**c.data, "position_embedding_type": "absolute"}, c.where)
    spec = read_spec(
        plain, "esm.", Fields(types="", activation=""), words=words, names=names, head=ROBERTA_HEADS, norm_first=True,
        last_norm="encoder.emb_layer_norm_after",
    )  # fmt: skip
    return replace(spec, thetas=(_theta(c, 10000.0),) * len(spec.layers)) if rotary else spec


ENCODERS: Mapping[str, Callable[[ConfigFields], EncoderSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "albert": _albert,
    "electra": _electra,
    "roberta-prelayernorm": _roberta_prelayernorm,
    "xlm-roberta-xl": _xlm_roberta_xl,
    "data2vec-text": _data2vec_text,
    "ernie": _ernie,
    "megatron-bert": _megatron_bert,
    "rembert": _rembert,
    "roformer": _roformer,
    "modernbert": _modernbert,
    "nomic_bert": _nomic_bert,
    "jina_embeddings_v3": _jina_embeddings_v3,
    "eurobert": _eurobert,
    "deberta-v2": _deberta_v2,
    "mobilebert": _mobilebert,
    "esm": _esm,
    "t5": t5_encoder,
    "mt5": t5_encoder,
    "umt5": umt5_encoder,
    **VISION,
    **SPEECH,
}
