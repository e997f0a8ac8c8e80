"""Mixed precision: what is stored in 16 bits, what is not, and that results differ by rounding errors only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.support.random_graphs import ALWAYS_THESE, Made, graphs

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import DType, bf16, bool_, f16, f32, i64
from relax_tune.ir.core.expr import Load, Op, const, postorder
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Constant, Function
from relax_tune.ir.core.graph_walk import nested_values
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.indexing.movement import Concat, Permute, Reshape, Take
from relax_tune.ir.op.math.elementwise import Add, Cast, Exp, Gelu, MulScalar
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Softmax, Sum
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.graph.mixed_precision import ComputeWide, MixedPrecision
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import lower, passes_for
from relax_tune.ir.text.printer import print_text

HALVES = (bf16, f16)
RNG = np.random.default_rng(11)


def rand(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def block() -> IRModule:
    """A table, a norm, attention with one head and its residual, a product on one side of a branch."""
    g = GraphBuilder()
    n = g.symbol("n", 1)
    ids, flag = g.input("ids", (n,), i64), g.input("flag", (), bool_)
    x = g.call(Take(), g.constant("table", rand(9, 8)), ids)
    x = g.call(LayerNorm(), x, g.constant("gamma", rand(8)), g.constant("beta", rand(8)))
    q, k, v = (g.call(Matmul(), x, g.constant(name, rand(8, 8))) for name in ("wq", "wk", "wv"))
    weights = g.call(Softmax(), g.call(MulScalar(0.35), g.call(Matmul(), q, g.call(Permute((1, 0)), k))))
    y = g.call(Add(), x, g.call(Matmul(), weights, v))
    return g.finish(
        g.branch(
            flag,
            lambda: g.call(Matmul(), g.call(Gelu(), y), g.constant("w", rand(8, 3))),
            lambda: g.call(Sum((1,), True), y),
        )
    )


def inputs(size: int, flag: bool) -> list[Any]:
    return [RNG.integers(0, 9, size), np.array(flag)]


def weight_types(module: IRModule) -> dict[str, DType]:
    """The weights that are read, and the types in which they are stored."""
    main = module.functions["main"]
    assert isinstance(main, Function)
    dtypes = {v.name: v.info.dtype for v in nested_values(main) if isinstance(v, Constant)}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def check_rounding(before: IRModule, after: IRModule, half: DType, args: list[Any], steps: int = 16) -> None:
    """Check that results have equal types, and differ by at most `steps` roundings of the largest result."""
    verify(after)
    expected, actual = (run_function(m, "main", args) for m in (before, after))
    for w, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (expected, actual)), strict=True):
        if isinstance(w, np.ndarray):
            assert f.dtype == w.dtype and f.shape == w.shape
            scale = 1 + np.max(np.abs(w), initial=0) if w.dtype.kind == "f" else 0
            np.testing.assert_allclose(f, w, rtol=0, atol=steps * half.epsilon * scale)


def test_text_before_and_after(golden: Callable[[str, str], None]) -> None:
    before = block()
    after = DeadCode()(MixedPrecision(bf16)(before))
    golden("passes/mixed_precision.txt", f"# before\n{print_text(before)}\n# after\n{print_text(after)}")
    assert MixedPrecision(bf16)(after) is after and MixedPrecision(f32)(before) is before
    for size, flag in ((1, True), (3, False), (4, True)):
        check_rounding(before, after, bf16, inputs(size, flag))


@pytest.mark.parametrize("half", HALVES)
def test_weights_of_matmuls_and_gathers_are_halved(half: DType) -> None:
    before = block()
    after = DeadCode()(MixedPrecision(half)(before))
    stored = weight_types(after)
    assert {n for n, d in stored.items() if d is half} == {f"{n}.{half}" for n in ("table", "wq", "wk", "wv", "w")}
    assert {n for n, d in stored.items() if d is f32} == {"gamma", "beta"}
    for name in ("wq", "table"):
        np.testing.assert_array_equal(after.constants[f"{name}.{half}"], before.constants[name].astype(half.numpy))


def test_weights_out_of_range_stay() -> None:
    g = GraphBuilder()
    w = rand(4, 3)
    w[1, 2] = 1e5
    x = g.input("x", (g.symbol("n"), 4))
    y = g.call(Matmul(), x, g.constant("large", w))
    module = g.finish(g.call(Matmul(), y, g.constant("w", rand(3, 3))))
    after = MixedPrecision(f16)(module)
    assert weight_types(after)["large"] is f32 and weight_types(after)["w.f16"] is f16
    assert weight_types(MixedPrecision(bf16)(module))["large.bf16"] is bf16


def test_precise_values_and_results_stay_f32() -> None:
    """The argument of exp, results, parameters and a value that only elementwise operators read stay f32."""
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 4))
    y = g.call(Matmul(), x, g.constant("w", rand(4, 4)))
    z = g.call(Exp(), g.call(MulScalar(0.5), y))
    module = g.finish([y, g.call(Matmul(), z, g.constant("v", rand(4, 2)))])
    after = MixedPrecision(bf16)(module)
    main = after.functions["main"]
    assert isinstance(main, Function)
    rounded = [b.value.args[0] for b in main.bindings if isinstance(b.value, Call) and b.value.op == Cast(bf16)]
    assert [v.name for v in rounded] == ["exp"]  # type: ignore[union-attr]
    check_rounding(module, after, bf16, [rand(3, 4)])


def test_inverse_casts_cancel() -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 4), bf16)
    up = g.call(Cast(f32), x)
    both = g.call(Concat(0), g.call(Cast(bf16), g.call(Reshape((n, const(4))), up)), x)
    module = g.finish(g.call(Matmul(), g.call(Cast(f32), both), g.constant("w", rand(4, 4))))
    after = DeadCode()(MixedPrecision(bf16)(module))
    main = after.functions["main"]
    assert isinstance(main, Function)
    assert not any(isinstance(b.value, Call) and b.value.op == Cast(bf16) for b in main.bindings)
    args = [rand(3, 4).astype(bf16.numpy)]
    check_rounding(module, after, bf16, args)


@pytest.mark.parametrize("half", HALVES)
def test_matmuls_convert_on_load_and_sum_in_f32(half: DType) -> None:
    """There are as many kernels as in f32, and every product is one function that reads 16 bits and sums in f32."""
    module = straight_line_block()
    plain, mixed = lower(module), lower(module, passes_for(precision=half))
    assert len(mixed.calls()) == len(plain.calls())
    called = [mixed.prims[c.callee] for c in mixed.calls()]
    products = [b for f in called for b in blocks(f.body) if b.is_reduction and b.name.startswith("matmul")]
    assert len(products) == 5
    for b in products:
        value = b.body.value
        assert isinstance(value, Op) and b.body.buffer.dtype is f32
        read = [e for e in postorder((value.args[1],)) if isinstance(e, Load)]
        assert {e.buffer.dtype for e in read} == {half} and len(read) == 2
    ids = RNG.integers(0, 9, 5)
    expected, actual = (evaluate_function(m, [ids]) for m in (plain.module, mixed.module))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * half.epsilon * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_attention_stays_one_function(half: DType) -> None:
    """Queries, keys, values and the softmax's weights have 16 bits; the mask and the computations are f32."""
    g = GraphBuilder()
    n = g.symbol("n", 1)
    x, mask = g.input("x", (n, 8)), g.input("mask", (n, n))
    parts = [g.call(Matmul(), x, g.constant(name, rand(8, 8))) for name in ("wq", "wk", "wv")]
    turned = [g.call(Permute((1, 0, 2)), g.call(Reshape((n, const(2), const(4))), p)) for p in parts]
    y = g.call(Permute((1, 0, 2)), g.call(Attention(0.5), *turned, mask))
    y = g.call(Reshape((n, const(8))), y)
    module = g.finish(g.call(Matmul(), y, g.constant("wo", rand(8, 8))))
    plain, mixed = lower(module), lower(module, passes_for(precision=half))
    assert len(mixed.calls()) == len(plain.calls())
    (func,) = (f for n, f in mixed.prims.items() if "attention" in n)
    assert Counter(b.dtype for b in func.buffers) == {half: 4, f32: 1}
    assert Counter(b.dtype for b in func.allocs) == {half: 1, f32: 5}
    check_rounding(module, DeadCode()(MixedPrecision(half)(module)), half, [rand(5, 8), rand(5, 5)])
    args = [rand(5, 8), rand(5, 5)]
    expected, actual = (evaluate_function(m, args) for m in (plain.module, mixed.module))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * half.epsilon * np.abs(expected).max())


@pytest.mark.parametrize("qkv", ["separate", "merged"])
def test_movement_before_a_matmul_costs_no_kernel(qkv: Literal["separate", "merged"]) -> None:
    """Both parameters and columns of a combined product are read without a copy."""
    g = GraphBuilder()
    n = g.symbol("n")
    x, y = g.input("x", (n, 4)), g.input("y", (n, 2, 4))
    parts = [g.call(Matmul(), x, g.constant(name, rand(4, 8))) for name in ("wq", "wk")]
    q, k = (g.call(Permute((1, 0, 2)), g.call(Reshape((n, const(2), const(4))), p)) for p in parts)
    turned = g.call(Permute((1, 0, 2)), y)
    module = g.finish([g.call(Matmul(transpose_b=True), a, b) for a, b in ((q, k), (turned, turned))])
    kernels = [len(lower(module, passes_for(qkv, p)).calls()) for p in (f32, bf16)]
    assert kernels[0] == kernels[1]


@pytest.mark.slow
def test_weights_unpacked_inside_matmuls_stay_packed() -> None:
    module = QuantizeWeights(bits=4, group=4)(straight_line_block())
    plain, mixed = lower(module), lower(module, passes_for(precision=bf16))
    assert len(mixed.calls()) == len(plain.calls())
    sizes = [sum(a.nbytes for a in m.module.constants.values()) for m in (plain, mixed)]
    assert sizes[1] < sizes[0]  # the table


def test_sums_of_16_bit_floats_run_in_float32() -> None:
    """In bf16, 256 + 1 is 256."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 1000), bf16)
    y = g.call(Add(), x, x)
    total = g.call(Sum((1,)), y)
    module = g.finish([g.call(Matmul(), y, g.constant("w", np.ones((1000, 1), bf16.numpy))), total, y])
    after = ComputeWide()(module)
    verify(after)
    assert ComputeWide()(after) is after
    ones = np.ones((2, 1000), bf16.numpy)
    for result in run_function(lower(module).module, "main", [ones])[:2]:
        assert result.dtype == bf16.numpy and (result.astype(int) == 2000).all()


def straight_line_block() -> IRModule:
    g = GraphBuilder()
    ids = g.input("ids", (g.symbol("n", 1),), i64)
    x = g.call(Take(), g.constant("table", rand(9, 8)), ids)
    x = g.call(LayerNorm(), x, g.constant("gamma", rand(8)), g.constant("beta", rand(8)))
    q, k, v = (g.call(Matmul(), x, g.constant(name, rand(8, 8))) for name in ("wq", "wk", "wv"))
    weights = g.call(Softmax(), g.call(MulScalar(0.35), g.call(Matmul(), q, g.call(Permute((1, 0)), k))))
    return g.finish(g.call(Gelu(), g.call(Add(), x, g.call(Matmul(), weights, v))))


def test_mixed_precision_random_programs_stay_near_reference() -> None:
    fired = []

    @settings(ALWAYS_THESE, max_examples=examples(40))
    @given(
        graphs(steps=5, first=("products",)),
        st.fixed_dictionaries({"n": st.integers(0, 4), "m": st.integers(0, 4)}),
        st.sampled_from(HALVES),
    )
    def check(program: Made, sizes: dict[str, int], half: DType) -> None:
        args = program.arguments(sizes, np.random.default_rng(3))
        try:
            run_function(program.module, "main", args)
        except (UserError, DeduceError):
            return
        after = MixedPrecision(half)(program.module)
        fired.append(after is not program.module)
        check_rounding(program.module, after, half, args)
        assert MixedPrecision(half)(after) is after, print_text(after)

    check()
    assert sum(fired) * 4 >= len(fired) > 4, fired
