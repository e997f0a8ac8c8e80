"""Quantisation: packing and its inverse, operators over symbolic dims, and weights of products in few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

import relax_tune as rt
from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32, i8, i64, u8
from relax_tune.ir.core.expr import Var, const, expr
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.base import Deduction
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.math.quantize import Dequantize, Pack4, Quantize, Unpack4
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

Array = np.ndarray[Any, Any]


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 9), st.integers(0, 5), st.booleans(), st.integers(0, 1), st.integers(0, 99))
def test_unpacking_takes_packing_back(n: int, m: int, signed: bool, axis: int, seed: int) -> None:
    low, kind = (-8, np.int8) if signed else (0, np.uint8)
    x = np.random.default_rng(seed).integers(low, low + 16, (n, m)).astype(kind)
    packed = Pack4(axis).evaluate([x])
    assert packed.shape[axis] == -(-x.shape[axis] // 2)
    np.testing.assert_array_equal(Unpack4(axis, const(x.shape[axis]), signed).evaluate([packed]), x)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 40), st.sampled_from((None, 1, 3, 32)), st.sampled_from((4, 8)), st.integers(0, 99))
def test_dequantize_of_quantize_errs_at_most_half_a_scale(n: int, group: int | None, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    shape = (n,) if group is None else (-(-n // group), 3)
    scale = np.full(shape, np.abs(x).max() / (2 ** (bits - 1) - 1), np.float32)
    back = Dequantize(0, group).evaluate([Quantize(0, group, i8, bits).evaluate([x, scale]), scale])
    assert np.abs(back - x).max() <= scale.max() * 0.5001


def test_wrong_arguments_are_refused() -> None:
    n = Var("n")

    def of(dtype: Any, *dims: Any) -> TensorInfo:
        return TensorInfo(tuple(expr(d) for d in dims), dtype)

    for op, args, words in (
        (Quantize(0), [of(f32, 3, 4), of(f32, 4)], "dim 0 of scales: .*got 3 and 4"),
        (Quantize(0, 2), [of(f32, 5, 4), of(f32, 5)], "expected 2 dims in scales"),
        (Quantize(None, 2), [of(f32, 5), of(f32)], "expected an axis"), (Quantize(), [of(i8, 5), of(f32)], "cast it first"),
        (Quantize(bits=3), [of(f32, 5), of(f32)], "2, 4 or 8 bits"),
        (Quantize(), [of(f32, 5), of(f32), of(u8)], "zero points of i8"),
        (Dequantize(), [of(f32, 5), of(f32)], "i8, u8, i16, u16, i32 or f8e4m3fn"),
        (Dequantize(), [of(u8, 5)], "expected a tensor, scales"), (Unpack4(0, const(5)), [of(u8, 2)], "bytes for 5 numbers"),
        (Pack4(0), [of(f32, 2)], "i8 or u8"),
    ):  # fmt: skip
        with pytest.raises(DeduceError, match=words):
            op.infer(args, Deduction())
    ctx = Deduction()
    assert Unpack4(0, n).infer([of(u8, Var("m"))], ctx) == of(i8, n)
    Dequantize(0, 8).infer([of(i8, n, 4), of(f32, Var("k"), 4)], ctx)
    assert [c.message[:42] for c in ctx.checks] == [
        "unpack4: bytes for n numbers: expected (n ", "dequantize: dim 0 of scales: expected (n +"
    ]  # fmt: skip


def model(rows: int = 40, columns: int = 12) -> tuple[IRModule, Array]:
    """Two layers, the second with its weight as (out, in), and an embedding table that a product shares."""
    g, rng = GraphBuilder(), np.random.default_rng(1)
    x = g.input("x", (g.symbol("n"), rows))
    first = g.constant("first", rng.standard_normal((rows, columns)).astype(np.float32))
    second = g.constant("second", rng.standard_normal((rows, columns)).astype(np.float32))
    bias = g.constant("bias", rng.standard_normal(columns).astype(np.float32))
    words = g.constant("words", rng.standard_normal((rows, 7)).astype(np.float32))
    y = g.call(Relu(), g.call(Add(), g.call(Matmul(), x, first), bias))
    y = g.call(Matmul(True), y, second)
    ids = g.input("ids", (3,), i64)
    return g.finish([g.call(Matmul(), y, words), g.call(Take(), words, ids)]), rng.standard_normal((5, rows)).astype(
        "f4"
    )


def unpacked_weight(module: IRModule, bits: int, group: int | None, name: str) -> Array:
    """The weight as the products of a quantised module read it."""
    rows = 0 if name == "first" else 1
    number, scale = module.constants[f"{name}.int{bits}"], module.constants[f"{name}.scale"]
    if bits == 4:
        number = Unpack4(rows, const(2 * number.shape[rows])).evaluate([number])
    return (Dequantize(1 - rows) if group is None else Dequantize(rows, group)).evaluate([number, scale])


@pytest.mark.parametrize("bits, group", [(8, None), (8, 8), (4, None)])
def test_products_read_quantised_weights(bits: int, group: int | None) -> None:
    module, x = model()
    quantised = rt.QuantizeWeights(bits, group)(module)
    verify(quantised)
    assert structural_equal(
        parse_module(print_text(quantised), OPERATORS).functions["main"], quantised.functions["main"]
    )
    assert {n.split(".")[0] for n in quantised.constants} == {"first", "second", "bias", "words"}
    assert {"words", "bias"} <= set(quantised.constants) and not {"first", "second"} & set(quantised.constants)
    nbytes = sum(a.nbytes for n, a in quantised.constants.items() if n.startswith("first"))
    assert nbytes < module.constants["first"].nbytes * bits / 32 * 1.7
    back = {n: unpacked_weight(quantised, bits, group or (32 if bits == 4 else None), n) for n in ("first", "second")}
    for n, a in back.items():
        scale = quantised.constants[f"{n}.scale"].max()
        assert a.shape == module.constants[n].shape and np.abs(a - module.constants[n]).max() <= scale * 0.5001
    inputs = [x, np.array([1, 0, 3])]
    exact = IRModule(module.functions, {**module.constants, **back}, module.bounds)
    lowered = lower(quantised)
    for form in (quantised, lowered.module):
        for f, w in zip(evaluate_function(form, inputs), evaluate_function(exact, inputs), strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-4, atol=1e-4)
    # the weights stay packed, and each product unpacks its own: the only kernels are the products and the lookup
    assert len(lowered.prims) == 4 and all(
        a.nbytes <= max(nbytes, 40 * 7 * 4) for a in lowered.module.constants.values()
    )
    assert sum("dequantize" in name and "matmul" in name for name in lowered.prims) == 2


def tied(*, transposed: bool = True, shared: bool = True) -> IRModule:
    """Rows of a table, and their scores against the whole table; without `shared`, against another one."""
    g, rng = GraphBuilder(), np.random.default_rng(2)
    table = g.constant("table", rng.standard_normal((9, 9)).astype(np.float32))
    rows = g.call(Take(), table, g.input("ids", (g.symbol("b"), g.symbol("n")), i64))
    other = table if shared else g.constant("other", rng.standard_normal((9, 9)).astype(np.float32))
    return g.finish([rows, g.call(Matmul(transposed), rows, other)])


@pytest.mark.parametrize("bits", [8, 4])
def test_tied_table_is_quantised_once_for_lookups_and_products(bits: int) -> None:
    module, ids = tied(), np.array([[0, 8, 3], [3, 3, 1]])
    quantised = QuantizeWeights(bits)(module)
    verify(quantised)
    assert {n: a.dtype.name for n, a in quantised.constants.items()} == {"table.int8": "int8", "table.scale": "float32"}
    back = Dequantize(0).evaluate([quantised.constants["table.int8"], quantised.constants["table.scale"]])
    assert 0 < np.abs(back - module.constants["table"]).max() <= quantised.constants["table.scale"].max() * 0.5001
    for form in (quantised, lower(quantised).module):
        rows, scores = evaluate_function(form, [ids])
        np.testing.assert_allclose(rows, back[ids], rtol=1e-6)
        np.testing.assert_allclose(scores, back[ids] @ back.T, rtol=1e-5, atol=1e-5)


def test_table_without_a_product_is_quantised_and_one_read_by_columns_is_not() -> None:
    assert set(QuantizeWeights()(tied(shared=False)).constants) == {
        "table.int8",
        "table.scale",
        "other.int8",
        "other.scale",
    }
    module = tied(transposed=False)
    assert QuantizeWeights()(module) is module


def test_quantize_refuses_unfit_weights() -> None:
    module, _ = model()
    for args in ((3,), (8, 0)):
        with pytest.raises(UserError, match=r"4 or 8 bits .*at least 1"):
            QuantizeWeights(*args)(module)
    module.constants["first"][3, 3] = np.inf
    with pytest.raises(UserError, match="'first': expected finite numbers"):
        QuantizeWeights()(module)
    g = GraphBuilder()
    plain = g.finish(g.call(Relu(), g.input("x", (3,))))
    assert QuantizeWeights()(plain) is plain


def test_a_weight_of_zeros_stays_zero() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 5))
    w = g.constant("w", np.zeros((5, 3), np.float32))
    for bits in (4, 8):
        quantised = QuantizeWeights(bits)(g.finish(g.call(Matmul(), x, w)))
        np.testing.assert_array_equal(evaluate_function(quantised, [np.ones((2, 5), np.float32)]), np.zeros((2, 3)))


def test_golden(golden: Callable[[str, str], None]) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (g.symbol("n"), 6)), g.constant("w", np.ones((6, 3), np.float32))
    before = g.finish(g.call(Relu(), g.call(Matmul(), x, w)))
    after = QuantizeWeights(4, 2)(before)
    golden("passes/quantize_weights.txt", f"# before\n{print_text(before)}\n# after\n{print_text(after)}")
