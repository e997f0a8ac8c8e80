"""The static memory plan: liveness, reuse by proof, and that no two live values share memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, free_vars, maximum, minimum, substitute
from relax_tune.ir.core.function import Bound, IRModule
from relax_tune.ir.core.graph import Call, Function, GVar
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import VIEWS, Concat, Flatten, Reshape, Slice, Split
from relax_tune.ir.op.math.elementwise import Add, Exp, Relu, Sqrt, Tanh
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.passes.memory.memory_plan import MemoryPlan, PlanMemory
from relax_tune.ir.passes.memory.size_bounds import size_bound
from relax_tune.ir.passes.pipeline import lower


def chain(upper: int | None = None) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 0, upper)
    y = g.call(Exp(), g.input("x", (n, 2, 2)))
    y = g.call(Relu(), g.call(Reshape((n, const(4))), y))
    y = g.call(Flatten(), g.call(Sqrt(), g.call(Exp(), y)))
    return g.finish(g.call(Tanh(), y))


def size(plan: MemoryPlan, bounds: tuple[Bound, ...], value: int) -> list[int]:
    sizes = [as_int(substitute(s, {b.var: const(value) for b in bounds})) for s in plan.storages]
    return [f for f in sizes if f is not None]


def test_a_chain_needs_two_alternating_storages() -> None:
    module = chain()
    plan = PlanMemory().plan(module)
    assert size(plan, module.bounds, 10) == [160, 160]
    used = [slot for slots in plan.assignment.values() for slot in slots]
    assert used == [0, 1, 0, 1]
    func = module.functions["main"]
    assert isinstance(func, Function) and func.ret not in plan.assignment


def test_upper_bounds_make_constant_plans() -> None:
    plan = PlanMemory(constant=True).plan(chain(1024))
    assert [as_int(s) for s in plan.storages] == [16384, 16384]
    unbounded = PlanMemory(constant=True).plan(chain())
    assert [repr(s) for s in unbounded.storages] == ["n * 16"] * 2


N, M, K = Var("n"), Var("m"), Var("k")
BOUNDED = Env({N: (0, 20), M: (0, 5)})
LARGEST: tuple[tuple[Expr, Expr], ...] = (
    (maximum(N - M, 1) * M * 80, const(6000)),  # (20 - 5) * 5 * 80, not 20 * 5 * 80
    (maximum(N - M, 1) * 80, const(1600)),
    ((20 - N) * N * 4, const(400)),
    (N // (M + 1) * M, const(16)),
    (minimum(K, 7) * N, const(140)),
    (N * K * 4, K * 80),
    (maximum(N - M, 1) * K * 4, K * 80),
    (maximum(K - N, 1) * 4, maximum(K, 1) * 4),
    (maximum(K - N, 1) * N * 4, maximum(K - N, 1) * N * 4),
)


@pytest.mark.parametrize(("size", "largest"), LARGEST, ids=[repr(e) for e, _ in LARGEST])
def test_size_bound_is_greatest_value_of_whole_size(size: Expr, largest: Expr) -> None:
    assert simplify(size_bound(size, BOUNDED), BOUNDED) is simplify(largest, BOUNDED)


@settings(max_examples=examples(60), deadline=None)
@given(st.tuples(*[st.integers(-3, 6)] * 6), st.integers(0, 9), st.integers(0, 9))
def test_size_bound_holds_at_every_point(terms: tuple[int, ...], n_most: int, m_most: int) -> None:
    a, b, c, d, e, f = terms
    size = maximum(N * a + M * b + c, 0) * maximum(N * d + M * e + f, 1) * 4
    env = Env({N: (0, n_most), M: (0, m_most)})
    values = [
        as_int(substitute(size, {N: const(n), M: const(m)})) or 0 for n in range(n_most + 1) for m in range(m_most + 1)
    ]
    assert as_int(size_bound(size, env)) == max(values)


def test_size_bound_of_large_ranges_ends() -> None:
    env = Env({N: (1, 1 << 20), M: (1, 1 << 20)})
    bound = as_int(size_bound(maximum(N - M, 1) * (M + 1) * (N % 7 + M % 5 + 1), env))
    assert bound is not None and bound >= (1 << 38) * 2


def test_a_larger_free_storage_is_reused_by_proof() -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n,))
    wide = g.call(Exp(), g.call(Concat(0), x, x, x, x))  # two values of 16n bytes
    narrow = g.call(Slice(0, const(0), n), g.call(Relu(), wide))
    y = g.call(Exp(), g.call(Relu(), narrow))
    plan = PlanMemory().plan(g.finish(g.call(Tanh(), y)))
    assert len(plan.storages) == 2
    slots = [s for storages in plan.assignment.values() for s in storages]
    assert slots == [0, 1, 0, 1, 0, 1]


def test_storage_is_reused_only_by_proof_of_size() -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    a = g.call(Sum(), g.call(Exp(), g.input("x", (n,))))
    b = g.call(Sum(), g.call(Exp(), g.input("y", (m,))))
    plan = PlanMemory().plan(g.finish(g.call(Add(), a, b)))
    sizes = {v.name for s in plan.storages for v in free_vars(s)}
    assert sizes == {"n", "m"}


def test_a_tuple_holds_one_storage_per_field() -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    parts = g.call(Split(2), g.call(Exp(), g.input("x", (n * 2,))))
    y = g.call(Add(), g.item(parts, 0), g.item(parts, 1))
    plan = PlanMemory().plan(g.finish(g.call(Relu(), y)))
    assert len(plan.assignment[parts]) == 2
    assert len(set(plan.assignment[parts])) == 2


def test_values_of_unknown_size_are_refused() -> None:
    g = GraphBuilder()
    x = g.input("x", None)
    with pytest.raises(BuildError, match=r"power: expected known dims"):
        PlanMemory().plan(g.finish(g.call(Exp(), g.call(Exp(), x, hint="power"))))


@st.composite
def programs(draw: st.DrawFn) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 0, 32)
    pool: list[GVar] = [g.input("x", (n, 4)), g.input("y", (n, 4))]
    for _ in range(draw(st.integers(1, 14))):
        a = pool[draw(st.integers(0, len(pool) - 1))]
        kind = draw(st.integers(0, 4))
        if kind == 0:
            pool.append(g.call(Exp(), a))
        elif kind == 1:
            pool.append(g.call(Add(), a, pool[draw(st.integers(0, len(pool) - 1))]))
        elif kind == 2:
            pool.append(g.call(Reshape((n, const(4))), g.call(Flatten(), a)))
        elif kind == 3:
            pool.append(g.call(Add(), a, g.call(Sum((0,)), a)))
        else:
            pool.append(g.call(Slice(0, const(0), n), g.call(Concat(0), a, a)))
    return g.finish(pool[-1])


@settings(max_examples=examples(60), deadline=None)
@given(programs(), st.booleans())
def test_live_values_never_share_memory(module: IRModule, fused: bool) -> None:
    module = lower(module).module if fused else module
    plan = PlanMemory().plan(module)
    func = module.functions["main"]
    assert isinstance(func, Function)
    # replay: `holds` has the value in each storage; a read through any view must find its own
    views: dict[GVar, GVar] = {}
    holds: dict[int, GVar] = {}
    n = 5
    symbols: dict[Var, object] = {b.var: const(n) for b in module.bounds}

    def root(v: GVar) -> GVar:
        while v in views:
            v = views[v]
        return v

    for b in func.bindings:
        for v in used_vars(b.value):
            for slot in plan.assignment.get(root(v), ()):
                assert holds[slot] is root(v), f"{b.var.name} reads {v.name}, which was overwritten"
        if b.var in plan.assignment:
            (slot,) = plan.assignment[b.var]
            assert slot not in {plan.assignment[root(v)][0] for v in used_vars(b.value) if root(v) in plan.assignment}
            holds[slot] = b.var
            room = as_int(substitute(plan.storages[slot], symbols))  # type: ignore[arg-type]
            shape = b.var.info.shape  # type: ignore[union-attr]
            need = 4
            for d in shape or ():
                need *= as_int(substitute(d, symbols)) or 0  # type: ignore[arg-type]
            assert room is not None and need <= room
        elif isinstance(b.value, Call) and isinstance(b.value.op, VIEWS):
            views[b.var] = used_vars(b.value)[0]
    for v in used_vars(func.ret):
        assert root(v) not in plan.assignment
