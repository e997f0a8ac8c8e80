"""Sizes of merged functions: chains of operators that read an argument several times have texts and builds of linear size."""

from __future__ import annotations

import numpy as np
import pytest

from relax_tune.ir.core.dtype import DType, i8, i64
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.numeric import Modulo, Quotient
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text


def chain(op: OperatorSpec, element: DType, length: int) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 1, None)
    x, y = g.input("x", [n], element), g.input("y", [n], element)
    value: Value = x
    for _ in range(length):
        value = g.call(op, value, y)
    return g.finish(value)


def text_sizes(op: OperatorSpec, element: DType, length: int) -> list[int]:
    """Return the length of the text of each tensor function of a lowered chain."""
    lowered = lower(chain(op, element, length)).module
    return [len(print_text(f)) for f in lowered.functions.values() if isinstance(f, PrimFunc)]


@pytest.mark.parametrize("element", [i64, i8], ids=["i64", "i8"])
@pytest.mark.parametrize("op", [Quotient(), Modulo()], ids=["quotient", "modulo"])
def test_chain_of_remainders_has_texts_of_linear_size(op: OperatorSpec, element: DType) -> None:
    short, long = (text_sizes(op, element, length) for length in (8, 32))
    assert max(short + long) < 200_000
    assert sum(long) < 6 * sum(short)


@pytest.mark.parametrize("op", [Quotient(), Modulo()], ids=["quotient", "modulo"])
def test_fused_chain_of_remainders_equals_graph(op: OperatorSpec) -> None:
    module = chain(op, i64, 6)
    x, y = np.array([-(2**62), -7, 0, 5, 2**62]), np.array([3, -2, 4, 7, -5])
    np.testing.assert_array_equal(
        run_function(lower(module).module, "main", [x, y]), run_function(module, "main", [x, y])
    )


def test_chain_of_cheap_functions_is_one_function() -> None:
    assert len(text_sizes(Modulo(), i64, 3)) == 1
