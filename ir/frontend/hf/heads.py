"""Heads of encoders by `architectures`, and the modules of sentence-transformers folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, add, const, sub
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import INSTEAD, ConfigFields
from relax_tune.ir.frontend.hf.encoder import Encoder, Stage
from relax_tune.ir.frontend.hf.encoder_spec import EncoderSpec, Patches, Waves
from relax_tune.ir.frontend.hf.weights import HfWeights, read_json, read_json_list
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice
from relax_tune.ir.op.math.elementwise import (
    Add,
    Cast,
    Div,
    Gelu,
    MaximumScalar,
    Mul,
    MulScalar,
    Relu,
    Sigmoid,
    Sqrt,
    Tanh,
)
from relax_tune.ir.op.math.logic import Equal, NotEqual, Where
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import L2Normalize, LayerNorm, Max, Mean, MeanPool, Sum
from relax_tune.ir.op.reduction.scan import ArgMax

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
        if kind == "cls":
            return first_position(encoder, x)
        g, mask = encoder.g, encoder.mask
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
    return position(encoder, x, const(0))


def position(encoder: Encoder, x: GVar, number: Expr, hint: str = "pooled") -> GVar:
    """Take one position: (b, n, hidden) to (b, hidden)."""
    batch, _ = encoder.dims
    one = encoder.g.call(Slice(1, number, add(number, const(1))), x)
    return encoder.g.call(Reshape((batch, const(encoder.spec.hidden))), one, hint=hint)


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
                f"{INSTEAD}"
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
            f"{INSTEAD}"
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


def head_stage(data: Mapping[str, Any], where: str, spec: EncoderSpec) -> Stage | None:
    """Return the head that `architectures` names, None for a bare encoder.

    Heads: masked words, a class of the sequence, of each position or of an image, the answer to a question, a projection. Raises
    ParseError for others."""
    c = ConfigFields(data, where)
    named = data.get("architectures")
    if named is None or named == []:
        return None
    heads: Mapping[str, Head] = {task: head for task, head in HEADS.items() if task in (spec.tasks or HEADS)}
    if spec.projection is not None:
        heads = PROJECTIONS
    if isinstance(spec.inputs, Patches):
        own = SPECTROGRAM_HEADS if spec.inputs.spectrogram else IMAGE_HEADS
        heads = {**(PROJECTIONS if spec.projection is not None else {}), **own}
    if isinstance(spec.inputs, Waves):
        heads = SPEECH_HEADS
    name = str(named[0]) if isinstance(named, list) else ""
    task = next((t for t in ("Model", *heads) if name.endswith(t) and not name.endswith("HeadModel")), "")
    if not task:
        raise c.wrong(
            "architectures",
            f"an encoder or one with a head among {', '.join(heads)} (with pooling=, its encoder alone is read)",
        )
    if task == "Model":
        return None
    return lambda encoder, x: heads[task](encoder, x, c)


def bare_results(encoder: Encoder, x: GVar) -> GVar | tuple[GVar, ...]:
    """Give the last hidden state of a bare model, and its pooled vector where it has one."""
    p = encoder.spec.pooler
    if p is None:
        return x
    first = p.dense or p.norm
    if p.optional and not (first and encoder.weights.has(f"{first}.weight")):
        return x
    return x, pooler_output(encoder, x)


def pooler_output(encoder: Encoder, x: GVar) -> GVar:
    """Emit the pooled vector (b, hidden) of a bare model."""
    g, s, (batch, length) = encoder.g, encoder.spec, encoder.dims
    p = s.pooler
    assert p is not None
    if p.kind == "probe":
        return _probed(encoder, x)
    if p.kind == "eos":
        ids = encoder.ids
        if p.eos is not None:
            ids = g.call(Cast(i64), g.call(Equal(), ids, g.constant("eos", np.asarray(p.eos, np.int64))))
        where = g.call(ExpandDims((1, 2)), g.call(ArgMax(1), ids, hint="eos_position"))
        where = g.call(BroadcastTo((batch, const(1), const(s.hidden))), where)
        y = g.call(Reshape((batch, const(s.hidden))), g.call(GatherElements(1), x, where), hint="pooled")
    elif p.kind == "pair":
        y = g.call(MulScalar(0.5), g.call(Add(), *(position(encoder, x, const(k)) for k in (0, 1))), hint="pooled")
    elif p.kind == "patches":
        y = g.call(Mean((1,)), _patches(encoder, x), hint="pooled")
    else:
        y = position(encoder, x, const(0) if p.kind == "first" else sub(length, const(1)))
    if p.norm:
        y = encoder.norm(y, p.norm)
    if p.dense:
        y = encoder.linear(y, p.dense, s.hidden, s.hidden)
    return ACTIVATIONS[p.activation](g, y) if p.activation else y


def _probed(encoder: Encoder, x: GVar) -> GVar:
    """Pool by attention of a learned query (Zhai et al. 2022), then a feed-forward block."""
    g, s, (batch, length) = encoder.g, encoder.spec, encoder.dims
    size = s.hidden // s.heads
    get = encoder.weights.get
    joint, shifts = (
        get("head.attention.in_proj_weight", (3 * s.hidden, s.hidden)),
        get("head.attention.in_proj_bias", (3 * s.hidden,)),
    )
    query = get("head.probe", (1, 1, s.hidden))[0] @ joint[: s.hidden].T + shifts[: s.hidden]

    def heads(k: int, part: str) -> GVar:
        rows = slice(k * s.hidden, (k + 1) * s.hidden)
        w = g.constant(f"head.{part}.weight", np.ascontiguousarray(joint[rows].T))
        y = g.call(Add(), g.call(Matmul(), x, w), g.constant(f"head.{part}.bias", shifts[rows]))
        y = g.call(Reshape((batch, length, const(s.heads), const(size))), y)
        return g.call(Permute((0, 2, 1, 3)), y, hint=part)

    q = g.constant("head.query", np.ascontiguousarray(query.reshape(1, s.heads, 1, size)))
    probe = g.call(BroadcastTo((batch, const(s.heads), const(1), const(size))), q)
    seen = g.call(Attention(float(size**-0.5), hides_rows=False), probe, heads(1, "key"), heads(2, "value"))
    y = encoder.linear(g.call(Reshape((batch, const(s.hidden))), seen), "head.attention.out_proj", s.hidden, s.hidden)
    inner = encoder.linear(encoder.norm(y, "head.layernorm"), "head.mlp.fc1", s.hidden, s.inner)
    inner = ACTIVATIONS[s.activation](g, inner)
    return g.call(Add(), encoder.linear(inner, "head.mlp.fc2", s.inner, s.hidden), y, hint="pooled")


def projected(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    """Emit the projected vector (b, width) of CLIP."""
    assert encoder.spec.projection is not None
    name, width = encoder.spec.projection
    y = pooler_output(encoder, x)
    return encoder.dense(y, encoder.weights, name, encoder.spec.hidden, width, biased=False, hint="embeds")


def _patches(encoder: Encoder, x: GVar) -> GVar:
    """Take the vectors of the patches of images."""
    inputs = encoder.spec.inputs
    assert isinstance(inputs, Patches)
    if not inputs.leading:
        return x
    return encoder.g.call(Slice(1, const(inputs.leading), const(inputs.positions)), x, hint="patches")


def _image(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    g, s = encoder.g, encoder.spec
    kinds = {"first": first_position, "mean": lambda e, x: g.call(Mean((1,)), _patches(e, x)), "pooled": pooler_output}
    parts = [kinds[kind](encoder, x) for kind in s.image_classes]
    y = parts[0] if len(parts) == 1 else g.call(Concat(1), *parts, hint="pooled")
    return encoder.dense(y, encoder.weights, "classifier", len(parts) * s.hidden, c.labels(), hint="logits")


def _image_with_teacher(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    """Emit the mean of the classes of both tokens of DeiT."""
    names = ("cls_classifier", "distillation_classifier")
    each = [_classes(encoder, position(encoder, x, const(k)), name, c.labels()) for k, name in enumerate(names)]
    return encoder.g.call(MulScalar(0.5), encoder.g.call(Add(), *each), hint="logits")


def _spectrogram(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    """Emit the classes of a spectrogram, of its pooled and normalised vector."""
    y = _normed(encoder, pooler_output(encoder, x), "classifier.layernorm", encoder.spec.hidden)
    return _classes(encoder, y, "classifier.dense", c.labels(), "logits")


def _characters(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    """Emit the logits of characters of each frame (Graves et al. 2006)."""
    return _classes(encoder, x, "lm_head", c.whole("vocab_size", 32), "logits")


def _weighted(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    """Return the last hidden state, or the sum of the states of all layers with weights of their own."""
    if not c.truth("use_weighted_layer_sum", False):
        return x
    g, states = encoder.g, encoder.states
    stored = encoder.weights.get("layer_weights", (len(states),), inner=False).astype(np.float64)
    share = np.exp(stored - stored.max())
    parts = [g.call(MulScalar(float(w)), y) for w, y in zip(share / share.sum(), states, strict=True)]
    return reduce(lambda a, b: g.call(Add(), a, b), parts)


def _sound(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    """Emit the classes of a sound: of the mean of its frames, without padding."""
    width = c.whole("classifier_proj_size", 256)
    y = _classes(encoder, _weighted(encoder, x, c), "projector", width)
    inputs = encoder.spec.inputs
    assert isinstance(inputs, Waves)
    y = pooled("mean")(encoder, y) if inputs.masked else encoder.g.call(Mean((1,)), y, hint="pooled")
    return encoder.dense(y, encoder.weights, "classifier", width, c.labels(), hint="logits")


def _frames(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    return _classes(encoder, _weighted(encoder, x, c), "classifier", c.labels(), "logits")


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
        return pooled("mean")(encoder, _classes(encoder, _transformed(encoder, x), names.out, c.labels()))
    first = pooled(names.pooled)(encoder, x)
    return _classes(encoder, _transformed(encoder, first), names.out, c.labels(), "logits")


def _positions(encoder: Encoder, x: GVar, c: ConfigFields) -> GVar:
    y = _transformed(encoder, x) if encoder.spec.head.everywhere else x
    return _classes(encoder, y, "classifier", c.labels(), "logits")


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
    if names.word_rest:
        more = weights.get(f"{names.word_rest}.weight", (width - s.words.width, vocabulary), inner=False)
        words = weights.get(f"{s.words.words}.weight", (vocabulary, s.words.width))
        table = g.constant(names.word_rest, np.concatenate([words, more.T], axis=1))
    elif not c.truth("tie_word_embeddings", True) or names.word_width:
        own = weights.get(f"{names.words}.weight", (vocabulary, width), inner=False)
        table = g.constant(f"{names.words}.weight", own)
    if not names.word_bias:
        return g.call(Matmul(transpose_b=True), y, table, hint="logits")
    bias = g.constant(names.word_bias, weights.get(names.word_bias, (vocabulary,), inner=False))
    return g.call(Add(), g.call(Matmul(transpose_b=True), y, table), bias, hint="logits")


Head = Callable[[Encoder, GVar, ConfigFields], "GVar | tuple[GVar, ...]"]
PROJECTIONS: Mapping[str, Head] = {"ModelWithProjection": projected}
IMAGE_HEADS: Mapping[str, Head] = {
    "ForImageClassification": _image, "ForImageClassificationWithTeacher": _image_with_teacher,
}  # fmt: skip
SPECTROGRAM_HEADS: Mapping[str, Head] = {"ForAudioClassification": _spectrogram}
SPEECH_HEADS: Mapping[str, Head] = {
    "ForCTC": _characters, "ForSequenceClassification": _sound, "ForAudioFrameClassification": _frames,
}  # fmt: skip
HEADS: Mapping[str, Head] = {
    "ForMaskedLM": _words, "ForSequenceClassification": _sequence, "ForTokenClassification": _positions,
    "ForQuestionAnswering": _answer,
}  # fmt: skip
