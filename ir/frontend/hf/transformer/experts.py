"""Emission of mixtures of experts (Shazeer et al. 2017).

Every expert is computed for every position, in one product with the weights of all experts. The router's weights, 0 for experts
that a position did not choose, scale their activations. That is right at every length, but costs the work of all experts.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Constant, GVar
from relax_tune.ir.frontend.hf.transformer.blocks import Blocks, joint_projections
from relax_tune.ir.frontend.hf.transformer.mixers import Experts
from relax_tune.ir.frontend.hf.transformer.parameters import Projection
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import ExpandDims, Reshape
from relax_tune.ir.op.math.elementwise import Add, Cast, Div, Mul, Sigmoid
from relax_tune.ir.op.math.logic import Equal, NotEqual, Where
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.op.reduction.scan import TopK


def mixture(e: Blocks, x: GVar, experts: Experts, path: str) -> GVar:
    """Emit the mixture of the layer at `path`, of x (b, n, hidden)."""
    g, hidden, count, inner = e.g, e.stack.hidden, experts.count, experts.inner
    weights = _routed(e, x, experts, path)
    gate, up = (
        g.call(Reshape((*e.dims, const(count), const(inner))), g.call(Matmul(), x, _joined(e, experts, path, part)))
        for part in ("gate", "up")
    )
    y = g.call(Mul(), e.activation(gate), up)
    # an expert that was not chosen may overflow, and 0 times infinity is NaN
    share, zero = g.call(ExpandDims((3,)), weights), e.scalar("not_chosen", 0.0)
    y = g.call(Where(), g.call(NotEqual(), share, zero), g.call(Mul(), y, share), zero)
    # The sum over experts is part of this product: side by side, the down projections of all experts are one matrix.
    y = g.call(Reshape((*e.dims, const(count * inner))), y)
    y = g.call(Matmul(), y, _joined(e, experts, path, "down"))
    if experts.shared is None:
        return y
    names, width = experts.names, experts.shared
    if names.shared_joined is not None:
        gate_up = joint_projections(f"{path}.{names.shared_joined}", width)
        shared_down = f"{path}.{names.shared_down}"
    else:
        shared = f"{path}.{names.shared}"
        gate_up = Projection(f"{shared}.gate_proj", width), Projection(f"{shared}.up_proj", width)
        shared_down = f"{shared}.down_proj"
    common = e.gated(x, *gate_up, Projection(shared_down, hidden), False)
    if names.shared_gate is not None:
        common = g.call(Mul(), common, g.call(Sigmoid(), e.dense(x, f"{path}.{names.shared_gate}", hidden, 1, False)))
    return g.call(Add(), y, common)


def _routed(e: Blocks, x: GVar, experts: Experts, path: str) -> GVar:
    """Emit the weight of each expert at each position, (b, n, experts): 0 for experts that are not chosen."""
    g = e.g
    scores = e.dense(x, f"{path}.{experts.names.router}", e.stack.hidden, experts.count, False)
    share = g.call(Softmax(), scores, hint="share")
    best = g.call(TopK(const(experts.chosen), 2), share, hint="chosen")
    largest = g.call(GatherElements(2), share, best)
    if experts.normalised:
        total = g.call(Reshape((*e.dims, const(1))), g.call(Sum((2,)), largest))
        largest = g.call(Div(), largest, total)
    numbers = e.constant(f"experts.{experts.count}", lambda: np.arange(experts.count, dtype=np.int64))
    chosen = g.call(Cast(f32), g.call(Equal(), g.call(ExpandDims((3,)), best), numbers))
    return g.call(Sum((2,)), g.call(Mul(), chosen, g.call(ExpandDims((3,)), largest)), hint="expert_weights")


def _joined(e: Blocks, experts: Experts, path: str, part: str) -> Constant:
    """Return the weights of all experts side by side: gate and up (hidden, experts * inner), down (experts * inner, hidden)."""
    names, hidden, inner, count, get = experts.names, e.stack.hidden, experts.inner, experts.count, e.parameters.get

    def make() -> NDArray[np.float32]:
        stacked = f"{path}.{names.stacked}.gate_up_proj"
        if e.parameters.has(stacked) and part == "down":
            w = get(f"{path}.{names.stacked}.down_proj", count, hidden, inner)
        elif e.parameters.has(stacked):
            w = get(stacked, count, 2 * inner, hidden)[:, slice(None, inner) if part == "gate" else slice(inner, None)]
        elif names.joined is not None and part == "down":
            w = get(f"{path}.{names.down}.weight", count, hidden, inner)
        elif names.joined is not None:
            both = get(f"{path}.{names.joined}.weight", count, 2 * inner, hidden)
            w = both[:, :inner] if part == "gate" else both[:, inner:]
        else:
            shape = (hidden, inner) if part == "down" else (inner, hidden)
            each = (f"{path}.{getattr(names, part).format(i)}.weight" for i in range(count))
            w = np.stack([get(name, *shape) for name in each])
        # stored as (out, in)
        return np.ascontiguousarray(w.transpose(0, 2, 1) if part == "down" else w.transpose(2, 0, 1)).reshape(
            (count * inner, hidden) if part == "down" else (hidden, count * inner)
        )

    return e.constant(e.parameters.full(f"{path}.experts.{part}"), make)
