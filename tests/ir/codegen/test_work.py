"""Loops run on several threads only where there is enough work."""

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


def parallel_lines(func: PrimFunc) -> list[str]:
    """Return the lines that run a loop on several threads."""
    lines = [line.strip() for k in kernels_of(func, "c") for line in k.source.split("\n")]
    return [line for line in lines if "RT_PARALLEL_FOR(rt_part" in line]


def test_parallel_loop_of_few_known_steps_is_serial() -> None:
    assert not parallel_lines(rows(4, 8)) and not parallel_lines(rows(FEW // 64, 63))


def test_parallel_loop_of_functions_counts_more_steps() -> None:
    b = TensorBuilder("functions")
    x, y = b.input("A", (FEW // 64, 32), f32), b.output("B", (FEW // 64, 32), f32)
    b.compute(y, lambda i, j: call("sin", call("exp", x[i, j])), name="twice")
    s = Schedule(b.finish())
    s.set_kind("twice_i", "parallel")
    assert parallel_lines(s.func)


def test_parallel_loop_of_nothing_has_no_condition() -> None:
    assert not parallel_lines(rows(None, 0))


def test_parallel_loop_of_many_known_steps_has_no_condition() -> None:
    assert parallel_lines(rows(FEW // 64, 64)) == ["RT_PARALLEL_FOR(rt_part_0_rows_, &rt_data, 32, 0, 1);"]


def test_parallel_loop_of_symbolic_steps_asks_at_run_time() -> None:
    (line,) = parallel_lines(rows(None, None))
    assert re.search(r", 0, 1\.0 \* \(double\)\(\w+\) \* \(double\)\(\w+\) >= 2048\.0\);", line)


def test_steps_of_triangular_loops_are_unknown() -> None:
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
        actual = Compiled(device, "c", func)([x, np.full_like(x, 7)], [])
        np.testing.assert_array_equal(actual[-1], x * 2)
    finally:
        device.close()
