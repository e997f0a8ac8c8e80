"""Attention as one operator over symbolic dims: its deduction, its decomposition, and its importers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Expr, ExprLike, Var, const, expr, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.base import Deduction
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.math.elementwise import Add, MulScalar
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import CausalSoftmax
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.passes.graph.decompose import Decompose
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text

Array = np.ndarray[Any, Any]
b, n, m, h = Var("b"), Var("n"), Var("m"), Var("h")


def operators(module: IRModule) -> list[type]:
    main = module.functions["main"]
    assert isinstance(main, Function)
    return [type(x.value.op) for x in main.bindings if isinstance(x.value, Call)]


def with_cache() -> IRModule:
    """New queries after a cache: keys of `m` positions before and `n` new ones, two query heads for one key head."""
    g = GraphBuilder()
    batch, new, past = g.symbol("b"), g.symbol("n", upper=64), g.symbol("m", upper=64)
    q, k, v = (g.input(name, (batch, heads, new, 4)) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    cached = [g.input(name, (batch, 2, past, 4)) for name in ("past_k", "past_v")]
    keys, values = (g.call(Concat(2), a, t) for a, t in zip(cached, (k, v), strict=True))
    return g.finish(g.call(Attention(0.5, True, past), q, keys, values))


def plain(q: Array, k: Array, v: Array, past: int) -> Array:
    """Query by query in double precision."""
    result = np.zeros(q.shape)
    for i, head, row in np.ndindex(q.shape[:3]):
        visible = past + row + 1
        s = k[i, head // 2, :visible].astype(np.float64) @ q[i, head, row] * 0.5
        e = np.exp(s - s.max())
        result[i, head, row] = e / e.sum() @ v[i, head // 2, :visible]
    return result


@pytest.mark.parametrize("size", [(2, 3, 5), (1, 1, 0), (1, 7, 0), (3, 1, 13), (2, 0, 3), (0, 2, 2)])
def test_with_a_growing_cache_at_any_length(size: tuple[int, int, int]) -> None:
    batch, new, past = size
    rng = np.random.default_rng(size)
    q, k, v = (rng.standard_normal((batch, heads, new, 4)).astype(np.float32) for heads in (4, 2, 2))
    cached = [rng.standard_normal((batch, 2, past, 4)).astype(np.float32) for _ in range(2)]
    expected = plain(q, *(np.concatenate(pair, axis=2) for pair in zip(cached, (k, v), strict=True)), past)
    module = with_cache()
    whole = Legalize(strict=True)(module)
    for form in (module, Decompose()(module), whole, lower(module).module):
        verify(form)
        np.testing.assert_allclose(evaluate_function(form, [q, k, v, *cached]), expected, rtol=1e-5, atol=1e-6)
    assert [f.name for f in whole.functions.values()] == ["main", "concat", "attention"]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_attention_row_without_columns_among_infinite_values_is_zero() -> None:
    g = GraphBuilder()
    q, k, v = g.input("q", (3, 4)), g.input("k", (5, 4)), g.input("v", (5, 4))
    module = g.finish(g.call(Attention(0.5), q, k, v, g.input("mask", (3, 5), bool_)))
    args = [np.ones((rows, 4), np.float32) for rows in (3, 5)] + [np.full((5, 4), np.inf, np.float32)]
    for form in (module, Legalize(strict=True)(module)):
        assert not evaluate_function(form, [*args, np.zeros((3, 5), bool)]).any()


def test_one_query_after_all_keys_needs_no_mask() -> None:
    g = GraphBuilder()
    past = g.symbol("m", 0)
    q = g.input("q", (2, 1, 4))
    k, v = (g.input(name, (2, past + 1, 4)) for name in "kv")
    assert Softmax in operators(Decompose()(g.finish(g.call(Attention(1.0, True, past), q, k, v))))
    g = GraphBuilder()
    past = g.symbol("m", 0)
    q, k, v = g.input("q", (2, 2, 4)), g.input("k", (2, past + 2, 4)), g.input("v", (2, past + 2, 4))
    assert CausalSoftmax in operators(Decompose()(g.finish(g.call(Attention(1.0, True, past), q, k, v))))


def tensor(*dims: ExprLike, dtype: Any = f32) -> TensorInfo:
    return TensorInfo(tuple(expr(d) for d in dims), dtype)


def test_deduction() -> None:
    ctx = Deduction(Env({h: (1, None)}))
    result = Attention(1.0).infer([tensor(b, h * 4, n, 8), tensor(b, h, m, 8), tensor(b, h, m, 16)], ctx)
    assert result == tensor(b, h * 4, n, 16) and not ctx.checks
    assert Attention(1.0).infer([TensorInfo(None, f32)] * 3, ctx) == TensorInfo(None, f32, None)
    for args, words in (
        ([tensor(2, n, 8), tensor(2, m, 9), tensor(2, m, 9)], "widths of queries and keys.*8 and 9"),
        ([tensor(2, n, 8), tensor(2, 5, 8), tensor(2, 6, 8)], "positions of keys and values.*5 and 6"),
        ([tensor(6, n, 8), tensor(4, m, 8), tensor(4, m, 8)], "query heads, .*multiple .*key heads.*4 and 6"),
        ([tensor(2, n, 8), tensor(2, m, 8), tensor(2, m, 8), tensor(3, m)], None),
        ([tensor(2, 5, 8), tensor(2, m, 8), tensor(2, m, 8), tensor(3, m)], "dim 0 of the mask.*3 and 5"),
        ([tensor(2, n, 8), tensor(2, m, 8), tensor(2, m, 8), tensor(m, dtype=i64)], "a mask of truth values or"),
        ([tensor(n, 8), tensor(m, 8), tensor(m, 8), tensor(2, n, m, dtype=bool_)], "a mask of at most 2 dims"),
        ([tensor(2, n, 8), tensor(2, m, 8)], "expected queries, keys, values"),
    ):
        if words is None:
            Attention(1.0).infer(args, ctx)
        else:
            with pytest.raises(DeduceError, match=words):
                Attention(1.0).infer(args, ctx)


@pytest.mark.parametrize("dims, expected, values, holds", [
    ((tensor(2, n, 8), tensor(2, m, 8), tensor(2, h, 8)), "positions of keys and values", {m: 3, h: 4}, False),
    ((tensor(h, n, 8), tensor(m, 5, 8), tensor(m, 5, 8)), "multiple of the key heads", {h: 6, m: 4}, False),
    ((tensor(h, n, 8), tensor(m, 5, 8), tensor(m, 5, 8)), "multiple of the key heads", {h: 6, m: 3}, True),
])  # fmt: skip
def test_attention_unknown_dims_are_checked_at_run_time(
    dims: tuple[TensorInfo, ...], expected: str, values: dict[Var, int], holds: bool
) -> None:
    ctx = Deduction()
    Attention(1.0).infer(dims, ctx)
    (check,) = [c for c in ctx.checks if expected in c.message]
    bound = substitute(check.cond, {v: const(x) for v, x in values.items()})
    assert bool(getattr(ctx.simplify(bound), "value", None)) is holds


def test_attention_meaningless_attributes_raise() -> None:
    args = [tensor(2, n, 8), tensor(2, m, 8), tensor(2, m, 8)]
    offset: Expr = const(-1)
    for op, words in (
        (Attention(1.0, group=2), "only where it is causal"), (Attention(1.0, True, group=0), "group and a window"),
        (Attention(1.0, softcap=0.0), "softcap above 0"), (Attention(1.0, True, offset), "offset: expected at least 0"),
    ):  # fmt: skip
        with pytest.raises(DeduceError, match=words):
            op.infer(args, Deduction())


def test_attention_exported_composition_is_recognised() -> None:
    w = Writer(GraphBuilder())
    new = w.g.symbol("n")
    q, k, v = (w.g.input(name, (2, 3, new, 4)) for name in "qkv")
    mask = w.g.input("mask", (2, 1, 1, new))
    scores = w.emit(Add(), w.emit(MulScalar(0.5), w.emit(Matmul(transpose_b=True), q, k)), mask)
    result = w.emit(Matmul(), w.emit(Softmax(), scores), v)
    call = w.definitions[result]
    assert call.op == Attention(0.5, hides_rows=False) and call.args == (q, k, v, mask)
    wide = w.emit(Softmax(), w.emit(MulScalar(0.5), w.emit(Matmul(transpose_b=True), q, w.g.input("one", (3, new, 4)))))
    assert isinstance(w.definitions[w.emit(Matmul(), wide, v)].op, Matmul)


def test_golden(golden: Callable[[str, str], None]) -> None:
    g = GraphBuilder()
    new, past = g.symbol("n"), g.symbol("m")
    q, k, v = g.input("q", (4, new, 8)), g.input("k", (2, past + new, 8)), g.input("v", (2, past + new, 8))
    mask = g.input("mask", (new, past + new), bool_)
    before = g.finish(g.call(Attention(0.5, True, past), q, k, v, mask, hint="seen"))
    after = Decompose()(before)
    golden("passes/decompose.txt", f"# before\n{print_text(before)}\n# after\n{print_text(after)}")
    assert Decompose()(after) is after
