"""Recognition of a step of a recurrent layer: a product with the gates as its first dimension, and its readers (`FuseGates`).

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.expr import Load, as_int, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import block_loads
from relax_tune.schedules.rules.shared.contraction import is_product


def weight_of(func: PrimFunc, product: Block) -> Load | None:
    """Return how a product reads its constant weight (steps, columns of all gates); None if it is none of gates."""
    if len(product.body.indices) != 3 or len(product.iters) != 4:
        return None
    gate, _, column = product.body.indices
    return next(
        (
            x
            for x in block_loads(product)
            if x.buffer in func.consts and len(x.indices) == 2 and {gate, column} <= set(free_vars(x.indices[1]))
        ),
        None,
    )


def has_gates(func: PrimFunc) -> bool:
    """Return whether a function is a product with a known number of gates and columns, and blocks that read it."""
    first, *others = blocks(func.body)
    if not others or not first.is_reduction or not is_product(func):
        return False
    (product,) = reductions(func)
    known = all(as_int(product.iters[n].extent) is not None for n in (0, 2)) if len(product.iters) == 4 else False
    return known and weight_of(func, product) is not None
