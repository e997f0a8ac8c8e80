"""Pools of keys and values: attention through tables equals attention of each text, writes go to their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.candidates import MACHINES

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import f16, f32, i64
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.base import Deduction
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.neural.paged import PagedAttention, PagedWrite
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.pipeline import lower
from relax_tune.schedules.sketch import generate_sketches

SIZE, GROUPS, SHARED, WIDTH = 4, 2, 3, 8
BLOCKS = 11


def step(read_before: bool = False) -> IRModule:
    """New keys and values are written to pools, which the tokens then attend to. read_before: the pool is read elsewhere too"""
    g = GraphBuilder()
    t, r, w, p = (g.symbol(n, 1, 16) for n in "trwp")
    q = g.input("q", (t, GROUPS, SHARED, WIDTH))
    new = [g.input(n, (t, GROUPS, WIDTH)) for n in ("new_k", "new_v")]
    pools = [g.input(n, (p, SIZE, GROUPS, WIDTH)) for n in ("k", "v")]
    places = g.input("tables", (r, w), i64), g.input("requests", (t,), i64), g.input("positions", (t,), i64)
    more = [g.call(Relu(), pools[0])] if read_before else []
    k, v = (g.call(PagedWrite(), pool, x, *places, hint="pool") for pool, x in zip(pools, new, strict=True))
    return g.finish([g.call(PagedAttention(0.5, window=6), q, k, v, *places), k, v, *more])


def attended(q: Any, keys: Any, values: Any, last: int) -> Any:
    """One token, (groups, shared, width), over the positions of its text in double precision."""
    result = np.zeros(q.shape)
    visible = slice(max(0, last - 5), last + 1)
    for group, head in np.ndindex(q.shape[:2]):
        s = keys[visible, group].astype(np.float64) @ q[group, head] * 0.5
        e = np.exp(s - s.max())
        result[group, head] = e / e.sum() @ values[visible, group]
    return result


@pytest.mark.parametrize("lengths", [(1,), (9, 1, 14), (4, 8)])
def test_paged_step_equals_attention_of_each_text(lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(lengths)
    texts = [[rng.standard_normal((n, GROUPS, WIDTH)).astype(np.float32) for _ in range(2)] for n in lengths]
    width = -(-max(lengths) // SIZE)
    tables = np.zeros((len(lengths), width), np.int64)
    blocks = iter(rng.permutation(BLOCKS))
    pools = [np.full((BLOCKS, SIZE, GROUPS, WIDTH), np.nan, np.float32) for _ in range(2)]
    pools = [np.where(np.isnan(pool), np.float32(1e3), pool) for pool in pools]
    requests, positions = list[int](), list[int]()
    for i, n in enumerate(lengths):
        first = max(0, n - 3)  # the last three tokens are new
        for at in range(n):
            if at % SIZE == 0:
                tables[i, at // SIZE] = next(blocks)
            for pool, rows in zip(pools, texts[i], strict=True):
                pool[tables[i, at // SIZE], at % SIZE] = rows[at] if at < first else 9
        requests += [i] * (n - first)
        positions += range(first, n)
    new = [np.stack([texts[i][part][at] for i, at in zip(requests, positions)]) for part in range(2)]
    q = rng.standard_normal((len(requests), GROUPS, SHARED, WIDTH)).astype(np.float32)
    expected = np.stack([attended(x, *texts[i], at) for x, i, at in zip(q, requests, positions)])
    args = [q, *new, *pools, tables, np.array(requests), np.array(positions)]
    module = step()
    for form in (module, Legalize(strict=True)(module), lower(module).module):
        y, *after = evaluate_function(form, args)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        for i, (pair, n) in enumerate(zip(texts, lengths)):
            for pool, rows in zip(after, pair, strict=True):
                np.testing.assert_array_equal(pool[tables[i]].reshape(-1, GROUPS, WIDTH)[:n], rows)


def test_paged_pools_read_once_are_written_in_place() -> None:
    assert [(a.param, a.result, a.axis) for a in lower(step(), append=True).appended["main"]] == [(3, 1, 0), (4, 2, 0)]
    assert [(a.param, a.result) for a in lower(step(True), append=True).appended["main"]] == [(4, 2)]


def test_paged_attention_is_scheduled_by_the_attention_rules() -> None:
    lowered = lower(step())
    assert sorted(lowered.prims) == ["paged_attention", "paged_write"]
    names = {
        machine: {s.name.partition(".")[0] for s in generate_sketches(lowered.prims["paged_attention"], hardware)}
        for machine, hardware in MACHINES.items()
    }
    assert names["c"] == names["opencl"] == {"flash_attention", "flash_decoding", "fallback"}
    assert names["gpu"] >= {"flash_attention", "fallback"}


def test_paged_operators_refuse_unfitting_arguments() -> None:
    t, r, w, p = map(Var, "trwp")

    def tensor(*dims: Any, dtype: Any = f32) -> TensorInfo:
        return TensorInfo(tuple(d if isinstance(d, Var) else const(d) for d in dims), dtype)

    places = tensor(r, w, dtype=i64), tensor(t, dtype=i64), tensor(t, dtype=i64)
    pool, q = tensor(p, 4, 2, 8), tensor(t, 2, 3, 8)
    assert PagedWrite().infer([pool, tensor(t, 2, 8), *places], Deduction()) == pool
    wide = tensor(p, 4, 2, 6)
    assert PagedAttention(1.0).infer([q, pool, wide, *places], Deduction()) == tensor(t, 2, 3, 6)
    half = [tensor(p, 4, 2, 8, dtype=f16)] * 2
    assert PagedAttention(1.0).infer([q, *half, *places], Deduction()) == q
    for op, args, words in (
        (PagedWrite(), [pool, tensor(t, 3, 8), *places], "dim 1 of the rows"),
        (PagedWrite(), [pool, tensor(5, 2, 8), tensor(r, w, dtype=i64), *[tensor(6, dtype=i64)] * 2], "number of rows"),
        (PagedWrite(), [pool, tensor(t, 2, 8), *places[:2], tensor(t)], "positions of 1 dims"),
        (PagedAttention(1.0), [tensor(t, 2, 3, 7), pool, pool, *places], "widths of queries and keys"),
        (PagedAttention(1.0), [tensor(t, 3, 3, 8), pool, pool, *places], "key heads"),
        (PagedAttention(1.0), [q, pool, tensor(p, 5, 2, 8), *places], "positions of a block"),
        (PagedAttention(1.0), [q, pool, pool, tensor(r, dtype=i64), *places[1:]], "tables of 2 dims"),
    ):
        with pytest.raises(DeduceError, match=words):
            op.infer(args, Deduction())


def test_paged_write_of_equal_places_takes_the_last_row() -> None:
    pool, new = np.zeros((2, 4, 1, 1), np.float32), np.arange(1, 4, dtype=np.float32).reshape(3, 1, 1)
    module = step()
    main = module.functions["main"]
    assert isinstance(main, Function) and sum(isinstance(b.value, Call) for b in main.bindings) == 3
    result = PagedWrite().evaluate([pool, new, np.array([[1]]), np.zeros(3, np.int64), np.array([2, 2, 0])])
    assert result[1, :, 0, 0].tolist() == [3, 0, 2, 0] and not result[0].any()
