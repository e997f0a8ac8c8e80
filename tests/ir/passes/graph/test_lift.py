"""Computations on parameters in a separate function: which are lifted, and that results do not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ir.passes.test_graph_passes import Golden, operators, rand
from tests.support.programs import same
from tests.support.random_graphs import ALWAYS_THESE, SIZES, Made, graphs

from relax_tune.errors import UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bool_, f32, u8
from relax_tune.ir.core.expr import const, free_vars
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add, Cast, Exp, Mul, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.passes.graph.lift import LiftParameters
from relax_tune.ir.text.printer import print_text


def exported() -> IRModule:
    """A model whose weights are parameters, as torch exports it."""
    g = GraphBuilder()
    x, flag = g.input("x", (g.symbol("n"), 4)), g.input("flag", (), bool_)
    w, scale, bias = g.input("w", (3, 4)), g.input("scale", (3, 1)), g.input("bias", (3,))
    scaled = g.call(Mul(), w, g.call(Exp(), scale))
    y = g.call(Add(), g.call(Matmul(), x, g.call(Permute((1, 0)), scaled)), bias)
    other = g.branch(
        flag, lambda: g.call(Relu(), g.call(Exp(), scale)), lambda: g.call(Reshape((const(3), const(1))), bias)
    )
    return g.finish(g.call(Add(), y, g.call(Reshape((const(3),)), other)))


def test_lift_prepares_weight_parameters_once(golden: Golden) -> None:
    module = exported()
    after = LiftParameters(("w", "scale", "bias"))(module)
    golden("passes/lift_parameters.txt", f"# before\n{print_text(module)}\n# after\n{print_text(after)}")
    verify(after)
    for flag in (True, False):
        x, *weights = rand(2, 4), rand(3, 4), rand(3, 1), rand(3)
        expected = run_function(module, "main", [x, np.array(flag), *weights])
        prepared = run_function(after, "main_prepare", weights[:2])
        assert isinstance(prepared, tuple)
        actual = run_function(after, "main", [x, np.array(flag), weights[1], weights[2], *prepared])
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    lifted = LiftParameters(("permute", "bias"))(after)
    assert lifted is after  # nothing is left to lift
    with pytest.raises(UserError, match="x, flag, w, scale, bias, got v"):
        LiftParameters(("v",))(module)


def test_unpacking_of_parameters_is_not_lifted() -> None:
    g = GraphBuilder()
    x, packed = g.input("x", (g.symbol("n"), 4)), g.input("packed", (4, 3), u8)
    wide = g.call(Cast(f32), packed)
    module = g.finish(g.call(Add(), g.call(Matmul(), x, wide), g.call(Sum((0,), False), wide)))
    after = LiftParameters(("packed",))(module)
    verify(after)
    main, prepare = (after.functions[n] for n in ("main", "main_prepare"))
    assert isinstance(main, Function) and [p.name for p in main.params] == ["x", "packed", "sum"]
    assert isinstance(prepare, Function) and [p.name for p in prepare.params] == ["packed"]
    assert operators(after)["cast"] == 1 and operators(after, "main_prepare")["cast"] == 1


def test_lift_parameters_random_programs_keep_values() -> None:
    fired = []

    @ALWAYS_THESE
    @given(graphs(steps=5, first=["prepared"]), SIZES, st.integers(0, 9))
    def check(program: Made, sizes: dict[str, int], seed: int) -> None:
        main = program.module.functions["main"]
        assert isinstance(main, Function)
        names = [p.name for p in main.params if isinstance(p.info, TensorInfo) and not free_vars(*(p.info.shape or ()))]
        args = program.arguments(sizes, np.random.default_rng(seed))
        try:
            expected = run_function(program.module, "main", args)
            after = LiftParameters(tuple(names))(program.module)
        except UserError:
            return
        verify(after)
        fired.append(after is not program.module)
        given_now = dict(zip((p.name for p in main.params), args, strict=True))
        prepare, rest = after.functions.get("main_prepare"), after.functions["main"]
        if isinstance(prepare, Function) and isinstance(rest, Function):
            prepared = run_function(after, "main_prepare", [given_now[p.name] for p in prepare.params])
            assert isinstance(prepared, tuple)
            lifted = rest.params[len(rest.params) - len(prepared) :]
            given_now |= dict(zip((p.name for p in lifted), prepared, strict=True))
            args = [given_now[p.name] for p in rest.params]
        same(run_function(after, "main", args), expected, print_text(after), 1e-4)

    check()
    assert sum(fired) >= 2 and sum(fired) * 2 >= len(fired), fired
