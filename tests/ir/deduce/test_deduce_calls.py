"""Deduction through calls of functions, function values, branches and side effects."""

from __future__ import annotations

import pytest
from tests.support.programs import (
    agree,
    checked,
    compiled,
    never,
    ones,
    read,
    refuse,
    run,
    tensor,
    text_refused,
)

from relax_tune.errors import ParseError, UserError, VerifyError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Var, const, le
from relax_tune.ir.core.graph import If
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, PrimInfo, ShapeInfo, TensorInfo, TupleInfo
from relax_tune.ir.deduce.relations import is_base, join
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Slice
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.runtime.device.base import Device

pytestmark = pytest.mark.ccompiler
n, m, k = Var("n"), Var("m"), Var("k")


# calls through signatures

APPLY = """
    @function
    def apply(f: Callable((Tensor((k,), f32),), Tensor((k,), f32)), x: Tensor((n,), f32)) -> Tensor((n,), f32):
        with dataflow():
            y: Tensor((n,), f32) = call(f, x)
            z: Tensor((n,), f32) = call(f, y)
        return z

    @function
    def double(x: Tensor((n,), f32)) -> Tensor((n,), f32):
        with dataflow():
            y: Tensor((n,), f32) = op.add(x, x)
        return y

    @function
    def longer(x: Tensor((n,), f32)) -> Tensor((n + n,), f32):
        with dataflow():
            y: Tensor((n + n,), f32) = op.concat(x, x, axis=0)
        return y

    @function
    def main(x: Tensor((m,), f32)) -> Tensor((m,), f32):
        with dataflow():
            f: Callable((Tensor((k,), f32),), Tensor((k,), f32)) = fn("double")
            y: Tensor((m,), f32) = call("apply", {f}, x)
        return y
"""


def test_functions_are_values(device: Device) -> None:
    for f in ("f", 'fn("double")'):
        module = read(APPLY.format(f=f))
        (result,) = agree(module, device, [ones(3)])
        assert result.tolist() == [4, 8, 12]
    text_refused(APPLY.format(f='fn("longer")'), "apply: parameter f: result: dim 0", 'call("apply", fn("longer"), x)')
    text_refused(APPLY.format(f="x"), "apply: parameter f: expected Callable", "got Tensor((m,), f32)")


def test_symbols_of_callee_are_solved_for(device: Device) -> None:
    text = """
        @function
        def halves(x: Tensor((n * 2,), f32)) -> Tensor((n,), f32):
            with dataflow():
                y: Tensor((n,), f32) = op.slice(x, axis=0, begin=0, end=n)
                z: Tensor((n,), f32) = op.exp(y)
            return z

        @function
        def main(x: Tensor({dims}, f32)) -> Tensor({out}, f32):
            with dataflow():
                y: Tensor({out}, f32) = call("halves", x)
            return y
    """
    agree(read(text.format(dims="(6,)", out="(3,)")), device, [ones(6)])
    text_refused(text.format(dims="(7,)", out="(3,)"), "halves: parameter x: dim 0: expected n * 2 = 6, got 7")
    module = read(text.format(dims="(m,)", out="(m // 2,)"))
    agree(module, device, [ones(4)], [ones(0)])
    refuse(module, device, [ones(5)], "halves: parameter x", "dim 0", "4", "5", 'call("halves", x)')


def test_bounds_of_callee_hold_at_calls(device: Device) -> None:
    text = """
        n = symbol("n", lower=1, upper=4)

        @function
        def small(x: Tensor((n,), f32)) -> Tensor((n,), f32):
            with dataflow():
                y: Tensor((n,), f32) = op.exp(x)
            return y

        @function
        def main(x: Tensor({dim}, f32)) -> Tensor({dim}, f32):
            with dataflow():
                y: Tensor({dim}, f32) = call("small", x)
            return y
    """
    module = read(text.format(dim="(m,)"))
    agree(module, device, [ones(1)], [ones(4)])
    refuse(module, device, [ones(5)], "small: expected 1 <= n <= 4", "5", 'call("small", x)')
    refuse(module, device, [ones(0)], "small: expected 1 <= n <= 4", "0")
    text_refused(text.format(dim="(5,)"), "small: expected 1 <= n <= 4, got n = 5", 'call("small", x)')


def test_one_function_called_often(device: Device) -> None:
    module = read("""
        @function
        def sub(x: Tensor((k,), f32), y: Tensor((j,), f32)) -> Tensor((k,), f32):
            with dataflow():
                c: Tensor((k,), f32) = match_cast(y, Tensor((k,), f32))
                a: Tensor((k,), f32) = op.add(x, c)
            return a

        @function
        def main(x: Tensor((n,), f32), y: Tensor((m,), f32)) -> Tensor((n,), f32):
            with dataflow():
                a: Tensor((n,), f32) = call("sub", x, y)
                b: Tensor((m,), f32) = call("sub", y, a)
                c: Tensor((n,), f32) = call("sub", a, b)
            return c
    """)
    agree(module, device, [ones(3), ones(3)])
    refuse(module, device, [ones(3), ones(4)], "sub: match_cast of y", "dim 0", "3", "4")


def test_tuples_and_shapes_pass_through_calls(device: Device) -> None:
    module = read("""
        @function
        def two(x: Tensor((n,), f32), t: Tuple(Tensor((n,), f32), Shape([n]))) -> Tuple(Tensor((n,), f32), Shape([n])):
            with dataflow():
                u: Tensor((n,), f32) = t[0]
                s: Shape([n]) = t[1]
                v: Tensor((n,), f32) = op.reshape_to(u, s)
                a: Tensor((n,), f32) = op.add(x, v)
            return (a, s)

        @function
        def main(x: Tensor((n, 2), f32)) -> Tensor((n, 2), f32):
            with dataflow():
                d: Shape([n, 2]) = op.shape_of(x)
                f: Tensor((n * 2,), f32) = op.flatten(x)
                s: Shape([n * 2]) = op.shape_of(f)
                t: Tuple(Tensor((n * 2,), f32), Shape([n * 2])) = (f, s)
                r: Tuple(Tensor((n * 2,), f32), Shape([n * 2])) = call("two", f, t)
                a: Tensor((n * 2,), f32) = r[0]
                b: Tensor((n, 2), f32) = op.reshape_to(a, d)
                c: Tensor((n, 2), f32) = op.exp(b)
            return c
    """)
    agree(module, device, [ones(3, 2)], [ones(0, 2)])


def test_recursion_in_tail_position_grows_nothing(device: Device) -> None:
    module = read("""
        @function
        def main(x: Tensor((n,), f32), steps: Prim(i64, k)) -> Tensor((n,), f32):
            y: Tensor((n,), f32)
            if prim(k <= 0):
                y = x
            else:
                with dataflow():
                    d: Tensor((n,), f32) = op.add(x, x)
                    r: Tensor((n,), f32) = call("main", d, prim(k - 1))
                y = r
            return y
    """)
    few, many = agree(module, device, [ones(2), 3], [ones(2), 120])
    assert few.tolist() == [8, 16] and many.tolist() == [2.0**120, 2.0**121]


# branches


def test_joins() -> None:
    both = {
        (tensor(n, 4), tensor(n, 4)): tensor(n, 4),
        (tensor(n + n), tensor(n * 2)): tensor(n + n),
        (tensor(n), tensor(n, 1)): TensorInfo(None, f32, None),
        (ShapeInfo((n,)), ShapeInfo((m,))): ShapeInfo(None, 1),
        (PrimInfo(i64, n), PrimInfo(i64, m)): PrimInfo(i64),
        (PrimInfo(i64, n), PrimInfo(bool_)): ObjectInfo(),
        (TupleInfo((tensor(n), tensor(4))), TupleInfo((tensor(n), tensor(5)))): TupleInfo(
            (tensor(n), TensorInfo(None, f32, 1))
        ),
        (TupleInfo((tensor(n),)), TupleInfo(())): ObjectInfo(),
    }
    for (a, b), expected in both.items():
        assert join(a, b) == expected and is_base(join(b, a), a) is is_base(join(b, a), b) is Proof.YES
    same = CallableInfo((tensor(n),), tensor(n))
    other = CallableInfo((tensor(m),), tensor(m))
    assert join(same, other) in (same, other)
    longer = join(same, CallableInfo((tensor(m),), tensor(m * 2)))
    assert longer == CallableInfo(None, TensorInfo(None, f32, 1))


def test_symbols_of_branch_are_local() -> None:
    text = """
        @function
        def main(x: Tensor(None, f32, ndim=1)) -> {ret}:
            y: {ret}
            if prim(True):
                with dataflow():
                    a: Tensor((m,), f32) = match_cast(x, Tensor((m,), f32))
                y = a
            else:
                y = x
            return y
    """
    assert run(read(text.format(ret="Tensor(None, f32, ndim=1)")), ones(3)).shape == (3,)
    never(
        lambda: read(text.format(ret="Tensor((m,), f32)")), "symbol m is bound by no parameter and no match_cast before"
    )


def test_each_side_knows_the_condition() -> None:
    g = GraphBuilder()
    size = g.symbol("n")
    x = g.input("x", (size,))
    y = g.branch(
        le(3, size),
        lambda: g.call(Slice(0, const(0), const(3)), x),
        lambda: g.call(Slice(0, const(0), const(3)), x),
    )
    module = checked(g.finish(y))
    branch = module.functions["main"].bindings[0].value  # type: ignore[union-attr]
    assert isinstance(branch, If)
    assert is_base(tensor(3), branch.then.bindings[0].var.info) is Proof.YES
    assert is_base(tensor(size), branch.orelse.bindings[0].var.info) is Proof.YES
    assert y.info == TensorInfo(None, f32, 1)
    assert [run(module, ones(s)).shape[0] for s in (0, 2, 3, 7)] == [0, 2, 3, 3]


def test_only_the_side_taken_runs(device: Device) -> None:
    text = """
        n = symbol("n", lower=1, upper=8)

        @function
        def main(x: Tensor((n,), f32), w: Tensor((m,), f32)) -> Tensor(None, f32, ndim=1):
            y: Tensor(None, f32, ndim=1)
            if prim(n <= {limit}):
                with dataflow():
                    a: Tensor((n,), f32) = op.exp(x)
                y = a
            else:
                with dataflow():
                    c: Tensor((n,), f32) = match_cast(w, Tensor((n,), f32))
                    b: Tensor((n,), f32) = op.add(x, c)
                y = b
            return y
    """
    undecided = read(text.format(limit=2))
    agree(undecided, device, [ones(2), ones(5)], [ones(3), ones(3)])
    refuse(undecided, device, [ones(3), ones(5)], "match_cast of w", "3", "5")
    agree(read(text.format(limit=8)), device, [ones(8), ones(2)])
    agree(read(text.format(limit=0)), device, [ones(3), ones(3)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y: Tensor((n,), f32)\n    if x:\n        y = x\n    else:\n        y = x", "expected a scalar of bool"),
        ("with dataflow():\n        y: Tensor((n,), f32) = call_host(\"h\", (x,), out=Tensor((n,), f32))", "declared pure|side effects"),
    ],
)  # fmt: skip
def test_misplaced_branches_and_effects_are_refused(body: str, message: str) -> None:
    head = "@function\ndef main(x: Tensor((n,), f32)) -> Tensor((n,), f32):\n    "
    with pytest.raises(VerifyError, match=message):
        verify(parse_module(head + body + "\n    return y", OPERATORS))


def test_side_effects_stay_in_order(device: Device) -> None:
    module = read("""
        @function(pure=False)
        def main(x: Tensor((n,), f32)) -> Tensor((n,), f32):
            a: Object() = call_host("log", (x,), out=Object())
            with dataflow():
                y: Tensor((n,), f32) = op.add(x, x)
            b: Object() = call_host("log", (y,), out=Object())
            z: Tensor((n,), f32) = call_host("grow", (y,), out=Tensor((n,), f32))
            return z
    """)
    logged: list[float] = []
    hosts = {"log": lambda v: logged.append(float(v[0])), "grow": lambda v: v + 1}
    out = run_function(module, "main", [ones(2)], hosts=hosts)
    assert out.tolist() == [3, 5] and logged == [1, 2]
    with pytest.raises(VerifyError, match="value z: expected"):
        run_function(module, "main", [ones(2)], hosts={**hosts, "grow": lambda v: v[:1]})
    with pytest.raises(UserError, match="expected the host routine 'log'; given: none"):
        run(module, ones(2))
    logged.clear()
    with compiled(module, device, hosts) as program:
        assert program(ones(2)).tolist() == [3, 5] and logged == [1, 2]


# calls that never fit


@pytest.mark.parametrize(
    ("param", "arg", "words"),
    [
        ("Tensor((n, n + 1), f32)", "Tensor((m, m), f32)", ("dim 1", "n + 1 = m + 1", "got m")),
        ("Tensor((n, 4), f32)", "Tensor((m,), f32)", ("expected 2 dims, got 1",)),
        ("Tensor((n,), f32)", "Tensor((m,), f16)", ("dtype f32, got f16",)),
        ("Shape([n, n])", "Shape([2, 3])", ("dim 1", "n = 2", "got 3")),
        (
            "Tuple(Tensor((n,), f32), Shape([n]))",
            "Tuple(Tensor((4,), f32), Shape([5]))",
            ("field 1: dim 0", "n = 4", "5"),
        ),
        ("Prim(i64, n)", "Tensor((m,), f32)", ("expected Prim(i64, n)",)),
        ("Tensor((n * 2,), f32)", "Tensor((m * 2 + 1,), f32)", ("dim 0", "got m * 2 + 1")),
    ],
)
def test_other_calls(param: str, arg: str, words: tuple[str, ...]) -> None:
    text = f"""
        @function
        def g(x: {param}) -> Object():
            return x

        @function
        def main(p: Tensor((m,), f32), y: {arg}) -> Object():
            with dataflow():
                z: Object() = call("g", y)
            return z
    """
    text_refused(text, "g: parameter x: ", *words, 'call("g", y)')


def test_arity_and_names() -> None:
    text = """
        @function
        def g(x: Tensor((n,), f32), y: Tensor((n,), f32)) -> Tensor((n,), f32):
            return x

        @function
        def main(x: Tensor((n,), f32)) -> Tensor((n,), f32):
            with dataflow():
                z: Tensor((n,), f32) = call({args})
            return z
    """
    text_refused(text.format(args='"g", x'), "g: expected 2 arguments, got 1; parameter y has none")
    text_refused(text.format(args='"g", x, x, x'), "g: expected 2 arguments, got 3")
    text_refused(text.format(args="x, x"), "x: expected a function to call, got Tensor((n,), f32)")
    with pytest.raises(ParseError, match=r"line 9, column .*got 'h'"):
        parse_module(text.format(args='"h", x').replace("\n        ", "\n"), OPERATORS)
