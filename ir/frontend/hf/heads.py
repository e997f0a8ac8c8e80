"""Heads of encoders by `architectures`, and the modules of sentence-transformers folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.encoder import Encoder, Stage
from relax_tune.ir.frontend.hf.encoder_spec import ACTIVATIONS
from relax_tune.ir.frontend.hf.weights import HfWeights, read_json, read_json_list
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, Cast, Div, Gelu, MaximumScalar, Mul, Relu, Sigmoid, Sqrt, Tanh
from relax_tune.ir.op.math.logic import NotEqual, Where
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import L2Normalize, LayerNorm, Max, MeanPool, Sum

Pooling = Literal["mean", "cls", "max", "mean_sqrt_len", "none"]

MODULES = "modules.json"
# Activations of sentence-transformers' dense modules; None: identity.
ACTIVATED: Mapping[str, type[OperatorSpec] | None] = {
    "Identity": None, "Tanh": Tanh, "ReLU": Relu, "GELU": Gelu, "Sigmoid": Sigmoid,
}  # fmt: skip
POOLED = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}  # fmt: skip


def pooled(kind: str) -> Callable[[Encoder, GVar], GVar]:
    """Pool the positions of the mask, as sentence-transformers does: (b, n, hidden) to (b, hidden)."""

    def stage(encoder: Encoder, x: GVar) -> GVar:
        g, mask = encoder.g, encoder.mask
        if kind == "cls":
            return first_position(encoder, x)
        weights = g.call(Cast(f32), mask)
        if kind == "mean":
            return g.call(MeanPool(1e-9), x, weights, hint="pooled")
        if kind == "max":
            seen = g.call(
                ExpandDims((2,)), g.call(NotEqual(), mask, g.constant("hidden_position", np.asarray(0, np.int64)))
            )
            lowest = g.constant("hidden_value", np.asarray(-1e9, np.float32))
            return g.call(Max((1,)), g.call(Where(), seen, x, lowest), hint="pooled")
        total = g.call(Sum((1,)), g.call(Mul(), x, g.call(ExpandDims((2,)), weights)))
        root = g.call(Sqrt(), g.call(MaximumScalar(1e-9), g.call(Sum((1,)), weights)))
        return g.call(Div(), total, g.call(ExpandDims((1,)), root), hint="pooled")

    return stage


def first_position(encoder: Encoder, x: GVar) -> GVar:
    """Take the first position: (b, n, hidden) to (b, hidden)."""
    batch, _ = encoder.dims
    first = encoder.g.call(Slice(1, const(0), const(1)), x)
    return encoder.g.call(Reshape((batch, const(encoder.spec.hidden))), first, hint="pooled")


def normalized(encoder: Encoder, x: GVar) -> GVar:
    """Scale every vector to unit length."""
    return encoder.g.call(L2Normalize(1e-12), x, hint="sentence_embedding")


def concatenated(parts: tuple[str, ...]) -> Stage:
    """Pool in several ways, and join the vectors."""

    def stage(encoder: Encoder, x: GVar) -> GVar:
        found = [pooled(kind)(encoder, x) for kind in parts]
        return found[0] if len(found) == 1 else encoder.g.call(Concat(1), *found, hint="pooled")

    return stage


# modules of sentence-transformers


def sentence_stages(root: Path, hidden: int) -> list[Stage]:
    """Read the modules behind the transformer of a sentence-transformers folder.

    hidden: size of the transformer's vectors. Raises ParseError for a module or option that is not imported."""
    stages, width = list[Stage](), hidden
    for module in _listed(root)[1:]:
        kind, folder = module["type"].rpartition(".")[2], root / module["path"]
        if kind == "Normalize":
            stages.append(normalized)
        elif kind == "Pooling":
            parts = _pooling_parts(folder)
            stages.append(concatenated(parts))
            width *= len(parts)
        elif kind == "Dense":
            stage, width = _dense(folder, width)
            stages.append(stage)
        elif kind != "Dropout":
            raise ParseError(
                f"{root / MODULES}: wanted modules Transformer, Pooling, Dense, Normalize and Dropout, found {module['type']!r:.80}; "
                "this model cannot be imported from its folder, but an .onnx file of it may"
            )
    return stages


def transformer_folder(root: Path) -> Path:
    """Return the folder of the transformer of a sentence-transformers folder."""
    first = _listed(root)[0]
    if first["type"].rpartition(".")[2] != "Transformer":
        raise ParseError(f"{root / MODULES}: wanted a Transformer as the first module, found {first['type']!r:.80}")
    return root / first["path"]


def _listed(root: Path) -> list[dict[str, str]]:
    path = root / MODULES
    listed = read_json_list(path, "the list of modules of a sentence-transformers folder")
    parts = [m for m in listed if isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("path", "type"))]
    inside = all(not Path(m["path"]).is_absolute() and ".." not in Path(m["path"]).parts for m in parts)
    if not listed or len(parts) != len(listed) or not inside:
        raise ParseError(f"{path}: wanted objects with a type and a path inside the folder, found {listed!r:.120}")
    return parts


def _pooling_parts(folder: Path) -> tuple[str, ...]:
    path = folder / "config.json"
    data = read_json(path, "the configuration of a pooling module")
    chosen = [k for k, v in data.items() if k.startswith("pooling_mode_") and v is True]
    if isinstance(data.get("pooling_mode"), str):  # of newer files
        chosen = [k for k, v in POOLED.items() if v == data["pooling_mode"]] or [data["pooling_mode"]]
    wrong = [k for k in chosen if k not in POOLED]
    if wrong or not chosen:
        raise ParseError(
            f"{path}: wanted pooling modes among {', '.join(POOLED)}, found {', '.join(wrong)[:80] or 'none'}; "
            "this model cannot be imported"
        )
    return tuple(kind for key, kind in POOLED.items() if key in chosen)


def _dense(folder: Path, width: int) -> tuple[Stage, int]:
    c = ConfigFields(
        read_json(folder / "config.json", "the configuration of a dense module"), str(folder / "config.json")
    )
    if c.whole("in_features") != width:
        raise c.wrong("in_features", f"{width}, the size of the vectors before it")
    out, biased = c.whole("out_features"), c.truth("bias", True)
    name = c.data.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("torch.nn.") else ""
    if kind not in ACTIVATED:
        raise c.wrong("activation_function", f"torch's {', '.join(ACTIVATED)}")
    weights = HfWeights(folder)

    def stage(encoder: Encoder, x: GVar) -> GVar:
        y = encoder.dense(x, weights, "linear", width, out, biased, folder.name)
        activation = ACTIVATED[kind]
        return y if activation is None else encoder.g.call(activation(), y)

    return stage, out


# heads of transformers


def head_stage(data: Mapping[str, Any], where: str) -> Stage | None:
    """Return the head that `architectures` names, None for a bare encoder.

    Heads: masked words, a class of the sequence or of each position, the answer to a question. Raises ParseError for others."""
    c = ConfigFields(data, where)
    named = data.get("architectures")
    if named is None or named == []:
        return None
    name = str(named[0]) if isinstance(named, list) else ""
    task = next((t for t in ("Model", *HEADS) if name.endswith(t) and not name.endswith("HeadModel")), "")
    if task != "Model" and task not in HEADS:
        raise c.wrong(
            "architectures",
            f"an encoder or one with a head among {', '.join(HEADS)} (with pooling=, its encoder alone is read)",
        )
    if task == "Model":
        return None
    return lambda encoder, x: HEADS[task](encoder, x, c)


def _labels(c: ConfigFields) -> int:
    named = c.data.get("id2label")
    return len(named) if isinstance(named, dict) and named else c.whole("num_labels", 2)


def _classes(encoder: Encoder, x: GVar, name: str, out: int, hint: str | None = None) -> GVar:
    return encoder.dense(x, encoder.weights, name, encoder.spec.hidden, out, hint=hint)


def _transformed(encoder: Encoder, x: GVar) -> GVar:
    """Emit the dense part before the classes."""
    g, names, width = encoder.g, encoder.spec.head, encoder.spec.hidden
    if not names.dense:
        return x
    y = encoder.dense(x, encoder.weights, names.dense, width, width, names.biased, inner=names.inner)
    y = ACTIVATIONS[names.activation](g, y)
    return _normed(encoder, y, names.norm, width) if names.norm else y


def _normed(encoder: Encoder, x: GVar, name: str, width: int) -> GVar:
    get, biased = encoder.weights.get, encoder.spec.head.norm_biased
    scale = get(f"{name}.weight", (width,), inner=False)
    shift = get(f"{name}.bias", (width,), inner=False) if biased else np.zeros(width, np.float32)
    parts = (encoder.g.constant(f"word_norm.{what}", part) for what, part in (("weight", scale), ("bias", shift)))
    return encoder.g.call(LayerNorm(encoder.spec.eps), x, *parts)


def _sequence(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    names = encoder.spec.head
    if names.pooled == "late":
        return pooled("mean")(encoder, _classes(encoder, _transformed(encoder, x), names.out, _labels(c)))
    first = pooled(names.pooled)(encoder, x)
    return _classes(encoder, _transformed(encoder, first), names.out, _labels(c), "logits")


def _positions(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    y = _transformed(encoder, x) if encoder.spec.head.everywhere else x
    return _classes(encoder, y, "classifier", _labels(c), "logits")


def _answer(encoder: Encoder, x: GVar, c: ConfigFields) -> tuple[GVar, ...]:
    g, (batch, length) = encoder.g, encoder.dims
    names = encoder.spec.head
    both = _classes(encoder, _transformed(encoder, x) if names.everywhere else x, names.answer_out, 2)
    ends = [
        g.call(Reshape((batch, length)), g.call(Slice(2, const(k), const(k + 1)), both), hint=hint)
        for k, hint in enumerate(("start_logits", "end_logits"))
    ]
    return tuple(ends)


def _words(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    g, s, names, weights = encoder.g, encoder.spec, encoder.spec.head, encoder.weights
    width, vocabulary, y = names.word_width or s.words.width, s.words.vocabulary, x
    if names.word_dense:
        y = encoder.dense(x, weights, names.word_dense, s.hidden, width, names.biased)
        y = ACTIVATIONS[names.word_activation or s.activation](g, y)
        y = _normed(encoder, y, names.word_norm, width)
    table = encoder.words
    if not c.truth("tie_word_embeddings", True) or names.word_width:
        own = weights.get(f"{names.words}.weight", (vocabulary, width), inner=False)
        table = g.constant(f"{names.words}.weight", own)
    if not names.word_bias:
        return g.call(Matmul(transpose_b=True), y, table, hint="logits")
    bias = g.constant(names.word_bias, weights.get(names.word_bias, (vocabulary,), inner=False))
    return g.call(Add(), g.call(Matmul(transpose_b=True), y, table), bias, hint="logits")


HEADS: Mapping[str, Callable[[Encoder, GVar, ConfigFields], GVar | tuple[GVar, ...]]] = {
    "ForMaskedLM": _words, "ForSequenceClassification": _sequence, "ForTokenClassification": _positions,
    "ForQuestionAnswering": _answer,
}  # fmt: skip
