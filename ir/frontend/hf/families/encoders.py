"""The table of the families of encoders, by `model_type`; `vision` and `speech` have the families of images and sound.

Tests: `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.family import (
    FULL,
    SLIDING,
    UNLIMITED,
    Family,
    Key,
    NormRule,
    fields_of,
    layer_norm,
    layer_types,
    read_stack,
    ropes_by_type,
)
from relax_tune.ir.frontend.hf.families.speech import SPEECH
from relax_tune.ir.frontend.hf.families.vision import VISION
from relax_tune.ir.frontend.hf.transformer.inputs import PageImage, Patches, Words
from relax_tune.ir.frontend.hf.transformer.rope import RopeStyle
from relax_tune.ir.frontend.hf.transformer.spec import (
    BERT_HEADS,
    Bottleneck,
    Buckets,
    Disentangled,
    Names,
    Outputs,
    Stack,
    TaskHeads,
)

ROPE = ("default",)  # other types of scaling have not been compared with the original for encoders
ROBERTA_HEADS = TaskHeads(
    "classifier.dense", "tanh", "classifier.out_proj", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias",
    "gelu",
)  # fmt: skip
DISTILBERT_HEADS = TaskHeads(
    "pre_classifier",
    "relu",
    "classifier",
    "vocab_transform",
    "vocab_layer_norm",
    "vocab_projector",
    "vocab_projector.bias",
)
ALBERT_HEADS = replace(
    BERT_HEADS, dense="pooler", word_dense="predictions.dense", word_norm="predictions.LayerNorm", words="predictions.decoder",
    word_bias="predictions.bias",
)  # fmt: skip
ELECTRA_HEADS = replace(
    ROBERTA_HEADS, activation="gelu", word_dense="generator_predictions.dense", word_norm="generator_predictions.LayerNorm",
    words="generator_lm_head", word_bias="generator_lm_head.bias",
)  # fmt: skip
REMBERT_HEADS = replace(
    BERT_HEADS,
    word_dense="cls.predictions.dense",
    word_norm="cls.predictions.LayerNorm",
    word_bias="cls.predictions.decoder.bias",
)
EUROBERT_HEADS = TaskHeads("dense", "gelu", "classifier", "", "", "lm_head", "")
MODERNBERT_HEADS = TaskHeads(
    "head.dense", "gelu", "classifier", "head.dense", "head.norm", "decoder", "decoder.bias", answer_out="classifier",
    norm="head.norm", everywhere=True,
)  # fmt: skip

# Names of weights.

BERT = Names(
    "bert.", "embeddings.word_embeddings", "embeddings.token_type_embeddings", "embeddings.position_embeddings", "embeddings.LayerNorm",
    layers="encoder.layer", query="attention.self.query", key="attention.self.key", value="attention.self.value",
    out="attention.output.dense", before_attention="attention.output.LayerNorm", gate=None, up="intermediate.dense", down="output.dense",
    before_mlp="output.LayerNorm", last_norm=None,
)  # fmt: skip
DISTILBERT = replace(
    BERT, prefix="distilbert.", layers="transformer.layer", query="attention.q_lin", key="attention.k_lin", value="attention.v_lin",
    out="attention.out_lin", before_attention="sa_layer_norm", up="ffn.lin1", down="ffn.lin2", before_mlp="output_layer_norm",
)  # fmt: skip
MPNET = replace(
    BERT, prefix="mpnet.", query="attention.attn.q", key="attention.attn.k", value="attention.attn.v", out="attention.attn.o",
    before_attention="attention.LayerNorm",
)  # fmt: skip
ALBERT = replace(
    BERT, prefix="albert.", project="encoder.embedding_hidden_mapping_in", layers="encoder.albert_layer_groups", query="attention.query",
    key="attention.key", value="attention.value", out="attention.dense", before_attention="attention.LayerNorm", up="ffn",
    down="ffn_output", before_mlp="full_layer_layer_norm",
)  # fmt: skip
PRE_NORM = replace(
    BERT,
    prefix="roberta_prelayernorm.",
    before_attention="attention.LayerNorm",
    before_mlp="intermediate.LayerNorm",
    last_norm="LayerNorm",
)
XLM_ROBERTA_XL = replace(
    BERT, prefix="roberta.", words_norm=None, before_attention="attention.self_attn_layer_norm", before_mlp="LayerNorm",
    last_norm="encoder.LayerNorm",
)  # fmt: skip
MEGATRON = replace(BERT, words_norm=None, before_attention="attention.ln", before_mlp="ln", last_norm="encoder.ln")
FUSED = replace(
    BERT,
    words_norm="emb_ln",
    positions=None,
    layers="encoder.layers",
    before_attention="norm1",
    before_mlp="norm2",
    down="mlp.fc2",
)
MODERNBERT = Names(
    words="embeddings.tok_embeddings", words_norm="embeddings.norm", before_attention="attn_norm", qkv="attn.Wqkv", out="attn.Wo",
    before_mlp="mlp_norm", gate_up="mlp.Wi", down="mlp.Wo", last_norm="final_norm",
)  # fmt: skip
DEBERTA = replace(
    BERT,
    prefix="deberta.",
    query="attention.self.query_proj",
    key="attention.self.key_proj",
    value="attention.self.value_proj",
)
DEBERTA_V1 = replace(
    BERT, prefix="deberta.", qkv="attention.self.in_proj",
    qkv_biases=("attention.self.q_bias", "", "attention.self.v_bias"),
)  # fmt: skip
ESM = replace(
    BERT,
    prefix="esm.",
    before_attention="attention.LayerNorm",
    before_mlp="LayerNorm",
    last_norm="encoder.emb_layer_norm_after",
)
T5 = Names(
    "transformer.", "shared|encoder.embed_tokens", layers="encoder.block", before_attention="layer.0.layer_norm",
    query="layer.0.SelfAttention.q", key="layer.0.SelfAttention.k", value="layer.0.SelfAttention.v", out="layer.0.SelfAttention.o",
    before_mlp="layer.1.layer_norm", gate="layer.1.DenseReluDense.wi_0", up="layer.1.DenseReluDense.wi_1",
    down="layer.1.DenseReluDense.wo", last_norm="encoder.final_layer_norm",
)  # fmt: skip

# Hooks.


def _mpnet(c: ConfigFields, stack: Stack) -> Stack:
    # transformers computes 32 buckets for tables of any size
    c.only("relative_attention_num_buckets", 32, None)
    return replace(stack, position_bias=Buckets("encoder.relative_attention_bias", 32, 128))


def _albert(c: ConfigFields, stack: Stack) -> Stack:
    """Share the weights of layers by groups."""
    groups, inside, count = c.whole("num_hidden_groups", 1), c.whole("inner_group_num", 1), len(stack.layers)
    each = count / groups
    paths = [f"{ALBERT.layers}.{int(i / each)}.albert_layers.{j}" for i in range(count) for j in range(inside)]
    return replace(stack, layers=tuple(replace(stack.layers[0], path=path) for path in paths))


def _projected(c: ConfigFields, stack: Stack) -> Stack:
    """Project embeddings whose width is not the hidden size."""
    if stack.words.width == stack.hidden:
        return stack
    return replace(stack, names=replace(stack.names, project="embeddings_project"))


def _with_heads(stack: Stack, **changes: Any) -> Stack:
    return replace(stack, outputs=replace(stack.outputs, heads=replace(stack.outputs.heads, **changes)))


def _rembert(c: ConfigFields, stack: Stack) -> Stack:
    """Read the width of the output embeddings, which differs from the input's."""
    return _with_heads(stack, word_width=c.whole("output_embedding_size", 1664))


def _roformer(c: ConfigFields, stack: Stack) -> Stack:
    heads = replace(
        BERT_HEADS, dense="classifier.dense", activation=stack.activation, out="classifier.out_proj", inner=False
    )
    return _with_heads(
        _projected(c, stack), **{name: getattr(heads, name) for name in ("dense", "activation", "out", "inner")}
    )


def _modernbert(c: ConfigFields, stack: Stack) -> Stack:
    """Read which layers have windows, the rotation of each kind, and the head."""
    every, count = c.whole("global_attn_every_n_layers", 3), len(stack.layers)
    kinds = layer_types(c, count, lambda: [SLIDING if i % every else FULL for i in range(count)])
    reach = c.whole("local_attention", 128) // 2
    stack = stack.with_layers(
        lambda i, layer: replace(layer, window=reach if kinds[i] == SLIDING else None, attention_norm=i > 0)
    )
    full, local = (
        RopeStyle(theta, f"{kind}_rope_theta", kinds=ROPE) for kind, theta in (("global", 160000.0), ("local", 10000.0))
    )
    stack = ropes_by_type(c, stack, full, local)
    activation = c.chosen("classifier_activation", "gelu", ACTIVATIONS)
    return _with_heads(
        stack, activation=activation, word_activation=activation, biased=c.truth("classifier_bias", False),
        pooled=c.chosen("classifier_pooling", "cls", ("cls", "mean")), norm_biased=stack.norm.bias,
        word_bias="decoder.bias" if c.truth("decoder_bias", True) else "",
    )  # fmt: skip


def _eurobert(c: ConfigFields, stack: Stack) -> Stack:
    kind = c.chosen("classifier_pooling", "late", ("late", "bos", "mean"))
    return _with_heads(stack, pooled="cls" if kind == "bos" else kind)


def _deberta_v2(c: ConfigFields, stack: Stack) -> Stack:
    """Read token types and the terms of disentangled attention, whose number scales the scores."""
    c.only("embedding_size", stack.hidden, None)
    c.only("pooler_hidden_size", stack.hidden, None)
    given = c.data.get("pos_att_type") or []
    terms = [x.strip() for x in given.lower().split("|")] if isinstance(given, str) else given
    if not isinstance(terms, list) or not set(map(str, terms)) <= {"c2p", "p2c"}:
        raise c.wrong("pos_att_type", "a list of c2p and p2c")
    bias = None
    if c.truth("relative_attention", False):
        limits = (c.data.get(k) for k in ("position_buckets", "max_relative_positions"))
        span, reach = (v if type(v) is int and v > 0 else None for v in limits)
        reach = reach or c.whole("max_position_embeddings")
        normed = "layer_norm" in str(c.data.get("norm_rel_ebd", "none")).lower()
        key, query = (
            ("key_proj", "query_proj") if c.truth("share_att_key", False) else ("pos_key_proj", "pos_query_proj")
        )
        bias = Disentangled(
            "encoder.rel_embeddings.weight", "encoder.LayerNorm" if normed else "", span or reach, reach if span else None,
            frozenset(terms), f"attention.self.{key}", f"attention.self.{query}",
        )  # fmt: skip
    if not c.truth("position_biased_input", True):
        stack = replace(stack, names=replace(stack.names, positions=None))
    types = c.whole("type_vocab_size") if c.data.get("type_vocab_size") else 0
    stack = replace(stack, position_bias=bias, embedding=replace(stack.words, token_types=types))
    scale = float((stack.size * (1 + len(terms))) ** -0.5)
    stack = stack.with_layers(lambda _, layer: replace(layer, scale=scale))
    return _with_heads(stack, activation=c.chosen("pooler_hidden_act", "gelu", ACTIVATIONS), inner=False)


def _deberta(c: ConfigFields, stack: Stack) -> Stack:
    """Read the first version, whose positions have projections of their own, without buckets."""
    stack = _deberta_v2(c, stack)
    if not isinstance(stack.position_bias, Disentangled):
        return stack
    bias = replace(
        stack.position_bias, key="attention.self.pos_proj", query="attention.self.pos_q_proj", key_bias=False
    )
    return replace(stack, position_bias=bias)


def _mobilebert(c: ConfigFields, stack: Stack) -> Stack:
    """Read the sizes of the narrow side."""
    kind = c.chosen("normalization_type", "no_norm", ("no_norm", "layer_norm"))
    width = c.whole("intra_bottleneck_size", 128)
    c.only("true_hidden_size", width)
    c.multiple("intra_bottleneck_size", width, "num_attention_heads", stack.heads)
    size = width // stack.heads
    stack = replace(
        stack, size=size, bottleneck=Bottleneck(width, c.whole("num_feedforward_networks", 4)),
        norm=replace(stack.norm, kind="affine" if kind == "no_norm" else "layer"),
        embedding=replace(stack.words, trigram=True, project_first=True),
    )  # fmt: skip
    stack = stack.with_layers(lambda _, layer: replace(layer, scale=float(size**-0.5)))
    return _with_heads(stack, word_width=stack.hidden, word_rest="cls.predictions.dense")


def _esm(c: ConfigFields, stack: Stack) -> Stack:
    """Read positions, which are absolute or rotary, and token dropout."""
    dropped = c.whole("mask_token_id") if c.data.get("token_dropout") else None
    norm = "embeddings.layer_norm" if c.data.get("emb_layer_norm_before") else None
    stack = replace(stack, names=replace(stack.names, words_norm=norm), embedding=replace(stack.words, dropped=dropped))
    if c.chosen("position_embedding_type", "absolute", ("absolute", "rotary")) == "absolute":
        return stack.with_layers(lambda _, layer: replace(layer, rope=None))
    return replace(stack, names=replace(stack.names, positions=None), embedding=replace(stack.words, padding=None))


def _t5(c: ConfigFields, stack: Stack, each_layer: bool = False) -> Stack:
    """Read buckets, and the feed-forward block, which version 1.1 gates."""
    activations = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu", "gelu": "gelu", "silu": "silu"}
    kind = c.chosen("feed_forward_proj", "relu", activations)
    count = c.whole("relative_attention_num_buckets", 32)
    furthest = c.whole("relative_attention_max_distance", 128)
    if count < 4:
        raise c.wrong("relative_attention_num_buckets", "at least 4 buckets")
    if furthest <= count // 2:
        raise c.wrong("relative_attention_max_distance", f"more than half of the {count} buckets")
    table = "layer.0.SelfAttention.relative_attention_bias"
    buckets = Buckets(table if each_layer else f"encoder.block.0.{table}", count, furthest, each_layer)
    names = stack.names
    if not kind.startswith("gated-"):
        names = replace(names, gate=None, up=names.up.replace("wi_1", "wi"))
    # transformers prefers this field to `feed_forward_proj`
    activation = c.chosen("dense_act_fn", activations[kind], ACTIVATIONS)
    return replace(stack, names=names, activation=activation, position_bias=buckets)


def _dpr(c: ConfigFields, stack: Stack) -> Stack:
    """Read which of the two encoders a file has."""
    context = "ContextEncoder" in str(c.data.get("architectures"))
    prefix = "ctx_encoder.bert_model." if context else "question_encoder.bert_model."
    return replace(stack, names=replace(stack.names, prefix=prefix))


def _layoutlm(c: ConfigFields, stack: Stack) -> Stack:
    return replace(stack, embedding=replace(stack.words, boxes=c.whole("max_2d_position_embeddings", 1024)))


def _layoutlmv3(c: ConfigFields, stack: Stack) -> Stack:
    """Read the image of a page, boxes and biases by place."""
    coordinate, shape = c.whole("coordinate_size", 128), c.whole("shape_size", 128)
    if 4 * coordinate + 2 * shape != stack.hidden:
        raise c.wrong("coordinate_size", f"a size so that four of them and two of shape_size make {stack.hidden}")
    patches = Patches(
        c.whole("num_channels", 3), (c.whole("input_size", 224),) * 2, c.pair("patch_size", 16), "patch_embed.proj", table="pos_embed",
        tokens=("cls_token",),
    )  # fmt: skip
    order = (c.whole("rel_pos_bins", 32), c.whole("max_rel_pos", 128))
    space = (c.whole("rel_2d_pos_bins", 64), c.whole("max_rel_2d_pos", 256))
    by_order, by_space = c.truth("has_relative_attention_bias", True), c.truth("has_spatial_attention_bias", True)
    page = PageImage(patches, coordinate, shape, order if by_order else None, space if by_space else None)
    stack = _layoutlm(c, stack)
    return replace(stack, embedding=replace(stack.words, page=page))


def _umt5(c: ConfigFields, stack: Stack) -> Stack:
    return _t5(c, stack, each_layer=True)


# Presets. Norms follow the sums, as in BERT (Devlin et al. 2019).

ENCODER = Family(
    names=BERT, causal=False, order="post_norm", groups=None, size=None, types="type_vocab_size", norm=layer_norm("layer_norm_eps", 1e-12),
    activation=("hidden_act", "gelu"), qkv_bias=True, out_bias=True, mlp_bias=True, rope=None,
    only={"position_embedding_type": ("absolute", None)},
)  # fmt: skip
ROBERTA = replace(
    ENCODER, names=replace(BERT, prefix="roberta."), padding=Key("pad_token_id", 1), outputs=Outputs(ROBERTA_HEADS)
)
T5_ENCODER = Family(
    names=T5, causal=False, hidden="d_model", layers="num_layers", heads="num_heads", groups=None, size="d_kv", inner="d_ff",
    positions=UNLIMITED, norm=NormRule(eps=Key("layer_norm_epsilon", 1e-6)), activation=("", "relu"), rope=None, scale=1.0,
    outputs=Outputs(tasks=("ForTokenClassification",)), finish=_t5, only={"position_embedding_type": ("absolute", None)},
)  # fmt: skip
UMT5_ENCODER = replace(T5_ENCODER, finish=_umt5)

ENCODERS: Mapping[str, Family] = {
    "bert": ENCODER,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": replace(
        ENCODER, names=DISTILBERT, hidden="dim", layers="n_layers", heads="n_heads", inner="hidden_dim", types=None,
        norm=NormRule("layer", 1e-12, bias=True), activation=("activation", "gelu"), outputs=Outputs(DISTILBERT_HEADS),
    ),
    "mpnet": replace(ENCODER, names=MPNET, types=None, padding=1, outputs=Outputs(ROBERTA_HEADS), finish=_mpnet),
    "albert": replace(
        ENCODER, names=ALBERT, width=Key("embedding_size", 128), activation=("hidden_act", "gelu_new"), outputs=Outputs(ALBERT_HEADS),
        finish=_albert,
    ),
    "electra": replace(
        ENCODER, names=replace(BERT, prefix="electra."), width=Key("embedding_size", 128), outputs=Outputs(ELECTRA_HEADS),
        finish=_projected,
    ),
    "roberta-prelayernorm": replace(ROBERTA, names=PRE_NORM, order="pre_norm"),
    "xlm-roberta-xl": replace(ROBERTA, names=XLM_ROBERTA_XL, order="pre_norm"),
    "data2vec-text": replace(ROBERTA, names=replace(BERT, prefix="data2vec_text.")),
    "ernie": replace(
        ENCODER, names=replace(BERT, prefix="ernie."), only={**ENCODER.only, "use_task_id": (False, None)}
    ),
    "megatron-bert": replace(ENCODER, names=MEGATRON, order="pre_norm"),
    "rembert": replace(
        ENCODER, names=replace(BERT, prefix="rembert.", project="encoder.embedding_hidden_mapping_in"),
        width=Key("input_embedding_size", 256), outputs=Outputs(REMBERT_HEADS), finish=_rembert,
    ),
    "roformer": replace(
        ENCODER, names=replace(BERT, prefix="roformer.", positions=None, rotary="encoder.embed_positions.weight"),
        width=Key("embedding_size"), rope=RopeStyle(10000.0, interleaved=True, kinds=ROPE), finish=_roformer,
        only={**ENCODER.only, "rotary_value": (False,)},
    ),
    "modernbert": replace(
        ENCODER, names=MODERNBERT, order="pre_norm", types=None, norm=layer_norm("norm_eps", bias=Key("norm_bias", False)),
        activation=("hidden_activation", "gelu"), qkv_bias=Key("attention_bias", False), out_bias=Key("attention_bias", False),
        mlp_bias=Key("mlp_bias", False), outputs=Outputs(MODERNBERT_HEADS), finish=_modernbert,
    ),
    "nomic_bert": replace(
        ENCODER, names=replace(FUSED, prefix="nomic_bert.", qkv="attn.Wqkv", out="attn.out_proj", gate="mlp.fc12", up="mlp.fc11"),
        size="head_dim", activation=("hidden_act", "silu"), qkv_bias=False, out_bias=False, mlp_bias=False,
        rope=RopeStyle(1000.0, kinds=ROPE), outputs=Outputs(replace(BERT_HEADS, word_norm="cls.predictions.transform.layer_norm")),
    ),
    "jina_embeddings_v3": replace(  # without adapters
        ENCODER, names=replace(FUSED, prefix="roberta.", qkv="mixer.Wqkv", out="mixer.out_proj", up="mlp.fc1"), size="head_dim",
        norm=layer_norm("layer_norm_eps"), rope=RopeStyle(20000.0, kinds=ROPE), outputs=Outputs(ROBERTA_HEADS),
    ),
    "eurobert": replace(  # Llama's layers without causality
        ENCODER, names=Names(), order="pre_norm", types=None, groups="num_key_value_heads", size="head_dim",
        norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), activation=("hidden_act", "silu"), qkv_bias=Key("attention_bias", False),
        out_bias=Key("attention_bias", False), mlp_bias=Key("mlp_bias", False), rope=RopeStyle(kinds=ROPE),
        outputs=Outputs(EUROBERT_HEADS), finish=_eurobert,
    ),
    "deberta": replace(
        ENCODER, names=DEBERTA_V1, types=None, norm=layer_norm("layer_norm_eps", 1e-7), fused="groups", key_bias=False, finish=_deberta,
        only={
            **ENCODER.only, "legacy": (True,), "talking_head": (False, None), "norm_rel_ebd": ("none",), "position_buckets": (-1, None),
            "share_att_key": (False,),
        },
    ),
    "deberta-v2": replace(
        ENCODER, names=DEBERTA, types=None, norm=layer_norm("layer_norm_eps", 1e-7), finish=_deberta_v2,
        only={**ENCODER.only, "conv_kernel_size": (0, None), "legacy": (True,), "attention_head_size": (None,)},
    ),
    "mobilebert": replace(
        ENCODER, names=replace(BERT, prefix="mobilebert.", project="embeddings.embedding_transformation"),
        width=Key("embedding_size", 128), activation=("hidden_act", "relu"), finish=_mobilebert,
        only={
            **ENCODER.only, "use_bottleneck": (True,), "key_query_shared_bottleneck": (True,), "use_bottleneck_attention": (False,),
            "trigram_input": (True,), "classifier_activation": (True,), "tie_word_embeddings": (True,),
        },
    ),
    "esm": replace(
        ENCODER, names=ESM, order="pre_norm", types=None, padding=Key("pad_token_id", 1), activation=("", "gelu"),
        rope=RopeStyle(10000.0, kinds=ROPE), outputs=Outputs(ROBERTA_HEADS), finish=_esm, only={"is_folding_model": (False, None)},
    ),
    "bert-generation": replace(ENCODER, types=None, outputs=Outputs(BERT_HEADS, tasks=("ForMaskedLM",))),
    "dpr": replace(ENCODER, outputs=Outputs(tasks=("QuestionEncoder", "ContextEncoder")), finish=_dpr),
    "layoutlmv3": replace(
        ROBERTA, names=replace(BERT, prefix="layoutlmv3."), norm=layer_norm("layer_norm_eps", 1e-5), finish=_layoutlmv3,
        only={"text_embed": (True,), "visual_embed": (True,)},
        outputs=Outputs(ROBERTA_HEADS, tasks=("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")),
    ),
    "layoutlm": replace(ENCODER, names=replace(BERT, prefix="layoutlm."), finish=_layoutlm),
    "t5": T5_ENCODER,
    "mt5": T5_ENCODER,
    "umt5": UMT5_ENCODER,
    **VISION,
    **SPEECH,
}  # fmt: skip
ENCODER_FIELDS: Mapping[str, tuple[object, ...]] = {
    "is_decoder": (False, None), "add_cross_attention": (False, None), "pruned_heads": ({}, None),
}  # fmt: skip


def read_encoder(data: Mapping[str, Any], where: str) -> Stack:
    """Read and check the configuration of one of ENCODERS. Raises ParseError naming the field."""
    c = ConfigFields(data, where)
    for key, values in ENCODER_FIELDS.items():
        c.only(key, *values)
    family = ENCODERS[data["model_type"]]
    stack = read_stack(family, fields_of(family, c))
    if isinstance(stack.embedding, Words) and stack.positions < 1:
        raise c.wrong(
            "max_position_embeddings", f"more positions than the {stack.words.padding} that pad_token_id skips and one"
        )
    return stack
