"""Windows that are reduced along one axis after the other: what they compute, how much they load, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning, outputs_of

from relax_tune.ir.core.expr import Expr, const, le, maximum, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule

STEP = step("separable_reduce", block="pool", loop="pool_p", step="pool_k1")


def pooled(kernel: int, stride: int, pad: int, largest: bool, dilation: int = 1) -> PrimFunc:
    """Windows with the padding inside."""
    return make.pooled(("h", "w"), kernel, stride, pad, largest, dilation)


@pytest.mark.parametrize(
    "kernel, stride, pad, dilation", [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 2, 2), (2, 3, 0, 1), (5, 3, 2, 2)]
)
@pytest.mark.parametrize("largest", [True, False])
def test_parted_windows_keep_the_meaning(kernel: int, stride: int, pad: int, dilation: int, largest: bool) -> None:
    func, reach = pooled(kernel, stride, pad, largest, dilation), (kernel - 1) * dilation + 1
    s = Schedule(func)
    assert s.apply(STEP[0], **STEP[1]) == ("pool_rows",)
    for h, w in ((0, 4), (4, 0), (1, 1), (3, 8), (9, 5)):
        if min(h, w) + 2 * pad >= reach:
            assert_same_meaning(func, s.func, {"h": h, "w": w})


def test_parted_windows_load_each_row_once_per_place() -> None:
    s = Schedule(pooled(3, 2, 1, True))
    (rows,) = s.apply(STEP[0], **STEP[1])
    assert [i.kind for i in find_block(s.func, rows).iters] == ["spatial", "spatial", "spatial", "reduce"]
    assert [i.kind for i in find_block(s.func, "pool").iters] == ["spatial", "spatial", "spatial", "reduce"]
    assert sum(x.var.name.startswith("pool_k") for x in loops(s.func.body)) == 1


def test_parted_maxima_keep_nan_and_signs() -> None:
    func = make.pooled((5, 6), 3, 1, 1, True)
    s = Schedule(func)
    s.apply(STEP[0], **STEP[1])
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0] * 10, np.float32).reshape(2, 5, 6)
    np.testing.assert_array_equal(outputs_of(s.func, {}, [x])[0], outputs_of(func, {}, [x])[0])


def windows_of(term: str) -> PrimFunc:
    """C[i] = max over j, k of a term of A (9, 70) and the place 2 * i + k."""
    b = TensorBuilder("windows")
    x, y = b.input("A", (9, 70)), b.output("C", (16,))

    def read(acc: Expr, i: Expr, j: Expr, k: Expr) -> Expr:
        place = 2 * i + k
        value = {
            "together": lambda: select(le(1, place), x[j, maximum(place - 1, 0)], const(0.0)),
            "twice": lambda: x[j, place] + x[j, i + k],
            "apart": lambda: x[j + i // 8, place],
            "backwards": lambda: x[j, 2 * i - k + 2],
            "half": lambda: x[j, (2 * i + k) // 2],
            "gaps": lambda: x[j, (4 * i + k) % 8],
            "wide": lambda: x[j, maximum(4 * i + k - 1, 0)],
        }[term]()
        return maximum(acc, value)

    b.reduce(y, (3, 3), const(-np.inf), read, name="win")
    return b.finish()


def test_conditions_on_places_move_along() -> None:
    func = windows_of("together")
    s = Schedule(func)
    s.apply("separable_reduce", block="win", loop="win_i", step="win_k1")
    assert_same_meaning(func, s.func, {})


@pytest.mark.parametrize("term", ["half", "wide"])
def test_functions_of_places_are_of_the_rows(term: str) -> None:
    func = windows_of(term)
    s = Schedule(func)
    s.apply("separable_reduce", block="win", loop="win_i", step="win_k1")
    assert_same_meaning(func, s.func, {})


def win(**changes: str) -> tuple[str, dict[str, str]]:
    return step("separable_reduce", **{"block": "win", "loop": "win_i", "step": "win_k1", **changes})


# fmt: off
REFUSED = [
    refuse("two ratios", lambda: windows_of("twice"), win(), message="in one ratio above 0"),
    refuse("an element outside the sum", lambda: windows_of("apart"), win(), message="in one ratio|only|in sums"),
    refuse("places of no window", lambda: windows_of("gaps"), win(), message="affine indices where windows leave places out"),
    refuse("windows that run back", lambda: windows_of("backwards"), win(), message="in one ratio above 0"),
    refuse("another axis than the window's", lambda: windows_of("together"), win(step="win_k"), message="in one ratio above 0"),
    refuse("two loops over elements", lambda: windows_of("together"), win(step="win_i"), message="one over steps"),
    refuse("a loop of another block", lambda: windows_of("together"), win(loop="win_z"), message="expects loops around 'win', got 'win_z'"),
    refuse("windows along one axis", lambda: make.pooled((9,), 3, 2, 0, True),
           step("separable_reduce", block="pool", loop="pool_l", step="pool_k"), message="along two axes"),
    refuse("a split loop", lambda: windows_of("together"), step("split", loop="win_i", factors=[None, 4]), win(loop="win_i_0"),
           message="one loop for each iterator"),
    refuse("a parallel loop", lambda: windows_of("together"), step("set_kind", loop="win_i", kind="parallel"), win(), message="serial"),
    refuse("products of weights", make.windows,
           step("separable_reduce", block="slide", loop="slide_j", step="slide_k1"), message="only|sums"),
]
# fmt: on


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.what)
def test_separable_reduce_refuses(case: Refusal) -> None:
    check(case)
