"""Counted loops are recognised, and their outlined functions stay the recursion that they mean; other recursions are left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.programs import ones, read, same

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.graph import Function
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.control.counted_loops import loop_form
from relax_tune.ir.passes.control.outline import OutlineSubgraphs

SUMS = """
    @function
    def main(x: Tensor((n, 3), f32), start: Tensor((3,), f32), other: Tensor((3,), f32)) -> {result}:
        with dataflow():
            rows: Tensor((0, 3), f32) = op.slice(x, axis=0, begin=const(0, i64), end=const(0, i64))
            r: {result} = call("sums", prim(n), prim(const(0, i64)), start, other, rows, x)
        return r

    @function
    def sums({params}) -> {result}:
        done: {result}
        if {condition}:
            with dataflow():
                slice: Tensor((1, 3), f32) = op.slice(x, axis=0, begin=max(min(i, n - 1), 0), end=min(i + 1, n), step=1)
                now: Tensor((3,), f32) = op.reshape(slice, shape=[3])
                sum: Tensor((3,), f32) = op.add({state}, now)
                row: Tensor((1, 3), f32) = op.reshape(sum, shape=[1, 3])
                more: Tensor((i + 1, 3), f32) = op.concat({concat}, axis=0)
                extra: Tensor((3,), f32) = op.{extra}
                again: {result} = call("sums", prim(n), prim({next}), {after}, more, x)
            done = again
        else:
            with dataflow():
                pass
            done = (s, o, {rows})
        return done
"""
PARAMS = """size: Prim(i64, n), at: Prim(i64, i), s: Tensor((3,), f32), o: Tensor((3,), f32), rows: Tensor((i, 3), f32),
    x: Tensor((n, 3), f32)""".replace("\n", " ")
RESULT = "Tuple(Tensor((3,), f32), Tensor((3,), f32), Tensor(None, f32, ndim=2))"
PARTS = {
    "params": PARAMS,
    "condition": "prim(i < n)",
    "state": "s",
    "concat": "rows, row",
    "next": "i + 1",
    "after": "sum, o",
    "rows": "rows",
    "extra": "exp(o)",
    "result": RESULT,
}


def sums(**parts: str) -> Function:
    f = read(SUMS.format(**PARTS | parts)).functions["sums"]
    assert isinstance(f, Function)
    return f


def test_loop_form_of_counted_loop_has_states_rows_and_limit() -> None:
    f = sums()
    form = loop_form(f)
    assert form is not None and repr(form.limit) == "n" and repr(form.index) == "i"
    assert {f.params[at].name: v.name for at, v in form.states.items()} == {"s": "sum"}
    # The view of the row belongs to the concatenation: the row is the memory of the sum.
    assert {f.params[at].name: v.name for at, v in form.rows.items()} == {"rows": "sum"}
    assert [b.var.name for b in form.steps] == ["slice", "now", "sum"]
    assert [b.var.name for b in form.appends] == ["row", "more"]


def test_loop_form_of_exchanged_states_names_the_parameters() -> None:
    f = sums(after="o, sum")
    form = loop_form(f)
    assert form is not None
    assert {f.params[at].name: v.name for at, v in form.states.items()} == {"s": "o", "o": "sum"}


@pytest.mark.parametrize(
    "parts",
    [
        {"condition": "prim(i <= n)"},
        {"condition": "prim(n < i)"},
        {"condition": "prim(i < n + min(i, 2))"},
        {"concat": "row, rows"},
        {"extra": "max(more, axes=(0,))", "after": "s, extra"},
    ],
    ids=lambda parts: " ".join(map(str, parts.values())),
)
def test_loop_form_of_another_recursion_is_none(parts: dict[str, str]) -> None:
    assert loop_form(sums(**parts)) is None


def test_loop_form_of_function_with_effects_is_none() -> None:
    f = sums()
    assert loop_form(replace(f, pure=False)) is None


@pytest.mark.parametrize("after", ["sum, o", "o, sum"])
def test_outlined_counted_loop_is_the_same_recursion(after: str) -> None:
    module = read(SUMS.format(**PARTS | {"after": after}))
    outlined = OutlineSubgraphs().run(module)
    verify(outlined.module)
    loop = outlined.loops["sums"]
    assert (loop.part, loop.appending, loop.results) == ("sums_part0", "sums_part1", 1)
    assert not OutlineSubgraphs(loops=False).run(module).loops
    for n in (0, 1, 4):
        args = [ones(n, 3), np.zeros(3, np.float32), np.full(3, 7, np.float32)]
        same(run_function(outlined.module, "main", args), run_function(module, "main", args), f"n = {n}")
