"""Emission of the parts of layers: constants, linear layers, norms, feed-forward blocks.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`, `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import Constant, GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters, Projection
from relax_tune.ir.frontend.hf.transformer.rope import Rope
from relax_tune.ir.frontend.hf.transformer.spec import Norm, Stack
from relax_tune.ir.op.math.elementwise import Add, Mul, MulScalar, Relu, Sqrt, Sub
from relax_tune.ir.op.neural.decoder import RmsNorm
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Mean

START: Expr = const(0)  # number of cached positions of a first call


class Blocks:
    """Emitter of the parts of one stack into one graph.

    Attributes:
        dims: number of rows and of new positions, (b, n)
        past: number of cached positions before the new ones
        outside: parameters of heads
    """

    dims: tuple[Expr, Expr]

    def __init__(self, stack: Stack, parameters: Parameters, g: GraphBuilder, past: Expr = START) -> None:
        self.stack, self.parameters, self.g, self.past = stack, parameters, g, past
        self.outside = parameters.outside()
        self._constants: dict[str, Constant] = {}

    def constant(self, name: str, make: Callable[[], NDArray[Any]]) -> Constant:
        """Return a constant by its full name, added on first use."""
        if name not in self._constants:
            self._constants[name] = self.g.constant(name, self.parameters.array(name, make))
        return self._constants[name]

    def scalar(self, name: str, value: float, dtype: type = np.float32) -> Constant:
        return self.constant(name, lambda: np.asarray(value, dtype))

    def filled(self, value: float, width: int) -> Constant:
        return self.constant(f"filled.{value:g}.{width}", lambda: np.full(width, value, np.float32))

    def weight(self, name: str, *shape: int) -> Constant:
        """Return a tensor as it is stored."""
        return self.constant(self.parameters.full(name), lambda: self.parameters.get(name, *shape))

    def linear(
        self,
        x: GVar,
        at: Projection,
        width: int,
        biased: bool = True,
        hint: str | None = None,
        parameters: Parameters | None = None,
    ) -> GVar:
        """Emit `x @ W.T + bias`. Most files hold W as (out, in), the graph as (in, out). width: of x"""
        p, g, turned = parameters or self.parameters, self.g, self.stack.input_major

        def matrix() -> NDArray[Any]:
            w = p.get(f"{at.name}.weight", *((width, at.stored) if turned else (at.stored, width)))
            return np.ascontiguousarray(at.select(w.T if turned else w).T)

        def bias() -> NDArray[Any]:
            if at.bias:
                return p.get(at.bias, at.width)
            return np.ascontiguousarray(at.select(p.get(f"{at.name}.bias", at.stored)))

        # Transposed once at import. `constant` shares the array between functions, which `prefill` and `decode` rely
        # on.
        w = self.constant(f"{p.full(at.label)}.weight", matrix)
        if not biased:
            return g.call(Matmul(), x, w, hint=hint)
        return g.call(Add(), g.call(Matmul(), x, w), self.constant(f"{p.full(at.label)}.bias", bias), hint=hint)

    def dense(
        self,
        x: GVar,
        name: str,
        width: int,
        out: int,
        biased: bool = True,
        hint: str | None = None,
        parameters: Parameters | None = None,
    ) -> GVar:
        """Emit the linear layer `name` from `width` to `out`."""
        return self.linear(x, Projection(name, out), width, biased, hint, parameters)

    def norm(
        self,
        x: GVar,
        name: str,
        width: int | None = None,
        norm: Norm | None = None,
        rope: Rope | None = None,
        parameters: Parameters | None = None,
    ) -> GVar:
        """Emit a norm of rows. rope: rotation that reorders the dims of heads in `x`"""
        g, p, width, norm = self.g, parameters or self.parameters, width or self.stack.hidden, norm or self.stack.norm

        # Some families store the weight less 1 (Gemma): the offset adds it back.
        def vector(part: str, offset: float = 0.0) -> Constant:
            def make() -> NDArray[Any]:
                stored = p.get(f"{name}.{part}", width)
                return self.turned(stored + np.float32(offset) if offset else stored, rope)

            return self.constant(p.full(f"{name}.{part}"), make)

        gamma = vector("weight", norm.offset) if norm.weight else self.filled(1.0, width)
        if norm.kind == "rms":
            return g.call(RmsNorm(norm.eps), x, gamma)
        beta = vector("bias") if norm.bias else self.filled(0.0, width)
        if norm.kind == "affine":
            return g.call(Add(), g.call(Mul(), x, gamma), beta)
        return g.call(LayerNorm(norm.eps), x, gamma, beta)

    def turned(self, stored: NDArray[Any], rope: Rope | None) -> NDArray[Any]:
        """Return weights of heads with their dims in the order of a rotation."""
        size = self.stack.size
        if rope is None or not rope.reorders(size):
            return stored
        return np.ascontiguousarray(stored.reshape(-1, size)[:, rope.order(size)].reshape(stored.shape))

    def activation(self, x: GVar) -> GVar:
        return ACTIVATIONS[self.stack.activation](self.g, x)

    def feed_forward(self, x: GVar, path: str, sparsity: float | None = None) -> GVar:
        """Emit the feed-forward block below `path`. sparsity: see `TransformerLayer`"""
        s, names = self.stack, self.stack.names
        up, down = Projection(f"{path}.{names.up}", s.inner), Projection(f"{path}.{names.down}", s.width)
        if names.gate_up is not None:
            return self.gated(x, *joint_projections(f"{path}.{names.gate_up}", s.inner), down, s.biases.mlp)
        if names.up_gate is not None:
            gate, up = joint_projections(f"{path}.{names.up_gate}", s.inner, gate_first=False)
            return self.gated(x, gate, up, down, s.biases.mlp)
        if names.gate is not None:
            return self.gated(x, Projection(f"{path}.{names.gate}", s.inner), up, down, s.biases.mlp, sparsity)
        y = self.activation(self.linear(x, up, s.width, s.biases.mlp))
        return self.linear(y, down, s.inner, s.biases.mlp)

    def gated(
        self, x: GVar, gate: Projection, up: Projection, down: Projection, biased: bool, sparsity: float | None = None
    ) -> GVar:
        """Emit a gated feed-forward block (Shazeer 2020)."""
        before, after = self.stack.mlp_scales
        factor = self.scaled(self.linear(x, gate, self.stack.width, biased), before)
        factor = self.activation(factor if sparsity is None else self.sparse(factor, sparsity))
        y = self.g.call(Mul(), self.linear(x, up, self.stack.width, biased), factor)
        return self.scaled(self.linear(y, down, gate.width, biased), after)

    def sparse(self, x: GVar, multiple: float) -> GVar:
        """Emit by how much each element exceeds the mean of its row and `multiple` standard deviations, at least 0."""
        g = self.g
        mean = g.call(Mean((2,), True), x)
        centred = g.call(Sub(), x, mean)
        deviation = g.call(Sqrt(), g.call(Mean((2,), True), g.call(Mul(), centred, centred)))
        limit = g.call(Add(), mean, g.call(MulScalar(multiple), deviation))
        return g.call(Relu(), g.call(Sub(), x, limit), hint="sparse")

    def scaled(self, x: GVar, factor: float) -> GVar:
        return x if factor == 1 else self.g.call(MulScalar(factor), x)


def joint_projections(name: str, inner: int, gate_first: bool = True) -> tuple[Projection, Projection]:
    """Return the gate and the up projection of a joint one."""
    halves = slice(0, inner), slice(inner, 2 * inner)
    gate, up = halves if gate_first else halves[::-1]
    return (
        Projection(name, 2 * inner, "gate", inner, lambda: gate),
        Projection(name, 2 * inner, "up", inner, lambda: up),
    )
