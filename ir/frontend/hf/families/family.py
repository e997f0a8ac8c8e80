"""Rules that read the config.json of a family of transformers into a `Stack`.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.transformer.inputs import Embedding, Words
from relax_tune.ir.frontend.hf.transformer.mixers import ExpertNames, Experts
from relax_tune.ir.frontend.hf.transformer.rope import RopeStyle, read_rope
from relax_tune.ir.frontend.hf.transformer.spec import (
    Biases,
    Fused,
    HeadNorm,
    Logits,
    Names,
    Norm,
    NormKind,
    Order,
    Outputs,
    Stack,
    TransformerLayer,
)

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Key:
    """A field of config.json, and the value that stands for a missing one."""

    name: str
    default: bool | float | None = None


Flag = bool | Key
Number = float | None | Key


def flag(c: ConfigFields, value: Flag) -> bool:
    """Read a truth value; null is false."""
    if not isinstance(value, Key):
        return value
    return c.data.get(value.name, value.default) is not None and c.truth(value.name, bool(value.default))


def optional(c: ConfigFields, value: Number) -> float | None:
    """Read a number other than 0, or None."""
    if not isinstance(value, Key):
        return value
    if c.data.get(value.name, value.default) is None:
        return None
    result = c.number(value.name, value.default, -1e30, 1e30, "a number")
    if result == 0:
        raise c.wrong(value.name, "a number other than 0")
    return result


def number(c: ConfigFields, value: Number) -> float:
    result = optional(c, value)
    return 1.0 if result is None else result


@dataclass(frozen=True, slots=True)
class NormRule:
    """Rule of a family's norms."""

    kind: NormKind = "rms"
    eps: Key | float = field(default_factory=lambda: Key("rms_norm_eps", 1e-6))
    offset: float = 0.0
    weight: Flag = True
    bias: Flag = False

    def read(self, c: ConfigFields) -> Norm:
        eps = self.eps
        if isinstance(eps, Key):
            eps = c.number(eps.name, eps.default, 0, 1, "a number in [0, 1)")
        return Norm(eps, self.kind, self.offset, flag(c, self.weight), flag(c, self.bias))


def layer_norm(key: str, default: float = 1e-5, bias: Flag = True, offset: float = 0.0) -> NormRule:
    """Return the rule of layer norms whose epsilon is a field."""
    return NormRule("layer", Key(key, default), offset, bias=bias)


@dataclass(frozen=True, slots=True)
class HeadNormRule:
    """Rule of the norms of queries and keys.

    Attributes:
        style: all but its norm
        norm: None: as in the layers
    """

    used: Flag = True
    style: HeadNorm = field(default_factory=lambda: HeadNorm(Norm(0.0)))
    norm: NormRule | None = None

    def read(self, c: ConfigFields, norm: NormRule) -> HeadNorm | None:
        return replace(self.style, norm=(self.norm or norm).read(c)) if flag(c, self.used) else None


@dataclass(frozen=True, slots=True)
class Windows:
    """Rule of the layers that have an attention window.

    Attributes:
        used: field that must be true; None: `sliding_window` is used if it is given
        needed: a configuration without `sliding_window` is refused, as the family has a default window
        first: field with the number of leading layers without a window
        every, every_key: period of the layers without a window, and the field with it; None: all layers have one
    """

    used: Key | None = None
    needed: bool = False
    first: Key | None = None
    every: int | None = None
    every_key: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """Rule of a family's mixtures of experts.

    Attributes:
        count: alternative fields with the number of experts
        inner, shared: fields with the width of an expert and of the shared expert
        sparse: `decoder_sparse_step` and `mlp_only_layers` select the layers with a mixture
    """

    names: ExpertNames
    count: tuple[str, ...]
    inner: str = "intermediate_size"
    normalised: Flag = True
    shared: str | None = None
    sparse: bool = False

    def read(self, c: ConfigFields, layer: int) -> Experts | None:
        """Read the mixture of a layer, if it has one."""
        if self.sparse:
            plain = c.data.get("mlp_only_layers") or []
            if not isinstance(plain, list) or not all(type(i) is int for i in plain):
                raise c.wrong("mlp_only_layers", "a list of numbers of layers")
            if layer in plain or (layer + 1) % c.whole("decoder_sparse_step", 1):
                return None
        key = next((k for k in self.count if k in c.data), self.count[0])
        count, chosen = c.whole(key), c.whole("num_experts_per_tok")
        if chosen > count:
            raise c.wrong("num_experts_per_tok", f"at most the {count} experts of {key}")
        shared = None if self.shared is None else c.whole(self.shared)
        return Experts(self.names, count, chosen, c.whole(self.inner), flag(c, self.normalised), shared)


Finish = Callable[[ConfigFields, Stack], Stack]
UNLIMITED = 1 << 20  # positions of a family without a table of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's config.json is read into a `Stack`: names of fields, and what the family does.

    Attributes:
        architecture: ending of the one architecture that is read; empty: heads are read by other rules
        defaults: values of missing fields
        only: fields that must be missing or have one of these values
        hidden, layers, heads, inner: fields with sizes; alternative names are separated by `|`
        groups: field with the number of key and value heads; None: as many as query heads
        groups_needed, size_needed: a configuration without the field is refused, as the family has another default
        size: field with the size of a head; None: the hidden size divided by the heads
        part: field with the object of all fields but `architectures`; empty: the fields are at the top
        inner_factor: multiple of the hidden size that stands for a missing `inner`
        positions: field with the number of positions, or that number
        first_position: row of the first position in the position table
        padding: id of the padding token, which has no position
        types: field with the number of token types
        width: field with the width of token embeddings; default: the hidden size
        embedding: reads embeddings that are not of text
        key_bias: None: as `qkv_bias`
        types_windows: `layer_types` says which layers have a window
        parallel: attention and feed-forward block read the same input
        words_scale: factor of embeddings, `root` of the hidden size
        logits_divided: `logits_scale` is a divisor
        scale: factor of the scores; root: field whose inverse root is the factor; else the inverse root of the head size
        finish: hook for what the fields cannot express
    """

    names: Names = field(default_factory=Names)
    architecture: str = ""
    part: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    groups: str | None = "num_key_value_heads"
    groups_needed: bool = False
    size: str | None = "head_dim"
    size_needed: bool = False
    inner: str = "intermediate_size"
    inner_factor: int | None = None
    positions: Key | int = field(default_factory=lambda: Key("max_position_embeddings"))
    first_position: int = 0
    padding: Key | int | None = None
    types: str | None = None
    width: Key | None = None
    embedding: Callable[[ConfigFields], Embedding] | None = None
    norm: NormRule = field(default_factory=NormRule)
    head_norm: HeadNormRule | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    tied: bool = False
    qkv_bias: Flag = False
    key_bias: Flag | None = None
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    causal: bool = True
    order: Order = "pre_norm"
    parallel: Flag = False
    rope: RopeStyle | None = field(default_factory=RopeStyle)
    windows: Windows | None = None
    types_windows: bool = True
    experts: ExpertRule | None = None
    fused: Fused = "blocks"
    input_major: bool = False
    words_scale: Number | Literal["root"] = None
    residual_scale: Number = None
    logits_scale: Number = None
    logits_divided: bool = False
    scale: Number = None
    root: Key | None = None
    clip: Number = None
    scores_cap: Number = None
    logits_cap: Number = None
    outputs: Outputs = field(default_factory=Outputs)
    finish: Finish | None = None


def read_decoder(family: Family, data: Mapping[str, Any], where: str) -> Stack:
    """Read and check the configuration of a decoder. Raises ParseError naming the field."""
    c, architecture = ConfigFields(data, where), family.architecture or "ForCausalLM"
    named = data.get("architectures") or [architecture]
    if not isinstance(named, list) or not str(named[0]).endswith(architecture):
        raise c.wrong("architectures", f"a model with the head {architecture} (pooling= reads the model as an encoder)")
    c = fields_of(family, c)
    for key, values in DECODER_FIELDS.items():
        c.only(key, *values)
    return read_stack(family, c)


def fields_of(family: Family, c: ConfigFields) -> ConfigFields:
    """Return the fields of the part of a model that a family reads. Raises ParseError if there are none."""
    if not family.part:
        return c
    fields = c.data.get(family.part)
    if not isinstance(fields, dict):
        raise c.wrong(family.part, "an object")
    return ConfigFields(fields, f"{c.where}: {family.part}")


DECODER_FIELDS: Mapping[str, tuple[object, ...]] = {
    "pretraining_tp": (1, None), "use_bidirectional_attention": (None, False),
    "add_cross_attention": (False, None), "is_causal": (True, None),
}  # fmt: skip


def read_stack(family: Family, c: ConfigFields) -> Stack:
    """Read a configuration by its family. Raises ParseError naming the field."""
    f, c = family, ConfigFields({**family.defaults, **c.data}, c.where)
    for key, values in f.only.items():
        c.only(key, *values)
    f = replace(f, hidden=_present(c, f.hidden), layers=_present(c, f.layers), heads=_present(c, f.heads))
    heads, hidden = c.whole(f.heads), c.whole(f.hidden)
    groups = _groups(c, f, heads)
    size = _size(c, f, hidden, heads)
    qkv = flag(c, f.qkv_bias)
    key_bias = qkv if f.key_bias is None else flag(c, f.key_bias)
    divided = number(c, f.logits_scale)
    stack = Stack(
        names=f.names,
        layers=_layers(c, f, size),
        embedding=_words(c, f, hidden) if f.embedding is None else f.embedding(c),
        hidden=hidden,
        heads=heads,
        groups=groups,
        size=size,
        inner=_inner(c, f, hidden),
        norm=f.norm.read(c),
        activation=c.chosen(*f.activation, ACTIVATIONS) if f.activation[0] else f.activation[1],
        biases=Biases(qkv, key_bias, qkv, flag(c, f.out_bias), flag(c, f.mlp_bias), flag(c, f.head_bias)),
        order="parallel" if flag(c, f.parallel) else f.order,
        causal=f.causal,
        head_norm=None if f.head_norm is None else f.head_norm.read(c, f.norm),
        fused=f.fused,
        input_major=f.input_major,
        residual_scale=number(c, f.residual_scale),
        clip=optional(c, f.clip),
        scores_cap=_above_0(c, f.scores_cap),
        logits=Logits(
            tied=c.truth("tie_word_embeddings", f.tied) if f.causal else True,
            scale=1.0 if f.logits_divided else divided,
            divisor=divided if f.logits_divided else 1.0,
            cap=_above_0(c, f.logits_cap),
        ),
        outputs=f.outputs,
    )
    return stack if f.finish is None else f.finish(c, stack)


def _layers(c: ConfigFields, f: Family, size: int) -> tuple[TransformerLayer, ...]:
    count, scale = c.layers(f.layers), optional(c, f.scale)
    divisor = c.number(f.root.name, f.root.default, 1e-30, 1e30, "a number above 0") if f.root else size
    rope = None if f.rope is None else read_rope(c, f.rope, size)
    windows = _windows(c, f, count) if f.causal and f.types_windows else (None,) * count
    return tuple(
        TransformerLayer(
            f"{f.names.layers}.{i}",
            float(divisor**-0.5) if scale is None else scale,
            rope,
            windows[i],
            None if f.experts is None else f.experts.read(c, i),
        )
        for i in range(count)
    )


def _words(c: ConfigFields, f: Family, hidden: int) -> Words:
    rows, padding = f.positions, f.padding
    if isinstance(rows, Key):
        rows = c.whole(rows.name, None if rows.default is None else int(rows.default))
    if isinstance(padding, Key):
        padding = 0 if c.data.get(padding.name) == 0 else c.whole(padding.name, int(padding.default or 0))
    return Words(
        hidden if f.width is None else c.whole(f.width.name, int(f.width.default or hidden)),
        c.whole("vocab_size"),
        rows + f.first_position,
        0 if f.types is None else c.whole(f.types),
        padding,
        f.first_position,
        scale=hidden**0.5 if f.words_scale == "root" else number(c, f.words_scale),
    )


def _inner(c: ConfigFields, f: Family, hidden: int) -> int:
    """Read the width of the feed-forward blocks, as one number or one for each layer."""
    given = c.data.get(f.inner)
    if isinstance(given, list):
        each = set(c.wholes(f.inner, (), c.layers(f.layers)))
        if len(each) > 1:
            raise c.wrong(f.inner, "the same width for every layer")
        return each.pop()
    return c.whole(f.inner, f.inner_factor and f.inner_factor * hidden)


def _present(c: ConfigFields, names: str) -> str:
    """Return the first of the alternative names `a|b` of a field that is present, else the last."""
    known = names.split("|")
    return next((name for name in known if c.data.get(name) is not None), known[-1])


def _groups(c: ConfigFields, f: Family, heads: int) -> int:
    """Read the number of key and value heads."""
    if f.groups is None:
        return heads
    groups = c.whole(f.groups, None if f.groups_needed and f.groups not in c.data else heads)
    c.multiple(f.heads, heads, f.groups, groups)
    return groups


def _size(c: ConfigFields, f: Family, hidden: int, heads: int) -> int:
    """Read the size of a head."""
    given = None if f.size is None else c.data.get(f.size)
    if given is None and (f.size is None or not f.size_needed or f.size in c.data):
        c.multiple(f.hidden, hidden, f.heads, heads)
    if f.size is None:
        c.only("head_dim", hidden // heads, None)
        return hidden // heads
    return c.whole(f.size, None if f.size_needed and f.size not in c.data else max(1, hidden // heads))


def _above_0(c: ConfigFields, value: Number) -> float | None:
    result = optional(c, value)
    if result is not None and result < 0:
        raise c.wrong(value.name if isinstance(value, Key) else "", "a number above 0")
    return result


def layer_types(c: ConfigFields, layers: int, default: Callable[[], list[str]]) -> list[str]:
    """Read whether each layer attends to all positions or to a window. default: types of a file without them"""
    types = c.data.get("layer_types")
    types = default() if types is None else types
    if not isinstance(types, list) or len(types) != layers or any(t not in (FULL, SLIDING) for t in types):
        raise c.wrong("layer_types", f"'{FULL}' or '{SLIDING}' for each of {layers} layers")
    return types


def _windows(c: ConfigFields, f: Family, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer, or None."""
    rule, data = f.windows, c.data
    used = False
    if rule is not None:
        if rule.needed and "sliding_window" not in data:
            raise c.wrong("sliding_window", "a number or null, as this family has windows by default")
        used = data.get("sliding_window") is not None and (rule.used is None or flag(c, rule.used))
    types = layer_types(c, layers, lambda: _typical(c, rule if used else None, layers))
    if SLIDING not in types:
        return (None,) * layers
    if not used:
        raise c.wrong("layer_types", f"'{FULL}' for every layer where no sliding_window is used")
    size = c.whole("sliding_window")
    return tuple(size if t == SLIDING else None for t in types)


def _typical(c: ConfigFields, rule: Windows | None, layers: int) -> list[str]:
    """Return the types of layers that a configuration without `layer_types` has."""
    if rule is None:
        return [FULL] * layers
    if rule.every is not None:
        every = rule.every if rule.every_key is None else c.whole(rule.every_key, rule.every)
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    first = 0 if rule.first is None else c.whole(rule.first.name, int(rule.first.default or 0))
    return [SLIDING if i >= first else FULL for i in range(layers)]


def ropes_by_type(c: ConfigFields, stack: Stack, style: RopeStyle, local: RopeStyle) -> Stack:
    """Give layers with a window the rotation of `local`, and other layers the rotation of `style`."""
    full, near = read_rope(c, style, stack.size, FULL), read_rope(c, local, stack.size, SLIDING)
    return stack.with_layers(lambda _, layer: replace(layer, rope=full if layer.window is None else near))
