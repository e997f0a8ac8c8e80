"""Parts that layers of decoders are made of: norms, linear layers, activations, feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.graph import Constant, GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.decoders.parameters import Parameters, Projection
from relax_tune.ir.frontend.hf.decoders.rope import Rope
from relax_tune.ir.frontend.hf.decoders.spec import DecoderSpec, Norm
from relax_tune.ir.op.math.elementwise import Add, Mul, MulScalar, Tanh
from relax_tune.ir.op.neural.decoder import RmsNorm
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm


class Blocks:
    """Builder of the parts of one graph, of `batch` rows with `length` positions."""

    def __init__(self, spec: DecoderSpec, parameters: Parameters, g: GraphBuilder, batch: Expr, length: Expr) -> None:
        self.spec, self.parameters, self.g = spec, parameters, g
        self.batch, self.length = batch, length
        self._shared: dict[str, Constant] = {}

    def weight(self, name: str, *shape: int) -> Constant:
        return self.g.constant(name, self.parameters.stored(name, *shape))

    def once(self, name: str, make: Callable[[], NDArray[Any]]) -> Constant:
        """Return a constant that several parts share."""
        if name not in self._shared:
            self._shared[name] = self.g.constant(name, self.parameters.array(name, make))
        return self._shared[name]

    def scalar(self, name: str, value: float) -> Constant:
        return self.once(name, lambda: np.asarray(value, np.float32))

    def filled(self, value: float, width: int) -> Constant:
        return self.once(f"filled.{value:g}.{width}", lambda: np.full(width, value, np.float32))

    def linear(self, x: GVar, at: Projection, width: int, biased: bool, hint: str | None = None) -> GVar:
        """Return `x @ W.T + bias`."""
        y = self.g.call(Matmul(), x, self.g.constant(*self.parameters.matrix(at, width)), hint=hint)
        return self.g.call(Add(), y, self.g.constant(*self.parameters.bias(at))) if biased else y

    def norm(self, x: GVar, name: str, width: int, norm: Norm, rope: Rope | None = None) -> GVar:
        """Return normalised rows. rope: rotation of the heads, whose dims may have another order than in the file"""

        def vector(part: str, offset: float) -> Constant:
            full, stored = f"{name}.{part}", self.parameters.weights

            def make() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
                found = stored.get(full, (width,))
                found = found + np.float32(offset) if offset else found
                return found if rope is None else self.turned(found, rope)

            return self.g.constant(full, self.parameters.array(full, make))

        gamma = vector("weight", norm.offset) if norm.weight else self.filled(1.0, width)
        if norm.kind == "rms":
            return self.g.call(RmsNorm(norm.eps), x, gamma)
        beta = vector("bias", 0.0) if norm.bias else self.filled(0.0, width)
        return self.g.call(LayerNorm(norm.eps), x, gamma, beta)

    def turned(self, found: NDArray[Any], rope: Rope | None) -> NDArray[Any]:
        """Return the weights of heads with their dims in the order of a rotation."""
        size = self.spec.size
        if rope is None or not rope.reorders(size):
            return found
        return np.ascontiguousarray(found.reshape(-1, size)[:, rope.order(size)].reshape(found.shape))

    def activation(self, x: GVar) -> GVar:
        """Return the activation of the feed-forward block."""
        return ACTIVATIONS[self.spec.activation](self.g, x)

    def feed_forward(self, x: GVar, layer: str, inner: int) -> GVar:
        """Return the feed-forward block of a layer, gated where its names have a gate."""
        c, names = self.spec, self.spec.names
        if names.gate_up is not None:
            full = f"{layer}.{names.gate_up}"
            gate = Projection(full, 2 * inner, "gate", inner, lambda: slice(0, inner))
            up = Projection(full, 2 * inner, "up", inner, lambda: slice(inner, 2 * inner))
            return self.gated(x, gate, up, Projection(f"{layer}.{names.down}", c.hidden), c.biases.mlp)
        up, down = Projection(f"{layer}.{names.up}", inner), Projection(f"{layer}.{names.down}", c.hidden)
        if names.gate is not None:
            return self.gated(x, Projection(f"{layer}.{names.gate}", inner), up, down, c.biases.mlp)
        y = self.activation(self.linear(x, up, c.hidden, c.biases.mlp))
        return self.linear(y, down, inner, c.biases.mlp)

    def gated(self, x: GVar, gate: Projection, up: Projection, down: Projection, biased: bool) -> GVar:
        """Return a gated feed-forward block (Shazeer 2020)."""
        c = self.spec
        one = self.activation(self.linear(x, gate, c.hidden, biased))
        y = self.g.call(Mul(), self.linear(x, up, c.hidden, biased), one)
        return self.linear(y, down, gate.width, biased)

    def capped(self, x: GVar, cap: float, hint: str) -> GVar:
        """Return `cap * tanh(x / cap)`."""
        return self.g.call(MulScalar(cap), self.g.call(Tanh(), self.g.call(MulScalar(1 / cap), x)), hint=hint)
