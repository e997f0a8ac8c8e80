"""Heads of encoders by `architectures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import const, sub
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.pooling import first_position, last_of, pooled, position, selected, visible
from relax_tune.ir.frontend.hf.sentence import activation_of
from relax_tune.ir.frontend.hf.transformer.inputs import Patches, PatchRows, Subsampling, Waves, Words
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters
from relax_tune.ir.frontend.hf.transformer.programs import Stage
from relax_tune.ir.frontend.hf.transformer.spec import Stack
from relax_tune.ir.frontend.hf.transformer.stack import StackEmitter
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, Permute, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, Cast, MulScalar
from relax_tune.ir.op.math.logic import Equal, NotEqual
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean
from relax_tune.ir.op.reduction.scan import ArgMax


def head_stage(data: Mapping[str, Any], where: str, stack: Stack) -> Stage | None:
    """Return the head that `architectures` names, None for a bare encoder.

    Heads: masked words; classes of a sequence, of each position or of an image; the answer to a question; a projection.

    Raises:
        ParseError: for any other head.
    """
    c = ConfigFields(data, where)
    named = data.get("architectures")
    if named is None or named == []:
        return None
    heads, outputs = _known_heads(stack), stack.outputs
    heads = {task: head for task, head in heads.items() if task in (outputs.tasks or heads)}
    name = str(named[0]) if isinstance(named, list) else ""
    # GPT-like `...LMHeadModel` ends in Model, but has a head.
    task = next((t for t in (*heads, "Model", "Encoder") if name.endswith(t) and not name.endswith("HeadModel")), "")
    if not task:
        known = f"an encoder or one with a head among {', '.join(heads)} (pooling= reads only the encoder)"
        raise c.wrong("architectures", known)
    return None if task in ("Model", "Encoder") else lambda e, x: heads[task](e, x, c)


def result_names(data: Mapping[str, Any], stack: Stack) -> tuple[str, ...]:
    """Return the names of the results of the head that `architectures` names, as of transformers' ModelOutput."""
    name = str(data["architectures"][0])
    if name.endswith("ForQuestionAnswering"):
        return "start_logits", "end_logits"
    if any(name.endswith(task) for task in VECTORS):
        return ("pooler_output",)
    if any(name.endswith(task) for task in PROJECTIONS):
        return ("text_embeds",) if isinstance(stack.embedding, Words) else ("image_embeds",)
    return ("logits",)


BARE = "last_hidden_state", "pooler_output"
"""Names of the results of a bare model."""


def _known_heads(stack: Stack) -> Mapping[str, Head]:
    if isinstance(stack.embedding, Waves):
        return SPEECH_HEADS
    if isinstance(stack.embedding, Subsampling):
        return {"ForCTC": _frame_characters}
    projections = {} if stack.outputs.projection is None else PROJECTIONS
    if isinstance(stack.embedding, PatchRows):
        return IMAGE_HEADS
    if isinstance(stack.embedding, Patches):
        return {**projections, **(SPECTROGRAM_HEADS if stack.embedding.spectrogram else IMAGE_HEADS)}
    heads = CAUSAL_HEADS if stack.causal else HEADS
    return projections or {**heads, **{k: v for k, v in VECTORS.items() if k in stack.outputs.tasks}}


def scored(data: Mapping[str, Any], where: str, saved: Mapping[str, Any] | None) -> Stage | None:
    """Return the activation of a cross-encoder's scores, None for a model that states none.

    Args:
        data: config.json, which older cross-encoders write it to
        saved: config_sentence_transformers.json, which newer ones do
    """
    own = data.get("sentence_transformers")
    places = (
        (saved or {}, "activation_fn"),
        (own if isinstance(own, dict) else {}, "activation_fn"),
        (data, OLDER_ACTIVATION),
    )
    stated = next(((fields, key) for fields, key in places if fields.get(key) is not None), None)
    return None if stated is None else activation_of(ConfigFields(stated[0], where), stated[1], "", "scores")


OLDER_ACTIVATION = "sbert_ce_default_activation_function"


def bare_results(e: StackEmitter, x: GVar) -> GVar | tuple[GVar, ...]:
    """Return the last hidden state of a bare model, and its pooled vector if it has one."""
    p = e.stack.outputs.pooler
    if p is None:
        return x
    first = p.dense or p.norm
    if p.optional and not (first and e.parameters.has(f"{first}.weight")):
        return x
    return x, pooler_output(e, x)


def pooler_output(e: StackEmitter, x: GVar) -> GVar:
    """Emit the pooled vector (b, hidden) of a bare model."""
    g, hidden, (_, length), p = e.g, e.stack.hidden, e.dims, e.stack.outputs.pooler
    assert p is not None
    if p.kind == "probe":
        return _probed(e, x)
    if p.kind == "eos":
        ids = e.ids
        if p.eos is not None:
            ids = g.call(Cast(i64), g.call(Equal(), ids, e.scalar("eos", p.eos, np.int64)))
        y = selected(e, x, g.call(ArgMax(1), ids, hint="eos_position"))
    elif p.kind == "pair":
        y = g.call(MulScalar(0.5), g.call(Add(), *(position(e, x, const(k)) for k in (0, 1))), hint="pooled")
    elif p.kind == "patches":
        y = g.call(Mean((1,)), _patches(e, x), hint="pooled")
    else:
        y = position(e, x, const(0) if p.kind == "first" else sub(length, const(1)))
    if p.norm:
        y = e.norm(y, p.norm)
    if p.dense:
        y = e.dense(y, p.dense, hidden, hidden)
    return ACTIVATIONS[p.activation](g, y) if p.activation else y


def _probed(e: StackEmitter, x: GVar) -> GVar:
    """Pool by attention of a learned query (Zhai et al. 2022), then a feed-forward block."""
    g, s, (batch, length) = e.g, e.stack, e.dims
    get = e.parameters.get
    joint = get("head.attention.in_proj_weight", 3 * s.hidden, s.hidden)
    shifts = get("head.attention.in_proj_bias", 3 * s.hidden)
    # The query is a weight, and its projection with it.
    query = get("head.probe", 1, 1, s.hidden)[0] @ joint[: s.hidden].T + shifts[: s.hidden]

    def heads(k: int, part: str) -> GVar:
        rows = slice(k * s.hidden, (k + 1) * s.hidden)
        w = e.constant(f"head.{part}.weight", lambda: np.ascontiguousarray(joint[rows].T))
        y = g.call(Add(), g.call(Matmul(), x, w), e.constant(f"head.{part}.bias", lambda: shifts[rows]))
        y = g.call(Reshape((batch, length, const(s.heads), const(s.size))), y)
        return g.call(Permute((0, 2, 1, 3)), y, hint=part)

    q = e.constant("head.query", lambda: np.ascontiguousarray(query.reshape(1, s.heads, 1, s.size)))
    probe = g.call(BroadcastTo((batch, const(s.heads), const(1), const(s.size))), q)
    mask = () if e.visible is None else (e.visible,)
    attention = Attention(float(s.size**-0.5), hides_rows=bool(mask))
    context = g.call(attention, probe, heads(1, "key"), heads(2, "value"), *mask)
    y = e.dense(g.call(Reshape((batch, const(s.hidden))), context), "head.attention.out_proj", s.hidden, s.hidden)
    inner = e.activation(e.dense(e.norm(y, "head.layernorm"), "head.mlp.fc1", s.hidden, s.inner))
    return g.call(Add(), e.dense(inner, "head.mlp.fc2", s.inner, s.hidden), y, hint="pooled")


def projected(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the projected vector (b, width) of CLIP."""
    assert e.stack.outputs.projection is not None
    name, width = e.stack.outputs.projection
    return e.dense(pooler_output(e, x), name, e.stack.hidden, width, False, "embeds", e.outside)


def _patches(e: StackEmitter, x: GVar) -> GVar:
    """Take the vectors of the patches of images."""
    p = e.stack.embedding
    assert isinstance(p, Patches)
    return e.g.call(Slice(1, const(p.leading), const(p.positions)), x, hint="patches") if p.leading else x


def _mean_of_patches(e: StackEmitter, x: GVar) -> GVar:
    """Return the mean of the patches of images, without padding."""
    return pooled("mean")(e, x) if e.visible is not None else e.g.call(Mean((1,)), _patches(e, x))


def _image(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the classes of an image."""
    kinds = {
        "first": first_position,
        "mean": _mean_of_patches,
        "pooled": pooler_output,
    }
    parts = [kinds[kind](e, x) for kind in e.stack.outputs.image_classes]
    y = parts[0] if len(parts) == 1 else e.g.call(Concat(1), *parts, hint="pooled")
    return e.dense(y, "classifier", len(parts) * e.stack.hidden, c.labels(), True, "logits", e.outside)


def _image_with_teacher(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the mean of the classes of both tokens of DeiT."""
    names = ("cls_classifier", "distillation_classifier")
    each = [_classes(e, position(e, x, const(k)), name, c.labels()) for k, name in enumerate(names)]
    return e.g.call(MulScalar(0.5), e.g.call(Add(), *each), hint="logits")


def _spectrogram(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the classes of a spectrogram, of its pooled and normalised vector."""
    y = e.head_normed(pooler_output(e, x), "classifier.layernorm", e.stack.hidden)
    return _classes(e, y, "classifier.dense", c.labels(), "logits")


def _characters(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the logits of characters of each frame (Graves et al. 2006)."""
    return e.dense(x, "lm_head", e.stack.out, c.whole("vocab_size", 32), True, "logits", e.outside)


def _frame_characters(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the logits of characters of each frame by a convolution of one frame."""
    out, width = c.whole("vocab_size", 1025), e.stack.hidden
    make = lambda: np.ascontiguousarray(e.outside.get("ctc_head.weight", out, width, 1)[:, :, 0].T)
    y = e.g.call(Matmul(), x, e.constant("ctc_head.weight", make))
    bias = e.constant("ctc_head.bias", lambda: e.outside.get("ctc_head.bias", out))
    return e.g.call(Add(), y, bias, hint="logits")


def _weighted(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Return the last hidden state, or the weighted sum of the states of all layers."""
    if not c.truth("use_weighted_layer_sum", False):
        return x
    stored = e.outside.get("layer_weights", len(e.hidden)).astype(np.float64)
    # A softmax of weights is a constant, so it is taken here.
    share = np.exp(stored - stored.max())
    parts = [e.g.call(MulScalar(float(w)), y) for w, y in zip(share / share.sum(), e.hidden, strict=True)]
    return reduce(lambda a, b: e.g.call(Add(), a, b), parts)


def _sound(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the classes of a sound: of the mean of its frames, without padding."""
    width = c.whole("classifier_proj_size", 256)
    y = _classes(e, _weighted(e, x, c), "projector", width)
    assert isinstance(e.stack.embedding, Waves)
    y = pooled("mean")(e, y) if e.stack.embedding.masked else e.g.call(Mean((1,)), y, hint="pooled")
    return e.dense(y, "classifier", width, c.labels(), True, "logits", e.outside)


def _frames(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    return _classes(e, _weighted(e, x, c), "classifier", c.labels(), "logits")


def _classes(e: StackEmitter, x: GVar, name: str, out: int, hint: str | None = None) -> GVar:
    return e.dense(x, name, e.stack.hidden, out, True, hint, e.outside)


def _transformed(e: StackEmitter, x: GVar) -> GVar:
    """Emit the dense layer, activation and norm before the classes."""
    names, width = e.stack.outputs.heads, e.stack.hidden
    if not names.dense:
        return x
    y = e.dense(x, names.dense, width, width, names.biased, parameters=e.parameters if names.inner else e.outside)
    y = ACTIVATIONS[names.activation](e.g, y)
    return e.head_normed(y, names.norm, width) if names.norm else y


def _sequence(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    names = e.stack.outputs.heads
    if names.pooled == "late":
        return pooled("mean")(e, _classes(e, _transformed(e, x), names.out, c.labels()))
    first = first_position(e, x) if names.pooled == "cls" else pooled(names.pooled)(e, x)
    return _classes(e, _transformed(e, first), names.out, c.labels(), "logits")


def _positions(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    embedding = e.stack.embedding
    if isinstance(embedding, Words) and embedding.page is not None:
        words = e.g.call(Slice(1, const(0), e.dims[1] - embedding.page.patches.positions), x, hint="words")
        # few classes need no layer before them
        return (
            _classes(e, words, "classifier", c.labels(), "logits") if c.labels() < 10 else _page(e, words, c.labels())
        )
    y = _transformed(e, x) if e.stack.outputs.heads.everywhere else x
    return _classes(e, y, "classifier", c.labels(), "logits")


def _page(e: StackEmitter, x: GVar, out: int, name: str = "classifier") -> GVar:
    """Emit the two layers of a head of LayoutLMv3."""
    y = ACTIVATIONS["tanh"](e.g, _classes(e, x, f"{name}.dense", e.stack.hidden))
    return _classes(e, y, f"{name}.out_proj", out, "logits")


def _answer(e: StackEmitter, x: GVar, c: ConfigFields) -> tuple[GVar, ...]:
    """Emit the logits of the first and of the last position of an answer, (b, n) each."""
    g, names = e.g, e.stack.outputs.heads
    paged = isinstance(e.stack.embedding, Words) and e.stack.embedding.page is not None
    both = (
        _page(e, x, 2, "qa_outputs")
        if paged
        else _classes(e, _transformed(e, x) if names.everywhere else x, names.answer_out, 2)
    )
    ends = enumerate(("start_logits", "end_logits"))
    return tuple(g.call(Reshape(e.dims), g.call(Slice(2, const(k), const(k + 1)), both), hint=hint) for k, hint in ends)


def _words(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the logits of words at each position."""
    return e.word_logits(x, c.truth("tie_word_embeddings", True))


def _vector(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the vector of a text of DPR: its first position, perhaps projected (Karpukhin et al. 2020)."""
    y, width = first_position(e, x), c.data.get("projection_dim", 0)
    if width == 0:
        return y
    encoder = e.parameters.prefix.rpartition("bert_model.")[0]
    out = Parameters(e.parameters.weights, encoder, arrays=e.parameters.arrays)
    return e.dense(y, "encode_proj", e.stack.hidden, c.whole("projection_dim"), parameters=out)


def _last(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    """Emit the classes of a text read by a decoder: of the last token that is no padding."""
    padding = c.data.get("pad_token_id")
    if padding is None:
        marked = visible(e, e.mask)
    else:
        marked = e.g.call(Cast(i64), e.g.call(NotEqual(), e.ids, e.scalar("padding", padding, np.int64)))
    y = selected(e, x, last_of(e, marked))
    shape = c.labels(), e.stack.hidden
    # (out, in) also where other linear layers are stored as (in, out)
    w = e.constant("score.weight", lambda: np.ascontiguousarray(e.outside.get("score.weight", *shape).T))
    return e.g.call(Matmul(), y, w, hint="logits")


def _token_classes(e: StackEmitter, x: GVar, c: ConfigFields) -> GVar:
    return _classes(e, x, "score", c.labels(), "logits")


Head = Callable[[StackEmitter, GVar, ConfigFields], "GVar | tuple[GVar, ...]"]
PROJECTIONS: Mapping[str, Head] = {"ModelWithProjection": projected}
IMAGE_HEADS: Mapping[str, Head] = {
    "ForImageClassification": _image, "ForImageClassificationWithTeacher": _image_with_teacher,
}  # fmt: skip
SPECTROGRAM_HEADS: Mapping[str, Head] = {"ForAudioClassification": _spectrogram}
SPEECH_HEADS: Mapping[str, Head] = {
    "ForCTC": _characters, "ForSequenceClassification": _sound, "ForAudioFrameClassification": _frames,
}  # fmt: skip
VECTORS: Mapping[str, Head] = {"QuestionEncoder": _vector, "ContextEncoder": _vector}
CAUSAL_HEADS: Mapping[str, Head] = {"ForSequenceClassification": _last, "ForTokenClassification": _token_classes}
HEADS: Mapping[str, Head] = {
    "ForMaskedLM": _words, "ForSequenceClassification": _sequence, "ForTokenClassification": _positions,
    "ForQuestionAnswering": _answer,
}  # fmt: skip
