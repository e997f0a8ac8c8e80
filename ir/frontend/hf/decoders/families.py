"""The table of the families of decoders, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.decoders.family import (
    ExpertRule,
    Family,
    HeadNormRule,
    Key,
    NormRule,
    Windows,
    layer_norm,
    ropes_by_type,
    with_layers,
)
from relax_tune.ir.frontend.hf.decoders.rope import RopeStyle
from relax_tune.ir.frontend.hf.decoders.spec import Alibi, DecoderSpec, ExpertNames, HeadNorm, Names, Norm

BIASED = Key("attention_bias", False)
UNIT = NormRule(offset=1.0)
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
GPTJ = replace(
    GPT2, positions=None, qkv=None, query="attn.q_proj", key="attn.k_proj", value="attn.v_proj", out="attn.out_proj", before_mlp=None,
    up="mlp.fc_in", down="mlp.fc_out",
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


# What no field of a family says.


def _gemma3(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    local = RopeStyle(theta_key="rope_local_base_freq")
    return ropes_by_type(c, spec, RopeStyle(1e6), local)


def _olmo3(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    style = RopeStyle(500000.0)
    return ropes_by_type(c, spec, style, style)


def _windowed_rope(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    """Leave positions out of the layers that attend to all of them."""
    return with_layers(spec, lambda i, layer: replace(layer, rope=None if layer.window is None else layer.rope))


def _exaone4(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    return spec if c.data.get("sliding_window") is None else _windowed_rope(c, spec)


def _smollm3(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    """Leave positions out of the layers that `no_rope_layers` marks with 0."""
    given, count = c.data.get("no_rope_layers"), len(spec.layers)
    if given is None:
        every = c.whole("no_rope_layer_interval", 4)
        given = [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(given, list) or len(given) != count or any(v not in (0, 1) for v in given):
        raise c.wrong("no_rope_layers", f"0 or 1 for each of {count} layers")
    return with_layers(spec, lambda i, layer: replace(layer, rope=layer.rope if given[i] else None))


def _gpt2(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    """Scale the scores as three switches say."""
    size = 1.0 if not c.truth("scale_attn_weights", True) else float(spec.size**-0.5)
    by_layer = c.truth("scale_attn_by_inverse_layer_idx", False)
    return with_layers(spec, lambda i, layer: replace(layer, scale=size / (i + 1 if by_layer else 1)))


def _bigcode(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    spec = _gpt2(c, spec)
    return replace(spec, groups=1) if c.truth("multi_query", True) else replace(spec, fused="groups")


def _gpt_neo(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    """Read which layers are local; nothing scales the scores."""
    kinds, count = c.data.get("attention_types"), len(spec.layers)
    try:
        types = [kind for part, times in kinds or () for _ in range(min(times, count)) for kind in part]
    except (TypeError, ValueError):
        types = []
    types = types if kinds else ["global", "local"] * (count // 2)
    if len(types) != count or any(t not in ("global", "local") for t in types):
        raise c.wrong("attention_types", f"lists of 'global' and 'local', repeated to {count} layers")
    size = c.whole("window_size", 256)
    return with_layers(spec, lambda i, x: replace(x, scale=1.0, window=size if types[i] == "local" else None))


def _opt(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    names, width = spec.names, c.whole("word_embed_proj_dim", spec.hidden)
    first = c.truth("do_layer_norm_before", True)
    if not first or c.truth("_remove_final_layer_norm", False):
        names = replace(names, last_norm=None)
    if width != spec.hidden:
        names = replace(names, words_in="project_in", words_out="project_out")
    affine = c.truth("layer_norm_elementwise_affine", True)
    norm = replace(spec.norm, weight=affine, bias=affine)
    return replace(spec, names=names, norm=norm, norms_follow_sums=not first, words_width=width)


def _falcon(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
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
    spec = replace(spec, names=names, groups=groups, parallel=parallel)
    if not c.truth("alibi", False):
        return spec
    return with_layers(replace(spec, alibi=Alibi(half=True, scaled=True)), lambda i, layer: replace(layer, rope=None))


def _bloom(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    after = c.truth("apply_residual_connection_post_layernorm", False)
    return replace(spec, alibi=Alibi(), residual_is_normed=after)


def _mpt(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    found = c.data.get("attn_config") or {}
    if not isinstance(found, dict):
        raise c.wrong("attn_config", "an object or null")
    a = ConfigFields(found, f"{c.where}: attn_config")
    for key, wanted in (("attn_type", "multihead_attention"), ("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
        a.only(key, wanted)
    a.only("attn_uses_sequence_id", False)
    scale, clip = a.data.get("softmax_scale"), a.data.get("clip_qkv")
    if scale is not None:
        value = a.number("softmax_scale", None, 1e-30, 1e30, "a number above 0")
        spec = with_layers(spec, lambda i, layer: replace(layer, scale=value))
    clip = a.number("clip_qkv", None, 1e-30, 1e30, "a number above 0") if clip else None
    largest = a.number("alibi_bias_max", 8, 1e-3, 1e3, "a number above 0")
    return replace(spec, alibi=Alibi(largest, from_end=True), clip=clip, inner=4 * spec.hidden)


def _codegen(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    c.multiple("n_head", spec.heads, "4", 4)
    return spec


def _cwm(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    if c.data.get("layer_types") is None:
        raise c.wrong("layer_types", "the type of each layer, as this family has types of its own by default")
    if c.data.get("rope_parameters") is None and c.data.get("rope_scaling") is None:
        raise c.wrong("rope_parameters", "an object, as this family has scaling of its own by default")
    return spec


def _stablelm(c: ConfigFields, spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, names=replace(spec.names, before_mlp=None)) if spec.parallel else spec


GPT: dict[str, Any] = {
    "names": GPT2, "hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "groups": None, "size": None, "inner": "n_inner",
    "inner_factor": 4, "positions": Key("n_positions", 1024), "norm": EPSILON, "activation": ("activation_function", "gelu_new"),
    "tied": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope": None,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias=BIASED, out_bias=BIASED, mlp_bias=Key("mlp_bias", False)),
    "mistral": Family(groups_needed=True, windows=Windows(needed=True)),
    "qwen2": Family(groups_needed=True, qkv_bias=True, windows=FROM_LAYER),
    "qwen3": Family(groups_needed=True, qkv_bias=BIASED, out_bias=BIASED, head_norm=HeadNormRule(), windows=FROM_LAYER),
    "gemma": Family(
        groups_needed=True, qkv_bias=BIASED, out_bias=BIASED, norm=UNIT, activation=("hidden_act", "gelu_pytorch_tanh"), tied=True,
        words_scale="root", only={"hidden_activation": ("gelu_pytorch_tanh", None)},
    ),
    "gemma2": Family(
        names=BOTH_NORMS, groups_needed=True, size_needed=True, qkv_bias=BIASED, out_bias=BIASED, norm=UNIT, tied=True, words_scale="root",
        activation=("hidden_activation", "gelu_pytorch_tanh"), root=Key("query_pre_attn_scalar", 256),
        windows=Windows(needed=True, every=2), scores_cap=Key("attn_logit_softcapping", 50.0),
        logits_cap=Key("final_logit_softcapping", 30.0),
    ),
    "gemma3_text": Family(
        names=BOTH_NORMS, groups_needed=True, size_needed=True, qkv_bias=BIASED, out_bias=BIASED, norm=UNIT, tied=True, words_scale="root",
        activation=("hidden_activation", "gelu_pytorch_tanh"), root=Key("query_pre_attn_scalar", 256), head_norm=HeadNormRule(),
        windows=Windows(needed=True, every=6, every_key="sliding_window_pattern"), scores_cap=Key("attn_logit_softcapping"),
        logits_cap=Key("final_logit_softcapping"), rope=None, finish=_gemma3,
    ),
    "phi3": Family(
        names=PHI3, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), windows=Windows(),
        rope=RopeStyle(part_key=PARTIAL, renamed={"su": "longrope", "yarn": "longrope"}), only={"attention_bias": (False, None)},
    ),
    "mixtral": Family(
        groups_needed=True, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), rope=RopeStyle(1e6), windows=Windows(),
        experts=ExpertRule(BLOCK_EXPERTS, COUNTS[::-1]),
    ),
    "qwen2_moe": Family(
        groups_needed=True, qkv_bias=Key("qkv_bias", True), windows=FROM_LAYER,
        experts=ExpertRule(
            ExpertNames(shared_gate="mlp.shared_expert_gate"), COUNTS, "moe_intermediate_size", Key("norm_topk_prob", False),
            "shared_expert_intermediate_size", sparse=True,
        ),
    ),
    "qwen3_moe": Family(
        groups_needed=True, qkv_bias=BIASED, out_bias=BIASED, head_norm=HeadNormRule(), windows=ASKED,
        experts=ExpertRule(ExpertNames(), COUNTS, "moe_intermediate_size", Key("norm_topk_prob", False), sparse=True),
    ),
    "olmoe": Family(
        qkv_bias=BIASED, out_bias=BIASED, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), head_norm=HeadNormRule(made=EVERY_HEAD),
        clip=Key("clip_qkv"), experts=ExpertRule(ExpertNames(), COUNTS, normalised=Key("norm_topk_prob", False)),
    ),
    "flex_olmo": Family(
        names=OUTPUT_NORMS, qkv_bias=BIASED, out_bias=BIASED, rope=RopeStyle(500000.0), head_norm=HeadNormRule(made=EVERY_HEAD),
        experts=ExpertRule(ExpertNames(), COUNTS, normalised=Key("norm_topk_prob", False)),
    ),
    "granitemoe": Family(
        qkv_bias=BIASED, out_bias=BIASED, words_scale=Key("embedding_multiplier", 1.0), residual_scale=Key("residual_multiplier", 1.0),
        logits_scale=Key("logits_scaling", 1.0), logits_divided=True, scale=Key("attention_multiplier", 1.0),
        experts=ExpertRule(GRANITE_EXPERTS, COUNTS[::-1]),
    ),
    "gpt2": Family(**GPT, head="LMHeadModel", input_major=True, finish=_gpt2),
    "gpt_bigcode": Family(**{**GPT, "activation": ("activation_function", "gelu_pytorch_tanh")}, finish=_bigcode),
    "gpt_neo": Family(
        names=replace(GPTJ, positions="wpe", before_mlp="ln_2", query="attn.attention.q_proj", key="attn.attention.k_proj",
                      value="attn.attention.v_proj", out="attn.attention.out_proj", up="mlp.c_fc", down="mlp.c_proj"),
        layers="num_layers", heads="num_heads", groups=None, size=None, inner_factor=4, positions=Key("max_position_embeddings", 2048),
        norm=EPSILON, activation=("activation_function", "gelu_new"), tied=True, out_bias=True, mlp_bias=True, rope=None,
        finish=_gpt_neo,
    ),
    "gptj": Family(
        **{**GPT, "names": GPTJ, "positions": Key("n_positions", 2048), "tied": False, "qkv_bias": False, "out_bias": False,
           "rope": NEIGHBOURS},
        head_bias=True, parallel=True,
    ),
    "codegen": Family(
        **{**GPT, "names": replace(GPTJ, qkv="attn.qkv_proj"), "positions": Key("n_positions", 2048), "tied": False,
           "qkv_bias": False, "out_bias": False, "rope": NEIGHBOURS},
        head_bias=True, parallel=True, fused="shards", finish=_codegen,
    ),
    "gpt_neox": Family(
        names=NEOX, groups=None, size=None, norm=LAYER_NORM, activation=("hidden_act", "gelu"), qkv_bias=Key("attention_bias", True),
        out_bias=Key("attention_bias", True), mlp_bias=True, fused="groups", parallel=Key("use_parallel_residual", True),
        rope=RopeStyle(theta_key="rotary_emb_base", part=0.25, part_key="rotary_pct"),
    ),
    "opt": Family(
        names=OPT, groups=None, size=None, inner="ffn_dim", positions=Key("max_position_embeddings", 2048),
        norm=NormRule("layer", 1e-5, bias=True),
        activation=("activation_function", "relu"), tied=True, qkv_bias=Key("enable_bias", True), out_bias=Key("enable_bias", True),
        mlp_bias=Key("enable_bias", True), rope=None, first_position=2, finish=_opt,
    ),
    "biogpt": Family(
        names=replace(OPT, prefix="biogpt.", last_norm="layer_norm", head="output_projection"), groups=None, size=None,
        positions=Key("max_position_embeddings", 1024), norm=layer_norm("layer_norm_eps", default=1e-12), activation=("hidden_act", "gelu"),
        tied=True, qkv_bias=True, out_bias=True, mlp_bias=True, rope=None, first_position=2, words_scale="root",
        only={"scale_embedding": (True,)},
    ),
    "falcon": Family(
        names=replace(BLOOM, words_norm=None), groups=None, size=None, inner="ffn_hidden_size", inner_factor=4,
        positions=Key("max_position_embeddings", 2048), norm=EPSILON, activation=("activation", "gelu"), tied=True,
        qkv_bias=Key("bias", False), out_bias=Key("bias", False), mlp_bias=Key("bias", False), fused="groups", finish=_falcon,
    ),
    "bloom": Family(
        names=BLOOM, hidden="n_embed|hidden_size", layers="n_layer|num_hidden_layers", heads="n_head|num_attention_heads",
        groups=None, size=None, inner="n_inner", inner_factor=4, tied=True,
        positions=Key("seq_length", 2048), norm=EPSILON, activation=("hidden_act", "gelu_new"), qkv_bias=True, out_bias=True,
        mlp_bias=True, fused="groups", rope=None, finish=_bloom,
    ),
    "mpt": Family(
        names=MPT, hidden="d_model", layers="n_layers", heads="n_heads", groups=None, size=None, inner="ffn_size", inner_factor=4,
        positions=Key("max_seq_len", 2048), norm=layer_norm("layer_norm_epsilon", bias=False), activation=("activation", "gelu"),
        tied=True, rope=None, finish=_mpt, only={"no_bias": (True,), "logit_scale": (None,), "embedding_fraction": (1.0,)},
    ),
    "phi": Family(
        names=PHI, norm=LAYER_NORM, activation=("hidden_act", "gelu_new"), qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True,
        parallel=True, size=None, rope=RopeStyle(part=0.5, part_key=PARTIAL), head_norm=HeadNormRule(Key("qk_layernorm", False)),
    ),
    "stablelm": Family(
        names=Names(query_norm="self_attn.q_layernorm.norms", key_norm="self_attn.k_layernorm.norms"), groups_needed=True, size=None,
        norm=LAYER_NORM, qkv_bias=Key("use_qkv_bias", False), parallel=Key("use_parallel_residual", False),
        rope=RopeStyle(part=0.25, part_key=PARTIAL), finish=_stablelm,
        head_norm=HeadNormRule(Key("qk_layernorm", False), EACH_NUMBERED, layer_norm("layer_norm_eps", bias=False)),
    ),
    "persimmon": Family(
        names=PERSIMMON, groups=None, size=None, norm=LAYER_NORM, activation=("hidden_act", "relu2"), qkv_bias=True, out_bias=True,
        mlp_bias=True, fused="groups", rope=RopeStyle(part=0.5, part_key=PARTIAL), head_norm=HeadNormRule(Key("qk_layernorm", True)),
    ),
    "starcoder2": Family(
        names=replace(PLAIN, up="mlp.c_fc", down="mlp.c_proj"), groups_needed=True, norm=layer_norm("norm_epsilon"), tied=True,
        activation=("hidden_act", "gelu_pytorch_tanh"), qkv_bias=Key("use_bias", True), out_bias=Key("use_bias", True),
        mlp_bias=Key("use_bias", True), windows=Windows(),
    ),
    "olmo": Family(
        norm=NormRule("layer", 1e-5, weight=False), qkv_bias=BIASED, out_bias=BIASED, clip=Key("clip_qkv"),
    ),
    "olmo2": Family(
        names=OUTPUT_NORMS, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), qkv_bias=BIASED, out_bias=BIASED,
        head_norm=HeadNormRule(made=EVERY_HEAD),
    ),
    "olmo3": Family(
        names=OUTPUT_NORMS, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), qkv_bias=BIASED, out_bias=BIASED,
        head_norm=HeadNormRule(made=EVERY_HEAD), windows=Windows(needed=True, every=4), rope=None, finish=_olmo3,
    ),
    "granite": Family(
        qkv_bias=BIASED, out_bias=BIASED, mlp_bias=Key("mlp_bias", False), words_scale=Key("embedding_multiplier", 1.0),
        residual_scale=Key("residual_multiplier", 1.0), logits_scale=Key("logits_scaling", 1.0), logits_divided=True,
        scale=Key("attention_multiplier", 1.0),
    ),
    "cohere": Family(
        names=Names(before_mlp=None), norm=layer_norm("layer_norm_eps", bias=False), qkv_bias=BIASED, out_bias=BIASED, tied=True,
        parallel=True, logits_scale=Key("logit_scale", 0.0625), rope=RopeStyle(500000.0, interleaved=True),
        head_norm=HeadNormRule(Key("use_qk_norm", False), HeadNorm(Norm(0.0), "each")),
    ),
    "cohere2": Family(
        names=Names(before_mlp=None), norm=layer_norm("layer_norm_eps", bias=False), qkv_bias=BIASED, out_bias=BIASED, tied=True,
        parallel=True, logits_scale=Key("logit_scale", 0.0625), rope=RopeStyle(10000.0, interleaved=True),
        windows=Windows(needed=True, every=4, every_key="sliding_window_pattern"), finish=_windowed_rope,
    ),
    "smollm3": Family(
        groups_needed=True, qkv_bias=BIASED, out_bias=BIASED, mlp_bias=Key("mlp_bias", False), tied=True, rope=RopeStyle(2e6),
        finish=_smollm3, only={"use_sliding_window": (False,)},
    ),
    "glm": Family(
        names=replace(PHI3, qkv=None), groups_needed=True, size_needed=True, qkv_bias=Key("attention_bias", True),
        norm=NormRule(eps=Key("rms_norm_eps", 1.5625e-07)), rope=RopeStyle(part=0.5, part_key=PARTIAL, interleaved=True),
    ),
    "glm4": Family(
        names=replace(PHI3, qkv=None, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"), groups_needed=True,
        size_needed=True, qkv_bias=Key("attention_bias", True), norm=NormRule(eps=Key("rms_norm_eps", 1.5625e-07)),
        rope=RopeStyle(part=0.5, part_key=PARTIAL, interleaved=True),
    ),
    "helium": Family(
        groups_needed=True, size_needed=True, qkv_bias=BIASED, mlp_bias=Key("mlp_bias", False), rope=RopeStyle(100000.0, interleaved=True),
        norm=NormRule(eps=Key("rms_norm_eps", 1e-8)),
    ),
    "nemotron": Family(
        names=PLAIN, norm=layer_norm("norm_eps", offset=1.0), activation=("hidden_act", "relu2"), qkv_bias=BIASED, out_bias=BIASED,
        mlp_bias=Key("mlp_bias", False), rope=RopeStyle(part=0.5, part_key=PARTIAL),
    ),
    "exaone4": Family(
        names=OUTPUT_NORMS, groups_needed=True, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), head_norm=HeadNormRule(),
        windows=Windows(needed=True, every=4, every_key="sliding_window_pattern"), finish=_exaone4,
    ),
    "arcee": Family(
        names=PLAIN, qkv_bias=BIASED, out_bias=BIASED, mlp_bias=Key("mlp_bias", False), activation=("hidden_act", "relu2"),
        norm=NormRule(eps=Key("rms_norm_eps", 1e-5)),
    ),
    "seed_oss": Family(
        groups_needed=True, size_needed=True, qkv_bias=Key("attention_bias", True), out_bias=Key("attention_out_bias", False),
        mlp_bias=Key("mlp_bias", False),
    ),
    "ernie4_5": Family(
        groups_needed=True, size_needed=True, qkv_bias=Key("use_bias", False), out_bias=Key("use_bias", False),
        mlp_bias=Key("use_bias", False), tied=True, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)),
        rope=RopeStyle(500000.0, interleaved=True),
    ),
    "hunyuan_v1_dense": Family(
        names=Names(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"), qkv_bias=BIASED, out_bias=BIASED,
        norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), head_norm=HeadNormRule(made=HeadNorm(Norm(0.0), after_rope=True)),
    ),
    "jais2": Family(
        names=PLAIN, norm=LAYER_NORM, activation=("hidden_act", "relu2"), qkv_bias=Key("attention_bias", True),
        out_bias=Key("attention_bias", True), mlp_bias=Key("mlp_bias", True),
    ),
    "ministral": Family(groups_needed=True, windows=Windows(needed=True)),
    "vaultgemma": Family(
        names=Names(before_mlp="pre_feedforward_layernorm"), groups_needed=True, size_needed=True, qkv_bias=BIASED, out_bias=BIASED,
        norm=UNIT, tied=True, words_scale="root", activation=("hidden_activation", "gelu_pytorch_tanh"),
        root=Key("query_pre_attn_scalar", 256), windows=Windows(needed=True, every=2), scores_cap=Key("attn_logit_softcapping", 50.0),
        logits_cap=Key("final_logit_softcapping", 30.0),
    ),
    "cwm": Family(
        groups_needed=True, size_needed=True, mlp_bias=Key("mlp_bias", False), norm=NormRule(eps=Key("rms_norm_eps", 1e-5)),
        rope=RopeStyle(1e6), windows=Windows(needed=True), finish=_cwm,
    ),
}  # fmt: skip
