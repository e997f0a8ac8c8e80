"""The table of architectures of GGUF files, which maps metadata to the fields of a config.json.

llama.cpp fixes by architecture what a config.json states, and its conversion stores some weights in other forms: queries and keys
of Llama with interleaved rotary pairs, norms of Gemma with 1 added, joint projections in blocks.

Tests: `tests/ir/frontend/gguf/test_importer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from relax_tune.ir.frontend.hf.transformer.mixers import ExpertNames
from relax_tune.ir.frontend.hf.transformer.spec import Names, Stack, TransformerLayer

Metadata = Mapping[str, Any]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: its family of decoders
        fields: fields of config.json by keys of the metadata, without the architecture's prefix
        fixed: fields that llama.cpp fixes
        eps: key of the epsilon of norms, and its field
        biases: field that is true if the first layer has the tensor
        interleaved: queries and keys are stored with interleaved rotary pairs
        scaled_norms: stored norm weights include the offset
        layout: expected layout of joint projections, if a key names it
        patterned: a key may list the layers with a window
        finish: hook for what the fields cannot express; takes the metadata, the names of tensors and the fields so far
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    biases: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    scaled_norms: bool = False
    patterned: bool = False
    layout: str | None = None
    finish: Callable[[Metadata, frozenset[str], Config], Config] | None = None


SIZES: Mapping[str, str] = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
GPT2_SIZES: Mapping[str, str] = {
    "context_length": "n_positions", "embedding_length": "n_embd", "block_count": "n_layer", "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
}  # fmt: skip
ROPE: Mapping[str, str] = {**SIZES, "rope.freq_base": "rope_theta"}
SIZED: Mapping[str, str] = {**ROPE, "attention.key_length": "head_dim"}
WINDOW: Mapping[str, str] = {"attention.sliding_window": "sliding_window"}
LAYER_EPS = "attention.layer_norm_epsilon"
ATTENTION_BIAS = {"attn_q.bias": "attention_bias"}
EXPERTS: Mapping[str, str] = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
CAPS: Mapping[str, str] = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _llama(m: Metadata, names: frozenset[str], c: Config) -> Config:
    """Read files with experts as Mixtral, whose expert weights are normalised."""
    return (
        {**c, "model_type": "mixtral"}
        if c.get("num_experts")
        else {k: v for k, v in c.items() if k not in EXPERTS.values()}
    )


def _gemma2(m: Metadata, names: frozenset[str], c: Config) -> Config:
    """Scale the scores of the largest model, of 46 layers, by the mean size of a head."""
    mean = c.get("num_hidden_layers") == 46
    return {
        **c,
        "query_pre_attn_scalar": c["hidden_size"] // c["num_attention_heads"] if mean else c.get("head_dim", 256),
    }


def _gemma3(m: Metadata, names: frozenset[str], c: Config) -> Config:
    """Scale the scores of the largest model, of 62 layers, by the mean size of a head."""
    mean = c.get("num_hidden_layers") == 62
    c = {**c, "query_pre_attn_scalar": c["hidden_size"] // c["num_attention_heads"] if mean else c.get("head_dim", 256)}
    return c if c.get("sliding_window") else {**c, "sliding_window": None}


def _falcon(m: Metadata, names: frozenset[str], c: Config) -> Config:
    new = "blk.0.attn_norm_2.weight" in names
    groups, heads = c.pop("num_key_value_heads", 1), c.get("num_attention_heads")
    return {**c, "new_decoder_architecture": new, "num_kv_heads": groups, "multi_query": groups == 1 and heads != 1}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type="llama", fields={**SIZED, **EXPERTS}, biases={**ATTENTION_BIAS, "ffn_up.bias": "mlp_bias"}, interleaved=True,
        finish=_llama,
    ),
    "qwen2": Architecture(model_type="qwen2", fields=ROPE),
    "qwen3": Architecture(model_type="qwen3", fields=SIZED, biases=ATTENTION_BIAS),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", fields={**SIZED, **EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        fixed={"norm_topk_prob": True}, biases=ATTENTION_BIAS,
    ),
    "gemma": Architecture(
        model_type="gemma", fields=SIZED, fixed={"hidden_act": "gelu_pytorch_tanh"}, scaled_norms=True,
    ),
    "gemma2": Architecture(
        model_type="gemma2", fields={**SIZED, **WINDOW, **CAPS}, fixed={"hidden_activation": "gelu_pytorch_tanh"}, scaled_norms=True,
        finish=_gemma2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", fixed={"hidden_activation": "gelu_pytorch_tanh"},
        fields={**SIZED, **WINDOW, "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        scaled_norms=True, patterned=True, finish=_gemma3,
    ),
    "phi3": Architecture(model_type="phi3", fields={**ROPE, **WINDOW}),
    "gpt2": Architecture(model_type="gpt2", fields=GPT2_SIZES, eps=(LAYER_EPS, "layer_norm_epsilon")),
    "falcon": Architecture(
        model_type="falcon", fields={**ROPE, "feed_forward_length": "ffn_hidden_size"}, fixed={"alibi": False},
        eps=(LAYER_EPS, "layer_norm_epsilon"), biases={"attn_qkv.bias": "bias"}, finish=_falcon, layout="jploski",
    ),
    "starcoder2": Architecture(
        model_type="starcoder2", fields={**ROPE, **WINDOW}, eps=(LAYER_EPS, "norm_epsilon"), biases={"attn_q.bias": "use_bias"},
    ),
}  # fmt: skip

# Tensors by the fields of `Names`, which has None for parts that a family lacks.
PARTS: Mapping[str, str] = {
    "words": "token_embd", "words_norm": "token_embd_norm", "positions": "position_embd", "before_attention": "attn_norm",
    "qkv": "attn_qkv", "query": "attn_q", "key": "attn_k", "value": "attn_v", "query_norm": "attn_q_norm", "key_norm": "attn_k_norm",
    "out": "attn_output", "after_attention": "post_attention_norm", "before_mlp": "ffn_norm", "gate_up": "ffn_up", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "after_mlp": "post_ffw_norm", "last_norm": "output_norm", "head": "output",
}  # fmt: skip
EXPERT_NAMES = ExpertNames("ffn_gate_inp", "ffn_gate_exps.{}", "ffn_up_exps.{}", "ffn_down_exps.{}")


def stored_as_gguf(spec: Stack, a: Architecture) -> Stack:
    """Return the stack with the names and the forms in which a GGUF file stores weights."""
    parts: dict[str, Any] = {k: None if getattr(spec.names, k) is None else v for k, v in PARTS.items()}
    names = replace(Names(), prefix="", layers="blk", **parts)
    if a.model_type == "falcon" and spec.names.before_mlp is not None and spec.order == "parallel":
        # in files, attn_norm precedes the feed-forward block, and attn_norm_2 attention
        names = replace(names, before_attention="attn_norm_2", before_mlp="attn_norm")
    norm, head_norm = spec.norm, spec.head_norm
    if a.scaled_norms:
        norm = replace(norm, offset=0.0)
        head_norm = head_norm and replace(head_norm, norm=replace(head_norm.norm, offset=0.0))

    def layer(number: int, one: TransformerLayer) -> TransformerLayer:
        rope = one.rope if one.rope is None or not a.interleaved else replace(one.rope, interleaved=True)
        experts = None if one.experts is None else replace(one.experts, names=EXPERT_NAMES)
        return replace(one, path=f"blk.{number}", rope=rope, experts=experts)

    spec = replace(spec, names=names, norm=norm, head_norm=head_norm, fused="blocks", input_major=False)
    return spec.with_layers(layer)
