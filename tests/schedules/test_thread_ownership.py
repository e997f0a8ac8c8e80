"""Local buffers that several loops over the items of a group touch: each element has one item, or the step is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Var
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule

WIDTH = 64


def doubled(where: Callable[[Expr], Expr] = lambda j: j) -> PrimFunc:
    """B = 2 A, C[i, j] = B[i, where(j)] + 1 over (n, 64)."""
    n = Var("n")
    b = TensorBuilder("doubled")
    x, y, z = b.input("A", (n, WIDTH)), b.alloc("B", (n, WIDTH)), b.output("C", (n, WIDTH))
    b.compute(y, lambda i, j: x[i, j] * 2.0, name="double")
    b.compute(z, lambda i, j: y[i, where(j)] + 1.0, name="inc")
    return b.finish()


def on_items(func: PrimFunc, first: list[int | None], second: list[int | None], scope: str = "local") -> Schedule:
    """Both stages for each row of a group, their columns cut by the arguments; the factor 16 is bound to items."""
    s = Schedule(func)
    row, column = s.loops_of("inc")
    s.compute_at("double", row)
    for block, name, factors in (("double", s.inner_loops("double", row)[0], first), ("inc", column, second)):
        parts = s.split(name, factors)
        item = parts[factors.index(16)]
        s.reorder([item, *(p for p in parts if p != item)])
        s.bind(item, "item")
        assert s.loops_of(block)[1] == item
    s.apply("set_scope", buffer="B", scope=scope)
    s.bind(row, "group")
    return s


@pytest.mark.opencl
@pytest.mark.parametrize("factors", [[None, 16], [16, None], [None, 16, 2]])
def test_local_buffer_with_same_item_in_all_stages_is_accepted(factors: list[int | None]) -> None:
    s = on_items(doubled(), factors, factors)
    assert_same_meaning(doubled(), s.func, {"n": 3})
    run = Compiled(opened("opencl"), "opencl", s.func)
    assert "barrier" not in run.kernels[0].source and run.kernels[0].local == (16,)
    data = np.random.default_rng(0).standard_normal((3, WIDTH), np.float32)
    (actual,) = run([data, np.empty_like(data)])
    np.testing.assert_array_equal(actual, data * 2 + 1)


@pytest.mark.parametrize(
    ("func", "first", "second"),
    [
        (doubled(), [None, 16], [16, None]),
        (doubled(), [None, 16], [None, 16, 2]),
        (doubled(lambda j: 63 - j), [None, 16], [None, 16]),
        (doubled(lambda j: j // 2), [None, 16], [None, 16]),
    ],
)
def test_local_buffer_with_elements_of_other_items_is_refused(
    func: PrimFunc, first: list[int | None], second: list[int | None]
) -> None:
    with pytest.raises(ScheduleError, match="another item writes; make its scope shared"):
        on_items(func, first, second)


@pytest.mark.opencl
def test_shared_buffer_gets_barriers() -> None:
    func = doubled(lambda j: 63 - j)
    s = on_items(func, [None, 16], [16, None], "shared")
    run = Compiled(opened("opencl"), "opencl", s.func)
    assert "barrier" in run.kernels[0].source
    data = np.random.default_rng(0).standard_normal((2, WIDTH), np.float32)
    (actual,) = run([data, np.empty_like(data)])
    np.testing.assert_array_equal(actual, data[:, ::-1] * 2 + 1)


def test_bind_group_outside_shared_buffer_is_refused() -> None:
    func = doubled()
    s = Schedule(func)
    row, _ = s.loops_of("inc")
    s.apply("set_scope", buffer="B", scope="shared")
    with pytest.raises(ScheduleError, match=r"its own .*, but block 'inc'"):
        s.bind(s.loops_of("double")[0], "group")
    s.compute_at("double", row)
    s.bind(row, "group")


def test_local_buffer_of_single_item_is_accepted() -> None:
    """One work-item on an axis needs no distinction, as in a trace replayed with numbers."""
    s = Schedule(doubled())
    row, column = s.loops_of("inc")
    s.compute_at("double", row)
    for name in (s.inner_loops("double", row)[0], column):
        whole, one = s.split(name, [None, 1])
        s.reorder([one, whole])
        s.bind(one, "item")
    s.apply("set_scope", buffer="B", scope="local")
    assert_same_meaning(doubled(), s.func, {"n": 3})
