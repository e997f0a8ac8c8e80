"""Traversal of scalar expressions."""

from __future__ import annotations

import random

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, Load, Var, const, free_vars, leaves, load, loads, lt, op, postorder, select


def test_leaves_are_the_variables_and_loads_of_a_traversal_in_order() -> None:
    """What nodes keep of their leaves gives the order of a traversal, whichever node is asked first."""
    rng = random.Random(0)
    buffers = [Buffer(f"b{rank}", (const(8),) * rank, i64) for rank in range(3)]
    pool: list[Expr] = [*(Var(f"v{k}") for k in range(5)), const(3)]
    for _ in range(2000):
        a, b, c, d = rng.choices(pool, k=4)
        buffer = rng.choice(buffers)
        made = [load(buffer, rng.choices(pool, k=len(buffer.shape))), op("add", (a, b), i64), select(lt(a, b), c, d)]
        pool.append(rng.choice(made))
        if len(pool) > 60:
            pool.pop(rng.randrange(6, 50))
        roots = rng.choices(pool, k=rng.randrange(3))
        wanted = [n for n in postorder(roots) if isinstance(n, (Var, Load))]
        assert list(leaves(*roots)) == wanted
        assert free_vars(*roots) == tuple(n for n in wanted if isinstance(n, Var))
        assert loads(*roots) == tuple(n for n in wanted if isinstance(n, Load))
