"""Emission of linear attention by the gated delta rule (Yang et al. 2024, Gated DeltaNet).

A position writes `beta * (v - S k)` along its key into the decayed state S. What all positions of a prompt write
solves a triangular system. Its inverse is computed by blocks of twice the size in each step, in products of (n, n) matrices without a
loop over positions: the work grows with the cube of the prompt's length. A further token updates the state.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.transformer.attention import AttentionBlocks
from relax_tune.ir.frontend.hf.transformer.mixers import DeltaRule
from relax_tune.ir.frontend.hf.transformer.parameters import Projection
from relax_tune.ir.frontend.hf.transformer.spec import Norm
from relax_tune.ir.frontend.hf.transformer.state_space import States, convolved, decays, heads, shared, softplus
from relax_tune.ir.op.indexing.movement import ExpandDims, Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Exp, Mul, MulScalar, Rsqrt, Sigmoid, Sub
from relax_tune.ir.op.math.logic import Less, LessEqual, LogicalAnd, Where
from relax_tune.ir.op.math.numeric import Quotient
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum

LENGTH_EPS = 1e-6
"""Added to the square of the length of queries and keys."""


def delta_rule(
    e: AttentionBlocks, x: GVar, m: DeltaRule, path: str, before: tuple[GVar, ...] | None
) -> tuple[GVar, States]:
    """Emit a layer of x (b, n, hidden), and the states after it. before: those before one new token; None: zeros"""
    g, (batch, length), name = e.g, e.dims, f"{path}.{m.name}"
    keys_end = 2 * m.groups * m.state
    mixed = g.call(Permute((0, 2, 1)), _projected(e, x, m, name, "mixed"))
    y, last = convolved(e, mixed, name, m.kernel, False, None if before is None else before[0])
    q, k = (_unit(e, heads(e, y, at, m.groups, m.state)) for at in (0, m.groups * m.state))
    q, k = shared(e, g.call(MulScalar(m.state**-0.5), q), m), shared(e, k, m)
    v = heads(e, y, keys_end, m.heads, m.size)
    beta = g.call(Permute((0, 2, 1)), g.call(Sigmoid(), _projected(e, x, m, name, "beta")), hint="beta")
    steps = g.call(Add(), _projected(e, x, m, name, "step"), e.weight(f"{name}.dt_bias", m.heads))
    rate = e.constant(
        f"{e.parameters.full(name)}.rate", lambda: -np.exp(e.parameters.get(f"{name}.A_log", m.heads))[:, None]
    )
    decay = g.call(Mul(), g.call(Permute((0, 2, 1)), softplus(e, steps)), rate, hint="decay")
    if before is None:
        z, state = _prompt(e, q, k, v, beta, decay)
    else:
        z, state = _token(e, q, k, v, beta, decay, before[1])
    z = e.norm(g.call(Permute((0, 2, 1, 3)), z), f"{name}.norm", m.size, Norm(e.stack.norm.eps))
    gate = ACTIVATIONS["silu"](g, _projected(e, x, m, name, "gate"))
    width = m.heads * m.size
    z = g.call(Mul(), g.call(Reshape((batch, length, const(width))), z), gate)
    return e.dense(z, f"{name}.out_proj", width, e.stack.hidden, False), (last, state)


def _projected(e: AttentionBlocks, x: GVar, m: DeltaRule, name: str, part: str) -> GVar:
    """Emit an input projection, or the rows of one that is stored by group of heads."""
    out = {"mixed": m.channels, "gate": m.heads * m.size}.get(part, m.heads)
    if m.separate:
        stored_name = {"mixed": "qkv", "gate": "z", "beta": "b", "step": "a"}[part]
        return e.linear(x, Projection(f"{name}.in_proj_{stored_name}", out), e.stack.hidden, False)
    each = m.heads // m.groups
    sizes = (m.state, m.state, each * m.size, each * m.size) if part in ("mixed", "gate") else (each, each)
    stored = m.groups * sum(sizes)

    def rows() -> NDArray[np.int64]:
        by_group = np.split(np.arange(stored).reshape(m.groups, -1), np.cumsum(sizes)[:-1], axis=1)
        # The rows are stored group by group, each with its queries, keys, values and gates; the convolution expects
        # all queries, all keys, all values.
        chosen = {"mixed": by_group[:3], "gate": by_group[-1:], "beta": by_group[:1], "step": by_group[-1:]}[part]
        return np.concatenate([c.ravel() for c in chosen])

    at = Projection(f"{name}.{'in_proj_qkvz' if len(sizes) == 4 else 'in_proj_ba'}", stored, part, out, rows)
    return e.linear(x, at, e.stack.hidden, False)


def _unit(e: AttentionBlocks, x: GVar) -> GVar:
    """Scale rows to unit length."""
    g = e.g
    square = g.call(Sum((3,), True), g.call(Mul(), x, x))
    return g.call(Mul(), x, g.call(Rsqrt(), g.call(AddScalar(LENGTH_EPS), square)))


def _prompt(e: AttentionBlocks, q: GVar, k: GVar, v: GVar, beta: GVar, decay: GVar) -> tuple[GVar, GVar]:
    """Emit the results (b, heads, n, size) of a prompt, and the state behind it."""
    g = e.g
    weights, to_last, at = decays(e, decay)
    column = g.call(ExpandDims((3,)), beta)
    system = g.call(Mul(), g.call(Mul(), g.call(Matmul(transpose_b=True), k, k), weights), column, hint="system")
    written = g.call(Mul(), v, column)
    inverse = _inverse(e, system, at)
    written = written if inverse is None else g.call(Matmul(), inverse, written, hint="written")
    scores = g.call(Mul(), g.call(Matmul(transpose_b=True), q, k), weights)
    result = g.call(Matmul(), scores, written)
    scaled = g.call(Permute((0, 1, 3, 2)), g.call(Mul(), written, g.call(ExpandDims((3,)), to_last)))
    return result, g.call(Matmul(), scaled, k, hint="state")


def _inverse(e: AttentionBlocks, system: GVar, at: GVar) -> GVar | None:
    """Emit the inverse of I + L, L the entries (b, heads, n, n) below the diagonal; None for a single position.

    With X the inverse of the diagonal blocks of one size and C the entries between the two halves of a block of twice the size,
    the inverse of the larger blocks is X - X C X."""
    g, size, inverse = e.g, 1, None
    zero = e.scalar("zero", 0.0)
    while size < e.positions:
        half, whole = (g.call(Quotient(), at, e.scalar(f"block_{s}", s, np.int64)) for s in (size, 2 * size))
        below = g.call(Less(), g.call(ExpandDims((0,)), half), g.call(ExpandDims((1,)), half))
        within = g.call(LessEqual(), g.call(ExpandDims((1,)), whole), g.call(ExpandDims((0,)), whole))
        between = g.call(Where(), g.call(LogicalAnd(), below, within), system, zero)
        if inverse is None:
            same = g.call(LogicalAnd(), *_both(e, at))
            inverse = g.call(Sub(), g.call(Where(), same, e.scalar("one", 1.0), zero), between)
        else:
            # For blocks [[A, 0], [B, D]] the inverse is [[A', 0], [-D' B A', D']]: the known inverses of the diagonal
            # blocks, and one product for the block below.
            change = g.call(Matmul(), g.call(Matmul(), inverse, between), inverse)
            inverse = g.call(Sub(), inverse, change, hint=f"inverse_{2 * size}")
        size *= 2
    return inverse


def _both(e: AttentionBlocks, at: GVar) -> tuple[GVar, GVar]:
    """Emit whether a column is at most the row, and at least."""
    g = e.g
    row, column = g.call(ExpandDims((1,)), at), g.call(ExpandDims((0,)), at)
    return g.call(LessEqual(), column, row), g.call(LessEqual(), row, column)


def _token(e: AttentionBlocks, q: GVar, k: GVar, v: GVar, beta: GVar, decay: GVar, state: GVar) -> tuple[GVar, GVar]:
    """Emit the result (b, heads, 1, size) of one token behind a state, and the next state."""
    g = e.g
    decayed = g.call(Mul(), state, g.call(ExpandDims((3,)), g.call(Exp(), decay)))
    recalled = g.call(Matmul(transpose_b=True), k, decayed)
    change = g.call(Mul(), g.call(Sub(), v, recalled), g.call(ExpandDims((3,)), beta))
    state = g.call(Add(), decayed, g.call(Mul(), g.call(Permute((0, 1, 3, 2)), change), k), hint="state")
    return g.call(Matmul(transpose_b=True), q, state), state
