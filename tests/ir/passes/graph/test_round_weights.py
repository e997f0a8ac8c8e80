"""Weights stored in 16 bits: a choice per weight, and a map of types for all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import DType, bf16, f16, i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Add, Relu
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.graph.round_weights import RoundWeights
from relax_tune.ir.passes.pipeline import lower, passes_for
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.job.lowered_model import WeightType, lowered_module
from relax_tune.tuner.settings import Settings

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(2)


def rand(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def model() -> IRModule:
    """A model: a table that a product shares, two products, one of a weight that a sum reads too, and a convolution."""
    g = GraphBuilder()
    ids, image = g.input("ids", (g.symbol("n", 1, 9),), i64), g.input("image", (1, 2, 6))
    table = g.constant("table", rand(8, 8))
    y = g.call(Relu(), g.call(Matmul(), g.call(Take(), table, ids), g.constant("first", rand(8, 8))))
    shared = g.constant("shared", rand(8, 8))
    z = g.call(Matmul(), g.call(Matmul(transpose_b=True), y, table), shared)
    conv = g.call(Conv((1,), (1,)), image, g.constant("taps", rand(3, 2, 3)))
    return g.finish([z, g.call(Add(), shared, shared), conv])


ARGUMENTS = [np.array([1, 7, 0]), rand(1, 2, 6)]


def results(module: IRModule) -> list[Array]:
    return list(evaluate_function(module, ARGUMENTS))


def test_golden(golden: Callable[[str, str], None]) -> None:
    before = model()
    after = RoundWeights({"table": bf16, "taps": f16, "first": f16})(before)
    golden("passes/round_weights.txt", f"# before\n{print_text(before)}\n# after\n{print_text(after)}")


@pytest.mark.parametrize("half", [bf16, f16])
def test_named_weights_are_rounded_and_no_others(half: DType) -> None:
    before = model()
    after = RoundWeights({"table": half, "taps": half, "shared": half, "missing": half})(before)
    verify(after)
    assert set(after.constants) == {"first", "shared", f"table.{half}", f"taps.{half}"}
    read = {n: before.constants[n].astype(half.numpy).astype("f4") for n in ("table", "taps")}
    rounded = IRModule(before.functions, {**before.constants, **read}, before.bounds)
    for form in (after, lower(after).module):
        for actual, expected in zip(results(form), results(rounded), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert RoundWeights({"shared": half})(before) is before


def test_weights_without_a_named_type_get_the_general_one() -> None:
    after = RoundWeights({"taps": f16}, bf16)(model())
    assert set(after.constants) == {"shared", "first.bf16", "table.bf16", "taps.f16"}
    assert lower(model(), passes_for(weights="bf16")).module.constants.keys() >= {"first.bf16", "table.bf16"}


def test_weights_beyond_the_range_stay() -> None:
    before = model()
    before.constants["first"][2, 3] = 1e6
    assert RoundWeights({"first": f16})(before) is before
    assert "first.bf16" in RoundWeights({"first": bf16})(before).constants


def test_kernels_convert_rounded_weights_while_loading() -> None:
    before = model()
    exact = lowered_module(before, Settings())
    names: dict[str, WeightType] = dict.fromkeys(("table", "first", "taps"), "bf16")
    mixed = lowered_module(before, Settings(), weight_types=names)
    assert len(mixed.calls()) == len(exact.calls())
    assert sum(a.nbytes for a in mixed.module.constants.values()) < sum(
        a.nbytes for a in exact.module.constants.values()
    )


def same(actual: IRModule, expected: IRModule) -> None:
    """Equal programs over weights that are equal to the bit."""
    assert print_text(actual) == print_text(expected)
    assert set(actual.constants) == set(expected.constants)
    for name, array in expected.constants.items():
        assert actual.constants[name].dtype == array.dtype and actual.constants[name].tobytes() == array.tobytes()


def test_no_map_gives_the_exact_module_to_the_bit() -> None:
    before = model()
    same(lowered_module(before, Settings(), weight_types={}).module, lower(before, passes_for(), append=True).module)


@pytest.mark.parametrize("kind, bits", [("int8", 8), ("int4", 4)])
def test_one_integer_type_for_all_gives_the_quantised_module_to_the_bit(kind: WeightType, bits: int) -> None:
    before = model()
    lowered = lowered_module(before, Settings(), weight_types=dict.fromkeys(before.constants, kind))
    same(lowered.module, lowered_module(QuantizeWeights(bits)(before), Settings()).module)


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_one_16_bit_type_for_all_stores_the_bits_of_precision(half: Any) -> None:
    before = model()
    constants = lowered_module(before, Settings(), weight_types=dict.fromkeys(before.constants, half)).module.constants
    whole = lowered_module(before, Settings(precision=half)).module.constants
    rounded = {n: a for n, a in whole.items() if n.endswith(f".{half}") and not n.startswith("shared")}
    assert (
        set(rounded)
        == {n for n in constants if n.endswith(f".{half}")}
        == {f"{n}.{half}" for n in ("table", "first", "taps")}
    )
    for name, array in rounded.items():
        assert constants[name].tobytes() == array.tobytes()


def test_map_of_several_types_stores_each_weight_by_name() -> None:
    before = model()
    lowered = lowered_module(before, Settings(), weight_types={"first": "int4", "taps": "f16", "table": "bf16"}).module
    kinds = {n: str(a.dtype) for n, a in lowered.constants.items()}
    assert (
        kinds["first.int4"] in ("int8", "uint8")
        and kinds["taps.f16"] == "float16"
        and kinds["table.bf16"] == "bfloat16"
    )
    assert kinds["shared"] == "float32" and not {"first", "taps", "table"} & set(kinds)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantised_weight_as_read_equals_the_opened_one(bits: int, transposed: bool) -> None:
    g = GraphBuilder()
    weight = rand(40, 12) if not transposed else rand(12, 40)
    module = g.finish(g.call(Matmul(transposed), g.input("x", (40, 40)), g.constant("w", weight)))
    read = QuantizeWeights(bits).as_read(module, "w")
    assert read is not None and read.shape == weight.shape and np.abs(read - weight).max() > 0
    (opened,) = [evaluate_function(QuantizeWeights(bits)(module), [np.eye(40, dtype="f4")])]
    np.testing.assert_allclose(opened, read.T if transposed else read, rtol=1e-6, atol=1e-6)
    assert QuantizeWeights(bits, only=frozenset())(module) is module
