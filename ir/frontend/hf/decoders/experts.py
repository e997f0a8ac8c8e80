"""Mixtures of experts (Shazeer et al. 2017) in decoders.

Every expert is computed for every position, in one product with the weights of all; the router's weights, 0 for the experts that a
position did not choose, scale their activations. That is right at every length, but costs the work of all experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.decoders.blocks import Blocks
from relax_tune.ir.frontend.hf.decoders.parameters import Projection
from relax_tune.ir.frontend.hf.decoders.spec import Experts
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import ExpandDims, Reshape
from relax_tune.ir.op.math.elementwise import Add, Cast, Div, Mul, Sigmoid
from relax_tune.ir.op.math.logic import Equal, NotEqual, Where
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.op.reduction.scan import TopK


def mixture(blocks: Blocks, x: GVar, experts: Experts, layer: str) -> GVar:
    """Return the mixture of a layer of what it reads, (b, n, hidden)."""
    g, c = blocks.g, blocks.spec
    count, inner = experts.count, experts.inner
    weights = routed(blocks, x, experts, layer)
    gate, up, down = (_joined(blocks, experts, layer, part) for part in ("gate", "up", "down"))

    def all_experts(part: str, w: NDArray[np.float32]) -> GVar:
        y = g.call(Matmul(), x, g.constant(f"{layer}.experts.{part}", w))
        return g.call(Reshape((blocks.batch, blocks.length, const(count), const(inner))), y)

    one, other = all_experts("gate", gate), all_experts("up", up)
    y = g.call(Mul(), blocks.activation(one), other)
    # an expert that was not chosen may overflow
    share = g.call(ExpandDims((3,)), weights)
    zero = blocks.scalar("not_chosen", 0.0)
    y = g.call(Where(), g.call(NotEqual(), share, zero), g.call(Mul(), y, share), zero)
    y = g.call(Reshape((blocks.batch, blocks.length, const(count * inner))), y)
    y = g.call(Matmul(), y, g.constant(f"{layer}.experts.down", down))
    if experts.shared is None:
        return y
    names, width = experts.names, experts.shared
    at = f"{layer}.{names.shared}"
    into = (Projection(f"{at}.gate_proj", width), Projection(f"{at}.up_proj", width))
    common = blocks.gated(x, *into, Projection(f"{at}.down_proj", c.hidden), False)
    if names.shared_gate is not None:
        open_ = g.call(Sigmoid(), blocks.linear(x, Projection(f"{layer}.{names.shared_gate}", 1), c.hidden, False))
        common = g.call(Mul(), common, open_)
    return g.call(Add(), y, common)


def routed(blocks: Blocks, x: GVar, experts: Experts, layer: str) -> GVar:
    """Return the weight of each expert at each position, (b, n, experts): 0 for the ones not chosen."""
    g = blocks.g
    scores = blocks.linear(x, Projection(f"{layer}.{experts.names.router}", experts.count), blocks.spec.hidden, False)
    share = g.call(Softmax(), scores, hint="share")
    best = g.call(TopK(const(experts.chosen), 2), share, hint="chosen")
    kept = g.call(GatherElements(2), share, best)
    if experts.normalised:
        total = g.call(Reshape((blocks.batch, blocks.length, const(1))), g.call(Sum((2,)), kept))
        kept = g.call(Div(), kept, total)
    numbers = blocks.once(f"experts.{experts.count}", lambda: np.arange(experts.count, dtype=np.int64))
    mine = g.call(Cast(f32), g.call(Equal(), g.call(ExpandDims((3,)), best), numbers))
    return g.call(Sum((2,)), g.call(Mul(), mine, g.call(ExpandDims((3,)), kept)), hint="expert_weights")


def _joined(blocks: Blocks, experts: Experts, layer: str, part: str) -> NDArray[np.float32]:
    """Return the weights of all experts side by side: gate and up (hidden, experts * inner), down (experts * inner, hidden)."""
    names, hidden, inner, count = experts.names, blocks.spec.hidden, experts.inner, experts.count
    get = blocks.parameters.weights.get

    def make() -> NDArray[np.float32]:
        if names.joined is not None and part == "down":
            w = get(f"{layer}.{names.down}.weight", (count, hidden, inner))
        elif names.joined is not None:
            both = get(f"{layer}.{names.joined}.weight", (count, 2 * inner, hidden))
            w = both[:, :inner] if part == "gate" else both[:, inner:]
        else:
            shape = (hidden, inner) if part == "down" else (inner, hidden)
            each = (f"{layer}.{getattr(names, part).format(i)}.weight" for i in range(count))
            w = np.stack([get(name, shape) for name in each])
        # stored as (out, in)
        return np.ascontiguousarray(w.transpose(0, 2, 1) if part == "down" else w.transpose(2, 0, 1)).reshape(
            (count * inner, hidden) if part == "down" else (hidden, count * inner)
        )

    return blocks.parameters.array(f"{layer}.experts.{part}", make)
