"""Families of decoders: rules that read their config.json into a specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.decoders.rope import Rope, RopeStyle, read_rope
from relax_tune.ir.frontend.hf.decoders.spec import (
    Biases,
    DecoderLayer,
    DecoderSpec,
    ExpertNames,
    Experts,
    Fused,
    HeadNorm,
    Names,
    Norm,
    NormKind,
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
    found = c.number(value.name, value.default, -1e30, 1e30, "a number")
    if found == 0:
        raise c.wrong(value.name, "a number other than 0")
    return found


def number(c: ConfigFields, value: Number) -> float:
    found = optional(c, value)
    return 1.0 if found is None else found


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
    """Rule of the norms of queries and keys; see `HeadNorm`. norm: None: as elsewhere"""

    used: Flag = True
    made: HeadNorm = field(default_factory=lambda: HeadNorm(Norm(0.0)))
    norm: NormRule | None = None

    def read(self, c: ConfigFields, norm: NormRule) -> HeadNorm | None:
        return replace(self.made, norm=(self.norm or norm).read(c)) if flag(c, self.used) else None


@dataclass(frozen=True, slots=True)
class Windows:
    """Rule of the layers that have an attention window.

    used: field that must be true; None: a `sliding_window` is used where there is one
    needed: the family has a window of its own where `sliding_window` is missing
    first: field with the number of the first layers that have none, and its default
    every: field or number: period of the layers without a window; None: all layers are alike
    """

    used: Key | None = None
    needed: bool = False
    first: Key | None = None
    every: int | None = None
    every_key: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """Rule of a family's mixtures of experts. count: fields with the number of experts, the first that is there."""

    names: ExpertNames
    count: tuple[str, ...]
    inner: str = "intermediate_size"
    normalised: Flag = True
    shared: str | None = None
    sparse: bool = False
    """`decoder_sparse_step` and `mlp_only_layers` say which layers have a mixture."""

    def read(self, c: ConfigFields, layer: int) -> Experts | None:
        """Read the mixture of a layer, None where it has none."""
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


Finish = Callable[[ConfigFields, DecoderSpec], DecoderSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: the names of the fields and weights that it uses, and what it does.

    head: ending of the one architecture that is read
    hidden, layers, heads: fields with sizes, several names of one apart by `|`
    groups: field with the number of key and value heads; None: as many as query heads
    groups_needed: the family has a default of its own for them
    size: field with the size of a head; None: the hidden size divided by the heads
    size_needed: the family has a default of its own for it
    inner: field with the width of the feed-forward block; inner_factor: multiple of the hidden size where it is missing
    words_scale: factor of embeddings, `root` of the hidden size
    scale: field with the factor of the scores; root: field whose inverse root is the factor; else that of the head's size
    only: fields that must be missing or have one of these values
    finish: what no other field says
    """

    names: Names = field(default_factory=Names)
    head: str = "ForCausalLM"
    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    groups: str | None = "num_key_value_heads"
    groups_needed: bool = False
    size: str | None = "head_dim"
    size_needed: bool = False
    inner: str = "intermediate_size"
    inner_factor: int | None = None
    positions: Key = field(default_factory=lambda: Key("max_position_embeddings"))
    norm: NormRule = field(default_factory=NormRule)
    head_norm: HeadNormRule | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    tied: bool = False
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    rope: RopeStyle | None = field(default_factory=RopeStyle)
    windows: Windows | None = None
    experts: ExpertRule | None = None
    fused: Fused = "blocks"
    input_major: bool = False
    parallel: Flag = False
    words_scale: Number | Literal["root"] = None
    residual_scale: Number = None
    logits_scale: Number = None
    logits_divided: bool = False
    scale: Number = None
    root: Key | None = None
    clip: Number = None
    scores_cap: Number = None
    logits_cap: Number = None
    first_position: int = 0
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    finish: Finish | None = None


def read_spec(family: Family, data: Mapping[str, Any], where: str) -> DecoderSpec:
    """Read and check a configuration. Raises ParseError naming the field."""
    c, f = ConfigFields(data, where), family
    named = data.get("architectures") or [f.head]
    if not isinstance(named, list) or not str(named[0]).endswith(f.head):
        raise c.wrong("architectures", f"a model with the head {f.head}")
    c.only("pretraining_tp", 1, None)
    c.only("quantization_config", None)
    c.only("use_bidirectional_attention", None, False)
    c.only("add_cross_attention", False, None)
    for key, values in f.only.items():
        c.only(key, *values)
    f = replace(f, hidden=_present(c, f.hidden), layers=_present(c, f.layers), heads=_present(c, f.heads))
    heads, hidden = c.whole(f.heads), c.whole(f.hidden)
    groups = _groups(c, f, heads)
    size = _size(c, f, hidden, heads)
    divisor = c.number(f.root.name, f.root.default, 1e-30, 1e30, "a number above 0") if f.root else size
    scale = optional(c, f.scale)
    count = c.layers(f.layers)
    windows = _windows(c, f, count)
    rope = None if f.rope is None else read_rope(c, f.rope, size)
    layers = tuple(
        DecoderLayer(
            rope,
            float(divisor**-0.5) if scale is None else scale,
            windows[i],
            None if f.experts is None else f.experts.read(c, i),
        )
        for i in range(count)
    )
    spec = DecoderSpec(
        names=f.names,
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=groups,
        size=size,
        inner=c.whole(f.inner, f.inner_factor and f.inner_factor * hidden),
        vocabulary=c.whole("vocab_size"),
        positions=c.whole(f.positions.name, None if f.positions.default is None else int(f.positions.default)),
        norm=f.norm.read(c),
        activation=c.chosen(*f.activation, ACTIVATIONS),
        tied=c.truth("tie_word_embeddings", f.tied),
        biases=Biases(flag(c, f.qkv_bias), flag(c, f.out_bias), flag(c, f.mlp_bias), flag(c, f.head_bias)),
        head_norm=None if f.head_norm is None else f.head_norm.read(c, f.norm),
        fused=f.fused,
        input_major=f.input_major,
        parallel=flag(c, f.parallel),
        words_scale=hidden**0.5 if f.words_scale == "root" else number(c, f.words_scale),
        residual_scale=number(c, f.residual_scale),
        logits_scale=1 / number(c, f.logits_scale) if f.logits_divided else number(c, f.logits_scale),
        clip=optional(c, f.clip),
        scores_cap=_above_0(c, f.scores_cap),
        logits_cap=_above_0(c, f.logits_cap),
        first_position=f.first_position,
    )
    return spec if f.finish is None else f.finish(c, spec)


def _present(c: ConfigFields, names: str) -> str:
    """Return the first of several names of a field that is there."""
    known = names.split("|")
    return next((name for name in known if name in c.data), known[-1])


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
    found = optional(c, value)
    if found is not None and found < 0:
        raise c.wrong(value.name if isinstance(value, Key) else "", "a number above 0")
    return found


def layer_types(c: ConfigFields, layers: int, default: Callable[[], list[str]]) -> list[str]:
    """Read whether each layer attends to all positions or to a window. default: types where none are written"""
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


def with_layers(spec: DecoderSpec, change: Callable[[int, DecoderLayer], DecoderLayer]) -> DecoderSpec:
    """Return a specification with every layer changed, by its number."""
    return replace(spec, layers=tuple(change(i, layer) for i, layer in enumerate(spec.layers)))


def ropes_by_type(c: ConfigFields, spec: DecoderSpec, style: RopeStyle, local: RopeStyle | None) -> DecoderSpec:
    """Give layers with a window the rotation of `local` (None: no rotation), the others that of `style`."""
    full: Rope = read_rope(c, style, spec.size, FULL)
    near = None if local is None else read_rope(c, local, spec.size, SLIDING)
    return with_layers(spec, lambda i, layer: replace(layer, rope=full if layer.window is None else near))
