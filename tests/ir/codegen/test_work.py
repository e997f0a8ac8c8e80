"""Parallel regions begin only where their work pays for starting threads."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened

from relax_tune.ir.codegen.work import FEW, at_least, steps
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, call, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import lower_block, map_blocks
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule


def rows(n: int | None, m: int | None) -> PrimFunc:
    """B = 2 * A of (n, m), rows in parallel."""
    dims = [Var(name) if size is None else const(size) for name, size in (("n", n), ("m", m))]
    b = TensorBuilder("rows")
    x, y = b.input("A", dims, f32), b.output("B", dims, f32)
    b.compute(y, lambda i, j: x[i, j] * 2.0, name="twice")
    s = Schedule(b.finish())
    s.set_kind("twice_i", "parallel")
    return s.func


def pragmas(func: PrimFunc) -> list[str]:
    return [line.strip() for k in kernels_of(func, "c") for line in k.source.split("\n") if "#pragma omp" in line]


def test_parallel_loop_of_few_known_steps_is_serial() -> None:
    assert not pragmas(rows(4, 8)) and not pragmas(rows(FEW // 64, 63))


def test_parallel_loop_of_functions_counts_more_steps() -> None:
    b = TensorBuilder("functions")
    x, y = b.input("A", (FEW // 64, 32), f32), b.output("B", (FEW // 64, 32), f32)
    b.compute(y, lambda i, j: call("sin", call("exp", x[i, j])), name="twice")
    s = Schedule(b.finish())
    s.set_kind("twice_i", "parallel")
    assert pragmas(s.func)


def test_parallel_loop_of_nothing_has_no_condition() -> None:
    assert not pragmas(rows(None, 0))


def test_parallel_loop_of_many_known_steps_has_no_condition() -> None:
    assert pragmas(rows(FEW // 64, 64)) == ["#pragma omp parallel for schedule(static)"]


def test_parallel_loop_of_symbolic_steps_asks_at_run_time() -> None:
    (found,) = pragmas(rows(None, None))
    assert re.search(r"if\(1\.0 \* \(double\)\(\w+\) \* \(double\)\(\w+\) >= 2048\.0\)", found)


def test_steps_of_an_inner_extent_known_inside_alone_are_unknown() -> None:
    n = Var("n")
    b = TensorBuilder("triangle")
    x, y = b.input("A", (n,), f32), b.output("B", (n,), f32)
    b.compute(y, lambda i: x[i] * 2.0, name="twice")
    body = map_blocks(b.finish().body, lower_block)
    assert steps(body, repr, 8) == [(1.0, ("n",))]
    assert steps(body, repr, 8, frozenset([n])) is None
    assert at_least(None, FEW) is True


@pytest.mark.ccompiler
@pytest.mark.parametrize("sizes", [(1, 1), (3, 700), (0, 9), (70, 65)])
def test_conditional_parallel_loop_computes_the_same(sizes: tuple[int, int]) -> None:
    func, device = rows(None, None), opened("c")
    try:
        x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
        found = Compiled(device, "c", func)([x, np.full_like(x, 7)], [])
        np.testing.assert_array_equal(found[-1], x * 2)
    finally:
        device.close()
