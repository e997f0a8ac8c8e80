"""Calls with several outputs and results of every kind: builds agree with the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.whole_models import Whole, built
from tests.support.built_modules import rand
from tests.support.effort import examples
from tests.support.programs import agree, checked, compiled, ones, opened, run, same
from tests.support.tuner_models import QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Var, call, cast, const, eq, maximum, minimum, select
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import CallTIR, TupleItem, TupleValue
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Flatten, Permute, Reshape, Split
from relax_tune.ir.op.math.elementwise import Add, Exp, MulScalar, Relu
from relax_tune.ir.passes.graph.split_outputs import SeparateOutputs
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.task.check import check_case

pytestmark = pytest.mark.ccompiler


def scaled_rows() -> PrimFunc:
    """s[i] = sum over k of x[i, k]**2, y = x * rsqrt(s + 1): the second output reads the first."""
    n, k = Var("n"), Var("k")
    b = TensorBuilder("scaled_rows")
    x, y, s = b.input("x", (n, k)), b.output("y", (n, k)), b.output("s", (n,))
    b.reduce(s, (k,), const(0.0), lambda acc, i, j: acc + x[i, j] * x[i, j])
    b.compute(y, lambda i, j: x[i, j] * call("rsqrt", s[i] + 1.0))
    return b.finish()


def shared_exp() -> PrimFunc:
    """e = exp(x) by itself; its double, and its sums over rows."""
    n, k = Var("n"), Var("k")
    b = TensorBuilder("shared_exp")
    x, y, s = b.input("x", (n, k)), b.output("y", (n, k)), b.output("s", (n,))
    e = b.alloc("e", (n, k))
    b.compute(e, lambda i, j: call("exp", x[i, j]))
    b.compute(y, lambda i, j: e[i, j] * 2.0)
    b.reduce(s, (k,), const(0.0), lambda acc, i, j: acc + e[i, j])
    return b.finish()


def best_of_rows() -> PrimFunc:
    """The largest value of each row and where it stands first: values with indices."""
    n, k = Var("n"), Var("k")
    b = TensorBuilder("best_of_rows")
    x, v, at = b.input("x", (n, k)), b.output("v", (n,)), b.output("at", (n,), i64)
    b.reduce(v, (k,), const(-3e38), lambda acc, i, j: maximum(acc, x[i, j]))
    b.reduce(at, (k,), k, lambda acc, i, j: minimum(acc, select(eq(x[i, j], v[i]), j, k)))
    return b.finish()


def turned() -> PrimFunc:
    """a = tanh(x) / 2 by itself; its cosine, and the sine of its first column."""
    n, k = Var("n"), Var("k")
    b = TensorBuilder("turned")
    x, y, s = b.input("x", (n, k)), b.output("y", (n, k)), b.output("s", (n,))
    a = b.alloc("a", (n, k))
    b.compute(a, lambda i, j: call("tanh", x[i, j]) * 0.5)
    b.compute(y, lambda i, j: call("cos", a[i, j]))
    b.compute(s, lambda i: call("sin", a[i, 0]))
    return b.finish()


FUNCTIONS: dict[str, Callable[[], PrimFunc]] = {
    "rows": scaled_rows,
    "exp": shared_exp,
    "best": best_of_rows,
    "turned": turned,
}


def outs(kind: str, info: TensorInfo) -> tuple[TensorInfo, TensorInfo]:
    assert info.shape is not None
    row = TensorInfo(info.shape[:1], i64 if kind == "best" else info.dtype)
    return (TensorInfo(info.shape[:1], info.dtype), row) if kind == "best" else (info, row)


def joined(kind: str, upper: int | None = 40) -> IRModule:
    """exp, then a function of two outputs, whose first is read by two calls."""
    g = GraphBuilder()
    info = TensorInfo((g.symbol("n", 0, upper), const(12)), f32)
    f = g.add(FUNCTIONS[kind]())
    x = g.call(Exp(), g.parameter("x", info))
    both = g.call_tir(f, (x,), outs(kind, info))
    y, s = g.item(both, 0), g.item(both, 1)
    return checked(g.finish((g.call(Add(), g.call(Relu(), y), y), s)))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_of_two_outputs_is_one_call(device: Device, kind: str) -> None:
    module = joined(kind)
    assert max(len(c.out) for c in lower(module).calls()) == 2
    agree(module, device, *([np.sin(ones(n, 12))] for n in (0, 1, 5, 33)))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_variant_writes_every_output(device: Device, kind: str) -> None:
    result = built(Whole(lambda: joined(kind), (), ()), device.info)
    executor = Executor(result.program, device, result.constants)
    for n in (1, 2, 5, 17, 33, 40):
        x = np.sin(ones(n, 12))
        same(tuple(executor.run([x])), run(result.module, x), f"n = {n}")
    executor.close()


@pytest.mark.opencl
def test_functions_of_two_outputs_on_opencl() -> None:
    with opened("opencl") as device:
        for kind in FUNCTIONS:
            module = joined(kind)
            with compiled(module, device) as program:
                for n in (0, 7):
                    x = np.sin(ones(n, 12))
                    same(program(x), run(module, x), f"{kind}, n = {n}")


@pytest.mark.process
def test_tuning_checks_every_output(device: Device) -> None:
    g = GraphBuilder()
    info = TensorInfo((g.symbol("n", 1, 16), const(12)), f32)
    module = g.finish(g.call_tir(g.add(scaled_rows()), (g.parameter("x", info),), outs("rows", info)))
    job = device_job(module, device.info, MemoryStore(), replace(QUICK, trials=1))
    (task,) = job.tasks
    assert [e.ndim for e in check_case(task, 1).expected] == [2, 1]
    with LocalRunner("c") as runner:
        job.tune(runner)
    records = job.store.query(job.target.key, task.key)
    assert records and all(r.status == "ok" and r.checked for r in records), [r.message for r in records]


# -- outputs that share nothing ----------------------------------------------------------------------------------------


def test_pieces_of_split_fuse_into_consumers(device: Device) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.call(Exp(), g.input("x", (n, 6)))
    pieces = g.call(Split(3, 1), x)
    total = g.call(Add(), g.item(pieces, 0), g.item(pieces, 1))
    module = checked(g.finish((total, g.item(pieces, 2))))
    assert [c.callee for c in lower(module).calls()] == ["exp", "split", "fused_split_split_add"]
    agree(module, device, *([np.sin(ones(size, 6))] for size in (0, 1, 9)))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_uneven_pieces(device: Device, size: int) -> None:
    g = GraphBuilder()
    pieces = g.call(Split(3), g.input("x", (g.symbol("n"), 4)))
    module = checked(g.finish(tuple(g.item(pieces, i) for i in range(3))))
    agree(module, device, [ones(size, 4)])


@pytest.mark.parametrize("whole", [False, True])
def test_split_into_one_piece_gives_a_tuple(device: Device, whole: bool) -> None:
    g = GraphBuilder()
    pieces = g.call(Split(1, 1), g.call(Exp(), g.input("x", (g.symbol("n"), 4))))
    module = checked(g.finish(pieces if whole else g.call(Relu(), g.item(pieces, 0))))
    agree(module, device, *([ones(size, 4)] for size in (0, 3)))


def test_outputs_sharing_nothing_are_separated() -> None:
    """Three outputs, two computed from one value; a scalar that only one of them needs."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("three")
    x, z = b.input("x", (n, 4)), b.input("z", (m,))
    y0, y1, y2 = b.output("y0", (n, 4)), b.output("y1", (m + 1,)), b.output("y2", (n, 4))
    e = b.alloc("e", (n, 4))
    b.compute(e, lambda i, j: call("exp", x[i, j]))
    b.compute(y0, lambda i, j: e[i, j] + 1.0)
    b.compute(y1, lambda i: z[0] * 2.0 + cast(n, f32))
    b.compute(y2, lambda i, j: e[i, j] - 1.0)
    g = GraphBuilder()
    p, q = g.symbol("p"), g.symbol("q", 1)
    out = (TensorInfo((p, const(4)), f32), TensorInfo((q + 1,), f32), TensorInfo((p, const(4)), f32))
    whole = g.call_tir(g.add(b.finish()), (g.input("x", (p, 4)), g.input("z", (q,))), out)
    module = checked(g.finish((whole, g.item(whole, 1))))
    parts = checked(SeparateOutputs()(module))
    main = lower(module).functions["main"]
    calls = [b.value for b in main.bindings if isinstance(b.value, CallTIR)]
    assert [(len(c.out), len(c.args), len(c.scalars)) for c in calls] == [(2, 1, 0), (1, 1, 1)]
    x0, z0 = rand(3, 4), rand(2)
    same(run(parts, x0, z0), run(module, x0, z0), "separated")


# -- results -----------------------------------------------------------------------------------------------------------


def results_of_every_kind() -> IRModule:
    """A parameter, its view, a weight and its view, a computed value twice and as a view, nested tuples, an empty tuple."""
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 4))
    w = g.constant("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    y = g.call(Exp(), x)
    inner = g.emit(TupleValue((y, x, g.call(Flatten(), y))))
    nested = g.emit(TupleValue((inner, g.emit(TupleValue(())), w)))
    picked = g.emit(TupleItem(inner, 0))
    views = (g.call(Reshape((n * 2, const(2))), x), g.call(Reshape((const(6),)), w))
    return checked(g.finish((y, nested, *views, picked, y, x)))


def flat(value: Any) -> list[Any]:
    return [a for v in value for a in flat(v)] if isinstance(value, tuple) else [value]


def test_results_of_every_kind_match_interpreter(device: Device) -> None:
    module = results_of_every_kind()
    with compiled(module, device) as program:
        for n in (3, 0, 1, 8):
            x = rand(n, 4)
            expected, given = flat(run(module, x)), x.copy()
            actual = list(program(given))
            assert len(actual) == len(expected) == 10
            for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
                same(a, b, f"n = {n}, result {number}")
            for number, a in enumerate(actual):  # each is its own array
                a += 1
                for other in (given, *actual[number + 1 :]):
                    assert not np.shares_memory(a, other)
            same(given, x, "the argument")
            for a, b in zip(program(x), expected, strict=True):
                same(a, b, "again")


def test_program_without_computation_returns_inputs_and_constants(device: Device) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 2))
    agree(checked(g.finish(x)), device, [ones(3, 2)], [ones(0, 2)])
    g = GraphBuilder()
    g.input("x", (g.symbol("n"), 2))
    w = g.constant("w", ones(3))
    agree(checked(g.finish((w, w))), device, [ones(3, 2)])


def test_one_field_is_returned_and_the_other_planned(device: Device) -> None:
    for returned in (0, 1):
        g = GraphBuilder()
        info = TensorInfo((g.symbol("n"), const(12)), f32)
        both = g.call_tir(g.add(shared_exp()), (g.parameter("x", info),), outs("exp", info))
        other = g.call(MulScalar(2.0), g.item(both, 1 - returned))
        module = checked(g.finish((g.item(both, returned), g.call(Exp(), g.call(MulScalar(0.1), other)))))
        agree(module, device, [np.sin(ones(5, 12))], [np.sin(ones(0, 12))])


# -- random programs ---------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> IRModule:
    """Rows of 12 through functions of one and of two outputs; some of the values are returned, in tuples."""
    g = GraphBuilder()
    info = TensorInfo((g.symbol("n", 0, 20), const(12)), f32)
    names = {k: g.add(f()) for k, f in FUNCTIONS.items()}
    pool = [g.parameter("x", info), g.parameter("y", info)]
    rows: list[Any] = []
    for _ in range(draw(st.integers(1, 8))):
        a = pool[draw(st.integers(0, len(pool) - 1))]
        kind = draw(st.sampled_from([*FUNCTIONS, "add", "view", "split"]))
        if kind == "add":
            pool.append(g.call(MulScalar(0.25), g.call(Add(), a, pool[draw(st.integers(0, len(pool) - 1))])))
        elif kind == "view":
            turned = g.call(Permute((1, 0)), g.call(Permute((1, 0)), a))
            pool.append(g.call(Reshape(info.shape or ()), g.call(Flatten(), turned)))
        elif kind == "split":
            halves = g.call(Split(2, 1), a)
            rows.append(g.call(Add(), g.item(halves, 0), g.item(halves, 1)))
        else:
            small = g.call(MulScalar(0.1), a)
            both = g.call_tir(names[kind], (small,), outs(kind, info))
            rows.append(g.item(both, 1))
            (rows if kind == "best" else pool).append(g.item(both, 0))
    everything = [*pool, *rows]
    picked = draw(st.lists(st.sampled_from(everything), min_size=1, max_size=5))
    return g.finish((g.emit(TupleValue(tuple(picked[:2]))), *picked[2:], pool[-1]))


@settings(max_examples=examples(6), deadline=None)
@given(programs(), st.integers(0, 20))
def test_random_programs_with_several_outputs_match_interpreter(device: Device, module: IRModule, n: int) -> None:
    x, y = rand(n, 12), rand(n, 12)
    expected = flat(run(checked(module), x, y))
    with compiled(module, device) as program:
        actual = program(x, y)
    for number, (a, b) in enumerate(zip(actual if isinstance(actual, tuple) else (actual,), expected, strict=True)):
        same(a, b, f"result {number}")
