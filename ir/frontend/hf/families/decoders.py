"""The table of the families of decoders, by `model_type`.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.family import (
    DECODER_FIELDS,
    ExpertRule,
    Family,
    HeadNormRule,
    Key,
    NormRule,
    Windows,
    fields_of,
    flag,
    layer_norm,
    read_stack,
    ropes_by_type,
)
from relax_tune.ir.frontend.hf.families.hybrids import HYBRIDS
from relax_tune.ir.frontend.hf.transformer.mixers import AltUp, ExpertNames
from relax_tune.ir.frontend.hf.transformer.rope import RopeStyle
from relax_tune.ir.frontend.hf.transformer.spec import Alibi, HeadNorm, Names, Norm, Stack, TransformerLayer

BIASED, MLP_BIASED = Key("attention_bias", False), Key("mlp_bias", False)
UNIT, RMS_1E5 = NormRule(offset=1.0), NormRule(eps=Key("rms_norm_eps", 1e-5))
ASKED = Windows(Key("use_sliding_window", False))
FROM_LAYER = Windows(Key("use_sliding_window", False), first=Key("max_window_layers", 28))
LAYER_NORM = layer_norm("layer_norm_eps")
EPSILON = layer_norm("layer_norm_epsilon")
EACH_NUMBERED = HeadNorm(Norm(0.0), "each", numbered=True)
EVERY_HEAD = HeadNorm(Norm(0.0), "all")
NEIGHBOURS = RopeStyle(dims_key="rotary_dim", interleaved=True)
PARTIAL = "partial_rotary_factor"

# Names of weights.

BOTH_NORMS = Names(
    after_attention="post_attention_layernorm", before_mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"
)  # fmt: skip
OUTPUT_NORMS = replace(BOTH_NORMS, before_attention=None, before_mlp=None)
GPT2 = Names(
    "transformer.", "wte", positions="wpe", layers="h", before_attention="ln_1", qkv="attn.c_attn", out="attn.c_proj", before_mlp="ln_2",
    gate=None, up="mlp.c_fc", down="mlp.c_proj", last_norm="ln_f",
)  # fmt: skip
GPTJ_NAMES = replace(
    GPT2, positions=None, qkv=None, query="attn.q_proj", key="attn.k_proj", value="attn.v_proj", out="attn.out_proj", before_mlp=None,
    up="mlp.fc_in", down="mlp.fc_out",
)  # fmt: skip
GPT_NEO = replace(
    GPTJ_NAMES, positions="wpe", before_mlp="ln_2", query="attn.attention.q_proj", key="attn.attention.k_proj",
    value="attn.attention.v_proj", out="attn.attention.out_proj", up="mlp.c_fc", down="mlp.c_proj",
)  # fmt: skip
BLOOM = replace(
    GPT2, words="word_embeddings", words_norm="word_embeddings_layernorm", positions=None, before_attention="input_layernorm",
    qkv="self_attention.query_key_value", out="self_attention.dense", before_mlp="post_attention_layernorm", up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)  # fmt: skip
NEOX = Names(
    "gpt_neox.", "embed_in", qkv="attention.query_key_value", out="attention.dense", gate=None, up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h", last_norm="final_layer_norm", head="embed_out",
)  # fmt: skip
PERSIMMON = replace(
    NEOX, prefix="model.", words="embed_tokens", qkv="self_attn.query_key_value", out="self_attn.dense", query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm", last_norm="final_layernorm", head="lm_head",
)  # fmt: skip
OPT = Names(
    "model.decoder.", positions="embed_positions", before_attention="self_attn_layer_norm", out="self_attn.out_proj",
    before_mlp="final_layer_norm", gate=None, up="fc1", down="fc2", last_norm="final_layer_norm",
)  # fmt: skip
MPT = Names(
    "transformer.", "wte", layers="blocks", before_attention="norm_1", qkv="attn.Wqkv", out="attn.out_proj", before_mlp="norm_2", gate=None,
    up="ffn.up_proj", down="ffn.down_proj", last_norm="norm_f",
)  # fmt: skip
PHI = Names(
    out="self_attn.dense", query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm", before_mlp=None, gate=None, up="mlp.fc1",
    down="mlp.fc2", last_norm="final_layernorm",
)  # fmt: skip
PHI3 = Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj", gate=None)
PLAIN = Names(gate=None)

BLOCK_EXPERTS = ExpertNames(
    "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{part}" for part in ("w1", "w3", "w2"))
)
GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer", down="block_sparse_moe.output_linear", joined="block_sparse_moe.input_linear"
)
COUNTS = ("num_experts", "num_local_experts")
EXPERTS = ExpertRule(ExpertNames(), COUNTS, normalised=Key("norm_topk_prob", False))
SPARSE = replace(EXPERTS, inner="moe_intermediate_size", sparse=True)


# Hooks.


def _gemma3(c: ConfigFields, spec: Stack) -> Stack:
    return ropes_by_type(c, spec, RopeStyle(1e6), RopeStyle(theta_key="rope_local_base_freq"))


def _gemma3n(c: ConfigFields, spec: Stack) -> Stack:
    """Read alternating updates, layers that share keys and values, and sparse gates."""
    spec, count = _gemma3(c, spec), len(spec.layers)
    streams = c.whole("altup_num_inputs", 4)
    if streams < 2:
        raise c.wrong("altup_num_inputs", "at least 2")
    active = c.number("altup_active_idx", 0, 0, streams, f"a whole number below {streams}")
    rows = c.whole("vocab_size_per_layer_input", 262144)
    altup = AltUp(
        streams, int(active), c.truth("altup_correct_scale", True), c.whole("laurel_rank", 64), rows,
        c.whole("hidden_size_per_layer_input", 256),
    )  # fmt: skip
    shared = int(c.number("num_kv_shared_layers", 15, 0, count, f"a whole number below the {count} layers"))
    windows = [layer.window for layer in spec.layers]
    own = windows[: count - shared]
    if not {*windows} <= {*own}:
        raise c.wrong("num_kv_shared_layers", "a layer of each type before the ones that share keys and values")
    usual = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    shares = c.data.get("activation_sparsity_pattern") or usual
    if (
        not isinstance(shares, list)
        or len(shares) != count
        or not all(type(v) in (int, float) and 0 <= v < 1 for v in shares)
    ):
        raise c.wrong("activation_sparsity_pattern", f"a number in [0, 1) for each of {count} layers")

    def layer(i: int, layer: TransformerLayer) -> TransformerLayer:
        producer = len(own) - 1 - own[::-1].index(layer.window) if i >= len(own) else None
        sparsity = NormalDist().inv_cdf(shares[i]) if shares[i] else None
        return replace(layer, shares=producer, sparsity=sparsity)

    return replace(spec, altup=altup).with_layers(layer)


def _phi3(c: ConfigFields, spec: Stack) -> Stack:
    """Require the length that LongRoPE was first trained with at the top, where transformers puts 4096 if it is missing."""
    if any(layer.rope is not None and layer.rope.limit is not None for layer in spec.layers):
        c.whole("original_max_position_embeddings")
    return spec


def _olmo3(c: ConfigFields, spec: Stack) -> Stack:
    return ropes_by_type(c, spec, RopeStyle(500000.0), RopeStyle(500000.0))


def _windowed_rope(c: ConfigFields, spec: Stack) -> Stack:
    """Rotate only in layers with a window."""
    return spec.with_layers(lambda _, layer: replace(layer, rope=None if layer.window is None else layer.rope))


def _exaone4(c: ConfigFields, spec: Stack) -> Stack:
    return spec if c.data.get("sliding_window") is None else _windowed_rope(c, spec)


def _smollm3(c: ConfigFields, spec: Stack) -> Stack:
    """Do not rotate in layers that `no_rope_layers` marks with 0."""
    marks, count = c.data.get("no_rope_layers"), len(spec.layers)
    if marks is None:
        every = c.whole("no_rope_layer_interval", 4)
        marks = [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(marks, list) or len(marks) != count or any(v not in (0, 1) for v in marks):
        raise c.wrong("no_rope_layers", f"0 or 1 for each of {count} layers")
    return spec.with_layers(lambda i, layer: replace(layer, rope=layer.rope if marks[i] else None))


def _gpt2(c: ConfigFields, spec: Stack) -> Stack:
    """Read the scale of the scores from two switches."""
    scale = 1.0 if not c.truth("scale_attn_weights", True) else float(spec.size**-0.5)
    by_layer = c.truth("scale_attn_by_inverse_layer_idx", False)
    return spec.with_layers(lambda i, layer: replace(layer, scale=scale / (i + 1 if by_layer else 1)))


def _bigcode(c: ConfigFields, spec: Stack) -> Stack:
    spec = _gpt2(c, spec)
    return replace(spec, groups=1) if c.truth("multi_query", True) else replace(spec, fused="groups")


def _gpt_neo(c: ConfigFields, spec: Stack) -> Stack:
    """Read which layers are local; scores are not scaled."""
    kinds, count = c.data.get("attention_types"), len(spec.layers)
    try:
        types = [kind for part, times in kinds or () for _ in range(min(times, count)) for kind in part]
    except (TypeError, ValueError):
        types = []
    types = types if kinds else ["global", "local"] * (count // 2)
    if len(types) != count or any(t not in ("global", "local") for t in types):
        raise c.wrong("attention_types", f"lists of 'global' and 'local', repeated to {count} layers")
    size = c.whole("window_size", 256)
    return spec.with_layers(lambda i, x: replace(x, scale=1.0, window=size if types[i] == "local" else None))


def _opt(c: ConfigFields, spec: Stack) -> Stack:
    names, width = spec.names, c.whole("word_embed_proj_dim", spec.hidden)
    first = c.truth("do_layer_norm_before", True)
    if not first or c.truth("_remove_final_layer_norm", False):
        names = replace(names, last_norm=None)
    if width != spec.hidden:
        names = replace(names, project="project_in", words_out="project_out")
    affine = c.truth("layer_norm_elementwise_affine", True)
    norm = replace(spec.norm, weight=affine, bias=affine)
    words = replace(spec.words, width=width, project_first=True, project_biased=False)
    return replace(spec, names=names, norm=norm, order="pre_norm" if first else "post_norm", embedding=words)


def _falcon(c: ConfigFields, spec: Stack) -> Stack:
    new, parallel = c.truth("new_decoder_architecture", False), c.truth("parallel_attn", True)
    names = spec.names
    groups = 1 if c.truth("multi_query", True) else spec.heads
    if new:
        groups = c.whole("num_kv_heads", spec.heads)
        c.multiple("num_attention_heads", spec.heads, "num_kv_heads", groups)
        c.only("parallel_attn", True)
        if c.whole("num_ln_in_parallel_attn", 2) == 2:
            names = replace(names, before_attention="ln_attn", before_mlp="ln_mlp")
        else:
            c.only("num_ln_in_parallel_attn", 1)
            names = replace(names, before_mlp=None)
    elif parallel:
        c.only("num_ln_in_parallel_attn", None, 1)
        names = replace(names, before_mlp=None)
    spec = replace(spec, names=names, groups=groups, order="parallel" if parallel else "pre_norm")
    if not c.truth("alibi", False):
        return spec
    spec = replace(spec, position_bias=Alibi(half=True, scaled=True))
    return spec.with_layers(lambda _, layer: replace(layer, rope=None))


def _bloom(c: ConfigFields, spec: Stack) -> Stack:
    after = c.truth("apply_residual_connection_post_layernorm", False)
    return replace(spec, position_bias=Alibi(), residual_is_normed=after)


def _mpt(c: ConfigFields, spec: Stack) -> Stack:
    attention = c.data.get("attn_config") or {}
    if not isinstance(attention, dict):
        raise c.wrong("attn_config", "an object or null")
    a = ConfigFields(attention, f"{c.where}: attn_config")
    for key, value in MPT_ATTENTION.items():
        a.only(key, value)
    if a.data.get("softmax_scale") is not None:
        scale = a.number("softmax_scale", None, 1e-30, 1e30, "a number above 0")
        spec = spec.with_layers(lambda _, layer: replace(layer, scale=scale))
    clip = a.number("clip_qkv", None, 1e-30, 1e30, "a number above 0") if a.data.get("clip_qkv") else None
    largest = a.number("alibi_bias_max", 8, 1e-3, 1e3, "a number above 0")
    return replace(spec, position_bias=Alibi(largest, from_end=True), clip=clip, inner=4 * spec.hidden)


MPT_ATTENTION = {
    "attn_type": "multihead_attention", "alibi": True, "qk_ln": False, "prefix_lm": False, "attn_uses_sequence_id": False,
}  # fmt: skip


def _codegen(c: ConfigFields, spec: Stack) -> Stack:
    c.multiple("n_head", spec.heads, "4", 4)
    return spec


def _cwm(c: ConfigFields, spec: Stack) -> Stack:
    if c.data.get("layer_types") is None:
        raise c.wrong("layer_types", "the type of each layer, as this family has other types by default")
    if c.data.get("rope_parameters") is None and c.data.get("rope_scaling") is None:
        raise c.wrong("rope_parameters", "an object, as this family has scaling by default")
    return spec


def _stablelm(c: ConfigFields, spec: Stack) -> Stack:
    return replace(spec, names=replace(spec.names, before_mlp=None)) if spec.order == "parallel" else spec


# Presets.

LLAMA = Family(qkv_bias=BIASED, out_bias=BIASED, mlp_bias=MLP_BIASED)
BIASED_ATTENTION = replace(LLAMA, mlp_bias=False)
UNBIASED = replace(LLAMA, qkv_bias=False, out_bias=False, mlp_bias=False)
MISTRAL = replace(UNBIASED, groups_needed=True, windows=Windows(needed=True))
QWEN3 = replace(BIASED_ATTENTION, groups_needed=True, head_norm=HeadNormRule())
GEMMA = replace(
    BIASED_ATTENTION,
    groups_needed=True,
    norm=UNIT,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    tied=True,
    words_scale="root",
)
GEMMA2 = replace(
    GEMMA, names=BOTH_NORMS, size_needed=True, activation=("hidden_activation", "gelu_pytorch_tanh"),
    root=Key("query_pre_attn_scalar", 256), windows=Windows(needed=True, every=2), scores_cap=Key("attn_logit_softcapping", 50.0),
    logits_cap=Key("final_logit_softcapping", 30.0),
)  # fmt: skip
OLMO2 = replace(BIASED_ATTENTION, names=OUTPUT_NORMS, norm=RMS_1E5, head_norm=HeadNormRule(style=EVERY_HEAD))
GRANITE = replace(
    BIASED_ATTENTION, words_scale=Key("embedding_multiplier", 1.0), residual_scale=Key("residual_multiplier", 1.0),
    logits_scale=Key("logits_scaling", 1.0), logits_divided=True, scale=Key("attention_multiplier", 1.0),
)  # fmt: skip
COHERE = replace(
    BIASED_ATTENTION, names=Names(before_mlp=None), norm=layer_norm("layer_norm_eps", bias=False), tied=True, parallel=True,
    logits_scale=Key("logit_scale", 0.0625), rope=RopeStyle(500000.0, interleaved=True),
)  # fmt: skip
GLM = replace(
    UNBIASED, names=replace(PHI3, qkv=None), groups_needed=True, size_needed=True, qkv_bias=Key("attention_bias", True),
    norm=NormRule(eps=Key("rms_norm_eps", 1.5625e-07)), rope=RopeStyle(part=0.5, part_key=PARTIAL, interleaved=True),
)  # fmt: skip
GPT = Family(
    names=GPT2, hidden="n_embd", layers="n_layer", heads="n_head", groups=None, size=None, inner="n_inner", inner_factor=4,
    positions=Key("n_positions", 1024), norm=EPSILON, activation=("activation_function", "gelu_new"), tied=True, qkv_bias=True,
    out_bias=True, mlp_bias=True, rope=None,
)  # fmt: skip
GPTJ = replace(
    GPT, names=GPTJ_NAMES, positions=Key("n_positions", 2048), tied=False, qkv_bias=False, out_bias=False, rope=NEIGHBOURS,
    head_bias=True, parallel=True,
)  # fmt: skip
PLAIN_HEADS = replace(UNBIASED, groups=None, size=None, qkv_bias=True, out_bias=True, mlp_bias=True)
GEMMA3 = replace(
    GEMMA2, head_norm=HeadNormRule(), windows=Windows(needed=True, every=6, every_key="sliding_window_pattern"), rope=None,
    scores_cap=None, logits_cap=Key("final_logit_softcapping"), finish=_gemma3,
    only={"attn_logit_softcapping": (None,)},  # transformers reads the field, and caps nothing
)  # fmt: skip
GEMMA3N = replace(
    GEMMA3, norm=NormRule(), head_norm=HeadNormRule(style=HeadNorm(Norm(0.0), values=True)), windows=Windows(needed=True, every=5),
    scale=1.0, root=None, logits_cap=Key("final_logit_softcapping", 30.0), finish=_gemma3n,
)  # fmt: skip
IN_IMAGES = "model.language_model.|language_model.model."  # of the text model in files of models that also read images

DECODERS: Mapping[str, Family] = {
    "llama": LLAMA,
    **HYBRIDS,
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "qwen2": replace(UNBIASED, groups_needed=True, qkv_bias=True, windows=FROM_LAYER),
    "qwen3": replace(QWEN3, windows=FROM_LAYER),
    "gemma": replace(GEMMA, only={"hidden_activation": ("gelu_pytorch_tanh", None)}),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": replace(
        GEMMA3, architecture="ForConditionalGeneration", part="text_config", names=replace(BOTH_NORMS, prefix=IN_IMAGES),
        defaults={
            "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072
        },
    ),
    "gemma3n_text": GEMMA3N,
    "gemma3n": replace(
        GEMMA3N, architecture="ForConditionalGeneration", part="text_config", names=replace(BOTH_NORMS, prefix=IN_IMAGES)
    ),
    "vaultgemma": replace(GEMMA2, names=Names(before_mlp="pre_feedforward_layernorm")),
    "phi3": replace(
        UNBIASED, names=PHI3, norm=RMS_1E5, windows=Windows(), only={"attention_bias": (False, None)},
        rope=RopeStyle(part_key=PARTIAL, renamed={"su": "longrope", "yarn": "longrope"}), finish=_phi3,
    ),
    "mixtral": replace(
        UNBIASED, groups_needed=True, norm=RMS_1E5, rope=RopeStyle(1e6), windows=Windows(), experts=ExpertRule(BLOCK_EXPERTS, COUNTS[::-1])
    ),
    "qwen2_moe": replace(
        UNBIASED, groups_needed=True, qkv_bias=Key("qkv_bias", True), windows=FROM_LAYER,
        experts=replace(
            SPARSE, names=ExpertNames(shared_gate="mlp.shared_expert_gate"), shared="shared_expert_intermediate_size"
        ),
    ),
    "qwen3_moe": replace(QWEN3, windows=ASKED, experts=SPARSE),
    "olmoe": replace(
        BIASED_ATTENTION, norm=RMS_1E5, head_norm=HeadNormRule(style=EVERY_HEAD), clip=Key("clip_qkv"), experts=EXPERTS
    ),
    "flex_olmo": replace(OLMO2, norm=NormRule(), rope=RopeStyle(500000.0), experts=EXPERTS),
    "olmo": replace(BIASED_ATTENTION, norm=NormRule("layer", 1e-5, weight=False), clip=Key("clip_qkv")),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows=Windows(needed=True, every=4), rope=None, finish=_olmo3),
    "granite": replace(GRANITE, mlp_bias=MLP_BIASED),
    "granitemoe": replace(GRANITE, experts=ExpertRule(GRANITE_EXPERTS, COUNTS[::-1])),
    "gpt2": replace(GPT, architecture="LMHeadModel", input_major=True, finish=_gpt2),
    "gpt_bigcode": replace(GPT, activation=("activation_function", "gelu_pytorch_tanh"), finish=_bigcode),
    "gpt_neo": replace(
        GPT, names=GPT_NEO, hidden="hidden_size", layers="num_layers", heads="num_heads", inner="intermediate_size",
        positions=Key("max_position_embeddings", 2048), qkv_bias=False, finish=_gpt_neo,
    ),
    "gptj": GPTJ,
    "codegen": replace(GPTJ, names=replace(GPTJ_NAMES, qkv="attn.qkv_proj"), fused="shards", finish=_codegen),
    "gpt_neox": replace(
        PLAIN_HEADS, names=NEOX, norm=LAYER_NORM, activation=("hidden_act", "gelu"), qkv_bias=Key("attention_bias", True),
        out_bias=Key("attention_bias", True), fused="groups", parallel=Key("use_parallel_residual", True),
        rope=RopeStyle(theta_key="rotary_emb_base", part=0.25, part_key="rotary_pct"),
    ),
    "persimmon": replace(
        PLAIN_HEADS, names=PERSIMMON, norm=LAYER_NORM, activation=("hidden_act", "relu2"), fused="groups",
        rope=RopeStyle(part=0.5, part_key=PARTIAL), head_norm=HeadNormRule(Key("qk_layernorm", True)),
    ),
    "opt": replace(
        PLAIN_HEADS, names=OPT, inner="ffn_dim", positions=Key("max_position_embeddings", 2048), norm=NormRule("layer", 1e-5, bias=True),
        activation=("activation_function", "relu"), tied=True, qkv_bias=Key("enable_bias", True), out_bias=Key("enable_bias", True),
        mlp_bias=Key("enable_bias", True), rope=None, first_position=2, finish=_opt,
    ),
    "biogpt": replace(
        PLAIN_HEADS, names=replace(OPT, prefix="biogpt.", last_norm="layer_norm", head="output_projection"), rope=None,
        positions=Key("max_position_embeddings", 1024), norm=NormRule("layer", 1e-5, bias=True), activation=("hidden_act", "gelu"),
        tied=True, first_position=2, words_scale="root", only={"scale_embedding": (True,)},
    ),
    "falcon": replace(
        PLAIN_HEADS, names=replace(BLOOM, words_norm=None), inner="ffn_hidden_size", inner_factor=4,
        positions=Key("max_position_embeddings", 2048), norm=EPSILON, activation=("activation", "gelu"), tied=True,
        qkv_bias=Key("bias", False), out_bias=Key("bias", False), mlp_bias=Key("bias", False), fused="groups", finish=_falcon,
    ),
    "bloom": replace(
        PLAIN_HEADS, names=BLOOM, hidden="n_embed|hidden_size", layers="n_layer|num_hidden_layers", heads="n_head|num_attention_heads",
        inner="n_inner", inner_factor=4, tied=True, positions=Key("seq_length", 2048), norm=EPSILON, activation=("hidden_act", "gelu_new"),
        fused="groups", rope=None, finish=_bloom,
    ),
    "mpt": replace(
        UNBIASED, names=MPT, hidden="d_model", layers="n_layers", heads="n_heads", groups=None, size=None, inner="ffn_size", inner_factor=4,
        positions=Key("max_seq_len", 2048), norm=layer_norm("layer_norm_epsilon", bias=False), activation=("activation", "gelu"),
        tied=True, rope=None, finish=_mpt, only={"no_bias": (True,), "logit_scale": (None,), "embedding_fraction": (1.0,)},
    ),
    "phi": replace(
        UNBIASED, names=PHI, norm=LAYER_NORM, activation=("hidden_act", "gelu_new"), qkv_bias=True, out_bias=True, mlp_bias=True,
        head_bias=True, parallel=True, size=None, rope=RopeStyle(part=0.5, part_key=PARTIAL),
        head_norm=HeadNormRule(Key("qk_layernorm", False)),
    ),
    "stablelm": replace(
        UNBIASED, names=Names(query_norm="self_attn.q_layernorm.norms", key_norm="self_attn.k_layernorm.norms"), groups_needed=True,
        size=None, norm=LAYER_NORM, qkv_bias=Key("use_qkv_bias", False), parallel=Key("use_parallel_residual", False),
        rope=RopeStyle(part=0.25, part_key=PARTIAL), finish=_stablelm,
        head_norm=HeadNormRule(Key("qk_layernorm", False), EACH_NUMBERED, layer_norm("layer_norm_eps", bias=False)),
    ),
    "starcoder2": replace(
        MISTRAL, names=replace(PLAIN, up="mlp.c_fc", down="mlp.c_proj"), norm=layer_norm("norm_epsilon"), tied=True, windows=Windows(),
        activation=("hidden_act", "gelu_pytorch_tanh"), qkv_bias=Key("use_bias", True), out_bias=Key("use_bias", True),
        mlp_bias=Key("use_bias", True),
    ),
    "cohere": replace(COHERE, head_norm=HeadNormRule(Key("use_qk_norm", False), HeadNorm(Norm(0.0), "each"))),
    "cohere2": replace(
        COHERE, rope=RopeStyle(interleaved=True), windows=Windows(needed=True, every=4, every_key="sliding_window_pattern"),
        finish=_windowed_rope,
    ),
    "smollm3": replace(
        LLAMA, groups_needed=True, tied=True, rope=RopeStyle(2e6), finish=_smollm3, only={"use_sliding_window": (False,)}
    ),
    "glm": GLM,
    "glm4": replace(GLM, names=replace(GLM.names, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")),
    "helium": replace(
        LLAMA, groups_needed=True, size_needed=True, out_bias=False, rope=RopeStyle(100000.0, interleaved=True),
        norm=NormRule(eps=Key("rms_norm_eps", 1e-8)),
    ),
    "nemotron": replace(
        LLAMA, names=PLAIN, norm=layer_norm("norm_eps", offset=1.0), activation=("hidden_act", "relu2"),
        rope=RopeStyle(part=0.5, part_key=PARTIAL),
    ),
    "exaone4": replace(
        UNBIASED, names=OUTPUT_NORMS, groups_needed=True, norm=RMS_1E5, head_norm=HeadNormRule(),
        windows=Windows(needed=True, every=4, every_key="sliding_window_pattern"), finish=_exaone4,
    ),
    "arcee": replace(LLAMA, names=PLAIN, activation=("hidden_act", "relu2"), norm=RMS_1E5),
    "seed_oss": replace(
        LLAMA, groups_needed=True, size_needed=True, qkv_bias=Key("attention_bias", True), out_bias=Key("attention_out_bias", False)
    ),
    "ernie4_5": replace(
        UNBIASED, groups_needed=True, size_needed=True, qkv_bias=Key("use_bias", False), out_bias=Key("use_bias", False),
        mlp_bias=Key("use_bias", False), tied=True, norm=RMS_1E5, rope=RopeStyle(500000.0, interleaved=True),
    ),
    "hunyuan_v1_dense": replace(
        BIASED_ATTENTION, names=Names(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"), norm=RMS_1E5,
        head_norm=HeadNormRule(style=HeadNorm(Norm(0.0), after_rope=True)),
    ),
    "jais2": replace(
        LLAMA, names=PLAIN, norm=LAYER_NORM, activation=("hidden_act", "relu2"), qkv_bias=Key("attention_bias", True),
        out_bias=Key("attention_bias", True), mlp_bias=Key("mlp_bias", True),
    ),
    "cwm": replace(
        MISTRAL, size_needed=True, mlp_bias=MLP_BIASED, norm=RMS_1E5, rope=RopeStyle(1e6), finish=_cwm
    ),
}  # fmt: skip


def read_decoder_as_encoder(data: Mapping[str, Any], where: str) -> Stack:
    """Read and check the configuration of one of DECODERS whose last hidden states are pooled. Raises ParseError."""
    kind = data["model_type"]
    c = fields_of(DECODERS[kind], ConfigFields(data, where))
    for key, values in DECODER_FIELDS.items():
        if key != ("use_bidirectional_attention" if kind in BIDIRECTIONAL else "is_causal"):
            c.only(key, *values)
    stack = read_stack(DECODERS[kind], c)
    if kind in HYBRIDS:
        raise c.wrong("model_type", "a decoder without state space layers, since padding changes their states")
    if kind in BIDIRECTIONAL:
        if not flag(c, Key("use_bidirectional_attention", False)):
            return stack
        # the window is on both sides of a position
        stack = stack.with_layers(lambda _, layer: replace(layer, window=layer.window and layer.window // 2))
    elif flag(c, Key("is_causal", True)) or c.data.get("is_causal", True) is None:
        return stack
    if stack.position_bias is not None:
        c.only("is_causal", True)
    return replace(stack, causal=False)


BIDIRECTIONAL = (
    "gemma3_text",
    "gemma3",
)  # families that read `use_bidirectional_attention`; all others read `is_causal`
