"""The families of encoders: what each reads from its configuration, and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder_spec import (
    ACTIVATIONS,
    ROBERTA_HEADS,
    EncoderSpec,
    HeadNames,
    LayerNames,
    Words,
)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Names of the fields of config.json; empty: the family has none, and the number is 0 or BERT's."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    rows: str = "max_position_embeddings"
    types: str = "type_vocab_size"
    eps: str = "layer_norm_eps"
    activation: str = "hidden_act"


_UNTYPED = _Fields(types="")


def encoder_spec(data: Mapping[str, Any], where: str) -> EncoderSpec:
    """Read and check the configuration of one of ENCODERS. Raises ParseError naming the field."""
    c = ConfigFields(data, where)
    c.only("position_embedding_type", "absolute", None)
    c.only("is_decoder", False, None)
    c.only("add_cross_attention", False, None)
    spec = ENCODERS[data["model_type"]](c)
    words = spec.words
    if words.positions < 1:
        raise c.wrong(
            "max_position_embeddings", f"more positions than the {words.padding} that pad_token_id skips and one"
        )
    return spec


def _spec(
    c: ConfigFields,
    prefix: str,
    fields: _Fields = _Fields(),
    path: str = "encoder.layer.{}",
    act: str = "gelu",
    eps: float = 1e-12,
    words: Mapping[str, Any] | None = None,
    **parts: Any,
) -> EncoderSpec:
    """Read the fields of BERT (Devlin et al. 2019). words, parts: what the family has otherwise."""
    layers, hidden, heads = (c.whole(name) for name in (fields.layers, fields.hidden, fields.heads))
    inner, vocabulary, rows = (c.whole(name) for name in (fields.inner, "vocab_size", fields.rows))
    types = c.whole(fields.types) if fields.types else 0
    c.multiple(fields.hidden, hidden, fields.heads, heads)
    own: dict[str, Any] = {
        "layers": tuple(path.format(i) for i in range(layers)),
        "size": hidden // heads,
        "eps": c.number(fields.eps, eps, 0, 1, "a number in [0, 1)") if fields.eps else eps,
        "activation": c.chosen(fields.activation, act, ACTIVATIONS),
        "words": Words(
            **{"width": hidden, "vocabulary": vocabulary, "rows": rows, "token_types": types, **(words or {})}
        ),
        "prefixes": (prefix,),
    }
    return EncoderSpec(hidden=hidden, heads=heads, inner=inner, **{**own, **parts})


def _padding(c: ConfigFields) -> int:
    """Read the token without a position."""
    return 0 if c.data.get("pad_token_id") == 0 else c.whole("pad_token_id", 1)


def _bert(c: ConfigFields) -> EncoderSpec:
    return _spec(c, "bert.")


def _roberta(c: ConfigFields) -> EncoderSpec:
    """Read RoBERTa (Liu et al. 2019), whose positions leave out padding."""
    return _spec(c, "roberta.", words={"padding": _padding(c)}, head=ROBERTA_HEADS)


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
    fields = _Fields("n_layers", "dim", "n_heads", "hidden_dim", types="", eps="", activation="activation")
    return _spec(
        c, "distilbert.", fields, "transformer.layer.{}", names=_DISTILBERT, head=_DISTILBERT_HEADS
    )  # fmt: skip


ENCODERS: Mapping[str, Callable[[ConfigFields], EncoderSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _distilbert,
}
