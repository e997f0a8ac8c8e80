"""The table of the families of decoders with state space layers, by `model_type`.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.family import (
    FULL,
    UNLIMITED,
    ExpertRule,
    Family,
    HeadNormRule,
    Key,
    NormRule,
)
from relax_tune.ir.frontend.hf.transformer.mixers import DeltaRule, ExpertNames, Experts, GatedNorm, StateSpace, TimeMix
from relax_tune.ir.frontend.hf.transformer.rope import RopeStyle
from relax_tune.ir.frontend.hf.transformer.spec import Names, Stack, TransformerLayer

MAMBA = ("mamba", "linear_attention")  # types of layers, in older and newer files
UNLIMITED_STEPS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as files state it
BIASED, MLP_BIASED = Key("attention_bias", False), Key("mlp_bias", False)
GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer", down="block_sparse_moe.output_linear", joined="block_sparse_moe.input_linear",
    shared_joined="shared_mlp.input_linear", shared_down="shared_mlp.output_linear",
)  # fmt: skip


def _number(c: ConfigFields, key: str, default: float = 1.0) -> float:
    return c.number(key, default, -math.inf, math.inf, "a number")


def _state_space(c: ConfigFields, stack: Stack, inner: int) -> StateSpace:
    """Read the sizes of state space layers. inner: width of their inside"""
    count = c.whole("mamba_n_heads", 128)
    c.multiple("mamba_expand", inner, "mamba_n_heads", count)
    size = inner // count
    c.only("mamba_d_head", size, "auto", None)
    return _checked(c, StateSpace(
        "mamba", count, size, c.whole("mamba_d_state", 256), c.whole("mamba_n_groups", 1), c.whole("mamba_d_conv", 4),
        c.truth("mamba_proj_bias", False), c.truth("mamba_conv_bias", True),
    ), "mamba_n_groups")  # fmt: skip


def _checked(c: ConfigFields, m: StateSpace, groups: str) -> StateSpace:
    c.multiple(groups, m.heads, "heads", m.groups)
    c.only("hidden_act", "silu", "swish")
    limits = c.data.get("time_step_limit")
    if limits not in UNLIMITED_STEPS:
        raise c.wrong("time_step_limit", "0 to infinity")
    return m


def _mamba2(c: ConfigFields, stack: Stack) -> Stack:
    """Read layers that have only a state space."""
    inner = int(_number(c, "expand", 2) * stack.hidden)
    m = StateSpace(
        "mixer", c.whole("num_heads"), c.whole("head_dim"), c.whole("state_size", 128), c.whole("n_groups", 8), c.whole("conv_kernel", 4),
        c.truth("use_bias", False), c.truth("use_conv_bias", True),
    )  # fmt: skip
    if m.heads * m.size != inner:
        raise c.wrong("num_heads", f"heads of {m.size} channels that make {inner}")
    m = _checked(c, m, "n_groups")
    return replace(stack, inner=0).with_layers(lambda _, layer: replace(layer, state_space=m, attends=False))


def _alternating(stack: Stack, m: StateSpace, attends: list[bool]) -> Stack:
    return stack.with_layers(
        lambda i, layer: layer if attends[i] else replace(layer, state_space=m, attends=False, rope=None)
    )


def _bamba(c: ConfigFields, stack: Stack) -> Stack:
    """Read which layers attend."""
    listed = c.data.get("attn_layer_indices") or []
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise c.wrong("attn_layer_indices", "a list of numbers of layers")
    m = _state_space(c, stack, c.whole("mamba_expand", 2) * stack.hidden)
    return _alternating(stack, m, [i in listed for i in range(len(stack.layers))])


def _granite(c: ConfigFields, stack: Stack) -> Stack:
    """Read which layers attend, rotations, and the mixture in addition to a block that serves every position."""
    count = len(stack.layers)
    types = c.data.get("layer_types") or c.data.get("layers_block_type") or ["mamba"] * count
    if not isinstance(types, list) or len(types) != count or any(t not in (*MAMBA, "attention", FULL) for t in types):
        raise c.wrong("layer_types", f"'mamba' or 'attention' for each of {count} layers")
    m = _state_space(c, stack, c.whole("mamba_expand", 2) * stack.hidden)
    stack = _alternating(stack, m, [t not in MAMBA for t in types])
    if c.data.get("position_embedding_type") is None:
        # State space layers see the order of positions, so attention may do without it.
        stack = stack.with_layers(lambda _, layer: replace(layer, rope=None))
    else:
        c.only("position_embedding_type", "rope")
    if not c.data.get("num_local_experts", 8):
        return stack
    experts = Experts(
        GRANITE_EXPERTS, c.whole("num_local_experts", 8), c.whole("num_experts_per_tok", 2), c.whole("intermediate_size"), True, stack.inner
    )  # fmt: skip
    return stack.with_layers(lambda _, layer: replace(layer, experts=experts))


def _falcon_h1(c: ConfigFields, stack: Stack) -> Stack:
    """Read the factors of every part; attention and state space read the same input."""
    given = c.data.get("mamba_d_ssm")
    m = _state_space(c, stack, c.whole("mamba_expand", 2) * stack.hidden if given is None else c.whole("mamba_d_ssm"))
    norm: GatedNorm = "none"
    if c.truth("mamba_rms_norm", False):
        norm = "before_gate" if c.truth("mamba_norm_before_gate", True) else "after_gate"

    def factors(key: str, count: int) -> tuple[float, ...]:
        values = c.data.get(key) or [1.0] * count
        if not isinstance(values, list) or len(values) != count or any(type(v) not in (int, float) for v in values):
            raise c.wrong(key, f"{count} numbers")
        return tuple(map(float, values))

    m = replace(
        m, norm=norm, factors=factors("ssm_multipliers", 5), input_scale=_number(c, "ssm_in_multiplier"),
        output_scale=_number(c, "ssm_out_multiplier"),
    )  # fmt: skip
    key = _number(c, "key_multiplier")
    stack = replace(
        stack, attention_scales=(_number(c, "attention_in_multiplier"), _number(c, "attention_out_multiplier")),
        mlp_scales=factors("mlp_multipliers", 2),
    )  # fmt: skip
    # A factor of the keys scales the scores, so it becomes part of their scale.
    return stack.with_layers(lambda _, layer: replace(layer, state_space=m, scale=layer.scale * key))


def _qwen3_next(c: ConfigFields, stack: Stack) -> Stack:
    """Read which layers attend, and the linear attention of the others."""
    count, every = len(stack.layers), c.whole("full_attention_interval", 4)
    types = c.data.get("layer_types") or [FULL if (i + 1) % every == 0 else MAMBA[1] for i in range(count)]
    if not isinstance(types, list) or len(types) != count or any(t not in (FULL, MAMBA[1]) for t in types):
        raise c.wrong("layer_types", f"'{FULL}' or '{MAMBA[1]}' for each of {count} layers")
    c.only("hidden_act", "silu", "swish")
    groups, heads = c.whole("linear_num_key_heads", 16), c.whole("linear_num_value_heads", 32)
    c.multiple("linear_num_value_heads", heads, "linear_num_key_heads", groups)
    m = DeltaRule(
        "linear_attn", heads, c.whole("linear_value_head_dim", 128), c.whole("linear_key_head_dim", 128), groups,
        c.whole("linear_conv_kernel_dim", 4),
    )  # fmt: skip
    stack = replace(stack, gated=True)
    return stack.with_layers(
        lambda i, layer: layer if types[i] == FULL else replace(layer, state_space=m, attends=False, rope=None)
    )


def _qwen3_5(c: ConfigFields, stack: Stack) -> Stack:
    stack = _qwen3_next(c, stack)

    def layer(_: int, layer: TransformerLayer) -> TransformerLayer:
        m = layer.state_space
        return replace(layer, state_space=replace(m, separate=True)) if isinstance(m, DeltaRule) else layer

    return stack.with_layers(layer)


def _rwkv(c: ConfigFields, stack: Stack) -> Stack:
    """Read layers without attention."""
    width, every = c.whole("attention_hidden_size", stack.hidden), c.data.get("rescale_every", 6)
    if type(every) is not int or every < 0:
        raise c.wrong("rescale_every", "a whole number")
    if width != stack.hidden:
        raise c.wrong("attention_hidden_size", f"the hidden size {stack.hidden}")
    m = TimeMix(stack.hidden, width, every)
    return stack.with_layers(lambda _, layer: replace(layer, state_space=m, attends=False))


FEED_FORWARD = Names(
    before_mlp="pre_ff_layernorm", gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj",
    last_norm="final_layernorm",
)  # fmt: skip
QWEN3_NEXT = Family(
    norm=NormRule(offset=1.0), qkv_bias=BIASED, out_bias=BIASED, groups_needed=True, size_needed=True, head_norm=HeadNormRule(),
    rope=RopeStyle(part=0.25, part_key="partial_rotary_factor"), positions=Key("max_position_embeddings", 32768), finish=_qwen3_next,
    types_windows=False,
)  # fmt: skip
QWEN3_5 = replace(
    QWEN3_NEXT, finish=_qwen3_5, rope=RopeStyle(part=0.25, part_key="partial_rotary_factor", renamed={"mrope": "default"})
)  # fmt: skip
SHARED_EXPERT = ExpertRule(
    ExpertNames(shared_gate="mlp.shared_expert_gate"), ("num_experts",), "moe_intermediate_size",
    shared="shared_expert_intermediate_size",
)  # fmt: skip
HYBRIDS: Mapping[str, Family] = {
    "mamba2": Family(
        names=Names("backbone.", "embeddings", before_attention="norm", before_mlp=None, last_norm="norm_f"), finish=_mamba2, rope=None,
        norm=NormRule(eps=Key("layer_norm_epsilon", 1e-5)), activation=("hidden_act", "silu"), positions=UNLIMITED, heads="num_heads",
        groups=None, defaults={"intermediate_size": 1}, types_windows=False,
    ),
    "rwkv": Family(
        only={"layer_norm_epsilon": (1e-5, None)},  # the last norm has this epsilon in every case
        names=Names("rwkv.", "embeddings", layers="blocks", last_norm="ln_out", head="head"), rope=None, heads="num_heads", groups=None,
        norm=NormRule("layer", Key("layer_norm_epsilon", 1e-5), bias=True), activation=("", "relu"), inner_factor=4,
        positions=Key("context_length", 1024), defaults={"num_heads": 1}, types_windows=False, finish=_rwkv,
    ),
    "bamba": Family(
        names=FEED_FORWARD, norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), qkv_bias=BIASED, out_bias=BIASED, mlp_bias=MLP_BIASED,
        groups_needed=True, rope=RopeStyle(part=0.5, part_key="partial_rotary_factor"), positions=Key("max_position_embeddings", 262144),
        finish=_bamba, types_windows=False,
    ),
    "granitemoehybrid": Family(
        names=Names(gate_up="shared_mlp.input_linear", gate=None, down="shared_mlp.output_linear"), qkv_bias=BIASED, out_bias=BIASED,
        inner="shared_intermediate_size", words_scale=Key("embedding_multiplier", 1.0), residual_scale=Key("residual_multiplier", 1.0),
        logits_scale=Key("logits_scaling", 1.0), logits_divided=True, scale=Key("attention_multiplier", 1.0),
        finish=_granite, types_windows=False,
    ),
    "qwen3_next": replace(
        QWEN3_NEXT, experts=replace(SHARED_EXPERT, normalised=Key("norm_topk_prob", True), sparse=True)
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, experts=SHARED_EXPERT, defaults={"intermediate_size": 1}),
    "falcon_h1": Family(
        names=replace(FEED_FORWARD), norm=NormRule(eps=Key("rms_norm_eps", 1e-5)), qkv_bias=BIASED, out_bias=BIASED, mlp_bias=MLP_BIASED,
        groups_needed=True, words_scale=Key("embedding_multiplier", 1.0), logits_scale=Key("lm_head_multiplier", 1.0), finish=_falcon_h1,
        only={"projectors_bias": (False, None)},
        positions=Key("max_position_embeddings", 8192), types_windows=False,
    ),
}  # fmt: skip
