"""Traversal of scalar expressions."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import (
    Expr,
    Load,
    Var,
    add,
    const,
    free_vars,
    leaves,
    load,
    loads,
    lt,
    mul,
    op,
    postorder,
    select,
)


def test_leaves_are_the_variables_and_loads_of_a_traversal_in_order() -> None:
    """Cached leaves have the order of a traversal, for any order of requests."""
    rng = random.Random(0)
    buffers = [Buffer(f"b{rank}", (const(8),) * rank, i64) for rank in range(3)]
    pool: list[Expr] = [*(Var(f"v{k}") for k in range(5)), const(3)]
    for _ in range(2000):
        a, b, c, d = rng.choices(pool, k=4)
        buffer = rng.choice(buffers)
        nodes = [load(buffer, rng.choices(pool, k=len(buffer.shape))), op("add", (a, b), i64), select(lt(a, b), c, d)]
        pool.append(rng.choice(nodes))
        if len(pool) > 60:
            pool.pop(rng.randrange(6, 50))
        roots = rng.choices(pool, k=rng.randrange(3))
        expected = [n for n in postorder(roots) if isinstance(n, (Var, Load))]
        assert list(leaves(*roots)) == expected
        assert free_vars(*roots) == tuple(n for n in expected if isinstance(n, Var))
        assert loads(*roots) == tuple(n for n in expected if isinstance(n, Load))


def test_nodes_of_concurrent_threads_are_interned() -> None:
    """Equality is identity: two nodes of one key would differ for ever, and rewrites that compare them would miss."""
    threads, before = 4, sys.getswitchinterval()
    names = [Var(f"v{k}") for k in range(1500)]
    buffer = Buffer("x", (const(4096),), f32)
    start = threading.Barrier(threads)

    def nodes(_: int) -> list[Expr]:
        start.wait()
        sums = [add(mul(v, k + 1_000_003), 5) for k, v in enumerate(names)]
        return [*sums, *(load(buffer, (e,)) for e in sums)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            first, *others = pool.map(nodes, range(threads))
    finally:
        sys.setswitchinterval(before)
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))
