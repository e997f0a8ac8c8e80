"""Trial runs detect well-formed tensor functions that access memory illegally."""

from __future__ import annotations

import pytest
from tests.support import zoo

from relax_tune.errors import VerifyError
from relax_tune.ir.check.examine import examine
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import Exp
from relax_tune.ir.rewrite.pattern import op
from relax_tune.ir.rewrite.rules import Rule, rewrite
from relax_tune.ir.text.parser import parse_prim_func


def own(body: str, reads: str = "n") -> PrimFunc:
    text = (
        f"@prim_func(outputs=1)\ndef own(x: Buffer(({reads},), f32), y: Buffer((n,), f32)):\n    for i in serial(n):\n"
    )
    return parse_prim_func(text + f"        with block('own'):\n            vi = spatial(n, i)\n            {body}")


def calling(func: PrimFunc, rows: int | None = None, extra: int = 0) -> IRModule:
    g = GraphBuilder()
    n: Expr | int = g.symbol("n", 2, 64) if rows is None else rows
    x = g.input("x", (n + extra,))
    return g.finish(
        g.call_tir(g.add(func), [x], TensorInfo((n,) if isinstance(n, Expr) else x.info.shape, x.info.dtype))
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y[vi] = x[vi + 1]", r"n = 3: own: read of x\[3\] .*0\.\.2[\s\S]*\n +\| +\^"),
        ("y[vi + 70] = x[vi]", r"tried at n = 3: own: .*y.* out of bounds"),
        ("y[vi // 2] = x[vi]", r"tried at n = 3: own: output y\[2\] was never written"),
        ("y[vi] = select(vi < 1, x[vi], x[vi] + y[max(vi - 1, 0)])", r"own: read of y\[0\], .*nothing has written"),
        ("y[vi] = x[select(n < 4, vi, vi + 1)]", r"n = 4: own: read of x\[4\] is out"),
    ],
)  # fmt: skip
def test_examine_wrong_function_shows_failing_input(body: str, message: str) -> None:
    module = calling(own(body))
    verify(module)
    with pytest.raises(VerifyError, match=message):
        examine(module)
    examine(module, ["another"])
    g = GraphBuilder()
    operators = g.finish(g.call(Exp(), g.input("x", (g.symbol("n", 2, 64),))))
    with pytest.raises(VerifyError, match=message):
        rewrite(operators, Rule(op(Exp, "x"), lambda s: s.tir(own(body), "x")))


def test_examine_function_valid_at_called_sizes_passes() -> None:
    examine(calling(own("y[vi] = x[vi + 1]", "n + 1"), extra=1))
    examine(calling(own("y[vi] = x[vi]")))
    examine(calling(own("y[vi] = x[vi + 1]"), rows=100_000))  # too large to be tried


def test_examine_skips_sizes_outside_signature() -> None:
    g = GraphBuilder()
    x, y = g.input("x", (g.symbol("n"),)), g.input("y", (g.symbol("m"),))
    func = parse_prim_func(
        "@prim_func(outputs=1)\ndef both(x: Buffer((n,), f32), y: Buffer((n,), f32), z: Buffer((n,), f32)):\n"
        "    for i in serial(n):\n        z[i] = x[i] + y[i]"
    )
    examine(g.finish(g.call_tir(g.add(func), [x, y], x.info)))


def test_the_zoo_passes() -> None:
    """Gathers, reductions over nothing, scalars, tiles and predicates."""
    for case in zoo.cases():
        g = GraphBuilder()
        func = case.func
        args = [g.input(b.name, b.shape, b.dtype) for b in func.input_buffers]
        outs = [TensorInfo(b.shape, b.dtype) for b in func.output_buffers]
        examine(g.finish(g.call_tir(g.add(func), args, outs, func.scalar_params)))


@pytest.mark.parametrize("extent", [1 << 31, 1 << 40, 1 << 62])
@pytest.mark.parametrize("body", ["y[0] = x[0]", "y[j % n] = x[0]", "if j < n:\n            y[j] = x[j]"])
def test_examine_loop_of_any_extent_ends(extent: int, body: str) -> None:
    """Trial runs allocate no arrays of the loop's extent, and do not run all its iterations."""
    text = f"@prim_func(outputs=1)\ndef f(x: Buffer((n,), f32), y: Buffer((n,), f32)):\n    for j in serial({extent}):\n        "
    examine(calling(parse_prim_func(text + body)))
