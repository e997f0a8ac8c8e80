"""Activations by the names that configurations give them (`ACT2FN` in transformers).

Tests: `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import AddScalar, Gelu, MaximumScalar, Mul, MulScalar, Relu, Sigmoid, Tanh

Emitted = Callable[[GraphBuilder, GVar], GVar]


def _gelu(g: GraphBuilder, x: GVar) -> GVar:
    return g.call(Gelu(), x)


def _relu2(g: GraphBuilder, x: GVar) -> GVar:
    y = g.call(Relu(), x)
    return g.call(Mul(), y, y)


def _relu6(g: GraphBuilder, x: GVar) -> GVar:
    """Emit `min(max(x, 0), 6)`, the minimum as a maximum of negatives."""
    below = g.call(MaximumScalar(-6.0), g.call(MulScalar(-1.0), g.call(Relu(), x)))
    return g.call(MulScalar(-1.0), below)


def _cubic(g: GraphBuilder, x: GVar) -> GVar:
    factor = g.call(AddScalar(1.0), g.call(MulScalar(0.044715), g.call(Mul(), x, x)))
    return g.call(MulScalar(1.5957691216057308), g.call(Mul(), x, factor))  # 2 * sqrt(2 / pi)


def _gated(inner: Emitted) -> Emitted:
    """Return the activation `x * sigmoid(inner(x))`."""
    return lambda g, x: g.call(Mul(), x, g.call(Sigmoid(), inner(g, x)))


# 0.5 * (1 + tanh(y)) is sigmoid(2 y), so GELU's tanh form is gated too: the constant of `_cubic` has the factor 2.
_silu, _tanh_gelu = _gated(lambda g, x: x), _gated(_cubic)
ACTIVATIONS: Mapping[str, Emitted] = {
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_python_tanh": _tanh_gelu,
    "quick_gelu": _gated(lambda g, x: g.call(MulScalar(1.702), x)),
    "relu": lambda g, x: g.call(Relu(), x),
    "relu2": _relu2,
    "relu6": _relu6,
    "sigmoid": lambda g, x: g.call(Sigmoid(), x),
    "silu": _silu,
    "swish": _silu,
    "tanh": lambda g, x: g.call(Tanh(), x),
}
