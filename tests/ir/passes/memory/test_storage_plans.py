"""Memory plans: reuse of storages, bounds of sizes, and results of the built programs compared with the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.built_modules import executed, job_of
from tests.support.programs import checked, compiled, ones, read, refuse, run, same

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import f16, f32, u8
from relax_tune.ir.core.expr import Expr, Var, as_int, const, maximum, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Concat, Flatten, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, Cast, Exp, Relu, Sqrt, Tanh
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.passes.memory.memory_plan import MemoryPlan, PlanMemory
from relax_tune.ir.passes.pipeline import STANDARD
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor

pytestmark = pytest.mark.ccompiler


def planned_bytes(module: IRModule, plan: MemoryPlan, **sizes: int) -> list[int]:
    known: dict[Var, Expr] = {b.var: const(sizes[b.var.name]) for b in module.bounds if b.var.name in sizes}
    result = [as_int(substitute(s, known)) for s in plan.storages]
    return [f for f in result if f is not None]


def slots(plan: MemoryPlan) -> list[int]:
    return [s for result in plan.assignment.values() for s in result]


# -- the chain of the paper ----------------------------------------------------------------------------------------


def chain(upper: int | None = None) -> IRModule:
    """exp, reshape, relu, exp, sqrt, flatten, tanh over (n, 2, 2)."""
    g = GraphBuilder()
    n = g.symbol("n", 0, upper)
    y = g.call(Reshape((n, const(4))), g.call(Exp(), g.input("x", (n, 2, 2))))
    y = g.call(Flatten(), g.call(Sqrt(), g.call(Exp(), g.call(Relu(), y))))
    return checked(g.finish(g.call(Tanh(), y)))


def test_two_storages_alternate_and_the_result_is_not_planned() -> None:
    module = chain()
    plan = PlanMemory().plan(module)
    assert planned_bytes(module, plan, n=10) == [160, 160] and slots(plan) == [0, 1, 0, 1]
    assert [v.name for v in plan.assignment] == ["exp", "relu", "exp_1", "sqrt"]
    bounded = chain(1024)
    plan = PlanMemory(constant=True).plan(bounded)
    assert [as_int(s) for s in plan.storages] == [16384, 16384] and slots(plan) == [0, 1, 0, 1]


def test_the_built_program_holds_two_storages(device: Device) -> None:
    for module in (chain(), chain(1024)):
        job = job_of(module, device)
        program = job.build("generic").program
        temps = [b for b in program.buffers if b.role == "temp"]
        assert [t.storage for t in temps] == [0, 1, 0, 1] and len(program.storages) == 2
        (out,) = program.outputs
        assert program.buffers[out].storage is None
        with executed(program, job, device) as executor:
            for n in (10, 0, 1, 1024, 7):
                x = np.sin(ones(n, 2, 2))
                same(executor.run([x])[0], run(module, x), f"n = {n}")
                values = executor.bind({"n": n}).values
                assert [values[s] for s in program.storages] == [16 * n] * 2


def test_fused_chain_needs_two_storages(device: Device) -> None:
    job = job_of(chain(), device, STANDARD)
    assert [c.callee for c in job.lowered.calls()] == ["exp", "fused_relu_exp_sqrt", "tanh"]
    assert len(job.build("generic").program.storages) == 2


def test_every_result_is_left_out() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    a = g.call(Exp(), x)
    b = g.call(Relu(), a)
    c = g.call(Tanh(), b)
    module = checked(g.finish((g.call(Flatten(), a), c)))
    assert list(PlanMemory().plan(module).assignment) == [b]


def test_longer_lives_need_more() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", upper=8), 4))
    a = g.call(Exp(), x)
    y = g.call(Relu(), a)
    for _ in range(6):
        y = g.call(Tanh(), y)
    module = checked(g.finish(g.call(Exp(), g.call(Add(), a, y))))
    plan = PlanMemory(constant=True).plan(module)
    assert [as_int(s) for s in plan.storages] == [128, 128, 128]
    assert slots(plan) == [0, 1, 2, 1, 2, 1, 2, 1, 2]


def test_constant_plans_keep_symbols_without_bound() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 0, 20), g.symbol("m")))
    module = checked(g.finish(g.call(Tanh(), g.call(Exp(), x))))
    assert [repr(s) for s in PlanMemory(constant=True).plan(module).storages] == ["m * 80"]


def test_constant_plan_is_the_greatest_size(device: Device) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n", 0, 20), g.symbol("m", 0, 5)
    k = g.symbol("k")
    wide = g.call(Exp(), g.input("x", (maximum(n - m, 1), m, k)))
    g.input("rows", (n,))
    module = checked(g.finish(g.call(Tanh(), wide)))
    job = job_of(module, device)
    program = job.build("generic", memory="constant").program
    with executed(program, job, device) as executor:
        for rows, width, depth in ((15, 5, 3), (19, 1, 0), (1, 5, 2)):
            x, others = np.sin(ones(rows, width, depth)), ones(20 if rows > 1 else 6)
            same(executor.run([x, others])[0], run(module, x, others), f"{rows} rows of {width}")


# -- a storage is reused for tensors with disjoint lifetimes -----------------------------------------------------------


def falling() -> IRModule:
    """Values of 16n, 12n, 8n, 4n and 20n bytes, one after another."""
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n,))
    y = g.call(Concat(0), x, x, x, x)
    for part in (3, 2, 1):
        y = g.call(Slice(0, const(0), n * part), y)
    return checked(g.finish(g.call(Exp(), g.call(Concat(0), y, y, y, y, y))))


def test_five_sizes_in_two_storages(device: Device) -> None:
    module = falling()
    plan = PlanMemory().plan(module)
    assert planned_bytes(module, plan, n=1) == [20, 12] and slots(plan) == [0, 1, 0, 1, 0]
    job = job_of(module, device)
    program = job.build("generic").program
    assert len(program.storages) == 2 and sum(b.role == "temp" for b in program.buffers) == 5
    with executed(program, job, device) as executor:
        for n in (1, 7, 0, 64):
            same(executor.run([ones(n) / 99])[0], run(module, ones(n) / 99), f"n = {n}")


def test_a_freed_4n_byte_storage_holds_n_bytes() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),))
    y = g.call(Relu(), g.call(Exp(), x))  # 4n and 4n
    y = g.call(Cast(f32), g.call(Cast(u8), y))  # n bytes in the first, 4n in the second
    module = checked(g.finish(g.call(Tanh(), g.call(Cast(f32), g.call(Cast(f16), y)))))
    plan = PlanMemory().plan(module)
    assert planned_bytes(module, plan, n=3) == [12, 12] and slots(plan) == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("first", "second", "lower"),
    [
        (lambda n, m: n * m, lambda n, m: n, 1),
        (lambda n, m: n * m, lambda n, m: n, 0),
        (lambda n, m: n, lambda n, m: m, 0),
        (lambda n, m: (n + 3) // 4 * 4, lambda n, m: n, 0),
        (lambda n, m: n, lambda n, m: n + 1, 0),
        (lambda n, m: n * n, lambda n, m: m + 8, 0),
    ],
)
def test_a_shared_storage_is_as_large_as_the_larger(first: Any, second: Any, lower: int) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m", lower)
    g.input("n", (n,))
    g.input("m", (m,))
    done = g.call(Sum(), g.call(Exp(), g.input("a", (first(n, m),))))
    again = g.call(Sum(), g.call(Exp(), g.input("b", (second(n, m),))))
    module = g.finish(g.call(Relu(), g.call(Add(), done, again)))
    plan = PlanMemory().plan(module)
    exps = [plan.assignment[v] for v in plan.assignment if v.name.startswith("exp")]
    assert exps[0] == exps[1]
    for at in ((0, lower), (1, 1), (5, 2), (2, 50), (1000, 7)):
        expected = max(first(*at), second(*at), 1) * 4  # a sum has four bytes
        assert max(planned_bytes(module, plan, n=at[0], m=at[1])) == expected


def test_storage_grows_for_later_tensor() -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    small = g.call(Sum((0,)), g.call(Exp(), g.input("a", (n * 2,))))
    big = g.call(Sum((0,)), g.call(Exp(), g.input("b", (n * 8,))))
    module = checked(g.finish(g.call(Relu(), g.call(Add(), small, big))))
    plan = PlanMemory().plan(module)
    named = {v.name: s for v, s in plan.assignment.items()}
    assert named["exp"] == named["exp_1"]
    assert sorted(planned_bytes(module, plan, n=3)) == [4, 4, 96]


# -- declared bounds hold at entry ---------------------------------------------------------------------------------


def bounded(lower: int = 0, upper: int | None = 4) -> IRModule:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", lower, upper), 2))
    return checked(g.finish(g.call(Softmax(), g.call(Exp(), x))))


def test_five_where_four_are_declared(device: Device) -> None:
    refuse(bounded(), device, [ones(5, 2)], "main", "n <= 4", "5")
    with compiled(bounded(), device) as program:
        program(ones(4, 2))
        with pytest.raises(UserError, match=r"main: .*n <= 4, got 5 .*parameter x"):
            program(ones(5, 2))
        same(program(ones(4, 2)), run(bounded(), ones(4, 2)), "after the refusal")


def test_shape_above_bound_is_refused_even_with_room(device: Device) -> None:
    module = bounded()
    job = job_of(module, device)
    program = job.build("generic").program
    room = [device.alloc(1 << 16) for _ in range(2)]
    names = {program.buffers[i].name: b for i, b in zip((*program.inputs, *program.outputs), room, strict=True)}
    executor = Executor(program, device, {}, shared=names)
    for refused in (lambda: executor.run([ones(5, 2)]), lambda: executor.bind({"n": 5})):
        with pytest.raises(UserError, match="expected n <= 4, got 5"):
            refused()
    executor.run([ones(4, 2)])
    executor.close()
    # nothing is planned, and the bound still holds
    g = GraphBuilder()
    refuse(g.finish(g.call(Exp(), g.input("x", (g.symbol("n", 0, 4),)))), device, [ones(5)], "n <= 4", "5")


def test_lower_bounds_and_other_dims(device: Device) -> None:
    refuse(bounded(2, None), device, [ones(1, 2)], "n", "2", "1")
    refuse(bounded(2, None), device, [ones(0, 2)], "n", "2", "0")
    module = read("""
        n = symbol("n", lower=1, upper=4)
        m = symbol("m", lower=0, upper=3)

        @function
        def main(x: Tensor((n * 2, m), f32), y: Tensor((n,), f32)) -> Tensor((n * 2, m), f32):
            with dataflow():
                z: Tensor((n * 2, m), f32) = op.exp(x)
            return z
    """)
    refuse(module, device, [ones(10, 2), ones(5)], "n", "4", "5")
    refuse(module, device, [ones(2, 4), ones(1)], "m", "3", "4")
    with compiled(module, device) as program:
        for n, m in ((1, 0), (4, 3), (1, 3)):
            same(program(ones(n * 2, m) / 9, ones(n)), run(module, ones(n * 2, m) / 9, ones(n)), f"{n}, {m}")


def test_bound_of_unplanned_result_is_checked(device: Device) -> None:
    """A call beyond a bound is refused even if only a fixed-size result or an unused parameter has it."""
    module = read("""
        n = symbol("n", lower=0, upper=4)

        @function
        def main(x: Tensor((n,), f32), y: Tensor((3,), f32)) -> Tensor((3,), f32):
            with dataflow():
                z: Tensor((3,), f32) = op.exp(y)
            return z
    """)
    refuse(module, device, [ones(5), ones(3)], "n", "4", "5")
    with compiled(module, device) as program:
        same(program(ones(4), ones(3)), np.exp(ones(3)), "within")
