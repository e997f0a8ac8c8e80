"""Functions outlined into straight-line parts and a caller: results stay, parts lower, the caller has the control flow."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.support.programs import read, same
from tests.support.random_graphs import SIZES, SLOW, Made, graphs

from relax_tune.errors import BuildError, DeduceError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.control.outline import OutlineSubgraphs, is_straight_line
from relax_tune.ir.text.printer import print_text


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UserError as error:
        return error


@settings(SLOW, max_examples=examples(60))
@given(graphs(steps=12), st.lists(SIZES, min_size=2, max_size=3), st.integers(0, 9))
def test_outline_random_programs_keep_values(program: Made, sizes: list[dict[str, int]], seed: int) -> None:
    try:
        outlined = OutlineSubgraphs().run(program.module)
    except (BuildError, DeduceError):
        return
    verify(outlined.module)
    for name in outlined.subgraphs:
        part = outlined.module.functions[name]
        assert isinstance(part, Function)
        inputs = [p for p in part.params if not isinstance(p.info, ShapeInfo)]
        sizes_last = part.params[len(inputs) :]
        assert len(sizes_last) <= 1 and is_straight_line(
            Function(name, tuple(inputs), part.blocks, part.ret, part.ret_info)
        )
    rng = np.random.default_rng(seed)
    for size in sizes:
        args = program.arguments(size, rng)
        expected = outcome(lambda args=args: run_function(program.module, "main", args))
        actual = outcome(lambda args=args: run_function(outlined.module, "main", args))
        where = f"{print_text(program.module)}\n{print_text(outlined.module)}\n{size}\n{expected}\n{actual}"
        if isinstance(actual, UserError):
            assert isinstance(expected, UserError), where
        elif not isinstance(expected, UserError):  # unread values may be removed, together with their refusals
            same(actual, expected, where)


def test_outline_orders_independent_work_before_subgraphs() -> None:
    """Two chains that meet at the end are two parts, not four; a shape known only at run time gets a name."""
    module = read("""
        @function(pure=False)
        def main(x: Tensor((n,), f32), w: Tensor((m, 2), f32)) -> Tensor((n,), f32):
            with dataflow():
                a: Tensor((n,), f32) = op.exp(x)
                u: Tensor(None, f32, ndim=1) = op.unique(w)
                b: Tensor((n,), f32) = op.tanh(a)
                v: Tensor(None, f32, ndim=1) = op.relu(u)
                s: Shape(None, ndim=1) = op.shape_of(v)
                t: Tuple(Tensor((n,), f32), Shape(None, ndim=1)) = (b, s)
            r: Tensor((n,), f32) = call_host("look", (t,), out=Tensor((n,), f32))
            with dataflow():
                e: Tensor((n,), f32) = op.add(r, b)
            return e
    """)
    outlined = OutlineSubgraphs().run(module)
    assert len(outlined.subgraphs) == 2
    text = print_text(outlined.module)
    expected = textwrap.dedent("""
        @function(pure=False)
        def main(x: Tensor((n,), f32), w: Tensor((m, 2), f32)) -> Tensor((n,), f32):
            with dataflow():
                u: Tensor(None, f32, ndim=1) = op.unique(w)
                u_1: Tensor((u_0,), f32) = match_cast(u, Tensor((u_0,), f32))
                b: Tensor((n,), f32) = call("main_part0", x)
                t: Tuple(Tensor((n,), f32), Shape([u_0])) = (b, shape(u_0))
            r: Tensor((n,), f32) = call_host("look", (t,), out=Tensor((n,), f32))
            with dataflow():
                e: Tensor((n,), f32) = call("main_part1", r, b)
            return e
    """).strip()
    assert expected in text, text


def test_outline_passes_hidden_symbols_to_subgraphs() -> None:
    module = read("""
        @function
        def main(s: Shape([n]), x: Tensor((m + n,), f32)) -> Tensor((n * 2,), f32):
            with dataflow():
                a: Tensor((n,), f32) = op.slice(x, axis=0, begin=0, end=n)
                b: Tensor((n + n,), f32) = op.concat(a, a, axis=0)
            return b
    """)
    outlined = OutlineSubgraphs().run(module)
    (name,) = outlined.subgraphs
    part = outlined.module.functions[name]
    assert isinstance(part, Function)
    assert [repr(p.info) for p in part.params] == ["Tensor((m + n,), f32)", "Shape([n, m])"]


def test_straight_line_functions_are_recognised() -> None:
    straight = """
        @function
        def main(x: Tensor((n,), f32), w: {info}) -> Tensor((n,), f32):
            with dataflow():
                y: Tensor((n,), f32) = op.exp(x)
                t: Tuple(Tensor((n,), f32), Tensor((n,), f32)) = (y, x)
                z: Tensor((n,), f32) = t[0]
                c: Tensor((n,), f32) = match_cast(z, Tensor((n,), f32))
            return c
    """
    for info, expected in (("Tensor((m,), f32)", True), ("Tensor(None, f32, ndim=1)", False), ("Shape([m])", False)):
        f = read(straight.format(info=info)).functions["main"]
        assert isinstance(f, Function) and is_straight_line(f) is expected


def test_outline_refuses_operator_on_unknown_rank() -> None:
    module = read("""
        @function
        def main(x: Tensor(None, f32)) -> Tensor(None, f32):
            with dataflow():
                e: Tensor(None, f32) = op.exp(x)
            return e
    """)
    with pytest.raises(BuildError, match=r"main: e: .* to lower exp[\s\S]*op.exp\(x\)\n[\s\S]*\^"):
        OutlineSubgraphs().run(module)
