"""Graph functions and modules as text, before and after lowering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from tests.support import zoo

from relax_tune.errors import ParseError
from relax_tune.ir.check.structural import first_difference, structural_hash
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import DType, f16, f32, i64
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.function import Bound, ExternFunc, IRModule
from relax_tune.ir.core.graph import (
    Binding,
    Call,
    CallDPSLibrary,
    CallTIR,
    Constant,
    DataflowBlock,
    Function,
    GVar,
    MatchCast,
    ShapeValue,
    TupleItem,
    TupleValue,
)
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, PrimInfo, ShapeInfo, TensorInfo, TupleInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module, parse_text
from relax_tune.ir.text.printer import print_text


def feed_forward() -> IRModule:
    """matmul + bias + GELU + matmul + add + layer norm over (b, n, 8), b in 1..4 and n in 1..16."""
    rng = np.random.default_rng(3)
    g = GraphBuilder()
    b, n = g.symbol("b", 1, 4), g.symbol("n", 1, 16)
    x = g.input("x", (b, n, 8))
    shapes = {"w1": (8, 12), "b1": (12,), "w2": (12, 8), "b2": (8,), "scale": (8,), "shift": (8,)}
    c = {name: g.constant(f"ff.{name}", rng.standard_normal(s).astype(np.float32)) for name, s in shapes.items()}
    h = g.call(Gelu(), g.call(Add(), g.call(Matmul(), x, c["w1"]), c["b1"]))
    h = g.call(Add(), g.call(Matmul(), h, c["w2"]), c["b2"])
    return g.finish(g.call(LayerNorm(), g.call(Add(), x, h), c["scale"], c["shift"]))


def round_trip(m: IRModule, operators: dict[str, type[Operator]] | None = None) -> None:
    text = print_text(m)
    back = parse_module(text, operators or OPERATORS, m.constants)
    assert first_difference(m, back) is None, text
    assert structural_hash(m) == structural_hash(back)
    assert print_text(back) == text


def test_feed_forward(golden: Callable[[str, str], None]) -> None:
    m = feed_forward()
    verify(m)
    round_trip(m)
    golden("feed_forward.txt", print_text(m))


def test_every_stage_of_lowering_prints_reads_and_verifies() -> None:
    stages = lower(feed_forward()).stages
    assert stages
    for name, m in stages:
        try:
            verify(m)
        except Exception as e:
            raise AssertionError(f"after {name}: {e}") from e
        round_trip(m)


@dataclass(frozen=True, slots=True)
class Odd(Operator):
    """Every kind of attribute."""

    number: int
    real: float
    flag: bool
    text: str
    nothing: None
    dtype: DType
    dim: Expr
    literal: Expr
    dims: tuple[Expr, ...]
    axes: tuple[int, ...]
    empty: tuple[int, ...]
    nested: tuple[tuple[int, ...], ...]
    infinite: float
    name: ClassVar[str] = "test.odd"


def everything() -> IRModule:
    n, m, k = Var("n"), Var("m"), Var("n")
    info = TensorInfo((n, const(4)), f32)
    x, s = GVar("x", info), GVar("class", ShapeInfo((n, m)))
    odd = Odd(
        -3, 0.5, True, 'a"b\n', None, f16, n * 2, const(7), (n, const(2)), (0, 1), (), ((1,), (2, 3)), float("-inf")
    )
    y = GVar("y", TensorInfo(None, None))
    c = GVar("x", TensorInfo((k, const(2)), f16))
    w = Constant("layer.0/w", TensorInfo((const(2),), f32))
    t = GVar("t", TupleInfo((info, ShapeInfo(None, 2), ObjectInfo())))
    u, v = GVar("u", info), GVar("v", TupleInfo((info, TensorInfo((k,), f32))))
    sh, q = GVar("sh", ShapeInfo((n, k))), GVar("q", TensorInfo(None, f32, 2))
    bindings = (
        Binding(y, Call(odd, (x, w))),
        MatchCast(c, y, TensorInfo((k, const(2)), f16)),
        Binding(sh, ShapeValue((n, k, const(3)))),
        Binding(t, TupleValue((x, s, y))),
        Binding(u, TupleItem(t, 0)),
        Binding(v, CallTIR("tiled.0", (u, w), (info, TensorInfo((k,), f32)), (n, k + 1))),
        Binding(q, CallDPSLibrary("openblas.sgemm", (u,), (info,), (n,))),
    )
    f = Function(
        "main", (x, s, GVar("p", PrimInfo(i64, n)), GVar("o", ObjectInfo())), (DataflowBlock(bindings), DataflowBlock(())),
        TupleValue((c, v)), TupleInfo((c.info, v.info)),
    )  # fmt: skip
    tiled = zoo.tiled_matmul()
    gemm = CallableInfo((TensorInfo((Var("a"), Var("b")), f32), ObjectInfo()), TensorInfo((Var("a"),), f32))
    functions = {
        "main": f,
        "tiled.0": tiled,
        "openblas.sgemm": ExternFunc("openblas.sgemm", gemm),
        "e": ExternFunc("f.e"),
    }
    return IRModule(functions, {}, (Bound(n, 1, 8), Bound(m)))


def test_everything_at_once(golden: Callable[[str, str], None]) -> None:
    m = everything()
    round_trip(m, {"test.odd": Odd})
    golden("everything.txt", print_text(m))


def test_single_functions() -> None:
    m = feed_forward()
    f = m.functions["main"]
    back = parse_text(print_text(f), OPERATORS)
    assert first_difference(f, back) is None  # type: ignore[arg-type]
    assert first_difference(f, parse_text(print_text(f, normalise=True), OPERATORS)) is None  # type: ignore[arg-type]


def test_names_do_not_matter() -> None:
    def make(symbol: str, name: str) -> IRModule:
        g = GraphBuilder()
        n = g.symbol(symbol, 1, 8)
        x = g.input(name, (n, 4))
        return g.finish(g.call(Reshape((n * 2, const(2))), x, hint=name + "2"))

    assert first_difference(make("n", "x"), make("rows", "input")) is None
    difference = first_difference(make("n", "x"), feed_forward())
    assert difference is not None and difference.path.startswith("bounds[0]")


BODY = "@function\ndef main(x: Tensor((n, 4), f32)) -> Object():\n    "
HEAD = "@function\ndef main(x: Tensor((n, 4), f32)) -> Tensor((n, 4), f32):\n    with dataflow():\n        "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "y: Tensor((n, 4), f32) = op.sine(x)\n    return y", r"line 4, column 34: unknown operator 'sine'; known: abs, "),
        (HEAD + "y: Tensor((n, 4), f32) = op.relu(z)\n    return y", r"line 4, column 42: nothing is called 'z' here"),
        (HEAD + "y: Tensor((n, 4), f32) = op.relu(x, axis=1)\n    return y", r"operator relu refuses its attributes"),
        (HEAD + "y = op.relu(x)\n    return y", r"expected a binding such as"),
        (HEAD + "y: Tensor(n) = op.relu(x)\n    return y", r"Tensor\(...\) does not take 1 arguments"),
        (HEAD + "y: Tensr((n,), f32) = op.relu(x)\n    return y", r"expected Tensor\(...\) or Shape"),
        (HEAD + "y: Tensor((n, 4), f32) = call_tir('f', (x,))\n    return y", r"expected call_tir\("),
        (HEAD + "y: Tensor((n, 4), f32) = shape(m)\n    return y", r"nothing is called 'm' here"),
        (BODY + "y: Object()\n    if x:\n        y = x\n    return y", r"line 4, column 5: .*both sides of the `if`"),
        (BODY + "y: Object()\n    if x:\n        y = x\n    else:\n        z = x\n    return y", r"line 7, column 9: expected both sides"),
        (BODY + "y: Object()\n    return y", r"line 3, column 5: expected a binding such as"),
        (BODY + "y: Object() = call('h', x)\n    return y", r"line 3, column 24: expected a graph function"),
        (BODY + "y: Object() = call(h, x)\n    return y", r"line 3, column 24: nothing is called 'h' here"),
        (BODY + "y: Object() = prim(n < k)\n    return y", r"line 3, column 28: nothing is called 'k'"),
        (BODY + "y: Object() = fn()\n    return y", r"fn\(...\) does not take 0 arguments"),
        (BODY + "y: Object() = call_host('h', (x,))\n    return y", r"expected call_host\("),
        (BODY + "y: Tensor(None, f32, ndim=-1) = x\n    return y", r"expected a number of dims >= 0, got -1"),
        (BODY + "y: Object() = call_host('\u00e9\u2028', z, out=x)\n    return y", r"column 35: expected a tuple.*\n[^^]*\| {35}\^"),
        (BODY + "if x:\n        pass\n    return x", r"line 3, column 5: .*`with dataflow\(\):`, a binding"),
        (HEAD + "y: Tensor((n, 4), f32) = op.relu(x)", r"graph function .*`return value`"),
        (HEAD + "y: Tensor((n, 4), f32) = x.relu(x)\n    return y", r"expected an operator such as op.add"),
        ("@function\ndef main(x):\n    return x", r"parameter x: expected an annotation"),
        ("@function\ndef main(x: Object()):\n    return x", r"expected the result's annotation"),
        ("@function\ndef main(x: Object()) -> Object():\n    return x\n" * 2, r"line 5, column 1: .*'main'"),
        ("module()\nextern('f', Tensor((n,), f32))", r"expected Callable"),
    ],
)  # fmt: skip
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_text(text, OPERATORS)
