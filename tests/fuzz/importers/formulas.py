"""Operators without an oracle: those of com.microsoft that ONNX Runtime has no kernel for on processors, in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator

MICROSOFT = "com.microsoft"
Array = np.ndarray[Any, Any]
Arguments = Sequence["Array | None"]
Attributes = Mapping[str, Any]


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _bias_add(a: Arguments, more: Attributes) -> list[Array]:
    x, bias, skip = (wide(v) for v in a[:3])
    return [x + bias + skip]


def _bias_split_gelu(a: Arguments, more: Attributes) -> list[Array]:
    left, right = np.split(wide(a[0]) + wide(a[1]), 2, axis=-1)
    return [left * _gelu(right)]


def _bias_softmax(a: Arguments, more: Attributes) -> list[Array]:
    x, bias = wide(a[0]), wide(a[1])
    axis = more.get("axis", 1) % x.ndim
    rows = (x + bias).reshape(*x.shape[:axis], -1)
    return [_softmax(rows).reshape(x.shape)]


def _nhwc_conv(a: Arguments, more: Attributes) -> list[Array]:
    """Convolve (n, h, w, c) with weights (m, kh, kw, c) by the standard's reference."""
    return _convolved(a, more, np.moveaxis(wide(a[1]), -1, 1))


def _nhwc_fused_conv(a: Arguments, more: Attributes) -> list[Array]:
    """Convolve (n, h, w, c) with weights (m, c, kh, kw), plus a summand, through Relu or nothing."""
    (y,) = _convolved(a, more, wide(a[1]))
    y = y if a[3] is None else y + wide(a[3])
    return [np.maximum(y, 0) if more.get("activation") == b"Relu" else y]


def _convolved(a: Arguments, more: Attributes, weights: Array) -> list[Array]:
    attributes = {name: value for name, value in more.items() if not name.startswith("activation")}
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    (y,) = ReferenceEvaluator(node).run(None, {"x": np.moveaxis(wide(a[0]), -1, 1), "w": weights})
    y = np.moveaxis(y, 1, -1)
    return [y if a[2] is None else y + wide(a[2])]


def _group_norm(a: Arguments, more: Attributes) -> list[Array]:
    x = wide(a[0])
    x = x if more.get("channels_last", 1) else np.moveaxis(x, 1, -1)
    n, c, groups = x.shape[0], x.shape[-1], more["groups"]
    v = x.reshape(n, -1, groups, c // groups)
    centred = v - v.mean((1, 3), keepdims=True)
    normed = centred / np.sqrt((centred**2).mean((1, 3), keepdims=True) + more.get("epsilon", 1e-5))
    y = normed.reshape(x.shape) * wide(a[1]) + wide(a[2])
    y = y / (1 + np.exp(-y)) if more["activation"] else y
    return [y if more.get("channels_last", 1) else np.moveaxis(y, -1, 1)]


def _skip_group_norm(a: Arguments, more: Attributes) -> list[Array]:
    x, skip = wide(a[0]), wide(a[3])
    total = x + (skip.reshape(len(skip), 1, 1, -1) if skip.ndim == 2 else skip)
    total = total if a[4] is None else total + wide(a[4])
    return [*_group_norm([total, *a[1:3]], more), total]


def _rms_norm(a: Arguments, more: Attributes) -> list[Array]:
    x, axis = wide(a[0]), more.get("axis", -1)
    axes = tuple(range(axis % x.ndim, x.ndim))
    return [x / np.sqrt((x * x).mean(axes, keepdims=True) + more.get("epsilon", 1e-5)) * wide(a[1])]


def _mean(a: Arguments, more: Attributes) -> list[Array]:
    """Compute QLinearReduceMean, whose result has the type of its input."""
    x, zero, after = a[0], a[2], a[4]
    assert x is not None
    numbers = (x.astype(float) - (0 if zero is None else zero)) * wide(a[1])
    mean = numbers.mean(tuple(more["axes"]), keepdims=bool(more.get("keepdims", 1)))
    info = np.iinfo(x.dtype)
    steps = np.rint(mean / wide(a[3])) + (0 if after is None else after)
    return [np.clip(steps, info.min, info.max).astype(x.dtype)]


def _where(a: Arguments, more: Attributes) -> list[Array]:
    """Compute QLinearWhere, whose kernel reads scales and zero points that are constants only."""
    condition, x, y, after = a[0], a[1], a[4], a[8]
    assert condition is not None and x is not None and y is not None and after is not None
    sides = [(wide(v) - wide(zero)) * wide(scale) for v, scale, zero in ((x, a[2], a[3]), (y, a[5], a[6]))]
    info = np.iinfo(x.dtype)
    steps = np.rint(np.where(condition, *sides) / wide(a[7])) + after
    return [np.clip(steps, info.min, info.max).astype(x.dtype)]


def _remove_padding(a: Arguments, more: Attributes) -> list[Array]:
    x, lengths = a[:2]
    assert x is not None and lengths is not None
    b, n = x.shape[:2]
    inside = (np.arange(n) < lengths[:, None]).reshape(-1)
    places = np.concatenate([inside.nonzero()[0], (~inside).nonzero()[0]]).astype(np.int32).reshape(b, n)
    sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return [x.reshape(b * n, -1)[inside], places, sums, lengths.max(keepdims=True)]


def _restore_padding(a: Arguments, more: Attributes) -> list[Array]:
    x, places = a[:2]
    assert x is not None and places is not None
    y = np.zeros((places.size, x.shape[1]), x.dtype)
    y[places.reshape(-1)[: len(x)]] = x
    return [y.reshape(*places.shape, -1)]


def _by_rows(q: Array, k: Array, v: Array, sums: Array, bias: Array | None, scale: float | None) -> Array:
    """Return the attention of (tokens, heads, size) within each row of tokens, (tokens, heads * size)."""
    parts = []
    for row, (first, end) in enumerate(zip(sums[:-1], sums[1:], strict=True)):
        scores = np.einsum("ihd,jhd->hij", q[first:end], k[first:end]) * (scale or 1 / math.sqrt(q.shape[2]))
        if bias is not None:
            scores = scores + wide(bias)[row, :, : end - first, : end - first]
        parts.append(np.einsum("hij,jhd->ihd", _softmax(scores), v[first:end]).reshape(end - first, -1))
    return np.concatenate(parts)


def _packed_attention(a: Arguments, more: Attributes) -> list[Array]:
    sums, bias = a[4], a[5]
    assert sums is not None
    projected = wide(a[0]) @ wide(a[1]) + wide(a[2])
    q, k, v = (t.reshape(len(t), more["num_heads"], -1) for t in np.split(projected, 3, axis=1))
    return [_by_rows(q, k, v, sums, bias, more.get("scale"))]


def _packed_multi_head(a: Arguments, more: Attributes) -> list[Array]:
    first, sums, bias, heads = wide(a[0]), a[5], a[6], more["num_heads"]
    assert sums is not None
    if first.ndim == 4:
        q, k, v = (first[:, :, p] for p in range(3))
    else:
        q, k, v = (wide(t).reshape(len(first), heads, -1) for t in a[:3])
    if a[3] is not None:
        q, k, v = (t + s.reshape(heads, -1) for t, s in zip((q, k, v), np.split(wide(a[3]), 3), strict=True))
    return [_by_rows(q, k, v, sums, bias, more.get("scale"))]


def wide(a: Array | None) -> Array:
    assert a is not None
    return a.astype(np.float64)


FORMULAS: Mapping[str, Callable[[Arguments, Attributes], list[Array]]] = {
    "BiasAdd": _bias_add, "BiasSplitGelu": _bias_split_gelu, "BiasSoftmax": _bias_softmax, "NhwcConv": _nhwc_conv,
    "NhwcFusedConv": _nhwc_fused_conv,
    "GroupNorm": _group_norm, "SkipGroupNorm": _skip_group_norm, "QLinearReduceMean": _mean,
    "QLinearWhere": _where, "RemovePadding": _remove_padding,
    "RestorePadding": _restore_padding, "SimplifiedLayerNormalization": _rms_norm,
    "PackedAttention": _packed_attention, "PackedMultiHeadAttention": _packed_multi_head,
}  # fmt: skip
MOST_INPUTS = 9


def has_formula(node: Any) -> bool:
    return (node.domain == MICROSOFT and node.op_type in FORMULAS) or node.op_type == "OptionalGetElement"


def by_formula(node: Any, given: Mapping[str, Any]) -> list[Any]:
    """Evaluate a node. Results of floats have the type of its first input."""
    arguments = [given[name] if name else None for name in node.input]
    if node.op_type == "OptionalGetElement":  # `onnx.reference` has an optional as a list of one
        return [arguments[0][0] if isinstance(arguments[0], list) else arguments[0]]
    kind = arguments[0].dtype
    more = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    with np.errstate(all="ignore"):
        results = FORMULAS[node.op_type]([*arguments, *[None] * (MOST_INPUTS - len(arguments))], more)
        results = [r.astype(kind) if r.dtype.kind == "f" else r for r in results]
    return [r if name else None for r, name in zip(results, node.output, strict=False)]
