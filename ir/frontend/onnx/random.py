"""ONNX random numbers, the same at every call: a counter and the seed of the node, or its place in the program, decide them."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i32, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.frontend.onnx.math import literal_of
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers import random as random_numbers
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer


def key_of(w: Writer, node: OnnxNode) -> random_numbers.Key:
    """Return the key of a node, by its seed if it has one."""
    seed = node.attributes.get("seed")
    return random_numbers.key_of(w, None if seed is None else float(seed))


def _element(node: OnnxNode, default: DType) -> DType:
    return node.element("dtype", default)


def _floats(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import RandomNormal, RandomUniform and their forms that take the shape of a tensor."""
    like = node.op.endswith("Like")
    element = _element(node, node.item(0).dtype if like else f32)
    shape: list[Expr] = list(node.item(0).shape) if like else [const(int(d)) for d in node.attributes["shape"]]
    if element not in random_numbers.PRECISION:
        raise node.refuse(f"expected random floats of 16 to 64 bits, got {element}; state them as dtype, and cast them")
    key = key_of(w, node)
    if "Normal" in node.op:
        mean, scale = (node.real(n, v) for n, v in (("mean", 0.0), ("scale", 1.0)))
        return w.of(random_numbers.normal(w, shape, key, element, mean, scale))
    low, high = (node.real(n, v) for n, v in (("low", 0.0), ("high", 1.0)))
    return w.of(random_numbers.uniform(w, shape, key, element, low, high))


def _bernoulli(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Bernoulli: 1 with the probability in the input. The function body of the standard has the opposite probability."""
    x = node.item(0)
    element = _element(node, x.dtype)
    return w.of(w.cast(random_numbers.drawn_true(w, x, key_of(w, node)), element), element.is_int)


def _multinomial(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import Multinomial: classes of each row by their logarithmic weights."""
    x, element = node.item(0), _element(node, i32)
    count = node.integer("sample_size", 1)
    if x.ndim != 2 or count < 1 or element not in (i32, i64):
        raise node.refuse(
            f"expected (rows, classes), samples of at least 1, int32 or int64, got {x.info!r}, {count}, {element}"
        )
    work = f64 if x.dtype is f64 else f32
    value = w.cast(w.tensor(x), work)
    # Only quotients of the weights count; less the largest one, no exponential overflows.
    weights = w.exp(w.sub(value, w.max(value, (1,), True)))
    drawn = random_numbers.classes(w, weights, const(count), key_of(w, node))
    return w.of(w.cast(drawn, element), True)


def _dropout(w: Writer, node: OnnxNode) -> list[ImportedValue | None]:
    """Import Dropout: the input at inference; in training each element is dropped with the chance `ratio`, the others scaled."""
    x = node.item(0)
    mode = w.scalars(node.item(2)) if node.has(2) else None
    ratio = literal_of(node.item(1)) if node.has(1) else 0.5
    if not node.has(2) or ratio == 0 or (mode is not None and mode.reshape(-1)[0].value == 0):
        if (node.version or 0) < 10 and node.is_read(1):
            raise node.refuse("expected no mask, which has no values in inference before opset 10, got one")
        return [x, w.of(w.full(x.shape, True, bool_)) if node.is_read(1) else None]
    if mode is None:
        raise node.refuse("expected training_mode as a constant, got it computed from tensors; export one mode")
    if ratio is None or not 0 <= ratio < 1:
        raise node.refuse(f"expected a constant ratio from 0 to below 1 in training, got {node.item(1).info!r}")
    mask, y = random_numbers.dropped(w, x, float(ratio), key_of(w, node))
    return [w.of(y), w.of(mask)]


HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _floats),
    "Bernoulli": _bernoulli, "Multinomial": _multinomial, "Dropout": _dropout,
}  # fmt: skip
