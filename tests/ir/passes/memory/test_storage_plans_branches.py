"""Planned results equal unplanned ones for every path through the branches of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.built_modules import UNFUSED, executed, job_of
from tests.support.effort import examples
from tests.support.programs import agree, checked, ones, opened, run, same
from tests.support.random_graphs import Made, graphs

from relax_tune.errors import BuildError, DeduceError
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Var, const, lt
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import (
    Body,
    Call,
    CallDPSLibrary,
    CallFunction,
    CallHost,
    CallTIR,
    Function,
    GVar,
    If,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import VIEWS, Concat, Flatten, Permute, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, Exp, MulScalar, Relu, Sqrt, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.memory.memory_plan import MemoryPlan, PlanMemory
from relax_tune.ir.passes.pipeline import STANDARD, Pass
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import BufferSpec, Program

pytestmark = pytest.mark.ccompiler


def unplanned(program: Program) -> Program:
    """Return the same program with each temporary in separate memory."""
    storages: list[int] = []
    buffers: list[BufferSpec] = []
    for spec in program.buffers:
        if spec.storage is not None:
            storages.append(program.storages[spec.storage])
            spec = replace(spec, storage=len(storages) - 1)
        buffers.append(spec)
    return replace(program, buffers=tuple(buffers), storages=tuple(storages))


# -- planned results are the unplanned ones ------------------------------------------------------------------------


class Replay:
    """Follows a plan along one way through the branches of a function: every read must see the value that was computed.

    A value is a token (the tensor allocated for a field of a variable), a tuple of values, or None for a tensor outside of the plan."""

    def __init__(self, plan: MemoryPlan, ways: Sequence[bool]) -> None:
        self.plan, self.ways = plan, list(ways)
        self.env: dict[GVar, Any] = {}
        self.holds: dict[int, Any] = {}

    def function(self, func: Function) -> None:
        self.env.update(dict.fromkeys(func.params))
        self.body(func)
        for token in self.tokens(self.value(func.ret)):
            assert self.slot(token) is None, f"{token[0].name} is returned and planned"

    def body(self, body: Function | Body) -> None:
        for b in body.bindings:
            self.env[b.var] = self.compute(b.var, b.value)

    def compute(self, var: GVar, value: Value) -> Any:
        if isinstance(value, If):
            self.read(self.value(value.cond))
            side = value.then if (self.ways.pop() if self.ways else True) else value.orelse
            self.body(side)
            return self.value(side.ret)
        if isinstance(value, (Call, CallTIR, CallDPSLibrary, CallFunction, CallHost)):
            arguments = [self.env[v] for v in used_vars(value)]
            if isinstance(value, Call) and isinstance(value.op, VIEWS):
                return arguments[0] if arguments else None
            taken = {self.read(a) for a in arguments}
            if isinstance(value, (CallFunction, CallHost)):  # as if it returned its argument
                return tuple(arguments) if isinstance(var.info, TupleInfo) else (arguments[0] if arguments else None)
            count = len(var.info.fields) if isinstance(var.info, TupleInfo) else 1
            tensors = tuple((var, i) for i in range(count))
            for token in tensors:
                slot = self.slot(token)
                if slot is not None:
                    assert slot not in set().union(*taken), f"{var.name} is written over what it reads"
                    self.holds[slot] = token
            return tensors if isinstance(var.info, TupleInfo) else tensors[0]
        return self.value(value)

    def value(self, value: Value) -> Any:
        if isinstance(value, GVar):
            return self.env[value]
        if isinstance(value, TupleValue):
            return [self.value(f) for f in value.fields]
        if isinstance(value, TupleItem):
            owner = self.value(value.value)
            known = isinstance(owner, list) or (isinstance(owner, tuple) and not self.is_token(owner))
            return owner[value.index] if known and value.index < len(owner) else owner
        return None

    @staticmethod
    def is_token(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], GVar)

    def tokens(self, value: Any) -> list[Any]:
        if self.is_token(value):
            return [value]
        return [t for v in value for t in self.tokens(v)] if isinstance(value, (list, tuple)) else []

    def slot(self, token: Any) -> int | None:
        var, index = token
        return self.plan.assignment[var][index] if var in self.plan.assignment else None

    def read(self, value: Any) -> frozenset[int]:
        result = set()
        for token in self.tokens(value):
            slot = self.slot(token)
            if slot is not None:
                assert self.holds[slot] == token, f"{token[0].name} was overwritten by {self.holds[slot][0].name}"
                result.add(slot)
        return frozenset(result)


@settings(max_examples=examples(80), deadline=None)
@given(
    graphs(),
    st.lists(st.booleans(), max_size=6),
    st.sampled_from([(), (Inline(),), (Legalize(),), (Legalize(), FuseOps())]),
)
def test_branches_do_not_confuse_the_plan(program: Made, ways: list[bool], passes: tuple[Pass, ...]) -> None:
    module = program.module
    for step in passes:
        try:
            module = step(module)
        except DeduceError:  # a call whose shapes can never match: nothing to plan
            return
    for name, func in module.functions.items():
        if not isinstance(func, Function):
            continue
        try:
            plan = PlanMemory().plan(module, name)
        except BuildError as error:
            assert "expected known dims" in str(error)
            continue
        Replay(plan, ways).function(func)


def branching() -> tuple[IRModule, Mapping[str, GVar]]:
    """Both sides use `a`, one reads `b`, and their result is read after values that could reuse their storages."""
    g = GraphBuilder()
    x, flag = g.input("x", (g.symbol("n"), 4)), g.input("flag", (), bool_)
    a, b = g.call(Exp(), x), g.call(Relu(), x)
    inner: dict[str, GVar] = {}

    def then() -> GVar:
        inner["t"] = g.call(Tanh(), g.call(Add(), a, b), hint="t")
        return inner["t"]

    def orelse() -> GVar:
        inner["e"] = g.call(Sqrt(), a, hint="e")
        return inner["e"]

    c = g.branch(flag, then, orelse)
    d = g.call(Exp(), x, hint="d")
    e = g.call(Relu(), d, hint="late")
    module = checked(g.finish(g.call(Add(), g.call(Add(), c, e), a)))
    return module, {"a": a, "b": b, "d": d, "late": e, **inner}


def test_result_of_branch_stays_live() -> None:
    module, named = branching()
    plan = PlanMemory().plan(module)
    slot = {k: plan.assignment[v][0] for k, v in named.items()}
    for live in ("t", "e", "a"):
        assert slot[live] not in (slot["d"], slot["late"])
    assert slot["a"] not in (slot["t"], slot["e"])
    main = module.functions["main"]
    assert isinstance(main, Function)
    for way in (True, False):
        Replay(plan, [way]).function(main)
    for flag in (True, False):
        x = ones(3, 4) / 9
        side = np.tanh(np.exp(x) + x) if flag else np.sqrt(np.exp(x))
        same(run(module, x, np.array(flag)), side + np.exp(x) + np.exp(x), f"{flag}")


def test_a_side_may_give_an_outer_value() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),))
    a = g.call(Exp(), x)
    c = g.branch(lt(x.info.shape[0], 3), lambda: a, lambda: g.call(Relu(), x))  # type: ignore[union-attr]
    d = g.call(Tanh(), g.call(Tanh(), x))
    module = checked(g.finish(g.call(Add(), c, d)))
    plan = PlanMemory().plan(module)
    assert all(plan.assignment[a] != s for v, s in plan.assignment.items() if v.name.startswith("tanh"))
    returned = checked(g.finish(c))
    assert a not in PlanMemory().plan(returned).assignment


def test_undecided_branch_is_built(device: Device) -> None:
    module, _ = branching()
    agree(module, device, *([ones(n, 4) / 9, np.array(flag)] for n in (0, 3) for flag in (True, False)))
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),))
    value = g.branch(lt(x.info.shape[0], 3), lambda: g.call(Exp(), x), lambda: g.call(Relu(), x))  # type: ignore[union-attr]
    agree(checked(g.finish(g.call(Tanh(), value))), device, *([ones(n)] for n in (0, 2, 3, 5)))


@pytest.mark.parametrize("host", [False, True])
def test_callee_may_return_argument(host: bool) -> None:
    inner = GraphBuilder("same")
    g = GraphBuilder()
    g.include(inner.finish(inner.input("v", (Var("k"),))))
    x = g.input("x", (g.symbol("n"),))
    a = g.call(Exp(), x)
    assert isinstance(a.info, TensorInfo)
    c = g.call_host("host.same", [a], a.info, pure=True) if host else g.call_function("same", a)
    d = g.call(Tanh(), g.call(Tanh(), x))
    module = checked(g.finish(g.call(Add(), c, d)))
    plan = PlanMemory().plan(module)
    main = module.functions["main"]
    assert isinstance(main, Function)
    Replay(plan, []).function(main)
    assert all(plan.assignment[a] != s for v, s in plan.assignment.items() if v.name.startswith("tanh"))


def test_fields_of_nested_tuples_live_as_long_as_the_tuple() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),))
    w = g.constant("w", ones(3))
    a, b = g.call(Exp(), x), g.call(Relu(), x)
    t = g.emit(TupleValue((a, b)), "pair")
    outer = g.emit(TupleValue((t, w)), "outer")
    back = g.item(outer, 0)
    d = g.call(Tanh(), g.call(Tanh(), x))
    module = checked(g.finish(g.call(Add(), g.call(Add(), g.item(back, 0), g.item(back, 1)), d)))
    plan = PlanMemory().plan(module)
    main = module.functions["main"]
    assert isinstance(main, Function)
    Replay(plan, []).function(main)


@st.composite
def programs(draw: Any) -> IRModule:
    """Straight-line programs over values of shapes like (n, 4), (n, n) and (m,), to be compiled."""
    g = GraphBuilder()
    n, m = g.symbol("n", 0, 9), g.symbol("m", 0, 5)
    pool: list[GVar] = [g.input("x", (n, 4)), g.input("y", (m, 4))]
    for _ in range(draw(st.integers(2, 8))):
        a = pool[draw(st.integers(0, len(pool) - 1))]
        assert isinstance(a.info, TensorInfo) and a.info.shape is not None
        rows = a.info.shape[0]
        kind = draw(st.integers(0, 8))
        if kind == 0:
            value = g.call(draw(st.sampled_from([Tanh(), Relu(), MulScalar(0.5)])), a)
        elif kind == 1:
            same_shape = [v for v in pool if v.info == a.info]
            value = g.call(Add(), a, draw(st.sampled_from(same_shape)))
        elif kind == 2:
            value = g.call(Concat(0), a, draw(st.sampled_from(pool)))
        elif kind == 3:
            value = g.call(Slice(0, const(0), draw(st.sampled_from([n, m, rows // 2, const(1)]))), a)
        elif kind == 4:
            value = g.call(Softmax(), g.call(Matmul(True), a, draw(st.sampled_from(pool))))
            value = g.call(Add(), a, g.call(Sum((1,), True), value))
        elif kind == 5:
            value = g.call(Add(), a, g.call(Sum((0,)), a))
        elif kind == 6:
            value = g.call(Permute((1, 0)), g.call(Tanh(), g.call(Permute((1, 0)), a)))
        elif kind == 7:
            pair = g.emit(TupleValue((a, draw(st.sampled_from(pool)))), "pair")
            value = g.call(Relu(), g.item(pair, draw(st.integers(0, 1))))
        else:
            value = g.call(Reshape((rows, const(4))), g.call(Flatten(), a))
        pool.append(value)
    results = [
        g.call(Tanh(), v) for v in draw(st.lists(st.sampled_from(pool[2:]), min_size=1, max_size=2, unique=True))
    ]
    return g.finish(results)


@settings(max_examples=examples(6), deadline=None)
@given(programs(), st.booleans())
def test_planned_results_are_the_unplanned_ones(module: IRModule, fused: bool) -> None:
    with opened("c") as device:
        job = job_of(module, device, STANDARD if fused else UNFUSED)
        program = job.build("generic").program
        plain_program = unplanned(program)
        temps = sum(b.role == "temp" for b in program.buffers)
        assert len(plain_program.storages) == temps >= len(program.storages)
        with executed(program, job, device) as planned, executed(plain_program, job, device) as unplanned_run:
            for n, m in ((3, 2), (0, 0), (1, 5), (7, 1), (9, 5)):
                x, y = np.sin(ones(n, 4)), np.cos(ones(m, 4))
                expected = run(module, x, y)
                actual, separate = planned.run([x, y]), unplanned_run.run([x, y])
                for f, s, w in zip(
                    actual, separate, expected if isinstance(expected, tuple) else (expected,), strict=True
                ):
                    np.testing.assert_array_equal(f, s)
                    np.testing.assert_allclose(f, w, rtol=1e-4, atol=1e-4)


def test_the_unplanned_build_is_not_the_planned_one(device: Device) -> None:
    """The comparison above can fail: with all temporaries in one storage the results differ."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    module = g.finish(g.call(Add(), g.call(Exp(), x), g.call(Tanh(), x)))
    job = job_of(module, device)
    program = job.build("generic").program
    assert len(program.storages) == 2
    broken = replace(program, buffers=tuple(b if b.storage is None else replace(b, storage=0) for b in program.buffers))
    with executed(broken, job, device) as executor:
        assert not np.allclose(executor.run([ones(3, 4) / 9])[0], run(module, ones(3, 4) / 9))
