"""Truth values of both formats.

Tests: `tests/ir/frontend/onnx/test_operators.py`, `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.frontend.shared.node import Node
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.elementwise import broadcast_dims


def logical_and(w: Writer, n: Node) -> ImportedValue:
    """Import a logical and. `x and true` becomes `x`."""
    a, b = n.typed(w, 0), n.typed(w, 1)
    dims = broadcast_dims(n.op, a.shape, b.shape, w.g.deduction)[0]
    for x, other in ((a, b), (b, a)):
        if x.uniform is True and dims is not None and x.dtype is other.dtype is bool_:
            if other.uniform is True:
                return w.uniform(dims, True, bool_)
            same = len(dims) == other.ndim and all(map(w.g.deduction.same, dims, other.shape))
            return other if same else w.of(w.broadcast_to(w.tensor(other), dims))
    return w.of(w.logical_and(w.tensor(a), w.tensor(b)))
