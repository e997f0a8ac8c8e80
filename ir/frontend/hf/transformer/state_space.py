"""Emission of state space layers (Dao and Gu 2024, Mamba-2).

A prompt is computed in the quadratic form of section 5 of the paper, as attention whose weights decay with the distance: products of
(n, n) matrices without a loop over positions, whose work and memory grow with the square of the prompt's length. A further token
updates the state.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import add, as_int, const, sub
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.blocks import Blocks
from relax_tune.ir.frontend.hf.transformer.mixers import DeltaRule, StateSpace
from relax_tune.ir.frontend.hf.transformer.spec import Norm
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, Exp, Mul, MulScalar, Relu, Sub
from relax_tune.ir.op.math.logic import LessEqual, Where
from relax_tune.ir.op.math.numeric import Abs, Atanh
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.scan import CumSum

States = tuple[GVar, GVar]
"""Last inputs of a layer's convolution (b, channels, kernel - 1), and its state (b, heads, size, state)."""


def state_space(e: Blocks, x: GVar, m: StateSpace, path: str, before: tuple[GVar, ...] | None) -> tuple[GVar, States]:
    """Emit a layer of x (b, n, hidden), and the states after it. before: those before one new token; None: zeros"""
    g, (batch, length) = e.g, e.dims
    name, width, channels = f"{path}.{m.name}", m.heads * m.size, m.heads * m.size + 2 * m.groups * m.state
    gate = _projected(e, x, m, name, "gate", 0, width)
    mixed = g.call(Permute((0, 2, 1)), _projected(e, x, m, name, "mixed", width, width + channels))
    steps = _projected(e, x, m, name, "step", width + channels, width + channels + m.heads)
    y, last = convolved(e, mixed, name, m.kernel, m.conv_biased, None if before is None else before[0])
    inputs = heads(e, y, 0, m.heads, m.size)
    keys, queries = (shared(e, heads(e, y, at, m.groups, m.state), m) for at in (width, width + m.groups * m.state))
    bias = e.weight(f"{name}.dt_bias", m.heads)
    steps = g.call(Permute((0, 2, 1)), softplus(e, g.call(Add(), steps, bias)), hint="steps")
    rate = e.constant(
        f"{e.parameters.full(name)}.rate", lambda: -np.exp(e.parameters.get(f"{name}.A_log", m.heads))[:, None]
    )
    decay = g.call(Mul(), steps, rate, hint="decay")
    if before is None:
        z, state = _prompt(e, inputs, keys, queries, steps, decay)
    else:
        z, state = _token(e, inputs, keys, queries, steps, decay, before[1])
    skip = e.constant(f"{e.parameters.full(name)}.skip", lambda: e.parameters.get(f"{name}.D", m.heads)[:, None, None])
    z = g.call(Add(), z, g.call(Mul(), inputs, skip))
    z = g.call(Reshape((batch, length, const(width))), g.call(Permute((0, 2, 1, 3)), z))
    z = _gated(e, z, gate, m, name)
    return e.dense(z, f"{name}.out_proj", width, e.stack.hidden, m.biased), (last, state)


def convolved(e: Blocks, mixed: GVar, name: str, kernel: int, biased: bool, before: GVar | None) -> tuple[GVar, GVar]:
    """Emit the convolution of channels (b, channels, n) over positions and its activation; and its last inputs, for the next token.

    Args:
        before: last inputs before one new token; None: zeros
    """
    g, length = e.g, e.dims[1]
    assert isinstance(mixed.info, TensorInfo) and mixed.info.shape is not None
    channels = as_int(mixed.info.shape[1])
    assert channels is not None
    if before is None:
        none, lead = const(0), const(kernel - 1)
        wide = g.call(Pad((none, none, lead), (none, none, none)), mixed)
    else:
        wide = g.call(Concat(2), before, mixed)
    # Of the padded inputs, so that prompts shorter than the kernel keep zeros in front.
    last = g.call(Slice(2, length, add(length, const(kernel - 1))), wide, hint="last_inputs")
    y = g.call(Conv((1,), (1,), channels), wide, e.weight(f"{name}.conv1d.weight", channels, 1, kernel))
    if biased:
        shift = e.constant(
            f"{e.parameters.full(name)}.conv1d.column",
            lambda: e.parameters.get(f"{name}.conv1d.bias", channels)[:, None],
        )
        y = g.call(Add(), y, shift)
    return ACTIVATIONS["silu"](g, y), last


def heads(e: Blocks, channels: GVar, start: int, count: int, size: int) -> GVar:
    """Take channels (b, channels, n) as (b, count, n, size)."""
    g, (batch, length) = e.g, e.dims
    part = g.call(Slice(1, const(start), const(start + count * size)), channels)
    return g.call(Permute((0, 1, 3, 2)), g.call(Reshape((batch, const(count), const(size), length)), part))


def decays(e: Blocks, decay: GVar) -> tuple[GVar, GVar, GVar]:
    """Emit the decay (b, heads, n, n) from each position to each later one, 0 to earlier ones; from each to the last; positions."""
    g, length = e.g, e.dims[1]
    total = g.call(CumSum(2), decay, hint="total_decay")
    difference = g.call(Sub(), g.call(ExpandDims((3,)), total), g.call(ExpandDims((2,)), total))
    at = g.call(Iota(length), hint="position")
    earlier = g.call(LessEqual(), g.call(ExpandDims((0,)), at), g.call(ExpandDims((1,)), at))
    # Hidden before the exponential: differences towards earlier positions are positive and could overflow.
    weights = g.call(Exp(), g.call(Where(), earlier, difference, e.scalar("no_state", -np.inf)))
    end = g.call(Slice(2, sub(length, const(1)), length), total)
    return weights, g.call(Exp(), g.call(Sub(), end, total)), at


def softplus(e: Blocks, x: GVar) -> GVar:
    """Emit log(1 + exp(x)), exact for small results too: log(1 + t) is 2 atanh(t / (2 + t))."""
    g = e.g
    t = g.call(Exp(), g.call(MulScalar(-1.0), g.call(Abs(), x)))
    logarithm = g.call(MulScalar(2.0), g.call(Atanh(), g.call(Div(), t, g.call(AddScalar(2.0), t))))
    return g.call(Add(), g.call(Relu(), x), logarithm)


def _projected(e: Blocks, x: GVar, m: StateSpace, name: str, part: str, start: int, end: int) -> GVar:
    """Emit rows `start` to `end` of the input projection."""
    width, p = m.heads * m.size, e.parameters
    sizes = (width, width, m.groups * m.state, m.groups * m.state, m.heads)
    factors = np.repeat(np.asarray(m.factors, np.float32), sizes)[start:end]

    def matrix() -> NDArray[Any]:
        stored = p.get(f"{name}.in_proj.weight", sum(sizes), e.stack.hidden)[start:end]
        return np.ascontiguousarray((stored * factors[:, None] * np.float32(m.input_scale)).T)

    label = f"{p.full(name)}.in_proj.{part}"
    y = e.g.call(Matmul(), x, e.constant(f"{label}.weight", matrix))
    if not m.biased:
        return y
    bias = lambda: p.get(f"{name}.in_proj.bias", sum(sizes))[start:end] * factors
    return e.g.call(Add(), y, e.constant(f"{label}.bias", bias))


def shared(e: Blocks, x: GVar, m: StateSpace | DeltaRule) -> GVar:
    """Repeat the keys or queries (b, groups, n, state) of a group for its heads; one group broadcasts."""
    if m.groups in (1, m.heads):
        return x
    (batch, length), each = e.dims, m.heads // m.groups
    wide = e.g.call(
        BroadcastTo((batch, const(m.groups), const(each), length, const(m.state))), e.g.call(ExpandDims((2,)), x)
    )
    return e.g.call(Reshape((batch, const(m.heads), length, const(m.state))), wide)


def _prompt(e: Blocks, inputs: GVar, keys: GVar, queries: GVar, steps: GVar, decay: GVar) -> tuple[GVar, GVar]:
    """Emit the results (b, heads, n, size) of a prompt, and the state behind it."""
    g = e.g
    weights, to_last, _ = decays(e, decay)
    weights = g.call(Mul(), weights, g.call(Matmul(transpose_b=True), queries, keys))
    weights = g.call(Mul(), weights, g.call(ExpandDims((2,)), steps), hint="weights")
    result = g.call(Matmul(), weights, inputs)
    rest = g.call(Mul(), to_last, steps)
    scaled = g.call(Permute((0, 1, 3, 2)), g.call(Mul(), inputs, g.call(ExpandDims((3,)), rest)))
    return result, g.call(Matmul(), scaled, keys, hint="state")


def _token(
    e: Blocks, inputs: GVar, keys: GVar, queries: GVar, steps: GVar, decay: GVar, state: GVar
) -> tuple[GVar, GVar]:
    """Emit the result (b, heads, 1, size) of one token behind a state, and the next state."""
    g = e.g
    decayed = g.call(Mul(), state, g.call(ExpandDims((3,)), g.call(Exp(), decay)))
    scaled = g.call(Mul(), g.call(Permute((0, 1, 3, 2)), inputs), g.call(ExpandDims((3,)), steps))
    state = g.call(Add(), decayed, g.call(Mul(), scaled, keys), hint="state")
    return g.call(Permute((0, 1, 3, 2)), g.call(Matmul(transpose_b=True), state, queries)), state


def _gated(e: Blocks, x: GVar, gate: GVar, m: StateSpace, name: str) -> GVar:
    """Emit the gate and the norm of groups of channels."""
    g, width = e.g, m.heads * m.size
    factor = ACTIVATIONS["silu"](g, gate)
    if m.norm == "none":
        return g.call(Mul(), x, factor)
    y = x if m.norm == "before_gate" else g.call(Mul(), x, factor)
    size = width // m.groups
    # The norm sees the channels of one group at a time; its weights span all of them.
    y = g.call(Reshape((*e.dims, const(m.groups), const(size))), y)
    y = e.norm(y, "", size, Norm(e.stack.norm.eps, weight=False))
    y = g.call(Mul(), g.call(Reshape((*e.dims, const(width))), y), e.weight(f"{name}.norm.weight", width))
    return g.call(Mul(), y, factor) if m.norm == "before_gate" else y
