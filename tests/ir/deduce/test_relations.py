"""Annotations against values: arguments, results, casts, and sizes that depend on data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.programs import agree, checked, info, interpreted_refuses, never, ones, read, refuse, run, tensor
from tests.support.programs import result as result_of

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bool_, f16, f32, i64
from relax_tune.ir.core.expr import Expr, Var, const, maximum
from relax_tune.ir.core.struct_info import PrimInfo, ShapeInfo, StructInfo, TensorInfo, TupleInfo
from relax_tune.ir.deduce.relations import is_base
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Flatten, Permute, Reshape, Slice, Split
from relax_tune.ir.op.math.elementwise import Add, Exp, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.shapes import TensorToShape, Unique
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device

pytestmark = pytest.mark.ccompiler
n, m, k = Var("n"), Var("m"), Var("k")


# views


@pytest.mark.parametrize(
    ("old", "new", "proof"),
    [
        ((n, m), (m, n), Proof.YES),
        ((n * 2, m), (n, m * 2), Proof.YES),
        ((n + 1, n - 1), (n * n - 1,), Proof.YES),
        ((n, 4), (n, 2, 3), Proof.UNKNOWN),
        ((n, m), (n + m,), Proof.UNKNOWN),
        ((n * 2,), (2, n + 1), Proof.NO),
        ((2, n), (n * 2 + 1,), Proof.NO),
    ],
)
def test_other_reshapes(old: Any, new: Any, proof: Proof) -> None:
    g = GraphBuilder()
    y = g.input("y", old)
    op = Reshape(tuple(d if isinstance(d, Expr) else const(d) for d in new))
    if proof is Proof.NO:
        never(lambda: g.call(op, y), "reshape", "products")
        return
    g.call(op, y)
    assert len(g.checks) == (proof is Proof.UNKNOWN)


def test_expand_and_flatten_again() -> None:
    g = GraphBuilder()
    y = g.call(Flatten(), g.call(ExpandDims((0, 2)), g.input("x", (n, m))))
    assert is_base(tensor(n * m), y.info) is Proof.YES


# products


def test_other_products() -> None:
    g = GraphBuilder()
    batch = g.call(Matmul(), g.input("a", (m, 2, n, k)), g.input("b", (k, 5)))
    assert batch.info == tensor(m, 2, n, 5) and not g.checks
    turned = g.call(Matmul(True), g.input("c", (n, k)), g.input("d", (m, k)))
    assert turned.info == tensor(n, m) and not g.checks
    never(lambda: g.call(Matmul(), g.input("e", (2, n, k)), g.input("f", (3, k, m))), "dim 0", "2 and 3")
    never(lambda: g.call(Matmul(), g.input("h", (n, k * 2)), g.input("i", (k * 2 + 1, m))), "inner dims", "k * 2 + 1")
    never(lambda: g.call(Matmul(), g.input("j", (n, k)), g.input("l", (k, m), f16)), "dtype", "f32", "f16")
    assert g.call(Matmul(), g.input("o", None), g.input("p", (k, m))).info == TensorInfo(None, f32)


# broadcasting


def test_other_broadcasts() -> None:
    g = GraphBuilder()
    x = g.input("x", (n, 1, 4))
    assert g.call(Add(), x, g.input("y", (m, 1))).info == tensor(n, m, 4)
    assert g.call(Add(), x, g.input("s", ())).info == tensor(n, 1, 4)
    assert not g.checks
    assert g.call(Add(), g.input("a", (n, 4)), g.input("b", (k, 4))).info == TensorInfo(None, f32, 2)
    assert g.call(Add(), g.input("c", (n,)), g.input("d", (7,))).info == tensor(7)
    assert len(g.checks) == 2
    never(lambda: g.call(BroadcastTo((n, const(3))), g.input("e", (n, 4))), "dim 1", "4", "3")
    never(lambda: g.call(Add(), g.input("f", (n + 2,)), g.input("h", (n + 3,))), "dim 0", "n + 2", "n + 3")


def test_dim_equal_to_1_at_run_time_is_broadcast(device: Device) -> None:
    """`n` may be 3, or 1; at 1 the loops must read its only element, not what lies behind it."""
    module = read("""
        n = symbol("n")

        @function
        def main(x: Tensor((n, n), f32), y: Tensor((n, 3), f32)) -> Tensor((n, 3), f32):
            with dataflow():
                z: Tensor((n, 3), f32) = op.add(x, y)
            return z
    """)
    arrays = [(np.full((size, size), 5, np.float32), np.ones((size, 3), np.float32)) for size in (3, 1)]
    assert [out.tolist() for out in agree(module, device, *arrays)] == [[[6.0] * 3] * 3, [[6.0] * 3]]
    refuse(module, device, (ones(2, 2), ones(2, 3)), "2", "3")


def test_values_decide_where_annotations_do_not() -> None:
    module = read("""
        @function
        def main(x: Tensor(None, f32), y: Tensor(None, None)) -> Tensor(None, None):
            z: Tensor(None, None) = op.add(x, y)
            return z
    """)
    assert run(module, ones(2, 3), ones(3)).shape == (2, 3)
    interpreted_refuses(module, [ones(2, 3), ones(2)], "dim 1", "3 and 2", "op.add(x, y)", "^^^")
    interpreted_refuses(module, [ones(2), ones(2, dtype=np.float64)], "one dtype", "f32", "f64")


# joins and cuts


def test_other_joins_and_cuts() -> None:
    g = GraphBuilder()
    x, y = g.input("x", (n, 4)), g.input("y", (n, m))
    assert g.call(Concat(1), x, y, x).info == tensor(n, m + 8)
    never(lambda: g.call(Concat(0), x, g.input("z", (m, 5))), "dim 1", "4", "5")
    g.call(Concat(0), x, y)
    assert len(g.checks) == 1
    thirds = g.call(Split(3, 1), g.input("w", (2, n * 3)))
    assert thirds.info == TupleInfo((tensor(2, n),) * 3)
    sixths = g.call(Split(2), g.call(Concat(0), x, x))
    assert sixths.info == TupleInfo((tensor(n, 4),) * 2)


@pytest.mark.parametrize("parts", [2, 4, 5])
@pytest.mark.parametrize("size", [0, 1, 5, 8])
def test_uneven_cuts(parts: int, size: int) -> None:
    g = GraphBuilder()
    module = g.finish(g.call(Split(parts), g.input("x", (n + 1,))))
    got = run(module, ones(size + 1))
    c = -(-(size + 1) // parts)
    assert [len(p) for p in got] == [max(min(c, size + 1 - i * c), 0) for i in range(parts)]
    assert np.concatenate(got).tolist() == ones(size + 1).tolist()


def test_other_slices() -> None:
    g = GraphBuilder()
    x = g.input("x", (n, 4))
    for begin, end, expected in (
        (const(0), n, n),
        (const(2), const(3), None),
        (n, n, const(0)),
        (n - 1, n, None),
        (const(1), n + 5, maximum(n - 1, 0)),
        (const(0), n + 5, n),
    ):
        y = g.call(Slice(0, begin, end), x).info
        assert isinstance(y, TensorInfo) and y.shape is not None
        if expected is not None:
            assert is_base(tensor(expected, 4), y) is Proof.YES, y
    g = GraphBuilder()
    x = g.input("x", (n,))
    g.input("y", (m,))
    parts = [g.call(Slice(0, a, b), x) for a, b in [(n // 2, n), (const(1), m), (m, n), (m, m + 2)]]
    module = checked(g.finish(parts))
    for size, other in ((0, 0), (1, 3), (5, 2), (4, 9)):
        v = ones(size)
        expected = [v[size // 2 :], v[1:other], v[other:size], v[other : other + 2]]
        assert [p.tolist() for p in run(module, v, ones(other))] == [w.tolist() for w in expected]


# match_cast


def test_shapes_and_tuples_are_cast() -> None:
    module = read("""
        @function
        def main(x: Tensor((n,), f32), s: Shape(None), t: Object()) -> Tuple(Shape([n, m]), Tensor((m, k), None)):
            with dataflow():
                c: Shape([n, m]) = match_cast(s, Shape([n, m]))
                d: Tuple(Tensor((m, k), None), Prim(i64, k)) = match_cast(t, Tuple(Tensor((m, k), None), Prim(i64, k)))
                e: Tensor((m, k), None) = d[0]
            return (c, e)
    """)
    good = (ones(2, 3), 3)
    shape, array = run(module, ones(4), (4, 2), good)
    assert shape == (4, 2) and array.shape == (2, 3)
    interpreted_refuses(module, [ones(4), (5, 2), good], "match_cast of s", "dim 0", "4", "5")
    interpreted_refuses(module, [ones(4), (4, 2, 1), good], "match_cast of s", "a tuple of 3")
    interpreted_refuses(module, [ones(4), (4, 1), good], "match_cast of t, field 0", "dim 0", "1", "2")
    interpreted_refuses(module, [ones(4), (4, 2), (ones(2, 3), 4)], "field 1", "equal to 3, got 4")
    interpreted_refuses(module, [ones(4), (4, 2), ones(1)], "match_cast of t", "got an array of float32")


def test_bounds_and_expressions_of_cast_symbols(device: Device) -> None:
    module = read("""
        m = symbol("m", lower=1, upper=4)

        @function
        def main(x: Tensor((n,), f32)) -> Tensor((m,), f32):
            c: Tensor((m * 2,), f32) = match_cast(x, Tensor((m * 2,), f32))
            y: Tensor((m,), f32) = op.slice(c, axis=0, begin=0, end=m)
            z: Tensor((m,), f32) = op.relu(y)
            return z
    """)
    agree(module, device, [ones(2)], [ones(8)])
    refuse(module, device, [ones(3)], "match_cast of x", "dim 0", "3")
    refuse(module, device, [ones(10)], "1 <= m <= 4", "5")
    refuse(module, device, [ones(0)], "1 <= m <= 4", "0")


def test_weights_and_results_are_cast(device: Device) -> None:
    g = GraphBuilder()
    size, other = g.symbol("n"), g.symbol("m")
    x, y = g.input("x", (size,)), g.input("y", (other,))
    c = g.match_cast(g.constant("c", ones(4)), tensor(size))
    z = g.call(Add(), x, c)
    module = checked(g.finish((z, g.match_cast(g.call(Exp(), y), tensor(size)))))
    agree(module, device, [ones(4), ones(4)])
    refuse(module, device, [ones(5), ones(5)], "match_cast of c", "dim 0", "5", "4")
    refuse(module, device, [ones(4), ones(5)], "match_cast of exp", "dim 0", "5", "4")


def test_impossible_casts_are_refused() -> None:
    g = GraphBuilder()
    x = g.input("x", (n + 1, 4))
    never(lambda: g.match_cast(x, tensor(n, 4)), "x: dim 0: expected n, got n + 1", "match_cast(x")
    never(lambda: g.match_cast(x, TensorInfo(None, f16, 2)), "expected dtype f16, got f32")
    never(lambda: g.match_cast(x, ShapeInfo(None, 2)), "expected Shape(ndim=2)")
    never(lambda: g.match_cast(x, tensor(k)), "expected 1 dims, got 2")


# arguments


def test_other_arguments(device: Device) -> None:
    module = read("""
        n = symbol("n", lower=1, upper=4)

        @function
        def main(x: Tensor((n, n), f32), y: Tensor((2 * n,), f32)) -> Tensor((n, n), f32):
            with dataflow():
                z: Tensor((n, n), f32) = op.exp(x)
            return z
    """)
    agree(module, device, [ones(2, 2), ones(4)])
    refuse(module, device, [ones(2, 3), ones(4)], "main: parameter x", "dim 1", "2", "3")
    refuse(module, device, [ones(2, 2), ones(5)], "main: parameter y", "dim 0", "4", "5")
    refuse(module, device, [ones(5, 5), ones(10)], "n", "4", "5")
    refuse(module, device, [ones(2, 2)], "main: ", "y")
    refuse(module, device, [ones(2, 2), ones(4), ones(1)], "main: expected 2", "3")


def test_symbols_only_inside_expressions_are_solved(device: Device) -> None:
    module = read("""
        n = symbol("n", lower=1, upper=4)

        @function
        def main(x: Tensor((2 * n,), f32), y: Tensor((n + m, 3), f32), z: Tensor((m + 1,), f32)) -> Tensor((n, 3), f32):
            with dataflow():
                a: Tensor((n,), f32) = op.slice(x, axis=0, begin=n, end=2 * n)
                b: Tensor((n, 3), f32) = op.slice(y, axis=0, begin=m, end=n + m)
                c: Tensor((n, 1), f32) = op.expand_dims(a, axes=(1,))
                d: Tensor((n, 3), f32) = op.add(b, c)
            return d
    """)
    agree(module, device, [ones(4), ones(5, 3), ones(4)], [ones(2), ones(1, 3), ones(1)])
    refuse(module, device, [ones(5), ones(5, 3), ones(4)], "parameter x", "dim 0", "4", "5")
    refuse(module, device, [ones(4), ones(6, 3), ones(4)], "parameter z", "dim 0", "5", "4")
    refuse(module, device, [ones(10), ones(8, 3), ones(4)], "1 <= n <= 4", "5")
    refuse(module, device, [ones(4), ones(1, 3), ones(0)], "m")


def test_symbols_of_solved_dims_have_the_bounds_of_the_dims() -> None:
    module = read("""
        n = symbol("n", lower=2, upper=64)

        @function
        def main(x: Tensor((4 * n, 3), f32)) -> Tensor((4 * n, 3), f32):
            with dataflow():
                a: Tensor((4 * n, 3), f32) = op.exp(x)
            return a
    """)
    (bound,) = lower(module).module.bounds
    assert (bound.lower, bound.upper) == (8, 256)


def test_casts_sharpen_parameters_among_solved_ones(device: Device) -> None:
    module = read("""
        @function
        def inner(y: Tensor(None, f32), z: Tensor((2 * k,), f32)) -> Tensor((k,), f32):
            with dataflow():
                c: Tensor((k,), f32) = match_cast(y, Tensor((k,), f32))
                d: Tensor((k,), f32) = op.exp(c)
            return d

        @function
        def main(x: Tensor((2 * n,), f32), y: Tensor(None, f32), z: Tensor((4,), f32)) -> Tensor((2,), f32):
            with dataflow():
                a: Tensor((n,), f32) = match_cast(y, Tensor((n,), f32))
                b: Tensor((n,), f32) = op.slice(x, axis=0, begin=0, end=n)
                c: Tensor((n,), f32) = op.add(a, b)
                d: Tensor((2,), f32) = call("inner", c, z)
            return d
    """)
    agree(module, device, [ones(4), ones(2), ones(4)])
    refuse(module, device, [ones(4), ones(3), ones(4)], "3")
    refuse(module, device, [ones(6), ones(3), ones(4)], "inner: match_cast of y", "dim 0", "2", "3")


def test_every_kind_of_parameter_is_checked() -> None:
    kinds: list[tuple[StructInfo, Any, Any, str]] = [
        (ShapeInfo((n, const(2))), (3, 2), (3, 4), "dim 1"),
        (ShapeInfo(None, 2), (3, 2), (3,), "got a tuple of 1"),
        (PrimInfo(i64, n), 3, 2.5, "got the number 2.5"),
        (PrimInfo(i64, const(3)), 3, 4, "equal to 3, got 4"),
        (PrimInfo(bool_), True, 1, "got the number 1"),
        (TupleInfo((tensor(n), tensor(n))), (ones(2), ones(2)), (ones(2), ones(3)), "field 1"),
        (TupleInfo((tensor(n),)), (ones(2),), ones(2), "got an array"),
        (tensor(n * 3), ones(6), ones(7), "equal to 6, got 7"),
    ]
    for expected, good, bad, message in kinds:
        g = GraphBuilder()
        p = g.parameter("p", expected)
        module = checked(g.finish(p))
        run(module, good)
        interpreted_refuses(module, [bad], "main: parameter p", message)
    with pytest.raises(VerifyError, match=r"symbol n of Tensor\(\(n \* m,\)"):
        g = GraphBuilder()
        verify(g.finish(g.input("x", (n * m,))))


# declared results


def test_other_results() -> None:
    for declared, words in (
        (TensorInfo(None, f32, 2), ("expected 2 dims, got 1",)),
        (tensor(n, dtype=f16), ("expected dtype f16, got f32",)),
        (ShapeInfo((n,)), ("expected Shape([n])", "got Tensor((n,), f32)")),
        (TupleInfo((tensor(n),)), ("expected Tuple(Tensor((n,), f32))",)),
    ):
        g = GraphBuilder()
        y = g.call(Exp(), g.input("x", (n,)))
        never(lambda g=g, y=y, declared=declared: g.finish(y, declared), *words)
    g = GraphBuilder()
    module = checked(g.finish(g.call(Exp(), g.input("x", None, None)), tensor(4)))
    assert run(module, ones(4)).shape == (4,)
    interpreted_refuses(module, [ones(5)], "main: the result", "dim 0", "4", "5", "return exp")


def test_results_of_callees_are_checked_at_calls() -> None:
    module = read("""
        @function
        def half(x: Tensor((n,), f32), y: Tensor((m,), f32)) -> Tensor((n,), f32):
            with dataflow():
                z: Tensor((m,), f32) = op.exp(y)
            return z

        @function
        def main(x: Tensor((n,), f32), y: Tensor((m,), f32)) -> Tensor((n,), f32):
            with dataflow():
                z: Tensor((n,), f32) = call("half", x, y)
            return z
    """)
    assert run(module, ones(2), ones(2)).shape == (2,)
    interpreted_refuses(module, [ones(2), ones(3)], "half: the result", "dim 0", "2", "3", 'call("half", x, y)')
    (check,) = lower(module).checks["main"]
    assert "half: the result" in check.message


# what depends on data


def test_other_dims_from_data() -> None:
    g = GraphBuilder()
    shape = g.call(TensorToShape(), g.input("dims", (2,), i64))
    assert shape.info == ShapeInfo(None, 2)
    a, b = Var("a"), Var("b")
    known = g.match_cast(shape, ShapeInfo((a, b)))
    x = g.call(Reshape((a, b)), g.input("x", (n,)))
    y = g.call(Permute((1, 0)), x)
    assert y.info == tensor(b, a)
    module = checked(g.finish((y, known)))
    out, dims = run(module, np.array([2, 3]), ones(6))
    assert out.shape == (3, 2) and dims == (2, 3)
    interpreted_refuses(module, [np.array([2, 4]), ones(6)], "reshape", "6", "8")
    interpreted_refuses(module, [np.array([2, -3]), ones(6)], "tensor_to_shape: expected dims >= 0")


def test_two_results_of_unknown_size() -> None:
    g = GraphBuilder()
    u, v = (g.call(Unique(), g.input(name, (n,))) for name in "xy")
    both = g.call(Add(), u, v)
    assert both.info == TensorInfo(None, f32, 1)
    a = g.match_cast(u, tensor(k))
    b = g.match_cast(v, tensor(k))
    module = checked(g.finish(g.call(Relu(), g.call(Add(), a, b))))
    assert result_of(module) == tensor(k) and info(module, "add_1") == tensor(k)
    assert run(module, np.float32([1, 1, 2]), np.float32([3, 4, 3])).tolist() == [4, 6]
    interpreted_refuses(module, [np.float32([1, 2, 3]), np.float32([3, 4, 3])], "dim 0", "3", "2")


def test_unknown_sizes_pass_through_calls() -> None:
    module = read("""
        @function
        def distinct(x: Tensor((n,), f32)) -> Tensor((k,), f32):
            with dataflow():
                u: Tensor(None, f32, ndim=1) = op.unique(x)
                c: Tensor((k,), f32) = match_cast(u, Tensor((k,), f32))
            return c

        @function
        def main(x: Tensor((n,), f32)) -> Tensor(None, f32, ndim=1):
            with dataflow():
                a: Tensor(None, f32, ndim=1) = call("distinct", x)
                b: Tensor(None, f32, ndim=1) = op.exp(a)
            return b
    """)
    np.testing.assert_allclose(run(module, np.float32([1, 0, 1])), np.exp([0, 1]), rtol=1e-6)
    assert run(module, ones(0)).shape == (0,)
